package policy

import (
	"time"

	"github.com/weir-dev/weir/quota"
)

// MaxConsumers is the most consumers that one page of usage holds.
const MaxConsumers = 1000

// A ConsumersQuery asks the store for a page of a domain's consumers. It only reads.
type ConsumersQuery struct {
	Domain string       // the policy's domain; empty for consumers that no policy names
	Only   []CounterID  // these alone, if it is not empty
	After  CounterID    // the last id of the page before; zero for the first page
	Limit  int          // at most so many consumers, from 1 to MaxConsumers
	Units  []quota.Unit // which windows to read; none is allowed
	Now    time.Time    // an instant in those windows
}

// A ConsumerUsage is a consumer that was charged at least once, and what it has used.
type ConsumerUsage struct {
	ID     CounterID
	Domain string
	// Entries are what its descriptor matched, as text for people: long values are
	// cut short, and bytes that are no printable text are escaped as in Go, as are
	// backslashes.
	Entries    []Entry
	EnrolledAt time.Time
	// Used[i] is what was used in the window of Units[i] that contains Now.
	Used []int64
}

// QuotaUnits returns the units of all windows in the policy's quotas, shortest first.
func (p *Policy) QuotaUnits() []quota.Unit {
	var has [quota.Year + 1]bool
	p.each(func(n *node) {
		for _, b := range n.limit.Quota {
			has[b.Unit] = true
		}
	})
	var units []quota.Unit
	for u := quota.Second; u <= quota.Year; u++ {
		if has[u] {
			units = append(units, u)
		}
	}
	return units
}

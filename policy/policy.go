package policy

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/weir-dev/weir/quota"
)

// A Policy is one domain's limits, as its file says. It is immutable.
type Policy struct {
	Domain   string   // the protocol's namespace, never empty
	File     string   // where it was read from, for messages
	Headers  Headers  // how clients are told
	Filter   *Filter  // the filter's rules for the domain, nil if the file has none
	Warnings []*Error // what loads but is likely not meant, in the order of their lines
	// MostConsumers is how many consumers the domain may enrol, at least 1: those whose
	// values no descriptor spells out. The rest share a counter for each descriptor.
	// Defaults to [DefaultMostConsumers].
	MostConsumers int64

	root *level // never nil
}

// Headers says which rate limit headers answers carry.
type Headers struct {
	// OnAllowed adds X-RateLimit-Limit, -Remaining and -Reset to allowed responses
	// too. Defaults to false: only refusals carry them.
	OnAllowed bool
	Style     HeaderStyle
}

// A HeaderStyle is how a reset is written. Defaults to [StyleEpoch].
type HeaderStyle uint8

// The header styles.
const (
	StyleEpoch HeaderStyle = iota // X-RateLimit-Reset is an epoch second
	StyleDelta                    // X-RateLimit-Reset is seconds to go
	StyleIETF                     // RateLimit-Policy and RateLimit, as structured fields
)

// A Limit is all that a policy says of the descriptors that match at one place. With
// no budget, limiter, rate limit or quota, it says that they are not limited.
type Limit struct {
	Name      string         // defaults to the keys of the path, joined by "/"
	Budget    *BudgetLimit   // nil if there is none
	Limiter   *LimiterPolicy // nil if there is none
	RateLimit *quota.Budget  // rate_limit: one calendar window; nil if there is none
	Quota     []quota.Budget // shortest window first; empty if there is none

	// Unlimited is rate_limit: {unlimited: true}.
	Unlimited bool
	// Replaces are the names of limits that are dropped from a request in which this
	// one matches.
	Replaces []string
	// Shadow limits are decided and charged apart, and never refuse.
	Shadow bool
	// QuotaMode limits refuse a request only when all of its quota-mode descriptors
	// are exhausted. Such a limit has a RateLimit and nothing else.
	QuotaMode bool
	// Hidden limits (expose: false) are left out of the headers that clients see. They
	// refuse as others do.
	Hidden bool
	// Named tells that the limit has one holder: every entry of the path has its value in
	// the policy, or a pattern whose values share a counter.
	Named      bool
	AllowError bool // on_error: allow. A request is admitted when the store cannot answer
	// Metadata goes into the dynamic metadata of requests that match: values as
	// encoding/json has them. It is nil if there is none.
	Metadata map[string]any
}

// A BudgetLimit is a rate budget and the scope that its buckets are kept in.
type BudgetLimit struct {
	Scope  Scope
	Budget Budget
}

// An Entry is one key and value of a descriptor.
type Entry struct {
	Key, Value string
}

// A Descriptor is an ordered list of entries that describes one aspect of a request.
type Descriptor []Entry

// A Set is the policies in force, one a domain. The zero Set has none. It is
// immutable and safe for concurrent use.
type Set struct {
	policies map[string]*Policy
}

// NewSet returns the set of the given policies. Two for one domain are an error
// that names both files.
func NewSet(policies ...*Policy) (*Set, error) {
	set := &Set{policies: make(map[string]*Policy, len(policies))}
	var errs []error
	for _, p := range policies {
		if other, ok := set.policies[p.Domain]; ok {
			errs = append(errs, fmt.Errorf("domain %q is in both %s and %s", p.Domain, other.File, p.File))
			continue
		}
		set.policies[p.Domain] = p
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return set, nil
}

// Domain returns the policy of a domain; ok is false when there is none.
func (s *Set) Domain(name string) (p *Policy, ok bool) {
	p, ok = s.policies[name]
	return p, ok
}

// Domains returns the names of all domains, sorted.
func (s *Set) Domains() []string { return slices.Sorted(maps.Keys(s.policies)) }

package policy

import (
	"crypto/sha256"
	"encoding/binary"
	"time"

	"github.com/weir-dev/weir/quota"
)

// A Request is all that the service asks of the store for one request. It is
// decided as a whole: every debit is taken or none, with the one exception of
// [quota.Check], that a quota denied by a later window stays spent in its earlier
// ones; and such a denial spends nothing else.
type Request struct {
	// Now is the caller's clock, at microsecond precision (what the database
	// holds); see [TruncateNow].
	Now time.Time
	// Budgets are decided first, then Quotas, each in order. The same bucket or
	// consumer may stand several times: it is charged each time.
	Budgets []BudgetDebit
	Quotas  []QuotaDebit
}

// TruncateNow drops what a timestamp of the database cannot hold.
func TruncateNow(now time.Time) time.Time { return now.Truncate(time.Microsecond) }

// A BudgetDebit takes units from one rate budget's bucket.
type BudgetDebit struct {
	Scope  Scope
	Key    BucketKey
	Budget Budget // must be valid
	Cost   int64  // units, from 0. 0 is covered and a cost above the burst is not, and neither is written
}

// A QuotaDebit spends units in all windows of one consumer's quota.
type QuotaDebit struct {
	Consumer Consumer
	Budgets  []quota.Budget // shortest window first, at least one
	Cost     int64          // units, from 0. 0 is covered and not written
}

// A Consumer is the holder of a quota.
type Consumer struct {
	ID      ConsumerID
	Domain  string  // the policy's domain
	Entries []Entry // what its descriptor matched: key and value, or the pattern where shared
}

// A ConsumerID identifies a quota's holder, whatever the policy's file looks like:
// a hash of the domain and the matched path.
type ConsumerID [sha256.Size]byte

// A Verdict is the store's answer to a [Request]. The states are read from the rows
// that the decision locked, after it.
type Verdict struct {
	// Allowed is whether all debits were taken.
	Allowed bool
	// Budgets[i] answers Request.Budgets[i], and Quotas[i] Request.Quotas[i].
	Budgets []BudgetState
	Quotas  []quota.Reservation
}

// A BudgetState is a bucket as its row holds it. For an absent row that was not
// minted it is the full bucket at the request's Now.
type BudgetState struct {
	Covered    bool    // the bucket could cover this debit, after those before it in the request
	Tokens     float64 // units at RefilledAt
	RefilledAt time.Time
}

// newConsumerID hashes a domain and a path. Every part goes in behind its length, so
// that no two paths give the same bytes, whatever bytes they hold.
func newConsumerID(domain string, path []step) ConsumerID {
	buf := appendText(make([]byte, 0, 128), domain)
	for _, s := range path {
		buf = appendText(buf, s.key)
		buf = append(buf, byte(s.kind))
		buf = appendText(buf, s.value)
	}
	return sha256.Sum256(buf)
}

func appendText(buf []byte, s string) []byte {
	buf = binary.AppendUvarint(buf, uint64(len(s)))
	return append(buf, s...)
}

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
//
// The same bucket or counter may stand several times: it is charged each time.
//
// A negative cost is a refund. It is always covered, never makes a row (though a limiter's of
// another policy becomes one of this), fills no bucket above its ceiling and leaves no window
// below 0 used.
type Request struct {
	// Now is the caller's clock, at microsecond precision (what the database
	// holds); see [TruncateNow].
	Now time.Time
	// The debits, decided in this order.
	Budgets  []BudgetDebit
	Limiters []LimiterDebit
	Quotas   []QuotaDebit
	// Shadows are decided in the same round trip, each by itself, after this
	// request and whatever became of it. They have no Shadows of their own.
	Shadows []Request
}

// Asks reports whether there is anything to ask of the store.
func (r *Request) Asks() bool {
	return len(r.Budgets)+len(r.Limiters)+len(r.Quotas)+len(r.Shadows) > 0
}

// TruncateNow drops what a timestamp of the database cannot hold.
func TruncateNow(now time.Time) time.Time { return now.Truncate(time.Microsecond) }

// A BudgetDebit takes units from one rate budget's bucket.
type BudgetDebit struct {
	Scope  Scope
	Key    BucketKey
	Budget Budget // must be valid
	Cost   int64  // units. 0 is covered and a cost above the burst is not, and neither is written
}

// A LimiterDebit takes tokens from one limiter's bucket.
type LimiterDebit struct {
	Bucket LimiterBucket
	Policy LimiterPolicy // must be valid, and the same for all debits from one bucket in a request
	Cost   int64         // tokens. 0 is covered and a cost above the burst is not, and neither is written
}

// A LimiterBucket is whose bucket it is.
type LimiterBucket struct {
	ID        CounterID
	Namespace string // for people: the policy's domain, or the library's namespace
	Subject   string // for people: what was matched, or the library's subject
}

// A QuotaDebit spends units in all windows of one counter.
type QuotaDebit struct {
	Counter CounterID
	Budgets []quota.Budget // shortest window first, at least one
	Cost    int64          // units. 0 is covered and not written
	// ChargedAt is, for a refund, when the charge was decided that it gives back: it
	// goes into the windows of that instant. Zero means the request's Now.
	ChargedAt time.Time
	// Optional makes it refuse the request only together with all other optional
	// debits of it; alone it is left out and reported as denied. It has one budget.
	Optional bool
	// Consumer is the holder of a quota; nil for a counter that nobody enrols, such as
	// that of a rate_limit.
	Consumer *Consumer
}

// A Consumer is the holder of a quota. Its first charge enrols it.
type Consumer struct {
	ID      CounterID
	Domain  string  // the policy's domain
	Entries []Entry // what its descriptor matched: key and value, or the pattern where shared
	// Named consumers are those that a policy spells out. They are enrolled when it
	// loads; when the store does not know one, its quota is inert.
	Named bool
	// Overflow is the counter that is charged instead, once the domain has Most
	// consumers and this one is not among them. With Most 0 there is no such bound.
	Overflow CounterID
	Most     int64
}

// A CounterID identifies a counter (the windows of a quota or of a rate_limit, or a
// limiter's bucket), whatever the policy's file looks like: a hash of its kind, the
// domain and the matched path.
type CounterID [sha256.Size]byte

// A Verdict is the store's answer to a [Request]. The states are read from the rows
// that the decision locked, after it.
type Verdict struct {
	// Allowed is whether all debits were taken.
	Allowed bool
	// At is the instant at which it was decided: the request's Now, or a later one's that
	// was decided together with it. Windows are those of At, and a refund's ChargedAt is At.
	At time.Time
	// Budgets[i] answers Request.Budgets[i], and so do the others.
	Budgets  []BudgetState
	Limiters []LimiterState
	Quotas   []QuotaState
	Shadows  []Verdict
}

// A BudgetState is a bucket as its row holds it. For an absent row that was not
// minted it is the full bucket at the request's Now.
type BudgetState struct {
	Covered    bool    // the bucket could cover this debit, after those before it in the request
	Tokens     float64 // units at RefilledAt
	RefilledAt time.Time
}

// A LimiterState is a limiter's bucket, in terms of the debit's policy. For an absent
// row that was not minted it is the full bucket at the request's Now.
type LimiterState struct {
	Covered    bool  // the bucket could cover this debit, after those before it in the request
	Level      int64 // token-microseconds at RefilledAt; see [LimiterPolicy]
	RefilledAt time.Time
}

// A QuotaState is what became of a [QuotaDebit].
type QuotaState struct {
	quota.Reservation

	// Unknown tells that the store does not know a named consumer: nothing was
	// charged and nothing denied.
	Unknown bool
	// Overflow tells that the domain has as many consumers as it may, so that the
	// shared counter was charged or asked.
	Overflow bool
}

// A counterKind says what a counter counts, so that two limits on one path never
// share one.
type counterKind byte

// The kinds. Their numbers are part of what is hashed, so they never change; 0 is for
// the store's own.
const (
	kindQuota counterKind = iota + 1
	kindRateLimit
	kindLimiter
	kindOverride
	kindOverflow
)

// newCounterID hashes a kind, a domain and a path. Every text goes in behind its
// length, so that no two paths give the same bytes, whatever bytes they hold.
func newCounterID(kind counterKind, domain string, path []step) CounterID {
	buf := append(make([]byte, 0, 128), byte(kind))
	buf = appendText(buf, domain)
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

package policy

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"time"
)

// A Scope names which rate budget a bucket belongs to. The set is closed: the
// database holds it in a CHECK as well.
type Scope string

// The scopes, by who is charged (a Node or a Domain of the platform) and for what.
const (
	ScopeSecretReadNode       Scope = "secret_read_node"       // a cost of 1 is one read
	ScopeSecretReadDomain     Scope = "secret_read_domain"     // a cost of 1 is one read
	ScopeAccessIssuanceDomain Scope = "access_issuance_domain" // a cost of 1 is one issuance
	ScopeIngestNode           Scope = "ingest_node"            // a cost of 1 is one wire byte
	ScopeIngestDomain         Scope = "ingest_domain"          // a cost of 1 is one wire byte
)

// Scopes returns all scopes, in the order of their declaration.
func Scopes() []Scope {
	return []Scope{
		ScopeSecretReadNode, ScopeSecretReadDomain, ScopeAccessIssuanceDomain,
		ScopeIngestNode, ScopeIngestDomain,
	}
}

// Valid reports whether s is one of the scopes.
func (s Scope) Valid() bool {
	switch s {
	case ScopeSecretReadNode, ScopeSecretReadDomain, ScopeAccessIssuanceDomain,
		ScopeIngestNode, ScopeIngestDomain:
		return true
	}
	return false
}

// MaxUnits is the largest cost, burst or limit, in units: 2^53, up to which a
// double holds every whole number.
const MaxUnits = 1 << 53

// MaxRefill is the longest that a rate budget may take to refill, in seconds. A
// bucket left alone for an hour is swept, and minted full by its next take: that is
// only right if it was full.
const MaxRefill = 3600

// ErrInvalidBudget is returned for a [Budget] that breaks its bounds.
var ErrInvalidBudget = errors.New("invalid budget")

// A Budget is the shape of a rate budget's bucket. It is never stored: it travels
// with each take, so that a changed budget is in force at once.
type Budget struct {
	PerSecond float64 // units that come back each second, above 0, at most MaxUnits
	Burst     float64 // the ceiling: units in a full bucket, above 0, at most MaxUnits and 3600 s of refill
}

// Validate returns an error that wraps [ErrInvalidBudget] and names the field,
// unless 0 < Burst ≤ MaxRefill × PerSecond, and both are at most MaxUnits. NaN and infinities
// are invalid.
func (b Budget) Validate() error {
	switch {
	case !(b.PerSecond > 0) || math.IsInf(b.PerSecond, 0):
		return fmt.Errorf("%w: per second must be a number above 0, not %v", ErrInvalidBudget, b.PerSecond)
	case b.PerSecond > MaxUnits:
		return fmt.Errorf("%w: per second must be at most 2^53, not %v", ErrInvalidBudget, b.PerSecond)
	case !(b.Burst > 0) || math.IsInf(b.Burst, 0):
		return fmt.Errorf("%w: burst must be a number above 0, not %v", ErrInvalidBudget, b.Burst)
	case b.Burst > MaxUnits:
		return fmt.Errorf("%w: burst must be at most 2^53, not %v", ErrInvalidBudget, b.Burst)
	case b.Burst > MaxRefill*b.PerSecond:
		return fmt.Errorf("%w: a burst of %v takes %.0f s to refill at %v a second, and a rate budget must refill within %d s (a slower limit is a limiter:)",
			ErrInvalidBudget, b.Burst, math.Ceil(b.Burst/b.PerSecond), b.PerSecond, MaxRefill)
	}
	return nil
}

// Level returns the units in a bucket at now, given what its row holds: the same
// arithmetic, in the same order, as the take's statement, so both agree to the bit.
// A now before refilledAt refills nothing.
func (b Budget) Level(tokens float64, refilledAt, now time.Time) float64 {
	elapsed := float64(max(0, now.UnixMicro()-refilledAt.UnixMicro())) / 1e6
	// The conversion forbids fusing the multiplication with the addition, which
	// the database does not do.
	return min(b.Burst, tokens+float64(elapsed*b.PerSecond))
}

// Wait returns how long after now the bucket will hold units, if nobody spends: 0
// when it does already. It is exact to the microsecond: at now plus the wait, Level
// is at least units. ok is false when units is above the ceiling, which no wait
// reaches.
func (b Budget) Wait(tokens float64, refilledAt, now time.Time, units float64) (wait time.Duration, ok bool) {
	if units > b.Burst {
		return 0, false
	}
	if b.Level(tokens, refilledAt, now) >= units {
		return 0, true
	}
	start := max(0, refilledAt.UnixMicro()-now.UnixMicro())
	need := math.Ceil((units - b.Level(tokens, refilledAt, now)) / b.PerSecond * 1e6)
	micros := start + int64(need)
	// Rounding in Level may leave the level an ulp short; step past it.
	for step := int64(1); b.Level(tokens, refilledAt, now.Add(time.Duration(micros)*time.Microsecond)) < units; step *= 2 {
		micros += step
	}
	return time.Duration(micros) * time.Microsecond, true
}

// A BucketKey is the UUID of the Node or the Domain that a bucket belongs to. The
// zero key is invalid.
type BucketKey [16]byte

// String returns the key in the canonical form of a UUID, in lower case.
func (k BucketKey) String() string {
	var b [36]byte
	hex.Encode(b[:8], k[:4])
	hex.Encode(b[9:13], k[4:6])
	hex.Encode(b[14:18], k[6:8])
	hex.Encode(b[19:23], k[8:10])
	hex.Encode(b[24:], k[10:])
	b[8], b[13], b[18], b[23] = '-', '-', '-', '-'
	return string(b[:])
}

// ErrMalformedKey is returned by [ParseBucketKey].
var ErrMalformedKey = errors.New("not a UUID of 36 characters, or all zero")

// ParseBucketKey reads a UUID in its form of 36 characters, in either case, and
// refuses everything else, the all-zero UUID included. The filter's `type: uuid`
// accepts the same strings. The error is [ErrMalformedKey].
func ParseBucketKey(s string) (BucketKey, error) {
	var k BucketKey
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return BucketKey{}, ErrMalformedKey
	}
	digits := make([]byte, 0, 32)
	digits = append(digits, s[:8]...)
	digits = append(digits, s[9:13]...)
	digits = append(digits, s[14:18]...)
	digits = append(digits, s[19:23]...)
	digits = append(digits, s[24:]...)
	if _, err := hex.Decode(k[:], digits); err != nil || k == (BucketKey{}) {
		return BucketKey{}, ErrMalformedKey
	}
	return k, nil
}

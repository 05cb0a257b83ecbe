package policy

import (
	"errors"
	"fmt"
	"math/bits"
	"time"
)

// MaxLevel is the largest level of a limiter's bucket, in token-microseconds: 2^62, so
// that sums of two levels fit 64 bits.
const MaxLevel = 1 << 62

// ErrInvalidArgument is returned for a [LimiterPolicy] that breaks its bounds, and for
// a cost that a limiter's bucket could never cover.
var ErrInvalidArgument = errors.New("invalid argument")

// A LimiterPolicy is the shape of a limiter's bucket: it holds at most Burst tokens, and
// Permits of them come back every Per. Levels are exact: they count in token-microseconds, of
// which a token has as many as Per has microseconds; so Permits come back every
// microsecond.
type LimiterPolicy struct {
	Permits int64         // tokens that come back every Per, above 0
	Per     time.Duration // whole microseconds, at least one
	Burst   int64         // the capacity: tokens in a full bucket, above 0
}

// Validate returns an error that wraps [ErrInvalidArgument] and names the field, unless
// the policy has a capacity, a refill and a period of whole microseconds, and Burst × Per
// and Permits are at most [MaxLevel].
func (p LimiterPolicy) Validate() error {
	switch {
	case p.Permits <= 0:
		return fmt.Errorf("%w: permits must be above 0, not %d", ErrInvalidArgument, p.Permits)
	case p.Permits > MaxLevel:
		return fmt.Errorf("%w: permits must be at most 2^62, not %d", ErrInvalidArgument, p.Permits)
	case p.Per < time.Microsecond || p.Per%time.Microsecond != 0:
		return fmt.Errorf("%w: per must be whole microseconds, at least one, not %s", ErrInvalidArgument, p.Per)
	case p.Burst <= 0:
		return fmt.Errorf("%w: burst must be above 0, not %d", ErrInvalidArgument, p.Burst)
	}
	hi, lo := bits.Mul64(uint64(p.Burst), uint64(p.Per.Microseconds())) //nolint:gosec // neither is negative
	if hi != 0 || lo > MaxLevel {
		return fmt.Errorf("%w: a burst of %d times a period of %d µs is more than 2^62, which is as far as levels are exact",
			ErrInvalidArgument, p.Burst, p.Per.Microseconds())
	}
	return nil
}

// Capacity returns the level of a full bucket, in token-microseconds. It and all below are
// defined for valid policies only.
func (p LimiterPolicy) Capacity() int64 { return p.Burst * p.Per.Microseconds() }

// Level returns the level at now of a bucket that held level, from 0 to the capacity, at
// refilledAt: the same arithmetic as the database's, in whole microseconds. A now before
// refilledAt refills nothing.
func (p LimiterPolicy) Level(level int64, refilledAt, now time.Time) int64 {
	capacity := p.Capacity()
	if level >= capacity {
		return capacity
	}
	elapsed := microsBetween(refilledAt, now)
	// Written so that nothing overflows.
	if elapsed > (capacity-level)/p.Permits {
		return capacity
	}
	return level + elapsed*p.Permits
}

// Convert returns, in terms of p, a level of a bucket of another policy: as many tokens,
// the part of one rounded down, cut to p's capacity.
func (p LimiterPolicy) Convert(level int64, from LimiterPolicy) int64 {
	old, period := uint64(from.Per.Microseconds()), uint64(p.Per.Microseconds()) //nolint:gosec // neither is negative
	if old == period {
		return min(level, p.Capacity())
	}
	hi, lo := bits.Mul64(uint64(max(0, level)), period)
	if hi >= old {
		return p.Capacity() // the quotient has more than 64 bits
	}
	converted, _ := bits.Div64(hi, lo, old)
	return int64(min(converted, uint64(p.Capacity()))) //nolint:gosec // at most the capacity
}

// Tokens returns the whole tokens in a level.
func (p LimiterPolicy) Tokens(level int64) int64 { return level / p.Per.Microseconds() }

// Wait returns how long after now a bucket that held level at refilledAt will hold so many
// tokens, if nobody takes any: 0 when it does already. It is exact to the microsecond, and
// at most 292 years. ok is false when tokens is above the burst, which no wait reaches.
func (p LimiterPolicy) Wait(level int64, refilledAt, now time.Time, tokens int64) (wait time.Duration, ok bool) {
	switch {
	case tokens <= 0:
		return 0, true
	case tokens > p.Burst:
		return 0, false
	}
	need := tokens*p.Per.Microseconds() - p.Level(level, refilledAt, now)
	if need <= 0 {
		return 0, true
	}
	micros := need / p.Permits
	if need%p.Permits > 0 {
		micros++
	}
	// A refill that lies ahead of now begins there.
	micros = min(micros, maxWait) + min(microsBetween(now, refilledAt), maxWait)
	return time.Duration(min(micros, maxWait)) * time.Microsecond, true
}

// WholeSeconds rounds a wait up to whole seconds, at least 1, as headers have it: a client
// that comes back when told must not come too early.
func WholeSeconds(d time.Duration) int64 {
	n := int64(d / time.Second)
	if d%time.Second > 0 {
		n++
	}
	return max(1, n)
}

// maxWait is the longest wait that a duration holds, in microseconds (292 years).
const maxWait = int64(1<<63-1) / int64(time.Microsecond)

// microsBetween returns the whole microseconds from a to b, as a timestamp of the
// database counts them: 0 when b is before a, and at most about [MaxLevel], which is
// longer than any wait.
func microsBetween(a, b time.Time) int64 {
	// By the calendar, whatever monotonic readings they carry.
	from, to := a.Unix(), b.Unix()
	if to < from {
		return 0
	}
	seconds := uint64(to) - uint64(from) //nolint:gosec // the difference is right modulo 2^64
	if seconds >= MaxLevel/1_000_000 {
		return MaxLevel
	}
	micros := int64(b.Nanosecond()/1000 - a.Nanosecond()/1000)
	return max(0, int64(seconds)*1_000_000+micros)
}

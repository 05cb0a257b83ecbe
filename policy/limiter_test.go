package policy_test

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/weir-dev/weir/policy"
)

var noon = time.Date(2026, time.May, 14, 12, 0, 0, 0, time.UTC)

func TestLimiterPolicyValidate(t *testing.T) {
	t.Parallel()

	const most = policy.MaxLevel
	for _, tt := range []struct {
		name      string
		permits   int64
		per       time.Duration
		burst     int64
		wantError string // part of it; empty: valid
	}{
		{name: "plain", permits: 100, per: time.Second, burst: 200},
		{name: "least", permits: 1, per: time.Microsecond, burst: 1},
		{name: "zero", wantError: "permits"},
		{name: "no refill", per: time.Second, burst: 1, wantError: "permits must be above 0, not 0"},
		{name: "negative refill", permits: -1, per: time.Second, burst: 1, wantError: "permits must be above 0, not -1"},
		{name: "most refill", permits: most, per: time.Second, burst: 1},
		{name: "too much refill", permits: most + 1, per: time.Second, burst: 1, wantError: "permits must be at most 2^62"},
		{name: "no period", permits: 1, burst: 1, wantError: "per must be whole microseconds"},
		{name: "negative period", permits: 1, per: -time.Second, burst: 1, wantError: "per must be"},
		{name: "period under a microsecond", permits: 1, per: 999, burst: 1, wantError: "not 999ns"},
		{name: "part of a microsecond", permits: 1, per: 1500, burst: 1, wantError: "not 1.5µs"},
		{name: "longest period", permits: 1, per: math.MaxInt64 / 1000 * 1000, burst: 1},
		{name: "no capacity", permits: 1, per: time.Second, wantError: "burst must be above 0, not 0"},
		{name: "negative capacity", permits: 1, per: time.Second, burst: -5, wantError: "burst must be above 0, not -5"},
		{name: "most capacity", permits: 1, per: time.Microsecond, burst: most},
		{name: "too much capacity", permits: 1, per: time.Microsecond, burst: most + 1, wantError: "more than 2^62"},
		{name: "most level", permits: 1, per: 2 * time.Microsecond, burst: most / 2},
		{name: "too much level", permits: 1, per: 2 * time.Microsecond, burst: most/2 + 1, wantError: "more than 2^62"},
		{name: "over 64 bits", permits: 1, per: time.Hour, burst: math.MaxInt64, wantError: "more than 2^62"},
		{name: "wraps to a small product", permits: 1, per: 4 * time.Microsecond, burst: 1 << 62, wantError: "more than 2^62"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()

			err := policy.LimiterPolicy{Permits: tt.permits, Per: tt.per, Burst: tt.burst}.Validate()
			switch {
			case tt.wantError == "" && err != nil:
				t.Errorf("Validate() = %v, want nil", err)
			case tt.wantError != "" && (!errors.Is(err, policy.ErrInvalidArgument) || !strings.Contains(err.Error(), tt.wantError)):
				t.Errorf("Validate() = %v, want one that says %q", err, tt.wantError)
			}
		})
	}
}

// Validate agrees with arithmetic that can't overflow.
func TestLimiterPolicyValidateProperty(t *testing.T) {
	t.Parallel()

	number := rapid.OneOf(rapid.Int64(), rapid.Int64Range(-2, 1000), rapid.Int64Range(1<<61, 1<<62+10), rapid.Custom(func(rt *rapid.T) int64 {
		return int64(1) << rapid.IntRange(0, 62).Draw(rt, "shift")
	}))
	rapid.Check(t, func(rt *rapid.T) {
		p := policy.LimiterPolicy{
			Permits: number.Draw(rt, "permits"),
			Per:     time.Duration(number.Draw(rt, "per")),
			Burst:   number.Draw(rt, "burst"),
		}
		if rapid.Bool().Draw(rt, "whole") {
			p.Per = p.Per / 1000 * 1000
		}
		most := big.NewInt(policy.MaxLevel)
		capacity := new(big.Int).Mul(big.NewInt(p.Burst), big.NewInt(int64(p.Per)))
		capacity.Div(capacity, big.NewInt(1000))
		want := p.Permits > 0 && p.Permits <= policy.MaxLevel && p.Per >= 1000 && p.Per%1000 == 0 && p.Burst > 0 && capacity.Cmp(most) <= 0
		if err := p.Validate(); (err == nil) != want {
			rt.Fatalf("Validate(%+v) = %v, want valid: %v", p, err, want)
		}
		if want && p.Capacity() != capacity.Int64() {
			rt.Fatalf("Capacity(%+v) = %d, want %s", p, p.Capacity(), capacity)
		}
	})
}

// limiterPolicies draws valid policies, often at the edges of what is valid.
func limiterPolicies() *rapid.Generator[policy.LimiterPolicy] {
	return rapid.Custom(func(rt *rapid.T) policy.LimiterPolicy {
		period := rapid.OneOf(
			rapid.SampledFrom([]int64{1, 2, 3, 7, 1000, 1e6, 60e6, 3600e6, 86400e6, 365 * 86400e6, math.MaxInt64 / 1000}),
			rapid.Int64Range(1, math.MaxInt64/1000),
		).Draw(rt, "period")
		most := policy.MaxLevel / period
		burst := rapid.OneOf(rapid.Int64Range(1, min(100, most)), rapid.Int64Range(1, most), rapid.Just(most)).Draw(rt, "burst")
		permits := rapid.OneOf(rapid.Int64Range(1, 100), rapid.Int64Range(1, policy.MaxLevel), rapid.Just[int64](policy.MaxLevel)).Draw(rt, "permits")
		p := policy.LimiterPolicy{Permits: permits, Per: time.Duration(period) * time.Microsecond, Burst: burst}
		if err := p.Validate(); err != nil {
			rt.Fatal(err)
		}
		return p
	})
}

// instants draws instants of the years 1 to 9999, often near each other, and with parts
// of microseconds.
func instants() *rapid.Generator[time.Time] {
	return rapid.Custom(func(rt *rapid.T) time.Time {
		seconds := rapid.OneOf(
			rapid.Int64Range(noon.Unix()-10, noon.Unix()+10),
			rapid.Int64Range(-62135596800, 253402300799),
			rapid.SampledFrom([]int64{-62135596800, -1, 0, 253402300799}),
		).Draw(rt, "seconds")
		return time.Unix(seconds, rapid.Int64Range(0, 999_999_999).Draw(rt, "nanos")).UTC()
	})
}

// micros is an instant in microseconds of a wide integer, rounded down.
func micros(at time.Time) *big.Int {
	n := new(big.Int).Mul(big.NewInt(at.Unix()), big.NewInt(1e9))
	n.Add(n, big.NewInt(int64(at.Nanosecond())))
	return n.Div(n, big.NewInt(1000)) // Euclidean: down
}

// bigLevel is the level of a bucket by arithmetic that can't overflow.
func bigLevel(p policy.LimiterPolicy, level int64, at, now time.Time) *big.Int {
	elapsed := new(big.Int).Sub(micros(now), micros(at))
	if elapsed.Sign() < 0 {
		elapsed.SetInt64(0)
	}
	elapsed.Mul(elapsed, big.NewInt(p.Permits))
	elapsed.Add(elapsed, big.NewInt(level))
	if capacity := big.NewInt(p.Capacity()); elapsed.Cmp(capacity) > 0 {
		return capacity
	}
	return elapsed
}

func TestLimiterPolicyLevelProperty(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(rt *rapid.T) {
		p := limiterPolicies().Draw(rt, "policy")
		level := rapid.OneOf(rapid.Int64Range(0, p.Capacity()), rapid.Just[int64](0), rapid.Just(p.Capacity())).Draw(rt, "level")
		at, now := instants().Draw(rt, "at"), instants().Draw(rt, "now")
		got := p.Level(level, at, now)
		if want := bigLevel(p, level, at, now); want.Cmp(big.NewInt(got)) != 0 {
			rt.Fatalf("%+v: Level(%d, %v, %v) = %d, want %s", p, level, at, now, got, want)
		}
		if got < level || got > p.Capacity() {
			rt.Fatalf("%+v: Level(%d, %v, %v) = %d, outside the level and the capacity", p, level, at, now, got)
		}
		// In two steps as in one, if they are of whole microseconds.
		if between := instants().Draw(rt, "between"); !between.Before(at) && !now.Before(between) {
			at := at.Truncate(time.Microsecond)
			between := between.Truncate(time.Microsecond)
			if steps := p.Level(p.Level(level, at, between), between, now); steps != got {
				rt.Fatalf("%+v: from %v by way of %v to %v the level is %d, and at once %d", p, at, between, now, steps, got)
			}
		}
		tokens := new(big.Int).Div(big.NewInt(got), big.NewInt(p.Per.Microseconds()))
		if p.Tokens(got) != tokens.Int64() || p.Tokens(got) > p.Burst {
			rt.Fatalf("%+v: Tokens(%d) = %d, want %s", p, got, p.Tokens(got), tokens)
		}
	})
}

// C38: after exactly the wait the tokens are there, and a microsecond earlier they
// are not.
func TestC38LimiterPolicyWaitIsExact(t *testing.T) {
	t.Parallel()

	const longest = math.MaxInt64 / 1000 * time.Microsecond
	rapid.Check(t, func(rt *rapid.T) {
		p := limiterPolicies().Draw(rt, "policy")
		level := rapid.OneOf(rapid.Int64Range(0, p.Capacity()), rapid.Just[int64](0)).Draw(rt, "level")
		at := instants().Draw(rt, "at").Truncate(time.Microsecond)
		now := instants().Draw(rt, "now").Truncate(time.Microsecond)
		tokens := rapid.OneOf(rapid.Int64Range(-1, 5), rapid.Int64Range(0, p.Burst), rapid.Just(p.Burst), rapid.Int64()).Draw(rt, "tokens")
		wait, ok := p.Wait(level, at, now, tokens)
		if ok != (tokens <= p.Burst) {
			rt.Fatalf("%+v: Wait for %d tokens = %v, want %v", p, tokens, ok, !ok)
		}
		if !ok {
			return
		}
		if wait < 0 || wait%time.Microsecond != 0 {
			rt.Fatalf("%+v: Wait for %d tokens = %v", p, tokens, wait)
		}
		price := new(big.Int).Mul(big.NewInt(max(0, tokens)), big.NewInt(p.Per.Microseconds()))
		if wait < longest {
			if then := now.Add(wait); bigLevel(p, level, at, then).Cmp(price) < 0 {
				rt.Fatalf("%+v: %d tokens are not there after %v", p, tokens, wait)
			}
		}
		if wait > 0 {
			if then := now.Add(wait - time.Microsecond); bigLevel(p, level, at, then).Cmp(price) >= 0 {
				rt.Fatalf("%+v: %d tokens are there before %v", p, tokens, wait)
			}
		}
	})
}

func TestLimiterPolicyConvertProperty(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(rt *rapid.T) {
		from, to := limiterPolicies().Draw(rt, "from"), limiterPolicies().Draw(rt, "to")
		if rapid.Bool().Draw(rt, "same period") {
			to.Per = from.Per
			to.Burst = min(to.Burst, policy.MaxLevel/to.Per.Microseconds())
		}
		level := rapid.OneOf(rapid.Int64Range(0, from.Capacity()), rapid.Just(from.Capacity())).Draw(rt, "level")
		want := new(big.Int).Mul(big.NewInt(level), big.NewInt(to.Per.Microseconds()))
		want.Div(want, big.NewInt(from.Per.Microseconds()))
		if capacity := big.NewInt(to.Capacity()); want.Cmp(capacity) > 0 {
			want = capacity
		}
		got := to.Convert(level, from)
		if want.Cmp(big.NewInt(got)) != 0 {
			rt.Fatalf("%+v: Convert(%d, %+v) = %d, want %s", to, level, from, got, want)
		}
		if a, b := from.Tokens(level), to.Tokens(got); b != min(a, to.Burst) {
			rt.Fatalf("%d tokens of %+v became %d of %+v", a, from, b, to)
		}
	})
}

func TestLimiterPolicyTimeline(t *testing.T) {
	t.Parallel()

	p := policy.LimiterPolicy{Permits: 10, Per: time.Second, Burst: 20} // a token each 100 ms
	const token = 1_000_000
	for _, tt := range []struct {
		after     time.Duration // of now from refilledAt
		level     int64
		want      int64
		wantTo1   time.Duration
		wantTo20  time.Duration
		wantWhole int64
	}{
		{level: 0, want: 0, wantTo1: 100 * time.Millisecond, wantTo20: 2 * time.Second},
		{after: 50 * time.Millisecond, want: token / 2, wantTo1: 50 * time.Millisecond, wantTo20: 1950 * time.Millisecond},
		{after: 99_999 * time.Microsecond, want: token - 10, wantTo1: time.Microsecond, wantTo20: 1_900_001 * time.Microsecond},
		{after: 100*time.Millisecond + 999, want: token, wantTo20: 1900 * time.Millisecond, wantWhole: 1},
		{after: -time.Minute, want: 0, wantTo1: time.Minute + 100*time.Millisecond, wantTo20: time.Minute + 2*time.Second},
		{after: time.Hour, want: 20 * token, wantWhole: 20},
		{after: 10 * 365 * 24 * time.Hour, want: 20 * token, wantWhole: 20}, // T03
		{level: 20 * token, want: 20 * token, wantWhole: 20},
		{level: 20 * token, after: -time.Hour, want: 20 * token, wantWhole: 20},
	} {
		t.Run(fmt.Sprintf("%d/%v", tt.level, tt.after), func(t *testing.T) {
			t.Parallel()

			now := noon.Add(tt.after)
			got := p.Level(tt.level, noon, now)
			if got != tt.want || p.Tokens(got) != tt.wantWhole {
				t.Errorf("Level = %d (%d tokens), want %d (%d tokens)", got, p.Tokens(got), tt.want, tt.wantWhole)
			}
			if wait, ok := p.Wait(tt.level, noon, now, 1); wait != tt.wantTo1 || !ok {
				t.Errorf("Wait for 1 = %v, %v, want %v", wait, ok, tt.wantTo1)
			}
			if wait, ok := p.Wait(tt.level, noon, now, 20); wait != tt.wantTo20 || !ok {
				t.Errorf("Wait for 20 = %v, %v, want %v", wait, ok, tt.wantTo20)
			}
			if wait, ok := p.Wait(tt.level, noon, now, 21); wait != 0 || ok {
				t.Errorf("Wait for 21 = %v, %v, want false", wait, ok)
			}
		})
	}
}

// Instants that no calendar holds, and clocks with a monotonic reading.
func TestLimiterPolicyStrangeClocks(t *testing.T) {
	t.Parallel()

	p := policy.LimiterPolicy{Permits: 1, Per: time.Microsecond, Burst: policy.MaxLevel}
	early, late := time.Unix(math.MinInt64/2, 0), time.Unix(math.MaxInt64/2, 0)
	if got := p.Level(0, early, late); got != policy.MaxLevel {
		t.Errorf("Level over all time = %d, want a full bucket", got)
	}
	if got := p.Level(7, late, early); got != 7 {
		t.Errorf("Level from the end of time to its beginning = %d, want 7", got)
	}
	wait, ok := p.Wait(0, late, early, 1)
	if want := math.MaxInt64 / 1000 * time.Microsecond; wait != want || !ok {
		t.Errorf("Wait = %v, %v, want the longest, %v", wait, ok, want)
	}
	now := time.Now()
	if got := p.Level(0, now.Round(0), now.Add(time.Second)); got != 1_000_000 {
		t.Errorf("Level of a bucket a second ago = %d, want 1000000", got)
	}
}

// C60: half a month later, half of a month's refill is back.
func TestC60LimiterPolicySmoothMonth(t *testing.T) {
	t.Parallel()

	month := 28 * 24 * time.Hour
	p := policy.LimiterPolicy{Permits: 1000, Per: month, Burst: 1000}
	if got := p.Tokens(p.Level(0, noon, noon.Add(month/2))); got != 500 {
		t.Errorf("after half a month %d tokens are back, want 500", got)
	}
	if wait, _ := p.Wait(0, noon, noon, 1000); wait != month {
		t.Errorf("an empty bucket is full after %v, want %v", wait, month)
	}
}

// T02: ten million random steps stay exact, since nothing is ever rounded.
func TestT02LimiterPolicyDoesNotDrift(t *testing.T) {
	t.Parallel()

	p := policy.LimiterPolicy{Permits: 333, Per: 7 * time.Second, Burst: 1000}
	level, at := int64(0), noon
	var taken, elapsed int64 // token-microseconds and microseconds
	seed := uint64(1)
	const steps = 10_000_000
	for range steps {
		seed = seed*6364136223846793005 + 1442695040888963407
		step := int64(seed>>33) % 50_000
		elapsed += step
		now := at.Add(time.Duration(step) * time.Microsecond)
		level, at = p.Level(level, at, now), now
		if cost := (int64(seed>>20) % 4) * p.Per.Microseconds(); cost <= level {
			level -= cost
			taken += cost
		}
		if level == p.Capacity() {
			t.Fatal("the bucket ran full: nothing is tested then")
		}
	}
	if got, want := level+taken, elapsed*p.Permits; got != want {
		t.Errorf("after %d steps %d token-microseconds came, want %d", steps, got, want)
	}
}

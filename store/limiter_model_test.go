package store

import (
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
)

// limiterModel is the limiter's buckets as the rules say, in numbers that can't overflow
// or round. Instants are microseconds from 1970.
type limiterModel struct {
	buckets map[string]*limiterBucket
}

type limiterBucket struct {
	level   *big.Int // token-microseconds
	at      int64
	policy  Policy
	expires *big.Int // nil: never
}

func ceilDiv(n, d *big.Int) *big.Int {
	q, r := new(big.Int).DivMod(n, d, new(big.Int))
	if r.Sign() > 0 {
		q.Add(q, big.NewInt(1))
	}
	return q
}

func capacity(p Policy) *big.Int { return price(p, p.Burst) }

func price(p Policy, tokens int64) *big.Int {
	return new(big.Int).Mul(big.NewInt(tokens), big.NewInt(p.Per.Microseconds()))
}

func smaller(a, b *big.Int) *big.Int {
	if a.Cmp(b) < 0 {
		return a
	}
	return b
}

// refilled is the level at now by the bucket's own policy, in terms of p.
func (b *limiterBucket) refilled(p Policy, now int64) *big.Int {
	level := new(big.Int).Mul(big.NewInt(max(0, now-b.at)), big.NewInt(b.policy.Permits))
	level = smaller(level.Add(level, b.level), capacity(b.policy))
	level = new(big.Int).Mul(level, big.NewInt(p.Per.Microseconds()))
	level.Div(level, big.NewInt(b.policy.Per.Microseconds()))
	return smaller(level, capacity(p))
}

// saturate is a wait as a duration, at most the longest.
func saturate(micros *big.Int) time.Duration {
	longest := big.NewInt(int64(1<<63-1) / 1000)
	return time.Duration(smaller(micros, longest).Int64()) * time.Microsecond
}

// wait is how long after now a level as of at reaches so many tokens.
func wait(p Policy, level *big.Int, at, now, tokens int64) time.Duration {
	missing := new(big.Int).Sub(price(p, tokens), level)
	if missing.Sign() <= 0 {
		return 0
	}
	micros := ceilDiv(missing, big.NewInt(p.Permits))
	return saturate(micros.Add(micros, big.NewInt(max(0, at-now))))
}

// expiry is base plus what a level lacks, or nil when that is too far after at.
func expiry(base *big.Int, at int64, p Policy, lacks *big.Int) *big.Int {
	if base == nil {
		return nil
	}
	ends := ceilDiv(lacks, big.NewInt(p.Permits))
	ends.Add(ends, base)
	if ahead := new(big.Int).Sub(ends, big.NewInt(at)); ahead.Cmp(big.NewInt(1<<52)) >= 0 {
		return nil
	}
	return ends
}

func (m *limiterModel) take(subject string, p Policy, cost, now int64) Decision {
	b, ok := m.buckets[subject]
	if !ok {
		level := new(big.Int).Sub(capacity(p), price(p, cost))
		m.buckets[subject] = &limiterBucket{level: level, at: now, policy: p, expires: expiry(big.NewInt(now), now, p, price(p, cost))}
		return Decision{Allowed: true, Remaining: p.Burst - cost, ResetAfter: wait(p, level, now, now, p.Burst)}
	}
	level := b.refilled(p, now)
	allowed := level.Cmp(price(p, cost)) >= 0
	if allowed || b.policy != p {
		at := max(b.at, now)
		full := ceilDiv(new(big.Int).Sub(capacity(p), level), big.NewInt(p.Permits))
		full.Add(full, big.NewInt(at))
		spent := new(big.Int)
		if allowed {
			spent = price(p, cost)
		}
		level = new(big.Int).Sub(level, spent)
		expires := expiry(big.NewInt(at), at, p, new(big.Int).Sub(capacity(p), level))
		if b.expires == nil || b.expires.Cmp(full) > 0 {
			expires = expiry(b.expires, at, p, spent)
		}
		*b = limiterBucket{level: level, at: at, policy: p, expires: expires}
	}
	d := Decision{
		Allowed:    allowed,
		Remaining:  new(big.Int).Div(level, big.NewInt(p.Per.Microseconds())).Int64(),
		ResetAfter: wait(p, level, b.at, now, p.Burst),
	}
	if !allowed {
		d.RetryAfter = wait(p, level, b.at, now, cost)
	}
	return d
}

func (m *limiterModel) peek(subject string, p Policy, now int64) Decision {
	b, ok := m.buckets[subject]
	if !ok {
		return Decision{Allowed: true, Remaining: p.Burst}
	}
	level := b.refilled(p, now)
	d := Decision{
		Remaining:  new(big.Int).Div(level, big.NewInt(p.Per.Microseconds())).Int64(),
		ResetAfter: wait(p, level, max(b.at, now), now, p.Burst),
	}
	d.Allowed = d.Remaining > 0
	if !d.Allowed {
		d.RetryAfter = wait(b.policy, b.refilled(b.policy, now), max(b.at, now), now, 1)
	}
	return d
}

func (m *limiterModel) sweep(before int64) (deleted int64) {
	for subject, b := range m.buckets {
		if b.expires != nil && b.expires.Cmp(big.NewInt(before)) < 0 {
			delete(m.buckets, subject)
			deleted++
		}
	}
	return deleted
}

// compare compares every row with the model, both ways.
func (m *limiterModel) compare(t *testing.T, rt rapid.TB, db DBTX) {
	t.Helper()
	want, got := map[string]string{}, map[string]string{}
	for subject, b := range m.buckets {
		expires := "infinity"
		if b.expires != nil {
			expires = b.expires.String()
		}
		want[subject] = fmt.Sprint(b.level, " ", b.at, " ", b.policy, " ", expires)
	}
	rows, err := db.Query(t.Context(), `
		SELECT subject, level, refilled_at, permits, period_us, burst,
			CASE WHEN isfinite(expires_at) THEN trunc(extract(epoch FROM expires_at) * 1000000)::text ELSE expires_at::text END
		FROM plexsphere.limiter_buckets`)
	if err != nil {
		rt.Fatal(err)
	}
	for rows.Next() {
		var (
			subject, expires string
			level, period    int64
			at               time.Time
			p                Policy
		)
		if err := rows.Scan(&subject, &level, &at, &p.Permits, &period, &p.Burst, &expires); err != nil {
			rt.Fatal(err)
		}
		p.Per = time.Duration(period) * time.Microsecond
		got[subject] = fmt.Sprint(level, " ", at.UnixMicro(), " ", p, " ", expires)
	}
	if err := rows.Err(); err != nil {
		rt.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		rt.Fatalf("rows (-model +store):\n%s", diff)
	}
}

// lawOne holds law 1 for one subject: a bucket of the largest burst and the largest rate
// in force, on the latest clock, that must cover whatever is admitted. That is the same
// as burst + rate × (d + ε) for every span.
type lawOne struct {
	rate, burst *big.Rat // tokens a microsecond; tokens, with those of ε
	level       *big.Rat
	at          int64
}

func newLawOne(policies []Policy, spread time.Duration) *lawOne {
	l := &lawOne{rate: new(big.Rat), burst: new(big.Rat)}
	for _, p := range policies {
		if r := big.NewRat(p.Permits, p.Per.Microseconds()); r.Cmp(l.rate) > 0 {
			l.rate = r
		}
		if b := new(big.Rat).SetInt64(p.Burst); b.Cmp(l.burst) > 0 {
			l.burst = b
		}
	}
	l.burst.Add(l.burst, new(big.Rat).Mul(l.rate, big.NewRat(spread.Microseconds(), 1)))
	l.reset()
	return l
}

func (l *lawOne) reset() { l.level = new(big.Rat).Set(l.burst) }

// admit reports whether so many tokens may be admitted at an instant of true time.
func (l *lawOne) admit(cost, now int64) bool {
	back := new(big.Rat).Mul(l.rate, big.NewRat(now-l.at, 1))
	l.level.Add(l.level, back)
	if l.level.Cmp(l.burst) > 0 {
		l.level.Set(l.burst)
	}
	l.at = now
	l.level.Sub(l.level, new(big.Rat).SetInt64(cost))
	return l.level.Sign() >= 0
}

// rolloutPolicies are such as may follow each other in one namespace.
var rolloutPolicies = []Policy{
	PerSecond(100), PerSecond(10), PerMinute(60), PerMinute(7),
	{Permits: 100, Per: time.Second, Burst: 10},
	{Permits: 100, Per: time.Second, Burst: 1000},
	{Permits: 1, Per: 10 * time.Second, Burst: 100},
	{Permits: 3, Per: 7 * time.Millisecond, Burst: 5},
	{Permits: 1, Per: 3600 * time.Second, Burst: 2},
}

// limiterStep is one step of a history: a take, a peek, a reset or a sweep, by a replica.
type limiterStep struct {
	kind    string
	subject string
	policy  Policy
	cost    int64
	forward int64 // microseconds of true time before it
	skew    int64 // of the replica's clock, in microseconds
}

func limiterSteps(policies []Policy, skew time.Duration) *rapid.Generator[limiterStep] {
	return rapid.Custom(func(rt *rapid.T) limiterStep {
		p := rapid.SampledFrom(policies).Draw(rt, "policy")
		return limiterStep{
			kind:    rapid.SampledFrom([]string{"take", "take", "take", "take", "peek", "sweep", "sweep", "reset"}).Draw(rt, "kind"),
			subject: rapid.SampledFrom([]string{"a", "a", "a", "b"}).Draw(rt, "subject"),
			policy:  p,
			cost:    rapid.OneOf(rapid.Int64Range(1, min(p.Burst, 3)), rapid.Int64Range(1, p.Burst), rapid.Just(p.Burst)).Draw(rt, "cost"),
			forward: rapid.OneOf(rapid.Just[int64](0), rapid.Int64Range(0, 1000), rapid.Int64Range(0, 2e6), rapid.Int64Range(0, 100e6)).Draw(rt, "forward"),
			skew:    rapid.Int64Range(-skew.Microseconds(), skew.Microseconds()).Draw(rt, "skew"),
		}
	})
}

// rollout draws the policies of one history, and the largest skew of its clocks.
func rollout(rt *rapid.T) ([]Policy, time.Duration) {
	policies := rapid.SliceOfN(rapid.SampledFrom(rolloutPolicies), 1, 3).Draw(rt, "policies")
	skew := rapid.SampledFrom([]time.Duration{0, time.Second, 5 * time.Minute}).Draw(rt, "skew")
	return policies, skew
}

// Law 1 holds for the rules themselves: many histories of the model, which the next test
// holds equal to the store.
func TestLimiterModelNeverOverAdmits(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(rt *rapid.T) {
		policies, skew := rollout(rt)
		m := &limiterModel{buckets: map[string]*limiterBucket{}}
		laws := map[string]*lawOne{"a": newLawOne(policies, 2*skew), "b": newLawOne(policies, 2*skew)}
		now := noon.UnixMicro()
		for _, step := range rapid.SliceOfN(limiterSteps(policies, skew), 10, 60).Draw(rt, "steps") {
			now += step.forward
			switch step.kind {
			case "take":
				if m.take(step.subject, step.policy, step.cost, now+step.skew).Allowed && !laws[step.subject].admit(step.cost, now) {
					rt.Fatalf("law 1: admitted what no bucket of the largest burst and rate covers: %+v", step)
				}
			case "reset":
				delete(m.buckets, step.subject)
				laws[step.subject].reset()
			case "sweep":
				m.sweep(now - skew.Microseconds()) // not ahead of any clock
			}
		}
	})
}

// TestLimiterModel runs random histories against the store and the model: takes, peeks,
// resets and sweeps, by replicas on several policies, whose clocks differ by up to five
// minutes. They agree in every answer and in every row, to the last microsecond and
// token-microsecond, and law 1 holds.
func TestLimiterModel(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	rapid.Check(t, func(rt *rapid.T) {
		if _, err := pool.Exec(t.Context(), "TRUNCATE plexsphere.limiter_buckets"); err != nil {
			rt.Fatal(err)
		}
		policies, skew := rollout(rt)
		m := &limiterModel{buckets: map[string]*limiterBucket{}}
		laws := map[string]*lawOne{"a": newLawOne(policies, 2*skew), "b": newLawOne(policies, 2*skew)}
		now := noon.UnixMicro()
		for _, step := range rapid.SliceOfN(limiterSteps(policies, skew), 1, 25).Draw(rt, "steps") {
			now += step.forward
			local := now + step.skew
			l := NewLimiter(pool, LimiterConfig[string]{Policy: step.policy, Now: func() time.Time {
				return time.UnixMicro(local).Add(999) // the database holds microseconds
			}})
			var got, want Decision
			var err error
			switch step.kind {
			case "take":
				got, err = l.TryAcquire(t.Context(), step.subject, step.cost)
				want = m.take(step.subject, step.policy, step.cost, local)
				if got.Allowed && !laws[step.subject].admit(step.cost, now) {
					rt.Fatalf("law 1: admitted what no bucket of the largest burst and rate covers: %+v", step)
				}
			case "peek":
				got, err = l.Peek(t.Context(), step.subject)
				want = m.peek(step.subject, step.policy, local)
			case "reset":
				err = l.Reset(t.Context(), step.subject)
				delete(m.buckets, step.subject)
				laws[step.subject].reset()
			case "sweep":
				got.Remaining, err = s.DeleteExpired(t.Context(), time.UnixMicro(now-skew.Microseconds()))
				want.Remaining = m.sweep(now - skew.Microseconds())
			}
			if err != nil {
				rt.Fatal(err)
			}
			if got != want {
				rt.Fatalf("%+v = %+v, want %+v", step, got, want)
			}
		}
		m.compare(t, rt, pool)
	})
}

// The database's arithmetic and Go's agree with numbers that can't overflow, wherever
// they are valid: capacities of 2^62, periods from a microsecond to 292 years, centuries
// between takes, and any policy after any other.
func TestLimiterExtremes(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	policies := rapid.Custom(func(rt *rapid.T) Policy {
		period := rapid.OneOf(
			rapid.SampledFrom([]int64{1, 2, 3, 1e6, 86400e6, 1e15, (1<<63 - 1) / 1000}), rapid.Int64Range(1, (1<<63-1)/1000),
		).Draw(rt, "period")
		most := policy.MaxLevel / period
		return Policy{
			Permits: rapid.OneOf(rapid.Int64Range(1, 5), rapid.Int64Range(1, policy.MaxLevel), rapid.Just[int64](policy.MaxLevel)).Draw(rt, "permits"),
			Per:     time.Duration(period) * time.Microsecond,
			Burst:   rapid.OneOf(rapid.Int64Range(1, min(5, most)), rapid.Int64Range(1, most), rapid.Just(most)).Draw(rt, "burst"),
		}
	})
	first, last := time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC).Unix(), time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC).Unix()
	instants := rapid.Custom(func(rt *rapid.T) int64 {
		seconds := rapid.OneOf(rapid.Int64Range(first, last), rapid.Int64Range(0, 10), rapid.SampledFrom([]int64{first, last, -1, 946_684_800})).Draw(rt, "second")
		return seconds*1e6 + rapid.Int64Range(0, 999_999).Draw(rt, "micros")
	})
	rapid.Check(t, func(rt *rapid.T) {
		if _, err := pool.Exec(t.Context(), "TRUNCATE plexsphere.limiter_buckets"); err != nil {
			rt.Fatal(err)
		}
		m := &limiterModel{buckets: map[string]*limiterBucket{}}
		p := policies.Draw(rt, "policy")
		for range rapid.IntRange(1, 8).Draw(rt, "steps") {
			if rapid.IntRange(0, 2).Draw(rt, "change") == 0 {
				p = policies.Draw(rt, "policy")
			}
			now := instants.Draw(rt, "now")
			cost := rapid.OneOf(rapid.Int64Range(1, min(3, p.Burst)), rapid.Int64Range(1, p.Burst), rapid.Just(p.Burst)).Draw(rt, "cost")
			l := NewLimiter(pool, LimiterConfig[string]{Policy: p, Now: func() time.Time { return time.UnixMicro(now) }})
			got, err := l.Peek(t.Context(), "a")
			if err != nil {
				rt.Fatal(err)
			}
			if want := m.peek("a", p, now); got != want {
				rt.Fatalf("%+v: Peek at %d = %+v, want %+v", p, now, got, want)
			}
			if got, err = l.TryAcquire(t.Context(), "a", cost); err != nil {
				rt.Fatal(err)
			}
			if want := m.take("a", p, cost, now); got != want {
				rt.Fatalf("%+v: TryAcquire(%d) at %d = %+v, want %+v", p, cost, now, got, want)
			}
			m.compare(t, rt, pool)
		}
	})
}

// Replicas on the old and on the new policy alternate while sweeps delete whatever has
// expired. The policies have one rate and two bursts: the small bucket is soon full, and a
// row that expired then would let the others mint the large one, again and again.
func TestLimiterRollOut(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	policies := []Policy{{Permits: 100, Per: time.Second, Burst: 10}, {Permits: 100, Per: time.Second, Burst: 100}}
	const (
		cycle = 1200 * time.Millisecond
		step  = 10 * time.Millisecond
		span  = 10 * cycle
	)
	for _, tt := range []struct {
		name string
		// Whether the small and the large take at a time of the cycle.
		small, large func(at time.Duration) bool
	}{
		{
			// The small take once, and rest until theirs is full.
			name:  "small rests at once",
			small: func(at time.Duration) bool { return at%(200*time.Millisecond) == 2*step },
			large: func(at time.Duration) bool { return at%(200*time.Millisecond) == 0 },
		},
		{
			// The small take all that comes back, until shortly before the large's row
			// would have expired.
			name:  "small never rests",
			small: func(at time.Duration) bool { return at > 0 && at < 900*time.Millisecond },
			large: func(at time.Duration) bool { return at == 0 },
		},
		{
			name:  "all the time",
			small: func(time.Duration) bool { return true },
			large: func(time.Duration) bool { return true },
		},
	} {
		s := NewStore(pool)
		clock := newClock(noon)
		small, large := limiterAt(pool, policies[0], clock), limiterAt(pool, policies[1], clock)
		law := newLawOne(policies, 0)
		var admitted int64
		take := func(l *Limiter[string], cost int64) {
			if mustAcquire(t, l, tt.name, cost).Allowed {
				admitted += cost
				if !law.admit(cost, clock.now().UnixMicro()) {
					t.Errorf("%s: at %v: admitted more than law 1 allows", tt.name, clock.now().Sub(noon))
				}
			}
		}
		for at := time.Duration(0); at < span && !t.Failed(); at += step {
			clock.set(noon.Add(at))
			if _, err := s.DeleteExpired(t.Context(), clock.now()); err != nil {
				t.Fatal(err)
			}
			if tt.large(at % cycle) {
				take(large, 100)
			}
			if tt.small(at % cycle) {
				take(small, 1)
			}
		}
		if most := 100 + span.Milliseconds()/10; admitted > most || admitted < 100 {
			t.Errorf("%s: %d admitted in %v, want 100 to %d", tt.name, admitted, span, most)
		}
		// When both have rested the row goes, and the bucket is full.
		clock.advance(3 * time.Second)
		if n, err := s.DeleteExpired(t.Context(), clock.now()); n != 1 || err != nil {
			t.Errorf("%s: DeleteExpired = %d, %v, want 1", tt.name, n, err)
		}
		if d := mustPeek(t, large, tt.name); d.Remaining != 100 {
			t.Errorf("%s: at rest %d are left, want 100", tt.name, d.Remaining)
		}
	}
}

// The same at once: workers of two pools on both policies, and sweeps, while the clock
// goes on.
func TestLimiterRollOutConcurrently(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	old, fresh := newPool(t, dsn, 6), newPool(t, dsn, 6)
	s := NewStore(old)
	clock := newClock(noon)
	policies := []Policy{{Permits: 1000, Per: time.Second, Burst: 10}, {Permits: 1000, Per: time.Second, Burst: 100}}
	const subjects, sweeps, workers = 12, 150, 8
	var (
		admitted [subjects]atomic.Int64
		swept    int64
		done     atomic.Bool
		// What each worker last read from the clock: a sweep must not lie ahead of any
		// that is still on its way.
		read [workers]atomic.Int64
	)
	for i := range read {
		read[i].Store(noon.UnixMicro())
	}
	together(workers+1, func(worker int) {
		if worker == workers {
			defer done.Store(true)
			for range sweeps {
				clock.advance(20 * time.Millisecond)
				before := clock.now().UnixMicro()
				for i := range read {
					before = min(before, read[i].Load())
				}
				n, err := s.DeleteExpired(t.Context(), time.UnixMicro(before))
				if err != nil {
					t.Error(err)
				}
				swept += n
			}
			return
		}
		db, p, cost := old, policies[0], int64(3)
		if worker%4 == 0 {
			db, p, cost = fresh, policies[1], 50
		}
		l := NewLimiter(db, LimiterConfig[string]{Policy: p, Now: func() time.Time {
			now := clock.now()
			read[worker].Store(now.UnixMicro())
			return now
		}})
		for i := worker; !done.Load(); i++ {
			d, err := l.TryAcquire(t.Context(), strconv.Itoa(i%subjects), cost)
			if err != nil {
				t.Error(err)
			}
			if d.Allowed {
				admitted[i%subjects].Add(cost)
			}
		}
	})
	elapsed := clock.now().Sub(noon)
	var total int64
	for i := range admitted {
		n := admitted[i].Load()
		total += n
		if most := 100 + elapsed.Milliseconds(); n > most {
			t.Errorf("subject %d: %d admitted in %v, want at most %d", i, n, elapsed, most)
		}
	}
	if total == 0 || swept == 0 {
		t.Errorf("%d admitted and %d swept: nothing was tested", total, swept)
	}
}

// An expired row that no sweep has seen is a bucket as any other; where the sweep deletes
// it, the answer is the same.
func TestLimiterExpiredIsNotAbsent(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	clock := newClock(noon)
	small := limiterAt(pool, PerSecond(1), clock)
	large := limiterAt(pool, PerSecond(1000), clock)
	mustAcquire(t, small, "a", 1)
	clock.advance(time.Hour)
	if d := mustAcquire(t, large, "a", 1); d.Remaining != 0 {
		t.Errorf("an expired bucket of one token holds %d after one was taken, want 0", d.Remaining)
	}
}

func TestDeleteExpired(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	l, clock := newLimiter(pool, PerSecond(10))
	mustAcquire(t, l, "soon", 1)   // full 100 ms after noon
	mustAcquire(t, l, "later", 10) // full 1 s after noon
	never := limiterAt(pool, Policy{Permits: 1, Per: 292 * 8766 * time.Hour, Burst: 1}, clock)
	mustAcquire(t, never, "never", 1)
	for i, step := range []struct {
		before time.Duration // after noon
		want   int64
		left   int64
	}{
		{0, 0, 3},
		{100 * time.Millisecond, 0, 3},
		{100*time.Millisecond + time.Microsecond, 1, 2},
		{time.Second, 0, 2},
		{time.Hour, 1, 1},
		{200 * 8766 * time.Hour, 0, 1},
	} {
		if n, err := s.DeleteExpired(t.Context(), noon.Add(step.before)); n != step.want || err != nil {
			t.Errorf("step %d: DeleteExpired = %d, %v, want %d", i, n, err, step.want)
		}
		if got := count(t, pool, "SELECT count(*) FROM plexsphere.limiter_buckets"); got != step.left {
			t.Errorf("step %d: %d rows are left, want %d", i, got, step.left)
		}
	}
	// Rate budgets are another table.
	mustTake(t, s, ScopeIngestNode, newKey(), 1, Budget{PerSecond: 1, Burst: 10}, noon.Add(-48*time.Hour))
	if n, err := s.DeleteExpired(t.Context(), noon.Add(time.Hour)); n != 0 || err != nil {
		t.Errorf("DeleteExpired = %d, %v, want 0", n, err)
	}
	if _, err := NewStore(unreachable{t}).DeleteExpired(t.Context(), time.Unix(1<<40, 0)); err == nil {
		t.Error("an instant out of range: no error")
	}
	if _, err := NewStore(&failingDB{err: errors.New("gone")}).DeleteExpired(t.Context(), noon); err == nil {
		t.Error("an unreachable database: no error")
	}
}

// P11: more expired rows than one batch, all deleted.
func TestP11DeleteExpiredInBatches(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	const rows = 2*sweepBatch + 17
	if _, err := pool.Exec(t.Context(), fmt.Sprintf(`
		INSERT INTO plexsphere.limiter_buckets
		SELECT sha256(i::text::bytea), 'n', 's', 0, $1::timestamptz, 1, 1, 1, $1::timestamptz
		FROM generate_series(1, %d) AS i`, rows), noon); err != nil {
		t.Fatal(err)
	}
	l, _ := newLimiter(pool, PerSecond(1))
	mustAcquire(t, l, "a", 1)
	if n, err := s.DeleteExpired(t.Context(), noon.Add(time.Microsecond)); err != nil || n != rows {
		t.Errorf("DeleteExpired = %d, %v, want %d", n, err, rows)
	}
	if got := count(t, pool, "SELECT count(*) FROM plexsphere.limiter_buckets"); got != 1 {
		t.Errorf("%d rows are left, want 1", got)
	}
}

// Sweeps and resets run all the while that takers spend expired buckets: what a taker
// debited must not be minted full again by a sweep, and no take fails because the row went
// away under it.
func TestDeleteExpiredAgainstConcurrentTakes(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	const subjects, takers = 30, 8
	for round := range 5 {
		name := func(i int) string { return fmt.Sprint(round, " ", i) }
		// Spent two hours ago, so expired and full by now.
		past := limiterAt(pool, PerSecond(10), newClock(noon.Add(-2*time.Hour)))
		for i := range subjects {
			mustAcquire(t, past, name(i), 10)
		}
		var mu sync.Mutex
		granted := map[string]int64{}
		together(takers+2, func(worker int) {
			if worker >= takers {
				for range 20 {
					if _, err := s.DeleteExpired(t.Context(), noon); err != nil {
						t.Error(err)
					}
				}
				return
			}
			l, _ := newLimiter(pool, PerSecond(10))
			for i := range subjects {
				for range 2 {
					d, err := l.TryAcquire(t.Context(), name(i), 1)
					if err != nil {
						t.Error(err)
					}
					if d.Allowed {
						mu.Lock()
						granted[name(i)]++
						mu.Unlock()
					}
				}
			}
		})
		for i := range subjects {
			if granted[name(i)] != 10 {
				t.Errorf("round %d, subject %d: granted %d, want 10", round, i, granted[name(i)])
			}
		}
	}

	l, _ := newLimiter(pool, PerSecond(10))
	together(6, func(worker int) {
		for range 60 {
			var err error
			if worker%2 == 0 {
				err = l.Reset(t.Context(), "reset")
			} else {
				_, err = l.TryAcquire(t.Context(), "reset", 1)
			}
			if err != nil {
				t.Error(err)
			}
		}
	})
}

package store

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// ownServer returns a Postgres of the test's own, with the schema.
func ownServer(t *testing.T) *pgtest.Server {
	t.Helper()
	server, err := pgtest.Start(t.Context(), pgtest.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := Migrate(t.Context(), server.DSN("postgres"), DefaultSchema); err != nil {
		t.Fatal(err)
	}
	return server
}

// A charge is what a decision took from one bucket at one instant of true time.
type charge struct {
	at    time.Time
	units float64
}

// maxSkew is how far a replica's clock may be from the truth, so that two of them are at
// most twice that apart.
const maxSkew = 5 * time.Minute

// A history is one run of some replicas whose clocks differ, on buckets and windows of its
// own, with policies that change.
type history struct {
	t        *testing.T
	r        *rand.Rand
	stores   []*Store
	batchers []*Batcher
	skews    []time.Duration
	keys     []Key
	limiters []policy.CounterID
	holder   policy.Consumer
	budgets  []Budget
	policies []policy.LimiterPolicy
	limits   []int64

	mu      sync.Mutex
	buckets map[string][]charge
	used    map[windowID]int64
}

func newHistory(t *testing.T, seed uint64, pools []*pgxpool.Pool, batchers []*Batcher) *history {
	t.Helper()
	h := &history{
		t: t, batchers: batchers, r: rand.New(rand.NewPCG(seed, 1)),
		keys: []Key{newKey(), newKey()}, holder: consumer(fmt.Sprint("law ", seed)),
		buckets: map[string][]charge{}, used: map[windowID]int64{},
	}
	for range 2 {
		h.limiters = append(h.limiters, policy.CounterID(slices.Concat(randomBytes(h.r), randomBytes(h.r))))
	}
	// The law allows what the spread of the clocks refills, so that most are close together:
	// else it would allow anything.
	skew := []time.Duration{0, 2 * time.Second, 10 * time.Second, maxSkew}[h.r.IntN(4)]
	for _, pool := range pools {
		h.stores = append(h.stores, NewStore(pool))
		h.skews = append(h.skews, time.Duration(h.r.Int64N(int64(2*skew)+1))-skew)
	}
	for range 2 {
		rate := []float64{0.5, 1, 7, 1.0 / 3}[h.r.IntN(4)]
		h.budgets = append(h.budgets, Budget{PerSecond: rate, Burst: min(3600*rate, 1+float64(h.r.IntN(40)))})
		h.policies = append(h.policies, policy.LimiterPolicy{
			Permits: 1 + h.r.Int64N(5), Per: time.Duration(1+h.r.IntN(90)) * time.Second, Burst: 1 + h.r.Int64N(20),
		})
		h.limits = append(h.limits, 1+h.r.Int64N(60))
	}
	return h
}

func randomBytes(r *rand.Rand) []byte {
	b := make([]byte, 16)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

// request draws a request of a replica whose clock shows now, under one of the policies.
func (h *history) request(r *rand.Rand, now time.Time) policy.Request {
	version := r.IntN(2)
	req := policy.Request{Now: now}
	for range r.IntN(3) {
		req.Budgets = append(req.Budgets, policy.BudgetDebit{
			Scope: ScopeIngestNode, Key: h.keys[r.IntN(2)], Budget: h.budgets[version], Cost: r.Int64N(12),
		})
	}
	for range r.IntN(3) {
		req.Limiters = append(req.Limiters, policy.LimiterDebit{
			Bucket: policy.LimiterBucket{ID: h.limiters[r.IntN(2)]}, Policy: h.policies[version], Cost: r.Int64N(6),
		})
	}
	if r.IntN(2) == 0 {
		req.Quotas = append(req.Quotas, quotaDebit(h.holder, []quota.Budget{
			{Unit: quota.Minute, Limit: h.limits[version]}, {Unit: quota.Day, Limit: 3 * h.limits[version]},
		}, r.Int64N(10)))
	}
	return req
}

// note adds what a decision charged at an instant of true time; back is -1 for a refund of it.
func (h *history) note(at time.Time, req policy.Request, v policy.Verdict, back int64) {
	if !v.Allowed {
		return // what a month leaves spent in the day only lowers what is admitted
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, d := range req.Budgets {
		id := d.Key.String()
		h.buckets[id] = append(h.buckets[id], charge{at, float64(back * d.Cost)})
	}
	for _, d := range req.Limiters {
		id := fmt.Sprintf("%x", d.Bucket.ID)
		h.buckets[id] = append(h.buckets[id], charge{at, float64(back * d.Cost)})
	}
	for _, d := range req.Quotas {
		for _, b := range d.Budgets {
			h.used[window(d.Counter, b, v.At)] += back * d.Cost
		}
	}
}

// step is what one worker does at one instant of true time.
func (h *history) step(r *rand.Rand, at time.Time) {
	replica := r.IntN(len(h.stores))
	s, now := h.stores[replica], at.Add(h.skews[replica])
	if r.IntN(5) == 0 { // a restart
		s = NewStore(s.db)
	}
	switch r.IntN(6) {
	case 0:
		d := policy.BudgetDebit{Scope: ScopeIngestNode, Key: h.keys[r.IntN(2)], Budget: h.budgets[r.IntN(2)], Cost: r.Int64N(12)}
		ok, err := s.Take(h.t.Context(), d.Scope, d.Key, float64(d.Cost), d.Budget, now)
		if err != nil {
			h.t.Error(err)
		}
		h.note(at, policy.Request{Budgets: []policy.BudgetDebit{d}}, policy.Verdict{Allowed: ok}, 1)
	case 1:
		// Its clock may show up to 2 × maxSkew more than the one that stamped the rows.
		if _, err := s.DeleteIdle(h.t.Context(), now.Add(-policy.MaxRefill*time.Second-2*maxSkew)); err != nil {
			h.t.Error(err)
		}
		if _, err := s.DeleteExpired(h.t.Context(), now.Add(-2*maxSkew)); err != nil {
			h.t.Error(err)
		}
	case 2, 3:
		req := h.request(r, now)
		decide := s.Decide
		if r.IntN(2) == 0 {
			decide = h.batchers[replica].Decide
		}
		v, err := decide(h.t.Context(), req)
		if err != nil {
			h.t.Error(err)
			return
		}
		h.note(at, req, v, 1)
		if v.Allowed && r.IntN(3) == 0 {
			h.refund(s, at, req, v)
		}
	default:
		reqs := make([]policy.Request, 1+r.IntN(4))
		for i := range reqs {
			reqs[i] = h.request(r, now)
		}
		verdicts, err := s.decide(h.t.Context(), reqs)
		if err != nil {
			h.t.Error(err)
			return
		}
		for i := range reqs {
			h.note(at, reqs[i], verdicts[i], 1)
		}
	}
}

// refund gives back all that a decision charged.
func (h *history) refund(s *Store, at time.Time, charged policy.Request, v policy.Verdict) {
	req := policy.Request{Now: charged.Now}
	for _, d := range charged.Budgets {
		d.Cost = -d.Cost
		req.Budgets = append(req.Budgets, d)
	}
	for _, d := range charged.Limiters {
		d.Cost = -d.Cost
		req.Limiters = append(req.Limiters, d)
	}
	for _, d := range charged.Quotas {
		d.Cost, d.ChargedAt = -d.Cost, v.At
		req.Quotas = append(req.Quotas, d)
	}
	refunded, err := s.Decide(h.t.Context(), req)
	if err != nil || !refunded.Allowed {
		h.t.Errorf("a refund: %+v, %v", refunded, err)
	}
	h.note(at, charged, v, -1)
}

// check holds every bucket and window of the history against law 1.
func (h *history) check(seed uint64) {
	spread := (slices.Max(h.skews) - slices.Min(h.skews)).Seconds()
	bound := func(id string, burst, rate float64) {
		charges := h.buckets[id]
		slices.SortStableFunc(charges, func(a, b charge) int { return a.at.Compare(b.at) })
		for i := range charges {
			if i > 0 && charges[i].at.Equal(charges[i-1].at) {
				continue // spans begin with an instant's first charge
			}
			net := 0.0
			for j := i; j < len(charges); j++ {
				net += charges[j].units
				if j+1 < len(charges) && charges[j+1].at.Equal(charges[j].at) {
					continue
				}
				d := charges[j].at.Sub(charges[i].at).Seconds()
				if most := burst + rate*(d+spread); net > most+1e-6 {
					h.t.Errorf("history %d: bucket %s admitted %v within %v s, and the law allows %v", seed, id, net, d, most)
					return
				}
			}
		}
	}
	for _, key := range h.keys {
		bound(key.String(), max(h.budgets[0].Burst, h.budgets[1].Burst), max(h.budgets[0].PerSecond, h.budgets[1].PerSecond))
	}
	rate := func(p policy.LimiterPolicy) float64 { return float64(p.Permits) / p.Per.Seconds() }
	for _, id := range h.limiters {
		bound(fmt.Sprintf("%x", id), float64(max(h.policies[0].Burst, h.policies[1].Burst)), max(rate(h.policies[0]), rate(h.policies[1])))
	}
	for id, used := range h.used {
		most := max(h.limits[0], h.limits[1])
		if id.unit == quota.Day {
			most *= 3
		}
		if used > most {
			h.t.Errorf("history %d: %v admitted %d, and its limit is %d", seed, id, used, most)
		}
	}
}

// Law 1, on thousands of random histories: replicas on several pools whose clocks are up to
// five minutes off take, decide, decide in batches and in company, refund, sweep and start anew, under two
// policies at once as in a roll-out. In no span of true time is more admitted than the law
// allows.
func TestLaw1NeverOverAdmits(t *testing.T) {
	t.Parallel()

	const histories, rounds, workers = 1000, 12, 2
	var admitted atomic.Int64
	var next atomic.Uint64
	// Each runs its histories in a database of its own: a sweep sees all rows there are, and
	// the time of another history is not its own.
	dsns := []string{pgtest.NewDatabase(t), pgtest.NewDatabase(t)}
	together(len(dsns), func(i int) {
		pools := []*pgxpool.Pool{newPool(t, dsns[i], 4), newPool(t, dsns[i], 4), newPool(t, dsns[i], 4)}
		var batchers []*Batcher
		for _, pool := range pools {
			batchers = append(batchers, startBatcher(t, pool, BatcherConfig{Timeout: 20 * time.Second}))
		}
		for seed := next.Add(1); seed <= histories && !t.Failed(); seed = next.Add(1) {
			h := newHistory(t, seed, pools, batchers)
			at := noon
			for round := range rounds {
				var group sync.WaitGroup
				for worker := range workers {
					r := rand.New(rand.NewPCG(seed, uint64(2+round*workers+worker)))
					group.Go(func() { h.step(r, at) })
				}
				group.Wait()
				at = at.Add([]time.Duration{0, 0, 0, time.Second, 3 * time.Second, 17 * time.Second, 2 * time.Hour}[h.r.IntN(7)])
			}
			h.check(seed)
			for _, charges := range h.buckets {
				admitted.Add(int64(len(charges)))
			}
		}
	})
	if admitted.Load() < 2*histories {
		t.Errorf("%d charges in %d histories prove little", admitted.Load(), histories)
	}
}

// A ledger is what rows must hold if every verdict told the truth: what was spent of each
// bucket and window at one instant.
type ledger struct {
	mu       sync.Mutex
	buckets  map[Key]int64
	limiters map[policy.CounterID]int64
	windows  map[windowID]int64
}

func newLedger() *ledger {
	return &ledger{buckets: map[Key]int64{}, limiters: map[policy.CounterID]int64{}, windows: map[windowID]int64{}}
}

func (l *ledger) note(req policy.Request, v policy.Verdict) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if v.Allowed {
		for _, d := range req.Budgets {
			l.buckets[d.Key] += d.Cost
		}
		for _, d := range req.Limiters {
			l.limiters[d.Bucket.ID] += d.Cost
		}
		for _, d := range req.Quotas {
			for _, b := range d.Budgets {
				l.windows[window(d.Counter, b, v.At)] += d.Cost
			}
		}
		return
	}
	for i := range req.Budgets {
		if !v.Budgets[i].Covered {
			return
		}
	}
	for i := range req.Limiters {
		if !v.Limiters[i].Covered {
			return
		}
	}
	for i, d := range req.Quotas {
		if denied := v.Quotas[i].Denied; denied >= 0 {
			for _, b := range d.Budgets[:denied] {
				l.windows[window(d.Counter, b, v.At)] += d.Cost
			}
			return
		}
	}
}

// Traffic draws requests over a few shared buckets and windows, at one instant.
type traffic struct {
	keys     []Key
	limiters []policy.CounterID
	holders  []policy.Consumer
	budget   Budget
	policy   policy.LimiterPolicy
	windows  []quota.Budget
}

func newTraffic(name string, size int64) *traffic {
	l := &traffic{
		budget:  Budget{PerSecond: 1e6, Burst: float64(size)},
		policy:  policy.LimiterPolicy{Permits: 1000, Per: time.Second, Burst: size},
		windows: dayMonth(size, size-size/8),
	}
	for i := range 20 {
		l.keys = append(l.keys, newKey())
		l.holders = append(l.holders, consumer(fmt.Sprint(name, i)))
		id := consumer(fmt.Sprint(name, "limiter", i)).ID
		l.limiters = append(l.limiters, id)
	}
	return l
}

func (l *traffic) request(r *rand.Rand) policy.Request {
	req := policy.Request{Now: noon}
	for range 1 + r.IntN(3) {
		req.Budgets = append(req.Budgets, policy.BudgetDebit{
			Scope: ScopeIngestNode, Key: l.keys[r.IntN(len(l.keys))], Budget: l.budget, Cost: r.Int64N(30),
		})
	}
	for range r.IntN(3) {
		req.Limiters = append(req.Limiters, policy.LimiterDebit{
			Bucket: policy.LimiterBucket{ID: l.limiters[r.IntN(len(l.limiters))]}, Policy: l.policy, Cost: r.Int64N(30),
		})
	}
	for range r.IntN(3) {
		req.Quotas = append(req.Quotas, quotaDebit(l.holders[r.IntN(len(l.holders))], l.windows, r.Int64N(30)))
	}
	return req
}

// compare holds the rows against what was surely spent, and what perhaps was.
func (l *traffic) compare(t *testing.T, db DBTX, sure, perhaps *ledger) {
	t.Helper()
	within := func(what string, got, sure, perhaps int64) {
		if got < sure || got > sure+perhaps {
			t.Errorf("%s: %d is spent, and %d to %d were admitted", what, got, sure, sure+perhaps)
		}
	}
	for _, key := range l.keys {
		tokens, _, ok := bucketRow(t, db, ScopeIngestNode, key)
		if ok {
			within("bucket "+key.String(), int64(l.budget.Burst-tokens), sure.buckets[key], perhaps.buckets[key])
		}
	}
	for _, id := range l.limiters {
		spent := count(t, db, `SELECT coalesce(sum(burst * period_us - level), 0)::bigint FROM plexsphere.limiter_buckets WHERE id = $1`, id[:])
		period := l.policy.Per.Microseconds()
		if spent%period != 0 {
			t.Errorf("limiter %x: %d token-microseconds are spent, no whole number of tokens", id, spent)
		}
		within(fmt.Sprintf("limiter %x", id), spent/period, sure.limiters[id], perhaps.limiters[id])
	}
	for _, holder := range l.holders {
		for _, b := range l.windows {
			w := window(holder.ID, b, noon)
			got := count(t, db, `SELECT coalesce(sum(used), 0)::bigint FROM plexsphere.quota_counters
				WHERE counter = $1 AND unit = $2 AND window_start = $3`, holder.ID[:], b.Unit.String(), time.Unix(w.start, 0))
			within(fmt.Sprintf("%x by the %s", holder.ID, b.Unit), got, sure.windows[w], perhaps.windows[w])
		}
	}
}

// refundOf gives back all of a request.
func refundOf(req policy.Request) policy.Request {
	back := policy.Request{Now: req.Now}
	for _, d := range req.Budgets {
		d.Cost = -d.Cost
		back.Budgets = append(back.Budgets, d)
	}
	for _, d := range req.Limiters {
		d.Cost = -d.Cost
		back.Limiters = append(back.Limiters, d)
	}
	for _, d := range req.Quotas {
		d.Cost = -d.Cost
		back.Quotas = append(back.Quotas, d)
	}
	return back
}

// P01: 64 workers on overlapping keys, at one instant, for a minute: singly, in batches and
// through the batcher, with refunds. No deadlock, and what was admitted less refunds is what
// the rows say.
func TestP01LoadForAMinute(t *testing.T) {
	t.Parallel()

	const workers, duration = 64, time.Minute
	s, pool := setup(t)
	batcher := NewBatcher(s, BatcherConfig{Statements: 2, Timeout: 30 * time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = batcher.Run(ctx) })
	l, sure := newTraffic("minute", 10_000), newLedger()
	end := time.Now().Add(duration)
	var decided, refused atomic.Int64
	together(workers, func(worker int) {
		r := rand.New(rand.NewPCG(3, uint64(worker)))
		for time.Now().Before(end) && !t.Failed() {
			reqs := []policy.Request{l.request(r)}
			var verdicts []policy.Verdict
			var err error
			switch worker % 4 {
			case 0:
				reqs = append(reqs, l.request(r), l.request(r))
				verdicts, err = s.decide(t.Context(), reqs)
			case 1:
				var v policy.Verdict
				v, err = s.Decide(t.Context(), reqs[0])
				verdicts = []policy.Verdict{v}
			default:
				var v policy.Verdict
				v, err = batcher.Decide(t.Context(), reqs[0])
				verdicts = []policy.Verdict{v}
			}
			if err != nil {
				t.Error(err)
				return
			}
			for i, v := range verdicts {
				sure.note(reqs[i], v)
				decided.Add(1)
				if !v.Allowed {
					refused.Add(1)
				}
			}
			if verdicts[0].Allowed && r.IntN(20) == 0 {
				back := refundOf(reqs[0])
				v, err := s.Decide(t.Context(), back)
				if err != nil || !v.Allowed {
					t.Errorf("a refund: %+v, %v", v, err)
				}
				sure.note(back, v)
			}
		}
	})
	cancel()
	running.Wait()
	l.compare(t, pool, sure, newLedger())
	if n := count(t, pool, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
	t.Logf("%d decisions, %d refused", decided.Load(), refused.Load())
	if refused.Load() == 0 {
		t.Error("nothing was refused: the load proves little")
	}
}

// Law 4, P12: Postgres is killed twenty times in the middle of a load. Every admitted unit is in
// the rows; beyond them at most what was being decided when it died.
func TestLaw4KilledTwentyTimes(t *testing.T) {
	t.Parallel()

	const workers, kills = 64, 20
	server := ownServer(t)
	pool := newPool(t, server.DSN("postgres"), 4)
	s := NewStore(pool)
	batcher := NewBatcher(s, BatcherConfig{Statements: 2, Timeout: 10 * time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { _ = batcher.Run(ctx) })
	l, sure, perhaps := newTraffic("kill", 1<<30), newLedger(), newLedger()
	var stop atomic.Bool
	var decided, failed atomic.Int64
	running.Go(func() {
		together(workers, func(worker int) {
			r := rand.New(rand.NewPCG(4, uint64(worker)))
			for !stop.Load() {
				req := l.request(r)
				v, err := batcher.Decide(t.Context(), req)
				if err != nil {
					failed.Add(1)
					perhaps.note(req, policy.Verdict{Allowed: true, At: noon})
					time.Sleep(20 * time.Millisecond)
					continue
				}
				decided.Add(1)
				sure.note(req, v)
			}
		})
	})
	for i := range kills {
		before := decided.Load()
		waitUntil(t, "decisions between the kills", func() bool { return decided.Load() > before+50 || t.Failed() })
		if err := server.Kill(t.Context()); err != nil {
			t.Errorf("kill %d: %v", i, err)
			break
		}
		if err := server.Restart(t.Context()); err != nil {
			t.Errorf("restart %d: %v", i, err)
			break
		}
	}
	before := decided.Load()
	waitUntil(t, "decisions after the last kill", func() bool { return decided.Load() > before || t.Failed() })
	stop.Store(true)
	cancel()
	running.Wait()
	waitUntil(t, "the server to answer", func() bool { return pool.Ping(t.Context()) == nil })
	l.compare(t, pool, sure, perhaps)
	t.Logf("%d decisions, %d unknown", decided.Load(), failed.Load())
	if failed.Load() == 0 {
		t.Error("no decision met a kill: the load proves nothing")
	}
}

package store

import (
	"context"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// Law 1 at the edge of what levels hold: what is asked of a bucket adds up to more than 64
// bits, and is refused rather than wrapped into a gift.
func TestLaw1LargestDemands(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	p := Policy{Permits: 1, Per: 512 * time.Microsecond, Burst: policy.MaxUnits} // a capacity of 2^62
	d := policy.LimiterDebit{Bucket: policy.LimiterBucket{ID: policy.CounterID{1}}, Policy: p, Cost: p.Burst}
	if v := mustDecide(t, s, policy.Request{Now: noon, Limiters: []policy.LimiterDebit{d}}); !v.Allowed {
		t.Fatalf("the whole burst: %+v", v)
	}
	for _, times := range []int{1, 2, 3, 4} {
		req := policy.Request{Now: noon}
		for range times {
			req.Limiters = append(req.Limiters, d)
		}
		if v := mustDecide(t, s, req); v.Allowed || v.Limiters[0].Level != 0 {
			t.Errorf("%d more at the same instant: %+v, want refused", times, v)
		}
	}

	// The capacity and the cost at their largest, with a refill as large.
	p = PerSecond(policy.MaxLevel / 1_000_000)
	d = policy.LimiterDebit{Bucket: policy.LimiterBucket{ID: policy.CounterID{2}}, Policy: p, Cost: p.Burst}
	for i, want := range []bool{true, false} {
		if v := mustDecide(t, s, policy.Request{Now: noon, Limiters: []policy.LimiterDebit{d}}); v.Allowed != want {
			t.Errorf("take %d of a whole burst: %+v, want %v", i, v, want)
		}
	}

	limits := []quota.Budget{{Key: quota.DailyKey, Unit: quota.Day, Limit: math.MaxInt64}}
	for i, step := range []struct {
		cost   int64
		denied int
	}{{1, -1}, {6e18, -1}, {4e18, 0}, {math.MaxInt64, 0}} {
		r, err := s.Reserve(t.Context(), "largest", limits, step.cost, noon)
		if err != nil || r.Denied != step.denied {
			t.Errorf("reservation %d: %+v, %v, want denied %d", i, r, err, step.denied)
		}
	}
}

// Two replicas open new windows at each second, side by side and again and again. They meet on
// them, and no request is unavailable for that.
func TestReplicasOpenWindowsTogether(t *testing.T) {
	t.Parallel()

	const replicas, callers, keys, duration = 2, 32, 200, 6 * time.Second
	dsn := pgtest.NewDatabase(t)
	ctx, cancel := context.WithCancel(t.Context())
	var callersDone, running sync.WaitGroup
	var decided atomic.Int64
	end := time.Now().Add(duration)
	for range replicas {
		b := NewBatcher(NewStore(newPool(t, dsn, 4)), BatcherConfig{Timeout: 20 * time.Second})
		running.Go(func() { _ = b.Run(ctx) })
		for range callers {
			callersDone.Go(func() {
				for time.Now().Before(end) {
					_, err := b.Decide(ctx, policy.Request{Now: time.Now(), Quotas: []policy.QuotaDebit{{
						Counter: policy.CounterID{1, byte(rand.N(keys))}, Cost: 1,
						Budgets: []quota.Budget{{Key: "second", Unit: quota.Second, Limit: 1 << 40}},
					}}})
					if err != nil {
						t.Error(err)
						return
					}
					decided.Add(1)
				}
			})
		}
	}
	callersDone.Wait()
	cancel()
	running.Wait()
	if decided.Load() < 1000 {
		t.Errorf("%d decisions prove little", decided.Load())
	}
}

// A row that somebody holds locked, in a transaction of their own, costs whoever asks for it an
// error, and nobody else.
func TestLockedRowSparesOthers(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	b := startBatcher(t, pool, BatcherConfig{Timeout: 20 * time.Second})
	budget, locked := Budget{PerSecond: 100, Burst: 1000}, newKey()
	mustTake(t, s, ScopeIngestNode, locked, 1, budget, noon)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var n int
	if err := tx.QueryRow(t.Context(), "SELECT 1 FROM plexsphere.rate_budgets WHERE bucket_key = $1 FOR UPDATE", pgtype.UUID{Bytes: locked, Valid: true}).Scan(&n); err != nil {
		t.Fatal(err)
	}
	var stopped atomic.Bool
	var failures atomic.Int64
	var asking sync.WaitGroup
	asking.Go(func() {
		for !stopped.Load() {
			if _, err := b.Decide(t.Context(), oneDebit(locked, 1, budget)); err != nil {
				failures.Add(1)
			}
		}
	})
	var others sync.WaitGroup
	for range 19 {
		others.Go(func() {
			for range 10 {
				if v, err := b.Decide(t.Context(), oneDebit(newKey(), 1, budget)); err != nil || !v.Allowed {
					t.Errorf("another key: %+v, %v", v, err)
				}
			}
		})
	}
	others.Wait()
	waitUntil(t, "the locked row to fail its caller", func() bool { return failures.Load() > 0 })
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	stopped.Store(true)
	asking.Wait()
	if v, err := b.Decide(t.Context(), oneDebit(locked, 1, budget)); err != nil || !v.Allowed {
		t.Errorf("once it is free: %+v, %v", v, err)
	}
}

package store

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/weir-dev/weir/policy"
)

// gate lets statements through when told, and counts them.
type gate struct {
	DBTX

	statements atomic.Int64
	entered    chan struct{} // a statement has come
	open       chan struct{} // closed, or a token a statement
}

func (g *gate) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	g.statements.Add(1)
	select {
	case g.entered <- struct{}{}:
	default:
	}
	<-g.open
	return g.DBTX.QueryRow(ctx, sql, args...)
}

func newGate(db DBTX) *gate {
	return &gate{DBTX: db, entered: make(chan struct{}, 1), open: make(chan struct{})}
}

// startBatcher runs a batcher until the test ends.
func startBatcher(t *testing.T, db DBTX, config BatcherConfig) *Batcher {
	t.Helper()
	b := NewBatcher(NewStore(db), config)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- b.Run(ctx) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return b
}

func oneDebit(key Key, cost int64, budget Budget) policy.Request {
	return policy.Request{Now: noon, Budgets: []policy.BudgetDebit{
		{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: cost},
	}}
}

// waitQueued waits until n requests are in the queue.
func waitQueued(t *testing.T, b *Batcher, n int) {
	t.Helper()
	for len(b.queue) < n {
		if t.Context().Err() != nil {
			t.Fatal("the test has ended")
		}
		time.Sleep(time.Millisecond)
	}
}

// What arrives while a statement is in flight goes in the next one, all of it, and the
// bucket is spent to the last unit and not beyond.
func TestBatcherDecidesTogether(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	g := newGate(pool)
	b := startBatcher(t, g, BatcherConfig{Statements: 1})
	key, budget := newKey(), Budget{PerSecond: 1, Burst: 60}

	const callers = 101
	var allowed atomic.Int64
	var group sync.WaitGroup
	call := func() {
		v, err := b.Decide(t.Context(), oneDebit(key, 1, budget))
		if err != nil {
			t.Error(err)
		}
		if v.Allowed {
			allowed.Add(1)
		}
	}
	group.Go(call)
	<-g.entered
	for range callers - 1 {
		group.Go(call)
	}
	waitQueued(t, b, callers-1)
	close(g.open)
	group.Wait()
	if allowed.Load() != 60 {
		t.Errorf("%d of %d requests were allowed, want the 60 that the bucket holds", allowed.Load(), callers)
	}
	if n := g.statements.Load(); n != 2 {
		t.Errorf("%d statements decided %d requests, want 2", n, callers)
	}
}

// In one batch, whoever came first is served first.
func TestBatcherKeepsArrivalOrder(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	g := newGate(pool)
	b := startBatcher(t, g, BatcherConfig{Statements: 1})
	key, budget := newKey(), Budget{PerSecond: 1, Burst: 10}

	var group sync.WaitGroup
	group.Go(func() { _, _ = b.Decide(t.Context(), oneDebit(newKey(), 1, budget)) })
	<-g.entered
	// 4 and 5 fit, 3 does not any more, 1 does.
	want := []bool{true, true, false, true}
	got := make([]bool, len(want))
	for i, cost := range []int64{4, 5, 3, 1} {
		group.Go(func() {
			v, err := b.Decide(t.Context(), oneDebit(key, cost, budget))
			if err != nil {
				t.Error(err)
			}
			got[i] = v.Allowed
		})
		waitQueued(t, b, i+1)
	}
	close(g.open)
	group.Wait()
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("request %d: allowed %v, want %v", i, got[i], want[i])
		}
	}
}

// PEERS C78: a caller that has given up is not charged, if it had not reached the
// database; and the queue has an end.
func TestC78BatcherHonoursDeadlines(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	g := newGate(pool)
	b := startBatcher(t, g, BatcherConfig{Statements: 1, Queue: 2})
	key, budget := newKey(), Budget{PerSecond: 1, Burst: 10}

	var group sync.WaitGroup
	group.Go(func() { _, _ = b.Decide(t.Context(), oneDebit(newKey(), 1, budget)) })
	<-g.entered
	gone, leave := context.WithCancel(t.Context())
	group.Go(func() {
		if _, err := b.Decide(gone, oneDebit(key, 10, budget)); !errors.Is(err, context.Canceled) {
			t.Errorf("a caller that left: %v, want its context's error", err)
		}
	})
	waitQueued(t, b, 1)
	group.Go(func() {
		v, err := b.Decide(t.Context(), oneDebit(key, 7, budget))
		if err != nil || !v.Allowed {
			t.Errorf("the one behind it: %v, %v, want allowed: nothing was charged before", v, err)
		}
	})
	waitQueued(t, b, 2)
	if _, err := b.Decide(t.Context(), oneDebit(key, 1, budget)); !errors.Is(err, ErrQueueFull) {
		t.Errorf("a third in a queue of two: %v, want ErrQueueFull", err)
	}
	leave()
	close(g.open)
	group.Wait()
}

// faulty refuses every statement that holds the bad request, as the database refuses
// data that it cannot take.
type faulty struct {
	DBTX

	bad Key
}

func (f *faulty) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if slices.Contains(keysOf(args), f.bad) {
		return failingRow{&pgconn.PgError{Code: "22003", Message: "value out of range"}}
	}
	return f.DBTX.QueryRow(ctx, sql, args...)
}

// One request that the database refuses does not take its neighbours down.
func TestBatcherIsolatesABadRequest(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	bad := newKey()
	g := newGate(&faulty{DBTX: pool, bad: bad})
	b := startBatcher(t, g, BatcherConfig{Statements: 1})
	budget := Budget{PerSecond: 1, Burst: 10}

	var group sync.WaitGroup
	group.Go(func() { _, _ = b.Decide(t.Context(), oneDebit(newKey(), 1, budget)) })
	<-g.entered
	for i := range 5 {
		group.Go(func() {
			key := newKey()
			if i == 2 {
				key = bad
			}
			v, err := b.Decide(t.Context(), oneDebit(key, 1, budget))
			if i == 2 && err == nil {
				t.Error("the bad request was decided")
			}
			if i != 2 && (err != nil || !v.Allowed) {
				t.Errorf("a neighbour: %v, %v, want allowed", v, err)
			}
		})
	}
	waitQueued(t, b, 5)
	close(g.open)
	group.Wait()
}

// A dead database fails the whole batch, once.
func TestBatcherOnADeadDatabase(t *testing.T) {
	t.Parallel()

	down := errors.New("connection refused")
	db := &failingDB{err: down}
	b := startBatcher(t, db, BatcherConfig{})
	if _, err := b.Decide(t.Context(), oneDebit(newKey(), 1, Budget{PerSecond: 1, Burst: 1})); !errors.Is(err, down) {
		t.Errorf("Decide = %v, want %v", err, down)
	}
	if _, err := b.Decide(t.Context(), oneDebit(Key{}, 1, Budget{PerSecond: 1, Burst: 1})); !errors.Is(err, ErrZeroKey) {
		t.Errorf("a zero key: %v, want ErrZeroKey", err)
	}
	if db.queries != 1 {
		t.Errorf("%d queries, want 1", db.queries)
	}
}

// keysOf finds the buckets among a statement's arguments.
func keysOf(args []any) []Key {
	var keys []Key
	for _, arg := range args {
		switch arg := arg.(type) {
		case [16]byte: // a lone request's
			keys = append(keys, arg)
		case []pgtype.UUID:
			for _, u := range arg {
				keys = append(keys, u.Bytes)
			}
		}
	}
	return keys
}

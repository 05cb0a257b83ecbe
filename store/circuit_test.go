package store

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
)

// startServer starts a Postgres of the test's own, with the schema.
func startServer(t *testing.T, parameters map[string]string) *pgtest.Server {
	t.Helper()
	server, err := pgtest.Start(t.Context(), pgtest.Config{Parameters: parameters})
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

func mustConnect(t *testing.T, dsn string) *pgxpool.Pool {
	t.Helper()
	pool, err := Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// oneUnit spends one unit of a bucket that holds a million and hardly refills.
func oneUnit(key Key) policy.Request { return oneDebit(key, 1, Budget{PerSecond: 1000, Burst: 1e6}) }

// spent is what has been taken of a bucket that oneUnit spends from.
func spent(t *testing.T, db DBTX, key Key) int64 {
	t.Helper()
	tokens, _, ok := bucketRow(t, db, ScopeIngestNode, key)
	if !ok {
		return 0
	}
	return int64(1e6 - tokens)
}

// patience is how long callers wait for a decision, and slack by how much later a busy
// machine may tell them.
const (
	patience = 250 * time.Millisecond
	slack    = 2 * time.Second
)

// impatient decides with a deadline of 250 ms, and fails the test when the answer
// comes late.
func impatient(t *testing.T, b *Batcher, key Key) (allowed bool, err error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	start := time.Now()
	v, err := b.Decide(ctx, oneUnit(key))
	if took := time.Since(start); took > patience+slack {
		t.Errorf("a caller with a deadline of %v got its answer after %v: %v", patience, took, err)
	}
	return v.Allowed, err
}

// load makes callers decide one after the other until stop is called, which returns how
// many decisions were admitted.
func load(t *testing.T, b *Batcher, key Key, callers int) (stop func() int64) {
	t.Helper()
	var admitted atomic.Int64
	var stopped atomic.Bool
	var group sync.WaitGroup
	for range callers {
		group.Go(func() {
			for !stopped.Load() {
				allowed, err := impatient(t, b, key)
				if allowed {
					admitted.Add(1)
				}
				if err != nil {
					time.Sleep(time.Millisecond)
				}
			}
		})
	}
	var once sync.Once
	end := func() int64 {
		once.Do(func() {
			stopped.Store(true)
			group.Wait()
		})
		return admitted.Load()
	}
	t.Cleanup(func() { end() })
	return end
}

// C76: a Postgres that swallows everything, or stands still, opens the circuit: callers are
// answered in time, at once after that; nothing piles up; and when it is back, so are
// decisions, without a restart.
func TestC76CircuitOpensOnSilence(t *testing.T) {
	t.Parallel()

	server := startServer(t, nil)
	network, dsn := newProxy(t, server.DSN("postgres"))
	direct := mustConnect(t, server.DSN("postgres"))
	pid := int(count(t, direct, "SELECT split_part(pg_read_file('postmaster.pid'), chr(10), 1)::bigint"))

	pool := mustConnect(t, dsn+"&pool_max_conns=2")
	b := startBatcher(t, pool, BatcherConfig{})
	for _, silence := range []struct {
		name       string
		begin, end func()
	}{
		{
			"black hole",
			func() { network.set(true, false) },
			func() { network.set(false, false) },
		},
		{
			"standstill",
			func() { signalAll(t, pid, syscall.SIGSTOP) },
			func() { signalAll(t, pid, syscall.SIGCONT) },
		},
	} {
		t.Run(silence.name, func(t *testing.T) {
			key := newKey()
			stop := load(t, b, key, 50)
			waitUntil(t, "decisions", func() bool {
				tokens, _, ok := bucketRow(t, direct, ScopeIngestNode, key)
				return ok && tokens < 1e6-100
			})
			before, opened := runtime.NumGoroutine(), metric(t, b, "weir_circuit_opened_total")
			silence.begin()
			ended := false
			end := func() {
				if !ended {
					ended = true
					silence.end()
				}
			}
			defer end()
			waitUntil(t, "the circuit to open", func() bool { return metric(t, b, "weir_circuit_open") == 1 })
			// Now nobody waits.
			for range 3 {
				start := time.Now()
				_, err := b.Decide(t.Context(), oneUnit(key))
				if !errors.Is(err, ErrCircuitOpen) {
					t.Errorf("with the circuit open: %v, want ErrCircuitOpen", err)
				}
				if took := time.Since(start); took > slack {
					t.Errorf("with the circuit open an answer took %v", took)
				}
			}
			time.Sleep(5 * time.Second) // long enough for what piles up to show
			if n := len(b.queue); n > 0 {
				t.Errorf("%d requests wait although the circuit is open", n)
			}
			if now := runtime.NumGoroutine(); now > before+60 {
				t.Errorf("%d goroutines, and %d before: they pile up", now, before)
			}
			if metric(t, b, "weir_circuit_open") != 1 {
				t.Error("the circuit closed although nothing answers")
			}
			end()
			start := time.Now()
			waitUntil(t, "decisions to resume", func() bool {
				allowed, err := impatient(t, b, key)
				return err == nil && allowed
			})
			t.Logf("decisions resumed %v after the silence", time.Since(start))
			if metric(t, b, "weir_circuit_opened_total") != opened+1 {
				t.Error("the circuit opened more than once")
			}
			// Each admission is a charge; a charge whose answer was lost may stand.
			if admitted := stop() + 1; spent(t, direct, key) < admitted {
				t.Errorf("%d were admitted, and %d are charged", admitted, spent(t, direct, key))
			}
		})
	}
}

// signalAll sends a signal to a postmaster and all its processes.
func signalAll(t *testing.T, postmaster int, sig syscall.Signal) {
	t.Helper()
	pids := []int{postmaster}
	for _, pid := range processes(t) {
		if pid.parent == postmaster {
			pids = append(pids, pid.pid)
		}
	}
	for _, pid := range pids {
		if err := syscall.Kill(pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
}

// An open circuit closes only on a server that may be written to.
func TestCircuitProbesForWriting(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	down := &faultyDB{DBTX: pool}
	b := startBatcher(t, down, BatcherConfig{})
	key := newKey()
	down.set(&pgconn.PgError{Code: "57P03", Message: "the database system is starting up"})
	if _, err := b.Decide(t.Context(), oneUnit(key)); errors.Is(err, ErrCircuitOpen) {
		t.Errorf("the first loss: %v, want the database's own error", err)
	}
	if metric(t, b, "weir_circuit_open") != 0 {
		t.Error("one lost connection opened the circuit")
	}
	_, _ = b.Decide(t.Context(), oneUnit(key))
	if _, err := b.Decide(t.Context(), oneUnit(key)); !errors.Is(err, ErrCircuitOpen) {
		t.Errorf("after two losses: %v, want ErrCircuitOpen", err)
	}
	down.set(nil)
	waitUntil(t, "the circuit to close", func() bool { return metric(t, b, "weir_circuit_open") == 0 })
	if v, err := b.Decide(t.Context(), oneUnit(key)); err != nil || !v.Allowed {
		t.Errorf("after it closed: %+v, %v", v, err)
	}

	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if _, err := conn.Exec(t.Context(), "SET default_transaction_read_only = on"); err != nil {
		t.Fatal(err)
	}
	if err := NewBatcher(NewStore(conn), BatcherConfig{}).probe(t.Context()); err == nil || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("a probe of a read-only session: %v, want an error that says so", err)
	}
	if _, err := conn.Exec(t.Context(), "RESET default_transaction_read_only"); err != nil {
		t.Fatal(err)
	}
}

// What an error says of the database. What it answers to one statement, it may answer
// otherwise to the next, and opens no circuit.
func TestFailureOf(t *testing.T) {
	t.Parallel()

	for code, want := range map[string]failure{
		"22003": answered, "23514": answered, "40001": answered, "40P01": answered, "55P03": answered,
		"57014": answered, "42883": answered, "XX000": answered, "": answered,
		"25006": lost, "57P01": lost, "57P02": lost, "57P03": lost, "08006": lost, "53300": lost,
	} {
		if got := failureOf(fmt.Errorf("deciding: %w", &pgconn.PgError{Code: code})); got != want {
			t.Errorf("%q: %v, want %v", code, got, want)
		}
	}
	for _, tc := range []struct {
		err  error
		want failure
	}{
		{nil, answered},
		{fmt.Errorf("x: %w", errPanicked), answered},
		{fmt.Errorf("timeout: %w", context.DeadlineExceeded), silent},
		{&net.OpError{Op: "read", Err: syscall.ECONNRESET}, lost},
	} {
		if got := failureOf(tc.err); got != tc.want {
			t.Errorf("%v: %v, want %v", tc.err, got, tc.want)
		}
	}
}

// panicky panics on a statement that holds the bad bucket.
type panicky struct {
	DBTX

	bad Key
}

func (p *panicky) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	for _, key := range keysOf(args) {
		if key == p.bad {
			panic("a bug")
		}
	}
	return p.DBTX.QueryRow(ctx, sql, args...)
}

// A panic costs its batch, and neither the process nor what comes after.
func TestBatcherOutlivesAPanic(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	bad, good := newKey(), newKey()
	b := startBatcher(t, &panicky{DBTX: pool, bad: bad}, BatcherConfig{})
	for range 3 {
		if v, err := b.Decide(t.Context(), oneUnit(bad)); err == nil || v.Allowed || !strings.Contains(err.Error(), "a bug") {
			t.Errorf("a decision that panics: %+v, %v, want an error that tells", v, err)
		}
		if v, err := b.Decide(t.Context(), oneUnit(good)); err != nil || !v.Allowed {
			t.Errorf("the next one: %+v, %v, want allowed", v, err)
		}
	}
}

// A statement has a bounded number of limits, whatever its requests bring.
func TestBatcherBoundsLimits(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	g := newGate(pool)
	b := startBatcher(t, g, BatcherConfig{Statements: 1, MaxLimits: 10})
	budget := Budget{PerSecond: 1, Burst: 10}
	request := func(limits int) policy.Request {
		req := policy.Request{Now: noon}
		for range limits {
			req.Budgets = append(req.Budgets, oneDebit(newKey(), 1, budget).Budgets...)
		}
		return req
	}
	var group sync.WaitGroup
	decide := func(limits int) {
		group.Go(func() {
			if v, err := b.Decide(t.Context(), request(limits)); err != nil || !v.Allowed {
				t.Errorf("%d limits: %v, %v", limits, v.Allowed, err)
			}
		})
	}
	decide(1)
	<-g.entered
	for i, limits := range []int{4, 6, 1, 25, 3, 3, 4} { // 4+6 | 1 | 25 | 3+3+4
		decide(limits)
		waitQueued(t, b, i+1)
	}
	close(g.open)
	group.Wait()
	if n := g.statements.Load(); n != 5 {
		t.Errorf("%d statements, want 5", n)
	}
	if got := metric(t, b, "weir_batch_requests"); got != 5 {
		t.Errorf("%v batches were counted, want 5", got)
	}
}

// limitsOf counts shadows and all windows.
func TestLimitsOf(t *testing.T) {
	t.Parallel()

	req := policy.Request{
		Budgets:  make([]policy.BudgetDebit, 2),
		Limiters: make([]policy.LimiterDebit, 3),
		Quotas:   []policy.QuotaDebit{{Budgets: dayMonth(1, 1)}, {Budgets: dayMonth(1, 1)[:1]}},
		Shadows:  []policy.Request{{Budgets: make([]policy.BudgetDebit, 5)}},
	}
	if got := limitsOf(&req); got != 13 {
		t.Errorf("%d limits, want 13", got)
	}
}

// A pool of two serves fifty callers: none fails for want of a connection, through the
// batcher and without it.
func TestPoolOfTwoServesFifty(t *testing.T) {
	t.Parallel()

	pool := newPool(t, pgtest.NewDatabase(t), 2)
	s := NewStore(pool)
	b := startBatcher(t, pool, BatcherConfig{Statements: 2})
	for name, decide := range map[string]func(context.Context, policy.Request) (policy.Verdict, error){
		"store": s.Decide, "batcher": b.Decide,
	} {
		key := newKey()
		together(50, func(int) {
			for range 20 {
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				v, err := decide(ctx, oneUnit(key))
				cancel()
				if err != nil || !v.Allowed {
					t.Errorf("%s: %v, %v, want allowed", name, v.Allowed, err)
				}
			}
		})
		if got := spent(t, pool, key); got != 1000 {
			t.Errorf("%s: %d units were charged for 1000 decisions", name, got)
		}
	}
	if n := pool.Stat().MaxConns(); n != 2 {
		t.Errorf("the pool has %d connections", n)
	}
}

// A row that somebody holds makes a decision unavailable within the bound, charges
// nothing, and opens no circuit.
func TestLockedRow(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	b := startBatcher(t, pool, BatcherConfig{})
	key, other := newKey(), newKey()
	for _, k := range []Key{key, other} {
		if v, err := b.Decide(t.Context(), oneUnit(k)); err != nil || !v.Allowed {
			t.Fatalf("%+v, %v", v, err)
		}
	}
	holder, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := holder.Exec(t.Context(), "SELECT FROM plexsphere.rate_budgets WHERE bucket_key = $1 FOR UPDATE", key); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	v, err := b.Decide(t.Context(), oneUnit(key))
	var pgErr *pgconn.PgError
	if v.Allowed || !errors.As(err, &pgErr) || pgErr.Code != "55P03" {
		t.Errorf("a held row: %+v, %v, want lock_not_available", v, err)
	}
	if took := time.Since(start); took < 500*time.Millisecond || took > 10*time.Second {
		t.Errorf("a held row took %v, want about two seconds", took)
	}
	if v, err := b.Decide(t.Context(), oneUnit(other)); err != nil || !v.Allowed {
		t.Errorf("another row: %+v, %v, want allowed", v, err)
	}
	if metric(t, b, "weir_circuit_opened_total") != 0 {
		t.Error("a held row opened the circuit")
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := spent(t, pool, key); got != 1 {
		t.Errorf("%d units are charged, want the 1 of before", got)
	}
	if v, err := b.Decide(t.Context(), oneUnit(key)); err != nil || !v.Allowed {
		t.Errorf("after it was let go: %+v, %v, want allowed", v, err)
	}
}

// A statement that takes too long is ended by the server, charges nothing, and its
// connection serves the next one.
func TestStatementTimeout(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	admin := newPool(t, dsn, 2)
	cfg, err := PoolConfig(dsn + "&statement_timeout=300&lock_timeout=0&pool_max_conns=1")
	if err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	s, key := NewStore(pool), newKey()
	mustDecide(t, s, oneUnit(key))
	holder, err := admin.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := holder.Exec(t.Context(), "SELECT FROM plexsphere.rate_budgets WHERE bucket_key = $1 FOR UPDATE", key); err != nil {
		t.Fatal(err)
	}
	v, err := s.Decide(t.Context(), oneUnit(key))
	var pgErr *pgconn.PgError
	if v.Allowed || !errors.As(err, &pgErr) || pgErr.Code != "57014" {
		t.Errorf("%+v, %v, want query_canceled", v, err)
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustDecide(t, s, oneUnit(key))
	if got := spent(t, admin, key); got != 2 {
		t.Errorf("%d units are charged for the 2 that were admitted", got)
	}
	if n := pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d connections were made, want 1", n)
	}
}

// collisions counts the statements that are tried again.
type collisions struct {
	DBTX

	again *atomic.Int64
}

func (c collisions) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if strings.Contains(sql, "pg_advisory_xact_lock") {
		c.again.Add(1)
	}
	return c.DBTX.QueryRow(ctx, sql, args...)
}

// First requests of new buckets that collide are tried again, and charge once.
func TestRetriesChargeOnce(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	var again, admitted atomic.Int64
	s := NewStore(collisions{pool, &again})
	budget := Budget{PerSecond: 1, Burst: 100}
	var total float64
	for round := 0; round < 20 || (again.Load() == 0 && round < 500); round++ {
		key := newKey()
		req := oneDebit(key, 9, budget) // eleven fit
		req.Budgets = append(req.Budgets, oneDebit(newKey(), 1, budget).Budgets...)
		together(12, func(int) {
			v, err := s.Decide(t.Context(), req)
			if err != nil {
				t.Error(err)
			}
			if v.Allowed {
				admitted.Add(9)
			}
		})
		tokens, _, _ := bucketRow(t, pool, ScopeIngestNode, key)
		total += 100 - tokens
	}
	if again.Load() == 0 {
		t.Error("nothing collided, so nothing is proved")
	}
	if int64(total) != admitted.Load() {
		t.Errorf("admitted %d, charged %v, after %d retries", admitted.Load(), total, again.Load())
	}
}

// When the connection dies as it commits, the caller gets an error, the charge stands
// at most once, and nothing is tried again.
func TestConnectionDiesAtCommit(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	direct := newPool(t, dsn, 2)
	network, through := newProxy(t, dsn)
	pool := newPool(t, through, 2)
	g := &counting{DBTX: pool}
	b := startBatcher(t, g, BatcherConfig{})
	key := newKey()
	if v, err := b.Decide(t.Context(), oneUnit(key)); err != nil || !v.Allowed {
		t.Fatalf("%+v, %v", v, err)
	}
	before := g.statements.Load()
	network.set(false, true) // the server's answers are lost
	done := make(chan error)
	go func() {
		_, err := b.Decide(t.Context(), oneUnit(key))
		done <- err
	}()
	waitUntil(t, "the charge to be committed", func() bool { return spent(t, direct, key) == 2 })
	network.cut()
	network.set(false, false)
	if err := <-done; err == nil {
		t.Error("an answer was lost, and the caller got none the less one")
	}
	if got := spent(t, direct, key); got != 2 {
		t.Errorf("%d units are charged, want 2: it was tried again", got)
	}
	if n := g.statements.Load() - before; n != 1 {
		t.Errorf("%d statements were sent for the lost answer, want 1", n)
	}
	waitUntil(t, "decisions to resume", func() bool {
		v, err := b.Decide(t.Context(), oneUnit(key))
		return err == nil && v.Allowed
	})
}

// counting counts decisions that are sent.
type counting struct {
	DBTX

	statements atomic.Int64
}

func (c *counting) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if sql != probeSQL {
		c.statements.Add(1)
	}
	return c.DBTX.QueryRow(ctx, sql, args...)
}

// process is one of /proc.
type process struct{ pid, parent int }

func processes(t *testing.T) []process {
	t.Helper()
	var all []process
	for _, name := range listDir(t, "/proc") {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if parent, ok := parentOf(pid); ok {
			all = append(all, process{pid: pid, parent: parent})
		}
	}
	return all
}

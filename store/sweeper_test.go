package store

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-dev/weir/internal/pgtest"
)

// replicaEnv, with a DSN, makes this test binary a replica that sweeps: see TestMain.
const (
	replicaEnv     = "WEIR_TEST_SWEEP"
	replicaNameEnv = "WEIR_TEST_SWEEP_REPLICA"
)

// runReplica sweeps idle rate budgets until it is killed, or its parent is gone.
func runReplica(dsn string) int {
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	logger := slog.New(slog.NewTextHandler(os.Stderr, nil))
	err := func() error {
		pool, err := Connect(ctx, dsn)
		if err != nil {
			return err
		}
		defer pool.Close()
		s, err := NewSweeper(pool, DefaultSchema, SweeperConfig{
			Jobs: []Job{mustJob("rate-budget-sweep")}, Logger: logger,
			Replica: os.Getenv(replicaNameEnv), Tick: 200 * time.Millisecond, Lease: 2 * time.Second, Retry: time.Second,
		})
		if err != nil {
			return err
		}
		return s.Run(ctx)
	}()
	if err != nil {
		logger.Error("replica", slog.Any("err", err))
		return 1
	}
	return 0
}

func mustJob(name string) Job {
	jobs, err := Jobs(Retention{})
	if err != nil {
		panic(err)
	}
	for _, j := range jobs {
		if j.Name == name {
			return j
		}
	}
	panic("no job " + name)
}

func startReplica(t *testing.T, dsn, name string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), replicaEnv+"="+dsn, replicaNameEnv+"="+name)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	stdin, err := cmd.StdinPipe() // its end is the replica's
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		stdin.Close()
		_ = cmd.Wait() // may have been killed
		if t.Failed() {
			t.Logf("replica %s:\n%s", name, &stderr)
		}
	})
	return cmd
}

// A replica killed with kill -9 in the middle of its sweep is replaced by the other one,
// which has left it alone until then; and at no time do both sweep.
func TestSweepOutlivesAKilledReplica(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	pool := newPool(t, dsn, 4)
	const rows = 8 * sweepBatch
	// Each batch takes a while, and notes whose it is.
	if _, err := pool.Exec(t.Context(), `
CREATE TABLE batches (id serial, run bigint);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO batches (run) SELECT run FROM plexsphere.sweep_jobs WHERE name = 'rate-budget-sweep';
    PERFORM pg_sleep(0.3);
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER DELETE ON plexsphere.rate_budgets FOR EACH STATEMENT EXECUTE FUNCTION note();`); err != nil {
		t.Fatal(err)
	}
	addIdle(t, pool, rows, 2*time.Hour)
	addIdle(t, pool, 3, time.Minute)

	replicas := map[string]*exec.Cmd{"a": startReplica(t, dsn, "a"), "b": startReplica(t, dsn, "b")}
	waitUntil(t, "a sweep to be under way", func() bool {
		return count(t, pool, "SELECT count(*) FROM batches") >= 2
	})
	var holder string
	if err := pool.QueryRow(t.Context(), "SELECT started_by FROM plexsphere.sweep_jobs WHERE finished_at IS NULL").Scan(&holder); err != nil {
		t.Fatal(err)
	}
	if err := replicas[holder].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if left := count(t, pool, "SELECT count(*) FROM plexsphere.rate_budgets"); left <= sweepBatch {
		t.Fatalf("only %d rows were left when the replica was killed: too late to tell", left)
	}
	waitUntil(t, "the other replica to end the sweep", func() bool {
		return count(t, pool, "SELECT count(*) FROM plexsphere.sweep_jobs WHERE run = 2 AND error IS NULL AND succeeded_at IS NOT NULL") == 1
	})
	if got := count(t, pool, "SELECT count(*) FROM plexsphere.rate_budgets"); got != 3 {
		t.Errorf("%d rows are left, want the 3 that are not idle", got)
	}
	var by string
	if err := pool.QueryRow(t.Context(), "SELECT started_by FROM plexsphere.sweep_jobs").Scan(&by); err != nil || by == holder {
		t.Errorf("the second run was %q's, %v, want the one's that was not killed (%s was)", by, err, holder)
	}
	// In their order, the batches are all of the first run and then all of the second.
	if n := count(t, pool, "SELECT count(*) FROM batches AS a JOIN batches AS b ON a.id < b.id AND a.run > b.run"); n != 0 {
		t.Errorf("batches of the two runs alternate (%d pairs)", n)
	}
	if n := count(t, pool, "SELECT count(DISTINCT run) FROM batches"); n != 2 {
		t.Errorf("the batches are of %d runs, want 2", n)
	}
}

func addIdle(t *testing.T, db DBTX, rows int, idle time.Duration) {
	t.Helper()
	for ; rows > 0; rows -= sweepBatch {
		if _, err := db.Exec(t.Context(), `
INSERT INTO plexsphere.rate_budgets
SELECT 'ingest_node', gen_random_uuid(), 1, now() - $2::interval FROM generate_series(1, $1)`, min(rows, sweepBatch), idle); err != nil {
			t.Fatal(err)
		}
	}
}

// testSweeper returns a sweeper that only does what tests tell it to.
func testSweeper(t *testing.T, pool *pgxpool.Pool, replica string, log io.Writer, jobs ...Job) (*Sweeper, *prometheus.Registry) {
	t.Helper()
	s, err := NewSweeper(pool, DefaultSchema, SweeperConfig{
		Jobs: jobs, Logger: slog.New(slog.NewTextHandler(log, nil)), Replica: replica,
	})
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(s)
	return s, registry
}

// series returns the value of a counter or gauge, of the series with a label of that
// value if one is given.
func series(t *testing.T, registry *prometheus.Registry, name, label string) float64 {
	t.Helper()
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			ok := label == ""
			for _, pair := range m.GetLabel() {
				ok = ok || pair.GetValue() == label
			}
			if family.GetName() == name && ok {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

func tick(t *testing.T, s *Sweeper) {
	t.Helper()
	if err := s.tick(t.Context()); err != nil {
		t.Error(err)
	}
}

// makeDue lets the time pass until the jobs are due.
func makeDue(t *testing.T, db DBTX) {
	t.Helper()
	if _, err := db.Exec(t.Context(), "UPDATE plexsphere.sweep_jobs SET due_at = '-infinity'"); err != nil {
		t.Fatal(err)
	}
}

// However many replicas look at one instant, one of them sweeps.
func TestSweepOnceWhenAllLook(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	admin := newPool(t, dsn, 1)
	var runs, working atomic.Int64
	job := Job{Name: "j", Period: time.Hour, Run: func(ctx context.Context, turn Turn) (Changes, error) {
		runs.Add(1)
		if working.Add(1) > 1 {
			t.Error("two sweep at once")
		}
		defer working.Add(-1)
		_, err := turn.Store.db.Exec(ctx, "SELECT pg_sleep(0.02)")
		return nil, err
	}}
	sweepers := make([]*Sweeper, 8)
	for i := range sweepers {
		sweepers[i], _ = testSweeper(t, newPool(t, dsn, 2), string(rune('a'+i)), io.Discard, job)
	}
	const rounds = 15
	for range rounds {
		makeDue(t, admin)
		together(len(sweepers), func(i int) {
			if err := sweepers[i].tick(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	if got := runs.Load(); got != rounds {
		t.Errorf("%d runs in %d rounds, want one in each", got, rounds)
	}
	// And none while it is not due.
	for _, s := range sweepers {
		tick(t, s)
	}
	if got := runs.Load(); got != rounds {
		t.Errorf("%d runs after %d rounds: one came too early", got, rounds)
	}
}

// Who was taken for dead can do nothing any more: its next statement fails, and its run's
// end is not the job's.
func TestSweepTakenOver(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	pool := newPool(t, dsn, 8)
	addIdle(t, pool, 5, 2*time.Hour)
	var log bytes.Buffer
	other, _ := testSweeper(t, pool, "other", io.Discard, Job{Name: "j", Period: time.Hour, Run: func(context.Context, Turn) (Changes, error) {
		return Changes{"rate_budgets": 42}, nil
	}})
	stalled, registry := testSweeper(t, pool, "stalled", &log, Job{Name: "j", Period: time.Hour, Run: func(ctx context.Context, turn Turn) (Changes, error) {
		if _, err := turn.Store.db.Exec(ctx, "SELECT 1"); err != nil {
			t.Error(err)
		}
		tick(t, other)
		if n := count(t, pool, "SELECT run FROM plexsphere.sweep_jobs"); n != 1 {
			t.Errorf("a run that is alive was taken over: %d", n)
		}
		makeDue(t, pool)
		tick(t, other)
		n, err := turn.Store.DeleteIdle(ctx, turn.Now)
		if !errors.Is(err, errTurnLost) || n != 0 {
			t.Errorf("DeleteIdle of a lost run = %d, %v, want %v", n, err, errTurnLost)
		}
		for name, err := range map[string]error{
			"Exec":     second(turn.Store.db.Exec(ctx, "SELECT 1")),
			"Query":    second(turn.Store.db.Query(ctx, "SELECT 1")),
			"QueryRow": turn.Store.db.QueryRow(ctx, "SELECT 1").Scan(new(int)),
		} {
			if !errors.Is(err, errTurnLost) {
				t.Errorf("%s of a lost run: %v, want %v", name, err, errTurnLost)
			}
		}
		return Changes{"rate_budgets": n}, err
	}})
	tick(t, stalled)

	if got := count(t, pool, "SELECT count(*) FROM plexsphere.rate_budgets"); got != 5 {
		t.Errorf("%d rows are left, want all 5", got)
	}
	if got := count(t, pool, "SELECT (changed ->> 'rate_budgets')::bigint FROM plexsphere.sweep_jobs WHERE started_by = 'other' AND run = 2 AND error IS NULL"); got != 42 {
		t.Errorf("the job's last run has changed %d rows, want the other's 42", got)
	}
	if !strings.Contains(log.String(), "another replica has taken the job over") {
		t.Errorf("the log does not tell: %s", &log)
	}
	if got := series(t, registry, "weir_sweep_runs_total", "failed"); got != 1 {
		t.Errorf("%v failed runs, want 1", got)
	}
}

func second[T any](_ T, err error) error { return err }

// A run's statements commit one by one, and each renews the claim.
func TestSweepRenewsItsClaim(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	s, _ := testSweeper(t, pool, "a", io.Discard, Job{Name: "j", Period: time.Hour, Run: func(ctx context.Context, turn Turn) (Changes, error) {
		due := func() (at time.Time) {
			if err := pool.QueryRow(ctx, "SELECT due_at FROM plexsphere.sweep_jobs").Scan(&at); err != nil {
				t.Error(err)
			}
			return at
		}
		first := due()
		rows, err := turn.Store.db.Query(ctx, "INSERT INTO plexsphere.consumer_domains VALUES ('d', 1), ('e', 2) RETURNING consumers")
		if err != nil {
			return nil, err
		}
		var sum, n int64
		for rows.Next() {
			if err := rows.Scan(&n); err != nil {
				return nil, err
			}
			sum += n
		}
		if rows.Err() != nil || sum != 3 {
			t.Errorf("read %d, %v, want 3", sum, rows.Err())
		}
		if got := count(t, pool, "SELECT count(*) FROM plexsphere.consumer_domains"); got != 2 {
			t.Errorf("%d rows after the statement, want 2: has it not committed?", got)
		}
		if !due().After(first) {
			t.Error("the claim was not renewed")
		}
		// What the database refuses undoes nothing but itself.
		if _, err := turn.Store.db.Exec(ctx, "SELECT 1/0"); err == nil {
			t.Error("no error")
		}
		_, err = turn.Store.db.Exec(ctx, "DELETE FROM plexsphere.consumer_domains")
		return Changes{"consumer_domains": 2}, err
	}})
	tick(t, s)
	if got := count(t, pool, "SELECT count(*) FROM plexsphere.sweep_jobs WHERE error IS NULL AND due_at = started_at + interval '1 hour'"); got != 1 {
		t.Error("the run did not end well, or is not due in an hour")
	}
	if got := count(t, pool, "SELECT count(*) FROM plexsphere.consumer_domains"); got != 0 {
		t.Errorf("%d rows are left", got)
	}
}

// A run that fails is told of and tried again soon; one that was only stopped, at once.
func TestSweepFails(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	var log bytes.Buffer
	ctx, stop := context.WithCancel(t.Context())
	var mu sync.Mutex
	fail := func(context.Context) error { return errors.New("it rains") }
	s, registry := testSweeper(t, pool, "a", &log, Job{Name: "j", Period: time.Hour, Run: func(ctx context.Context, _ Turn) (Changes, error) {
		mu.Lock()
		defer mu.Unlock()
		return Changes{"rate_budgets": 7}, fail(ctx)
	}})
	tick(t, s)
	if got := count(t, pool, `
SELECT count(*) FROM plexsphere.sweep_jobs
WHERE error = 'it rains' AND changed = '{"rate_budgets": 7}' AND succeeded_at IS NULL AND due_at = finished_at + interval '5 minutes'`); got != 1 {
		t.Error("the row does not say that the run failed and when it is tried again")
	}
	for _, want := range []string{"sweep failed", "it rains", "rate_budgets=7", "level=WARN"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %q: %s", want, &log)
		}
	}
	makeDue(t, pool)
	fail = func(ctx context.Context) error { stop(); return ctx.Err() }
	if err := s.tick(ctx); err != nil {
		t.Error(err)
	}
	if got := count(t, pool, "SELECT count(*) FROM plexsphere.sweep_jobs WHERE run = 2 AND due_at <= clock_timestamp() AND finished_at IS NOT NULL"); got != 1 {
		t.Error("a run that was stopped is not due at once")
	}
	log.Reset()
	fail = func(context.Context) error { return nil }
	tick(t, s)
	if got := count(t, pool, "SELECT count(*) FROM plexsphere.sweep_jobs WHERE run = 3 AND error IS NULL AND succeeded_at IS NOT NULL"); got != 1 {
		t.Error("the third run did not succeed")
	}
	if n := strings.Count(log.String(), "\n"); n != 1 || !strings.Contains(log.String(), "msg=swept job=j") {
		t.Errorf("the log of a run is %d lines, want one: %s", n, &log)
	}
	if got := series(t, registry, "weir_sweep_last_success_timestamp_seconds", "j"); got < 1e9 {
		t.Errorf("last success at %v", got)
	}
	if got := series(t, registry, "weir_sweep_changes_total", "rate_budgets"); got != 21 {
		t.Errorf("%v rows counted, want 21", got)
	}
	// Another replica shows the fleet's last success, not its own.
	other, registry := testSweeper(t, pool, "b", io.Discard, s.config.Jobs...)
	tick(t, other)
	if got := series(t, registry, "weir_sweep_last_success_timestamp_seconds", "j"); got < 1e9 {
		t.Errorf("another replica's last success is at %v", got)
	}
}

// Run looks by itself, and ends with its context.
func TestSweeperRun(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	addIdle(t, pool, 4, 2*time.Hour)
	s, err := NewSweeper(pool, DefaultSchema, SweeperConfig{
		Jobs: []Job{mustJob("rate-budget-sweep")}, Tick: 20 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- s.Run(ctx) }()
	waitUntil(t, "the sweep", func() bool { return count(t, pool, "SELECT count(*) FROM plexsphere.rate_budgets") == 0 })
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestNewSweeperChecks(t *testing.T) {
	t.Parallel()

	good := Job{Name: "j", Period: time.Hour, Run: func(context.Context, Turn) (Changes, error) { return nil, nil }}
	for name, jobs := range map[string][]Job{
		"Jobs":    nil,
		"period":  {{Name: "j", Run: good.Run}},
		`job ""`:  {good, {Period: time.Hour, Run: good.Run}},
		`job "k"`: {good, {Name: "k", Period: time.Hour}},
	} {
		if _, err := NewSweeper(nil, DefaultSchema, SweeperConfig{Jobs: jobs}); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v, want an error that says so", name, err)
		}
	}
	if _, err := NewSweeper(nil, DefaultSchema, SweeperConfig{Jobs: []Job{good}}); err != nil {
		t.Error(err)
	}
}

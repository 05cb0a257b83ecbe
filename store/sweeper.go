package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// A Job is a piece of housekeeping that one replica of the fleet does at a time.
type Job struct {
	Name   string        // its row in sweep_jobs, and its name in logs and metrics
	Period time.Duration // from the start of one run to the start of the next
	// Run does the work by the statements of turn.Store, each of which commits by
	// itself, and says what it has changed, also when it fails. A run that fails is
	// tried again by whichever replica looks next, so it must bear repeating.
	Run func(ctx context.Context, turn Turn) (Changes, error)
}

// A Turn is what one run of a [Job] works with.
type Turn struct {
	// Store is on the run's claim: each of its statements is a transaction that
	// first makes sure that the run is still this replica's, and fails otherwise.
	Store *Store
	// Now is the database's clock when the run began.
	Now time.Time
}

// Changes counts what a run did: rows deleted, by table, or partitions made and dropped.
type Changes map[string]int64

// errTurnLost is the error of a statement whose run was taken over.
var errTurnLost = errors.New("another replica has taken the job over")

// SweeperConfig says how a [Sweeper] works.
type SweeperConfig struct {
	Jobs []Job // required; see [Jobs]
	// Logger is told of each run, in a line. Defaults to none.
	Logger *slog.Logger
	// Replica is how this process is called in sweep_jobs. Defaults to the host's
	// name and the process id.
	Replica string
	// Tick is how often a replica looks for jobs that are due, give or take half of
	// it, so that replicas don't look together. Defaults to a minute.
	Tick time.Duration
	// Lease is how long after its last statement the replica that does a job is
	// taken for dead. Defaults to a minute: longer than any statement or forgotten
	// transaction may last (see [PoolConfig]), so that no claim waits for one.
	Lease time.Duration
	// Retry is how soon a run that failed is tried again. Defaults to 5 minutes.
	Retry time.Duration
}

func (c SweeperConfig) withDefaults() SweeperConfig {
	if c.Replica == "" {
		host, err := os.Hostname()
		if err != nil {
			host = "unknown" // for people only
		}
		c.Replica = host + "/" + strconv.Itoa(os.Getpid())
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Tick <= 0 {
		c.Tick = time.Minute
	}
	if c.Lease <= 0 {
		c.Lease = time.Minute
	}
	if c.Retry <= 0 {
		c.Retry = 5 * time.Minute
	}
	return c
}

func (c SweeperConfig) validate() error {
	var errs []error
	if len(c.Jobs) == 0 {
		errs = append(errs, errors.New("Jobs is missing"))
	}
	for _, j := range c.Jobs {
		if j.Name == "" || j.Period <= 0 || j.Run == nil {
			errs = append(errs, fmt.Errorf("job %q has no name, no period or nothing to run", j.Name))
		}
	}
	return errors.Join(errs...)
}

// A Sweeper does the jobs that keep a database tidy, together with those of all other
// replicas: each run of a job is one replica's, whichever finds it due first. A replica
// that dies is replaced within [SweeperConfig] Lease and Tick. It is a
// [prometheus.Collector].
type Sweeper struct {
	pool    *pgxpool.Pool
	schema  string
	config  SweeperConfig
	queries sweeperQueries
	metrics *sweeperMetrics
}

type sweeperQueries struct{ jobs, claim, renew, finish string }

// NewSweeper returns a sweeper for a schema. The error names what is wrong in config.
func NewSweeper(pool *pgxpool.Pool, schema string, config SweeperConfig) (*Sweeper, error) {
	if err := config.validate(); err != nil {
		return nil, fmt.Errorf("making a sweeper: %w", err)
	}
	return &Sweeper{
		pool: pool, schema: schema, config: config.withDefaults(), metrics: newSweeperMetrics(),
		queries: sweeperQueries{
			jobs:   inSchema(jobsSQL, schema),
			claim:  inSchema(claimSQL, schema),
			renew:  inSchema(renewSQL, schema),
			finish: inSchema(finishSQL, schema),
		},
	}, nil
}

// Describe implements [prometheus.Collector].
func (s *Sweeper) Describe(ch chan<- *prometheus.Desc) { describe(s.metrics.all(), ch) }

// Collect implements [prometheus.Collector].
func (s *Sweeper) Collect(ch chan<- prometheus.Metric) { collect(s.metrics.all(), ch) }

// Run looks for jobs that are due, and does them, until ctx ends. A job that is under
// way then is left to another replica at once.
func (s *Sweeper) Run(ctx context.Context) error {
	// A fleet that starts together does not look together either.
	timer := time.NewTimer(rand.N(s.config.Tick/8 + 1)) //nolint:gosec // no secret
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		if err := s.tick(ctx); err != nil && ctx.Err() == nil {
			s.config.Logger.LogAttrs(ctx, slog.LevelWarn, "looking for sweeps failed", slog.Any("err", err))
		}
		timer.Reset(s.config.Tick/2 + rand.N(s.config.Tick)) //nolint:gosec // no secret
	}
}

// jobsSQL reads which jobs have run, and whether they are due again. It locks nothing.
const jobsSQL = `
SELECT name, due_at <= clock_timestamp(), coalesce(date_part('epoch', succeeded_at), 0)
FROM plexsphere.sweep_jobs`

// tick does the jobs that are due.
func (s *Sweeper) tick(ctx context.Context) error {
	rows, err := s.pool.Query(ctx, s.queries.jobs)
	if err != nil {
		return fmt.Errorf("reading the jobs: %w", err)
	}
	var (
		name      string
		due       bool
		succeeded float64
	)
	waiting := make(map[string]bool)
	if _, err := pgx.ForEachRow(rows, []any{&name, &due, &succeeded}, func() error {
		waiting[name] = !due
		if slices.ContainsFunc(s.config.Jobs, func(j Job) bool { return j.Name == name }) {
			s.metrics.succeeded.WithLabelValues(name).Set(succeeded)
		}
		return nil
	}); err != nil {
		return fmt.Errorf("reading the jobs: %w", err)
	}
	var errs []error
	for _, job := range s.config.Jobs {
		if !waiting[job.Name] {
			errs = append(errs, s.sweep(ctx, job))
		}
	}
	return errors.Join(errs...)
}

// claimSQL takes a job that is due. Whoever finds another replica at the same statement
// leaves, rather than wait for an answer that can only be no; the lock ends with the
// statement, whatever becomes of the connection.
const claimSQL = `
INSERT INTO plexsphere.sweep_jobs AS j (name, run, started_at, started_by, due_at)
SELECT $1, 1, clock_timestamp(), $2, clock_timestamp() + $3::interval
WHERE pg_try_advisory_xact_lock(hashtextextended($4, 0))
ON CONFLICT (name) DO UPDATE
SET run = j.run + 1, started_at = excluded.started_at, started_by = excluded.started_by,
    finished_at = NULL, due_at = excluded.due_at
WHERE j.due_at <= clock_timestamp()
RETURNING run, started_at`

// finishSQL ends a run: $3 is what it changed, $4 its error, $5 when the job is due next:
// so long after this run's start, or, after an error, from now.
const finishSQL = `
UPDATE plexsphere.sweep_jobs
SET finished_at = now(), changed = $3::jsonb, error = $4,
    succeeded_at = CASE WHEN $4::text IS NULL THEN now() ELSE succeeded_at END,
    due_at = CASE WHEN $4::text IS NULL THEN started_at ELSE now() END + $5::interval
WHERE name = $1 AND run = $2 AND finished_at IS NULL`

// finishTimeout bounds the last statement of a run, which is also made when the
// replica is stopping.
const finishTimeout = 5 * time.Second

// sweep claims a job and does it, or leaves it to whoever has it.
func (s *Sweeper) sweep(ctx context.Context, job Job) error {
	var run int64
	var began time.Time
	err := s.pool.QueryRow(ctx, s.queries.claim, job.Name, s.config.Replica, s.config.Lease, "weir sweep "+s.schema+" "+job.Name).Scan(&run, &began)
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrNoRows), errors.As(err, &pgErr) && pgErr.Code == "55P03": // its holder's statement took long
		return nil
	case err != nil:
		return fmt.Errorf("claiming %s: %w", job.Name, err)
	}
	start := time.Now()
	turn := Turn{
		Store: NewStoreIn(&turnDB{pool: s.pool, renew: s.queries.renew, name: job.Name, run: run, lease: s.config.Lease}, s.schema),
		Now:   began.UTC(),
	}
	changes, err := job.Run(ctx, turn)
	if !errors.Is(err, errTurnLost) {
		err = errors.Join(err, s.finish(ctx, job, run, changes, err))
	}
	s.record(ctx, job, changes, time.Since(start), err)
	return nil // it has been told
}

func (s *Sweeper) finish(ctx context.Context, job Job, run int64, changes Changes, failure error) error {
	text, err := json.Marshal(changes)
	if err != nil || changes == nil {
		text = []byte("{}") // numbers always encode
	}
	var reason *string
	next := job.Period
	if failure != nil {
		message := failure.Error()
		reason, next = &message, min(s.config.Retry, job.Period)
		if ctx.Err() != nil {
			next = 0 // nothing is wrong but that this replica is stopping
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), finishTimeout)
	defer cancel()
	tag, err := s.pool.Exec(ctx, s.queries.finish, job.Name, run, string(text), reason, next)
	if err == nil && tag.RowsAffected() == 0 {
		err = errTurnLost
	}
	if err != nil {
		return fmt.Errorf("finishing: %w", err)
	}
	return nil
}

// record tells of a run, in metrics and in one line.
func (s *Sweeper) record(ctx context.Context, job Job, changes Changes, took time.Duration, err error) {
	attrs := []slog.Attr{slog.String("job", job.Name), slog.Duration("took", took)}
	for _, what := range slices.Sorted(maps.Keys(changes)) {
		attrs = append(attrs, slog.Int64(what, changes[what]))
		s.metrics.changes.WithLabelValues(what).Add(float64(changes[what]))
	}
	s.metrics.duration.WithLabelValues(job.Name).Observe(took.Seconds())
	if err != nil {
		s.metrics.runs.WithLabelValues(job.Name, "failed").Inc()
		s.config.Logger.LogAttrs(ctx, slog.LevelWarn, "sweep failed", append(attrs, slog.Any("err", err))...)
		return
	}
	s.metrics.runs.WithLabelValues(job.Name, "succeeded").Inc()
	s.metrics.succeeded.WithLabelValues(job.Name).SetToCurrentTime()
	s.config.Logger.LogAttrs(ctx, slog.LevelInfo, "swept", attrs...)
}

// renewSQL makes sure that a run is still its replica's and keeps it so. It locks the row
// until the statement that it goes before has committed: nobody takes over meanwhile.
const renewSQL = `
UPDATE plexsphere.sweep_jobs
SET due_at = clock_timestamp() + $3::interval
WHERE name = $1 AND run = $2 AND finished_at IS NULL`

// A turnDB is a [DBTX] on which each statement is a transaction that renews a run's
// claim first.
type turnDB struct {
	pool  *pgxpool.Pool
	renew string
	name  string
	run   int64
	lease time.Duration
}

func (d *turnDB) begin(ctx context.Context) (pgx.Tx, error) {
	tx, err := d.pool.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("beginning a statement of %s: %w", d.name, err)
	}
	tag, err := tx.Exec(ctx, d.renew, d.name, d.run, d.lease)
	if err == nil && tag.RowsAffected() == 0 {
		err = errTurnLost
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("renewing the claim of %s: %w", d.name, err), tx.Rollback(ctx))
	}
	return tx, nil
}

// end commits, or undoes what failed.
func end(ctx context.Context, tx pgx.Tx, err error) error {
	if err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	return tx.Commit(ctx)
}

// Exec implements [DBTX].
func (d *turnDB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	tx, err := d.begin(ctx)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := tx.Exec(ctx, sql, args...)
	return tag, end(ctx, tx, err)
}

// Query implements [DBTX]. The rows commit when they are closed, or have been read.
func (d *turnDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	tx, err := d.begin(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, end(ctx, tx, err)
	}
	return &turnRows{Rows: rows, end: func(err error) error { return end(ctx, tx, err) }}, nil
}

// QueryRow implements [DBTX]. It runs when it is scanned.
func (d *turnDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return turnRow(func(dest ...any) error {
		tx, err := d.begin(ctx)
		if err != nil {
			return err
		}
		return end(ctx, tx, tx.QueryRow(ctx, sql, args...).Scan(dest...))
	})
}

type turnRow func(dest ...any) error

// Scan implements [pgx.Row].
func (r turnRow) Scan(dest ...any) error { return r(dest...) }

type turnRows struct {
	pgx.Rows

	end    func(error) error
	closed bool
	err    error
}

// Next implements [pgx.Rows].
func (r *turnRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

// Close implements [pgx.Rows].
func (r *turnRows) Close() {
	r.Rows.Close()
	if !r.closed {
		r.closed = true
		r.err = r.end(r.Rows.Err())
	}
}

// Err implements [pgx.Rows].
func (r *turnRows) Err() error { return errors.Join(r.err, r.Rows.Err()) }

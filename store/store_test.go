package store

import (
	"context"
	"errors"
	"flag"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

func TestMain(m *testing.M) {
	if dsn := os.Getenv(replicaEnv); dsn != "" {
		os.Exit(runReplica(dsn))
	}
	// The same histories in every run, unless the command line asks for others: what
	// fails here fails for whoever reads of it. `make soak` draws new ones.
	if err := flag.Set("rapid.seed", "20261201"); err != nil {
		panic(err)
	}
	os.Exit(pgtest.Main(m, func(ctx context.Context, dsn string) error {
		return Migrate(ctx, dsn, DefaultSchema)
	}))
}

// noon is the instant at which tests start. It is mid-window in every unit.
var noon = time.Date(2026, time.May, 14, 12, 30, 30, 500_000_000, time.UTC)

func newPool(t *testing.T, dsn string, conns int32) *pgxpool.Pool {
	t.Helper()
	cfg, err := PoolConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = conns
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// setup returns a store on a database of its own.
func setup(t *testing.T) (*Store, *pgxpool.Pool) {
	t.Helper()
	pool := newPool(t, pgtest.NewDatabase(t), 16)
	return NewStore(pool), pool
}

func newKey() Key { return Key(uuid.New()) }

func mustTake(t *testing.T, s *Store, scope Scope, key Key, cost float64, b Budget, now time.Time) bool {
	t.Helper()
	ok, err := s.Take(t.Context(), scope, key, cost, b, now)
	if err != nil {
		t.Fatal(err)
	}
	return ok
}

func mustDecide(t *testing.T, s *Store, req policy.Request) policy.Verdict {
	t.Helper()
	v, err := s.Decide(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// bucketRow is a row of rate_budgets; ok is false when there is none.
func bucketRow(t *testing.T, db DBTX, scope Scope, key Key) (tokens float64, at time.Time, ok bool) {
	t.Helper()
	err := db.QueryRow(t.Context(),
		"SELECT tokens, refilled_at FROM plexsphere.rate_budgets WHERE scope = $1 AND bucket_key = $2",
		string(scope), [16]byte(key)).Scan(&tokens, &at)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, time.Time{}, false
	}
	if err != nil {
		t.Fatal(err)
	}
	return tokens, at.UTC(), true
}

// count runs a query that yields one whole number.
func count(t *testing.T, db DBTX, sql string, args ...any) int64 {
	t.Helper()
	var n int64
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// together runs n functions as close to one instant as it can.
func together(n int, f func(i int)) {
	var group sync.WaitGroup
	gate := make(chan struct{})
	for i := range n {
		group.Go(func() {
			<-gate
			f(i)
		})
	}
	close(gate)
	group.Wait()
}

// consumer returns a holder of a quota as a policy would.
func consumer(name string) policy.Consumer {
	c := libraryConsumer(name)
	c.ID[0] ^= 0x80 // another than the library's of that name
	c.Domain = "test"
	return c
}

// quotaOf returns budgets of so many units per window, such as 10 a day.
func quotaOf(limits map[quota.Unit]int64) []quota.Budget {
	var budgets []quota.Budget
	for u := quota.Second; u <= quota.Year; u++ {
		if limit, ok := limits[u]; ok {
			budgets = append(budgets, quota.Budget{Key: u.String(), Unit: u, Limit: limit})
		}
	}
	return budgets
}

func dayMonth(day, month int64) []quota.Budget {
	return quotaOf(map[quota.Unit]int64{quota.Day: day, quota.Month: month})
}

// failingDB answers every query with an error, and counts them.
type failingDB struct {
	err     error
	queries int
}

func (f *failingDB) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	f.queries++
	return pgconn.CommandTag{}, f.err
}

func (f *failingDB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	f.queries++
	return nil, f.err
}

func (f *failingDB) QueryRow(context.Context, string, ...any) pgx.Row {
	f.queries++
	return failingRow{f.err}
}

type failingRow struct{ err error }

func (r failingRow) Scan(...any) error { return r.err }

func TestNewStorePanicsOnNil(t *testing.T) {
	t.Parallel()

	for name, db := range map[string]DBTX{
		"nil":        nil,
		"nil pool":   (*pgxpool.Pool)(nil),
		"nil conn":   (*pgx.Conn)(nil),
		"nil typed":  (*failingDB)(nil),
		"nil pooled": (*pgxpool.Conn)(nil),
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: NewStore did not panic", name)
				}
			}()
			NewStore(db)
		}()
	}
}

// A handle may also be a connection or a transaction, and what a transaction took is
// undone with it.
func TestStoreOnTransaction(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	key, budget := newKey(), Budget{PerSecond: 1, Burst: 10}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !mustTake(t, NewStore(tx), ScopeIngestNode, key, 10, budget, noon) {
		t.Fatal("a full bucket refused")
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !mustTake(t, s, ScopeIngestNode, key, 10, budget, noon) {
		t.Error("a take that was rolled back stayed spent")
	}
}

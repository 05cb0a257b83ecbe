package store

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/policy"
)

func TestDeleteIdle(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	budget := Budget{PerSecond: 1, Burst: 10}
	idle, edge, busy := newKey(), newKey(), newKey()
	mustTake(t, s, ScopeIngestNode, idle, 1, budget, noon.Add(-time.Hour-time.Microsecond))
	mustTake(t, s, ScopeIngestNode, edge, 1, budget, noon.Add(-time.Hour))
	mustTake(t, s, ScopeIngestNode, busy, 1, budget, noon)
	// Only refused since: as full as an idle one.
	if mustTake(t, s, ScopeIngestNode, idle, 11, budget, noon) {
		t.Fatal("admitted above the ceiling")
	}

	n, err := s.DeleteIdle(t.Context(), noon.Add(-time.Hour))
	if err != nil || n != 1 {
		t.Fatalf("DeleteIdle = %d, %v, want 1", n, err)
	}
	for key, want := range map[Key]bool{idle: false, edge: true, busy: true} {
		if _, _, ok := bucketRow(t, pool, ScopeIngestNode, key); ok != want {
			t.Errorf("bucket %s is there: %v, want %v", key, ok, want)
		}
	}
	// What was deleted is minted as full as it had become.
	if !mustTake(t, s, ScopeIngestNode, idle, 10, budget, noon) {
		t.Error("a swept bucket was not full")
	}
}

// P11: more idle rows than one batch, all deleted.
func TestP11DeleteIdleInBatches(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	const rows = 2*sweepBatch + 17
	if _, err := pool.Exec(t.Context(), fmt.Sprintf(`
		INSERT INTO plexsphere.rate_budgets
		SELECT 'ingest_node', gen_random_uuid(), 1, $1::timestamptz - interval '2 hours'
		FROM generate_series(1, %d)`, rows), noon); err != nil {
		t.Fatal(err)
	}
	mustTake(t, s, ScopeIngestNode, newKey(), 1, Budget{PerSecond: 1, Burst: 1}, noon)
	n, err := s.DeleteIdle(t.Context(), noon.Add(-time.Hour))
	if err != nil || n != rows {
		t.Errorf("DeleteIdle = %d, %v, want %d", n, err, rows)
	}
	if got := count(t, pool, "SELECT count(*) FROM plexsphere.rate_budgets"); got != 1 {
		t.Errorf("%d rows are left, want 1", got)
	}
}

// A bucket that is being taken from is passed over, not waited for.
func TestDeleteIdleSkipsLocked(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	key, budget := newKey(), Budget{PerSecond: 1, Burst: 10}
	mustTake(t, s, ScopeIngestNode, key, 10, budget, noon.Add(-2*time.Hour))
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context()) //nolint:errcheck // committed below
	mustTake(t, NewStore(tx), ScopeIngestNode, key, 4, budget, noon)
	if n, err := s.DeleteIdle(t.Context(), noon.Add(-time.Hour)); err != nil || n != 0 {
		t.Errorf("DeleteIdle beside a take = %d, %v, want 0", n, err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if tokens, _, ok := bucketRow(t, pool, ScopeIngestNode, key); !ok || tokens != 6 {
		t.Errorf("the bucket holds %v (there: %v), want 6", tokens, ok)
	}
}

// Sweeps run all the while that takers spend idle buckets: whenever a sweep hits
// between, what a taker debited must not be minted full again.
func TestDeleteIdleAgainstConcurrentTakes(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	const buckets, takers = 40, 8
	budget := Budget{PerSecond: 1, Burst: 10}
	for round := range 6 {
		keys := make([]Key, buckets)
		for i := range keys {
			keys[i] = newKey()
			// Spent two hours ago, so idle and full by now.
			mustTake(t, s, ScopeIngestNode, keys[i], 10, budget, noon.Add(-2*time.Hour))
		}
		var granted [takers][buckets]int64
		together(takers+2, func(worker int) {
			if worker >= takers {
				for range 20 {
					if _, err := s.DeleteIdle(t.Context(), noon.Add(-time.Hour)); err != nil {
						t.Error(err)
					}
				}
				return
			}
			for i, key := range keys {
				for range 2 {
					var ok bool
					var err error
					if worker%2 == 0 {
						ok, err = s.Take(t.Context(), ScopeIngestNode, key, 1, budget, noon)
					} else {
						var v policy.Verdict
						v, err = s.Decide(t.Context(), policy.Request{Now: noon, Budgets: []policy.BudgetDebit{
							{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: 1},
						}})
						ok = v.Allowed
					}
					if err != nil {
						t.Error(err)
					}
					if ok {
						granted[worker][i]++
					}
				}
			}
		})
		for i, key := range keys {
			var total int64
			for worker := range takers {
				total += granted[worker][i]
			}
			if tokens, _, ok := bucketRow(t, pool, ScopeIngestNode, key); total != 10 || !ok || tokens != 0 {
				t.Errorf("round %d, bucket %d: granted %d and %v left (there: %v), want 10 and 0", round, i, total, tokens, ok)
			}
		}
	}
}

// A batch of a sweep finds again what it has locked by where it lies. By their keys, all
// rows that are to go would be read anew for each batch, and ten million never go.
func TestSweepsFindLockedRowsByPlace(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	if _, err := pool.Exec(t.Context(), `
INSERT INTO plexsphere.rate_budgets
SELECT 'ingest_node', gen_random_uuid(), 1, '2026-01-01' FROM generate_series(1, 30000);
INSERT INTO plexsphere.limiter_buckets
SELECT sha256(i::text::bytea), 'n', 's', 0, '2026-01-01', 1, 1, 1, '2026-01-01' FROM generate_series(1, 30000) AS i;
INSERT INTO plexsphere.quota_counters
SELECT sha256(i::text::bytea), 'second', '2026-01-01', 1 FROM generate_series(1, 30000) AS i`); err != nil {
		t.Fatal(err)
	}
	for _, table := range []string{"rate_budgets", "limiter_buckets", "quota_counters"} {
		if _, err := pool.Exec(t.Context(), "ANALYZE plexsphere."+table); err != nil {
			t.Fatal(err)
		}
	}
	for name, sweep := range map[string]struct {
		sql  string
		args []any
	}{
		"rate budgets": {deleteIdleSQL, []any{noon, sweepBatch}},
		"limiters":     {deleteExpiredSQL, []any{noon, sweepBatch}},
		"counters":     {deleteEndedSQL, []any{noon, sweepBatch, "second"}},
	} {
		rows, err := pool.Query(t.Context(), "EXPLAIN "+sweep.sql, sweep.args...)
		if err != nil {
			t.Fatal(err)
		}
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		plan := strings.Join(lines, "\n")
		if !strings.Contains(plan, "Tid Scan") || strings.Contains(plan, "Join") {
			t.Errorf("%s are swept by the plan\n%s", name, plan)
		}
	}
}

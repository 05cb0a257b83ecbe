package store

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
)

func TestTakeChecksBeforeAnyQuery(t *testing.T) {
	t.Parallel()

	good := Budget{PerSecond: 1, Burst: 10}
	for _, tc := range []struct {
		name   string
		scope  Scope
		key    Key
		cost   float64
		budget Budget
		want   error
	}{
		{"scope", "ingest", newKey(), 1, good, ErrUnknownScope},
		{"empty scope", "", newKey(), 1, good, ErrUnknownScope},
		{"key", ScopeIngestNode, Key{}, 1, good, ErrZeroKey},
		{"cost", ScopeIngestNode, newKey(), -1, good, ErrNegativeCost},
		{"cost of NaN", ScopeIngestNode, newKey(), math.NaN(), good, ErrNegativeCost},
		{"infinite cost", ScopeIngestNode, newKey(), math.Inf(1), good, ErrNegativeCost},
		{"no rate", ScopeIngestNode, newKey(), 1, Budget{Burst: 10}, ErrInvalidBudget},
		{"no burst", ScopeIngestNode, newKey(), 1, Budget{PerSecond: 10}, ErrInvalidBudget},
		{"rate of NaN", ScopeIngestNode, newKey(), 1, Budget{PerSecond: math.NaN(), Burst: 1}, ErrInvalidBudget},
		{"burst of NaN", ScopeIngestNode, newKey(), 1, Budget{PerSecond: 1, Burst: math.NaN()}, ErrInvalidBudget},
		{"infinite rate", ScopeIngestNode, newKey(), 1, Budget{PerSecond: math.Inf(1), Burst: 1}, ErrInvalidBudget},
		{"rate above 2^53", ScopeIngestNode, newKey(), 1, Budget{PerSecond: 1e308, Burst: 10}, ErrInvalidBudget},
		{"infinite burst", ScopeIngestNode, newKey(), 1, Budget{PerSecond: 1, Burst: math.Inf(1)}, ErrInvalidBudget},
		{"refills too slowly", ScopeIngestNode, newKey(), 1, Budget{PerSecond: 1, Burst: 3601}, ErrInvalidBudget},
		{"order: scope first", "x", Key{}, -1, Budget{}, ErrUnknownScope},
		{"order: then key", ScopeIngestNode, Key{}, -1, Budget{}, ErrZeroKey},
		{"order: then cost", ScopeIngestNode, newKey(), -1, Budget{}, ErrNegativeCost},
		{"before the zero-cost shortcut: scope", "x", newKey(), 0, good, ErrUnknownScope},
		{"before the zero-cost shortcut: key", ScopeIngestNode, Key{}, 0, good, ErrZeroKey},
		{"before the zero-cost shortcut: budget", ScopeIngestNode, newKey(), 0, Budget{}, ErrInvalidBudget},
		{"before the ceiling shortcut: budget", ScopeIngestNode, newKey(), 9, Budget{Burst: 1}, ErrInvalidBudget},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			db := &failingDB{err: errors.New("queried")}
			ok, err := NewStore(db).Take(t.Context(), tc.scope, tc.key, tc.cost, tc.budget, noon)
			if ok || !errors.Is(err, tc.want) {
				t.Errorf("Take = %v, %v, want false, %v", ok, err, tc.want)
			}
			if db.queries != 0 {
				t.Errorf("%d queries, want none", db.queries)
			}
		})
	}
}

// Zero cost and a cost above the ceiling never reach the database.
func TestTakeShortcuts(t *testing.T) {
	t.Parallel()

	budget := Budget{PerSecond: 1, Burst: 10}
	for cost, want := range map[float64]bool{0: true, math.Copysign(0, -1): true, 10.5: false, math.MaxFloat64: false} {
		db := &failingDB{err: errors.New("queried")}
		ok, err := NewStore(db).Take(t.Context(), ScopeIngestNode, newKey(), cost, budget, noon)
		if ok != want || err != nil || db.queries != 0 {
			t.Errorf("Take of %v = %v, %v after %d queries, want %v without a query", cost, ok, err, db.queries, want)
		}
	}
}

// Unavailable is a third outcome: an error that is no refusal, and keeps its cause.
func TestTakeUnavailable(t *testing.T) {
	t.Parallel()

	cause := errors.New("connection refused")
	ok, err := NewStore(&failingDB{err: cause}).Take(t.Context(), ScopeIngestNode, newKey(), 1, Budget{PerSecond: 1, Burst: 1}, noon)
	if ok || !errors.Is(err, cause) {
		t.Errorf("Take = %v, %v, want false and the cause", ok, err)
	}
}

// Each scope mints at the ceiling, debits, refuses without a trace and refills.
func TestTakeInEachScope(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	key := newKey() // one key, so that scopes that shared a bucket would show
	budget := Budget{PerSecond: 2, Burst: 10}
	for _, scope := range []Scope{
		ScopeSecretReadNode, ScopeSecretReadDomain, ScopeAccessIssuanceDomain,
		ScopeIngestNode, ScopeIngestDomain,
	} {
		for _, step := range []struct {
			at     time.Duration // after noon
			cost   float64
			want   bool
			tokens float64       // of the row, after
			row    time.Duration // its refilled_at, after noon
		}{
			{at: 0, cost: 4, want: true, tokens: 6, row: 0},
			{at: 0, cost: 7, want: false, tokens: 6, row: 0},
			{at: time.Second, cost: 9, want: false, tokens: 6, row: 0}, // not stamped: the second is not lost
			{at: time.Second, cost: 8, want: true, tokens: 0, row: time.Second},
			{at: 500 * time.Millisecond, cost: 1, want: false, tokens: 0, row: time.Second},
			{at: 1500 * time.Millisecond, cost: 1, want: true, tokens: 0, row: 1500 * time.Millisecond},
			{at: time.Hour, cost: 1, want: true, tokens: 9, row: time.Hour},   // capped at the ceiling
			{at: time.Minute, cost: 1, want: true, tokens: 8, row: time.Hour}, // never moves back
		} {
			if got := mustTake(t, s, scope, key, step.cost, budget, noon.Add(step.at)); got != step.want {
				t.Errorf("%s at %v: Take(%v) = %v, want %v", scope, step.at, step.cost, got, step.want)
			}
			tokens, at, ok := bucketRow(t, pool, scope, key)
			if !ok || tokens != step.tokens || !at.Equal(noon.Add(step.row)) {
				t.Errorf("%s at %v: row = %v at %v, want %v at %v", scope, step.at, tokens, at.Sub(noon), step.tokens, step.row)
			}
		}
	}
	if got := count(t, pool, "SELECT count(*) FROM plexsphere.rate_budgets"); got != 5 {
		t.Errorf("%d rows, want one a scope", got)
	}
}

// The package's scopes and the table's CHECK are one set.
func TestScopesEqualTheCheck(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	var definition string
	if err := pool.QueryRow(t.Context(), `
		SELECT pg_get_constraintdef(oid) FROM pg_constraint
		WHERE conrelid = 'plexsphere.rate_budgets'::regclass AND conname = 'rate_budgets_scope'`).Scan(&definition); err != nil {
		t.Fatal(err)
	}
	var inCheck []string
	for _, match := range regexp.MustCompile(`'([^']*)'`).FindAllStringSubmatch(definition, -1) {
		inCheck = append(inCheck, match[1])
	}
	var inPackage []string
	for _, s := range policy.Scopes() {
		inPackage = append(inPackage, string(s))
	}
	slices.Sort(inCheck)
	slices.Sort(inPackage)
	if diff := cmp.Diff(inPackage, inCheck); diff != "" {
		t.Errorf("scopes in the package (-) and in the CHECK (+):\n%s", diff)
	}
	_, err := pool.Exec(t.Context(), "INSERT INTO plexsphere.rate_budgets VALUES ('ingest', gen_random_uuid(), 1, now())")
	if err == nil {
		t.Error("the table took a sixth scope")
	}
}

// The table refuses what the code assumes never to be there.
func TestTableChecks(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	for _, row := range []string{
		"('ingest_node', gen_random_uuid(), -0.5, now())",
		"('ingest_node', gen_random_uuid(), 'NaN', now())",
		"('ingest_node', gen_random_uuid(), 'Infinity', now())",
		"('ingest_node', gen_random_uuid(), 1, 'infinity')",
		"('ingest_node', NULL, 1, now())",
		"('ingest_node', gen_random_uuid(), NULL, now())",
	} {
		if _, err := pool.Exec(t.Context(), "INSERT INTO plexsphere.rate_budgets VALUES "+row); err == nil {
			t.Errorf("the table took %s", row)
		}
	}
}

// The seed's own proof: a hundred takes from two pools at one instant are granted
// exactly what the bucket holds.
func TestHundredTakesFromTwoPools(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	stores := []*Store{NewStore(newPool(t, dsn, 10)), NewStore(newPool(t, dsn, 10))}
	key, budget := newKey(), Budget{PerSecond: 1, Burst: 40}
	var granted atomic.Int64
	together(100, func(i int) {
		ok, err := stores[i%2].Take(t.Context(), ScopeIngestNode, key, 1, budget, noon)
		if err != nil {
			t.Error(err)
		}
		if ok {
			granted.Add(1)
		}
	})
	if got := granted.Load(); got != 40 {
		t.Errorf("granted %d, want exactly 40", got)
	}
}

// The seed's queries, as printed, for an operator with psql.
func TestSeedQueries(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	domain, budget := newKey(), Budget{PerSecond: 1, Burst: 100}
	mustTake(t, s, ScopeIngestDomain, domain, 30, budget, noon)
	mustTake(t, s, ScopeAccessIssuanceDomain, domain, 1, budget, noon)
	mustTake(t, s, ScopeIngestDomain, newKey(), 1, budget, noon)

	const buckets = `
SELECT scope, tokens, refilled_at
FROM plexsphere.rate_budgets
WHERE bucket_key = '<domain-uuid>'
ORDER BY scope;`
	rows, err := pool.Query(t.Context(), strings.ReplaceAll(buckets, "<domain-uuid>", domain.String()))
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		var (
			scope  string
			tokens float64
			at     time.Time
		)
		err := row.Scan(&scope, &tokens, &at)
		return fmt.Sprint(scope, " ", tokens, " ", at.Equal(noon)), err
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"access_issuance_domain 99 true", "ingest_domain 70 true"}, got); diff != "" {
		t.Errorf("a Domain's buckets (-want +got):\n%s", diff)
	}

	const sharing = `
SELECT count(*)
FROM plexsphere.rate_budgets
WHERE scope = 'ingest_domain'
  AND bucket_key = '<domain-uuid>';`
	if got := count(t, pool, strings.ReplaceAll(sharing, "<domain-uuid>", domain.String())); got != 1 {
		t.Errorf("%d buckets, want 1", got)
	}
}

// P04: limit 1, a hundred at once: exactly one, at READ COMMITTED.
func TestP04OneOfAHundred(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	var isolation string
	if err := pool.QueryRow(t.Context(), "SHOW transaction_isolation").Scan(&isolation); err != nil || isolation != "read committed" {
		t.Fatalf("transaction_isolation = %q, %v", isolation, err)
	}
	budget := Budget{PerSecond: 1, Burst: 1}
	key, holder := newKey(), consumer("p04")
	for name, try := range map[string]func(ctx context.Context) (bool, error){
		"Take": func(ctx context.Context) (bool, error) {
			return s.Take(ctx, ScopeSecretReadNode, key, 1, budget, noon)
		},
		"Decide": func(ctx context.Context) (bool, error) {
			v, err := s.Decide(ctx, policy.Request{
				Now:     noon,
				Budgets: []policy.BudgetDebit{{Scope: ScopeIngestDomain, Key: key, Budget: budget, Cost: 1}},
			})
			return v.Allowed, err
		},
		"quota": func(ctx context.Context) (bool, error) {
			v, err := s.Decide(ctx, policy.Request{
				Now:    noon,
				Quotas: []policy.QuotaDebit{quotaDebit(holder, dayMonth(1, 10), 1)},
			})
			return v.Allowed, err
		},
	} {
		var admitted atomic.Int64
		together(100, func(int) {
			ok, err := try(t.Context())
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if ok {
				admitted.Add(1)
			}
		})
		if got := admitted.Load(); got != 1 {
			t.Errorf("%s: admitted %d, want exactly 1", name, got)
		}
	}
}

// P05: two hundred first requests of a new key at once, limit 10: exactly ten, and
// no error of uniqueness surfaces.
func TestP05FirstRequestsRace(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	budget := Budget{PerSecond: 1, Burst: 10}
	key, holder := newKey(), consumer("p05")
	for name, try := range map[string]func(ctx context.Context) (bool, error){
		"Take": func(ctx context.Context) (bool, error) {
			return s.Take(ctx, ScopeSecretReadNode, key, 1, budget, noon)
		},
		"Decide": func(ctx context.Context) (bool, error) {
			v, err := s.Decide(ctx, policy.Request{
				Now:     noon,
				Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: 1}},
				Quotas:  []policy.QuotaDebit{quotaDebit(holder, dayMonth(1000, 1000), 1)},
			})
			return v.Allowed, err
		},
	} {
		var admitted atomic.Int64
		together(200, func(int) {
			ok, err := try(t.Context())
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if ok {
				admitted.Add(1)
			}
		})
		if got := admitted.Load(); got != 10 {
			t.Errorf("%s: admitted %d, want exactly 10", name, got)
		}
	}
	if got := count(t, pool, "SELECT used FROM plexsphere.quota_counters WHERE unit = 'day' AND counter = $1", holder.ID[:]); got != 10 {
		t.Errorf("the day's counter is %d, want 10", got)
	}
}

// P07: a transaction that began long ago waits for one that is ahead of it, and
// clocks disagree: elapsed time is never negative, the refill never moves back.
func TestP07ClocksDisagree(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	key, budget := newKey(), Budget{PerSecond: 10, Burst: 100}

	slow, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Rollback(context.Background()) //nolint:errcheck // after Commit it is none
	// The transaction's own now() is fixed here, before the other one's.
	if _, err := slow.Exec(t.Context(), "SELECT now()"); err != nil {
		t.Fatal(err)
	}
	ahead, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer ahead.Rollback(context.Background()) //nolint:errcheck // after Commit it is none
	mustTake(t, NewStore(ahead), ScopeIngestNode, key, 90, budget, noon.Add(5*time.Minute))

	taken := make(chan bool)
	go func() {
		ok, err := NewStore(slow).Take(t.Context(), ScopeIngestNode, key, 10, budget, noon.Add(-5*time.Minute))
		if err != nil {
			t.Error(err)
		}
		taken <- ok
	}()
	waitUntil(t, "the slow take to wait for the row", func() bool {
		return count(t, pool, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'") > 0
	})
	if err := ahead.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !<-taken {
		t.Error("what the bucket held was refused")
	}
	if err := slow.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	tokens, at, _ := bucketRow(t, pool, ScopeIngestNode, key)
	if tokens != 0 || !at.Equal(noon.Add(5*time.Minute)) {
		t.Errorf("row = %v at %v, want 0 at the later of the two clocks", tokens, at)
	}
	// A replica whose clock is behind gets nothing until it has caught up.
	if mustTake(t, s, ScopeIngestNode, key, 1, budget, noon) {
		t.Error("a clock that is behind was granted a refill")
	}
	if !mustTake(t, s, ScopeIngestNode, key, 1, budget, noon.Add(5*time.Minute+100*time.Millisecond)) {
		t.Error("a clock that caught up was refused")
	}
}

// waitUntil polls a condition in the database.
func waitUntil(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !done() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("gave up waiting for %s", what)
		}
	}
}

// P10: updates stay heap-only, through both write paths, and the tables stay small. The
// server is the test's own: a transaction that stays open, in any database of a server,
// keeps dead rows from being pruned for a while.
func TestP10UpdatesAreHeapOnly(t *testing.T) {
	t.Parallel()

	server := ownServer(t)
	pool := newPool(t, server.DSN("postgres"), 1) // statistics are flushed by session
	s := NewStore(pool)
	budget := Budget{PerSecond: 1e6, Burst: 1e9}
	keys := make([]Key, 20)
	for i := range keys {
		keys[i] = newKey()
	}
	const rounds = 60
	now := noon
	for range rounds {
		for i, key := range keys {
			now = now.Add(time.Millisecond)
			mustTake(t, s, ScopeIngestNode, key, 100, budget, now)
			mustDecide(t, s, policy.Request{
				Now:     now,
				Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: 7}},
				Quotas:  []policy.QuotaDebit{quotaDebit(consumer(strconv.Itoa(i)), dayMonth(1e6, 1e6), 7)},
			})
		}
	}
	if _, err := pool.Exec(t.Context(), "SELECT pg_stat_force_next_flush()"); err != nil {
		t.Fatal(err)
	}
	for table, want := range map[string]int64{
		"rate_budgets":   len64(keys) * (2*rounds - 1),
		"quota_counters": 2 * len64(keys) * (rounds - 1),
	} {
		var updates, hot, size int64
		if err := pool.QueryRow(t.Context(), `
			SELECT n_tup_upd, n_tup_hot_upd, pg_table_size(relid) FROM pg_stat_user_tables
			WHERE schemaname = 'plexsphere' AND relname = $1`, table).Scan(&updates, &hot, &size); err != nil {
			t.Fatal(err)
		}
		if updates != want || float64(hot) < 0.95*float64(updates) {
			t.Errorf("%s: %d updates, %d of them heap-only; want %d, and 95%%", table, updates, hot, want)
		}
		if size > 256<<10 {
			t.Errorf("%s grew to %d bytes", table, size)
		}
	}
}

func len64[T any](s []T) int64 { return int64(len(s)) }

// T03: ten years of idleness fill a bucket, and no more.
func TestT03LongIdleIsFull(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	key, budget := newKey(), Budget{PerSecond: 2 << 20, Burst: 4 << 30}
	mustTake(t, s, ScopeIngestNode, key, 4<<30, budget, noon)
	later := noon.AddDate(10, 0, 0)
	v := mustDecide(t, s, policy.Request{
		Now:     later,
		Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: 1}},
	})
	if got := v.Budgets[0]; !v.Allowed || got.Tokens != 4<<30-1 || !got.RefilledAt.Equal(later) {
		t.Errorf("after ten years: %+v, want the burst less 1", v)
	}
	if tokens, _, _ := bucketRow(t, pool, ScopeIngestNode, key); tokens != 4<<30-1 {
		t.Errorf("row = %v, want the burst less 1", tokens)
	}
}

// Years that no timestamp holds are an error, not an overflow.
func TestNowOutOfRange(t *testing.T) {
	t.Parallel()

	db := &failingDB{err: errors.New("queried")}
	s := NewStore(db)
	for _, now := range []time.Time{time.Unix(1<<60, 0), time.Unix(-1<<60, 0)} {
		if _, err := s.Take(t.Context(), ScopeIngestNode, newKey(), 1, Budget{PerSecond: 1, Burst: 1}, now); err == nil {
			t.Errorf("Take at %v: no error", now)
		}
		if _, err := s.Decide(t.Context(), policy.Request{Now: now}); err == nil {
			t.Errorf("Decide at %v: no error", now)
		}
		if _, err := s.Used(t.Context(), "c", dayMonth(1, 1), now); err == nil {
			t.Errorf("Used at %v: no error", now)
		}
		if _, err := s.DeleteIdle(t.Context(), now); err == nil {
			t.Errorf("DeleteIdle before %v: no error", now)
		}
	}
	if db.queries != 0 {
		t.Errorf("%d queries, want none", db.queries)
	}
}

// P06: a row that somebody holds is waited for, and never taken for a missing one, which
// would be minted full.
func TestP06LockedRowIsNotMissing(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	budget, windows := Budget{PerSecond: 1, Burst: 10}, dayMonth(10, 10)
	for name, try := range map[string]func(s *Store, key Key, cost int64) (bool, error){
		"Take": func(s *Store, key Key, cost int64) (bool, error) {
			return s.Take(t.Context(), ScopeIngestNode, key, float64(cost), budget, noon)
		},
		"Decide": func(s *Store, key Key, cost int64) (bool, error) {
			v, err := s.Decide(t.Context(), policy.Request{Now: noon, Budgets: []policy.BudgetDebit{
				{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: cost},
			}})
			return v.Allowed, err
		},
		"quota": func(s *Store, key Key, cost int64) (bool, error) {
			v, err := s.Decide(t.Context(), quotaRequest(consumer(key.String()), windows, cost, noon))
			return v.Allowed, err
		},
	} {
		key := newKey()
		if ok, err := try(s, key, 2); !ok || err != nil {
			t.Fatalf("%s: %v, %v", name, ok, err)
		}
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if ok, err := try(NewStore(tx), key, 6); !ok || err != nil {
			t.Fatalf("%s in a transaction: %v, %v", name, ok, err)
		}
		taken := make(chan bool)
		go func() {
			ok, err := try(s, key, 5) // 8 are left by what is committed, and 2 in truth
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			taken <- ok
		}()
		waitForLock(t, pool)
		if err := tx.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		if <-taken {
			t.Errorf("%s: admitted 5 of the 2 that were left", name)
		}
		if ok, err := try(s, key, 2); !ok || err != nil {
			t.Errorf("%s: %v, %v for what is left", name, ok, err)
		}
	}
}

// T01: polling often doesn't starve a slow bucket.
func TestT01TakeSlowBucket(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	key, budget := newKey(), Budget{PerSecond: 0.1, Burst: 2}
	mustTake(t, s, ScopeSecretReadNode, key, 2, budget, noon)
	admitted, first := 0, time.Duration(0)
	for at := 900 * time.Millisecond; at <= time.Hour; at += 900 * time.Millisecond {
		if mustTake(t, s, ScopeSecretReadNode, key, 1, budget, noon.Add(at)) {
			admitted++
			if first == 0 {
				first = at
			}
		}
	}
	// The 360th may miss its poll by a rounding, and then comes with the next.
	if first != 10_800*time.Millisecond || admitted < 359 || admitted > 360 {
		t.Errorf("first admitted after %v and %d in an hour, want 10.8s and 360", first, admitted)
	}
}

// T02: random takes stay within takes × 2^-52 × burst of exact arithmetic: what that admits
// or refuses by more is decided the same way, and the bucket holds the same in the end.
func TestT02TakeDoesNotDrift(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	key, budget := newKey(), Budget{PerSecond: 1e6 / 3., Burst: 3e8 / 7.}
	const takes = 3000
	rate := new(big.Rat).SetFloat64(budget.PerSecond)
	rate.Quo(rate, big.NewRat(1e6, 1)) // a microsecond
	burst := new(big.Rat).SetFloat64(budget.Burst)
	tolerance := new(big.Rat).Mul(big.NewRat(takes, 1<<52), burst)
	level, at := new(big.Rat).Set(burst), noon
	r := rand.New(rand.NewPCG(5, 2))
	refused := 0
	for now, i := noon, 0; i < takes; i++ {
		elapsed := r.Int64N(20_000_000) // in which less comes back than is asked for
		now = now.Add(time.Duration(elapsed) * time.Microsecond)
		cost := big.NewRat(r.Int64N(8_000_000)+1, 1)
		ok := mustTake(t, s, ScopeIngestNode, key, float64(cost.Num().Int64()), budget, now)
		held := new(big.Rat).Mul(rate, big.NewRat(now.Sub(at).Microseconds(), 1))
		held.Add(held, level)
		if held.Cmp(burst) > 0 {
			held.Set(burst)
		}
		left := new(big.Rat).Sub(held, cost)
		if exact := left.Sign() >= 0; ok != exact && new(big.Rat).Abs(left).Cmp(tolerance) > 0 {
			t.Fatalf("take %d of %v from %s: admitted %v", i, cost.Num(), held.FloatString(6), ok)
		}
		if ok {
			level, at = left, now
		} else {
			refused++
		}
	}
	tokens, _, _ := bucketRow(t, pool, ScopeIngestNode, key)
	drift := new(big.Rat).SetFloat64(tokens)
	if drift.Sub(drift, level).Abs(drift).Cmp(tolerance) > 0 {
		t.Errorf("the bucket holds %v, and %s by exact arithmetic", tokens, level.FloatString(6))
	}
	if refused < takes/20 || refused > takes/2 {
		t.Errorf("%d of %d takes were refused: that proves little", refused, takes)
	}
}

// T05, T07: neither many tries nor the edge of a window gives a second burst.
func TestT05T07TakeNoDoubleBurst(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	admitted := func(budget Budget, tries []time.Duration) (n int) {
		key := newKey()
		for _, at := range tries {
			if mustTake(t, s, ScopeSecretReadNode, key, 1, budget, noon.Add(at)) {
				n++
			}
		}
		return n
	}
	var minute, edge []time.Duration
	for i := range 600 {
		minute = append(minute, time.Duration(i)*100*time.Millisecond)
	}
	for i := range 200 {
		edge = append(edge, time.Duration(59+i/100)*time.Second)
	}
	if n := admitted(Budget{PerSecond: 3, Burst: 3}, minute); n > 183 || n < 180 {
		t.Errorf("T05: %d admitted in a minute of 3/s, want 180 to 183", n)
	}
	if n := admitted(Budget{PerSecond: 100. / 60, Burst: 100}, edge); n != 101 {
		t.Errorf("T07: %d admitted around the minute's edge, want 101", n)
	}
}

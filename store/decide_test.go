package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

func quotaDebit(c policy.Consumer, budgets []quota.Budget, cost int64) policy.QuotaDebit {
	return policy.QuotaDebit{Counter: c.ID, Consumer: &c, Budgets: budgets, Cost: cost}
}

func reserved(denied int, used []int64) policy.QuotaState {
	return policy.QuotaState{Reservation: quota.Reservation{Denied: denied, Used: used}}
}

func quotaRequest(c policy.Consumer, budgets []quota.Budget, cost int64, now time.Time) policy.Request {
	return policy.Request{Now: now, Quotas: []policy.QuotaDebit{quotaDebit(c, budgets, cost)}}
}

// usedIn returns what the current windows of a quota hold.
func usedIn(t *testing.T, s *Store, c policy.Consumer, budgets []quota.Budget, now time.Time) []int64 {
	t.Helper()
	return mustDecide(t, s, quotaRequest(c, budgets, 0, now)).Quotas[0].Used
}

func rowCounts(t *testing.T, db DBTX) (buckets, counters, consumers int64) {
	t.Helper()
	return count(t, db, "SELECT count(*) FROM plexsphere.rate_budgets"),
		count(t, db, "SELECT count(*) FROM plexsphere.quota_counters"),
		count(t, db, "SELECT count(*) FROM plexsphere.consumers")
}

// Law 2: a refusal by any of a request's limits takes from none of them.
func TestDecideAllOrNone(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	node, domain, holder := newKey(), newKey(), consumer("c")
	small, large := Budget{PerSecond: 1, Burst: 10}, Budget{PerSecond: 10, Burst: 100}
	request := func(cost int64, day int64) policy.Request {
		return policy.Request{
			Now: noon,
			Budgets: []policy.BudgetDebit{
				{Scope: ScopeIngestDomain, Key: domain, Budget: large, Cost: cost},
				{Scope: ScopeIngestNode, Key: node, Budget: small, Cost: cost},
			},
			Quotas: []policy.QuotaDebit{quotaDebit(holder, dayMonth(day, 100), 1)},
		}
	}

	// Refused before anything was ever taken: no row at all appears.
	v := mustDecide(t, s, request(11, 5))
	if v.Allowed || !v.Budgets[0].Covered || v.Budgets[1].Covered || v.Quotas[0].Denied != -1 {
		t.Errorf("over the node's ceiling: %+v", v)
	}
	if b, c, e := rowCounts(t, pool); b+c+e != 0 {
		t.Errorf("a refused request wrote %d buckets, %d counters, %d consumers", b, c, e)
	}

	if v := mustDecide(t, s, request(7, 5)); !v.Allowed {
		t.Fatalf("refused what fits: %+v", v)
	}
	if b, c, e := rowCounts(t, pool); b != 2 || c != 2 || e != 1 {
		t.Errorf("an admitted request wrote %d buckets, %d counters, %d consumers, want 2, 2, 1", b, c, e)
	}

	want := policy.Verdict{
		At: noon,
		Budgets: []policy.BudgetState{
			{Covered: true, Tokens: 93, RefilledAt: noon},
			{Covered: false, Tokens: 3, RefilledAt: noon},
		},
		Quotas: []policy.QuotaState{reserved(-1, []int64{1, 1})},
	}
	if diff := cmp.Diff(want, mustDecide(t, s, request(7, 5))); diff != "" {
		t.Errorf("refused by the node (-want +got):\n%s", diff)
	}
	want.Budgets[1].Covered = true
	want.Quotas[0].Denied = 0
	if diff := cmp.Diff(want, mustDecide(t, s, request(3, 1))); diff != "" {
		t.Errorf("refused by the day (-want +got):\n%s", diff)
	}
	for scope, key := range map[Scope]Key{ScopeIngestDomain: domain, ScopeIngestNode: node} {
		tokens, at, _ := bucketRow(t, pool, scope, key)
		if want := map[Scope]float64{ScopeIngestDomain: 93, ScopeIngestNode: 3}[scope]; tokens != want || !at.Equal(noon) {
			t.Errorf("%s holds %v as of %v, want %v as of noon", scope, tokens, at, want)
		}
	}
}

// Law 2's one exception: what the month denies stays spent in the day, and nothing
// else is spent.
func TestDecideMonthDeniesDayStaysSpent(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	key, budget := newKey(), Budget{PerSecond: 1, Burst: 100}
	first, second := consumer("first"), consumer("second")
	if !mustDecide(t, s, quotaRequest(second, dayMonth(10, 3), 3, noon)).Allowed {
		t.Fatal("refused what fits")
	}
	req := policy.Request{
		Now:     noon,
		Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: 5}},
		Quotas: []policy.QuotaDebit{
			quotaDebit(first, dayMonth(10, 10), 1),
			quotaDebit(second, dayMonth(10, 3), 2),
		},
	}
	want := policy.Verdict{
		At:      noon,
		Budgets: []policy.BudgetState{{Covered: true, Tokens: 100, RefilledAt: noon}},
		Quotas:  []policy.QuotaState{reserved(-1, []int64{0, 0}), reserved(1, []int64{5, 3})},
	}
	if diff := cmp.Diff(want, mustDecide(t, s, req)); diff != "" {
		t.Errorf("denied by the month (-want +got):\n%s", diff)
	}
	if b, c, e := rowCounts(t, pool); b != 0 || c != 2 || e != 1 {
		t.Errorf("%d buckets, %d counters, %d consumers, want only the second consumer's two counters", b, c, e)
	}

	// When a budget refuses, no quota is spent, not even its day.
	req.Budgets[0].Cost = 101
	v := mustDecide(t, s, req)
	if v.Allowed || v.Quotas[1].Denied != 1 || v.Quotas[1].Used[0] != 5 {
		t.Errorf("refused by the budget: %+v, want the day's 5 unchanged", v)
	}
	// The waste ends at the day's own limit: then the day denies, which is free.
	for _, wantUsed := range []int64{7, 9, 9, 9} {
		v := mustDecide(t, s, quotaRequest(second, dayMonth(10, 3), 2, noon))
		if got := v.Quotas[0].Used[0]; v.Allowed || got != wantUsed {
			t.Errorf("allowed %v with %d used in the day, want %d", v.Allowed, got, wantUsed)
		}
	}
}

// A cost above a window's whole limit can never fit: it is refused with a reading
// only, and wastes no day.
func TestDecideOverTheLimitIsOnlyRead(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	holder := consumer("c")
	v := mustDecide(t, s, quotaRequest(holder, dayMonth(100, 10), 11, noon))
	if v.Allowed || v.Quotas[0].Denied != 1 {
		t.Errorf("over the month's limit: %+v, want denied by the month", v)
	}
	key := newKey()
	for _, cost := range []int64{11, policy.MaxUnits + 1, 1<<63 - 1} {
		v := mustDecide(t, s, policy.Request{
			Now:     noon,
			Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: Budget{PerSecond: 1, Burst: 10}, Cost: cost}},
		})
		if v.Allowed || v.Budgets[0].Covered || v.Budgets[0].Tokens != 10 {
			t.Errorf("cost %d over the ceiling: %+v, want not covered, 10 left", cost, v)
		}
	}
	if b, c, e := rowCounts(t, pool); b+c+e != 0 {
		t.Errorf("wrote %d buckets, %d counters, %d consumers", b, c, e)
	}
	// As a double, 2^53 + 1 would be the burst itself.
	huge := Budget{PerSecond: policy.MaxUnits, Burst: policy.MaxUnits}
	v = mustDecide(t, s, policy.Request{
		Now:     noon,
		Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: huge, Cost: policy.MaxUnits + 1}},
	})
	if v.Allowed {
		t.Error("admitted 2^53 + 1 from a burst of 2^53")
	}
}

// One bucket, or one consumer, named twice in a request is charged twice, in order.
func TestDecideSameLimitTwice(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	key, budget, holder := newKey(), Budget{PerSecond: 1, Burst: 10}, consumer("c")
	request := func(costs ...int64) policy.Request {
		req := policy.Request{Now: noon}
		for _, cost := range costs {
			req.Budgets = append(req.Budgets, policy.BudgetDebit{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: cost})
			req.Quotas = append(req.Quotas, quotaDebit(holder, dayMonth(20, 20), cost))
		}
		return req
	}
	v := mustDecide(t, s, request(8, 8, 2))
	if v.Allowed || !v.Budgets[0].Covered || v.Budgets[1].Covered || !v.Budgets[2].Covered || v.Budgets[2].Tokens != 10 {
		t.Errorf("8, 8, 2 of 10: %+v, want the second uncovered and nothing taken", v)
	}
	v = mustDecide(t, s, request(6, 4))
	if !v.Allowed || v.Budgets[0].Tokens != 0 || v.Budgets[1].Tokens != 0 || v.Quotas[0].Used[0] != 10 {
		t.Errorf("6, 4 of 10: %+v, want all taken", v)
	}
}

// A zero cost is covered by an empty bucket and a full window, writes nothing, waits
// for nobody, and yet tells the truth (C03).
func TestC03ZeroCostReadsOnly(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	key, budget, holder := newKey(), Budget{PerSecond: 1, Burst: 10}, consumer("c")
	request := func(cost int64) policy.Request {
		return policy.Request{
			Now:     noon,
			Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: cost}},
			Quotas:  []policy.QuotaDebit{quotaDebit(holder, dayMonth(10, 100), cost)},
		}
	}
	v := mustDecide(t, s, request(0))
	if !v.Allowed || v.Budgets[0].Tokens != 10 || v.Quotas[0].Used[0] != 0 {
		t.Errorf("zero of a fresh limit: %+v", v)
	}
	if b, c, e := rowCounts(t, pool); b+c+e != 0 {
		t.Errorf("zero cost wrote %d buckets, %d counters, %d consumers", b, c, e)
	}
	if !mustDecide(t, s, request(10)).Allowed {
		t.Fatal("refused what fits")
	}

	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context()) //nolint:errcheck // nothing to keep
	if _, err := tx.Exec(t.Context(), "SELECT FROM plexsphere.rate_budgets, plexsphere.quota_counters FOR UPDATE"); err != nil {
		t.Fatal(err)
	}
	want := policy.Verdict{
		At:      noon,
		Allowed: true,
		Budgets: []policy.BudgetState{{Covered: true, Tokens: 0, RefilledAt: noon}},
		Quotas:  []policy.QuotaState{reserved(-1, []int64{10, 10})},
	}
	if diff := cmp.Diff(want, mustDecide(t, s, request(0))); diff != "" {
		t.Errorf("zero cost beside a locked row (-want +got):\n%s", diff)
	}
}

// C01: a narrow limit's refusals leave the broad one alone.
func TestC01RefusedByTheNarrowSparesTheBroad(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	user, site := consumer("user"), consumer("site")
	allowed := 0
	var last policy.Verdict
	for range 50 {
		last = mustDecide(t, s, policy.Request{Now: noon, Quotas: []policy.QuotaDebit{
			quotaDebit(user, quotaOf(map[quota.Unit]int64{quota.Hour: 1}), 1),
			quotaDebit(site, quotaOf(map[quota.Unit]int64{quota.Hour: 100}), 1),
		}})
		if last.Allowed {
			allowed++
		}
	}
	if allowed != 1 || last.Quotas[1].Used[0] != 1 {
		t.Errorf("allowed %d with %d used of the site, want 1 and 1", allowed, last.Quotas[1].Used[0])
	}
}

// C02: a refused large cost leaves room for a small one. C50: limits beyond 32 bits.
func TestC02RefusedCostIsNotCharged(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	for i, scale := range []int64{1, 1e12} {
		holder, hour := consumer(strconv.Itoa(i)), quotaOf(map[quota.Unit]int64{quota.Hour: 5 * scale})
		for _, step := range []struct {
			cost, left int64
			allowed    bool
		}{{3, 2, true}, {4, 2, false}, {1, 1, true}} {
			v := mustDecide(t, s, quotaRequest(holder, hour, step.cost*scale, noon))
			if left := 5*scale - v.Quotas[0].Used[0]; v.Allowed != step.allowed || left != step.left*scale {
				t.Errorf("cost %d: allowed %v, %d left, want %v, %d", step.cost*scale, v.Allowed, left, step.allowed, step.left*scale)
			}
		}
	}
}

// C33: a limit edited under use is right at once, both ways.
func TestC33LimitEditedUnderUse(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	holder := consumer("c")
	for _, step := range []struct {
		limit, cost int64
		allowed     bool
		used        int64
	}{
		{limit: 10, cost: 7, allowed: true, used: 7},
		{limit: 5, cost: 1, allowed: false, used: 7},
		{limit: 20, cost: 1, allowed: true, used: 8},
		{limit: 20, cost: 12, allowed: true, used: 20},
	} {
		v := mustDecide(t, s, quotaRequest(holder, quotaOf(map[quota.Unit]int64{quota.Month: step.limit}), step.cost, noon))
		if v.Allowed != step.allowed || v.Quotas[0].Used[0] != step.used {
			t.Errorf("%+v: allowed %v, used %d", step, v.Allowed, v.Quotas[0].Used[0])
		}
	}
	// A bucket's ceiling, lowered and raised: it keeps what it held, up to the new one.
	key := newKey()
	for _, step := range []struct {
		burst   float64
		cost    int64
		allowed bool
		tokens  float64
	}{
		{burst: 100, cost: 20, allowed: true, tokens: 80},
		{burst: 10, cost: 11, allowed: false, tokens: 80},
		{burst: 10, cost: 4, allowed: true, tokens: 6},
		{burst: 100, cost: 7, allowed: false, tokens: 6},
		{burst: 100, cost: 6, allowed: true, tokens: 0},
	} {
		v := mustDecide(t, s, policy.Request{Now: noon, Budgets: []policy.BudgetDebit{
			{Scope: ScopeIngestNode, Key: key, Budget: Budget{PerSecond: 1, Burst: step.burst}, Cost: step.cost},
		}})
		if v.Allowed != step.allowed || v.Budgets[0].Tokens != step.tokens {
			t.Errorf("%+v: allowed %v, tokens %v", step, v.Allowed, v.Budgets[0].Tokens)
		}
	}
}

// C34: windows of different units are different counters, also where they start at
// the same instant.
func TestC34UnitsAreApart(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	holder := consumer("c")
	newYear := time.Date(2029, time.January, 1, 0, 0, 0, 0, time.UTC) // a Monday
	for u := quota.Second; u <= quota.Year; u++ {
		v := mustDecide(t, s, quotaRequest(holder, quotaOf(map[quota.Unit]int64{u: 3}), 3, newYear))
		if !v.Allowed {
			t.Errorf("%s was charged with another unit's use: %+v", u, v)
		}
	}
}

// C57, C58: a new window starts at nothing, on the instant, whatever the last one's
// row holds; and the old row is as it was.
func TestC57WindowsTurnOver(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	for u := quota.Second; u <= quota.Year; u++ {
		holder, budgets := consumer(u.String()), quotaOf(map[quota.Unit]int64{u: 5})
		end := time.Unix(u.Window(noon.Unix()).End, 0)
		for _, step := range []struct {
			now     time.Time
			allowed bool
			used    int64
		}{
			{noon, true, 5},
			{end.Add(-time.Microsecond), false, 5},
			{end, true, 5},
			{end.Add(-time.Microsecond), false, 5},
		} {
			v := mustDecide(t, s, quotaRequest(holder, budgets, 5, step.now))
			if v.Allowed != step.allowed || v.Quotas[0].Used[0] != step.used {
				t.Errorf("%s at %v: allowed %v, used %d, want %v, %d", u, step.now, v.Allowed, v.Quotas[0].Used[0], step.allowed, step.used)
			}
		}
		if got := count(t, pool, "SELECT count(*) FROM plexsphere.quota_counters WHERE counter = $1", holder.ID[:]); got != 2 {
			t.Errorf("%s: %d rows, want one a window", u, got)
		}
	}
}

// C05 and its brothers: arguments that no caller should pass are errors before any
// query, and wrap their sentinels.
func TestC05DecideChecksBeforeAnyQuery(t *testing.T) {
	t.Parallel()

	budget := Budget{PerSecond: 1, Burst: 10}
	debit := func(change func(*policy.BudgetDebit)) policy.Request {
		d := policy.BudgetDebit{Scope: ScopeIngestNode, Key: newKey(), Budget: budget, Cost: 1}
		change(&d)
		return policy.Request{Now: noon, Budgets: []policy.BudgetDebit{d}}
	}
	for name, tc := range map[string]struct {
		req  policy.Request
		want error
	}{
		"scope":      {debit(func(d *policy.BudgetDebit) { d.Scope = "x" }), ErrUnknownScope},
		"key":        {debit(func(d *policy.BudgetDebit) { d.Key = Key{} }), ErrZeroKey},
		"budget":     {debit(func(d *policy.BudgetDebit) { d.Budget = Budget{}; d.Cost = 0 }), ErrInvalidBudget},
		"limiter":    {policy.Request{Now: noon, Limiters: []policy.LimiterDebit{{Policy: policy.LimiterPolicy{Permits: 1, Per: 1, Burst: 1}}}}, policy.ErrInvalidArgument},
		"no windows": {quotaRequest(consumer("c"), nil, 1, noon), nil},
		"unit 0":     {quotaRequest(consumer("c"), []quota.Budget{{Limit: 1}}, 1, noon), nil},
		"unit 99":    {quotaRequest(consumer("c"), []quota.Budget{{Unit: 99, Limit: 1}}, 1, noon), nil},
		"limit":      {quotaRequest(consumer("c"), dayMonth(-1, 1), 1, noon), nil},
		"order":      {quotaRequest(consumer("c"), []quota.Budget{{Unit: quota.Month, Limit: 1}, {Unit: quota.Day, Limit: 1}}, 1, noon), nil},
		"optional":   {policy.Request{Now: noon, Quotas: []policy.QuotaDebit{{Budgets: dayMonth(1, 1), Optional: true}}}, nil},
		"counter":    {policy.Request{Now: noon, Quotas: []policy.QuotaDebit{{Budgets: dayMonth(1, 1), Consumer: &policy.Consumer{ID: policy.CounterID{1}}}}}, nil},
		"charged at": {policy.Request{Now: noon, Quotas: []policy.QuotaDebit{{Budgets: dayMonth(1, 1), ChargedAt: time.Unix(1<<40, 0)}}}, nil},
		"shadow":     {policy.Request{Now: noon, Shadows: []policy.Request{quotaRequest(consumer("c"), nil, 1, noon)}}, nil},
		"shadows":    {policy.Request{Now: noon, Shadows: []policy.Request{{Now: noon, Shadows: []policy.Request{{Now: noon}}}}}, nil},
		"same twice": {quotaRequest(consumer("c"), []quota.Budget{{Unit: quota.Day, Limit: 1}, {Unit: quota.Day, Limit: 2}}, 1, noon), nil},
	} {
		db := &failingDB{err: errors.New("queried")}
		v, err := NewStore(db).Decide(t.Context(), tc.req)
		if v.Allowed || err == nil || (tc.want != nil && !errors.Is(err, tc.want)) {
			t.Errorf("%s: %+v, %v, want an error of %v", name, v, err, tc.want)
		}
		if db.queries != 0 {
			t.Errorf("%s: %d queries, want none", name, db.queries)
		}
	}
	db := &failingDB{err: errors.New("queried")}
	if v, err := NewStore(db).Decide(t.Context(), policy.Request{Now: noon}); !v.Allowed || err != nil || db.queries != 0 {
		t.Errorf("an empty request: %+v, %v after %d queries, want allowed without a query", v, err, db.queries)
	}
}

// A collision is retried three times and no more, and what was not undone, never.
func TestDecideRetries(t *testing.T) {
	t.Parallel()

	req := quotaRequest(consumer("c"), dayMonth(1, 1), 1, noon)
	for code, want := range map[string]int{"40001": 4, "40P01": 4, "57P01": 1, "25006": 1, "53300": 1} {
		db := &failingDB{err: &pgconn.PgError{Code: code}}
		v, err := NewStore(db).Decide(t.Context(), req)
		var pgErr *pgconn.PgError
		if v.Allowed || !errors.As(err, &pgErr) || pgErr.Code != code || db.queries != want {
			t.Errorf("%s: %+v, %v after %d queries, want the error after %d", code, v, err, db.queries, want)
		}
	}
	db := &failingTx{failingDB: failingDB{err: &pgconn.PgError{Code: "40001"}}}
	if _, err := NewStore(db).Decide(t.Context(), req); err == nil || db.queries != 1 {
		t.Errorf("in a transaction: %v after %d queries, want an error after 1", err, db.queries)
	}
}

// failingTx is a transaction whose queries fail.
type failingTx struct {
	failingDB
	pgx.Tx
}

func (f *failingTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return f.failingDB.Exec(ctx, sql, args...)
}

func (f *failingTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return f.failingDB.Query(ctx, sql, args...)
}

func (f *failingTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return f.failingDB.QueryRow(ctx, sql, args...)
}

// The function itself tells a row that was minted meanwhile from one that it locked:
// what another transaction inserted and has not committed is waited for, then seen.
func TestDecideCollidesAndRetries(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	key, budget, holder := newKey(), Budget{PerSecond: 1, Burst: 10}, consumer("c")
	req := policy.Request{
		Now:     noon,
		Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: 6}},
		Quotas:  []policy.QuotaDebit{quotaDebit(holder, dayMonth(10, 10), 6)},
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context()) //nolint:errcheck // committed below
	if !mustDecide(t, NewStore(tx), req).Allowed {
		t.Fatal("refused what fits")
	}
	verdict := make(chan policy.Verdict)
	go func() {
		v, err := s.Decide(t.Context(), req)
		if err != nil {
			t.Error(err)
		}
		verdict <- v
	}()
	waitUntil(t, "the second to wait for the first", func() bool {
		return count(t, pool, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'") > 0
	})
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	v := <-verdict
	if v.Allowed || v.Budgets[0].Covered || v.Budgets[0].Tokens != 4 || v.Quotas[0].Denied != 0 || v.Quotas[0].Used[0] != 6 {
		t.Errorf("the second: %+v, want a refusal with what the first left", v)
	}
}

// A hundred at once on limits below a hundred: exactly the tightest is admitted, and
// the others are charged for no more than that.
func TestDecideHundredAtOnce(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	node, domain, holder := newKey(), newKey(), consumer("c")
	var admitted atomic.Int64
	together(100, func(int) {
		v, err := s.Decide(t.Context(), policy.Request{
			Now: noon,
			Budgets: []policy.BudgetDebit{
				{Scope: ScopeIngestNode, Key: node, Budget: Budget{PerSecond: 1, Burst: 50}, Cost: 1},
				{Scope: ScopeIngestDomain, Key: domain, Budget: Budget{PerSecond: 1, Burst: 60}, Cost: 1},
			},
			Quotas: []policy.QuotaDebit{quotaDebit(holder, dayMonth(30, 40), 1)},
		})
		if err != nil {
			t.Error(err)
		}
		if v.Allowed {
			admitted.Add(1)
		}
	})
	if got := admitted.Load(); got != 30 {
		t.Errorf("admitted %d, want exactly 30", got)
	}
	if tokens, _, _ := bucketRow(t, pool, ScopeIngestDomain, domain); tokens != 30 {
		t.Errorf("the domain's bucket holds %v, want 30", tokens)
	}
	if got := usedIn(t, s, holder, dayMonth(30, 40), noon); !slices.Equal(got, []int64{30, 30}) {
		t.Errorf("used %v, want 30 of each", got)
	}
}

// P01: workers with overlapping keys in random order, singly and in batches: no
// deadlock at all, and the rows hold exactly what was not admitted.
func TestP01OverlappingKeys(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	const workers, shared, perRequest, rounds = 16, 20, 5, 60
	budget := Budget{PerSecond: 1e6, Burst: 3000}
	var keys []Key
	var holders []policy.Consumer
	for i := range shared {
		keys = append(keys, newKey())
		holders = append(holders, consumer(fmt.Sprint("p01 ", i)))
	}
	windows := dayMonth(3000, 2500)

	var mu sync.Mutex
	spent := map[Key]int64{}
	used := map[policy.CounterID][2]int64{}
	// account notes what a verdict says was spent.
	account := func(req policy.Request, v policy.Verdict) {
		mu.Lock()
		defer mu.Unlock()
		covered := true
		for i, d := range req.Budgets {
			if v.Allowed {
				spent[d.Key] += d.Cost
			}
			covered = covered && v.Budgets[i].Covered
		}
		for i, d := range req.Quotas {
			u := used[d.Consumer.ID]
			denied := v.Quotas[i].Denied
			if v.Allowed {
				u[0] += d.Cost
				u[1] += d.Cost
			} else if covered && denied == 1 {
				u[0] += d.Cost
			}
			used[d.Consumer.ID] = u
			covered = covered && denied < 0
		}
	}
	request := func(r *rand.Rand) policy.Request {
		req := policy.Request{Now: noon}
		for range perRequest {
			req.Budgets = append(req.Budgets, policy.BudgetDebit{
				Scope: ScopeIngestNode, Key: keys[r.IntN(shared)], Budget: budget, Cost: r.Int64N(30),
			})
			req.Quotas = append(req.Quotas, quotaDebit(holders[r.IntN(shared)], windows, r.Int64N(30)))
		}
		return req
	}
	together(workers, func(worker int) {
		r := rand.New(rand.NewPCG(1, uint64(worker)))
		for range rounds {
			reqs := make([]policy.Request, 1+r.IntN(4))
			for i := range reqs {
				reqs[i] = request(r)
			}
			verdicts, err := s.decide(t.Context(), reqs)
			if err != nil {
				t.Error(err)
				return
			}
			for i := range reqs {
				account(reqs[i], verdicts[i])
			}
			// The take's statement competes for the same rows.
			key, cost := keys[r.IntN(shared)], r.Int64N(30)
			ok, err := s.Take(t.Context(), ScopeIngestNode, key, float64(cost), budget, noon)
			if err != nil {
				t.Error(err)
				return
			}
			if ok {
				mu.Lock()
				spent[key] += cost
				mu.Unlock()
			}
		}
	})

	for i, key := range keys {
		if tokens, _, ok := bucketRow(t, pool, ScopeIngestNode, key); !ok || tokens != budget.Burst-float64(spent[key]) {
			t.Errorf("bucket %d holds %v, want %v", i, tokens, budget.Burst-float64(spent[key]))
		}
		want := used[holders[i].ID]
		if got := usedIn(t, s, holders[i], windows, noon); !slices.Equal(got, want[:]) {
			t.Errorf("consumer %d used %v, want %v", i, got, want)
		}
	}
	exhausted := 0
	for total := range maps.Values(spent) {
		if total > 2900 {
			exhausted++
		}
	}
	if exhausted == 0 {
		t.Error("no bucket came near its end: the load proves little")
	}
	// The statistics are flushed when the workers' sessions end.
	pool.Reset()
	if got := count(t, pool, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"); got != 0 {
		t.Errorf("%d deadlocks", got)
	}
}

package quota_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weir-dev/weir/quota"
)

// noon is 2026-11-30 12:00 UTC: the day and the month end together, 12 hours on.
var noon = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func dayMonth(daily, monthly int64) []quota.Budget {
	return []quota.Budget{
		{Key: quota.DailyKey, Unit: quota.Day, Limit: daily},
		{Key: quota.MonthlyKey, Unit: quota.Month, Limit: monthly},
	}
}

// memory is a Store in a map, with the evaluation order of the package comment. The
// real one is tested on Postgres in package store.
type memory struct {
	used map[memoryKey]int64
	err  error
}

type memoryKey struct {
	consumer string
	window   quota.Window
}

func (m *memory) Reserve(_ context.Context, consumer string, budgets []quota.Budget, cost int64, now time.Time) (quota.Reservation, error) {
	if m.err != nil {
		return quota.Reservation{}, m.err
	}
	r := quota.Reservation{Denied: -1, Used: make([]int64, len(budgets))}
	for i, b := range budgets {
		key := memoryKey{consumer, b.Unit.Window(now.Unix())}
		switch {
		case r.Denied >= 0: // only read
		case m.used[key]+cost > b.Limit:
			r.Denied = i
		default:
			m.used[key] += cost
		}
		r.Used[i] = m.used[key]
	}
	return r, nil
}

func (m *memory) Used(_ context.Context, consumer string, budgets []quota.Budget, now time.Time) ([]int64, error) {
	if m.err != nil {
		return nil, m.err
	}
	used := make([]int64, len(budgets))
	for i, b := range budgets {
		used[i] = m.used[memoryKey{consumer, b.Unit.Window(now.Unix())}]
	}
	return used, nil
}

func TestCheckTimeline(t *testing.T) {
	t.Parallel()

	day := quota.DayWindow(noon.Unix()).End
	type step struct {
		after time.Duration
		cost  int64
		want  quota.Outcome
	}
	for _, test := range []struct {
		name    string
		budgets []quota.Budget
		steps   []step
	}{
		{
			// PEERS C02: a refused cost is not charged.
			name:    "C02 a refusal costs nothing",
			budgets: dayMonth(5, 100),
			steps: []step{
				{cost: 3, want: quota.Outcome{Code: quota.Allowed, Limit: 5, Remaining: 2, Reset: day}},
				{cost: 4, want: quota.Outcome{Code: quota.Denied, Limit: 5, Remaining: 2, Reset: day, RetryAfter: 43_200}},
				{cost: 1, want: quota.Outcome{Code: quota.Allowed, Limit: 5, Remaining: 1, Reset: day}},
				{cost: 0, want: quota.Outcome{Code: quota.Allowed, Limit: 5, Remaining: 1, Reset: day}},
			},
		},
		{
			name:    "denied by the month, the day stays spent",
			budgets: dayMonth(10, 3),
			steps: []step{
				{cost: 3, want: quota.Outcome{Code: quota.Allowed, Budget: 1, Limit: 3, Reset: day}},
				{cost: 1, want: quota.Outcome{Code: quota.Denied, Budget: 1, Limit: 3, Reset: day, RetryAfter: 43_200}},
				// Ten of the day are now spent by 3 + 1 + 6 refused by the month...
				{cost: 3, want: quota.Outcome{Code: quota.Denied, Budget: 1, Limit: 3, Reset: day, RetryAfter: 43_200}},
				{cost: 3, want: quota.Outcome{Code: quota.Denied, Budget: 1, Limit: 3, Reset: day, RetryAfter: 43_200}},
				// ... so that now the day denies.
				{cost: 1, want: quota.Outcome{Code: quota.Denied, Budget: 0, Limit: 10, Reset: day, RetryAfter: 43_200}},
			},
		},
		{
			name:    "a cost above the limit never fits",
			budgets: dayMonth(5, 100),
			steps: []step{
				{cost: 6, want: quota.Outcome{Code: quota.Denied, Limit: 5, Remaining: 5, Reset: day, OverLimit: true}},
				{cost: 5, want: quota.Outcome{Code: quota.Allowed, Limit: 5, Reset: day}},
			},
		},
		{
			name:    "a limit of zero allows nothing",
			budgets: dayMonth(0, 10),
			steps: []step{
				{cost: 1, want: quota.Outcome{Code: quota.Denied, Reset: day, OverLimit: true}},
			},
		},
		{
			// PEERS C57, C58: a new window starts from nothing.
			name:    "C57 C58 the next day is whole",
			budgets: []quota.Budget{{Key: quota.DailyKey, Unit: quota.Day, Limit: 2}},
			steps: []step{
				{after: 12*time.Hour - time.Millisecond, cost: 2, want: quota.Outcome{Code: quota.Allowed, Limit: 2, Reset: day}},
				{after: 12*time.Hour - time.Millisecond, cost: 1, want: quota.Outcome{Code: quota.Denied, Limit: 2, Reset: day, RetryAfter: 1}},
				{after: 12 * time.Hour, cost: 1, want: quota.Outcome{Code: quota.Allowed, Limit: 2, Remaining: 1, Reset: day + 86_400}},
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			store := &memory{used: map[memoryKey]int64{}}
			for i, step := range test.steps {
				got := quota.Check(t.Context(), store, "alice", test.budgets, step.cost, noon.Add(step.after))
				if diff := cmp.Diff(step.want, got); diff != "" {
					t.Errorf("step %d: Check(cost %d) differs (-want +got):\n%s", i, step.cost, diff)
				}
			}
		})
	}
}

// A client that is told the day's wall must not walk into the month's.
func TestRetryAfterReachesTheLastExhaustedWall(t *testing.T) {
	t.Parallel()

	now := time.Date(2026, 11, 10, 12, 0, 0, 0, time.UTC)
	store := &memory{used: map[memoryKey]int64{
		{"alice", quota.DayWindow(now.Unix())}:   10,
		{"alice", quota.MonthWindow(now.Unix())}: 99,
	}}
	for _, test := range []struct {
		cost int64
		want int64
	}{
		{cost: 1, want: 12 * 3600},           // the month still holds one
		{cost: 2, want: 20*86_400 + 12*3600}, // but not two
	} {
		got := quota.Check(t.Context(), store, "alice", dayMonth(10, 100), test.cost, now)
		if got.Code != quota.Denied || got.Budget != 0 || got.RetryAfter != test.want {
			t.Errorf("cost %d: %+v, want denied by the day with RetryAfter %d", test.cost, got, test.want)
		}
	}
	if used := store.used[memoryKey{"alice", quota.MonthWindow(now.Unix())}]; used != 99 {
		t.Errorf("the month has %d used after denials by the day, want 99", used)
	}
}

func TestRetryAfterRoundsUp(t *testing.T) {
	t.Parallel()

	// PEERS C38, C39.
	reset := noon.Unix() + 60
	for _, test := range []struct {
		before time.Duration
		want   int64
	}{
		{200 * time.Millisecond, 1},
		{time.Second, 1},
		{1001 * time.Millisecond, 2},
		{59*time.Second + 999_900*time.Microsecond, 60},
		{-10 * time.Second, 1},
	} {
		if got := quota.RetryAfter(time.Unix(reset, 0).Add(-test.before), reset); got != test.want {
			t.Errorf("RetryAfter %v before the reset = %d, want %d", test.before, got, test.want)
		}
	}
}

func TestCheckFailure(t *testing.T) {
	t.Parallel()

	down := errors.New("connection refused")
	for _, test := range []struct {
		name    string
		store   quota.Store
		budgets []quota.Budget
		want    quota.Code
		err     error
	}{
		{"a dead store is unavailable", &memory{err: down}, dayMonth(1, 1), quota.Unavailable, down},
		{"an unknown consumer is allowed", &memory{err: quota.ErrUnknownConsumer}, dayMonth(1, 1), quota.Allowed, quota.ErrUnknownConsumer},
		{"no store is inert", nil, dayMonth(1, 1), quota.Allowed, quota.ErrNoStore},
		{"no budgets allow", &memory{err: down}, nil, quota.Allowed, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			got := quota.Check(t.Context(), test.store, "alice", test.budgets, 1, noon)
			if got.Code != test.want || !errors.Is(got.Err, test.err) || got.Budget != -1 {
				t.Errorf("Check = %+v, want %v with %v", got, test.want, test.err)
			}
		})
	}
}

// PEERS C33: what counts is what was used, so an edited limit is right at once.
func TestC33LimitEditedUnderUse(t *testing.T) {
	t.Parallel()

	store := &memory{used: map[memoryKey]int64{{"alice", quota.DayWindow(noon.Unix())}: 7}}
	one := func(limit int64) []quota.Budget {
		return []quota.Budget{{Key: quota.DailyKey, Unit: quota.Day, Limit: limit}}
	}
	if got := quota.Check(t.Context(), store, "alice", one(5), 1, noon); got.Code != quota.Denied || got.Remaining != 0 {
		t.Errorf("lowered to 5: %+v, want denied with nothing left", got)
	}
	if got := quota.Check(t.Context(), store, "alice", one(20), 1, noon); got.Code != quota.Allowed || got.Remaining != 12 {
		t.Errorf("raised to 20: %+v, want allowed with 12 left", got)
	}
}

func TestCurrentUsage(t *testing.T) {
	t.Parallel()

	store := &memory{used: map[memoryKey]int64{
		{"alice", quota.DayWindow(noon.Unix())}:   12,
		{"alice", quota.MonthWindow(noon.Unix())}: 30,
	}}
	end := quota.DayWindow(noon.Unix()).End
	want := []quota.BudgetUsage{
		{Key: quota.DailyKey, Limit: 10, Used: 12, Remaining: 0, Reset: end},
		{Key: quota.MonthlyKey, Limit: 100, Used: 30, Remaining: 70, Reset: end},
	}
	if diff := cmp.Diff(want, quota.CurrentUsage(t.Context(), store, "alice", dayMonth(10, 100), noon)); diff != "" {
		t.Errorf("CurrentUsage differs (-want +got):\n%s", diff)
	}
	store.err = errors.New("down")
	if got := quota.CurrentUsage(t.Context(), store, "alice", dayMonth(10, 100), noon); got != nil {
		t.Errorf("CurrentUsage on a dead store = %v, want none", got)
	}
	if got := quota.CurrentUsage(t.Context(), nil, "alice", dayMonth(10, 100), noon); got != nil {
		t.Errorf("CurrentUsage without a store = %v, want none", got)
	}
}

func TestCodeString(t *testing.T) {
	t.Parallel()

	for code, want := range map[quota.Code]string{
		0: "undecided", quota.Allowed: "allowed", quota.Denied: "denied", quota.Unavailable: "unavailable",
	} {
		if code.String() != want {
			t.Errorf("Code(%d) = %q, want %q", code, code, want)
		}
	}
}

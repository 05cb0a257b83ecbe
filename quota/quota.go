// Package quota holds budgets over fixed UTC calendar windows: so many requests,
// bytes or tokens a day and a month, per consumer. A quota is a budget, not a
// rate: it never refills inside its window and is whole again at the boundary.
//
// [Check] reserves one request's cost in all of a consumer's budgets, through a
// [Store], and says what follows. [Judge] is the same rendering for callers who
// have already reserved. [DayWindow], [MonthWindow] and [Unit.Window] are the
// calendar.
//
// # Evaluation
//
// Budgets are evaluated in order, shortest window first, and all must hold.
// Evaluation reserves as it goes and stops at the first denial: a request denied
// by its day spends nothing; one denied by its month has already spent its cost in
// the day. That waste is bounded by one cost in the window that resets sooner,
// and never admits more. Later budgets are only read, so that the wait reaches
// the last exhausted wall.
//
// # Failure
//
// A store that cannot answer makes the outcome [Unavailable], which is neither an
// admission nor a denial. A consumer that the store does not know, and a nil
// store, leave the quota inert: the outcome is [Allowed] and its Err says why, for
// the caller to warn of.
//
// Nothing here reads a clock or keeps state.
package quota

import (
	"context"
	"errors"
	"time"
)

// The keys of the budgets that a policy's quota block can hold, shortest window first.
const (
	SecondlyKey = "secondly"
	MinutelyKey = "minutely"
	HourlyKey   = "hourly"
	DailyKey    = "daily"
	WeeklyKey   = "weekly"
	MonthlyKey  = "monthly"
	YearlyKey   = "yearly"
)

// ErrUnknownConsumer is returned by a [Store] that has no row for a consumer that
// it should know. [Check] then allows the request and passes the error on.
var ErrUnknownConsumer = errors.New("consumer is not in the store")

// ErrNoStore is the Err of an outcome that was allowed because no store is
// attached.
var ErrNoStore = errors.New("no store is attached, so quotas are inert")

// A Budget is one window of a quota: so many units in each window of a unit.
type Budget struct {
	Key   string // how the budget is named to clients and in usage, such as [DailyKey]
	Unit  Unit   // the window's length
	Limit int64  // units allowed in a window, from 0; 0 allows nothing
}

// A Reservation is a store's answer to a cost.
type Reservation struct {
	// Denied is the index of the first budget that could not cover the cost, or
	// -1 when all could.
	Denied int
	// Used is what each budget's current window has used after the reservation,
	// in units, in the order of the budgets. It may exceed a limit that was
	// lowered under use.
	Used []int64
}

// A Store counts what consumers use. Its methods must be safe for concurrent use.
type Store interface {
	// Reserve spends cost (from 0) in the windows that contain now, atomically
	// and durably, by the evaluation order of the package's documentation. A
	// denial is no error.
	Reserve(ctx context.Context, consumer string, budgets []Budget, cost int64, now time.Time) (Reservation, error)
	// Used returns what each budget's window at now has used, in units.
	Used(ctx context.Context, consumer string, budgets []Budget, now time.Time) ([]int64, error)
}

// A Code is one of the three outcomes.
type Code uint8

// The outcomes. The zero Code is invalid, so that an outcome nobody decided is
// never an admission.
const (
	Allowed     Code = iota + 1
	Denied           // over a budget: 429
	Unavailable      // the store could not answer: 500, and no rate headers
)

// String returns the code's name in lower case.
func (c Code) String() string {
	switch c {
	case Allowed:
		return "allowed"
	case Denied:
		return "denied"
	case Unavailable:
		return "unavailable"
	}
	return "undecided"
}

// An Outcome says whether a request may proceed, and what its client is told.
type Outcome struct {
	Code Code

	// Budget is the index of the budget that the fields below describe: the first
	// that denied; when allowed, the one with the least left relative to its
	// limit. It is -1 when the quota is inert or unavailable.
	Budget    int
	Limit     int64 // that budget's limit, in units
	Remaining int64 // units left in its window, never below 0
	Reset     int64 // epoch second at which it is whole again

	// RetryAfter is the seconds until the last exhausted window ends, rounded up,
	// at least 1. It is 0 when the request was not denied, and when OverLimit.
	RetryAfter int64
	// OverLimit tells that the cost is above a budget's whole limit, so that no
	// wait can help.
	OverLimit bool

	// Err is the store's error when Unavailable; when Allowed, the reason why the
	// quota was inert, if it was: [ErrUnknownConsumer] or [ErrNoStore].
	Err error
}

// Check reserves cost (from 0, in units) for a consumer in every budget and judges
// the answer. Budgets must be ordered, shortest window first.
func Check(ctx context.Context, store Store, consumer string, budgets []Budget, cost int64, now time.Time) Outcome {
	if len(budgets) == 0 {
		return Outcome{Code: Allowed, Budget: -1}
	}
	if store == nil {
		return Outcome{Code: Allowed, Budget: -1, Err: ErrNoStore}
	}
	reservation, err := store.Reserve(ctx, consumer, budgets, cost, now)
	switch {
	case errors.Is(err, ErrUnknownConsumer):
		return Outcome{Code: Allowed, Budget: -1, Err: err}
	case err != nil:
		return Outcome{Code: Unavailable, Budget: -1, Err: err}
	}
	return Judge(budgets, reservation, cost, now)
}

// Judge renders a reservation of cost made at now: whose numbers a client sees, and
// how long it must wait. There must be at least one budget.
func Judge(budgets []Budget, r Reservation, cost int64, now time.Time) Outcome {
	out := Outcome{Code: Allowed, Budget: r.Denied}
	if r.Denied >= 0 {
		out.Code = Denied
		for i, b := range budgets {
			if cost > b.Limit {
				out.OverLimit = true
			}
			// The denying budget counts as exhausted whatever it holds by now.
			if i == r.Denied || r.Used[i] > b.Limit-cost {
				wait := RetryAfter(now, b.Unit.Window(now.Unix()).End)
				out.RetryAfter = max(out.RetryAfter, wait)
			}
		}
		if out.OverLimit {
			out.RetryAfter = 0
		}
	} else {
		out.Budget = tightest(budgets, r.Used)
	}
	b := budgets[out.Budget]
	out.Limit = b.Limit
	out.Remaining = max(0, b.Limit-r.Used[out.Budget])
	out.Reset = b.Unit.Window(now.Unix()).End
	return out
}

// tightest returns the index of the budget with the least left relative to its
// limit; of equals, the first.
func tightest(budgets []Budget, used []int64) int {
	best, bestLeft := 0, 2.0
	for i, b := range budgets {
		left := 0.0
		if b.Limit > 0 {
			left = float64(max(0, b.Limit-used[i])) / float64(b.Limit)
		}
		if left < bestLeft {
			best, bestLeft = i, left
		}
	}
	return best
}

// RetryAfter returns the whole seconds from now to the epoch second reset, rounded
// up, at least 1: a client that waits them never comes back too early.
func RetryAfter(now time.Time, reset int64) int64 {
	wait := reset - now.Unix()
	// now.Unix rounds down, so a fraction of a second has already been counted in
	// full, except when reset lies before now.
	return max(1, wait)
}

// A BudgetUsage is what one budget has used in its current window.
type BudgetUsage struct {
	Key       string `json:"budget"`
	Limit     int64  `json:"limit"`     // units
	Used      int64  `json:"used"`      // units
	Remaining int64  `json:"remaining"` // units, never below 0
	Reset     int64  `json:"reset"`     // epoch second at which the window ends
}

// CurrentUsage reads a consumer's current windows; it reserves nothing. It is empty
// when there is no store or the store cannot answer: callers surface that gap in
// their own way.
func CurrentUsage(ctx context.Context, store Store, consumer string, budgets []Budget, now time.Time) []BudgetUsage {
	if store == nil || len(budgets) == 0 {
		return nil
	}
	used, err := store.Used(ctx, consumer, budgets, now)
	if err != nil {
		return nil
	}
	return Usage(budgets, used, now)
}

// Usage renders what each budget's window at now has used, in units.
func Usage(budgets []Budget, used []int64, now time.Time) []BudgetUsage {
	usage := make([]BudgetUsage, len(budgets))
	for i, b := range budgets {
		usage[i] = BudgetUsage{
			Key:       b.Key,
			Limit:     b.Limit,
			Used:      used[i],
			Remaining: max(0, b.Limit-used[i]),
			Reset:     b.Unit.Window(now.Unix()).End,
		}
	}
	return usage
}

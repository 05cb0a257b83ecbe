package store

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// decideSQL calls the function of migration 0004, which says what each argument is. Its
// first argument takes what the statement needs before the function is called, and so before
// it holds any row:
//
// Decisions share an advisory lock ("weir", 1), which one that has collided on a new row takes
// for itself (decideAgainSQL): then nobody else makes a row, and it does not collide again.
//
// The hurried one waits only briefly for a row that somebody holds locked.
var (
	decideSQL        = decideCall(shareLock + " IS NULL")
	decideAgainSQL   = decideCall("pg_advisory_xact_lock(2003134834, 1) IS NULL")
	decideHurriedSQL = decideCall(hurry + " IS NULL OR " + shareLock + " IS NULL")
)

const (
	shareLock = "pg_advisory_xact_lock_shared(2003134834, 1)"
	hurry     = "set_config('lock_timeout', '50ms', true)"
)

func decideCall(first string) string {
	var sql strings.Builder
	sql.WriteString(`
SELECT all_allowed, allowed, covered, tokens_left, tokens_at, take_covered, take_levels, take_at,
    denied, quota_states, units_used, enrolled
FROM plexsphere.decide_v1(CASE WHEN ` + first + ` THEN $1::boolean ELSE $1::boolean END`)
	for i := 2; i <= decideArguments; i++ {
		sql.WriteString(", $" + strconv.Itoa(i))
	}
	sql.WriteString(")")
	return sql.String()
}

// decideRetries is how often a decision that collided with another on a new row is
// tried again. A retry is alone with its rows, but for takes and lone requests, each of
// which makes one row at most.
const decideRetries = 3

// Decide takes all debits of a request, or none, in one round trip, and returns the
// state of every bucket and window after it. See [policy.Request] for what a request
// is, and for the one exception to all-or-none. A request without debits is allowed
// without a query.
//
// What could never be taken, or costs nothing, is only read: a cost of 0 is covered,
// and a cost above a burst or above a window's whole limit is not and spends
// nothing, not even in a quota's earlier windows. A negative cost is a refund.
//
// A limiter's bucket that another policy wrote is taken over by the debit's policy, also
// when it is refused: see [Limiter].
//
// Arguments are checked before any query: [ErrUnknownScope], [ErrZeroKey],
// [ErrInvalidBudget], [ErrInvalidArgument] for a limiter's policy, and errors of their
// own for a quota without budgets, with an unknown unit, a negative limit, or not
// shortest window first.
//
// When two first requests of one bucket collide, one is retried, at most three times;
// inside a caller's transaction it is not, as the collision has ended it.
func (s *Store) Decide(ctx context.Context, req policy.Request) (policy.Verdict, error) {
	if err := check(req); err != nil {
		return policy.Verdict{}, fmt.Errorf("deciding a request: %w", err)
	}
	if !req.Asks() {
		return policy.Verdict{Allowed: true, At: req.Now}, nil
	}
	verdicts, err := s.decide(ctx, []policy.Request{req})
	if err != nil {
		return policy.Verdict{}, err
	}
	return verdicts[0], nil
}

// check returns the first error in a request's arguments.
func check(req policy.Request) error {
	if err := checkNow(req.Now); err != nil {
		return err
	}
	for _, d := range req.Budgets {
		if err := checkBucket(d.Scope, d.Key); err != nil {
			return err
		}
		if err := d.Budget.Validate(); err != nil {
			return fmt.Errorf("rate budget %s/%s: %w", d.Scope, d.Key, err)
		}
	}
	for _, d := range req.Limiters {
		if err := d.Policy.Validate(); err != nil {
			return fmt.Errorf("limiter %x: %w", d.Bucket.ID, err)
		}
	}
	for _, d := range req.Quotas {
		if err := checkQuota(d); err != nil {
			return fmt.Errorf("quota of counter %x: %w", d.Counter, err)
		}
	}
	for _, shadow := range req.Shadows {
		if len(shadow.Shadows) > 0 {
			return errors.New("a shadow has shadows")
		}
		if err := check(shadow); err != nil {
			return err
		}
	}
	return nil
}

func checkQuota(d policy.QuotaDebit) error {
	switch {
	case len(d.Budgets) == 0:
		return errors.New("has no budgets")
	case d.Optional && len(d.Budgets) > 1:
		return errors.New("is optional, and has more than one budget")
	case d.Consumer != nil && d.Consumer.ID != d.Counter:
		return errors.New("is not its consumer's counter")
	}
	if !d.ChargedAt.IsZero() {
		if err := checkNow(d.ChargedAt); err != nil {
			return fmt.Errorf("charged at: %w", err)
		}
	}
	var last quota.Unit
	for _, b := range d.Budgets {
		switch {
		case !b.Unit.Valid():
			return fmt.Errorf("budget %q has an unknown unit", b.Key)
		case b.Unit <= last:
			return fmt.Errorf("budget %q is not of a longer window than the one before it", b.Key)
		case b.Limit < 0:
			return fmt.Errorf("budget %q has the negative limit %d", b.Key, b.Limit)
		}
		last = b.Unit
	}
	return nil
}

// decide decides requests, which must have passed check, in their order, as if each
// had come alone, in one round trip and one transaction.
func (s *Store) decide(ctx context.Context, reqs []policy.Request) ([]policy.Verdict, error) {
	return s.decideBy(ctx, s.queries.decide, s.queries.decideOne, reqs)
}

// decideHurried is decide, but gives up soon on a row that somebody holds locked.
func (s *Store) decideHurried(ctx context.Context, reqs []policy.Request) ([]policy.Verdict, error) {
	return s.decideBy(ctx, s.queries.decideHurried, s.queries.decideOneHurried, reqs)
}

func (s *Store) decideBy(ctx context.Context, first, lone string, reqs []policy.Request) ([]policy.Verdict, error) {
	if len(reqs) == 1 && isLone(&reqs[0]) {
		return s.decideOne(ctx, lone, &reqs[0])
	}
	b := newBatch(reqs, s.known)
	args := b.args()
	for attempt := 0; ; attempt++ {
		var a answers
		sql := first
		if attempt > 0 {
			sql = s.queries.decideAgain
		}
		err := s.db.QueryRow(ctx, sql, args...).Scan(
			&a.allAllowed, &a.allowed, &a.covered, &a.tokens, &a.at, &a.takeCovered, &a.takeLevels, &a.takeAt,
			&a.denied, &a.states, &a.used, &a.enrolled)
		switch {
		case err == nil:
			if !s.inTransaction() {
				s.known.add(b.enrolledIn(a.enrolled))
			}
			return a.verdicts(b, reqs)
		case !collided(err):
			return nil, fmt.Errorf("deciding %d requests: %w", len(reqs), err)
		case s.inTransaction():
			return nil, fmt.Errorf("deciding %d requests in a transaction: %w", len(reqs), err)
		case attempt == decideRetries:
			return nil, fmt.Errorf("deciding %d requests: giving up after %d retries: %w", len(reqs), decideRetries, err)
		}
	}
}

const decideOneSQL = decideOneHead + "$1::text" + decideOneTail

const decideOneHurriedSQL = decideOneHead + "CASE WHEN " + hurry + " IS NULL THEN $1::text ELSE $1::text END" + decideOneTail

const decideOneHead = `
SELECT covered, tokens_left, tokens_at
FROM plexsphere.decide_one_v1(`

const decideOneTail = `, $2::uuid, $3::float8, $4::float8, $5::float8, $6::timestamptz)`

// isLone reports whether a request asks for nothing but one rate budget, of which it may be
// covered.
func isLone(req *policy.Request) bool {
	return len(req.Budgets) == 1 && len(req.Limiters)+len(req.Quotas)+len(req.Shadows) == 0 &&
		req.Budgets[0].Cost > 0 && req.Budgets[0].Cost <= policy.MaxUnits && float64(req.Budgets[0].Cost) <= req.Budgets[0].Budget.Burst
}

// decideOne decides a lone request as decide would: most of what it costs to ask for one
// decision is the asking.
func (s *Store) decideOne(ctx context.Context, sql string, req *policy.Request) ([]policy.Verdict, error) {
	d, now := &req.Budgets[0], policy.TruncateNow(req.Now)
	var state policy.BudgetState
	err := s.db.QueryRow(ctx, sql,
		string(d.Scope), [16]byte(d.Key), float64(d.Cost), d.Budget.PerSecond, d.Budget.Burst, now,
	).Scan(&state.Covered, &state.Tokens, &state.RefilledAt)
	if err != nil {
		return nil, fmt.Errorf("deciding a request: %w", err)
	}
	state.RefilledAt = state.RefilledAt.UTC()
	return []policy.Verdict{{Allowed: state.Covered, At: now, Budgets: []policy.BudgetState{state}}}, nil
}

func (s *Store) inTransaction() bool {
	_, ok := s.db.(pgx.Tx)
	return ok
}

// collided reports whether the database undid a statement because of another one, so
// that it may be tried again and charges once: a serialisation failure or a deadlock.
func collided(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}

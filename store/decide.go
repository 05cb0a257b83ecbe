package store

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// decideSQL calls the function of migration 0004, which says what each argument is.
// decideAgainSQL is for a batch that has collided: such batches go one at a time, lest
// they collide with each other again. An argument is evaluated before the function is
// called, so whoever waits for the advisory lock ("weir", 1) holds no row.
const (
	decideSQL      = decideHead + "$3" + decideTail
	decideAgainSQL = decideHead + "CASE WHEN pg_advisory_xact_lock(2003134834, 1) IS NULL THEN $3::int ELSE $3::int END" + decideTail

	decideHead = `
SELECT allowed, covered, tokens_left, tokens_at, denied, units_used
FROM plexsphere.decide_v1($1, $2, `
	decideTail = `, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23)`
)

// decideRetries is how often a decision that collided with another on a new row is
// tried again. The winner has committed by then, so that a retry finds its row, and
// retries take turns, so that they don't collide among themselves.
const decideRetries = 3

// Decide takes all debits of a request, or none, in one round trip, and returns the
// state of every bucket and window after it. See [policy.Request] for what a request
// is, and for the one exception to all-or-none. A request without debits is allowed
// without a query.
//
// What could never be taken, or costs nothing, is only read: a cost of 0 is covered,
// and a cost above a burst or above a window's whole limit is not and spends
// nothing, not even in a quota's earlier windows.
//
// Arguments are checked before any query: [ErrUnknownScope], [ErrZeroKey],
// [ErrNegativeCost], [ErrInvalidBudget], and errors of their own for a quota without
// budgets, with an unknown unit, a negative limit, or not shortest window first.
//
// When two first requests of one bucket collide, one is retried, at most three times;
// inside a caller's transaction it is not, as the collision has ended it.
func (s *Store) Decide(ctx context.Context, req policy.Request) (policy.Verdict, error) {
	if err := check(req); err != nil {
		return policy.Verdict{}, fmt.Errorf("deciding a request: %w", err)
	}
	if len(req.Budgets) == 0 && len(req.Quotas) == 0 {
		return policy.Verdict{Allowed: true}, nil
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
		if d.Cost < 0 {
			return fmt.Errorf("rate budget %s/%s: %w: %d", d.Scope, d.Key, ErrNegativeCost, d.Cost)
		}
		if err := d.Budget.Validate(); err != nil {
			return fmt.Errorf("rate budget %s/%s: %w", d.Scope, d.Key, err)
		}
	}
	for _, d := range req.Quotas {
		if d.Cost < 0 {
			return fmt.Errorf("quota of consumer %x: %w: %d", d.Consumer.ID, ErrNegativeCost, d.Cost)
		}
		if err := checkQuota(d.Budgets); err != nil {
			return fmt.Errorf("quota of consumer %x: %w", d.Consumer.ID, err)
		}
	}
	return nil
}

func checkQuota(budgets []quota.Budget) error {
	if len(budgets) == 0 {
		return errors.New("has no budgets")
	}
	var last quota.Unit
	for _, b := range budgets {
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
	b := newBatch(reqs)
	args := b.args()
	for attempt := 0; ; attempt++ {
		var a answers
		sql := s.queries.decide
		if attempt > 0 {
			sql = s.queries.decideAgain
		}
		err := s.db.QueryRow(ctx, sql, args...).
			Scan(&a.allowed, &a.covered, &a.tokens, &a.at, &a.denied, &a.used)
		switch {
		case err == nil:
			return a.verdicts(reqs)
		case !collided(err):
			return nil, fmt.Errorf("deciding %d requests: %w", len(reqs), err)
		case s.inTransaction():
			return nil, fmt.Errorf("deciding %d requests in a transaction: %w", len(reqs), err)
		case attempt == decideRetries:
			return nil, fmt.Errorf("deciding %d requests: giving up after %d retries: %w", len(reqs), decideRetries, err)
		}
	}
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

type (
	bucketID struct {
		scope Scope
		key   Key
	}
	windowID struct {
		consumer policy.CounterID
		unit     quota.Unit
		start    int64 // epoch second
	}
)

func compareBuckets(a, b bucketID) int {
	return cmp.Or(cmp.Compare(a.scope, b.scope), bytes.Compare(a.key[:], b.key[:]))
}

func compareWindows(a, b windowID) int {
	return cmp.Or(bytes.Compare(a.consumer[:], b.consumer[:]), cmp.Compare(a.unit, b.unit), cmp.Compare(a.start, b.start))
}

// A set numbers the distinct rows of a batch in the order in which they are locked:
// those that may be written first, each part sorted.
type set[T comparable] struct {
	index    map[T]int // into members
	members  []T
	writable []bool
}

// add notes a member and returns its provisional number.
func (s *set[T]) add(id T, writable bool) int32 {
	i, ok := s.index[id]
	if !ok {
		i = len(s.members)
		if s.index == nil {
			s.index = make(map[T]int)
		}
		s.index[id] = i
		s.members = append(s.members, id)
		s.writable = append(s.writable, false)
	}
	s.writable[i] = s.writable[i] || writable
	return int32(i) //nolint:gosec // no batch has 2^31 rows
}

// order sorts the members, replaces the provisional numbers in refs by the final
// ones, which count from 1, and returns how many members are writable.
func (s *set[T]) order(compare func(a, b T) int, refs []int32) (members []T, writable int32) {
	perm := make([]int, len(s.members))
	for i := range perm {
		perm[i] = i
		if s.writable[i] {
			writable++
		}
	}
	slices.SortFunc(perm, func(i, j int) int {
		if s.writable[i] != s.writable[j] {
			if s.writable[i] {
				return -1
			}
			return 1
		}
		return compare(s.members[i], s.members[j])
	})
	members = make([]T, len(perm))
	final := make([]int32, len(perm))
	for to, from := range perm {
		members[to] = s.members[from]
		final[from] = int32(to) + 1
	}
	for i, ref := range refs {
		refs[i] = final[ref]
	}
	return members, writable
}

// A batch is the requests as the function's arguments, but for what is sorted.
type batch struct {
	buckets   set[bucketID]
	windows   set[windowID]
	consumers map[policy.CounterID]enrolment

	now            []time.Time
	debits, quotas []int32

	debitBucket                      []int32
	debitCost, debitRate, debitBurst []float64
	quotaCost                        []int64
	quotaLimits                      []int32
	quotaChargeable                  []bool
	limitWindow                      []int32
	limitUnits                       []int64
}

type enrolment struct {
	consumer policy.Consumer
	seen     time.Time
}

func newBatch(reqs []policy.Request) *batch {
	// The database takes a nil slice for NULL, so none may be nil.
	b := &batch{
		now:             make([]time.Time, 0, len(reqs)),
		debits:          make([]int32, 0, len(reqs)),
		quotas:          make([]int32, 0, len(reqs)),
		debitBucket:     []int32{},
		debitCost:       []float64{},
		debitRate:       []float64{},
		debitBurst:      []float64{},
		quotaCost:       []int64{},
		quotaLimits:     []int32{},
		quotaChargeable: []bool{},
		limitWindow:     []int32{},
		limitUnits:      []int64{},
	}
	for _, req := range reqs {
		now := policy.TruncateNow(req.Now)
		b.now = append(b.now, now)
		b.debits = append(b.debits, int32(len(req.Budgets))) //nolint:gosec // a request is no larger than its message
		b.quotas = append(b.quotas, int32(len(req.Quotas)))  //nolint:gosec // the same
		for _, d := range req.Budgets {
			b.addDebit(d)
		}
		for _, d := range req.Quotas {
			b.addQuota(d, now)
		}
	}
	return b
}

func (b *batch) addDebit(d policy.BudgetDebit) {
	cost := float64(d.Cost)
	if d.Cost > policy.MaxUnits {
		// As a double it might round down to what a bucket can hold.
		cost = math.Inf(1)
	}
	writable := d.Cost > 0 && cost <= d.Budget.Burst
	b.debitBucket = append(b.debitBucket, b.buckets.add(bucketID{d.Scope, d.Key}, writable))
	b.debitCost = append(b.debitCost, cost)
	b.debitRate = append(b.debitRate, d.Budget.PerSecond)
	b.debitBurst = append(b.debitBurst, d.Budget.Burst)
}

func (b *batch) addQuota(d policy.QuotaDebit, now time.Time) {
	chargeable := d.Cost > 0
	for _, w := range d.Budgets {
		chargeable = chargeable && d.Cost <= w.Limit
	}
	if chargeable {
		if _, ok := b.consumers[d.Consumer.ID]; !ok {
			if b.consumers == nil {
				b.consumers = make(map[policy.CounterID]enrolment)
			}
			b.consumers[d.Consumer.ID] = enrolment{consumer: *d.Consumer, seen: now}
		}
	}
	b.quotaCost = append(b.quotaCost, d.Cost)
	b.quotaLimits = append(b.quotaLimits, int32(len(d.Budgets))) //nolint:gosec // at most one a unit
	b.quotaChargeable = append(b.quotaChargeable, chargeable)
	for _, w := range d.Budgets {
		id := windowID{d.Consumer.ID, w.Unit, w.Unit.Window(now.Unix()).Start}
		b.limitWindow = append(b.limitWindow, b.windows.add(id, chargeable))
		b.limitUnits = append(b.limitUnits, w.Limit)
	}
}

// args orders the rows and returns the arguments of decideSQL. It may be called once.
func (b *batch) args() []any {
	buckets, writableBuckets := b.buckets.order(compareBuckets, b.debitBucket)
	scopes := make([]string, len(buckets))
	keys := make([]pgtype.UUID, len(buckets))
	for i, id := range buckets {
		scopes[i] = string(id.scope)
		keys[i] = pgtype.UUID{Bytes: id.key, Valid: true}
	}

	windows, writableWindows := b.windows.order(compareWindows, b.limitWindow)
	holders := make([][]byte, len(windows))
	units := make([]string, len(windows))
	starts := make([]time.Time, len(windows))
	for i, id := range windows {
		holders[i] = bytes.Clone(id.consumer[:])
		units[i] = id.unit.String()
		starts[i] = time.Unix(id.start, 0)
	}

	enrolled := make([]enrolment, 0, len(b.consumers))
	for _, e := range b.consumers {
		enrolled = append(enrolled, e)
	}
	slices.SortFunc(enrolled, func(a, b enrolment) int { return bytes.Compare(a.consumer.ID[:], b.consumer.ID[:]) })
	ids := make([][]byte, len(enrolled))
	domains := make([]string, len(enrolled))
	entries := make([]string, len(enrolled))
	seen := make([]time.Time, len(enrolled))
	for i, e := range enrolled {
		ids[i] = bytes.Clone(e.consumer.ID[:])
		domains[i] = readable(e.consumer.Domain)
		entries[i] = readableEntries(e.consumer.Entries)
		seen[i] = e.seen
	}

	return []any{
		scopes, keys, writableBuckets,
		holders, units, starts, writableWindows,
		ids, domains, entries, seen,
		b.now, b.debits, b.quotas,
		b.debitBucket, b.debitCost, b.debitRate, b.debitBurst,
		b.quotaCost, b.quotaLimits, b.quotaChargeable,
		b.limitWindow, b.limitUnits,
	}
}

// answers are the function's results.
type answers struct {
	allowed []bool
	covered []bool
	tokens  []float64
	at      []time.Time
	denied  []int32
	used    []int64
}

func (a answers) verdicts(reqs []policy.Request) ([]policy.Verdict, error) {
	verdicts := make([]policy.Verdict, len(reqs))
	var debit, quotas, limit int
	for i, req := range reqs {
		if i >= len(a.allowed) || debit+len(req.Budgets) > min(len(a.covered), len(a.tokens), len(a.at)) ||
			quotas+len(req.Quotas) > len(a.denied) {
			return nil, errors.New("deciding: the database answered for fewer requests than were asked")
		}
		v := policy.Verdict{Allowed: a.allowed[i]}
		if len(req.Budgets) > 0 {
			v.Budgets = make([]policy.BudgetState, len(req.Budgets))
		}
		for j := range req.Budgets {
			v.Budgets[j] = policy.BudgetState{
				Covered:    a.covered[debit],
				Tokens:     a.tokens[debit],
				RefilledAt: a.at[debit].UTC(),
			}
			debit++
		}
		if len(req.Quotas) > 0 {
			v.Quotas = make([]policy.QuotaState, len(req.Quotas))
		}
		for j, d := range req.Quotas {
			end := limit + len(d.Budgets)
			if end > len(a.used) {
				return nil, errors.New("deciding: the database answered for fewer windows than were asked")
			}
			v.Quotas[j] = policy.QuotaState{Reservation: quota.Reservation{Denied: int(a.denied[quotas]), Used: a.used[limit:end:end]}}
			quotas++
			limit = end
		}
		verdicts[i] = v
	}
	return verdicts, nil
}

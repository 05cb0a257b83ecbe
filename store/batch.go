package store

import (
	"bytes"
	"cmp"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

type (
	bucketID struct {
		scope Scope
		key   Key
	}
	windowID struct {
		counter policy.CounterID
		unit    quota.Unit
		start   int64 // epoch second
	}
)

func compareBuckets(a, b bucketID) int {
	return cmp.Or(cmp.Compare(a.scope, b.scope), bytes.Compare(a.key[:], b.key[:]))
}

func compareCounters(a, b policy.CounterID) int { return bytes.Compare(a[:], b[:]) }

func compareWindows(a, b windowID) int {
	return cmp.Or(bytes.Compare(a.counter[:], b.counter[:]), cmp.Compare(a.unit, b.unit), cmp.Compare(a.start, b.start))
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
// ones, which count from 1 (a negative one becomes 0), and returns how many members are
// writable.
func (s *set[T]) order(compare func(a, b T) int, refs ...[]int32) (members []T, writable int32) {
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
	for _, refs := range refs {
		for i, ref := range refs {
			if ref < 0 {
				refs[i] = 0
				continue
			}
			refs[i] = final[ref]
		}
	}
	return members, writable
}

// A batch is the requests as the function's arguments, but for what is sorted. Shadows
// are requests of their own, each behind the one that it came with.
type batch struct {
	known     *knownConsumers
	buckets   set[bucketID]
	limiters  set[policy.CounterID]
	windows   set[windowID]
	names     map[policy.CounterID]policy.LimiterBucket
	consumers []enrolment // that may not be enrolled yet; sorted by args
	seen      map[policy.CounterID]int32

	now                   []time.Time
	debits, takes, quotas []int32

	debitBucket                       []int32
	debitCost, debitRate, debitBurst  []float64
	takeBucket                        []int32
	takeCost, takePermits, takePeriod []int64
	takeBurst                         []int64
	quotaCost                         []int64
	quotaLimits                       []int32
	quotaChargeable, quotaOptional    []bool
	quotaConsumer                     []int32 // 1 + index into consumers, 0 for none
	limitWindow, limitOverflow        []int32 // limitOverflow: -1 for none
	limitUnits                        []int64
}

type enrolment struct {
	consumer *policy.Consumer
	seen     time.Time
}

func newBatch(reqs []policy.Request, known *knownConsumers) *batch {
	b := &batch{known: known, now: make([]time.Time, 0, len(reqs))}
	for i := range reqs {
		b.addRequest(&reqs[i])
		for j := range reqs[i].Shadows {
			b.addRequest(&reqs[i].Shadows[j])
		}
	}
	return b
}

//nolint:gosec // a request is no larger than its message
func (b *batch) addRequest(req *policy.Request) {
	now := policy.TruncateNow(req.Now)
	b.now = append(b.now, now)
	b.debits = append(b.debits, int32(len(req.Budgets)))
	b.takes = append(b.takes, int32(len(req.Limiters)))
	b.quotas = append(b.quotas, int32(len(req.Quotas)))
	for i := range req.Budgets {
		b.addDebit(&req.Budgets[i])
	}
	for i := range req.Limiters {
		b.addTake(&req.Limiters[i])
	}
	for i := range req.Quotas {
		b.addQuota(&req.Quotas[i], now)
	}
}

func (b *batch) addDebit(d *policy.BudgetDebit) {
	cost := float64(d.Cost)
	if d.Cost > policy.MaxUnits {
		// As a double it might round down to what a bucket can hold.
		cost = math.Inf(1)
	}
	writable := d.Cost != 0 && cost <= d.Budget.Burst
	b.debitBucket = append(b.debitBucket, b.buckets.add(bucketID{d.Scope, d.Key}, writable))
	b.debitCost = append(b.debitCost, cost)
	b.debitRate = append(b.debitRate, d.Budget.PerSecond)
	b.debitBurst = append(b.debitBurst, d.Budget.Burst)
}

func (b *batch) addTake(d *policy.LimiterDebit) {
	if b.names == nil {
		b.names = make(map[policy.CounterID]policy.LimiterBucket)
	}
	b.names[d.Bucket.ID] = d.Bucket
	writable := d.Cost != 0 && d.Cost <= d.Policy.Burst
	b.takeBucket = append(b.takeBucket, b.limiters.add(d.Bucket.ID, writable))
	b.takeCost = append(b.takeCost, max(d.Cost, -d.Policy.Burst)) // no refund is larger
	b.takePermits = append(b.takePermits, d.Policy.Permits)
	b.takePeriod = append(b.takePeriod, d.Policy.Per.Microseconds())
	b.takeBurst = append(b.takeBurst, d.Policy.Burst)
}

func (b *batch) addQuota(d *policy.QuotaDebit, now time.Time) {
	chargeable := d.Cost != 0
	for _, w := range d.Budgets {
		chargeable = chargeable && d.Cost <= w.Limit
	}
	at := now
	if d.Cost < 0 && !d.ChargedAt.IsZero() {
		at = d.ChargedAt
	}
	unknown := d.Consumer != nil && !b.known.has(d.Counter)
	overflows := unknown && d.Consumer.Overflow != policy.CounterID{}
	var consumer int32
	if unknown && d.Cost != 0 {
		consumer = b.addConsumer(d.Consumer, now)
	}
	b.quotaCost = append(b.quotaCost, d.Cost)
	b.quotaLimits = append(b.quotaLimits, int32(len(d.Budgets))) //nolint:gosec // at most one a unit
	b.quotaChargeable = append(b.quotaChargeable, chargeable)
	b.quotaOptional = append(b.quotaOptional, d.Optional)
	b.quotaConsumer = append(b.quotaConsumer, consumer)
	for _, w := range d.Budgets {
		id := windowID{d.Counter, w.Unit, w.Unit.Window(at.Unix()).Start}
		b.limitWindow = append(b.limitWindow, b.windows.add(id, chargeable))
		overflow := int32(-1)
		if overflows {
			id.counter = d.Consumer.Overflow
			overflow = b.windows.add(id, chargeable)
		}
		b.limitOverflow = append(b.limitOverflow, overflow)
		b.limitUnits = append(b.limitUnits, w.Limit)
	}
}

// addConsumer notes a consumer that may have to be enrolled and returns 1 + its index.
func (b *batch) addConsumer(c *policy.Consumer, now time.Time) int32 {
	if i, ok := b.seen[c.ID]; ok {
		return i
	}
	if b.seen == nil {
		b.seen = make(map[policy.CounterID]int32)
	}
	b.consumers = append(b.consumers, enrolment{consumer: c, seen: now})
	i := int32(len(b.consumers)) //nolint:gosec // no batch has 2^31 consumers
	b.seen[c.ID] = i
	return i
}

// decideArguments is how many arguments the function takes.
const decideArguments = 38

// args orders the rows and returns the arguments of decideSQL. It may be called once.
func (b *batch) args() []any {
	buckets, writableBuckets := b.buckets.order(compareBuckets, b.debitBucket)
	scopes := make([]string, len(buckets))
	keys := make([]pgtype.UUID, len(buckets))
	for i, id := range buckets {
		scopes[i] = string(id.scope)
		keys[i] = pgtype.UUID{Bytes: id.key, Valid: true}
	}

	limiters, writableLimiters := b.limiters.order(compareCounters, b.takeBucket)
	limiterIDs := make([][]byte, len(limiters))
	namespaces := make([]string, len(limiters))
	subjects := make([]string, len(limiters))
	for i := range limiters {
		limiterIDs[i] = limiters[i][:]
		namespaces[i] = readable(b.names[limiters[i]].Namespace)
		subjects[i] = readable(b.names[limiters[i]].Subject)
	}

	windows, writableWindows := b.windows.order(compareWindows, b.limitWindow, b.limitOverflow)
	counters := make([][]byte, len(windows))
	units := make([]string, len(windows))
	starts := make([]time.Time, len(windows))
	for i := range windows {
		counters[i] = windows[i].counter[:]
		units[i] = windows[i].unit.String()
		starts[i] = time.Unix(windows[i].start, 0)
	}

	b.orderConsumers()
	ids := make([][]byte, len(b.consumers))
	domains := make([]string, len(b.consumers))
	entries := make([]string, len(b.consumers))
	named := make([]bool, len(b.consumers))
	most := make([]int64, len(b.consumers))
	seen := make([]time.Time, len(b.consumers))
	for i, e := range b.consumers {
		ids[i] = e.consumer.ID[:]
		domains[i] = readable(e.consumer.Domain)
		entries[i] = readableEntries(e.consumer.Entries)
		named[i] = e.consumer.Named
		most[i] = e.consumer.Most
		seen[i] = e.seen
	}

	return []any{
		scopes, keys, writableBuckets,
		limiterIDs, namespaces, subjects, writableLimiters,
		counters, units, starts, writableWindows,
		ids, domains, entries, named, most, seen,
		b.now, b.debits, b.takes, b.quotas,
		orEmpty(b.debitBucket), orEmpty(b.debitCost), orEmpty(b.debitRate), orEmpty(b.debitBurst),
		orEmpty(b.takeBucket), orEmpty(b.takeCost), orEmpty(b.takePermits), orEmpty(b.takePeriod), orEmpty(b.takeBurst),
		orEmpty(b.quotaCost), orEmpty(b.quotaLimits), orEmpty(b.quotaChargeable), orEmpty(b.quotaOptional), orEmpty(b.quotaConsumer),
		orEmpty(b.limitWindow), orEmpty(b.limitOverflow), orEmpty(b.limitUnits),
	}
}

// orEmpty returns s, which the database would take for NULL if it were nil.
func orEmpty[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

// orderConsumers sorts the consumers by id, as they are inserted, and lets the quotas
// refer to their new places.
func (b *batch) orderConsumers() {
	if len(b.consumers) < 2 {
		return
	}
	slices.SortFunc(b.consumers, func(a, c enrolment) int { return compareCounters(a.consumer.ID, c.consumer.ID) })
	place := make([]int32, len(b.consumers)+1)
	for i, e := range b.consumers {
		place[b.seen[e.consumer.ID]] = int32(i) + 1
	}
	for i, c := range b.quotaConsumer {
		b.quotaConsumer[i] = place[c]
	}
}

// enrolledIn returns the consumers that the database knows by now.
func (b *batch) enrolledIn(answer []bool) []policy.CounterID {
	var ids []policy.CounterID
	for i, ok := range answer {
		if ok && i < len(b.consumers) {
			ids = append(ids, b.consumers[i].consumer.ID)
		}
	}
	return ids
}

// answers are the function's results.
type answers struct {
	allowed     []bool
	covered     []bool
	tokens      []float64
	at          []time.Time
	takeCovered []bool
	takeLevels  []int64
	takeAt      []time.Time
	denied      []int32
	states      []int32
	used        []int64
	enrolled    []bool

	request, debit, take, quota, limit int // how many have been read
}

// The values of quota_states.
const (
	stateUnknown  = 1
	stateOverflow = 2
)

var errShortAnswer = errors.New("deciding: the database answered less than was asked")

func (a *answers) verdicts(reqs []policy.Request) ([]policy.Verdict, error) {
	verdicts := make([]policy.Verdict, len(reqs))
	for i := range reqs {
		v, err := a.next(&reqs[i])
		if err != nil {
			return nil, err
		}
		for j := range reqs[i].Shadows {
			shadow, err := a.next(&reqs[i].Shadows[j])
			if err != nil {
				return nil, err
			}
			v.Shadows = append(v.Shadows, shadow)
		}
		verdicts[i] = v
	}
	return verdicts, nil
}

// next reads the answer to one request.
func (a *answers) next(req *policy.Request) (policy.Verdict, error) {
	limits := 0
	for i := range req.Quotas {
		limits += len(req.Quotas[i].Budgets)
	}
	if a.request >= len(a.allowed) ||
		a.debit+len(req.Budgets) > min(len(a.covered), len(a.tokens), len(a.at)) ||
		a.take+len(req.Limiters) > min(len(a.takeCovered), len(a.takeLevels), len(a.takeAt)) ||
		a.quota+len(req.Quotas) > min(len(a.denied), len(a.states)) ||
		a.limit+limits > len(a.used) {
		return policy.Verdict{}, errShortAnswer
	}
	v := policy.Verdict{Allowed: a.allowed[a.request]}
	a.request++
	if len(req.Budgets) > 0 {
		v.Budgets = make([]policy.BudgetState, len(req.Budgets))
	}
	for i := range req.Budgets {
		v.Budgets[i] = policy.BudgetState{
			Covered: a.covered[a.debit], Tokens: a.tokens[a.debit], RefilledAt: a.at[a.debit].UTC(),
		}
		a.debit++
	}
	if len(req.Limiters) > 0 {
		v.Limiters = make([]policy.LimiterState, len(req.Limiters))
	}
	for i := range req.Limiters {
		v.Limiters[i] = policy.LimiterState{
			Covered: a.takeCovered[a.take], Level: a.takeLevels[a.take], RefilledAt: a.takeAt[a.take].UTC(),
		}
		a.take++
	}
	if len(req.Quotas) > 0 {
		v.Quotas = make([]policy.QuotaState, len(req.Quotas))
	}
	for i := range req.Quotas {
		end := a.limit + len(req.Quotas[i].Budgets)
		v.Quotas[i] = policy.QuotaState{
			Reservation: quota.Reservation{Denied: int(a.denied[a.quota]), Used: a.used[a.limit:end:end]},
			Unknown:     a.states[a.quota] == stateUnknown,
			Overflow:    a.states[a.quota] == stateOverflow,
		}
		a.quota++
		a.limit = end
	}
	return v, nil
}

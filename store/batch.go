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
// those that may be written first, each part sorted. It also keeps what a simple batch
// asks of each row.
type set[ID comparable, Demand any] struct {
	index    map[ID]int32 // into members
	members  []ID
	writable []bool
	demands  []Demand // as long as the batch is simple
}

// add notes a member and returns its provisional number.
func (s *set[ID, Demand]) add(id ID, writable bool) int32 {
	i, ok := s.index[id]
	if !ok {
		i = int32(len(s.members)) //nolint:gosec // no batch has 2^31 rows
		if s.index == nil {
			s.index = make(map[ID]int32)
		}
		s.index[id] = i
		s.members = append(s.members, id)
		s.writable = append(s.writable, false)
	}
	s.writable[i] = s.writable[i] || writable
	return i
}

// demand returns what is asked of member i so far; fresh is true if that is nothing.
func (s *set[ID, Demand]) demand(i int32) (d *Demand, fresh bool) {
	if int(i) == len(s.demands) {
		var none Demand
		s.demands = append(s.demands, none)
		fresh = true
	}
	return &s.demands[i], fresh
}

// order sorts the members and their demands, replaces the provisional numbers in refs by
// the final ones, which count from 1 (a negative one becomes 0), and returns how many
// members are writable.
func (s *set[ID, Demand]) order(compare func(a, b ID) int, refs ...[]int32) (writable int32) {
	perm := make([]int32, len(s.members))
	for i := range perm {
		perm[i] = int32(i)
		if s.writable[i] {
			writable++
		}
	}
	slices.SortFunc(perm, func(i, j int32) int {
		if s.writable[i] != s.writable[j] {
			if s.writable[i] {
				return -1
			}
			return 1
		}
		return compare(s.members[i], s.members[j])
	})
	members, final := make([]ID, len(perm)), make([]int32, len(perm))
	for to, from := range perm {
		members[to] = s.members[from]
		final[from] = int32(to) + 1
	}
	if len(s.demands) == len(perm) {
		demands := make([]Demand, len(perm))
		for to, from := range perm {
			demands[to] = s.demands[from]
		}
		s.demands = demands
	}
	s.members = members
	for _, refs := range refs {
		for i, ref := range refs {
			if ref < 0 {
				refs[i] = 0
				continue
			}
			refs[i] = final[ref]
		}
	}
	return writable
}

// What the requests of a simple batch ask of one row together.
type (
	bucketDemand struct {
		units  int64
		budget Budget
		now    time.Time
	}
	limiterDemand struct {
		level  int64 // token-microseconds
		policy policy.LimiterPolicy
		now    time.Time
	}
	windowDemand struct {
		units int64
		limit int64 // the least that is named
	}
)

// A batch is the requests as the function's arguments, but for what is sorted. Shadows
// are requests of their own, each behind the one that it came with.
type batch struct {
	simple    bool // see the function's argument of that name
	known     *knownConsumers
	buckets   set[bucketID, bucketDemand]
	limiters  set[policy.CounterID, limiterDemand]
	windows   set[windowID, windowDemand]
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
	limitCost                         []int64 // its quota's; not an argument
	limits                            []int32 // by request; not an argument
}

type enrolment struct {
	consumer *policy.Consumer
	seen     time.Time
}

func newBatch(reqs []policy.Request, known *knownConsumers) *batch {
	b := &batch{simple: true, known: known, now: make([]time.Time, 0, len(reqs))}
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
		b.addDebit(&req.Budgets[i], now)
	}
	for i := range req.Limiters {
		b.addTake(&req.Limiters[i], now)
	}
	before := len(b.limitUnits)
	for i := range req.Quotas {
		b.addQuota(&req.Quotas[i], now)
	}
	b.limits = append(b.limits, int32(len(b.limitUnits)-before))
}

func (b *batch) addDebit(d *policy.BudgetDebit, now time.Time) {
	cost := float64(d.Cost)
	if d.Cost > policy.MaxUnits {
		// As a double it might round down to what a bucket can hold.
		cost = math.Inf(1)
	}
	writable := d.Cost != 0 && cost <= d.Budget.Burst
	i := b.buckets.add(bucketID{d.Scope, d.Key}, writable)
	if b.simple = b.simple && writable && d.Cost > 0; b.simple {
		demand, fresh := b.buckets.demand(i)
		if fresh {
			*demand = bucketDemand{budget: d.Budget, now: now}
		}
		b.simple = demand.units <= policy.MaxUnits-d.Cost && demand.budget == d.Budget && demand.now.Equal(now)
		demand.units += d.Cost
	}
	b.debitBucket = append(b.debitBucket, i)
	b.debitCost = append(b.debitCost, cost)
	b.debitRate = append(b.debitRate, d.Budget.PerSecond)
	b.debitBurst = append(b.debitBurst, d.Budget.Burst)
}

func (b *batch) addTake(d *policy.LimiterDebit, now time.Time) {
	if b.names == nil {
		b.names = make(map[policy.CounterID]policy.LimiterBucket)
	}
	b.names[d.Bucket.ID] = d.Bucket
	writable := d.Cost != 0 && d.Cost <= d.Policy.Burst
	i := b.limiters.add(d.Bucket.ID, writable)
	if b.simple = b.simple && writable && d.Cost > 0; b.simple {
		demand, fresh := b.limiters.demand(i)
		if fresh {
			*demand = limiterDemand{policy: d.Policy, now: now}
		}
		level := d.Cost * d.Policy.Per.Microseconds()
		b.simple = demand.level <= d.Policy.Capacity()-level && demand.policy == d.Policy && demand.now.Equal(now)
		demand.level += level
	}
	b.takeBucket = append(b.takeBucket, i)
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
	b.simple = b.simple && chargeable && d.Cost > 0 && consumer == 0
	b.quotaCost = append(b.quotaCost, d.Cost)
	b.quotaLimits = append(b.quotaLimits, int32(len(d.Budgets))) //nolint:gosec // at most one a unit
	b.quotaChargeable = append(b.quotaChargeable, chargeable)
	b.quotaOptional = append(b.quotaOptional, d.Optional)
	b.quotaConsumer = append(b.quotaConsumer, consumer)
	for _, w := range d.Budgets {
		id := windowID{d.Counter, w.Unit, w.Unit.Window(at.Unix()).Start}
		i := b.windows.add(id, chargeable)
		b.limitWindow = append(b.limitWindow, i)
		if b.simple {
			demand, fresh := b.windows.demand(i)
			if fresh {
				demand.limit = w.Limit
			}
			demand.limit = min(demand.limit, w.Limit)
			b.simple = demand.units <= w.Limit-d.Cost
			demand.units += d.Cost
		}
		overflow := int32(-1)
		if overflows {
			id.counter = d.Consumer.Overflow
			overflow = b.windows.add(id, chargeable)
		}
		b.limitOverflow = append(b.limitOverflow, overflow)
		b.limitUnits = append(b.limitUnits, w.Limit)
		b.limitCost = append(b.limitCost, d.Cost)
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
const decideArguments = 50

// args orders the rows and returns the arguments of decideSQL. It may be called once.
func (b *batch) args() []any {
	args := make([]any, 0, decideArguments)
	writableBuckets := b.buckets.order(compareBuckets, b.debitBucket)
	writableLimiters := b.limiters.order(compareCounters, b.takeBucket)
	writableWindows := b.windows.order(compareWindows, b.limitWindow, b.limitOverflow)
	args = b.appendDemands(append(args, b.simple))

	scopes := make([]string, len(b.buckets.members))
	keys := make([]pgtype.UUID, len(b.buckets.members))
	for i, id := range b.buckets.members {
		scopes[i] = string(id.scope)
		keys[i] = pgtype.UUID{Bytes: id.key, Valid: true}
	}
	args = append(args, scopes, keys, writableBuckets)

	limiterIDs := make([][]byte, len(b.limiters.members))
	namespaces := make([]string, len(b.limiters.members))
	subjects := make([]string, len(b.limiters.members))
	for i := range b.limiters.members {
		id := &b.limiters.members[i]
		limiterIDs[i] = id[:]
		namespaces[i] = readable(b.names[*id].Namespace)
		subjects[i] = readable(b.names[*id].Subject)
	}
	args = append(args, limiterIDs, namespaces, subjects, writableLimiters)

	counters := make([][]byte, len(b.windows.members))
	units := make([]string, len(b.windows.members))
	starts := make([]time.Time, len(b.windows.members))
	for i := range b.windows.members {
		w := &b.windows.members[i]
		counters[i] = w.counter[:]
		units[i] = w.unit.String()
		starts[i] = time.Unix(w.start, 0)
	}
	args = append(args, counters, units, starts, writableWindows)

	return append(b.appendConsumers(args),
		b.now, b.debits, b.takes, b.quotas,
		orEmpty(b.debitBucket), orEmpty(b.debitCost), orEmpty(b.debitRate), orEmpty(b.debitBurst),
		orEmpty(b.takeBucket), orEmpty(b.takeCost), orEmpty(b.takePermits), orEmpty(b.takePeriod), orEmpty(b.takeBurst),
		orEmpty(b.quotaCost), orEmpty(b.quotaLimits), orEmpty(b.quotaChargeable), orEmpty(b.quotaOptional), orEmpty(b.quotaConsumer),
		orEmpty(b.limitWindow), orEmpty(b.limitOverflow), orEmpty(b.limitUnits),
	)
}

// appendDemands appends what a simple batch asks of each row; for another batch nobody
// looks at it.
func (b *batch) appendDemands(args []any) []any {
	var buckets, limiters, windows int
	if b.simple {
		buckets, limiters, windows = len(b.buckets.demands), len(b.limiters.demands), len(b.windows.demands)
	}
	demands, rates, bursts := make([]float64, buckets), make([]float64, buckets), make([]float64, buckets)
	nows := make([]time.Time, buckets)
	for i := range buckets {
		d := &b.buckets.demands[i]
		demands[i], rates[i], bursts[i], nows[i] = float64(d.units), d.budget.PerSecond, d.budget.Burst, d.now
	}
	args = append(args, demands, rates, bursts, nows)

	levels, permits, periods, capacities := make([]int64, limiters), make([]int64, limiters), make([]int64, limiters), make([]int64, limiters)
	limiterNows := make([]time.Time, limiters)
	for i := range limiters {
		d := &b.limiters.demands[i]
		levels[i], permits[i], periods[i], capacities[i] = d.level, d.policy.Permits, d.policy.Per.Microseconds(), d.policy.Burst
		limiterNows[i] = d.now
	}
	args = append(args, levels, permits, periods, capacities, limiterNows)

	units, limits := make([]int64, windows), make([]int64, windows)
	for i := range windows {
		units[i], limits[i] = b.windows.demands[i].units, b.windows.demands[i].limit
	}
	return append(args, units, limits)
}

func (b *batch) appendConsumers(args []any) []any {
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
	return append(args, ids, domains, entries, named, most, seen)
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
	allAllowed  bool // and then tokens, at, takeLevels, takeAt and used answer by row
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

func (a *answers) verdicts(b *batch, reqs []policy.Request) ([]policy.Verdict, error) {
	if a.allAllowed {
		if err := a.spread(b); err != nil {
			return nil, err
		}
	}
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

// spread turns what a simple batch left in each row into what each request left, in their
// order: a row held what it holds now and all that was asked of it. Costs are whole, so
// that is exact, but for a rate budget's last bits where a fraction meets many units.
func (a *answers) spread(b *batch) error {
	if len(b.buckets.members) > min(len(a.tokens), len(a.at)) ||
		len(b.limiters.members) > min(len(a.takeLevels), len(a.takeAt)) ||
		len(b.windows.members) > len(a.used) {
		return errShortAnswer
	}
	a.allowed, a.covered, a.takeCovered = allTrue(len(b.now)), allTrue(len(b.debitBucket)), allTrue(len(b.takeBucket))
	a.states, a.denied = make([]int32, len(b.quotaCost)), make([]int32, len(b.quotaCost))
	for i := range a.denied {
		a.denied[i] = -1
	}

	tokens, at := a.tokens, a.at
	a.tokens, a.at = make([]float64, len(b.debitBucket)), make([]time.Time, len(b.debitBucket))
	for i := range b.buckets.demands {
		tokens[i] += float64(b.buckets.demands[i].units)
	}
	eachRequest(b.debits, func(k int) { tokens[b.debitBucket[k]-1] -= b.debitCost[k] }, func(k int) {
		a.tokens[k], a.at[k] = tokens[b.debitBucket[k]-1], at[b.debitBucket[k]-1]
	})

	levels, takeAt := a.takeLevels, a.takeAt
	a.takeLevels, a.takeAt = make([]int64, len(b.takeBucket)), make([]time.Time, len(b.takeBucket))
	for i := range b.limiters.demands {
		levels[i] += b.limiters.demands[i].level
	}
	eachRequest(b.takes, func(k int) { levels[b.takeBucket[k]-1] -= b.takeCost[k] * b.takePeriod[k] }, func(k int) {
		a.takeLevels[k], a.takeAt[k] = levels[b.takeBucket[k]-1], takeAt[b.takeBucket[k]-1]
	})

	used := a.used
	a.used = make([]int64, len(b.limitWindow))
	for i := range b.windows.demands {
		used[i] -= b.windows.demands[i].units
	}
	eachRequest(b.limits, func(k int) { used[b.limitWindow[k]-1] += b.limitCost[k] }, func(k int) {
		a.used[k] = used[b.limitWindow[k]-1]
	})
	return nil
}

// eachRequest calls charge for all items of a request and then report for each of them,
// request by request.
func eachRequest(counts []int32, charge, report func(k int)) {
	from := 0
	for _, n := range counts {
		to := from + int(n)
		for k := from; k < to; k++ {
			charge(k)
		}
		for k := from; k < to; k++ {
			report(k)
		}
		from = to
	}
}

func allTrue(n int) []bool {
	s := make([]bool, n)
	for i := range s {
		s[i] = true
	}
	return s
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
	v := policy.Verdict{Allowed: a.allowed[a.request], At: policy.TruncateNow(req.Now)}
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

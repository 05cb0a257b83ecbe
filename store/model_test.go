package store

import (
	"encoding/hex"
	"fmt"
	"maps"
	"math"
	"math/big"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// model is buckets and windows as the laws say, in memory and one request at a time.
type model struct {
	buckets   map[bucketID]bucketState
	limiters  map[policy.CounterID]limiterState
	windows   map[windowID]int64
	consumers map[policy.CounterID]string // their domains
}

type bucketState struct {
	tokens float64
	at     time.Time
}

type limiterState struct {
	level  int64
	at     time.Time
	policy policy.LimiterPolicy
}

func newModel() *model {
	return &model{
		buckets: map[bucketID]bucketState{}, limiters: map[policy.CounterID]limiterState{},
		windows: map[windowID]int64{}, consumers: map[policy.CounterID]string{},
	}
}

func (m *model) clone() *model {
	return &model{
		buckets: maps.Clone(m.buckets), limiters: maps.Clone(m.limiters),
		windows: maps.Clone(m.windows), consumers: maps.Clone(m.consumers),
	}
}

// take is one debit alone.
func (m *model) take(id bucketID, cost float64, b Budget, now time.Time) bool {
	state, ok := m.buckets[id]
	if !ok {
		if cost < 0 {
			return true
		}
		state = bucketState{tokens: b.Burst, at: now}
	}
	level := b.Level(state.tokens, state.at, now)
	if cost > level {
		return false
	}
	if cost != 0 {
		m.buckets[id] = bucketState{tokens: min(b.Burst, level-cost), at: later(state.at, now)}
	}
	return true
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// adopt turns a limiter's bucket into one of the policy: what is left is refilled by the
// policy that wrote it, and cut to the new capacity.
func (m *model) adopt(id policy.CounterID, p policy.LimiterPolicy, now time.Time) {
	state, ok := m.limiters[id]
	if !ok || state.policy == p {
		return
	}
	m.limiters[id] = limiterState{level: converted(state, p, now), at: later(state.at, now), policy: p}
}

func converted(state limiterState, p policy.LimiterPolicy, now time.Time) int64 {
	level := big.NewInt(state.policy.Level(state.level, state.at, now))
	level.Mul(level, big.NewInt(p.Per.Microseconds()))
	level.Div(level, big.NewInt(state.policy.Per.Microseconds()))
	if level.Cmp(big.NewInt(p.Capacity())) > 0 {
		return p.Capacity()
	}
	return level.Int64()
}

// acquire is one debit from a limiter alone.
func (m *model) acquire(d policy.LimiterDebit, now time.Time) bool {
	state, ok := m.limiters[d.Bucket.ID]
	if !ok {
		if d.Cost < 0 {
			return true
		}
		state = limiterState{level: d.Policy.Capacity(), at: now, policy: d.Policy}
	}
	if d.Cost == 0 {
		return true
	}
	if d.Cost > d.Policy.Burst {
		return false
	}
	m.adopt(d.Bucket.ID, d.Policy, now)
	if adopted, ok := m.limiters[d.Bucket.ID]; ok {
		state = adopted
	}
	level := big.NewInt(d.Policy.Level(state.level, state.at, now))
	level.Sub(level, new(big.Int).Mul(big.NewInt(d.Cost), big.NewInt(d.Policy.Per.Microseconds())))
	if level.Sign() < 0 {
		return false
	}
	if level.Cmp(big.NewInt(d.Policy.Capacity())) > 0 {
		level.SetInt64(d.Policy.Capacity())
	}
	m.limiters[d.Bucket.ID] = limiterState{level: level.Int64(), at: later(state.at, now), policy: d.Policy}
	return true
}

func window(c policy.CounterID, b quota.Budget, now time.Time) windowID {
	return windowID{c, b.Unit, b.Unit.Window(now.Unix()).Start}
}

// counts reports which counter a debit goes to, and whether its consumer is to be enrolled.
func (m *model) counts(d policy.QuotaDebit) (id policy.CounterID, state policy.QuotaState, enrol bool) {
	c := d.Consumer
	if c == nil || d.Cost == 0 {
		return d.Counter, state, false
	}
	if _, ok := m.consumers[c.ID]; ok {
		return d.Counter, state, false
	}
	if c.Named {
		state.Unknown = true
		return d.Counter, state, false
	}
	var enrolled int64
	for _, domain := range m.consumers {
		if domain == c.Domain {
			enrolled++
		}
	}
	if c.Most > 0 && (enrolled >= c.Most || d.Cost < 0) {
		state.Overflow = true
		return c.Overflow, state, false
	}
	return d.Counter, state, d.Cost > 0
}

// spend is one quota alone: the first window that denies, or -1.
func (m *model) spend(id policy.CounterID, d policy.QuotaDebit, now time.Time) int {
	at := now
	if d.Cost < 0 && !d.ChargedAt.IsZero() {
		at = d.ChargedAt
	}
	for i, b := range d.Budgets {
		if d.Cost > 0 && (d.Cost > b.Limit || m.windows[window(id, b, at)] > b.Limit-d.Cost) {
			return i
		}
	}
	for _, b := range d.Budgets {
		w := window(id, b, at)
		if used, ok := m.windows[w]; d.Cost > 0 || d.Cost < 0 && ok {
			m.windows[w] = max(0, used+d.Cost)
		}
	}
	return -1
}

// decide is a whole request: tried on a copy, which is kept only if all is covered.
func (m *model) decide(req policy.Request) policy.Verdict {
	v := policy.Verdict{Allowed: true, At: req.Now}
	met := map[policy.CounterID]bool{}
	for _, d := range req.Limiters {
		if d.Cost != 0 && d.Cost <= d.Policy.Burst && !met[d.Bucket.ID] {
			m.adopt(d.Bucket.ID, d.Policy, req.Now) // also when it is refused
			met[d.Bucket.ID] = true
		}
	}
	trial := m.clone()
	for _, d := range req.Budgets {
		covered := d.Cost == 0 ||
			float64(d.Cost) <= d.Budget.Burst && d.Cost <= policy.MaxUnits && trial.take(bucketID{d.Scope, d.Key}, float64(d.Cost), d.Budget, req.Now)
		v.Budgets = append(v.Budgets, policy.BudgetState{Covered: covered})
		v.Allowed = v.Allowed && covered
	}
	for _, d := range req.Limiters {
		covered := trial.acquire(d, req.Now)
		v.Limiters = append(v.Limiters, policy.LimiterState{Covered: covered})
		v.Allowed = v.Allowed && covered
	}
	var partly func() // what a quota's denial leaves spent
	optionals, refusing := 0, 0
	ids := make([]policy.CounterID, len(req.Quotas))
	for i, d := range req.Quotas {
		id, state, enrol := trial.counts(d)
		ids[i], state.Denied = id, -1
		if !state.Unknown {
			chargeable := true
			for _, b := range d.Budgets {
				chargeable = chargeable && d.Cost <= b.Limit
			}
			state.Denied = trial.spend(id, d, req.Now)
			if enrol && chargeable {
				trial.consumers[d.Consumer.ID] = d.Consumer.Domain
			}
			if d.Optional {
				optionals++
			}
			switch {
			case state.Denied < 0:
			case d.Optional:
				refusing++
			case v.Allowed && chargeable:
				partly = func() {
					for _, b := range d.Budgets[:state.Denied] {
						m.windows[window(id, b, req.Now)] += d.Cost
						// Also when an earlier quota of the request, now undone, had
						// enrolled it already: what is charged has an owner.
						if d.Consumer != nil && !state.Overflow {
							m.consumers[d.Consumer.ID] = d.Consumer.Domain
						}
					}
				}
			}
			v.Allowed = v.Allowed && (state.Denied < 0 || d.Optional)
		}
		v.Quotas = append(v.Quotas, state)
	}
	v.Allowed = v.Allowed && (optionals == 0 || refusing < optionals)
	switch {
	case v.Allowed:
		*m = *trial
	case partly != nil:
		partly()
	}
	m.report(req, ids, &v)
	for _, shadow := range req.Shadows {
		v.Shadows = append(v.Shadows, m.decide(shadow))
	}
	return v
}

// report fills in what the rows hold after a decision.
func (m *model) report(req policy.Request, ids []policy.CounterID, v *policy.Verdict) {
	for i, d := range req.Budgets {
		state, ok := m.buckets[bucketID{d.Scope, d.Key}]
		if !ok {
			state = bucketState{tokens: d.Budget.Burst, at: req.Now}
		}
		v.Budgets[i].Tokens, v.Budgets[i].RefilledAt = state.tokens, state.at
	}
	for i, d := range req.Limiters {
		state, ok := m.limiters[d.Bucket.ID]
		switch {
		case !ok:
			state = limiterState{level: d.Policy.Capacity(), at: req.Now}
		case state.policy != d.Policy:
			state = limiterState{level: converted(state, d.Policy, req.Now), at: later(state.at, req.Now)}
		}
		v.Limiters[i].Level, v.Limiters[i].RefilledAt = state.level, state.at
	}
	for i, d := range req.Quotas {
		at := req.Now
		if d.Cost < 0 && !d.ChargedAt.IsZero() {
			at = d.ChargedAt
		}
		for _, b := range d.Budgets {
			v.Quotas[i].Used = append(v.Quotas[i].Used, m.windows[window(ids[i], b, at)])
		}
	}
}

// histories draws the requests of a history: few keys, so that they meet.
type histories struct {
	keys    []Key
	holders []policy.Consumer
	now     time.Time
	// The limiters' policies, which may change between requests.
	policies [3]policy.LimiterPolicy
	modest   bool // all costs are small, so that most are covered
}

var modelPolicies = []policy.LimiterPolicy{
	{Permits: 3, Per: time.Second, Burst: 10},
	{Permits: 3, Per: time.Second, Burst: 25},
	{Permits: 7, Per: time.Minute, Burst: 5},
	{Permits: 1, Per: 3 * time.Microsecond, Burst: 8},
	{Permits: 1 << 40, Per: 365 * 24 * time.Hour, Burst: 1 << 16},
	{Permits: 1, Per: 1 << 42 * time.Millisecond, Burst: 1 << 9},
}

// domainMost is the cap of the domain "capped".
const domainMost = 2

func newHistories() *histories {
	h := &histories{keys: []Key{newKey(), newKey(), newKey()}, now: noon}
	h.holders = []policy.Consumer{consumer("a"), consumer("b")}
	named := consumer("named")
	named.Named = true
	h.holders = append(h.holders, named)
	for _, name := range []string{"x", "y", "z", "zz"} {
		c := consumer(name)
		c.Domain, c.Most, c.Overflow = "capped", domainMost, policy.CounterID{0xff}
		h.holders = append(h.holders, c)
	}
	return h
}

func (h *histories) cost(rt *rapid.T) int64 {
	if h.modest {
		return rapid.Int64Range(1, 3).Draw(rt, "cost")
	}
	return rapid.OneOf(
		rapid.Int64Range(0, 12), rapid.Int64Range(0, 12), rapid.Int64Range(-12, 0), rapid.Int64Range(0, 1<<54),
		rapid.Just[int64](math.MaxInt64), rapid.Just[int64](math.MinInt64),
	).Draw(rt, "cost")
}

func (h *histories) debit(rt *rapid.T) policy.BudgetDebit {
	rate := rapid.SampledFrom([]float64{0.5, 1, 3, 1.0 / 3, 1e6, 12345.678}).Draw(rt, "rate")
	burst := rapid.OneOf(rapid.Float64Range(1, 30), rapid.Just(rate*3600), rapid.Just(5.0)).Draw(rt, "burst")
	return policy.BudgetDebit{
		Scope:  rapid.SampledFrom([]Scope{ScopeIngestNode, ScopeSecretReadNode}).Draw(rt, "scope"),
		Key:    rapid.SampledFrom(h.keys).Draw(rt, "key"),
		Budget: Budget{PerSecond: rate, Burst: min(burst, 3600*rate)},
		Cost:   h.cost(rt),
	}
}

func (h *histories) take(rt *rapid.T) policy.LimiterDebit {
	i := rapid.IntRange(0, len(h.policies)-1).Draw(rt, "limiter")
	return policy.LimiterDebit{
		Bucket: policy.LimiterBucket{ID: policy.CounterID{byte(i)}},
		Policy: h.policies[i],
		Cost:   h.cost(rt),
	}
}

func (h *histories) quota(rt *rapid.T) policy.QuotaDebit {
	units := rapid.SampledFrom([][]quota.Unit{
		{quota.Day, quota.Month}, {quota.Day}, {quota.Second, quota.Hour, quota.Year}, {quota.Minute, quota.Week},
	}).Draw(rt, "units")
	d := quotaDebit(rapid.SampledFrom(h.holders).Draw(rt, "consumer"), nil, h.cost(rt))
	if rapid.Bool().Draw(rt, "rate limit") {
		d.Consumer, d.Counter = nil, policy.CounterID{7}
		if len(units) == 1 {
			d.Optional = rapid.Bool().Draw(rt, "optional")
		}
	}
	for _, u := range units {
		limit := rapid.OneOf(rapid.Int64Range(0, 40), rapid.Just[int64](1<<62)).Draw(rt, "limit")
		d.Budgets = append(d.Budgets, quota.Budget{Key: u.String(), Unit: u, Limit: limit})
	}
	if d.Cost < 0 && rapid.Bool().Draw(rt, "receipt") {
		d.ChargedAt = h.now.Add(-time.Duration(rapid.Int64Range(0, 40*86400).Draw(rt, "ago")) * time.Second)
	}
	return d
}

func (h *histories) request(rt *rapid.T) policy.Request {
	// Mostly small steps, back as well as forth; sometimes out of the window.
	step := rapid.OneOf(
		rapid.Int64Range(-3e6, 3e6), rapid.Int64Range(0, 100), rapid.Int64Range(-300e6, 300e6), rapid.Int64Range(0, 40*86400*1e6),
	).Draw(rt, "step")
	h.now = h.now.Add(time.Duration(step) * time.Microsecond)
	for i := range h.policies {
		if h.policies[i].Burst == 0 || rapid.IntRange(0, 3).Draw(rt, "roll-out") == 0 {
			h.policies[i] = rapid.SampledFrom(modelPolicies).Draw(rt, "policy")
		}
	}
	h.modest = rapid.Bool().Draw(rt, "modest")
	req := h.debits(rt, 4)
	for range rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(rt, "shadows") {
		req.Shadows = append(req.Shadows, h.debits(rt, 1))
	}
	return req
}

func (h *histories) debits(rt *rapid.T, most int) policy.Request {
	return policy.Request{
		Now:      h.now,
		Budgets:  rapid.SliceOfN(rapid.Custom(h.debit), 0, most).Draw(rt, "budgets"),
		Limiters: rapid.SliceOfN(rapid.Custom(h.take), 0, most).Draw(rt, "limiters"),
		Quotas:   rapid.SliceOfN(rapid.Custom(h.quota), 0, most).Draw(rt, "quotas"),
	}
}

// TestModel runs random histories of takes, decisions and batches against the store
// and the model. Single-threaded and with whole costs they agree to the bit, in every
// verdict and in every row.
func TestModel(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	rapid.Check(t, func(rt *rapid.T) {
		if _, err := pool.Exec(t.Context(), `TRUNCATE plexsphere.rate_budgets, plexsphere.limiter_buckets,
			plexsphere.quota_counters, plexsphere.consumers, plexsphere.consumer_domains`); err != nil {
			rt.Fatal(err)
		}
		s, m, h := NewStore(pool), newModel(), newHistories()
		for range rapid.IntRange(1, 15).Draw(rt, "steps") {
			switch rapid.SampledFrom([]string{"take", "decide", "batch", "restart", "enrol"}).Draw(rt, "kind") {
			case "take":
				d, req := h.debit(rt), h.request(rt)
				cost := float64(max(0, d.Cost))
				got, err := s.Take(t.Context(), d.Scope, d.Key, cost, d.Budget, req.Now)
				if err != nil {
					rt.Fatal(err)
				}
				want := cost == 0 || cost <= d.Budget.Burst && m.take(bucketID{d.Scope, d.Key}, cost, d.Budget, req.Now)
				if got != want {
					rt.Fatalf("Take(%+v at %v) = %v, want %v", d, req.Now, got, want)
				}
			case "decide":
				req := h.request(rt)
				got, err := s.Decide(t.Context(), req)
				if err != nil {
					rt.Fatal(err)
				}
				if diff := cmp.Diff(m.decide(req), got, cmpopts.EquateEmpty()); diff != "" {
					rt.Fatalf("Decide(%+v) (-model +store):\n%s", req, diff)
				}
			case "batch":
				reqs := rapid.SliceOfN(rapid.Custom(h.request), 2, 6).Draw(rt, "requests")
				if rapid.Bool().Draw(rt, "at once") {
					for i := range reqs {
						reqs[i].Now = h.now
						for j := range reqs[i].Shadows {
							reqs[i].Shadows[j].Now = h.now
						}
					}
				}
				got, err := s.decide(t.Context(), reqs)
				if err != nil {
					rt.Fatal(err)
				}
				for i, req := range reqs {
					if diff := cmp.Diff(m.decide(req), got[i], cmpopts.EquateEmpty()); diff != "" {
						rt.Fatalf("request %d of a batch, %+v (-model +store):\n%s", i, req, diff)
					}
				}
			case "restart": // nothing is remembered
				s = NewStore(pool)
			case "enrol":
				c := rapid.SampledFrom(h.holders).Draw(rt, "enrolled")
				if err := s.Enrol(t.Context(), []policy.Consumer{c}, h.now); err != nil {
					rt.Fatal(err)
				}
				m.consumers[c.ID] = c.Domain
			}
		}
		compareRows(t, rt, pool, m)
	})
}

// compareRows compares every row with the model, both ways.
func compareRows(t *testing.T, rt rapid.TB, db DBTX, m *model) {
	t.Helper()
	want := map[string]string{}
	for id, state := range m.buckets {
		want[fmt.Sprint(id.scope, " ", id.key)] = fmt.Sprintf("%x %d", state.tokens, state.at.UnixMicro())
	}
	for id, used := range m.windows {
		want[fmt.Sprintf("%x %s %d", id.counter, id.unit, id.start)] = strconv.FormatInt(used, 10)
	}
	for id, state := range m.limiters {
		want[fmt.Sprintf("%x", id)] = fmt.Sprintf("%d %d %v", state.level, state.at.UnixMicro(), state.policy)
	}
	domains := map[string]int{}
	for id, domain := range m.consumers {
		want[fmt.Sprintf("consumer %x", id)] = domain
		domains[domain]++
	}
	for domain, n := range domains {
		want["domain "+domain] = strconv.Itoa(n)
	}
	got := map[string]string{}
	collect := func(sql string, scan func(pgx.Rows) (key, value string, err error)) {
		rows, err := db.Query(t.Context(), sql)
		if err != nil {
			rt.Fatal(err)
		}
		for rows.Next() {
			key, value, err := scan(rows)
			if err != nil {
				rt.Fatal(err)
			}
			got[key] = value
		}
		if err := rows.Err(); err != nil {
			rt.Fatal(err)
		}
	}
	collect("SELECT scope, bucket_key::text, tokens, refilled_at FROM plexsphere.rate_budgets", func(rows pgx.Rows) (string, string, error) {
		var (
			scope, key string
			state      bucketState
		)
		err := rows.Scan(&scope, &key, &state.tokens, &state.at)
		return scope + " " + key, fmt.Sprintf("%x %d", state.tokens, state.at.UnixMicro()), err
	})
	collect("SELECT id, level, refilled_at, permits, period_us, burst FROM plexsphere.limiter_buckets", func(rows pgx.Rows) (string, string, error) {
		var (
			id     []byte
			state  limiterState
			period int64
		)
		err := rows.Scan(&id, &state.level, &state.at, &state.policy.Permits, &period, &state.policy.Burst)
		state.policy.Per = time.Duration(period) * time.Microsecond
		return hex.EncodeToString(id), fmt.Sprintf("%d %d %v", state.level, state.at.UnixMicro(), state.policy), err
	})
	collect("SELECT counter, unit, window_start, used FROM plexsphere.quota_counters", func(rows pgx.Rows) (string, string, error) {
		var (
			id    []byte
			unit  string
			start time.Time
			used  int64
		)
		err := rows.Scan(&id, &unit, &start, &used)
		return fmt.Sprintf("%x %s %d", id, unit, start.Unix()), strconv.FormatInt(used, 10), err
	})
	collect("SELECT 'consumer ' || encode(id, 'hex'), domain FROM plexsphere.consumers", scanTexts)
	collect("SELECT 'domain ' || domain, consumers::text FROM plexsphere.consumer_domains", scanTexts)
	if diff := cmp.Diff(want, got); diff != "" {
		rt.Fatalf("rows (-model +store):\n%s", diff)
	}
}

func scanTexts(rows pgx.Rows) (key, value string, err error) {
	err = rows.Scan(&key, &value)
	return key, value, err
}

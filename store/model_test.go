package store

import (
	"fmt"
	"maps"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// model is buckets and windows as the laws say, in memory and one request at a time.
type model struct {
	buckets map[bucketID]bucketState
	windows map[windowID]int64
}

type bucketState struct {
	tokens float64
	at     time.Time
}

func newModel() *model {
	return &model{buckets: map[bucketID]bucketState{}, windows: map[windowID]int64{}}
}

// take is one debit alone.
func (m *model) take(id bucketID, cost float64, b Budget, now time.Time) bool {
	state, ok := m.buckets[id]
	if !ok {
		state = bucketState{tokens: b.Burst, at: now}
	}
	level := b.Level(state.tokens, state.at, now)
	if cost > level {
		return false
	}
	if cost > 0 {
		if now.After(state.at) {
			state.at = now
		}
		m.buckets[id] = bucketState{tokens: level - cost, at: state.at}
	}
	return true
}

func window(c policy.CounterID, b quota.Budget, now time.Time) windowID {
	return windowID{c, b.Unit, b.Unit.Window(now.Unix()).Start}
}

// decide is a whole request: tried on a copy, which is kept only if all is covered.
func (m *model) decide(req policy.Request) policy.Verdict {
	trial := &model{buckets: maps.Clone(m.buckets), windows: maps.Clone(m.windows)}
	v := policy.Verdict{Allowed: true}
	for _, d := range req.Budgets {
		covered := d.Cost == 0 ||
			float64(d.Cost) <= d.Budget.Burst && d.Cost <= policy.MaxUnits && trial.take(bucketID{d.Scope, d.Key}, float64(d.Cost), d.Budget, req.Now)
		v.Budgets = append(v.Budgets, policy.BudgetState{Covered: covered})
		v.Allowed = v.Allowed && covered
	}
	var partly func() // what a quota's denial leaves spent
	for _, d := range req.Quotas {
		denied := -1
		for i := len(d.Budgets) - 1; i >= 0 && d.Cost > 0; i-- {
			left := d.Budgets[i].Limit - trial.windows[window(d.Counter, d.Budgets[i], req.Now)]
			if d.Cost > left {
				denied = i
			}
		}
		if denied < 0 {
			for _, b := range d.Budgets {
				if d.Cost > 0 {
					trial.windows[window(d.Counter, b, req.Now)] += d.Cost
				}
			}
		} else if v.Allowed {
			partly = func() {
				for _, b := range d.Budgets {
					if d.Cost > b.Limit {
						return
					}
				}
				for _, b := range d.Budgets[:denied] {
					m.windows[window(d.Counter, b, req.Now)] += d.Cost
				}
			}
		}
		v.Quotas = append(v.Quotas, policy.QuotaState{Reservation: quota.Reservation{Denied: denied}})
		v.Allowed = v.Allowed && denied < 0
	}
	switch {
	case v.Allowed:
		*m = *trial
	case partly != nil:
		partly()
	}
	for i, d := range req.Budgets {
		state, ok := m.buckets[bucketID{d.Scope, d.Key}]
		if !ok {
			state = bucketState{tokens: d.Budget.Burst, at: req.Now}
		}
		v.Budgets[i].Tokens, v.Budgets[i].RefilledAt = state.tokens, state.at
	}
	for i, d := range req.Quotas {
		for _, b := range d.Budgets {
			v.Quotas[i].Used = append(v.Quotas[i].Used, m.windows[window(d.Counter, b, req.Now)])
		}
	}
	return v
}

// TestModel runs random histories of takes, decisions and batches against the store
// and the model. Single-threaded and with whole costs they agree to the bit, in every
// verdict and in every row.
func TestModel(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	rates := []float64{0.5, 1, 3, 1.0 / 3, 1e6, 12345.678}
	rapid.Check(t, func(rt *rapid.T) {
		if _, err := pool.Exec(t.Context(), "TRUNCATE plexsphere.rate_budgets, plexsphere.quota_counters, plexsphere.consumers"); err != nil {
			rt.Fatal(err)
		}
		m := newModel()
		keys := []Key{newKey(), newKey(), newKey()}
		holders := []policy.Consumer{consumer("a"), consumer("b")}

		scope := rapid.SampledFrom([]Scope{ScopeIngestNode, ScopeSecretReadNode})
		key := rapid.SampledFrom(keys)
		cost := rapid.OneOf(rapid.Int64Range(0, 12), rapid.Int64Range(0, 1<<54), rapid.Just[int64](1<<63-1))
		budget := rapid.Custom(func(rt *rapid.T) Budget {
			rate := rapid.SampledFrom(rates).Draw(rt, "rate")
			burst := rapid.OneOf(rapid.Float64Range(1, 30), rapid.Just(rate*3600), rapid.Just(5.0)).Draw(rt, "burst")
			return Budget{PerSecond: rate, Burst: min(burst, 3600*rate)}
		})
		debit := rapid.Custom(func(rt *rapid.T) policy.BudgetDebit {
			return policy.BudgetDebit{Scope: scope.Draw(rt, "scope"), Key: key.Draw(rt, "key"), Budget: budget.Draw(rt, "budget"), Cost: cost.Draw(rt, "cost")}
		})
		limit := rapid.OneOf(rapid.Int64Range(0, 40), rapid.Just[int64](1<<62))
		quotas := rapid.Custom(func(rt *rapid.T) policy.QuotaDebit {
			units := rapid.SampledFrom([][]quota.Unit{
				{quota.Day, quota.Month}, {quota.Day}, {quota.Second, quota.Hour, quota.Year}, {quota.Minute, quota.Week},
			}).Draw(rt, "units")
			d := quotaDebit(rapid.SampledFrom(holders).Draw(rt, "consumer"), nil, cost.Draw(rt, "cost"))
			for _, u := range units {
				d.Budgets = append(d.Budgets, quota.Budget{Key: u.String(), Unit: u, Limit: limit.Draw(rt, "limit")})
			}
			return d
		})

		now := noon
		request := rapid.Custom(func(rt *rapid.T) policy.Request {
			// Mostly small steps, back as well as forth; sometimes out of the window.
			step := rapid.OneOf(
				rapid.Int64Range(-3e6, 3e6), rapid.Int64Range(0, 100), rapid.Int64Range(-300e6, 300e6), rapid.Int64Range(0, 40*86400*1e6),
			).Draw(rt, "step")
			now = now.Add(time.Duration(step) * time.Microsecond)
			return policy.Request{
				Now:     now,
				Budgets: rapid.SliceOfN(debit, 0, 4).Draw(rt, "budgets"),
				Quotas:  rapid.SliceOfN(quotas, 0, 3).Draw(rt, "quotas"),
			}
		})

		for range rapid.IntRange(1, 15).Draw(rt, "steps") {
			switch rapid.SampledFrom([]string{"take", "decide", "batch"}).Draw(rt, "kind") {
			case "take":
				d, req := debit.Draw(rt, "debit"), request.Draw(rt, "request")
				got, err := s.Take(t.Context(), d.Scope, d.Key, float64(d.Cost), d.Budget, req.Now)
				if err != nil {
					rt.Fatal(err)
				}
				want := float64(d.Cost) <= d.Budget.Burst && m.take(bucketID{d.Scope, d.Key}, float64(d.Cost), d.Budget, req.Now)
				if got != (want || d.Cost == 0) {
					rt.Fatalf("Take(%+v at %v) = %v, want %v", d, req.Now, got, want)
				}
			case "decide":
				req := request.Draw(rt, "request")
				got, err := s.Decide(t.Context(), req)
				if err != nil {
					rt.Fatal(err)
				}
				if diff := cmp.Diff(m.decide(req), got); diff != "" {
					rt.Fatalf("Decide(%+v) (-model +store):\n%s", req, diff)
				}
			case "batch":
				reqs := rapid.SliceOfN(request, 2, 6).Draw(rt, "requests")
				got, err := s.decide(t.Context(), reqs)
				if err != nil {
					rt.Fatal(err)
				}
				for i, req := range reqs {
					if diff := cmp.Diff(m.decide(req), got[i]); diff != "" {
						rt.Fatalf("request %d of a batch, %+v (-model +store):\n%s", i, req, diff)
					}
				}
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
	got := map[string]string{}
	rows, err := db.Query(t.Context(), "SELECT scope, bucket_key::text, tokens, refilled_at FROM plexsphere.rate_budgets")
	if err != nil {
		rt.Fatal(err)
	}
	for rows.Next() {
		var (
			scope, key string
			state      bucketState
		)
		if err := rows.Scan(&scope, &key, &state.tokens, &state.at); err != nil {
			rt.Fatal(err)
		}
		got[scope+" "+key] = fmt.Sprintf("%x %d", state.tokens, state.at.UnixMicro())
	}
	rows, err = db.Query(t.Context(), "SELECT counter, unit, window_start, used FROM plexsphere.quota_counters")
	if err != nil {
		rt.Fatal(err)
	}
	for rows.Next() {
		var (
			id    []byte
			unit  string
			start time.Time
			used  int64
		)
		if err := rows.Scan(&id, &unit, &start, &used); err != nil {
			rt.Fatal(err)
		}
		got[fmt.Sprintf("%x %s %d", id, unit, start.Unix())] = strconv.FormatInt(used, 10)
	}
	if err := rows.Err(); err != nil {
		rt.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		rt.Fatalf("rows (-model +store):\n%s", diff)
	}
}

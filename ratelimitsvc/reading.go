package ratelimitsvc

import (
	"math"
	"time"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// A reading is one limit's state after the decision, in the terms of headers: a bucket,
// or one window.
type reading struct {
	descriptor int // its index in the request
	limit      *policy.Limit
	kind       debitKind
	key        string // which window of a quota; "" for others
	refused    bool   // it could not cover the cost
	blocks     bool   // and that is why the request is refused
	optional   bool   // it refuses only together with all other optional ones
	never      bool   // the cost is above the whole limit
	rank       int    // which refusal is shown: rates first, then the shorter window
	size       int64
	remaining  int64
	window     int64         // seconds from empty to whole, at least 1
	reset      time.Duration // until it is whole again
	wait       time.Duration // until it covers the cost, when refused and not never
	perUnit    uint32        // the protocol's current limit
	unit       rlsv3.RateLimitResponse_RateLimit_Unit
}

// left is what remains relative to the limit's size.
func (r *reading) left() float64 {
	if r.size == 0 {
		return 0
	}
	return float64(r.remaining) / float64(r.size)
}

// name is how clients and logs see the limit.
func (r *reading) name() string {
	if r.limit.Name == "" {
		return "override"
	}
	return r.limit.Name
}

// shown picks which of two limits is described: one that refuses before others, of two
// that refuse the one that no wait helps, then the one of lower rank, else the one with
// the least left. The first wins a tie; nil loses.
func shown(a, b *reading) *reading {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.blocks != b.blocks:
		if b.blocks {
			return b
		}
	case a.blocks:
		if b.never && !a.never || b.never == a.never && b.rank < a.rank {
			return b
		}
	case b.left() < a.left():
		return b
	}
	return a
}

// readings appends the states of a descriptor's limits, in the order of its debits. A
// quota that is inert has none, and neither has a window that a refund went into after
// it had passed.
func (d *planned) readings(rs []reading, request *policy.Request, v *policy.Verdict) []reading {
	for _, debit := range d.debits() {
		switch debit.kind {
		case debitBudget:
			rs = append(rs, budgetReading(d.limit, request, debit.at, v.Budgets[debit.at]))
		case debitLimiter:
			rs = append(rs, limiterReading(d.limit, request, debit.at, v.Limiters[debit.at]))
		case debitRateLimit, debitQuota:
			if state := &v.Quotas[debit.at]; !state.Unknown {
				rs = quotaReadings(rs, d.limit, debit, request, state)
			}
		}
	}
	return rs
}

func budgetReading(l *policy.Limit, request *policy.Request, at int, state policy.BudgetState) reading {
	debit, now := request.Budgets[at], request.Now
	b := debit.Budget
	r := reading{
		limit:     l,
		kind:      debitBudget,
		refused:   !state.Covered && debit.Cost > 0,
		size:      int64(b.Burst),
		remaining: int64(b.Level(state.Tokens, state.RefilledAt, now)),
		window:    max(1, int64(math.Ceil(b.Burst/b.PerSecond))),
		perUnit:   saturate(b.PerSecond),
		unit:      rlsv3.RateLimitResponse_RateLimit_SECOND,
	}
	r.reset, _ = b.Wait(state.Tokens, state.RefilledAt, now, b.Burst)
	if r.refused {
		var s sum
		for _, d := range request.Budgets {
			if d.Scope == debit.Scope && d.Key == debit.Key {
				s.add(d.Cost)
			}
		}
		// As whole numbers, since a double does not hold each one above 2^53.
		if r.never = s.most > r.size; !r.never {
			r.wait, _ = b.Wait(state.Tokens, state.RefilledAt, now, float64(s.most))
		}
	}
	return r
}

func limiterReading(l *policy.Limit, request *policy.Request, at int, state policy.LimiterState) reading {
	debit, now := request.Limiters[at], request.Now
	p := debit.Policy
	perSecond := float64(p.Permits) / p.Per.Seconds()
	r := reading{
		limit:     l,
		kind:      debitLimiter,
		rank:      1,
		refused:   !state.Covered && debit.Cost > 0,
		size:      p.Burst,
		remaining: p.Tokens(p.Level(state.Level, state.RefilledAt, now)),
		window:    max(1, int64(math.Ceil(float64(p.Burst)/perSecond))),
		perUnit:   saturate(perSecond),
		unit:      rlsv3.RateLimitResponse_RateLimit_SECOND,
	}
	r.reset, _ = p.Wait(state.Level, state.RefilledAt, now, p.Burst)
	if r.refused {
		var s sum
		for _, d := range request.Limiters {
			if d.Bucket.ID == debit.Bucket.ID {
				s.add(d.Cost)
			}
		}
		wait, ok := p.Wait(state.Level, state.RefilledAt, now, s.most)
		r.wait, r.never = wait, !ok
	}
	return r
}

// quotaReadings appends one reading a window. The first that denies refuses, and so do
// later ones that could not cover the cost either: a client that waits for the first
// wall must not run into the next.
func quotaReadings(rs []reading, l *policy.Limit, d debit, request *policy.Request, state *policy.QuotaState) []reading {
	debit, now := request.Quotas[d.at], request.Now
	for i, b := range debit.Budgets {
		window := b.Unit.Window(now.Unix())
		if !debit.ChargedAt.IsZero() && !window.Contains(debit.ChargedAt.Unix()) {
			continue
		}
		r := reading{
			limit:     l,
			kind:      d.kind,
			optional:  debit.Optional,
			rank:      1 + int(b.Unit),
			size:      b.Limit,
			remaining: max(0, b.Limit-state.Used[i]),
			window:    window.End - window.Start,
			reset:     time.Unix(window.End, 0).Sub(now),
			perUnit:   saturate(float64(b.Limit)),
			unit:      protocolUnits[b.Unit],
		}
		if d.kind == debitQuota {
			r.key = b.Key
		}
		if state.Denied >= 0 && i >= state.Denied && debit.Cost > 0 {
			need := windowNeed(request, debit, b.Unit)
			r.refused = i == state.Denied || state.Used[i] > b.Limit-need
			r.never = need > b.Limit
			r.wait = r.reset
		}
		rs = append(rs, r)
	}
	return rs
}

// windowNeed is what the request wants of a counter's current window. An optional debit
// wants its own cost alone: that others fit beside it is not what the request waits for.
func windowNeed(request *policy.Request, debit policy.QuotaDebit, unit quota.Unit) int64 {
	if debit.Optional {
		return debit.Cost
	}
	var s sum
	window := unit.Window(request.Now.Unix())
	for _, d := range request.Quotas {
		if d.Counter == debit.Counter && (d.ChargedAt.IsZero() || window.Contains(d.ChargedAt.Unix())) {
			s.add(d.Cost)
		}
	}
	return s.most
}

// A sum is what the debits of one bucket or window add up to, one after the other: the
// same limit twice in a request is charged twice, so that is what it must hold. Refunds
// among them fill nothing above its ceiling.
type sum struct{ now, most int64 }

func (s *sum) add(cost int64) {
	s.now = max(0, s.now+cost)
	s.most = max(s.most, s.now)
}

var protocolUnits = [...]rlsv3.RateLimitResponse_RateLimit_Unit{
	quota.Second: rlsv3.RateLimitResponse_RateLimit_SECOND,
	quota.Minute: rlsv3.RateLimitResponse_RateLimit_MINUTE,
	quota.Hour:   rlsv3.RateLimitResponse_RateLimit_HOUR,
	quota.Day:    rlsv3.RateLimitResponse_RateLimit_DAY,
	quota.Week:   rlsv3.RateLimitResponse_RateLimit_WEEK,
	quota.Month:  rlsv3.RateLimitResponse_RateLimit_MONTH,
	quota.Year:   rlsv3.RateLimitResponse_RateLimit_YEAR,
}

// status is the protocol's view of a reading, whose numbers have 32 bits. A nil reading
// is a descriptor with no limit. Of a hidden limit there is only the code, since Envoy
// can make headers of the rest.
func (r *reading) status() *rlsv3.RateLimitResponse_DescriptorStatus {
	s := &rlsv3.RateLimitResponse_DescriptorStatus{Code: rlsv3.RateLimitResponse_OK}
	if r == nil {
		return s
	}
	if r.refused {
		s.Code = rlsv3.RateLimitResponse_OVER_LIMIT
	}
	if r.limit.Hidden {
		return s
	}
	s.CurrentLimit = &rlsv3.RateLimitResponse_RateLimit{
		Name: r.limit.Name, RequestsPerUnit: r.perUnit, Unit: r.unit,
	}
	s.LimitRemaining = saturate(float64(r.remaining))
	s.DurationUntilReset = durationpb.New(r.reset)
	return s
}

// saturate fits a number from 0 into the protocol's 32 bits.
func saturate(n float64) uint32 {
	return uint32(min(n, math.MaxUint32))
}

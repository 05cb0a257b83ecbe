package ratelimitsvc

import (
	"math"
	"strconv"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// An outcome is how a request was decided, as metrics, logs and metadata name it.
type outcome string

const (
	outcomeAllowed     outcome = "allowed"
	outcomeRefused     outcome = "refused"
	outcomeUnavailable outcome = "unavailable"
)

// Reasons of a refusal, for logs and metadata.
const (
	reasonExhausted   = "exhausted"     // the limit will cover the cost later
	reasonOverCeiling = "over_ceiling"  // the cost is above the whole limit
	reasonMalformed   = "malformed_key" // a budget's key is no UUID
	reasonOnError     = "on_error"      // admitted undecided, as the policy says
)

// An answer is what becomes of a plan.
type answer struct {
	outcome    outcome
	reason     string
	response   *rlsv3.RateLimitResponse
	shown      *reading // the limit that headers describe, nil if none
	retryAfter int64    // seconds, 0 when there is no such header
	cause      error    // why it could not be decided
}

// A reading is one limit's state after the decision, in the terms of headers.
type reading struct {
	name      string
	refused   bool
	never     bool // the cost is above the whole limit
	size      int64
	remaining int64
	rank      int           // which refusal is shown: rates first, then the shorter window
	reset     time.Duration // until it is whole again
	wait      time.Duration // until it covers the cost, when refused and not never
	perUnit   uint32        // the protocol's current limit
	unit      rlsv3.RateLimitResponse_RateLimit_Unit
}

// left is what remains relative to the limit's size.
func (r *reading) left() float64 {
	if r.size == 0 {
		return 0
	}
	return float64(r.remaining) / float64(r.size)
}

// render turns the store's verdict into the protocol's response.
func (p *plan) render(v policy.Verdict) answer {
	a := answer{outcome: outcomeAllowed}
	response := &rlsv3.RateLimitResponse{
		OverallCode: rlsv3.RateLimitResponse_OK,
		Statuses:    make([]*rlsv3.RateLimitResponse_DescriptorStatus, len(p.descriptors)),
	}
	if !v.Allowed {
		a.outcome, a.reason = outcomeRefused, reasonExhausted
		response.OverallCode = rlsv3.RateLimitResponse_OVER_LIMIT
	}
	never := false
	var longest time.Duration
	for i := range p.descriptors {
		var own *reading
		for _, r := range p.readings(&p.descriptors[i], v) {
			own = shown(own, r)
			if r.refused {
				never = never || r.never
				longest = max(longest, r.wait)
			}
		}
		response.Statuses[i] = own.status()
		a.shown = shown(a.shown, own)
	}
	switch {
	case a.outcome != outcomeRefused:
	case never:
		a.reason = reasonOverCeiling
	default:
		a.retryAfter = seconds(longest)
	}
	if a.shown != nil && (a.outcome == outcomeRefused || p.headers.OnAllowed) {
		response.ResponseHeadersToAdd = p.rateHeaders(a)
	}
	response.DynamicMetadata = metadata(a)
	a.response = response
	return a
}

// shown picks which of two limits is described: a refusing one before others, of two
// that refuse the one of lower rank, else the one with the least left. The first wins
// a tie; nil loses.
func shown(a, b *reading) *reading {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.refused != b.refused:
		if b.refused {
			return b
		}
		return a
	case a.refused:
		if b.rank < a.rank {
			return b
		}
		return a
	case b.left() < a.left():
		return b
	}
	return a
}

// readings returns the states of a descriptor's limits, its budget first.
func (p *plan) readings(d *planned, v policy.Verdict) []*reading {
	var rs []*reading
	if d.budget >= 0 {
		rs = append(rs, budgetReading(d.limit, p.request.Budgets[d.budget], v.Budgets[d.budget], p.request.Now))
	}
	if d.quota >= 0 {
		rs = append(rs, quotaReading(d.limit, p.request.Quotas[d.quota], v.Quotas[d.quota].Reservation, p.request.Now))
	}
	return rs
}

func budgetReading(l *policy.Limit, debit policy.BudgetDebit, state policy.BudgetState, now time.Time) *reading {
	b := debit.Budget
	r := &reading{
		name:      l.Name,
		refused:   !state.Covered,
		size:      int64(b.Burst),
		remaining: int64(b.Level(state.Tokens, state.RefilledAt, now)),
		perUnit:   saturate(b.PerSecond),
		unit:      rlsv3.RateLimitResponse_RateLimit_SECOND,
	}
	r.reset, _ = b.Wait(state.Tokens, state.RefilledAt, now, b.Burst)
	if r.refused {
		wait, ok := b.Wait(state.Tokens, state.RefilledAt, now, float64(debit.Cost))
		r.wait, r.never = wait, !ok
	}
	return r
}

func quotaReading(l *policy.Limit, debit policy.QuotaDebit, state quota.Reservation, now time.Time) *reading {
	out := quota.Judge(debit.Budgets, state, debit.Cost, now)
	b := debit.Budgets[out.Budget]
	return &reading{
		name:      l.Name,
		refused:   out.Code == quota.Denied,
		never:     out.OverLimit,
		size:      out.Limit,
		remaining: out.Remaining,
		rank:      int(b.Unit),
		reset:     time.Unix(out.Reset, 0).Sub(now),
		wait:      time.Duration(out.RetryAfter) * time.Second,
		perUnit:   saturate(float64(b.Limit)),
		unit:      protocolUnits[b.Unit],
	}
}

var protocolUnits = map[quota.Unit]rlsv3.RateLimitResponse_RateLimit_Unit{
	quota.Second: rlsv3.RateLimitResponse_RateLimit_SECOND,
	quota.Minute: rlsv3.RateLimitResponse_RateLimit_MINUTE,
	quota.Hour:   rlsv3.RateLimitResponse_RateLimit_HOUR,
	quota.Day:    rlsv3.RateLimitResponse_RateLimit_DAY,
	quota.Week:   rlsv3.RateLimitResponse_RateLimit_WEEK,
	quota.Month:  rlsv3.RateLimitResponse_RateLimit_MONTH,
	quota.Year:   rlsv3.RateLimitResponse_RateLimit_YEAR,
}

// status is the protocol's view of a reading, whose numbers have 32 bits. A nil
// reading is a descriptor with no limit.
func (r *reading) status() *rlsv3.RateLimitResponse_DescriptorStatus {
	if r == nil {
		return &rlsv3.RateLimitResponse_DescriptorStatus{Code: rlsv3.RateLimitResponse_OK}
	}
	code := rlsv3.RateLimitResponse_OK
	if r.refused {
		code = rlsv3.RateLimitResponse_OVER_LIMIT
	}
	return &rlsv3.RateLimitResponse_DescriptorStatus{
		Code: code,
		CurrentLimit: &rlsv3.RateLimitResponse_RateLimit{
			Name: r.name, RequestsPerUnit: r.perUnit, Unit: r.unit,
		},
		LimitRemaining:     saturate(float64(r.remaining)),
		DurationUntilReset: durationpb.New(r.reset),
	}
}

// saturate fits a number from 0 into the protocol's 32 bits.
func saturate(n float64) uint32 {
	return uint32(min(n, math.MaxUint32))
}

// The headers, in the lower case that HTTP/2 wants.
const (
	headerRetryAfter = "retry-after"
	headerLimit      = "x-ratelimit-limit"
	headerRemaining  = "x-ratelimit-remaining"
	headerReset      = "x-ratelimit-reset"
)

func (p *plan) rateHeaders(a answer) []*corev3.HeaderValue {
	r := a.shown
	reset := seconds(r.reset)
	if p.headers.Style == policy.StyleEpoch {
		reset = ceilSecond(p.request.Now.Add(r.reset))
	}
	headers := make([]*corev3.HeaderValue, 0, 4)
	if a.retryAfter > 0 {
		headers = append(headers, header(headerRetryAfter, a.retryAfter))
	}
	return append(headers,
		header(headerLimit, r.size),
		header(headerRemaining, r.remaining),
		header(headerReset, reset),
	)
}

func header(key string, n int64) *corev3.HeaderValue {
	return &corev3.HeaderValue{Key: key, Value: strconv.FormatInt(n, 10)}
}

// seconds rounds a wait up to whole seconds, at least 1: a client that comes back
// when told must not come too early.
func seconds(d time.Duration) int64 {
	return max(1, int64((d+time.Second-1)/time.Second))
}

// ceilSecond returns the first whole epoch second not before t.
func ceilSecond(t time.Time) int64 {
	if t.Nanosecond() > 0 {
		return t.Unix() + 1
	}
	return t.Unix()
}

// metadata is what access logs can show of a decision.
func metadata(a answer) *structpb.Struct {
	fields := map[string]*structpb.Value{
		"outcome": structpb.NewStringValue(string(a.outcome)),
	}
	if a.reason != "" {
		fields["reason"] = structpb.NewStringValue(a.reason)
	}
	if a.shown != nil {
		fields["limit"] = structpb.NewStringValue(a.shown.name)
		fields["remaining"] = structpb.NewNumberValue(float64(a.shown.remaining))
	}
	return &structpb.Struct{Fields: map[string]*structpb.Value{
		"weir": structpb.NewStructValue(&structpb.Struct{Fields: fields}),
	}}
}

// refuseMalformed answers a request with a key that its budget cannot use. Nothing is
// asked of the store and nothing is spent.
func (p *plan) refuseMalformed() answer {
	a := answer{outcome: outcomeRefused, reason: reasonMalformed}
	response := p.bare()
	response.OverallCode = rlsv3.RateLimitResponse_OVER_LIMIT
	for i, d := range p.descriptors {
		if d.malformed {
			response.Statuses[i].Code = rlsv3.RateLimitResponse_OVER_LIMIT
		}
	}
	response.DynamicMetadata = metadata(a)
	a.response = response
	return a
}

// allowUndecided admits a request that the store could not decide, since all its limits
// say so.
func (p *plan) allowUndecided(cause error) answer {
	a := answer{outcome: outcomeAllowed, reason: reasonOnError, cause: cause}
	a.response = p.bare()
	a.response.DynamicMetadata = metadata(a)
	return a
}

// bare is an OK with statuses that say nothing of limits.
func (p *plan) bare() *rlsv3.RateLimitResponse {
	response := &rlsv3.RateLimitResponse{
		OverallCode: rlsv3.RateLimitResponse_OK,
		Statuses:    make([]*rlsv3.RateLimitResponse_DescriptorStatus, len(p.descriptors)),
	}
	for i := range p.descriptors {
		response.Statuses[i] = (*reading)(nil).status()
	}
	return response
}

package ratelimitsvc

import (
	"maps"
	"math"
	"slices"
	"time"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/weir-dev/weir/policy"
)

// An outcome is how a request was decided, as metrics, logs and metadata name it.
type outcome string

const (
	outcomeAllowed     outcome = "allowed"
	outcomeRefused     outcome = "refused"
	outcomeUnavailable outcome = "unavailable"
	outcomeCanceled    outcome = "canceled" // who asked did not wait for the answer
)

// Reasons of an outcome, for logs and metadata.
const (
	reasonExhausted   = "exhausted"     // the limit will cover the cost later
	reasonOverCeiling = "over_ceiling"  // the cost is above the whole limit
	reasonMalformed   = "malformed_key" // a budget's key is no UUID
	reasonOnError     = "on_error"      // admitted undecided, as the policy says
)

// An answer is what becomes of a plan.
type answer struct {
	outcome      outcome
	reason       string
	response     *rlsv3.RateLimitResponse
	decisive     *reading // the limit that refused, or has the least left; nil if none
	retryAfter   int64    // seconds, 0 when there is no such header
	shadowDenied []string // names of limits in shadow that would have refused
	cause        error    // why it could not be decided
	receipt      string   // of what was charged; "" if there is nothing to give back
}

// render turns the store's verdict into the protocol's response.
func (p *plan) render(v policy.Verdict) answer {
	a := answer{outcome: outcomeAllowed}
	response := p.bare()
	if !v.Allowed {
		a.outcome = outcomeRefused
		response.OverallCode = rlsv3.RateLimitResponse_OVER_LIMIT
	}

	var few [8]reading // on the stack, for most requests
	all := few[:0]
	var ends [maxDescriptors]int // of the readings of each descriptor
	for i := range p.descriptors {
		begin := len(all)
		if d := &p.descriptors[i]; d.enforced() {
			all = d.readings(all, &p.request, &v)
			for k := begin; k < len(all); k++ {
				all[k].descriptor = i
			}
		}
		ends[i] = len(all)
	}
	if !v.Allowed {
		a.reason, a.retryAfter = refusal(all)
	}

	var decisive, visible *reading
	begin := 0
	for i := range p.descriptors {
		d := &p.descriptors[i]
		var own *reading
		for k := begin; k < ends[i]; k++ {
			r := &all[k]
			own = shown(own, r)
			if !r.limit.Hidden {
				visible = shown(visible, r)
			}
		}
		begin = ends[i]
		decisive = shown(decisive, own)
		if d.limit == nil || !d.limit.Unlimited {
			response.Statuses[i] = own.status()
		}
		if d.limit != nil && d.limit.Shadow && !d.refund && (d.malformed || d.shadow >= 0 && !v.Shadows[d.shadow].Allowed) {
			a.deniedInShadow(d.limit.Name)
		}
	}
	if visible != nil && !p.refunds && (a.outcome == outcomeRefused || p.headers.OnAllowed) {
		response.ResponseHeadersToAdd = p.rateHeaders(visible, all, a.retryAfter)
	} else if a.retryAfter > 0 {
		response.ResponseHeadersToAdd = retryAfterHeaders(a.retryAfter)
	}
	if decisive != nil {
		d := *decisive // leaves the rest to the stack
		a.decisive = &d
	}
	if v.Allowed && p.charges() {
		a.receipt = p.receipt(&v)
	}
	a.response = response
	response.DynamicMetadata = p.metadata(&a)
	return a
}

func (a *answer) deniedInShadow(name string) {
	if !slices.Contains(a.shadowDenied, name) {
		a.shadowDenied = append(a.shadowDenied, name)
	}
}

// enforced reports whether the descriptor's limits can refuse.
func (d *planned) enforced() bool { return d.limit != nil && !d.limit.Shadow }

// refusal says why a request was refused, and after how many seconds the same one would
// not be, 0 for never; and marks the limits that blocked it. All that refuse must be
// waited for. Optional limits refuse only together, so the first of them that covers its
// cost will do.
func refusal(all []reading) (reason string, retryAfter int64) {
	optionals, refusing, hopeless := 0, 0, 0
	first := time.Duration(math.MaxInt64)
	for i := range all {
		if r := &all[i]; r.optional {
			optionals++
			if r.refused {
				refusing++
			}
			if r.never {
				hopeless++
			} else if r.refused {
				first = min(first, r.wait)
			}
		}
	}
	together := optionals > 0 && refusing == optionals
	never := together && hopeless == optionals
	longest := time.Duration(0)
	if together && !never {
		longest = first
	}
	for i := range all {
		r := &all[i]
		r.blocks = r.refused && (!r.optional || together)
		if r.blocks && !r.optional {
			never = never || r.never
			longest = max(longest, r.wait)
		}
	}
	if never {
		return reasonOverCeiling, 0
	}
	return reasonExhausted, policy.WholeSeconds(longest)
}

// metadata is what access logs can show of a decision, and what a refund needs.
func (p *plan) metadata(a *answer) *structpb.Struct {
	weir := map[string]*structpb.Value{
		"outcome": structpb.NewStringValue(string(a.outcome)),
	}
	if a.reason != "" {
		weir["reason"] = structpb.NewStringValue(a.reason)
	}
	if r := a.decisive; r != nil {
		weir["rule"] = structpb.NewStringValue(r.name())
		weir["remaining"] = structpb.NewNumberValue(float64(r.remaining))
		if r.kind == debitBudget {
			weir["scope"] = structpb.NewStringValue(string(r.limit.Budget.Scope))
		}
	}
	if len(a.shadowDenied) > 0 {
		names := make([]*structpb.Value, len(a.shadowDenied))
		for i, name := range a.shadowDenied {
			names[i] = structpb.NewStringValue(name)
		}
		weir["shadow_denied"] = structpb.NewListValue(&structpb.ListValue{Values: names})
	}
	if a.receipt != "" {
		weir["receipt"] = structpb.NewStringValue(a.receipt)
	}
	fields := map[string]*structpb.Value{
		"weir": structpb.NewStructValue(&structpb.Struct{Fields: weir}),
	}
	if merged := p.limitMetadata(a.response); merged != nil {
		fields["metadata"] = merged
	}
	return &structpb.Struct{Fields: fields}
}

// charges reports whether the request asks for anything that could be given back. Even if
// nothing of it was charged it has a receipt, which then says so.
func (p *plan) charges() bool {
	for i := range p.descriptors {
		if d := &p.descriptors[i]; d.cost > 0 && d.kinds > 0 {
			return true
		}
	}
	return false
}

// receipt writes down what an allowed request was charged.
func (p *plan) receipt(v *policy.Verdict) string {
	var charged [maxDescriptors]kindSet
	for i := range p.descriptors {
		if d := &p.descriptors[i]; d.shadow >= 0 {
			charged[i] = d.charged(&v.Shadows[d.shadow])
		} else {
			charged[i] = d.charged(v)
		}
	}
	return receipt{at: p.request.Now, charged: charged[:len(p.descriptors)]}.text(p.domain)
}

// charged are the kinds of the descriptor's limits that were charged by the verdict on them.
func (d *planned) charged(v *policy.Verdict) (kinds kindSet) {
	if !v.Allowed || d.cost <= 0 {
		return 0
	}
	for _, debit := range d.debits() {
		if debit.kind == debitRateLimit || debit.kind == debitQuota {
			if state := &v.Quotas[debit.at]; state.Unknown || state.Denied >= 0 {
				continue
			}
		}
		kinds.add(debit.kind)
	}
	return kinds
}

// limitMetadata merges what the policy says of the descriptors that passed, a later one
// over an earlier one, under the name that the reference uses; nil if it says nothing.
func (p *plan) limitMetadata(response *rlsv3.RateLimitResponse) *structpb.Value {
	var merged map[string]any
	for i := range p.descriptors {
		l := p.descriptors[i].limit
		if l == nil || l.Metadata == nil || response.GetStatuses()[i].GetCode() != rlsv3.RateLimitResponse_OK {
			continue
		}
		if merged == nil {
			merged = make(map[string]any, len(l.Metadata))
		}
		maps.Copy(merged, l.Metadata)
	}
	if merged == nil {
		return nil
	}
	value, err := structpb.NewValue(merged)
	if err != nil {
		return nil // a policy's metadata is such as JSON has
	}
	return value
}

// refuseMalformed answers a request with a key that its budget cannot use. Nothing is
// asked of the store and nothing is spent.
func (p *plan) refuseMalformed() answer {
	a := answer{outcome: outcomeRefused, reason: reasonMalformed, response: p.bare()}
	a.response.OverallCode = rlsv3.RateLimitResponse_OVER_LIMIT
	for i := range p.descriptors {
		if d := &p.descriptors[i]; d.malformed && d.enforced() {
			a.response.Statuses[i] = &rlsv3.RateLimitResponse_DescriptorStatus{Code: rlsv3.RateLimitResponse_OVER_LIMIT}
		}
	}
	a.response.DynamicMetadata = p.metadata(&a)
	return a
}

// allowUndecided admits a request that the store could not decide, since all its limits
// say so.
func (p *plan) allowUndecided(cause error) answer {
	a := answer{outcome: outcomeAllowed, reason: reasonOnError, cause: cause, response: p.bare()}
	a.response.DynamicMetadata = p.metadata(&a)
	return a
}

// bare is an OK with statuses that say nothing of limits but where there is none.
func (p *plan) bare() *rlsv3.RateLimitResponse {
	response := &rlsv3.RateLimitResponse{
		OverallCode: rlsv3.RateLimitResponse_OK,
		Statuses:    make([]*rlsv3.RateLimitResponse_DescriptorStatus, len(p.descriptors)),
	}
	for i := range p.descriptors {
		s := &rlsv3.RateLimitResponse_DescriptorStatus{Code: rlsv3.RateLimitResponse_OK}
		if l := p.descriptors[i].limit; l != nil && l.Unlimited {
			s.LimitRemaining = math.MaxUint32
		}
		response.Statuses[i] = s
	}
	return response
}

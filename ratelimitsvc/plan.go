package ratelimitsvc

import (
	"context"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// maxDescriptors bounds what one request may ask for. Envoy sends a handful, and what a
// request asks for is decided in one statement while others wait.
const maxDescriptors = 64

// maxEntries bounds a descriptor. No policy is as deep.
const maxEntries = 64

// A plan is a request of the protocol, matched: what to ask of the store, and which
// descriptor each answer belongs to.
type plan struct {
	domain      string
	known       bool // the domain has a policy
	headers     policy.Headers
	descriptors []planned
	request     policy.Request

	malformed  bool // an enforced budget's key is no UUID
	allowError bool // every limit that could refuse has on_error: allow
	refunds    bool // every descriptor gives back
}

// planned is one descriptor.
type planned struct {
	entries policy.Descriptor
	matched bool          // the policy has a place for it, or it brought a limit
	limit   *policy.Limit // nil when nothing applies
	counter policy.CounterID
	cost    int64 // negative for a refund
	refund  bool  // it gives back, if only 0, and only to what is refundable

	refundable kindSet
	asked      [debitKinds]debit
	kinds      int // how many of them there are
	shadow     int // index of the request of its own that a limit in shadow is, or -1

	malformed bool
}

// A debit is one limit of a descriptor: what it is, and where it stands in the request's
// debits of that kind.
type debit struct {
	kind debitKind
	at   int
}

type debitKind uint8

// The kinds, in the order in which refusals are shown.
const (
	debitBudget debitKind = iota
	debitLimiter
	debitRateLimit // among the request's quotas, as are quotas
	debitQuota
	debitKinds = iota
)

// plan matches a request against the policies. Its errors are gRPC statuses, for
// faults of the request's structure and for what its caller may not ask.
func (s *Service) plan(ctx context.Context, req *rlsv3.RateLimitRequest, c caller, now time.Time) (*plan, error) {
	if req.GetDomain() == "" {
		return nil, status.Error(codes.InvalidArgument, "domain: is empty")
	}
	n := len(req.GetDescriptors())
	if n == 0 {
		return nil, status.Error(codes.InvalidArgument, "descriptors: there are none")
	}
	if n > maxDescriptors {
		return nil, status.Errorf(codes.InvalidArgument, "descriptors: there are more than the %d that one request may have", maxDescriptors)
	}
	client, err := s.permit(c, req.GetDomain())
	if err != nil {
		return nil, err
	}
	p := &plan{
		domain:      req.GetDomain(),
		descriptors: make([]planned, n),
		request:     policy.Request{Now: now},
		allowError:  true,
		refunds:     true,
	}
	refunds := false
	for i, d := range req.GetDescriptors() {
		if err := checkDescriptor(i, d, client); err != nil {
			return nil, err
		}
		p.descriptors[i] = planned{entries: entriesOf(d), cost: costOf(req, d), refund: d.GetIsNegativeHits(), shadow: -1}
		refunds = refunds || d.GetIsNegativeHits()
		p.refunds = p.refunds && d.GetIsNegativeHits()
	}
	var charge receipt
	if refunds {
		if charge, err = receiptOf(p.domain, receiptsOf(ctx), n); err != nil {
			return nil, err
		}
	}
	if p.refunds {
		// There is nothing to admit, and an OK would say that the units are back.
		p.allowError = false
	}
	if domain, known := s.config.Policies.Domain(p.domain); known {
		p.known, p.headers = true, domain.Headers
		p.match(domain, req.GetDescriptors(), charge)
	}
	return p, nil
}

func checkDescriptor(i int, d *ratelimitv3.RateLimitDescriptor, client policy.Client) error {
	// There may be none: Envoy sends such a descriptor when all of its actions skip what is
	// absent, which a client decides. It matches nothing.
	if len(d.GetEntries()) > maxEntries {
		return status.Errorf(codes.InvalidArgument, "descriptors[%d].entries: there are more than the %d that a descriptor may have", i, maxEntries)
	}
	if d.GetIsNegativeHits() && !client.Refunds {
		return status.Errorf(codes.PermissionDenied, "descriptors[%d].is_negative_hits: refunds are off for this client", i)
	}
	own := d.GetLimit()
	if own == nil {
		return nil
	}
	if !client.Overrides {
		return status.Errorf(codes.PermissionDenied, "descriptors[%d].limit: overrides are off for this client", i)
	}
	if _, ok := overrideUnits[own.GetUnit()]; !ok {
		return status.Errorf(codes.InvalidArgument, "descriptors[%d].limit.unit: %s is no unit of a window", i, own.GetUnit())
	}
	return nil
}

// overrideUnits are the units that a descriptor's own limit can have.
var overrideUnits = map[typev3.RateLimitUnit]quota.Unit{
	typev3.RateLimitUnit_SECOND: quota.Second,
	typev3.RateLimitUnit_MINUTE: quota.Minute,
	typev3.RateLimitUnit_HOUR:   quota.Hour,
	typev3.RateLimitUnit_DAY:    quota.Day,
	typev3.RateLimitUnit_MONTH:  quota.Month,
	typev3.RateLimitUnit_YEAR:   quota.Year,
}

// receiptOf returns the receipt of a refund with so many descriptors, the zero receipt if
// there is none.
func receiptOf(domain string, receipts []string, descriptors int) (receipt, error) {
	switch len(receipts) {
	case 0:
		return receipt{}, nil
	case 1:
		r, err := parseReceipt(domain, receipts[0])
		if err != nil {
			return receipt{}, status.Errorf(codes.InvalidArgument, "%s: %q %v", ReceiptKey, truncate(receipts[0]), err)
		}
		if len(r.charged) != descriptors {
			return receipt{}, status.Errorf(codes.InvalidArgument, "%s: is of a charge with %d descriptors, not %d", ReceiptKey, len(r.charged), descriptors)
		}
		return r, nil
	}
	return receipt{}, status.Errorf(codes.InvalidArgument, "%s: stands %d times", ReceiptKey, len(receipts))
}

func entriesOf(d *ratelimitv3.RateLimitDescriptor) policy.Descriptor {
	entries := make(policy.Descriptor, len(d.GetEntries()))
	for i, e := range d.GetEntries() {
		entries[i] = policy.Entry{Key: e.GetKey(), Value: e.GetValue()}
	}
	return entries
}

// costOf is the descriptor's own hits_addend, which may be 0, else the request's,
// where 0 means 1 since the protocol cannot tell it from unset. What is above every
// possible limit counts as just above. A refund's cost is negative.
func costOf(req *rlsv3.RateLimitRequest, d *ratelimitv3.RateLimitDescriptor) int64 {
	cost := int64(max(1, req.GetHitsAddend()))
	if own := d.GetHitsAddend(); own != nil {
		cost = int64(min(own.GetValue(), policy.MaxUnits+1))
	}
	if d.GetIsNegativeHits() {
		return -cost
	}
	return cost
}

// match finds what applies to each descriptor, and asks for it.
func (p *plan) match(domain *policy.Policy, ds []*ratelimitv3.RateLimitDescriptor, charge receipt) {
	matches := make([]policy.Match, len(ds))
	for i, d := range ds {
		if d.GetLimit() == nil {
			matches[i], p.descriptors[i].matched = domain.Match(p.descriptors[i].entries)
		}
	}
	policy.Replace(matches)
	for i := range p.descriptors {
		d := &p.descriptors[i]
		request := &p.request
		if own := ds[i].GetLimit(); own != nil {
			d.override(p.domain, own)
		} else {
			d.limit = matches[i].Limit
		}
		if d.limit == nil {
			continue
		}
		if d.limit.Shadow {
			// One request for the descriptor, so that its limits are taken together
			// or not at all, as they would be without the shadow, and no other
			// descriptor in shadow is kept from being charged.
			request = &policy.Request{Now: p.request.Now}
		}
		var chargedAt time.Time
		if d.refund {
			d.refundable = refundableBlindly(d.limit)
			if charge.charged != nil {
				d.refundable = charge.charged[i]
			}
			if d.cost < 0 {
				chargedAt = charge.at
			}
		}
		d.ask(request, matches[i], chargedAt)
		if !d.limit.Shadow {
			p.malformed = p.malformed || d.malformed
			p.allowError = p.allowError && (d.limit.AllowError || d.kinds == 0)
		} else if request.Asks() {
			d.shadow = len(p.request.Shadows)
			p.request.Shadows = append(p.request.Shadows, *request)
		}
	}
}

// debits are the limits of the descriptor, in the order of their kinds.
func (d *planned) debits() []debit { return d.asked[:d.kinds] }

func (d *planned) add(kind debitKind, at int) {
	d.asked[d.kinds] = debit{kind: kind, at: at}
	d.kinds++
}

// override gives the descriptor the limit that it brought, whatever the policy says.
func (d *planned) override(domain string, own *ratelimitv3.RateLimitDescriptor_RateLimitOverride) {
	unit := overrideUnits[own.GetUnit()]
	d.matched = true
	d.limit = &policy.Limit{RateLimit: &quota.Budget{Key: unit.String(), Unit: unit, Limit: int64(own.GetRequestsPerUnit())}}
	d.counter = policy.OverrideCounter(domain, d.entries)
}

// wants reports whether to ask for a limit of this kind, if the descriptor has one.
func (d *planned) wants(kind debitKind) bool { return !d.refund || d.refundable.has(kind) }

// refundableBlindly are the kinds to which a refund without a receipt gives back. A limit
// with quota_mode is not among them: requests pass without being charged to it.
func refundableBlindly(l *policy.Limit) kindSet {
	all := kindSet(1<<debitKinds - 1)
	if l.QuotaMode {
		return all &^ (1 << debitRateLimit)
	}
	return all
}

// ask adds all that the descriptor's limit wants of the store to the request. A limit
// whose bucket cannot be named asks for nothing; a refund has nothing to give back to
// there, and is never refused.
func (d *planned) ask(request *policy.Request, m policy.Match, chargedAt time.Time) {
	l := d.limit
	if l.Budget != nil && d.wants(debitBudget) {
		key, err := m.BucketKey()
		switch {
		case err == nil:
			d.add(debitBudget, len(request.Budgets))
			request.Budgets = append(request.Budgets, policy.BudgetDebit{
				Scope: l.Budget.Scope, Key: key, Budget: l.Budget.Budget, Cost: d.cost,
			})
		case !d.refund:
			d.malformed = true
			return
		}
	}
	if l.Limiter != nil && d.wants(debitLimiter) {
		d.add(debitLimiter, len(request.Limiters))
		request.Limiters = append(request.Limiters, policy.LimiterDebit{
			Bucket: m.LimiterBucket(), Policy: *l.Limiter, Cost: d.cost,
		})
	}
	if l.RateLimit != nil && d.wants(debitRateLimit) {
		counter := d.counter
		if counter == (policy.CounterID{}) {
			counter = m.RateLimitCounter()
		}
		d.add(debitRateLimit, len(request.Quotas))
		request.Quotas = append(request.Quotas, policy.QuotaDebit{
			Counter: counter, Budgets: []quota.Budget{*l.RateLimit}, Cost: d.cost, ChargedAt: chargedAt,
			Optional: l.QuotaMode && !l.Shadow && !d.refund,
		})
	}
	if len(l.Quota) > 0 && d.wants(debitQuota) {
		consumer := m.Consumer()
		d.add(debitQuota, len(request.Quotas))
		request.Quotas = append(request.Quotas, policy.QuotaDebit{
			Counter: consumer.ID, Budgets: l.Quota, Cost: d.cost, ChargedAt: chargedAt, Consumer: consumer,
		})
	}
}

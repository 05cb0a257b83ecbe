package ratelimitsvc

import (
	"strconv"
	"strings"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/policy"
)

// maxDescriptors bounds what one request may ask for. Envoy sends a handful.
const maxDescriptors = 1000

// A plan is a request of the protocol, matched: what to ask of the store, and which
// descriptor each answer belongs to.
type plan struct {
	domain      string
	known       bool // the domain has a policy
	headers     policy.Headers
	descriptors []planned
	request     policy.Request

	malformed  bool // a budget's key is no UUID
	allowError bool // every limit that applies has on_error: allow
}

// planned is one descriptor. The indexes point into the plan's request, -1 for none.
type planned struct {
	entries   policy.Descriptor
	limit     *policy.Limit // nil when nothing matches
	cost      int64
	budget    int
	quota     int
	malformed bool
}

// plan matches a request against the policies. Its errors are gRPC statuses, for
// faults of the request's structure.
func (s *Service) plan(req *rlsv3.RateLimitRequest, now time.Time) (*plan, error) {
	if req.GetDomain() == "" {
		return nil, status.Error(codes.InvalidArgument, "domain: is empty")
	}
	n := len(req.GetDescriptors())
	if n == 0 {
		return nil, status.Error(codes.InvalidArgument, "descriptors: there are none")
	}
	if n > maxDescriptors {
		return nil, status.Errorf(codes.InvalidArgument, "descriptors: %d are more than the %d that one request may have", n, maxDescriptors)
	}
	p := &plan{
		domain:      req.GetDomain(),
		descriptors: make([]planned, n),
		request:     policy.Request{Now: now},
		allowError:  true,
	}
	domain, known := s.config.Policies.Domain(p.domain)
	if known {
		p.known, p.headers = true, domain.Headers
	}
	for i, d := range req.GetDescriptors() {
		if err := checkDescriptor(i, d); err != nil {
			return nil, err
		}
		p.descriptors[i] = planned{
			entries: entriesOf(d), cost: costOf(req, d), budget: -1, quota: -1,
		}
		if known {
			p.match(domain, &p.descriptors[i])
		}
	}
	return p, nil
}

func checkDescriptor(i int, d *ratelimitv3.RateLimitDescriptor) error {
	switch {
	case len(d.GetEntries()) == 0:
		return status.Errorf(codes.InvalidArgument, "descriptors[%d].entries: there are none", i)
	case d.GetLimit() != nil:
		return status.Errorf(codes.PermissionDenied, "descriptors[%d].limit: overrides are off", i)
	case d.GetIsNegativeHits():
		return status.Errorf(codes.PermissionDenied, "descriptors[%d].is_negative_hits: refunds are off", i)
	}
	return nil
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
// possible limit counts as just above.
func costOf(req *rlsv3.RateLimitRequest, d *ratelimitv3.RateLimitDescriptor) int64 {
	if own := d.GetHitsAddend(); own != nil {
		return int64(min(own.GetValue(), policy.MaxUnits+1))
	}
	return int64(max(1, req.GetHitsAddend()))
}

func (p *plan) match(domain *policy.Policy, d *planned) {
	m, ok := domain.Match(d.entries)
	if !ok {
		return
	}
	d.limit = m.Limit
	if m.Limit.Budget != nil {
		key, err := m.BucketKey()
		if err != nil {
			d.malformed, p.malformed = true, true
			return
		}
		d.budget = len(p.request.Budgets)
		p.request.Budgets = append(p.request.Budgets, policy.BudgetDebit{
			Scope: m.Limit.Budget.Scope, Key: key, Budget: m.Limit.Budget.Budget, Cost: d.cost,
		})
	}
	if len(m.Limit.Quota) > 0 {
		consumer := m.Consumer()
		d.quota = len(p.request.Quotas)
		p.request.Quotas = append(p.request.Quotas, policy.QuotaDebit{
			Counter: consumer.ID, Budgets: m.Limit.Quota, Cost: d.cost, Consumer: consumer,
		})
	}
	if d.budget >= 0 || d.quota >= 0 {
		p.allowError = p.allowError && m.Limit.AllowError
	}
}

// asks reports whether there is anything to ask of the store.
func (p *plan) asks() bool { return len(p.request.Budgets)+len(p.request.Quotas) > 0 }

// describe renders the descriptors and their costs for the log. Values come from
// clients, so each is cut to a length that a line can bear.
func (p *plan) describe() []string {
	const maxText = 64
	texts := make([]string, 0, len(p.descriptors))
	for _, d := range p.descriptors {
		var b strings.Builder
		for i, e := range d.entries {
			if i > 0 {
				b.WriteByte('/')
			}
			b.WriteString(truncate(e.Key, maxText))
			b.WriteByte('=')
			b.WriteString(truncate(e.Value, maxText))
		}
		b.WriteString(" cost ")
		b.WriteString(strconv.FormatInt(d.cost, 10))
		if d.limit == nil {
			b.WriteString(" (no limit)")
		}
		texts = append(texts, b.String())
	}
	return texts
}

func truncate(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

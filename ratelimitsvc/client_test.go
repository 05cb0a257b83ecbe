package ratelimitsvc_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
	"github.com/weir-dev/weir/ratelimitsvc"
)

var errDown = errors.New("connection refused")

// allowed lets clients from the loopback ask for what client says.
func allowed(client policy.Client) func(*ratelimitsvc.Config) {
	domains := ""
	if client.Domains != nil {
		domains = ", domains: [" + strings.Join(client.Domains, ", ") + "]"
	}
	clients, err := policy.ParseClients("clients.yaml", fmt.Appendf(nil,
		"clients: [{network: 127.0.0.1, refunds: %t, overrides: %t%s}]", client.Refunds, client.Overrides, domains))
	if err != nil {
		panic(err)
	}
	return func(c *ratelimitsvc.Config) { c.Clients = clients }
}

// from is the context of a call from an address.
func from(t *testing.T, address string, receipts ...string) context.Context {
	t.Helper()
	ctx := peer.NewContext(t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(address), Port: 4711}})
	md := metadata.MD{}
	md.Set(ratelimitsvc.ReceiptKey, receipts...)
	return metadata.NewIncomingContext(ctx, md)
}

func fromLoopback(t *testing.T, receipts ...string) context.Context {
	t.Helper()
	return from(t, "127.0.0.1", receipts...)
}

func override(d *ratelimitv3.RateLimitDescriptor, perUnit uint32, unit typev3.RateLimitUnit) {
	d.Limit = &ratelimitv3.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: perUnit, Unit: unit}
}

// Who may ask what: PERMISSION_DENIED names the field, and the store is not asked.
func TestPermissions(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name    string
		client  *policy.Client // nil: no clients file
		address string
		change  func(*rlsv3.RateLimitRequest)
		says    string // "" for OK
	}{
		{name: "no file", address: "192.0.2.1"},
		{name: "no file, a refund", address: "127.0.0.1", change: func(r *rlsv3.RateLimitRequest) { refund(r.GetDescriptors()) }, says: "descriptors[0].is_negative_hits"},
		{name: "a client of the file", client: &policy.Client{}, address: "127.0.0.1"},
		{name: "a client that is not in the file", client: &policy.Client{}, address: "192.0.2.1", says: "client:"},
		{name: "a domain of its own", client: &policy.Client{Domains: []string{"test"}}, address: "127.0.0.1"},
		{name: "another domain", client: &policy.Client{Domains: []string{"other"}}, address: "127.0.0.1", says: "domain:"},
		{name: "a refund", client: &policy.Client{Refunds: true}, address: "127.0.0.1", change: func(r *rlsv3.RateLimitRequest) { refund(r.GetDescriptors()) }},
		{name: "an override", client: &policy.Client{Overrides: true}, address: "127.0.0.1", change: func(r *rlsv3.RateLimitRequest) {
			override(r.GetDescriptors()[0], 5, typev3.RateLimitUnit_HOUR)
		}},
		{name: "an override by who may only refund", client: &policy.Client{Refunds: true}, address: "127.0.0.1", change: func(r *rlsv3.RateLimitRequest) {
			override(r.GetDescriptors()[0], 5, typev3.RateLimitUnit_HOUR)
		}, says: "descriptors[0].limit"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var changes []func(*ratelimitsvc.Config)
			if test.client != nil {
				changes = append(changes, allowed(*test.client))
			}
			s := &store{verdict: policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1)}}}
			req := request(1, "path=/")
			if test.change != nil {
				test.change(req)
			}
			_, err := newService(t, s, kindsPolicy, changes...).ShouldRateLimit(from(t, test.address), req)
			if test.says == "" {
				if err != nil || len(s.asked) != 1 {
					t.Errorf("error = %v, asked %d times", err, len(s.asked))
				}
				return
			}
			if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), test.says) || len(s.asked) > 0 {
				t.Errorf("error = %v, asked %d times, want PERMISSION_DENIED that names %s", err, len(s.asked), test.says)
			}
		})
	}
}

// PEERS C05, C63: a descriptor's own limit is used as it is, on a counter of its own; a unit
// that is none is named.
func TestC05Overrides(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 7), reservation(-1, 1)}}}
	service := newService(t, s, kindsPolicy, allowed(policy.Client{Overrides: true}))
	// Of what the policy has in shadow, the override is enforced.
	req := request(2, "tried=a", "path=/")
	override(req.GetDescriptors()[0], 7, typev3.RateLimitUnit_MONTH)
	response, err := service.ShouldRateLimit(fromLoopback(t), req)
	if err != nil {
		t.Fatal(err)
	}
	debit := s.asked[0].Quotas[0]
	want := policy.OverrideCounter("test", policy.Descriptor{{Key: "tried", Value: "a"}})
	if debit.Counter != want || debit.Consumer != nil || debit.Cost != 2 || debit.Budgets[0] != (quota.Budget{Key: "month", Unit: quota.Month, Limit: 7}) {
		t.Errorf("the debit is %+v", debit)
	}
	limit := response.GetStatuses()[0].GetCurrentLimit()
	if limit.GetName() != "" || limit.GetRequestsPerUnit() != 7 || limit.GetUnit() != rlsv3.RateLimitResponse_RateLimit_MONTH {
		t.Errorf("the current limit is %v", limit)
	}
	if got := describeHeaders(response); !strings.Contains(got, "x-ratelimit-limit=7 x-ratelimit-remaining=0") {
		t.Errorf("headers %s", got)
	}

	for _, unit := range []typev3.RateLimitUnit{typev3.RateLimitUnit_UNKNOWN, 99} {
		override(req.GetDescriptors()[0], 5, unit)
		_, err := service.ShouldRateLimit(fromLoopback(t), req)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "descriptors[0].limit.unit") {
			t.Errorf("unit %v: %v, want INVALID_ARGUMENT that names it", unit, err)
		}
	}
	// Without a policy for the domain, nothing is limited.
	req.Domain = "other"
	override(req.GetDescriptors()[0], 5, typev3.RateLimitUnit_HOUR)
	if response, err := service.ShouldRateLimit(fromLoopback(t), req); err != nil || response.GetStatuses()[0].GetCurrentLimit() != nil {
		t.Errorf("an override in a domain without policy: %v, %v", response, err)
	}
}

func receiptOf(t *testing.T, response *rlsv3.RateLimitResponse) string {
	t.Helper()
	receipt := response.GetDynamicMetadata().GetFields()["weir"].GetStructValue().GetFields()["receipt"].GetStringValue()
	if receipt == "" {
		t.Fatalf("%v carries no receipt", response)
	}
	return receipt
}

// PEERS C14, DESIGN 5: a refund with a receipt goes into the windows of its charge; one
// without into the current ones.
func TestReceipts(t *testing.T) {
	t.Parallel()

	now := noon.Add(123456789 * time.Nanosecond)
	s := &store{verdict: policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1, 1)}}}
	service := newService(t, s, kindsPolicy, allowed(policy.Client{Refunds: true}),
		func(c *ratelimitsvc.Config) { c.Now = func() time.Time { return now } })
	charge := request(5, "consumer=a")
	response, err := service.ShouldRateLimit(fromLoopback(t), charge)
	if err != nil {
		t.Fatal(err)
	}
	receipt, charged := receiptOf(t, response), policy.TruncateNow(now)
	now = now.Add(24 * time.Hour) // the next day, and the next month

	back := request(5, "consumer=a")
	refund(back.GetDescriptors())
	response, err = service.ShouldRateLimit(fromLoopback(t, receipt), back)
	if err != nil {
		t.Fatal(err)
	}
	if got := s.asked[1].Quotas[0].ChargedAt; !got.Equal(charged) {
		t.Errorf("charged at %v, want %v", got, charged)
	}
	if got := describeStatuses(response); got != "OK 0 none" {
		t.Errorf("a window that has passed is described as %s", got)
	}
	if _, err := service.ShouldRateLimit(fromLoopback(t), back); err != nil || !s.asked[2].Quotas[0].ChargedAt.IsZero() {
		t.Errorf("without a receipt: %v, charged at %v", err, s.asked[2].Quotas[0].ChargedAt)
	}
	// In a request of both, only what gives back goes into the past.
	both := request(5, "consumer=a", "soft=a")
	refund(both.GetDescriptors()[:1])
	s.verdict.Quotas = append(s.verdict.Quotas, reservation(-1, 1))
	ofTwo := ratelimitsvc.NewReceipt("test", charged, 8, 4)
	if _, err := service.ShouldRateLimit(fromLoopback(t, ofTwo), both); err != nil || s.asked[3].Quotas[0].ChargedAt.IsZero() || !s.asked[3].Quotas[1].ChargedAt.IsZero() {
		t.Errorf("a refund and a charge: %v, %+v", err, s.asked[3].Quotas)
	}

	asked := len(s.asked)
	flipped := []byte(receipt)
	flipped[5] ^= 1
	for name, receipts := range map[string][]string{
		"empty": {""}, "no base64": {strings.Repeat("!", len(receipt))}, "short": {receipt[1:]}, "long": {receipt + "A"},
		"changed": {string(flipped)}, "huge": {strings.Repeat("A", 1<<16)}, "two": {receipt, receipt}, "of two descriptors": {ofTwo}, "no UTF-8": {"\xff" + receipt[1:]},
	} {
		_, err := service.ShouldRateLimit(fromLoopback(t, receipts...), back)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), ratelimitsvc.ReceiptKey) || len(err.Error()) > 512 {
			t.Errorf("%s: %v, want INVALID_ARGUMENT that names %s", name, err, ratelimitsvc.ReceiptKey)
		}
	}
	if len(s.asked) != asked {
		t.Error("the store was asked about a malformed receipt")
	}
	// What a client sends beside a charge is no fault of it.
	s.verdict.Quotas = s.verdict.Quotas[:1]
	if _, err := service.ShouldRateLimit(fromLoopback(t, "garbage"), charge); err != nil {
		t.Errorf("a receipt beside a charge: %v", err)
	}
}

// A request that is decided together with a later one is decided at that one's instant: so
// are its windows and its receipt.
func TestDecidedLater(t *testing.T) {
	t.Parallel()

	midnight := noon.Add(12 * time.Hour)
	s := &store{verdict: policy.Verdict{At: midnight, Quotas: []policy.QuotaState{reservation(0, 10, 1)}}}
	service := newService(t, s, kindsPolicy, at(midnight.Add(-time.Millisecond)), allowed(policy.Client{Refunds: true}))
	response := ask(t, newService(t, s, kindsPolicy, at(midnight.Add(-time.Millisecond))), request(1, "consumer=a"))
	if got := describeHeaders(response); !strings.HasPrefix(got, "retry-after=86400 ") {
		t.Errorf("headers %s, want a whole day to wait", got)
	}
	s.verdict.Allowed, s.verdict.Quotas[0] = true, reservation(-1, 1, 1)
	charge := request(1, "consumer=a")
	response, err := service.ShouldRateLimit(fromLoopback(t), charge)
	if err != nil {
		t.Fatal(err)
	}
	refund(charge.GetDescriptors())
	if _, err := service.ShouldRateLimit(fromLoopback(t, receiptOf(t, response)), charge); err != nil {
		t.Fatal(err)
	}
	if got := s.asked[2].Quotas[0].ChargedAt; !got.Equal(midnight) {
		t.Errorf("charged at %v, want %v", got, midnight)
	}
}

// A receipt is one of its domain's.
func TestReceiptOfAnotherDomain(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1)}}}
	receipt := receiptOf(t, ask(t, newService(t, s, kindsPolicy), request(1, "path=/")))
	req := request(1, "path=/")
	refund(req.GetDescriptors())
	req.Domain = "other"
	_, err := newService(t, s, kindsPolicy, allowed(policy.Client{Refunds: true})).ShouldRateLimit(fromLoopback(t, receipt), req)
	if status.Code(err) != codes.InvalidArgument {
		t.Errorf("error = %v, want INVALID_ARGUMENT", err)
	}
}

// A refund gives back what its receipt says was charged, and nothing that an allowed request
// was let pass without.
func TestReceiptsSayWhatWasCharged(t *testing.T) {
	t.Parallel()

	inert := policy.QuotaState{Unknown: true}
	overflow := reservation(-1, 1, 1)
	overflow.Overflow = true
	used := reservation(-1, 1)
	denied := reservation(0, 5)
	for _, test := range []struct {
		name        string
		descriptors []string
		verdict     policy.Verdict
		refunded    string // the kinds that are asked to be given back, of all descriptors and of shadows
	}{
		{
			name:        "one of two quota-mode limits was exhausted",
			descriptors: []string{"soft=a", "softer=a"},
			verdict:     policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{denied, used}},
			refunded:    "hour",
		},
		{
			name:        "the other one was",
			descriptors: []string{"soft=a", "softer=a"},
			verdict:     policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{used, denied}},
			refunded:    "minute",
		},
		{
			name:        "an inert quota beside limits that are charged",
			descriptors: []string{"all=" + nodeID},
			verdict: policy.Verdict{
				Allowed: true, Budgets: []policy.BudgetState{bucket(true, 1)}, Limiters: []policy.LimiterState{{Covered: true}},
				Quotas: []policy.QuotaState{used, inert},
			},
			refunded: "budget limiter hour",
		},
		{
			name:        "only an inert quota",
			descriptors: []string{"consumer=a"},
			verdict:     policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{inert}},
		},
		{
			name:        "the overflow counter",
			descriptors: []string{"consumer=a"},
			verdict:     policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{overflow}},
			refunded:    "daily",
		},
		{
			name:        "of two limits in shadow, one would have refused",
			descriptors: []string{"tried=" + nodeID, "path=/", "tried=" + nodeID},
			verdict: policy.Verdict{
				Allowed: true, Quotas: []policy.QuotaState{used},
				Shadows: []policy.Verdict{
					{Budgets: []policy.BudgetState{bucket(false, 0)}, Quotas: []policy.QuotaState{used}},
					{Allowed: true, Budgets: []policy.BudgetState{bucket(true, 0)}, Quotas: []policy.QuotaState{used}},
				},
			},
			refunded: "minute shadow budget daily",
		},
		{
			name:        "limits in shadow alone",
			descriptors: []string{"tried=" + nodeID},
			verdict: policy.Verdict{
				Allowed: true, Shadows: []policy.Verdict{{Budgets: []policy.BudgetState{bucket(false, 0)}, Quotas: []policy.QuotaState{used}}},
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := &echo{store: store{verdict: test.verdict}}
			service := newService(t, &s.store, kindsPolicy, allowed(policy.Client{Refunds: true}), func(c *ratelimitsvc.Config) { c.Decider = s })
			req := request(3, test.descriptors...)
			response, err := service.ShouldRateLimit(fromLoopback(t), req)
			if err != nil {
				t.Fatal(err)
			}
			s.asked, s.covers = nil, true
			refund(req.GetDescriptors())
			if _, err := service.ShouldRateLimit(fromLoopback(t, receiptOf(t, response)), req); err != nil {
				t.Fatal(err)
			}
			var got []string
			for i := range s.asked {
				got = append(got, kindsOf(&s.asked[i])...)
			}
			if got := strings.Join(got, " "); got != test.refunded {
				t.Errorf("given back to %q, want %q", got, test.refunded)
			}
		})
	}
}

// echo is a store that covers whatever it is asked, once covers is set.
type echo struct {
	store

	covers bool
}

func (e *echo) Decide(ctx context.Context, req policy.Request) (policy.Verdict, error) {
	v, err := e.store.Decide(ctx, req)
	if e.covers {
		v = coveredAll(&req)
	}
	return v, err
}

func coveredAll(req *policy.Request) policy.Verdict {
	v := policy.Verdict{
		Allowed: true, Budgets: make([]policy.BudgetState, len(req.Budgets)), Limiters: make([]policy.LimiterState, len(req.Limiters)),
	}
	for _, d := range req.Quotas {
		v.Quotas = append(v.Quotas, reservation(-1, make([]int64, len(d.Budgets))...))
	}
	for i := range req.Shadows {
		v.Shadows = append(v.Shadows, coveredAll(&req.Shadows[i]))
	}
	return v
}

// kindsOf names the debits of a request, windows by the first.
func kindsOf(req *policy.Request) []string {
	var kinds []string
	for range req.Budgets {
		kinds = append(kinds, "budget")
	}
	for range req.Limiters {
		kinds = append(kinds, "limiter")
	}
	for _, d := range req.Quotas {
		kinds = append(kinds, d.Budgets[0].Key)
	}
	for i := range req.Shadows {
		kinds = append(append(kinds, "shadow"), kindsOf(&req.Shadows[i])...)
	}
	return kinds
}

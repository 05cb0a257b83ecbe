package ratelimitsvc_test

import (
	"strings"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/ratelimitsvc"
)

// at sets the clock of a service.
func at(now time.Time) func(*ratelimitsvc.Config) {
	return func(c *ratelimitsvc.Config) { c.Now = func() time.Time { return now } }
}

func ask(t *testing.T, service *ratelimitsvc.Service, req *rlsv3.RateLimitRequest) *rlsv3.RateLimitResponse {
	t.Helper()
	response, err := service.ShouldRateLimit(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	return response
}

func request(cost uint32, texts ...string) *rlsv3.RateLimitRequest {
	return &rlsv3.RateLimitRequest{Domain: "test", Descriptors: descriptors(texts...), HitsAddend: cost}
}

func tokens(covered bool, p policy.LimiterPolicy, tokens int64) policy.LimiterState {
	return policy.LimiterState{Covered: covered, Level: tokens * p.Per.Microseconds(), RefilledAt: noon}
}

const kindsPolicy = `
domain: test
descriptors:
  - key: node
    budget: {scope: ingest_node, per_second: 10, burst: 100}
  - key: caller
    limiter: {permits: 100, per: 1s, burst: 200}
  - key: path
    name: paths
    rate_limit: {unit: minute, requests_per_unit: 1000}
  - key: all
    name: everything
    budget: {scope: ingest_node, per_second: 10, burst: 100}
    limiter: {permits: 6, per: 1m}
    rate_limit: {unit: hour, requests_per_unit: 50}
    quota: {daily: 20, monthly: 100}
  - key: consumer
    quota: {daily: 10, monthly: 100}
  - key: tried
    name: tried
    shadow_mode: true
    budget: {scope: ingest_domain, per_second: 10, burst: 100}
    quota: {daily: 10}
  - key: secret
    expose: false
    quota: {daily: 10}
  - key: soft
    quota_mode: true
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: softer
    quota_mode: true
    rate_limit: {unit: hour, requests_per_unit: 50}
  - key: staff
    rate_limit: {unlimited: true, replaces: [{name: paths}]}
  - key: tagged
    metadata: {tier: gold, team: a}
    rate_limit: {unit: day, requests_per_unit: 5}
  - key: tagged2
    metadata: {team: b}
`

var callerPolicy = policy.LimiterPolicy{Permits: 100, Per: time.Second, Burst: 200}

// Every kind of limit, alone and in company: which status stands where, and what clients
// and logs are told.
func TestRenderKinds(t *testing.T) {
	t.Parallel()

	slow := policy.LimiterPolicy{Permits: 6, Per: time.Minute, Burst: 6}
	const over = rlsv3.RateLimitResponse_OVER_LIMIT
	for _, test := range []struct {
		name        string
		headers     string // of the policy
		descriptors []string
		cost        uint32
		now         time.Time // noon by default
		verdict     policy.Verdict
		over        bool
		statuses    string
		wantHeaders string
		metadata    string
	}{
		{
			name: "a limiter's bucket", headers: "{on_allowed: true}",
			descriptors: []string{"caller=a"}, cost: 50,
			verdict:     policy.Verdict{Allowed: true, Limiters: []policy.LimiterState{tokens(true, callerPolicy, 150)}},
			statuses:    "OK 150 500ms",
			wantHeaders: "x-ratelimit-limit=200 x-ratelimit-remaining=150 x-ratelimit-reset=1796040001",
			metadata:    "outcome=allowed rule=caller remaining=150",
		},
		{
			name:        "a limiter refuses",
			descriptors: []string{"caller=a"}, cost: 160,
			verdict: policy.Verdict{Limiters: []policy.LimiterState{tokens(false, callerPolicy, 150)}},
			over:    true, statuses: "OVER_LIMIT 150 500ms",
			wantHeaders: "retry-after=1 x-ratelimit-limit=200 x-ratelimit-remaining=150 x-ratelimit-reset=1796040001",
			metadata:    "outcome=refused reason=exhausted rule=caller remaining=150",
		},
		{
			name:        "a window refuses until it ends",
			descriptors: []string{"path=/"}, now: noon.Add(17500 * time.Millisecond),
			verdict: policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 1000)}},
			over:    true, statuses: "OVER_LIMIT 0 42.5s",
			wantHeaders: "retry-after=43 x-ratelimit-limit=1000 x-ratelimit-remaining=0 x-ratelimit-reset=1796040060",
			metadata:    "outcome=refused reason=exhausted rule=paths remaining=0",
		},
		{
			name:        "one limit of every kind: the status is that of the first that refuses, the wait the longest",
			descriptors: []string{"all=" + nodeID},
			verdict: policy.Verdict{
				Budgets:  []policy.BudgetState{bucket(true, 99)},
				Limiters: []policy.LimiterState{tokens(false, slow, 0)},
				Quotas:   []policy.QuotaState{reservation(-1, 10), reservation(0, 20, 30)},
			},
			over: true, statuses: "OVER_LIMIT 0 1m0s",
			wantHeaders: "retry-after=43200 x-ratelimit-limit=6 x-ratelimit-remaining=0 x-ratelimit-reset=1796040060",
			metadata:    "outcome=refused reason=exhausted rule=everything remaining=0",
		},
		{
			name:        "the wait reaches the last exhausted wall",
			descriptors: []string{"consumer=a"}, now: noon.AddDate(0, 0, -10),
			verdict: policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 10, 100)}},
			over:    true, statuses: "OVER_LIMIT 0 12h0m0s",
			wantHeaders: "retry-after=907200 x-ratelimit-limit=10 x-ratelimit-remaining=0 x-ratelimit-reset=1795219200",
			metadata:    "outcome=refused reason=exhausted rule=consumer remaining=0",
		},
		{
			name:        "the same bucket twice must hold both",
			descriptors: []string{"node=" + nodeID, "node=" + nodeID}, cost: 40,
			verdict: policy.Verdict{Budgets: []policy.BudgetState{bucket(true, 50), bucket(false, 50)}},
			over:    true, statuses: "OK 50 5s, OVER_LIMIT 50 5s",
			wantHeaders: "retry-after=3 x-ratelimit-limit=100 x-ratelimit-remaining=50 x-ratelimit-reset=1796040005",
			metadata:    "outcome=refused reason=exhausted rule=node remaining=50",
		},
		{
			name:        "the same bucket twice can never hold both",
			descriptors: []string{"caller=a", "caller=a"}, cost: 120,
			verdict: policy.Verdict{Limiters: []policy.LimiterState{tokens(true, callerPolicy, 200), tokens(false, callerPolicy, 200)}},
			over:    true, statuses: "OK 200 0s, OVER_LIMIT 200 0s",
			wantHeaders: "x-ratelimit-limit=200 x-ratelimit-remaining=200 x-ratelimit-reset=1796040000",
			metadata:    "outcome=refused reason=over_ceiling rule=caller remaining=200",
		},
		{
			name:        "the same window twice can never hold both",
			descriptors: []string{"consumer=a", "consumer=a"}, cost: 6,
			verdict: policy.Verdict{Quotas: []policy.QuotaState{reservation(-1, 3, 3), reservation(0, 3, 3)}},
			over:    true, statuses: "OK 7 12h0m0s, OVER_LIMIT 7 12h0m0s",
			wantHeaders: "x-ratelimit-limit=10 x-ratelimit-remaining=7 x-ratelimit-reset=1796083200",
			metadata:    "outcome=refused reason=over_ceiling rule=consumer remaining=7",
		},
		{
			name:        "what no wait helps is shown before what is only exhausted",
			descriptors: []string{"node=" + nodeID, "consumer=a"}, cost: 50,
			verdict: policy.Verdict{
				Budgets: []policy.BudgetState{bucket(false, 20)},
				Quotas:  []policy.QuotaState{reservation(0, 3, 3)},
			},
			over: true, statuses: "OVER_LIMIT 20 8s, OVER_LIMIT 7 12h0m0s",
			wantHeaders: "x-ratelimit-limit=10 x-ratelimit-remaining=7 x-ratelimit-reset=1796083200",
			metadata:    "outcome=refused reason=over_ceiling rule=consumer remaining=7",
		},
		{
			name:        "C37 C47 a limit in shadow is told of in metadata alone",
			headers:     "{on_allowed: true}",
			descriptors: []string{"tried=" + nodeID, "path=/", "tried=" + nodeID},
			verdict: policy.Verdict{
				Allowed: true,
				Quotas:  []policy.QuotaState{reservation(-1, 1)},
				Shadows: []policy.Verdict{
					{Budgets: []policy.BudgetState{bucket(false, 0)}, Quotas: []policy.QuotaState{reservation(-1, 3)}},
					{Budgets: []policy.BudgetState{bucket(false, 0)}, Quotas: []policy.QuotaState{reservation(-1, 3)}},
				},
			},
			statuses:    "OK 0 none, OK 999 1m0s, OK 0 none",
			wantHeaders: "x-ratelimit-limit=1000 x-ratelimit-remaining=999 x-ratelimit-reset=1796040060",
			metadata:    "outcome=allowed rule=paths remaining=999 shadow_denied=[tried]",
		},
		{
			name:        "C47 a malformed key in shadow refuses nothing",
			descriptors: []string{"tried=x", "path=/"},
			verdict:     policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1)}},
			statuses:    "OK 0 none, OK 999 1m0s",
			metadata:    "outcome=allowed rule=paths remaining=999 shadow_denied=[tried]",
		},
		{
			name:        "C43 the headers of a hidden limit's refusal describe the next that is visible",
			descriptors: []string{"secret=a", "path=/"},
			verdict:     policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 10), reservation(-1, 400)}},
			over:        true, statuses: "OVER_LIMIT 0 none, OK 600 1m0s",
			wantHeaders: "retry-after=43200 x-ratelimit-limit=1000 x-ratelimit-remaining=600 x-ratelimit-reset=1796040060",
			metadata:    "outcome=refused reason=exhausted rule=secret remaining=0",
		},
		{
			name:        "C43 with none that is visible there is only the wait",
			descriptors: []string{"secret=a"},
			verdict:     policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 10)}},
			over:        true, statuses: "OVER_LIMIT 0 none",
			wantHeaders: "retry-after=43200",
			metadata:    "outcome=refused reason=exhausted rule=secret remaining=0",
		},
		{
			name:        "one of two quota-mode limits is exhausted",
			headers:     "{on_allowed: true}",
			descriptors: []string{"soft=a", "softer=a"},
			verdict:     policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(0, 5), reservation(-1, 10)}},
			statuses:    "OVER_LIMIT 0 1m0s, OK 40 1h0m0s",
			wantHeaders: "x-ratelimit-limit=5 x-ratelimit-remaining=0 x-ratelimit-reset=1796040060",
			metadata:    "outcome=allowed rule=soft remaining=0",
		},
		{
			name:        "all quota-mode limits are exhausted, and the first that comes back will do",
			descriptors: []string{"softer=a", "soft=a"},
			verdict:     policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 50), reservation(0, 5)}},
			over:        true, statuses: "OVER_LIMIT 0 1h0m0s, OVER_LIMIT 0 1m0s",
			wantHeaders: "retry-after=60 x-ratelimit-limit=5 x-ratelimit-remaining=0 x-ratelimit-reset=1796040060",
			metadata:    "outcome=refused reason=exhausted rule=soft remaining=0",
		},
		{
			name:        "an exhausted quota-mode limit is no reason to wait when another one refuses",
			descriptors: []string{"softer=a", "soft=a", "path=/"},
			verdict:     policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 50), reservation(-1, 1), reservation(0, 1000)}},
			over:        true, statuses: "OVER_LIMIT 0 1h0m0s, OK 4 1m0s, OVER_LIMIT 0 1m0s",
			wantHeaders: "retry-after=60 x-ratelimit-limit=1000 x-ratelimit-remaining=0 x-ratelimit-reset=1796040060",
			metadata:    "outcome=refused reason=exhausted rule=paths remaining=0",
		},
		{
			name:        "one of the quota-mode limits covers the cost after a while, so there is something to wait for",
			descriptors: []string{"soft=a", "softer=a"}, cost: 20,
			verdict: policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 0), reservation(0, 40)}},
			over:    true, statuses: "OVER_LIMIT 5 1m0s, OVER_LIMIT 10 1h0m0s",
			wantHeaders: "retry-after=3600 x-ratelimit-limit=5 x-ratelimit-remaining=5 x-ratelimit-reset=1796040060",
			metadata:    "outcome=refused reason=exhausted rule=soft remaining=5",
		},
		{
			name:        "a quota-mode limit twice covers one of the costs after a while",
			descriptors: []string{"soft=a", "soft=a"}, cost: 3,
			verdict: policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 5), reservation(0, 5)}},
			over:    true, statuses: "OVER_LIMIT 0 1m0s, OVER_LIMIT 0 1m0s",
			wantHeaders: "retry-after=60 x-ratelimit-limit=5 x-ratelimit-remaining=0 x-ratelimit-reset=1796040060",
			metadata:    "outcome=refused reason=exhausted rule=soft remaining=0",
		},
		{
			name:        "unlimited, and what it replaces is neither charged nor limited",
			descriptors: []string{"staff=a", "path=/"},
			statuses:    "OK 4294967295 none, OK 0 none",
			metadata:    "outcome=allowed",
		},
		{
			name:        "a quota that the store does not know is inert",
			headers:     "{on_allowed: true}",
			descriptors: []string{"consumer=a"},
			verdict:     policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{{Unknown: true}}},
			statuses:    "OK 0 none",
			metadata:    "outcome=allowed",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			now := noon
			if !test.now.IsZero() {
				now = test.now
			}
			headers := ""
			if test.headers != "" {
				headers = "headers: " + test.headers
			}
			response := ask(t, newService(t, &store{verdict: test.verdict}, headers+kindsPolicy, at(now)), request(test.cost, test.descriptors...))
			if got := response.GetOverallCode() == over; got != test.over {
				t.Errorf("refused = %t, want %t", got, test.over)
			}
			for _, part := range []struct{ name, got, want string }{
				{"statuses", describeStatuses(response), test.statuses},
				{"headers", describeHeaders(response), test.wantHeaders},
				{"metadata", describeMetadata(response), test.metadata},
			} {
				if part.got != part.want {
					t.Errorf("%s\n got %s\nwant %s", part.name, part.got, part.want)
				}
			}
		})
	}
}

// What is asked of the store: each kind in its place, limits in shadow each by itself,
// quota-mode limits as optional, replaced and unlimited ones not at all.
func TestPlanKinds(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{
		Allowed: true,
		Budgets: []policy.BudgetState{bucket(true, 1), bucket(true, 1)}, Limiters: []policy.LimiterState{tokens(true, callerPolicy, 1), {Covered: true}},
		Quotas:  []policy.QuotaState{reservation(-1, 1), reservation(-1, 1, 1), reservation(-1, 1)},
		Shadows: []policy.Verdict{{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1)}}, {Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1)}}},
	}}
	ask(t, newService(t, s, kindsPolicy), request(3,
		"caller=a", "tried="+nodeID, "node="+nodeID, "all="+nodeID, "soft=a", "staff=a", "path=/", "tried="+nodeID))
	got := s.asked[0]
	if len(got.Budgets) != 2 || len(got.Limiters) != 2 || len(got.Quotas) != 3 || len(got.Shadows) != 2 {
		t.Fatalf("asked %+v", got)
	}
	if got.Limiters[0].Policy != callerPolicy || got.Limiters[0].Cost != 3 || got.Limiters[0].Bucket.Namespace != "test" {
		t.Errorf("the limiter's debit is %+v", got.Limiters[0])
	}
	if window := got.Quotas[0]; window.Consumer != nil || window.Optional || window.Budgets[0].Limit != 50 {
		t.Errorf("the rate limit's debit is %+v", window)
	}
	if held := got.Quotas[1]; held.Consumer == nil || held.Consumer.ID != held.Counter || len(held.Budgets) != 2 {
		t.Errorf("the quota's debit is %+v", held)
	}
	if soft := got.Quotas[2]; !soft.Optional {
		t.Errorf("the quota-mode debit is %+v", soft)
	}
	for _, shadow := range got.Shadows {
		if len(shadow.Budgets) != 1 || len(shadow.Quotas) != 1 || !shadow.Now.Equal(noon) {
			t.Errorf("a shadow asks %+v", shadow)
		}
	}
}

func refund(ds []*ratelimitv3.RateLimitDescriptor) []*ratelimitv3.RateLimitDescriptor {
	for _, d := range ds {
		d.IsNegativeHits = true
	}
	return ds
}

// PEERS C38: waits are rounded up, and never 0.
func TestC38RetryAfterIsRoundedUp(t *testing.T) {
	t.Parallel()

	for wait, want := range map[time.Duration]string{
		200 * time.Millisecond: "1", time.Second: "1", 1001 * time.Millisecond: "2", 59999900 * time.Microsecond: "60",
	} {
		p := policy.LimiterPolicy{Permits: 1, Per: time.Microsecond, Burst: 100_000_000}
		missing := int64(wait / time.Microsecond) // a token a microsecond
		s := &store{verdict: policy.Verdict{Limiters: []policy.LimiterState{tokens(false, p, 80_000_000-missing)}}}
		response := ask(t, newService(t, s, `
domain: test
descriptors:
  - key: caller
    limiter: {permits: 1, per: 1us, burst: 100000000}
`), request(80_000_000, "caller=a"))
		if got := response.GetResponseHeadersToAdd()[0]; got.GetKey() != "retry-after" || got.GetValue() != want {
			t.Errorf("a wait of %v: %s=%s, want %s", wait, got.GetKey(), got.GetValue(), want)
		}
	}
}

// PEERS C39: a row that was written by a clock ahead of this one gives no wait that is
// negative or endless.
func TestC39ClockMovedBack(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{
		Budgets: []policy.BudgetState{{Tokens: 0, RefilledAt: noon.Add(10 * time.Second)}},
	}}
	response := ask(t, newService(t, s, kindsPolicy), request(50, "node="+nodeID))
	// Ten seconds until the row's instant, in which nothing comes back, and five for 50.
	if got := response.GetResponseHeadersToAdd()[0].GetValue(); got != "15" {
		t.Errorf("Retry-After = %s, want 15", got)
	}
}

// PEERS C44: epoch seconds do not end in 2038.
func TestC44ResetAcross2038(t *testing.T) {
	t.Parallel()

	const end = 1<<31 - 1 // 2038-01-19T03:14:07Z
	for _, test := range []struct {
		style, want string
	}{
		{"epoch", "2147483651"},
		{"delta", "4"},
	} {
		s := &store{verdict: policy.Verdict{Budgets: []policy.BudgetState{{Tokens: 69, RefilledAt: time.Unix(end, 0)}}}}
		service := newService(t, s, "headers: {style: "+test.style+"}"+kindsPolicy, at(time.Unix(end, 0)))
		response := ask(t, service, request(80, "node="+nodeID))
		if got := response.GetResponseHeadersToAdd()[3]; got.GetKey() != "x-ratelimit-reset" || got.GetValue() != test.want {
			t.Errorf("%s: %s = %s, want %s", test.style, got.GetKey(), got.GetValue(), test.want)
		}
	}
}

// PEERS C42, C46, C50: the structured fields of the IETF's draft.
func TestIETFHeaders(t *testing.T) {
	t.Parallel()

	february := time.Date(2027, 2, 10, 12, 0, 0, 0, time.UTC)
	for _, test := range []struct {
		name, policy, descriptors string
		now                       time.Time
		verdict                   policy.Verdict
		wantPolicy, want          string
	}{
		{
			name: "C42 all limits are listed, and the one that binds is told of",
			policy: `
  - {key: a, name: fast, rate_limit: {unit: second, requests_per_unit: 10}}
  - {key: b, name: slow, rate_limit: {unit: minute, requests_per_unit: 1000}}`,
			descriptors: "a=1 b=1 a=1", now: noon,
			verdict:    policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 2), reservation(-1, 990), reservation(-1, 2)}},
			wantPolicy: `"fast";q=10;w=1, "slow";q=1000;w=60`,
			want:       `"slow";r=10;t=60`,
		},
		{
			name: "C46 a month is as long as it is",
			policy: `
  - {key: a, quota: {daily: 10, monthly: 100, yearly: 1000}}`,
			descriptors: "a=1", now: february,
			verdict:    policy.Verdict{Quotas: []policy.QuotaState{reservation(1, 5, 100, 100)}},
			wantPolicy: `"a/daily";q=10;w=86400, "a/monthly";q=100;w=2419200, "a/yearly";q=1000;w=31536000`,
			want:       `"a/monthly";r=0;t=1598400`,
		},
		{
			name: "C50 numbers are true up to 15 digits",
			policy: `
  - {key: a, quota: {daily: 1_000_000_000_000}}
  - {key: b, quota: {yearly: 9_007_199_254_740_992}}`,
			descriptors: "a=1 b=1", now: noon,
			verdict:    policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1), reservation(-1, 0)}},
			wantPolicy: `"a";q=1000000000000;w=86400, "b";q=999999999999999;w=31536000`,
			want:       `"a";r=999999999999;t=43200`,
		},
		{
			name: "buckets: bytes are bytes, and the window is the time to fill",
			policy: `
  - {key: a, budget: {scope: ingest_node, per_second: 3, burst: 100}}
  - {key: b, limiter: {permits: 1, per: 250ms, burst: 1}}`,
			descriptors: "a=" + nodeID + " b=1", now: noon,
			verdict: policy.Verdict{
				Allowed: true, Budgets: []policy.BudgetState{bucket(true, 10)},
				Limiters: []policy.LimiterState{{Covered: true, RefilledAt: noon, Level: 250_000}},
			},
			wantPolicy: `"a";q=100;qu="content-bytes";w=34, "b";q=1;w=1`,
			want:       `"a";r=10;t=30`,
		},
		{
			name: "C43 hidden and shadow limits are left out, and names are escaped",
			policy: `
  - {key: a, name: 'a "b\" é', quota: {daily: 10}}
  - {key: b, expose: false, quota: {daily: 10}}
  - {key: c, shadow_mode: true, quota: {daily: 10}}`,
			descriptors: "b=1 c=1 a=1", now: noon,
			verdict: policy.Verdict{
				Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 9), reservation(-1, 1)},
				Shadows: []policy.Verdict{{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1)}}},
			},
			wantPolicy: `"a \"b\\\" %C3%A9";q=10;w=86400`,
			want:       `"a \"b\\\" %C3%A9";r=9;t=43200`,
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			text := "domain: test\nheaders: {style: ietf, on_allowed: true}\ndescriptors:" + test.policy
			response := ask(t, newService(t, &store{verdict: test.verdict}, text, at(test.now)), request(1, strings.Fields(test.descriptors)...))
			got := map[string]string{}
			for _, h := range response.GetResponseHeadersToAdd() {
				got[h.GetKey()] = h.GetValue()
			}
			delete(got, "retry-after")
			want := map[string]string{"ratelimit-policy": test.wantPolicy, "ratelimit": test.want}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("headers differ (-want +got):\n%s", diff)
			}
		})
	}
}

// A header stays one that proxies take, however many limits a request has; the limit that
// binds is in it.
func TestIETFHeadersAreBounded(t *testing.T) {
	t.Parallel()

	var text strings.Builder
	text.WriteString("domain: test\nheaders: {style: ietf, on_allowed: true}\ndescriptors:\n")
	var ask64 []string
	s := &store{verdict: policy.Verdict{Allowed: true}}
	for i := range 64 {
		key := strings.Repeat("k", 200) + string(rune('a'+i%26)) + string(rune('a'+i/26))
		text.WriteString("  - {key: " + key + ", rate_limit: {unit: day, requests_per_unit: 100}}\n")
		ask64 = append(ask64, key+"=1")
		s.verdict.Quotas = append(s.verdict.Quotas, reservation(-1, int64(i)))
	}
	response := ask(t, newService(t, s, text.String()), request(1, ask64...))
	headers := response.GetResponseHeadersToAdd()
	last := strings.Repeat("k", 200) + "lc"
	if n := len(headers[0].GetValue()); n > 4096+300 {
		t.Errorf("RateLimit-Policy has %d bytes", n)
	}
	for _, h := range headers {
		if !strings.Contains(h.GetValue(), last) {
			t.Errorf("%s does not have the limit that binds", h.GetKey())
		}
	}
}

// PEERS C48: access logs can say which limit decided, and what the policy says of it.
func TestC48Metadata(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{
		Allowed: true, Budgets: []policy.BudgetState{bucket(true, 10)}, Quotas: []policy.QuotaState{reservation(-1, 1)},
	}}
	response := ask(t, newService(t, s, kindsPolicy), request(1, "tagged=1", "tagged2=1", "node="+nodeID))
	fields := response.GetDynamicMetadata().AsMap()
	if diff := cmp.Diff(map[string]any{"tier": "gold", "team": "b"}, fields["metadata"]); diff != "" {
		t.Errorf("the limits' metadata differs (-want +got):\n%s", diff)
	}
	weir, _ := fields["weir"].(map[string]any)
	receipt, _ := weir["receipt"].(string)
	delete(weir, "receipt")
	if diff := cmp.Diff(map[string]any{"outcome": "allowed", "rule": "node", "scope": "ingest_node", "remaining": 10.0}, weir); diff != "" {
		t.Errorf("the decision's metadata differs (-want +got):\n%s", diff)
	}
	if n := len(receipt); n == 0 || n > 24 {
		t.Errorf("the receipt is %q", receipt)
	}
	// The metadata is that of descriptors that passed.
	s.verdict.Allowed, s.verdict.Quotas[0] = false, reservation(0, 5)
	response = ask(t, newService(t, s, kindsPolicy), request(1, "tagged=1", "tagged2=1", "node="+nodeID))
	if diff := cmp.Diff(map[string]any{"team": "b"}, response.GetDynamicMetadata().AsMap()["metadata"]); diff != "" {
		t.Errorf("the metadata of a refusal differs (-want +got):\n%s", diff)
	}
}

// Limits in shadow refuse nothing, whatever the store does; a refund is never taken for
// done when it was not.
func TestUnavailableShadowsAndRefunds(t *testing.T) {
	t.Parallel()

	down := &store{err: errDown}
	response := ask(t, newService(t, down, kindsPolicy), request(1, "tried="+nodeID))
	if got := describeMetadata(response); got != "outcome=allowed reason=on_error" {
		t.Errorf("a limit in shadow on a dead store: %s", got)
	}
	service := newService(t, down, `
domain: test
descriptors:
  - {key: a, on_error: allow, quota: {daily: 5}}
`, allowed(policy.Client{Refunds: true}))
	req := request(1, "a=1")
	if _, err := service.ShouldRateLimit(fromLoopback(t), req); err != nil {
		t.Errorf("on_error: allow: %v", err)
	}
	refund(req.GetDescriptors())
	if _, err := service.ShouldRateLimit(fromLoopback(t), req); status.Code(err) != codes.Unavailable {
		t.Errorf("a refund on a dead store: %v, want UNAVAILABLE", err)
	}
}

// PEERS C03, C06: a refund's cost is negative, also when it is a descriptor's own, and an
// answer to it tells a client nothing.
func TestC06Refunds(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{
		Allowed: true, Budgets: []policy.BudgetState{bucket(true, 100)}, Quotas: []policy.QuotaState{reservation(-1, 1, 1), reservation(-1, 0)},
	}}
	service := newService(t, s, "headers: {on_allowed: true}"+kindsPolicy, allowed(policy.Client{Refunds: true}))
	req := request(3, "node="+nodeID, "consumer=a", "soft=a", "node=malformed")
	refund(req.GetDescriptors())[1].HitsAddend = wrapperspb.UInt64(1 << 60)
	receipt := ratelimitsvc.NewReceipt("test", noon, 1, 8, 4, 0)
	response, err := service.ShouldRateLimit(fromLoopback(t, receipt), req)
	if err != nil {
		t.Fatal(err)
	}
	got := s.asked[0]
	if got.Budgets[0].Cost != -3 || got.Quotas[0].Cost != -policy.MaxUnits-1 || got.Quotas[1].Cost != -3 || len(got.Budgets) != 1 {
		t.Errorf("asked %+v", got)
	}
	if got.Quotas[1].Optional {
		t.Error("a refund counts among those that refuse only together")
	}
	if want := "OK 100 0s, OK 9 12h0m0s, OK 5 1m0s, OK 0 none"; describeStatuses(response) != want {
		t.Errorf("statuses\n got %s\nwant %s", describeStatuses(response), want)
	}
	if h := describeHeaders(response); h != "" || response.GetOverallCode() != rlsv3.RateLimitResponse_OK {
		t.Errorf("%v with headers %q", response.GetOverallCode(), h)
	}
	if _, has := response.GetDynamicMetadata().AsMap()["weir"].(map[string]any)["receipt"]; has {
		t.Error("a refund has a receipt")
	}
	// Without a receipt nobody knows whether a quota-mode limit was charged.
	s.verdict.Quotas = s.verdict.Quotas[:1]
	if _, err := service.ShouldRateLimit(fromLoopback(t), req); err != nil {
		t.Fatal(err)
	}
	if got := s.asked[1]; len(got.Budgets) != 1 || len(got.Quotas) != 1 || got.Quotas[0].Consumer == nil {
		t.Errorf("without a receipt, asked %+v", got)
	}
}

// A double does not tell 2^53 + 1 from 2^53; the cost above the largest budget still never
// fits.
func TestLargestBudget(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{Budgets: []policy.BudgetState{bucket(false, policy.MaxUnits)}}}
	req := request(1, "node="+nodeID)
	req.Descriptors[0].HitsAddend = wrapperspb.UInt64(policy.MaxUnits + 1)
	response := ask(t, newService(t, s, `
domain: test
descriptors:
  - key: node
    budget: {scope: ingest_node, per_second: 9007199254740992, burst: 9007199254740992}
`), req)
	const want = "outcome=refused reason=over_ceiling rule=node remaining=9007199254740992"
	if got := describeMetadata(response); got != want {
		t.Errorf("metadata %s, want %s", got, want)
	}
	if got := describeHeaders(response); strings.Contains(got, "retry-after") {
		t.Errorf("headers %s, and no wait helps", got)
	}
}

// A refund whose budget's key is malformed is refused no more than others, even if it gives
// back nothing, and keeps nothing else from being given back.
func TestRefundOfMalformedKey(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{
		Allowed: true, Budgets: []policy.BudgetState{bucket(true, 100)}, Limiters: []policy.LimiterState{{Covered: true}},
		Quotas: []policy.QuotaState{reservation(-1, 1), reservation(-1, 1, 1)},
	}}
	service := newService(t, s, kindsPolicy, allowed(policy.Client{Refunds: true}))
	for _, cost := range []uint64{0, 3} {
		s.asked = nil
		req := request(3, "all=malformed", "node="+nodeID)
		refund(req.GetDescriptors())[0].HitsAddend = wrapperspb.UInt64(cost)
		response, err := service.ShouldRateLimit(fromLoopback(t), req)
		if err != nil || response.GetOverallCode() != rlsv3.RateLimitResponse_OK {
			t.Fatalf("a refund of %d: %v, %v", cost, response, err)
		}
		if len(s.asked) != 1 {
			t.Fatalf("a refund of %d: the store was asked %d times", cost, len(s.asked))
		}
		if got := s.asked[0]; len(got.Budgets) != 1 || got.Budgets[0].Cost != -3 || len(got.Limiters) != 1 || len(got.Quotas) != 2 {
			t.Errorf("a refund of %d: asked %+v", cost, got)
		}
	}
}

package ratelimitsvc_test

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
	"github.com/weir-dev/weir/ratelimitsvc"
)

const nodeID = "3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e5f"

// noon is 12 hours before the end of a day and of a month.
var noon = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

const testPolicy = `
domain: ingest
descriptors:
  - key: node
    budget: {scope: ingest_node, per_second: 10, burst: 100}
  - key: domain
    budget: {scope: ingest_domain, per_second: 100, burst: 1000}
  - key: consumer
    quota: {daily: 10, monthly: 100}
  - key: soft
    on_error: allow
    quota: {daily: 10}
  - key: huge
    quota: {daily: 1_000_000_000_000}
  - {key: free}
`

// store is a Decider that answers as it is told, and remembers what it was asked. The
// real one is behind the service in the end-to-end tests.
type store struct {
	verdict policy.Verdict
	err     error
	asked   []policy.Request
	known   []policy.ConsumerUsage
}

func (s *store) Decide(_ context.Context, req policy.Request) (policy.Verdict, error) {
	s.asked = append(s.asked, req)
	return s.verdict, s.err
}

func (s *store) Consumers(_ context.Context, q policy.ConsumersQuery) ([]policy.ConsumerUsage, error) {
	var page []policy.ConsumerUsage
	for _, c := range s.known {
		if len(q.Only) == 0 || slices.Contains(q.Only, c.ID) {
			page = append(page, c)
		}
	}
	return page[:min(q.Limit, len(page))], s.err
}

func (s *store) Ping(context.Context) error { return s.err }

func newService(tb testing.TB, s *store, text string, changes ...func(*ratelimitsvc.Config)) *ratelimitsvc.Service {
	tb.Helper()
	p, err := policy.Parse("test.yaml", []byte(text))
	if err != nil {
		tb.Fatal(err)
	}
	set, err := policy.NewSet(p)
	if err != nil {
		tb.Fatal(err)
	}
	config := ratelimitsvc.Config{
		Policies: set, Decider: s, Usage: s, Ping: s.Ping,
		Now:      func() time.Time { return noon },
		Logger:   slog.New(slog.DiscardHandler),
		Registry: prometheus.NewRegistry(),
	}
	for _, change := range changes {
		change(&config)
	}
	service, err := ratelimitsvc.New(config)
	if err != nil {
		tb.Fatal(err)
	}
	return service
}

// descriptors makes one descriptor of one entry from each "key=value".
func descriptors(texts ...string) []*ratelimitv3.RateLimitDescriptor {
	var ds []*ratelimitv3.RateLimitDescriptor
	for _, text := range texts {
		key, value, _ := strings.Cut(text, "=")
		ds = append(ds, &ratelimitv3.RateLimitDescriptor{
			Entries: []*ratelimitv3.RateLimitDescriptor_Entry{{Key: key, Value: value}},
		})
	}
	return ds
}

func bucket(covered bool, tokens float64) policy.BudgetState {
	return policy.BudgetState{Covered: covered, Tokens: tokens, RefilledAt: noon}
}

func reservation(denied int, used ...int64) policy.QuotaState {
	return policy.QuotaState{Reservation: quota.Reservation{Denied: denied, Used: used}}
}

func TestRender(t *testing.T) {
	t.Parallel()

	const (
		ok   = rlsv3.RateLimitResponse_OK
		over = rlsv3.RateLimitResponse_OVER_LIMIT
	)
	type want struct {
		overall  rlsv3.RateLimitResponse_Code
		statuses string // code, remaining and reset of each
		headers  string
		metadata string
	}
	for _, test := range []struct {
		name        string
		policy      string // before testPolicy
		descriptors []string
		cost        uint32
		verdict     policy.Verdict
		want        want
	}{
		{
			name:        "allowed, and no headers unless the policy asks",
			descriptors: []string{"node=" + nodeID},
			cost:        40,
			verdict:     policy.Verdict{Allowed: true, Budgets: []policy.BudgetState{bucket(true, 60)}},
			want:        want{overall: ok, statuses: "OK 60 4s", metadata: "outcome=allowed rule=node remaining=60"},
		},
		{
			name:        "allowed with headers of the limit with the least left",
			policy:      "headers: {on_allowed: true}",
			descriptors: []string{"node=" + nodeID, "consumer=alice"},
			verdict: policy.Verdict{
				Allowed: true,
				Budgets: []policy.BudgetState{bucket(true, 99)},
				Quotas:  []policy.QuotaState{reservation(-1, 2, 60)},
			},
			want: want{
				overall: ok, statuses: "OK 99 100ms, OK 40 12h0m0s",
				headers:  "x-ratelimit-limit=100 x-ratelimit-remaining=40 x-ratelimit-reset=1796083200",
				metadata: "outcome=allowed rule=consumer remaining=40",
			},
		},
		{
			name:        "refused by a bucket",
			descriptors: []string{"node=" + nodeID},
			cost:        75,
			verdict:     policy.Verdict{Budgets: []policy.BudgetState{bucket(false, 60)}},
			want: want{
				overall: over, statuses: "OVER_LIMIT 60 4s",
				headers:  "retry-after=2 x-ratelimit-limit=100 x-ratelimit-remaining=60 x-ratelimit-reset=1796040004",
				metadata: "outcome=refused reason=exhausted rule=node remaining=60",
			},
		},
		{
			name:        "seconds to go",
			policy:      "headers: {style: delta}",
			descriptors: []string{"node=" + nodeID},
			cost:        75,
			verdict:     policy.Verdict{Budgets: []policy.BudgetState{bucket(false, 60.5)}},
			want: want{
				overall: over, statuses: "OVER_LIMIT 60 3.95s",
				headers:  "retry-after=2 x-ratelimit-limit=100 x-ratelimit-remaining=60 x-ratelimit-reset=4",
				metadata: "outcome=refused reason=exhausted rule=node remaining=60",
			},
		},
		{
			name:        "over the ceiling there is nothing to wait for",
			descriptors: []string{"node=" + nodeID, "domain=" + nodeID},
			cost:        300,
			verdict:     policy.Verdict{Budgets: []policy.BudgetState{bucket(false, 100), bucket(false, 200)}},
			want: want{
				overall: over, statuses: "OVER_LIMIT 100 0s, OVER_LIMIT 200 8s",
				headers:  "x-ratelimit-limit=100 x-ratelimit-remaining=100 x-ratelimit-reset=1796040000",
				metadata: "outcome=refused reason=over_ceiling rule=node remaining=100",
			},
		},
		{
			name:        "C35 the headers are of the limit that refused, not of one that passed",
			descriptors: []string{"node=" + nodeID, "consumer=alice"},
			verdict: policy.Verdict{
				Budgets: []policy.BudgetState{bucket(true, 56)},
				Quotas:  []policy.QuotaState{reservation(0, 10, 10)},
			},
			want: want{
				overall: over, statuses: "OK 56 4.4s, OVER_LIMIT 0 12h0m0s",
				headers:  "retry-after=43200 x-ratelimit-limit=10 x-ratelimit-remaining=0 x-ratelimit-reset=1796083200",
				metadata: "outcome=refused reason=exhausted rule=consumer remaining=0",
			},
		},
		{
			name:        "rates are shown before windows, and the longest wait is told",
			descriptors: []string{"consumer=alice", "node=" + nodeID},
			verdict: policy.Verdict{
				Budgets: []policy.BudgetState{bucket(false, 0.5)},
				Quotas:  []policy.QuotaState{reservation(0, 10, 10)},
			},
			want: want{
				overall: over, statuses: "OVER_LIMIT 0 12h0m0s, OVER_LIMIT 0 9.95s",
				headers:  "retry-after=43200 x-ratelimit-limit=100 x-ratelimit-remaining=0 x-ratelimit-reset=1796040010",
				metadata: "outcome=refused reason=exhausted rule=node remaining=0",
			},
		},
		{
			name:        "C50 the protocol saturates at 32 bits and our headers do not",
			policy:      "headers: {on_allowed: true}",
			descriptors: []string{"huge=x"},
			verdict:     policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1)}},
			want: want{
				overall: ok, statuses: "OK 4294967295 12h0m0s",
				headers:  "x-ratelimit-limit=1000000000000 x-ratelimit-remaining=999999999999 x-ratelimit-reset=1796083200",
				metadata: "outcome=allowed rule=huge remaining=999999999999",
			},
		},
		{
			name:        "what nothing limits is allowed without asking",
			descriptors: []string{"free=1", "unknown=1"},
			want:        want{overall: ok, statuses: "OK 0 none, OK 0 none", metadata: "outcome=allowed"},
		},
		{
			name:        "C16 C30 a key that is no UUID is refused, not an error",
			descriptors: []string{"node=1 \ufffd\ufffd", "consumer=alice"},
			want: want{
				overall: over, statuses: "OVER_LIMIT 0 none, OK 0 none",
				metadata: "outcome=refused reason=malformed_key",
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := &store{verdict: test.verdict}
			service := newService(t, s, test.policy+testPolicy)
			response, err := service.ShouldRateLimit(t.Context(), &rlsv3.RateLimitRequest{
				Domain: "ingest", Descriptors: descriptors(test.descriptors...), HitsAddend: test.cost,
			})
			if err != nil {
				t.Fatal(err)
			}
			got := want{
				overall:  response.GetOverallCode(),
				statuses: describeStatuses(response),
				headers:  describeHeaders(response),
				metadata: describeMetadata(response),
			}
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(want{})); diff != "" {
				t.Errorf("the response differs (-want +got):\n%s", diff)
			}
		})
	}
}

func describeStatuses(response *rlsv3.RateLimitResponse) string {
	var texts []string
	for _, s := range response.GetStatuses() {
		reset := "none"
		if s.GetDurationUntilReset() != nil {
			reset = s.GetDurationUntilReset().AsDuration().String()
		}
		texts = append(texts, strings.Join([]string{
			s.GetCode().String(), jsonText(s.GetLimitRemaining()), reset,
		}, " "))
	}
	return strings.Join(texts, ", ")
}

func describeHeaders(response *rlsv3.RateLimitResponse) string {
	var texts []string
	for _, h := range response.GetResponseHeadersToAdd() {
		texts = append(texts, h.GetKey()+"="+h.GetValue())
	}
	return strings.Join(texts, " ")
}

func describeMetadata(response *rlsv3.RateLimitResponse) string {
	fields := response.GetDynamicMetadata().GetFields()["weir"].GetStructValue().AsMap()
	var texts []string
	for _, key := range []string{"outcome", "reason", "rule", "remaining"} {
		if v, ok := fields[key]; ok {
			texts = append(texts, key+"="+strings.Trim(jsonText(v), `"`))
		}
	}
	if v, ok := fields["shadow_denied"]; ok {
		texts = append(texts, fmt.Sprintf("shadow_denied=%v", v))
	}
	return strings.Join(texts, " ")
}

func jsonText(v any) string {
	text, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(text)
}

// PEERS C03, C13: a descriptor's own cost may be 0 and stands for itself; the request's
// 0 means 1.
func TestC03C13Costs(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{
		Allowed: true,
		Budgets: []policy.BudgetState{bucket(true, 1), bucket(true, 1), bucket(true, 1)},
		Quotas:  []policy.QuotaState{reservation(-1, 1, 1)},
	}}
	service := newService(t, s, testPolicy)
	ds := descriptors("node="+nodeID, "node="+nodeID, "domain="+nodeID, "consumer=alice")
	ds[1].HitsAddend = wrapperspb.UInt64(0)
	ds[2].HitsAddend = wrapperspb.UInt64(1 << 63)
	ds[3].HitsAddend = wrapperspb.UInt64(2048)
	if _, err := service.ShouldRateLimit(t.Context(), &rlsv3.RateLimitRequest{Domain: "ingest", Descriptors: ds}); err != nil {
		t.Fatal(err)
	}
	var got []int64
	for _, b := range s.asked[0].Budgets {
		got = append(got, b.Cost)
	}
	got = append(got, s.asked[0].Quotas[0].Cost)
	if diff := cmp.Diff([]int64{1, 0, policy.MaxUnits + 1, 2048}, got); diff != "" {
		t.Errorf("costs differ (-want +got):\n%s", diff)
	}
}

// PEERS C05, C06: what an operator got wrong is named, and never misread.
func TestC05C06StructureFaults(t *testing.T) {
	t.Parallel()

	one := func(change func(*ratelimitv3.RateLimitDescriptor)) *rlsv3.RateLimitRequest {
		ds := descriptors("consumer=alice", "consumer=bob")
		change(ds[1])
		return &rlsv3.RateLimitRequest{Domain: "ingest", Descriptors: ds}
	}
	for _, test := range []struct {
		name string
		req  *rlsv3.RateLimitRequest
		code codes.Code
		says string
	}{
		{"no domain", &rlsv3.RateLimitRequest{Descriptors: descriptors("a=b")}, codes.InvalidArgument, "domain"},
		{"no descriptors", &rlsv3.RateLimitRequest{Domain: "ingest"}, codes.InvalidArgument, "descriptors"},
		{"too many entries", one(func(d *ratelimitv3.RateLimitDescriptor) {
			d.Entries = make([]*ratelimitv3.RateLimitDescriptor_Entry, 65)
		}), codes.InvalidArgument, "descriptors[1].entries"},
		{"ten thousand descriptors", &rlsv3.RateLimitRequest{
			Domain: "ingest", Descriptors: make([]*ratelimitv3.RateLimitDescriptor, 10_000),
		}, codes.InvalidArgument, "descriptors"},
		{"an override", one(func(d *ratelimitv3.RateLimitDescriptor) {
			d.Limit = &ratelimitv3.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 5, Unit: typev3.RateLimitUnit(99)}
		}), codes.PermissionDenied, "descriptors[1].limit"},
		{"a refund", one(func(d *ratelimitv3.RateLimitDescriptor) { d.IsNegativeHits = true }), codes.PermissionDenied, "descriptors[1].is_negative_hits"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := &store{}
			_, err := newService(t, s, testPolicy).ShouldRateLimit(t.Context(), test.req)
			if status.Code(err) != test.code || !strings.Contains(err.Error(), test.says) {
				t.Errorf("error = %v, want %v that names %s", err, test.code, test.says)
			}
			if len(s.asked) > 0 {
				t.Error("the store was asked")
			}
		})
	}
}

// Law 3: what could not be decided is unavailable; it is admitted only if every limit
// says so.
func TestUnavailable(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name        string
		descriptors []string
		code        codes.Code
	}{
		{"denied", []string{"consumer=alice"}, codes.Unavailable},
		{"one denying descriptor denies", []string{"soft=a", "consumer=alice"}, codes.Unavailable},
		{"on_error: allow", []string{"soft=a", "free=1"}, codes.OK},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := &store{err: errors.New("connection refused")}
			response, err := newService(t, s, testPolicy).ShouldRateLimit(t.Context(), &rlsv3.RateLimitRequest{
				Domain: "ingest", Descriptors: descriptors(test.descriptors...),
			})
			if status.Code(err) != test.code {
				t.Errorf("error = %v, want %v", err, test.code)
			}
			if strings.Contains(status.Convert(err).Message(), "connection refused") {
				t.Error("the cause is told to the client")
			}
			if len(response.GetResponseHeadersToAdd()) > 0 {
				t.Errorf("rate headers: %v", describeHeaders(response))
			}
		})
	}
}

func get(t *testing.T, service *ratelimitsvc.Service, path string) (int, string) {
	t.Helper()
	recorder := httptest.NewRecorder()
	service.Handler().ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, path, nil))
	body, err := io.ReadAll(recorder.Result().Body)
	if err != nil {
		t.Fatal(err)
	}
	return recorder.Code, string(body)
}

func TestUsage(t *testing.T) {
	t.Parallel()

	p, err := policy.Parse("test.yaml", []byte(testPolicy))
	if err != nil {
		t.Fatal(err)
	}
	m, ok := p.Match(policy.Descriptor{{Key: "consumer", Value: "alice"}})
	if !ok {
		t.Fatal("alice matches nothing")
	}
	alice := policy.ConsumerUsage{ID: m.Consumer().ID, Entries: m.Consumer().Entries, Used: []int64{3, 40}}
	gone := policy.ConsumerUsage{ID: policy.CounterID{2}, Entries: []policy.Entry{{Key: "was", Value: "here"}}, Used: []int64{1, 1}}
	s := &store{known: []policy.ConsumerUsage{alice, gone}}
	service := newService(t, s, testPolicy)

	const want = `{"now":1796040000,"consumers":[{"domain":"ingest","entries":[{"key":"consumer","value":"alice"}],` +
		`"budgets":[{"budget":"daily","limit":10,"used":3,"remaining":7,"reset":1796083200},` +
		`{"budget":"monthly","limit":100,"used":40,"remaining":60,"reset":1796083200}]}]}` + "\n"
	for _, path := range []string{
		"/quotas/usage", "/quotas/usage?domain=ingest&entry=consumer=alice",
	} {
		if code, body := get(t, service, path); code != http.StatusOK || body != want {
			t.Errorf("GET %s = %d %s, want %s", path, code, body, want)
		}
	}
	for entry, want := range map[string]string{
		"consumer=nobody": `"used":0,"remaining":10`, // never charged
		"free=1":          `"consumers":[]`,          // no quota
		"no=such":         `"consumers":[]`,
	} {
		if code, body := get(t, service, "/quotas/usage?entry="+entry); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("GET ?entry=%s = %d %s, want %s in it", entry, code, body, want)
		}
	}
	if _, body := get(t, service, "/quotas/usage?limit=1"); !strings.Contains(body, `"next":"`+hex.EncodeToString(alice.ID[:])) {
		t.Errorf("a full page does not name the next: %s", body)
	}
	for _, query := range []string{"limit=0", "limit=x", "after=zz", "entry=alice", "domain=other"} {
		if code, body := get(t, service, "/quotas/usage?"+query); code != http.StatusBadRequest {
			t.Errorf("GET ?%s = %d %s, want 400", query, code, body)
		}
	}
	s.err = errors.New("down")
	if len(s.asked) > 0 {
		t.Error("reading usage went the way of decisions")
	}
	if code, _ := get(t, service, "/quotas/usage"); code != http.StatusInternalServerError {
		t.Errorf("usage on a dead store = %d, want 500", code)
	}
}

func TestMetricsHaveBoundedLabels(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1, 1)}}}
	service := newService(t, s, testPolicy)
	for _, domain := range []string{"ingest", "no-such-1", "no-such-2"} {
		if _, err := service.ShouldRateLimit(t.Context(), &rlsv3.RateLimitRequest{
			Domain: domain, Descriptors: descriptors("consumer=alice"),
		}); err != nil {
			t.Fatal(err)
		}
	}
	_, body := get(t, service, "/metrics")
	for _, want := range []string{
		`weir_decisions_total{domain="ingest",outcome="allowed"} 1`,
		`weir_decisions_total{domain="_unknown",outcome="allowed"} 2`,
		`weir_unmatched_descriptors_total{domain="_unknown"} 2`,
	} {
		if !strings.Contains(body, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	if strings.Contains(body, "no-such") || strings.Contains(body, "alice") {
		t.Error("a client's value is a label")
	}
}

func TestNewNamesWhatIsMissing(t *testing.T) {
	t.Parallel()

	_, err := ratelimitsvc.New(ratelimitsvc.Config{})
	for _, field := range []string{"Policies", "Decider", "Usage", "Ping", "Now", "Logger", "Registry"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("New of nothing = %v, want %s in it", err, field)
		}
	}
}

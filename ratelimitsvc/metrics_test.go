package ratelimitsvc_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/ratelimitsvc"
)

const quotaPolicy = `
domain: test
descriptors:
  - key: consumer
    value: alice
    quota: {daily: 10, monthly: 100}
  - key: consumer
    value: bob
    quota: {daily: 20}
  - key: consumer
    quota: {daily: 5}
  - key: path
    rate_limit: {unit: minute, requests_per_unit: 5}
  - key: tried
    shadow_mode: true
    quota: {daily: 1}
`

// lines collects a log, one record a line.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// records returns what was logged, of a level at least.
func (l *lines) records(t *testing.T) []map[string]any {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	var records []map[string]any
	for line := range strings.Lines(l.text.String()) {
		record := map[string]any{}
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Fatal(err)
		}
		records = append(records, record)
	}
	return records
}

func logTo(l *lines) func(*ratelimitsvc.Config) {
	return func(c *ratelimitsvc.Config) { c.Logger = slog.New(slog.NewJSONHandler(l, nil)) }
}

// recorded is one call of a Recorder.
type recorded struct {
	Consumer string
	Refused  bool
	Units    int64
}

type recorder struct{ calls []recorded }

func (r *recorder) Record(c policy.Consumer, refused bool, units int64, _ time.Time) {
	r.calls = append(r.calls, recorded{Consumer: c.Entries[0].Value, Refused: refused, Units: units})
}

// The metering of quotas: denials by consumer where the policy names it, history of each
// decision, a log record of each refusal with its consumer.
func TestQuotaMetering(t *testing.T) {
	t.Parallel()

	var log lines
	history := &recorder{}
	s := &store{}
	service := newService(t, s, quotaPolicy, logTo(&log), allowed(policy.Client{Refunds: true}),
		func(c *ratelimitsvc.Config) { c.History = history })
	call := func(cost uint32, back bool, verdict policy.Verdict, texts ...string) {
		t.Helper()
		s.verdict = verdict
		req := request(cost, texts...)
		if back {
			refund(req.GetDescriptors())
		}
		if _, err := service.ShouldRateLimit(fromLoopback(t), req); err != nil {
			t.Fatal(err)
		}
	}
	quotas := func(states ...policy.QuotaState) []policy.QuotaState { return states }
	call(3, false, policy.Verdict{Allowed: true, Quotas: quotas(reservation(-1, 3, 3))}, "consumer=alice")
	call(4, false, policy.Verdict{Quotas: quotas(reservation(1, 4, 100))}, "consumer=alice")
	call(5, false, policy.Verdict{Quotas: quotas(reservation(0, 5))}, "consumer=carol")
	call(1, false, policy.Verdict{Quotas: quotas(reservation(0, 5))}, "consumer=dave")
	call(2, true, policy.Verdict{Allowed: true, Quotas: quotas(reservation(-1, 1, 1))}, "consumer=alice")
	// Refused by another limit of the request: the consumer sent it, and it was refused.
	call(2, false, policy.Verdict{Quotas: quotas(reservation(-1, 1), reservation(0, 5))}, "consumer=bob", "path=/")
	// Neither a limit in shadow nor a rate limit is anybody's quota.
	call(1, false, policy.Verdict{Allowed: true, Quotas: quotas(reservation(-1, 5)), Shadows: []policy.Verdict{{Quotas: quotas(reservation(0, 1))}}}, "path=/", "tried=eve")

	want := []recorded{
		{"alice", false, 3}, {"alice", true, 4}, {"carol", true, 5}, {"dave", true, 1}, {"alice", false, -2}, {"bob", true, 2},
	}
	if diff := cmp.Diff(want, history.calls); diff != "" {
		t.Errorf("the history differs (-want +got):\n%s", diff)
	}
	_, metrics := get(t, service, "/metrics")
	for _, want := range []string{
		`weir_quota_denied_total{budget="monthly",consumer="consumer=alice",domain="test"} 1`,
		`weir_quota_denied_total{budget="daily",consumer="_other",domain="test"} 2`,
		`weir_shadow_denied_total{domain="test",limit="tried"} 1`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	for _, secret := range []string{"carol", "dave", "eve"} {
		if strings.Contains(metrics, secret) {
			t.Errorf("a client's value, %s, is a label", secret)
		}
	}
	var refused []string
	for _, r := range log.records(t) {
		if r["rate_limited"] == true {
			consumer, _ := r["consumer"].(string)
			refused = append(refused, consumer)
		}
	}
	if diff := cmp.Diff([]string{"consumer=alice", "consumer=carol", "consumer=dave", "consumer=bob"}, refused); diff != "" {
		t.Errorf("consumers of refusals in the log differ (-want +got):\n%s", diff)
	}
}

// A consumer that the policy names and the store does not know, and the counter that
// consumers share: told of, and counted.
func TestInertAndOverflow(t *testing.T) {
	t.Parallel()

	var log lines
	s := &store{verdict: policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{{Unknown: true}}}}
	service := newService(t, s, quotaPolicy, logTo(&log))
	for range 3 {
		if got := ask(t, service, request(1, "consumer=alice")); got.GetOverallCode() != rlsv3.RateLimitResponse_OK {
			t.Fatalf("an inert quota: %v", got)
		}
	}
	overflow := reservation(0, 5)
	overflow.Overflow = true
	s.verdict = policy.Verdict{Quotas: []policy.QuotaState{overflow}}
	for range 3 {
		if got := ask(t, service, request(1, "consumer=new")); got.GetOverallCode() != rlsv3.RateLimitResponse_OVER_LIMIT {
			t.Fatalf("a full shared counter: %v", got)
		}
	}
	_, metrics := get(t, service, "/metrics")
	for _, want := range []string{`weir_quota_inert_total{domain="test"} 3`, `weir_quota_overflow_total{domain="test"} 3`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	inert, overflowed := 0, 0
	for _, r := range log.records(t) {
		message, _ := r["msg"].(string)
		if strings.Contains(message, "inert") {
			inert++
		}
		if strings.Contains(message, "share a counter") {
			overflowed++
		}
	}
	if inert != 1 || overflowed != 1 {
		t.Errorf("%d lines of inert quotas, %d of the overflow, want 1 of each", inert, overflowed)
	}
}

// An outage is one line a second, with the number of those that were held back, and a
// client that went away is no outage.
func TestOutageLog(t *testing.T) {
	t.Parallel()

	var log lines
	now := noon
	s := &store{err: errDown}
	service := newService(t, s, kindsPolicy, logTo(&log), func(c *ratelimitsvc.Config) { c.Now = func() time.Time { return now } })
	ask := func(ctx context.Context, times int) {
		for range times {
			_, _ = service.ShouldRateLimit(ctx, request(1, "path=/"))
		}
	}
	ask(t.Context(), 100)
	now = now.Add(time.Second)
	ask(t.Context(), 100)
	now = now.Add(-time.Hour) // a clock that is set back silences nothing
	ask(t.Context(), 1)
	records := log.records(t)
	if len(records) != 3 || records[0]["suppressed"] != nil || records[1]["suppressed"] != 99.0 || records[2]["suppressed"] != 99.0 {
		t.Fatalf("logged %v, want 3 lines, of which two say that 99 were held back", records)
	}

	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := service.ShouldRateLimit(gone, request(1, "path=/")); status.Code(err) != codes.Canceled {
		t.Errorf("a canceled call: %v", err)
	}
	_, metrics := get(t, service, "/metrics")
	for _, want := range []string{"weir_store_errors_total 201", `outcome="canceled"} 1`, `outcome="unavailable"} 201`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	if n := len(log.records(t)); n != 3 {
		t.Errorf("a canceled call was logged: %d lines", n)
	}
}

// Whatever a client sends, a log line has a bounded length.
func TestLogLinesAreBounded(t *testing.T) {
	t.Parallel()

	var log lines
	s := &store{}
	for range 64 {
		s.verdict.Quotas = append(s.verdict.Quotas, reservation(0, 5))
	}
	req := &rlsv3.RateLimitRequest{Domain: "test"}
	for range 64 {
		req.Descriptors = append(req.Descriptors, descriptors("consumer="+strings.Repeat("\u00e9", 10_000))...)
	}
	service := newService(t, s, quotaPolicy, logTo(&log))
	ask(t, service, req)
	req.Domain = strings.Repeat("d", 100_000)
	req.Descriptors[0].Entries = make([]*ratelimitv3.RateLimitDescriptor_Entry, 65)
	if _, err := service.ShouldRateLimit(t.Context(), req); err == nil {
		t.Fatal("65 entries: no error")
	}
	if got := log.records(t); len(got) != 2 {
		t.Errorf("%d lines, want 2", len(got))
	}
	for line := range strings.Lines(log.text.String()) {
		if len(line) > 4096 {
			t.Errorf("a line has %d bytes", len(line))
		}
	}
}

// The gauges of named consumers come from the last reading, and are gone while the store
// does not answer.
func TestUsageGauges(t *testing.T) {
	t.Parallel()

	p, err := policy.Parse("test.yaml", []byte(quotaPolicy))
	if err != nil {
		t.Fatal(err)
	}
	s := &store{}
	for i, c := range p.NamedConsumers() {
		s.known = append(s.known, policy.ConsumerUsage{ID: c.ID, Domain: "test", Entries: c.Entries, Used: []int64{int64(i + 3), 40}})
	}
	m, _ := p.Match(policy.Descriptor{{Key: "consumer", Value: "carol"}})
	s.known = append(s.known, policy.ConsumerUsage{ID: m.Consumer().ID, Entries: m.Consumer().Entries, Used: []int64{1, 1}})
	service := newService(t, s, quotaPolicy)
	service.RefreshUsage(t.Context())
	_, metrics := get(t, service, "/metrics")
	for _, want := range []string{
		`weir_quota_used{budget="daily",consumer="consumer=alice",domain="test"} 3`,
		`weir_quota_used{budget="monthly",consumer="consumer=alice",domain="test"} 40`,
		`weir_quota_limit{budget="monthly",consumer="consumer=alice",domain="test"} 100`,
		`weir_quota_used{budget="daily",consumer="consumer=bob",domain="test"} 4`,
		`weir_quota_limit{budget="daily",consumer="consumer=bob",domain="test"} 20`,
	} {
		if !strings.Contains(metrics, want) {
			t.Errorf("/metrics lacks %s", want)
		}
	}
	if strings.Contains(metrics, "carol") {
		t.Error("a consumer that the policy does not name has a gauge")
	}
	s.err = errDown
	service.RefreshUsage(t.Context())
	if _, metrics := get(t, service, "/metrics"); strings.Contains(metrics, "weir_quota_used") {
		t.Error("there are gauges while the store does not answer")
	}
}

// Run takes the first reading at once.
func TestRunReadsUsage(t *testing.T) {
	t.Parallel()

	p, err := policy.Parse("test.yaml", []byte(quotaPolicy))
	if err != nil {
		t.Fatal(err)
	}
	alice := p.NamedConsumers()[0]
	s := &store{known: []policy.ConsumerUsage{{ID: alice.ID, Entries: alice.Entries, Used: []int64{3, 40}}}}
	service := newService(t, s, quotaPolicy)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- service.Run(ctx) }()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		if _, body := get(t, service, "/metrics"); strings.Contains(body, "weir_quota_used") {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("there is no reading")
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// The consumers that the policies name are enrolled, and again
// when the store has forgotten one; a failure is tried again, and is no reason to be unhealthy.
func TestEnrolment(t *testing.T) {
	t.Parallel()

	var mu sync.Mutex
	var enrolled []string
	failures := 1
	s := &store{}
	service := newService(t, s, quotaPolicy, func(c *ratelimitsvc.Config) {
		c.Enrol = func(_ context.Context, consumers []policy.Consumer, _ time.Time) error {
			mu.Lock()
			defer mu.Unlock()
			if failures > 0 {
				failures--
				return errDown
			}
			for _, consumer := range consumers {
				enrolled = append(enrolled, consumer.Entries[0].Value)
			}
			return nil
		}
	})
	check := func(want string) {
		t.Helper()
		service.CheckHealth(t.Context())
		service.EnrolAgain(t.Context())
		if code, _ := get(t, service, "/healthcheck"); code != http.StatusOK {
			t.Errorf("GET /healthcheck = %d", code)
		}
		mu.Lock()
		defer mu.Unlock()
		if got := strings.Join(enrolled, " "); got != want {
			t.Errorf("enrolled %q, want %q", got, want)
		}
	}
	check("") // it failed
	check("alice bob")
	check("alice bob") // and not at each check
	s.verdict = policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{{Unknown: true}}}
	ask(t, service, request(1, "consumer=alice"))
	check("alice bob alice bob")
	check("alice bob alice bob")

	// While the store does not answer there is no use in trying.
	ask(t, service, request(1, "consumer=alice"))
	s.err = errDown
	service.CheckHealth(t.Context())
	service.EnrolAgain(t.Context())
	s.err = nil
	service.CheckHealth(t.Context())
	mu.Lock()
	got := strings.Join(enrolled, " ")
	mu.Unlock()
	if got != "alice bob alice bob" {
		t.Errorf("enrolled %q while the store did not answer", got)
	}
	check("alice bob alice bob alice bob")
}

// An enrolment that hangs holds up no check of the store's health; and what stops says that
// it drains, not that the store does not answer.
func TestHealthBesideEnrolment(t *testing.T) {
	t.Parallel()

	var failing atomic.Bool
	enrolling, release := make(chan struct{}, 1), make(chan struct{})
	service := newService(t, &store{}, quotaPolicy, func(c *ratelimitsvc.Config) {
		c.Enrol = func(context.Context, []policy.Consumer, time.Time) error {
			select {
			case enrolling <- struct{}{}:
			default:
			}
			<-release
			return nil
		}
		c.Ping = func(context.Context) error {
			if failing.Load() {
				return errDown
			}
			return nil
		}
	})
	health := func(want int, says string) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			code, body := get(t, service, "/healthcheck")
			if code == want && strings.TrimSpace(body) == says {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("GET /healthcheck = %d %s, want %d %s", code, body, want, says)
			}
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- service.Run(ctx) }()
	<-enrolling
	health(http.StatusOK, "OK")
	failing.Store(true)
	health(http.StatusInternalServerError, "the store does not answer")
	failing.Store(false)
	health(http.StatusOK, "OK")
	cancel()
	health(http.StatusInternalServerError, "draining")
	close(release)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Of two consumers on one node of the policy, the log names the one whose quota refused.
func TestLogNamesWhoWasRefused(t *testing.T) {
	t.Parallel()

	var log lines
	s := &store{verdict: policy.Verdict{Quotas: []policy.QuotaState{reservation(-1, 1), reservation(0, 5)}}}
	ask(t, newService(t, s, quotaPolicy, logTo(&log)), request(1, "consumer=carol", "consumer=dave"))
	records := log.records(t)
	if len(records) != 1 || records[0]["consumer"] != "consumer=dave" {
		t.Errorf("logged %v, want consumer=dave in it", records)
	}
}

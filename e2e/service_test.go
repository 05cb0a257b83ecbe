package e2e_test

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
	"github.com/weir-dev/weir/ratelimitsvc"
	"github.com/weir-dev/weir/store"
)

// A counterService is the rate limit service on a real store, with a clock of its own.
type counterService struct {
	t       *testing.T
	domain  string // of what is asked
	now     time.Time
	store   *store.Store
	batcher *store.Batcher
	service *ratelimitsvc.Service
}

// newCounterService starts the service on a database of its own, with policies, of which
// one is of the domain "test". Clients from the loopback may do all that there is.
func newCounterService(t *testing.T, texts ...string) *counterService {
	t.Helper()
	config, err := store.PoolConfig(pgtest.NewDatabase(t))
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 4
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	c := &counterService{t: t, domain: "test", now: time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC), store: store.NewStore(pool)}
	c.batcher = store.NewBatcher(c.store, store.BatcherConfig{})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.batcher.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	c.apply(texts...)
	return c
}

// apply puts policies in force, and no others.
func (c *counterService) apply(texts ...string) {
	c.t.Helper()
	var policies []*policy.Policy
	for _, text := range texts {
		p, err := policy.Parse("test.yaml", []byte(text))
		if err != nil {
			c.t.Fatal(err)
		}
		policies = append(policies, p)
	}
	set, err := policy.NewSet(policies...)
	if err != nil {
		c.t.Fatal(err)
	}
	clients, err := policy.ParseClients("clients.yaml", []byte("clients: [{network: 127.0.0.1, refunds: true, overrides: true}]"))
	if err != nil {
		c.t.Fatal(err)
	}
	c.service, err = ratelimitsvc.New(ratelimitsvc.Config{
		Policies: set, Decider: c.batcher, Usage: c.store, Clients: clients,
		Ping: func(context.Context) error { return nil },
		Now:  func() time.Time { return c.now }, Logger: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(),
	})
	if err != nil {
		c.t.Fatal(err)
	}
}

// hits makes a descriptor from "key=value/key=value", with a cost of its own: negative for a
// refund.
func hits(cost int64, text string) *ratelimitv3.RateLimitDescriptor {
	d := &ratelimitv3.RateLimitDescriptor{HitsAddend: wrapperspb.UInt64(uint64(max(cost, -cost))), IsNegativeHits: cost < 0}
	for entry := range strings.SplitSeq(text, "/") {
		key, value, _ := strings.Cut(entry, "=")
		d.Entries = append(d.Entries, &ratelimitv3.RateLimitDescriptor_Entry{Key: key, Value: value})
	}
	return d
}

func (c *counterService) call(receipt string, ds ...*ratelimitv3.RateLimitDescriptor) (*rlsv3.RateLimitResponse, error) {
	ctx := peer.NewContext(c.t.Context(), &peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}})
	if receipt != "" {
		ctx = metadata.NewIncomingContext(ctx, metadata.Pairs(ratelimitsvc.ReceiptKey, receipt))
	}
	return c.service.ShouldRateLimit(ctx, &rlsv3.RateLimitRequest{Domain: c.domain, Descriptors: ds})
}

// want asks, and compares the answer's code, and the code and remaining of each status.
func (c *counterService) want(want string, ds ...*ratelimitv3.RateLimitDescriptor) *rlsv3.RateLimitResponse {
	c.t.Helper()
	return c.wantWith("", want, ds...)
}

func (c *counterService) wantWith(receipt, want string, ds ...*ratelimitv3.RateLimitDescriptor) *rlsv3.RateLimitResponse {
	c.t.Helper()
	response, err := c.call(receipt, ds...)
	if err != nil {
		c.t.Fatal(err)
	}
	code := func(code rlsv3.RateLimitResponse_Code) string {
		return strings.TrimSuffix(code.String(), "_LIMIT")
	}
	parts := []string{code(response.GetOverallCode()) + ":"}
	for _, s := range response.GetStatuses() {
		parts = append(parts, code(s.GetCode()), strconv.FormatUint(uint64(s.GetLimitRemaining()), 10))
	}
	if got := strings.Join(parts, " "); got != want {
		c.t.Errorf("got  %s\nwant %s\n(%v)", got, want, response.GetResponseHeadersToAdd())
	}
	return response
}

func (c *counterService) retryAfter(response *rlsv3.RateLimitResponse) time.Duration {
	c.t.Helper()
	for _, h := range response.GetResponseHeadersToAdd() {
		if h.GetKey() == "retry-after" {
			seconds, err := strconv.Atoi(h.GetValue())
			if err != nil {
				c.t.Fatal(err)
			}
			return time.Duration(seconds) * time.Second
		}
	}
	return 0
}

func receiptOf(response *rlsv3.RateLimitResponse) string {
	return response.GetDynamicMetadata().GetFields()["weir"].GetStructValue().GetFields()["receipt"].GetStringValue()
}

const nodeOne = "3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e5f"

func TestC01ARefusalChargesNobody(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: site, rate_limit: {unit: hour, requests_per_unit: 100}}
`)
	c.want("OK: OK 0 OK 99", hits(1, "user=a"), hits(1, "site=s"))
	for range 49 {
		c.want("OVER: OVER 0 OK 99", hits(1, "user=a"), hits(1, "site=s"))
	}
}

func TestC02RefusedCostsAreNotCharged(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, "domain: test\ndescriptors:\n  - {key: a, rate_limit: {unit: hour, requests_per_unit: 5}}\n")
	c.want("OK: OK 2", hits(3, "a=1"))
	c.want("OVER: OVER 2", hits(4, "a=1"))
	c.want("OK: OK 1", hits(1, "a=1"))
}

func TestC03ZeroCostThroughTheService(t *testing.T) {
	t.Parallel()

	for kind, limit := range map[string]string{
		"rate_limit": "rate_limit: {unit: hour, requests_per_unit: 5}", "quota": "quota: {daily: 5}",
		"limiter": "limiter: {permits: 5, per: 1h}", "budget": "budget: {scope: ingest_node, per_second: 1, burst: 5}",
	} {
		c := newCounterService(t, "domain: test\ndescriptors:\n  - {key: a, "+limit+"}\n")
		a := "a=" + nodeOne
		t.Log(kind)
		c.want("OK: OK 5", hits(0, a))
		c.want("OK: OK 3", hits(2, a))
		c.want("OK: OK 3", hits(0, a))
		c.want("OK: OK 0", hits(3, a))
		c.want("OK: OK 0", hits(0, a))
		c.want("OVER: OVER 0", hits(1, a))
	}
}

// Refunds fill nothing above its ceiling, and make no row.
func TestC06C08RefundsThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: window, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: quota, quota: {daily: 10, monthly: 100}}
  - {key: limiter, limiter: {permits: 10, per: 1h}}
  - {key: budget, budget: {scope: ingest_node, per_second: 1, burst: 10}}
`)
	for _, key := range []string{"window", "quota", "limiter", "budget"} {
		d := key + "=" + nodeOne
		c.want("OK: OK 10", hits(-1000, d)) // never seen
		c.want("OK: OK 6", hits(4, d))
		c.want("OK: OK 9", hits(-3, d))
		c.want("OK: OK 10", hits(-50, d))
		c.want("OK: OK 10", hits(-(1<<62), d))
		c.want("OK: OK 0", hits(10, d))
		c.want("OVER: OVER 0", hits(1, d))
	}
}

// Nothing that a replica remembers keeps a refund from being seen by another.
func TestC07RefundIsSeenByAllReplicas(t *testing.T) {
	t.Parallel()

	const text = "domain: test\ndescriptors:\n  - {key: a, quota: {monthly: 1}}\n"
	c := newCounterService(t, text)
	other := *c
	other.batcher = store.NewBatcher(c.store, store.BatcherConfig{})
	go func() { _ = other.batcher.Run(t.Context()) }()
	other.apply(text)

	c.want("OK: OK 0", hits(1, "a=1"))
	other.want("OVER: OVER 0", hits(1, "a=1"))
	c.want("OK: OK 1", hits(-1, "a=1"))
	other.want("OK: OK 0", hits(1, "a=1"))
}

func TestC13CostsOfTheirOwn(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: requests, rate_limit: {unit: minute, requests_per_unit: 100}}
  - {key: bytes, rate_limit: {unit: minute, requests_per_unit: 1048576}}
`)
	c.want("OK: OK 99 OK 1046528", hits(1, "requests=a"), hits(2048, "bytes=a"))
}

// Reserve and settle, across midnight: with its receipt the refund reaches the day that was
// charged, and without it would free a day that was not.
func TestC14RefundReachesItsWindow(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, "domain: test\ndescriptors:\n  - {key: a, quota: {daily: 100, monthly: 1000}}\n")
	c.now = time.Date(2026, 12, 15, 23, 59, 59, 0, time.UTC)
	receipt := receiptOf(c.want("OK: OK 0", hits(100, "a=1")))
	c.now = c.now.Add(2 * time.Second)
	c.want("OK: OK 40", hits(60, "a=1"))
	c.wantWith(receipt, "OK: OK 903", hits(-63, "a=1")) // the month's, which has not passed
	c.want("OK: OK 40", hits(0, "a=1"))
	usage, err := c.store.Consumers(t.Context(), policy.ConsumersQuery{
		Domain: "test", Limit: 1, Units: []quota.Unit{quota.Day, quota.Month}, Now: c.now.Add(-2 * time.Second),
	})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int64{37, 97}, usage[0].Used); diff != "" {
		t.Errorf("used of the day and the month that were charged (-want +got):\n%s", diff)
	}
}

// PEERS C18, and its brothers: no values run into each other, in one domain.
func TestC18CountersThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: a_b, rate_limit: {unit: hour, requests_per_unit: 1}}
  - key: a
    value: x
    descriptors: [{key: b, rate_limit: {unit: hour, requests_per_unit: 1}}]
`)
	for _, d := range []string{"a=b_c", "a_b=c", "a=b", "a_b=", "a=\x00", "a=\n", "a=%s", "a='", "a=a|b", "a=1.5:2", "a=x/b=1"} {
		c.want("OK: OK 0", hits(1, d))
		c.want("OVER: OVER 0", hits(1, d))
	}
}

// A limit that is edited under use is right at once, and no usage is lost.
func TestC33EditedLimits(t *testing.T) {
	t.Parallel()

	for _, limit := range []string{
		"rate_limit: {unit: day, requests_per_unit: %d}", "quota: {daily: %d}",
	} {
		text := func(n int) string {
			return "domain: test\ndescriptors:\n  - {key: a, " + fmt.Sprintf(limit, n) + "}\n"
		}
		c := newCounterService(t, text(10))
		c.want("OK: OK 3", hits(7, "a=1"))
		c.apply(text(5))
		c.want("OVER: OVER 0", hits(1, "a=1"))
		c.apply(text(20))
		c.want("OK: OK 12", hits(1, "a=1"))
	}
}

// An edited unit counts anew: the hour's count is not the day's.
func TestC34EditedUnit(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, "domain: test\ndescriptors:\n  - {key: a, rate_limit: {unit: hour, requests_per_unit: 10}}\n")
	c.now = time.Date(2026, 11, 30, 0, 30, 0, 0, time.UTC)
	c.want("OK: OK 3", hits(7, "a=1"))
	c.apply("domain: test\ndescriptors:\n  - {key: a, rate_limit: {unit: day, requests_per_unit: 10}}\n")
	c.want("OK: OK 9", hits(1, "a=1"))
	c.apply("domain: test\ndescriptors:\n  - {key: a, quota: {daily: 10}}\n")
	c.want("OK: OK 9", hits(1, "a=1"))
}

// PEERS C38: after exactly Retry-After the same request is admitted when nobody else
// spends, whatever refused it and however often it names a limit.
func TestC38RetryAfterKeepsItsWord(t *testing.T) {
	t.Parallel()

	const text = `
domain: test
descriptors:
  - {key: budget, budget: {scope: ingest_node, per_second: 3.7, burst: 100}}
  - {key: limiter, limiter: {permits: 7, per: 1100ms, burst: 20}}
  - {key: window, rate_limit: {unit: minute, requests_per_unit: 20}}
  - {key: quota, quota: {hourly: 30, daily: 50}}
  - {key: soft, quota_mode: true, rate_limit: {unit: minute, requests_per_unit: 3}}
  - {key: softer, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 3}}
`
	c := newCounterService(t, text)
	c.now = c.now.Add(12345678 * time.Microsecond)
	refusals := 0
	for i := range int64(60) {
		cost := i*7%13 + 1
		var ds []*ratelimitv3.RateLimitDescriptor
		for k, key := range []string{"budget=" + nodeOne, "limiter=a", "window=a", "quota=a"} {
			if i>>k&1 == 1 {
				ds = append(ds, hits(cost, key))
			}
			if i%5 == 4 && i>>k&1 == 1 {
				ds = append(ds, hits(2, key)) // twice
			}
		}
		if i%3 == 0 {
			ds = append(ds, hits(2, "soft=a"), hits(2, "softer=a"))
		}
		if len(ds) == 0 {
			continue
		}
		response, err := c.call("", ds...)
		if err != nil {
			t.Fatal(err)
		}
		if response.GetOverallCode() == rlsv3.RateLimitResponse_OK {
			continue
		}
		refusals++
		wait := c.retryAfter(response)
		if wait < time.Second {
			t.Fatalf("request %d: Retry-After %v of %v", i, wait, response)
		}
		c.now = c.now.Add(wait)
		again, err := c.call("", ds...)
		if err != nil || again.GetOverallCode() != rlsv3.RateLimitResponse_OK {
			t.Errorf("request %d, after %v: %v, %v", i, wait, again, err)
		}
	}
	if refusals < 10 {
		t.Errorf("only %d refusals were tried", refusals)
	}
}

// A limit in shadow counts as it would, beside what is enforced, and refuses nothing.
func TestC47ShadowsThroughTheService(t *testing.T) {
	t.Parallel()

	text := func(shadow bool) string {
		return fmt.Sprintf(`
domain: test
descriptors:
  - {key: a, name: strict, shadow_mode: %t, quota: {daily: 3}}
  - {key: b, rate_limit: {unit: day, requests_per_unit: 100}}
`, shadow)
	}
	c := newCounterService(t, text(true))
	for i := range 5 {
		response := c.want(fmt.Sprintf("OK: OK 0 OK %d", 99-i), hits(1, "a=1"), hits(1, "b=1"))
		denied := response.GetDynamicMetadata().GetFields()["weir"].GetStructValue().GetFields()["shadow_denied"].GetListValue().AsSlice()
		if want := i >= 3; (len(denied) == 1 && denied[0] == "strict") != want {
			t.Errorf("request %d: shadow_denied = %v", i, denied)
		}
	}
	// Out of the shadow, its count is what it was.
	c.apply(text(false))
	c.want("OVER: OVER 0 OK 95", hits(1, "a=1"), hits(1, "b=1"))
}

// PEERS C.3: quota_mode refuses only when all of a request's are exhausted, and what is
// exhausted is left out.
func TestQuotaModeThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: a, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 1}}
  - {key: b, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 2}}
  - {key: c, rate_limit: {unit: day, requests_per_unit: 100}}
`)
	ds := []*ratelimitv3.RateLimitDescriptor{hits(1, "a=1"), hits(1, "b=1"), hits(1, "c=1")}
	c.want("OK: OK 0 OK 1 OK 99", ds...)
	c.want("OK: OVER 0 OK 0 OK 98", ds...)
	c.want("OVER: OVER 0 OVER 0 OK 98", ds...)
}

// What an exhausted limit with quota_mode was not charged, its refund does not give back.
func TestQuotaModeRefundsThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: a, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 10}}
  - {key: b, quota_mode: true, rate_limit: {unit: day, requests_per_unit: 100}}
`)
	receipt := receiptOf(c.want("OK: OK 0 OK 90", hits(10, "a=1"), hits(10, "b=1")))
	for range 2 {
		overflow := receiptOf(c.want("OK: OVER 0 OK 80", hits(10, "a=1"), hits(10, "b=1")))
		c.wantWith(overflow, "OK: OK 0 OK 90", hits(-10, "a=1"), hits(-10, "b=1"))
		c.want("OK: OVER 0 OK 90", hits(1, "a=1"), hits(0, "b=1"))
	}
	c.wantWith(receipt, "OK: OK 4 OK 94", hits(-4, "a=1"), hits(-4, "b=1"))
}

func TestReplacedAndUnlimitedThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: staff, rate_limit: {unlimited: true, replaces: [{name: everybody}]}}
  - {key: user, rate_limit: {name: everybody, unit: day, requests_per_unit: 2}}
`)
	c.want("OK: OK 1", hits(1, "user=a"))
	for range 3 {
		c.want("OK: OK 4294967295 OK 0", hits(1, "staff=yes"), hits(1, "user=a"))
	}
	c.want("OK: OK 0", hits(1, "user=a"))
	c.want("OVER: OVER 0", hits(1, "user=a"))
}

// A limit that stands twice in a request is charged twice, in order, or not at all.
func TestTheSameLimitTwiceThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: window, rate_limit: {unit: hour, requests_per_unit: 10}}
  - {key: quota, quota: {daily: 10}}
  - {key: limiter, limiter: {permits: 10, per: 1h}}
  - {key: budget, budget: {scope: ingest_node, per_second: 1, burst: 10}}
`)
	for _, key := range []string{"window", "quota", "limiter", "budget"} {
		d := key + "=" + nodeOne
		c.want("OK: OK 3 OK 3", hits(4, d), hits(3, d))
		if wait := c.retryAfter(c.want("OVER: OK 3 OVER 3", hits(2, d), hits(2, d))); wait < time.Second {
			t.Errorf("%s: Retry-After %v", key, wait)
		}
		if wait := c.retryAfter(c.want("OVER: OVER 3 OVER 3", hits(6, d), hits(6, d))); wait != 0 {
			t.Errorf("%s: Retry-After %v for what never fits", key, wait)
		}
		c.want("OK: OK 0 OK 0 OK 0", hits(1, d), hits(1, d), hits(1, d))
	}
}

func TestC05OverridesThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, "domain: test\ndescriptors:\n  - {key: a, rate_limit: {unit: day, requests_per_unit: 100}}\n")
	own := hits(2, "a=1")
	own.Limit = &ratelimitv3.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 5, Unit: typev3.RateLimitUnit_DAY}
	c.want("OK: OK 3", own)
	c.want("OK: OK 1", own)
	c.want("OVER: OVER 1", own)
	c.want("OK: OK 99", hits(1, "a=1"))
}

// PEERS C57, C58: a new window is fresh, whatever the last one held.
func TestC57C58FreshWindows(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: day, quota: {daily: 10}}
  - {key: minute, rate_limit: {unit: minute, requests_per_unit: 10}}
`)
	c.now = time.Date(2026, 11, 29, 12, 0, 58, 700_000_000, time.UTC)
	c.want("OK: OK 3 OK 3", hits(7, "day=1"), hits(7, "minute=1"))
	c.now = time.Date(2026, 11, 29, 12, 1, 0, 100_000_000, time.UTC)
	c.want("OK: OK 2 OK 9", hits(1, "day=1"), hits(1, "minute=1"))
	c.now = time.Date(2026, 11, 30, 8, 0, 0, 0, time.UTC)
	c.want("OK: OK 8 OK 8", hits(2, "day=1"), hits(2, "minute=1"))
}

// PEERS P04, P05: a hundred first requests at once, through the batcher.
func TestP04P05ConcurrentFirstRequests(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: window, rate_limit: {unit: day, requests_per_unit: 10}}
  - {key: quota, quota: {daily: 10, monthly: 10}}
  - {key: limiter, limiter: {permits: 10, per: 24h}}
  - {key: budget, budget: {scope: ingest_node, per_second: 0.01, burst: 10}}
`)
	for _, key := range []string{"window", "quota", "limiter", "budget"} {
		var admitted atomic.Int64
		var callers sync.WaitGroup
		for range 100 {
			callers.Go(func() {
				response, err := c.call("", hits(1, key+"="+nodeOne))
				if err != nil {
					t.Error(err)
				}
				if response.GetOverallCode() == rlsv3.RateLimitResponse_OK {
					admitted.Add(1)
				}
			})
		}
		callers.Wait()
		if got := admitted.Load(); got != 10 {
			t.Errorf("%s: %d of 100 admitted, want 10", key, got)
		}
	}
}

// PEERS T01, T04, T05, T07: buckets in the terms of answers.
func TestBucketsThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: slow, limiter: {permits: 1, per: 10s, burst: 1}}
  - {key: fast, limiter: {permits: 5000, per: 1s}}
  - {key: three, limiter: {permits: 3, per: 1s}}
  - {key: hundred, limiter: {permits: 100, per: 1m}}
`)
	start := c.now
	c.want("OK: OK 0", hits(1, "slow=1"))
	first := time.Duration(0)
	for i := range 12 {
		c.now = start.Add(time.Duration(i+1) * 900 * time.Millisecond)
		response, err := c.call("", hits(1, "slow=1"))
		if err != nil {
			t.Fatal(err)
		}
		if response.GetOverallCode() == rlsv3.RateLimitResponse_OK && first == 0 {
			first = c.now.Sub(start)
		}
	}
	if first != 10800*time.Millisecond {
		t.Errorf("T01: the next token came after %v, want the first poll after 10s", first)
	}
	response := c.want("OVER: OVER 5000", hits(5001, "fast=1"))
	if wait := c.retryAfter(response); wait != 0 {
		t.Errorf("more than the bucket holds: Retry-After %v", wait)
	}
	c.want("OK: OK 0", hits(5000, "fast=1"))
	if wait := c.retryAfter(c.want("OVER: OVER 0", hits(1, "fast=1"))); wait != time.Second {
		t.Errorf("T04: Retry-After %v, want 1s", wait)
	}
	start, admitted := c.now, 0
	for i := range 600 {
		c.now = start.Add(time.Duration(i) * 100 * time.Millisecond)
		response, err := c.call("", hits(1, "three=1"))
		if err != nil {
			t.Fatal(err)
		}
		if response.GetOverallCode() == rlsv3.RateLimitResponse_OK {
			admitted++
		}
	}
	if admitted > 3*60+3 || admitted < 3*59 {
		t.Errorf("T05: %d admitted in a minute of 3 a second", admitted)
	}
	c.now = time.Date(2026, 11, 30, 13, 0, 59, 0, time.UTC)
	c.want("OK: OK 0", hits(100, "hundred=1"))
	c.now = c.now.Add(time.Second)
	c.want("OK: OK 0", hits(1, "hundred=1")) // T07: what came back in that second
	c.want("OVER: OVER 0", hits(1, "hundred=1"))
}

// A consumer that the policy names is unknown until the policy enrols it; until then its
// quota is inert.
func TestInertUntilEnrolled(t *testing.T) {
	t.Parallel()

	const text = "domain: test\ndescriptors:\n  - {key: a, value: alice, quota: {daily: 2}}\n"
	c := newCounterService(t, text)
	for range 5 {
		c.want("OK: OK 0", hits(1, "a=alice"))
	}
	p, err := policy.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if err := c.store.Enrol(t.Context(), p.NamedConsumers(), c.now); err != nil {
		t.Fatal(err)
	}
	c.want("OK: OK 1", hits(1, "a=alice"))
	c.want("OK: OK 0", hits(1, "a=alice"))
	c.want("OVER: OVER 0", hits(1, "a=alice"))
}

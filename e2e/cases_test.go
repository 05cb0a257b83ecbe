package e2e_test

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/store"
)

// headersOf is what the client is told, as "key=value key=value".
func headersOf(response *rlsv3.RateLimitResponse) string {
	var texts []string
	for _, h := range response.GetResponseHeadersToAdd() {
		texts = append(texts, h.GetKey()+"="+h.GetValue())
	}
	return strings.Join(texts, " ")
}

func (c *counterService) wantHeaders(response *rlsv3.RateLimitResponse, want string) {
	c.t.Helper()
	if got := headersOf(response); got != want {
		c.t.Errorf("headers\n got %s\nwant %s", got, want)
	}
}

// PEERS C03: the request's cost of 0 is that of an unset field, and means 1.
func TestC03UnsetCostIsOne(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, "domain: test\ndescriptors:\n  - {key: a, rate_limit: {unit: hour, requests_per_unit: 5}}\n")
	unset := hits(0, "a=1")
	unset.HitsAddend = nil
	c.want("OK: OK 4", unset)
	c.want("OK: OK 4", hits(0, "a=1"))
}

// PEERS C05: what is no request is named, and the next one is served.
func TestC05StructureThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, "domain: test\ndescriptors:\n  - {key: a, rate_limit: {unit: day, requests_per_unit: 100}}\n")
	override := func(unit typev3.RateLimitUnit) *ratelimitv3.RateLimitDescriptor {
		d := hits(1, "a=1")
		d.Limit = &ratelimitv3.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 5, Unit: unit}
		return d
	}
	for i, test := range []struct {
		says string
		ds   []*ratelimitv3.RateLimitDescriptor
	}{
		{"descriptors[1].limit.unit", []*ratelimitv3.RateLimitDescriptor{hits(1, "a=1"), override(typev3.RateLimitUnit_UNKNOWN)}},
		{"descriptors[0].limit.unit", []*ratelimitv3.RateLimitDescriptor{override(99)}},
		{"descriptors[0].limit.unit", []*ratelimitv3.RateLimitDescriptor{override(math.MinInt32)}},
		{"descriptors[0].entries", []*ratelimitv3.RateLimitDescriptor{{Entries: make([]*ratelimitv3.RateLimitDescriptor_Entry, 10_000)}}},
		{"descriptors", make([]*ratelimitv3.RateLimitDescriptor, 10_000)},
		{"descriptors", nil},
	} {
		_, err := c.call("", test.ds...)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), test.says+":") {
			t.Errorf("%v, want INVALID_ARGUMENT that names %s", err, test.says)
		}
		c.want(fmt.Sprintf("OK: OK %d", 99-i), hits(1, "a=1"))
	}
}

// PEERS C05, C24: a descriptor without entries, which Envoy sends when a header is absent that
// all of its actions skip, is no error: a client would get rid of all limits by leaving out a
// header. It matches nothing, and the others hold.
func TestC05C24NoEntries(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, "domain: test\ndescriptors:\n  - {key: a, rate_limit: {unit: day, requests_per_unit: 2}}\n")
	c.want("OK: OK 0 OK 1 OK 0", &ratelimitv3.RateLimitDescriptor{}, hits(1, "a=1"), nil)
	c.want("OK: OK 0", &ratelimitv3.RateLimitDescriptor{Entries: []*ratelimitv3.RateLimitDescriptor_Entry{nil}})
	c.want("OK: OK 0", &ratelimitv3.RateLimitDescriptor{IsNegativeHits: true})
	c.want("OK: OK 0 OK 0", &ratelimitv3.RateLimitDescriptor{}, hits(1, "a=1"))
	c.want("OVER: OK 0 OVER 0", &ratelimitv3.RateLimitDescriptor{}, hits(1, "a=1"))
}

// PEERS C12: a cost that turns out larger than the limit is taken as far as the limit holds
// it; what is left is then 0, and never what 32 bits make of a number below it, even if
// more is used than the limit allows. The debt ends with the window.
func TestC12CostAboveTheLimit(t *testing.T) {
	t.Parallel()

	text := func(limit int) string {
		return fmt.Sprintf("domain: test\nheaders: {style: delta}\ndescriptors:\n  - {key: a, quota: {daily: %d}}\n", limit)
	}
	c := newCounterService(t, text(1000))
	c.wantHeaders(c.want("OVER: OVER 1000", hits(1200, "a=1")),
		"x-ratelimit-limit=1000 x-ratelimit-remaining=1000 x-ratelimit-reset=43200") // it never fits
	c.want("OK: OK 0", hits(1000, "a=1"))
	c.apply(text(800))
	c.wantHeaders(c.want("OVER: OVER 0", hits(1, "a=1")),
		"retry-after=43200 x-ratelimit-limit=800 x-ratelimit-remaining=0 x-ratelimit-reset=43200")
	c.want("OK: OK 0", hits(0, "a=1"))
	c.now = c.now.Add(12 * time.Hour)
	c.want("OK: OK 799", hits(1, "a=1"))
}

// PEERS C15: what is charged and then given back, since it turned out not to count, is as
// if it had never been.
func TestC15SettledToNothing(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: window, rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: quota, quota: {daily: 3, monthly: 3}}
  - {key: limiter, limiter: {permits: 3, per: 1h}}
  - {key: budget, budget: {scope: secret_read_node, per_second: 1, burst: 3}}
`)
	for _, key := range []string{"window", "quota", "limiter", "budget"} {
		d := key + "=" + nodeOne
		for range 5 {
			receipt := receiptOf(c.want("OK: OK 2", hits(1, d)))
			c.wantWith(receipt, "OK: OK 3", hits(-1, d))
		}
		c.want("OK: OK 0", hits(3, d))
	}
}

// PEERS C16, C17: keys and values that look alike when they are joined are told apart.
func TestC16C17JoinedAlike(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: foo_bar, rate_limit: {unit: hour, requests_per_unit: 7}}
  - {key: a, value: b_c, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: a_b, value: c, rate_limit: {unit: hour, requests_per_unit: 2}}
`)
	c.want("OK: OK 0", hits(8, "foo=bar")) // nothing limits it
	c.want("OK: OK 6", hits(1, "foo_bar=x"))
	c.want("OK: OK 0 OK 1", hits(1, "a=b_c"), hits(1, "a_b=c"))
	c.want("OVER: OVER 0 OK 1", hits(1, "a=b_c"), hits(1, "a_b=c"))
	c.want("OK: OK 0", hits(1, "a_b=c"))
}

// PEERS C18: the three requests that share one counter in peers, one of them in another
// domain.
func TestC18Domains(t *testing.T) {
	t.Parallel()

	const limits = `
descriptors:
  - {key: a, %[1]s}
  - {key: a_b, %[1]s}
  - {key: b, %[1]s}
`
	for _, limit := range []string{
		"rate_limit: {unit: day, requests_per_unit: 1}", "quota: {daily: 1}", "limiter: {permits: 1, per: 1d}",
	} {
		text := fmt.Sprintf(limits, limit)
		c := newCounterService(t, "domain: d"+text, "domain: d_a"+text)
		for _, request := range [][2]string{{"d", "a=b_c"}, {"d", "a_b=c"}, {"d_a", "b=c"}, {"d", "b=c"}} {
			c.domain = request[0]
			c.want("OK: OK 0", hits(1, request[1]))
			c.want("OVER: OVER 0", hits(1, request[1]))
		}
	}
}

// PEERS C19, C20, C21: descriptors are not joined, depths must be equal, and there is no
// way back from an exact match. What does match is refused the second time.
func TestC19C20C21Unmatched(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - key: a
    value: x
    rate_limit: {unit: hour, requests_per_unit: 1}
  - key: a
    descriptors:
      - key: b
        rate_limit: {unit: hour, requests_per_unit: 1}
        descriptors: [{key: c, rate_limit: {unit: hour, requests_per_unit: 1}}]
`)
	for range 2 {
		c.want("OK: OK 0 OK 0", hits(1, "c=1"), hits(1, "a=1")) // C19
		c.want("OK: OK 0 OK 0", hits(1, "a=1"), hits(1, "b=1/c=1"))
		c.want("OK: OK 0", hits(1, "b=1/a=1"))
		c.want("OK: OK 0 OK 0", hits(1, "a=x/sub=1"), hits(1, "a=1/b=1/c=1/d=1")) // C20
		c.want("OK: OK 0", hits(1, "a=x/b=1"))                                    // C21
	}
	for _, d := range []string{"a=x", "a=1/b=1", "a=1/b=1/c=1"} {
		c.want("OK: OK 0", hits(1, d))
		c.want("OVER: OVER 0", hits(1, d))
	}
}

// PEERS C27: what is one key is one bucket, however it is written. Texts are taken as they
// are; it is the filter that may say more of them.
func TestC27KeysInAnyCase(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: node, budget: {scope: ingest_node, per_second: 1, burst: 2}}
  - {key: text, limiter: {permits: 1, per: 1d}}
`)
	c.want("OK: OK 1", hits(1, "node="+nodeOne))
	c.want("OK: OK 0", hits(1, "node="+strings.ToUpper(nodeOne)))
	c.want("OVER: OVER 0", hits(1, "node="+nodeOne))
	c.want("OK: OK 0 OK 0", hits(1, "text=Host"), hits(1, "text=host"))
}

// PEERS C29, C30: any bytes, at any length, are a value of which there is one counter.
func TestC29C30AnyBytesThroughTheService(t *testing.T) {
	t.Parallel()

	long := strings.Repeat("v", 64<<10)
	values := []string{
		"", " ", "two words", long, long + "v", "1 \xc0\xa7", "\xff", "\xff\xfe", "a\x00b", "a\x00", "\x00", "\r\n", "\xed\xa0\x80",
	}
	for _, limit := range []string{
		"rate_limit: {unit: day, requests_per_unit: 1}", "quota: {daily: 1}", "limiter: {permits: 1, per: 1d}",
	} {
		c := newCounterService(t, "domain: test\ndescriptors:\n  - {key: a, "+limit+"}\n")
		for _, value := range values {
			c.want("OK: OK 0", hits(1, "a="+value))
			c.want("OVER: OVER 0", hits(1, "a="+value))
		}
		own := func(value string) *ratelimitv3.RateLimitDescriptor {
			d := hits(1, "a="+value)
			d.Limit = &ratelimitv3.RateLimitDescriptor_RateLimitOverride{RequestsPerUnit: 1, Unit: typev3.RateLimitUnit_DAY}
			return d
		}
		for _, value := range values {
			c.want("OK: OK 0", own(value))
			c.want("OVER: OVER 0", own(value))
		}
	}
}

// PEERS C35: the headers are of the limit that refused, not of one that passed.
func TestC35HeadersOfTheLimitThatRefused(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
headers: {style: delta}
descriptors:
  - {key: a, limiter: {permits: 1, per: 3s, burst: 60}}
  - {key: b, rate_limit: {unit: hour, requests_per_unit: 5}}
`)
	c.now = time.Date(2026, 11, 30, 12, 10, 0, 0, time.UTC)
	c.want("OK: OK 56 OK 0", hits(4, "a=1"), hits(5, "b=1"))
	response := c.want("OVER: OK 56 OVER 0", hits(1, "a=1"), hits(1, "b=1"))
	c.wantHeaders(response, "retry-after=3000 x-ratelimit-limit=5 x-ratelimit-remaining=0 x-ratelimit-reset=3000")
	if reset := response.GetStatuses()[0].GetDurationUntilReset().AsDuration(); reset != 12*time.Second {
		t.Errorf("the limit that passed is whole again in %v, want 12s", reset)
	}
}

// PEERS C50: more than 32 bits are counted to the unit, and shown as they are in headers;
// the protocol's own fields saturate.
func TestC50BeyondTheProtocol(t *testing.T) {
	t.Parallel()

	const limit = 1_000_000_000_000
	c := newCounterService(t, `
domain: test
headers: {style: delta, on_allowed: true}
descriptors:
  - {key: a, quota: {daily: 1_000_000_000_000}}
`)
	response := c.want("OK: OK 4294967295", hits(1, "a=1"))
	c.wantHeaders(response, "x-ratelimit-limit=1000000000000 x-ratelimit-remaining=999999999999 x-ratelimit-reset=43200")
	if got := response.GetStatuses()[0].GetCurrentLimit().GetRequestsPerUnit(); got != math.MaxUint32 {
		t.Errorf("the protocol's limit is %d, want what 32 bits can hold", got)
	}
	c.want("OK: OK 5", hits(limit-6, "a=1"))
	c.want("OVER: OVER 5", hits(6, "a=1"))
	c.want("OK: OK 0", hits(5, "a=1"))
	c.want("OVER: OVER 0", hits(math.MaxInt64, "a=1"))
}

// PEERS C51, C46: windows of the calendar, in the terms of answers.
func TestC51CalendarThroughTheService(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: day, rate_limit: {unit: day, requests_per_unit: 2}}
  - {key: week, rate_limit: {unit: week, requests_per_unit: 2}}
  - {key: month, rate_limit: {unit: month, requests_per_unit: 2}}
  - {key: year, rate_limit: {unit: year, requests_per_unit: 2}}
`)
	for _, test := range []struct {
		at, key string
		want    time.Duration
	}{
		{"2026-01-31T23:59:59Z", "month", time.Second},
		{"2028-02-29T12:00:00Z", "month", 43_200 * time.Second},
		{"2028-02-29T12:00:00Z", "year", 26_481_600 * time.Second},
		{"2026-12-31T23:59:59Z", "day", time.Second},
		{"2026-12-31T23:59:59Z", "month", time.Second},
		{"2026-12-31T23:59:59Z", "year", time.Second},
		{"2026-11-29T23:59:59Z", "week", time.Second}, // a Sunday
		{"2027-02-01T00:00:00Z", "month", 2_419_200 * time.Second},
	} {
		var err error
		if c.now, err = time.Parse(time.RFC3339, test.at); err != nil {
			t.Fatal(err)
		}
		d := test.key + "=" + test.at // its own counter
		response := c.want("OK: OK 0", hits(2, d))
		if got := response.GetStatuses()[0].GetDurationUntilReset().AsDuration(); got != test.want {
			t.Errorf("the %s at %s ends in %v, want %v", test.key, test.at, got, test.want)
		}
		if wait := c.retryAfter(c.want("OVER: OVER 0", hits(1, d))); wait != test.want {
			t.Errorf("the %s at %s: Retry-After %v, want %v", test.key, test.at, wait, test.want)
		}
		c.now = c.now.Add(test.want)
		c.want("OK: OK 1", hits(1, d))
	}
}

// PEERS C62: a hundred in five minutes.
func TestC62PerFiveMinutes(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
headers: {style: ietf}
descriptors:
  - {key: a, limiter: {permits: 100, per: 5m}}
`)
	c.want("OK: OK 0", hits(100, "a=1"))
	response := c.want("OVER: OVER 0", hits(1, "a=1"))
	c.wantHeaders(response, `retry-after=3 ratelimit-policy="a";q=100;w=300 ratelimit="a";r=0;t=300`)
	if got := response.GetStatuses()[0].GetCurrentLimit().GetName(); got != "a" {
		t.Errorf("the limit's name is %q, want a", got)
	}
	c.now = c.now.Add(150 * time.Second)
	c.want("OK: OK 0", hits(50, "a=1"))
	c.want("OVER: OVER 0", hits(1, "a=1"))
	c.now = c.now.Add(5 * time.Minute)
	c.want("OK: OK 0", hits(100, "a=1"))
}

// PEERS C64: a month is the calendar's, thirty days are thirty days, and neither can be
// written for the other.
func TestC64CalendarAndPeriod(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: calendar, quota: {monthly: 30}}
  - {key: rolling, limiter: {permits: 30, per: 30d}}
`)
	c.now = time.Date(2026, 1, 31, 23, 59, 59, 0, time.UTC)
	c.want("OK: OK 0 OK 0", hits(30, "calendar=1"), hits(30, "rolling=1"))
	c.now = c.now.Add(time.Second)
	c.want("OK: OK 29", hits(1, "calendar=1"))
	c.want("OVER: OVER 0", hits(1, "rolling=1"))
	c.now = c.now.Add(24 * time.Hour)
	c.want("OK: OK 28 OK 0", hits(1, "calendar=1"), hits(1, "rolling=1"))

	for _, limit := range []string{
		"limiter: {permits: 30, per: month}", "limiter: {permits: 30, per: 1mo}", "rate_limit: {unit: 30d, requests_per_unit: 30}", "quota: {30d: 30}",
	} {
		if _, err := policy.Parse("test.yaml", []byte("domain: test\ndescriptors:\n  - {key: a, "+limit+"}\n")); err == nil {
			t.Errorf("%s loads", limit)
		}
	}
}

// PEERS P12: two replicas count a month's quota as one, and what one of them has admitted
// outlives it, since nothing is written behind.
func TestP12NothingIsWrittenBehind(t *testing.T) {
	t.Parallel()

	const text = "domain: test\ndescriptors:\n  - {key: a, quota: {monthly: 10}}\n"
	c := newCounterService(t, text)
	for i := range int64(9) {
		// Each is a replica of its own, which is gone after one request.
		replica := *c
		replica.batcher = store.NewBatcher(c.store, store.BatcherConfig{})
		ctx, kill := context.WithCancel(t.Context())
		go func() { _ = replica.batcher.Run(ctx) }()
		replica.apply(text)
		replica.want(fmt.Sprintf("OK: OK %d", 9-i), hits(1, "a=1"))
		kill()
	}
	c.want("OK: OK 0", hits(1, "a=1"))
	c.want("OVER: OVER 0", hits(1, "a=1"))
}

// PEERS T09: the limits of one descriptor add up, and so do descriptors; of a descriptor's
// places in the policy only the most exact one holds.
func TestT09WhatAddsUp(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
descriptors:
  - {key: a, limiter: {permits: 5, per: 1h}, rate_limit: {unit: day, requests_per_unit: 8}}
  - {key: a, value: x, rate_limit: {unit: day, requests_per_unit: 100}}
  - {key: b, rate_limit: {unit: day, requests_per_unit: 2}}
`)
	c.want("OK: OK 0", hits(5, "a=1"))
	c.want("OVER: OVER 0", hits(1, "a=1")) // by the limiter
	c.now = c.now.Add(time.Hour)
	c.want("OVER: OVER 3", hits(4, "a=1")) // by the window
	c.want("OK: OK 0", hits(3, "a=1"))

	c.want("OK: OK 90", hits(10, "a=x")) // of neither of the above
	c.want("OK: OK 89 OK 1", hits(1, "a=x"), hits(1, "b=1"))
	c.want("OVER: OK 89 OVER 1", hits(1, "a=x"), hits(2, "b=1"))
}

package filter

import (
	"strings"
	"testing"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/weir-dev/weir/internal/wasmhost"
)

// onBoth runs a test on both rigs, each with a block.
func onBoth(t *testing.T, block string, test func(t *testing.T, r rig)) {
	t.Helper()
	for name, newRig := range rigs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			if err := r.start(t, pluginConfig(t, block)); err != nil {
				t.Fatal(err)
			}
			test(t, r)
		})
	}
}

// streamed has a limit on bytes, in blocks of 100.
const streamed = `{"hold_bytes": 10, "block_bytes": 100, "rules": [{"descriptors": [{"entries": [{"key": "k", "constant": "c"}], "cost": "body_bytes"}]}]}`

func outage() wasmhost.Answer { return trailersOnly([2]string{"grpc-status", "14"}) }

func refusal(tb testing.TB) wasmhost.Answer {
	tb.Helper()
	return answerOf(tb, &rlsv3.RateLimitResponse{
		OverallCode: rlsv3.RateLimitResponse_OVER_LIMIT, ResponseHeadersToAdd: headerValues([2]string{"retry-after", "1"}), RawBody: []byte("the service's"),
	})
}

func TestRefusedAnswer(t *testing.T) {
	t.Parallel()

	const rules = `"rules": [{"descriptors": [{"entries": [{"key": "k", "constant": "c"}]}]}]}`
	for _, tc := range []struct {
		refused, body string
		status        int
		headers       [][2]string
	}{
		{`{"status": 503}`, "the service's", 503, [][2]string{{"retry-after", "1"}}},
		{`{"body": "{}", "content_type": "application/json"}`, "{}", 429, [][2]string{{"retry-after", "1"}, {"content-type", "application/json"}}},
		{`{"body": "no"}`, "no", 429, [][2]string{{"retry-after", "1"}}},
	} {
		onBoth(t, `{"refused": `+tc.refused+`, `+rules, func(t *testing.T, r rig) {
			t.Helper()
			e := r.exchange(t)
			e.requestHeaders(t, get(), true)
			r.calls()[0].respond(t, refusal(t))
			l := e.local()
			if l == nil || l.Status != tc.status || l.GRPCStatus != 8 || string(l.Body) != tc.body {
				t.Fatalf("answer = %v, want %d %q", l, tc.status, tc.body)
			}
			if diff := cmp.Diff(tc.headers, l.Headers); diff != "" {
				t.Errorf("headers (-want +got):\n%s", diff)
			}
		})
	}
}

// An answer whose headers the host refuses is given without them.
func TestRefusedHeaders(t *testing.T) {
	t.Parallel()

	r := newNativeRig()
	if err := r.start(t, pluginConfig(t, strict)); err != nil {
		t.Fatal(err)
	}
	r.failing["respond with headers"] = true
	e := r.exchange(t)
	e.requestHeaders(t, get([2]string{"x-consumer", "acme"}), true)
	r.calls()[0].respond(t, refusal(t))
	if l := e.local(); l == nil || l.Status != 429 || len(l.Headers) != 0 {
		t.Errorf("answer = %v, want 429 without headers", l)
	}
}

func TestAllowOnError(t *testing.T) {
	t.Parallel()

	const block = `{"hold_bytes": 10, "block_bytes": 100, "rules": [{"name": "a", "descriptors": [
		{"entries": [{"key": "k", "constant": "c"}], "on_error": "allow", "cost": "body_bytes"},
		{"entries": [{"key": "s", "header": "x-strict", "missing": "skip"}]}
	]}]}`
	onBoth(t, block, func(t *testing.T, r rig) {
		t.Helper()
		// All that apply say so.
		e := r.exchange(t)
		e.requestHeaders(t, get(), true)
		r.calls()[0].respond(t, outage())
		if !e.upstream().Ended || r.metric("allowed_on_error") != 1 {
			t.Errorf("the request did not go on: %v", e.local())
		}
		// One does not.
		e = r.exchange(t)
		e.requestHeaders(t, get([2]string{"x-strict", "1"}), true)
		r.calls()[0].respond(t, outage())
		if l := e.local(); l == nil || l.Status != 500 {
			t.Errorf("answer = %v, want 500", l)
		}
		// In the middle of a body, the rest goes on uncharged.
		e = r.exchange(t)
		e.requestHeaders(t, post(), false)
		e.requestBody(t, make([]byte, 20), false)
		r.calls()[0].respond(t, okAnswer(t))
		e.requestBody(t, make([]byte, 200), false)
		for _, c := range r.calls() {
			c.respond(t, outage())
		}
		e.requestBody(t, make([]byte, 1000), true)
		if up := e.upstream(); !up.Ended || len(up.Body) != 1220 || r.metric("allowed_on_error") != 2 {
			t.Errorf("%d bytes went on, ended: %v", len(up.Body), up.Ended)
		}
		if n := len(r.calls()); n != 0 {
			t.Errorf("%d calls are made although the service is away", n)
		}
		if log := r.log(); strings.Count(log, "unavailable") != 1 {
			t.Errorf("log = %q, want one record for the outage", log)
		}
	})

	// No call can be made at all.
	r := newNativeRig()
	if err := r.start(t, pluginConfig(t, block)); err != nil {
		t.Fatal(err)
	}
	r.failing["call"] = true
	e := r.exchange(t)
	e.requestHeaders(t, get(), true)
	if !e.upstream().Ended {
		t.Errorf("the request did not go on: %v", e.local())
	}
}

// What a client says about limits does not reach the upstream.
func TestSpoofedHeaders(t *testing.T) {
	t.Parallel()

	onBoth(t, demo, func(t *testing.T, r rig) {
		t.Helper()
		e := r.exchange(t)
		e.requestHeaders(t, get(
			[2]string{"x-a", "1"}, [2]string{"x-ratelimit-remaining", "9"}, [2]string{"ratelimit", "a"}, [2]string{"x-b", "2"},
			[2]string{"ratelimit", "b"}, [2]string{"ratelimit-policy", "p"}, [2]string{"weir-receipt", "r"}, [2]string{"x-ratelimited", "3"},
		), true)
		want := get([2]string{"x-a", "1"}, [2]string{"x-b", "2"}, [2]string{"x-ratelimited", "3"})
		if diff := cmp.Diff(want, e.upstream().Headers); diff != "" {
			t.Errorf("the upstream's headers (-want +got):\n%s", diff)
		}
	})
}

func TestShadow(t *testing.T) {
	t.Parallel()

	onBoth(t, strict, func(t *testing.T, r rig) {
		t.Helper()
		e := r.exchange(t)
		e.requestHeaders(t, get([2]string{"x-consumer", "acme"}), true)
		weir, err := structpb.NewStruct(map[string]any{"weir": map[string]any{"shadow_denied": []any{"per-node", "per-org"}}})
		if err != nil {
			t.Fatal(err)
		}
		r.calls()[0].respond(t, answerOf(t, &rlsv3.RateLimitResponse{OverallCode: rlsv3.RateLimitResponse_OK, DynamicMetadata: weir}))
		if got := e.state("weir.shadow_denied"); got != "per-node,per-org" || !e.upstream().Ended {
			t.Errorf("state = %q, want both limits", got)
		}
	})
}

func TestDebug(t *testing.T) {
	t.Parallel()

	const entries = `"rules": [{"name": "r", "descriptors": [{"entries": [
		{"key": "token", "header": "x-token"}, {"key": "plan", "header": "x-plan", "missing": "default", "default": "free"}]}]}]}`
	for level, want := range map[string][]string{
		"off":      {""},
		"redacted": {`rule r: key "token" from header x-token has 6 bytes`, `rule r: key "plan" from header x-plan is absent, so it has its default`},
		"values":   {`rule r: key "token" from header x-token is "secret"`, `rule r: key "plan" from header x-plan is absent, so it has its default`},
	} {
		onBoth(t, `{"debug": "`+level+`", `+entries, func(t *testing.T, r rig) {
			t.Helper()
			e := r.exchange(t)
			e.requestHeaders(t, get([2]string{"x-token", "secret"}), true)
			if diff := cmp.Diff(want, strings.Split(strings.TrimSpace(r.log()), "\n")); diff != "" {
				t.Errorf("log (-want +got):\n%s", diff)
			}
		})
	}
}

// A WebSocket has no body before somebody has answered, and a stream has none that ends.
func TestUpgrade(t *testing.T) {
	t.Parallel()

	onBoth(t, streamed, func(t *testing.T, r rig) {
		t.Helper()
		l := newLedger(map[string]int64{"k": 1000})
		e := r.exchange(t)
		e.requestHeaders(t, get([2]string{"upgrade", "websocket"}), false)
		l.settle(t, r)
		if !e.upstream().Begun || l.net("k") != 101 {
			t.Fatalf("%d are charged before the first byte, want a block and one; begun: %v", l.net("k"), e.upstream().Begun)
		}
		e.responseHeaders(t, [][2]string{{":status", "101"}})
		for range 30 {
			e.requestBody(t, make([]byte, 30), false)
			l.settle(t, r)
		}
		if up := e.upstream(); len(up.Body) != 900 {
			t.Errorf("%d bytes went on, want 900", len(up.Body))
		}
		e.done(t)
		l.settle(t, r)
		if l.net("k") != 900 {
			t.Errorf("%d are charged, want 900", l.net("k"))
		}
	})
}

// C14: what is taken ahead is given back when it was not needed.
func TestRefunds(t *testing.T) {
	t.Parallel()

	onBoth(t, streamed, func(t *testing.T, r rig) {
		t.Helper()
		l := newLedger(map[string]int64{"k": 10_000})
		begin := func() exchange {
			e := r.exchange(t)
			e.requestHeaders(t, post([2]string{"content-length", "500"}), false)
			return e
		}
		leave := func() {
			e := begin()
			for _, c := range r.calls() {
				c.respond(t, l.answer(t, c))
			}
			e.requestBody(t, make([]byte, 30), false)
			e.done(t)
		}
		// The client leaves in the middle of a body of known length.
		leave()
		l.settle(t, r)
		if l.net("k") != 30 || l.refunds != 1 || r.counter("weir_filter_refunds_outcome=sent") != 1 {
			t.Errorf("%d are charged after %d refunds, want 30", l.net("k"), l.refunds)
		}
		// Somebody else answers during the call: nothing went on.
		e := begin()
		e.responseHeaders(t, [][2]string{{":status", "504"}})
		l.settle(t, r)
		if l.net("k") != 30 {
			t.Errorf("%d are charged, want 30 as before", l.net("k"))
		}
		e.done(t)
		// A refund that is refused is not sent again.
		leave()
		r.tick(t)
		calls := r.calls()
		if len(calls) != 1 {
			t.Fatalf("%d refunds are under way, want 1", len(calls))
		}
		calls[0].respond(t, outage())
		if !r.tick(t) || len(r.calls()) != 0 || r.counter("weir_filter_refunds_outcome=failed") != 1 {
			t.Errorf("a refund that failed is not at rest; log: %s", r.log())
		}
		// The configuration is replaced: the plugin stays until its refunds are made.
		leave()
		if r.close(t) {
			t.Error("the plugin ended before its refund")
		}
		before := l.refunds
		for _, c := range r.calls() {
			c.respond(t, l.answer(t, c))
		}
		if l.refunds != before+1 || !r.close(t) {
			t.Errorf("after %d refunds the plugin has not ended", l.refunds-before)
		}
	})
}

// While no call can be made refunds wait, up to a bound.
func TestRefundsWait(t *testing.T) {
	t.Parallel()

	r := newNativeRig()
	if err := r.start(t, pluginConfig(t, streamed)); err != nil {
		t.Fatal(err)
	}
	l := newLedger(map[string]int64{"k": 1 << 40})
	for range maxRefunds + 5 {
		e := r.exchange(t)
		e.requestHeaders(t, post([2]string{"content-length", "500"}), false)
		c := r.calls()[0]
		c.respond(t, l.answer(t, c))
		e.done(t)
	}
	r.failing["call"] = true
	if r.tick(t) || len(r.calls()) != 0 {
		t.Fatal("calls were made")
	}
	delete(r.failing, "call")
	r.tick(t)
	if n := len(r.calls()); n != maxRefundCalls {
		t.Errorf("%d refunds are under way, want %d", n, maxRefundCalls)
	}
	l.settle(t, r)
	if l.refunds != maxRefunds || r.counter("weir_filter_refunds_outcome=lost") != 5 {
		t.Errorf("%d refunds were made and %d lost, want %d and 5", l.refunds, r.counter("weir_filter_refunds_outcome=lost"), maxRefunds)
	}
	// If the plugin is to end and no call can be made, it ends.
	e := r.exchange(t)
	e.requestHeaders(t, post([2]string{"content-length", "500"}), false)
	c := r.calls()[0]
	c.respond(t, l.answer(t, c))
	e.done(t)
	r.failing["call"] = true
	if !r.close(t) {
		t.Error("the plugin waits for a call that can't be made")
	}
}

// A panic in the plugin's own callbacks ends none of its streams.
func TestPanicsInRefunds(t *testing.T) {
	t.Parallel()

	for _, method := range []string{"call", "setTick", "answerHeaders", "count"} {
		r := newNativeRig()
		if err := r.start(t, pluginConfig(t, streamed)); err != nil {
			t.Fatal(err)
		}
		l := newLedger(map[string]int64{"k": 1 << 40})
		e := r.exchange(t)
		e.requestHeaders(t, post([2]string{"content-length", "500"}), false)
		c := r.calls()[0]
		c.respond(t, l.answer(t, c))
		e.done(t)
		r.panicking[method] = true
		r.tick(t)
		for _, c := range r.calls() {
			c.respond(t, okAnswer(t))
		}
		clear(r.panicking)
		e = r.exchange(t)
		e.requestHeaders(t, get(), true)
		for _, c := range r.calls() {
			c.respond(t, okAnswer(t))
		}
		if !e.upstream().Ended {
			t.Errorf("after a panic in %s the next request is not served", method)
		}
	}
}

// A long stream is asked for in blocks ahead, and never waits while there is enough.
func TestAhead(t *testing.T) {
	t.Parallel()

	onBoth(t, streamed, func(t *testing.T, r rig) {
		t.Helper()
		l := newLedger(map[string]int64{"k": 1 << 20})
		e := r.exchange(t)
		e.requestHeaders(t, post(), false)
		e.requestBody(t, make([]byte, 20), false)
		l.settle(t, r)
		for i := range 100 {
			if got := e.requestBody(t, make([]byte, 25), false); got != wasmhost.Continue {
				t.Fatalf("chunk %d waits although a block is paid for", i)
			}
			l.settle(t, r)
		}
		e.requestBody(t, nil, true)
		l.settle(t, r)
		if l.net("k") != 2520 || l.calls > 60 {
			t.Errorf("%d are charged in %d calls, want 2520 in about one for two chunks", l.net("k"), l.calls)
		}
	})
}

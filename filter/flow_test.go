package filter

import (
	"strings"
	"testing"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"

	"github.com/weir-dev/weir/internal/wasmhost"
)

// started is a rig with the demonstration's configuration.
func started(t *testing.T, r rig) {
	t.Helper()
	if err := r.start(t, pluginConfig(t, demo)); err != nil {
		t.Fatal(err)
	}
}

// ask begins a request that waits for an answer.
func ask(t *testing.T, r rig) (exchange, pendingCall) {
	t.Helper()
	e := r.exchange(t)
	before := len(r.calls())
	if got := e.requestHeaders(t, get([2]string{"x-consumer", "acme"}), true); got != wasmhost.StopAll {
		t.Fatalf("action at the headers = %d, want %d", got, wasmhost.StopAll)
	}
	calls := r.calls()
	if len(calls) != before+1 {
		t.Fatalf("%d calls, want %d", len(calls), before+1)
	}
	return e, calls[before]
}

// works checks that the next request is limited as ever.
func works(t *testing.T, r rig) {
	t.Helper()
	before := r.metric("allowed")
	e, c := ask(t, r)
	c.respond(t, okAnswer(t))
	if !e.upstream().Ended || r.metric("allowed") != before+1 {
		t.Errorf("the next request is not served: upstream %v, log %s", e.upstream(), r.log())
	}
}

func TestActions(t *testing.T) {
	t.Parallel()

	for name, newRig := range rigs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			started(t, r)

			// A body that need not be read waits at the host, with back-pressure.
			e := r.exchange(t)
			if got := e.requestHeaders(t, post([2]string{"content-length", "5"}, [2]string{"x-node-id", node}), false); got != wasmhost.StopAll {
				t.Errorf("with a length: action at the headers = %d, want %d", got, wasmhost.StopAll)
			}
			// One that must be is held, callback by callback.
			e = r.exchange(t)
			if got := e.requestHeaders(t, post([2]string{"x-node-id", node}), false); got != wasmhost.Pause {
				t.Errorf("without a length: action at the headers = %d, want %d", got, wasmhost.Pause)
			}
			if got := e.requestBody(t, []byte("12345"), false); got != wasmhost.PauseWatermark {
				t.Errorf("action in the body = %d, want %d", got, wasmhost.Pause)
			}
			if got := e.requestBody(t, nil, true); got != wasmhost.PauseWatermark {
				t.Errorf("action at the end = %d, want %d", got, wasmhost.Pause)
			}
			if e.upstream().Begun {
				t.Error("the upstream has seen the request")
			}
		})
	}
}

func TestClientLeaves(t *testing.T) {
	t.Parallel()

	for name, newRig := range rigs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			started(t, r)

			e, c := ask(t, r)
			e.done(t)
			c.respond(t, okAnswer(t))
			if e.upstream().Begun || e.local() != nil {
				t.Error("a stream that is gone was resumed or answered")
			}

			// In the midst of a body that is held.
			e = r.exchange(t)
			e.requestHeaders(t, post([2]string{"x-node-id", node}), false)
			e.requestBody(t, []byte("12345"), false)
			e.done(t)
			if n := len(r.calls()); n != 0 {
				t.Errorf("%d calls were made for half a body", n)
			}

			works(t, r)
			if log := r.log(); log != "" {
				t.Errorf("log = %q, want none", log)
			}
		})
	}
}

// Envoy may answer by itself while the filter waits, such as after a timeout.
func TestAnsweredElsewhere(t *testing.T) {
	t.Parallel()

	for name, newRig := range rigs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			started(t, r)

			for _, answer := range []wasmhost.Answer{okAnswer(t), trailersOnly([2]string{"grpc-status", "14"})} {
				e, c := ask(t, r)
				e.responseHeaders(t, [][2]string{{":status", "504"}})
				c.respond(t, answer)
				if e.upstream().Begun || e.local() != nil {
					t.Error("the filter acted on a stream that was answered")
				}
				if status, _ := lookup(e.downstream().Headers, ":status"); status != "504" {
					t.Errorf("status = %s, want 504", status)
				}
				e.done(t)
			}
			works(t, r)
		})
	}
}

// Requests that are under way do not mix.
func TestConcurrentStreams(t *testing.T) {
	t.Parallel()

	for name, newRig := range rigs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			started(t, r)

			held := r.exchange(t)
			held.requestHeaders(t, post([2]string{"x-node-id", node}), false)
			held.requestBody(t, []byte("123"), false)
			first, firstCall := ask(t, r)
			second, secondCall := ask(t, r)
			held.requestBody(t, []byte("45"), true)

			calls := r.calls()
			secondCall.respond(t, trailersOnly([2]string{"grpc-status", "14"}))
			if second.local() == nil || first.local() != nil || first.upstream().Begun {
				t.Error("the answer went to the wrong stream")
			}
			firstCall.respond(t, okAnswer(t))
			if !first.upstream().Ended || held.upstream().Begun {
				t.Error("the answer went to the wrong stream")
			}
			s := scenario{wantCall: []*commonv3.RateLimitDescriptor{desc(5, "node", node)}}
			s.checkCall(t, calls[2])
			calls[2].respond(t, okAnswer(t))
			if up := held.upstream(); !up.Ended || string(up.Body) != "12345" {
				t.Errorf("the upstream has %q (ended: %v)", up.Body, up.Ended)
			}
		})
	}
}

// A request that waits outlives the configuration that it began under.
func TestConfigurationUpdate(t *testing.T) {
	t.Parallel()

	for name, newRig := range rigs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			started(t, r)
			e, c := ask(t, r)

			if err := r.start(t, []byte(`{"domain": ""}`)); err == nil {
				t.Error("a bad configuration was accepted")
			}
			if err := r.start(t, pluginConfig(t, strict)); err != nil {
				t.Fatal(err)
			}
			denied := r.exchange(t)
			denied.requestHeaders(t, get(), true)
			if l := denied.local(); l == nil || l.Status != 400 {
				t.Errorf("under the new configuration: %v, want a 400", l)
			}

			c.respond(t, okAnswer(t))
			if !e.upstream().Ended {
				t.Error("the request that waited was not resumed")
			}
			// Both have a rule without a name, and so the same metrics.
			const want = int(outcomes) + int(reasons) + int(refundOutcomes) + 1
			if w, ok := r.(*wasmRig); ok && w.vm.MetricDefinitions() != want {
				t.Errorf("metrics were defined %d times, want %d", w.vm.MetricDefinitions(), want)
			}
			if n, ok := r.(*nativeRig); ok && len(n.counters) != want {
				t.Errorf("metrics were defined %d times, want %d", len(n.counters), want)
			}
			if got := r.counter("weir_filter_config_version"); got != 7 {
				t.Errorf("the configuration's version is %d, want 7", got)
			}
		})
	}
}

func TestBadConfiguration(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct{ name, config, want string }{
		{"none", "", "the plugin has no configuration"},
		{"no JSON", "{", "unexpected end of JSON input"},
		{"an unknown field", `{"domain": "d", "cluster": "c", "filter": {"rules": [{"descriptors": [], "wen": 1}]}}`, "filter.rules[0].wen: "},
		{"two faults", `{"cluster": "c", "filter": {"rules": [], "hold_bytes": 0}}`, "domain: is required; filter.hold_bytes: is 0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			for name, newRig := range rigs() {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					r := newRig(t)
					err := r.start(t, []byte(tc.config))
					if err == nil || !strings.Contains(err.Error(), tc.want) {
						t.Errorf("start = %v, want %q in it", err, tc.want)
					}
				})
			}
		})
	}
}

// Envoy can be told to serve with a plugin that did not start: it must not pass.
func TestNotStarted(t *testing.T) {
	t.Parallel()

	r := newNativeRig()
	r.plugin = r.vm.NewPluginContext(0).(*plugin)
	e := r.exchange(t)
	e.requestHeaders(t, get(), true)
	if l := e.local(); l == nil || l.Status != 500 || e.upstream().Begun {
		t.Errorf("answer = %v, want 500", l)
	}
}

func TestDoubleCallback(t *testing.T) {
	t.Parallel()

	for name, answers := range map[string][2]wasmhost.Answer{
		"allowed, then an error":  {okAnswer(t), {}},
		"an error, then allowed":  {{}, okAnswer(t)},
		"allowed, then once more": {okAnswer(t), okAnswer(t)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			r := newNativeRig()
			started(t, r)
			e, c := ask(t, r)
			c.respond(t, answers[0])
			up, down := e.upstream(), e.downstream()
			c.respond(t, answers[1])
			if e.upstream().Begun != up.Begun || len(e.downstream().Headers) != len(down.Headers) {
				t.Error("the second callback did something")
			}
			if n := r.metric("allowed") + r.metric("unavailable"); n != 1 {
				t.Errorf("%d requests are counted, want 1", n)
			}
		})
	}
}

// C84: whatever panics costs one request. Each method of the host is made to panic in
// turn, which is where every callback can; the request gets a 500 and the next is
// served.
func TestPanics(t *testing.T) {
	t.Parallel()

	small := post([2]string{"x-node-id", node})
	for _, tc := range []struct {
		method string
		send   func(t *testing.T, r *nativeRig, e exchange)
	}{
		{"requestHeaders", func(t *testing.T, _ *nativeRig, e exchange) {
			t.Helper()
			e.requestHeaders(t, small, false)
		}},
		{"call", func(t *testing.T, _ *nativeRig, e exchange) {
			t.Helper()
			e.requestHeaders(t, get([2]string{"x-consumer", "acme"}), true)
		}},
		{"call", func(t *testing.T, _ *nativeRig, e exchange) {
			t.Helper()
			e.requestHeaders(t, small, false)
			e.requestBody(t, []byte("12345"), true)
		}},
		{"call", func(t *testing.T, _ *nativeRig, e exchange) {
			t.Helper()
			e.requestHeaders(t, small, false)
			e.requestBody(t, []byte("12345"), false)
			e.requestTrailers(t, [][2]string{{"x-sum", "1"}})
		}},
		{"answerHeaders", respondOK},
		{"answerBody", respondOK},
		{"answerTrailers", respondOK},
		{"setRequestHeaders", respondOK},
		{"count", respondOK},
		{"resume", respondOK},
		{"setResponseHeaders", func(t *testing.T, r *nativeRig, e exchange) {
			t.Helper()
			respondOK(t, r, e)
			e.responseHeaders(t, [][2]string{{":status", "200"}})
		}},
	} {
		for _, worse := range []string{"", "logWarn", "count"} {
			t.Run(tc.method+" "+worse, func(t *testing.T) {
				t.Parallel()

				r := newNativeRig()
				started(t, r)
				e := r.exchange(t)
				r.panicking[tc.method] = true
				// What the rescue itself uses may panic too.
				r.panicking[worse] = true
				tc.send(t, r, e)
				clear(r.panicking)

				if l := e.local(); l == nil || l.Status != 500 || l.GRPCStatus != 14 || len(l.Headers) != 0 {
					t.Errorf("answer = %v, want 500", l)
				}
				e.done(t)
				if worse == "" && tc.method != "count" && !strings.Contains(r.log(), "panic: planted in "+tc.method) {
					t.Errorf("log = %q, want the panic in it", r.log())
				}
				works(t, r)
			})
		}
	}
}

func respondOK(t *testing.T, r *nativeRig, e exchange) {
	t.Helper()
	e.requestHeaders(t, get([2]string{"x-consumer", "acme"}), true)
	for _, c := range r.calls() {
		c.respond(t, headersAnswer(t))
	}
}

func TestPanicsAtStart(t *testing.T) {
	t.Parallel()

	for _, method := range []string{"configuration", "defineCounter"} {
		r := newNativeRig()
		r.panicking[method] = true
		if err := r.start(t, pluginConfig(t, demo)); err == nil || !strings.Contains(err.Error(), "planted in "+method) {
			t.Errorf("start = %v, want the panic in it", err)
		}
		clear(r.panicking)
		started(t, r)
		works(t, r)
	}
}

// Errors of the host that are no panic.
func TestHostErrors(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		method string
		want   int // 0: the request goes on all the same
	}{
		{"requestHeaders", 500},
		{"call", 500},
		{"answerHeaders", 500},
		{"answerBody", 500},
		{"answerTrailers", 500},
		{"setRequestHeaders", 500},
		{"setResponseHeaders", 0},
		{"resume", 0},
	} {
		t.Run(tc.method, func(t *testing.T) {
			t.Parallel()

			r := newNativeRig()
			started(t, r)
			r.failing[tc.method] = true
			e := r.exchange(t)
			respondOK(t, r, e)
			if tc.want == 0 {
				e.responseHeaders(t, [][2]string{{":status", "200"}})
				if !e.upstream().Ended || e.local() != nil || !e.downstream().Ended {
					t.Errorf("the request did not go on: %v", e.local())
				}
			} else if l := e.local(); l == nil || l.Status != tc.want || e.upstream().Begun {
				t.Errorf("answer = %v, want %d", l, tc.want)
			}
			if !strings.Contains(r.log(), "planted in "+tc.method) {
				t.Errorf("log = %q, want the cause in it", r.log())
			}
			clear(r.failing)
			works(t, r)
		})
	}
}

// A local response that the host refuses is not made twice, nor the request let go.
func TestRespondFails(t *testing.T) {
	t.Parallel()

	r := newNativeRig()
	started(t, r)
	r.failing["respond"] = true
	e := r.exchange(t)
	if got := e.requestHeaders(t, get([2]string{"x-node-id", "?"}), true); got != wasmhost.Action(types.ActionPause) {
		t.Errorf("action = %d, want a pause", got)
	}
	if e.upstream().Begun || !strings.Contains(r.log(), "answering 400") {
		t.Errorf("upstream %v, log %q", e.upstream(), r.log())
	}
}

// headersAnswer allows a request and has headers for both sides.
func headersAnswer(tb testing.TB) wasmhost.Answer {
	tb.Helper()
	return answerOf(tb, &rlsv3.RateLimitResponse{
		OverallCode:          rlsv3.RateLimitResponse_OK,
		ResponseHeadersToAdd: headerValues([2]string{"x-ratelimit-remaining", "9"}),
		RequestHeadersToAdd:  headerValues([2]string{"x-plan", "free"}),
	})
}

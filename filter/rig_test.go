package filter

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"

	"github.com/weir-dev/weir/internal/wasmhost"
	"github.com/weir-dev/weir/internal/wasmhost/wasmtest"
)

// A rig runs the filter: natively behind a host of Go code, or as the compiled module
// in internal/wasmhost. One table of scenarios drives both.
type rig interface {
	// start loads a plugin configuration; the latest is for new exchanges.
	start(t *testing.T, cfg []byte) error
	exchange(t *testing.T) exchange
	// calls are those that wait for an answer, oldest first.
	calls() []pendingCall
	metric(outcome string) int64
	log() string
}

// An exchange is one request and its response.
type exchange interface {
	requestHeaders(t *testing.T, headers [][2]string, end bool) wasmhost.Action
	requestBody(t *testing.T, chunk []byte, end bool) wasmhost.Action
	requestTrailers(t *testing.T, trailers [][2]string) wasmhost.Action
	responseHeaders(t *testing.T, headers [][2]string)
	done(t *testing.T)
	upstream() wasmhost.Message
	downstream() wasmhost.Message
	local() *wasmhost.LocalResponse
}

type pendingCall struct {
	cluster string
	headers [][2]string
	body    []byte
	timeout time.Duration
	respond func(t *testing.T, a wasmhost.Answer)
}

// clusters are those that both rigs know: to the third no call can be made.
func clusters() map[string]bool { return map[string]bool{"weir_ratelimit": true, "empty": false} }

// rigs are the two, by name.
func rigs() map[string]func(t *testing.T) rig {
	return map[string]func(t *testing.T) rig{
		"native": func(*testing.T) rig { return newNativeRig() },
		"wasm":   newWasmRig,
	}
}

// wasmRig is a VM of internal/wasmhost.
type wasmRig struct {
	vm      *wasmhost.VM
	plugin  *wasmhost.Plugin
	plugins []*wasmhost.Plugin
}

func newWasmRig(t *testing.T) rig {
	t.Helper()
	vm, err := wasmtest.Compiled(t).NewVM(t.Context(), wasmhost.VMConfig{Clusters: clusters()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := vm.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
	return &wasmRig{vm: vm}
}

func (r *wasmRig) start(t *testing.T, cfg []byte) error {
	t.Helper()
	p, err := r.vm.Start(t.Context(), cfg)
	if err == nil {
		r.plugin = p
		r.plugins = append(r.plugins, p)
	}
	return err
}

func (r *wasmRig) exchange(t *testing.T) exchange {
	t.Helper()
	s, err := r.plugin.NewStream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return wasmExchange{s}
}

func (r *wasmRig) calls() []pendingCall {
	var calls []pendingCall
	for _, p := range r.plugins {
		for _, c := range p.Calls() {
			calls = append(calls, pendingCall{c.Cluster, c.Headers, c.Body, c.Timeout, func(t *testing.T, a wasmhost.Answer) {
				t.Helper()
				if err := c.Respond(t.Context(), a); err != nil {
					t.Fatal(err)
				}
			}})
		}
	}
	return calls
}

func (r *wasmRig) metric(outcome string) int64 {
	v, _ := r.vm.Metric("weir_filter_requests_outcome=" + outcome)
	return v
}

func (r *wasmRig) log() string {
	var b strings.Builder
	for _, l := range r.vm.Logs() {
		b.WriteString(l.Text + "\n")
	}
	return b.String()
}

type wasmExchange struct{ s *wasmhost.Stream }

func (e wasmExchange) requestHeaders(t *testing.T, headers [][2]string, end bool) wasmhost.Action {
	t.Helper()
	return must(t)(e.s.RequestHeaders(t.Context(), headers, end))
}

func (e wasmExchange) requestBody(t *testing.T, chunk []byte, end bool) wasmhost.Action {
	t.Helper()
	return must(t)(e.s.RequestBody(t.Context(), chunk, end))
}

func (e wasmExchange) requestTrailers(t *testing.T, trailers [][2]string) wasmhost.Action {
	t.Helper()
	return must(t)(e.s.RequestTrailers(t.Context(), trailers))
}

func (e wasmExchange) responseHeaders(t *testing.T, headers [][2]string) {
	t.Helper()
	must(t)(e.s.ResponseHeaders(t.Context(), headers, true))
}

func (e wasmExchange) done(t *testing.T) {
	t.Helper()
	if err := e.s.Done(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (e wasmExchange) upstream() wasmhost.Message     { return e.s.Upstream() }
func (e wasmExchange) downstream() wasmhost.Message   { return e.s.Downstream() }
func (e wasmExchange) local() *wasmhost.LocalResponse { return e.s.LocalResponse() }

func must(t *testing.T) func(wasmhost.Action, error) wasmhost.Action {
	t.Helper()
	return func(a wasmhost.Action, err error) wasmhost.Action {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
}

// nativeRig is the filter's own host in Go. It knows what Envoy does with a request
// of this filter, and no more.
type nativeRig struct {
	vm     *vm
	plugin *plugin
	// panicking names the methods of the host that panic.
	panicking map[string]bool
	// failing names the methods of the host that return an error.
	failing map[string]bool

	config   []byte
	counters []string
	counts   map[string]int64
	logs     []string
	pending  []*nativeCall
	current  *nativeExchange // whose callback runs
	answer   *wasmhost.Answer
}

func newNativeRig() *nativeRig {
	r := &nativeRig{panicking: map[string]bool{}, failing: map[string]bool{}, counts: map[string]int64{}}
	r.vm = &vm{host: r}
	return r
}

func (r *nativeRig) start(_ *testing.T, cfg []byte) error {
	r.config = cfg
	p := r.vm.NewPluginContext(0).(*plugin)
	if p.OnPluginStart(len(cfg)) != types.OnPluginStartStatusOK {
		return errors.New(r.log())
	}
	r.plugin = p
	return nil
}

func (r *nativeRig) exchange(*testing.T) exchange {
	return &nativeExchange{rig: r, ctx: r.plugin.NewHttpContext(0)}
}

type nativeCall struct {
	pendingCall
	done func(headers, size, trailers int)
	by   *nativeExchange
}

func (r *nativeRig) calls() []pendingCall {
	var calls []pendingCall
	for _, c := range r.pending {
		calls = append(calls, c.pendingCall)
	}
	return calls
}

func (r *nativeRig) metric(outcome string) int64 {
	return r.counts["weir_filter_requests_outcome="+outcome]
}

func (r *nativeRig) log() string { return strings.Join(r.logs, "\n") }

// fault does what the test planted in a method of the host.
func (r *nativeRig) fault(method string) error {
	if r.panicking[method] {
		panic("planted in " + method)
	}
	if r.failing[method] {
		return errors.New("planted in " + method)
	}
	return nil
}

func (r *nativeRig) configuration() ([]byte, error) {
	if len(r.config) == 0 {
		return nil, errors.New("the plugin has no configuration")
	}
	return r.config, r.fault("configuration")
}

func (r *nativeRig) defineCounter(name string) uint32 {
	_ = r.fault("defineCounter")
	r.counters = append(r.counters, name)
	return uint32(len(r.counters) - 1)
}

func (r *nativeRig) count(counter uint32) {
	_ = r.fault("count")
	r.counts[r.counters[counter]]++
}

func (r *nativeRig) logWarn(text string) {
	_ = r.fault("logWarn")
	r.logs = append(r.logs, text)
}

func (r *nativeRig) logError(text string) { r.logs = append(r.logs, text) }

func (r *nativeRig) requestHeaders() ([][2]string, error) {
	return r.current.headers, r.fault("requestHeaders")
}

func (r *nativeRig) setRequestHeaders(headers [][2]string) error {
	r.current.headers = replace(r.current.headers, headers)
	return r.fault("setRequestHeaders")
}

func (r *nativeRig) setResponseHeaders(headers [][2]string) error {
	r.current.down.Headers = replace(r.current.down.Headers, headers)
	return r.fault("setResponseHeaders")
}

func replace(pairs, with [][2]string) [][2]string {
	var kept [][2]string
	for _, p := range pairs {
		if _, n := lookup(with, p[0]); n == 0 {
			kept = append(kept, p)
		}
	}
	return append(kept, with...)
}

func (r *nativeRig) resume() error {
	r.current.resumed = true
	return r.fault("resume")
}

func (r *nativeRig) respond(status uint32, headers [][2]string, body []byte, grpcStatus int32) error {
	if err := r.fault("respond"); err != nil {
		return err
	}
	if r.current.answered == nil {
		r.current.answered = &wasmhost.LocalResponse{
			Status: int(status), Headers: headers, Body: body, GRPCStatus: int(grpcStatus),
		}
	}
	return nil
}

func (r *nativeRig) call(cluster string, headers [][2]string, body []byte, timeout uint32, done func(headers, size, trailers int)) error {
	if err := r.fault("call"); err != nil {
		return err
	}
	if healthy, known := clusters()[cluster]; !healthy {
		return fmt.Errorf("cluster known: %v", known)
	}
	c := &nativeCall{done: done, by: r.current}
	c.pendingCall = pendingCall{
		cluster, headers, append([]byte(nil), body...), time.Duration(timeout) * time.Millisecond,
		func(t *testing.T, a wasmhost.Answer) {
			t.Helper()
			for i := range r.pending {
				if r.pending[i] == c {
					r.pending = append(r.pending[:i:i], r.pending[i+1:]...)
					break
				}
			}
			// The SDK drops the answer for a stream that is gone.
			if c.by.gone {
				return
			}
			r.answer = &a
			c.by.run(func() wasmhost.Action {
				done(len(a.Headers), len(a.Body), len(a.Trailers))
				return wasmhost.Pause
			}, func(wasmhost.Action) {})
			r.answer = nil
		},
	}
	r.pending = append(r.pending, c)
	return nil
}

func (r *nativeRig) answerHeaders() ([][2]string, error) {
	return r.answer.Headers, r.fault("answerHeaders")
}

func (r *nativeRig) answerBody(int) ([]byte, error) { return r.answer.Body, r.fault("answerBody") }

func (r *nativeRig) answerTrailers() ([][2]string, error) {
	return r.answer.Trailers, r.fault("answerTrailers")
}

// nativeExchange holds a request back, and lets it go on, as Envoy does.
type nativeExchange struct {
	rig *nativeRig
	ctx types.HttpContext

	headers, trailers [][2]string
	held              []byte
	queue             []func() // while all is stopped
	stopped, resumed  bool
	ended, gone       bool
	buffering         bool

	up, down wasmhost.Message
	answered *wasmhost.LocalResponse
	sent     bool
}

// run makes a callback, then does what it asked for.
func (e *nativeExchange) run(callback func() wasmhost.Action, apply func(wasmhost.Action)) wasmhost.Action {
	e.rig.current = e
	action := callback()
	apply(action)
	if e.answered != nil && !e.sent {
		e.sent = true
		if !e.down.Begun {
			e.down.Headers = append([][2]string{{":status", strconv.Itoa(e.answered.Status)}}, e.answered.Headers...)
			e.ctx.OnHttpResponseHeaders(len(e.down.Headers), len(e.answered.Body) == 0)
			e.down.Body = e.answered.Body
			e.down.Begun, e.down.Ended = true, true
		}
	}
	if e.resumed && !e.sent {
		e.resumed, e.stopped, e.buffering = false, false, false
		e.forward()
		for _, event := range e.queue {
			event()
		}
		e.queue = nil
	}
	return action
}

func (e *nativeExchange) forward() {
	if !e.up.Begun {
		e.up.Begun, e.up.Headers, e.headers = true, e.headers, nil
	}
	e.up.Body = append(e.up.Body, e.held...)
	e.held = nil
	e.up.Trailers = e.trailers
	e.up.Ended = e.ended
}

// deliver hands over an event, now or once the stream is resumed.
func (e *nativeExchange) deliver(event func() wasmhost.Action) wasmhost.Action {
	switch {
	case e.gone, e.sent:
		return wasmhost.Pause
	case e.stopped:
		e.queue = append(e.queue, func() { event() })
		return wasmhost.StopAll
	}
	return event()
}

func (e *nativeExchange) requestHeaders(_ *testing.T, headers [][2]string, end bool) wasmhost.Action {
	e.headers = append([][2]string(nil), headers...)
	e.ended = end
	return e.run(func() wasmhost.Action {
		return wasmhost.Action(e.ctx.OnHttpRequestHeaders(len(headers), end))
	}, func(a wasmhost.Action) {
		switch a {
		case wasmhost.Continue:
			e.forward()
		case wasmhost.StopAll, wasmhost.PauseWatermark:
			e.stopped = true
		case wasmhost.Pause:
		}
	})
}

func (e *nativeExchange) requestBody(_ *testing.T, chunk []byte, end bool) wasmhost.Action {
	return e.deliver(func() wasmhost.Action {
		e.ended = end
		size := len(chunk)
		if e.buffering {
			size += len(e.held)
		}
		return e.run(func() wasmhost.Action {
			return wasmhost.Action(e.ctx.OnHttpRequestBody(size, end))
		}, func(a wasmhost.Action) {
			e.held = append(e.held, chunk...)
			e.buffering = a == wasmhost.Pause
			if a == wasmhost.Continue {
				e.forward()
			}
		})
	})
}

func (e *nativeExchange) requestTrailers(_ *testing.T, trailers [][2]string) wasmhost.Action {
	return e.deliver(func() wasmhost.Action {
		e.trailers = trailers
		e.ended = true
		return e.run(func() wasmhost.Action {
			return wasmhost.Action(e.ctx.OnHttpRequestTrailers(len(trailers)))
		}, func(a wasmhost.Action) {
			if a == wasmhost.Continue {
				e.forward()
			}
		})
	})
}

func (e *nativeExchange) responseHeaders(_ *testing.T, headers [][2]string) {
	if e.gone || e.sent {
		return
	}
	e.down.Headers = append([][2]string(nil), headers...)
	e.run(func() wasmhost.Action {
		return wasmhost.Action(e.ctx.OnHttpResponseHeaders(len(headers), true))
	}, func(a wasmhost.Action) {
		e.down.Begun = a == wasmhost.Continue
		e.down.Ended = e.down.Begun
	})
}

func (e *nativeExchange) done(*testing.T) {
	e.rig.current = e
	e.ctx.OnHttpStreamDone()
	e.gone = true
}

func (e *nativeExchange) upstream() wasmhost.Message     { return e.up }
func (e *nativeExchange) downstream() wasmhost.Message   { return e.down }
func (e *nativeExchange) local() *wasmhost.LocalResponse { return e.answered }

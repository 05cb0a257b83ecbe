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
	// metric counts the requests of all rules with an outcome, counter one metric.
	metric(outcome string) int64
	counter(name string) int64
	log() string
	// tick calls the plugin if it wants to be called, close ends it. Both report
	// whether the plugin is at rest, or has ended.
	tick(t *testing.T) bool
	close(t *testing.T) bool
}

// An exchange is one request and its response.
type exchange interface {
	requestHeaders(t *testing.T, headers [][2]string, end bool) wasmhost.Action
	requestBody(t *testing.T, chunk []byte, end bool) wasmhost.Action
	requestTrailers(t *testing.T, trailers [][2]string) wasmhost.Action
	responseHeaders(t *testing.T, headers [][2]string)
	done(t *testing.T)
	property(value []byte, path ...string)
	state(name string) string
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

func (r *wasmRig) metric(outcome string) int64 { return requests(r.vm.Metrics(), outcome) }

func (r *wasmRig) counter(name string) int64 {
	v, _ := r.vm.Metric(name)
	return v
}

// requests adds up an outcome over all rules.
func requests(counts map[string]int64, outcome string) int64 {
	var sum int64
	for name, n := range counts {
		if strings.HasPrefix(name, "weir_filter_requests_rule=") && strings.HasSuffix(name, "_outcome="+outcome) {
			sum += n
		}
	}
	return sum
}

func (r *wasmRig) tick(t *testing.T) bool {
	t.Helper()
	if r.plugin.TickPeriod() == 0 {
		return true
	}
	if err := r.plugin.Tick(t.Context()); err != nil {
		t.Fatal(err)
	}
	return false
}

func (r *wasmRig) close(t *testing.T) bool {
	t.Helper()
	if r.plugin.Done() {
		return true
	}
	done, err := r.plugin.Close(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return done
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

func (e wasmExchange) property(value []byte, path ...string) { e.s.SetProperty(value, path...) }
func (e wasmExchange) state(name string) string              { return string(e.s.State("wasm." + name)) }

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
	period   uint32
	over     bool // the plugin said so
}

func newNativeRig() *nativeRig {
	r := &nativeRig{panicking: map[string]bool{}, failing: map[string]bool{}, counts: map[string]int64{}}
	r.vm = newVM(r)
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
	return &nativeExchange{
		rig: r, ctx: r.plugin.NewHttpContext(0),
		properties: map[string][]byte{}, states: map[string]string{},
	}
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

func (r *nativeRig) metric(outcome string) int64 { return requests(r.counts, outcome) }
func (r *nativeRig) counter(name string) int64   { return r.counts[name] }

func (r *nativeRig) tick(*testing.T) bool {
	if r.period == 0 {
		return true
	}
	r.current = nil
	r.plugin.OnTick()
	return false
}

func (r *nativeRig) close(*testing.T) bool {
	r.current = nil
	return r.over || r.plugin.OnPluginDone()
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

func (r *nativeRig) defineGauge(name string) uint32 { return r.defineCounter(name) }

func (r *nativeRig) setGauge(gauge uint32, value uint64) {
	r.counts[r.counters[gauge]] = int64(value)
}

func (r *nativeRig) setTick(milliseconds uint32) error {
	r.period = milliseconds
	return r.fault("setTick")
}

func (r *nativeRig) pluginDone() { r.over = true }

func (r *nativeRig) requestBody(start, size int) ([]byte, error) {
	chunk := r.current.chunk
	start = min(start, len(chunk))
	return append([]byte(nil), chunk[start:min(start+size, len(chunk))]...), r.fault("requestBody")
}

func (r *nativeRig) property(path []string) (value []byte, found bool, err error) {
	value, found = r.current.properties[strings.Join(path, "/")]
	return value, found, r.fault("property")
}

func (r *nativeRig) setState(name, value string) error {
	r.current.states[name] = value
	return r.fault("setState")
}

func (r *nativeRig) removeRequestHeader(name string) error {
	r.current.headers = replace(r.current.headers, [][2]string{{name, ""}})
	r.current.headers = r.current.headers[:len(r.current.headers)-1]
	return r.fault("removeRequestHeader")
}

func (r *nativeRig) now() time.Time { return time.Unix(1, 0) }

func (r *nativeRig) logDebug(text string) { r.logs = append(r.logs, text) }

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
	if len(headers) > 0 {
		if err := r.fault("respond with headers"); err != nil {
			return err
		}
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
			r.answer = &a
			defer func() { r.answer = nil }()
			answered := func() wasmhost.Action {
				done(len(a.Headers), len(a.Body), len(a.Trailers))
				return wasmhost.Pause
			}
			switch {
			case c.by == nil: // the plugin's own
				r.current = nil
				answered()
			case !c.by.gone: // the SDK drops the answer for a stream that is gone
				c.by.run(answered, func(wasmhost.Action) {})
			}
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
	chunk, held       []byte
	properties        map[string][]byte
	states            map[string]string
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
			e.chunk = append(append([]byte(nil), e.held...), chunk...)
			size += len(e.held)
		} else {
			e.chunk = chunk
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

func (e *nativeExchange) property(value []byte, path ...string) {
	e.properties[strings.Join(path, "/")] = value
}

func (e *nativeExchange) state(name string) string { return e.states[name] }

func (e *nativeExchange) upstream() wasmhost.Message     { return e.up }
func (e *nativeExchange) downstream() wasmhost.Message   { return e.down }
func (e *nativeExchange) local() *wasmhost.LocalResponse { return e.answered }

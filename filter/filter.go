// Package filter is the behaviour of Weir's Envoy filter, a proxy-wasm plugin.
//
// [NewVMContext] is the entry; cmd/filter registers it with the SDK. Rules come from
// the plugin's configuration (package filter/config), values from package
// filter/extract. docs/filter.md is the reference for users.
//
// # What it does with a request
//
// At the headers it looks which rules hold, takes the values that they name and forms
// descriptors. A unary gRPC call asks envoy.service.ratelimit.v3.RateLimitService
// whether they may be charged. Meanwhile the request stands still, and the upstream
// sees no byte of it.
//
//   - Allowed: the request goes on; the service's headers are added to it and to the
//     response, in place of headers of the same name.
//   - Refused: the configured answer, 429 by default, with the service's headers
//     (gRPC 8, RESOURCE_EXHAUSTED).
//   - Unavailable, which is every other outcome of the call: 500 with a generic body
//     and no rate headers (gRPC 14, UNAVAILABLE). The cause is in the log. If all
//     descriptors say on_error: allow, the request goes on instead, uncharged.
//   - Invalid, which is a key or a cost that is missing, malformed or repeated: 400
//     (gRPC 3, INVALID_ARGUMENT). No call is made.
//   - Too large, which is a body over hold_bytes that must be read: 413 (gRPC 8, as
//     gRPC itself answers a message over its limit). No call is made.
//
// When no descriptor applies, the request goes on and nothing is counted. A call is
// made once: a charge that may have been committed is not repeated.
//
// # When it is charged
//
// A cost that is known at the headers is charged there, and so is one of the body's
// bytes if there is a Content-Length. A body without one is held back up to hold_bytes
// and charged once when it has ended. A longer one, a gRPC stream, and a body that the
// client does not send before it is asked to (Expect: 100-continue), are charged in
// blocks, each before any byte of it goes on. When a block is refused, what the
// waiting bytes need is asked for alone, and when that is refused the stream ends.
//
// What was charged and not forwarded by the end of the request is refunded, whoever
// ended it, with the receipt of the charge. Refunds are sent by the plugin, since the
// stream is gone by then. One that is lost leaves the client charged for too much;
// nothing lets it have more than its budget.
//
// # Failure
//
// Every callback recovers from a panic and answers 500 for that stream; the VM goes
// on. Callbacks that are not here do nothing (they are the SDK's defaults). No state is
// in package variables: counters belong to the VM's context, all else to the plugin's
// and the stream's.
//
// # Host
//
// Envoy must be configured with allow_on_headers_stop_iteration, or a body without
// a length is never seen, with buffers larger than hold_bytes, and with
// proxy_100_continue, or Envoy asks for a body before it may be sent. Types are used
// from one thread, as Envoy does.
package filter

import (
	"strconv"
	"strings"
	"time"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"

	"github.com/weir-dev/weir/filter/config"
)

// vm is the context of a VM. Several plugins may live in one.
type vm struct {
	types.DefaultVMContext
	host host

	// A metric that is defined again gets a new number, and no number is ever
	// freed, so each is defined once for the VM and not for each plugin.
	metrics map[string]uint32
}

// NewVMContext returns what the SDK calls back.
func NewVMContext() types.VMContext { return newVM(sdk{}) }

func newVM(h host) *vm { return &vm{host: h, metrics: map[string]uint32{}} }

// NewPluginContext implements [types.VMContext].
func (v *vm) NewPluginContext(uint32) types.PluginContext { return &plugin{vm: v, host: v.host} }

// plugin is the context of one plugin configuration.
type plugin struct {
	types.DefaultPluginContext
	vm   *vm
	host host

	cfg         *config.Config // nil until the plugin has started
	counters    counters
	callHeaders [][2]string
	timeout     uint32 // milliseconds
	message     []byte // a call's body, reused: the host copies it
	refunds     refunds
	outage      sampler
}

// OnPluginStart implements [types.PluginContext]. A configuration that it refuses
// is in the log, since Envoy passes no reason on.
func (p *plugin) OnPluginStart(int) (status types.OnPluginStartStatus) {
	defer func() {
		if r := recover(); r != nil {
			status = types.OnPluginStartStatusFailed
			p.host.logError("panic at the plugin's start: " + describe(r))
		}
	}()
	if err := p.start(); err != nil {
		// One record, although it may name several faults.
		p.host.logError("refusing the configuration: " + strings.ReplaceAll(err.Error(), "\n", "; "))
		return types.OnPluginStartStatusFailed
	}
	return types.OnPluginStartStatusOK
}

func (p *plugin) start() error {
	text, err := p.host.configuration()
	if err != nil {
		return err
	}
	cfg, err := config.Parse(text)
	if err != nil {
		return err
	}
	p.counters = p.vm.define(cfg)
	p.callHeaders = callHeaders(cfg.Cluster, cfg.Timeout)
	p.timeout = uint32(cfg.Timeout.Milliseconds()) //nolint:gosec // at most config.MaxTimeout
	p.refunds.plugin = p
	p.cfg = cfg
	return nil
}

// OnTick implements [types.PluginContext].
func (p *plugin) OnTick() {
	defer p.rescue("a tick")

	p.refunds.send()
}

// OnPluginDone implements [types.PluginContext]: another configuration has taken over
// and the last stream of this one has ended. Refunds that are still to be made keep the
// plugin.
func (p *plugin) OnPluginDone() (done bool) {
	defer func() {
		if r := recover(); r != nil {
			done = true
			p.panicked("the plugin's end", r)
		}
	}()
	return p.refunds.end()
}

// rescue ends a callback of the plugin that panicked. It is deferred itself, or recover
// would not work.
func (p *plugin) rescue(where string) {
	if r := recover(); r != nil {
		p.panicked(where, r)
	}
}

func (p *plugin) panicked(where string, r any) {
	defer func() { _ = recover() }() // what panicked may do so again
	p.host.logError("panic in " + where + ": " + describe(r))
}

// NewHttpContext implements [types.PluginContext]. It never returns nil, which would
// mean that the plugin is for TCP.
func (p *plugin) NewHttpContext(uint32) types.HttpContext {
	s := &stream{plugin: p, host: p.host}
	s.request.host = p.host
	s.charges = s.chargesBuf[:0]
	s.values = s.valuesBuf[:0]
	s.grants = s.grantsBuf[:0]
	return s
}

// sampler lets a log record through once in a while: an outage has one for each request.
type sampler struct {
	last    time.Time
	skipped int
}

// samplePeriod is how often a record of one kind is written.
const samplePeriod = time.Second

// sample returns what to write for a text, "" for nothing.
func (s *sampler) sample(now time.Time, text string) string {
	if now.Sub(s.last) < samplePeriod {
		s.skipped++
		return ""
	}
	if s.skipped > 0 {
		text += " (and " + strconv.Itoa(s.skipped) + " more like it)"
	}
	s.last, s.skipped = now, 0
	return text
}

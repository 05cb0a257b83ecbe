// Package filter is the behaviour of Weir's Envoy filter, a proxy-wasm plugin.
//
// [NewVMContext] is the entry; cmd/filter registers it with the SDK. Rules come from
// the plugin's configuration (package filter/config).
//
// # What it does with a request
//
// At the headers it takes the values that the rules name and forms descriptors. One
// unary gRPC call asks envoy.service.ratelimit.v3.RateLimitService whether they may
// be charged. Meanwhile the request stands still. A cost that needs the body's
// length has it from Content-Length, else the body is held back until it has ended.
// The upstream sees no byte of a request that is not allowed.
//
//   - Allowed: the request goes on; the service's headers are added to it and to the
//     response, in place of headers of the same name.
//   - Refused: 429 with the service's headers and body, or a short text
//     (gRPC 8, RESOURCE_EXHAUSTED).
//   - Unavailable, which is every other outcome of the call: 500 with a generic body
//     and no rate headers (gRPC 14, UNAVAILABLE). The cause is in the log.
//   - Invalid, which is a key that is missing, malformed or repeated: 400
//     (gRPC 3, INVALID_ARGUMENT). No call is made.
//   - Too large, which is a body of unknown length over hold_bytes: 413
//     (gRPC 8, as gRPC itself answers a message over its limit). No call is made.
//
// A call is made once: a charge that may have been committed is not repeated. When no
// descriptor applies, the request goes on and nothing is counted.
//
// # Keys
//
// A header that is absent and one that is empty are different: the empty string is a
// value of type string, and no UUID. A header that comes twice is refused, whatever
// the rule says about a missing one. Within a descriptor, deny is stronger than skip.
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
// a length is never seen. Types are used from one thread, as Envoy does.
package filter

import (
	"strings"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"

	"github.com/weir-dev/weir/filter/config"
)

// An outcome is what became of a request that a rule applied to. The set is closed.
type outcome int

const (
	allowed outcome = iota
	refused
	unavailable
	invalid
	tooLarge
	outcomes // their number
)

// Envoy's stats have no labels; the part from "_outcome=" is for its stats_tags.
func (o outcome) metric() string {
	const name = "weir_filter_requests_outcome="
	switch o {
	case allowed:
		return name + "allowed"
	case refused:
		return name + "refused"
	case invalid:
		return name + "invalid"
	case tooLarge:
		return name + "too_large"
	case unavailable, outcomes:
	}
	return name + "unavailable"
}

// vm is the context of a VM. Several plugins may live in one.
type vm struct {
	types.DefaultVMContext
	host host

	// A metric that is defined again gets a new number, and no number is ever
	// freed, so the counters are defined once for the VM and not for each plugin.
	counters [outcomes]uint32
	defined  bool
}

// NewVMContext returns what the SDK calls back.
func NewVMContext() types.VMContext { return &vm{host: sdk{}} }

// NewPluginContext implements [types.VMContext].
func (v *vm) NewPluginContext(uint32) types.PluginContext { return &plugin{vm: v} }

func (v *vm) count(o outcome) { v.host.count(v.counters[o]) }

// plugin is the context of one plugin configuration.
type plugin struct {
	types.DefaultPluginContext
	vm *vm

	cfg         *config.Config // nil until the plugin has started
	callHeaders [][2]string
	timeout     uint32 // milliseconds
	message     []byte // a call's body, reused: the host copies it
}

// OnPluginStart implements [types.PluginContext]. A configuration that it refuses
// is in the log, since Envoy passes no reason on.
func (p *plugin) OnPluginStart(int) (status types.OnPluginStartStatus) {
	defer func() {
		if r := recover(); r != nil {
			status = types.OnPluginStartStatusFailed
			p.vm.host.logError("panic at the plugin's start: " + describe(r))
		}
	}()
	if err := p.start(); err != nil {
		// One record, although it may name several faults.
		p.vm.host.logError("refusing the configuration: " + strings.ReplaceAll(err.Error(), "\n", "; "))
		return types.OnPluginStartStatusFailed
	}
	return types.OnPluginStartStatusOK
}

func (p *plugin) start() error {
	text, err := p.vm.host.configuration()
	if err != nil {
		return err
	}
	cfg, err := config.Parse(text)
	if err != nil {
		return err
	}
	if !p.vm.defined {
		for o := range outcomes {
			p.vm.counters[o] = p.vm.host.defineCounter(o.metric())
		}
		p.vm.defined = true
	}
	p.callHeaders = callHeaders(cfg.Cluster, cfg.Timeout)
	p.timeout = uint32(cfg.Timeout.Milliseconds()) //nolint:gosec // at most config.MaxTimeout
	p.cfg = cfg
	return nil
}

// NewHttpContext implements [types.PluginContext]. It never returns nil, which would
// mean that the plugin is for TCP.
func (p *plugin) NewHttpContext(uint32) types.HttpContext {
	s := &stream{plugin: p, host: p.vm.host}
	s.charges = s.chargesBuf[:0]
	s.values = s.valuesBuf[:0]
	return s
}

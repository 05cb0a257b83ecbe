// Package wasmhost is a proxy-wasm host on wazero: it runs the filter's module as
// Envoy does, without Envoy. Tests, the control plane's check of a configuration and
// `weir explain` use it.
//
// [Compile] a module once. Each [Module.NewVM] is a VM of its own, [VM.Start] loads a
// plugin configuration into it, [Plugin.NewStream] begins a request. [Check] does all
// that is needed to know whether a configuration is accepted.
//
// # What it imitates
//
// ABI 0.2 as Envoy 1.40 implements it: maps, buffers, properties, metrics, shared data
// with its compare-and-swap, HTTP calls, local responses, pauses (with
// allow_on_headers_stop_iteration) and what the sizes of body callbacks mean after
// them. A [Stream] knows what the upstream and the client have been sent. Shared queues,
// foreign functions and TCP streams answer "unimplemented".
//
// # Failure
//
// A guest that traps, exits or panics is an error that has its text. Its VM is dead
// from then on, as a worker's is in Envoy. A call ends with an error when its context
// does, so an endless loop in the guest is no danger.
//
// # Concurrency
//
// A Module is safe for concurrent use. A VM, with its plugins and streams, is not: it
// is one worker's. Nothing is global.
package wasmhost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"time"

	"github.com/tetratelabs/wazero"
	"github.com/tetratelabs/wazero/api"
	"github.com/tetratelabs/wazero/experimental"
	"github.com/tetratelabs/wazero/imports/wasi_snapshot_preview1"
)

// A Module is a compiled proxy-wasm module.
type Module struct {
	runtime  wazero.Runtime
	compiled wazero.CompiledModule
}

// Compile compiles a module. That takes seconds; the result is for many VMs.
func Compile(ctx context.Context, wasm []byte) (*Module, error) {
	m := &Module{
		// Without this a guest's endless loop could not be ended.
		runtime: wazero.NewRuntimeWithConfig(ctx, wazero.NewRuntimeConfig().WithCloseOnContextDone(true)),
	}
	if err := m.compile(ctx, wasm); err != nil {
		return nil, errors.Join(err, m.Close(ctx))
	}
	return m, nil
}

func (m *Module) compile(ctx context.Context, wasm []byte) error {
	if _, err := wasi_snapshot_preview1.Instantiate(ctx, m.runtime); err != nil {
		return fmt.Errorf("setting up WASI: %w", err)
	}
	if err := exportABI(ctx, m.runtime); err != nil {
		return fmt.Errorf("setting up the host's functions: %w", err)
	}
	var err error
	workers := experimental.WithCompilationWorkers(ctx, runtime.GOMAXPROCS(0))
	if m.compiled, err = m.runtime.CompileModule(workers, wasm); err != nil {
		return fmt.Errorf("compiling the module: %w", err)
	}
	exports := m.compiled.ExportedFunctions()
	for _, name := range []string{allocateExport, "proxy_abi_version_0_2_0", "proxy_on_context_create", "proxy_on_configure"} {
		if exports[name] == nil {
			return fmt.Errorf("the module has no function %s: not a proxy-wasm plugin", name)
		}
	}
	return nil
}

// Close frees the module and all its VMs.
func (m *Module) Close(ctx context.Context) error { return m.runtime.Close(ctx) }

// Check reports why the module would not start with a plugin configuration; nil if it
// would. It compiles the module: a caller with many configurations uses [Compile]
// once and [Module.Check].
func Check(ctx context.Context, wasm, pluginConfig []byte) error {
	m, err := Compile(ctx, wasm)
	if err != nil {
		return err
	}
	return errors.Join(m.Check(ctx, pluginConfig), m.Close(ctx))
}

// Check reports why the module would not start with a plugin configuration; nil if it
// would.
func (m *Module) Check(ctx context.Context, pluginConfig []byte) error {
	vm, err := m.NewVM(ctx, VMConfig{})
	if err != nil {
		return err
	}
	_, err = vm.Start(ctx, pluginConfig)
	return errors.Join(err, vm.Close(ctx))
}

// VMConfig says what a VM finds in its host.
type VMConfig struct {
	// Configuration is the VM's own configuration. Defaults to none.
	Configuration []byte
	// Clusters says which clusters exist and, by their value, whether they have a
	// host. A call to an unknown cluster is a bad argument, one to a cluster without
	// hosts an internal failure, as in Envoy. Nil means that every call can be made.
	Clusters map[string]bool
	// Shared is the data shared with other VMs. Defaults to data of the VM's own.
	Shared *SharedData
}

// A VM is an instance of a module.
type VM struct {
	cfg    VMConfig
	module api.Module
	output output

	dead      error
	started   bool
	lastID    uint32
	plugins   map[uint32]*Plugin
	streams   map[uint32]*Stream
	effective uint32 // the context that host functions act on

	logs    []Log
	metrics metrics

	calls    map[uint32]*Call
	lastCall uint32
	answer   *Answer // during a call's callback

	config []byte // what the guest reads as its plugin configuration
}

// maxLogs is how many log records a VM keeps.
const maxLogs = 4096

// Log is a record that the guest logged.
type Log struct {
	Level LogLevel
	Text  string
}

// LogLevel is a proxy-wasm log level.
type LogLevel uint32

// The log levels.
const (
	LogTrace LogLevel = iota
	LogDebug
	LogInfo
	LogWarn
	LogError
	LogCritical
)

// NewVM instantiates the module and runs its initialisation.
func (m *Module) NewVM(ctx context.Context, cfg VMConfig) (*VM, error) {
	if cfg.Shared == nil {
		cfg.Shared = &SharedData{}
	}
	v := &VM{
		cfg:     cfg,
		plugins: map[uint32]*Plugin{},
		streams: map[uint32]*Stream{},
		calls:   map[uint32]*Call{},
	}
	var err error
	v.module, err = m.runtime.InstantiateModule(withVM(ctx, v), m.compiled, wazero.NewModuleConfig().
		WithName(""). // many instances of one module
		WithStartFunctions("_initialize").
		WithSysWalltime().WithSysNanotime().
		WithStdout(&v.output).WithStderr(&v.output))
	if err != nil {
		return nil, fmt.Errorf("instantiating the module: %w", v.explain(err))
	}
	return v, nil
}

// Close frees the VM.
func (v *VM) Close(ctx context.Context) error { return v.module.Close(ctx) }

// Logs returns the records logged so far, the last 4096 at most.
func (v *VM) Logs() []Log { return v.logs }

// Metric returns the value of a counter or gauge, or of the last record of a
// histogram; false if the guest has not defined it.
func (v *VM) Metric(name string) (int64, bool) { return v.metrics.value(name) }

// Metrics returns all counters and gauges, by name.
func (v *VM) Metrics() map[string]int64 { return maps.Clone(v.metrics.values) }

// MetricDefinitions returns how often the guest has defined a metric. Envoy keeps
// memory for each.
func (v *VM) MetricDefinitions() int { return len(v.metrics.names) }

// Memory returns the size of the guest's memory in bytes. It never shrinks.
func (v *VM) Memory() uint64 { return uint64(v.module.Memory().Size()) }

// Tick calls the plugin's tick.
func (p *Plugin) Tick(ctx context.Context) error {
	_, err := p.vm.call(ctx, p.id, "proxy_on_tick", uint64(p.id))
	return err
}

// A Plugin is a plugin configuration in a VM.
type Plugin struct {
	vm   *VM
	id   uint32
	tick time.Duration
	done bool
}

// TickPeriod returns how often the guest wants [Plugin.Tick]; 0 is never.
func (p *Plugin) TickPeriod() time.Duration { return p.tick }

// Done reports whether the guest has said that it is done, after [Plugin.Close]
// reported that it was not.
func (p *Plugin) Done() bool { return p.done }

// Start creates a plugin with a configuration. An error has what the guest logged as
// it refused.
func (v *VM) Start(ctx context.Context, config []byte) (*Plugin, error) {
	p := &Plugin{vm: v, id: v.nextID()}
	v.plugins[p.id] = p
	if _, err := v.call(ctx, p.id, "proxy_on_context_create", uint64(p.id), 0); err != nil {
		return nil, err
	}
	if !v.started {
		if err := v.accepts(ctx, "proxy_on_vm_start", p.id, len(v.cfg.Configuration)); err != nil {
			return nil, err
		}
		v.started = true
	}
	v.config = config
	defer func() { v.config = nil }()
	if err := v.accepts(ctx, "proxy_on_configure", p.id, len(config)); err != nil {
		return nil, err
	}
	return p, nil
}

// accepts calls an export that answers whether it accepts a configuration.
func (v *VM) accepts(ctx context.Context, name string, id uint32, size int) error {
	before := len(v.logs)
	ok, err := v.call(ctx, id, name, uint64(id), u64(size))
	switch {
	case err != nil:
		return err
	case ok != 0:
		return nil
	}
	var texts []string
	for _, l := range v.logs[min(before, len(v.logs)):] {
		texts = append(texts, l.Text)
	}
	if len(texts) == 0 {
		texts = []string{"without a reason"}
	}
	return fmt.Errorf("the plugin refuses to start: %s", strings.Join(texts, "; "))
}

// VM returns the plugin's VM.
func (p *Plugin) VM() *VM { return p.vm }

// Close ends the plugin, as Envoy does once its last stream has ended. It reports
// whether the guest was done; if not, the guest still has work and the plugin goes on.
func (p *Plugin) Close(ctx context.Context) (bool, error) {
	done, err := p.vm.call(ctx, p.id, "proxy_on_done", uint64(p.id))
	if err != nil || done == 0 {
		return false, err
	}
	_, err = p.vm.call(ctx, p.id, "proxy_on_delete", uint64(p.id))
	delete(p.vm.plugins, p.id)
	return true, err
}

func (v *VM) nextID() uint32 {
	v.lastID++
	return v.lastID
}

// call calls an export for a context. A missing export is a callback that the guest
// does without. The result of one that returns nothing is 0.
func (v *VM) call(ctx context.Context, id uint32, name string, args ...uint64) (uint64, error) {
	if v.dead != nil {
		return 0, fmt.Errorf("calling %s: the VM is dead: %w", name, v.dead)
	}
	f := v.module.ExportedFunction(name)
	if f == nil {
		return 0, nil
	}
	v.effective = id
	results, err := f.Call(withVM(ctx, v), args...)
	if err != nil {
		v.dead = v.explain(err)
		return 0, fmt.Errorf("calling %s: %w", name, v.dead)
	}
	if len(results) == 0 {
		return 0, nil
	}
	return results[0], nil
}

// explain adds what the guest printed to an error: Go's runtime says there why it
// panicked, and the error itself is but a trap or an exit code.
func (v *VM) explain(err error) error {
	if text := strings.TrimSpace(v.output.String()); text != "" {
		return fmt.Errorf("%w: %s", err, text)
	}
	return err
}

// output keeps the start of what the guest prints.
type output struct{ buf bytes.Buffer }

const maxOutput = 16 << 10

func (o *output) Write(p []byte) (int, error) {
	if room := maxOutput - o.buf.Len(); room > 0 {
		o.buf.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func (o *output) String() string { return o.buf.String() }

// vmKey is the key of the VM in the context of the guest's calls: host functions
// belong to the module, which has many VMs.
type vmKey struct{}

func withVM(ctx context.Context, v *VM) context.Context {
	return context.WithValue(ctx, vmKey{}, v)
}

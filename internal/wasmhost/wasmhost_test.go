package wasmhost_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/weir-dev/weir/internal/wasmhost"
	"github.com/weir-dev/weir/internal/wasmhost/wasmtest"
)

// guest is testdata/guest, built and compiled once for all tests.
var guest = sync.OnceValues(func() (*wasmhost.Module, error) {
	dir, err := os.MkdirTemp("", "weir-guest-")
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "guest.wasm")
	cmd := exec.Command("go", "build", "-buildmode=c-shared", "-ldflags=-s -w", "-o", path, "./testdata/guest")
	cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=", "CGO_ENABLED=0")
	out, err := cmd.CombinedOutput()
	wasm, readErr := os.ReadFile(path)
	if err := errors.Join(err, readErr, os.RemoveAll(dir)); err != nil {
		return nil, errors.Join(err, errors.New(string(out)))
	}
	return wasmhost.Compile(context.Background(), wasm)
})

func newVM(t *testing.T, cfg wasmhost.VMConfig) *wasmhost.VM {
	t.Helper()
	m, err := guest()
	if err != nil {
		t.Fatal(err)
	}
	vm, err := m.NewVM(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return vm
}

func newPlugin(t *testing.T, vm *wasmhost.VM) *wasmhost.Plugin {
	t.Helper()
	p, err := vm.Start(t.Context(), []byte("{}"))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// request begins a stream with a path and more headers.
func request(t *testing.T, p *wasmhost.Plugin, path string, end bool, headers ...[2]string) (*wasmhost.Stream, wasmhost.Action) {
	t.Helper()
	s, err := p.NewStream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s.SetProperty([]byte("10.0.0.1:99"), "source", "address")
	a, err := s.RequestHeaders(t.Context(), append([][2]string{{":path", path}}, headers...), end)
	if err != nil {
		t.Fatal(err)
	}
	return s, a
}

func body(t *testing.T, s *wasmhost.Stream, chunk string, end bool) wasmhost.Action {
	t.Helper()
	a, err := s.RequestBody(t.Context(), []byte(chunk), end)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func header(m wasmhost.Message, name string) (values []string) {
	for _, h := range m.Headers {
		if h[0] == name {
			values = append(values, h[1])
		}
	}
	return values
}

func TestMaps(t *testing.T) {
	t.Parallel()

	p := newPlugin(t, newVM(t, wasmhost.VMConfig{}))
	s, _ := request(t, p, "/headers", true, [2]string{"X-Gone", "1"}, [2]string{"x-gone", "2"},
		[2]string{"x-twice", "a"}, [2]string{"x-twice", "b"}, [2]string{"x-empty", ""})
	want := wasmhost.Message{
		Headers: [][2]string{
			{":path", "/headers"},
			{"x-twice", "new"},
			{"x-twice", "b"},
			{"x-empty", ""},
			{"x-added", "1"},
			{"x-added", ""},
			{"x-seen", `"" <nil> error status returned by host: not found`},
		},
		Begun: true, Ended: true,
	}
	if diff := cmp.Diff(want, s.Upstream()); diff != "" {
		t.Errorf("upstream (-want +got):\n%s", diff)
	}

	s, _ = request(t, p, "/replace", false, [2]string{"x", "y"})
	if diff := cmp.Diff([][2]string{{":path", "/new"}}, s.Upstream().Headers); diff != "" {
		t.Errorf("upstream's headers (-want +got):\n%s", diff)
	}
}

func TestProperties(t *testing.T) {
	t.Parallel()

	s, _ := request(t, newPlugin(t, newVM(t, wasmhost.VMConfig{})), "/property", true)
	want := []string{"10.0.0.1:99 error status returned by host: not found"}
	if diff := cmp.Diff(want, header(s.Upstream(), "x-seen")); diff != "" {
		t.Errorf("x-seen (-want +got):\n%s", diff)
	}
}

// Shared data as ENVOY.md, section 8, has it, between two VMs.
func TestSharedData(t *testing.T) {
	t.Parallel()

	const notFound, mismatch = "error status returned by host: not found", "error status returned by host: cas mismatch"
	shared := &wasmhost.SharedData{}
	for i, want := range []string{
		notFound + ", <nil>, " + mismatch + ", <nil>",
		"<nil>, " + mismatch + ", " + mismatch + ", <nil>",
	} {
		s, _ := request(t, newPlugin(t, newVM(t, wasmhost.VMConfig{Shared: shared})), "/shared", true)
		if diff := cmp.Diff([]string{want}, header(s.Upstream(), "x-seen")); diff != "" {
			t.Errorf("VM %d (-want +got):\n%s", i, diff)
		}
	}
	if value, _, ok := shared.Get("k"); string(value) != "1++" || !ok {
		t.Errorf("shared data = %q, %v", value, ok)
	}
}

// What a body callback's size means depends on what the last one returned.
func TestBodySizes(t *testing.T) {
	t.Parallel()

	p := newPlugin(t, newVM(t, wasmhost.VMConfig{}))
	for _, tc := range []struct{ path, want string }{
		{"/hold", "3 5 5"},      // all that is held
		{"/watermark", "3 2 0"}, // what is new
	} {
		s, _ := request(t, p, tc.path, false)
		body(t, s, "abc", false)
		body(t, s, "de", false)
		if up := s.Upstream(); up.Begun || len(up.Body) > 0 {
			t.Errorf("%s: the upstream has %q", tc.path, up.Body)
		}
		body(t, s, "", true)
		up := s.Upstream()
		if diff := cmp.Diff([]string{tc.want}, header(up, "x-sizes")); diff != "" {
			t.Errorf("%s: sizes (-want +got):\n%s", tc.path, diff)
		}
		if string(up.Body) != "abcde" || !up.Ended {
			t.Errorf("%s: the upstream has %q, ended: %v", tc.path, up.Body, up.Ended)
		}
	}

	// To continue in the body lets paused headers go on too.
	s, a := request(t, p, "/through", false)
	if a != wasmhost.Pause || s.Upstream().Begun {
		t.Errorf("action = %d, upstream %v", a, s.Upstream())
	}
	body(t, s, "abc", false)
	if up := s.Upstream(); !up.Begun || up.Ended || string(up.Body) != "abc" {
		t.Errorf("upstream = %v", up)
	}
	if _, err := s.RequestTrailers(t.Context(), [][2]string{{"X-Sum", "1"}}); err != nil {
		t.Fatal(err)
	}
	if up := s.Upstream(); !up.Ended || len(up.Trailers) != 1 || up.Trailers[0] != [2]string{"x-sum", "1"} {
		t.Errorf("upstream = %v", up)
	}

	s, _ = request(t, p, "/upper", false)
	body(t, s, "abc", true)
	if up := s.Upstream(); string(up.Body) != "ABC" {
		t.Errorf("the upstream has %q", up.Body)
	}
}

func TestCalls(t *testing.T) {
	t.Parallel()

	p := newPlugin(t, newVM(t, wasmhost.VMConfig{}))
	s, a := request(t, p, "/stop", false)
	if a != wasmhost.StopAll {
		t.Errorf("action = %d, want %d", a, wasmhost.StopAll)
	}
	// What arrives meanwhile waits at the host.
	if a := body(t, s, "abc", false); a != wasmhost.StopAll {
		t.Errorf("action = %d, want %d", a, wasmhost.StopAll)
	}
	body(t, s, "de", true)
	calls := p.Calls()
	if len(calls) != 1 || calls[0].Cluster != "c" || calls[0].Timeout != time.Second || s.Upstream().Begun {
		t.Fatalf("calls = %v, upstream %v", calls, s.Upstream())
	}
	answer := wasmhost.Answer{Headers: [][2]string{{":status", "200"}, {"a", "b"}}, Body: []byte("xyz"), Trailers: [][2]string{{"t", "1"}}}
	if err := calls[0].Respond(t.Context(), answer); err != nil {
		t.Fatal(err)
	}
	up := s.Upstream()
	if diff := cmp.Diff([]string{"2 3 1"}, header(up, "x-answer")); diff != "" {
		t.Errorf("x-answer (-want +got):\n%s", diff)
	}
	if string(up.Body) != "abcde" || !up.Ended {
		t.Errorf("the upstream has %q, ended: %v", up.Body, up.Ended)
	}
	if err := calls[0].Respond(t.Context(), answer); err == nil {
		t.Error("a call can be answered twice")
	}
	if len(p.Calls()) != 0 {
		t.Errorf("calls = %v, want none", p.Calls())
	}

	s, _ = request(t, p, "/incomplete", true)
	if got := header(s.Upstream(), "x-seen"); len(got) != 1 || !strings.Contains(got[0], "bad argument") {
		t.Errorf("a call without a path: %q, want a bad argument", got)
	}

	// A stream that is gone: the guest is told, and does nothing.
	s, _ = request(t, p, "/stop", true)
	if err := s.Done(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := p.Calls()[0].Respond(t.Context(), answer); err != nil {
		t.Fatal(err)
	}
	if s.Upstream().Begun {
		t.Error("a stream that is gone went on")
	}
}

func TestLocalResponse(t *testing.T) {
	t.Parallel()

	p := newPlugin(t, newVM(t, wasmhost.VMConfig{}))
	s, _ := request(t, p, "/local", false)
	want := &wasmhost.LocalResponse{Status: 418, Headers: [][2]string{{"x-tea", "pot"}}, Body: []byte("short"), GRPCStatus: 5}
	if diff := cmp.Diff(want, s.LocalResponse()); diff != "" {
		t.Errorf("local response (-want +got):\n%s", diff)
	}
	// It passes the guest's own response callback.
	wantDown := wasmhost.Message{
		Headers: [][2]string{{":status", "418"}, {"x-tea", "pot"}, {"x-request-headers", "<nil>"}},
		Body:    []byte("short"), Begun: true, Ended: true,
	}
	if diff := cmp.Diff(wantDown, s.Downstream()); diff != "" {
		t.Errorf("downstream (-want +got):\n%s", diff)
	}
	body(t, s, "abc", true)
	if s.Upstream().Begun {
		t.Error("the upstream has seen the request")
	}

	// In place of the upstream's.
	s, _ = request(t, p, "/late", true)
	if _, err := s.ResponseHeaders(t.Context(), [][2]string{{":status", "200"}}, false); err != nil {
		t.Fatal(err)
	}
	if got := header(s.Downstream(), ":status"); len(got) != 1 || got[0] != "502" || string(s.Downstream().Body) != "late" {
		t.Errorf("downstream = %v", s.Downstream())
	}
}

// Headers that went on are gone, until the stream is done.
func TestHeadersLifetime(t *testing.T) {
	t.Parallel()

	vm := newVM(t, wasmhost.VMConfig{})
	s, _ := request(t, newPlugin(t, vm), "/", true)
	if _, err := s.ResponseHeaders(t.Context(), [][2]string{{":status", "200"}}, true); err != nil {
		t.Fatal(err)
	}
	want := []string{"error status returned by host: not found"}
	if diff := cmp.Diff(want, header(s.Downstream(), "x-request-headers")); diff != "" {
		t.Errorf("x-request-headers (-want +got):\n%s", diff)
	}
	if err := s.Done(t.Context()); err != nil {
		t.Fatal(err)
	}
	logs := vm.Logs()
	if len(logs) != 1 || logs[0] != (wasmhost.Log{Level: wasmhost.LogInfo, Text: "done / <nil>"}) {
		t.Errorf("logs = %v", logs)
	}
}

func TestMetricsAndTicks(t *testing.T) {
	t.Parallel()

	vm := newVM(t, wasmhost.VMConfig{})
	p, q := newPlugin(t, vm), newPlugin(t, vm)
	for _, plugin := range []*wasmhost.Plugin{p, q, p} {
		if err := plugin.Tick(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if got, ok := vm.Metric("ticks"); got != 6 || !ok || vm.MetricDefinitions() != 2 {
		t.Errorf("ticks = %d, %v; %d definitions", got, ok, vm.MetricDefinitions())
	}
	if _, ok := vm.Metric("none"); ok {
		t.Error("a metric that no one defined is there")
	}
	if done, err := q.Close(t.Context()); !done || err != nil {
		t.Errorf("Close = %v, %v", done, err)
	}
}

func TestStartErrors(t *testing.T) {
	t.Parallel()

	for config, want := range map[string]string{
		"refuse":          "the plugin refuses to start: not this one",
		"refuse silently": "the plugin refuses to start: without a reason",
		"panic":           "panic: told to",
	} {
		vm := newVM(t, wasmhost.VMConfig{})
		if _, err := vm.Start(t.Context(), []byte(config)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Start(%q) = %v, want %q in it", config, err, want)
		}
	}
}

// A guest that panics takes its VM with it, and no other.
func TestPanic(t *testing.T) {
	t.Parallel()

	p, other := newPlugin(t, newVM(t, wasmhost.VMConfig{})), newPlugin(t, newVM(t, wasmhost.VMConfig{}))
	s, err := p.NewStream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, err = s.RequestHeaders(t.Context(), [][2]string{{":path", "/panic"}}, true)
	if err == nil || !strings.Contains(err.Error(), "panic: told to") {
		t.Errorf("RequestHeaders = %v, want the panic", err)
	}
	if _, err := p.NewStream(t.Context()); err == nil || !strings.Contains(err.Error(), "the VM is dead") {
		t.Errorf("NewStream = %v, want a dead VM", err)
	}
	if s, _ := request(t, other, "/", true); !s.Upstream().Ended {
		t.Error("another VM does not go on")
	}
}

// An endless loop ends with the context.
func TestEndlessLoop(t *testing.T) {
	t.Parallel()

	vm := newVM(t, wasmhost.VMConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := vm.Start(ctx, []byte("loop")); err == nil || ctx.Err() == nil {
		t.Errorf("Start = %v before the deadline", err)
	}
}

func TestCompileErrors(t *testing.T) {
	t.Parallel()

	for name, wasm := range map[string][]byte{
		"compiling the module":    []byte("not wasm"),
		"not a proxy-wasm plugin": {0, 'a', 's', 'm', 1, 0, 0, 0},
	} {
		if _, err := wasmhost.Compile(t.Context(), wasm); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("Compile = %v, want %q in it", err, name)
		}
	}
}

// The filter's own module, as the control plane checks a configuration.
func TestCheck(t *testing.T) {
	t.Parallel()

	const good = `{"domain": "d", "cluster": "c", "filter": {"rules": []}}`
	if err := wasmhost.Check(t.Context(), wasmtest.Bytes(t), []byte(good)); err != nil {
		t.Errorf("Check = %v", err)
	}
	m := wasmtest.Compiled(t)
	for config, want := range map[string]string{
		"": "the plugin has no configuration",
		`{"domain": "d", "cluster": "c", "filter": {"rules": [], "hold_bytes": 0}}`: "filter.hold_bytes: is 0",
	} {
		if err := m.Check(t.Context(), []byte(config)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Check(%q) = %v, want %q in it", config, err, want)
		}
	}
	// Many at once, of one module.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := m.Check(t.Context(), []byte(good)); err != nil {
				t.Errorf("Check = %v", err)
			}
		})
	}
	wg.Wait()
}

func TestModulePath(t *testing.T) {
	t.Parallel()

	if wasm, err := os.ReadFile(wasmtest.Module(t)); err != nil || string(wasm[:4]) != "\x00asm" {
		t.Errorf("Module has %q, %v", wasm[:min(4, len(wasm))], err)
	}
}

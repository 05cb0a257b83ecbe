package envoyproc_test

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"go.uber.org/goleak"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/weir-dev/weir/internal/envoyproc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience is for a host on which everything else runs too.
const patience = time.Minute

func binary(t *testing.T) string {
	t.Helper()
	path, err := envoyproc.Find(os.Getenv("ENVOY"))
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// teapot is a bootstrap whose one listener answers 418 by itself.
const teapot = `{
  "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
  "static_resources": {"listeners": [{
    "name": "teapot",
    "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
    "filter_chains": [{"filters": [{
      "name": "hcm",
      "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "teapot",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [
          {"match": {"prefix": "/"}, "direct_response": {"status": 418}}]}]},
        "http_filters": [{"name": "router", "typed_config": {
          "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}]
      }}]}]
  }]}
}`

// conflict names a cluster that isn't there, which Envoy refuses to start with.
var conflict = strings.Replace(teapot, `"direct_response": {"status": 418}`, `"route": {"cluster": "nowhere"}`, 1)

func parse(t *testing.T, text string) *bootstrapv3.Bootstrap {
	t.Helper()
	b := new(bootstrapv3.Bootstrap)
	if err := protojson.Unmarshal([]byte(text), b); err != nil {
		t.Fatal(err)
	}
	return b
}

// within is a context that outlasts every healthy step.
func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

func TestBinaryVersion(t *testing.T) {
	t.Parallel()

	got, err := envoyproc.BinaryVersion(within(t), binary(t))
	if err != nil || got != envoyproc.Version {
		t.Errorf("BinaryVersion = %q, %v; want %q", got, err, envoyproc.Version)
	}
	if _, err := envoyproc.BinaryVersion(within(t), "/bin/true"); err == nil {
		t.Error("BinaryVersion of a program that says nothing is no error")
	}
}

func TestVersionFile(t *testing.T) {
	t.Parallel()

	data, err := os.ReadFile("../../.envoy-version")
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.TrimSpace(string(data)); got != envoyproc.Version {
		t.Errorf(".envoy-version is %q, Version is %q", got, envoyproc.Version)
	}
}

func TestServe(t *testing.T) {
	t.Parallel()

	for _, form := range []string{"bootstrap", "file"} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()

			config := envoyproc.Config{Binary: binary(t), Concurrency: 1}
			if form == "bootstrap" {
				config.Bootstrap = parse(t, teapot)
			} else {
				config.File = filepath.Join(t.TempDir(), "teapot.json")
				if err := os.WriteFile(config.File, []byte(teapot), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			e, err := envoyproc.Start(t.Context(), config)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = e.Stop() })
			if err := e.WaitReady(within(t)); err != nil {
				t.Fatal(err)
			}

			addr, err := e.Listener(within(t), "teapot")
			if err != nil {
				t.Fatal(err)
			}
			client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			request, err := http.NewRequestWithContext(within(t), http.MethodGet, "http://"+addr, http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			response, err := client.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			_ = response.Body.Close()
			if response.StatusCode != http.StatusTeapot {
				t.Errorf("GET = %d, want 418", response.StatusCode)
			}

			if got, err := e.Stat(within(t), "http.teapot.downstream_rq_4xx"); got != 1 || err != nil {
				t.Errorf("Stat(downstream_rq_4xx) = %d, %v; want 1", got, err)
			}
			if got, err := e.Stat(within(t), "http.teapot.no_such"); got != 0 || err != nil {
				t.Errorf("Stat(no_such) = %d, %v; want 0", got, err)
			}
			if _, err := e.Listener(within(t), "kettle"); err == nil {
				t.Error("Listener(kettle) is no error")
			}

			if err := e.Stop(); err != nil {
				t.Errorf("Stop: %v", err)
			}
			if err := e.Stop(); err != nil {
				t.Errorf("Stop again: %v", err)
			}
			if err := syscall.Kill(e.PID(), 0); !errors.Is(err, syscall.ESRCH) {
				t.Errorf("after Stop, signalling process %d: %v, want none", e.PID(), err)
			}
			if _, err := e.Admin(); err == nil {
				t.Error("after Stop, the admin address file is still there")
			}
		})
	}
}

func TestWaitReadyWhenEnvoyEnds(t *testing.T) {
	t.Parallel()

	var log bytes.Buffer
	e, err := envoyproc.Start(t.Context(), envoyproc.Config{
		Binary: binary(t), Bootstrap: parse(t, conflict), Output: &log, Concurrency: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Stop() })

	err = e.WaitReady(within(t))
	if err == nil || !strings.Contains(err.Error(), "unknown cluster 'nowhere'") {
		t.Errorf("WaitReady = %v, want Envoy's own words", err)
	}
	<-e.Done()
	if exit := new(exec.ExitError); !errors.As(e.Err(), &exit) {
		t.Errorf("Err = %v, want an exit status", e.Err())
	}
	if !strings.Contains(log.String(), "unknown cluster 'nowhere'") {
		t.Errorf("Output received %q, want Envoy's log", log.String())
	}
}

func TestWaitReadyWhenContextEnds(t *testing.T) {
	t.Parallel()

	ctx, cancel := context.WithCancel(t.Context())
	e, err := envoyproc.Start(ctx, envoyproc.Config{Binary: binary(t), Bootstrap: parse(t, teapot), Concurrency: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Stop() })

	cancel()
	if err := e.WaitReady(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("WaitReady = %v, want Canceled", err)
	}
	if err := e.WaitReady(within(t)); err != nil {
		t.Errorf("the end of Start's context stopped Envoy: %v", err)
	}
}

func TestStartRefuses(t *testing.T) {
	t.Parallel()

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	both := envoyproc.Config{Binary: "/bin/true", Bootstrap: parse(t, teapot), File: "x.yaml"}
	for _, tt := range []struct {
		name   string
		ctx    context.Context
		config envoyproc.Config
		want   string
	}{
		{"ended context", ended, envoyproc.Config{Binary: "/bin/true", File: "x.yaml"}, "canceled"},
		{"no bootstrap", t.Context(), envoyproc.Config{Binary: "/bin/true"}, "exactly one"},
		{"two bootstraps", t.Context(), both, "exactly one"},
		{"no admin", t.Context(), envoyproc.Config{Binary: "/bin/true", Bootstrap: &bootstrapv3.Bootstrap{}}, "admin"},
		{"no binary", t.Context(), envoyproc.Config{Binary: "/no/such/envoy", File: "x.yaml"}, "/no/such/envoy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if _, err := envoyproc.Start(tt.ctx, tt.config); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Start = %v, want an error with %q", err, tt.want)
			}
		})
	}
}

// A process that ignores SIGTERM is killed after the grace.
func TestStopKills(t *testing.T) {
	t.Parallel()

	script := filepath.Join(t.TempDir(), "deaf")
	text := "#!/bin/sh\ntrap '' TERM\necho deaf\nwhile :; do sleep 1; done\n"
	if err := os.WriteFile(script, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
	heard := newSignal("deaf")
	e, err := envoyproc.Start(t.Context(), envoyproc.Config{
		Binary: script, File: "none", Output: heard, Grace: 50 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	<-heard.seen
	if err := e.Stop(); err != nil {
		t.Errorf("Stop: %v", err)
	}
	select {
	case <-e.Done():
	default:
		t.Error("Stop returned and the process still runs")
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()

	if err := envoyproc.Validate(within(t), binary(t), parse(t, teapot)); err != nil {
		t.Errorf("Validate of a good bootstrap: %v", err)
	}
	err := envoyproc.Validate(within(t), binary(t), parse(t, conflict))
	if exit := new(exec.ExitError); !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("Validate of a bad bootstrap = %v, want exit status 1", err)
	}
	if err == nil || !strings.Contains(err.Error(), "unknown cluster 'nowhere'") {
		t.Errorf("Validate of a bad bootstrap = %v, want Envoy's own words", err)
	}
}

// A signal is a writer that closes seen once it was written text.
type signal struct {
	text string
	seen chan struct{}
	once sync.Once
	mu   sync.Mutex
	all  []byte
}

func newSignal(text string) *signal { return &signal{text: text, seen: make(chan struct{})} }

func (s *signal) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, p...)
	if bytes.Contains(s.all, []byte(s.text)) {
		s.once.Do(func() { close(s.seen) })
	}
	return len(p), nil
}

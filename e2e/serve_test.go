package e2e_test

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/internal/envoyproc"
	"github.com/weir-dev/weir/internal/pgtest"
)

// startServe starts `weir serve` alone, on a new database.
func startServe(t *testing.T, arguments ...string) *mesh {
	t.Helper()
	return startServeOver(t, nil, arguments...)
}

// startServeOver is startServe, with TLS on the ports if it is given.
func startServeOver(t *testing.T, health *tls.Config, arguments ...string) *mesh {
	t.Helper()
	m := &mesh{health: health, service: &service{grpc: freeAddress(t), http: freeAddress(t), xds: freeAddress(t)}}
	m.arguments = append([]string{
		"serve", examplePolicy, "--database-url", pgtest.NewDatabase(t),
		"--grpc-listen", m.service.grpc, "--http-listen", m.service.http, "--xds-listen", m.service.xds,
	}, arguments...)
	showOnFailure(t, "weir serve", &m.serviceLog)
	m.startService(t)
	t.Cleanup(func() { _ = m.service.Stop(syscall.SIGKILL, 0) })
	return m
}

func dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// The health answers turn first, and decisions are made until the drain delay is over. A
// client that watches gRPC health hears of it.
func TestServeDrains(t *testing.T) {
	t.Parallel()
	awayFromMidnight(t)
	m := startServe(t, "--drain-delay", "1h") // every mesh's end shows that it passes
	conn := dial(t, m.service.grpc)
	watch, err := healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{Service: "ratelimit"})
	if err != nil {
		t.Fatal(err)
	}
	expect := func(want healthv1.HealthCheckResponse_ServingStatus) {
		t.Helper()
		if answer, err := watch.Recv(); err != nil || answer.GetStatus() != want {
			t.Fatalf("gRPC health is %v, %v; want %v", answer, err, want)
		}
	}
	expect(healthv1.HealthCheckResponse_SERVING)

	if err := m.service.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	expect(healthv1.HealthCheckResponse_NOT_SERVING)
	response, err := http.Get("http://" + m.service.http + "/healthcheck")
	if err != nil {
		t.Fatalf("HTTP health while it drains: %v", err)
	}
	_ = response.Body.Close()
	if response.StatusCode < http.StatusInternalServerError {
		t.Errorf("HTTP health while it drains: %s", response.Status)
	}
	answer, err := rlsv3.NewRateLimitServiceClient(conn).ShouldRateLimit(t.Context(), &rlsv3.RateLimitRequest{
		Domain: "ingest",
		Descriptors: []*commonv3.RateLimitDescriptor{{
			Entries: []*commonv3.RateLimitDescriptor_Entry{{Key: "consumer", Value: "late"}},
		}},
	})
	if err != nil || answer.GetOverallCode() != rlsv3.RateLimitResponse_OK {
		t.Errorf("a decision while it drains: %v, %v; want OK", answer, err)
	}
}

func TestServeSignals(t *testing.T) {
	t.Parallel()
	m := startServe(t, "--drain-delay", "1h")
	if err := m.service.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "SIGHUP is logged", func() error {
		if !strings.Contains(m.serviceLog.String(), "SIGHUP is ignored") {
			return errors.New("it is not")
		}
		return nil
	})
	if err := healthy(m.service.http); err != nil {
		t.Errorf("after SIGHUP: %v", err)
	}

	if err := m.service.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	eventually(t, time.Minute, "health has turned", func() error {
		if healthy(m.service.http) == nil {
			return errors.New("it has not")
		}
		return nil
	})
	// Again and again: one that comes at the instant of the first may count as one with it.
	eventually(t, time.Minute, "a second SIGTERM ends weir serve", func() error {
		if err := m.service.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		select {
		case <-m.service.Done():
			return nil
		default:
			return errors.New("it still runs")
		}
	})
	exit, ok := errors.AsType[*exec.ExitError](m.service.Err())
	if !ok || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
		t.Errorf("weir serve ended with %v, want the signal", m.service.Err())
	}
}

// What Envoy refuses is in the log of serve, which needs no module of its own.
func TestServeTellsRefusals(t *testing.T) {
	t.Parallel()
	const module = "/no/such/filter.wasm"
	m := startServe(t, "--gateway", "127.0.0.1:0", "--module", module)
	bootstrap, err := envoy.Config{NodeID: "e2e", Admin: "127.0.0.1:0", ADS: m.service.xds}.ADSBootstrap()
	if err != nil {
		t.Fatal(err)
	}
	binary, err := envoyproc.Find(os.Getenv("ENVOY"))
	if err != nil {
		t.Fatal(err)
	}
	proxy, err := envoyproc.Start(t.Context(), envoyproc.Config{Binary: binary, Bootstrap: bootstrap, Concurrency: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := proxy.Stop(); err != nil {
			t.Error(err)
		}
	}()
	eventually(t, startTimeout, "the refusal is logged", func() error {
		for line := range strings.Lines(m.serviceLog.String()) {
			if strings.Contains(line, "level=WARN") && strings.Contains(line, "envoy refused a configuration") &&
				strings.Contains(line, "node=e2e") && strings.Contains(line, module) {
				return nil
			}
		}
		return errors.New("it is not")
	})
}

// An Envoy that refuses the filter ends `weir dev` with a word of why.
func TestDevRefusedFilter(t *testing.T) {
	t.Parallel()
	module := filepath.Join(t.TempDir(), "empty.wasm")
	if err := os.WriteFile(module, []byte("\x00asm\x01\x00\x00\x00"), 0o600); err != nil {
		t.Fatal(err)
	}
	d := launchDev(t, "WEIR_TEST=refused", nil, module)
	select {
	case <-d.Done():
	case <-time.After(startTimeout):
		t.Fatal("weir dev still runs")
	}
	if text := d.out.String(); d.Err() == nil || !strings.Contains(text, "weir: envoy refused the filter: ") ||
		!strings.Contains(text, "WARN: envoy refused the filter: ") || strings.Contains(text, "Weir is running.") {
		t.Errorf("weir dev ended with %v, want that Envoy refused the filter", d.Err())
	}
}

// An embedded Postgres that dies ends `weir dev`, which says so.
func TestDevPostgresDies(t *testing.T) {
	t.Parallel()
	const mark = "WEIR_TEST=postgres-dies"
	d := startDev(t, mark, nil)
	kill := 0
	for _, process := range processesWith(t, mark) {
		var pid int
		var name string
		if _, err := fmt.Sscan(process, &pid, &name); err == nil && name == "postgres" && (kill == 0 || pid < kill) {
			kill = pid // the postmaster, which came first
		}
	}
	if kill == 0 {
		t.Fatal("no postmaster found")
	}
	if err := syscall.Kill(kill, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	select {
	case <-d.Done():
	case <-time.After(time.Minute):
		t.Fatal("weir dev still runs")
	}
	if d.Err() == nil || !strings.Contains(d.out.String(), "weir: the embedded Postgres has ended") {
		t.Errorf("weir dev ended with %v, want that Postgres has ended", d.Err())
	}
	eventually(t, 30*time.Second, "nothing is left running", func() error {
		if left := processesWith(t, mark); len(left) > 0 {
			return fmt.Errorf("left running: %s", strings.Join(left, ", "))
		}
		return nil
	})
}

// Package envoytest runs the real Envoy, and what stands around it, for tests.
package envoytest

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"

	"github.com/weir-dev/weir/internal/envoyproc"
)

// Patience bounds a step that a healthy Envoy ends soon: compiling the filter's
// module takes it ten seconds where everything else runs too.
const Patience = 3 * time.Minute

// Within is a context that lasts for Patience, or for the test.
func Within(tb testing.TB) context.Context {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), Patience)
	tb.Cleanup(cancel)
	return ctx
}

// Binary returns the path of Envoy: $ENVOY, or what `make tools` has put there. A
// test without one fails.
func Binary(tb testing.TB) string {
	tb.Helper()
	path, err := envoyproc.Find(os.Getenv("ENVOY"))
	if err != nil {
		tb.Fatal(err)
	}
	return path
}

// Start starts an Envoy with two workers, which is stopped when the test ends. Its
// log is shown if the test fails.
func Start(tb testing.TB, bootstrap *bootstrapv3.Bootstrap) *envoyproc.Envoy {
	tb.Helper()
	var log bytes.Buffer
	// Not the test's context: it ends before the test's cleanups.
	e, err := envoyproc.Start(context.Background(), envoyproc.Config{
		Binary: Binary(tb), Bootstrap: bootstrap, Output: &log, Concurrency: 2,
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := e.Stop(); err != nil {
			tb.Errorf("stopping Envoy: %v", err)
		}
		if tb.Failed() {
			tb.Logf("Envoy's log:\n%s", log.String())
		}
	})
	return e
}

// A Decider decides as the rate limit service would.
type Decider func(*rlsv3.RateLimitRequest) *rlsv3.RateLimitResponse

// RateLimitService serves decide on a free port until the test ends, and returns
// its address.
func RateLimitService(tb testing.TB, decide Decider) string {
	tb.Helper()
	server := grpc.NewServer()
	rlsv3.RegisterRateLimitServiceServer(server, service{decide: decide})
	return Serve(tb, server)
}

type service struct {
	rlsv3.UnimplementedRateLimitServiceServer
	decide Decider
}

func (s service) ShouldRateLimit(_ context.Context, r *rlsv3.RateLimitRequest) (*rlsv3.RateLimitResponse, error) {
	return s.decide(r), nil
}

// Serve serves server on a free port until the test ends, and returns its
// address.
func Serve(tb testing.TB, server *grpc.Server) string {
	tb.Helper()
	listener, err := new(net.ListenConfig).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	tb.Cleanup(func() {
		server.Stop()
		if err := <-done; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			tb.Errorf("serving gRPC: %v", err)
		}
	})
	return listener.Addr().String()
}

package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime/debug"
	"syscall"
	"time"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	"github.com/weir-dev/weir/internal/child"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/ratelimitsvc"
	"github.com/weir-dev/weir/store"
)

// A server is a process that answers the rate limit protocol.
type server struct {
	process *child.Process
	address string
}

// startServer runs this program in another role and waits for its address.
func startServer(role string, o options) (*server, error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("finding this program: %w", err)
	}
	command := exec.Command(executable, "-role", role, "-database-url", o.database, "-schema", o.schema, "-answer", o.answer) //nolint:gosec,noctx // this program; stopped by stop
	command.Stderr = os.Stderr
	read, write, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", role, err)
	}
	defer func() { _ = read.Close() }()
	command.Stdout = write
	process, err := child.Start(command)
	_ = write.Close()
	if err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(read).ReadString('\n')
	if err != nil {
		_ = process.Stop(syscall.SIGKILL, 0)
		return nil, fmt.Errorf("starting %s: it did not say its address: %w", role, err)
	}
	return &server{process: process, address: line[:len(line)-1]}, nil
}

// gcPercent is what `weir serve` has as well: see there.
const gcPercent = 400

func (s *server) stop() { _ = s.process.Stop(syscall.SIGTERM, 10*time.Second) }

// serve runs a server until ctx ends, and says its address on stdout. Both collect garbage as
// seldom as `weir serve` does.
func serve(ctx context.Context, stdout io.Writer, register func(grpc.ServiceRegistrar), options ...grpc.ServerOption) error {
	debug.SetGCPercent(gcPercent)
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := grpc.NewServer(options...)
	register(s)
	fmt.Fprintln(stdout, listener.Addr())
	go func() {
		<-ctx.Done()
		s.Stop()
	}()
	return s.Serve(listener)
}

// nullService answers with the bytes that Weir has answered with.
type nullService struct {
	rlsv3.UnimplementedRateLimitServiceServer

	answer *rlsv3.RateLimitResponse
}

func (s nullService) ShouldRateLimit(context.Context, *rlsv3.RateLimitRequest) (*rlsv3.RateLimitResponse, error) {
	return s.answer, nil
}

func serveNull(ctx context.Context, o options, stdout io.Writer) error {
	text, err := base64.StdEncoding.DecodeString(o.answer)
	if err != nil {
		return err
	}
	answer := &rlsv3.RateLimitResponse{}
	if err := proto.Unmarshal(text, answer); err != nil {
		return err
	}
	return serve(ctx, stdout, func(s grpc.ServiceRegistrar) { rlsv3.RegisterRateLimitServiceServer(s, nullService{answer: answer}) })
}

// capture asks a server once and returns its answer's bytes, in base64.
func capture(ctx context.Context, address string) (string, error) {
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	answer, err := rlsv3.NewRateLimitServiceClient(conn).ShouldRateLimit(ctx, request(0, "node"))
	if err != nil {
		return "", err
	}
	text, err := proto.Marshal(answer)
	return base64.StdEncoding.EncodeToString(text), err
}

const benchDomain = "bench"

// benchPolicy has limits that never refuse, and one that refuses nine in ten. Of the
// quota one can see afterwards how much was charged: it does not refill.
const benchPolicy = `
domain: ` + benchDomain + `
descriptors:
  - {key: node, budget: {scope: ingest_node, per_second: 1GiB, burst: 1TiB}}
  - {key: domain, budget: {scope: ingest_domain, per_second: 1GiB, burst: 1TiB}}
  - {key: reads, budget: {scope: secret_read_node, per_second: 1GiB, burst: 1TiB}}
  - {key: issued, budget: {scope: access_issuance_domain, per_second: 1GiB, burst: 1TiB}}
  - {key: tight, budget: {scope: secret_read_domain, per_second: 1, burst: 10}}
  - {key: ` + consumerKey + `, quota: {daily: 9_000_000_000_000_000}}
`

func serveWeir(ctx context.Context, o options, stdout io.Writer) error {
	p, err := policy.Parse("bench.yaml", []byte(benchPolicy))
	if err != nil {
		return err
	}
	policies, err := policy.NewSet(p)
	if err != nil {
		return err
	}
	pool, err := store.Connect(ctx, o.database)
	if err != nil {
		return err
	}
	defer pool.Close()
	st := store.NewStoreIn(pool, o.schema)
	batcher := store.NewBatcher(st, store.BatcherConfig{})
	service, err := ratelimitsvc.New(ratelimitsvc.Config{
		Policies: policies, Decider: batcher, Usage: st, Ping: pool.Ping,
		Now: time.Now, Logger: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(),
	})
	if err != nil {
		return err
	}
	// As `weir serve` has them. Envoy pings more often than gRPC would bear.
	options := append(ratelimitsvc.ServerOptions(),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}))
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return batcher.Run(ctx) })
	group.Go(func() error { return serve(ctx, stdout, service.Register, options...) })
	return group.Wait()
}

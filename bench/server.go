package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"syscall"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

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
	command := exec.Command(executable, "-role", role, "-database-url", o.database) //nolint:gosec,noctx // this program; stopped by stop
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

func (s *server) stop() { _ = s.process.Stop(syscall.SIGTERM, 10*time.Second) }

// serve runs a server until ctx ends, and says its address on stdout.
func serve(ctx context.Context, stdout io.Writer, register func(grpc.ServiceRegistrar)) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	register(s)
	fmt.Fprintln(stdout, listener.Addr())
	go func() {
		<-ctx.Done()
		s.Stop()
	}()
	return s.Serve(listener)
}

// nullService says OK with as many bytes as Weir does.
type nullService struct {
	rlsv3.UnimplementedRateLimitServiceServer
}

func (nullService) ShouldRateLimit(context.Context, *rlsv3.RateLimitRequest) (*rlsv3.RateLimitResponse, error) {
	return &rlsv3.RateLimitResponse{
		OverallCode: rlsv3.RateLimitResponse_OK,
		Statuses: []*rlsv3.RateLimitResponse_DescriptorStatus{{
			Code:               rlsv3.RateLimitResponse_OK,
			CurrentLimit:       &rlsv3.RateLimitResponse_RateLimit{Name: "node", RequestsPerUnit: 1 << 30, Unit: rlsv3.RateLimitResponse_RateLimit_SECOND},
			LimitRemaining:     1 << 31,
			DurationUntilReset: &durationpb.Duration{Nanos: 1000},
		}},
		ResponseHeadersToAdd: []*corev3.HeaderValue{},
		DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
			"weir": structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
				"outcome":   structpb.NewStringValue("allowed"),
				"limit":     structpb.NewStringValue("node"),
				"remaining": structpb.NewNumberValue(1 << 31),
			}}),
		}},
	}, nil
}

func serveNull(ctx context.Context, stdout io.Writer) error {
	return serve(ctx, stdout, func(s grpc.ServiceRegistrar) { rlsv3.RegisterRateLimitServiceServer(s, nullService{}) })
}

// benchPolicy has limits that never refuse, and one that refuses nine in ten.
const benchPolicy = `
domain: bench
descriptors:
  - {key: node, budget: {scope: ingest_node, per_second: 1GiB, burst: 1TiB}}
  - {key: domain, budget: {scope: ingest_domain, per_second: 1GiB, burst: 1TiB}}
  - {key: reads, budget: {scope: secret_read_node, per_second: 1GiB, burst: 1TiB}}
  - {key: issued, budget: {scope: access_issuance_domain, per_second: 1GiB, burst: 1TiB}}
  - {key: tight, budget: {scope: secret_read_domain, per_second: 1, burst: 10}}
`

func serveWeir(ctx context.Context, database string, stdout io.Writer) error {
	p, err := policy.Parse("bench.yaml", []byte(benchPolicy))
	if err != nil {
		return err
	}
	policies, err := policy.NewSet(p)
	if err != nil {
		return err
	}
	pool, err := store.Connect(ctx, database)
	if err != nil {
		return err
	}
	defer pool.Close()
	st := store.NewStoreIn(pool, schema)
	batcher := store.NewBatcher(st, store.BatcherConfig{})
	service, err := ratelimitsvc.New(ratelimitsvc.Config{
		Policies: policies, Decider: batcher, Usage: st, Ping: pool.Ping,
		Now: time.Now, Logger: slog.New(slog.DiscardHandler), Registry: prometheus.NewRegistry(),
	})
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return batcher.Run(ctx) })
	group.Go(func() error { return serve(ctx, stdout, service.Register) })
	return group.Wait()
}

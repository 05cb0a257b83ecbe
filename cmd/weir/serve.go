package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	grpcprometheus "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/ratelimitsvc"
	"github.com/weir-dev/weir/store"
	"github.com/weir-dev/weir/xds"
)

// databaseFlags say where the counters are.
type databaseFlags struct {
	DatabaseURL string `name:"database-url" env:"DATABASE_URL" help:"Postgres, as a URL or as key=value pairs." placeholder:"URL"`
	Schema      string `help:"The schema that holds Weir's tables." default:"plexsphere"`
}

func (f databaseFlags) validate() error {
	if f.DatabaseURL == "" {
		return &usageError{err: errors.New("--database-url: is missing (DATABASE_URL in the environment will do)")}
	}
	return nil
}

type serveCommand struct {
	databaseFlags
	gatewayFlags
	logFlags
	accessFlags

	Policies   []string `arg:"" name:"policy" help:"Policy files or folders."`
	GRPCListen string   `name:"grpc-listen" help:"The rate limit service, over gRPC. Empty switches it off." default:":8081"`
	HTTPListen string   `name:"http-listen" help:"Health, metrics and usage, over HTTP. Empty switches it off." default:":8080"`
	XDSListen  string   `name:"xds-listen" help:"The control plane, over gRPC. Empty switches it off." default:":18000"`
}

// Run serves until ctx ends.
func (c *serveCommand) Run(ctx context.Context, t terminal) error {
	if err := c.validate(); err != nil {
		return err
	}
	logger := c.logger(t.stderr)
	set, policies, err := loadPolicies(c.Policies)
	if err != nil {
		return err
	}
	logWarnings(ctx, logger, policies)
	clients, certificates, err := c.load(logger)
	if err != nil {
		return err
	}

	listeners, err := listenAll([]binding{
		{flag: "--grpc-listen", address: c.GRPCListen},
		{flag: "--http-listen", address: c.HTTPListen},
		{flag: "--xds-listen", address: c.XDSListen},
	})
	if err != nil {
		return err
	}
	grpcListener, httpListener, xdsListener := listeners[0], listeners[1], listeners[2]
	defer closeAll(listeners)

	pool, err := openStore(ctx, c.databaseFlags)
	if err != nil {
		return err
	}
	defer pool.Close()
	s, err := newServing(servingConfig{
		pool: pool, schema: c.Schema, policies: set, logger: logger,
		grpc: grpcListener, http: httpListener, clients: clients, certificates: certificates,
	})
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	if xdsListener != nil {
		plane, err := c.controlPlane(ctx, logger, policies)
		if err != nil {
			return err
		}
		group.Go(func() error { return serveControlPlane(ctx, xdsListener, plane) })
	}
	group.Go(func() error { return s.run(ctx) })
	logger.LogAttrs(ctx, slog.LevelInfo, "serving",
		slog.Any("domains", set.Domains()),
		slog.String("grpc", address(grpcListener)),
		slog.String("http", address(httpListener)),
		slog.String("xds", address(xdsListener)),
	)
	return group.Wait()
}

// controlPlane returns the control plane with all that it serves. Policies without a
// `filter:` block give it nothing to serve, which is no error: the service may be used
// by Envoy's own filter.
func (c *serveCommand) controlPlane(ctx context.Context, logger *slog.Logger, policies []*policy.Policy) (*xds.Server, error) {
	config, err := c.config(policies, c.GRPCListen, c.XDSListen)
	if errors.Is(err, errNoFilter) {
		logger.LogAttrs(ctx, slog.LevelWarn, "the control plane has nothing to serve", slog.Any("reason", err))
		return xds.NewServer(xds.Config{Logger: logger})
	}
	if err != nil {
		return nil, err
	}
	return publish(ctx, logger, config)
}

func logWarnings(ctx context.Context, logger *slog.Logger, policies []*policy.Policy) {
	for _, p := range policies {
		for _, w := range p.Warnings {
			logger.LogAttrs(ctx, slog.LevelWarn, "policy", slog.Any("warning", w))
		}
	}
}

// A binding is an address to listen on, and the flag that set it.
type binding struct{ flag, address string }

// listenAll opens a listener for each binding, nil for an empty address. On an error it
// leaves none open.
func listenAll(bindings []binding) ([]net.Listener, error) {
	listeners := make([]net.Listener, len(bindings))
	for i, b := range bindings {
		if b.address == "" {
			continue
		}
		var err error
		if listeners[i], err = net.Listen("tcp", b.address); err != nil { //nolint:noctx // instantaneous
			closeAll(listeners)
			return nil, fmt.Errorf("%s: %w", b.flag, err)
		}
	}
	return listeners, nil
}

func closeAll(listeners []net.Listener) {
	for _, l := range listeners {
		if l != nil {
			_ = l.Close() // its server has closed it as a rule
		}
	}
}

func address(l net.Listener) string {
	if l == nil {
		return "off"
	}
	return l.Addr().String()
}

// openStore connects to the database and makes sure that its schema is one that this
// binary knows.
func openStore(ctx context.Context, f databaseFlags) (*pgxpool.Pool, error) {
	pool, err := store.Connect(ctx, f.DatabaseURL)
	if err != nil {
		return nil, err
	}
	if err := store.CheckSchema(ctx, pool, f.Schema); err != nil {
		pool.Close()
		return nil, err
	}
	return pool, nil
}

type servingConfig struct {
	pool       *pgxpool.Pool
	schema     string
	policies   *policy.Set
	logger     *slog.Logger
	grpc, http net.Listener // nil switches one off

	clients      *policy.Clients // nil without a file
	certificates *certificates   // nil without TLS
}

// serving is the rate limit service with its two servers.
type serving struct {
	servingConfig

	batcher *store.Batcher
	service *ratelimitsvc.Service
	server  *grpc.Server
}

func newServing(config servingConfig) (*serving, error) {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	grpcMetrics := grpcprometheus.NewServerMetrics()
	registry.MustRegister(grpcMetrics)

	st := store.NewStoreIn(config.pool, config.schema)
	batcher := store.NewBatcher(st, store.BatcherConfig{})
	service, err := ratelimitsvc.New(ratelimitsvc.Config{
		Policies: config.policies,
		Decider:  batcher,
		Usage:    st,
		Ping:     config.pool.Ping,
		Now:      time.Now,
		Logger:   config.logger,
		Registry: registry,
		Clients:  config.clients,
	})
	if err != nil {
		return nil, fmt.Errorf("building the service: %w", err)
	}
	options := append(ratelimitsvc.ServerOptions(), grpc.ChainUnaryInterceptor(grpcMetrics.UnaryServerInterceptor()))
	if config.certificates != nil {
		options = append(options, config.certificates.grpcOption())
	}
	server := newGRPCServer(config.logger, options...)
	service.Register(server)
	reflection.Register(server)
	grpcMetrics.InitializeMetrics(server)
	return &serving{servingConfig: config, batcher: batcher, service: service, server: server}, nil
}

// newGRPCServer returns a server on which a panic of one handler ends one call, and
// which lets Envoy keep idle connections alive.
func newGRPCServer(logger *slog.Logger, options ...grpc.ServerOption) *grpc.Server {
	recovered := recovery.WithRecoveryHandlerContext(func(ctx context.Context, p any) error {
		logger.LogAttrs(ctx, slog.LevelError, "a handler panicked", slog.Any("panic", p))
		return status.Error(codes.Unavailable, "internal error")
	})
	return grpc.NewServer(append([]grpc.ServerOption{
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.ChainUnaryInterceptor(recovery.UnaryServerInterceptor(recovered)),
		grpc.ChainStreamInterceptor(recovery.StreamServerInterceptor(recovered)),
	}, options...)...)
}

// run serves until ctx ends: the health answers turn first, then calls in flight end, and
// then what decides them.
func (s *serving) run(ctx context.Context) error {
	batchCtx, stopBatcher := context.WithCancel(context.WithoutCancel(ctx))
	var batcher errgroup.Group
	batcher.Go(func() error { return s.batcher.Run(batchCtx) })

	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.service.Run(ctx) })
	if s.grpc != nil {
		group.Go(func() error { return serveGRPC(ctx, s.grpc, s.server) })
	}
	if s.http != nil {
		listener, server := httpServer(s.http, s.service.Handler(), s.certificates, s.logger)
		group.Go(func() error { return serveHTTP(ctx, listener, server) })
	}
	if s.certificates != nil {
		group.Go(func() error { return s.certificates.run(ctx) })
	}
	err := group.Wait()
	stopBatcher()
	return errors.Join(err, batcher.Wait())
}

// serveGRPC serves until ctx ends, and then lets calls in flight finish.
func serveGRPC(ctx context.Context, listener net.Listener, server *grpc.Server) error {
	stopped := make(chan error, 1)
	go func() { stopped <- server.Serve(listener) }()
	select {
	case err := <-stopped:
		return err
	case <-ctx.Done():
	}
	force := time.AfterFunc(drainTimeout, server.Stop)
	defer force.Stop()
	server.GracefulStop()
	return <-stopped
}

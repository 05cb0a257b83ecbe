package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	grpcprometheus "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"
	"google.golang.org/grpc/reflection"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/ratelimitsvc"
	"github.com/weir-dev/weir/store"
	"github.com/weir-dev/weir/xds"
)

// databaseFlags say where the counters are.
type databaseFlags struct {
	DatabaseURL string `name:"database-url" env:"DATABASE_URL" help:"Postgres, as a URL or as key=value pairs." placeholder:"URL"`
	DirectURL   string `name:"database-direct-url" env:"DATABASE_DIRECT_URL" help:"The same database without a pooler, for migrations. By default --database-url." placeholder:"URL"`
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
	retentionFlags

	Policies   []string      `arg:"" name:"policy" help:"Policy files or folders."`
	GRPCListen string        `name:"grpc-listen" help:"The rate limit service, over gRPC. Empty switches it off." default:":8081"`
	HTTPListen string        `name:"http-listen" help:"Health, metrics and usage, over HTTP. Empty switches it off." default:":8080"`
	XDSListen  string        `name:"xds-listen" help:"The control plane, over gRPC. Empty switches it off." default:":18000"`
	Service    string        `help:"Where the Envoys that the control plane configures reach the rate limit service. By default the address of --grpc-listen, if it names one. If it is every address of this machine, the default is the loopback where --xds-listen is too, since all Envoys are then on this machine; else this flag must be given." placeholder:"ADDRESS"`
	DrainDelay time.Duration `help:"How long to go on serving after the first signal to stop, with health already NOT_SERVING, so that load balancers notice. A second signal ends weir at once." default:"2s"`
}

// Run serves until ctx ends.
func (c *serveCommand) Run(ctx context.Context, t terminal) error {
	if err := c.validate(); err != nil {
		return err
	}
	logger := c.logger(t.stderr)
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP) // it would end the process
	defer signal.Stop(hangups)

	loaded, err := loadPolicies(c.Policies)
	if err != nil {
		return err
	}
	clients, certificates, err := c.load(logger)
	if err != nil {
		return err
	}
	logWarnings(ctx, logger, loaded.warnings)
	plane, err := c.controlPlane(ctx, logger, loaded.policies)
	if err != nil {
		return err
	}
	defer plane.Close()

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
		pool: pool, schema: c.Schema, policies: loaded.set, logger: logger,
		grpc: grpcListener, http: httpListener, clients: clients, certificates: certificates,
		retention: c.retention(),
	})
	if err != nil {
		return err
	}
	logger.LogAttrs(ctx, slog.LevelInfo, "serving",
		slog.Any("domains", loaded.set.Domains()),
		slog.String("grpc", address(grpcListener)),
		slog.String("http", address(httpListener)),
		slog.String("xds", address(xdsListener)),
	)
	parts := []part{s.serve, ignoreHangups(logger, hangups)}
	if xdsListener != nil {
		parts = append(parts, serveControlPlane(logger, xdsListener, plane, certificates))
	}
	return runBeside(ctx, func(ctx context.Context) error {
		err := s.service.Run(ctx) // whose health answers have turned when it returns
		logger.LogAttrs(ctx, slog.LevelInfo, "stopping: health is NOT_SERVING", slog.Duration("drain_delay", c.DrainDelay))
		time.Sleep(c.DrainDelay)
		return err
	}, parts...)
}

func (c *serveCommand) validate() error {
	faults := []error{c.databaseFlags.validate()}
	if c.GRPCListen == "" && c.HTTPListen == "" && c.XDSListen == "" {
		faults = append(faults, errors.New("--grpc-listen, --http-listen, --xds-listen: all are empty, so there is nothing to serve"))
	}
	if c.DrainDelay < 0 {
		faults = append(faults, fmt.Errorf("--drain-delay: %v is negative", c.DrainDelay))
	}
	if err := errors.Join(faults...); err != nil {
		return &usageError{err: err}
	}
	return nil
}

// ignoreHangups keeps SIGHUP from ending the process, and says so.
func ignoreHangups(logger *slog.Logger, hangups <-chan os.Signal) part {
	return func(ctx context.Context) error {
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-hangups:
				logger.LogAttrs(ctx, slog.LevelWarn, "SIGHUP is ignored: restart weir to read its policies again")
			}
		}
	}
}

// controlPlane returns the control plane with all that it serves. Policies without a
// `filter:` block give it nothing to serve, which is no error: the service may be used
// by Envoy's own filter.
func (c *serveCommand) controlPlane(ctx context.Context, logger *slog.Logger, policies []*policy.Policy) (*xds.Server, error) {
	if c.XDSListen == "" {
		return xds.NewServer(xds.Config{}), nil
	}
	if _, err := filterConfig(policies, c.FilterDomain); errors.Is(err, errNoFilter) {
		logger.LogAttrs(ctx, slog.LevelWarn, "the control plane has nothing to serve", slog.Any("reason", err))
		return xds.NewServer(xds.Config{Logger: logger}), nil
	}
	if c.TLSCert != "" && c.EnvoyTLSCA == "" {
		logger.LogAttrs(ctx, slog.LevelWarn, "the Envoys that this control plane configures do not speak TLS to the service, which --tls-cert asks of them: "+
			"each request through them will be a 500; give --envoy-tls-ca, or configure Envoys otherwise")
	}
	service, flag, err := c.serviceAddress()
	if err != nil {
		return nil, err
	}
	config, err := c.config(policies, service)
	if err != nil {
		return nil, err
	}
	return publish(ctx, logger, config, fieldFlags{"Service": flag})
}

// serviceAddress is where Envoys reach the service, and the flag that says so.
func (c *serveCommand) serviceAddress() (service, flag string, err error) {
	if c.Service != "" {
		return c.Service, "--service", nil
	}
	if c.GRPCListen == "" {
		return "", "", &usageError{err: errors.New("--service: is missing: the control plane must tell Envoys where the rate limit service is, which --grpc-listen switches off here")}
	}
	host, port, err := net.SplitHostPort(c.GRPCListen)
	if err == nil && isEveryAddress(host) && !isLoopback(c.XDSListen) {
		return "", "", &usageError{err: fmt.Errorf("--service: is missing: the control plane must tell Envoys where the rate limit service is, "+
			"and --grpc-listen %s names no address; 127.0.0.1:%s will do if all Envoys are on this machine", c.GRPCListen, port)}
	}
	return reachable(c.GRPCListen), "--grpc-listen", nil
}

// isLoopback reports whether only this machine can reach an address to listen on.
func isLoopback(listen string) bool {
	host, _, err := net.SplitHostPort(listen)
	ip := net.ParseIP(host)
	return err == nil && (host == "localhost" || ip != nil && ip.IsLoopback())
}

func logWarnings(ctx context.Context, logger *slog.Logger, warnings []*policy.Error) {
	for _, w := range warnings {
		logger.LogAttrs(ctx, slog.LevelWarn, "policy", slog.Any("warning", w))
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
	retention    store.Retention
}

// serving is the rate limit service with its two servers.
type serving struct {
	servingConfig

	*backing
	*tidying

	service *ratelimitsvc.Service
	server  *grpcServer
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
	back, err := newBacking(config, registry)
	if err != nil {
		return nil, err
	}
	tidy, err := newTidying(st, config, registry)
	if err != nil {
		return nil, err
	}
	service, err := ratelimitsvc.New(ratelimitsvc.Config{
		Policies: config.policies,
		Decider:  back.batcher,
		Usage:    st,
		Ping:     config.pool.Ping,
		History:  tidy.recorder,
		Now:      back.clock.Now,
		Logger:   config.logger,
		Registry: registry,
		Clients:  config.clients,
		Enrol:    st.Enrol,
	})
	if err != nil {
		return nil, fmt.Errorf("building the service: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), enrolTimeout)
	defer cancel()
	if err := service.EnrolNamed(ctx); err != nil {
		return nil, err
	}
	options := append(ratelimitsvc.ServerOptions(),
		grpc.ChainUnaryInterceptor(ofDecisions(grpcMetrics.UnaryServerInterceptor())))
	if config.certificates != nil {
		options = append(options, config.certificates.grpcOption())
	}
	server := newGRPCServer(config.logger, options...)
	service.Register(server)
	reflection.Register(server)
	return &serving{servingConfig: config, backing: back, tidying: tidy, service: service, server: server}, nil
}

// gcPercent has the collector run a quarter as often as by default: what lives is a few
// megabytes, and to look through it that often cost a sixth of a decision.
const gcPercent = 400

// enrolTimeout bounds how long it may take to make the consumers of policies known.
const enrolTimeout = 30 * time.Second

// ofDecisions leaves all calls out of an interceptor's sight but those of the rate limit
// protocol.
func ofDecisions(i grpc.UnaryServerInterceptor) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		if info.FullMethod != rlsv3.RateLimitService_ShouldRateLimit_FullMethodName {
			return handler(ctx, req)
		}
		return i(ctx, req, info, handler)
	}
}

// serve serves until ctx ends: calls in flight end first, and then what decides them.
func (s *serving) serve(ctx context.Context) error {
	var servers []part
	if s.grpc != nil {
		servers = append(servers, s.server.serve(s.grpc))
	}
	if s.http != nil {
		servers = append(servers, serveHTTP(s.logger, s.certificates.over(s.http), httpServer(s.certificates.guard(s.service.Handler()))))
	}
	parts := []part{s.batcher.Run, s.watch, s.sweeper.Run, s.recorder.Run}
	if s.certificates != nil {
		parts = append(parts, s.certificates.run)
	}
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	defer s.decisions.Close()
	return runBeside(ctx, together(servers...), parts...)
}

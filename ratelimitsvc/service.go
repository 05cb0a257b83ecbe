// Package ratelimitsvc answers Envoy's rate limit protocol
// (envoy.service.ratelimit.v3): may this request proceed, and what is its client
// told?
//
// [New] makes a [Service]; [Service.Register] puts it on a gRPC server and
// [Service.Handler] is its HTTP side. The policies say which limits a request's
// descriptors match, a [Decider] decides them all together, and this package
// renders the answer: a status a descriptor, the headers, and metadata for access
// logs.
//
// # Outcomes
//
// A request is allowed (OK), refused (OVER_LIMIT with headers) or, when the store
// could not answer, unavailable: the gRPC status UNAVAILABLE with no headers, which
// is never shown as a refusal. A limit with on_error: allow admits then, unless
// another one of the request does not.
//
// A value that a client controls never makes the service answer with an error,
// since Envoy's own filter lets requests through on errors: a key that a budget
// cannot use is refused. INVALID_ARGUMENT and PERMISSION_DENIED are for what an
// operator got wrong.
//
// The package reads no clock of its own: [Config] hands it one.
package ratelimitsvc

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/policy"
)

// A Decider decides all limits of a request together. An error means that it could
// not: the request is then unavailable. It must be safe for concurrent use.
type Decider interface {
	Decide(ctx context.Context, req policy.Request) (policy.Verdict, error)
}

// Config is what a [Service] is made of. All fields are required.
type Config struct {
	Policies *policy.Set
	Decider  Decider
	Usage    UsageReader
	// Ping reports whether the store answers; [Service.Run] calls it for the
	// health checks.
	Ping     func(context.Context) error
	Now      func() time.Time // the clock of every decision
	Logger   *slog.Logger
	Registry *prometheus.Registry // where metrics go, and what /metrics shows
}

func (c Config) validate() error {
	var errs []error
	for name, missing := range map[string]bool{
		"Policies": c.Policies == nil, "Decider": c.Decider == nil, "Usage": c.Usage == nil,
		"Ping": c.Ping == nil, "Now": c.Now == nil, "Logger": c.Logger == nil,
		"Registry": c.Registry == nil,
	} {
		if missing {
			errs = append(errs, errors.New(name+" is missing"))
		}
	}
	return errors.Join(errs...)
}

// A Service is the rate limit service. It is safe for concurrent use.
type Service struct {
	rlsv3.UnimplementedRateLimitServiceServer

	config  Config
	metrics *metrics
	health  *health.Server
	healthy atomic.Bool
}

// New returns a service. The error names the fields of config that are missing, or a
// metric that the registry already has.
func New(config Config) (*Service, error) {
	if err := config.validate(); err != nil {
		return nil, err
	}
	m, err := newMetrics(config.Registry)
	if err != nil {
		return nil, err
	}
	s := &Service{config: config, metrics: m, health: health.NewServer()}
	s.setHealthy(false)
	return s, nil
}

// Register puts the rate limit service and gRPC health on a server.
func (s *Service) Register(server grpc.ServiceRegistrar) {
	rlsv3.RegisterRateLimitServiceServer(server, s)
	healthv1.RegisterHealthServer(server, s.health)
}

// healthName is the name under which users of the reference ask for its health.
const healthName = "ratelimit"

const (
	healthInterval = time.Second
	healthTimeout  = time.Second
)

// Run keeps the health answers true until ctx ends, asking the store once a second.
// The service is unhealthy until the first answer, and again after Run returns.
func (s *Service) Run(ctx context.Context) error {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	defer s.setHealthy(false)
	for {
		s.checkHealth(ctx)
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

func (s *Service) checkHealth(ctx context.Context) {
	pingCtx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	err := s.config.Ping(pingCtx)
	if ctx.Err() != nil {
		return // which says nothing of the store
	}
	if was := s.healthy.Load(); was != (err == nil) {
		if err == nil {
			s.config.Logger.LogAttrs(ctx, slog.LevelInfo, "the store answers")
		} else {
			s.config.Logger.LogAttrs(ctx, slog.LevelWarn, "the store does not answer", slog.Any("err", err))
		}
	}
	s.setHealthy(err == nil)
}

func (s *Service) setHealthy(healthy bool) {
	s.healthy.Store(healthy)
	state := healthv1.HealthCheckResponse_NOT_SERVING
	if healthy {
		state = healthv1.HealthCheckResponse_SERVING
	}
	s.health.SetServingStatus("", state)
	s.health.SetServingStatus(healthName, state)
}

// ShouldRateLimit implements the rate limit protocol.
func (s *Service) ShouldRateLimit(ctx context.Context, req *rlsv3.RateLimitRequest) (*rlsv3.RateLimitResponse, error) {
	start := s.config.Now()
	p, err := s.plan(req, policy.TruncateNow(start))
	if err != nil {
		return nil, err
	}
	a, err := s.decide(ctx, p)
	s.metrics.observe(p, a, s.config.Now().Sub(start))
	s.log(ctx, p, a)
	if err != nil {
		return nil, err
	}
	return a.response, nil
}

// decide answers a plan. With an error, the answer still says what to count and log.
func (s *Service) decide(ctx context.Context, p *plan) (answer, error) {
	if p.malformed {
		return p.refuseMalformed(), nil
	}
	if !p.asks() {
		return p.render(policy.Verdict{Allowed: true}), nil
	}
	verdict, err := s.config.Decider.Decide(ctx, p.request)
	switch {
	case err == nil:
		return p.render(verdict), nil
	case p.allowError:
		return p.allowUndecided(err), nil
	}
	return answer{outcome: outcomeUnavailable, cause: err},
		status.Error(codes.Unavailable, "the rate limit store did not answer")
}

// log writes a line a decision: what was refused or could not be decided always, what
// was allowed only for those who debug.
func (s *Service) log(ctx context.Context, p *plan, a answer) {
	level := slog.LevelDebug
	switch {
	case a.cause != nil:
		level = slog.LevelWarn
	case a.outcome == outcomeRefused:
		level = slog.LevelInfo
	}
	if !s.config.Logger.Enabled(ctx, level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("outcome", string(a.outcome)),
		slog.Bool("rate_limited", a.outcome == outcomeRefused),
		slog.String("domain", p.domain),
		slog.Any("descriptors", p.describe()),
	}
	if a.reason != "" {
		attrs = append(attrs, slog.String("reason", a.reason))
	}
	if r := a.shown; r != nil {
		attrs = append(attrs, slog.String("limit", r.name), slog.Int64("size", r.size), slog.Int64("remaining", r.remaining))
	}
	if a.retryAfter > 0 {
		attrs = append(attrs, slog.Int64("retry_after_s", a.retryAfter))
	}
	if a.cause != nil {
		attrs = append(attrs, slog.Any("err", a.cause))
	}
	s.config.Logger.LogAttrs(ctx, level, "decision", attrs...)
}

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
// # Who may ask what
//
// A client is known by the names of its verified certificate, or by its address, and
// [policy.Clients] say which domains it may ask for. Refunds and limits that a request
// brings along are off unless they allow them, and are then answered
// PERMISSION_DENIED with the field's name, never misread.
//
// # Refunds
//
// An allowed answer carries a receipt, weir.receipt in its dynamic metadata. A refund
// that brings it back, as gRPC metadata [ReceiptKey], goes into the limits and the windows
// that were charged, however much later it comes. One without goes into the current windows,
// and not into limits with quota_mode, which may not have been charged.
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
	"fmt"
	"log/slog"
	"sync"
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

// A Recorder takes note of what consumers ask for, for their history. It must be safe
// for concurrent use and wait for nobody.
type Recorder interface {
	// Record is called for each decided request that has a quota of the consumer,
	// once for each of its quotas: whether the request was refused, by whichever limit,
	// and its cost in units, which was charged unless it was refused, at now. Negative
	// units are a refund, which is no request.
	Record(consumer policy.Consumer, refused bool, units int64, now time.Time)
}

// Config is what a [Service] is made of. All fields are required but those that say
// otherwise.
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

	// Clients say who may ask what. Nil lets everybody ask for every domain, without
	// refunds and overrides.
	Clients *policy.Clients
	// History takes note of decisions about quotas. Nil keeps none.
	History Recorder
	// Enrol makes consumers known to the store; [Service.EnrolNamed] calls it for those
	// that the policies name. Nil leaves that to others: the quota of one that the store
	// does not know is inert.
	Enrol func(ctx context.Context, consumers []policy.Consumer, now time.Time) error
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
	usage   *usageGauges
	health  *health.Server
	healthy atomic.Bool

	draining   atomic.Bool   // Run has been told to end
	usageReads chan struct{} // holds one for each request that reads the usage

	unenrolled                            atomic.Bool // a named consumer may be unknown to the store
	undecided, rejected, inert, enrolling sampler
	overflowed                            sync.Map // domains whose overflow was told of
}

// New returns a service. The error names the fields of config that are missing, or a
// metric that the registry already has.
func New(config Config) (*Service, error) {
	if err := config.validate(); err != nil {
		return nil, err
	}
	named := newNamedConsumers(config.Policies)
	m, err := newMetrics(config.Registry, named)
	if err != nil {
		return nil, err
	}
	usage := &usageGauges{named: named}
	if err := config.Registry.Register(usage); err != nil {
		return nil, err
	}
	s := &Service{config: config, metrics: m, usage: usage, health: health.NewServer(), usageReads: make(chan struct{}, maxUsageReads)}
	s.unenrolled.Store(true)
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
	enrolTimeout   = 10 * time.Second
)

// Run keeps the health answers and the usage gauges true until ctx ends, asking the store
// once a second whether it answers and every 15 seconds for the usage. The service is
// unhealthy until the first answer, and again, as draining, when ctx has ended. When the
// store turns out not to know a consumer that a policy names, it is enrolled.
func (s *Service) Run(ctx context.Context) error {
	var beside sync.WaitGroup
	defer beside.Wait()
	beside.Go(func() { every(ctx, usageInterval, s.refreshUsage) })
	beside.Go(func() { every(ctx, healthInterval, s.enrolAgain) })
	defer s.drain()
	every(ctx, healthInterval, s.checkHealth)
	return nil
}

// every calls f at once and then at each interval, until ctx ends.
func every(ctx context.Context, interval time.Duration, f func(context.Context)) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		f(ctx)
		select {
		case <-ctx.Done():
			return
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

// EnrolNamed makes all consumers known that the policies name, so that their quotas are not
// inert. Whoever serves calls it first; Run does it again when the store has forgotten one.
func (s *Service) EnrolNamed(ctx context.Context) error {
	if s.config.Enrol == nil {
		return nil
	}
	s.unenrolled.Store(false) // before, so that what is found out meanwhile counts
	var named []policy.Consumer
	for _, domain := range s.config.Policies.Domains() {
		p, _ := s.config.Policies.Domain(domain)
		named = append(named, p.NamedConsumers()...)
	}
	if len(named) == 0 {
		return nil
	}
	if err := s.config.Enrol(ctx, named, s.config.Now()); err != nil {
		s.unenrolled.Store(true)
		return fmt.Errorf("enrolling the consumers that the policies name: %w", err)
	}
	return nil
}

// enrolAgain is EnrolNamed in the background, if it is due and the store answers. It runs
// beside the checks of health, since it may take longer; that it fails makes nobody unhealthy,
// as only some quotas wait for it: the next call tries again.
func (s *Service) enrolAgain(ctx context.Context) {
	if !s.unenrolled.Load() || !s.healthy.Load() {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, enrolTimeout)
	defer cancel()
	err := s.EnrolNamed(ctx)
	if err == nil {
		return
	}
	if suppressed, ok := s.enrolling.allow(s.config.Now()); ok {
		s.config.Logger.LogAttrs(ctx, slog.LevelWarn, "quotas are inert", slog.Any("err", err), slog.Int64("suppressed", suppressed))
	}
}

func (s *Service) drain() {
	s.draining.Store(true)
	s.setHealthy(false)
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
	return s.respond(ctx, req, grpcCaller(ctx))
}

// respond answers a request, in whatever protocol it came. Its errors are gRPC statuses.
func (s *Service) respond(ctx context.Context, req *rlsv3.RateLimitRequest, c caller) (*rlsv3.RateLimitResponse, error) {
	start := s.config.Now()
	p, err := s.plan(ctx, req, c, policy.TruncateNow(start))
	if err != nil {
		s.logRejected(ctx, start, req, err)
		return nil, err
	}
	a, err := s.decide(ctx, p)
	now := s.config.Now()
	s.metrics.observe(p, &a, now.Sub(start))
	s.log(ctx, now, p, &a)
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
	if !p.request.Asks() {
		return p.render(policy.Verdict{Allowed: true}), nil
	}
	verdict, err := s.config.Decider.Decide(ctx, p.request)
	switch {
	case err == nil:
		if !verdict.At.IsZero() {
			p.request.Now = verdict.At // whose windows were charged, and hold what is read
		}
		s.observeQuotas(ctx, p, &verdict)
		return p.render(verdict), nil
	case errors.Is(ctx.Err(), context.Canceled):
		// Who asked has gone; that says nothing of the store.
		return answer{outcome: outcomeCanceled, cause: err}, status.Error(codes.Canceled, "the request was canceled")
	case p.allowError:
		return p.allowUndecided(err), nil
	}
	return answer{outcome: outcomeUnavailable, cause: err},
		status.Error(codes.Unavailable, "the rate limit store did not answer")
}

// observeQuotas tells the history, the metrics and the log what became of a request's
// quotas. Those in shadow are no part of it.
func (s *Service) observeQuotas(ctx context.Context, p *plan, v *policy.Verdict) {
	now := p.request.Now
	for i := range p.request.Quotas {
		debit, state := &p.request.Quotas[i], &v.Quotas[i]
		if debit.Consumer == nil {
			continue
		}
		if state.Unknown {
			s.metrics.inert.WithLabelValues(p.domain).Inc()
			s.logInert(ctx, now, debit.Consumer)
			s.unenrolled.Store(true)
			continue
		}
		if state.Overflow {
			s.metrics.overflow.WithLabelValues(p.domain).Inc()
			s.logOverflow(ctx, debit.Consumer)
		}
		if state.Denied >= 0 {
			s.metrics.denied(debit.Consumer, debit.Budgets[state.Denied].Key)
		}
		if s.config.History == nil || debit.Cost < 0 && !v.Allowed {
			continue
		}
		s.config.History.Record(*debit.Consumer, !v.Allowed, debit.Cost, now)
	}
}

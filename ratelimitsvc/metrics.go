package ratelimitsvc

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// metrics are the service's own. Labels come from closed sets: the domains that have a
// policy, what those policies name, and the outcomes.
type metrics struct {
	named *namedConsumers

	decisions    *prometheus.CounterVec
	unmatched    *prometheus.CounterVec
	undecided    prometheus.Counter
	latency      prometheus.Histogram
	quotaDenied  *prometheus.CounterVec
	shadowDenied *prometheus.CounterVec
	inert        *prometheus.CounterVec
	overflow     *prometheus.CounterVec
}

const (
	// unknownDomain labels what names a domain without a policy.
	unknownDomain = "_unknown"
	// otherConsumer labels all consumers that have no label of their own.
	otherConsumer = "_other"
	// maxLabels is the most consumers that have one.
	maxLabels = 1000
)

func newMetrics(registry *prometheus.Registry, named *namedConsumers) (*metrics, error) {
	m := &metrics{
		named: named,
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_decisions_total",
			Help: "Requests decided, by domain and outcome (allowed, refused, unavailable, canceled).",
		}, []string{"domain", "outcome"}),
		unmatched: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_unmatched_descriptors_total",
			Help: "Descriptors that no limit of the policy matched, and which were therefore admitted.",
		}, []string{"domain"}),
		undecided: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "weir_store_errors_total",
			Help: "Requests that the store could not decide.",
		}),
		latency: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "weir_decision_duration_seconds",
			Help:    "Time from a request's arrival to its answer.",
			Buckets: prometheus.ExponentialBuckets(0.000125, 2, 14),
		}),
		quotaDenied: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_quota_denied_total",
			Help: "Requests that a quota denied, by the first budget that did. Only consumers that the policy names have a label of their own.",
		}, []string{"domain", "consumer", "budget"}),
		shadowDenied: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_shadow_denied_total",
			Help: "Requests that a limit in shadow would have refused.",
		}, []string{"domain", "limit"}),
		inert: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_quota_inert_total",
			Help: "Charges that were not made since the store does not know a consumer that the policy names.",
		}, []string{"domain"}),
		overflow: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_quota_overflow_total",
			Help: "Charges to the counter that consumers share once the domain has as many as it may.",
		}, []string{"domain"}),
	}
	var errs []error
	for _, c := range []prometheus.Collector{
		m.decisions, m.unmatched, m.undecided, m.latency, m.quotaDenied, m.shadowDenied, m.inert, m.overflow,
	} {
		errs = append(errs, registry.Register(c))
	}
	return m, errors.Join(errs...)
}

func (m *metrics) observe(p *plan, a *answer, took time.Duration) {
	domain := unknownDomain
	if p.known {
		domain = p.domain
	}
	m.decisions.WithLabelValues(domain, string(a.outcome)).Inc()
	m.latency.Observe(took.Seconds())
	if a.cause != nil && a.outcome != outcomeCanceled {
		m.undecided.Inc()
	}
	for i := range p.descriptors {
		if !p.descriptors[i].matched {
			m.unmatched.WithLabelValues(domain).Inc()
		}
	}
	for _, name := range a.shadowDenied {
		m.shadowDenied.WithLabelValues(domain, name).Inc()
	}
}

// denied counts a quota's denial by its budget's key.
func (m *metrics) denied(c *policy.Consumer, budget string) {
	label, ok := m.named.labels[c.ID]
	if !ok {
		label = otherConsumer
	}
	m.quotaDenied.WithLabelValues(c.Domain, label, budget).Inc()
}

// namedConsumers are those that the policies spell out, as far as metrics have labels for
// them.
type namedConsumers struct {
	labels  map[policy.CounterID]string
	domains []namedIn
}

// namedIn are those of one domain.
type namedIn struct {
	policy *policy.Policy
	ids    []policy.CounterID
	quotas map[policy.CounterID][]quota.Budget
}

func newNamedConsumers(set *policy.Set) *namedConsumers {
	n := &namedConsumers{labels: map[policy.CounterID]string{}}
	for _, domain := range set.Domains() {
		p, _ := set.Domain(domain)
		in := namedIn{policy: p, quotas: map[policy.CounterID][]quota.Budget{}}
		used := map[string]bool{otherConsumer: true}
		for _, c := range p.NamedConsumers() {
			// A label that two would share tells nothing of either.
			label := describeEntries(c.Entries)
			m, ok := p.Match(c.Entries)
			if len(n.labels) == maxLabels || used[label] || !ok {
				continue
			}
			used[label] = true
			n.labels[c.ID] = label
			in.ids = append(in.ids, c.ID)
			in.quotas[c.ID] = m.Limit.Quota
		}
		if len(in.ids) > 0 {
			n.domains = append(n.domains, in)
		}
	}
	return n
}

const (
	usageInterval = 15 * time.Second
	usageTimeout  = 5 * time.Second
)

var (
	quotaUsed = prometheus.NewDesc("weir_quota_used",
		"Units that a consumer which the policy names has used in its budget's current window.",
		[]string{"domain", "consumer", "budget"}, nil)
	quotaLimit = prometheus.NewDesc("weir_quota_limit",
		"Units that a consumer which the policy names may use in a window of its budget.",
		[]string{"domain", "consumer", "budget"}, nil)
)

// usageGauges show what named consumers have used. Scrapes show the last reading, and
// ask nothing of the store themselves; while the store does not answer there is none.
type usageGauges struct {
	named *namedConsumers
	last  atomic.Pointer[[]prometheus.Metric]
}

// Describe implements [prometheus.Collector].
func (*usageGauges) Describe(descs chan<- *prometheus.Desc) {
	descs <- quotaUsed
	descs <- quotaLimit
}

// Collect implements [prometheus.Collector].
func (g *usageGauges) Collect(metrics chan<- prometheus.Metric) {
	last := g.last.Load()
	if last == nil {
		return
	}
	for _, m := range *last {
		metrics <- m
	}
}

// refreshUsage reads the usage of all named consumers, one query a domain.
func (s *Service) refreshUsage(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, usageTimeout)
	defer cancel()
	var all []prometheus.Metric
	for _, in := range s.usage.named.domains {
		query := policy.ConsumersQuery{
			Domain: in.policy.Domain, Only: in.ids, Limit: policy.MaxConsumers,
			Units: in.policy.QuotaUnits(), Now: s.config.Now(),
		}
		consumers, err := s.config.Usage.Consumers(ctx, query)
		if err != nil {
			s.usage.last.Store(nil)
			// An outage is told of by the health check.
			s.config.Logger.LogAttrs(ctx, slog.LevelDebug, "reading usage for the gauges", slog.Any("err", err))
			return
		}
		for _, c := range consumers {
			label, budgets := s.usage.named.labels[c.ID], in.quotas[c.ID]
			for i, u := range quota.Usage(budgets, usedOf(budgets, c, query.Units), query.Now) {
				all = append(all,
					prometheus.MustNewConstMetric(quotaUsed, prometheus.GaugeValue, float64(u.Used), in.policy.Domain, label, budgets[i].Key),
					prometheus.MustNewConstMetric(quotaLimit, prometheus.GaugeValue, float64(u.Limit), in.policy.Domain, label, budgets[i].Key))
			}
		}
	}
	s.usage.last.Store(&all)
}

// usedOf picks what a consumer has used in the windows of the budgets, whose units are
// among those that were read.
func usedOf(budgets []quota.Budget, c policy.ConsumerUsage, units []quota.Unit) []int64 {
	used := make([]int64, len(budgets))
	for i, b := range budgets {
		used[i] = c.Used[slices.Index(units, b.Unit)]
	}
	return used
}

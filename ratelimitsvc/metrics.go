package ratelimitsvc

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the service's own. Labels come from closed sets: the domains that have a
// policy, and the outcomes.
type metrics struct {
	decisions *prometheus.CounterVec
	unmatched *prometheus.CounterVec
	undecided prometheus.Counter
	latency   prometheus.Histogram
}

// unknownDomain labels what names a domain without a policy.
const unknownDomain = "_unknown"

func newMetrics(registry *prometheus.Registry) (*metrics, error) {
	m := &metrics{
		decisions: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_decisions_total",
			Help: "Requests decided, by domain and outcome (allowed, refused, unavailable).",
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
	}
	var errs []error
	for _, c := range []prometheus.Collector{m.decisions, m.unmatched, m.undecided, m.latency} {
		errs = append(errs, registry.Register(c))
	}
	return m, errors.Join(errs...)
}

func (m *metrics) observe(p *plan, a answer, took time.Duration) {
	domain := unknownDomain
	if p.known {
		domain = p.domain
	}
	m.decisions.WithLabelValues(domain, string(a.outcome)).Inc()
	m.latency.Observe(took.Seconds())
	if a.cause != nil {
		m.undecided.Inc()
	}
	for i := range p.descriptors {
		if p.descriptors[i].limit == nil {
			m.unmatched.WithLabelValues(domain).Inc()
		}
	}
}

package store

import "github.com/prometheus/client_golang/prometheus"

// sweeperMetrics tell what the sweeper did. Labels come from closed sets: the jobs, and
// what they change.
type sweeperMetrics struct {
	runs      *prometheus.CounterVec
	changes   *prometheus.CounterVec
	duration  *prometheus.HistogramVec
	succeeded *prometheus.GaugeVec
}

func newSweeperMetrics() *sweeperMetrics {
	return &sweeperMetrics{
		runs: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_sweep_runs_total",
			Help: "Runs of a sweep by this replica, by job and outcome (succeeded, failed).",
		}, []string{"job", "outcome"}),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_sweep_changes_total",
			Help: "What sweeps by this replica changed: rows deleted, by table, and partitions made and dropped.",
		}, []string{"what"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "weir_sweep_duration_seconds",
			Help:    "Time that a run of a sweep by this replica took.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 11),
		}, []string{"job"}),
		succeeded: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "weir_sweep_last_success_timestamp_seconds",
			Help: "When any replica last ended a run of the sweep without an error, in seconds since 1970; 0 for never.",
		}, []string{"job"}),
	}
}

func (m *sweeperMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.runs, m.changes, m.duration, m.succeeded}
}

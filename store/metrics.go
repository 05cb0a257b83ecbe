package store

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// batcherMetrics are a batcher's own.
type batcherMetrics struct {
	requests   prometheus.Histogram
	duration   *prometheus.HistogramVec
	opened     prometheus.Counter
	collectors []prometheus.Collector
}

func newBatcherMetrics(b *Batcher) *batcherMetrics {
	m := &batcherMetrics{
		requests: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "weir_batch_requests",
			Help:    "Requests that one statement decided.",
			Buckets: prometheus.ExponentialBuckets(1, 2, 10),
		}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "weir_batch_duration_seconds",
			Help:    "Time that a statement and its commit took, retries included, by result (ok, error).",
			Buckets: prometheus.ExponentialBuckets(0.00025, 2, 14),
		}, []string{"result"}),
		opened: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "weir_circuit_opened_total",
			Help: "How often the database was found not to answer.",
		}),
	}
	m.collectors = []prometheus.Collector{
		m.requests, m.duration, m.opened,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "weir_circuit_open",
			Help: "1 while the database does not answer, so that decisions are unavailable at once.",
		}, func() float64 {
			if b.circuit.open.Load() {
				return 1
			}
			return 0
		}),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "weir_batch_queue_length",
			Help: "Requests that wait for the next statement.",
		}, func() float64 { return float64(len(b.queue)) }),
	}
	m.duration.WithLabelValues("ok")
	m.duration.WithLabelValues("error")
	return m
}

func (m *batcherMetrics) observe(requests int, took time.Duration, err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.requests.Observe(float64(requests))
	m.duration.WithLabelValues(result).Observe(took.Seconds())
}

// Describe implements [prometheus.Collector].
func (b *Batcher) Describe(ch chan<- *prometheus.Desc) { describe(b.metrics.collectors, ch) }

// Collect implements [prometheus.Collector].
func (b *Batcher) Collect(ch chan<- prometheus.Metric) { collect(b.metrics.collectors, ch) }

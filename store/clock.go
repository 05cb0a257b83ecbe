package store

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// clockSamples is how many round trips a measurement makes; the shortest one counts.
const clockSamples = 5

// clockJump is by how much an offset moves that somebody should look at: a clock was
// set, a machine slept, or another server answers.
const clockJump = 250 * time.Millisecond

// ClockConfig says how a [Clock] works. The zero value is complete.
type ClockConfig struct {
	// Interval is the time between measurements. Defaults to 10 seconds.
	Interval time.Duration
	// Timeout bounds a measurement. Defaults to 2 seconds.
	Timeout time.Duration
	// Local is the host's clock, of which only differences count. Defaults to
	// [time.Now], whose differences are monotonic.
	Local func() time.Time
	// Logger is told of jumps, and of measurements that fail. Defaults to none.
	Logger *slog.Logger
}

func (c ClockConfig) withDefaults() ClockConfig {
	if c.Interval <= 0 {
		c.Interval = 10 * time.Second
	}
	if c.Timeout <= 0 {
		c.Timeout = 2 * time.Second
	}
	if c.Local == nil {
		c.Local = time.Now
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// A Clock tells Postgres's time without asking it: local monotonic time plus an offset
// that is measured now and then. So all replicas agree, within the uncertainty of
// their measurements, however wrong their hosts' clocks are or are set.
//
// A measurement proves that the true offset lies within half its round trip; the
// offset then moves at once, but only as far as it was proved wrong. (To move it
// gradually would keep replicas apart for longer.) So [Clock.Now] may step back, which
// the store's statements allow for. Between measurements a clock drifts with its
// host's, by tens of microseconds a second; while Postgres is away, the last offset
// stays.
//
// It is safe for concurrent use, and a [prometheus.Collector].
type Clock struct {
	db     DBTX
	config ClockConfig
	start  time.Time

	offset      atomic.Int64 // all in nanoseconds
	uncertainty atomic.Int64
	measured    atomic.Int64 // since 1970, by this clock
	jumps       prometheus.Counter
	failures    prometheus.Counter
	collectors  []prometheus.Collector
	failing     bool // Run's
}

// NewClock measures the offset to db's clock, and fails when it cannot.
func NewClock(ctx context.Context, db DBTX, config ClockConfig) (*Clock, error) {
	c := &Clock{db: db, config: config.withDefaults()}
	c.start = c.config.Local()
	c.jumps = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "weir_clock_jumps_total",
		Help: "Measurements by which the offset to Postgres's clock had moved by more than 250 ms.",
	})
	c.failures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "weir_clock_failures_total",
		Help: "Measurements of the offset to Postgres's clock that failed.",
	})
	c.collectors = []prometheus.Collector{
		c.jumps,
		c.failures,
		secondsGauge("weir_clock_offset_seconds",
			"Postgres's clock less this host's, which is taken at the start and counted on from there.", &c.offset),
		secondsGauge("weir_clock_uncertainty_seconds",
			"How far the offset may be from the truth, as of the last measurement.", &c.uncertainty),
		secondsGauge("weir_clock_last_measurement_timestamp_seconds",
			"When the offset was last measured.", &c.measured),
	}
	sample, err := c.measure(ctx)
	if err != nil {
		return nil, err
	}
	c.set(sample.offset, sample)
	return c, nil
}

func secondsGauge(name, help string, nanoseconds *atomic.Int64) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help},
		func() float64 { return time.Duration(nanoseconds.Load()).Seconds() })
}

// Now returns Postgres's time, in UTC.
func (c *Clock) Now() time.Time {
	return c.local().Add(time.Duration(c.offset.Load())).UTC()
}

// local is the host's time at the start, counted on by its monotonic clock.
func (c *Clock) local() time.Time {
	return c.start.Round(0).Add(c.config.Local().Sub(c.start))
}

// Offset returns Postgres's clock less the host's (as it was when the clock was made,
// counted on monotonically), and how far that may be from the truth.
func (c *Clock) Offset() (offset, uncertainty time.Duration) {
	return time.Duration(c.offset.Load()), time.Duration(c.uncertainty.Load())
}

// Run measures at each interval until ctx ends.
func (c *Clock) Run(ctx context.Context) error {
	ticker := time.NewTicker(c.config.Interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			c.adjust(ctx)
		}
	}
}

// adjust measures once. A failure leaves the offset as it is, and is logged when the
// measurement before it succeeded.
func (c *Clock) adjust(ctx context.Context) {
	sample, err := c.measure(ctx)
	if err != nil {
		if ctx.Err() != nil {
			return
		}
		c.failures.Inc()
		if !c.failing {
			c.config.Logger.LogAttrs(ctx, slog.LevelWarn, "the offset to the database's clock stays as it was", slog.Any("err", err))
		}
		c.failing = true
		return
	}
	c.failing = false
	was := time.Duration(c.offset.Load())
	offset := min(max(was, sample.offset-sample.uncertainty), sample.offset+sample.uncertainty)
	c.set(offset, sample)
	if moved := offset - was; moved.Abs() > clockJump {
		c.jumps.Inc()
		c.config.Logger.LogAttrs(ctx, slog.LevelWarn, "the offset to the database's clock jumped",
			slog.Duration("by", moved), slog.Duration("offset", offset), slog.Duration("uncertainty", sample.uncertainty))
	}
}

func (c *Clock) set(offset time.Duration, s clockSample) {
	c.offset.Store(int64(offset))
	c.uncertainty.Store(int64(s.uncertainty + (offset - s.offset).Abs()))
	c.measured.Store(c.Now().UnixNano())
}

// A clockSample proves that the offset is within its uncertainty.
type clockSample struct{ offset, uncertainty time.Duration }

// measure asks for the time and takes the answer of the shortest round trip: the
// server read its clock at some instant within it.
func (c *Clock) measure(ctx context.Context) (clockSample, error) {
	ctx, cancel := context.WithTimeout(ctx, c.config.Timeout)
	defer cancel()
	var best clockSample
	for i := range clockSamples {
		var at time.Time
		sent := c.local()
		err := c.db.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&at)
		half := c.local().Sub(sent) / 2
		if err != nil {
			return clockSample{}, fmt.Errorf("reading the database's clock: %w", err)
		}
		// The answer is cut to microseconds.
		s := clockSample{offset: at.Sub(sent.Add(half)), uncertainty: half + time.Microsecond}
		if i == 0 || s.uncertainty < best.uncertainty {
			best = s
		}
	}
	return best, nil
}

// Describe implements [prometheus.Collector].
func (c *Clock) Describe(ch chan<- *prometheus.Desc) { describe(c.collectors, ch) }

// Collect implements [prometheus.Collector].
func (c *Clock) Collect(ch chan<- prometheus.Metric) { collect(c.collectors, ch) }

func describe(collectors []prometheus.Collector, ch chan<- *prometheus.Desc) {
	for _, c := range collectors {
		c.Describe(ch)
	}
}

func collect(collectors []prometheus.Collector, ch chan<- prometheus.Metric) {
	for _, c := range collectors {
		c.Collect(ch)
	}
}

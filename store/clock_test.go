package store

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
)

// hostClock is a clock that is wrong by so much and can be set.
type hostClock struct{ wrong atomic.Int64 }

func (h *hostClock) now() time.Time { return time.Now().Add(time.Duration(h.wrong.Load())) }

// mustClock returns a clock on the test's server, which runs on this machine.
func mustClock(t *testing.T, db DBTX, config ClockConfig) *Clock {
	t.Helper()
	c, err := NewClock(t.Context(), db, config)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// checkAgrees fails unless a clock tells the server's time, within its uncertainty and
// the round trip that it takes to look.
func checkAgrees(t *testing.T, db DBTX, c *Clock, what string) {
	t.Helper()
	before := c.Now()
	var at time.Time
	if err := db.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&at); err != nil {
		t.Fatal(err)
	}
	after := c.Now()
	_, uncertainty := c.Offset()
	const slack = 2 * time.Millisecond // what a host's clock may be slewed by in this test
	if at.Before(before.Add(-uncertainty-slack)) || at.After(after.Add(uncertainty+slack)) {
		t.Errorf("%s: the server said %v between %v and %v of the clock, which is sure to %v", what, at, before, after, uncertainty)
	}
}

// Law 5: however wrong a host's clock is, the clock tells the server's time.
func TestLaw5ClockIsTheServers(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	clocks := make(map[string]*Clock)
	for name, wrong := range map[string]time.Duration{"right": 0, "fast": time.Hour, "slow": -time.Hour} {
		host := &hostClock{}
		host.wrong.Store(int64(wrong))
		c := mustClock(t, pool, ClockConfig{Local: host.now})
		clocks[name] = c
		checkAgrees(t, pool, c, name)
		offset, uncertainty := c.Offset()
		if got := (offset + wrong).Abs(); got > uncertainty+time.Second {
			t.Errorf("%s: offset %v, want about %v", name, offset, -wrong)
		}
		if uncertainty <= 0 || uncertainty > time.Second {
			t.Errorf("%s: uncertainty %v", name, uncertainty)
		}
		if c.Now().Location() != time.UTC {
			t.Errorf("%s: not in UTC", name)
		}
	}
	// So replicas an hour apart share one budget as if they were not.
	s, key, budget := NewStore(pool), newKey(), Budget{PerSecond: 10, Burst: 100}
	start := time.Now()
	var admitted float64
	for time.Since(start) < 300*time.Millisecond {
		for _, name := range []string{"right", "fast", "slow"} {
			if mustTake(t, s, ScopeIngestNode, key, 10, budget, clocks[name].Now()) {
				admitted += 10
			}
		}
	}
	if most := 100 + 10*(time.Since(start).Seconds()+0.1); admitted > most || admitted < 100 {
		t.Errorf("admitted %v, want 100 to %v", admitted, most)
	}
}

// The offset follows a jump at once, with a log line and a metric, and small errors of
// measurement don't move it.
func TestClockJumps(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	var log bytes.Buffer
	host := &hostClock{}
	c := mustClock(t, pool, ClockConfig{Local: host.now, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	first, _ := c.Offset()
	c.adjust(t.Context())
	if again, uncertainty := c.Offset(); (again - first).Abs() > uncertainty+time.Millisecond {
		t.Errorf("the offset moved from %v to %v although nothing did (sure to %v)", first, again, uncertainty)
	}
	if log.Len() > 0 || metric(t, c, "weir_clock_jumps_total") != 0 {
		t.Errorf("a jump of nothing: %s", log.String())
	}
	for _, wrong := range []time.Duration{time.Hour, -time.Hour, -time.Hour + time.Second} {
		log.Reset()
		before := metric(t, c, "weir_clock_jumps_total")
		host.wrong.Store(int64(wrong))
		c.adjust(t.Context())
		checkAgrees(t, pool, c, "after a jump to "+wrong.String())
		if metric(t, c, "weir_clock_jumps_total") != before+1 || strings.Count(log.String(), "jumped") != 1 {
			t.Errorf("a jump to %v: %v jumps, log %q, want one of each", wrong, metric(t, c, "weir_clock_jumps_total")-before, log.String())
		}
	}
}

// slowDB answers with the server's time, but late.
type slowDB struct {
	DBTX

	delays []time.Duration
	calls  int
}

func (s *slowDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	row := s.DBTX.QueryRow(ctx, sql, args...)
	time.Sleep(s.delays[s.calls%len(s.delays)])
	s.calls++
	return row
}

// Of several round trips the shortest counts, and one that proves nothing against an
// offset doesn't move it.
func TestClockTrustsTheShortestRoundTrip(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	slow := &slowDB{DBTX: pool, delays: []time.Duration{300 * time.Millisecond, 0, 300 * time.Millisecond, 0, 300 * time.Millisecond}}
	c := mustClock(t, slow, ClockConfig{})
	if _, uncertainty := c.Offset(); uncertainty > 140*time.Millisecond {
		t.Errorf("uncertainty %v: a slow round trip was taken", uncertainty)
	}
	checkAgrees(t, pool, c, "beside slow round trips")

	before, doubt := c.Offset()
	slow.delays = []time.Duration{200 * time.Millisecond}
	c.adjust(t.Context())
	after, uncertainty := c.Offset()
	// They may prove as much of it wrong as was in doubt.
	if (after-before).Abs() > doubt || uncertainty < 100*time.Millisecond {
		t.Errorf("slow round trips moved the offset from %v to %v, sure to %v: want it moved by no more than %v, and less sure", before, after, uncertainty, doubt)
	}
}

// While Postgres is away the last offset stays, and that is counted.
func TestClockOutlivesTheDatabase(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	down := &faultyDB{DBTX: pool}
	host := &hostClock{}
	host.wrong.Store(int64(time.Hour))
	c := mustClock(t, down, ClockConfig{Local: host.now, Interval: time.Millisecond})
	before, _ := c.Offset()
	down.set(errors.New("gone"))
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- c.Run(ctx) }()
	waitUntil(t, "failures to be counted", func() bool { return metric(t, c, "weir_clock_failures_total") >= 3 })
	if after, _ := c.Offset(); after != before {
		t.Errorf("offset %v after the database went, want %v", after, before)
	}
	checkAgrees(t, pool, c, "while it could not measure")
	down.set(nil)
	host.wrong.Store(0)
	waitUntil(t, "the new offset", func() bool { o, _ := c.Offset(); return o.Abs() < 30*time.Minute })
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	down.set(errors.New("gone"))
	if _, err := NewClock(t.Context(), down, ClockConfig{}); err == nil {
		t.Error("NewClock without a database: no error")
	}
}

func TestClockMetrics(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	got := metricsOf(t, mustClock(t, pool, ClockConfig{}))
	if at := got["weir_clock_last_measurement_timestamp_seconds"]; time.Since(time.Unix(int64(at), 0)).Abs() > time.Hour {
		t.Errorf("last measurement at %v", at)
	}
	if u := got["weir_clock_uncertainty_seconds"]; u <= 0 || u > 1 {
		t.Errorf("uncertainty %v s", u)
	}
	for _, name := range []string{"weir_clock_offset_seconds", "weir_clock_jumps_total", "weir_clock_failures_total"} {
		if _, ok := got[name]; !ok {
			t.Errorf("%s is missing", name)
		}
	}
}

// faultyDB fails when told to.
type faultyDB struct {
	DBTX

	mu  sync.Mutex
	err error
}

func (f *faultyDB) set(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *faultyDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	f.mu.Lock()
	err := f.err
	f.mu.Unlock()
	if err != nil {
		return failingRow{err}
	}
	return f.DBTX.QueryRow(ctx, sql, args...)
}

// metricsOf collects metrics: the values of counters and gauges, and how often a
// histogram was told of something.
func metricsOf(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(c)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			values[f.GetName()] += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return values
}

// metric is one of metricsOf, which must be there.
func metric(t *testing.T, c prometheus.Collector, name string) float64 {
	t.Helper()
	v, ok := metricsOf(t, c)[name]
	if !ok {
		t.Fatalf("there is no metric %s", name)
	}
	return v
}

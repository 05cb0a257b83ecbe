package store

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// MonitorConfig says how a [Monitor] works. The zero value is complete.
type MonitorConfig struct {
	// Interval is the time between looks. Defaults to 15 seconds.
	Interval time.Duration
	// Timeout bounds a look. Defaults to 2 seconds.
	Timeout time.Duration
	// Logger is told of the database at the start. Defaults to none.
	Logger *slog.Logger
}

func (c MonitorConfig) withDefaults() MonitorConfig {
	if c.Interval <= 0 {
		c.Interval = 15 * time.Second
	}
	if c.Timeout <= 0 {
		c.Timeout = 2 * time.Second
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// A Monitor looks at what slows decisions down from outside: the oldest snapshot that
// anybody holds (a long query, a dump, a forgotten transaction or replication slot),
// since no row version younger than it is cleared away. It is safe for concurrent use,
// and a [prometheus.Collector]; its gauges are NaN until the first look and after one
// that failed.
//
// A role sees the sessions of others only as a member of pg_read_all_stats.
type Monitor struct {
	db     DBTX
	config MonitorConfig

	xminAge     atomic.Uint64 // bits of float64s
	snapshotAge atomic.Uint64
	collectors  []prometheus.Collector
}

// NewMonitor returns a monitor of a database.
func NewMonitor(db DBTX, config MonitorConfig) *Monitor {
	m := &Monitor{db: db, config: config.withDefaults()}
	m.set(math.NaN(), math.NaN())
	m.collectors = []prometheus.Collector{
		floatGauge("weir_postgres_oldest_xmin_age_transactions",
			"How many transactions ago the oldest snapshot was taken that keeps dead rows from being cleared away.", &m.xminAge),
		floatGauge("weir_postgres_oldest_snapshot_age_seconds",
			"For how long the oldest transaction has run that holds a snapshot.", &m.snapshotAge),
	}
	return m
}

func floatGauge(name, help string, bits *atomic.Uint64) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help},
		func() float64 { return math.Float64frombits(bits.Load()) })
}

func (m *Monitor) set(xminAge, snapshotAge float64) {
	m.xminAge.Store(math.Float64bits(xminAge))
	m.snapshotAge.Store(math.Float64bits(snapshotAge))
}

// Run logs what the database is, and then looks at each interval until ctx ends.
func (m *Monitor) Run(ctx context.Context) error {
	m.describeServer(ctx)
	ticker := time.NewTicker(m.config.Interval)
	defer ticker.Stop()
	for {
		if err := m.look(ctx); err != nil && ctx.Err() == nil {
			m.config.Logger.LogAttrs(ctx, slog.LevelDebug, "looking at the database", slog.Any("err", err))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// oldestSQL leaves out its own session, and vacuums, which hold nobody up.
const oldestSQL = `
SELECT greatest(
        coalesce(max(age(a.backend_xmin)), 0),
        (SELECT coalesce(max(age(xmin)), 0) FROM pg_replication_slots),
        (SELECT coalesce(max(age(transaction)), 0) FROM pg_prepared_xacts)
    )::float8,
    greatest(
        coalesce(max(date_part('epoch', clock_timestamp() - a.xact_start)), 0),
        (SELECT coalesce(max(date_part('epoch', clock_timestamp() - prepared)), 0) FROM pg_prepared_xacts)
    )::float8
FROM pg_stat_activity AS a
WHERE a.backend_xmin IS NOT NULL AND a.pid <> pg_backend_pid() AND a.backend_type <> 'autovacuum worker'`

func (m *Monitor) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, m.config.Timeout)
	defer cancel()
	var xminAge, snapshotAge float64
	if err := m.db.QueryRow(ctx, oldestSQL).Scan(&xminAge, &snapshotAge); err != nil {
		m.set(math.NaN(), math.NaN())
		return fmt.Errorf("reading the oldest snapshot: %w", err)
	}
	m.set(xminAge, snapshotAge)
	return nil
}

const serverSQL = `
SELECT current_setting('server_version'), current_setting('synchronous_standby_names'), current_setting('synchronous_commit'),
    pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')`

// describeServer logs what an operator asks first after an incident.
func (m *Monitor) describeServer(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, m.config.Timeout)
	defer cancel()
	var version, standbys, commit string
	var seesAll bool
	err := m.db.QueryRow(ctx, serverSQL).Scan(&version, &standbys, &commit, &seesAll)
	var missing []string
	if err == nil {
		missing, err = MissingSettings(ctx, m.db)
	}
	if err != nil {
		m.config.Logger.LogAttrs(ctx, slog.LevelWarn, "reading what the database is", slog.Any("err", err))
		return
	}
	m.config.Logger.LogAttrs(ctx, slog.LevelInfo, "database",
		slog.String("server_version", version),
		slog.String("synchronous_standby_names", standbys),
		slog.String("synchronous_commit", commit),
		slog.Bool("sees_all_sessions", seesAll),
	)
	if len(missing) > 0 {
		m.config.Logger.LogAttrs(ctx, slog.LevelWarn, "the session lacks settings that decisions are faster with or that bound waits: ALTER ROLE … SET gives them to a role behind a pooler",
			slog.Any("settings", missing))
	}
}

// Describe implements [prometheus.Collector].
func (m *Monitor) Describe(ch chan<- *prometheus.Desc) { describe(m.collectors, ch) }

// Collect implements [prometheus.Collector].
func (m *Monitor) Collect(ch chan<- prometheus.Metric) { collect(m.collectors, ch) }

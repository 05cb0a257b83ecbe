package store

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// A snapshot that somebody holds shows, in transactions and in seconds, until it is
// let go. The server is the test's own.
func TestMonitorSeesOldSnapshots(t *testing.T) {
	t.Parallel()

	server := startServer(t, nil)
	pool := mustConnect(t, server.DSN("postgres"))
	m := NewMonitor(pool, MonitorConfig{})
	const xmin, seconds = "weir_postgres_oldest_xmin_age_transactions", "weir_postgres_oldest_snapshot_age_seconds"
	if v := metric(t, m, xmin); !math.IsNaN(v) {
		t.Errorf("before the first look: %v, want NaN", v)
	}
	look := func() {
		t.Helper()
		if err := m.look(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	look()
	if v := metric(t, m, xmin); v > 50 {
		t.Errorf("nobody holds a snapshot, and the oldest is %v transactions old", v)
	}

	dump, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dump.Exec(t.Context(), "SELECT FROM plexsphere.rate_budgets"); err != nil {
		t.Fatal(err)
	}
	s, key := NewStore(pool), newKey()
	for range 100 {
		mustDecide(t, s, oneUnit(key))
	}
	time.Sleep(100 * time.Millisecond)
	look()
	if v := metric(t, m, xmin); v < 100 {
		t.Errorf("the oldest snapshot is %v transactions old, want 100 at least", v)
	}
	if v := metric(t, m, seconds); v < 0.1 || v > 300 {
		t.Errorf("the oldest snapshot is %v s old", v)
	}
	if err := dump.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitUntil(t, "the snapshot to be gone", func() bool { look(); return metric(t, m, xmin) < 50 })
}

func TestMonitorTellsOfTheServer(t *testing.T) {
	t.Parallel()

	server := startServer(t, nil)
	var log bytes.Buffer
	pool := mustConnect(t, server.DSN("postgres")+"&jit=on")
	down := &faultyDB{DBTX: pool}
	m := NewMonitor(down, MonitorConfig{Logger: slog.New(slog.NewTextHandler(&log, nil)), Interval: time.Millisecond})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- m.Run(ctx) }()
	waitUntil(t, "a look", func() bool { return !math.IsNaN(metric(t, m, "weir_postgres_oldest_snapshot_age_seconds")) })
	down.set(errors.New("gone"))
	waitUntil(t, "a look that fails", func() bool { return math.IsNaN(metric(t, m, "weir_postgres_oldest_snapshot_age_seconds")) })
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, want := range []string{`synchronous_standby_names=""`, "synchronous_commit=on", "server_version=18", "sees_all_sessions=true", "settings=[jit]"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log lacks %q:\n%s", want, log.String())
		}
	}
}

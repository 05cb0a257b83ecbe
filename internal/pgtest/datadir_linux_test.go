package pgtest_test

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/weir-dev/weir/internal/pgtest"
)

// However a server on a lasting folder was killed, the next one finds the data.
func TestDataDirAfterKill(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		name string
		busy bool // a query keeps a backend from noticing
		kill func(t *testing.T, s *pgtest.Server, postmaster int)
	}{
		{name: "the postmaster", kill: func(t *testing.T, s *pgtest.Server, postmaster int) {
			t.Helper()
			kill(t, postmaster)
			if err := s.Stop(); err != nil {
				t.Error(err)
			}
		}},
		{name: "the postmaster of a busy backend", busy: true, kill: func(t *testing.T, s *pgtest.Server, postmaster int) {
			t.Helper()
			kill(t, postmaster)
			if err := s.Stop(); err != nil {
				t.Error(err)
			}
		}},
		{name: "the child", busy: true, kill: func(t *testing.T, s *pgtest.Server, postmaster int) {
			t.Helper()
			kill(t, parentOf(t, postmaster))
			<-s.Done()
			if !alive(postmaster)() {
				t.Error("the postmaster went with the child, so this tests nothing")
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			dir := dataDir(t)
			first := start(t, pgtest.Config{DataDir: dir})
			dsn := first.DSN("postgres")
			if err := query(t.Context(), dsn, "CREATE TABLE kept AS SELECT 42 AS a"); err != nil {
				t.Fatal(err)
			}
			pid, _ := postmaster(t, dsn)
			if tt.busy {
				keepBusy(t, dsn)
			}
			tt.kill(t, first, pid)
			second := start(t, pgtest.Config{DataDir: dir})
			if got := value(t, second.DSN("postgres"), "SELECT a::text FROM kept"); got != "42" {
				t.Errorf("kept = %s, want 42", got)
			}
		})
	}
}

// parentOf is the process id of a process's parent.
func parentOf(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), "PPid:")
	line, _, _ := strings.Cut(rest, "\n")
	parent, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	return parent
}

// keepBusy has a backend compute until it is killed, and returns once it does.
func keepBusy(t *testing.T, dsn string) {
	t.Helper()
	go func() {
		_ = query(context.WithoutCancel(t.Context()), dsn, "SELECT count(*) FROM generate_series(1, 1000000000000)")
	}()
	waitGone(t, "the idleness", func() bool {
		return value(t, dsn, "SELECT count(*)::text FROM pg_stat_activity WHERE query LIKE '%generate_series%' AND state = 'active' AND pid <> pg_backend_pid()") == "0"
	})
}

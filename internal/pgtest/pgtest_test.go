package pgtest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/internal/pgtest"
)

// victimVariable makes the test binary start a server, tell of it, and wait to be
// killed.
const victimVariable = "PGTEST_VICTIM"

func TestMain(m *testing.M) {
	if pgtest.RunChild() {
		return
	}
	if os.Getenv(victimVariable) != "" {
		victim()
		return
	}
	os.Exit(pgtest.Main(m, func(ctx context.Context, dsn string) error {
		return query(ctx, dsn, "CREATE TABLE migrated (a int)")
	}))
}

func victim() {
	s, err := pgtest.Start(context.Background(), pgtest.Config{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	fmt.Println(s.DSN("postgres"))
	select {}
}

func query(ctx context.Context, dsn, sql string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql)
	return errors.Join(err, conn.Close(ctx))
}

// value reads one value as text.
func value(t *testing.T, dsn, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	var v string
	if err := conn.QueryRow(t.Context(), sql).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

func start(t *testing.T, cfg pgtest.Config) *pgtest.Server {
	t.Helper()
	s, err := pgtest.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// waitGone waits until check fails, and is an error if it never does.
func waitGone(t *testing.T, what string, check func() bool) {
	t.Helper()
	deadline := time.After(30 * time.Second)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for check() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("%s is still there", what)
		}
	}
}

func alive(pid int) func() bool { return func() bool { return syscall.Kill(pid, 0) == nil } }

func exists(path string) func() bool {
	return func() bool { _, err := os.Stat(path); return err == nil }
}

func postmaster(t *testing.T, dsn string) (pid int, data string) {
	t.Helper()
	data = value(t, dsn, "SHOW data_directory")
	pid, err := strconv.Atoi(strings.TrimSpace(value(t, dsn, "SELECT split_part(pg_read_file('postmaster.pid'), chr(10), 1)")))
	if err != nil {
		t.Fatal(err)
	}
	return pid, data
}

func TestNewDatabase(t *testing.T) {
	t.Parallel()

	a, b := pgtest.NewDatabase(t), pgtest.NewDatabase(t)
	if err := query(t.Context(), a, "INSERT INTO migrated VALUES (1)"); err != nil {
		t.Fatal(err)
	}
	if got := value(t, b, "SELECT count(*)::text FROM migrated"); got != "0" {
		t.Errorf("the second database has %s rows of the first", got)
	}
}

func TestNewDatabaseIsDropped(t *testing.T) {
	t.Parallel()

	var dsn string
	if !t.Run("owner", func(t *testing.T) { dsn = pgtest.NewDatabase(t) }) {
		t.FailNow()
	}
	if err := query(t.Context(), dsn, "SELECT 1"); err == nil {
		t.Error("the database outlived its test")
	}
}

// Durability is the product: a test server with fsync off would prove nothing.
func TestServerIsDurable(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	for _, setting := range []string{"fsync", "synchronous_commit", "full_page_writes"} {
		if got := value(t, dsn, "SHOW "+setting); got != "on" {
			t.Errorf("%s = %s, want on", setting, got)
		}
	}
}

func TestStopLeavesNothing(t *testing.T) {
	t.Parallel()

	s := start(t, pgtest.Config{Parameters: map[string]string{"max_connections": "17"}})
	dsn := s.DSN("postgres")
	if got := value(t, dsn, "SHOW max_connections"); got != "17" {
		t.Errorf("max_connections = %s, want 17", got)
	}
	pid, data := postmaster(t, dsn)
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	waitGone(t, "the postmaster", alive(pid))
	waitGone(t, "the run's folder", exists(filepath.Dir(data)))
	if err := s.Stop(); err != nil {
		t.Errorf("stopping twice: %v", err)
	}
}

func TestKillAndHaltKeepData(t *testing.T) {
	t.Parallel()

	s := start(t, pgtest.Config{})
	dsn := s.DSN("postgres")
	if err := query(t.Context(), dsn, "CREATE TABLE kept AS SELECT 42 AS a"); err != nil {
		t.Fatal(err)
	}
	for _, end := range []struct {
		name string
		end  func(context.Context) error
	}{{"kill", s.Kill}, {"halt", s.Halt}} {
		if err := end.end(t.Context()); err != nil {
			t.Fatalf("%s: %v", end.name, err)
		}
		if err := query(t.Context(), dsn, "SELECT 1"); err == nil {
			t.Errorf("%s: the server still answers", end.name)
		}
		if err := s.Restart(t.Context()); err != nil {
			t.Fatalf("restart after %s: %v", end.name, err)
		}
		if got := value(t, dsn, "SELECT a::text FROM kept"); got != "42" {
			t.Errorf("after %s: %s, want 42", end.name, got)
		}
	}
}

// dataDir returns a folder for lasting data.
func dataDir(t *testing.T) string {
	t.Helper()
	// Not t.TempDir, whose parents an unprivileged uid may not enter.
	dir, err := os.MkdirTemp(os.TempDir(), "pgtest-data-*") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestDataDirPersists(t *testing.T) {
	t.Parallel()

	dir := dataDir(t)
	first := start(t, pgtest.Config{DataDir: dir})
	if err := query(t.Context(), first.DSN("postgres"), "CREATE TABLE kept AS SELECT 42 AS a"); err != nil {
		t.Fatal(err)
	}
	if _, err := pgtest.Start(t.Context(), pgtest.Config{DataDir: dir}); err == nil || !strings.Contains(err.Error(), "in use") {
		t.Errorf("a second server on one data folder: %v, want that it is in use", err)
	}
	if err := first.Stop(); err != nil {
		t.Fatal(err)
	}
	second := start(t, pgtest.Config{DataDir: dir})
	if got := value(t, second.DSN("postgres"), "SELECT a::text FROM kept"); got != "42" {
		t.Errorf("kept = %s, want 42", got)
	}
}

func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// A Postgres that dies by itself takes its child along, which tells of it.
func TestDoneWhenPostgresDies(t *testing.T) {
	t.Parallel()

	var log bytes.Buffer
	s := start(t, pgtest.Config{Log: &log})
	pid, data := postmaster(t, s.DSN("postgres"))
	kill(t, pid)
	select {
	case <-s.Done():
	case <-time.After(time.Minute):
		t.Fatal("the child has not noticed")
	}
	if !strings.Contains(log.String(), "Postgres ended by itself") {
		t.Errorf("the child said %q", &log)
	}
	waitGone(t, "the run's folder", exists(filepath.Dir(data)))
	if err := s.Restart(t.Context()); err == nil {
		t.Error("Restart is no error when the child is gone")
	}
}

func TestPortInUse(t *testing.T) {
	t.Parallel()

	var config net.ListenConfig
	l, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	port := l.Addr().(*net.TCPAddr).Port
	_, err = pgtest.Start(t.Context(), pgtest.Config{Port: port})
	if err == nil || !strings.Contains(err.Error(), strconv.Itoa(port)) || !strings.Contains(err.Error(), "DATABASE_URL") {
		t.Errorf("Start on a taken port: %v, want the port and what to do", err)
	}
}

func TestConcurrentStarts(t *testing.T) {
	t.Parallel()

	var group sync.WaitGroup
	for range 3 {
		group.Go(func() {
			s, err := pgtest.Start(t.Context(), pgtest.Config{})
			if err != nil {
				t.Error(err)
				return
			}
			if err := query(t.Context(), s.DSN("postgres"), "SELECT 1"); err != nil {
				t.Error(err)
			}
			if err := s.Stop(); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
}

func TestKilledParentLeavesNothing(t *testing.T) {
	t.Parallel()

	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), victimVariable+"=1")
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var dsn string
	if _, err := fmt.Fscanln(stdout, &dsn); err != nil {
		t.Fatalf("reading what the victim says: %v", err)
	}
	pid, data := postmaster(t, dsn)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	waitGone(t, "the postmaster", alive(pid))
	waitGone(t, "the run's folder", exists(filepath.Dir(data)))
}

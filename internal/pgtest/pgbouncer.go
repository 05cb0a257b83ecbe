package pgtest

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/internal/child"
)

// pgbouncerVariable names the pgbouncer to run; make sets it to the one that it gets.
const pgbouncerVariable = "PGBOUNCER"

// StartPgBouncer starts a real pgbouncer in transaction mode in front of a DSN's server,
// with few server connections so that sessions are shared, and returns the DSN that
// leads through it. Settings are added to its configuration. It is stopped when the test
// ends.
//
// The binary is that of PGBOUNCER, or the one that `make tools` has put below .tools,
// or is on PATH. A test that needs it fails without.
func StartPgBouncer(tb testing.TB, dsn string, settings map[string]string) string {
	tb.Helper()
	binary, err := findPgBouncer()
	if err != nil {
		tb.Fatal(err)
	}
	server, err := url.Parse(dsn)
	if err != nil {
		tb.Fatal(err)
	}
	port, err := freePort()
	if err != nil {
		tb.Fatal(err)
	}
	password, _ := server.User.Password()
	var config bytes.Buffer
	fmt.Fprintf(&config, "[databases]\n* = host=%s port=%s user=%s password=%s\n",
		server.Hostname(), server.Port(), server.User.Username(), password)
	fmt.Fprintf(&config, "[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = %d\nunix_socket_dir =\nauth_type = any\n", port)
	fmt.Fprint(&config, "pool_mode = transaction\ndefault_pool_size = 3\nmax_client_conn = 500\nlog_connections = 0\nlog_disconnections = 0\n")
	for name, value := range settings {
		fmt.Fprintf(&config, "%s = %s\n", name, value)
	}
	file := filepath.Join(tb.TempDir(), "pgbouncer.ini")
	if err := os.WriteFile(file, config.Bytes(), 0o600); err != nil {
		tb.Fatal(err)
	}
	args := []string{file}
	if os.Geteuid() == 0 { // it refuses to stay root
		args = append([]string{"--user=nobody"}, args...)
	}
	log, err := os.Create(file + ".log") //nolint:gosec // a path of our own
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { log.Close() })
	said := func() string {
		text, err := os.ReadFile(log.Name())
		if err != nil {
			return err.Error()
		}
		return string(text)
	}
	cmd := exec.Command(binary, args...) //nolint:gosec,noctx // a test's own; it is stopped below
	cmd.Stdout, cmd.Stderr = log, log
	process, err := child.Start(cmd)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := process.Stop(syscall.SIGTERM, stopGrace); err != nil {
			tb.Errorf("stopping pgbouncer: %v", err)
		}
		if tb.Failed() {
			tb.Logf("pgbouncer said:\n%s", said())
		}
	})
	server.Host = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	through := server.String()
	if err := awaitPgBouncer(tb.Context(), process, through); err != nil {
		tb.Fatalf("starting pgbouncer: %v\n%s", err, said())
	}
	return through
}

// awaitPgBouncer returns once a pgbouncer passes a query on.
func awaitPgBouncer(ctx context.Context, process *child.Process, dsn string) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for {
		conn, err := pgx.Connect(ctx, dsn)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-ticker.C:
		case <-process.Done():
			return fmt.Errorf("it ended: %w", err)
		case <-ctx.Done():
			return err
		}
	}
}

// findPgBouncer returns the path of the pgbouncer to run.
var findPgBouncer = sync.OnceValues(func() (string, error) {
	if path := os.Getenv(pgbouncerVariable); path != "" {
		return path, nil
	}
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("finding pgbouncer: %w", err)
	}
	for {
		path := filepath.Join(dir, ".tools", "pgbouncer", "pgbouncer")
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			break
		}
		dir = parent
	}
	path, err := exec.LookPath("pgbouncer")
	if err != nil {
		return "", fmt.Errorf("finding pgbouncer: run make tools, or set %s to one: %w", pgbouncerVariable, err)
	}
	return path, nil
})

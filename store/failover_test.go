package store

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
)

// startPair starts a primary and its streaming hot standby, with the schema.
func startPair(t *testing.T) (primary, standby *pgtest.Server) {
	t.Helper()
	// Not t.TempDir, whose parents the server's user may not enter.
	root, err := os.MkdirTemp("", "weir-failover-*") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	start := func(dir string) *pgtest.Server {
		server, err := pgtest.Start(t.Context(), pgtest.Config{DataDir: dir})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := server.Stop(); err != nil {
				t.Error(err)
			}
		})
		return server
	}
	a, b := filepath.Join(root, "a"), filepath.Join(root, "b")
	primary = start(a)
	if err := Migrate(t.Context(), primary.DSN("postgres"), DefaultSchema); err != nil {
		t.Fatal(err)
	}
	if err := primary.Halt(t.Context()); err != nil {
		t.Fatal(err)
	}
	// A copy of a server that is down is a base backup.
	if out, err := exec.Command("cp", "-a", a, b).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	data, err := filepath.Glob(filepath.Join(b, "postgres-*", "PG_VERSION"))
	if err != nil || len(data) != 1 {
		t.Fatalf("the copy's data folder: %v, %v", data, err)
	}
	dir := filepath.Dir(data[0])
	info, err := os.ReadFile(filepath.Join(dir, "postgresql.auto.conf"))
	if err != nil {
		t.Fatal(err)
	}
	info = fmt.Appendf(info, "\nprimary_conninfo = 'host=127.0.0.1 port=%d user=postgres password=postgres'\n", primary.Port())
	if err := os.WriteFile(filepath.Join(dir, "postgresql.auto.conf"), info, 0o600); err != nil {
		t.Fatal(err)
	}
	// Made by copying, so that it is the server's user's.
	if out, err := exec.Command("cp", "-a", data[0], filepath.Join(dir, "standby.signal")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := primary.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	return primary, start(b)
}

// C77: the primary is killed and its standby promoted: a DSN that names both leads to
// the primary, whatever their order, and to the new one after the failover.
func TestC77FailoverToStandby(t *testing.T) {
	t.Parallel()

	primary, standby := startPair(t)
	ports := []int{standby.Port(), primary.Port()}
	key := newKey()
	var batchers []*Batcher
	for name, dsn := range map[string]string{
		"as given": withHosts(t, primary.DSN("postgres"), ports...),
		"asked":    withHosts(t, primary.DSN("postgres"), ports...) + "&target_session_attrs=read-write",
	} {
		pool := mustConnect(t, dsn)
		b := startBatcher(t, pool, BatcherConfig{})
		batchers = append(batchers, b)
		if v, err := b.Decide(t.Context(), oneUnit(key)); err != nil || !v.Allowed {
			t.Fatalf("%s: %+v, %v", name, v, err)
		}
	}
	if _, err := Connect(t.Context(), standby.DSN("postgres")); err == nil || !strings.Contains(err.Error(), "read only") {
		t.Errorf("connecting to a standby: %v, want that it is read only", err)
	}
	replica, err := pgxpool.New(t.Context(), standby.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer replica.Close()
	waitUntil(t, "the standby to have followed", func() bool { return spent(t, replica, key) == 2 })

	stop := load(t, batchers[0], key, 8)
	if err := primary.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, b := range batchers {
		waitUntil(t, "the circuit to open", func() bool {
			_, err := b.Decide(t.Context(), oneUnit(key))
			return errors.Is(err, ErrCircuitOpen)
		})
	}
	if _, err := replica.Exec(t.Context(), "SELECT pg_promote()"); err != nil {
		t.Fatal(err)
	}
	for _, b := range batchers {
		waitUntil(t, "decisions on the new primary", func() bool {
			v, err := b.Decide(t.Context(), oneUnit(key))
			return err == nil && v.Allowed
		})
	}
	stop()
	before := spent(t, replica, key)
	if v, err := batchers[0].Decide(t.Context(), oneUnit(key)); err != nil || !v.Allowed {
		t.Fatalf("%+v, %v", v, err)
	}
	if got := spent(t, replica, key); got != before+1 {
		t.Errorf("%d units are charged on the new primary, want %d", got, before+1)
	}
}

// C77: a server that becomes read-only is answered once by each pool: its connections are
// dropped, the other host of the DSN is dialled, and while none may be written to,
// decisions are unavailable.
func TestC77ReadOnlyServerIsLeft(t *testing.T) {
	t.Parallel()

	a, b := startServer(t, nil), startServer(t, nil)
	admin := make(map[*pgtest.Server]*pgxpool.Pool)
	for _, server := range []*pgtest.Server{a, b} {
		pool, err := pgxpool.New(t.Context(), server.DSN("postgres"))
		if err != nil {
			t.Fatal(err)
		}
		defer pool.Close()
		admin[server] = pool
	}
	readOnly := func(server *pgtest.Server, value string) {
		for _, sql := range []string{"ALTER SYSTEM SET default_transaction_read_only = " + value, "SELECT pg_reload_conf()"} {
			if _, err := admin[server].Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		waitUntil(t, "the setting", func() bool {
			var got string
			return admin[server].QueryRow(t.Context(), "SHOW default_transaction_read_only").Scan(&got) == nil && got == value
		})
	}
	readOnly(b, "on")

	pool := mustConnect(t, withHosts(t, a.DSN("postgres"), b.Port(), a.Port())+"&target_session_attrs=read-write&pool_max_conns=4")
	s, batcher := NewStore(pool), startBatcher(t, pool, BatcherConfig{})
	key := newKey()
	together(8, func(int) { mustDecide(t, s, oneUnit(key)) })
	if got := spent(t, admin[a], key); got != 8 {
		t.Errorf("%d units are charged on the server that may be written to, want 8", got)
	}

	readOnly(a, "on")
	// A connection that says so is dropped, by a single decision too.
	var pgErr *pgconn.PgError
	if _, err := s.Decide(t.Context(), oneUnit(key)); !errors.As(err, &pgErr) || pgErr.Code != "25006" {
		t.Errorf("a server that became read-only: %v, want 25006", err)
	}
	idle := pool.Stat().IdleConns()
	if _, err := batcher.Decide(t.Context(), oneUnit(key)); err == nil {
		t.Error("a read-only server decided")
	}
	waitUntil(t, "the pool to drop its connections", func() bool { return pool.Stat().IdleConns() == 0 })
	if idle > 3 {
		t.Errorf("%d connections were idle after one answered 25006, want at most 3", idle)
	}
	for range 3 {
		if _, err := batcher.Decide(t.Context(), oneUnit(key)); err == nil {
			t.Error("no server may be written to, and one decided")
		}
	}
	readOnly(b, "off")
	waitUntil(t, "decisions on the other server", func() bool {
		v, err := batcher.Decide(t.Context(), oneUnit(key))
		return err == nil && v.Allowed
	})
	if got := spent(t, admin[b], key); got != 1 {
		t.Errorf("%d units are charged on the other server, want 1", got)
	}
	if got := spent(t, admin[a], key); got != 8 {
		t.Errorf("%d units are charged on the read-only server, want the 8 of before", got)
	}
}

// C77: an administrator who ends all sessions costs at most what was in flight: decisions go
// on by themselves, on new connections.
func TestC77SessionsAreTerminated(t *testing.T) {
	t.Parallel()

	server := startServer(t, nil)
	admin, err := pgxpool.New(t.Context(), server.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	pool := mustConnect(t, server.DSN("postgres")+"&pool_max_conns=4")
	b := startBatcher(t, pool, BatcherConfig{Statements: 2})
	key := newKey()
	stop := load(t, b, key, 16)
	sessions := func() (pids []int32) {
		err := admin.QueryRow(t.Context(),
			"SELECT coalesce(array_agg(pid), '{}') FROM pg_stat_activity WHERE application_name = 'weir'").Scan(&pids)
		if err != nil {
			t.Fatal(err)
		}
		return pids
	}
	for range 5 {
		var old []int32
		waitUntil(t, "sessions", func() bool { old = sessions(); return len(old) > 0 })
		if _, err := admin.Exec(t.Context(), "SELECT pg_terminate_backend(pid) FROM unnest($1::int[]) AS s (pid)", old); err != nil {
			t.Fatal(err)
		}
		waitUntil(t, "decisions", func() bool {
			allowed, err := impatient(t, b, newKey())
			return err == nil && allowed
		})
	}
	admitted := stop()
	charged := spent(t, admin, key)
	// 57P01 is the answer of a statement that was undone, but not for one that ended
	// between its commit and its answer; there are at most 16 of those a round.
	if charged < admitted || charged > admitted+5*16 {
		t.Errorf("admitted %d, charged %d", admitted, charged)
	}
	for range 20 { // none that is dead is left
		if _, err := b.Decide(t.Context(), oneUnit(key)); err != nil {
			t.Errorf("after all was over: %v", err)
		}
	}
}

package store

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
)

func TestPoolConfig(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	pool, err := Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for setting, want := range map[string]string{
		"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off", "jit": "off",
		"statement_timeout": "5s", "lock_timeout": "2s", "application_name": "weir",
		"default_transaction_isolation": "read committed", "idle_in_transaction_session_timeout": "10s",
	} {
		var got string
		if err := pool.QueryRow(t.Context(), "SELECT current_setting($1)", setting).Scan(&got); err != nil || got != want {
			t.Errorf("%s = %q, %v, want %q", setting, got, err, want)
		}
	}

	cfg, err := PoolConfig("host=127.0.0.1 connect_timeout=7 lock_timeout=11 application_name=mine pool_max_conns=3")
	if err != nil {
		t.Fatal(err)
	}
	params := cfg.ConnConfig.RuntimeParams
	if cfg.ConnConfig.ConnectTimeout != 7*time.Second || params["lock_timeout"] != "11" || params["application_name"] != "mine" || cfg.MaxConns != 3 {
		t.Errorf("the DSN's own settings were replaced: %v, %v, %d", cfg.ConnConfig.ConnectTimeout, params, cfg.MaxConns)
	}
	if _, err := PoolConfig("postgres://%zz"); err == nil {
		t.Error("an unreadable DSN: no error")
	}
	if _, err := Connect(t.Context(), "postgres://postgres@127.0.0.1:1/none"); err == nil {
		t.Error("Connect to nowhere: no error")
	}
}

// The database is stopped, killed, and comes back: calls fail quickly meanwhile, and
// then go on by themselves, with every admitted unit in the rows.
func TestDatabaseGoesAndComesBack(t *testing.T) {
	t.Parallel()

	server, err := pgtest.Start(t.Context(), pgtest.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := Migrate(t.Context(), server.DSN("postgres"), DefaultSchema); err != nil {
		t.Fatal(err)
	}
	pool, err := Connect(t.Context(), server.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	s := NewStore(pool)
	key, holder := newKey(), consumer("c")
	request := policy.Request{
		Now:     noon,
		Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: Budget{PerSecond: 1, Burst: 100}, Cost: 3}},
		Quotas:  []policy.QuotaDebit{quotaDebit(holder, dayMonth(100, 100), 3)},
	}

	var admitted int64
	for name, end := range map[string]func(context.Context) error{"halt": server.Halt, "kill": server.Kill} {
		for range 4 {
			if !mustDecide(t, s, request).Allowed {
				t.Fatal("refused what fits")
			}
			admitted += 3
		}
		if err := end(t.Context()); err != nil {
			t.Fatal(err)
		}
		for range 5 {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			start := time.Now()
			v, err := s.Decide(ctx, request)
			cancel()
			if err == nil || v.Allowed || time.Since(start) > 2*time.Second {
				t.Errorf("after %s: %+v, %v after %v, want an error at once", name, v, err, time.Since(start))
			}
		}
		if err := server.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		v, err := decideWhenBack(t, s, pool, request)
		if err != nil {
			t.Fatalf("after %s and a restart: %v", name, err)
		}
		admitted += 3
		if v.Budgets[0].Tokens != float64(100-admitted) || v.Quotas[0].Used[0] != admitted {
			t.Errorf("after %s: %+v, want %d used of each", name, v, admitted)
		}
	}
}

// decideWhenBack decides once the server answers again. The first tries may meet
// connections of before, which fail once each.
func decideWhenBack(t *testing.T, s *Store, pool *pgxpool.Pool, req policy.Request) (policy.Verdict, error) {
	t.Helper()
	waitUntil(t, "the server to answer", func() bool { return pool.Ping(t.Context()) == nil })
	return s.Decide(t.Context(), req)
}

// Law 4 has no opt-out: a database that commits without waiting for its disk does not
// make Weir do so.
func TestDurabilityHasNoOptOut(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	admin := newPool(t, dsn, 1)
	for _, setting := range []string{"synchronous_commit = off", "default_transaction_isolation = 'serializable'"} {
		sql := "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET " + strings.ReplaceAll(setting, "'", "''") + "', current_database()); END $$"
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	pool, err := Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for name, want := range map[string]string{"synchronous_commit": "on", "default_transaction_isolation": "read committed"} {
		var got string
		if err := pool.QueryRow(t.Context(), "SELECT current_setting($1)", name).Scan(&got); err != nil || got != want {
			t.Errorf("%s = %q (%v), want %q", name, got, err, want)
		}
	}
}

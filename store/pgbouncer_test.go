package store

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
)

// P08: the store works through a real pgbouncer in transaction mode, one that knows no
// prepared statements, whether it lets startup parameters pass or not.
func TestP08PgBouncer(t *testing.T) {
	t.Parallel()

	for name, config := range map[string]map[string]string{
		"as it comes": nil,
		"ignoring startup parameters": {
			"ignore_startup_parameters": "enable_seqscan,idle_in_transaction_session_timeout,jit,lock_timeout," +
				"plan_cache_mode,statement_timeout,default_transaction_isolation,synchronous_commit,extra_float_digits",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn := pgtest.NewDatabase(t)
			direct := newPool(t, dsn, 4)
			pool := mustConnect(t, pgtest.StartPgBouncer(t, dsn, config)+"&pool_max_conns=20")
			if mode := pool.Config().ConnConfig.DefaultQueryExecMode; mode != pgx.QueryExecModeCacheDescribe {
				t.Errorf("statements are run as %v, want no named ones", mode)
			}
			s := NewStore(pool)
			b := startBatcher(t, pool, BatcherConfig{Statements: 2})
			if err := CheckSchema(t.Context(), pool, DefaultSchema); err != nil {
				t.Error(err)
			}

			// More clients than server sessions, so that sessions change hands.
			key, holder := newKey(), consumer("c")
			var admitted atomic.Int64
			together(20, func(int) {
				for range 20 {
					req := oneUnit(key)
					req.Quotas = append(req.Quotas, quotaDebit(holder, dayMonth(1000, 1000), 1))
					for _, decide := range []func(context.Context, policy.Request) (policy.Verdict, error){b.Decide, s.Decide} {
						v, err := decide(t.Context(), req)
						if err != nil {
							t.Error(err)
							return
						}
						if v.Allowed {
							admitted.Add(1)
						}
					}
					if !mustTake(t, s, ScopeIngestDomain, key, 1, Budget{PerSecond: 1000, Burst: 1e6}, noon) {
						t.Error("a take was refused")
					}
				}
			})
			if got := spent(t, direct, key); got != 800 || admitted.Load() != 800 {
				t.Errorf("%d admitted, %d charged, want 800", admitted.Load(), got)
			}
			if used := usedIn(t, s, holder, dayMonth(1000, 1000), noon); used[0] != 800 || used[1] != 800 {
				t.Errorf("the windows hold %v, want 800", used)
			}
			if _, err := s.DeleteIdle(t.Context(), noon.Add(-time.Hour)); err != nil {
				t.Error(err)
			}
			checkAgrees(t, pool, mustClock(t, pool, ClockConfig{}), "behind pgbouncer")
			if sessions := count(t, direct, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name = 'weir'"); sessions > 3+4 {
				t.Errorf("%d sessions on the server: pgbouncer does not pool them", sessions)
			}

			missing, err := MissingSettings(t.Context(), pool)
			if err != nil || len(missing) != len(settings()) {
				t.Errorf("missing settings = %v, %v, want all: pgbouncer drops them", missing, err)
			}
			if missing, err := MissingSettings(t.Context(), direct); err != nil || len(missing) > 0 {
				t.Errorf("missing settings of a direct connection = %v, %v, want none", missing, err)
			}
		})
	}
}

// A pooler that drops the settings that correctness rests on is refused, with an error
// that says what to do; and doing it helps.
func TestP08PgBouncerOnACarelessDatabase(t *testing.T) {
	t.Parallel()

	for setting, value := range map[string]string{"synchronous_commit": "off", "default_transaction_isolation": "serializable"} {
		dsn := pgtest.NewDatabase(t)
		admin := newPool(t, dsn, 1)
		var database string
		if err := admin.QueryRow(t.Context(), "SELECT current_database()").Scan(&database); err != nil {
			t.Fatal(err)
		}
		role := pgx.Identifier{"weir_writer_" + database[len(database)-12:]}.Sanitize()
		for _, sql := range []string{
			"ALTER DATABASE " + pgx.Identifier{database}.Sanitize() + " SET " + setting + " = '" + value + "'",
			"CREATE ROLE " + role + " LOGIN SUPERUSER PASSWORD 'w'",
		} {
			if _, err := admin.Exec(t.Context(), sql); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() {
			conn, err := pgx.Connect(context.Background(), dsn)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close(context.Background())
			if _, err := conn.Exec(context.Background(), "DROP ROLE "+role); err != nil {
				t.Error(err)
			}
		})
		through := pgtest.StartPgBouncer(t, strings.Replace(dsn, "postgres:postgres@", strings.Trim(role, `"`)+":w@", 1), nil)
		_, err := Connect(t.Context(), through)
		if err == nil || !strings.Contains(err.Error(), "ALTER ROLE "+role+" SET "+setting) {
			t.Fatalf("%s = %s behind pgbouncer: %v, want an error that tells what to run", setting, value, err)
		}
		good := requirements()[setting]
		if _, err := admin.Exec(t.Context(), "ALTER ROLE "+role+" IN DATABASE "+pgx.Identifier{database}.Sanitize()+" SET "+setting+" = '"+good+"'"); err != nil {
			t.Fatal(err)
		}
		if _, err := admin.Exec(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"); err != nil {
			t.Fatal(err)
		}
		waitUntil(t, "pgbouncer to reconnect", func() bool {
			pool, err := Connect(t.Context(), through)
			if err != nil {
				return false
			}
			pool.Close()
			return true
		})
	}
}

// Law 4 has no opt-out: a server that may forget what it committed is refused.
func TestLaw4UndurableServerIsRefused(t *testing.T) {
	t.Parallel()

	for _, setting := range []string{"fsync", "full_page_writes"} {
		server, err := pgtest.Start(t.Context(), pgtest.Config{Parameters: map[string]string{setting: "off"}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = Connect(t.Context(), server.DSN("postgres"))
		if err == nil || !strings.Contains(err.Error(), setting+" = off") || !strings.Contains(err.Error(), "ALTER SYSTEM") {
			t.Errorf("%s = off: %v, want an error that names it and what to do", setting, err)
		}
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	}
}

package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/store"
)

// Law 3: while Postgres is away a request is neither refused nor let through, and
// when it is back everything is as it was.
func TestPostgresStopped(t *testing.T) {
	t.Parallel()
	awayFromMidnight(t)

	// A server of its own, so that it can be stopped.
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	postgres, err := pgtest.Start(ctx, pgtest.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := postgres.Stop(); err != nil {
			t.Errorf("stopping Postgres: %v", err)
		}
	})
	dsn := postgres.DSN("postgres")
	if err := store.Migrate(ctx, dsn, schema); err != nil {
		t.Fatal(err)
	}
	m := startMesh(t, meshConfig{dsn: dsn})

	node := uuid.NewString()
	consumer := header("x-consumer", "alice")
	for range 4 {
		if a := m.request(t, http.MethodGet, "/before", consumer, nil); a.status != http.StatusOK {
			t.Fatalf("before: %s, want 200", describe(a))
		}
	}
	if a := m.request(t, http.MethodPost, "/before", header("x-node-id", node), bytes.NewReader(make([]byte, 200<<10))); a.status != http.StatusOK {
		t.Fatalf("before: %s, want 200", describe(a))
	}

	passed := 0
	stopped := map[string]func(context.Context) error{"stopped": postgres.Halt, "killed": postgres.Kill}
	for name, stop := range stopped {
		if err := stop(ctx); err != nil {
			t.Fatal(err)
		}
		// A backend may outlive a killed postmaster for a moment. What it still admits
		// it has committed, so it counts.
		eventually(t, time.Minute, "Postgres is away", func() error {
			a := m.request(t, http.MethodGet, "/going", consumer, nil)
			if a.status == http.StatusOK {
				passed++
			}
			if a.status != http.StatusInternalServerError {
				return fmt.Errorf("%s", describe(a))
			}
			return nil
		})
		for range 5 {
			a := m.request(t, http.MethodGet, "/away", consumer, nil)
			if a.status != http.StatusInternalServerError {
				t.Errorf("%s: %s, want 500", name, describe(a))
			}
			noRateHeaders(t, a)
			// The filter waits 250 ms at most; the rest is this machine's.
			if a.took > 5*time.Second {
				t.Errorf("%s: the 500 took %v", name, a.took)
			}
		}
		if begun, _, _ := m.upstream.saw("/away"); begun > 0 {
			t.Errorf("%s: the upstream saw %d requests", name, begun)
		}
		if err := postgres.Restart(ctx); err != nil {
			t.Fatal(err)
		}
		eventually(t, time.Minute, "decisions are made again", func() error {
			// A key of no limit's would not reach the database.
			a := m.request(t, http.MethodGet, "/back", header("x-node-id", uuid.NewString()), nil)
			if a.status != http.StatusOK {
				return fmt.Errorf("%s", describe(a))
			}
			return nil
		})
	}

	// Six of ten are left. A commit whose answer was lost to a stop may have charged a
	// request that got a 500, at most one a stop; it can't have given one back.
	for range 8 {
		if a := m.request(t, http.MethodGet, "/after", consumer, nil); a.status == http.StatusOK {
			passed++
		}
	}
	if passed > 6 || passed < 6-len(stopped) {
		t.Errorf("%d requests passed from the stops on, want the 6 that were left", passed)
	}
	if used := watchCount(t, m.connect(t), "alice")(); used != 10 {
		t.Errorf("the day's count is %d, want 10", used)
	}
	if tokens, ok := m.tokens(t, "ingest_node", node); !ok || tokens != 56<<10 {
		t.Errorf("the node's bucket holds %v (row: %v), want the %d it had", tokens, ok, 56<<10)
	}
}

// Law 4: what was admitted is in the database before it proceeds, so that killing the
// service at any moment loses no charge.
func TestServiceKilledUnderLoad(t *testing.T) {
	t.Parallel()
	awayFromMidnight(t)
	m := startMesh(t, meshConfig{})
	conn := m.connect(t)

	const rounds, workers, tries = 4, 6, 15
	var passed [rounds]atomic.Int64
	for round := range rounds {
		consumer := fmt.Sprintf("killed-%d", round)
		count := watchCount(t, conn, consumer)
		half := make(chan struct{})
		var once sync.Once
		var group sync.WaitGroup
		for range workers {
			group.Go(func() {
				for i := range tries {
					if i == tries/3 {
						once.Do(func() { close(half) })
					}
					a := m.request(t, http.MethodGet, "/killed", header("x-consumer", consumer), nil)
					switch a.status {
					case http.StatusOK:
						passed[round].Add(1)
					case http.StatusTooManyRequests, http.StatusInternalServerError:
					default:
						t.Errorf("round %d: %s, want 200, 429 or 500", round, describe(a))
					}
				}
			})
		}
		if round%2 == 0 {
			<-half
		}
		m.stopService(t, syscall.SIGKILL)
		count()
		m.startService(t)
		group.Wait()
		count()
		// Until the day is used up, in case the kill came before the load did.
		eventually(t, time.Minute, "the day is used up", func() error {
			a := m.request(t, http.MethodGet, "/killed", header("x-consumer", consumer), nil)
			if a.status == http.StatusOK {
				passed[round].Add(1)
			}
			if a.status != http.StatusTooManyRequests {
				return fmt.Errorf("%s", describe(a))
			}
			return nil
		})
		if used := count(); used != 10 {
			t.Errorf("round %d: the day's count is %d, want 10", round, used)
		}
		if n := passed[round].Load(); n > 10 {
			t.Errorf("round %d: %d requests passed a quota of ten", round, n)
		}
	}
	for round := range rounds {
		if _, whole, _ := m.upstream.saw("/killed"); int64(whole) > 10*rounds {
			t.Errorf("round %d: the upstream saw %d requests, of %d allowed", round, whole, 10*rounds)
		}
	}
}

// watchCount returns a function that reads a consumer's count of the day and fails if it
// ever went backwards.
func watchCount(t *testing.T, conn *pgx.Conn, consumer string) func() int64 {
	t.Helper()
	var last int64
	return func() int64 {
		t.Helper()
		var used int64
		err := conn.QueryRow(t.Context(), `
			SELECT coalesce(max(q.used), 0)
			FROM plexsphere.quota_counters q
			JOIN plexsphere.consumers c ON c.id = q.counter
			WHERE c.domain = 'ingest' AND c.entries::text LIKE '%' || $1 || '%' AND q.unit = 'day'`, consumer).Scan(&used)
		if err != nil {
			t.Fatal(err)
		}
		if used < last {
			t.Errorf("the day's count of %s went from %d to %d", consumer, last, used)
		}
		last = used
		return used
	}
}

// The service away altogether: the filter's own words for unavailable.
func TestServiceAway(t *testing.T) {
	t.Parallel()
	m := startMesh(t, meshConfig{})
	m.stopService(t, syscall.SIGTERM)
	for range 3 {
		a := m.request(t, http.MethodGet, "/away", header("x-consumer", "alice"), nil)
		if a.status != http.StatusInternalServerError {
			t.Errorf("%s, want 500", describe(a))
		}
		noRateHeaders(t, a)
	}
	if begun, _, _ := m.upstream.saw("/away"); begun > 0 {
		t.Errorf("the upstream saw %d requests", begun)
	}
	// The control plane went with it; what Envoy has stays in force.
	if a := m.request(t, http.MethodGet, "/away", header("x-node-id", "not-a-uuid"), nil); a.status != http.StatusBadRequest {
		t.Errorf("a malformed key: %s, want 400", describe(a))
	}
	m.startService(t)
	eventually(t, time.Minute, "decisions are made again", func() error {
		if a := m.request(t, http.MethodGet, "/back", header("x-consumer", "alice"), nil); a.status != http.StatusOK {
			return fmt.Errorf("%s", describe(a))
		}
		return nil
	})
}

// The bootstrap that `weir bootstrap` prints works by itself, with no control plane.
func TestPrintedBootstrap(t *testing.T) {
	t.Parallel()
	m := startMesh(t, meshConfig{bootstrap: true})
	node := uuid.NewString()
	for i, want := range []int{http.StatusOK, http.StatusOK, http.StatusTooManyRequests} {
		a := m.request(t, http.MethodPost, "/static", header("x-node-id", node), bytes.NewReader(make([]byte, 100<<10)))
		if a.status != want {
			t.Errorf("body %d: %s, want %d", i+1, describe(a), want)
		}
	}
}

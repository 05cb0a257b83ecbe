package e2e_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/jackc/pgx/v5"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/weir-dev/weir/internal/child"
	"github.com/weir-dev/weir/internal/pgtest"
)

// The database as a platform team gives it out: an owner that migrates, a writer that
// serves through pgbouncer in transaction mode, and a reader. Nobody is a superuser.
func TestServeBehindPgBouncer(t *testing.T) {
	t.Parallel()
	awayFromMidnight(t)

	dsn := pgtest.NewDatabase(t)
	admin, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = admin.Close(context.Background()) })
	execute := func(format string, args ...any) {
		t.Helper()
		if _, err := admin.Exec(context.WithoutCancel(t.Context()), fmt.Sprintf(format, args...)); err != nil {
			t.Fatal(err)
		}
	}
	var database string
	if err := admin.QueryRow(t.Context(), "SELECT current_database()").Scan(&database); err != nil {
		t.Fatal(err)
	}
	execute("DROP SCHEMA %s CASCADE", schema) // the migrated template's is the superuser's
	role := func(kind string) (name, dsnAs string) {
		name = kind + database[len(database)-12:]
		execute("CREATE ROLE %s LOGIN NOCREATEROLE PASSWORD 'secret'", name)
		t.Cleanup(func() {
			execute("DROP OWNED BY %s CASCADE", name)
			execute("DROP ROLE %s", name)
		})
		u, err := url.Parse(dsn)
		if err != nil {
			t.Fatal(err)
		}
		u.User = url.UserPassword(name, "secret")
		return name, u.String()
	}
	owner, ownerDSN := role("owner")
	writer, writerDSN := role("writer")
	reader, _ := role("reader")
	execute("GRANT CREATE ON DATABASE %s TO %s", database, owner)
	env := append(environment(),
		"DATABASE_URL="+pgtest.StartPgBouncer(t, writerDSN, nil),
		"DATABASE_DIRECT_URL="+ownerDSN)

	migrate := exec.Command(weirBinary(t), "migrate", "--writer", writer, "--reader", reader)
	migrate.Env = env
	for range 2 { // grants can be made again
		if out, err := migrate.CombinedOutput(); err != nil {
			t.Fatalf("weir migrate: %v\n%s", err, out)
		}
		migrate = exec.Command(migrate.Path, migrate.Args[1:]...)
		migrate.Env = env
	}

	log := &logBuffer{}
	showOnFailure(t, "weir serve", log)
	grpcAddress, httpAddress := freeAddress(t), freeAddress(t)
	serve := exec.Command(weirBinary(t), "serve", examplePolicy,
		"--grpc-listen", grpcAddress, "--http-listen", httpAddress, "--xds-listen", "")
	serve.Env, serve.Stdout, serve.Stderr = env, log, log
	process, err := child.Start(serve)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = process.Stop(syscall.SIGKILL, 0) })
	eventually(t, startTimeout, "weir serve is healthy", func() error {
		select {
		case <-process.Done():
			t.Fatalf("weir serve ended: %v", process.Err())
		default:
		}
		return healthy(httpAddress)
	})

	conn, err := grpc.NewClient(grpcAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	client := rlsv3.NewRateLimitServiceClient(conn)
	request := &rlsv3.RateLimitRequest{Domain: "ingest", Descriptors: []*ratelimitv3.RateLimitDescriptor{
		{Entries: []*ratelimitv3.RateLimitDescriptor_Entry{{Key: "consumer", Value: "alice"}}},
	}}
	for i := range 12 {
		response, err := client.ShouldRateLimit(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		want := rlsv3.RateLimitResponse_OK
		if i >= 10 {
			want = rlsv3.RateLimitResponse_OVER_LIMIT
		}
		if response.GetOverallCode() != want {
			t.Errorf("request %d: %v, want %v", i+1, response.GetOverallCode(), want)
		}
	}

	metrics := scrape(t, httpAddress)
	for _, want := range []string{
		"weir_circuit_open 0", "weir_batch_queue_length 0", "weir_batch_requests_count 12",
		"weir_clock_offset_seconds ", "weir_clock_uncertainty_seconds ", "weir_clock_jumps_total 0",
		"weir_postgres_oldest_xmin_age_transactions ", "weir_postgres_oldest_snapshot_age_seconds ",
	} {
		if !strings.Contains(metrics, "\n"+want) {
			t.Errorf("the metrics lack %q", want)
		}
	}
	eventually(t, startTimeout, "the database is described", func() error {
		for _, want := range []string{"synchronous_standby_names=", "plan_cache_mode"} {
			if !strings.Contains(log.String(), want) {
				return fmt.Errorf("the log lacks %q", want)
			}
		}
		return nil
	})
	if err := process.Stop(syscall.SIGTERM, time.Minute); err != nil || process.Err() != nil {
		t.Errorf("weir serve ended with %v, %v", err, process.Err())
	}
}

// serve refuses a database that may forget what it admitted, and says what to do.
func TestServeRefusesAnUndurableDatabase(t *testing.T) {
	t.Parallel()

	server, err := pgtest.Start(t.Context(), pgtest.Config{Parameters: map[string]string{"fsync": "off"}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	serve := exec.Command(weirBinary(t), "serve", examplePolicy,
		"--grpc-listen", freeAddress(t), "--http-listen", "", "--xds-listen", "")
	serve.Env = append(environment(), "DATABASE_URL="+server.DSN("postgres"))
	out, err := serve.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "fsync = off") {
		t.Errorf("weir serve with fsync = off: %v, want an error that names it\n%s", err, out)
	}
}

func scrape(t *testing.T, address string) string {
	t.Helper()
	response, err := http.Get("http://" + address + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

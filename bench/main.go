// Command bench measures what a decision costs, side by side in one run: a gRPC server
// that only says OK, and Weir on the same machine with a real Postgres, durable and
// exact. Machines differ and are shared, so ratios count.
//
// It runs each column for some seconds in turn, several rounds, and takes the median of
// the rounds. The servers are processes of their own; the client is this one.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/store"
)

func main() {
	if pgtest.RunChild() {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	role     string // what this process is: the client, or a server that it starts
	database string
	out      string
	peer     string
	rounds   int
	seconds  time.Duration
	keys     int
	only     string
	rows     string
	schema   string
	answer   string // what the null server answers, in base64
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.role, "role", "", "what this process is; for its own children")
	flags.StringVar(&o.database, "database-url", os.Getenv("DATABASE_URL"), "a Postgres; an embedded one by default")
	flags.StringVar(&o.out, "out", "bench/out/latest.json", "where figures go, as JSON")
	flags.StringVar(&o.peer, "peer", "", "host:port of another rate limit service, as one more column")
	flags.IntVar(&o.rounds, "rounds", 5, "rounds of each column, 1 to 100")
	flags.DurationVar(&o.seconds, "time", 2*time.Second, "time of a column in a round, up to 1m")
	flags.IntVar(&o.keys, "keys", 1000, "distinct keys, at least 1")
	flags.StringVar(&o.rows, "rows", "10000,100000,1000000,10000000", "tables of so many buckets, separated by commas, each as one more column; empty for none")
	flags.StringVar(&o.schema, "schema", "plexsphere", "the schema of Weir's tables; for its own children")
	flags.StringVar(&o.answer, "answer", "", "what the null server answers; for its own children")
	flags.StringVar(&o.only, "only", "", "the columns to run, separated by commas; all by default")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if o.rounds < 1 || o.rounds > 100 || o.seconds <= 0 || o.seconds > time.Minute || o.keys < 1 {
		return errors.New("rounds, time or keys are out of range; see -help")
	}
	switch o.role {
	case "":
		return measureAll(ctx, o, stdout)
	case "null":
		return serveNull(ctx, o, stdout)
	case "weir":
		return serveWeir(ctx, o, stdout)
	}
	return fmt.Errorf("no role %q", o.role)
}

// measureAll starts the servers, measures every column and writes the figures.
func measureAll(ctx context.Context, o options, stdout io.Writer) error {
	if o.database == "" {
		server, err := pgtest.Start(ctx, pgtest.Config{Parameters: map[string]string{"shared_buffers": "256MB"}})
		if err != nil {
			return err
		}
		defer func() { _ = server.Stop() }() // the figures are taken
		o.database = server.DSN("postgres")
	}
	if err := store.Migrate(ctx, o.database, o.schema); err != nil {
		return err
	}
	weir, err := startServer("weir", o)
	if err != nil {
		return err
	}
	defer weir.stop()
	if o.answer, err = capture(ctx, weir.address); err != nil {
		return err
	}
	null, err := startServer("null", o)
	if err != nil {
		return err
	}
	defer null.stop()
	at := addresses{null: null.address, weir: weir.address, rows: map[int]string{}}
	tables, err := rowsOf(o.rows)
	if err != nil {
		return err
	}
	for _, rows := range tables {
		server, err := startFilled(ctx, o, rows, stdout)
		if err != nil {
			return err
		}
		defer server.stop()
		at.rows[rows] = server.address
	}

	columns := columnsOf(o, at)
	if o.only != "" {
		only := strings.Split(o.only, ",")
		columns = slices.DeleteFunc(columns, func(c column) bool { return !slices.Contains(only, c.name) })
	}
	figures := make(map[string][]figure, len(columns))
	for round := range o.rounds + 1 {
		for _, c := range columns {
			f, err := c.measure(ctx, o.seconds)
			if err != nil {
				return fmt.Errorf("measuring %s: %w", c.name, err)
			}
			if round > 0 { // the first warms up
				figures[c.name] = append(figures[c.name], f)
			}
		}
	}
	medians := make(map[string]figure, len(columns))
	fmt.Fprintf(stdout, "%-14s %9s %7s %13s %8s %8s %9s\n", "", "rps", "of null", "rps min–max", "p50 µs", "p99 µs", "cpu µs/op")
	for _, c := range columns {
		m := median(figures[c.name])
		medians[c.name] = m
		base := medians[c.base]
		rates := each(figures[c.name], func(f figure) float64 { return f.RPS })
		fmt.Fprintf(stdout, "%-14s %9.0f %7.2f %6.0f–%-6.0f %8.0f %8.0f %9.1f\n",
			c.name, m.RPS, m.RPS/base.RPS, slices.Min(rates), slices.Max(rates), m.P50, m.P99, m.CPU)
	}
	text, err := json.MarshalIndent(medians, "", "  ")
	if err != nil {
		return fmt.Errorf("writing figures: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(o.out), 0o750); err != nil {
		return fmt.Errorf("writing figures: %w", err)
	}
	return os.WriteFile(o.out, append(text, '\n'), 0o600)
}

// rowsOf reads the flag of that name.
func rowsOf(list string) ([]int, error) {
	if list == "" {
		return nil, nil
	}
	var tables []int
	for text := range strings.SplitSeq(list, ",") {
		rows, err := strconv.Atoi(text)
		if err != nil || rows < 1 || rows > 1e8 {
			return nil, fmt.Errorf("-rows: %q is no number from 1 to 10^8", text)
		}
		tables = append(tables, rows)
	}
	return tables, nil
}

// startFilled starts Weir on a schema of its own, whose table holds so many buckets.
func startFilled(ctx context.Context, o options, rows int, stdout io.Writer) (*server, error) {
	o.schema = fmt.Sprintf("rows_%d", rows)
	if err := store.Migrate(ctx, o.database, o.schema); err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, o.database)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close(ctx) }()
	start := time.Now()
	for _, sql := range []string{
		fmt.Sprintf(`INSERT INTO %s.rate_budgets (scope, bucket_key, tokens, refilled_at)
			SELECT 'ingest_node', lpad(to_hex(n), 32, '0')::uuid, 1e12, now() FROM generate_series(1, %d) AS n
			ON CONFLICT DO NOTHING`, o.schema, rows),
		fmt.Sprintf("VACUUM (ANALYZE) %s.rate_budgets", o.schema),
		"CHECKPOINT",
	} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return nil, fmt.Errorf("filling a table: %w", err)
		}
	}
	fmt.Fprintf(stdout, "%d buckets made in %.0f s\n", rows, time.Since(start).Seconds())
	return startServer("weir", o)
}

// A figure is what one column came to in one round.
type figure struct {
	RPS float64 `json:"rps"`
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`
	// CPU is the processor time of all servers, Postgres among them and the client
	// not, in microseconds a request.
	CPU float64 `json:"cpu_us_per_op"`
}

func each(figures []figure, of func(figure) float64) []float64 {
	values := make([]float64, len(figures))
	for i, f := range figures {
		values[i] = of(f)
	}
	return values
}

// median takes each figure's median by itself.
func median(figures []figure) figure {
	middle := func(of func(figure) float64) float64 {
		values := each(figures, of)
		slices.Sort(values)
		return values[len(values)/2]
	}
	return figure{
		RPS: middle(func(f figure) float64 { return f.RPS }),
		P50: middle(func(f figure) float64 { return f.P50 }),
		P99: middle(func(f figure) float64 { return f.P99 }),
		CPU: middle(func(f figure) float64 { return f.CPU }),
	}
}

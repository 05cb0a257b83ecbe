// Command bench measures what a decision costs, side by side in one run: a gRPC server
// that only says OK, and Weir on the same machine with a real Postgres, durable and
// exact. Then it measures what a request costs through a real Envoy with no filter, with
// Envoy's own rate limit filter and with Weir's, both of which ask Weir once. Machines
// differ and are shared, so ratios count.
//
// It runs each column for some seconds in turn, several rounds, and takes the median of
// the rounds, of ratios too. The servers are processes of their own; the client is this
// one. What was charged through an Envoy is counted in Postgres: a request too many or
// too few fails the run.
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
	envoy    string
	filter   string
	schema   string
	answer   string // what the null server answers, in base64
}

// maxTime is the longest that a column may be measured for in a round.
const maxTime = time.Minute

func run(ctx context.Context, args []string, stdout io.Writer) error {
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.role, "role", "", "what this process is; for its own children")
	flags.StringVar(&o.database, "database-url", os.Getenv("DATABASE_URL"), "a Postgres; an embedded one by default")
	flags.StringVar(&o.out, "out", "bench/out/latest.json", "where figures go, as JSON")
	flags.StringVar(&o.peer, "peer", "", "host:port of another rate limit service, as one more column")
	flags.IntVar(&o.rounds, "rounds", 5, "rounds of each column, 1 to 100")
	flags.DurationVar(&o.seconds, "time", 2*time.Second, "time of a column in a round, up to 1m; with an Envoy, an eighth of it in eight times as many rounds")
	flags.IntVar(&o.keys, "keys", 1000, "distinct keys, at least 1")
	flags.StringVar(&o.rows, "rows", "10000,100000,1000000,10000000", "tables of so many buckets, separated by commas, each as one more column; empty for none")
	flags.StringVar(&o.envoy, "envoy", os.Getenv("ENVOY"), "Envoy's binary; looked for by default")
	flags.StringVar(&o.filter, "filter", "bin/filter.wasm", "Envoy's filter")
	flags.StringVar(&o.schema, "schema", "plexsphere", "the schema of Weir's tables; for its own children")
	flags.StringVar(&o.answer, "answer", "", "what the null server answers; for its own children")
	flags.StringVar(&o.only, "only", "", "the columns to run, separated by commas; all by default")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if o.rounds < 1 || o.rounds > 100 || o.seconds <= 0 || o.seconds > maxTime || o.keys < 1 {
		return errors.New("rounds, time or keys are out of range; see -help")
	}
	switch o.role {
	case "":
		return measureAll(ctx, o, stdout)
	case "null":
		return serveNull(ctx, o, stdout)
	case "weir":
		return serveWeir(ctx, o, stdout)
	case "upstream":
		return serveUpstream(ctx, stdout)
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

	medians := map[string]figure{}
	measure := func(base string, columns []column, parts int) error {
		figures, err := measureRounds(ctx, columns, o, parts)
		if err != nil {
			return err
		}
		report(stdout, base, columns, figures, medians)
		return nil
	}
	if err := measure("null", o.wanted(columnsOf(o, at)), 1); err != nil {
		return err
	}
	if len(o.wanted([]column{{name: envoyNone}, {name: envoyNative}, {name: envoyFilterCall}})) > 0 {
		upstream, err := startServer("upstream", o)
		if err != nil {
			return err
		}
		defer upstream.stop()
		envoys, err := startEnvoys(ctx, o, weir.address, upstream.address)
		defer envoys.stop()
		if err != nil {
			return err
		}
		if err := measure("native", o.wanted(envoys.columns), envoyParts); err != nil {
			return err
		}
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

// wanted are the columns that the flag -only leaves.
func (o options) wanted(columns []column) []column {
	if o.only == "" {
		return columns
	}
	only := strings.Split(o.only, ",")
	return slices.DeleteFunc(columns, func(c column) bool { return !slices.Contains(only, c.name) })
}

// measureRounds measures the columns in turn, in rounds that are shorter and more by the
// number of parts. It returns each column's figures, a round each.
func measureRounds(ctx context.Context, columns []column, o options, parts int) (map[string][]figure, error) {
	figures := make(map[string][]figure, len(columns))
	for round := range (o.rounds + 1) * parts {
		for _, c := range columns {
			f, err := c.measure(ctx, o.seconds/time.Duration(parts))
			if err != nil {
				return nil, fmt.Errorf("measuring %s: %w", c.name, err)
			}
			if round >= parts { // those before warm up
				figures[c.name] = append(figures[c.name], f)
			}
		}
	}
	return figures, nil
}

// report prints the columns' medians, and adds them to those of the run.
func report(stdout io.Writer, base string, columns []column, figures map[string][]figure, medians map[string]figure) {
	if len(columns) == 0 {
		return
	}
	fmt.Fprintf(stdout, "%-17s %9s %9s %13s %8s %8s %9s %9s\n",
		"", "rps", "of "+base, "rps min–max", "p50 µs", "p99 µs", "of "+base, "cpu µs/op")
	for _, c := range columns {
		m := median(figures[c.name])
		m.RPSRatio = medianRatio(figures[c.name], figures[c.base], func(f figure) float64 { return f.RPS })
		m.P99Ratio = medianRatio(figures[c.name], figures[c.base], func(f figure) float64 { return f.P99 })
		medians[c.name] = m
		rates := each(figures[c.name], func(f figure) float64 { return f.RPS })
		fmt.Fprintf(stdout, "%-17s %9.0f %9.2f %6.0f–%-6.0f %8.0f %8.0f %9.2f %9.1f\n",
			c.name, m.RPS, m.RPSRatio, slices.Min(rates), slices.Max(rates), m.P50, m.P99, m.P99Ratio, m.CPU)
	}
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
	// The ratios are to the column that this one is compared with, in the same round;
	// none if that was not measured.
	RPSRatio float64 `json:"rps_ratio,omitempty"`
	P99Ratio float64 `json:"p99_ratio,omitempty"`
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
	of := func(of func(figure) float64) float64 { return middle(each(figures, of)) }
	return figure{
		RPS: of(func(f figure) float64 { return f.RPS }),
		P50: of(func(f figure) float64 { return f.P50 }),
		P99: of(func(f figure) float64 { return f.P99 }),
		CPU: of(func(f figure) float64 { return f.CPU }),
	}
}

// medianRatio is the median of rounds' ratios, 0 if there is no base.
func medianRatio(figures, base []figure, of func(figure) float64) float64 {
	if len(figures) != len(base) {
		return 0
	}
	ratios := make([]float64, len(figures))
	for i := range figures {
		ratios[i] = of(figures[i]) / of(base[i])
	}
	return middle(ratios)
}

// middle is the median of values, which it sorts.
func middle(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

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
	"strings"
	"syscall"
	"time"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/store"
)

const schema = "plexsphere"

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
		return serveNull(ctx, stdout)
	case "weir":
		return serveWeir(ctx, o.database, stdout)
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
	if err := store.Migrate(ctx, o.database, schema); err != nil {
		return err
	}
	null, err := startServer("null", o)
	if err != nil {
		return err
	}
	defer null.stop()
	weir, err := startServer("weir", o)
	if err != nil {
		return err
	}
	defer weir.stop()

	columns := columnsOf(o, null.address, weir.address)
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

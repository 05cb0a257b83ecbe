package e2e_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/weir-dev/weir/internal/certtest"
)

// An issuer signs JSON web tokens, whose claims Envoy's jwt_authn puts into the dynamic
// metadata: envoy.filters.http.jwt_authn, payload, and the claim's name.
type issuer struct{ key *ecdsa.PrivateKey }

const issuerName = "https://issuer.example"

func newIssuer(t *testing.T) *issuer {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &issuer{key: key}
}

// token returns a token with claims, good for an hour unless they say otherwise (exp).
func (i *issuer) token(t *testing.T, claims map[string]any) string {
	t.Helper()
	all := map[string]any{"iss": issuerName, "exp": time.Now().Add(time.Hour).Unix()}
	maps.Copy(all, claims)
	body := base64URL(marshal(t, map[string]any{"alg": "ES256", "typ": "JWT", "kid": "test"})) + "." + base64URL(marshal(t, all))
	digest := sha256.Sum256([]byte(body))
	r, s, err := ecdsa.Sign(rand.Reader, i.key, digest[:])
	if err != nil {
		t.Fatal(err)
	}
	var signature [64]byte
	r.FillBytes(signature[:32])
	s.FillBytes(signature[32:])
	return body + "." + base64URL(signature[:])
}

// bearer is a header with a token.
func (i *issuer) bearer(t *testing.T, claims map[string]any) http.Header {
	t.Helper()
	return header("Authorization", "Bearer "+i.token(t, claims))
}

// filters returns a file for --http-filters: each request needs a token of the issuer's.
func (i *issuer) filters(t *testing.T) string {
	t.Helper()
	point, err := i.key.PublicKey.Bytes() // 4, x, y
	if err != nil {
		t.Fatal(err)
	}
	keys := marshal(t, map[string]any{"keys": []any{map[string]any{
		"kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": "test",
		"x": base64URL(point[1:33]), "y": base64URL(point[33:]),
	}}})
	text := fmt.Sprintf(`
- name: envoy.filters.http.jwt_authn
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication
    providers:
      test:
        issuer: %s
        local_jwks: {inline_string: '%s'}
        payload_in_metadata: payload
        forward: true
    rules:
      - match: {prefix: /}
        requires: {provider_name: test}
`, issuerName, keys)
	path := filepath.Join(t.TempDir(), "filters.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func base64URL(data []byte) string { return base64.RawURLEncoding.EncodeToString(data) }

func marshal(t *testing.T, v any) []byte {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// gatewayTLS has a mesh's gateway speak TLS and take certificates that ca has signed,
// which are required unless optional is true. The mesh's own client shows none.
func (c *meshConfig) gatewayTLS(t *testing.T, ca *certtest.Authority, optional bool) {
	t.Helper()
	files := newCertFolder(t)
	certificate, key := files.issue("gateway", ca, "gateway.example")
	c.gateway = append(c.gateway, "--gateway-tls-cert", certificate, "--gateway-tls-key", key,
		"--gateway-tls-client-ca", files.write("clients.crt", ca.PEM))
	if optional {
		c.gateway = append(c.gateway, "--gateway-tls-client-optional")
	}
	c.client = ca.Client(t, nil)
}

// with returns the mesh, for requests by a client with this TLS. Its ServerName is what the
// gateway hears as the SNI.
func (m *mesh) with(config *tls.Config) *mesh {
	return &mesh{upstream: m.upstream, gateway: m.gateway, envoy: m.envoy, client: config}
}

// connects reports what becomes of a request to a gateway with TLS: an error if the
// handshake fails, which is all that a client without the right certificate sees.
func (m *mesh) connects(t *testing.T, config *tls.Config) error {
	t.Helper()
	client, scheme := over(config)
	response, err := client.Get(scheme + m.gateway + "/connects")
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return errors.New(response.Status)
	}
	return nil
}

// A token comes first, then the limits.
func TestGatewayTakesTokens(t *testing.T) {
	t.Parallel()
	good, other := newIssuer(t), newIssuer(t)
	m := startMesh(t, meshConfig{gateway: []string{"--http-filters", good.filters(t)}})
	for _, test := range []struct {
		name   string
		header http.Header
		want   int
	}{
		{"good", good.bearer(t, map[string]any{"sub": "alice"}), http.StatusOK},
		{"none", nil, http.StatusUnauthorized},
		{"expired", good.bearer(t, map[string]any{"exp": time.Now().Add(-time.Hour).Unix()}), http.StatusUnauthorized},
		{"another issuer's", other.bearer(t, map[string]any{"sub": "alice"}), http.StatusUnauthorized},
	} {
		if a := m.request(t, http.MethodGet, "/token", test.header, nil); a.status != test.want {
			t.Errorf("%s: %s, want %d", test.name, describe(a), test.want)
		}
	}
	// Weir's filter comes next.
	h := good.bearer(t, map[string]any{"sub": "alice"})
	h.Set("x-node-id", "not-a-uuid")
	if a := m.request(t, http.MethodGet, "/token", h, nil); a.status != http.StatusBadRequest {
		t.Errorf("a malformed key: %s, want 400", describe(a))
	}
}

func TestGatewayTakesCertificates(t *testing.T) {
	t.Parallel()
	ca, other := certtest.NewAuthority(t, "ca"), certtest.NewAuthority(t, "other")
	config := meshConfig{policy: newCertFolder(t).write("policy.yaml", []byte(plentyPolicy))}
	config.gatewayTLS(t, ca, false)
	own := ca.ClientOf(t, ca, pkix.Name{CommonName: "node-7", Organization: []string{"acme"}}, "spiffe://mesh/node-7", "node-7.example")
	config.client = own
	m := startMesh(t, config)

	named := own.Clone()
	named.ServerName = "gateway.example"
	for name, config := range map[string]*tls.Config{"by address": own, "by name": named} {
		if a := m.with(config).request(t, http.MethodGet, "/certificate", header("x-consumer", "alice"), nil); a.status != http.StatusOK {
			t.Errorf("%s: %s, want 200", name, describe(a))
		}
	}
	for name, config := range map[string]*tls.Config{
		"no certificate": ca.Client(t, nil), "another authority's": ca.Client(t, other, "spiffe://mesh/node-7"),
	} {
		if err := m.connects(t, config); !failedHandshake(err) {
			t.Errorf("%s: %v, want a failed handshake", name, err)
		}
	}
	if a := m.with(nil).connects(t, nil); a == nil {
		t.Error("plain text is let in")
	}
	if begun, _, _ := m.upstream.saw("/connects"); begun > 0 {
		t.Errorf("the upstream saw %d requests of strangers", begun)
	}
	// The inspector has read the name; without it the filter would not be told.
	if found := m.stat(t, "tls_inspector.sni_found"); found == 0 {
		t.Error("the gateway has found no SNI")
	}
}

// failedHandshake reports whether an error is that of a connection that was not let in. In
// TLS 1.3 a client is done before its certificate is looked at, so that it may be writing
// its request when the server ends the connection.
func failedHandshake(err error) bool {
	return err != nil && (strings.Contains(err.Error(), "tls: ") ||
		errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET))
}

func TestGatewayTakesNoCertificate(t *testing.T) {
	t.Parallel()
	ca, other := certtest.NewAuthority(t, "ca"), certtest.NewAuthority(t, "other")
	config := meshConfig{bootstrap: true}
	config.gatewayTLS(t, ca, true)
	m := startMesh(t, config)
	for name, config := range map[string]*tls.Config{
		"no certificate": ca.Client(t, nil), "a good one": ca.Client(t, ca, "spiffe://mesh/node-7"),
	} {
		if err := m.connects(t, config); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := m.connects(t, ca.Client(t, other, "spiffe://mesh/node-7")); !failedHandshake(err) {
		t.Errorf("another authority's: %v, want a failed handshake", err)
	}
}

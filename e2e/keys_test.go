package e2e_test

import (
	"crypto/x509/pkix"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/weir-dev/weir/internal/certtest"
)

// keysOf has a source for each key, and the value that TestKeys finds counted.
var keysOf = []struct{ key, source, want string }{
	{"claim", "jwt_claim: sub", "alice"},
	{"nested_claim", "jwt_claim: {path: [org, id], as: number}", "42"},
	{"list_claim", "jwt_claim: {path: [aud, '0']}", "first"},
	{"flag_claim", "jwt_claim: {path: [admin], as: bool}", "true"},
	{"uri", "peer_certificate: uri_san", "spiffe://mesh/node-7"},
	{"dns", "peer_certificate: dns_san", "node-7.example"},
	{"subject", "peer_certificate: subject", "CN=node-7,O=acme"},
	{"sni", "sni: true", "gateway.example"},
	{"address", "source_address: true, mask: {ipv4: 24, ipv6: 56}", "127.0.0.0/24"},
	{"authority", "authority: true", "127.0.0.1"},
	{"method", "method: true", "POST"},
	{"segment", "path: {segment: 2}", "tenant-9"},
	{"part", `path: {pattern: "/v1/{tenant}/**"}`, "tenant-9"},
	{"query", "query: tier", "gold plus"},
	{"cookie", "cookie: sid", "s-1"},
	{"hashed", "cookie: sid, normalize: [sha256]", "6a840baf5d8c3ff241688aeb14546e653774cd5387faf1cb982b0fbbf1fbb810"},
	{"model", "json: /model/name", "small"},
	{"constant", "constant: everyone", "everyone"},
}

// Each kind of key is taken from what the real Envoy knows of a request: of a token that
// it verified, of a client's certificate, and of the bytes on the wire.
func TestKeys(t *testing.T) {
	t.Parallel()

	var policy strings.Builder
	policy.WriteString("domain: ingest\ndescriptors:\n")
	for _, k := range keysOf {
		policy.WriteString("  - {key: " + k.key + ", quota: {daily: 100}}\n")
	}
	policy.WriteString("filter:\n  timeout: 5s\n  rules:\n    - when: {paths: [/v1/**]}\n      descriptors:\n")
	for _, k := range keysOf {
		policy.WriteString("        - entries: [{key: " + k.key + ", " + k.source + "}]\n")
	}

	ca, tokens := certtest.NewAuthority(t, "ca"), newIssuer(t)
	config := meshConfig{policy: newCertFolder(t).write("policy.yaml", []byte(policy.String()))}
	config.gatewayTLS(t, ca, true)
	config.gateway = append(config.gateway, "--http-filters", tokens.filters(t))
	m := startMesh(t, config)
	client := ca.ClientOf(t, ca, pkix.Name{CommonName: "node-7", Organization: []string{"acme"}}, "spiffe://mesh/node-7", "node-7.example")
	client.ServerName = "gateway.example"

	h := tokens.bearer(t, map[string]any{
		"sub": "alice", "org": map[string]any{"id": 42}, "aud": []string{"first", "second"}, "admin": true,
	})
	h.Set("Cookie", "a=b; sid=s-1")
	const body = `{"model": {"name": "small"}}`
	a := m.with(client).request(t, http.MethodPost, "/v1/tenant-9/x?tier=gold+plus", h, chunked([]byte(body)))
	if _, _, got := m.upstream.saw("/v1/tenant-9/x"); a.status != http.StatusOK || got != int64(len(body)) {
		t.Fatalf("%s, and the upstream saw %d bytes, want 200 and all %d", describe(a), got, len(body))
	}
	response, err := http.Get("http://" + m.service.http + "/quotas/usage")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	usage, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range keysOf {
		if !strings.Contains(string(usage), `"key":"`+k.key+`","value":"`+k.want+`"`) {
			t.Errorf("nothing is counted for %s = %s in %s", k.key, k.want, usage)
		}
	}
	// Without a certificate its keys are missing, which is an answer and no failure.
	plain := ca.Client(t, nil)
	if a := m.with(plain).request(t, http.MethodPost, "/v1/tenant-9/x?tier=a", h, chunked([]byte(body))); a.status != http.StatusBadRequest ||
		!strings.Contains(a.body, "peer certificate's uri_san is missing") {
		t.Errorf("without a certificate: %s, want a 400", describe(a))
	}
}

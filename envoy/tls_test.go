package envoy_test

import (
	"strings"
	"testing"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	"github.com/google/go-cmp/cmp"

	"github.com/weir-dev/weir/envoy"
)

// jwtFilter lets requests with a token of an issuer pass.
const jwtFilter = `
- name: envoy.filters.http.jwt_authn
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication
    providers:
      issuer:
        local_jwks: {inline_string: '{"keys":[{"kty":"EC","crv":"P-256","x":"MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4","y":"4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM"}]}'}
        payload_in_metadata: payload
    rules: [{match: {prefix: /}, requires: {provider_name: issuer}}]
`

func parseFilters(t *testing.T, text string) []*hcmv3.HttpFilter {
	t.Helper()
	filters, err := envoy.ParseFilters([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return filters
}

// secure is c with TLS on all sides, and a filter before Weir's.
func secure(t *testing.T, c envoy.Config) envoy.Config {
	t.Helper()
	c.ServiceTLS = &envoy.TLS{CA: "/etc/weir/ca.crt", Certificate: "/etc/weir/envoy.crt", Key: "/etc/weir/envoy.key"}
	c.ADSTLS = c.ServiceTLS
	c.GatewayTLS = &envoy.GatewayTLS{Certificate: "/etc/weir/gateway.crt", Key: "/etc/weir/gateway.key", ClientCA: "/etc/weir/clients.crt"}
	c.SecretsDir = "/etc/weir/secrets"
	c.FiltersBefore = parseFilters(t, jwtFilter)
	return c
}

func TestSecretFiles(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		golden string
		build  func(envoy.Config) ([]envoy.SecretFile, error)
	}{
		{"secrets.txt", envoy.Config.BootstrapSecrets},
		{"ads-secrets.txt", envoy.Config.ADSBootstrapSecrets},
	} {
		files, err := tt.build(secure(t, sample(t)))
		if err != nil {
			t.Fatal(err)
		}
		var all strings.Builder
		for _, file := range files {
			all.WriteString("-- " + file.Path + " --\n")
			all.Write(file.Content)
		}
		golden(t, tt.golden, []byte(all.String()))

		files, err = tt.build(sample(t))
		if err != nil || len(files) > 0 {
			t.Errorf("without TLS: %v, %v, want no files", files, err)
		}
	}
}

// A control plane sends the secrets, and what names them says so.
func TestSecretsOfResources(t *testing.T) {
	t.Parallel()

	c := secure(t, sample(t))
	c.SecretsDir = ""
	r, err := c.Resources()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, secret := range r.Secrets {
		names = append(names, secret.GetName())
	}
	want := []string{"weir_service_ca", "weir_service_certificate", "weir_gateway_certificate", "weir_gateway_client_ca"}
	if diff := cmp.Diff(want, names); diff != "" {
		t.Errorf("secrets (-want +got):\n%s", diff)
	}
	source := upstreamTLS(t, r.Clusters[0]).GetCommonTlsContext().GetTlsCertificateSdsSecretConfigs()[0].GetSdsConfig()
	if _, ok := source.GetConfigSourceSpecifier().(*corev3.ConfigSource_Ads); !ok {
		t.Errorf("the certificate comes from %v, want the control plane", source)
	}
}

func TestServerNames(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		service, name string
		kind          tlsv3.SubjectAltNameMatcher_SanType
		want, sni     string
	}{
		{"weir.example:8081", "", tlsv3.SubjectAltNameMatcher_DNS, "weir.example", "weir.example"},
		{"192.0.2.7:8081", "", tlsv3.SubjectAltNameMatcher_IP_ADDRESS, "192.0.2.7", ""},
		{"[2001:db8::1]:8081", "", tlsv3.SubjectAltNameMatcher_IP_ADDRESS, "2001:db8::1", ""},
		{"192.0.2.7:8081", "weir.example", tlsv3.SubjectAltNameMatcher_DNS, "weir.example", "weir.example"},
		{"weir.example:8081", "spiffe://mesh/weir", tlsv3.SubjectAltNameMatcher_URI, "spiffe://mesh/weir", ""},
	} {
		c := sample(t)
		c.Service, c.ServiceTLS = tt.service, &envoy.TLS{CA: "/ca", ServerName: tt.name}
		r, err := c.Resources()
		if err != nil {
			t.Fatal(err)
		}
		context := upstreamTLS(t, r.Clusters[0])
		matchers := context.GetCommonTlsContext().GetCombinedValidationContext().GetDefaultValidationContext().GetMatchTypedSubjectAltNames()
		if len(matchers) != 1 || matchers[0].GetSanType() != tt.kind || matchers[0].GetMatcher().GetExact() != tt.want || context.GetSni() != tt.sni {
			t.Errorf("%s, %q: SNI %q and names %v, want %q and %v %q", tt.service, tt.name, context.GetSni(), matchers, tt.sni, tt.kind, tt.want)
		}
	}
}

func upstreamTLS(t *testing.T, cluster *clusterv3.Cluster) *tlsv3.UpstreamTlsContext {
	t.Helper()
	context := new(tlsv3.UpstreamTlsContext)
	unpack(t, cluster.GetTransportSocket().GetTypedConfig(), context)
	return context
}

func TestParseFilters(t *testing.T) {
	t.Parallel()

	if filters := parseFilters(t, jwtFilter); len(filters) != 1 || filters[0].GetName() != "envoy.filters.http.jwt_authn" {
		t.Errorf("filters = %v", filters)
	}
	for text, want := range map[string]string{
		"name: x":               "a list of HTTP filters is expected",
		"[{name: x}, {nam: y}]": `filter 2: .*"nam"`,
		"[{typed_config: {'@type': type.googleapis.com/no.such.Type}}]": "filter 1: .*no.such.Type",
	} {
		want, rest, _ := strings.Cut(want, ".*")
		if _, err := envoy.ParseFilters([]byte(text)); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), rest) {
			t.Errorf("ParseFilters(%s) = %v, want %q and %q", text, err, want, rest)
		}
	}
}

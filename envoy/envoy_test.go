package envoy_test

import (
	"encoding/json"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/filter/config"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const holdBytes = 512 << 10

// block charges a consumer one, and a node the bytes of the body.
const block = `{
  "timeout": "5s",
  "hold_bytes": 524288,
  "rules": [{"descriptors": [
    {"entries": [{"key": "consumer", "header": "x-consumer", "missing": "skip"}]},
    {"entries": [{"key": "node", "header": "x-node", "missing": "skip"}], "cost": "body_bytes"}
  ]}]
}`

func filterConfig(t *testing.T, block string) []byte {
	t.Helper()
	data, err := config.Compose("7", "ingest", "weir_ratelimit", []byte(block))
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// sample is a valid configuration.
func sample(t *testing.T) envoy.Config {
	t.Helper()
	return envoy.Config{
		NodeID:       "gateway-1",
		NodeCluster:  "edge",
		Admin:        "127.0.0.1:9901",
		Gateway:      "0.0.0.0:10000",
		Upstream:     "app.internal:8000",
		Service:      "192.0.2.7:8081",
		ADS:          "weir.internal:18000",
		FilterConfig: filterConfig(t, block),
		Module:       envoy.Module{Path: "/etc/weir/filter.wasm"},
	}
}

// golden compares got with a file, or rewrites the file.
func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", file)
	if *update {
		if err := os.WriteFile(path, got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got; -update rewrites it):\n%s", path, diff)
	}
}

func TestGolden(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		file  string
		build func(envoy.Config) (proto.Message, error)
	}{
		{"bootstrap.yaml", func(c envoy.Config) (proto.Message, error) { return c.Bootstrap() }},
		{"ads.yaml", func(c envoy.Config) (proto.Message, error) { return c.ADSBootstrap() }},
		{"tls.yaml", func(c envoy.Config) (proto.Message, error) { return secure(t, c).Bootstrap() }},
		{"listener.yaml", func(c envoy.Config) (proto.Message, error) {
			r, err := c.Resources()
			if err != nil {
				return nil, err
			}
			return r.Listeners[0], nil
		}},
	} {
		t.Run(tt.file, func(t *testing.T) {
			t.Parallel()

			m, err := tt.build(sample(t))
			if err != nil {
				t.Fatal(err)
			}
			got, err := envoy.YAML(m)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, tt.file, got)

			again, err := tt.build(sample(t))
			if err != nil {
				t.Fatal(err)
			}
			if !proto.Equal(m, again) {
				t.Error("equal configurations gave different messages")
			}
		})
	}
}

// YAML loses nothing: what it prints reads back as the message it was given.
func TestYAMLRoundTrip(t *testing.T) {
	t.Parallel()

	c := sample(t)
	c.Module = envoy.Module{Inline: []byte("\x00asm\x01\x00\x00\x00")}
	// Values that YAML would take for something else, were they not quoted.
	c.NodeID, c.NodeCluster = "0123", "no\n: \"'{\u00e9\U0001f600"
	want, err := c.Bootstrap()
	if err != nil {
		t.Fatal(err)
	}
	text, err := envoy.YAML(want)
	if err != nil {
		t.Fatal(err)
	}

	var tree any
	if err := yaml.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	data, err := json.Marshal(tree)
	if err != nil {
		t.Fatal(err)
	}
	got := want.ProtoReflect().New().Interface()
	if err := protojson.Unmarshal(data, got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestFieldErrors(t *testing.T) {
	t.Parallel()

	bootstrap := func(c envoy.Config) error { _, err := c.Bootstrap(); return err }
	resources := func(c envoy.Config) error { _, err := c.Resources(); return err }
	ads := func(c envoy.Config) error { _, err := c.ADSBootstrap(); return err }

	for _, tt := range []struct {
		name  string
		spoil func(*envoy.Config)
		build func(envoy.Config) error
		field string
		want  string
	}{
		{"gateway missing", func(c *envoy.Config) { c.Gateway = "" }, bootstrap, "Gateway", "missing"},
		{"gateway a name", func(c *envoy.Config) { c.Gateway = "localhost:80" }, bootstrap, "Gateway", "IP address"},
		{"gateway without port", func(c *envoy.Config) { c.Gateway = "127.0.0.1" }, bootstrap, "Gateway", "host:port"},
		{"gateway's port too large", func(c *envoy.Config) { c.Gateway = "127.0.0.1:65536" }, bootstrap, "Gateway", "port"},
		{"gateway is admin", func(c *envoy.Config) { c.Gateway = c.Admin }, bootstrap, "Gateway", "admin"},
		{"admin a name", func(c *envoy.Config) { c.Admin = ":9901" }, bootstrap, "Admin", "IP address"},
		{"upstream missing", func(c *envoy.Config) { c.Upstream = "" }, bootstrap, "Upstream", "missing"},
		{"upstream without host", func(c *envoy.Config) { c.Upstream = ":80" }, bootstrap, "Upstream", "no host"},
		{"upstream at port 0", func(c *envoy.Config) { c.Upstream = "app:0" }, bootstrap, "Upstream", "port 0"},
		{"service without port", func(c *envoy.Config) { c.Service = "weir" }, resources, "Service", "host:port"},
		{"unknown protocol", func(c *envoy.Config) { c.UpstreamProtocol = "h3" }, bootstrap, "UpstreamProtocol", `"h3"`},
		{"no module", func(c *envoy.Config) { c.Module = envoy.Module{} }, bootstrap, "Module", "Path"},
		{"two modules", func(c *envoy.Config) { c.Module.Inline = []byte("x") }, bootstrap, "Module", "one of them"},
		{"no filter", func(c *envoy.Config) { c.FilterConfig = nil }, bootstrap, "FilterConfig", "missing"},
		{"bad filter", func(c *envoy.Config) {
			c.FilterConfig = []byte(`{"version":"1","domain":"d","cluster":"c","filter":{"timeout":"never"}}`)
		}, resources, "FilterConfig", "filter.timeout"},
		{"filter calls the upstream", func(c *envoy.Config) {
			c.FilterConfig = []byte(`{"version":"1","domain":"d","cluster":"upstream","filter":{"rules":[]}}`)
		}, bootstrap, "FilterConfig", `"upstream"`},
		{"a header that is never let in", func(c *envoy.Config) {
			c.FilterConfig = []byte(strings.Replace(string(c.FilterConfig), "x-node", "x_node", 1))
		}, bootstrap, "FilterConfig", "filter.rules[0].descriptors[1].entries[0].header"},
		{"buffer too small", func(c *envoy.Config) { c.BufferBytes = holdBytes }, bootstrap, "BufferBytes", "hold_bytes, 524288"},
		{"buffer under HTTP/2's least", func(c *envoy.Config) {
			c.BufferBytes = 65_534
			c.FilterConfig = []byte(strings.Replace(string(c.FilterConfig), "524288", "1", 1))
		}, bootstrap, "BufferBytes", "65535"},
		{"buffer over HTTP/2's most", func(c *envoy.Config) { c.BufferBytes = 1 << 31 }, bootstrap, "BufferBytes", "2147483647"},
		{"idle timeout too short", func(c *envoy.Config) { c.StreamIdleTimeout = 19 * time.Second }, bootstrap, "StreamIdleTimeout", "5s"},
		{"service's authority missing", func(c *envoy.Config) { c.ServiceTLS = &envoy.TLS{} }, resources, "ServiceTLS", "CA is missing"},
		{"service's key missing", func(c *envoy.Config) { c.ServiceTLS = &envoy.TLS{CA: "ca", Certificate: "c"} }, resources, "ServiceTLS", "needs the other"},
		{"control plane's certificate missing", func(c *envoy.Config) { c.ADSTLS = &envoy.TLS{CA: "ca", Key: "k"} }, ads, "ADSTLS", "needs the other"},
		{"no folder for secrets", func(c *envoy.Config) { c.ServiceTLS = &envoy.TLS{CA: "ca"} }, bootstrap, "SecretsDir", "missing"},
		{"no folder for the gateway's secrets", func(c *envoy.Config) { c.GatewayTLS = &envoy.GatewayTLS{Certificate: "c", Key: "k"} }, bootstrap, "SecretsDir", "missing"},
		{"no folder for the control plane's secrets", func(c *envoy.Config) { c.ADSTLS = &envoy.TLS{CA: "ca"} }, ads, "SecretsDir", "missing"},
		{"gateway's key missing", func(c *envoy.Config) { c.GatewayTLS = &envoy.GatewayTLS{Certificate: "c"} }, resources, "GatewayTLS", "a Key"},
		{"optional clients of no authority", func(c *envoy.Config) {
			c.GatewayTLS = &envoy.GatewayTLS{Certificate: "c", Key: "k", ClientOptional: true}
		}, resources, "GatewayTLS", "ClientCA"},
		{"two filters of one name", func(c *envoy.Config) {
			c.FiltersBefore = parseFilters(t, "[{name: weir, typed_config: {'@type': type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication}}]")
		}, bootstrap, "FiltersBefore", `"weir"`},
		{"a filter of no type", func(c *envoy.Config) { c.FiltersBefore = parseFilters(t, "[{name: jwt}]") }, bootstrap, "FiltersBefore", "typed_config"},
		{"a filter of no name", func(c *envoy.Config) { c.FiltersBefore = parseFilters(t, "[{}]") }, bootstrap, "FiltersBefore", "filter 1 has no name"},
		{"no node", func(c *envoy.Config) { c.NodeID = "" }, ads, "NodeID", "missing"},
		{"no control plane", func(c *envoy.Config) { c.ADS = "" }, ads, "ADS", "missing"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()

			c := sample(t)
			tt.spoil(&c)
			err := tt.build(c)
			var field *envoy.FieldError
			if !errors.As(err, &field) || field.Field != tt.field || !strings.Contains(field.Error(), tt.want) {
				t.Errorf("error = %v, want one of %s with %q", err, tt.field, tt.want)
			}
		})
	}
}

func TestFieldErrorsAllAtOnce(t *testing.T) {
	t.Parallel()

	_, err := envoy.Config{}.Bootstrap()
	if err == nil {
		t.Fatal("Bootstrap of nothing is no error")
	}
	for _, field := range []string{"Gateway", "Upstream", "Service", "Module", "FilterConfig"} {
		if !strings.Contains(err.Error(), field+": ") {
			t.Errorf("the error doesn't name %s:\n%v", field, err)
		}
	}
}

// Whatever the filter holds, Envoy can hold more.
func TestBuffersExceedHoldBytes(t *testing.T) {
	t.Parallel()

	for _, hold := range []string{"1", "262144", "16777216"} {
		c := sample(t)
		c.FilterConfig = []byte(strings.Replace(string(c.FilterConfig), "524288", hold, 1))
		parsed, err := config.Parse(c.FilterConfig)
		if err != nil {
			t.Fatal(err)
		}
		r, err := c.Resources()
		if err != nil {
			t.Fatal(err)
		}
		b, err := c.Bootstrap()
		if err != nil {
			t.Fatal(err)
		}
		for _, listener := range []*listenerv3.Listener{r.Listeners[0], b.GetStaticResources().GetListeners()[0]} {
			hcm := manager(t, listener)
			for what, bytes := range map[string]uint32{
				"per_connection_buffer_limit_bytes": listener.GetPerConnectionBufferLimitBytes().GetValue(),
				"initial_stream_window_size":        hcm.GetHttp2ProtocolOptions().GetInitialStreamWindowSize().GetValue(),
				"initial_connection_window_size":    hcm.GetHttp2ProtocolOptions().GetInitialConnectionWindowSize().GetValue(),
			} {
				if int64(bytes) <= parsed.HoldBytes {
					t.Errorf("hold_bytes %s: %s = %d, want more", hold, what, bytes)
				}
			}
		}
	}
}

func TestResources(t *testing.T) {
	t.Parallel()

	r, err := sample(t).Resources()
	if err != nil {
		t.Fatal(err)
	}
	kinds := make(map[string]clusterv3.Cluster_DiscoveryType)
	for _, cluster := range r.Clusters {
		kinds[cluster.GetName()] = cluster.GetType()
	}
	wantKinds := map[string]clusterv3.Cluster_DiscoveryType{
		"weir_ratelimit":      clusterv3.Cluster_EDS,        // an address
		envoy.UpstreamCluster: clusterv3.Cluster_STRICT_DNS, // a name
	}
	if diff := cmp.Diff(wantKinds, kinds); diff != "" {
		t.Errorf("clusters (-want +got):\n%s", diff)
	}
	if len(r.Endpoints) != 1 || r.Endpoints[0].GetClusterName() != "weir_ratelimit" {
		t.Errorf("endpoints = %v, want those of weir_ratelimit", r.Endpoints)
	}

	hcm := manager(t, r.Listeners[0])
	if got := hcm.GetHttpFilters()[0]; got.GetConfigDiscovery() == nil || got.GetName() != r.Extensions[0].GetName() {
		t.Errorf("the first filter is %v, want the discovered %q", got, r.Extensions[0].GetName())
	}
	if got := hcm.GetRds().GetRouteConfigName(); got != r.Routes[0].GetName() {
		t.Errorf("the listener discovers the routes %q, want %q", got, r.Routes[0].GetName())
	}
}

// manager returns the connection manager of a listener.
func manager(t *testing.T, listener *listenerv3.Listener) *hcmv3.HttpConnectionManager {
	t.Helper()
	hcm := new(hcmv3.HttpConnectionManager)
	if err := listener.GetFilterChains()[0].GetFilters()[0].GetTypedConfig().UnmarshalTo(hcm); err != nil {
		t.Fatal(err)
	}
	return hcm
}

package e2e_test

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/weir-dev/weir/internal/envoyproc"
	"github.com/weir-dev/weir/internal/envoyproc/envoytest"
	"github.com/weir-dev/weir/ratelimitsvc"
)

// nativeBootstrap is an Envoy with its own rate limit filter and no part of Weir: by the
// service's address, the upstream's, and the access log's file.
const nativeBootstrap = `
admin: {address: {socket_address: {address: 127.0.0.1, port_value: 0}}}
static_resources:
  listeners:
  - name: gateway
    address: {socket_address: {address: 127.0.0.1, port_value: 0}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: gateway
          access_log:
          - name: envoy.access_loggers.file
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog
              path: %[3]s
              log_format:
                text_format_source:
                  inline_string: "%%REQ(:PATH)%% %%RESPONSE_CODE%% %%DYNAMIC_METADATA(envoy.filters.http.ratelimit:weir:outcome)%% %%DYNAMIC_METADATA(envoy.filters.http.ratelimit:weir:rule)%% %%DYNAMIC_METADATA(envoy.filters.http.ratelimit:weir:shadow_denied)%%\n"
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {prefix: /}
                route:
                  cluster: upstream
                  rate_limits:
                  - actions: [{request_headers: {header_name: x-user, descriptor_key: user, skip_if_absent: true}}]
                  - actions: [{request_headers: {header_name: x-tried, descriptor_key: tried, skip_if_absent: true}}]
          http_filters:
          - name: envoy.filters.http.ratelimit
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
              domain: test
              failure_mode_deny: true
              timeout: 20s
              enable_retry_after_header: true
              rate_limit_service:
                transport_api_version: V3
                grpc_service: {envoy_grpc: {cluster_name: weir}}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
  - name: upstream
    load_assignment: {cluster_name: upstream, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: %[2]s}}}]}]}
  - name: weir
    load_assignment: {cluster_name: weir, endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: %[1]s}}}]}]}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
`

func socketAddress(address string) string {
	host, port, _ := strings.Cut(address, ":")
	return fmt.Sprintf("{address: %s, port_value: %s}", host, port)
}

// startNative starts an Envoy with its own filter in front of a service on the real store,
// and returns what sends requests through it.
func startNative(t *testing.T, c *counterService, accessLog string) *mesh {
	t.Helper()
	server := grpc.NewServer(ratelimitsvc.ServerOptions()...)
	c.service.Register(server)
	m := &mesh{upstream: startUpstream(t)}
	file := filepath.Join(t.TempDir(), "bootstrap.yaml")
	text := fmt.Sprintf(nativeBootstrap, socketAddress(envoytest.Serve(t, server)), socketAddress(m.upstream.address), accessLog)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	log := &logBuffer{}
	showOnFailure(t, "envoy", log)
	proxy, err := envoyproc.Start(t.Context(), envoyproc.Config{Binary: envoytest.Binary(t), File: file, Output: log, Concurrency: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := proxy.Stop(); err != nil {
			t.Errorf("stopping envoy: %v", err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	if err := proxy.WaitReady(ctx); err != nil {
		t.Fatal(err)
	}
	if m.gateway, err = proxy.Listener(ctx, "gateway"); err != nil {
		t.Fatal(err)
	}
	return m
}

// PEERS C24, C37, C47, C48: beside Envoy's own filter, which is told to write Retry-After too, there
// is one, the service's, and only on what is refused; a limit in shadow is seen in access
// logs alone, which can say which limit decided.
func TestC24C37C47C48EnvoysOwnFilter(t *testing.T) {
	t.Parallel()

	c := newCounterService(t, `
domain: test
headers: {style: delta}
descriptors:
  - {key: user, name: per-user, limiter: {permits: 1, per: 10s, burst: 2}}
  - {key: tried, name: new-limit, shadow_mode: true, quota: {daily: 1}}
`)
	accessLog := filepath.Join(t.TempDir(), "access.log")
	m := startNative(t, c, accessLog)
	// Of what is absent Envoy sends a descriptor without entries, which is no error.
	if a := m.request(t, http.MethodGet, "/neither", nil, nil); a.status != http.StatusOK {
		t.Errorf("neither header: %s, want 200", describe(a))
	}
	for i := range 3 {
		a := m.request(t, http.MethodGet, fmt.Sprintf("/shadow%d", i), header("X-Tried", "a"), nil)
		if a.status != http.StatusOK {
			t.Errorf("a limit in shadow: %s, want 200", describe(a))
		}
		noRateHeaders(t, a)
	}
	for i := range 2 {
		a := m.request(t, http.MethodGet, fmt.Sprintf("/allowed%d", i), header("X-User", "a"), nil)
		if a.status != http.StatusOK {
			t.Errorf("request %d: %s, want 200", i, describe(a))
		}
		noRateHeaders(t, a)
	}
	// A token is back in 10 s, which is what to wait for, and all of them in 20 s, which is
	// what Envoy would say.
	a := m.request(t, http.MethodGet, "/refused", header("X-User", "a"), nil)
	if a.status != http.StatusTooManyRequests {
		t.Errorf("the third: %s, want 429", describe(a))
	}
	for name, want := range map[string]string{
		"Retry-After": "10", "X-Ratelimit-Limit": "2", "X-Ratelimit-Remaining": "0", "X-Ratelimit-Reset": "20",
	} {
		if got := a.header.Values(name); len(got) != 1 || got[0] != want {
			t.Errorf("%s = %q, want %q once", name, got, want)
		}
	}
	const want = `/neither 200 allowed - -
/shadow0 200 allowed - -
/shadow1 200 allowed - ["new-limit"]
/shadow2 200 allowed - ["new-limit"]
/allowed0 200 allowed per-user -
/allowed1 200 allowed per-user -
/refused 429 refused per-user -
`
	eventually(t, startTimeout, "the access log is written", func() error {
		got, err := os.ReadFile(accessLog)
		if err == nil && string(got) != want {
			err = fmt.Errorf("it is\n%s, want\n%s", got, want)
		}
		return err
	})
}

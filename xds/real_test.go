package xds_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	wasmfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/wasm/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/internal/envoyproc/envoytest"
	"github.com/weir-dev/weir/internal/wasmhost/wasmtest"
	"github.com/weir-dev/weir/xds"
)

// An Envoy that knows nothing but the control plane gets everything from it,
// enforces it, follows its changes, and stays on the last good one.
func TestRealEnvoy(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		name   string
		api    corev3.ApiConfigSource_ApiType
		module func(*testing.T) envoy.Module
	}{
		{"delta, module in a file", corev3.ApiConfigSource_DELTA_GRPC, func(t *testing.T) envoy.Module {
			t.Helper()
			return envoy.Module{Path: wasmtest.Module(t)}
		}},
		{"state of the world, module inline", corev3.ApiConfigSource_GRPC, func(t *testing.T) envoy.Module {
			t.Helper()
			return envoy.Module{Inline: wasmtest.Bytes(t)}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()

			log := new(syncBuffer)
			server := xds.NewServer(xds.Config{Logger: slog.New(slog.NewTextHandler(log, nil))})
			grpcServer := grpc.NewServer()
			server.Register(grpcServer)
			b := &bench{server: server, log: log}

			upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				_, _ = io.WriteString(w, "hello")
			}))
			t.Cleanup(upstream.Close)

			config := envoy.Config{
				NodeID:   "gateway-1",
				Admin:    "127.0.0.1:0",
				Gateway:  "127.0.0.1:0",
				Upstream: upstream.Listener.Addr().String(),
				Service:  envoytest.RateLimitService(t, refuseConsumer),
				ADS:      envoytest.Serve(t, grpcServer),
				Module:   tt.module(t),
			}
			bootstrap, err := config.ADSBootstrap()
			if err != nil {
				t.Fatal(err)
			}
			bootstrap.GetDynamicResources().GetAdsConfig().ApiType = tt.api
			e := envoytest.Start(t, bootstrap)

			// Nothing is published yet, so Envoy isn't ready, and says so.
			b.waitFor(t, func(nodes []xds.Node) bool { return len(nodes) == 1 && len(nodes[0].Types) > 0 })
			impatient, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			if err := e.WaitReady(impatient); err == nil {
				t.Fatal("Envoy is ready with no configuration")
			}

			b.publish(t, build(t, config, "1", "x-consumer"))
			if err := e.WaitReady(envoytest.Within(t)); err != nil {
				t.Fatal(err)
			}
			addr, err := e.Listener(envoytest.Within(t), envoy.ListenerName)
			if err != nil {
				t.Fatal(err)
			}
			expect := func(header, value string, want int) {
				t.Helper()
				if got := statusOf(t, addr, header, value); got != want {
					t.Errorf("GET with %s: %s = %d, want %d", header, value, got, want)
				}
			}
			expect("x-consumer", "someone", http.StatusOK)
			expect("x-consumer", "refused", http.StatusTooManyRequests)
			nodes := b.waitFor(t, func(nodes []xds.Node) bool {
				for _, s := range subscriptions {
					if state := nodes[0].Types[s.typeURL]; state.Acked == "" || state.Acked != state.Sent {
						return false
					}
				}
				return true
			})
			if got := nodes[0]; got.ID != "gateway-1" || got.Version != "1.40.0" || got.Delta != (tt.api == corev3.ApiConfigSource_DELTA_GRPC) {
				t.Errorf("Nodes = %+v", got)
			}

			// Another header.
			extension := func() xds.TypeState { return b.server.Nodes()[0].Types[resource.ExtensionConfigType] }
			first := extension().Acked
			b.publish(t, build(t, config, "2", "x-user"))
			b.waitFor(t, func([]xds.Node) bool { return extension().Acked != first })
			expect("x-consumer", "refused", http.StatusOK)
			expect("x-user", "refused", http.StatusTooManyRequests)

			// One that the filter refuses: the last good one stays.
			bad := build(t, config, "3", "x-user")
			wasm := new(wasmfilterv3.Wasm)
			if err := bad.Extensions[0].GetTypedConfig().UnmarshalTo(wasm); err != nil {
				t.Fatal(err)
			}
			wasm.GetConfig().Configuration = pack(t, wrapperspb.String("{}"))
			bad.Extensions[0].TypedConfig = pack(t, wasm)
			b.publish(t, bad)
			b.waitFor(t, func([]xds.Node) bool { return extension().Nack != nil })
			expect("x-user", "refused", http.StatusTooManyRequests)
			b.publish(t, bad)

			// And the next good one is taken. Envoy has answered nothing in between.
			b.publish(t, build(t, config, "4", "x-consumer"))
			b.waitFor(t, func([]xds.Node) bool { return extension().Nack == nil })
			expect("x-consumer", "refused", http.StatusTooManyRequests)
			expect("x-user", "refused", http.StatusOK)

			// Of what did not change nothing was sent again. The counters are
			// Envoy's own.
			for counter, want := range map[string]uint64{
				"listener_manager.lds.update_success":                         1,
				"cluster_manager.cds.update_success":                          1,
				"http.weir_gateway.rds.weir_routes.update_success":            1,
				"extension_config_discovery.http_filter.weir.config_reload":   4, // with the refused one
				"extension_config_discovery.http_filter.weir.config_fail":     1,
				"extension_config_discovery.http_filter.weir.update_rejected": 1,
				"extension_config_discovery.http_filter.weir.config_conflict": 0,
			} {
				if got, err := e.Stat(envoytest.Within(t), counter); got != want || err != nil {
					t.Errorf("%s = %d, %v; want %d", counter, got, err, want)
				}
			}
		})
	}
}

func refuseConsumer(r *rlsv3.RateLimitRequest) *rlsv3.RateLimitResponse {
	for _, d := range r.GetDescriptors() {
		if d.GetEntries()[0].GetValue() == "refused" {
			return &rlsv3.RateLimitResponse{OverallCode: rlsv3.RateLimitResponse_OVER_LIMIT}
		}
	}
	return &rlsv3.RateLimitResponse{OverallCode: rlsv3.RateLimitResponse_OK}
}

// statusOf is that of a request with one header, on a connection of its own.
func statusOf(t *testing.T, addr, header, value string) int {
	t.Helper()
	r, err := http.NewRequestWithContext(envoytest.Within(t), http.MethodGet, "http://"+addr, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set(header, value)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	response, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	_ = response.Body.Close()
	return response.StatusCode
}

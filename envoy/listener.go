package envoy

import (
	"slices"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	routerv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const (
	requestHeadersTimeout = 30 * time.Second
	maxConcurrentStreams  = 100

	// A connection's window is shared by its streams. Those that wait at their
	// headers keep what they have read; this many may do so before a connection's
	// other streams wait with them.
	streamsPerWindow = 4

	routerName = "envoy.filters.http.router"
)

// listener builds the gateway's listener around a filter and a route
// configuration, given either in full or by reference.
func (c *checked) listener(filter *hcmv3.HttpFilter, hcm *hcmv3.HttpConnectionManager) (*listenerv3.Listener, error) {
	router, err := pack(&routerv3.Router{})
	if err != nil {
		return nil, err
	}

	hcm.CodecType = hcmv3.HttpConnectionManager_AUTO
	hcm.StatPrefix = ListenerName
	hcm.HttpFilters = append(slices.Clone(c.FiltersBefore), filter, &hcmv3.HttpFilter{
		Name:       routerName,
		ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: router},
	})

	// Without this Envoy answers "Expect: 100-continue" itself, before the filter
	// has decided, and a client uploads what is then refused.
	hcm.Proxy_100Continue = true

	hcm.CommonHttpProtocolOptions = &corev3.HttpProtocolOptions{
		// Many servers take x_node_id for x-node-id. A client could so hide from
		// the filter the name that it shows to the upstream.
		HeadersWithUnderscoresAction: corev3.HttpProtocolOptions_REJECT_REQUEST,
	}
	// Trailers then travel the same way over HTTP/1.1 as over HTTP/2.
	hcm.HttpProtocolOptions = &corev3.Http1ProtocolOptions{EnableTrailers: true}
	hcm.Http2ProtocolOptions = &corev3.Http2ProtocolOptions{
		MaxConcurrentStreams:        wrapperspb.UInt32(maxConcurrentStreams),
		InitialStreamWindowSize:     window(c.BufferBytes),
		InitialConnectionWindowSize: window(streamsPerWindow * c.BufferBytes),
	}

	// There is no request_timeout: it would end long uploads and client streams.
	// A stalled one ends by the idle timeout.
	hcm.StreamIdleTimeout = durationpb.New(c.StreamIdleTimeout)
	hcm.RequestHeadersTimeout = durationpb.New(requestHeadersTimeout)

	// The client's address is the connection's, not what a header claims.
	hcm.UseRemoteAddress = wrapperspb.Bool(true)
	hcm.InternalAddressConfig = &hcmv3.HttpConnectionManager_InternalAddressConfig{}

	// One resource has one path, for routes and for whatever counts by path.
	hcm.NormalizePath = wrapperspb.Bool(true)
	hcm.MergeSlashes = true
	hcm.PathWithEscapedSlashesAction = hcmv3.HttpConnectionManager_UNESCAPE_AND_REDIRECT

	hcm.ServerHeaderTransformation = hcmv3.HttpConnectionManager_PASS_THROUGH

	manager, err := pack(hcm)
	if err != nil {
		return nil, err
	}
	listener := &listenerv3.Listener{
		Name:                          ListenerName,
		Address:                       c.gateway.address(),
		TrafficDirection:              corev3.TrafficDirection_INBOUND,
		PerConnectionBufferLimitBytes: window(c.BufferBytes),
		FilterChains: []*listenerv3.FilterChain{{
			Filters: []*listenerv3.Filter{{
				Name:       "envoy.filters.network.http_connection_manager",
				ConfigType: &listenerv3.Filter_TypedConfig{TypedConfig: manager},
			}},
		}},
	}
	return listener, c.GatewayTLS.secure(listener, c.secretsFrom)
}

// window is n bytes, or as many as a window can be.
func window(n int64) *wrapperspb.UInt32Value {
	return wrapperspb.UInt32(uint32(min(n, maxBuffer))) //nolint:gosec // n is positive: checkBuffer
}

// staticListener has its filter and its routes in it.
func (c *checked) staticListener() (*listenerv3.Listener, error) {
	wasm, err := c.wasmFilter()
	if err != nil {
		return nil, err
	}
	return c.listener(
		&hcmv3.HttpFilter{
			Name:       FilterName,
			ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: wasm},
		},
		&hcmv3.HttpConnectionManager{
			RouteSpecifier: &hcmv3.HttpConnectionManager_RouteConfig{RouteConfig: routes()},
		},
	)
}

// discoveredListener fetches its filter's configuration and its routes, so that a
// change of either leaves the listener, and the connections on it, alone.
func (c *checked) discoveredListener(wasm *anypb.Any) (*listenerv3.Listener, error) {
	return c.listener(
		&hcmv3.HttpFilter{
			Name: FilterName,
			ConfigType: &hcmv3.HttpFilter_ConfigDiscovery{
				ConfigDiscovery: &corev3.ExtensionConfigSource{
					ConfigSource: fromADS(),
					TypeUrls:     []string{wasm.GetTypeUrl()},
				},
			},
		},
		&hcmv3.HttpConnectionManager{
			RouteSpecifier: &hcmv3.HttpConnectionManager_Rds{
				Rds: &hcmv3.Rds{ConfigSource: fromADS(), RouteConfigName: RouteName},
			},
		},
	)
}

func routes() *routev3.RouteConfiguration {
	return &routev3.RouteConfiguration{
		Name: RouteName,
		VirtualHosts: []*routev3.VirtualHost{{
			Name:    "all",
			Domains: []string{"*"},
			Routes: []*routev3.Route{{
				Name:  "upstream",
				Match: &routev3.RouteMatch{PathSpecifier: &routev3.RouteMatch_Prefix{Prefix: "/"}},
				Action: &routev3.Route_Route{Route: &routev3.RouteAction{
					ClusterSpecifier: &routev3.RouteAction_Cluster{Cluster: UpstreamCluster},
					// Long answers and streams are not cut at Envoy's 15 s; a
					// silent upstream is, by the idle timeout.
					Timeout: durationpb.New(0),
				}},
			}},
		}},
	}
}

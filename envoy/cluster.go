package envoy

import (
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	upstreamv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const (
	connectTimeout         = time.Second
	upstreamConnectTimeout = 5 * time.Second
	keepaliveInterval      = 10 * time.Second
	keepaliveTimeout       = 5 * time.Second

	// Envoy's own limits (1,024) would turn a busy second into answers of ours:
	// 500 from the rate limit cluster, 503 from the upstream's.
	maxConnections = 16_384
	maxRequests    = 65_536
	maxRetries     = 1_024

	protocolOptions = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
)

// server builds a cluster of one server: a fixed address, or a name that Envoy
// resolves.
func server(name string, at hostPort, timeout time.Duration, options *upstreamv3.HttpProtocolOptions) (*clusterv3.Cluster, error) {
	packed, err := pack(options)
	if err != nil {
		return nil, err
	}
	c := &clusterv3.Cluster{
		Name:                 name,
		ClusterDiscoveryType: &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STATIC},
		ConnectTimeout:       durationpb.New(timeout),
		LoadAssignment: &endpointv3.ClusterLoadAssignment{
			ClusterName: name,
			Endpoints: []*endpointv3.LocalityLbEndpoints{{
				LbEndpoints: []*endpointv3.LbEndpoint{{
					HostIdentifier: &endpointv3.LbEndpoint_Endpoint{
						Endpoint: &endpointv3.Endpoint{Address: at.address()},
					},
				}},
			}},
		},
		CircuitBreakers: &clusterv3.CircuitBreakers{
			Thresholds: []*clusterv3.CircuitBreakers_Thresholds{{
				MaxConnections:     wrapperspb.UInt32(maxConnections),
				MaxPendingRequests: wrapperspb.UInt32(maxRequests),
				MaxRequests:        wrapperspb.UInt32(maxRequests),
				MaxRetries:         wrapperspb.UInt32(maxRetries),
			}},
		},
		TypedExtensionProtocolOptions: map[string]*anypb.Any{protocolOptions: packed},
	}
	if !at.isIP {
		c.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_STRICT_DNS}
		// Servers on localhost seldom listen on ::1 as well.
		c.DnsLookupFamily = clusterv3.Cluster_V4_PREFERRED
	}
	return c, nil
}

// serviceCluster is where the filter's calls go.
func (c *checked) serviceCluster() (*clusterv3.Cluster, error) {
	cluster, err := server(c.filter.cluster, c.service, connectTimeout, grpcOptions())
	if err != nil {
		return nil, err
	}
	return cluster, c.ServiceTLS.secure(cluster, c.service.host, c.secretsFrom, serviceCA, serviceCertificate)
}

func (c *checked) adsCluster() (*clusterv3.Cluster, error) {
	cluster, err := server(ADSCluster, c.ads, connectTimeout, grpcOptions())
	if err != nil {
		return nil, err
	}
	return cluster, c.ADSTLS.secure(cluster, c.ads.host, c.secretsFrom, adsCA, adsCertificate)
}

func (c *checked) upstreamCluster() (*clusterv3.Cluster, error) {
	http1 := &corev3.Http1ProtocolOptions{EnableTrailers: true}
	http2 := &corev3.Http2ProtocolOptions{}

	options := new(upstreamv3.HttpProtocolOptions)
	switch c.UpstreamProtocol {
	case HTTP1:
		options.UpstreamProtocolOptions = explicit(&upstreamv3.HttpProtocolOptions_ExplicitHttpConfig{
			ProtocolConfig: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_HttpProtocolOptions{HttpProtocolOptions: http1},
		})
	case HTTP2:
		options.UpstreamProtocolOptions = explicit(&upstreamv3.HttpProtocolOptions_ExplicitHttpConfig{
			ProtocolConfig: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{Http2ProtocolOptions: http2},
		})
	case SameAsClient:
		options.UpstreamProtocolOptions = &upstreamv3.HttpProtocolOptions_UseDownstreamProtocolConfig{
			UseDownstreamProtocolConfig: &upstreamv3.HttpProtocolOptions_UseDownstreamHttpConfig{
				HttpProtocolOptions:  http1,
				Http2ProtocolOptions: http2,
			},
		}
	}
	return server(UpstreamCluster, c.upstream, upstreamConnectTimeout, options)
}

// grpcOptions speaks HTTP/2 from the first byte on. A peer that went away
// without a word is noticed by pings, not by the requests that wait for it.
func grpcOptions() *upstreamv3.HttpProtocolOptions {
	return &upstreamv3.HttpProtocolOptions{
		UpstreamProtocolOptions: explicit(&upstreamv3.HttpProtocolOptions_ExplicitHttpConfig{
			ProtocolConfig: &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_Http2ProtocolOptions{
				Http2ProtocolOptions: &corev3.Http2ProtocolOptions{
					ConnectionKeepalive: &corev3.KeepaliveSettings{
						Interval: durationpb.New(keepaliveInterval),
						Timeout:  durationpb.New(keepaliveTimeout),
					},
				},
			},
		}),
	}
}

func explicit(options *upstreamv3.HttpProtocolOptions_ExplicitHttpConfig) *upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_ {
	return &upstreamv3.HttpProtocolOptions_ExplicitHttpConfig_{ExplicitHttpConfig: options}
}

func (hp hostPort) address() *corev3.Address {
	return &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address:       hp.host,
		PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: hp.port},
	}}}
}

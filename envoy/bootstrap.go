package envoy

import (
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	metricsv3 "github.com/envoyproxy/go-control-plane/envoy/config/metrics/v3"
	overloadv3 "github.com/envoyproxy/go-control-plane/envoy/config/overload/v3"
	connectionsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	// Each client can make Envoy hold a buffer's worth, and Envoy has no bound of
	// its own on their number.
	maxClients = 50_000

	reconnectFirst = 500 * time.Millisecond
	reconnectMost  = 5 * time.Second
)

// metricTags are the labels in the names of the filter's metrics. A name is
// built as noun_label=value_label=value, since a filter can't label a metric any
// other way.
var metricTags = []string{"outcome", "reason", "kind", "domain", "rule", "version"}

// Bootstrap builds a complete bootstrap: Envoy needs nothing else to run. The
// error joins a [FieldError] for each fault of c.
func (c Config) Bootstrap() (*bootstrapv3.Bootstrap, error) {
	ok, err := c.check(needTraffic | needSecretsDir)
	if err != nil {
		return nil, err
	}
	listener, err := ok.staticListener()
	if err != nil {
		return nil, err
	}
	clusters, err := ok.clusters()
	if err != nil {
		return nil, err
	}
	b, err := ok.process()
	if err != nil {
		return nil, err
	}
	b.StaticResources = &bootstrapv3.Bootstrap_StaticResources{
		Listeners: []*listenerv3.Listener{listener},
		Clusters:  clusters,
	}
	return b, nil
}

// ADSBootstrap builds the bootstrap of an Envoy that fetches everything else from
// the control plane at c.ADS, incrementally. It reads NodeID, NodeCluster, Admin,
// ADS, ADSTLS and SecretsDir only. The error joins a [FieldError] for each fault of those.
func (c Config) ADSBootstrap() (*bootstrapv3.Bootstrap, error) {
	ok, err := c.check(needADS | needSecretsDir)
	if err != nil {
		return nil, err
	}
	cluster, err := ok.adsCluster()
	if err != nil {
		return nil, err
	}
	b, err := ok.process()
	if err != nil {
		return nil, err
	}
	b.StaticResources = &bootstrapv3.Bootstrap_StaticResources{
		Clusters: []*clusterv3.Cluster{cluster},
	}
	b.DynamicResources = &bootstrapv3.Bootstrap_DynamicResources{
		LdsConfig: fromADS(),
		CdsConfig: fromADS(),
		AdsConfig: &corev3.ApiConfigSource{
			ApiType:             corev3.ApiConfigSource_DELTA_GRPC,
			TransportApiVersion: corev3.ApiVersion_V3,
			GrpcServices: []*corev3.GrpcService{{
				TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{
					ClusterName: ADSCluster,
					RetryPolicy: &corev3.RetryPolicy{RetryBackOff: &corev3.BackoffStrategy{
						BaseInterval: durationpb.New(reconnectFirst),
						MaxInterval:  durationpb.New(reconnectMost),
					}},
				}},
			}},
			SetNodeOnFirstMessageOnly: true,
		},
	}
	return b, nil
}

// process builds what belongs to the process whatever it serves.
func (c *checked) process() (*bootstrapv3.Bootstrap, error) {
	connections, err := pack(&connectionsv3.DownstreamConnectionsConfig{MaxActiveDownstreamConnections: maxClients})
	if err != nil {
		return nil, err
	}
	b := &bootstrapv3.Bootstrap{
		Node:        &corev3.Node{Id: c.NodeID, Cluster: c.NodeCluster},
		StatsConfig: &metricsv3.StatsConfig{StatsTags: statsTags()},
		OverloadManager: &overloadv3.OverloadManager{
			ResourceMonitors: []*overloadv3.ResourceMonitor{{
				Name:       "envoy.resource_monitors.global_downstream_max_connections",
				ConfigType: &overloadv3.ResourceMonitor_TypedConfig{TypedConfig: connections},
			}},
		},
	}
	if c.Admin != "" {
		b.Admin = &bootstrapv3.Admin{
			Address: c.admin.address(),
			// One must be able to look when the clients are too many.
			IgnoreGlobalConnLimit: true,
		}
	}
	return b, nil
}

// statsTags turns the labels in the names of the filter's metrics into labels:
// weir_requests_domain=ingest_outcome=allowed becomes weir_requests with two.
// A value ends where the next label, or the name, does; it may hold dots.
func statsTags() []*metricsv3.TagSpecifier {
	tags := make([]*metricsv3.TagSpecifier, len(metricTags))
	for i, name := range metricTags {
		tags[i] = &metricsv3.TagSpecifier{
			TagName: name,
			TagValue: &metricsv3.TagSpecifier_Regex{
				Regex: `^wasmcustom\.weir_.*?(_` + name + `=(.*?))(?:_[a-z]+=.*)?$`,
			},
		}
	}
	return tags
}

// fromADS says that a resource comes over the control plane's one stream. It has
// no deadline: Envoy would go on without the resource.
func fromADS() *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ConfigSourceSpecifier: &corev3.ConfigSource_Ads{Ads: &corev3.AggregatedConfigSource{}},
		ResourceApiVersion:    corev3.ApiVersion_V3,
		InitialFetchTimeout:   durationpb.New(0),
	}
}

package envoy

import (
	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpointv3 "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
)

// Resources is what a control plane serves to an Envoy that was started from
// [Config.ADSBootstrap]: one set for each type of xDS. It is consistent: each
// resource that another one names is there.
type Resources struct {
	Listeners  []*listenerv3.Listener              // LDS
	Routes     []*routev3.RouteConfiguration       // RDS
	Clusters   []*clusterv3.Cluster                // CDS
	Endpoints  []*endpointv3.ClusterLoadAssignment // EDS, for servers given by address
	Extensions []*corev3.TypedExtensionConfig      // ECDS: the filter with its module
	Secrets    []*tlsv3.Secret                     // SDS: the names of files with certificates
}

// Resources builds what [Config.Bootstrap] holds as xDS resources. Endpoints are
// resources of their own where a server is given by its address; a name stays in
// its cluster, for Envoy to resolve. The error joins a [FieldError] for each
// fault of c.
func (c Config) Resources() (*Resources, error) {
	ok, err := c.check(needTraffic)
	if err != nil {
		return nil, err
	}
	wasm, err := ok.wasmFilter()
	if err != nil {
		return nil, err
	}
	listener, err := ok.discoveredListener(wasm)
	if err != nil {
		return nil, err
	}
	clusters, err := ok.clusters()
	if err != nil {
		return nil, err
	}

	r := &Resources{
		Listeners:  []*listenerv3.Listener{listener},
		Routes:     []*routev3.RouteConfiguration{routes()},
		Clusters:   clusters,
		Extensions: []*corev3.TypedExtensionConfig{{Name: FilterName, TypedConfig: wasm}},
		Secrets:    ok.trafficSecrets(),
	}
	for _, cluster := range clusters {
		if cluster.GetType() != clusterv3.Cluster_STATIC {
			continue
		}
		r.Endpoints = append(r.Endpoints, cluster.GetLoadAssignment())
		cluster.LoadAssignment = nil
		cluster.ClusterDiscoveryType = &clusterv3.Cluster_Type{Type: clusterv3.Cluster_EDS}
		cluster.EdsClusterConfig = &clusterv3.Cluster_EdsClusterConfig{EdsConfig: fromADS()}
	}
	return r, nil
}

// clusters builds what requests are sent to: the service, then the upstream.
func (c *checked) clusters() ([]*clusterv3.Cluster, error) {
	service, err := c.serviceCluster()
	if err != nil {
		return nil, err
	}
	upstream, err := c.upstreamCluster()
	if err != nil {
		return nil, err
	}
	return []*clusterv3.Cluster{service, upstream}, nil
}

// Package envoy builds the configuration of an Envoy that runs Weir's filter.
//
// Everything starts from a [Config]. [Config.Bootstrap] is a complete static
// bootstrap for an Envoy that stands alone. [Config.Resources] is the same
// listener, routes and clusters cut into xDS resources, and
// [Config.ADSBootstrap] is the small bootstrap that fetches them. [YAML] prints
// any of it.
//
// The package only builds: it opens no file, looks up no name and reads no
// clock. Equal configurations give equal messages.
//
// # What every configuration keeps
//
//   - The filter comes first and the router last. A filter that fails takes its
//     request down with it (FAIL_RELOAD), it never lets one through.
//   - A body that the filter holds always fits: the HTTP/1 buffer and the HTTP/2
//     windows are larger than the filter's hold_bytes, or the configuration is
//     refused.
//   - The module is a local file or stands inline. Code that Envoy would have to
//     fetch can't be expressed, since Envoy accepts such an update at once and
//     then passes all traffic with no filter.
//   - Envoy is ready only when it has all of its configuration: no fetch has a
//     deadline after which a listener would go live without its filter.
//
// TLS, towards clients or towards the service, is not built yet, so there is no
// tls_inspector either.
package envoy

// The names in the configuration. Access logs, statistics and xDS status speak
// of these.
const (
	FilterName      = "weir"         // the filter, its plugin and its ECDS resource
	ListenerName    = "weir_gateway" // the listener; also the prefix of its HTTP statistics
	RouteName       = "weir_routes"  // the route configuration
	UpstreamCluster = "upstream"     // what the gateway protects
	ADSCluster      = "weir_ads"     // the control plane
)

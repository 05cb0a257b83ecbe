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
//   - The filter comes after those that were asked for ([Config].FiltersBefore),
//     and the router last. A filter that fails takes its
//     request down with it (FAIL_RELOAD), it never lets one through.
//
//   - A body that the filter holds always fits: the HTTP/1 buffer and the HTTP/2
//     windows are larger than the filter's hold_bytes, or the configuration is
//     refused.
//
//   - The module is a local file or stands inline. Code that Envoy would have to
//     fetch can't be expressed, since Envoy accepts such an update at once and
//     then passes all traffic with no filter.
//
//   - Envoy is ready only when it has all of its configuration: no fetch has a
//     deadline after which a listener would go live without its filter.
//
//   - A server that Envoy speaks TLS to is believed only if its certificate has
//     the name that was expected and is signed by an authority of the file given.
//
//   - Certificates that change on disk are taken up without a restart.
//
// # How certificates change
//
// Envoy reads a certificate's files again only if they are named by a resource of
// their own, a secret. A control plane serves these ([Resources].Secrets), and
// Envoy then looks at the files when one is moved into their folder, as a
// Kubernetes mount does or mv; a file that is overwritten in its place is not
// seen. A bootstrap names files with secrets ([Config.BootstrapSecrets],
// [Config.ADSBootstrapSecrets]), and Envoy reads all of them every five seconds.
// New files that are bad, or don't fit together, leave the last good ones in
// force. Connections that are open stay as they are.
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

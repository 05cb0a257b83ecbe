package main

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"strings"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/policy"
)

// gatewayFlags describe the Envoy that the control plane and the bootstraps configure.
type gatewayFlags struct {
	envoyTLSFlags
	gatewayTLSFlags

	Gateway      string `help:"Where Envoy takes requests: an IP address and a port, such as 0.0.0.0:10000 for every address of its machine." default:"127.0.0.1:10000"`
	Upstream     string `help:"The server that Envoy guards, as Envoy reaches it." default:"127.0.0.1:10080"`
	Module       string `help:"The compiled filter: a file on Envoy's machine, or with --inline-module on this one." default:"bin/filter.wasm" type:"path"`
	InlineModule bool   `help:"Read the module here and send its bytes to Envoy, rather than its path."`
	FilterDomain string `help:"Whose filter: block to use, if several policies have one."`
	HTTPFilters  string `name:"http-filters" help:"A file with HTTP filters that requests pass before Weir's, as a list in YAML, such as Envoy's jwt_authn." type:"path" placeholder:"FILE"`
}

// nodeFlags describe an Envoy's process.
type nodeFlags struct {
	EnvoyAdmin string `help:"Where Envoy's admin interface listens." default:"127.0.0.1:9901"`
}

// config builds the configuration of the Envoy's traffic. service is the address at
// which Envoy reaches the rate limit service.
func (f gatewayFlags) config(policies []*policy.Policy, service string) (envoy.Config, error) {
	filter, err := filterConfig(policies, f.FilterDomain)
	if err != nil {
		return envoy.Config{}, err
	}
	module := envoy.Module{Path: f.Module}
	if f.InlineModule {
		data, err := readModule(f.Module)
		if err != nil {
			return envoy.Config{}, err
		}
		module = envoy.Module{Inline: data}
	}
	serviceTLS, err := f.envoyTLS()
	if err != nil {
		return envoy.Config{}, err
	}
	gatewayTLS, err := f.gatewayTLS()
	if err != nil {
		return envoy.Config{}, err
	}
	before, err := readFilters(f.HTTPFilters)
	if err != nil {
		return envoy.Config{}, err
	}
	return envoy.Config{
		Gateway:       f.Gateway,
		GatewayTLS:    gatewayTLS,
		Upstream:      f.Upstream,
		Service:       service,
		ServiceTLS:    serviceTLS,
		FiltersBefore: before,
		FilterConfig:  filter,
		Module:        module,
	}, nil
}

// readFilters reads the filters before Weir's, none without a file.
func readFilters(path string) ([]*hcmv3.HttpFilter, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, fmt.Errorf("--http-filters: %w", err)
	}
	filters, err := envoy.ParseFilters(text)
	if err != nil {
		return nil, fmt.Errorf("--http-filters: %s: %w", path, err)
	}
	return filters, nil
}

// wasmHeader is how a module of WebAssembly begins: its name and version 1.
const wasmHeader = "\x00asm\x01\x00\x00\x00"

// readModule reads the compiled filter from this machine, and makes sure that it is one
// as far as its first bytes tell.
func readModule(path string) ([]byte, error) {
	data, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, fmt.Errorf("--module: %w (build it with `make filter`)", err)
	}
	if !strings.HasPrefix(string(data[:min(len(data), len(wasmHeader))]), wasmHeader) {
		return nil, fmt.Errorf("--module: %s is no WebAssembly module of version 1: it begins with %q, not %q",
			path, data[:min(len(data), len(wasmHeader))], wasmHeader)
	}
	return data, nil
}

// reachable turns an address to listen on into one to connect to from this machine:
// every address becomes the loopback.
func reachable(listen string) string {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return listen // the builder says what is wrong with it
	}
	if isEveryAddress(host) {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

// isEveryAddress reports whether listening on host means all addresses of this machine.
func isEveryAddress(host string) bool {
	ip := net.ParseIP(host)
	return host == "" || ip != nil && ip.IsUnspecified()
}

type bootstrapCommand struct {
	gatewayFlags
	nodeFlags

	Policies    []string `arg:"" optional:"" name:"policy" help:"Policy files or folders (${defaultPolicy} by default). Not read with --ads." default:"${defaultPolicy}"`
	ADS         bool     `name:"ads" help:"Name only the control plane, which then sends all else: of the other flags, only --xds, --envoy-admin, --envoy-tls-*, --tls-secrets, --node-id and --node-cluster are read."`
	Service     string   `help:"Where Envoy reaches the rate limit service. The default is right for an Envoy beside weir serve." default:"127.0.0.1:8081"`
	XDS         string   `name:"xds" help:"Where Envoy reaches the control plane. The default is right for an Envoy beside weir serve." default:"127.0.0.1:18000"`
	NodeID      string   `name:"node-id" help:"Envoy's name in the control plane and in logs." default:"weir-gateway"`
	NodeCluster string   `help:"The name of the group of Envoys that it belongs to." default:"weir"`
	TLSSecrets  string   `name:"tls-secrets" help:"A folder, here and on Envoy's machine, for files that name the certificates, so that Envoy reads those again when they change. Needed with --envoy-tls-ca and --gateway-tls-cert; the files are written." type:"path" placeholder:"DIR"`
}

// Run prints the bootstrap, and writes the files that it names.
func (c *bootstrapCommand) Run(t terminal) error {
	bootstrap, secrets, err := c.build()
	if err != nil {
		return flagErrors(err, fieldFlags{"Service": "--service", "ADS": "--xds", "SecretsDir": "--tls-secrets"}) //nolint:gosec // names of flags
	}
	text, err := envoy.YAML(bootstrap)
	if err != nil {
		return fmt.Errorf("printing the bootstrap: %w", err)
	}
	c.warnOfMissing(t.stderr)
	if err := writeSecrets(secrets); err != nil {
		return fmt.Errorf("--tls-secrets: %w", err)
	}
	_, err = t.stdout.Write(text)
	return err
}

func (c *bootstrapCommand) build() (*bootstrapv3.Bootstrap, []envoy.SecretFile, error) {
	tls, err := c.envoyTLS()
	if err != nil {
		return nil, nil, err
	}
	node := envoy.Config{
		NodeID: c.NodeID, NodeCluster: c.NodeCluster, Admin: c.EnvoyAdmin, ADS: c.XDS,
		ADSTLS: tls, SecretsDir: c.TLSSecrets,
	}
	if c.ADS {
		bootstrap, err := node.ADSBootstrap()
		if err != nil {
			return nil, nil, err
		}
		secrets, err := node.ADSBootstrapSecrets()
		return bootstrap, secrets, err
	}
	loaded, err := loadPolicies(c.Policies)
	if err != nil {
		return nil, nil, err
	}
	config, err := c.config(loaded.policies, c.Service)
	if err != nil {
		return nil, nil, err
	}
	config.NodeID, config.NodeCluster, config.Admin, config.SecretsDir = node.NodeID, node.NodeCluster, node.Admin, node.SecretsDir
	bootstrap, err := config.Bootstrap()
	if err != nil {
		return nil, nil, err
	}
	secrets, err := config.BootstrapSecrets()
	return bootstrap, secrets, err
}

// fieldFlags names the flag that sets a field of an envoy.Config.
type fieldFlags map[string]string

// flagErrors gives the faults of an envoy.Config the names of their flags. of has those
// that differ between commands.
func flagErrors(err error, of fieldFlags) error {
	flags := fieldFlags{
		"Gateway": "--gateway", "Admin": "--envoy-admin", "Upstream": "--upstream",
		"Module": "--module", "FilterConfig": "the filter: block", "NodeID": "--node-id",
		"FiltersBefore": "--http-filters",
	}
	maps.Copy(flags, of)
	var faults []error
	for _, err := range unjoin(err) {
		var fault *envoy.FieldError
		if errors.As(err, &fault) && flags[fault.Field] != "" {
			err = fmt.Errorf("%s: %w", flags[fault.Field], fault.Err)
		}
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

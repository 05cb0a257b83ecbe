package main

import (
	"errors"
	"fmt"
	"net"
	"os"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/policy"
)

// gatewayFlags describe the Envoy that the control plane and the bootstraps configure.
type gatewayFlags struct {
	Gateway      string `help:"Where Envoy takes requests." default:"127.0.0.1:10000"`
	EnvoyAdmin   string `help:"Where Envoy's admin interface listens." default:"127.0.0.1:9901"`
	Upstream     string `help:"The server that Envoy guards." default:"127.0.0.1:10080"`
	Module       string `help:"The compiled filter." default:"bin/filter.wasm" type:"path"`
	InlineModule bool   `help:"Send the module's bytes to Envoy, rather than its path."`
	FilterDomain string `help:"Whose filter: block to use, if several policies have one."`
}

// config builds the Envoy's configuration. service and ads are the addresses at which
// the service and the control plane listen.
func (f gatewayFlags) config(policies []*policy.Policy, service, ads string) (envoy.Config, error) {
	filter, err := filterConfig(policies, f.FilterDomain)
	if err != nil {
		return envoy.Config{}, err
	}
	module := envoy.Module{Path: f.Module}
	if _, err := os.Stat(f.Module); err != nil {
		return envoy.Config{}, fmt.Errorf("finding the filter's module: %w (build it with `make filter`, or name it with --module)", err)
	}
	if f.InlineModule {
		if module, err = inline(f.Module); err != nil {
			return envoy.Config{}, err
		}
	}
	return envoy.Config{
		NodeID:       "weir-gateway",
		Admin:        f.EnvoyAdmin,
		Gateway:      f.Gateway,
		Upstream:     f.Upstream,
		Service:      reachable(service),
		ADS:          reachable(ads),
		FilterConfig: filter,
		Module:       module,
	}, nil
}

func inline(path string) (envoy.Module, error) {
	data, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	if err != nil {
		return envoy.Module{}, fmt.Errorf("reading the filter's module: %w", err)
	}
	return envoy.Module{Inline: data}, nil
}

// reachable turns an address to listen on into one to connect to: every address of
// this machine becomes the loopback.
func reachable(listen string) string {
	host, port, err := net.SplitHostPort(listen)
	if err != nil {
		return listen // the builder says what is wrong with it
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

type bootstrapCommand struct {
	gatewayFlags

	Policies []string `arg:"" optional:"" name:"policy" help:"Policy files or folders." default:"${defaultPolicy}"`
	ADS      bool     `name:"ads" help:"Name only the control plane, which then sends all else."`
	Service  string   `help:"Where the rate limit service answers." default:"127.0.0.1:8081"`
	XDS      string   `name:"xds" help:"Where the control plane answers." default:"127.0.0.1:18000"`
}

// Run prints the bootstrap.
func (c *bootstrapCommand) Run(t terminal) error {
	_, policies, err := loadPolicies(c.Policies)
	if err != nil {
		return err
	}
	config, err := c.config(policies, c.Service, c.XDS)
	if err != nil {
		return err
	}
	build := config.Bootstrap
	if c.ADS {
		build = config.ADSBootstrap
	}
	bootstrap, err := build()
	if err != nil {
		return flagErrors(err)
	}
	text, err := envoy.YAML(bootstrap)
	if err != nil {
		return fmt.Errorf("printing the bootstrap: %w", err)
	}
	_, err = t.stdout.Write(text)
	return err
}

// flagErrors gives the faults of an envoy.Config the names of their flags.
func flagErrors(err error) error {
	flags := map[string]string{
		"Gateway": "--gateway", "Admin": "--envoy-admin", "Upstream": "--upstream",
		"Service": "--service", "ADS": "--xds", "Module": "--module", "FilterConfig": "filter:",
	}
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

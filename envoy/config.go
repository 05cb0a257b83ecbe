package envoy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
)

// A Config says what an Envoy is to do. Addresses are "host:port"; an IPv6 host
// stands in brackets.
type Config struct {
	// NodeID names this Envoy to the control plane and in logs. Defaults to
	// "weir"; ADSBootstrap requires it, since one control plane serves many.
	NodeID string

	// NodeCluster names the group of Envoys that this one belongs to. Defaults
	// to "weir".
	NodeCluster string

	// Admin is where Envoy's admin interface listens: an IP address, and a port
	// or 0 for any. Defaults to none.
	Admin string

	// Gateway is where the listener takes requests: an IP address, and a port or
	// 0 for any.
	Gateway string

	// Upstream is the server that the gateway protects. Its host is an IP address
	// or a name, which Envoy resolves.
	Upstream string

	// UpstreamProtocol is what Envoy speaks to Upstream. Defaults to HTTP1.
	UpstreamProtocol Protocol

	// Service is the rate limit service's gRPC address; the host as for Upstream.
	// The cluster gets the name that the filter's configuration calls.
	Service string

	// ADS is the control plane's gRPC address; the host as for Upstream. Only
	// ADSBootstrap reads it.
	ADS string

	// ServiceTLS and ADSTLS are how Envoy speaks TLS to Service and to ADS. nil is
	// plain text.
	ServiceTLS, ADSTLS *TLS

	// GatewayTLS is how the gateway speaks TLS to its clients. nil is plain text.
	GatewayTLS *GatewayTLS

	// SecretsDir is a folder, as Envoy sees it, that holds the files of
	// BootstrapSecrets or ADSBootstrapSecrets. Bootstraps need it with TLS;
	// Resources don't.
	SecretsDir string

	// FiltersBefore are HTTP filters that requests pass before they come to
	// Weir's, in this order. What these find out, such as the claims of a token,
	// the filter can use.
	FiltersBefore []*hcmv3.HttpFilter

	// FilterConfig is the filter's configuration, as package filter/config
	// defines it.
	FilterConfig []byte

	// Module is the compiled filter.
	Module Module

	// BufferBytes is how much of a body Envoy holds for one HTTP/1 connection or
	// one HTTP/2 stream. It must be above the filter's hold_bytes, and at least
	// 65,535 (a fixed bound of HTTP/2). Defaults to hold_bytes and 64 KiB more.
	BufferBytes int64

	// StreamIdleTimeout ends a request on which nothing moves, among them one that
	// waits for a filter whose VM has died. It must be at least four times the
	// filter's timeout, so that it never ends one that waits for the service.
	// Defaults to 5 minutes.
	StreamIdleTimeout time.Duration
}

// A Module is the compiled filter. Exactly one field is set.
type Module struct {
	Path   string // a file, as Envoy sees it
	Inline []byte // the module itself
}

// A Protocol is what Envoy speaks to an upstream.
type Protocol string

// The protocols of an upstream.
const (
	HTTP1        Protocol = "http1"
	HTTP2        Protocol = "http2"          // without TLS, so from the first byte on
	SameAsClient Protocol = "same-as-client" // HTTP/1.1 for one client, HTTP/2 for another
)

// A FieldError is a fault in one field of a [Config]. Errors of this package
// join one for each fault, so errors.As finds the first.
type FieldError struct {
	Field string // the field's name, such as "Gateway" or "Module"
	Err   error
}

// Error returns the field's name and its fault.
func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }

// Unwrap returns the fault.
func (e *FieldError) Unwrap() error { return e.Err }

const (
	defaultName              = "weir"
	defaultStreamIdleTimeout = 5 * time.Minute

	bufferHeadroom = 64 << 10
	minBuffer      = 65_535    // the least HTTP/2 window that Envoy takes
	maxBuffer      = 1<<31 - 1 // the largest HTTP/2 window there is
)

// checked is a Config whose fields were found valid and have been read.
type checked struct {
	Config
	admin, gateway         hostPort
	upstream, service, ads hostPort
	filter                 filterFacts
	secretsFrom            secretSource
}

// A need is a group of fields that a caller is going to use.
type need int

const (
	needTraffic    need = 1 << iota // all that requests pass through
	needADS                         // node, and the way to the control plane
	needSecretsDir                  // the secrets of these are named by files
)

// check reads the fields that needs name and applies the defaults. The error
// joins a FieldError for each fault.
func (c Config) check(needs need) (*checked, error) {
	var faults []error
	fault := func(field string, err error) {
		if err != nil {
			faults = append(faults, &FieldError{Field: field, Err: err})
		}
	}

	ok := &checked{Config: c}
	var err error
	if c.Admin != "" {
		ok.admin, err = parseBind(c.Admin)
		fault("Admin", err)
	}
	if needs&needADS != 0 {
		if c.NodeID == "" {
			fault("NodeID", errors.New("is missing: the control plane knows this Envoy by it"))
		}
		ok.ads, err = parseHostPort(c.ADS)
		fault("ADS", err)
		fault("ADSTLS", c.ADSTLS.check())
	}
	if ok.NodeID == "" {
		ok.NodeID = defaultName
	}
	if ok.NodeCluster == "" {
		ok.NodeCluster = defaultName
	}

	if needs&needTraffic != 0 {
		ok.gateway, err = parseBind(c.Gateway)
		fault("Gateway", err)
		if err == nil && ok.gateway == ok.admin && ok.gateway.port != 0 {
			fault("Gateway", fmt.Errorf("%s is the admin interface's address too", c.Gateway))
		}
		ok.upstream, err = parseHostPort(c.Upstream)
		fault("Upstream", err)
		ok.service, err = parseHostPort(c.Service)
		fault("Service", err)
		fault("ServiceTLS", c.ServiceTLS.check())
		fault("GatewayTLS", c.GatewayTLS.check())
		fault("FiltersBefore", checkFilters(c.FiltersBefore))
		fault("UpstreamProtocol", ok.checkProtocol())
		fault("Module", c.Module.check())

		ok.filter, err = readFilter(c.FilterConfig)
		fault("FilterConfig", err)
		if err == nil {
			fault("BufferBytes", ok.checkBuffer())
			fault("StreamIdleTimeout", ok.checkStreamIdle())
		}
	}
	fault("SecretsDir", ok.checkSecretsDir(needs))
	if len(faults) > 0 {
		return nil, errors.Join(faults...)
	}
	ok.secretsFrom = func(string) *corev3.ConfigSource { return fromADS() }
	if needs&needSecretsDir != 0 {
		ok.secretsFrom = ok.fromFile
	}
	return ok, nil
}

func (c *checked) checkProtocol() error {
	switch c.UpstreamProtocol {
	case "":
		c.UpstreamProtocol = HTTP1
	case HTTP1, HTTP2, SameAsClient:
	default:
		return fmt.Errorf("%q is not one of %q, %q, %q", c.UpstreamProtocol, HTTP1, HTTP2, SameAsClient)
	}
	return nil
}

// checkBuffer makes sure that a body which the filter holds to its end can reach
// that end: at or below hold_bytes Envoy would stop reading first, and the
// request would wait for its idle timeout.
func (c *checked) checkBuffer() error {
	switch {
	case c.BufferBytes == 0:
		c.BufferBytes = c.filter.holdBytes + bufferHeadroom
	case c.BufferBytes <= c.filter.holdBytes:
		return fmt.Errorf("%d is not above the filter's hold_bytes, %d", c.BufferBytes, c.filter.holdBytes)
	case c.BufferBytes < minBuffer || c.BufferBytes > maxBuffer:
		return fmt.Errorf("%d is not within %d and %d", c.BufferBytes, minBuffer, maxBuffer)
	}
	return nil
}

func (c *checked) checkStreamIdle() error {
	least := 4 * c.filter.timeout
	switch {
	case c.StreamIdleTimeout == 0:
		c.StreamIdleTimeout = max(defaultStreamIdleTimeout, least)
	case c.StreamIdleTimeout < least:
		return fmt.Errorf("%v is under four times the filter's timeout, %v", c.StreamIdleTimeout, c.filter.timeout)
	}
	return nil
}

func (m Module) check() error {
	switch {
	case m.Path == "" && len(m.Inline) == 0:
		return errors.New("needs a Path or the module Inline")
	case m.Path != "" && len(m.Inline) > 0:
		return errors.New("has a Path and is Inline: one of them must go")
	}
	return nil
}

// A hostPort is a checked address.
type hostPort struct {
	host string
	port uint32
	isIP bool
}

// parseHostPort reads the address of a server.
func parseHostPort(addr string) (hostPort, error) {
	hp, err := parseAny(addr)
	if err != nil {
		return hostPort{}, err
	}
	if hp.host == "" {
		return hostPort{}, fmt.Errorf("%q has no host", addr)
	}
	if hp.port == 0 {
		return hostPort{}, fmt.Errorf("%q has port 0", addr)
	}
	return hp, nil
}

// parseBind reads an address to listen on. Envoy takes no names there.
func parseBind(addr string) (hostPort, error) {
	hp, err := parseAny(addr)
	if err != nil {
		return hostPort{}, err
	}
	if !hp.isIP {
		return hostPort{}, fmt.Errorf("%q needs an IP address as its host, such as 127.0.0.1 or 0.0.0.0", addr)
	}
	return hp, nil
}

func parseAny(addr string) (hostPort, error) {
	if addr == "" {
		return hostPort{}, errors.New(`is missing: want "host:port"`)
	}
	host, digits, err := net.SplitHostPort(addr)
	if err != nil {
		return hostPort{}, fmt.Errorf(`%q is not "host:port": %w`, addr, err)
	}
	port, err := strconv.ParseUint(digits, 10, 16)
	if err != nil {
		return hostPort{}, fmt.Errorf("%q has no port number from 0 to 65535", addr)
	}
	_, err = netip.ParseAddr(host)
	return hostPort{host: host, port: uint32(port), isIP: err == nil}, nil
}

package envoy

import (
	"errors"
	"net/netip"
	"net/url"
	"path"
	"time"

	clusterv3 "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	listenerv3 "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	tlsinspectorv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/listener/tls_inspector/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	matcherv3 "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// A TLS says how Envoy speaks TLS to a server. Paths are as Envoy sees them, of
// files in PEM.
type TLS struct {
	// CA is a file with the authorities that may have signed the server's
	// certificate.
	CA string

	// Certificate and Key are files with what Envoy shows of itself: the
	// certificate, with those that vouch for it, and its key. Both or neither.
	Certificate, Key string

	// ServerName is the name that the server's certificate must have among its
	// subject alternative names: a DNS name, which Envoy asks for too (SNI), an IP
	// address, or a URI such as a SPIFFE ID. Defaults to the host of the server's
	// address.
	ServerName string
}

// A GatewayTLS says how the gateway speaks TLS to its clients. Paths are as in
// [TLS].
type GatewayTLS struct {
	// Certificate and Key are files with the gateway's certificate, with those
	// that vouch for it, and its key.
	Certificate, Key string

	// ClientCA is a file with the authorities that sign the certificates of
	// clients. A client must then show one. Defaults to none: clients are not
	// asked.
	ClientCA string

	// ClientOptional lets clients in that show no certificate. One that is shown
	// must be good all the same.
	ClientOptional bool
}

const (
	// pollInterval is how often Envoy reads the files that the secret files name.
	// A poll sees every change, on every kind of file system.
	pollInterval = 5 * time.Second

	tlsSocket    = "envoy.transport_sockets.tls"
	tlsInspector = "envoy.filters.listener.tls_inspector"
)

// The names of secrets, which statistics (sds.NAME.…) and xDS status speak of.
const (
	serviceCA          = "weir_service_ca"
	serviceCertificate = "weir_service_certificate"
	adsCA              = "weir_ads_ca"
	adsCertificate     = "weir_ads_certificate"
	gatewayClientCA    = "weir_gateway_client_ca"
	gatewayCertificate = "weir_gateway_certificate"
)

// A SecretFile is a file that a bootstrap needs beside it. It holds no secret: it
// names the files that do. Envoy reads certificates again only if they are named
// by a file of their own.
type SecretFile struct {
	Path    string // below Config.SecretsDir
	Content []byte // YAML
}

// BootstrapSecrets builds the files that [Config.Bootstrap] names, none without
// TLS. They must be there before Envoy starts. The error is that of Bootstrap.
func (c Config) BootstrapSecrets() ([]SecretFile, error) {
	ok, err := c.check(needTraffic | needSecretsDir)
	if err != nil {
		return nil, err
	}
	return ok.secretFiles(ok.trafficSecrets())
}

// ADSBootstrapSecrets builds the files that [Config.ADSBootstrap] names, as
// [Config.BootstrapSecrets] does.
func (c Config) ADSBootstrapSecrets() ([]SecretFile, error) {
	ok, err := c.check(needADS | needSecretsDir)
	if err != nil {
		return nil, err
	}
	return ok.secretFiles(ok.ADSTLS.secrets(adsCA, adsCertificate))
}

func (c *checked) secretFiles(secrets []*tlsv3.Secret) ([]SecretFile, error) {
	files := make([]SecretFile, len(secrets))
	for i, secret := range secrets {
		packed, err := pack(secret)
		if err != nil {
			return nil, err
		}
		text, err := YAML(&discoveryv3.DiscoveryResponse{Resources: []*anypb.Any{packed}})
		if err != nil {
			return nil, err
		}
		files[i] = SecretFile{Path: c.secretPath(secret.GetName()), Content: text}
	}
	return files, nil
}

func (c *checked) secretPath(name string) string {
	return path.Join(c.SecretsDir, name+".yaml")
}

// trafficSecrets are those of all that requests pass through.
func (c *checked) trafficSecrets() []*tlsv3.Secret {
	secrets := c.ServiceTLS.secrets(serviceCA, serviceCertificate)
	if c.GatewayTLS != nil {
		secrets = append(secrets, pair(gatewayCertificate, c.GatewayTLS.Certificate, c.GatewayTLS.Key))
		if c.GatewayTLS.ClientCA != "" {
			secrets = append(secrets, authorities(gatewayClientCA, c.GatewayTLS.ClientCA))
		}
	}
	return secrets
}

func (t *TLS) secrets(ca, certificate string) []*tlsv3.Secret {
	if t == nil {
		return nil
	}
	secrets := []*tlsv3.Secret{authorities(ca, t.CA)}
	if t.Certificate != "" {
		secrets = append(secrets, pair(certificate, t.Certificate, t.Key))
	}
	return secrets
}

func authorities(name, file string) *tlsv3.Secret {
	return &tlsv3.Secret{Name: name, Type: &tlsv3.Secret_ValidationContext{
		ValidationContext: &tlsv3.CertificateValidationContext{TrustedCa: inFile(file)},
	}}
}

func pair(name, certificate, key string) *tlsv3.Secret {
	return &tlsv3.Secret{Name: name, Type: &tlsv3.Secret_TlsCertificate{
		TlsCertificate: &tlsv3.TlsCertificate{CertificateChain: inFile(certificate), PrivateKey: inFile(key)},
	}}
}

func inFile(name string) *corev3.DataSource {
	return &corev3.DataSource{Specifier: &corev3.DataSource_Filename{Filename: name}}
}

// fromFile says that a secret comes from its file in SecretsDir.
func (c *checked) fromFile(secret string) *corev3.ConfigSource {
	return &corev3.ConfigSource{
		ConfigSourceSpecifier: &corev3.ConfigSource_PathConfigSource{PathConfigSource: &corev3.PathConfigSource{
			Path:         c.secretPath(secret),
			PollInterval: durationpb.New(pollInterval),
		}},
		ResourceApiVersion:  corev3.ApiVersion_V3,
		InitialFetchTimeout: durationpb.New(0),
	}
}

// A secretSource says where Envoy gets a secret.
type secretSource func(secret string) *corev3.ConfigSource

func (s secretSource) config(secret string) *tlsv3.SdsSecretConfig {
	return &tlsv3.SdsSecretConfig{Name: secret, SdsConfig: s(secret)}
}

// secure has a cluster of gRPC servers speak TLS, if t is not nil. host is the
// servers'.
func (t *TLS) secure(cluster *clusterv3.Cluster, host string, from secretSource, ca, certificate string) error {
	if t == nil {
		return nil
	}
	name := t.ServerName
	if name == "" {
		name = host
	}
	kind := nameKind(name)
	context := &tlsv3.UpstreamTlsContext{
		CommonTlsContext: &tlsv3.CommonTlsContext{
			AlpnProtocols: []string{"h2"},
			// The name is part of the configuration; only the files change.
			ValidationContextType: &tlsv3.CommonTlsContext_CombinedValidationContext{
				CombinedValidationContext: &tlsv3.CommonTlsContext_CombinedCertificateValidationContext{
					DefaultValidationContext: &tlsv3.CertificateValidationContext{
						MatchTypedSubjectAltNames: []*tlsv3.SubjectAltNameMatcher{{
							SanType: kind,
							Matcher: &matcherv3.StringMatcher{MatchPattern: &matcherv3.StringMatcher_Exact{Exact: name}},
						}},
					},
					ValidationContextSdsSecretConfig: from.config(ca),
				},
			},
		},
	}
	if kind == tlsv3.SubjectAltNameMatcher_DNS {
		context.Sni = name
	}
	if t.Certificate != "" {
		context.CommonTlsContext.TlsCertificateSdsSecretConfigs = []*tlsv3.SdsSecretConfig{from.config(certificate)}
	}
	packed, err := pack(context)
	if err != nil {
		return err
	}
	cluster.TransportSocket = socket(packed)
	return nil
}

func socket(packed *anypb.Any) *corev3.TransportSocket {
	return &corev3.TransportSocket{
		Name:       tlsSocket,
		ConfigType: &corev3.TransportSocket_TypedConfig{TypedConfig: packed},
	}
}

// secure has a listener speak TLS, if t is not nil.
func (t *GatewayTLS) secure(listener *listenerv3.Listener, from secretSource) error {
	if t == nil {
		return nil
	}
	common := &tlsv3.CommonTlsContext{
		AlpnProtocols:                  []string{"h2", "http/1.1"},
		TlsCertificateSdsSecretConfigs: []*tlsv3.SdsSecretConfig{from.config(gatewayCertificate)},
	}
	if t.ClientCA != "" {
		common.ValidationContextType = &tlsv3.CommonTlsContext_ValidationContextSdsSecretConfig{
			ValidationContextSdsSecretConfig: from.config(gatewayClientCA),
		}
	}
	context, err := pack(&tlsv3.DownstreamTlsContext{
		CommonTlsContext:         common,
		RequireClientCertificate: wrapperspb.Bool(t.ClientCA != "" && !t.ClientOptional),
	})
	if err != nil {
		return err
	}
	// Without it the filter would not be told the name that a client asks for.
	inspector, err := pack(&tlsinspectorv3.TlsInspector{})
	if err != nil {
		return err
	}
	listener.ListenerFilters = []*listenerv3.ListenerFilter{{
		Name:       tlsInspector,
		ConfigType: &listenerv3.ListenerFilter_TypedConfig{TypedConfig: inspector},
	}}
	for _, chain := range listener.GetFilterChains() {
		chain.TransportSocket = socket(context)
	}
	return nil
}

// nameKind tells what kind of name a server's certificate must have.
func nameKind(name string) tlsv3.SubjectAltNameMatcher_SanType {
	if _, err := netip.ParseAddr(name); err == nil {
		return tlsv3.SubjectAltNameMatcher_IP_ADDRESS
	}
	if u, err := url.Parse(name); err == nil && u.Scheme != "" {
		return tlsv3.SubjectAltNameMatcher_URI
	}
	return tlsv3.SubjectAltNameMatcher_DNS
}

func (t *TLS) check() error {
	if t == nil {
		return nil
	}
	var faults []error
	if t.CA == "" {
		faults = append(faults, errors.New("CA is missing: whoever answered would be believed"))
	}
	if (t.Certificate == "") != (t.Key == "") {
		faults = append(faults, errors.New("one of Certificate and Key needs the other"))
	}
	return errors.Join(faults...)
}

func (t *GatewayTLS) check() error {
	if t == nil {
		return nil
	}
	var faults []error
	if t.Certificate == "" || t.Key == "" {
		faults = append(faults, errors.New("needs a Certificate and a Key"))
	}
	if t.ClientOptional && t.ClientCA == "" {
		faults = append(faults, errors.New("ClientOptional needs a ClientCA: clients are not asked for certificates"))
	}
	return errors.Join(faults...)
}

// checkSecretsDir makes sure that there is a place for the secret files.
func (c *checked) checkSecretsDir(needs need) error {
	wanted := needs&needADS != 0 && c.ADSTLS != nil ||
		needs&needTraffic != 0 && (c.ServiceTLS != nil || c.GatewayTLS != nil)
	if needs&needSecretsDir != 0 && wanted && c.SecretsDir == "" {
		return errors.New("is missing: TLS needs a folder for files that name the certificates")
	}
	return nil
}

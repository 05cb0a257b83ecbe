package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/weir-dev/weir/envoy"
)

// envoyTLSFlags say how Envoy speaks TLS to the service and to the control plane, which
// show one certificate. The files are on Envoy's machine.
type envoyTLSFlags struct {
	EnvoyTLSCA   string `name:"envoy-tls-ca" help:"Who signs the certificate of the rate limit service and of the control plane, to which Envoy then speaks TLS: a file on Envoy's machine, as the others for TLS. Read again when it changes, as are they." type:"path" placeholder:"FILE"`
	EnvoyTLSCert string `name:"envoy-tls-cert" help:"The certificate that Envoy shows them, with those that vouch for it." type:"path" placeholder:"FILE"`
	EnvoyTLSKey  string `name:"envoy-tls-key" help:"That certificate's key." type:"path" placeholder:"FILE"`
	EnvoyTLSName string `name:"envoy-tls-name" help:"The DNS name, IP address or URI that their certificate must have. By default the host of --service or --xds." placeholder:"NAME"`
}

// gatewayTLSFlags say how Envoy speaks TLS to its clients. The files are on Envoy's
// machine.
type gatewayTLSFlags struct {
	GatewayTLSCert           string `name:"gateway-tls-cert" help:"The certificate that Envoy shows its clients, with those that vouch for it." type:"path" placeholder:"FILE"`
	GatewayTLSKey            string `name:"gateway-tls-key" help:"That certificate's key." type:"path" placeholder:"FILE"`
	GatewayTLSClientCA       string `name:"gateway-tls-client-ca" help:"Who signs the certificates of Envoy's clients, which are then required." type:"path" placeholder:"FILE"`
	GatewayTLSClientOptional bool   `name:"gateway-tls-client-optional" help:"Let clients in that show no certificate, too."`
}

// envoyTLS is nil without flags.
func (f envoyTLSFlags) envoyTLS() (*envoy.TLS, error) {
	if (f.EnvoyTLSCert == "") != (f.EnvoyTLSKey == "") {
		return nil, &usageError{err: errors.New("--envoy-tls-cert, --envoy-tls-key: one needs the other")}
	}
	if f.EnvoyTLSCA == "" {
		if f.EnvoyTLSCert != "" || f.EnvoyTLSName != "" {
			return nil, &usageError{err: errors.New("--envoy-tls-cert, --envoy-tls-key, --envoy-tls-name: need --envoy-tls-ca")}
		}
		return nil, nil //nolint:nilnil // plain text
	}
	return &envoy.TLS{CA: f.EnvoyTLSCA, Certificate: f.EnvoyTLSCert, Key: f.EnvoyTLSKey, ServerName: f.EnvoyTLSName}, nil
}

// gatewayTLS is nil without flags.
func (f gatewayTLSFlags) gatewayTLS() (*envoy.GatewayTLS, error) {
	switch {
	case (f.GatewayTLSCert == "") != (f.GatewayTLSKey == ""):
		return nil, &usageError{err: errors.New("--gateway-tls-cert, --gateway-tls-key: one needs the other")}
	case f.GatewayTLSClientCA != "" && f.GatewayTLSCert == "":
		return nil, &usageError{err: errors.New("--gateway-tls-client-ca: needs --gateway-tls-cert and --gateway-tls-key")}
	case f.GatewayTLSClientOptional && f.GatewayTLSClientCA == "":
		return nil, &usageError{err: errors.New("--gateway-tls-client-optional: needs --gateway-tls-client-ca")}
	case f.GatewayTLSCert == "":
		return nil, nil //nolint:nilnil // plain text
	}
	return &envoy.GatewayTLS{
		Certificate: f.GatewayTLSCert, Key: f.GatewayTLSKey,
		ClientCA: f.GatewayTLSClientCA, ClientOptional: f.GatewayTLSClientOptional,
	}, nil
}

// missing returns a fault for each of Envoy's files for TLS that is not on this machine.
func (f gatewayFlags) missing() []error {
	var faults []error
	for _, file := range []struct{ flag, path string }{
		{"--envoy-tls-ca", f.EnvoyTLSCA},
		{"--envoy-tls-cert", f.EnvoyTLSCert},
		{"--envoy-tls-key", f.EnvoyTLSKey},
		{"--gateway-tls-cert", f.GatewayTLSCert},
		{"--gateway-tls-key", f.GatewayTLSKey},
		{"--gateway-tls-client-ca", f.GatewayTLSClientCA},
	} {
		if file.path == "" {
			continue
		}
		if _, err := os.Stat(file.path); err != nil {
			faults = append(faults, fmt.Errorf("%s: %w", file.flag, err))
		}
	}
	return faults
}

// warnOfMissing tells of files for TLS that are not here. They may well be where Envoy is.
func (f gatewayFlags) warnOfMissing(w io.Writer) {
	for _, fault := range f.missing() {
		fmt.Fprintf(w, "weir: warning: %v; without it, Envoy's machine would serve nothing\n", fault)
	}
}

// writeSecrets writes the files that name certificates. Each is exchanged as a whole,
// since an Envoy may be reading it.
func writeSecrets(files []envoy.SecretFile) error {
	for _, file := range files {
		dir := filepath.Dir(file.Path)
		if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // Envoy may be another user; there is no secret in it
			return err
		}
		next := file.Path + ".new"
		if err := os.WriteFile(next, file.Content, 0o644); err != nil { //nolint:gosec // as above
			return err
		}
		if err := os.Rename(next, file.Path); err != nil {
			return err
		}
	}
	return nil
}

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/weir-dev/weir/policy"
)

// accessFlags say how clients reach the service and the control plane, and what they may ask.
type accessFlags struct {
	Clients     string `help:"A file that says who may ask what. By default all may ask for every domain, without refunds and overrides." type:"path" placeholder:"FILE"`
	TLSCert     string `name:"tls-cert" help:"The certificate of all ports, with those that vouch for it. Read again when it changes, as are the others." type:"path" placeholder:"FILE"`
	TLSKey      string `name:"tls-key" help:"The certificate's key." type:"path" placeholder:"FILE"`
	TLSClientCA string `name:"tls-client-ca" help:"Who signs the certificates of clients, which are then required." type:"path" placeholder:"FILE"`
}

// load reads the files; what no flag names is nil.
func (f accessFlags) load(logger *slog.Logger) (*policy.Clients, *certificates, error) {
	if (f.TLSCert == "") != (f.TLSKey == "") {
		return nil, nil, &usageError{err: errors.New("--tls-cert, --tls-key: one needs the other")}
	}
	if f.TLSClientCA != "" && f.TLSCert == "" {
		return nil, nil, &usageError{err: errors.New("--tls-client-ca: needs --tls-cert and --tls-key")}
	}
	var clients *policy.Clients
	if f.Clients != "" {
		text, err := os.ReadFile(f.Clients)
		if err != nil {
			return nil, nil, fmt.Errorf("--clients: %w", err)
		}
		if clients, err = policy.ParseClients(f.Clients, text); err != nil {
			return nil, nil, err
		}
	}
	if clients.NamesCertificates() && f.TLSClientCA == "" {
		return nil, nil, &usageError{err: fmt.Errorf("--clients: %s names certificates (san), which needs --tls-client-ca to verify them", f.Clients)}
	}
	if f.TLSCert == "" {
		return clients, nil, nil
	}
	c := &certificates{files: f, logger: logger}
	err := c.reload(time.Now())
	return clients, c, err
}

// certificates are those of all ports, and read again when their files change.
// The files are read rather than watched: that also sees a change behind a symbolic link,
// as in a mounted Kubernetes secret, and on file systems that notify nobody.
type certificates struct {
	files    accessFlags
	logger   *slog.Logger
	interval time.Duration // between looks at the files; reloadInterval if it is 0
	current  atomic.Pointer[keyMaterial]

	tried [3][]byte // what the files held when last looked at
	fault string    // what was wrong with that
}

// keyMaterial is what a handshake needs.
type keyMaterial struct {
	certificate tls.Certificate
	clients     *x509.CertPool // nil when clients need no certificate
}

const reloadInterval = 5 * time.Second

// run looks at the files until ctx ends. What is wrong with new ones is logged, and the
// last good ones stay.
func (c *certificates) run(ctx context.Context) error {
	interval := c.interval
	if interval == 0 {
		interval = reloadInterval
	}
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		before, fault := c.current.Load(), c.fault
		err := c.reload(time.Now())
		switch {
		case err != nil && err.Error() != fault:
			c.logger.LogAttrs(ctx, slog.LevelError, "the certificates cannot be read again, so the last ones stay", slog.Any("err", err))
		case err == nil && c.current.Load() != before:
			c.logger.LogAttrs(ctx, slog.LevelInfo, "the certificates were read again",
				slog.Time("expires", c.current.Load().certificate.Leaf.NotAfter))
		}
	}
}

// reload reads the files, and puts what they hold in force if it has changed and is good.
func (c *certificates) reload(now time.Time) (err error) {
	defer func() {
		c.fault = ""
		if err != nil {
			c.fault = err.Error()
		}
	}()
	contents, err := c.files.read()
	if err != nil {
		return err
	}
	if c.fault == "" && c.current.Load() != nil && same(contents, c.tried) {
		return nil
	}
	// Files that are exchanged while they are read give a new certificate with an old key.
	// So what is new counts once it reads the same again.
	for range 3 {
		again, err := c.files.read()
		if err != nil {
			return err
		}
		if same(contents, again) {
			break
		}
		contents = again
	}
	c.tried = contents
	m := &keyMaterial{}
	if m.certificate, err = tls.X509KeyPair(contents[0], contents[1]); err != nil {
		return fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	if expires := m.certificate.Leaf.NotAfter; expires.Before(now) {
		return fmt.Errorf("--tls-cert: %s expired on %s", c.files.TLSCert, expires.Format(time.RFC3339))
	}
	if c.files.TLSClientCA != "" {
		m.clients = x509.NewCertPool()
		if !m.clients.AppendCertsFromPEM(contents[2]) {
			return fmt.Errorf("--tls-client-ca: %s has no certificate in PEM", c.files.TLSClientCA)
		}
	}
	c.current.Store(m)
	return nil
}

// read returns what the files for TLS hold, nil for those that no flag names.
func (f accessFlags) read() (contents [3][]byte, err error) {
	flags := [3]string{"--tls-cert", "--tls-key", "--tls-client-ca"}
	for i, path := range [3]string{f.TLSCert, f.TLSKey, f.TLSClientCA} {
		if path == "" {
			continue
		}
		if contents[i], err = os.ReadFile(path); err != nil { //nolint:gosec // the operator names the file
			return contents, fmt.Errorf("%s: %w", flags[i], err)
		}
	}
	return contents, nil
}

func same(a, b [3][]byte) bool {
	for i := range a {
		if !bytes.Equal(a[i], b[i]) {
			return false
		}
	}
	return true
}

// config returns a configuration whose handshakes use what is in force. A certificate of
// the client is treated as auth says where there is an authority to verify it.
func (c *certificates) config(auth tls.ClientAuthType, protocols ...string) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: protocols,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			m := c.current.Load()
			config := &tls.Config{
				MinVersion:   tls.VersionTLS12,
				NextProtos:   protocols,
				Certificates: []tls.Certificate{m.certificate},
				// A session that goes on would keep what was verified before a reload.
				SessionTicketsDisabled: true,
			}
			if m.clients != nil {
				config.ClientAuth, config.ClientCAs = auth, m.clients
			}
			return config, nil
		},
	}
}

// grpcOption has a gRPC server speak TLS.
func (c *certificates) grpcOption() grpc.ServerOption {
	return grpc.Creds(credentials.NewTLS(c.config(tls.RequireAndVerifyClientCert, "h2")))
}

// over returns the listener, speaking TLS if there are certificates.
func (c *certificates) over(listener net.Listener) net.Listener {
	if c == nil {
		return listener
	}
	return tls.NewListener(listener, c.config(tls.VerifyClientCertIfGiven, "h2", "http/1.1"))
}

// guard requires a certificate of clients where there is an authority to verify it, but
// for the health check: who asks for that often has none, as Kubernetes.
func (c *certificates) guard(handler http.Handler) http.Handler {
	if c == nil {
		return handler
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if c.current.Load().clients != nil && len(r.TLS.VerifiedChains) == 0 && r.URL.Path != "/healthcheck" {
			http.Error(w, "a client certificate is required", http.StatusForbidden)
			return
		}
		handler.ServeHTTP(w, r)
	})
}

// Bounds of what the service's HTTP side takes.
const (
	httpReadTimeout = 30 * time.Second // a request with its body
	httpMaxHeader   = 64 << 10         // bytes
)

// httpServer returns the server of the service's HTTP side.
func httpServer(handler http.Handler) *http.Server {
	return &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: httpHeaderTimeout,
		ReadTimeout:       httpReadTimeout,
		WriteTimeout:      httpWriteTimeout,
		IdleTimeout:       httpIdleTimeout,
		MaxHeaderBytes:    httpMaxHeader,
	}
}

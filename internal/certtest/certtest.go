// Package certtest signs certificates for tests. An [Authority] issues them, for servers
// on the loopback and for clients, valid for a day unless asked otherwise.
package certtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"testing"
	"time"
)

// An Authority signs certificates.
type Authority struct {
	PEM []byte // its own certificate

	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
}

// NewAuthority returns an authority that nobody trusts but who is told to.
func NewAuthority(tb testing.TB, name string) *Authority {
	tb.Helper()
	key := newKey(tb)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: Tomorrow(),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a := &Authority{certificate: template, key: key}
	a.certificate, a.PEM = a.sign(tb, template, &key.PublicKey)
	return a
}

// Tomorrow is when certificates expire as a rule.
func Tomorrow() time.Time { return time.Now().Add(24 * time.Hour) }

func newKey(tb testing.TB) *ecdsa.PrivateKey {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return key
}

func (a *Authority) sign(tb testing.TB, template *x509.Certificate, key *ecdsa.PublicKey) (*x509.Certificate, []byte) {
	tb.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, key, a.key)
	if err != nil {
		tb.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		tb.Fatal(err)
	}
	return certificate, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// Issue returns a certificate and its key, in PEM, for 127.0.0.1 and the names, each a URI or
// a DNS name.
func (a *Authority) Issue(tb testing.TB, expires time.Time, names ...string) (certificate, key []byte) {
	tb.Helper()
	return a.IssueTo(tb, pkix.Name{}, expires, names...)
}

// IssueTo is Issue, to a subject.
func (a *Authority) IssueTo(tb testing.TB, subject pkix.Name, expires time.Time, names ...string) (certificate, key []byte) {
	tb.Helper()
	template := &x509.Certificate{
		Subject:      subject,
		SerialNumber: big.NewInt(time.Now().UnixNano()), NotBefore: time.Now().Add(-48 * time.Hour), NotAfter: expires,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	for _, name := range names {
		if uri, err := url.Parse(name); err == nil && uri.Scheme != "" {
			template.URIs = append(template.URIs, uri)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	private := newKey(tb)
	_, certificate = a.sign(tb, template, &private.PublicKey)
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		tb.Fatal(err)
	}
	return certificate, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// Client returns a client's side of TLS that trusts the authority. If by is not nil, it
// shows a certificate of that one for the names, whatever the server asks for.
func (a *Authority) Client(tb testing.TB, by *Authority, names ...string) *tls.Config {
	tb.Helper()
	if by == nil {
		return a.trusted()
	}
	return a.ClientOf(tb, by, pkix.Name{}, names...)
}

// ClientOf is Client with a certificate to a subject.
func (a *Authority) ClientOf(tb testing.TB, by *Authority, subject pkix.Name, names ...string) *tls.Config {
	tb.Helper()
	pair, err := tls.X509KeyPair(by.IssueTo(tb, subject, Tomorrow(), names...))
	if err != nil {
		tb.Fatal(err)
	}
	config := a.trusted()
	config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	return config
}

func (a *Authority) trusted() *tls.Config {
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS12}
	config.RootCAs.AddCert(a.certificate)
	return config
}

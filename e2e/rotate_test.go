package e2e_test

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/internal/certtest"
)

// A relay passes bytes on to a server, and drops its connections when it is asked to: so
// that its clients connect anew, while neither they nor the server restart.
type relay struct {
	address string

	mu    sync.Mutex
	conns map[net.Conn]bool
}

func startRelay(t *testing.T, to string) *relay {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &relay{address: listener.Addr().String(), conns: map[net.Conn]bool{}}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			if err != nil {
				_ = client.Close()
				continue
			}
			r.keep(client, server)
			for _, pair := range [][2]net.Conn{{client, server}, {server, client}} {
				running.Go(func() {
					_, _ = io.Copy(pair[0], pair[1])
					_, _ = pair[0].Close(), pair[1].Close()
				})
			}
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		r.drop()
		running.Wait()
	})
	return r
}

func (r *relay) keep(conns ...net.Conn) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range conns {
		r.conns[c] = true
	}
}

func (r *relay) drop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		_ = c.Close()
	}
	clear(r.conns)
}

// All certificates and authorities of both sides are exchanged on disk, under traffic of
// which no request fails; neither side restarts.
func TestCertificatesRotate(t *testing.T) {
	t.Parallel()
	for _, mode := range []struct {
		name      string
		bootstrap bool
		// put exchanges a file. Envoy sees a move where the control plane names its
		// files, and any change where a file of its own does.
		put func(*certFolder, string, []byte) string
	}{
		{"control plane", false, (*certFolder).move},
		{"complete bootstrap", true, (*certFolder).write},
	} {
		t.Run(mode.name, func(t *testing.T) {
			old, young := certtest.NewAuthority(t, "old"), certtest.NewAuthority(t, "young")
			files := newCertFolder(t)
			var relays []*relay
			m := startSecure(t, old, files, true, func(c *meshConfig) {
				c.bootstrap = mode.bootstrap
				c.relay = func(address string) string {
					r := startRelay(t, address)
					relays = append(relays, r)
					return r.address
				}
			})
			traffic := startTraffic(m)
			defer traffic.stop()

			reconnect := func() {
				t.Helper()
				handshakes := m.stat(t, "cluster.weir_ratelimit.ssl.handshake")
				traffic.pause(func() {
					for _, r := range relays {
						r.drop()
					}
					m.wait(t, "the connections are closed", func() bool {
						return m.stat(t, "cluster.weir_ratelimit.upstream_cx_active") == 0
					})
				})
				m.wait(t, "there are new ones", func() bool {
					return m.stat(t, "cluster.weir_ratelimit.ssl.handshake") > handshakes
				})
			}

			// First both sides trust both authorities, then each shows a new certificate,
			// then the old authority goes.
			both := append(append([]byte(nil), young.PEM...), old.PEM...)
			updates, reads := m.tlsUpdates(t), m.reads()
			mode.put(files, "ca.crt", both)
			files.move("clients.crt", both)
			m.wait(t, "both authorities are known", func() bool {
				return m.tlsUpdates(t) > updates && m.reads() > reads
			})

			reads = m.reads()
			certificate, key := young.Issue(t, certtest.Tomorrow())
			files.move("service.crt", certificate)
			files.move("service.key", key)
			// One after the other. Until they fit together, the last ones stay in force.
			certificate, key = young.Issue(t, certtest.Tomorrow(), "spiffe://mesh/envoy")
			mode.put(files, "envoy.crt", certificate)
			m.wait(t, "Envoy has seen that they don't fit", func() bool {
				return m.stat(t, "sds.weir_service_certificate.key_rotation_failed") > 0
			})
			reconnect()
			mode.put(files, "envoy.key", key)
			m.wait(t, "Envoy and the service have new certificates", func() bool {
				return m.certs(t, serial(t, certificate)) && m.reads() > reads
			})

			updates, reads = m.tlsUpdates(t), m.reads()
			mode.put(files, "ca.crt", young.PEM)
			files.move("clients.crt", young.PEM)
			m.wait(t, "the old authority is gone", func() bool {
				return m.tlsUpdates(t) > updates && m.reads() > reads
			})

			// The old connections are still open. New ones need the new certificates.
			reconnect()
			m.expect(t, "none", http.StatusTooManyRequests)
			if !mode.bootstrap {
				m.wait(t, "the control plane is there again", func() bool {
					return m.stat(t, "control_plane.connected_state") == 1 &&
						m.stat(t, "cluster."+envoy.ADSCluster+".ssl.handshake") > 1
				})
			}
			traffic.stop()
			if traffic.good.Load() == 0 || len(traffic.failures) > 0 {
				t.Errorf("%d requests passed, and %d did not: %v", traffic.good.Load(), len(traffic.failures), traffic.failures)
			}
		})
	}
}

// tlsUpdates counts how often Envoy has taken up new files for TLS to the service.
func (m *mesh) tlsUpdates(t *testing.T) uint64 {
	t.Helper()
	return m.stat(t, "cluster.weir_ratelimit.client_ssl_socket_factory.ssl_context_update_by_sds")
}

// reads counts how often the service has taken up new ones.
func (m *mesh) reads() int {
	return strings.Count(m.serviceLog.String(), "the certificates were read again")
}

func (m *mesh) wait(t *testing.T, what string, holds func() bool) {
	t.Helper()
	eventually(t, time.Minute, what, func() error {
		if !holds() {
			return errors.New("not yet")
		}
		return nil
	})
}

// certs reports whether Envoy uses the certificate of a serial number.
func (m *mesh) certs(t *testing.T, serial string) bool {
	t.Helper()
	admin, err := m.envoy.Admin()
	if err != nil {
		t.Fatal(err)
	}
	response, err := client.Get("http://" + admin + "/certs")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Contains(string(text), serial)
}

// serial is the serial number of a certificate, as Envoy writes it.
func serial(t *testing.T, certificate []byte) string {
	t.Helper()
	block, _ := pem.Decode(certificate)
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%x", c.SerialNumber)
}

// traffic is requests, one after the other, that should all pass.
type traffic struct {
	m        *mesh
	cancel   context.CancelFunc
	done     chan struct{}
	between  sync.Mutex // held during a request
	good     atomic.Int64
	failures []string // to be read once it has stopped
}

func startTraffic(m *mesh) *traffic {
	ctx, cancel := context.WithCancel(context.Background())
	tr := &traffic{m: m, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(tr.done)
		for ctx.Err() == nil {
			tr.request()
			time.Sleep(2 * time.Millisecond)
		}
	}()
	return tr
}

func (tr *traffic) request() {
	tr.between.Lock()
	defer tr.between.Unlock()
	req, err := http.NewRequest(http.MethodGet, "http://"+tr.m.gateway+"/traffic", http.NoBody)
	if err == nil {
		req.Header.Set("x-consumer", "traffic")
		var response *http.Response
		if response, err = client.Do(req); err == nil {
			_ = response.Body.Close()
			if response.StatusCode == http.StatusOK {
				tr.good.Add(1)
				return
			}
			err = fmt.Errorf("%s", response.Status)
		}
	}
	tr.failures = append(tr.failures, err.Error())
}

// pause does something while no request is under way.
func (tr *traffic) pause(do func()) {
	tr.between.Lock()
	defer tr.between.Unlock()
	do()
}

func (tr *traffic) stop() {
	tr.cancel()
	<-tr.done
}

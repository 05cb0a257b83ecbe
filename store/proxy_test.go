package store

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// A proxy is a network between the store and its server, and what can go wrong there.
type proxy struct {
	listener net.Listener
	server   string

	mu      sync.Mutex
	changed *sync.Cond
	hole    bool // nothing passes, in either direction, and nothing is closed
	mute    bool // nothing passes to the client
	conns   map[net.Conn]bool
	closed  bool

	dials     atomic.Int64 // connections that were accepted
	swallowed atomic.Int64 // bytes that the client was not told
}

// newProxy returns a proxy in front of a DSN's server, and the DSN that leads through it.
func newProxy(t *testing.T, dsn string) (p *proxy, through string) {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p = &proxy{listener: listener, server: u.Host, conns: make(map[net.Conn]bool)}
	p.changed = sync.NewCond(&p.mu)
	var group sync.WaitGroup
	group.Go(func() { p.accept(&group) })
	t.Cleanup(func() {
		_ = listener.Close()
		p.cut()
		p.mu.Lock()
		p.closed = true
		p.changed.Broadcast()
		p.mu.Unlock()
		group.Wait()
	})
	u.Host = listener.Addr().String()
	return p, u.String()
}

func (p *proxy) accept(group *sync.WaitGroup) {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.dials.Add(1)
		group.Go(func() { p.join(client) })
	}
}

// join passes bytes between a client and the server until either side ends.
func (p *proxy) join(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", p.server)
	if err != nil {
		return
	}
	defer server.Close()
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return
	}
	p.conns[client], p.conns[server] = true, true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		delete(p.conns, client)
		delete(p.conns, server)
		p.mu.Unlock()
	}()
	var group sync.WaitGroup
	group.Go(func() { p.copy(server, client, false); _ = server.Close() })
	group.Go(func() { p.copy(client, server, true); _ = client.Close() })
	group.Wait()
}

func (p *proxy) copy(to, from net.Conn, toClient bool) {
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		p.mu.Lock()
		for p.hole && !p.closed {
			p.changed.Wait()
		}
		mute := p.mute && toClient
		p.mu.Unlock()
		switch {
		case mute:
			p.swallowed.Add(int64(n))
		case n > 0:
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// set changes what passes.
func (p *proxy) set(hole, mute bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hole, p.mute = hole, mute
	p.changed.Broadcast()
}

// cut closes all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
}

// withHosts returns a DSN that names several servers in order.
func withHosts(t *testing.T, dsn string, ports ...int) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	hosts := make([]string, len(ports))
	for i, port := range ports {
		hosts[i] = net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	}
	u.Host = strings.Join(hosts, ",")
	return u.String()
}

func listDir(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names
}

// parentOf reads a process's parent; ok is false when the process has ended.
func parentOf(pid int) (parent int, ok bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, false
	}
	// The name, in parentheses, may hold anything.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 2 {
		return 0, false
	}
	parent, err = strconv.Atoi(fields[1])
	return parent, err == nil
}

package policy

import (
	"net/netip"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Clients say what each client of the service may ask: not what it may spend, which is
// the policies' business. They are immutable. Nil Clients let everybody ask for every
// domain, without refunds and overrides.
type Clients struct {
	entries []clientEntry
}

// A Client is what one client may ask. The zero Client may ask for every domain, and for
// no refund and no override.
type Client struct {
	Domains   []string // those that it may ask for; nil for all
	Refunds   bool     // it may give units back
	Overrides bool     // it may bring limits of its own
}

// MayAsk reports whether the client may ask for the domain.
func (c Client) MayAsk(domain string) bool {
	return c.Domains == nil || slices.Contains(c.Domains, domain)
}

// A clientEntry says who a client is, by one of the two, and what it may ask.
type clientEntry struct {
	san     string
	network netip.Prefix
	client  Client
}

// Find returns what a client may ask, by the names of its verified certificate (SANs:
// URIs and DNS names, none without one) and its address (invalid if it has none). The
// first entry of the file that names either decides. ok is false when none does: such a
// client may ask nothing.
func (c *Clients) Find(sans []string, address netip.Addr) (client Client, ok bool) {
	if c == nil {
		return Client{}, true
	}
	// A zone names one of this machine's links, and an IPv4 address stays one in the
	// clothes of IPv6.
	address = address.Unmap().WithZone("")
	for _, e := range c.entries {
		if e.san != "" && slices.Contains(sans, e.san) || e.san == "" && e.network.Contains(address) {
			return e.client, true
		}
	}
	return Client{}, false
}

// NamesCertificates reports whether any client is known by its certificate.
func (c *Clients) NamesCertificates() bool {
	return c != nil && slices.ContainsFunc(c.entries, func(e clientEntry) bool { return e.san != "" })
}

// ParseClients reads a clients file; file is its name in messages. It is as strict as
// [Parse], and its error joins all faults in the same way.
//
//	clients:
//	  - {san: spiffe://mesh/envoy, domains: [ingest], refunds: true}
//	  - {network: 10.0.0.0/8, overrides: true}
func ParseClients(file string, data []byte) (*Clients, error) {
	d := &document{file: file}
	root := d.parse(data)
	if root == nil {
		return nil, d.faults()
	}
	c := d.clients(root)
	// What is only a warning in a policy (a second document, which is ignored) would
	// here take rights away unseen.
	d.errs = append(d.errs, d.warnings...)
	if err := d.faults(); err != nil {
		return nil, err
	}
	return c, nil
}

func (d *document) clients(root *yaml.Node) *Clients {
	fields, ok := d.fields(root, "", "clients")
	if !ok {
		return nil
	}
	list, ok := fields["clients"]
	if !ok {
		d.failf(root, "clients", "is missing")
		return nil
	}
	c := &Clients{}
	seen := map[string]int{} // line, by identity
	for _, item := range d.items(list) {
		e, id, ok := d.client(item)
		if !ok {
			continue
		}
		if line, ok := seen[id]; ok {
			d.failf(item.value, item.path, "%s stands twice; the first is on line %d", id, line)
			continue
		}
		seen[id] = item.value.Line
		c.entries = append(c.entries, e)
	}
	return c
}

// client reads one entry; id is the identity that it names.
func (d *document) client(item field) (e clientEntry, id string, ok bool) {
	faults := len(d.errs)
	fields, ok := d.fields(item.value, item.path, "san", "network", "domains", "refunds", "overrides")
	if !ok {
		return e, "", false
	}
	san, hasSAN := fields["san"]
	network, hasNetwork := fields["network"]
	switch {
	case hasSAN == hasNetwork:
		d.failf(item.value, item.path, "needs a san or a network, and not both")
	case hasSAN:
		if e.san = d.text(san); e.san == "" {
			d.failf(san.value, san.path, "is empty")
		}
		id = e.san
	default:
		e.network = d.network(network)
		id = e.network.String()
	}
	if f, ok := fields["domains"]; ok {
		e.client.Domains = d.domains(f)
	}
	if f, ok := fields["refunds"]; ok {
		e.client.Refunds = d.boolean(f)
	}
	if f, ok := fields["overrides"]; ok {
		e.client.Overrides = d.boolean(f)
	}
	return e, id, len(d.errs) == faults
}

// network reads a network such as 10.0.0.0/8, or a single address.
func (d *document) network(f field) netip.Prefix {
	text := d.text(f)
	if !strings.Contains(text, "/") {
		if address, err := netip.ParseAddr(text); err == nil && address.Zone() == "" {
			address = address.Unmap()
			return netip.PrefixFrom(address, address.BitLen())
		}
	}
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil:
		d.failf(f.value, f.path, "must be a network such as 10.0.0.0/8 or an address, not %s", describe(f.value))
	case p.Addr().Is4In6():
		d.failf(f.value, f.path, "must be written as a network of IPv4")
	case p != p.Masked():
		d.failf(f.value, f.path, "has bits behind its length; the network is %s", p.Masked())
	}
	return p
}

func (d *document) domains(f field) []string {
	domains := []string{}
	for _, item := range d.items(f) {
		name := d.text(item)
		switch {
		case name == "":
			d.failf(item.value, item.path, "is empty")
		case slices.Contains(domains, name):
			d.failf(item.value, item.path, "stands twice")
		}
		domains = append(domains, name)
	}
	if len(domains) == 0 {
		d.failf(f.value, f.path, "names no domain; leave it out to allow all of them")
	}
	return domains
}

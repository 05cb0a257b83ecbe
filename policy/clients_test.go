package policy_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weir-dev/weir/policy"
)

func TestClients(t *testing.T) {
	t.Parallel()

	clients, err := policy.ParseClients("clients.yaml", []byte(`
clients:
  - {san: spiffe://mesh/envoy, domains: [ingest, api], refunds: true}
  - {san: gateway.example, overrides: true}
  - {network: 10.1.2.3, refunds: true, overrides: true}
  - {network: 10.0.0.0/8, domains: [ingest]}
  - {network: "fd00::/8"}
`))
	if err != nil {
		t.Fatal(err)
	}
	mesh := policy.Client{Domains: []string{"ingest", "api"}, Refunds: true}
	for _, test := range []struct {
		name    string
		sans    string // separated by spaces
		address string
		want    policy.Client
		unknown bool
	}{
		{name: "a URI", sans: "spiffe://mesh/envoy", address: "192.0.2.1", want: mesh},
		{name: "one name of several", sans: "other spiffe://mesh/envoy", want: mesh},
		{name: "a DNS name", sans: "gateway.example", want: policy.Client{Overrides: true}},
		{name: "the first entry decides, whatever names it", sans: "gateway.example", address: "10.1.2.3", want: policy.Client{Overrides: true}},
		{name: "a name that is not in the file falls back to the address", sans: "other", address: "10.1.2.3", want: policy.Client{Refunds: true, Overrides: true}},
		{name: "a network", address: "10.9.9.9", want: policy.Client{Domains: []string{"ingest"}}},
		{name: "IPv4 in the clothes of IPv6", address: "::ffff:10.9.9.9", want: policy.Client{Domains: []string{"ingest"}}},
		{name: "IPv6 with a zone", address: "fd00::1%eth0", want: policy.Client{}},
		{name: "nobody", sans: "spiffe://mesh/envoy2", address: "192.0.2.1", unknown: true},
		{name: "no name and no address", unknown: true},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var address netip.Addr
			if test.address != "" {
				address = netip.MustParseAddr(test.address)
			}
			got, ok := clients.Find(strings.Fields(test.sans), address)
			if ok == test.unknown {
				t.Fatalf("Find knows the client: %t", ok)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("Find differs (-want +got):\n%s", diff)
			}
		})
	}
	if !mesh.MayAsk("api") || mesh.MayAsk("other") || !(policy.Client{}).MayAsk("other") {
		t.Error("MayAsk does not follow the domains")
	}
}

// With no file, everybody may ask for every domain, and for nothing that is off by default.
func TestNoClientsFile(t *testing.T) {
	t.Parallel()

	var clients *policy.Clients
	got, ok := clients.Find(nil, netip.Addr{})
	if diff := cmp.Diff(policy.Client{}, got); diff != "" || !ok {
		t.Errorf("Find = %v, %t, want the zero Client", got, ok)
	}
}

func TestParseClientsFaults(t *testing.T) {
	t.Parallel()

	for _, test := range []struct{ name, text, want string }{
		{"empty", "", "c.yaml:1:1: the file is empty"},
		{"no list", "{}", "c.yaml:1:1: clients: is missing"},
		{"an unknown field", "clients:\n  - {san: a, refund: true}", "c.yaml:2:14: clients[0].refund: unknown field"},
		{"a field twice", "clients:\n  - {san: a, san: b}", "c.yaml:2:14: clients[0].san: stands twice"},
		{"nobody", "clients:\n  - {refunds: true}", "c.yaml:2:5: clients[0]: needs a san or a network"},
		{"two at once", "clients:\n  - {san: a, network: 10.0.0.0/8}", "c.yaml:2:5: clients[0]: needs a san or a network, and not both"},
		{"an empty name", "clients:\n  - {san: ''}", "c.yaml:2:11: clients[0].san: is empty"},
		{"no network", "clients:\n  - {network: 10.0.0}", `c.yaml:2:15: clients[0].network: must be a network such as 10.0.0.0/8 or an address, not "10.0.0"`},
		{"host bits", "clients:\n  - {network: 10.0.0.1/8}", "c.yaml:2:15: clients[0].network: has bits behind its length; the network is 10.0.0.0/8"},
		{"mapped", "clients:\n  - {network: '::ffff:10.0.0.0/104'}", "c.yaml:2:15: clients[0].network: must be written as a network of IPv4"},
		{"twice", "clients:\n  - {san: a}\n  - {san: a}", "c.yaml:3:5: clients[1]: a stands twice; the first is on line 2"},
		{"twice as an address", "clients:\n  - {network: 10.0.0.1}\n  - {network: 10.0.0.1/32}", "c.yaml:3:5: clients[1]: 10.0.0.1/32 stands twice"},
		{"no domain", "clients:\n  - {san: a, domains: []}", "c.yaml:2:23: clients[0].domains: names no domain"},
		{"a word for a boolean", "clients:\n  - {san: a, refunds: 1}", `c.yaml:2:23: clients[0].refunds: must be true or false, not "1"`},
		{"a second document", "clients: []\n---\nclients: []", "only the first YAML document"},
		{"no YAML", "clients: [", "c.yaml:"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			_, err := policy.ParseClients("c.yaml", []byte(test.text))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("ParseClients = %v, want %q in it", err, test.want)
			}
		})
	}
}

// Whatever the file holds, there is an answer: clients or faults that name the file.
func FuzzParseClients(f *testing.F) {
	for _, seed := range []string{
		"", "clients: []", "clients:\n  - {san: a, domains: [b], refunds: true}", "clients:\n  - {network: 10.0.0.0/8}",
		"clients: &a\n  - *a", "clients:\n  - {network: ::1, overrides: yes}", "a: &a [b]\nclients: *a",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		clients, err := policy.ParseClients("c.yaml", data)
		if err != nil {
			if !strings.Contains(err.Error(), "c.yaml:") {
				t.Errorf("the fault has no place: %v", err)
			}
			return
		}
		clients.Find([]string{"a"}, netip.MustParseAddr("10.0.0.1"))
	})
}

package extract_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

const notAddress = "is not an IP address, with or without a port"

func TestAddress(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		text  string
		masks extract.Masks
		want  string
	}{
		{"10.1.2.3", whole, `"10.1.2.3"`},
		{"10.1.2.3:80", whole, `"10.1.2.3"`},
		{"10.1.2.3:00080", whole, `"10.1.2.3"`},
		{"fe80::1", whole, `"fe80::1"`},
		{"FE80:0:0:0::1", whole, `"fe80::1"`},
		{"[fe80::1]", whole, `"fe80::1"`},
		{"[fe80::1]:80", whole, `"fe80::1"`},
		{"fe80::1%eth0", whole, `"fe80::1"`},
		{"[fe80::1%eth0]:80", whole, `"fe80::1"`},
		{"::ffff:10.1.2.3", whole, `"10.1.2.3"`},
		{"[::ffff:a01:203]:80", whole, `"10.1.2.3"`},
		{"::ffff:10.1.2.3%eth0", whole, `"10.1.2.3"`},
		{"::10.1.2.3", whole, `"::a01:203"`},

		{"10.1.2.3:80", extract.Masks{IPv4: 24, IPv6: 56}, `"10.1.2.0/24"`},
		{"::ffff:10.1.2.3", extract.Masks{IPv4: 24, IPv6: 56}, `"10.1.2.0/24"`},
		{"2001:db8:1:2ff::1", extract.Masks{IPv4: 24, IPv6: 56}, `"2001:db8:1:200::/56"`},
		{"10.1.2.3", extract.Masks{IPv4: 31, IPv6: 56}, `"10.1.2.2/31"`},
		{"10.1.2.3", extract.Masks{}, `"0.0.0.0/0"`},
		{"fe80::1", extract.Masks{}, `"::/0"`},
		{"10.1.2.3", extract.Masks{IPv4: -1, IPv6: -1}, `"0.0.0.0/0"`},
		{"10.1.2.3", extract.Masks{IPv4: 33}, `"10.1.2.3"`},
		{"fe80::1", extract.Masks{IPv6: 129}, `"fe80::1"`},

		{"", whole, notAddress},
		{"10.1.2", whole, notAddress},
		{"10.1.2.03", whole, notAddress},
		{"10.1.2.256", whole, notAddress},
		{"10.1.2.3:", whole, notAddress},
		{"10.1.2.3:65536", whole, notAddress},
		{"10.1.2.3:http", whole, notAddress},
		{"10.1.2.3:+1", whole, notAddress},
		{"10.1.2.3%eth0", whole, notAddress},
		{"10.1.2.3/24", whole, notAddress},
		{" 10.1.2.3", whole, notAddress},
		{"fe80::1%", whole, notAddress},
		{"[fe80::1", whole, notAddress},
		{"[fe80::1]:", whole, notAddress},
		{"[fe80::1]80", whole, notAddress},
		{"[fe80::1]]:80", whole, notAddress},
		{"fe80::1::2", whole, notAddress},
		{"example.com", whole, notAddress},
		{"/run/envoy.sock", whole, notAddress},
	} {
		if got := outcome(extract.Address(tc.text, tc.masks)); got != tc.want {
			t.Errorf("Address(%q, %v) = %s, want %s", tc.text, tc.masks, got, tc.want)
		}
	}
}

// whole keeps all bits of addresses.
var whole = extract.Masks{IPv4: 32, IPv6: 128}

// addressByReference reads an address, with or without a port, by net/netip.
func addressByReference(text string) (netip.Addr, bool) {
	if ip, err := netip.ParseAddr(text); err == nil {
		return ip.Unmap().WithZone(""), true
	}
	if inner, ok := strings.CutPrefix(text, "["); ok {
		if inner, ok = strings.CutSuffix(inner, "]"); ok {
			ip, err := netip.ParseAddr(inner)
			return ip.Unmap().WithZone(""), err == nil
		}
	}
	if both, err := netip.ParseAddrPort(text); err == nil {
		return both.Addr().Unmap().WithZone(""), true
	}
	return netip.Addr{}, false
}

// An address is one that net/netip reads too, and has one spelling.
func FuzzAddress(f *testing.F) {
	for _, s := range []string{
		"10.1.2.3", "10.1.2.3:80", "::1", "[fe80::1%eth0]:80", "::ffff:10.1.2.3", "::FFFF:0a01:0203",
		"[::1]", "1.2.3.4%eth0", "01.2.3.4", "[1.2.3.4]:1", "::1%", "1.2.3.4:", "[::1]:", "[::1]:65536", "1.2.3.4:080",
	} {
		f.Add(s, 24, 56)
		f.Add(s, 32, 128)
	}
	f.Fuzz(func(t *testing.T, s string, bits4, bits6 int) {
		got, err := extract.Address(s, whole)
		ip, ok := addressByReference(s)
		switch {
		case ok && (err != nil || got != ip.String()):
			t.Fatalf("Address(%q) = %q, %v; want %q", s, got, err, ip)
		case !ok && err == nil && !strings.HasPrefix(s, "[") && !strings.Contains(s, ":0"):
			// Beyond net/netip's, a port may have zeros before it, and brackets IPv4 in them.
			t.Fatalf("Address(%q) = %q", s, got)
		case err != nil:
			return
		}
		if again, err := extract.Address(got, whole); again != got || err != nil {
			t.Errorf("Address(%q) = %q, whose own is %q, %v", s, got, again, err)
		}

		ip = netip.MustParseAddr(got)
		bits := max(0, min(bits4, 32))
		if ip.Is6() {
			bits = max(0, min(bits6, 128))
		}
		prefix, err := ip.Prefix(bits)
		if err != nil {
			t.Fatal(err)
		}
		want := prefix.String()
		if bits == ip.BitLen() {
			want = ip.String()
		}
		if cut, err := extract.Address(s, extract.Masks{IPv4: bits4, IPv6: bits6}); cut != want || err != nil {
			t.Errorf("Address(%q, %d %d) = %q, %v; want %q", s, bits4, bits6, cut, err, want)
		}
	})
}

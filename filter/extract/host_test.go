package extract_test

import (
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

// A host is what net/url finds in a URL with the authority, and has one spelling.
func FuzzHost(f *testing.F) {
	for _, s := range []string{
		"example.com", "EXAMPLE.com.", "example.com:8080", "a_b-c.d", "10.1.2.3", "10.1.2.3:80", "10.1.2.3.",
		"[::1]", "[::FFFF:10.1.2.3]:443", "[fe80::1%25eth0]", "127.1", "0x7f000001", "0x", "1e3", "a..b", ".",
		"user@example.com", "exämple.com", "a%2eb", "a:1:2", "a:", ":80", "", "xn--bcher-kva.example",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := extract.Host(s)
		if err != nil {
			return
		}
		u, err := url.Parse("http://" + s + "/")
		if err != nil || u.User != nil {
			t.Fatalf("Host(%q) = %q, but net/url says %v, %v", s, got, u, err)
		}
		want := strings.ToLower(strings.TrimSuffix(u.Hostname(), "."))
		if ip, err := netip.ParseAddr(want); err == nil {
			want = ip.Unmap().String()
		}
		if got != want {
			t.Errorf("Host(%q) = %q, want %q", s, got, want)
		}

		authority := got
		if strings.Contains(got, ":") {
			authority = "[" + got + "]"
		}
		for _, spelling := range []string{
			authority, strings.ToUpper(authority), authority + ":", authority + ":8080", strings.TrimSuffix(authority, "]") + tail(authority),
		} {
			if again, err := extract.Host(spelling); again != got || err != nil {
				t.Errorf("Host(%q) = %q, but Host(%q) = %q, %v", s, got, spelling, again, err)
			}
		}
	})
}

// tail is what a host's other spelling ends in: a literal's bracket, a name's dot.
func tail(authority string) string {
	if strings.HasPrefix(authority, "[") {
		return "]"
	}
	return "."
}

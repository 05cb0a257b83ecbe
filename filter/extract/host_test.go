package extract_test

import (
	"net/netip"
	"net/url"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

const notHost = "is not a host name or an IP address, with or without a port"

// Case, the port and the dot at the end make no other host of one.
func TestC27Host(t *testing.T) {
	t.Parallel()

	label, long := strings.Repeat("a", 63), strings.Repeat("a.", 126)
	for authority, want := range map[string]string{
		"example.com":           `"example.com"`,
		"EXAMPLE.Com":           `"example.com"`,
		"example.com.":          `"example.com"`,
		"example.com:443":       `"example.com"`,
		"Example.COM.:8080":     `"example.com"`,
		"example.com:":          `"example.com"`,
		"localhost":             `"localhost"`,
		"_dmarc.a-b.example":    `"_dmarc.a-b.example"`,
		"xn--bcher-kva.example": `"xn--bcher-kva.example"`,
		"1.example":             `"1.example"`,
		"0x7f.example":          `"0x7f.example"`,
		"1.2.3.4e":              `"1.2.3.4e"`,
		label + "." + label:     `"` + label + "." + label + `"`,
		long + "b":              `"` + long + `b"`,
		long + "b.":             `"` + long + `b"`,
		"10.1.2.3":              `"10.1.2.3"`,
		"10.1.2.3.":             `"10.1.2.3"`,
		"10.1.2.3:80":           `"10.1.2.3"`,
		"[::1]":                 `"::1"`,
		"[::1]:443":             `"::1"`,
		"[::1]:":                `"::1"`,
		"[2001:DB8:0:0::1]":     `"2001:db8::1"`,
		"[::ffff:10.1.2.3]:80":  `"10.1.2.3"`,
		"":                      absent,
		".":                     notHost,
		":80":                   notHost,
		"example..com":          notHost,
		"example.com..":         notHost,
		".example.com":          notHost,
		"example.com:80:81":     notHost,
		"example.com:65536":     notHost,
		"example.com:http":      notHost,
		"example.com:-1":        notHost,
		"user@example.com":      notHost,
		"example.com/":          notHost,
		"ex%61mple.com":         notHost,
		"exämple.com":           notHost,
		"example.com\x20":       notHost,
		"exam\x00ple.com":       notHost,
		"a,b":                   notHost,
		"*.example.com":         notHost,
		label + "a.example":     notHost,
		long + "bb":             notHost,
		"127.1":                 notHost,
		"2130706433":            notHost,
		"0x7f000001":            notHost,
		"0X7F.0.0.0x1":          notHost,
		"0x":                    notHost,
		"010.1.2.3":             notHost,
		"10.1.2.3.4":            notHost,
		"example.1":             notHost,
		"[fe80::1%25eth0]":      notHost,
		"[fe80::1%eth0]":        notHost,
		"[10.1.2.3]":            notHost,
		"[::1":                  notHost,
		"[::1]x":                notHost,
		"[::1]:x":               notHost,
		"[]":                    notHost,
		"::1":                   notHost,
	} {
		if got := outcome(extract.Host(authority)); got != want {
			t.Errorf("Host(%q) = %s, want %s", authority, got, want)
		}
	}
}

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

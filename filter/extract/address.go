package extract

import (
	"errors"
	"net/netip"
	"strings"
)

var errNotAddress = errors.New("is not an IP address, with or without a port")

// Masks say how many bits of an address are kept, from the left. A number out of
// range is as the nearest one in it.
type Masks struct {
	IPv4 int // 0 to 32, which keeps the whole address
	IPv6 int // 0 to 128, likewise
}

// Address returns the IP address in text, which may have brackets and a port:
// "10.1.2.3", "10.1.2.3:80", "fe80::1", "[fe80::1]", "[fe80::1]:80". Where m cuts bits
// off they are zero and the length follows: "10.1.2.0/24".
//
// An IPv6 address comes in its shortest form, without its zone, and as IPv4 (under
// that mask) if it stands for an IPv4 address. Nothing is absent here: an empty text
// is an error as any other that is no address.
func Address(text string, m Masks) (string, error) {
	host := text
	switch {
	case strings.HasPrefix(text, "["):
		inner, after, ok := strings.Cut(text[1:], "]")
		if !ok || after != "" && (len(after) == 1 || after[0] != ':' || !port(after[1:])) {
			return "", errNotAddress
		}
		host = inner
	case strings.Count(text, ":") == 1:
		before, after, _ := strings.Cut(text, ":")
		if after == "" || !port(after) {
			return "", errNotAddress
		}
		host = before
	}
	// The zone is cut off here, so that no text of a client's is interned.
	host, zone, zoned := strings.Cut(host, "%")
	ip, err := netip.ParseAddr(host)
	if err != nil || zoned && (zone == "" || !ip.Is6()) {
		return "", errNotAddress
	}
	ip = ip.Unmap()
	kept := min(m.IPv6, ip.BitLen())
	if ip.Is4() {
		kept = min(m.IPv4, ip.BitLen())
	}
	if kept == ip.BitLen() {
		return ip.String(), nil
	}
	prefix, err := ip.Prefix(max(kept, 0))
	if err != nil {
		return "", errNotAddress
	}
	return prefix.String(), nil
}

package extract

import (
	"errors"
	"net/netip"
	"strings"
)

var errNotHost = errors.New("is not a host name or an IP address, with or without a port")

// The bounds of DNS names, in bytes.
const (
	maxHost  = 253
	maxLabel = 63
)

// Host returns the host of authority, which is a request's :authority: lower-case,
// without the port and one dot at the end. "" is [ErrAbsent].
//
// Names are of letters, digits, hyphens and underscores between dots, at most 253
// bytes, so percent escapes, user info and what IDNA has not encoded are refused. An
// IPv6 literal comes without its brackets in its shortest form, and as IPv4 if it
// stands for an IPv4 address; zones are refused. A name whose last label is a number
// must be an IPv4 address with four numbers and no leading zeros, as there are readers
// to whom "127.1" and "0x7f000001" are 127.0.0.1.
func Host(authority string) (string, error) {
	if authority == "" {
		return "", ErrAbsent
	}
	if authority[0] == '[' {
		literal, after, ok := strings.Cut(authority[1:], "]")
		if !ok || after != "" && (after[0] != ':' || !port(after[1:])) {
			return "", errNotHost
		}
		return hostIPv6(literal)
	}
	host, after, _ := strings.Cut(authority, ":")
	host = strings.TrimSuffix(host, ".")
	if len(host) > maxHost || !port(after) {
		return "", errNotHost
	}
	last := ""
	for label := range strings.SplitSeq(host, ".") {
		if !isLabel(label) {
			return "", errNotHost
		}
		last = label
	}
	if isNumber(last) {
		ip, err := netip.ParseAddr(host)
		if err != nil {
			return "", errNotHost
		}
		return ip.String(), nil
	}
	return strings.ToLower(host), nil
}

func hostIPv6(literal string) (string, error) {
	if strings.IndexByte(literal, '%') >= 0 {
		return "", errNotHost
	}
	ip, err := netip.ParseAddr(literal)
	if err != nil || !ip.Is6() {
		return "", errNotHost
	}
	return ip.Unmap().String(), nil
}

func isLabel(label string) bool {
	for i := range len(label) {
		switch c := label[i]; {
		case isDigit(c), 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', c == '-', c == '_':
		default:
			return false
		}
	}
	return label != "" && len(label) <= maxLabel
}

// isNumber reports that label makes its host an IPv4 address to a browser: it is of
// digits, or of hexadecimal ones after 0x.
func isNumber(label string) bool {
	hex := len(label) >= 2 && label[0] == '0' && label[1]|0x20 == 'x'
	if hex {
		label = label[2:]
	}
	for i := range len(label) {
		if !isDigit(label[i]) && (!hex || unhex(label[i]) > 0xF) {
			return false
		}
	}
	return true
}

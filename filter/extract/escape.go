package extract

import (
	"errors"
	"strings"
)

var errEscape = errors.New("has a bad percent escape")

// octet returns the first byte that s stands for, and how many bytes of s spell it.
// That is 0 for a bad escape. In a form a plus is a space. s is not empty.
func octet(s string, form bool) (c byte, n int) {
	switch {
	case s[0] == '%':
		if len(s) < 3 {
			return 0, 0
		}
		hi, lo := unhex(s[1]), unhex(s[2])
		if hi > 0xF || lo > 0xF {
			return 0, 0
		}
		return hi<<4 | lo, 3
	case s[0] == '+' && form:
		return ' ', 1
	}
	return s[0], 1
}

// unhex returns a hexadecimal digit's number, and more than 15 if c is none.
func unhex(c byte) byte {
	switch {
	case isDigit(c):
		return c - '0'
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10
	}
	return 0xFF
}

// unescape decodes s. It allocates only if there is something to decode.
func unescape(s string, form bool) (string, error) {
	special := strings.IndexByte(s, '%')
	if form {
		special = strings.IndexAny(s, "%+")
	}
	if special < 0 {
		return s, nil
	}
	var b strings.Builder
	b.Grow(len(s))
	b.WriteString(s[:special])
	for s = s[special:]; s != ""; {
		c, n := octet(s, form)
		if n == 0 {
			return "", errEscape
		}
		b.WriteByte(c)
		s = s[n:]
	}
	return b.String(), nil
}

// spells reports that s stands for want. ok is false if s has a bad escape, wherever
// it is.
func spells(s, want string, form bool) (equal, ok bool) {
	equal = true
	for s != "" {
		c, n := octet(s, form)
		if n == 0 {
			return false, false
		}
		s = s[n:]
		if equal = equal && want != "" && want[0] == c; equal {
			want = want[1:]
		}
	}
	return equal && want == "", true
}

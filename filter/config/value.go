package config

import (
	"errors"
	"strings"
	"unicode/utf8"
)

// Type is what a descriptor entry's value must be.
type Type uint8

// The types of values.
const (
	// TypeString takes any value, an empty one too.
	TypeString Type = iota
	// TypeUUID takes the 36-character form of a UUID in any case, not all zero.
	TypeUUID
)

// errNotUUID is what [Type.Canonical] returns for [TypeUUID].
var errNotUUID = errors.New("is not a UUID of 36 characters, or is all zero")

// Canonical returns the value that goes into the descriptor, or an error that says
// what is wrong with it, to be put behind the value's name.
//
// A UUID is lower-cased. A string is kept, but the protocol's strings are UTF-8 and
// a header's bytes need not be: each byte that is not part of valid UTF-8 becomes
// the character U+10FF00 plus the byte. So that no two values meet, the four bytes
// of a character from U+10FF80 to U+10FFFF, which are for private use, are written
// in the same way.
func (t Type) Canonical(value string) (string, error) {
	if t == TypeUUID {
		id, ok := parseUUID(value)
		if !ok {
			return "", errNotUUID
		}
		return id, nil
	}
	return escape(value), nil
}

// uuidLen is the length of 8-4-4-4-12 hexadecimal digits with their hyphens.
const uuidLen = 36

// parseUUID returns s in lower case. It allocates only when s has capitals.
func parseUUID(s string) (string, bool) {
	if len(s) != uuidLen {
		return "", false
	}
	zero := true
	for i := range uuidLen {
		c := s[i]
		switch i {
		case 8, 13, 18, 23:
			if c != '-' {
				return "", false
			}
			continue
		}
		switch {
		case '0' <= c && c <= '9', 'a' <= c && c <= 'f', 'A' <= c && c <= 'F':
			zero = zero && c == '0'
		default:
			return "", false
		}
	}
	if zero {
		return "", false
	}
	return strings.ToLower(s), true
}

// Characters that stand for single bytes. Bytes below 0x80 are always valid.
const (
	byteRune  = 0x10FF00
	firstRune = byteRune + 0x80
)

// escape makes s valid UTF-8, without two strings becoming the same one.
func escape(s string) string {
	if plain(s) {
		return s
	}
	var b strings.Builder
	b.Grow(len(s) + 3*utf8.UTFMax)
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if escaped(r, n) {
			for i := range n {
				b.WriteRune(byteRune + rune(s[i]))
			}
		} else {
			b.WriteString(s[:n])
		}
		s = s[n:]
	}
	return b.String()
}

// plain reports that escape would change nothing.
func plain(s string) bool {
	for len(s) > 0 {
		// ASCII is nearly all that is seen, and this is the quick way through it.
		if s[0] < utf8.RuneSelf {
			s = s[1:]
			continue
		}
		r, n := utf8.DecodeRuneInString(s)
		if escaped(r, n) {
			return false
		}
		s = s[n:]
	}
	return true
}

func escaped(r rune, size int) bool {
	return r == utf8.RuneError && size == 1 || r >= firstRune
}

package config

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/weir-dev/weir/filter/extract"
)

// Type is what a descriptor entry's value must be.
type Type uint8

// The types of values.
const (
	// TypeString takes any value, an empty one too.
	TypeString Type = iota
	// TypeUUID takes the 36-character form of a UUID in any case, not all zero.
	TypeUUID
	// TypeIP takes an IP address, with or without a port.
	TypeIP
)

// What [Entry.Canonical] returns, to be put behind the name of the value's source.
var (
	errNotUUID = errors.New("is not a UUID of 36 characters, or is all zero")
	errTooLong = errors.New("is longer than " + strconv.Itoa(MaxValue) + " bytes")
)

// Canonical returns what goes into the descriptor for a value of the entry's source, or
// an error that says what is wrong with it, to be put behind the source's name. It
// returns [extract.ErrAbsent] if Capture does not match.
//
// A UUID is lower-cased, an address is as [extract.Address] has it. A string is kept,
// but the protocol's strings are UTF-8 and a header's bytes need not be: each byte that
// is not part of valid UTF-8 becomes the character U+10FF00 plus the byte. So that no
// two values meet, the four bytes of a character from U+10FF80 to U+10FFFF, which are
// for private use, are written in the same way.
func (e *Entry) Canonical(value string) (string, error) {
	if e.Capture != nil {
		at := e.Capture.FindStringSubmatchIndex(value)
		switch {
		case at == nil:
			return "", extract.ErrAbsent
		case len(at) == 2:
			value = value[at[0]:at[1]]
		case at[2] < 0: // the group took no part in the match
			return "", extract.ErrAbsent
		default:
			value = value[at[2]:at[3]]
		}
	}
	for _, step := range e.Normalize {
		switch step {
		case Lower:
			value = lower(value)
		case Trim:
			value = strings.TrimSpace(value)
		case SHA256:
			sum := sha256.Sum256([]byte(value))
			value = hex.EncodeToString(sum[:])
		}
	}
	return e.typed(value)
}

// lower leaves alone what is not UTF-8: strings.ToLower would make all of it one.
func lower(s string) string {
	if utf8.ValidString(s) {
		return strings.ToLower(s)
	}
	b := []byte(s)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// typed is the last step of [Entry.Canonical], which defaults go through too.
func (e *Entry) typed(value string) (string, error) {
	switch {
	case len(value) > MaxValue:
		return "", errTooLong
	case e.Type == TypeUUID:
		id, ok := parseUUID(value)
		if !ok {
			return "", errNotUUID
		}
		return id, nil
	case e.Type == TypeIP:
		return extract.Address(value, e.Mask)
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

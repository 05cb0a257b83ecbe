// Package extract takes single values out of a request's bytes: headers, paths,
// queries, cookies, hosts, addresses, JSON, protobuf and gRPC frames.
//
// Values become the keys that budgets are counted under, so a client must not be
// able to spell one identity in two ways, nor to show this package one value and the
// server behind Envoy another. Where servers are known to differ in what they read,
// the input is refused rather than guessed at, and what remains is in the comment of
// the function.
//
// # Errors
//
// [ErrAbsent] and [ErrRepeated] are told apart from all others, which mean that the
// input is malformed. Their texts say what is wrong, to be put behind the name of the
// source, and hold nothing that the client sent.
//
// # Promises
//
// The functions are pure, and any input is safe: none panics, the time is linear in
// the input's length, and nesting is bounded. Types are immutable and safe for
// concurrent use, except [Frames]. The package ships inside Envoy, so it imports
// little.
package extract

import "errors"

// ErrAbsent is returned where the value is not there. A value that is there and
// empty is not absent.
var ErrAbsent = errors.New("is absent")

// ErrRepeated is returned where the value is there more than once, and so it depends
// on the reader which one counts.
var ErrRepeated = errors.New("is given more than once")

// ErrTooLarge is returned by [FirstMessage] and [Gunzip] for what exceeds the
// caller's bound.
var ErrTooLarge = errors.New("is too large")

// Header returns the value of the header called name, in lower case as the names in
// headers are. It returns [ErrAbsent], or [ErrRepeated] if it is there twice.
func Header(headers [][2]string, name string) (string, error) {
	value, found := "", false
	for i := range headers {
		if headers[i][0] != name {
			continue
		}
		if found {
			return "", ErrRepeated
		}
		value, found = headers[i][1], true
	}
	if !found {
		return "", ErrAbsent
	}
	return value, nil
}

// maxWhole is 2^53: up to it every reader of numbers agrees, floating point or not.
const maxWhole = 1 << 53

var errNotWhole = errors.New("is not a whole number from 0 to 2^53")

// Whole reads a number from 0 to 2^53 in decimal digits. Leading zeros are allowed,
// a sign, a space and an empty text are not.
func Whole(text string) (int64, error) {
	if text == "" {
		return 0, errNotWhole
	}
	var n int64
	for i := range len(text) {
		c := text[i]
		if !isDigit(c) {
			return 0, errNotWhole
		}
		n = n*10 + int64(c-'0')
		if n > maxWhole {
			return 0, errNotWhole
		}
	}
	return n, nil
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// port reports that s is a port number, or empty: RFC 3986 lets one be left out
// after the colon.
func port(s string) bool {
	n := 0
	for i := range len(s) {
		if !isDigit(s[i]) {
			return false
		}
		n = n*10 + int(s[i]-'0')
		if n > 0xFFFF {
			return false
		}
	}
	return true
}

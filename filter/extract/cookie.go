package extract

import (
	"errors"
	"strings"
)

var (
	errCookieName  = errors.New("has characters around its name that some servers drop")
	errCookieValue = errors.New("has a quote, a backslash or a control character in its value")
)

// Cookie returns the value of the cookie called name, which is case-sensitive, from
// all cookie headers. It returns [ErrAbsent], or [ErrRepeated] if the cookie is there
// twice. A cookie without "=" is there and empty.
//
// Spaces and tabs around names and values don't count, nor does one pair of double
// quotes around a value. Other quotes, backslashes and control characters in the
// value are refused, since servers differ in whether they unquote them. Values are
// not percent-decoded, which is up to each application.
func Cookie(headers [][2]string, name string) (string, error) {
	value, found := "", false
	for i := range headers {
		if headers[i][0] != "cookie" {
			continue
		}
		for line := headers[i][1]; line != ""; {
			var pair string
			pair, line, _ = strings.Cut(line, ";")
			key, text, hasValue := strings.Cut(pair, "=")
			key = strings.Trim(key, " \t")
			switch {
			case key == name && (hasValue || key != ""):
			case name != "" && strings.TrimFunc(key, invisible) == name:
				return "", errCookieName
			default:
				continue
			}
			if found {
				return "", ErrRepeated
			}
			value, found = strings.Trim(text, " \t"), true
		}
	}
	if !found {
		return "", ErrAbsent
	}
	if len(value) > 1 && value[0] == '"' && value[len(value)-1] == '"' {
		value = value[1 : len(value)-1]
	}
	for i := range len(value) {
		if c := value[i]; c == '"' || c == '\\' || c < ' ' || c == 0x7F {
			return "", errCookieValue
		}
	}
	return value, nil
}

// invisible reports what some server might take for space around a name: control
// characters, and what is not ASCII, which is read in one encoding here and in another
// there.
func invisible(r rune) bool { return r <= ' ' || r >= 0x7F }

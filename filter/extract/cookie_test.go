package extract_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

const (
	cookieName  = "has characters around its name that some servers drop"
	cookieValue = "has a quote, a backslash or a control character in its value"
)

func TestCookie(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		name  string
		lines []string // the cookie headers
		want  string
	}{
		{"id", []string{"id=acme"}, `"acme"`},
		{"id", []string{"a=b; id=acme; c=d"}, `"acme"`},
		{"id", []string{"a=b", "id=acme"}, `"acme"`}, // as HTTP/2 has it
		{"id", []string{"id=acme;"}, `"acme"`},
		{"id", []string{";;id=acme"}, `"acme"`},
		{"id", []string{" \t id \t=\t acme\t"}, `"acme"`},
		{"id", []string{`id="acme"`}, `"acme"`},
		{"id", []string{`id=" a "`}, `" a "`},
		{"id", []string{"id=a b"}, `"a b"`},
		{"id", []string{"id=a=b"}, `"a=b"`},
		{"id", []string{"id=a%20b"}, `"a%20b"`},
		{"id", []string{"id=1 \xC0\xA7"}, `"1 \xc0\xa7"`},
		{"", []string{"=acme"}, `"acme"`},

		{"id", nil, absent},
		{"id", []string{""}, absent},
		{"id", []string{"ID=acme"}, absent},
		{"id", []string{"ids=acme; i=d"}, absent},
		{"id", []string{"a=id=b"}, absent},
		{"id", []string{"a=b, id=acme"}, absent},
		{"", []string{"id=acme; "}, absent},

		{"id", []string{"id=a; id=b"}, repeated},
		{"id", []string{"id=a; id=a"}, repeated},
		{"id", []string{"id=a", "id=b"}, repeated},
		{"id", []string{"id; id=a"}, repeated},
		{"id", []string{`a="x; id=y; "; id=b`}, repeated}, // some servers see one only

		{"id", []string{"\x0Bid=acme"}, cookieName},
		{"id", []string{"id\u00A0=acme"}, cookieName},
		{"id", []string{"id=a; \xA0id=b"}, cookieName},
		{"id", []string{`id="acme`}, cookieValue},
		{"id", []string{`id=ac"me`}, cookieValue},
		{"id", []string{`id="`}, cookieValue},
		{"id", []string{`id="a\"b"`}, cookieValue},
		{"id", []string{`id="a;b"`}, cookieValue},
		{"id", []string{`id=a\141`}, cookieValue},
		{"id", []string{"id=a\x00"}, cookieValue},
		{"id", []string{"id=a\x7F"}, cookieValue},
	} {
		headers := [][2]string{{":path", "/"}, {"x-cookie", tc.name + "=other"}}
		for _, line := range tc.lines {
			headers = append(headers, [2]string{"cookie", line})
		}
		if got := outcome(extract.Cookie(headers, tc.name)); got != tc.want {
			t.Errorf("Cookie(%q, %q) = %s, want %s", tc.lines, tc.name, got, tc.want)
		}
	}
}

// Headers are found by their names alone. A cookie is what net/http reads where it
// reads all of them, and none that another server might see is passed over in silence.
func FuzzHeaders(f *testing.F) {
	for _, line := range []string{
		"id=acme", "a=b; id=acme", "id=a; id=b", `id="acme"`, `id="a`, `id=a"b`, "id", " id = a ", "ID=x",
		"\x0bid=x", "id\u00a0=x", `id=a\"`, "a=b;id=acme;", "id=a=b", "id=", "=id", ";;", "id=\x7f",
	} {
		f.Add(line, "c=d", "id")
		f.Add("x=y", line, "id")
		f.Add(line, line, "")
	}
	f.Fuzz(func(t *testing.T, first, second, name string) {
		headers := [][2]string{{":path", "id=other"}, {"cookie", first}, {"x-" + name, second}}
		if got := outcome(extract.Header(headers, "cookie")); got != outcome(first, nil) {
			t.Errorf("Header(%q, cookie) = %s", headers, got)
		}
		if got := outcome(extract.Header(headers, "x-"+name)); got != outcome(second, nil) {
			t.Errorf("Header(%q, x-%s) = %s", headers, name, got)
		}
		headers[2][0] = "cookie"
		if got := outcome(extract.Header(headers, "cookie")); got != repeated {
			t.Errorf("Header(%q, cookie) = %s", headers, got)
		}

		got, err := extract.Cookie(headers, name)
		result := outcome(got, err)
		// How headers are split makes no difference.
		joined := outcome(extract.Cookie([][2]string{{"cookie", first + ";" + second}}, name))
		if result != joined {
			t.Errorf("Cookie(%q, %q) = %s, joined %s", headers, name, result, joined)
		}

		request := http.Request{Header: http.Header{"Cookie": {first, second}}}
		expected := absent
		cookies := request.CookiesNamed(name)
		switch {
		case name == "":
			return // net/http finds no cookies of that name
		case len(cookies) == 1:
			expected = outcome(strings.Trim(cookies[0].Value, " \t"), nil) // which net/http trims at its end only
		case len(cookies) > 1:
			expected = repeated
		}
		switch {
		case result == absent && expected != absent:
			t.Errorf("Cookie(%q, %q) = %s, want %s", headers, name, result, expected)
		case err == nil && expected != absent && result != expected:
			t.Errorf("Cookie(%q, %q) = %s, want %s", headers, name, result, expected)
		}
		if err != nil || strings.ContainsAny(name, ";= \t") {
			return
		}
		for _, spelling := range []string{name + "=" + got, "x" + name + "=b;\t" + name + " = \"" + got + "\" ;"} {
			again := outcome(extract.Cookie([][2]string{{"cookie", spelling}}, name))
			if again != result && got == strings.Trim(got, " \t") { // spaces can only stand within quotes
				t.Errorf("Cookie(%q, %q) = %s, but of %q it is %s", headers, name, result, spelling, again)
			}
		}
	})
}

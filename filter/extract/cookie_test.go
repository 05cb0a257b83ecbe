package extract_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

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

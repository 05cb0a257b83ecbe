package extract_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

// queryByReference returns the query of a request's :path.
func queryByReference(target string) string {
	target, _, _ = strings.Cut(target, "#")
	_, query, _ := strings.Cut(target, "?")
	return query
}

// A parameter is what net/url reads, and is read the same however it is escaped.
func FuzzQuery(f *testing.F) {
	for _, target := range []string{
		"/?k=v", "/?k=v&k=w", "/?K=v&%6b=w", "/?a=%zz&k=1", "/?%zz=a&k=1", "/?k=%zz", "/?k", "/?&&k=a+b%2B&",
		"/?k=v#k=w", "/#?k=v", "/?a=1;k=2", "/?=x", "/?k=%C0%A7", "/", "", "?k=1?k=2", "/?k=a=b", "/?a+b=c",
	} {
		for _, name := range []string{"k", "", "a b"} {
			f.Add(target, name)
		}
	}
	f.Fuzz(func(t *testing.T, target, name string) {
		got, err := extract.Query(target, name)
		query := queryByReference(target)
		values, parseErr := url.ParseQuery(query)
		// net/url drops what it can't read, and all with semicolons, and says so.
		if want := values[name]; parseErr == nil {
			expected := absent
			switch {
			case len(want) == 1:
				expected = outcome(want[0], nil)
			case len(want) > 1:
				expected = repeated
			}
			if result := outcome(got, err); result != expected {
				t.Fatalf("Query(%q, %q) = %s, want %s", target, name, result, expected)
			}
		} else if result := outcome(got, err); result == absent && len(want) > 0 {
			t.Errorf("Query(%q, %q) = %s, want one of %q", target, name, result, want)
		}
		if err != nil {
			return
		}
		for _, spelling := range []string{
			url.Values{name: {got}}.Encode(), "x=1&&" + percent(name) + "=" + percent(got) + "&#" + url.QueryEscape(name) + "=x",
		} {
			if again, err := extract.Query("/?"+spelling, name); again != got || err != nil {
				t.Errorf("Query(%q, %q) = %q, but of %q it is %q, %v", target, name, got, spelling, again, err)
			}
		}
	})
}

// percent escapes each byte, letters too.
func percent(s string) string {
	const digits = "0123456789aBcDeF"
	var b strings.Builder
	for i := range len(s) {
		b.WriteByte('%')
		b.WriteByte(digits[s[i]>>4])
		b.WriteByte(digits[s[i]&0xF])
	}
	return b.String()
}

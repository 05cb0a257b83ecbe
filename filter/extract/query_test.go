package extract_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

const badEscape = "has a bad percent escape"

func TestQuery(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct{ target, name, want string }{
		{"/v1?tenant=acme", "tenant", `"acme"`},
		{"/v1?a=b&tenant=acme&c=d", "tenant", `"acme"`},
		{"/v1?tenant=a%20b%2Bc%26+d", "tenant", `"a b+c& d"`},
		{"/v1?%74%65nant=acme", "tenant", `"acme"`},
		{"/v1?my+name=acme", "my name", `"acme"`},
		{"/v1?my%20name=acme", "my name", `"acme"`},
		{"/v1?tenant=a=b", "tenant", `"a=b"`},
		{"/v1?tenant=a?b", "tenant", `"a?b"`},
		{"/v1?tenant=1%20%C0%A7", "tenant", `"1 \xc0\xa7"`},
		{"/v1?tenant=a%00b", "tenant", `"a\x00b"`},
		{"?tenant=acme", "tenant", `"acme"`},
		{"/v1?tenant=acme#tenant=b", "tenant", `"acme"`},
		{"/v1?&&tenant=acme&", "tenant", `"acme"`},
		{"/v1?a=%zz&tenant=acme", "tenant", `"acme"`},
		{"/v1?=acme", "", `"acme"`},
		{"/v1?tenant=a;b", "tenant", `"a;b"`},

		{"/v1", "tenant", absent},
		{"/v1?", "tenant", absent},
		{"", "tenant", absent},
		{"/v1?Tenant=acme", "tenant", absent},
		{"/v1?tenants=acme", "tenant", absent},
		{"/v1?tenan=acme", "tenant", absent},
		{"/v1?a=1;tenant=acme", "tenant", absent},
		{"/v1#?tenant=acme", "tenant", absent},
		{"/tenant=acme", "tenant", absent},
		{"/v1?&", "", absent},

		{"/v1?tenant=a&tenant=b", "tenant", repeated},
		{"/v1?tenant=a&tenant=a", "tenant", repeated},
		{"/v1?tenant=a&t%65nant=b", "tenant", repeated},
		{"/v1?tenant&tenant", "tenant", repeated},
		{"/v1?tenant=%zz&tenant=b", "tenant", repeated},

		{"/v1?tenant=%", "tenant", badEscape},
		{"/v1?tenant=%2", "tenant", badEscape},
		{"/v1?tenant=%G0", "tenant", badEscape},
		{"/v1?tenant=%0G", "tenant", badEscape},
		{"/v1?tenant%zz=b&tenant=a", "tenant", badEscape},
		{"/v1?tenant=a&%zz=b", "tenant", badEscape},
	} {
		if got := outcome(extract.Query(tc.target, tc.name)); got != tc.want {
			t.Errorf("Query(%q, %q) = %s, want %s", tc.target, tc.name, got, tc.want)
		}
	}
}

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

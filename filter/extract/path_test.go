package extract_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

const (
	noPath = "is not a path that begins with a slash"
	dots   = "has a dot segment"
)

func TestPathOf(t *testing.T) {
	t.Parallel()

	for target, want := range map[string]string{
		"/v1/acme":        "/v1/acme",
		"/v1/acme?a=b/c":  "/v1/acme",
		"/v1/acme#a?b":    "/v1/acme",
		"/v1/acme%3Fa":    "/v1/acme%3Fa",
		"?a":              "",
		"":                "",
		"*":               "*",
		"example.com:443": "example.com:443",
	} {
		if got := extract.PathOf(target); got != want {
			t.Errorf("PathOf(%q) = %q, want %q", target, got, want)
		}
	}
}

func TestSegment(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		path string
		n    int
		want string
	}{
		{"/v1/acme/jobs", 1, `"v1"`},
		{"/v1/acme/jobs", 2, `"acme"`},
		{"/v1/acme/jobs", 3, `"jobs"`},
		{"/v1/acme/", 2, `"acme"`},
		{"/v1/a%63me", 2, `"acme"`},
		{"/v1/a%2Fb", 2, `"a/b"`},
		{"/v1/a%25b", 2, `"a%b"`},
		{"/v1/a+b", 2, `"a+b"`},
		{"/v1//jobs", 2, `""`},
		{"/v1//", 2, `""`},
		{"//v1", 1, `""`},
		{"/...", 1, `"..."`},
		{"/%zz/acme", 2, `"acme"`},
		{"/v1/ACME", 2, `"ACME"`},

		{"/v1/acme/jobs", 4, absent},
		{"/v1/acme/", 3, absent},
		{"/v1", 0, absent},
		{"/v1", -1, absent},
		{"/v1", 1 << 40, absent},
		{"/", 1, absent},
		{"", 1, absent},

		{"*", 1, noPath},
		{"v1/acme", 1, noPath},
		{"http://example.com/v1", 1, noPath},
		{"/v1/..", 2, dots},
		{"/v1/.", 2, dots},
		{"/v1/%2e%2E", 2, dots},
		{"/v1/a%", 2, badEscape},
		{"/v1/a%2", 2, badEscape},
		{"/v1/%zz", 2, badEscape},
	} {
		if got := outcome(extract.Segment(tc.path, tc.n)); got != tc.want {
			t.Errorf("Segment(%q, %d) = %s, want %s", tc.path, tc.n, got, tc.want)
		}
	}
}

func TestPrefix(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		path string
		n    int
		want string
	}{
		{"/v1/acme/jobs", 1, `"/v1"`},
		{"/v1/acme/jobs", 2, `"/v1/acme"`},
		{"/v1/acme/", 2, `"/v1/acme"`},
		{"/v1/a%63me/x", 2, `"/v1/acme"`},
		{"/v1//jobs", 2, `"/v1/"`},
		{"/v1//jobs", 3, `"/v1//jobs"`},
		{"/v1/acme/%zz/..", 2, `"/v1/acme"`},
		{"/v1/a+b", 2, `"/v1/a+b"`},

		{"/v1/acme", 3, absent},
		{"/v1", 0, absent},
		{"/", 1, absent},
		{"", 1, absent},
		{"v1", 1, noPath},
		{"/v1/../jobs", 3, dots},
		{"/%2e/jobs", 2, dots},
		{"/v1/%/jobs", 3, badEscape},
	} {
		if got := outcome(extract.Prefix(tc.path, tc.n)); got != tc.want {
			t.Errorf("Prefix(%q, %d) = %s, want %s", tc.path, tc.n, got, tc.want)
		}
	}
}

// Segments that are joined don't collide with others that are joined elsewhere.
func TestC18Prefix(t *testing.T) {
	t.Parallel()

	seen := map[string]string{}
	for _, path := range []string{
		"/a/b_c", "/a_b/c", "/a%2Fb/c", "/a/b%2Fc", "/a%252Fb/c", "/a%25252Fb/c", "/%2Fa/b", "//a",
		"/a%00/b", "/a/%00b", "/a%0A/b", "/a%7Cb/c", "/a.b/c", "/a:b/c", "/a%25/c", "/a%22/b", "/a%27/b",
	} {
		got, err := extract.Prefix(path, 2)
		if err != nil {
			t.Errorf("Prefix(%q, 2) = %v", path, err)
		}
		if other, ok := seen[got]; ok {
			t.Errorf("Prefix(%q, 2) = Prefix(%q, 2) = %q", path, other, got)
		}
		seen[got] = path
	}
}

// splitByReference returns the segments of a path, not decoded.
func splitByReference(path string) []string {
	if path == "/" {
		return nil
	}
	return strings.Split(strings.TrimSuffix(path[1:], "/"), "/")
}

// decodeByReference decodes one segment by net/url.
func decodeByReference(segment string) (string, bool) {
	value, err := url.PathUnescape(segment)
	return value, err == nil && value != "." && value != ".."
}

// joinByReference joins what segments stand for, each with a slash before it.
func joinByReference(segments []string) (string, bool) {
	var b strings.Builder
	for _, segment := range segments {
		value, ok := decodeByReference(segment)
		if !ok {
			return "", false
		}
		b.WriteString("/" + strings.NewReplacer("/", "%2F", "%", "%25").Replace(value))
	}
	return b.String(), true
}

// Segments are what net/url decodes, prefixes tell all their segments, and both are
// the same from every spelling.
func FuzzPath(f *testing.F) {
	for _, target := range []string{
		"/v1/acme/jobs?x=/y", "/a//b/", "/", "//", "", "*", "http://a/b", "/a%2Fb/%25", "/a/%zz/b", "/./a", "/%2e%2E/a",
		"/a%", "/%C0%A7", "/a#/b", "/a+b/", "/...", "/a;v=1/b",
	} {
		for n := range 4 {
			f.Add(target, n)
		}
	}
	f.Fuzz(func(t *testing.T, target string, n int) {
		path := extract.PathOf(target)
		if !strings.HasPrefix(target, path) || strings.ContainsAny(path, "?#") ||
			len(path) < len(target) && target[len(path)] != '?' && target[len(path)] != '#' {
			t.Fatalf("PathOf(%q) = %q", target, path)
		}
		segment, segmentErr := extract.Segment(path, n)
		prefix, prefixErr := extract.Prefix(path, n)
		if !strings.HasPrefix(path, "/") {
			want := "is not a path that begins with a slash"
			if path == "" {
				want = absent
			}
			if s, p := outcome(segment, segmentErr), outcome(prefix, prefixErr); s != want || p != want {
				t.Errorf("of %q: Segment %s, Prefix %s; want %s", path, s, p, want)
			}
			return
		}
		segments := splitByReference(path)
		if n < 1 || n > len(segments) {
			if s, p := outcome(segment, segmentErr), outcome(prefix, prefixErr); s != absent || p != absent {
				t.Errorf("of %q, %d: Segment %s, Prefix %s", path, n, s, p)
			}
			return
		}
		want, ok := decodeByReference(segments[n-1])
		if (segmentErr == nil) != ok || ok && segment != want {
			t.Errorf("Segment(%q, %d) = %q, %v; want %q, ok: %v", path, n, segment, segmentErr, want, ok)
		}
		want, ok = joinByReference(segments[:n])
		if (prefixErr == nil) != ok || ok && prefix != want {
			t.Errorf("Prefix(%q, %d) = %q, %v; want %q, ok: %v", path, n, prefix, prefixErr, want, ok)
		}
		if prefixErr != nil {
			return
		}
		if again, err := extract.Prefix(prefix+"/x", n); again != prefix || err != nil {
			t.Errorf("Prefix(%q, %d) = %q, whose own is %q, %v", path, n, prefix, again, err)
		}
		respelt := []string{""}
		for _, segment := range segments[:n] {
			value, _ := decodeByReference(segment)
			respelt = append(respelt, percent(value))
		}
		spelling := strings.Join(append(respelt, "x"), "/")
		if again, err := extract.Prefix(spelling, n); again != prefix || err != nil {
			t.Errorf("Prefix(%q, %d) = %q, but of %q it is %q, %v", path, n, prefix, spelling, again, err)
		}
		if again, err := extract.Segment(spelling, n); again != segment || err != nil {
			t.Errorf("Segment(%q, %d) = %q, but of %q it is %q, %v", path, n, segment, spelling, again, err)
		}
	})
}

func TestPath(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct{ path, want, err string }{
		{"/", "/", ""},
		{"/a/b", "/a/b", ""},
		{"/a/b/", "/a/b", ""},
		{"/%61%2fb/%25", "/a%2Fb/%25", ""},
		{"//a", "//a", ""},
		{"", "", "is absent"},
		{"*", "", noPath},
		{"/a/%2E./b", "", dots},
		{"/a/%2", "", "has a bad percent escape"},
	} {
		got, err := extract.Path(tc.path)
		text := ""
		if err != nil {
			text = err.Error()
		}
		if got != tc.want || text != tc.err {
			t.Errorf("Path(%q) = %q, %q; want %q, %q", tc.path, got, text, tc.want, tc.err)
		}
	}
}

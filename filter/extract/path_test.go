package extract_test

import (
	"net/url"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

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
		spelling := "/"
		for _, segment := range segments[:n] {
			value, _ := decodeByReference(segment)
			spelling += percent(value) + "/"
		}
		spelling += "x"
		if again, err := extract.Prefix(spelling, n); again != prefix || err != nil {
			t.Errorf("Prefix(%q, %d) = %q, but of %q it is %q, %v", path, n, prefix, spelling, again, err)
		}
		if again, err := extract.Segment(spelling, n); again != segment || err != nil {
			t.Errorf("Segment(%q, %d) = %q, but of %q it is %q, %v", path, n, segment, spelling, again, err)
		}
	})
}

package extract_test

import (
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

// matchByReference matches a path with the segments of a pattern that has been read,
// and returns what each named part has, not decoded.
func matchByReference(pattern, segments []string) (parts map[string][]string, ok bool) {
	if len(pattern) == 0 {
		return map[string][]string{}, len(segments) == 0
	}
	first := pattern[0]
	name, named := strings.CutPrefix(strings.TrimSuffix(first, "}"), "{")
	if rest, isRest := strings.CutSuffix(name, "..."); first == "**" || named && isRest {
		return map[string][]string{rest: segments}, true
	}
	if len(segments) == 0 {
		return nil, false
	}
	if !named && first != "*" {
		want, _ := url.PathUnescape(first)
		if got, err := url.PathUnescape(segments[0]); err != nil || got != want {
			return nil, false
		}
	}
	parts, ok = matchByReference(pattern[1:], segments[1:])
	if named && ok {
		parts[name] = segments[:1]
	}
	return parts, ok
}

// A pattern matches as one that goes through lists of segments.
func FuzzPattern(f *testing.F) {
	for _, pattern := range []string{
		"/", "/v1/{tenant}/**", "/v1/*/jobs", "/{a}/{b}", "/{a}/{a}", "/{rest...}", "/v1/{rest...}", "/a%2Fb/%2a",
		"/**/a", "/a*", "/{A}", "/a/", "a", "", "/..", "/%zz", "/{}", "/{...}", "/***", "/{a}b", "/\xff",
	} {
		for _, path := range []string{"/", "/v1/acme/jobs", "/v1/acme/jobs/7/", "/v1/", "/a%2fb/*", "/v1//x", "/%zz/..", "", "*", "/a//"} {
			f.Add(pattern, path)
		}
	}
	f.Fuzz(func(t *testing.T, text, path string) {
		p, err := extract.ParsePattern(text)
		if err != nil {
			if p.Match(path) || p.String() != "" || p.Parts() != nil {
				t.Errorf("ParsePattern(%q) = %v, but it matches %q", text, err, path)
			}
			return
		}
		if p.String() != text {
			t.Errorf("ParsePattern(%q).String() = %q", text, p)
		}
		path = extract.PathOf(path)
		parts, ok := map[string][]string(nil), false
		if strings.HasPrefix(path, "/") {
			parts, ok = matchByReference(splitByReference(text), splitByReference(path))
		}
		if p.Match(path) != ok {
			t.Fatalf("%q matches %q: %v, want %v", text, path, !ok, ok)
		}
		for _, name := range append(p.Parts(), "", "nobody") {
			isRest := strings.HasSuffix(text, "{"+name+"...}")
			want, wantOK := absent, true
			if segments, there := parts[name]; there && name != "" {
				var value string
				switch {
				case isRest:
					value, wantOK = joinByReference(segments)
					value = strings.TrimPrefix(value, "/")
				default:
					value, wantOK = decodeByReference(segments[0])
				}
				want = outcome(value, nil)
			} else if name == "nobody" && slices.Contains(p.Parts(), name) {
				continue
			}
			got := outcome(p.Part(path, name))
			if wantOK && got != want || !wantOK && (got == absent || strings.HasPrefix(got, `"`)) {
				t.Errorf("Part %q of %q by %q = %s, want %s, ok: %v", name, path, text, got, want, wantOK)
			}
		}
		if !strings.ContainsAny(text, "*{") && !p.Match(text) {
			t.Errorf("%q does not match itself", text)
		}
	})
}

package extract_test

import (
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

// pattern reads a pattern that is right.
func pattern(tb testing.TB, text string) extract.Pattern {
	tb.Helper()

	p, err := extract.ParsePattern(text)
	if err != nil {
		tb.Fatalf("ParsePattern(%q): %v", text, err)
	}
	return p
}

func TestParsePattern(t *testing.T) {
	t.Parallel()

	for text, want := range map[string][]string{
		"/":                            nil,
		"/v1/jobs":                     nil,
		"/v1/*/**":                     nil,
		"/v1/{tenant}/jobs/{job_2}":    {"tenant", "job_2"},
		"/{first}/{rest...}":           {"first", "rest"},
		"/**":                          nil,
		"/a%2Fb/%2A/%7Bx%7D":           nil,
		"/...":                         nil,
		"/v1:batch/a.b~c/a;b=c,d@e$!'": nil,
	} {
		p, err := extract.ParsePattern(text)
		if err != nil || p.String() != text || !slices.Equal(p.Parts(), want) {
			t.Errorf("ParsePattern(%q) = %q with parts %q, %v; want %q", text, p, p.Parts(), err, want)
		}
	}
	for text, want := range map[string]string{
		"":              "begin with a slash",
		"v1":            "begin with a slash",
		"*":             "begin with a slash",
		"/v1/":          "slash at its end",
		"//v1":          "empty segment",
		"/**/v1":        "at the end only",
		"/{rest...}/v1": "at the end only",
		"/{a}/{a}":      `"a"`,
		"/{a}/{a...}":   `"a"`,
		"/{A}":          `"A"`,
		"/{a-b}":        `"a-b"`,
		"/{}":           "name is of",
		"/{...}":        "name is of",
		"/{a....}":      `"a."`,
		"/v*":           `"*"`,
		"/***":          `"*"`,
		"/{a}b":         `"{"`,
		"/b{a}":         `"{"`,
		"/{a":           `"{"`,
		"/a}":           `"}"`,
		"/a?b":          `"?"`,
		"/a#b":          `"#"`,
		"/a/%zz":        badEscape,
		"/a/..":         dots,
		"/a/%2e":        dots,
	} {
		p, err := extract.ParsePattern(text)
		if err == nil || !strings.Contains(err.Error(), want) || p.String() != "" {
			t.Errorf("ParsePattern(%q) = %q, %v; want an error with %q", text, p, err, want)
		}
	}
}

func TestPatternMatch(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		pattern string
		match   []string
		not     []string
	}{
		{"/", []string{"/"}, []string{"", "//", "/a", "*"}},
		{
			"/v1/jobs",
			[]string{"/v1/jobs", "/v1/jobs/", "/v1/j%6Fbs", "/%761/jobs"},
			[]string{"/v1", "/v1/jobs/7", "/v1/Jobs", "/v1//jobs", "/v1/jobs//", "/v1%2Fjobs", "/v1/jobs%zz", "v1/jobs", "/"},
		},
		{"/v1/*", []string{"/v1/a", "/v1/a/", "/v1//", "/v1/%zz", "/v1/.."}, []string{"/v1", "/v1/", "/v1/a/b", "/v2/a"}},
		{"/v1/**", []string{"/v1", "/v1/", "/v1/a", "/v1/a/b/", "/v1//"}, []string{"/", "/v2", "/v10"}},
		{"/**", []string{"/", "//", "/a/b", "/%zz/.."}, []string{"", "*", "a"}},
		{"/{a}/x/{rest...}", []string{"/1/x", "/1/x/", "/1/x/2/3"}, []string{"/1", "/1/y/2"}},
		{"/a%2Fb", []string{"/a%2Fb", "/a%2fb", "/%61%2F%62"}, []string{"/a/b", "/a%252Fb"}},
	} {
		p := pattern(t, tc.pattern)
		for _, path := range tc.match {
			if !p.Match(path) {
				t.Errorf("%q does not match %q", tc.pattern, path)
			}
		}
		for _, path := range tc.not {
			if p.Match(path) {
				t.Errorf("%q matches %q", tc.pattern, path)
			}
		}
	}
	var zero extract.Pattern
	if zero.Match("/") || zero.Match("") || zero.String() != "" || zero.Parts() != nil {
		t.Error("the zero Pattern matches something")
	}
}

func TestPatternPart(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct{ pattern, path, name, want string }{
		{"/v1/{tenant}/jobs", "/v1/acme/jobs", "tenant", `"acme"`},
		{"/v1/{tenant}/jobs", "/v1/a%63me/j%6Fbs/", "tenant", `"acme"`},
		{"/v1/{tenant}/jobs", "/v1/a%2Fb/jobs", "tenant", `"a/b"`},
		{"/v1/{tenant}/{job}", "/v1/acme/7", "job", `"7"`},
		{"/{tenant}/**", "/acme/%zz/..", "tenant", `"acme"`},
		{"/v1/{rest...}", "/v1/a/b%2Fc/%25", "rest", `"a/b%2Fc/%25"`},
		{"/v1/{rest...}", "/v1/%61/b/", "rest", `"a/b"`},
		{"/v1/{rest...}", "/v1", "rest", `""`},
		{"/v1/{rest...}", "/v1/", "rest", `""`},
		{"/{rest...}", "/", "rest", `""`},

		{"/v1/{tenant}", "/v1", "tenant", absent},
		{"/v1/{tenant}", "/v1/acme/jobs", "tenant", absent},
		{"/v1/{tenant}", "", "tenant", absent},
		{"/v1/{tenant}", "/v1/acme", "other", absent},
		{"/v1/*", "/v1/acme", "", absent},
		{"/v1/{tenant}", "/v1/..", "tenant", dots},
		{"/v1/{tenant}", "/v1/%2e", "tenant", dots},
		{"/v1/{tenant}", "/v1/%zz", "tenant", badEscape},
		{"/v1/{rest...}", "/v1/a/../b", "rest", dots},
		{"/v1/{rest...}", "/v1/a/%", "rest", badEscape},
	} {
		if got := outcome(pattern(t, tc.pattern).Part(tc.path, tc.name)); got != tc.want {
			t.Errorf("Part %q of %q by %q = %s, want %s", tc.name, tc.path, tc.pattern, got, tc.want)
		}
	}
	if got := outcome(extract.Pattern{}.Part("/", "")); got != absent {
		t.Errorf("a part of the zero Pattern = %s", got)
	}
}

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

package policy_test

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/weir-dev/weir/policy"
)

// slowGlob is what a pattern means, without a thought for time.
func slowGlob(pattern, s string) bool {
	if pattern == "" {
		return s == ""
	}
	if pattern[0] == '*' {
		return slowGlob(pattern[1:], s) || s != "" && slowGlob(pattern, s[1:])
	}
	return s != "" && s[0] == pattern[0] && slowGlob(pattern[1:], s[1:])
}

func TestGlobIsWhatItMeans(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		pattern := rapid.StringMatching(`[ab*]{0,8}`).Draw(t, "pattern")
		s := rapid.StringMatching(`[ab*]{0,10}`).Draw(t, "s")
		if got, want := policy.Glob(pattern, s), slowGlob(pattern, s); got != want {
			t.Fatalf("glob(%q, %q) = %v, want %v", pattern, s, got, want)
		}
	})
}

// PEERS C22: what is said to be never reached never is.
func TestC22CoveredIsNeverReached(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		pattern := rapid.StringMatching(`[ab*]{1,5}`)
		p, q := pattern.Draw(t, "earlier"), pattern.Draw(t, "later")
		s := rapid.StringMatching(`[ab*]{0,8}`).Draw(t, "s")
		if policy.Covers(p, q) && slowGlob(q, s) && !slowGlob(p, s) {
			t.Fatalf("%q is said to cover %q, which alone matches %q", p, q, s)
		}
	})
}

func FuzzMatch(f *testing.F) {
	p, err := policy.Parse("fuzz.yaml", []byte(`
domain: d
descriptors:
  - {key: a, value: x, name: exact, quota: {daily: 1}}
  - {key: a, value: "*a*b*", name: within, quota: {daily: 1}}
  - {key: a, value: "x*y", share_threshold: true, name: shared, quota: {daily: 1}}
  - {key: k*, name: keys, quota: {daily: 1}}
  - {key: a, name: bare, quota: {daily: 1}, descriptors: [{key: a, name: deep, quota: {daily: 1}}]}
`))
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range [][4]string{
		{"a", "x", "", ""},
		{"a", "1a2b3", "", ""},
		{"a", "xy", "", ""},
		{"kk", "", "", ""},
		{"a", "q", "a", "\xff\x00"},
		{"", "", "", ""},
		{"a", "*a*b*", "", ""},
	} {
		f.Add(seed[0], seed[1], seed[2], seed[3])
	}
	// Any bytes have a limit or none, by the rules, and what matched names itself.
	f.Fuzz(func(t *testing.T, key, value, key2, value2 string) {
		if len(value) > 64 || len(key) > 64 {
			return // slowGlob would take ages
		}
		d := policy.Descriptor{{Key: key, Value: value}}
		if key2 != "" || value2 != "" {
			d = append(d, policy.Entry{Key: key2, Value: value2})
		}
		want := ""
		switch {
		case key == "a" && value == "x":
			want = "exact"
		case key == "a" && slowGlob("*a*b*", value):
			want = "within"
		case key == "a" && slowGlob("x*y", value):
			want = "shared"
		case slowGlob("k*", key):
			want = "keys"
		case key == "a":
			want = "bare"
		}
		if len(d) == 2 {
			if want == "bare" && key2 == "a" {
				want = "deep"
			} else {
				want = ""
			}
		}
		m, ok := p.Match(d)
		if ok != (want != "") || ok && m.Limit.Name != want {
			t.Fatalf("Match(%q) = %v, %v, want %q", d, m.Limit, ok, want)
		}
		if !ok {
			return
		}
		again, ok := p.Match(m.Consumer().Entries)
		if !ok || again.Consumer().ID != m.Consumer().ID {
			t.Fatalf("the consumer's own entries %q match %v", m.Consumer().Entries, again.Limit)
		}
		if m.LimiterBucket().ID == m.RateLimitCounter() {
			t.Fatal("two kinds share a counter")
		}
	})
}

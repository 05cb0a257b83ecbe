package policy_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/weir-dev/weir/policy"
)

const identityPolicy = `
domain: d
descriptors:
  - &all
    key: a
    limiter: {permits: 1, per: 1s}
    rate_limit: {unit: hour, requests_per_unit: 1}
    quota: {daily: 1}
  - {<<: *all, value: x}
  - {<<: *all, value: s*, share_threshold: true}
  - {<<: *all, value: p*}
  - <<: *all
    key: b
    descriptors: [*all]
`

// counters returns all counters that a descriptor could be charged to, by name.
func counters(t *testing.T, p *policy.Policy, d policy.Descriptor) map[string]policy.CounterID {
	t.Helper()
	m, ok := p.Match(d)
	if !ok {
		t.Fatalf("%v matches nothing", d)
	}
	ids := map[string]policy.CounterID{
		"limiter":    m.LimiterBucket().ID,
		"rate_limit": m.RateLimitCounter(),
		"quota":      m.Consumer().ID,
		"override":   policy.OverrideCounter(p.Domain, d),
	}
	if !m.Limit.Named {
		ids["overflow"] = m.Consumer().Overflow
	}
	return ids
}

// PEERS C34: what a limit counts is part of its counter's identity. (A window's unit and
// start are in its row.)
func TestC34KindsDoNotShareCounters(t *testing.T) {
	t.Parallel()

	p := mustParse(t, identityPolicy)
	seen := map[policy.CounterID]string{}
	for _, text := range []string{"a=x", "a=s1", "a=p1", "a=other", "b=1", "b=1 a=1"} {
		for kind, id := range counters(t, p, descriptor(text)) {
			name := kind + " of " + text
			if other, ok := seen[id]; ok {
				t.Errorf("%s is the %s", name, other)
			}
			seen[id] = name
		}
	}
}

// PEERS C33, C74: a file that is read again has the same counters, and so has one whose
// limits, names, units and order have changed.
func TestC33C74CountersOutliveReloads(t *testing.T) {
	t.Parallel()

	edited := `
domain: d
max_consumers: 7
descriptors:
  - &all
    key: b
    name: renamed
    limiter: {permits: 9, per: 1h, burst: 3}
    rate_limit: {unit: day, requests_per_unit: 9}
    quota: {minutely: 1, yearly: 9}
    shadow_mode: true
    descriptors: [{<<: *inner}]
  - {<<: *all, key: a, value: p*}
  - {<<: *all, key: a, value: s*, share_threshold: true}
  - {<<: *all, key: a, value: x}
  - {<<: *all, key: a}
`
	edited = strings.ReplaceAll(edited, "{<<: *inner}", "{key: a, quota: {daily: 9}}")
	before := mustParse(t, identityPolicy)
	after := mustParse(t, edited)
	var reloaded *policy.Policy
	for range 100 {
		reloaded = mustParse(t, identityPolicy)
	}
	for _, text := range []string{"a=x", "a=s1", "a=p1", "a=other", "b=1", "b=1 a=1"} {
		want := counters(t, before, descriptor(text))
		if diff := cmp.Diff(want, counters(t, after, descriptor(text))); diff != "" {
			t.Errorf("%s lost counters to an edit (-before +after):\n%s", text, diff)
		}
		if diff := cmp.Diff(want, counters(t, reloaded, descriptor(text))); diff != "" {
			t.Errorf("%s lost counters to a reload (-before +after):\n%s", text, diff)
		}
	}
}

// What is hashed is in every database: it never changes. A failure here is a failure of
// every counter that is in use.
func TestCountersAreForEver(t *testing.T) {
	t.Parallel()

	var got strings.Builder
	p := mustParse(t, identityPolicy)
	for _, text := range []string{"a=x", "a=s1", "b=1 a=1"} {
		ids := counters(t, p, descriptor(text))
		for _, kind := range []string{"quota", "rate_limit", "limiter", "override", "overflow"} {
			if id, ok := ids[kind]; ok {
				fmt.Fprintf(&got, "%s: %s %x\n", text, kind, id[:6])
			}
		}
	}
	const want = `a=x: quota 933c406d1a9a
a=x: rate_limit ec95976633a9
a=x: limiter 0634e15a08fa
a=x: override 970b5f34b2d8
a=s1: quota 49b6d9b5d264
a=s1: rate_limit ac0cb973f350
a=s1: limiter 052ffb395c0f
a=s1: override 1dd8f5dde237
b=1 a=1: quota e1a523162527
b=1 a=1: rate_limit 06f69358499e
b=1 a=1: limiter 307d0045aaea
b=1 a=1: override 912e4ed14fd3
b=1 a=1: overflow f8a7584ccc18
`
	if diff := cmp.Diff(want, got.String()); diff != "" {
		t.Errorf("counters differ (-want +got):\n%s", diff)
	}
}

// PEERS C19: a key that is repeated is two levels, and other descriptors of a request do
// not fill a gap.
func TestC19RepeatedKeysAreLevels(t *testing.T) {
	t.Parallel()

	p := mustParse(t, `
domain: d
descriptors:
  - key: a
    value: 1
    descriptors:
      - {key: a, value: 2, name: both, quota: {daily: 1}}
  - key: b
    descriptors: [{key: c, descriptors: [{key: d, name: three, quota: {daily: 1}}]}]
`)
	for text, want := range map[string]string{
		"a=1 a=2": "both", "a=2 a=1": "", "a=1": "", "a=2": "",
		"b=1 c=1 d=1": "three", "b=1": "", "c=1 d=1": "", "d=1": "", "b=1 d=1 c=1": "",
	} {
		m, ok := p.Match(descriptor(text))
		if ok != (want != "") || ok && m.Limit.Name != want {
			t.Errorf("Match(%s) = %v, %v, want %q", text, m.Limit, ok, want)
		}
	}
}

// The overflow's counter belongs to a descriptor of the policy, not to what a client
// sends, and only those whom the policy does not spell out can be charged to it.
func TestOverflow(t *testing.T) {
	t.Parallel()

	p := mustParse(t, `
domain: d
max_consumers: 7
descriptors:
  - {key: a, quota: {daily: 1}}
  - {key: a, value: x, quota: {daily: 1}}
  - {key: a, value: p*, quota: {daily: 1}}
  - {key: a, value: s*, share_threshold: true, quota: {daily: 1}}
  - {key: k*, share_threshold: true, quota: {daily: 1}}
  - {key: b, descriptors: [{key: a, quota: {daily: 1}}]}
  - {key: b, value: x, descriptors: [{key: a, quota: {daily: 1}}]}
`)
	consumer := func(text string) *policy.Consumer {
		m, ok := p.Match(descriptor(text))
		if !ok {
			t.Fatalf("%s matches nothing", text)
		}
		return m.Consumer()
	}
	first := map[policy.CounterID]string{}
	for _, same := range [][]string{
		{"a=1", "a=2", "a=", "a=a"},
		{"a=p", "a=p1"},
		{"b=1 a=1", "b=2 a=2", "b= a="},
		{"b=x a=1", "b=x a=2"},
		{"k1=1", "k2=1", "k2="},
	} {
		want := consumer(same[0])
		if other, ok := first[want.Overflow]; ok || want.Overflow == (policy.CounterID{}) {
			t.Errorf("%s has the overflow of %q", same[0], other)
		}
		first[want.Overflow] = same[0]
		for _, text := range same {
			c := consumer(text)
			if c.Named || c.Most != 7 || c.Overflow != want.Overflow {
				t.Errorf("%s: named %v, most %d, overflow %x, want false, 7, %x", text, c.Named, c.Most, c.Overflow, want.Overflow)
			}
		}
	}
	for _, text := range []string{"a=x", "a=s1"} {
		if c := consumer(text); !c.Named || c.Most != 0 || c.Overflow != (policy.CounterID{}) {
			t.Errorf("%s: named %v, most %d, overflow %x, want true, 0 and none", text, c.Named, c.Most, c.Overflow)
		}
	}
	if consumer("k1=1").ID == consumer("k2=1").ID || consumer("k1=1").ID != consumer("k1=2").ID {
		t.Error("a shared pattern of keys has one counter for each key")
	}
}

func TestNamedConsumers(t *testing.T) {
	t.Parallel()

	p := mustParse(t, `
domain: d
descriptors:
  - {key: a, quota: {daily: 1}}
  - {key: a, value: x, quota: {daily: 1}}
  - {key: a, value: y, limiter: {permits: 1, per: 1s}}
  - {key: a, value: s*, share_threshold: true, quota: {daily: 1}}
  - key: a
    value: z
    descriptors:
      - {key: b, value: "1", quota: {daily: 1}, shadow_mode: true}
      - {key: b, quota: {daily: 1}}
`)
	want := []policy.Descriptor{descriptor("a=x"), descriptor("a=s*"), descriptor("a=z b=1")}
	var got []policy.Descriptor
	for _, c := range p.NamedConsumers() {
		got = append(got, c.Entries)
		m, ok := p.Match(c.Entries)
		if !ok {
			t.Fatalf("%v matches nothing", c.Entries)
		}
		if diff := cmp.Diff(c, *m.Consumer()); diff != "" || c.Domain != "d" || !c.Named {
			t.Errorf("a request's consumer differs (-named +matched):\n%s", diff)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("NamedConsumers differ (-want +got):\n%s", diff)
	}
	if m, _ := p.Match(descriptor("a=s7")); m.Consumer().ID != p.NamedConsumers()[1].ID {
		t.Error("a value of a shared pattern has another consumer")
	}
}

func TestLimiterBucket(t *testing.T) {
	t.Parallel()

	p := mustParse(t, `
domain: shop
descriptors:
  - {key: consumer, limiter: {permits: 1, per: 1s}}
  - {key: consumer, value: alice, limiter: {permits: 1, per: 1s}}
  - {key: t, value: f*, share_threshold: true, descriptors: [{key: path, limiter: {permits: 1, per: 1s}}]}
`)
	for text, want := range map[string]string{
		"consumer=alice":                       "consumer=alice",
		"consumer=bob":                         "consumer=bob",
		"consumer=":                            "consumer=",
		"t=free path=/x":                       "t=f*, path=/x",
		"consumer=" + strings.Repeat("x", 65):  "consumer=" + strings.Repeat("x", 64) + "…",
		"consumer=" + strings.Repeat("ö", 99):  "consumer=" + strings.Repeat("ö", 32) + "…",
		"consumer=x" + strings.Repeat("ö", 99): "consumer=x" + strings.Repeat("ö", 31) + "…",
	} {
		m, ok := p.Match(descriptor(text))
		if !ok {
			t.Fatalf("%s matches nothing", text)
		}
		if b := m.LimiterBucket(); b.Namespace != "shop" || b.Subject != want {
			t.Errorf("LimiterBucket(%s) = %q of %q, want %q of shop", text, b.Subject, b.Namespace, want)
		}
	}
}

// PEERS C18, for descriptors that bring their own limit.
func TestC18OverridesDoNotCollide(t *testing.T) {
	t.Parallel()

	seen := map[policy.CounterID]string{}
	for _, domain := range []string{"d", "d_a", ""} {
		for _, d := range []policy.Descriptor{
			{{Key: "a", Value: "b_c"}},
			{{Key: "a_b", Value: "c"}},
			{{Key: "b", Value: "c"}},
			{{Key: "a", Value: "b"}, {Key: "c"}},
			{{Key: "a", Value: "b"}},
			{{Key: "a"}, {Key: "b"}},
			{{Key: "a"}},
			{{Value: "a"}},
			{{}},
			{{}, {}},
			{{Key: "a", Value: "\x00"}},
			{{Key: "a", Value: "\x01b\x00"}},
		} {
			id := policy.OverrideCounter(domain, d)
			name := fmt.Sprintf("%q %q", domain, d)
			if other, ok := seen[id]; ok {
				t.Errorf("%s and %s share a counter", name, other)
			}
			seen[id] = name
		}
	}
}

// PEERS C23: whatever matched and is replaced goes, and nothing else.
func TestC23Replace(t *testing.T) {
	t.Parallel()

	p := mustParse(t, `
domain: d
descriptors:
  - {key: base, rate_limit: {unit: hour, requests_per_unit: 1, name: base}}
  - {key: same, quota: {daily: 1}, name: base}
  - {key: vip, rate_limit: {unit: hour, requests_per_unit: 2, name: vip, replaces: [{name: base}]}}
  - {key: top, rate_limit: {unit: hour, requests_per_unit: 3, name: top, replaces: [{name: vip}, {name: other}]}}
  - {key: free, rate_limit: {unlimited: true, name: other, replaces: [{name: base}, {name: vip}]}}
  - {key: plain, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: tricky, rate_limit: {unit: hour, requests_per_unit: 1, replaces: [{name: plain}]}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1, replaces: [{name: base}]}}
`)
	for _, test := range []struct {
		request string // descriptors of one entry
		want    string // those that still have a limit
	}{
		{"base vip", "vip"},
		{"vip base same plain", "vip plain"},
		{"base same", "base same"},
		{"base none vip", "vip"},
		{"base vip top", "top"}, // vip is replaced, and replaces base all the same
		{"base top", "base top"},
		{"base vip free", "free"},
		{"free top", "free top"},         // what is unlimited is never replaced
		{"plain tricky", "plain tricky"}, // a limit without a name of its own neither
		{"shadow base", "shadow"},
		{"base base vip vip", "vip vip"},
		{"none", ""},
	} {
		names := strings.Fields(test.request)
		matches := make([]policy.Match, len(names))
		for i, name := range names {
			matches[i], _ = p.Match(policy.Descriptor{{Key: name, Value: "1"}})
		}
		policy.Replace(matches)
		var got []string
		for i, m := range matches {
			if m.Limit != nil {
				got = append(got, names[i])
			}
		}
		if !slices.Equal(got, strings.Fields(test.want)) {
			t.Errorf("of %s stay %v, want %s", test.request, got, test.want)
		}
	}
}

func TestMatchAllocatesNothing(t *testing.T) {
	p := mustParse(t, identityPolicy)
	d := descriptor("b=1 a=1")
	named := descriptor("a=x")
	var sink policy.CounterID
	for name, f := range map[string]func(){
		"Match": func() { p.Match(d) },
		"RateLimitCounter": func() {
			m, _ := p.Match(d)
			sink = m.RateLimitCounter()
		},
		"all counters of one who is named": func() {
			m, _ := p.Match(named)
			sink = m.RateLimitCounter()
			sink = m.Consumer().ID
			sink = m.LimiterBucket().ID
		},
		"Replace": func() {
			m, _ := p.Match(d)
			policy.Replace([]policy.Match{m, m})
		},
	} {
		if n := testing.AllocsPerRun(100, f); n > 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
	}
	_ = sink
}

func BenchmarkMatch(b *testing.B) {
	var text strings.Builder
	text.WriteString("domain: d\ndescriptors:\n")
	for i := range 100 {
		fmt.Fprintf(&text, "- {key: consumer, value: c%d, quota: {daily: 1}}\n", i)
	}
	for i := range 10 {
		fmt.Fprintf(&text, "- {key: consumer, value: 'x%d*', quota: {daily: 1}}\n", i)
	}
	text.WriteString("- {key: consumer, quota: {daily: 1}, descriptors: [{key: path, limiter: {permits: 1, per: 1s}}]}\n")
	p, err := policy.Parse("bench.yaml", []byte(text.String()))
	if err != nil {
		b.Fatal(err)
	}
	for _, bench := range []struct {
		name string
		d    policy.Descriptor
		f    func(policy.Match) policy.CounterID
	}{
		{"named consumer", descriptor("consumer=c50"), func(m policy.Match) policy.CounterID { return m.Consumer().ID }},
		{"any consumer", descriptor("consumer=somebody"), func(m policy.Match) policy.CounterID { return m.Consumer().ID }},
		{"limiter", descriptor("consumer=somebody path=/a/b/c"), func(m policy.Match) policy.CounterID { return m.LimiterBucket().ID }},
	} {
		b.Run(bench.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				m, ok := p.Match(bench.d)
				if !ok {
					b.Fatal("no match")
				}
				bench.f(m)
			}
		})
	}
}

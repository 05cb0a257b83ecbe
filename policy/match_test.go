package policy_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/weir-dev/weir/policy"
)

func mustParse(t *testing.T, text string) *policy.Policy {
	t.Helper()
	p, err := policy.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// descriptor reads "a=x b=1" as two entries.
func descriptor(text string) policy.Descriptor {
	var d policy.Descriptor
	for part := range strings.FieldsSeq(text) {
		key, value, _ := strings.Cut(part, "=")
		d = append(d, policy.Entry{Key: key, Value: value})
	}
	return d
}

func TestMatch(t *testing.T) {
	t.Parallel()

	p := mustParse(t, `
domain: d
descriptors:
  - {key: foo_bar, name: glued, quota: {daily: 1}}
  - key: a
    value: x
    name: exact
    quota: {daily: 1}
  - key: a
    descriptors:
      - {key: b, name: child, quota: {daily: 1}}
  - {key: w, value: foo*, name: first, quota: {daily: 1}}
  - {key: w, value: foobar*, name: second, quota: {daily: 1}}
  - {key: w, value: "*", name: star, quota: {daily: 1}}
  - {key: v, name: bare, quota: {daily: 1}}
  - {key: v, value: free}
  - {key: p, value: /api/*/x, name: middle, quota: {daily: 1}}
  - {key: k*, name: keys, quota: {daily: 1}}
`)
	for _, test := range []struct {
		name string
		d    string
		want string // the limit's name, "" for no match
	}{
		{"C16 a key is not glued to its value", "foo=bar", ""},
		{"C16 the key itself matches", "foo_bar=x", "glued"},
		{"C20 depths must be equal", "a=x sub=y", ""},
		{"C21 no way back from an exact match", "a=x b=1", ""},
		{"C21 the key alone leads to its child", "a=y b=1", "child"},
		{"a node with children only does not limit", "a=y", ""},
		{"an exact value comes first", "a=x", "exact"},
		{"C22 the first pattern in the file wins", "w=foobarbaz", "first"},
		{"C22 a star matches an empty value", "w=", "star"},
		{"an unlimited node matches", "v=free", "v"},
		{"any other value takes the key alone", "v=other", "bare"},
		{"an empty value takes the key alone", "v=", "bare"},
		{"a star within", "p=/api/7/x", "middle"},
		{"a star within spans levels", "p=/api/7/8/x", "middle"},
		{"patterns are anchored", "p=/api/7/xy", ""},
		{"C22 a star in the key", "kangaroo=1", "keys"},
		{"matching minds case", "A=x", ""},
		{"no entries", "", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			m, ok := p.Match(descriptor(test.d))
			got := ""
			if ok {
				got = m.Limit.Name
			}
			if got != test.want {
				t.Errorf("Match(%s) = %q, want %q", test.d, got, test.want)
			}
		})
	}
}

func consumerOf(t *testing.T, p *policy.Policy, d policy.Descriptor) policy.CounterID {
	t.Helper()
	m, ok := p.Match(d)
	if !ok {
		t.Fatalf("%v matches nothing", d)
	}
	return m.Consumer().ID
}

// PEERS C18: three requests that share one counter in peers, and bytes that tend to
// break keys.
func TestC18CountersDoNotCollide(t *testing.T) {
	t.Parallel()

	tree := `
descriptors:
  - {key: a, quota: {daily: 1}}
  - {key: a_b, quota: {daily: 1}}
  - {key: b, quota: {daily: 1}, descriptors: [{key: c, quota: {daily: 1}}]}
`
	d := mustParse(t, "domain: d"+tree)
	da := mustParse(t, "domain: d_a"+tree)
	ids := map[policy.CounterID]string{}
	add := func(name string, id policy.CounterID) {
		if other, ok := ids[id]; ok {
			t.Errorf("%s and %s share a counter", name, other)
		}
		ids[id] = name
	}
	add("d a=b_c", consumerOf(t, d, descriptor("a=b_c")))
	add("d a_b=c", consumerOf(t, d, descriptor("a_b=c")))
	add("d_a b=c", consumerOf(t, da, descriptor("b=c")))
	add("d b= c=", consumerOf(t, d, descriptor("b= c=")))
	for _, value := range []string{"", "|", ".", ":", "\x00", "\n", "%", `"`, "'", "b\x01c", "\xc0\xa7", "1 \xc0\xa7", "\x01a"} {
		add("a="+value, consumerOf(t, d, policy.Descriptor{{Key: "a", Value: value}}))
		add("b c="+value, consumerOf(t, d, policy.Descriptor{{Key: "b", Value: "x"}, {Key: "c", Value: value}}))
	}
}

// The identity is the domain and the path, and nothing else of the file.
func TestIdentityOutlivesEdits(t *testing.T) {
	t.Parallel()

	before := mustParse(t, `
domain: d
descriptors:
  - {key: consumer, quota: {daily: 1}}
`)
	after := mustParse(t, `
domain: d
descriptors:
  - {key: other, quota: {daily: 5}}
  - {key: consumer, value: alice, name: vip, quota: {daily: 100, monthly: 1000}}
  - {key: consumer, value: b*, name: patterned, quota: {daily: 100}}
`)
	for _, value := range []string{"alice", "bob"} {
		d := policy.Descriptor{{Key: "consumer", Value: value}}
		if consumerOf(t, before, d) != consumerOf(t, after, d) {
			t.Errorf("%s lost its counter to an edit of the policy", value)
		}
	}
}

func TestSharedPatternSharesACounter(t *testing.T) {
	t.Parallel()

	p := mustParse(t, `
domain: d
descriptors:
  - {key: a, value: x*, share_threshold: true, quota: {daily: 1}}
  - {key: a, value: y*, quota: {daily: 1}}
`)
	id := func(value string) policy.CounterID {
		return consumerOf(t, p, policy.Descriptor{{Key: "a", Value: value}})
	}
	if id("x1") != id("x2") {
		t.Error("values of a shared pattern have counters of their own")
	}
	if id("y1") == id("y2") {
		t.Error("values of a pattern that is not shared have one counter")
	}
	// The pattern's counter is not that of the value that is spelt like it.
	q := mustParse(t, "domain: d\ndescriptors: [{key: a, quota: {daily: 1}}]\n")
	if id("x1") == consumerOf(t, q, policy.Descriptor{{Key: "a", Value: "x*"}}) {
		t.Error("a pattern shares the counter of a value spelt alike")
	}
}

// A client chooses the value that patterns are tried on, so the worst of them must be
// quick. 1 MiB against twenty stars would take ages if matching went back and forth.
func TestPatternsAreTriedInBoundedTime(t *testing.T) {
	t.Parallel()

	p := mustParse(t, "domain: d\ndescriptors: [{key: a, value: '"+strings.Repeat("*a", 20)+"*b', quota: {daily: 1}}]\n")
	if _, ok := p.Match(policy.Descriptor{{Key: "a", Value: strings.Repeat("a", 1<<20)}}); ok {
		t.Error("matched")
	}
}

func TestParseBucketKey(t *testing.T) {
	t.Parallel()

	const good = "3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e5f"
	key, err := policy.ParseBucketKey(strings.ToUpper(good))
	if err != nil || key.String() != good {
		t.Errorf("ParseBucketKey = %v, %v, want %s", key, err, good)
	}
	for _, bad := range []string{
		"", "not-a-uuid", "00000000-0000-0000-0000-000000000000",
		"3f0c2b6e8d5a4c1b9e7f0a1b2c3d4e5f", "{3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e5f}",
		"urn:uuid:" + good, " " + good, good + " ", "3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e5g",
		"3f0c2b6e-8d5a-4c1b-9e7f_0a1b2c3d4e5f", "3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e\xff\xff",
	} {
		if key, err := policy.ParseBucketKey(bad); err == nil {
			t.Errorf("ParseBucketKey(%q) = %v, want an error", bad, key)
		}
	}
}

func TestBudgetValidate(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		budget policy.Budget
		ok     bool
	}{
		{policy.Budget{PerSecond: 1, Burst: 3600}, true},
		{policy.Budget{PerSecond: 1, Burst: 3600.5}, false},
		{policy.Budget{PerSecond: 1e13, Burst: policy.MaxUnits}, true},
		{policy.Budget{PerSecond: 1e13, Burst: policy.MaxUnits * 2}, false},
		{policy.Budget{PerSecond: 0, Burst: 1}, false},
		{policy.Budget{PerSecond: -1, Burst: 1}, false},
		{policy.Budget{PerSecond: 1, Burst: 0}, false},
		{policy.Budget{PerSecond: math.NaN(), Burst: 1}, false},
		{policy.Budget{PerSecond: 1, Burst: math.NaN()}, false},
		{policy.Budget{PerSecond: math.Inf(1), Burst: 1}, false},
		{policy.Budget{PerSecond: 1, Burst: math.Inf(1)}, false},
	} {
		if err := test.budget.Validate(); (err == nil) != test.ok {
			t.Errorf("%+v.Validate() = %v, want ok %v", test.budget, err, test.ok)
		}
	}
}

// PEERS C38: whoever waits as told finds the units there, and not long after they came.
func TestC38WaitIsTrue(t *testing.T) {
	t.Parallel()

	start := time.Date(2026, 11, 30, 0, 0, 0, 0, time.UTC)
	rapid.Check(t, func(t *rapid.T) {
		rate := rapid.Float64Range(1e-3, 1e9).Draw(t, "rate")
		budget := policy.Budget{PerSecond: rate, Burst: rate * rapid.Float64Range(0.01, 3600).Draw(t, "refill")}
		tokens := budget.Burst * rapid.Float64Range(0, 1).Draw(t, "tokens")
		units := budget.Burst * rapid.Float64Range(0, 1).Draw(t, "units")
		now := start.Add(time.Duration(rapid.Int64Range(-300e6, 300e6).Draw(t, "skew")) * time.Microsecond)
		wait, ok := budget.Wait(tokens, start, now, units)
		if !ok {
			t.Fatalf("Wait for %v of %v is never", units, budget.Burst)
		}
		if level := budget.Level(tokens, start, now.Add(wait)); level < units {
			t.Fatalf("after %v the level is %v, short of %v", wait, level, units)
		}
		if wait > 2*time.Microsecond {
			early := now.Add(wait - wait/1000 - 2*time.Microsecond)
			if level := budget.Level(tokens, start, early); level >= units {
				t.Fatalf("the wait %v is too long: %v was there %v before", wait, level, wait/1000)
			}
		}
		if _, ok := budget.Wait(tokens, start, now, budget.Burst*1.001); ok {
			t.Fatal("a wait for more than the ceiling")
		}
	})
}

// PEERS T03: neither a long idle nor a clock that went back gives more than the ceiling.
func TestT03Level(t *testing.T) {
	t.Parallel()

	b := policy.Budget{PerSecond: 2, Burst: 10}
	start := time.Date(2026, 11, 30, 0, 0, 0, 0, time.UTC)
	for _, test := range []struct {
		at   time.Duration
		want float64
	}{
		{0, 1},
		{500 * time.Millisecond, 2},
		{time.Minute, 10},
		{10 * 365 * 24 * time.Hour, 10},
		{-time.Hour, 1},
	} {
		if got := b.Level(1, start, start.Add(test.at)); got != test.want {
			t.Errorf("level after %v = %v, want %v", test.at, got, test.want)
		}
	}
}

// A descriptor reaches a limit by its keys alone, whatever its values; a descriptor that says
// "not limited" is none, but rate_limit: {unlimited: true} is.
func TestLimits(t *testing.T) {
	t.Parallel()

	p, err := policy.Parse("p.yaml", []byte(`
domain: d
descriptors:
  - key: a
    value: x
    descriptors:
      - {key: b, quota: {daily: 1}}
  - {key: free}
  - {key: open, rate_limit: {unlimited: true}}
  - {key: "k*", limiter: {permits: 1, per: 1s}}
`))
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		keys []string
		want bool
	}{
		{[]string{"a", "b"}, true},
		{[]string{"a"}, false},
		{[]string{"b"}, false},
		{[]string{"a", "b", "c"}, false},
		{[]string{"free"}, false},
		{[]string{"open"}, true},
		{[]string{"kay"}, true},
		{[]string{"ok"}, false},
		{nil, false},
	} {
		if got := p.Limits(tc.keys); got != tc.want {
			t.Errorf("Limits(%q) = %v, want %v", tc.keys, got, tc.want)
		}
	}
	if p.Empty() {
		t.Error("Empty of a policy with descriptors")
	}
}

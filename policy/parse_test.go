package policy_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/weir-dev/weir/policy"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// Each case is a file of policies that are refused or warned of: after each policy,
// what Parse says of it.
func TestParseSays(t *testing.T) {
	t.Parallel()
	golden(t, "testdata/*.txtar", ".says", says)
}

// Each case is a file of policies that load: after each, all limits as they were read,
// and what Parse warns of.
func TestParseReads(t *testing.T) {
	t.Parallel()
	golden(t, "testdata/reads/*.txtar", ".reads", func(name string, data []byte) string {
		p, err := policy.Parse(name, data)
		if err != nil {
			t.Errorf("Parse(%s): %v", name, err)
			return ""
		}
		return p.Dump() + says(name, data)
	})
}

// golden runs render over the files of archives, each of which is followed by what is
// to be rendered.
func golden(t *testing.T, pattern, suffix string, render func(name string, data []byte) string) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	for _, file := range files {
		archive, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if len(archive.Files) == 0 || len(archive.Files)%2 != 0 {
			t.Fatalf("%s: a policy or its %s is missing", file, suffix)
		}
		for i := 0; i < len(archive.Files); i += 2 {
			in, out := archive.Files[i], &archive.Files[i+1]
			if out.Name != in.Name+suffix {
				t.Fatalf("%s: after %s stands %s, not %s%s", file, in.Name, out.Name, in.Name, suffix)
			}
			got := render(in.Name, in.Data)
			if *update {
				out.Data = []byte(got)
				continue
			}
			if diff := cmp.Diff(string(out.Data), got); diff != "" {
				t.Errorf("%s: %s differs (-want +got):\n%s", file, out.Name, diff)
			}
		}
		if *update {
			if err := os.WriteFile(file, txtar.Format(archive), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func says(name string, data []byte) string {
	p, err := policy.Parse(name, data)
	if err != nil {
		return err.Error() + "\n"
	}
	var b strings.Builder
	for _, w := range p.Warnings {
		fmt.Fprintf(&b, "warning: %v\n", w)
	}
	b.WriteString("ok\n")
	return b.String()
}

func TestParseExample(t *testing.T) {
	t.Parallel()

	const file = "../examples/ingest/policy.yaml"
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	p, err := policy.Parse(file, data)
	if err != nil {
		t.Fatal(err)
	}
	if p.Domain != "ingest" || len(p.Warnings) > 0 {
		t.Errorf("domain %q, warnings %v", p.Domain, p.Warnings)
	}
	m, ok := p.Match(policy.Descriptor{{Key: "node", Value: "3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e5f"}})
	if !ok {
		t.Fatal("a node matches nothing")
	}
	want := &policy.BudgetLimit{
		Scope:  policy.ScopeIngestNode,
		Budget: policy.Budget{PerSecond: 16 << 10, Burst: 256 << 10},
	}
	if diff := cmp.Diff(want, m.Limit.Budget); diff != "" {
		t.Errorf("the node's budget differs (-want +got):\n%s", diff)
	}
	const wantJSON = `"hold_bytes":524288,"timeout":"250ms","rules":[{"descriptors":[`
	if !strings.Contains(string(p.Filter.JSON), wantJSON) {
		t.Errorf("the filter's block is %s, want %s in it", p.Filter.JSON, wantJSON)
	}
}

func TestFilterLocate(t *testing.T) {
	t.Parallel()

	p, err := policy.Parse("p.yaml", []byte(`domain: d
filter:
  rules:
    - name: a
      descriptors:
        - entries:
            - {key: k, header: h}
`))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"":              "p.yaml:2:1: filter: bad",
		"rules[0].name": "p.yaml:4:13: filter.rules[0].name: bad",
		"rules[0].descriptors[0].entries[0].header": "p.yaml:7:32: filter.rules[0].descriptors[0].entries[0].header: bad",
		// Absent fields are placed at what they are absent from.
		"rules[0].descriptors[0].entries[0].type": "p.yaml:7:15: filter.rules[0].descriptors[0].entries[0].type: bad",
		"timeout": "p.yaml:2:1: filter.timeout: bad",
	} {
		if got := p.Filter.Locate(path, "bad").Error(); got != want {
			t.Errorf("Locate(%q) = %q, want %q", path, got, want)
		}
	}
}

func TestNewSetRefusesADomainTwice(t *testing.T) {
	t.Parallel()

	parse := func(file string) *policy.Policy {
		p, err := policy.Parse(file, []byte("domain: d\n"))
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	_, err := policy.NewSet(parse("a.yaml"), parse("b.yaml"))
	if err == nil || !strings.Contains(err.Error(), "a.yaml") || !strings.Contains(err.Error(), "b.yaml") {
		t.Errorf("NewSet of one domain twice = %v, want an error that names both files", err)
	}
}

// The examples are what people start from: they load without a warning, and do what their
// comments say.
func TestExamples(t *testing.T) {
	t.Parallel()

	policies := map[string]*policy.Policy{}
	files, err := filepath.Glob("../examples/policies/*.yaml")
	if err != nil || len(files) != 2 {
		t.Fatalf("the examples are %v, %v", files, err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		p, err := policy.Parse(file, data)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range p.Warnings {
			t.Error(w)
		}
		policies[p.Domain] = p
	}
	for _, test := range []struct {
		domain, d, want string
	}{
		{"shop", "remote_address=192.0.2.1 path=/login", "logins"},
		{"shop", "remote_address=192.0.2.10 path=/login", "remote_address/path"},
		{"shop", "path=/api/7/export", "path"},
		{"shop", "path=/api/7", ""},
		{"shop", "account=a", "account"},
		{"limits", "node=3f0c2b6e-8d5a-4c1b-9e7f-0a1b2c3d4e5f", "node"},
		{"limits", "method=POST", "writes"},
		{"limits", "method=GET", ""},
		{"limits", "consumer=partner", "partner"},
		{"limits", "consumer=trial-7", "consumer"},
	} {
		m, _ := policies[test.domain].Match(descriptor(test.d))
		got := ""
		if m.Limit != nil {
			got = m.Limit.Name
		}
		if got != test.want {
			t.Errorf("%s: Match(%s) = %q, want %q", test.domain, test.d, got, test.want)
		}
	}
	if got := policies["limits"].MostConsumers; got != 10_000 {
		t.Errorf("MostConsumers = %d", got)
	}
}

// Whoever wrote a file of many descriptors need not wait for what is said of it.
func TestLintIsBounded(t *testing.T) {
	t.Parallel()

	var b strings.Builder
	b.WriteString("domain: d\ndescriptors:\n")
	for i := range 3000 {
		fmt.Fprintf(&b, "- {key: k_%d, value: '%d*a', quota: {daily: 1}, descriptors: [{key: c, value: '*%d'}]}\n", i, i, i)
	}
	start := time.Now()
	mustParse(t, b.String())
	if took := time.Since(start); took > time.Minute {
		t.Errorf("parsing took %v", took)
	}
}

func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	reads, err := filepath.Glob("testdata/reads/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range append(files, reads...) {
		archive, err := txtar.ParseFile(file)
		if err != nil {
			f.Fatal(err)
		}
		for _, in := range archive.Files {
			f.Add(in.Data)
		}
	}
	// Whatever the bytes, there is a policy or an error, and a policy can be asked.
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := policy.Parse("fuzz.yaml", data)
		if (p == nil) == (err == nil) {
			t.Fatalf("Parse = %v, %v", p, err)
		}
		if p == nil {
			return
		}
		if p.Domain == "" || p.MostConsumers < 1 {
			t.Fatalf("domain %q, most consumers %d", p.Domain, p.MostConsumers)
		}
		p.Match(policy.Descriptor{{Key: "node", Value: "x"}, {Key: "", Value: ""}})
		for _, c := range p.NamedConsumers() {
			// It is its own, unless an earlier pattern covers it.
			if m, ok := p.Match(c.Entries); ok && m.Limit.Named && len(m.Limit.Quota) > 0 && !slices.Equal(m.Consumer().Entries, c.Entries) {
				t.Fatalf("%v matches the consumer %v", c.Entries, m.Consumer().Entries)
			}
		}
		if again, err := policy.Parse("fuzz.yaml", data); err != nil || again.Dump() != p.Dump() {
			t.Fatalf("read again it is another policy, or %v", err)
		}
	})
}

package policy_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"

	"github.com/weir-dev/weir/policy"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// Each case is a file of policies that are refused or warned of: after each policy,
// what Parse says of it.
func TestParseSays(t *testing.T) {
	t.Parallel()

	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no cases: %v", err)
	}
	for _, file := range files {
		archive, err := txtar.ParseFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i+1 < len(archive.Files); i += 2 {
			in, out := archive.Files[i], &archive.Files[i+1]
			if out.Name != in.Name+".says" {
				t.Fatalf("%s: after %s stands %s, not %s.says", file, in.Name, out.Name, in.Name)
			}
			got := says(in.Name, in.Data)
			if *update {
				out.Data = []byte(got)
				continue
			}
			if diff := cmp.Diff(string(out.Data), got); diff != "" {
				t.Errorf("%s: Parse(%s) differs (-want +got):\n%s", file, in.Name, diff)
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

func FuzzParse(f *testing.F) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range files {
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
		if p != nil {
			p.Match(policy.Descriptor{{Key: "node", Value: "x"}, {Key: "", Value: ""}})
			if p.Domain == "" {
				t.Fatal("a policy without a domain")
			}
		}
	})
}

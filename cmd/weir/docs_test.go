package main

import (
	"os"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/policy"
)

// Each indented block of docs/filter.md is a filter's block that loads.
func TestFilterExamples(t *testing.T) {
	t.Parallel()

	text, err := os.ReadFile("../../docs/filter.md")
	if err != nil {
		t.Fatal(err)
	}
	var examples []string
	var example strings.Builder
	for line := range strings.Lines(string(text) + "\nend\n") {
		if code, ok := strings.CutPrefix(line, "    "); ok {
			example.WriteString(code)
		} else if example.Len() > 0 {
			examples = append(examples, example.String())
			example.Reset()
		}
	}
	if len(examples) < 4 {
		t.Fatalf("%d examples were found, want 4 at least", len(examples))
	}
	for _, e := range examples {
		if strings.HasPrefix(e, "clients:") {
			if _, err := policy.ParseClients("filter.md", []byte(e)); err != nil {
				t.Errorf("%v in\n%s", err, e)
			}
			continue
		}
		p, err := policy.Parse("filter.md", []byte("domain: d\n"+e))
		if err != nil {
			t.Errorf("%v in\n%s", err, e)
			continue
		}
		if _, err := config.ParseBlock(p.Filter.JSON); err != nil {
			t.Errorf("%v in\n%s", err, e)
		}
	}
}

package policy_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/weir-dev/weir/policy"
)

var yamlBlock = regexp.MustCompile("(?s)```yaml\n(.*?)```")

// What the documents show is a file that loads.
func TestDocumentedYAML(t *testing.T) {
	t.Parallel()

	pages, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range yamlBlock.FindAllStringSubmatch(string(text), -1) {
			switch {
			case strings.HasPrefix(block[1], "domain:"):
				p, err := policy.Parse(page, []byte(block[1]))
				if err != nil {
					t.Errorf("%v\n%s", err, block[1])
					continue
				}
				for _, w := range p.Warnings {
					t.Errorf("%v\n%s", w, block[1])
				}
			case strings.HasPrefix(block[1], "clients:"):
				if _, err := policy.ParseClients(page, []byte(block[1])); err != nil {
					t.Errorf("%v\n%s", err, block[1])
				}
			default:
				continue // another program's
			}
			blocks++
		}
	}
	if blocks < 3 {
		t.Errorf("only %d blocks were read", blocks)
	}
}

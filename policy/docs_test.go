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

// Each case of peers that RATIONALE.md lists is where it says: a test, or a case of one, has
// its number.
func TestCasesOfPeersAreTested(t *testing.T) {
	t.Parallel()

	text, err := os.ReadFile("../RATIONALE.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`(?m)^\| ([CPT]\d\d) \| [^|]+ \|([^|]*)\|([^|]*)\|$`)
	room := regexp.MustCompile("`([^`]+)`")
	cases, tested := 0, map[string]string{}
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		cases++
		rooms := room.FindAllStringSubmatch(m[2], -1)
		if len(rooms) == 0 && strings.TrimSpace(m[3]) == "" {
			t.Errorf("%s is tested nowhere, for no reason", m[1])
		}
		for _, r := range rooms {
			if _, ok := tested[r[1]]; !ok {
				tested[r[1]] = testsOf(t, filepath.Join("..", r[1]))
			}
			if !regexp.MustCompile(`(Test|Test[CPT\d]+|\b)` + m[1] + `(\D|$)`).MatchString(tested[r[1]]) {
				t.Errorf("no test of %s has the number %s", r[1], m[1])
			}
		}
	}
	if cases < 60 {
		t.Errorf("only %d cases were read", cases)
	}
}

// testsOf returns the tests of a package and their data.
func testsOf(t *testing.T, dir string) string {
	t.Helper()
	var all strings.Builder
	for _, pattern := range []string{"*_test.go", "testdata/*.txtar", "testdata/*/*.txtar"} {
		files, err := filepath.Glob(filepath.Join(dir, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			all.Write(text)
		}
	}
	return all.String()
}

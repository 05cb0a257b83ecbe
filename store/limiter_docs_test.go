package store

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// What docs/limiter.md shows is run: its Go stands in the examples, line by line, and its
// SQL is accepted by the database.
func TestLimiterDocs(t *testing.T) {
	t.Parallel()

	page, err := os.ReadFile("../docs/limiter.md")
	if err != nil {
		t.Fatal(err)
	}
	examples, err := os.ReadFile("example_limiter_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, pool := setup(t)
	shown := map[string]int{}
	for _, block := range regexp.MustCompile("(?ms)^```(\\w+)\n(.*?)^```$").FindAllStringSubmatch(string(page), -1) {
		shown[block[1]]++
		switch block[1] {
		case "go":
			if !strings.Contains(trimLines(string(examples)), trimLines(block[2])) {
				t.Errorf("no example runs this:\n%s", block[2])
			}
		case "sql":
			if _, err := pool.Exec(t.Context(), block[2]); err != nil {
				t.Errorf("%v, from:\n%s", err, block[2])
			}
		}
	}
	if shown["go"] < 5 || shown["sql"] < 1 {
		t.Errorf("the page shows %v: is it read right?", shown)
	}
}

func trimLines(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "\n")
}

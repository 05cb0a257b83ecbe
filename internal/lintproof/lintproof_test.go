//go:build lintproof

// Package lintproof proves that the linter enforces the dependency diagram: it
// plants every import that the diagram forbids in a module of empty rooms, and
// sees each of them reported, and nothing else.
//
// It needs the linter that the project pins, so it has a build tag; `make check`
// runs it.
package lintproof

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

const (
	module    = "github.com/weir-dev/weir"
	sdk       = "github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm"
	protowire = "google.golang.org/protobuf/encoding/protowire"
	protobuf  = "google.golang.org/protobuf/proto"
	yamlV3    = "go.yaml.in/yaml/v3"
	netip     = "net/netip"
	netHTTP   = "net/http"
	jsonV1    = "encoding/json"
)

// rooms are what may be imported, if the diagram lets one.
var rooms = []string{
	"bench", "cmd/weir", "e2e", "envoy", "filter", "filter/config", "filter/extract",
	"internal/child", "internal/envoyproc", "internal/pgtest", "internal/wasmhost",
	"policy", "quota", "ratelimitsvc", "store", "xds",
}

// diagram is the dependency diagram, told apart from .golangci.yml.
var diagram = []struct {
	room    string
	rule    string   // the rule that reports the room's violations
	imports []string // the other rooms that it may import; its own it always may
	outside []string // modules of others that it may import
	never   []string // modules of others that it may not
}{
	{room: "quota", rule: "quota", never: []string{protowire, yamlV3}},
	{
		room: "policy", rule: "policy", imports: []string{"quota"},
		outside: []string{yamlV3}, never: []string{protowire},
	},
	{room: "store", rule: "store", imports: []string{"policy", "quota"}, outside: []string{protowire}},
	{room: "ratelimitsvc", rule: "ratelimitsvc", imports: []string{"policy", "quota"}, outside: []string{protobuf}},
	{
		room: "xds", rule: "xds", imports: []string{"envoy", "filter/config", "policy", "quota"},
		outside: []string{protobuf},
	},
	{room: "envoy", rule: "envoy", imports: []string{"filter/config"}, outside: []string{protobuf}},
	{
		room: "filter", rule: "filter", imports: []string{"filter/config", "filter/extract"},
		outside: []string{sdk, sdk + "/types", protowire}, never: []string{protobuf, yamlV3},
	},
	{
		room: "filter/config", rule: "filter-config", imports: []string{"filter/extract"},
		outside: []string{jsonV1}, never: []string{sdk, protowire, yamlV3},
	},
	{room: "filter/extract", rule: "filter-extract", outside: []string{netip}, never: []string{sdk, protowire, yamlV3, jsonV1, netHTTP}},
	{
		room: "cmd/filter", rule: "cmd-filter", imports: []string{"filter", "filter/config", "filter/extract"},
		outside: []string{sdk}, never: []string{protobuf, yamlV3},
	},
	{room: "cmd/weir", rule: "top", imports: allBut("filter", "filter/extract"), outside: []string{yamlV3}},
	{room: "bench", rule: "top", imports: allBut("filter", "filter/extract"), outside: []string{yamlV3}},
	{room: "e2e", rule: "top", imports: allBut("filter", "filter/extract"), outside: []string{yamlV3}},
	{room: "internal/child", rule: "top", imports: allBut("filter", "filter/extract"), outside: []string{yamlV3}},
	{room: "internal/wasmhost", rule: "top", imports: allBut("filter", "filter/extract"), outside: []string{yamlV3}},
	{room: "unheardof", rule: "elsewhere", outside: []string{yamlV3}},
	{room: "examples/embed", imports: rooms, outside: []string{yamlV3}},
}

func allBut(others ...string) []string {
	return slices.DeleteFunc(slices.Clone(rooms), func(r string) bool { return slices.Contains(others, r) })
}

// A finding is one import that the linter reports.
type finding struct{ File, Import, Rule string }

// TestDiagram lays a module in which every room imports every other, lints it
// once, and compares what is reported with what the diagram forbids.
//
// So that nothing imports in a circle, a room imports the others' leaves, its
// subpackage imports the others themselves, and a leaf imports nothing. Thus each
// forbidden edge is planted in the room and below it.
func TestDiagram(t *testing.T) {
	t.Parallel()

	linter := os.Getenv("GOLANGCI_LINT")
	if linter == "" {
		t.Fatal("GOLANGCI_LINT is not set: run `make check`, which sets it to the pinned linter")
	}
	root, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}

	// The folder's name holds rooms' names, which must not confuse the rules.
	dir := filepath.Join(t.TempDir(), "cmd", "internal", "quota", "weir")
	for _, name := range []string{".golangci.yml", "go.mod", "go.sum"} {
		content, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name), string(content))
	}

	var planted []finding
	for _, room := range rooms {
		writePackage(t, dir, room+"/leaf/leaf.go", "leaf", nil)
		writePackage(t, dir, room+"/doc.go", path.Base(room), nil)
	}
	for _, d := range diagram {
		rootFile, subFile, testFile := d.room+"/planted.go", d.room+"/sub/planted.go", d.room+"/planted_test.go"
		rootImports := slices.Concat(d.outside, d.never)
		subImports := slices.Clone(rootImports)
		for _, pkg := range d.never {
			planted = append(planted, finding{rootFile, pkg, d.rule}, finding{subFile, pkg, d.rule})
		}
		for _, room := range rooms {
			pkg := module + "/" + room
			rootImports = append(rootImports, pkg+"/leaf")
			subImports = append(subImports, pkg)
			if room != d.room && !slices.Contains(d.imports, room) {
				planted = append(planted, finding{rootFile, pkg + "/leaf", d.rule}, finding{subFile, pkg, d.rule})
			}
		}
		name := path.Base(d.room)
		writePackage(t, dir, rootFile, name, rootImports)
		writePackage(t, dir, subFile, "sub", subImports)
		writePackage(t, dir, testFile, name+"_test", rootImports) // a test may import all
	}

	if diff := cmp.Diff(sorted(planted), sorted(lint(t, linter, dir))); diff != "" {
		t.Errorf("forbidden by the diagram (-), reported by the linter (+):\n%s", diff)
	}

	config := readSettings(t, root)
	if !slices.Contains(config.Linters.Enable, "depguard") {
		t.Error(".golangci.yml does not enable depguard")
	}
	// A rule for which nothing is planted would be unproved.
	proved := map[string]bool{}
	for _, f := range planted {
		proved[f.Rule] = true
	}
	configured := slices.Sorted(maps.Keys(config.Linters.Settings.Depguard.Rules))
	if diff := cmp.Diff(configured, slices.Sorted(maps.Keys(proved))); diff != "" {
		t.Errorf("rules of .golangci.yml (-), rules with a planted violation (+):\n%s", diff)
	}
}

// depguardText is how depguard words a finding.
var depguardText = regexp.MustCompile(`^import '([^']+)' is not allowed from list '([^']+)'`)

// lint runs the linter in dir, with the configuration there but depguard alone,
// and returns what it reports.
func lint(t *testing.T, linter, dir string) []finding {
	t.Helper()

	report := filepath.Join(t.TempDir(), "report.json")
	cmd := exec.CommandContext(t.Context(), linter, "run", "--enable-only=depguard", "--issues-exit-code=0",
		"--show-stats=false", "--output.json.path="+report, "./...")
	cmd.Dir = dir
	// The module is outside any workspace.
	cmd.Env = append(os.Environ(), "GOWORK=off")
	if output, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("running the linter: %v\n%s", err, output)
	}
	content, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var issues struct {
		Issues []struct {
			FromLinter, Text string
			Pos              struct{ Filename string }
		}
	}
	if err := json.Unmarshal(content, &issues); err != nil {
		t.Fatalf("reading the linter's report: %v\n%s", err, content)
	}

	var found []finding
	for _, issue := range issues.Issues {
		text := depguardText.FindStringSubmatch(issue.Text)
		if text == nil {
			t.Errorf("%s reports in %s: %s", issue.FromLinter, issue.Pos.Filename, issue.Text)
			continue
		}
		found = append(found, finding{File: filepath.ToSlash(issue.Pos.Filename), Import: text[1], Rule: text[2]})
	}
	return found
}

// settings are the parts of .golangci.yml that the proof rests on.
type settings struct {
	Linters struct {
		Enable   []string `yaml:"enable"`
		Settings struct {
			Depguard struct {
				Rules map[string]any `yaml:"rules"`
			} `yaml:"depguard"`
		} `yaml:"settings"`
	} `yaml:"linters"`
}

func readSettings(t *testing.T, root string) settings {
	t.Helper()

	content, err := os.ReadFile(filepath.Join(root, ".golangci.yml"))
	if err != nil {
		t.Fatal(err)
	}
	var s settings
	if err := yaml.Unmarshal(content, &s); err != nil {
		t.Fatalf("reading .golangci.yml: %v", err)
	}
	return s
}

// writePackage writes a Go file that imports pkgs for nothing.
func writePackage(t *testing.T, dir, file, name string, pkgs []string) {
	t.Helper()

	var source strings.Builder
	fmt.Fprintf(&source, "package %s\n", name)
	for _, pkg := range pkgs {
		fmt.Fprintf(&source, "\nimport _ %q\n", pkg)
	}
	write(t, filepath.Join(dir, filepath.FromSlash(file)), source.String())
}

func write(t *testing.T, file, content string) {
	t.Helper()

	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

func sorted(findings []finding) []finding {
	return slices.SortedFunc(slices.Values(findings), func(a, b finding) int {
		return strings.Compare(a.File+" "+a.Import, b.File+" "+b.Import)
	})
}

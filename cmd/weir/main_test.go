package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/weir-dev/weir/internal/wasmhost/wasmtest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"weir": main})
}

// The command line's behaviour, as scripts.
func TestScripts(t *testing.T) {
	t.Parallel()
	module := wasmtest.Module(t)
	example, err := filepath.Abs("../../" + defaultPolicy)
	if err != nil {
		t.Fatal(err)
	}
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			env.Setenv("MODULE", module)
			env.Setenv("EXAMPLE", example)
			return nil
		},
		RequireExplicitExec: true,
		UpdateScripts:       os.Getenv("UPDATE_SCRIPTS") != "",
	})
}

// The policy that README shows loads, and is part of the example's.
func TestREADMEPolicy(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(readme), "    domain: ingest\n")
	if !ok {
		t.Fatal("README shows no policy")
	}
	var text strings.Builder
	text.WriteString("domain: ingest\n")
	for line := range strings.Lines(rest) {
		code, indented := strings.CutPrefix(line, "    ")
		if !indented {
			break
		}
		text.WriteString(code)
	}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := loadPolicies([]string{file}); err != nil {
		t.Errorf("README's policy:\n%s\n%v", &text, err)
	}
}

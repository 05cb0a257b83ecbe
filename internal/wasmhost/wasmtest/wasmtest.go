// Package wasmtest builds the filter's module for tests, from the sources as they are.
package wasmtest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"github.com/weir-dev/weir/internal/wasmhost"
)

// MaxSize is the module's ceiling in bytes: 6 MB.
const MaxSize = 6_000_000

// Module returns the path of a filter.wasm, which lives as long as the test. It works
// in every package of this repository. The module is built once for a test binary.
func Module(tb testing.TB) string {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "filter.wasm")
	if err := os.WriteFile(path, Bytes(tb), 0o600); err != nil {
		tb.Fatal(err)
	}
	return path
}

// Bytes returns the module itself. It is not to be changed.
func Bytes(tb testing.TB) []byte {
	tb.Helper()
	wasm, err := build()
	if err != nil {
		tb.Fatal(err)
	}
	return wasm
}

// Compiled returns the module, compiled once for a test binary. It is not to be closed.
func Compiled(tb testing.TB) *wasmhost.Module {
	tb.Helper()
	m, err := compile()
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

// A test's own context and directory end before the next test begins, so these use
// neither.
var (
	build = sync.OnceValues(func() (wasm []byte, err error) {
		dir, err := os.MkdirTemp("", "weir-filter-")
		if err != nil {
			return nil, err
		}
		defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
		path := filepath.Join(dir, "filter.wasm")
		//nolint:gosec // the path is our own
		cmd := exec.CommandContext(context.Background(), "go", "build", "-buildmode=c-shared", "-ldflags=-s -w",
			"-o", path, "github.com/weir-dev/weir/cmd/filter")
		// Flags of the tests, such as -race, are not the module's.
		cmd.Env = append(os.Environ(), "GOOS=wasip1", "GOARCH=wasm", "GOFLAGS=", "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("building the filter: %w\n%s", err, out)
		}
		return os.ReadFile(path) //nolint:gosec // the path is our own
	})

	compile = sync.OnceValues(func() (*wasmhost.Module, error) {
		wasm, err := build()
		if err != nil {
			return nil, err
		}
		return wasmhost.Compile(context.Background(), wasm)
	})
)

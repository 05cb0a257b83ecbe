package envoyproc

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
)

// A folder in use is left alone; one whose process is gone goes at the next start.
func TestRunDirs(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())

	used, err := newRunDir()
	if err != nil {
		t.Fatal(err)
	}
	killed, err := newRunDir()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(killed.path, "bootstrap.json"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	killed.lock.Close() // as the kernel does for a process that was killed

	stranger := filepath.Join(os.TempDir(), "weir-envoy-run")
	if err := os.Mkdir(stranger, 0o700); err != nil {
		t.Fatal(err)
	}
	next, err := newRunDir()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{used.path, next.path, stranger} {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("a folder in use is gone: %v", err)
		}
	}
	if _, err := os.Stat(killed.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder of a process that is gone: %v, want that it does not exist", err)
	}
	for _, dir := range []*runDir{used, next} {
		if err := dir.remove(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(dir.path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("after remove: %v", err)
		}
	}
}

// Starts that sweep and make folders at once keep what they have made.
func TestRunDirsAtOnce(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())

	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for range 50 {
				dir, err := newRunDir()
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := lockDir(dir.path); !errors.Is(err, syscall.EWOULDBLOCK) {
					t.Errorf("locking a folder in use: %v, want EWOULDBLOCK", err)
				}
				if err := dir.remove(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	group.Wait()
}

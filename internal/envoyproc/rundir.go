package envoyproc

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
)

// runPrefix begins the names of the folders, where temporary files go.
const runPrefix = "weir-envoy-run-"

// A runDir is a temporary folder that stays locked while it is in use, so that one
// whose process was killed can be told from the others, and removed.
type runDir struct {
	path string
	lock *os.File // the folder itself
}

// newRunDir removes the folders of processes that are gone, and makes one.
func newRunDir() (*runDir, error) {
	sweepRunDirs()
	const attempts = 10
	for range attempts {
		path, err := os.MkdirTemp("", runPrefix)
		if err != nil {
			return nil, err
		}
		lock, err := lockDir(path)
		if err == nil && !sameFile(lock, path) {
			lock.Close()
			err = os.ErrNotExist
		}
		if err == nil {
			return &runDir{path: path, lock: lock}, nil
		}
		// Another process swept it away before it was locked.
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("locking %s: %w", path, err), os.RemoveAll(path))
		}
	}
	return nil, fmt.Errorf("each of %d folders in %s was removed by another process", attempts, os.TempDir())
}

func (d *runDir) remove() error {
	err := os.RemoveAll(d.path)
	d.lock.Close()
	return err
}

// sweepRunDirs removes the folders of this user that nobody has locked. What can't be
// removed is left to the next sweep.
func sweepRunDirs() {
	paths, err := filepath.Glob(filepath.Join(os.TempDir(), runPrefix+"*"))
	if err != nil {
		return
	}
	for _, path := range paths {
		info, err := os.Lstat(path)
		if err != nil {
			continue
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); !ok || !info.IsDir() || int(stat.Uid) != os.Geteuid() {
			continue
		}
		lock, err := lockDir(path)
		if err != nil {
			continue
		}
		_ = os.RemoveAll(path)
		lock.Close()
	}
}

// lockDir locks a folder; closing it unlocks, and so does the end of this process,
// however it ends. A child doesn't inherit it. The error is EWOULDBLOCK when it is
// locked.
func lockDir(path string) (*os.File, error) {
	dir, err := os.Open(path) //nolint:gosec // a path of our own
	if err != nil {
		return nil, err
	}
	for {
		err = syscall.Flock(int(dir.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		dir.Close()
		return nil, err
	}
	return dir, nil
}

// sameFile reports whether path still leads to the open folder.
func sameFile(dir *os.File, path string) bool {
	opened, err := dir.Stat()
	if err != nil {
		return false
	}
	found, err := os.Lstat(path)
	return err == nil && os.SameFile(opened, found)
}

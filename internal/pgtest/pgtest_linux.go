package pgtest

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// endWithParent has the kernel tell the child to stop when this process dies, and
// not kill it: it must stop Postgres and remove its files.
func endWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGTERM }

// prSetChildSubreaper is PR_SET_CHILD_SUBREAPER of prctl(2).
const prSetChildSubreaper = 36

// adoptOrphans makes the postmaster, which pg_ctl leaves behind, a child of this
// process, so that its end can be waited for whatever the machine's init does.
func adoptOrphans() {
	// A kernel that refuses leaves us with polling, as on other systems.
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, prSetChildSubreaper, 1, 0)
}

// reapOrphans waits for adopted processes that have ended. It must not run beside
// an exec.Cmd, whose child it could take.
func reapOrphans() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return
		}
	}
}

// hasEnded reports whether a process has ended, and waits for it if it was adopted: one
// that nobody has waited for looks alive to others.
func hasEnded(pid int) bool {
	for {
		waited, err := syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil: // none of ours
			return syscall.Kill(pid, 0) != nil
		default:
			return waited == pid
		}
	}
}

// postgresIn returns the processes of Postgres that work in a data folder, which is
// where each of them lives. Those of other users are not seen. known is true: on other
// systems nobody can tell.
func postgresIn(data string) (pids []int, known bool) {
	folder, err := os.Stat(data)
	if err != nil {
		return nil, true // not made yet
	}
	dirs, _ := filepath.Glob("/proc/[0-9]*") // the pattern is right
	for _, dir := range dirs {
		at, err := os.Stat(filepath.Join(dir, "cwd"))
		if err != nil || !os.SameFile(folder, at) {
			continue // gone, a zombie, another user's, or elsewhere
		}
		exe, err := os.Readlink(filepath.Join(dir, "exe"))
		if err != nil || !strings.HasPrefix(filepath.Base(exe), "postgres") {
			continue // such as a shell
		}
		if pid, err := strconv.Atoi(filepath.Base(dir)); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, true
}

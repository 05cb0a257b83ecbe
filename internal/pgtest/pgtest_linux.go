package pgtest

import (
	"errors"
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

//go:build !linux

package pgtest

import "syscall"

// Elsewhere the child learns of our death from the end of its standard input, and
// init reaps the postmaster.

func endWithParent(*syscall.SysProcAttr) {}

func adoptOrphans() {}

func reapOrphans() {}

func hasEnded(pid int) bool { return syscall.Kill(pid, 0) != nil }

// postgresIn knows nothing here.
func postgresIn(string) (pids []int, known bool) { return nil, false }

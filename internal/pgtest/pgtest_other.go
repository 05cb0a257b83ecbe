//go:build !linux

package pgtest

import "syscall"

// Elsewhere the child learns of our death from the end of its standard input, and
// init reaps the postmaster.

func endWithParent(*syscall.SysProcAttr) {}

func adoptOrphans() {}

func reapOrphans() {}

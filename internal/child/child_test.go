package child_test

import (
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/weir-dev/weir/internal/child"
)

func start(t *testing.T, script string) *child.Process {
	t.Helper()
	p, err := child.Start(exec.Command("/bin/sh", "-c", script))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Stop(syscall.SIGKILL, 0) })
	return p
}

// The id of a child that has ended may be another process's: nothing is sent to it.
func TestSignalAfterTheEnd(t *testing.T) {
	t.Parallel()

	p := start(t, "exit 3")
	if err := p.Err(); err == nil {
		t.Error("Err = nil, want the exit status")
	}
	if err := p.Signal(syscall.SIGTERM); err != nil {
		t.Errorf("Signal to a child that has ended: %v", err)
	}
	if err := p.Stop(syscall.SIGTERM, time.Minute); err != nil {
		t.Errorf("Stop of a child that has ended: %v", err)
	}
}

func TestStop(t *testing.T) {
	t.Parallel()

	p := start(t, "exec sleep 600")
	if err := p.Stop(syscall.SIGTERM, time.Minute); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.Done():
	default:
		t.Error("Stop returned before the child's end")
	}
}

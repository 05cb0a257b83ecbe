// Package child runs the processes that weir starts beside itself: Envoy, and
// an embedded Postgres.
//
// A [Process] lives in a process group of its own, so that a terminal's Ctrl-C
// reaches only weir, which then stops its children in order. On Linux a child
// is killed by the kernel when its parent dies, however it dies: nothing is left
// running after a kill -9.
package child

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// A Process is a started child. It is safe for concurrent use.
type Process struct {
	cmd  *exec.Cmd
	done chan struct{}
	err  error
}

// Start starts cmd. Its SysProcAttr may be set; Start adds the process group and,
// where the system has one, the signal at the parent's death (SIGKILL unless
// Pdeathsig says another). cmd must not come
// from [exec.CommandContext]: a child is stopped by [Process.Stop].
func Start(cmd *exec.Cmd) (*Process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
	dieWithParent(cmd.SysProcAttr)

	p := &Process{cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel sends the parent-death signal when the *thread* that forked
		// ends, so that thread is kept for as long as the child lives.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
	}
	return p, nil
}

// PID is the child's process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the child has ended and been waited for.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err is what [exec.Cmd.Wait] returned. It is valid once Done is closed.
func (p *Process) Err() error {
	<-p.done
	return p.err
}

// Signal sends sig to the child alone. It is no error when the child has ended.
func (p *Process) Signal(sig syscall.Signal) error {
	// The os package knows when the id may be another process's by now.
	err := p.cmd.Process.Signal(sig)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// Stop asks the child to end with sig and waits for it; after grace it kills the
// child's whole process group. It returns once the child is gone.
func (p *Process) Stop(sig syscall.Signal, grace time.Duration) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	if err := p.Signal(sig); err != nil {
		return fmt.Errorf("signalling process %d: %w", p.PID(), err)
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-p.done:
		return nil
	case <-timer.C:
	}
	if err := syscall.Kill(-p.PID(), syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("killing process group %d: %w", p.PID(), err)
	}
	<-p.done
	return nil
}

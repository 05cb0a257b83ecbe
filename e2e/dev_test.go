package e2e_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/weir-dev/weir/internal/child"
	"github.com/weir-dev/weir/internal/envoyproc"
	"github.com/weir-dev/weir/internal/wasmhost/wasmtest"
)

// nobody is the plain user that `weir dev` runs as when the tests run as root.
const nobody = 65534

// `weir dev` starts everything, shows each decision, and leaves nothing running, however
// it ends.
func TestDev(t *testing.T) {
	t.Parallel()
	awayFromMidnight(t)

	ends := []struct {
		name   string
		signal syscall.Signal
		user   *syscall.Credential
	}{
		{name: "Ctrl-C", signal: syscall.SIGINT},
		{name: "SIGTERM", signal: syscall.SIGTERM},
		{name: "kill -9", signal: syscall.SIGKILL},
	}
	if os.Geteuid() == 0 {
		ends[1].name = "SIGTERM as a plain user"
		ends[1].user = &syscall.Credential{Uid: nobody, Gid: nobody}
	}
	// One after the other: each compiles the filter in an Envoy of its own.
	for _, end := range ends {
		t.Run(end.name, func(t *testing.T) {
			mark := "WEIR_TEST=" + uuid.NewString()
			d := startDev(t, mark, end.user)
			for i := range 11 {
				want := http.StatusOK
				if i == 10 {
					want = http.StatusTooManyRequests
				}
				if got := get(t, d.gateway, "alice"); got != want {
					t.Errorf("request %d: %d, want %d", i+1, got, want)
				}
			}
			eventually(t, 10*time.Second, "the decisions are shown", func() error {
				text := d.out.String()
				allowed := strings.Count(text, "allowed      ingest  consumer=alice cost 1")
				refused := strings.Count(text, "refused      ingest  consumer=alice cost 1 | consumer: 0 of 10 left, retry after")
				if allowed != 10 || refused != 1 {
					return fmt.Errorf("%d lines say allowed and %d refused, want 10 and 1", allowed, refused)
				}
				return nil
			})
			if err := d.Stop(end.signal, time.Minute); err != nil {
				t.Error(err)
			}
			if end.signal != syscall.SIGKILL && d.Err() != nil {
				t.Errorf("weir dev ended with %v", d.Err())
			}
			eventually(t, 30*time.Second, "nothing is left running", func() error {
				if left := processesWith(t, mark); len(left) > 0 {
					return fmt.Errorf("left running: %s", strings.Join(left, ", "))
				}
				return nil
			})
		})
	}
}

// A dev is a running `weir dev`.
type dev struct {
	*child.Process

	gateway string
	out     *logBuffer
}

// startDev starts `weir dev` and returns once it says that it runs.
func startDev(t *testing.T, mark string, user *syscall.Credential, more ...string) *dev {
	t.Helper()
	d := launchDev(t, mark, user, wasmtest.Module(t), more...)
	eventually(t, startTimeout, "weir dev is ready", func() error {
		select {
		case <-d.Done():
			t.Fatalf("weir dev ended: %v", d.Err())
		default:
		}
		if !strings.Contains(d.out.String(), "Weir is running.") {
			return errors.New("it has not said so")
		}
		return nil
	})
	return d
}

// launchDev starts `weir dev` with a mark in its environment, and returns at once.
func launchDev(t *testing.T, mark string, user *syscall.Credential, module string, more ...string) *dev {
	t.Helper()
	binary, err := envoyproc.Find(os.Getenv("ENVOY"))
	if err != nil {
		t.Fatal(err)
	}
	d := &dev{gateway: freeAddress(t), out: &logBuffer{}}
	home := t.TempDir()
	policy, envoy := examplePolicy, binary
	if user != nil {
		// What a plain user can't reach below root's folders is copied.
		home = reachableDir(t)
		policy, module = copyTo(t, home, policy, 0o644), copyTo(t, home, module, 0o644)
		if !strings.HasPrefix(binary, "/usr/") {
			envoy = linkOrCopy(t, home, binary)
		}
		if err := os.Chown(home, nobody, nobody); err != nil {
			t.Fatal(err)
		}
	}
	command := exec.Command(weirBinary(t), append([]string{
		"dev", policy,
		"--gateway", d.gateway, "--envoy-admin", freeAddress(t), "--upstream", freeAddress(t),
		"--grpc-listen", freeAddress(t), "--http-listen", freeAddress(t), "--xds-listen", freeAddress(t),
		"--module", module, "--envoy", envoy,
	}, more...)...)
	command.Stdout, command.Stderr = d.out, d.out
	command.Env = append(environment(), mark, "HOME="+home, "XDG_CACHE_HOME="+filepath.Join(home, "cache"))
	if user != nil {
		command.SysProcAttr = &syscall.SysProcAttr{Credential: user}
		command.Dir = home
	}
	showOnFailure(t, "weir dev", d.out)
	if d.Process, err = child.Start(command); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Stop(syscall.SIGKILL, 0) })
	return d
}

// environment is this process's, without what would change what dev does.
func environment() []string {
	var env []string
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "DATABASE_URL=") && !strings.HasPrefix(v, "DATABASE_DIRECT_URL=") && !strings.HasPrefix(v, "ENVOY=") && !strings.HasPrefix(v, "HOME=") {
			env = append(env, v)
		}
	}
	return env
}

func get(t *testing.T, gateway, consumer string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+gateway+"/", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("x-consumer", consumer)
	response, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	return response.StatusCode
}

// processesWith returns the processes that have a variable in their environment.
func processesWith(t *testing.T, variable string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for _, file := range files {
		env, err := os.ReadFile(file)
		if err != nil || !strings.Contains("\x00"+string(env), "\x00"+variable+"\x00") {
			continue // gone, or another user's
		}
		name, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "comm"))
		found = append(found, filepath.Base(filepath.Dir(file))+" "+strings.TrimSpace(string(name)))
	}
	return found
}

func reachableDir(t *testing.T) string {
	t.Helper()
	// Not t.TempDir, whose parents a plain user may not enter.
	dir, err := os.MkdirTemp("", "weir-plain-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func copyTo(t *testing.T, dir, file string, mode os.FileMode) string {
	t.Helper()
	from, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to := filepath.Join(dir, filepath.Base(file))
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY, mode)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(out, from); err != nil {
		t.Fatal(err)
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	return to
}

// linkOrCopy spares the copy of a large file where a hard link will do.
func linkOrCopy(t *testing.T, dir, file string) string {
	t.Helper()
	to := filepath.Join(dir, filepath.Base(file))
	if os.Link(file, to) == nil {
		return to
	}
	return copyTo(t, dir, file, 0o755)
}

// A port in use is told by its flag, before anything is started.
func TestPortInUse(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"--gateway", "--envoy-admin", "--upstream", "--grpc-listen", "--http-listen", "--xds-listen"} {
		t.Run(flag, func(t *testing.T) {
			t.Parallel()
			taken, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer taken.Close()
			arguments := []string{"dev", examplePolicy, "--module", wasmtest.Module(t), flag, taken.Addr().String()}
			for _, other := range []string{"--gateway", "--envoy-admin", "--upstream", "--grpc-listen", "--http-listen", "--xds-listen"} {
				if other != flag {
					arguments = append(arguments, other, freeAddress(t))
				}
			}
			ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
			defer cancel()
			out, err := exec.CommandContext(ctx, weirBinary(t), arguments...).CombinedOutput()
			if err == nil || !strings.Contains(string(out), flag+": listen tcp "+taken.Addr().String()) ||
				!strings.Contains(string(out), "address already in use") {
				t.Errorf("weir dev = %v, %q, want an error that names %s and the address", err, out, flag)
			}
		})
	}
}

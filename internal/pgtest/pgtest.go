// Package pgtest runs a real Postgres: for tests, and for `weir dev`.
//
// [Start] starts an embedded PostgreSQL 18, downloaded once from Maven Central and
// kept in a cache. It runs behind a child process, this same program started again,
// for two reasons: Postgres refuses to run as root, so that as root the child takes
// an unprivileged uid; and when this process dies, however it dies, the child lives
// to stop the server and remove its files. So a program that calls [Start] must call
// [RunChild] first thing in its main.
//
// Tests call [Main] from TestMain, which does that, and [NewDatabase] for a database
// of their own. With DATABASE_URL set they use that server instead.
package pgtest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/weir-dev/weir/internal/child"
)

// stopGrace is how long the child may take to stop Postgres and remove its files.
const stopGrace = 60 * time.Second

// A Config says how to run a server. Its zero value is a server on a free port
// whose data is removed when it stops.
type Config struct {
	// Port is the TCP port on 127.0.0.1. 0 chooses a free one.
	Port int
	// DataDir is a folder that keeps the data between runs; it is created when
	// missing. As root it must be a path that uid 65534 can reach. Defaults to a
	// temporary folder that is removed at the end.
	DataDir string
	// Parameters are settings of Postgres, such as "max_connections". They are
	// added to the defaults of this package, which keep fsync on.
	Parameters map[string]string
	// Log receives a line when a download starts. Defaults to nowhere.
	Log io.Writer
}

// A Server is a running Postgres. Its methods are safe for concurrent use.
type Server struct {
	process *child.Process
	port    int

	mu      sync.Mutex // one command at a time
	stdin   *os.File
	replies chan reply
	pid     int // the postmaster's, 0 when it is down
}

// request is one line to the child's standard input; reply one from its output.
type (
	request struct {
		Command string       `json:"command"` // start, halt or kill
		Config  *childConfig `json:"config,omitempty"`
	}
	reply struct {
		PID   int    `json:"pid"`
		Port  int    `json:"port"`
		Error string `json:"error,omitempty"`
	}
)

// Start starts a server and returns once it accepts connections. The first start on
// a machine downloads about 20 MB. ctx bounds the start only: the server runs until
// [Server.Stop], or until this process dies.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	home, credential, err := prepareHome()
	if err != nil {
		return nil, err
	}
	if cfg.DataDir != "" {
		if cfg.DataDir, err = prepareDataDir(cfg.DataDir, credential); err != nil {
			return nil, err
		}
	}

	stdinRead, stdinWrite, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("making a pipe: %w", err)
	}
	defer stdinRead.Close()
	stdoutRead, stdoutWrite, err := os.Pipe()
	if err != nil {
		stdinWrite.Close()
		return nil, fmt.Errorf("making a pipe: %w", err)
	}
	defer stdoutWrite.Close()

	stderr := child.NewTail(cfg.Log)
	cmd := exec.Command(executable()) //nolint:gosec,noctx // this program itself; it outlives ctx
	cmd.Args[0] = "weir-postgres"
	cmd.Dir = home
	cmd.Env = childEnviron()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdinRead, stdoutWrite, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential}
	endWithParent(cmd.SysProcAttr)
	process, err := child.Start(cmd)
	if err != nil {
		stdinWrite.Close()
		stdoutRead.Close()
		return nil, fmt.Errorf("starting the child that runs Postgres: %w", err)
	}
	s := &Server{process: process, stdin: stdinWrite, replies: make(chan reply)}
	go s.readReplies(stdoutRead)

	r, err := s.command(ctx, request{Command: "start", Config: &childConfig{
		Home: home, Port: cfg.Port, DataDir: cfg.DataDir, Parameters: cfg.Parameters,
	}})
	if err != nil {
		_ = s.close() // the start's error tells more
		if text := stderr.String(); text != "" {
			err = fmt.Errorf("%w\n%s", err, text)
		}
		return nil, fmt.Errorf("starting an embedded Postgres (set DATABASE_URL to use a server of your own): %w", err)
	}
	s.pid, s.port = r.PID, r.Port
	return s, nil
}

// DSN returns the connection string of a database on the server, as its superuser.
// The database "postgres" always exists.
func (s *Server) DSN(database string) string {
	return fmt.Sprintf("postgres://%s:%s@127.0.0.1:%d/%s?sslmode=disable",
		superuser, superuser, s.port, url.PathEscape(database))
}

// Port is the server's TCP port on 127.0.0.1. It stays the same when the server is
// restarted.
func (s *Server) Port() int { return s.port }

// Done is closed when the child that runs the server has ended, asked or not. It ends
// by itself soon after a Postgres that was told neither to halt nor to be killed does.
func (s *Server) Done() <-chan struct{} { return s.process.Done() }

// Halt stops Postgres in order, cutting its clients off, and keeps its data for
// [Server.Restart]. It is no error when it is down already.
func (s *Server) Halt(ctx context.Context) error { return s.change(ctx, "halt") }

// Kill kills Postgres with SIGKILL, as a crash would, and keeps its data for
// [Server.Restart].
func (s *Server) Kill(ctx context.Context) error { return s.change(ctx, "kill") }

// Restart starts Postgres on the same data and port, after halting it if it runs.
func (s *Server) Restart(ctx context.Context) error {
	if err := s.Halt(ctx); err != nil {
		return err
	}
	return s.change(ctx, "start")
}

// Stop ends Postgres and the child, and removes what was temporary. Stopping twice
// is no error.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.close()
}

func (s *Server) change(ctx context.Context, command string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, err := s.command(ctx, request{Command: command})
	if err != nil {
		return fmt.Errorf("asking the child for %q of Postgres: %w", command, err)
	}
	s.pid = r.PID
	return nil
}

// command sends a request and waits for its reply. A reply that ctx did not wait for
// would be taken for the next one's, so the child is stopped then.
func (s *Server) command(ctx context.Context, req request) (reply, error) {
	line, err := json.Marshal(req)
	if err != nil {
		return reply{}, fmt.Errorf("encoding a request: %w", err)
	}
	if _, err := s.stdin.Write(append(line, '\n')); err != nil {
		return reply{}, fmt.Errorf("writing to the child: %w", err)
	}
	select {
	case r, open := <-s.replies:
		if !open {
			return reply{}, errors.New("the child ended")
		}
		if r.Error != "" {
			return reply{}, errors.New(r.Error)
		}
		return r, nil
	case <-ctx.Done():
		return reply{}, errors.Join(ctx.Err(), s.close())
	}
}

// close ends the child: the end of its standard input is its order to stop.
func (s *Server) close() error {
	if err := s.stdin.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("closing the pipe to the child: %w", err)
	}
	err := s.process.Stop(syscall.SIGTERM, stopGrace)
	if s.pid != 0 && s.process.Err() != nil {
		// The child was killed, and could not stop it.
		_ = syscall.Kill(s.pid, syscall.SIGQUIT)
	}
	s.pid = 0
	return err
}

// readReplies passes the child's lines on until it ends.
func (s *Server) readReplies(stdout *os.File) {
	defer stdout.Close()
	defer close(s.replies)
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		var r reply
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
			r.Error = fmt.Sprintf("reading %q from the child: %v", lines.Text(), err)
		}
		select {
		case s.replies <- r:
		case <-s.process.Done():
			return
		}
	}
}

// executable names this program. On Linux /proc/self/exe can be run even where an
// unprivileged uid could not reach the path, such as root's build cache.
func executable() string {
	if runtime.GOOS == "linux" {
		return "/proc/self/exe"
	}
	if path, err := os.Executable(); err == nil {
		return path
	}
	return os.Args[0]
}

// childEnviron is our environment without libpq's variables, which would reach
// into the server's own start.
func childEnviron() []string {
	env := []string{childVariable + "=1"}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "PG") && !strings.HasPrefix(v, childVariable+"=") {
			env = append(env, v)
		}
	}
	return env
}

// unprivileged is the uid and gid of the server when we are root: "nobody".
const unprivileged = 65534

// prepareHome returns the folder in which the child keeps the downloaded server and
// its temporary data, owned by the uid that the child will have, and that uid's
// credential, which is nil for our own.
func prepareHome() (home string, credential *syscall.Credential, err error) {
	uid := os.Geteuid()
	if uid != 0 {
		if cache, err := os.UserCacheDir(); err == nil {
			home = filepath.Join(cache, "weir", "postgres")
			if os.MkdirAll(home, 0o700) == nil && checkOwner(home, uid) == nil && writable(home) {
				return home, nil, nil
			}
		}
	} else {
		uid = unprivileged
		credential = &syscall.Credential{Uid: unprivileged, Gid: unprivileged}
	}
	home = filepath.Join(os.TempDir(), "weir-postgres-"+strconv.Itoa(uid))
	if err := os.Mkdir(home, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return "", nil, fmt.Errorf("making a folder for Postgres: %w", err)
	}
	if credential != nil && checkOwner(home, os.Geteuid()) == nil {
		if err := os.Lchown(home, uid, uid); err != nil {
			return "", nil, fmt.Errorf("making a folder for Postgres: %w", err)
		}
	}
	// The folder's name can be foreseen, so whoever made it first could put other
	// binaries there.
	if err := checkOwner(home, uid); err != nil {
		return "", nil, fmt.Errorf("checking the folder for Postgres: %w; remove it, or set TMPDIR", err)
	}
	return home, credential, nil
}

// checkOwner returns an error unless path is a folder that uid owns and nobody else
// may write to.
func checkOwner(path string, uid int) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.IsDir():
		return fmt.Errorf("%s is not a folder", path)
	case !ok || int(stat.Uid) != uid:
		return fmt.Errorf("%s is not owned by uid %d", path, uid)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%s may be written by others", path)
	}
	return nil
}

func writable(dir string) bool {
	f, err := os.CreateTemp(dir, "try-*")
	if err != nil {
		return false
	}
	f.Close()
	return os.Remove(f.Name()) == nil
}

// prepareDataDir makes a lasting data folder and gives it to the child's uid. It
// does not take over a folder that holds anything.
func prepareDataDir(dir string, credential *syscall.Credential) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("finding the data folder: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("making the data folder: %w", err)
	}
	if credential == nil {
		return dir, nil
	}
	if checkOwner(dir, unprivileged) == nil {
		return dir, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("reading the data folder: %w", err)
	}
	if len(entries) > 0 {
		return "", fmt.Errorf("data folder %s holds files and is not owned by uid %d, as which Postgres runs when started by root: chown it, or choose another",
			dir, unprivileged)
	}
	if err := os.Lchown(dir, unprivileged, unprivileged); err != nil {
		return "", fmt.Errorf("giving the data folder to uid %d: %w", unprivileged, err)
	}
	return dir, nil
}

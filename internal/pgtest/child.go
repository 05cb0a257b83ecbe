package pgtest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

const (
	// childVariable marks a process as the child.
	childVariable = "WEIR_POSTGRES_CHILD"
	// superuser is both the name and the password.
	superuser = "postgres"
	// version is what is downloaded; a folder of data belongs to one major version.
	version      = embeddedpostgres.V18
	majorVersion = "18"

	startTimeout = 30 * time.Second
	// operationGrace is how long an order to stop waits for a start in progress.
	operationGrace = 30 * time.Second
	pollInterval   = 10 * time.Millisecond
	// watchInterval is how often the child looks whether the postmaster lives.
	watchInterval = 100 * time.Millisecond
	// quitGrace is how long a server that nobody owns may take to end in order.
	quitGrace = 5 * time.Second
	// logLines is how much of Postgres's log is told when it ended by itself.
	logLines = 5
)

// childConfig is what the child is told on its first line.
type childConfig struct {
	Home       string            `json:"home"`
	Port       int               `json:"port"`
	DataDir    string            `json:"data_dir,omitempty"`
	Parameters map[string]string `json:"parameters,omitempty"`
}

// RunChild reports whether this process was started as the child of [Start]. If so
// it has done the child's whole work, and the caller must return from main. It costs
// nothing otherwise.
func RunChild() bool {
	if os.Getenv(childVariable) == "" {
		return false
	}
	c := &runner{replies: json.NewEncoder(os.Stdout)}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	adoptOrphans()

	finished, lost := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(finished)
		c.serve()
	}()
	go func() {
		defer close(lost)
		c.watch()
	}()
	select {
	case <-ended:
	case <-finished:
	case <-lost:
	}
	c.end()
	return true
}

// runner is the child's side: one server and its folders.
type runner struct {
	replies *json.Encoder
	config  childConfig

	mu       sync.Mutex // held during an operation
	instance string     // temporary folder of this run, removed at the end
	data     string     // Postgres's data folder
	locks    []*os.File
	port     int
	pid      int                                // the postmaster's, 0 when down
	server   *embeddedpostgres.EmbeddedPostgres // nil when down
}

// serve obeys the lines on standard input until it ends.
func (c *runner) serve() {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var req request
		r := reply{}
		if err := json.Unmarshal(lines.Bytes(), &req); err != nil {
			r.Error = err.Error()
		} else {
			r = c.obey(req)
		}
		if c.replies.Encode(r) != nil {
			return
		}
	}
}

// watch returns when the postmaster has ended without an order.
func (c *runner) watch() {
	for !c.lost() {
		time.Sleep(watchInterval)
	}
}

// lost reports whether the postmaster has ended without an order, and says so.
func (c *runner) lost() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server == nil || !hasEnded(c.pid) {
		return false
	}
	fmt.Fprintf(os.Stderr, "Postgres ended by itself; the last of its log:\n%s\n", c.log())
	c.server, c.pid = nil, 0
	return true
}

// log is the end of Postgres's log.
func (c *runner) log() string {
	files, _ := filepath.Glob(filepath.Join(c.instance, "embedded_postgres_log*")) // the pattern is right
	var newest string
	var at time.Time
	for _, file := range files { // one a start
		if info, err := os.Stat(file); err == nil && !info.ModTime().Before(at) {
			newest, at = file, info.ModTime()
		}
	}
	text, err := os.ReadFile(newest) //nolint:gosec // a path of our own
	if err != nil {
		return ""
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-logLines):], "\n")
}

func (c *runner) obey(req request) reply {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := c.do(req)
	r := reply{PID: c.pid, Port: c.port}
	if err != nil {
		r.Error = err.Error()
	}
	return r
}

func (c *runner) do(req request) error {
	switch req.Command {
	case "start":
		if req.Config != nil {
			c.config = *req.Config
			if err := c.prepare(); err != nil {
				return err
			}
		}
		return c.start()
	case "halt":
		return c.halt()
	case "kill":
		return c.kill()
	}
	return fmt.Errorf("unknown command %q", req.Command)
}

// prepare makes the folders of this run.
func (c *runner) prepare() error {
	runs := filepath.Join(c.config.Home, "run")
	if err := os.MkdirAll(runs, 0o700); err != nil {
		return fmt.Errorf("making a folder for Postgres: %w", err)
	}
	// Making a run and sweeping runs exclude each other: a run without its lock
	// looks dead.
	runsLock, err := lockFile(filepath.Join(c.config.Home, "run.lock"), syscall.LOCK_EX)
	if err != nil {
		return err
	}
	defer runsLock.Close()
	sweepDead(runs)
	if c.instance, err = os.MkdirTemp(runs, ""); err != nil {
		return fmt.Errorf("making a folder for Postgres: %w", err)
	}
	lock, err := lockFile(filepath.Join(c.instance, "lock"), syscall.LOCK_EX)
	if err != nil {
		return err
	}
	c.locks = append(c.locks, lock)
	// The embedded server leaves its log behind where temporary files go.
	if err := os.Setenv("TMPDIR", c.instance); err != nil {
		return fmt.Errorf("setting TMPDIR: %w", err)
	}
	if c.config.DataDir == "" {
		c.data = filepath.Join(c.instance, "data")
		return nil
	}

	lock, err = lockFile(filepath.Join(c.config.DataDir, "lock"), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return fmt.Errorf("data folder %s is in use by another server", c.config.DataDir)
	}
	if err != nil {
		return fmt.Errorf("locking the data folder as uid %d: %w", os.Geteuid(), err)
	}
	c.locks = append(c.locks, lock)
	c.data = filepath.Join(c.config.DataDir, "postgres-"+majorVersion)
	if _, err := os.Stat(c.complete()); errors.Is(err, os.ErrNotExist) {
		// An initdb that was cut short leaves a folder that looks whole.
		if err := os.RemoveAll(c.data); err != nil {
			return fmt.Errorf("removing an unfinished data folder: %w", err)
		}
	}
	return nil
}

// complete is the file that marks a lasting data folder as initialised.
func (c *runner) complete() string { return c.data + ".complete" }

// start installs the server if need be and starts it, on a port that it keeps.
func (c *runner) start() error {
	if c.server != nil {
		return errors.New("the server is running")
	}
	binaries := filepath.Join(c.config.Home, string(version))
	installed := binaries + ".complete"
	install, err := lockFile(binaries+".lock", syscall.LOCK_EX)
	if err != nil {
		return err
	}
	defer install.Close()
	_, err = os.Stat(installed)
	if err == nil {
		// Installed: others may start meanwhile.
		install.Close()
	} else {
		fmt.Fprintf(os.Stderr, "installing PostgreSQL %s in %s (a download of about 20 MB)\n", version, c.config.Home)
		if err := os.RemoveAll(binaries); err != nil {
			return fmt.Errorf("removing an unfinished installation: %w", err)
		}
	}
	if err := c.launch(binaries); err != nil {
		return err
	}
	if err := touch(installed); err != nil {
		return err
	}
	if c.config.DataDir != "" {
		return touch(c.complete())
	}
	return nil
}

// launch starts the server. A port of our own choice may be taken between the choice
// and the start, and a server that was killed may still be dying, so it tries again.
func (c *runner) launch(binaries string) error {
	const attempts = 5
	var err error
	for range attempts {
		if err = c.clear(); err != nil {
			return err
		}
		port := c.port
		if port == 0 {
			port = c.config.Port
		}
		if port == 0 {
			if port, err = freePort(); err != nil {
				return err
			}
		} else if err = checkPort(port); err != nil {
			return err
		}
		before := c.readPID()
		server := embeddedpostgres.NewDatabase(embeddedpostgres.DefaultConfig().
			Version(version).
			Port(uint32(port)). //nolint:gosec // checked to be a port by listening on it
			Username(superuser).Password(superuser).Database("postgres").
			Locale("C").Encoding("UTF8").
			CachePath(c.config.Home).
			BinariesPath(binaries).
			RuntimePath(filepath.Join(c.instance, "runtime")).
			DataPath(c.data).
			StartTimeout(startTimeout).
			StartParameters(c.parameters()).
			Logger(nil))
		if err = server.Start(); err == nil {
			c.server, c.port, c.pid = server, port, c.readPID()
			return nil
		}
		if pid := c.readPID(); pid != before {
			// It started and did not answer; an older file may name a stranger.
			c.pid = pid
			if err := c.kill(); err != nil {
				return err
			}
		}
		if strings.Contains(err.Error(), "could not look up effective user ID") {
			return fmt.Errorf("%w\nPostgres runs only as a user that the machine knows: give uid %d an entry in /etc/passwd", err, os.Geteuid())
		}
		if _, initialised := os.Stat(filepath.Join(c.data, "PG_VERSION")); initialised != nil || c.port == 0 && c.config.Port != 0 {
			return err
		}
		time.Sleep(10 * pollInterval)
		reapOrphans()
	}
	return err
}

// clear ends what a server that was killed, or whose child was, has left at work in the
// data folder, and removes its lock file. The folder's own lock says that no other
// child uses it, while the file names a process id that may be a stranger's, or that of
// a zombie: Postgres would refuse to start for either.
func (c *runner) clear() error {
	start := time.Now()
	for {
		left, known := postgresIn(c.data)
		if !known {
			return nil // Postgres looks for itself
		}
		if len(left) == 0 {
			break
		}
		if time.Since(start) > operationGrace {
			return fmt.Errorf("processes %v of an earlier Postgres still work in %s", left, c.data)
		}
		signal := syscall.SIGQUIT // stop at once; what was committed stays
		if time.Since(start) > quitGrace {
			signal = syscall.SIGKILL
		}
		for _, pid := range left {
			_ = syscall.Kill(pid, signal) // it may just have ended
		}
		time.Sleep(pollInterval)
		reapOrphans()
	}
	if err := os.Remove(filepath.Join(c.data, "postmaster.pid")); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing the lock file of an earlier Postgres: %w", err)
	}
	return nil
}

// parameters keep the server small and all that it makes inside its data folder:
// no Unix socket, no shared memory that outlives a crash.
func (c *runner) parameters() map[string]string {
	p := map[string]string{
		"listen_addresses":           "127.0.0.1",
		"unix_socket_directories":    "",
		"dynamic_shared_memory_type": "mmap",
		"shared_buffers":             "32MB",
		"max_connections":            "200",
		"timezone":                   "UTC",
	}
	maps.Copy(p, c.config.Parameters)
	return p
}

// halt stops the server in order.
func (c *runner) halt() error {
	if c.server == nil {
		return nil
	}
	server, pid := c.server, c.pid
	c.server = nil
	// A postmaster that is killed meanwhile would look alive to pg_ctl, which would
	// wait for a minute, until it has been waited for.
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for !hasEnded(pid) {
			time.Sleep(pollInterval)
		}
	}()
	if err := server.Stop(); err != nil {
		select {
		case <-ended: // what was wanted, if not how
		default:
			return errors.Join(fmt.Errorf("stopping Postgres: %w", err), c.kill())
		}
	}
	<-ended
	reapOrphans()
	c.pid = 0
	return nil
}

// kill kills the postmaster, whose other processes end when they notice, and waits
// until it is gone.
func (c *runner) kill() error {
	c.server = nil
	pid := c.pid
	if pid == 0 {
		return nil
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("killing the postmaster: %w", err)
	}
	deadline := time.Now().Add(operationGrace)
	for !hasEnded(pid) {
		if time.Now().After(deadline) {
			return fmt.Errorf("postmaster %d did not end after SIGKILL", pid)
		}
		time.Sleep(pollInterval)
	}
	reapOrphans()
	c.pid = 0
	return nil
}

// readPID is the process id in the data folder's lock file, or 0. After a crash it
// may name a process that is none of ours.
func (c *runner) readPID() int {
	file, err := os.ReadFile(filepath.Join(c.data, "postmaster.pid"))
	if err != nil {
		return 0
	}
	line, _, _ := strings.Cut(string(file), "\n")
	pid, err := strconv.Atoi(line)
	if err != nil || pid <= 0 {
		return 0
	}
	return pid
}

// end stops the server and removes what is temporary. An operation in progress is
// given time, and then overtaken.
func (c *runner) end() {
	idle := make(chan struct{})
	go func() {
		c.mu.Lock() // for good: nothing may start any more
		close(idle)
	}()
	select {
	case <-idle:
		if err := c.halt(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	case <-time.After(operationGrace):
		// A postmaster whose folder is gone ends by itself.
	}
	if c.instance == "" {
		return
	}
	// A postmaster's last processes may still write for an instant.
	for range 100 {
		if err := os.RemoveAll(c.instance); err == nil {
			return
		}
		time.Sleep(pollInterval)
	}
	fmt.Fprintln(os.Stderr, "could not remove", c.instance)
}

// sweepDead removes the folders of runs whose child was killed before it could. A
// postmaster that still runs there ends by itself within a minute of that; its
// process id is not to be trusted.
func sweepDead(runs string) {
	entries, err := os.ReadDir(runs)
	if err != nil {
		return
	}
	for _, e := range entries {
		dir := filepath.Join(runs, e.Name())
		lock, err := lockFile(filepath.Join(dir, "lock"), syscall.LOCK_EX|syscall.LOCK_NB)
		if err != nil {
			continue
		}
		_ = os.RemoveAll(dir)
		lock.Close()
	}
}

// lockFile opens a file and locks it; closing it unlocks. The processes that share
// these files are unrelated, so the kernel must know who holds what.
func lockFile(path string, how int) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600) //nolint:gosec // a path of our own
	if err != nil {
		return nil, fmt.Errorf("opening a lock: %w", err)
	}
	for {
		err = syscall.Flock(int(f.Fd()), how)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	return f, nil
}

func touch(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600) //nolint:gosec // a path of our own
	if err != nil {
		return fmt.Errorf("marking as complete: %w", err)
	}
	return f.Close()
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // instantaneous
	if err != nil {
		return 0, fmt.Errorf("finding a free port: %w", err)
	}
	defer l.Close()
	addr, ok := l.Addr().(*net.TCPAddr)
	if !ok {
		return 0, fmt.Errorf("finding a free port: %v is no TCP address", l.Addr())
	}
	return addr.Port, nil
}

func checkPort(port int) error {
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port))) //nolint:noctx // instantaneous
	if err != nil {
		return fmt.Errorf("port %d for Postgres is taken, choose another: %w", port, err)
	}
	return l.Close()
}

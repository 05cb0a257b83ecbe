// Package envoyproc finds the real Envoy, checks configurations with it and runs
// it, for `weir dev` and for tests.
//
// [Find] returns a binary, [Validate] has it judge a bootstrap, and [Start] runs
// it. An [Envoy] that was started is stopped by [Envoy.Stop] and by nothing else;
// its files are in a temporary directory that Stop removes, or the next start where
// this process was killed. On Linux it can't outlive the process that started it.
//
// A bootstrap may leave ports to the kernel by saying 0: [Envoy.Admin] and
// [Envoy.Listener] tell which it took.
package envoyproc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	adminv3 "github.com/envoyproxy/go-control-plane/envoy/admin/v3"
	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/weir-dev/weir/internal/child"
)

const (
	defaultGrace    = 5 * time.Second
	killGrace       = time.Second
	pollInterval    = 20 * time.Millisecond
	requestTimeout  = 10 * time.Second // the admin interface stands still while code compiles
	maxAdminBody    = 4 << 20
	defaultLogLevel = "warning"
)

// A Config says which Envoy to run and how. Exactly one of Bootstrap and File is
// set.
type Config struct {
	Binary string // as from Find

	Bootstrap *bootstrapv3.Bootstrap
	File      string // a bootstrap file; its suffix tells Envoy the format

	// LogLevel is one of Envoy's: trace, debug, info, warning, error, critical,
	// off. Defaults to warning.
	LogLevel string

	// Output receives what Envoy writes, its log. Writes come one at a time.
	// Defaults to nowhere; errors carry the last of it either way.
	Output io.Writer

	// Concurrency is the number of worker threads. Defaults to one for each CPU.
	Concurrency int

	// Grace is how long Stop waits for Envoy to end before it kills it. Defaults
	// to 5 seconds.
	Grace time.Duration
}

// An Envoy is a running Envoy. It is safe for concurrent use.
type Envoy struct {
	process   *child.Process
	dir       *runDir // holds the configuration and the admin address
	adminFile string
	output    *child.Tail
	grace     time.Duration
	http      *http.Client

	stop    sync.Once
	stopErr error
}

// Start starts Envoy and returns at once; see [Envoy.WaitReady]. It does nothing
// when ctx has ended; later ends of ctx don't stop Envoy.
func Start(ctx context.Context, config Config) (*Envoy, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("starting Envoy: %w", err)
	}
	if config.Bootstrap != nil && config.Bootstrap.GetAdmin() == nil {
		return nil, errors.New("starting Envoy: its bootstrap has no admin interface, which tells when it is ready")
	}
	if config.Grace == 0 {
		config.Grace = defaultGrace
	}
	dir, err := newRunDir()
	if err != nil {
		return nil, fmt.Errorf("starting Envoy: %w", err)
	}
	adminFile := filepath.Join(dir.path, "admin")
	args, err := arguments(config, dir.path)
	if err != nil {
		return nil, errors.Join(err, dir.remove())
	}
	args = append(args, "--admin-address-path", adminFile)

	output := child.NewTail(config.Output)
	cmd := exec.Command(config.Binary, args...) //nolint:gosec,noctx // the caller chooses its Envoy; child stops it
	cmd.Stdout, cmd.Stderr = output, output
	process, err := child.Start(cmd)
	if err != nil {
		return nil, errors.Join(err, dir.remove())
	}
	return &Envoy{
		process:   process,
		dir:       dir,
		adminFile: adminFile,
		output:    output,
		grace:     config.Grace,
		http: &http.Client{
			Timeout: requestTimeout,
			// No connection is left open, since nothing would close it.
			Transport: &http.Transport{DisableKeepAlives: true},
		},
	}, nil
}

// Validate has the Envoy at binary load bootstrap without serving: its plugins
// start too, so a filter configuration that the filter refuses is an error. The
// error holds Envoy's own words.
func Validate(ctx context.Context, binary string, bootstrap *bootstrapv3.Bootstrap) (err error) {
	dir, err := newRunDir()
	if err != nil {
		return fmt.Errorf("validating an Envoy configuration: %w", err)
	}
	defer func() { err = errors.Join(err, dir.remove()) }()

	args, err := arguments(Config{Bootstrap: bootstrap}, dir.path)
	if err != nil {
		return err
	}
	//nolint:gosec,noctx // the caller chooses its Envoy; child stops it
	out, err := run(ctx, exec.Command(binary, append(args, "--mode", "validate")...))
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return fmt.Errorf("validating an Envoy configuration: %w\n%s", err, out)
	case err != nil:
		return fmt.Errorf("validating an Envoy configuration: %w", err)
	}
	return nil
}

// arguments builds Envoy's command line, and writes the bootstrap to dir if it is
// not a file yet.
func arguments(config Config, dir string) ([]string, error) {
	file := config.File
	switch {
	case (config.Bootstrap == nil) == (file == ""):
		return nil, errors.New("starting Envoy: exactly one of Bootstrap and File must be set")
	case config.Bootstrap != nil:
		data, err := protojson.Marshal(config.Bootstrap)
		if err != nil {
			return nil, fmt.Errorf("marshalling Envoy's bootstrap: %w", err)
		}
		file = filepath.Join(dir, "bootstrap.json")
		if err := os.WriteFile(file, data, 0o600); err != nil {
			return nil, fmt.Errorf("writing Envoy's bootstrap: %w", err)
		}
	}
	level := config.LogLevel
	if level == "" {
		level = defaultLogLevel
	}
	args := []string{
		"--config-path", file,
		"--log-level", level,
		// Hot restart wants shared memory and an id that no other Envoy of this
		// host has.
		"--disable-hot-restart",
	}
	if config.Concurrency > 0 {
		args = append(args, "--concurrency", strconv.Itoa(config.Concurrency))
	}
	return args, nil
}

// WaitReady returns when Envoy serves: all of its configuration is there and its
// listeners listen. It fails when ctx ends, and when Envoy does; the error then
// holds the last of Envoy's log.
func (e *Envoy) WaitReady(ctx context.Context) error {
	last := errors.New("it has not been asked yet")
	for {
		// /ready is 200 only in the state LIVE.
		_, err := e.get(ctx, "/ready")
		if err == nil {
			return nil
		}
		if ctx.Err() == nil {
			last = err
		}
		if err := e.pause(ctx); err != nil {
			return fmt.Errorf("waiting for Envoy to be ready: %w (last: %w)%s", err, last, e.words())
		}
	}
}

// Admin returns the address of Envoy's admin interface as "host:port". It fails
// until Envoy has opened it, which is early in its start.
func (e *Envoy) Admin() (string, error) {
	data, err := os.ReadFile(e.adminFile)
	if err != nil {
		return "", fmt.Errorf("reading Envoy's admin address: %w", err)
	}
	addr := strings.TrimSpace(string(data))
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return "", fmt.Errorf("reading Envoy's admin address: %w", err)
	}
	return addr, nil
}

// Listener returns the address of the listener with that name as "host:port". It
// fails while Envoy has no such listener.
func (e *Envoy) Listener(ctx context.Context, name string) (string, error) {
	body, err := e.get(ctx, "/listeners?format=json")
	if err != nil {
		return "", fmt.Errorf("asking Envoy for its listeners: %w", err)
	}
	var all adminv3.Listeners
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(body, &all); err != nil {
		return "", fmt.Errorf("asking Envoy for its listeners: %w", err)
	}
	for _, listener := range all.GetListenerStatuses() {
		if at := listener.GetLocalAddress().GetSocketAddress(); listener.GetName() == name && at != nil {
			return net.JoinHostPort(at.GetAddress(), strconv.FormatUint(uint64(at.GetPortValue()), 10)), nil
		}
	}
	return "", fmt.Errorf("asking Envoy for its listeners: it has no %q", name)
}

// Stat returns a counter or gauge of Envoy's by its full name. One that Envoy has
// not made yet is 0.
func (e *Envoy) Stat(ctx context.Context, name string) (uint64, error) {
	body, err := e.get(ctx, "/stats?format=json&filter="+url.QueryEscape("^"+regexp.QuoteMeta(name)+"$"))
	if err != nil {
		return 0, fmt.Errorf("asking Envoy for the statistic %q: %w", name, err)
	}
	var answer struct {
		Stats []struct {
			Name  string `json:"name"`
			Value uint64 `json:"value"`
		} `json:"stats"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return 0, fmt.Errorf("asking Envoy for the statistic %q: %w", name, err)
	}
	for _, stat := range answer.Stats {
		if stat.Name == name {
			return stat.Value, nil
		}
	}
	return 0, nil
}

// get asks the admin interface; any status but 200 is an error.
func (e *Envoy) get(ctx context.Context, path string) ([]byte, error) {
	addr, err := e.Admin()
	if err != nil {
		return nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := e.http.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxAdminBody))
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s is %d: %s", path, response.StatusCode, strings.TrimSpace(string(body)))
	}
	return body, nil
}

// pause waits a little. It fails when ctx or Envoy ends.
func (e *Envoy) pause(ctx context.Context) error {
	timer := time.NewTimer(pollInterval)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-e.process.Done():
		return e.Err()
	}
}

// words is the end of Envoy's log, to close an error with.
func (e *Envoy) words() string {
	if said := e.output.String(); said != "" {
		return "\n" + said
	}
	return ""
}

// PID is Envoy's process id.
func (e *Envoy) PID() int { return e.process.PID() }

// Done is closed when Envoy has ended.
func (e *Envoy) Done() <-chan struct{} { return e.process.Done() }

// Err says how Envoy ended. It waits for Done.
func (e *Envoy) Err() error {
	if err := e.process.Err(); err != nil {
		return fmt.Errorf("envoy ended: %w", err)
	}
	return errors.New("envoy ended")
}

// Stop ends Envoy and removes its files. It returns when Envoy is gone. Calls
// after the first return what the first returned.
func (e *Envoy) Stop() error {
	e.stop.Do(func() {
		err := e.process.Stop(syscall.SIGTERM, e.grace)
		e.http.CloseIdleConnections()
		e.stopErr = errors.Join(err, e.dir.remove())
	})
	return e.stopErr
}

// Command weir gives Envoy exact, durable budgets: it is the rate limit service,
// the control plane that configures Envoy and its filter, and the tools around them.
//
//	weir dev                 everything on this machine, to try it
//	weir serve               the service and the control plane
//	weir migrate             bring the database's schema up to date
//	weir bootstrap           print an Envoy bootstrap
//	weir policy check FILE   say what is wrong with policy files
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"github.com/weir-dev/weir/internal/envoyproc"
	"github.com/weir-dev/weir/internal/pgtest"
)

func main() {
	if pgtest.RunChild() {
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // so that a second signal ends the process at once
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	var usage *usageError
	switch {
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "weir: %v\n", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintf(os.Stderr, "weir: %v\n", err)
		os.Exit(1)
	}
}

// A usageError is a fault of the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }

// cli is the command tree.
type cli struct {
	Version kong.VersionFlag `help:"Say which weir this is, and the Envoy that it was tested with."`

	Dev       devCommand       `cmd:"" help:"Run everything on this machine: Postgres, the service, an echo upstream and Envoy with the filter."`
	Serve     serveCommand     `cmd:"" help:"Run the rate limit service and the control plane."`
	Migrate   migrateCommand   `cmd:"" help:"Bring the database's schema up to date."`
	Bootstrap bootstrapCommand `cmd:"" help:"Print an Envoy bootstrap, as YAML."`
	Policy    policyCommand    `cmd:"" help:"Work with policy files."`
}

// terminal is where a command speaks: results go to stdout, all else to stderr.
type terminal struct {
	stdout, stderr io.Writer
}

// run is main without the process: tests call it with their own ctx and writers. It
// returns nil once ctx ends and everything it started has stopped.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	exited := false
	parser, err := kong.New(&cli{},
		kong.Name("weir"),
		kong.Description("Exact, durable budgets for Envoy."),
		kong.UsageOnError(),
		kong.Writers(stdout, stderr),
		kong.Exit(func(int) { exited = true }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(terminal{stdout: stdout, stderr: stderr}),
		kong.Vars{"defaultPolicy": defaultPolicy, "version": version()},
	)
	if err != nil {
		return fmt.Errorf("building the command line: %w", err)
	}
	command, err := parser.Parse(args)
	switch {
	case exited: // help or the version was asked for, and printed
		return nil
	case err != nil:
		return &usageError{err: fmt.Errorf("%w; see weir --help", err)}
	}
	return command.Run()
}

// logFlags say how a long-lived command logs.
type logFlags struct {
	LogLevel  slog.Level `help:"Least level to log: debug, info, warn or error." default:"info"`
	LogFormat string     `help:"Log lines as text or as json." enum:"text,json" default:"text"`
}

func (f logFlags) logger(w io.Writer) *slog.Logger {
	options := &slog.HandlerOptions{Level: f.LogLevel}
	if f.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, options))
	}
	return slog.New(slog.NewTextHandler(w, options))
}

// version tells this binary's version, the commit that it was built from, if it knows
// that, and the Envoy that it was tested with.
func version() string {
	var text strings.Builder
	text.WriteString("weir ")
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{Main: debug.Module{Version: "(unknown)"}, GoVersion: runtime.Version()}
	}
	text.WriteString(cmp.Or(info.Main.Version, "(devel)"))
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	if commit := settings["vcs.revision"]; commit != "" {
		fmt.Fprintf(&text, ", commit %s of %s", commit, settings["vcs.time"])
		if settings["vcs.modified"] == "true" {
			text.WriteString(" with changes")
		}
	}
	fmt.Fprintf(&text, ", %s, tested with Envoy %s", info.GoVersion, envoyproc.Version)
	return text.String()
}

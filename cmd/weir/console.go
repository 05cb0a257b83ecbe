package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
)

// A console is the log of `weir dev`: a readable line a decision, and what else is
// worth a person's attention.
type console struct {
	w     io.Writer // writes whole lines
	least slog.Level
	attrs []slog.Attr
}

// newConsole returns a console that writes a line at a time to w. It admits what has the
// least level, of which Handle leaves out what is not for a person.
func newConsole(w io.Writer, least slog.Level) *console { return &console{w: w, least: least} }

// Enabled implements [slog.Handler].
func (c *console) Enabled(_ context.Context, level slog.Level) bool { return level >= c.least }

// WithAttrs implements [slog.Handler].
func (c *console) WithAttrs(attrs []slog.Attr) slog.Handler {
	next := *c
	next.attrs = append(append([]slog.Attr(nil), c.attrs...), attrs...)
	return &next
}

// WithGroup implements [slog.Handler]. Groups are not shown.
func (c *console) WithGroup(string) slog.Handler { return c }

// Handle implements [slog.Handler].
func (c *console) Handle(_ context.Context, r slog.Record) error {
	attrs := map[string]slog.Value{}
	var rest []string
	add := func(a slog.Attr) bool {
		attrs[a.Key] = a.Value
		rest = append(rest, a.Key+"="+a.Value.String())
		return true
	}
	for _, a := range c.attrs {
		add(a)
	}
	r.Attrs(add)

	var line string
	switch {
	case r.Message == "decision":
		line = decisionLine(attrs)
	case r.Message == "envoy refused a configuration":
		line = fmt.Sprintf("WARN: envoy refused the %s: %s", resourceName(attrs["type"].String()), attrs["detail"])
	case r.Message == "database":
		return nil // what it is matters to operators
	case r.Level >= slog.LevelWarn:
		line = strings.TrimSpace(r.Level.String() + ": " + r.Message + " " + strings.Join(rest, " "))
	case r.Level >= slog.LevelInfo:
		line = r.Message
	default:
		return nil
	}
	_, err := fmt.Fprintf(c.w, "%s  %s\n", r.Time.Format("15:04:05"), line)
	return err
}

// decisionLine renders a decision of the service, for example:
//
//	refused      ingest  consumer=alice cost 1 | consumer: 0 of 10 left, retry after 3600 s
func decisionLine(attrs map[string]slog.Value) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%-12s %s ", attrs["outcome"], attrs["domain"])
	if descriptors, ok := attrs["descriptors"].Any().([]string); ok {
		b.WriteString(" " + strings.Join(descriptors, ", "))
	}
	var told []string
	if limit, ok := attrs["limit"]; ok {
		told = append(told, fmt.Sprintf("%s: %s of %s left", limit, attrs["remaining"], attrs["size"]))
	}
	if reason, ok := attrs["reason"]; ok && reason.String() != "exhausted" {
		told = append(told, reason.String())
	}
	if wait, ok := attrs["retry_after_s"]; ok {
		told = append(told, fmt.Sprintf("retry after %s s", wait))
	}
	if err, ok := attrs["err"]; ok {
		told = append(told, err.String())
	}
	if len(told) > 0 {
		b.WriteString(" | " + strings.Join(told, ", "))
	}
	return b.String()
}

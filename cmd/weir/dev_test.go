package main

import (
	"log/slog"
	"strings"
	"testing"
)

func TestWithoutPassword(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ dsn, want string }{
		{"postgres://weir:s3cret@db.example:5432/weir?sslmode=require", "postgres://weir@db.example:5432/weir?sslmode=require"},
		{"postgresql://db.example/weir?user=weir&password=s3cret", "postgresql://db.example/weir?user=weir"},
		{"postgres://weir@db.example/weir", "postgres://weir@db.example/weir"},
		{"host=db.example port=5433 user=weir password='s3 cret' dbname=weir", "host=db.example port=5433 user=weir dbname=weir"},
	} {
		if got := withoutPassword(tt.dsn); got != tt.want {
			t.Errorf("withoutPassword(%q) = %q, want %q", tt.dsn, got, tt.want)
		}
	}
}

func TestEnvoyLog(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	log := &envoyLog{w: &out}
	write := func(text string) {
		t.Helper()
		if n, err := log.Write([]byte(text)); n != len(text) || err != nil {
			t.Fatalf("Write = %d, %v", n, err)
		}
	}
	const (
		warning = "[2026-12-01 03:11:08.652][6460][warning][main] [source/server/server.cc:1028] caught ENVOY_SIGTERM"
		fault   = "[2026-12-01 03:11:08.652][6460][critical][main] [source/server/server.cc:1028] assert failure"
	)
	write(warning[:10])
	write(warning[10:] + "\n" + fault + "\nplain")
	write("\n")
	log.stopping.Store(true)
	write(warning + "\n" + fault + "\n")
	want := "envoy: " + warning + "\nenvoy: " + fault + "\nenvoy: plain\nenvoy: " + fault + "\n"
	if out.String() != want {
		t.Errorf("shown:\n%s\nwant:\n%s", &out, want)
	}
}

func TestConsole(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	quiet, all := slog.New(newConsole(&out, slog.LevelWarn)), slog.New(newConsole(&out, slog.LevelDebug))
	quiet.Info("envoy accepted a configuration")
	quiet.Warn("envoy refused a configuration",
		slog.String("type", "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"),
		slog.String("detail", "Unable to create Wasm plugin weir"))
	all.Info("database", slog.String("server_version", "18.3"))
	all.Debug("decision",
		slog.String("outcome", "refused"), slog.String("domain", "ingest"), slog.Any("descriptors", []string{"consumer=alice cost 1"}),
		slog.String("limit", "consumer"), slog.Int64("remaining", 0), slog.Int64("size", 10), slog.Int64("retry_after_s", 60))
	var lines []string
	for line := range strings.Lines(out.String()) {
		_, text, _ := strings.Cut(line, "  ")
		lines = append(lines, text)
	}
	want := []string{
		"WARN: envoy refused the filter: Unable to create Wasm plugin weir\n",
		"refused      ingest  consumer=alice cost 1 | consumer: 0 of 10 left, retry after 60 s\n",
	}
	if strings.Join(lines, "") != strings.Join(want, "") {
		t.Errorf("shown: %q, want %q", lines, want)
	}
}

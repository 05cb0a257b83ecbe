package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"
)

const (
	httpHeaderTimeout = 10 * time.Second
	httpWriteTimeout  = 30 * time.Second // from the headers' end to the answer's
	httpIdleTimeout   = 2 * time.Minute

	// drainTimeout is how long calls in flight may take to end.
	drainTimeout = 5 * time.Second
)

// serveHTTP serves until ctx ends, and then lets requests in flight finish.
func serveHTTP(logger *slog.Logger, listener net.Listener, server *http.Server) part {
	server.ErrorLog = slog.NewLogLogger(logger.Handler(), slog.LevelWarn)
	return func(ctx context.Context) error {
		stopped := make(chan error, 1)
		go func() { stopped <- server.Serve(listener) }()
		select {
		case err := <-stopped:
			return err
		case <-ctx.Done():
		}
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTimeout)
		defer cancel()
		err := server.Shutdown(drain)
		if err != nil { // some did not finish in time
			err = server.Close()
		}
		if serving := <-stopped; !errors.Is(serving, http.ErrServerClosed) {
			err = errors.Join(err, serving)
		}
		return err
	}
}

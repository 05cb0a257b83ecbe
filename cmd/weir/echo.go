package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// serveEcho is the upstream of `weir dev`: it answers each request with what arrived.
// It returns when ctx ends.
func serveEcho(ctx context.Context, listener net.Listener) error {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "%s %s reached the upstream with %d bytes of body\n", r.Method, r.URL.Path, n) //nolint:gosec // plain text, said to be so
	})
	return serveHTTP(ctx, listener, &http.Server{Handler: handler, ReadHeaderTimeout: httpHeaderTimeout})
}

const (
	httpHeaderTimeout = 10 * time.Second
	drainTimeout      = 5 * time.Second
)

// serveHTTP serves until ctx ends, and then lets requests in flight finish.
func serveHTTP(ctx context.Context, listener net.Listener, server *http.Server) error {
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

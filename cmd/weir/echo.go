package main

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
)

// serveEcho is the upstream of `weir dev`: it answers each request with what arrived.
func serveEcho(logger *slog.Logger, listener net.Listener) part {
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		fmt.Fprintf(w, "%s %s reached the upstream with %d bytes of body\n", r.Method, r.URL.Path, n) //nolint:gosec // plain text, said to be so
	})
	// No more timeouts: an upload may be slow, and Envoy keeps connections.
	return serveHTTP(logger, listener, &http.Server{Handler: handler, ReadHeaderTimeout: httpHeaderTimeout})
}

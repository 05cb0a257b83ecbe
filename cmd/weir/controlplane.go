package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/xds"
)

// publish returns a control plane that serves an Envoy's configuration.
func publish(ctx context.Context, logger *slog.Logger, config envoy.Config) (*xds.Server, error) {
	resources, err := config.Resources()
	if err != nil {
		return nil, flagErrors(err)
	}
	plane, err := xds.NewServer(xds.Config{Logger: logger})
	if err != nil {
		return nil, fmt.Errorf("building the control plane: %w", err)
	}
	if err := plane.Publish(ctx, resources); err != nil {
		plane.Close()
		return nil, fmt.Errorf("publishing Envoy's configuration: %w", err)
	}
	return plane, nil
}

// serveControlPlane serves until ctx ends.
func serveControlPlane(ctx context.Context, listener net.Listener, plane *xds.Server) error {
	server := newGRPCServer(slog.New(slog.DiscardHandler))
	plane.Register(server)
	go func() {
		<-ctx.Done()
		plane.Close() // its streams would otherwise never end
	}()
	return serveGRPC(ctx, listener, server)
}

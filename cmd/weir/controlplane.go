package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path"

	"google.golang.org/grpc"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/xds"
)

// publish returns a control plane that serves an Envoy's configuration. flags are those
// of the command, as for flagErrors.
func publish(ctx context.Context, logger *slog.Logger, config envoy.Config, flags fieldFlags) (*xds.Server, error) {
	resources, err := config.Resources()
	if err != nil {
		return nil, flagErrors(err, flags)
	}
	plane := xds.NewServer(xds.Config{Logger: logger})
	if err := plane.Publish(ctx, resources); err != nil {
		plane.Close()
		return nil, fmt.Errorf("publishing Envoy's configuration: %w", err)
	}
	return plane, nil
}

// serveControlPlane serves until ctx ends, over TLS if there are certificates.
func serveControlPlane(logger *slog.Logger, listener net.Listener, plane *xds.Server, certificates *certificates) part {
	return func(ctx context.Context) error {
		var options []grpc.ServerOption
		if certificates != nil {
			options = append(options, certificates.grpcOption())
		}
		server := newGRPCServer(logger, options...)
		plane.Register(server)
		// Its streams would otherwise never end.
		defer context.AfterFunc(ctx, plane.Close)()
		return server.serve(listener)(ctx)
	}
}

// refused returns what connected Envoys have refused of what they were last sent, nil
// for nothing.
func refused(plane *xds.Server) error {
	var refusals []error
	for _, node := range plane.Nodes() {
		for typeURL, state := range node.Types {
			if state.Nack != nil {
				refusals = append(refusals, fmt.Errorf("envoy refused the %s: %s", resourceName(typeURL), state.Nack.Detail))
			}
		}
	}
	return errors.Join(refusals...)
}

// resourceName names a type of resource for people.
func resourceName(typeURL string) string {
	switch name := path.Base(typeURL); name {
	case "envoy.config.core.v3.TypedExtensionConfig":
		return "filter"
	case "envoy.config.listener.v3.Listener":
		return "listener"
	case "envoy.config.cluster.v3.Cluster":
		return "clusters"
	case "envoy.config.route.v3.RouteConfiguration":
		return "routes"
	case "envoy.config.endpoint.v3.ClusterLoadAssignment":
		return "endpoints"
	case "envoy.extensions.transport_sockets.tls.v3.Secret":
		return "certificates"
	default:
		return name
	}
}

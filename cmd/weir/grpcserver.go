package main

import (
	"context"
	"log/slog"
	"net"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
)

// A grpcServer is a gRPC server on which a panic of one handler ends one call, which
// lets Envoy keep idle connections alive, and whose streams end when it is told to stop:
// a watch of its health would otherwise hold it up.
type grpcServer struct {
	*grpc.Server

	endStreams context.CancelFunc
}

func newGRPCServer(logger *slog.Logger, options ...grpc.ServerOption) *grpcServer {
	recovered := recovery.WithRecoveryHandlerContext(func(ctx context.Context, p any) error {
		logger.LogAttrs(ctx, slog.LevelError, "a handler panicked", slog.Any("panic", p))
		return status.Error(codes.Unavailable, "internal error")
	})
	streams, endStreams := context.WithCancel(context.Background())
	return &grpcServer{
		Server: grpc.NewServer(append([]grpc.ServerOption{
			grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
			grpc.ChainUnaryInterceptor(recovery.UnaryServerInterceptor(recovered)),
			grpc.ChainStreamInterceptor(recovery.StreamServerInterceptor(recovered), endWith(streams)),
		}, options...)...),
		endStreams: endStreams,
	}
}

// endWith ends the context of each stream when ctx ends.
func endWith(ctx context.Context) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		streamCtx, end := context.WithCancel(ss.Context())
		defer end()
		defer context.AfterFunc(ctx, end)()
		return handler(srv, endingStream{ServerStream: ss, ctx: streamCtx})
	}
}

type endingStream struct {
	grpc.ServerStream

	ctx context.Context
}

// Context implements [grpc.ServerStream].
func (s endingStream) Context() context.Context { return s.ctx }

// serve serves until ctx ends, and then lets calls in flight finish.
func (s *grpcServer) serve(listener net.Listener) part {
	return func(ctx context.Context) error {
		stopped := make(chan error, 1)
		go func() { stopped <- s.Serve(listener) }()
		select {
		case err := <-stopped:
			return err
		case <-ctx.Done():
		}
		s.endStreams()
		force := time.AfterFunc(drainTimeout, s.Stop)
		defer force.Stop()
		s.GracefulStop()
		return <-stopped
	}
}

package main

import (
	"context"
	"log/slog"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// A watch of the server's health ends with the server, by the server's word: had it held
// the server up until it was cut off, its status would be another.
func TestGRPCServerEndsWatches(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := newGRPCServer(slog.New(slog.DiscardHandler))
	healthv1.RegisterHealthServer(server, health.NewServer())
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.serve(listener)(ctx) }()

	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	watch, err := healthv1.NewHealthClient(conn).Watch(t.Context(), &healthv1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if answer, err := watch.Recv(); err != nil || answer.GetStatus() != healthv1.HealthCheckResponse_SERVING {
		t.Fatalf("Recv = %v, %v; want SERVING", answer, err)
	}
	stop()
	if answer, err := watch.Recv(); status.Code(err) != codes.Canceled {
		t.Errorf("Recv when the server stops = %v, %v; want its end with %v", answer, err, codes.Canceled)
	}
	if err := <-done; err != nil {
		t.Errorf("serving: %v", err)
	}
}

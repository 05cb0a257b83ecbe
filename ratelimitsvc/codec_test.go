package ratelimitsvc_test

import (
	"context"
	"net"
	"testing"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/ratelimitsvc"
)

// dial serves a service as cmd does and returns a connection to it.
func dial(t *testing.T, service *ratelimitsvc.Service) *grpc.ClientConn {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(ratelimitsvc.ServerOptions()...)
	service.Register(server)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// raw sends bytes as they are, as a C++ client does, and reads answers as protobuf.
type raw struct{}

func (raw) Name() string { return "proto" }

func (raw) Marshal(v any) (mem.BufferSlice, error) {
	text, _ := v.([]byte)
	return mem.BufferSlice{mem.SliceBuffer(text)}, nil
}

func (raw) Unmarshal(data mem.BufferSlice, v any) error {
	message, _ := v.(proto.Message)
	return proto.Unmarshal(data.Materialize(), message)
}

func send(ctx context.Context, conn *grpc.ClientConn, message []byte) (*rlsv3.RateLimitResponse, error) {
	response := &rlsv3.RateLimitResponse{}
	err := conn.Invoke(ctx, rlsv3.RateLimitService_ShouldRateLimit_FullMethodName, message, response, grpc.ForceCodecV2(raw{}))
	return response, err
}

// withValue is a request whose value has n bytes that the caller replaces.
func withValue(t *testing.T, key string, value []byte) []byte {
	t.Helper()
	filler := make([]byte, len(value))
	for i := range filler {
		filler[i] = '~'
	}
	message, err := proto.Marshal(&rlsv3.RateLimitRequest{
		Domain: "ingest", Descriptors: descriptors(key + "=" + string(filler)), HitsAddend: 3,
	})
	if err != nil {
		t.Fatal(err)
	}
	at := len(message) - len(value) - 2 // hits_addend stands behind it
	copy(message[at:], value)
	return message
}

// PEERS C29, C30: bytes that are no UTF-8 are a value like any other. An error would let
// the request through.
func TestC29C30ValuesThatAreNotUTF8(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 3, 3)}}}
	conn := dial(t, newService(t, s, testPolicy))
	values := []string{"1 \xc0\xa7", "\xff", "\xfe", "\xff\U0010FFFF", "\x00"}
	ids := map[policy.CounterID]string{}
	for i, value := range values {
		response, err := send(t.Context(), conn, withValue(t, "consumer", []byte(value)))
		if err != nil || response.GetOverallCode() != rlsv3.RateLimitResponse_OK {
			t.Fatalf("%q: %v, %v, want OK", value, response, err)
		}
		debit := s.asked[i].Quotas[0]
		if debit.Cost != 3 {
			t.Errorf("%q: cost %d, want 3", value, debit.Cost)
		}
		if other, ok := ids[debit.Consumer.ID]; ok {
			t.Errorf("%q and %q share a counter", value, other)
		}
		ids[debit.Consumer.ID] = value
	}
	// Weir's filter writes the same bytes the same way.
	want, err := config.TypeString.Canonical(values[0])
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, s.asked[0].Quotas[0].Consumer.Entries[0].Value); diff != "" {
		t.Errorf("the filter and the service differ (-filter +service):\n%s", diff)
	}

	response, err := send(t.Context(), conn, withValue(t, "node", []byte("1 \xc0\xa7")))
	if err != nil || response.GetOverallCode() != rlsv3.RateLimitResponse_OVER_LIMIT {
		t.Errorf("a budget's key: %v, %v, want OVER_LIMIT", response, err)
	}
}

// What is no message at all is still an error, and the next call is served.
func TestC05NoMessage(t *testing.T) {
	t.Parallel()

	conn := dial(t, newService(t, &store{}, testPolicy))
	for _, message := range []string{"\xff", "\x0a\x05ab", "\x12\x03\x0a\x05x", "\x12\x02\x0a\xff"} {
		if _, err := send(t.Context(), conn, []byte(message)); status.Code(err) != codes.Internal {
			t.Errorf("%q: %v, want INTERNAL", message, err)
		}
	}
	if _, err := healthv1.NewHealthClient(conn).Check(t.Context(), &healthv1.HealthCheckRequest{}); err != nil {
		t.Errorf("the next call: %v", err)
	}
}

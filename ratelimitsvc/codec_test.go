package ratelimitsvc_test

import (
	"context"
	"net"
	"strings"
	"testing"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
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
	want, err := (&config.Entry{}).Canonical(values[0])
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

// PEERS C05: what takes little on the wire takes little in memory, and is named.
func TestC05ManyOfAll(t *testing.T) {
	t.Parallel()

	const most = 4 << 20
	repeat := func(head, item string) []byte {
		return []byte(head + strings.Repeat(item, (most-len(head)-8)/len(item)))
	}
	entries := repeat("", "\x0a\x00")
	one := protowire.AppendBytes([]byte("\x0a\x04test\x12"), entries)
	for _, test := range []struct {
		name, says string
		message    []byte
		items      int // of what the service gets to see
	}{
		{"descriptors", "descriptors: there are more than", repeat("\x0a\x04test", "\x12\x00"), 65},
		{"entries", "descriptors[0].entries: there are more than", one, 66},
	} {
		req := &rlsv3.RateLimitRequest{}
		if err := ratelimitsvc.Codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(test.message)}, req); err != nil {
			t.Fatalf("%s: %v", test.name, err)
		}
		items := len(req.GetDescriptors())
		for _, d := range req.GetDescriptors() {
			items += len(d.GetEntries())
		}
		if items != test.items {
			t.Errorf("%s: %d of them were read", test.name, items)
		}
		_, err := newService(t, &store{}, testPolicy).ShouldRateLimit(t.Context(), req)
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want INVALID_ARGUMENT with %q", test.name, err, test.says)
		}
	}
	// A large request that is none too many comes through as it is.
	want := &rlsv3.RateLimitRequest{Domain: "ingest", HitsAddend: 3}
	for range 64 {
		want.Descriptors = append(want.Descriptors, descriptors("consumer="+strings.Repeat("x", 60<<10))...)
	}
	message, err := proto.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	got := &rlsv3.RateLimitRequest{}
	if err := ratelimitsvc.Codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(message)}, got); err != nil || !proto.Equal(want, got) {
		t.Errorf("a large request is not what was sent: %v", err)
	}
}

// PEERS C29: Envoy's largest headers, in every descriptor there can be, are decided rather
// than answered with an error.
func TestC29LargestHeaders(t *testing.T) {
	t.Parallel()

	s := &store{verdict: policy.Verdict{Allowed: true}}
	req := &rlsv3.RateLimitRequest{Domain: "ingest"}
	for range 64 {
		req.Descriptors = append(req.Descriptors, descriptors("consumer="+strings.Repeat("x", 60<<10))...)
		s.verdict.Quotas = append(s.verdict.Quotas, reservation(-1, 1, 1))
	}
	response, err := rlsv3.NewRateLimitServiceClient(dial(t, newService(t, s, testPolicy))).ShouldRateLimit(t.Context(), req)
	if err != nil || response.GetOverallCode() != rlsv3.RateLimitResponse_OK {
		t.Errorf("%v, %v, want OK", response.GetOverallCode(), err)
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

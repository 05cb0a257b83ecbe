package filter

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/testing/protocmp"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/internal/wasmhost"
)

// The block of the demonstration.
const demo = `{
	"hold_bytes": 524288,
	"rules": [{"descriptors": [
		{"entries": [{"key": "node", "header": "x-node-id", "type": "uuid", "missing": "skip"}], "cost": "body_bytes"},
		{"entries": [{"key": "domain", "header": "x-domain-id", "type": "uuid", "missing": "skip"}], "cost": "body_bytes"},
		{"entries": [{"key": "consumer", "header": "x-consumer", "missing": "skip"}]}
	]}]
}`

// A block with one key that must be there.
const strict = `{"rules": [{"descriptors": [{"entries": [{"key": "consumer", "header": "x-consumer"}]}]}]}`

const (
	node  = "0189d0a8-7f3b-7c4e-9a54-2f8e6b1c0d3a"
	other = "c9bf9e57-1685-4c89-bafb-ff5af830be8a"
)

func pluginConfig(tb testing.TB, block string) []byte {
	tb.Helper()
	text, err := config.Compose("7", "ingest", "weir_ratelimit", []byte(block))
	if err != nil {
		tb.Fatal(err)
	}
	return text
}

// get and post are requests with more headers.
func get(headers ...[2]string) [][2]string {
	return append([][2]string{{":method", "GET"}, {":path", "/"}, {":authority", "gw"}}, headers...)
}

func post(headers ...[2]string) [][2]string {
	return append([][2]string{{":method", "POST"}, {":path", "/"}, {":authority", "gw"}}, headers...)
}

// desc is a descriptor with one entry.
func desc(hits uint64, keysAndValues ...string) *commonv3.RateLimitDescriptor {
	d := &commonv3.RateLimitDescriptor{HitsAddend: wrapperspb.UInt64(hits)}
	for i := 0; i < len(keysAndValues); i += 2 {
		d.Entries = append(d.Entries, &commonv3.RateLimitDescriptor_Entry{Key: keysAndValues[i], Value: keysAndValues[i+1]})
	}
	return d
}

func frame(message []byte) []byte {
	b := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(message)))
	return append(b, message...)
}

// answerOf is a whole gRPC answer.
func answerOf(tb testing.TB, r *rlsv3.RateLimitResponse) wasmhost.Answer {
	tb.Helper()
	message, err := proto.Marshal(r)
	if err != nil {
		tb.Fatal(err)
	}
	return grpcAnswer(frame(message))
}

func grpcAnswer(body []byte) wasmhost.Answer {
	return wasmhost.Answer{
		Headers:  [][2]string{{":status", "200"}, {"content-type", "application/grpc"}, {"x-envoy-upstream-service-time", "1"}},
		Body:     body,
		Trailers: [][2]string{{"grpc-status", "0"}, {"grpc-message", ""}},
	}
}

func okAnswer(tb testing.TB) wasmhost.Answer {
	tb.Helper()
	return answerOf(tb, &rlsv3.RateLimitResponse{OverallCode: rlsv3.RateLimitResponse_OK})
}

func headerValues(pairs ...[2]string) (out []*corev3.HeaderValue) {
	for _, p := range pairs {
		out = append(out, &corev3.HeaderValue{Key: p[0], Value: p[1]})
	}
	return out
}

// trailersOnly is an error of a gRPC service, or Envoy's own.
func trailersOnly(pairs ...[2]string) wasmhost.Answer {
	return wasmhost.Answer{Headers: append([][2]string{{":status", "200"}, {"content-type", "application/grpc"}}, pairs...)}
}

// A scenario is one request.
type scenario struct {
	name    string
	block   string // demo by default
	cluster string // weir_ratelimit by default

	properties map[string]string // of Envoy, by path with slashes
	headers    [][2]string
	chunks     []int       // the body; nil is none, ended by the headers
	body       []string    // or what stands in its chunks
	trailers   [][2]string // end the body, if there are any

	// What the filter asks, if it does, and what it is told.
	wantCall []*commonv3.RateLimitDescriptor
	answer   wasmhost.Answer

	// The upstream's response, where the request gets there.
	response [][2]string

	wantStatus   int // of the filter's own answer; 0 if the request went on
	wantGRPC     int
	wantBody     string
	wantHeaders  [][2]string // of the response, in order, without :status
	wantUpstream [][2]string // the request's headers at the upstream; checked if set
	wantMissing  string      // the reason why a cost of rule 0 is missing; "" is none
	wantOutcome  string      // the only counter that counts; "" is none
	wantLog      string      // a part of the log; "" is no log at all
}

func scenarios(t *testing.T) []scenario {
	t.Helper()
	refusal := answerOf(t, &rlsv3.RateLimitResponse{
		OverallCode: rlsv3.RateLimitResponse_OVER_LIMIT,
		ResponseHeadersToAdd: headerValues([2]string{"Retry-After", "31"}, [2]string{"X-RateLimit-Limit", "10"},
			[2]string{"X-RateLimit-Remaining", "0"}),
	})
	refusalHeaders := [][2]string{{"retry-after", "31"}, {"x-ratelimit-limit", "10"}, {"x-ratelimit-remaining", "0"}}
	internal := scenario{wantStatus: 500, wantGRPC: 14, wantBody: "internal error", wantOutcome: "unavailable"}

	list := []scenario{
		// What goes on.
		{name: "no key, no call", headers: get()},
		{name: "no key, no call, with a body", headers: post(), chunks: []int{100_000, 1}},
		{
			name: "one, allowed", headers: get([2]string{"x-consumer", "acme"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "cost one does not wait for the body", headers: post([2]string{"x-consumer", "acme"}), chunks: []int{1 << 20, 1 << 20},
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name:    "the length is charged before the body is read",
			headers: post([2]string{"content-length", "102400"}, [2]string{"x-node-id", node}), chunks: []int{102400},
			wantCall: []*commonv3.RateLimitDescriptor{desc(102400, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name:    "a length over hold_bytes is no matter",
			headers: post([2]string{"content-length", "52428800"}, [2]string{"x-node-id", node}), chunks: []int{1 << 20, 1 << 20},
			wantCall: []*commonv3.RateLimitDescriptor{desc(52428800, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "no body costs nothing, and is asked for", headers: get([2]string{"x-node-id", node}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(0, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name:    "each descriptor has its own cost",
			headers: post([2]string{"x-node-id", node}, [2]string{"x-domain-id", other}, [2]string{"x-consumer", "acme"}), chunks: []int{7, 5},
			wantCall: []*commonv3.RateLimitDescriptor{desc(12, "node", node), desc(12, "domain", other), desc(1, "consumer", "acme")},
			answer:   okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "C82: 160 KB in odd chunks, refused", headers: post([2]string{"x-node-id", node}),
			chunks:   []int{1, 16384, 3, 65535, 40001, 31337, 10579},
			wantCall: []*commonv3.RateLimitDescriptor{desc(163840, "node", node)}, answer: refusal,
			wantStatus: 429, wantGRPC: 8, wantBody: "too many requests", wantHeaders: refusalHeaders, wantOutcome: "refused",
		},
		{
			name: "C82: 160 KB in odd chunks, allowed", headers: post([2]string{"x-node-id", node}),
			chunks:   []int{1, 16384, 3, 65535, 40001, 31337, 10579},
			wantCall: []*commonv3.RateLimitDescriptor{desc(163840, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "an empty last chunk", headers: post([2]string{"x-node-id", node}), chunks: []int{1000, 24, 0},
			wantCall: []*commonv3.RateLimitDescriptor{desc(1024, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "only an empty chunk", headers: post([2]string{"x-node-id", node}), chunks: []int{0},
			wantCall: []*commonv3.RateLimitDescriptor{desc(0, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "trailers end the body", headers: post([2]string{"x-node-id", node}), chunks: []int{10, 20}, trailers: [][2]string{{"x-sum", "1"}},
			wantCall: []*commonv3.RateLimitDescriptor{desc(30, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "trailers end the body, refused", headers: post([2]string{"x-node-id", node}), chunks: []int{10, 20}, trailers: [][2]string{{"x-sum", "1"}},
			wantCall: []*commonv3.RateLimitDescriptor{desc(30, "node", node)}, answer: refusal,
			wantStatus: 429, wantGRPC: 8, wantBody: "too many requests", wantHeaders: refusalHeaders, wantOutcome: "refused",
		},
		{
			name: "a length that is none is not believed", headers: post([2]string{"content-length", "+5"}, [2]string{"x-node-id", node}), chunks: []int{9},
			wantCall: []*commonv3.RateLimitDescriptor{desc(9, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name:    "two lengths are not believed",
			headers: post([2]string{"content-length", "5"}, [2]string{"content-length", "5"}, [2]string{"x-node-id", node}), chunks: []int{9},
			wantCall: []*commonv3.RateLimitDescriptor{desc(9, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "exactly hold_bytes", headers: post([2]string{"x-node-id", node}), chunks: []int{524287, 1},
			wantCall: []*commonv3.RateLimitDescriptor{desc(524288, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},

		// Keys.
		{
			name: "a UUID's case is dropped", headers: get([2]string{"x-node-id", strings.ToUpper(node)}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(0, "node", node)}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "not a UUID", headers: get([2]string{"x-node-id", "not-a-uuid"}),
			wantStatus: 400, wantGRPC: 3, wantBody: "header x-node-id is not a UUID of 36 characters, or is all zero", wantOutcome: "invalid",
		},
		{
			name: "the zero UUID", headers: get([2]string{"x-node-id", "00000000-0000-0000-0000-000000000000"}),
			wantStatus: 400, wantGRPC: 3, wantBody: "header x-node-id is not a UUID of 36 characters, or is all zero", wantOutcome: "invalid",
		},
		{
			name: "C24: an empty UUID is malformed, not missing", headers: get([2]string{"x-node-id", ""}),
			wantStatus: 400, wantGRPC: 3, wantBody: "header x-node-id is not a UUID of 36 characters, or is all zero", wantOutcome: "invalid",
		},
		{
			name: "C24: an empty string is a value", headers: get([2]string{"x-consumer", ""}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "")}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "C24: missing, deny", block: strict, headers: get(),
			wantStatus: 400, wantGRPC: 3, wantBody: "header x-consumer is missing", wantOutcome: "invalid",
		},
		{
			name: "C24: missing, default",
			block: `{"rules": [{"descriptors": [{"entries": [
				{"key": "consumer", "header": "x-consumer", "missing": "default", "default": "nobody"}]}]}]}`,
			headers:  get(),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "nobody")}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "C24: skip leaves out the whole descriptor and no other",
			block: `{"rules": [
				{"descriptors": [{"entries": [{"key": "a", "header": "x-a"}, {"key": "b", "header": "x-b", "missing": "skip"}]}]},
				{"descriptors": [{"entries": [{"key": "a", "header": "x-a"}, {"key": "c", "header": "x-c"}]}]}]}`,
			headers:  get([2]string{"x-a", "1"}, [2]string{"x-c", "3"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "a", "1", "c", "3")}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "C25: deny is stronger than skip beside it",
			block: `{"rules": [{"descriptors": [{"entries": [
				{"key": "a", "header": "x-a", "missing": "skip"}, {"key": "b", "header": "x-b"}]}]}]}`,
			headers:    get(),
			wantStatus: 400, wantGRPC: 3, wantBody: "header x-b is missing", wantOutcome: "invalid",
		},
		{
			name: "a skipped descriptor's other key is still checked",
			block: `{"rules": [{"descriptors": [{"entries": [
				{"key": "a", "header": "x-a", "missing": "skip"}, {"key": "b", "header": "x-b", "type": "uuid"}]}]}]}`,
			headers:    get([2]string{"x-b", "?"}),
			wantStatus: 400, wantGRPC: 3, wantBody: "header x-b is not a UUID of 36 characters, or is all zero", wantOutcome: "invalid",
		},
		{
			name: "two headers", headers: get([2]string{"x-node-id", node}, [2]string{"x-node-id", node}),
			wantStatus: 400, wantGRPC: 3, wantBody: "header x-node-id is given more than once", wantOutcome: "invalid",
		},
		{
			name: "C30: bytes that are not UTF-8", headers: get([2]string{"x-consumer", "1 \xC0\xA7"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "1 \U0010FFC0\U0010FFA7")}, answer: okAnswer(t), wantOutcome: "allowed",
		},
		{
			name: "C29: a value of 60 KB", headers: get([2]string{"x-consumer", strings.Repeat("v", 60_000)}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", strings.Repeat("v", 60_000))}, answer: okAnswer(t), wantOutcome: "allowed",
		},

		// Answers.
		{
			name: "headers for the response", headers: get([2]string{"x-consumer", "acme"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")}, wantOutcome: "allowed",
			answer: answerOf(t, &rlsv3.RateLimitResponse{
				OverallCode:          rlsv3.RateLimitResponse_OK,
				ResponseHeadersToAdd: headerValues([2]string{"X-RateLimit-Remaining", "9"}, [2]string{"ratelimit", "a"}, [2]string{"ratelimit", "b"}),
			}),
			// The upstream's own do not stand beside ours.
			response:    [][2]string{{":status", "200"}, {"x-ratelimit-remaining", "99"}, {"server", "up"}, {"ratelimit", "x"}},
			wantHeaders: [][2]string{{"server", "up"}, {"x-ratelimit-remaining", "9"}, {"ratelimit", "a"}, {"ratelimit", "b"}},
		},
		{
			name:     "headers for the request",
			headers:  get([2]string{"x-consumer", "acme"}, [2]string{"x-plan", "gold"}, [2]string{"x-plan", "gold"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")}, wantOutcome: "allowed",
			answer: answerOf(t, &rlsv3.RateLimitResponse{
				OverallCode: rlsv3.RateLimitResponse_OK, RequestHeadersToAdd: headerValues([2]string{"X-Plan", "free"}),
			}),
			wantUpstream: get([2]string{"x-consumer", "acme"}, [2]string{"x-plan", "free"}),
		},
		{
			name: "raw_value", headers: get([2]string{"x-consumer", "acme"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")}, wantOutcome: "allowed",
			answer: answerOf(t, &rlsv3.RateLimitResponse{
				OverallCode:          rlsv3.RateLimitResponse_OK,
				ResponseHeadersToAdd: []*corev3.HeaderValue{{Key: "x-raw", RawValue: []byte("r")}},
			}),
			wantHeaders: [][2]string{{"x-raw", "r"}},
		},
		{
			name: "refused", headers: get([2]string{"x-consumer", "acme"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")}, answer: refusal,
			wantStatus: 429, wantGRPC: 8, wantBody: "too many requests", wantHeaders: refusalHeaders, wantOutcome: "refused",
		},
		{
			name:    "refused at the headers, before the body",
			headers: post([2]string{"content-length", "307200"}, [2]string{"x-node-id", node}), chunks: []int{307200},
			wantCall: []*commonv3.RateLimitDescriptor{desc(307200, "node", node)}, answer: refusal,
			wantStatus: 429, wantGRPC: 8, wantBody: "too many requests", wantHeaders: refusalHeaders, wantOutcome: "refused",
		},
		{
			name: "refused with the service's body", headers: get([2]string{"x-consumer", "acme"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")},
			answer: answerOf(t, &rlsv3.RateLimitResponse{
				OverallCode: rlsv3.RateLimitResponse_OVER_LIMIT, RawBody: []byte("come back tomorrow"),
			}),
			wantStatus: 429, wantGRPC: 8, wantBody: "come back tomorrow", wantOutcome: "refused",
		},
	}

	// Every outcome of the call that is no answer (C81, ENVOY.md section 11).
	ok, _ := proto.Marshal(&rlsv3.RateLimitResponse{OverallCode: rlsv3.RateLimitResponse_OK})
	withHeader := func(h ...*corev3.HeaderValue) wasmhost.Answer {
		return answerOf(t, &rlsv3.RateLimitResponse{OverallCode: rlsv3.RateLimitResponse_OK, ResponseHeadersToAdd: h})
	}
	without := func(a wasmhost.Answer, f func(*wasmhost.Answer)) wasmhost.Answer { f(&a); return a }
	for _, o := range []struct {
		name   string
		answer wasmhost.Answer
		log    string
	}{
		{"the service's error", trailersOnly([2]string{"grpc-status", "14"}, [2]string{"grpc-message", "store down"}), `grpc-status is "14": "store down"`},
		{"a timeout", trailersOnly([2]string{"grpc-status", "14"}, [2]string{"grpc-message", "upstream request timeout"}), "upstream request timeout"},
		{"a circuit breaker", trailersOnly([2]string{"grpc-status", "14"}, [2]string{"x-envoy-overloaded", "true"}), `grpc-status is "14"`},
		{"a proxy's 502", wasmhost.Answer{Headers: [][2]string{{":status", "502"}}, Body: []byte("bad gateway")}, `HTTP status is "502"`},
		{"a 404 with an answer", without(okAnswer(t), func(a *wasmhost.Answer) { a.Headers = [][2]string{{":status", "404"}} }), `HTTP status is "404"`},
		{"no status", without(okAnswer(t), func(a *wasmhost.Answer) { a.Headers = [][2]string{{"x", "y"}} }), `HTTP status is ""`},
		{"cut off", wasmhost.Answer{}, "cut off"},
		{"an error after the answer", without(okAnswer(t), func(a *wasmhost.Answer) { a.Trailers = [][2]string{{"grpc-status", "13"}} }), `grpc-status is "13"`},
		{"an error in the trailers, success in the headers", without(okAnswer(t), func(a *wasmhost.Answer) {
			a.Headers = append(a.Headers, [2]string{"grpc-status", "0"})
			a.Trailers = [][2]string{{"grpc-status", "13"}}
		}), `grpc-status is "13"`},
		{"no grpc-status", without(okAnswer(t), func(a *wasmhost.Answer) { a.Trailers = nil }), "no grpc-status"},
		{"two of grpc-status", without(okAnswer(t), func(a *wasmhost.Answer) {
			a.Trailers = [][2]string{{"grpc-status", "0"}, {"grpc-status", "0"}}
		}), "several values"},
		{"grpc-status 00", without(okAnswer(t), func(a *wasmhost.Answer) { a.Trailers = [][2]string{{"grpc-status", "00"}} }), `grpc-status is "00"`},
		{"success without a body", trailersOnly([2]string{"grpc-status", "0"}), "0 bytes"},
		{"less than a frame's prefix", grpcAnswer([]byte{0, 0, 0, 0}), "4 bytes"},
		{"a short frame", grpcAnswer(frame(ok)[:6]), "announces 2 bytes and has 1"},
		{"a long frame", grpcAnswer(append(frame(ok), 0)), "announces 2 bytes and has 3"},
		{"two frames", grpcAnswer(append(frame(ok), frame(ok)...)), "announces 2 bytes"},
		{"a compressed frame", grpcAnswer(append([]byte{1}, frame(ok)[1:]...)), "compressed"},
		{"an empty message", grpcAnswer(frame(nil)), "overall_code is 0"},
		{"no code", answerOf(t, &rlsv3.RateLimitResponse{}), "overall_code is 0"},
		{"a code of tomorrow", answerOf(t, &rlsv3.RateLimitResponse{OverallCode: 3}), "overall_code is 3"},
		{"no protobuf", grpcAnswer(frame([]byte("<html>"))), "no RateLimitResponse"},
		{"a truncated field", grpcAnswer(frame([]byte{0x1a, 0x7f})), "no RateLimitResponse"},
		{"a header that splits", withHeader(&corev3.HeaderValue{Key: "x", Value: "1\r\nset-cookie: a"}), "can't carry"},
		{"a pseudo-header", withHeader(&corev3.HeaderValue{Key: ":status", Value: "200"}), "can't carry"},
		{"a header without a name", withHeader(&corev3.HeaderValue{Value: "200"}), "can't carry"},
	} {
		s := internal
		s.name = "C81: " + o.name
		s.headers = get([2]string{"x-consumer", "acme"})
		s.wantCall = []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")}
		s.answer, s.wantLog = o.answer, o.log
		list = append(list, s)
	}
	for _, cluster := range []string{"empty", "unknown"} {
		s := internal
		s.name = "C81: no call can be made, cluster " + cluster
		s.cluster = cluster
		s.headers = get([2]string{"x-consumer", "acme"})
		s.wantLog = `calling cluster "` + cluster + `"`
		list = append(list, s)
		s.name += ", a held body"
		s.headers = post([2]string{"x-node-id", node})
		s.chunks = []int{10, 10}
		list = append(list, s)
	}
	list = append(list,
		scenario{
			name: "C81: success whose status stands in the headers", headers: get([2]string{"x-consumer", "acme"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")}, wantOutcome: "allowed",
			answer: without(okAnswer(t), func(a *wasmhost.Answer) {
				a.Headers = append(a.Headers, [2]string{"grpc-status", "0"})
				a.Trailers = nil
			}),
		},
		scenario{
			name: "C81: fields of tomorrow", headers: get([2]string{"x-consumer", "acme"}),
			wantCall: []*commonv3.RateLimitDescriptor{desc(1, "consumer", "acme")}, wantOutcome: "allowed",
			answer: grpcAnswer(frame(append([]byte{0xfa, 0x01, 2, 'h', 'i', 0x98, 0x06, 1}, ok...))),
		},
	)
	return list
}

func TestScenarios(t *testing.T) {
	t.Parallel()

	for _, s := range append(append(scenarios(t), keyScenarios(t)...), costScenarios(t)...) {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			for name, newRig := range rigs() {
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					s.run(t, newRig(t))
				})
			}
		})
	}
}

func (s scenario) run(t *testing.T, r rig) {
	t.Helper()
	block, cluster := s.block, s.cluster
	if block == "" {
		block = demo
	}
	if cluster == "" {
		cluster = "weir_ratelimit"
	}
	cfg, err := config.Compose("7", "ingest", cluster, []byte(block))
	if err != nil {
		t.Fatal(err)
	}
	if err := r.start(t, cfg); err != nil {
		t.Fatal(err)
	}
	e := r.exchange(t)
	for path, value := range s.properties {
		e.property([]byte(value), strings.Split(path, "/")...)
	}
	body := s.send(t, e)

	calls := r.calls()
	if s.wantCall != nil {
		if len(calls) != 1 {
			t.Fatalf("%d calls were made, want one; log: %s", len(calls), r.log())
		}
		if seen := e.upstream(); seen.Begun || len(seen.Body) > 0 {
			t.Errorf("before the answer the upstream has seen %v, %d bytes", seen.Headers, len(seen.Body))
		}
		s.checkCall(t, calls[0])
		calls[0].respond(t, s.answer)
		if more := r.calls(); len(more) != 0 {
			t.Errorf("after the answer %d more calls were made", len(more))
		}
	} else if len(calls) != 0 {
		t.Fatalf("a call was made: %q", calls[0].body)
	}

	s.checkRequest(t, e, body)
	if s.wantStatus == 0 {
		response := s.response
		if response == nil {
			response = [][2]string{{":status", "200"}}
		}
		e.responseHeaders(t, response)
	}
	down := e.downstream()
	if !down.Begun || !down.Ended {
		t.Errorf("the client has no whole response")
	}
	if diff := cmp.Diff(s.wantHeaders, down.Headers[1:], cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("the response's headers (-want +got):\n%s", diff)
	}
	e.done(t)

	for _, outcome := range []string{"allowed", "refused", "unavailable", "invalid", "too_large", "allowed_on_error"} {
		want := int64(0)
		if outcome == s.wantOutcome {
			want = 1
		}
		if got := r.metric(outcome); got != want {
			t.Errorf("metric %s = %d, want %d", outcome, got, want)
		}
	}
	for reason := range reasons {
		want := int64(0)
		if reason.String() == s.wantMissing {
			want = 1
		}
		if got := r.counter("weir_filter_cost_missing_rule=0_reason=" + reason.String()); got != want {
			t.Errorf("a cost was missing because of %v %d times, want %d", reason, got, want)
		}
	}
	if log := r.log(); s.wantLog == "" && log != "" || !strings.Contains(log, s.wantLog) {
		t.Errorf("log = %q, want %q in it", log, s.wantLog)
	}
}

// send sends the request and returns the body.
func (s scenario) send(t *testing.T, e exchange) []byte {
	t.Helper()
	var body []byte
	e.requestHeaders(t, s.headers, s.chunks == nil && s.body == nil)
	for i, chunk := range s.body {
		body = append(body, chunk...)
		e.requestBody(t, []byte(chunk), i == len(s.body)-1 && s.trailers == nil)
	}
	for i, size := range s.chunks {
		chunk := bytes.Repeat([]byte{byte('a' + i)}, size)
		body = append(body, chunk...)
		e.requestBody(t, chunk, i == len(s.chunks)-1 && s.trailers == nil)
	}
	if s.trailers != nil {
		e.requestTrailers(t, s.trailers)
	}
	return body
}

func (s scenario) checkCall(t *testing.T, c pendingCall) {
	t.Helper()
	wantHeaders := [][2]string{
		{":method", "POST"},
		{":path", "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"},
		{":authority", "weir_ratelimit"},
		{"content-type", "application/grpc"},
		{"te", "trailers"},
		{"grpc-timeout", "250m"},
	}
	if diff := cmp.Diff(wantHeaders, c.headers); diff != "" {
		t.Errorf("the call's headers (-want +got):\n%s", diff)
	}
	if c.cluster != "weir_ratelimit" || c.timeout != 250*time.Millisecond {
		t.Errorf("called %q with a timeout of %v", c.cluster, c.timeout)
	}
	if len(c.body) < 5 || c.body[0] != 0 || int(binary.BigEndian.Uint32(c.body[1:])) != len(c.body)-5 {
		t.Fatalf("the call's body is no frame: %q", c.body)
	}
	var got rlsv3.RateLimitRequest
	if err := proto.Unmarshal(c.body[5:], &got); err != nil {
		t.Fatal(err)
	}
	want := &rlsv3.RateLimitRequest{Domain: "ingest", Descriptors: s.wantCall}
	if diff := cmp.Diff(want, &got, protocmp.Transform()); diff != "" {
		t.Errorf("the call (-want +got):\n%s", diff)
	}
}

func (s scenario) checkRequest(t *testing.T, e exchange, body []byte) {
	t.Helper()
	local, up := e.local(), e.upstream()
	if s.wantStatus != 0 {
		if local == nil {
			t.Fatalf("no answer, want %d", s.wantStatus)
		}
		if local.Status != s.wantStatus || local.GRPCStatus != s.wantGRPC || string(local.Body) != s.wantBody {
			t.Errorf("answer = %d, gRPC %d, %q; want %d, %d, %q", local.Status, local.GRPCStatus, local.Body,
				s.wantStatus, s.wantGRPC, s.wantBody)
		}
		if up.Begun || len(up.Body) > 0 {
			t.Errorf("the upstream has seen %v, %d bytes", up.Headers, len(up.Body))
		}
		return
	}
	if local != nil {
		t.Fatalf("answer = %d %q, want none", local.Status, local.Body)
	}
	if !up.Ended || !bytes.Equal(up.Body, body) {
		t.Errorf("the upstream has %d bytes (ended: %v), want %d", len(up.Body), up.Ended, len(body))
	}
	if diff := cmp.Diff(s.trailers, up.Trailers, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("the upstream's trailers (-want +got):\n%s", diff)
	}
	wantUpstream := s.wantUpstream
	if wantUpstream == nil {
		wantUpstream = s.headers
	}
	if diff := cmp.Diff(wantUpstream, up.Headers); diff != "" {
		t.Errorf("the upstream's headers (-want +got):\n%s", diff)
	}
}

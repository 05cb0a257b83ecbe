package filter

import (
	"encoding/binary"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/weir-dev/weir/internal/wasmhost"
)

// A ledger is a service with a budget for each descriptor, by its first entry's key.
type ledger struct {
	left, charged, refunded map[string]int64
	receipts                map[string][]*commonv3.RateLimitDescriptor
	calls, refunds          int
}

func newLedger(budgets map[string]int64) *ledger {
	return &ledger{
		left: budgets, charged: map[string]int64{}, refunded: map[string]int64{},
		receipts: map[string][]*commonv3.RateLimitDescriptor{},
	}
}

// net is what a descriptor has cost.
func (l *ledger) net(key string) int64 { return l.charged[key] - l.refunded[key] }

// answer decides a call.
func (l *ledger) answer(t *testing.T, c pendingCall) wasmhost.Answer {
	t.Helper()
	var req rlsv3.RateLimitRequest
	if err := proto.Unmarshal(c.body[framePrefix:], &req); err != nil {
		t.Fatal(err)
	}
	if receipt, n := lookup(c.headers, receiptHeader); n == 1 {
		l.refund(t, receipt, req.GetDescriptors())
		return okAnswer(t)
	}
	l.calls++
	for _, d := range req.GetDescriptors() {
		if d.GetIsNegativeHits() {
			t.Fatal("a refund without a receipt")
		}
		if int64(d.GetHitsAddend().GetValue()) > l.left[d.GetEntries()[0].GetKey()] {
			return answerOf(t, &rlsv3.RateLimitResponse{OverallCode: rlsv3.RateLimitResponse_OVER_LIMIT})
		}
	}
	for _, d := range req.GetDescriptors() {
		key := d.GetEntries()[0].GetKey()
		l.left[key] -= int64(d.GetHitsAddend().GetValue())
		l.charged[key] += int64(d.GetHitsAddend().GetValue())
	}
	receipt := strconv.Itoa(len(l.receipts))
	l.receipts[receipt] = req.GetDescriptors()
	return answerOf(t, &rlsv3.RateLimitResponse{
		OverallCode: rlsv3.RateLimitResponse_OK,
		DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
			"other": structpb.NewBoolValue(true),
			"weir":  structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{"receipt": structpb.NewStringValue(receipt)}}),
		}},
	})
}

// refund checks that a refund is of a charge with the same descriptors, and of no more.
func (l *ledger) refund(t *testing.T, receipt string, ds []*commonv3.RateLimitDescriptor) {
	t.Helper()
	l.refunds++
	charged, known := l.receipts[receipt]
	if !known {
		t.Fatalf("a refund with the receipt %q, which is none or was used", receipt)
	}
	delete(l.receipts, receipt)
	if len(ds) != len(charged) {
		t.Fatalf("a refund of %d descriptors for a charge of %d", len(ds), len(charged))
	}
	for i, d := range ds {
		key, n := d.GetEntries()[0].GetKey(), int64(d.GetHitsAddend().GetValue())
		if !d.GetIsNegativeHits() || d.GetHitsAddend() == nil || key != charged[i].GetEntries()[0].GetKey() || n > int64(charged[i].GetHitsAddend().GetValue()) {
			t.Fatalf("a refund of %v for a charge of %v", d, charged[i])
		}
		l.left[key] += n
		l.refunded[key] += n
	}
}

// settle answers all calls, and ticks, until nothing is left to do.
func (l *ledger) settle(t *testing.T, r rig) {
	t.Helper()
	for {
		calls := r.calls()
		for _, c := range calls {
			c.respond(t, l.answer(t, c))
		}
		if r.tick(t) && len(calls) == 0 {
			return
		}
	}
}

// metered has a limit on requests and bytes, one on bytes twice, one on messages.
const metered = `{"hold_bytes": 200, "block_bytes": 100, "block_messages": 3, "rules": [{"descriptors": [
	{"entries": [{"key": "sum", "constant": "c"}], "cost": {"sum": ["one", "body_bytes"]}},
	{"entries": [{"key": "double", "constant": "c"}], "cost": {"count": "body_bytes", "factor": 2}},
	{"entries": [{"key": "messages", "constant": "c"}], "cost": "grpc_messages"},
	{"entries": [{"key": "one", "constant": "c"}]}
]}]}`

// cost is what each descriptor of metered costs.
func meteredCost(body []byte, grpc bool) map[string]int64 {
	messages := int64(0)
	for rest := body; grpc && len(rest) >= framePrefix; {
		messages++
		rest = rest[min(len(rest), framePrefix+int(binary.BigEndian.Uint32(rest[1:]))):]
	}
	n := int64(len(body))
	return map[string]int64{"sum": n + 1, "double": 2 * n, "messages": messages, "one": 1}
}

// TestMetering sends random requests in random pieces to a service with random budgets,
// which answers at random moments, and some clients leave. At no time has more gone on
// than is paid for, at the end exactly what went on is, and a request whose exact cost is
// there is never refused.
func TestMetering(t *testing.T) {
	t.Parallel()

	for name, newRig := range rigs() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			if err := r.start(t, pluginConfig(t, metered)); err != nil {
				t.Fatal(err)
			}
			rounds := uint64(4000)
			if name == "wasm" {
				rounds = 200
			}
			seen := map[string]int{}
			for seed := range rounds {
				seen[meter(t, r, seed)]++
			}
			for _, want := range []string{"whole", "refused", "cut", "left"} {
				if seen[want] < 10 {
					t.Errorf("%d requests were %s, so that is hardly tried: %v", seen[want], want, seen)
				}
			}
			if log := r.log(); log != "" {
				t.Errorf("log = %q, want none", log)
			}
		})
	}
}

// meter sends the request of a seed and says what became of it.
func meter(t *testing.T, r rig, seed uint64) string {
	t.Helper()
	random := rand.New(rand.NewPCG(seed, 0))
	grpc := random.IntN(2) == 0
	var body []byte
	for range random.IntN(30) {
		message := make([]byte, random.IntN(60))
		if grpc {
			message = frame(message)
		}
		body = append(body, message...)
	}
	budgets := map[string]int64{
		"sum": random.Int64N(1200), "double": random.Int64N(2400), "messages": random.Int64N(40), "one": 1,
	}
	total := meteredCost(body, grpc)
	enough := true
	for key, n := range total {
		enough = enough && n <= budgets[key]
	}
	// A stream is begun only if its first message can be paid for.
	least := int64(0)
	headers := post()
	switch kind := random.IntN(4); {
	case grpc:
		headers, least = grpcRequest(), framePrefix
		enough = enough && budgets["messages"] >= 1
	case kind == 0:
		headers = append(headers, [2]string{"content-length", strconv.Itoa(len(body))})
	case kind == 1:
		headers, least = append(headers, [2]string{"expect", "100-continue"}), 1
	}
	enough = enough && budgets["sum"] >= 1+least && budgets["double"] >= 2*least
	l := newLedger(budgets)

	e := r.exchange(t)
	check := func() {
		t.Helper()
		up := e.upstream()
		if !up.Begun {
			return
		}
		for key, n := range meteredCost(up.Body, grpc) {
			if paid := l.net(key); paid < n {
				t.Fatalf("seed %d: %d bytes went on, of which %s costs %d, and %d are paid", seed, len(up.Body), key, n, paid)
			}
		}
	}
	answer := func() {
		calls := r.calls()
		if len(calls) > 0 {
			i := random.IntN(len(calls))
			calls[i].respond(t, l.answer(t, calls[i]))
		}
	}
	leaves, left := random.IntN(5) == 0, false
	e.requestHeaders(t, headers, len(body) == 0)
	for rest := body; len(rest) > 0 && e.local() == nil; {
		check()
		if random.IntN(2) == 0 {
			answer()
		}
		if random.IntN(8) == 0 {
			r.tick(t)
		}
		if leaves && random.IntN(6) == 0 {
			left = true
			break
		}
		n := min(1+random.IntN(150), len(rest))
		last := n == len(rest) && random.IntN(2) == 0
		e.requestBody(t, rest[:n], last)
		if rest = rest[n:]; len(rest) == 0 && !last {
			if random.IntN(2) == 0 {
				e.requestBody(t, nil, true)
			} else {
				e.requestTrailers(t, [][2]string{{"x-sum", "1"}})
			}
		}
	}
	// A client that leaves during a call may lose what that call was granted.
	lost := left && len(r.calls()) > 0
	if left {
		e.done(t)
	}
	l.settle(t, r)
	check()
	up := e.upstream()
	if !left {
		e.done(t)
		l.settle(t, r)
	}
	for key, n := range meteredCost(up.Body, grpc) {
		if !up.Begun {
			n = 0
		}
		if paid := l.net(key); paid < n || paid > n && !lost {
			t.Fatalf("seed %d: at the end %s has cost %d, want %d (%d bytes of %d went on; refused: %v, left: %v)",
				seed, key, paid, n, len(up.Body), len(body), e.local() != nil, left)
		}
	}
	return became(t, e, body, seed, enough, left)
}

// became says what became of a request, and checks that it is right.
func became(t *testing.T, e exchange, body []byte, seed uint64, enough, left bool) string {
	t.Helper()
	up := e.upstream()
	switch {
	case left:
		return "left"
	case e.local() == nil:
		if !up.Ended || !slices.Equal(up.Body, body) {
			t.Fatalf("seed %d: %d bytes of %d went on", seed, len(up.Body), len(body))
		}
		return "whole"
	case enough:
		t.Fatalf("seed %d: refused although all can be paid", seed)
	case e.local().Status != 429 || e.local().GRPCStatus != 8:
		t.Fatalf("seed %d: answer = %v, want 429", seed, e.local())
	case !up.Begun:
		return "refused"
	}
	return "cut"
}

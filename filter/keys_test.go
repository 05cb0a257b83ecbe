package filter

import (
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	"google.golang.org/protobuf/encoding/protowire"
)

// keyBlock is a block with one entry, of which text is what follows its key.
func keyBlock(text string) string {
	return `{"hold_bytes": 1000, "rules": [{"descriptors": [{"entries": [{"key": "k", ` + text + `}]}]}]}`
}

func costBlock(text string) string {
	return `{"hold_bytes": 1000, "block_bytes": 100, "rules": [{"descriptors": [{"entries": [{"key": "k", "constant": "c"}], "cost": ` + text + `}]}]}`
}

func number(f float64) string {
	return string(binary.LittleEndian.AppendUint64(nil, math.Float64bits(f)))
}

func zipped(tb testing.TB, text string) string {
	tb.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write([]byte(text)); err != nil {
		tb.Fatal(err)
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.String()
}

// nested is a protobuf message with text in field 3.1 and a number in field 2.
func nested(text string, n uint64) string {
	inner := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), text)
	b := protowire.AppendVarint(protowire.AppendTag(nil, 2, protowire.VarintType), n)
	return string(protowire.AppendBytes(protowire.AppendTag(b, 3, protowire.BytesType), inner))
}

// at is a request for a target.
func at(target string, headers ...[2]string) [][2]string {
	return append([][2]string{{":method", "GET"}, {":path", target}, {":authority", "gw"}}, headers...)
}

func grpcRequest(headers ...[2]string) [][2]string {
	return append([][2]string{{":method", "POST"}, {":path", "/p.S/M"}, {":authority", "gw"}, {"content-type", "application/grpc+proto"}}, headers...)
}

const jwtPayload = "metadata/filter_metadata/envoy.filters.http.jwt_authn/payload"

// keyScenarios has each source with a value, and with what is wrong with it.
func keyScenarios(t *testing.T) []scenario {
	t.Helper()
	var list []scenario
	add := func(name, text string, s scenario, value string) {
		s.name, s.block = name, keyBlock(text)
		s.wantCall, s.answer, s.wantOutcome = []*commonv3.RateLimitDescriptor{desc(1, "k", value)}, okAnswer(t), "allowed"
		list = append(list, s)
	}
	wrong := func(name, text string, s scenario, fault string) {
		s.name, s.block = name, keyBlock(text)
		s.wantStatus, s.wantGRPC, s.wantBody, s.wantOutcome = 400, 3, fault, "invalid"
		list = append(list, s)
	}

	add("the path", `"path": "whole"`, scenario{headers: at("/a%62/c%2Fd/?q")}, "/ab/c%2Fd")
	wrong("the path with dots", `"path": "whole"`, scenario{headers: at("/a/%2e%2e/b")}, "path has a dot segment")
	add("a segment", `"path": {"segment": 2}`, scenario{headers: at("/v1/acme?x")}, "acme")
	wrong("a segment that is not there", `"path": {"segment": 3}`, scenario{headers: at("/v1/acme")}, "path segment 3 is missing")
	add("a prefix", `"path": {"prefix": 2}`, scenario{headers: at("/v1/acme/x")}, "/v1/acme")
	add("a part", `"path": {"pattern": "/v1/{tenant}/**"}`, scenario{headers: at("/v1/acme/a/b")}, "acme")
	wrong("a part of another path", `"path": {"pattern": "/v1/{tenant}/**"}`, scenario{headers: at("/v2/acme")}, "path part tenant of /v1/{tenant}/** is missing")
	add("a query parameter", `"query": "k"`, scenario{headers: at("/?a=b&k=%C3%BC+1")}, "ü 1")
	wrong("a query parameter twice", `"query": "k"`, scenario{headers: at("/?k=1&%6b=2")}, "query parameter k is given more than once")
	add("an empty query parameter", `"query": "k"`, scenario{headers: at("/?k")}, "")
	add("a cookie", `"cookie": "sid"`, scenario{headers: at("/", [2]string{"cookie", "a=b; sid=1"})}, "1")
	wrong("a cookie twice, in two headers", `"cookie": "sid"`, scenario{headers: at("/", [2]string{"cookie", "sid=1"}, [2]string{"cookie", "sid=1"})}, "cookie sid is given more than once")
	add("the method", `"method": true`, scenario{headers: at("/")}, "GET")
	add("C27: the authority", `"authority": true`, scenario{headers: [][2]string{{":method", "GET"}, {":path", "/"}, {":authority", "API.Example.com.:8443"}}}, "api.example.com")
	add("an IPv6 authority", `"authority": true`, scenario{headers: [][2]string{{":method", "GET"}, {":path", "/"}, {":authority", "[::FFFF:10.1.2.3]:80"}}}, "10.1.2.3")
	add("a constant", `"constant": "all"`, scenario{headers: at("/")}, "all")

	add("the source address", `"source_address": true`, scenario{headers: at("/"), properties: map[string]string{"source/address": "10.1.2.3:60104"}}, "10.1.2.3")
	add("a masked address", `"source_address": true, "mask": {"ipv4": 24, "ipv6": 56}`, scenario{
		headers: at("/"), properties: map[string]string{"source/address": "[2001:db8:1:2ff::1]:1"},
	}, "2001:db8:1:200::/56")
	add("an IPv4 address within an IPv6 one", `"source_address": true, "mask": {"ipv4": 24, "ipv6": 56}`, scenario{
		headers: at("/"), properties: map[string]string{"source/address": "[::ffff:10.1.2.3]:1"},
	}, "10.1.2.0/24")
	wrong("no source address", `"source_address": true`, scenario{headers: at("/")}, "source address is missing")
	add("a certificate", `"peer_certificate": "uri_san"`, scenario{
		headers: at("/"), properties: map[string]string{"connection/uri_san_peer_certificate": "spiffe://acme/n"},
	}, "spiffe://acme/n")
	wrong("no certificate", `"peer_certificate": "subject"`, scenario{
		headers: at("/"), properties: map[string]string{"connection/subject_peer_certificate": ""},
	}, "peer certificate's subject is missing")
	add("the SNI", `"sni": true`, scenario{headers: at("/"), properties: map[string]string{"connection/requested_server_name": "a.test"}}, "a.test")
	add("a claim", `"jwt_claim": "sub"`, scenario{headers: at("/"), properties: map[string]string{jwtPayload + "/sub": "u1"}}, "u1")
	add("C24: an empty claim is a value", `"jwt_claim": "sub"`, scenario{headers: at("/"), properties: map[string]string{jwtPayload + "/sub": ""}}, "")
	wrong("no claim", `"jwt_claim": "sub"`, scenario{headers: at("/")}, "jwt claim sub is missing")
	add("a number in a claim", `"jwt_claim": {"path": ["org"], "as": "number"}`, scenario{
		headers: at("/"), properties: map[string]string{jwtPayload + "/org": number(42)},
	}, "42")
	wrong("half a number in a claim", `"jwt_claim": {"path": ["org"], "as": "number"}`, scenario{
		headers: at("/"), properties: map[string]string{jwtPayload + "/org": number(0.5)},
	}, "jwt claim org of payload as number is not a whole number from -2^53 to 2^53")
	wrong("a number that is too large", `"jwt_claim": {"path": ["org"], "as": "number"}`, scenario{
		headers: at("/"), properties: map[string]string{jwtPayload + "/org": number(1 << 54)},
	}, "jwt claim org of payload as number is not a whole number from -2^53 to 2^53")
	wrong("text for a number", `"jwt_claim": {"path": ["org"], "as": "number"}`, scenario{
		headers: at("/"), properties: map[string]string{jwtPayload + "/org": "acme"},
	}, "jwt claim org of payload as number is not a whole number from -2^53 to 2^53")
	add("true in metadata", `"metadata": {"filter": "f", "path": ["a", "0"], "as": "bool"}`, scenario{
		headers: at("/"), properties: map[string]string{"metadata/filter_metadata/f/a/0": "\x01"},
	}, "true")
	wrong("text for true", `"metadata": {"filter": "f", "path": ["a"], "as": "bool"}`, scenario{
		headers: at("/"), properties: map[string]string{"metadata/filter_metadata/f/a": "yes"},
	}, "metadata f a as bool is not true or false")
	add("the route", `"route": "name"`, scenario{headers: at("/"), properties: map[string]string{"xds/route_name": "in"}}, "in")
	add("the route's metadata", `"route_metadata": {"filter": "weir", "path": ["plan"]}`, scenario{
		headers: at("/"), properties: map[string]string{"xds/route_metadata/filter_metadata/weir/plan": "gold"},
	}, "gold")

	add("a capture", `"header": "authorization", "capture": "^Bearer (.+)$", "normalize": ["lower"]`, scenario{
		headers: at("/", [2]string{"authorization", "Bearer AbC"}),
	}, "abc")
	wrong("a capture that does not match", `"header": "authorization", "capture": "^Bearer (.+)$"`, scenario{
		headers: at("/", [2]string{"authorization", "Basic AbC"}),
	}, "header authorization is missing")
	wrong("C29: a value that is too long", `"header": "x-a"`, scenario{
		headers: at("/", [2]string{"x-a", strings.Repeat("x", 65537)}),
	}, "header x-a is longer than 65536 bytes")

	json := slices.Clip(post([2]string{"content-type", "application/json"}))
	add("in a JSON body", `"json": "/org/id"`, scenario{headers: json, body: []string{`{"org": {`, `"id": "acm`, `e"}}`}}, "acme")
	add("in a JSON body with a length", `"json": "/id"`, scenario{headers: append(json, [2]string{"content-length", "9"}), body: []string{`{"id": 7}`}}, "7")
	add("in a JSON body with trailers", `"json": "/id"`, scenario{headers: json, body: []string{`{"id": 7}`}, trailers: [][2]string{{"x-sum", "1"}}}, "7")
	add("C11: in a compressed JSON body", `"json": "/id"`, scenario{headers: append(json, [2]string{"content-encoding", "gzip"}), body: []string{zipped(t, `{"id": 7}`)}}, "7")
	wrong("no JSON", `"json": "/id"`, scenario{headers: json, body: []string{`{"id": 7`}}, `json "/id" is not JSON as RFC 8259 has it, or is cut short`)
	wrong("no body", `"json": "/id"`, scenario{headers: json}, `json "/id" is missing`)
	wrong("an empty body", `"json": "/id"`, scenario{headers: json, body: []string{""}}, `json "/id" is missing`)
	wrong("twice in a JSON body", `"json": "/id"`, scenario{headers: json, body: []string{`{"id": 7, "i\u0064": 7}`}}, `json "/id" is given more than once`)
	wrong("another compression", `"json": "/id"`, scenario{headers: append(json, [2]string{"content-encoding", "br"}), body: []string{"x"}}, `json "/id" is in an encoding that can't be read; gzip can`)
	wrong("broken compression", `"json": "/id"`, scenario{headers: append(json, [2]string{"content-encoding", "gzip"}), body: []string{"x"}}, `json "/id" is not gzip, or is cut short or damaged`)

	add("in a protobuf body", `"protobuf": "3.1"`, scenario{headers: post(), body: []string{nested("acme", 7)}}, "acme")
	add("in a gRPC message", `"protobuf": "3.1"`, scenario{headers: grpcRequest(), body: []string{"\x00\x00", string(frame([]byte(nested("acme", 7))))[2:]}}, "acme")
	add("in a compressed gRPC message", `"protobuf": {"field": "2", "as": "uint32"}`, scenario{
		headers: grpcRequest([2]string{"grpc-encoding", "gzip"}),
		body:    []string{"\x01" + string(frame([]byte(zipped(t, nested("acme", 7)))))[1:]},
	}, "7")
	wrong("no gRPC message", `"protobuf": "3.1"`, scenario{headers: grpcRequest(), body: []string{""}}, "protobuf field 3.1 as string is missing")
	wrong("half a gRPC message", `"protobuf": "3.1"`, scenario{headers: grpcRequest(), body: []string{"\x00\x00\x00\x00\x05ab"}}, "protobuf field 3.1 as string ends in the middle of a message")
	wrong("no gRPC stream", `"protobuf": "3.1"`, scenario{headers: grpcRequest(), body: []string{"\x02\x00\x00\x00\x05ab"}}, "the body is not a gRPC stream: a message begins with a byte that is neither 0 nor 1")

	tooLarge := func(name, text string, s scenario) {
		s.name, s.block = name, keyBlock(text)
		s.wantStatus, s.wantGRPC, s.wantOutcome = 413, 8, "too_large"
		s.wantBody = "the body must be read and is larger than hold_bytes (1000)"
		list = append(list, s)
	}
	tooLarge("a body that is too long to be read", `"json": "/id"`, scenario{headers: json, body: []string{strings.Repeat(" ", 1000), " "}})
	tooLarge("a length that is too long to be read", `"json": "/id"`, scenario{headers: append(json, [2]string{"content-length", "1001"}), body: []string{"x"}})
	tooLarge("C11: a body that is too long when decompressed", `"json": "/id"`, scenario{
		headers: append(json, [2]string{"content-encoding", "gzip"}), body: []string{zipped(t, strings.Repeat(" ", 1001))},
	})
	tooLarge("a gRPC message that is too long to be read", `"protobuf": "1"`, scenario{headers: grpcRequest(), body: []string{"\x00\x00\x00\x10\x00"}})

	list = append(list, scenario{
		name: "a body to be read, and a client that waits", block: keyBlock(`"json": "/id"`), headers: append(json, [2]string{"expect", "100-continue"}), body: []string{"x"},
		wantStatus: 417, wantGRPC: 3, wantBody: "the body is read before the request goes on: send it without Expect",
	}, scenario{
		name: "a key in a body that skips", block: keyBlock(`"json": "/id", "missing": "skip"`), headers: json, body: []string{"{", "}"}, trailers: [][2]string{{"x-sum", "1"}},
	}, scenario{
		name: "a skipped descriptor's body is not waited for", headers: post([2]string{"content-length", "100000"}), chunks: []int{100000},
		block: `{"rules": [{"descriptors": [{"entries": [{"key": "k", "header": "x-k", "missing": "skip"}, {"key": "b", "json": "/id"}]}]}]}`,
	})
	return append(list, ruleScenarios(t)...)
}

// ruleScenarios has the conditions of rules.
func ruleScenarios(t *testing.T) []scenario {
	t.Helper()
	var list []scenario
	for _, tc := range []struct {
		name, when string
		s          scenario
		holds      bool
	}{
		{"one of the methods", `{"methods": ["PUT", "GET"]}`, scenario{headers: at("/")}, true},
		{"none of the methods", `{"methods": ["PUT"]}`, scenario{headers: at("/")}, false},
		{"one of the paths", `{"paths": ["/a", "/v1/**"]}`, scenario{headers: at("/v1/x?y")}, true},
		{"one of the paths, spelt differently", `{"paths": ["/v1/**"]}`, scenario{headers: at("/%761/x")}, true},
		{"none of the paths", `{"paths": ["/a"]}`, scenario{headers: at("/a/b")}, false},
		{"the route", `{"routes": ["in"]}`, scenario{headers: at("/"), properties: map[string]string{"xds/route_name": "in"}}, true},
		{"another route", `{"routes": ["in"]}`, scenario{headers: at("/"), properties: map[string]string{"xds/route_name": "out"}}, false},
		{"no route", `{"routes": ["in"]}`, scenario{headers: at("/")}, false},
		{"a header that is there", `{"headers": [{"name": "x-a", "present": true}]}`, scenario{headers: at("/", [2]string{"x-a", ""}, [2]string{"x-a", ""})}, true},
		{"a header that is not there", `{"headers": [{"name": "x-a", "present": true}]}`, scenario{headers: at("/")}, false},
		{"a header that must not be there", `{"headers": [{"name": "x-a", "present": false}]}`, scenario{headers: at("/", [2]string{"x-a", ""})}, false},
		{"a header that need not be there", `{"headers": [{"name": "x-a", "present": false}]}`, scenario{headers: at("/")}, true},
		{"a header's value", `{"headers": [{"name": "x-a", "equals": "1"}]}`, scenario{headers: at("/", [2]string{"x-a", "1"})}, true},
		{"a header's value twice", `{"headers": [{"name": "x-a", "equals": "1"}]}`, scenario{headers: at("/", [2]string{"x-a", "1"}, [2]string{"x-a", "1"})}, false},
		{"a header that matches as a whole", `{"headers": [{"name": "x-a", "matches": "a|ab"}]}`, scenario{headers: at("/", [2]string{"x-a", "ab"})}, true},
		{"a header that matches in part", `{"headers": [{"name": "x-a", "matches": "a|b"}]}`, scenario{headers: at("/", [2]string{"x-a", "ab"})}, false},
		{"all conditions but one", `{"methods": ["GET"], "paths": ["/"], "headers": [{"name": "x-a", "present": true}]}`, scenario{headers: at("/")}, false},
	} {
		s := tc.s
		s.name = "when: " + tc.name
		s.block = `{"rules": [{"when": ` + tc.when + `, "descriptors": [{"entries": [{"key": "k", "constant": "c"}]}]}]}`
		if tc.holds {
			s.wantCall, s.answer, s.wantOutcome = []*commonv3.RateLimitDescriptor{desc(1, "k", "c")}, okAnswer(t), "allowed"
		}
		list = append(list, s)
	}
	return list
}

// costScenarios has each cost.
func costScenarios(t *testing.T) []scenario {
	t.Helper()
	var list []scenario
	add := func(name, cost string, s scenario, want uint64) {
		s.name, s.block = "cost: "+name, costBlock(cost)
		s.wantCall, s.answer, s.wantOutcome = []*commonv3.RateLimitDescriptor{desc(want, "k", "c")}, okAnswer(t), "allowed"
		list = append(list, s)
	}
	costs := func(value string) scenario { return scenario{headers: at("/", [2]string{"x-cost", value})} }
	missing := func(s scenario, reason string) scenario { s.wantMissing = reason; return s }

	add("a factor", `{"count": "one", "factor": 7}`, scenario{headers: at("/")}, 7)
	add("bytes", `"bytes"`, scenario{headers: post([2]string{"content-length", "1000"}), chunks: []int{1000}},
		uint64(1000+len(":methodPOST:path/:authoritygwcontent-length1000")))
	add("bytes of a chunked body", `{"count": "bytes", "factor": 2}`, scenario{headers: post(), chunks: []int{10, 5}},
		uint64(2*(15+len(":methodPOST:path/:authoritygw"))))
	add("bytes of no body", `"bytes"`, scenario{headers: at("/")}, uint64(len(":methodGET:path/:authoritygw")))
	add("messages of what has none", `"grpc_messages"`, scenario{headers: post(), chunks: []int{10}}, 0)
	add("a header", `{"header": "x-cost", "factor": 3}`, costs("14"), 42)
	add("the largest", `{"header": "x-cost"}`, costs("9007199254740992"), 1<<53)
	add("too large for a limit, and refused by each", `{"header": "x-cost", "factor": 2}`, costs("9007199254740992"), 1<<53+1)
	add("a sum", `{"sum": ["one", {"header": "x-cost"}, {"count": "body_bytes", "factor": 10}]}`, scenario{
		headers: post([2]string{"x-cost", "5"}, [2]string{"content-length", "3"}), chunks: []int{3},
	}, 36)
	add("a query parameter", `{"query": "n"}`, scenario{headers: at("/?n=12")}, 12)
	add("metadata", `{"metadata": {"filter": "f", "path": ["n"], "as": "number"}}`, scenario{
		headers: at("/"), properties: map[string]string{"metadata/filter_metadata/f/n": number(12)},
	}, 12)
	add("JSON", `{"json": "/usage/tokens"}`, scenario{headers: post(), body: []string{`{"usage": {"tokens": 1e3}}`}}, 1000)
	add("JSON, and the bytes it stands in", `{"sum": ["body_bytes", {"json": "/n"}]}`, scenario{headers: post(), body: []string{`{"n": 2}`}}, 10)
	add("C11: compressed bytes count as received", `{"sum": ["body_bytes", {"json": "/n"}]}`, scenario{
		headers: post([2]string{"content-encoding", "gzip"}), body: []string{zipped(t, `{"n": 2}`)},
	}, uint64(2+len(zipped(t, `{"n": 2}`))))
	add("a protobuf field", `{"protobuf": "2"}`, scenario{headers: post(), body: []string{nested("acme", 7)}}, 7)
	add("a gRPC message's field", `{"protobuf": "2"}`, scenario{headers: grpcRequest(), body: []string{string(frame([]byte(nested("acme", 7))))}}, 7)
	add("a default", `{"header": "x-cost", "missing": "default", "default": 0}`, missing(scenario{headers: at("/")}, "absent"), 0)
	add("a default in place of a wrong one", `{"header": "x-cost", "missing": "default", "default": 9}`, missing(costs("-1"), "malformed"), 9)
	add("the least", `{"header": "x-cost", "min": 0}`, costs("0"), 0)

	for _, tc := range []struct {
		name, cost string
		s          scenario
		reason     string
		text       string
	}{
		{"C10: absent", `{"header": "x-cost"}`, scenario{headers: at("/")}, "absent", "header x-cost is missing"},
		{"C10: zero", `{"header": "x-cost"}`, costs("0"), "out_of_range", "header x-cost is not a whole number from 1 to 9007199254740992"},
		{"C10: negative", `{"header": "x-cost"}`, costs("-5"), "malformed", "header x-cost is not a whole number from 0 to 2^53"},
		{"C10: a fraction", `{"header": "x-cost"}`, costs("1.5"), "malformed", "header x-cost is not a whole number from 0 to 2^53"},
		{"C10: empty", `{"header": "x-cost"}`, costs(""), "malformed", "header x-cost is not a whole number from 0 to 2^53"},
		{"C10: beyond 64 bits", `{"header": "x-cost"}`, costs("18446744073709551617"), "malformed", "header x-cost is not a whole number from 0 to 2^53"},
		{"above max", `{"header": "x-cost", "max": 10}`, costs("11"), "out_of_range", "header x-cost is not a whole number from 1 to 10"},
		{"twice", `{"header": "x-cost"}`, scenario{headers: at("/", [2]string{"x-cost", "1"}, [2]string{"x-cost", "1"})}, "repeated", "header x-cost is given more than once"},
		{"text in JSON", `{"json": "/n"}`, scenario{headers: post(), body: []string{`{"n": "many"}`}}, "malformed", `json "/n" is not a whole number from 0 to 2^53`},
	} {
		s := missing(tc.s, tc.reason)
		s.name, s.block = "cost: "+tc.name, costBlock(tc.cost)
		s.wantStatus, s.wantGRPC, s.wantBody, s.wantOutcome = 400, 3, tc.text, "invalid"
		list = append(list, s)
	}
	skipped := missing(scenario{headers: at("/")}, "absent")
	skipped.name, skipped.block = "cost: skipped", costBlock(`{"header": "x-cost", "missing": "skip"}`)
	return append(list, skipped)
}

package config_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/filter/extract"
)

const full = `{
	"timeout": "1.5s",
	"hold_bytes": 524288,
	"block_bytes": 131072,
	"block_messages": 4,
	"refused": {"status": 503, "body": "{}", "content_type": "application/json"},
	"debug": "redacted",
	"rules": [
		{"name": "uploads", "when": {
			"routes": ["in"], "methods": ["PUT", "PATCH"], "paths": ["/v1/{tenant}/**"],
			"headers": [
				{"name": "X-Plan", "equals": ""}, {"name": "x-a", "matches": "a|b"},
				{"name": "x-b", "present": true}, {"name": "x-c", "present": false}
			]
		}, "descriptors": [
			{"entries": [{"key": "node", "header": "X-Node-Id", "type": "uuid", "missing": "skip"}], "cost": "body_bytes", "on_error": "allow"},
			{"entries": [
				{"key": "plan", "header": "x-plan", "missing": "default", "default": "free", "capture": "^v(.*)$", "normalize": ["trim", "lower"]},
				{"key": "owner", "header": "x-owner", "type": "uuid", "missing": "default", "default": "C9BF9E57-1685-4C89-BAFB-FF5AF830BE8A"},
				{"key": "from", "source_address": true, "mask": {"ipv4": 24, "ipv6": 56}}
			], "cost": {"sum": [
				{"count": "bytes", "factor": 2},
				{"header": "x-cost", "factor": 3, "min": 0, "max": 10, "missing": "default", "default": 5}
			]}}
		]},
		{"descriptors": [{"entries": [{"key": "consumer", "header": "x-consumer", "type": "string", "missing": "deny"}], "cost": "one", "on_error": "deny"}]}
	]
}`

var everyBit = extract.Masks{IPv4: 32, IPv6: 128}

func header(name string) config.Source { return config.Source{Kind: config.SourceHeader, Name: name} }

func one() config.Cost { return config.Cost{Terms: []config.Term{{Factor: 1}}} }

// same compares configurations. Texts that are for people are looked at elsewhere.
var same = cmp.Options{
	cmpopts.IgnoreUnexported(config.Source{}),
	cmp.Comparer(func(a, b *regexp.Regexp) bool {
		return (a == nil) == (b == nil) && (a == nil || a.String() == b.String())
	}),
	cmp.Comparer(func(a, b extract.Pattern) bool { return a.String() == b.String() }),
	cmp.Comparer(func(a, b extract.Pointer) bool { return a.String() == b.String() }),
	cmp.Comparer(func(a, b extract.Field) bool { return a.String() == b.String() }),
}

func pattern(text string) extract.Pattern {
	p, err := extract.ParsePattern(text)
	if err != nil {
		panic(err)
	}
	return p
}

func fullBlock() config.Block {
	return config.Block{
		Timeout:       1500 * time.Millisecond,
		HoldBytes:     524288,
		BlockBytes:    131072,
		BlockMessages: 4,
		Refused:       config.Answer{Status: 503, Body: "{}", ContentType: "application/json"},
		Debug:         config.DebugRedacted,
		Rules: []config.Rule{
			{Name: "uploads", When: config.When{
				Routes: []string{"in"}, Methods: []string{"PUT", "PATCH"}, Paths: []extract.Pattern{pattern("/v1/{tenant}/**")},
				Headers: []config.HeaderMatch{
					{Name: "x-plan", Kind: config.HeaderEquals},
					{Name: "x-a", Kind: config.HeaderMatches, Expression: regexp.MustCompile("^(?:a|b)$")},
					{Name: "x-b", Kind: config.HeaderPresent},
					{Name: "x-c", Kind: config.HeaderAbsent},
				},
			}, Descriptors: []config.Descriptor{
				{
					Entries:      []config.Entry{{Key: "node", Source: header("x-node-id"), Type: config.TypeUUID, Mask: everyBit, Missing: config.MissingSkip}},
					Cost:         config.Cost{Terms: []config.Term{{Kind: config.TermBodyBytes, Factor: 1}}},
					AllowOnError: true,
				},
				{
					Entries: []config.Entry{
						{
							Key: "plan", Source: header("x-plan"), Mask: everyBit, Missing: config.MissingDefault, Default: "free",
							Capture: regexp.MustCompile("^v(.*)$"), Normalize: []config.Normalizer{config.Trim, config.Lower},
						},
						{
							Key: "owner", Source: header("x-owner"), Type: config.TypeUUID, Mask: everyBit,
							Missing: config.MissingDefault, Default: "c9bf9e57-1685-4c89-bafb-ff5af830be8a",
						},
						{
							Key: "from", Source: config.Source{Kind: config.SourceAddress}, Type: config.TypeIP,
							Mask: extract.Masks{IPv4: 24, IPv6: 56},
						},
					},
					Cost: config.Cost{Terms: []config.Term{
						{Kind: config.TermBytes, Factor: 2},
						{Kind: config.TermValue, Source: header("x-cost"), Factor: 3, Max: 10, Missing: config.MissingDefault, Default: 5},
					}},
				},
			}},
			{Name: "1", Descriptors: []config.Descriptor{
				{Entries: []config.Entry{{Key: "consumer", Source: header("x-consumer"), Mask: everyBit}}, Cost: one()},
			}},
		},
	}
}

// defaults are those of a block.
func defaults(change func(*config.Block)) config.Block {
	b := config.Block{
		Timeout: 250 * time.Millisecond, HoldBytes: 256 << 10, BlockBytes: 64 << 10, BlockMessages: 16,
		Refused: config.Answer{Status: 429},
	}
	change(&b)
	return b
}

func TestParseBlock(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		name, text string
		want       config.Block
	}{
		{"everything", full, fullBlock()},
		{"the defaults", `{"rules": []}`, defaults(func(*config.Block) {})},
		{
			"the least", `{"timeout": "1ms", "hold_bytes": 1, "block_bytes": 1, "block_messages": 1, "refused": {"status": 400}, "rules": []}`,
			defaults(func(b *config.Block) {
				b.Timeout, b.HoldBytes, b.BlockBytes, b.BlockMessages, b.Refused.Status = time.Millisecond, 1, 1, 1, 400
			}),
		},
		{
			"the most", `{"timeout": "60s", "hold_bytes": 16777216, "block_bytes": 16777216, "block_messages": 1048576, "refused": {"status": 599}, "rules": []}`,
			defaults(func(b *config.Block) {
				b.Timeout, b.HoldBytes, b.BlockBytes, b.BlockMessages, b.Refused.Status = time.Minute, 16<<20, 16<<20, 1<<20, 599
			}),
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			got, err := config.ParseBlock([]byte(tc.text))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got, same); diff != "" {
				t.Errorf("ParseBlock (-want +got):\n%s", diff)
			}
		})
	}
}

func parsed[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func property(as config.PropertyType, path ...string) config.Source {
	return config.Source{Kind: config.SourceProperty, As: as, Path: path}
}

func TestSources(t *testing.T) {
	t.Parallel()

	const jwt = "envoy.filters.http.jwt_authn"
	for _, tc := range []struct {
		text string
		want config.Source
		name string // for people
	}{
		{`"header": "X-Node-Id"`, header("x-node-id"), "header x-node-id"},
		{`"path": "whole"`, config.Source{Kind: config.SourcePath}, "path"},
		{`"path": {"segment": 64}`, config.Source{Kind: config.SourceSegment, N: 64}, "path segment 64"},
		{`"path": {"prefix": 2}`, config.Source{Kind: config.SourcePrefix, N: 2}, "path prefix 2"},
		{
			`"path": {"pattern": "/v1/{tenant}/*"}`,
			config.Source{Kind: config.SourcePattern, Pattern: pattern("/v1/{tenant}/*"), Name: "tenant"},
			"path part tenant of /v1/{tenant}/*",
		},
		{
			`"path": {"pattern": "/{a}/{b...}", "part": "b"}`,
			config.Source{Kind: config.SourcePattern, Pattern: pattern("/{a}/{b...}"), Name: "b"},
			"path part b of /{a}/{b...}",
		},
		{`"query": "Key"`, config.Source{Kind: config.SourceQuery, Name: "Key"}, "query parameter Key"},
		{`"cookie": "sid"`, config.Source{Kind: config.SourceCookie, Name: "sid"}, "cookie sid"},
		{`"method": true`, config.Source{Kind: config.SourceMethod}, "method"},
		{`"authority": true`, config.Source{Kind: config.SourceAuthority}, "authority"},
		{`"source_address": true`, config.Source{Kind: config.SourceAddress}, "source address"},
		{`"peer_certificate": "uri_san"`, property(config.PropertyText, "connection", "uri_san_peer_certificate"), "peer certificate's uri_san"},
		{`"peer_certificate": "dns_san"`, property(config.PropertyText, "connection", "dns_san_peer_certificate"), "peer certificate's dns_san"},
		{`"peer_certificate": "subject"`, property(config.PropertyText, "connection", "subject_peer_certificate"), "peer certificate's subject"},
		{`"peer_certificate": "sha256"`, property(config.PropertyText, "connection", "sha256_peer_certificate_digest"), "peer certificate's sha256"},
		{`"sni": true`, property(config.PropertyText, "connection", "requested_server_name"), "sni"},
		{`"jwt_claim": "sub"`, property(config.PropertyString, "metadata", "filter_metadata", jwt, "payload", "sub"), "jwt claim sub"},
		{
			`"jwt_claim": {"path": ["org", "id"], "payload": "p", "as": "number"}`,
			property(config.PropertyNumber, "metadata", "filter_metadata", jwt, "p", "org", "id"), "jwt claim org/id of p as number",
		},
		{
			`"metadata": {"filter": "f", "path": ["a", "0"], "as": "bool"}`,
			property(config.PropertyBool, "metadata", "filter_metadata", "f", "a", "0"), "metadata f a/0 as bool",
		},
		{`"route": "name"`, property(config.PropertyText, "xds", "route_name"), "route name"},
		{
			`"route_metadata": {"filter": "f", "path": ["a"]}`,
			property(config.PropertyString, "xds", "route_metadata", "filter_metadata", "f", "a"), "route_metadata f a as string",
		},
		{`"json": ""`, config.Source{Kind: config.SourceJSON}, `json ""`},
		{`"json": "/a/b~1c"`, config.Source{Kind: config.SourceJSON, Pointer: parsed(extract.ParsePointer("/a/b~1c"))}, `json "/a/b~1c"`},
		{
			`"protobuf": "3.1"`,
			config.Source{Kind: config.SourceProtobuf, Field: parsed(extract.ParseField("3.1"))},
			"protobuf field 3.1 as string",
		},
		{
			`"protobuf": {"field": "2", "as": "sint64"}`,
			config.Source{Kind: config.SourceProtobuf, Field: parsed(extract.ParseField("2")), Encoding: extract.EncodingSint64},
			"protobuf field 2 as sint64",
		},
		{`"constant": "all"`, config.Source{Kind: config.SourceConstant, Name: "all"}, "constant all"},
	} {
		t.Run(tc.text, func(t *testing.T) {
			t.Parallel()

			b, err := config.ParseBlock([]byte(entry(`{"key": "a", ` + tc.text + `}`)))
			if err != nil {
				t.Fatal(err)
			}
			got := b.Rules[0].Descriptors[0].Entries[0].Source
			if diff := cmp.Diff(tc.want, got, same); diff != "" {
				t.Errorf("source (-want +got):\n%s", diff)
			}
			if got.String() != tc.name {
				t.Errorf("String() = %q, want %q", got.String(), tc.name)
			}
		})
	}
}

func TestCosts(t *testing.T) {
	t.Parallel()

	value := func(s config.Source) config.Cost {
		return config.Cost{Terms: []config.Term{{Kind: config.TermValue, Source: s, Factor: 1, Min: 1, Max: 1 << 53}}}
	}
	count := func(kind config.TermKind, factor int64) config.Cost {
		return config.Cost{Terms: []config.Term{{Kind: kind, Factor: factor}}}
	}
	for _, tc := range []struct {
		text string
		want config.Cost
	}{
		{`"one"`, one()},
		{`"body_bytes"`, count(config.TermBodyBytes, 1)},
		{`"bytes"`, count(config.TermBytes, 1)},
		{`"grpc_messages"`, count(config.TermMessages, 1)},
		{`{"count": "one", "factor": 9007199254740992}`, count(config.TermOne, 1<<53)},
		{`{"header": "X-Cost"}`, value(header("x-cost"))},
		{`{"query": "n"}`, value(config.Source{Kind: config.SourceQuery, Name: "n"})},
		{`{"json": "/usage"}`, value(config.Source{Kind: config.SourceJSON, Pointer: parsed(extract.ParsePointer("/usage"))})},
		{
			`{"protobuf": "2"}`,
			value(config.Source{Kind: config.SourceProtobuf, Field: parsed(extract.ParseField("2")), Encoding: extract.EncodingInt64}),
		},
		{`{"metadata": {"filter": "f", "path": ["n"], "as": "number"}}`, value(property(config.PropertyNumber, "metadata", "filter_metadata", "f", "n"))},
		{`{"sum": ["one", {"count": "bytes", "factor": 2}]}`, config.Cost{Terms: []config.Term{
			{Kind: config.TermOne, Factor: 1}, {Kind: config.TermBytes, Factor: 2},
		}}},
	} {
		t.Run(tc.text, func(t *testing.T) {
			t.Parallel()

			b, err := config.ParseBlock([]byte(costs(tc.text)))
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, b.Rules[0].Descriptors[0].Cost, same); diff != "" {
				t.Errorf("cost (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHeaders(t *testing.T) {
	t.Parallel()

	b, err := config.ParseBlock([]byte(full))
	if err != nil {
		t.Fatal(err)
	}
	const d = "rules[0].descriptors"
	want := [][2]string{
		{"rules[0].when.headers[0].name", "x-plan"},
		{"rules[0].when.headers[1].name", "x-a"},
		{"rules[0].when.headers[2].name", "x-b"},
		{"rules[0].when.headers[3].name", "x-c"},
		{d + "[0].entries[0].header", "x-node-id"},
		{d + "[1].entries[0].header", "x-plan"},
		{d + "[1].entries[1].header", "x-owner"},
		{d + "[1].cost.sum[1].header", "x-cost"},
		{"rules[1].descriptors[0].entries[0].header", "x-consumer"},
	}
	var got [][2]string
	for path, name := range b.Headers() {
		got = append(got, [2]string{path, name})
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Headers (-want +got):\n%s", diff)
	}

	b, err = config.ParseBlock([]byte(costs(`{"header": "x-cost"}`)))
	if err != nil {
		t.Fatal(err)
	}
	for path, name := range b.Headers() {
		if name == "x-cost" && path != "rules[0].descriptors[0].cost.header" {
			t.Errorf("the path of the cost's header is %q", path)
		}
	}
}

// costs wraps the text of a cost in a block.
func costs(text string) string {
	return `{"rules": [{"descriptors": [{"entries": [{"key": "a", "constant": "c"}], "cost": ` + text + `}]}]}`
}

// when wraps the text of a condition in a block.
func when(text string) string {
	return `{"rules": [{"when": ` + text + `, "descriptors": [{"entries": [{"key": "a", "constant": "c"}]}]}]}`
}

// entry wraps the text of an entry in a block.
func entry(text string) string {
	return `{"rules": [{"descriptors": [{"entries": [` + text + `]}]}]}`
}

func TestParseBlockErrors(t *testing.T) {
	t.Parallel()

	const (
		e0 = "rules[0].descriptors[0].entries[0]"
		c0 = "rules[0].descriptors[0].cost"
		w0 = "rules[0].when"
	)
	for _, tc := range []struct {
		name, text string
		want       []string // errors, each a path, a colon and a part of the message
	}{
		{"nothing", ``, []string{"unexpected end of JSON input"}},
		{"half", `{"rules": [`, []string{"unexpected end of JSON input"}},
		{"text after it", `{"rules": []} {}`, []string{"invalid character"}},
		{"not UTF-8", "{\"rules\": [], \"\xff\": 1}", []string{"is not valid UTF-8"}},
		{"no object", `[]`, []string{"is a list, want an object"}},
		{"null", `null`, []string{"is null, want an object"}},
		{"nested", strings.Repeat("[", 40) + strings.Repeat("]", 40), []string{"nested too deeply"}},
		{"no rules", `{}`, []string{"rules: is required"}},
		{"rules null", `{"rules": null}`, []string{"rules: is null, want a list"}},
		{"an unknown field", `{"rules": [], "hold_byte": 1}`, []string{"hold_byte: is not a known field"}},
		{"a field in another case", `{"Rules": [], "rules": []}`, []string{"Rules: is not a known field"}},
		{"a field twice", `{"rules": [], "rules": []}`, []string{"rules: is given twice"}},
		{"a field twice, deep", entry(`{"key": "a", "header": "x-a", "key": "b"}`), []string{e0 + ".key: is given twice"}},

		{"a timeout of no unit", `{"rules": [], "timeout": "250"}`, []string{"timeout: \"250\" is not a duration"}},
		{"a timeout as a number", `{"rules": [], "timeout": 250}`, []string{"timeout: is a number, want a string"}},
		{"a timeout of zero", `{"rules": [], "timeout": "0s"}`, []string{"timeout: is 0s, want 1ms to 1m0s"}},
		{"a timeout below a millisecond", `{"rules": [], "timeout": "999us"}`, []string{"timeout: is 999µs"}},
		{"a negative timeout", `{"rules": [], "timeout": "-1s"}`, []string{"timeout: is -1s"}},
		{"a long timeout", `{"rules": [], "timeout": "61s"}`, []string{"timeout: is 1m1s"}},
		{"hold_bytes of zero", `{"rules": [], "hold_bytes": 0}`, []string{"hold_bytes: is 0, want 1 to 16777216"}},
		{"hold_bytes too large", `{"rules": [], "hold_bytes": 16777217}`, []string{"hold_bytes: is 16777217"}},
		{"hold_bytes as a fraction", `{"rules": [], "hold_bytes": 1.5}`, []string{"hold_bytes: 1.5 is not a whole number"}},
		{"hold_bytes with an exponent", `{"rules": [], "hold_bytes": 1e3}`, []string{"hold_bytes: 1e3 is not a whole number"}},
		{"hold_bytes beyond 64 bits", `{"rules": [], "hold_bytes": 99999999999999999999}`, []string{"hold_bytes: 99999999999999999999 is not"}},
		{"hold_bytes as text", `{"rules": [], "hold_bytes": "512KiB"}`, []string{"hold_bytes: is a string, want a number"}},

		{"a rule that is no object", `{"rules": [{"descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]}, 1]}`, []string{"rules[1]: is a number, want an object"}},
		{"no descriptors", `{"rules": [{}]}`, []string{"rules[0].descriptors: is required"}},
		{"empty descriptors", `{"rules": [{"descriptors": []}]}`, []string{"rules[0].descriptors: is empty"}},
		{"no entries", `{"rules": [{"descriptors": [{}]}]}`, []string{"rules[0].descriptors[0].entries: is required"}},
		{"empty entries", entry(``), []string{"rules[0].descriptors[0].entries: is empty"}},
		{"C32: a descriptor twice, for the same requests", `{"rules": [
			{"when": {"methods": ["PUT"]}, "descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]},
			{"when": {"methods": ["PUT"]}, "descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]}]}`, []string{"rules[1].descriptors[0]: is the same as rules[0].descriptors[0]"}},
		{"a rule's name with an underscore", `{"rules": [{"name": "a_b", "descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]}]}`, []string{`rules[0].name: "a_b" is not a name`}},
		{"a rule's name with a dot at its end", `{"rules": [{"name": "a.", "descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]}]}`, []string{`rules[0].name: "a." is not a name`}},
		{"a rule's name that is empty", `{"rules": [{"name": "", "descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]}]}`, []string{`rules[0].name: "" is not a name`}},
		{"a rule's name that is long", `{"rules": [{"name": "` + strings.Repeat("n", 65) + `", "descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]}]}`, []string{`rules[0].name: "n`}},
		{"a rule's name that is another's place", `{"rules": [
			{"name": "1", "descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]},
			{"descriptors": [{"entries": [{"key": "b", "header": "x-b"}]}]}]}`, []string{`rules[1].name: "1" is the name of rules[0] too`}},

		{"block_bytes of zero", `{"rules": [], "block_bytes": 0}`, []string{"block_bytes: is 0, want 1 to 16777216"}},
		{"block_messages too many", `{"rules": [], "block_messages": 1048577}`, []string{"block_messages: is 1048577, want 1 to 1048576"}},
		{"a refusal that is none", `{"rules": [], "refused": {"status": 200}}`, []string{"refused.status: is 200, want 400 to 599"}},
		{"a long refusal", `{"rules": [], "refused": {"body": "` + strings.Repeat("x", 16385) + `"}}`, []string{"refused.body: has 16385 bytes"}},
		{"a media type with a line break", `{"rules": [], "refused": {"content_type": "a\r\nb"}}`, []string{"refused.content_type: "}},
		{"an unknown field of a refusal", `{"rules": [], "refused": {"code": 1}}`, []string{"refused.code: is not a known field"}},
		{"an unknown detail", `{"rules": [], "debug": "on"}`, []string{`debug: "on" is not a level of detail; known are off, redacted, values`}},

		{"no routes", when(`{"routes": []}`), []string{w0 + ".routes: is empty"}},
		{"an empty route", when(`{"routes": [""]}`), []string{w0 + ".routes[0]: is empty"}},
		{"a method in small letters", when(`{"methods": ["GET", "put"]}`), []string{w0 + `.methods[1]: "put" is not a method in capitals`}},
		{"a bad pattern", when(`{"paths": ["v1"]}`), []string{w0 + `.paths[0]: "v1" does not begin with a slash`}},
		{"a match of nothing", when(`{"headers": [{"name": "x-a"}]}`), []string{w0 + ".headers[0]: wants one of equals, matches and present"}},
		{"a match of two things", when(`{"headers": [{"name": "x-a", "equals": "", "present": true}]}`), []string{w0 + ".headers[0]: wants one of"}},
		{"a match of the host", when(`{"headers": [{"name": "host", "present": true}]}`), []string{w0 + ".headers[0].name: host is not visible"}},
		{"a bad expression", when(`{"headers": [{"name": "x-a", "matches": "("}]}`), []string{w0 + ".headers[0].matches: is not an RE2 expression: missing closing ): `(`"}},
		{"a look-ahead", when(`{"headers": [{"name": "x-a", "matches": "(?=a)"}]}`), []string{w0 + ".headers[0].matches: is not an RE2 expression"}},
		{"an unbalanced expression", when(`{"headers": [{"name": "x-a", "matches": "a)(?:b"}]}`), []string{w0 + ".headers[0].matches: is not an RE2 expression"}},
		{"an unknown condition", when(`{"hosts": ["a"]}`), []string{w0 + ".hosts: is not a known field"}},

		{"two sources", entry(`{"key": "a", "header": "x-a", "query": "a"}`), []string{e0 + ".query: is a second source, beside header"}},
		{"an unknown part of the path", entry(`{"key": "a", "path": "all"}`), []string{e0 + `.path: "all" is not a part of the path`}},
		{"two parts of the path", entry(`{"key": "a", "path": {"segment": 1, "prefix": 1}}`), []string{e0 + ".path: wants one of segment, prefix and pattern"}},
		{"segment zero", entry(`{"key": "a", "path": {"segment": 0}}`), []string{e0 + ".path.segment: is 0, want 1 to 64"}},
		{"a pattern without names", entry(`{"key": "a", "path": {"pattern": "/*"}}`), []string{e0 + `.path.pattern: "/*" names no part`}},
		{"a pattern with two names", entry(`{"key": "a", "path": {"pattern": "/{a}/{b}"}}`), []string{e0 + ".path.part: is required, since the pattern names 2"}},
		{"a part that is not there", entry(`{"key": "a", "path": {"pattern": "/{a}", "part": "b"}}`), []string{e0 + `.path.part: "b" is not a part of the pattern; known are a`}},
		{"a method of false", entry(`{"key": "a", "method": false}`), []string{e0 + ".method: is false, want true or nothing"}},
		{"a method by name", entry(`{"key": "a", "method": "GET"}`), []string{e0 + ".method: is a string, want a boolean"}},
		{"an unknown part of the certificate", entry(`{"key": "a", "peer_certificate": "issuer"}`), []string{e0 + `.peer_certificate: "issuer" is not a part of a certificate`}},
		{"a claim without a path", entry(`{"key": "a", "jwt_claim": {"payload": "p"}}`), []string{e0 + ".jwt_claim.path: is required"}},
		{"metadata without a filter", entry(`{"key": "a", "metadata": {"path": ["a"]}}`), []string{e0 + ".metadata.filter: is required"}},
		{"metadata of an unknown type", entry(`{"key": "a", "metadata": {"filter": "f", "path": ["a"], "as": "int"}}`), []string{e0 + `.metadata.as: "int" is not a type of metadata`}},
		{"metadata with a zero byte", entry(`{"key": "a", "metadata": {"filter": "f", "path": ["a\u0000b"]}}`), []string{e0 + ".metadata.path[0]: has a zero byte"}},
		{"another part of the route", entry(`{"key": "a", "route": "cluster"}`), []string{e0 + `.route: "cluster" is not a part of the route`}},
		{"no pointer", entry(`{"key": "a", "json": "a"}`), []string{e0 + `.json: "a" `}},
		{"a field as a number", entry(`{"key": "a", "protobuf": 3.10}`), []string{e0 + `.protobuf: is a number, want a string: write "3.10"`}},
		{"a field that is none", entry(`{"key": "a", "protobuf": {"field": "0"}}`), []string{e0 + `.protobuf.field: "0" `}},
		{"no field", entry(`{"key": "a", "protobuf": {"as": "bool"}}`), []string{e0 + ".protobuf.field: is required"}},
		{"an unknown encoding", entry(`{"key": "a", "protobuf": {"field": "1", "as": "text"}}`), []string{e0 + `.protobuf.as: "text" is not an encoding; known are string, bytes`}},
		{"an empty constant", entry(`{"key": "a", "constant": ""}`), []string{e0 + ".constant: is empty"}},
		{"a bad capture", entry(`{"key": "a", "header": "x-a", "capture": "["}`), []string{e0 + ".capture: is not an RE2 expression"}},
		{"no normalizers", entry(`{"key": "a", "header": "x-a", "normalize": []}`), []string{e0 + ".normalize: is empty"}},
		{"an unknown normalizer", entry(`{"key": "a", "header": "x-a", "normalize": ["upper"]}`), []string{e0 + `.normalize[0]: "upper" is not a normalizer`}},
		{"a hash that is to be a UUID", entry(`{"key": "a", "header": "x-a", "type": "uuid", "normalize": ["sha256"]}`), []string{e0 + ".normalize: sha256 needs type: string"}},
		{"an address that is no address", entry(`{"key": "a", "source_address": true, "type": "string"}`), []string{e0 + ".type: a source_address is of type ip"}},
		{"a mask of a string", entry(`{"key": "a", "header": "x-a", "mask": {"ipv4": 24}}`), []string{e0 + ".mask: needs type: ip"}},
		{"a wide mask", entry(`{"key": "a", "source_address": true, "mask": {"ipv4": 33}}`), []string{e0 + ".mask.ipv4: is 33, want 0 to 32"}},
		{"a long default", entry(`{"key": "a", "header": "x-a", "missing": "default", "default": "` + strings.Repeat("x", 65537) + `"}`), []string{e0 + ".default: "}},

		{"a cost of nothing", costs(`{}`), []string{c0 + ": has no source"}},
		{"a cost in a list", costs(`[]`), []string{c0 + ": is a list, want a string or an object"}},
		{"a count and a source", costs(`{"count": "one", "header": "x-a", "min": 1}`), []string{c0 + ".min: does not go with count", c0 + ".header: does not go with count"}},
		{"an unknown count", costs(`{"count": "body"}`), []string{c0 + `.count: "body" is not a cost`}},
		{"a factor of zero", costs(`{"count": "one", "factor": 0}`), []string{c0 + ".factor: is 0, want 1 to 9007199254740992"}},
		{"a source that has no number", costs(`{"cookie": "a"}`), []string{c0 + ".cookie: is not a known field", c0 + ": has no source"}},
		{"min above max", costs(`{"header": "x-a", "min": 3, "max": 2}`), []string{c0 + ".min: is 3, want at most max, which is 2"}},
		{"a default of none for a cost", costs(`{"header": "x-a", "missing": "default"}`), []string{c0 + ".default: is required"}},
		{"a default unused for a cost", costs(`{"header": "x-a", "default": 1}`), []string{c0 + ".default: needs missing: default"}},
		{"an empty sum", costs(`{"sum": []}`), []string{c0 + ".sum: is empty"}},
		{"a sum of one", costs(`{"sum": ["one"]}`), []string{c0 + ".sum: has one term"}},
		{"a sum in a sum", costs(`{"sum": ["one", {"sum": ["one", "bytes"]}]}`), []string{c0 + ".sum[1].sum: is not a known field", c0 + ".sum[1]: has no source"}},
		{"an unknown answer to errors", `{"rules": [{"descriptors": [{"entries": [{"key": "a", "header": "x-a"}], "on_error": "skip"}]}]}`, []string{`rules[0].descriptors[0].on_error: "skip" is not a way`}},

		{"a rule's name twice", `{"rules": [
			{"name": "n", "descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]},
			{"name": "n", "descriptors": [{"entries": [{"key": "b", "header": "x-b"}]}]}]}`, []string{`rules[1].name: "n" is the name of rules[0] too`}},
		{"C32: a descriptor twice", `{"rules": [
			{"descriptors": [{"entries": [{"key": "a", "header": "x-a"}]}]},
			{"descriptors": [{"cost": "one", "entries": [{"header": "X-A", "key": "a", "type": "string"}]}]}]}`, []string{"rules[1].descriptors[0]: is the same as rules[0].descriptors[0]"}},
		{"an unknown cost", `{"rules": [{"descriptors": [{"entries": [{"key": "a", "header": "x-a"}], "cost": "body"}]}]}`, []string{`rules[0].descriptors[0].cost: "body" is not a cost`}},

		{"no key", entry(`{"header": "x-a"}`), []string{e0 + ".key: is required"}},
		{"an empty key", entry(`{"key": "", "header": "x-a"}`), []string{e0 + ".key: is empty"}},
		{"no source", entry(`{"key": "a"}`), []string{e0 + ": has no source"}},
		{"an empty header", entry(`{"key": "a", "header": ""}`), []string{e0 + ".header: is empty"}},
		{"a pseudo-header", entry(`{"key": "a", "header": ":path"}`), []string{e0 + `.header: ":path" is not a header's name`}},
		{"a header with a space", entry(`{"key": "a", "header": "x a"}`), []string{e0 + `.header: "x a" is not a header's name`}},
		{"the host", entry(`{"key": "a", "header": "Host"}`), []string{e0 + ".header: host is not visible"}},
		{"an unknown type", entry(`{"key": "a", "header": "x-a", "type": "int"}`), []string{e0 + `.type: "int" is not a type`}},
		{"an unknown missing", entry(`{"key": "a", "header": "x-a", "missing": "allow"}`), []string{e0 + `.missing: "allow" is not`}},
		{"a default of none", entry(`{"key": "a", "header": "x-a", "missing": "default"}`), []string{e0 + ".default: is required"}},
		{"an empty default", entry(`{"key": "a", "header": "x-a", "missing": "default", "default": ""}`), []string{e0 + ".default: is empty"}},
		{"a default of the wrong type", entry(`{"key": "a", "header": "x-a", "type": "uuid", "missing": "default", "default": "free"}`), []string{e0 + `.default: "free" is not a UUID`}},
		{"a default unused", entry(`{"key": "a", "header": "x-a", "default": "free"}`), []string{e0 + ".default: needs missing: default"}},

		{"all at once", `{"timeout": "x", "hold_bytes": -1, "rules": [{"descriptors": [{"entries": [{"kee": "a"}], "cost": 1}]}], "x": 1}`, []string{
			"x: is not a known field", "timeout: ", "hold_bytes: is -1", e0 + ".kee: is not a known field",
			e0 + ".key: is required", e0 + ": has no source", "rules[0].descriptors[0].cost: is a number, want a string or an object",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			_, err := config.ParseBlock([]byte(tc.text))
			if err == nil {
				t.Fatal("ParseBlock accepts it")
			}
			checkErrors(t, err, tc.want)
		})
	}
}

func checkErrors(t *testing.T, err error, want []string) {
	t.Helper()
	list := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		list = joined.Unwrap()
	}
	if len(list) != len(want) {
		t.Fatalf("%d errors, want %d: %v", len(list), len(want), err)
	}
	for i, e := range list {
		var fault *config.Error
		if !errors.As(e, &fault) {
			t.Errorf("%T is no *config.Error", e)
			continue
		}
		if !strings.Contains(e.Error(), want[i]) {
			t.Errorf("error %d = %q, want %q in it", i, e, want[i])
		}
		if path, _, ok := strings.Cut(want[i], ": "); ok && fault.Path != path {
			t.Errorf("path = %q, want %q", fault.Path, path)
		}
	}
}

func TestParse(t *testing.T) {
	t.Parallel()

	got, err := config.Parse([]byte(`{"version": "7", "domain": "ingest", "cluster": "weir_ratelimit", "filter": ` + full + `}`))
	if err != nil {
		t.Fatal(err)
	}
	want := &config.Config{Version: "7", Domain: "ingest", Cluster: "weir_ratelimit", Block: fullBlock()}
	if diff := cmp.Diff(want, got, same); diff != "" {
		t.Errorf("Parse (-want +got):\n%s", diff)
	}
}

func TestParseErrors(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		name, text string
		want       []string
	}{
		{"nothing", ` `, []string{"unexpected end"}},
		{"an empty object", `{}`, []string{"domain: is required", "cluster: is required", "filter: is required"}},
		{"empty names", `{"domain": "", "cluster": "", "filter": {"rules": []}}`, []string{"domain: is empty", "cluster: is empty"}},
		{"wrong types", `{"version": 7, "domain": 1, "cluster": [], "filter": "x"}`, []string{
			"version: is a number, want a string", "domain: is a number", "cluster: is a list", "filter: is a string, want an object",
		}},
		{"in the block", `{"domain": "d", "cluster": "c", "filter": {"rules": [{"descriptors": [{"entries": [{}]}]}]}, "extra": {}}`, []string{
			"extra: is not a known field", "filter.rules[0].descriptors[0].entries[0].key: is required",
			"filter.rules[0].descriptors[0].entries[0]: has no source",
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			_, err := config.Parse([]byte(tc.text))
			if err == nil {
				t.Fatal("Parse accepts it")
			}
			checkErrors(t, err, tc.want)
		})
	}
}

func TestCompose(t *testing.T) {
	t.Parallel()

	got, err := config.Compose("<7>", `a"b`, "c", []byte("{\n\t\"rules\": [ ]\n}\n"))
	if err != nil {
		t.Fatal(err)
	}
	var text struct{ Version, Domain, Cluster string }
	if err := json.Unmarshal(got, &text); err != nil {
		t.Fatal(err)
	}
	if text.Version != "<7>" || text.Domain != `a"b` || text.Cluster != "c" || strings.ContainsAny(string(got), "\n\t ") {
		t.Errorf("Compose = %s", got)
	}

	for _, tc := range []struct {
		name                    string
		version, domain, block  string
		wantPath, wantInMessage string
	}{
		{"no block", "", "d", "", "filter", "unexpected end"},
		{"half a block", "", "d", `{"rules": [}`, "filter", "invalid character"},
		{"two values", "", "d", `{"rules": []},"x":{}`, "filter", "invalid character"},
		{"a block that is not UTF-8", "", "d", "{\"rules\": [], \"\xff\": 1}", "filter", "UTF-8"},
		{"a version that is not UTF-8", "\xff", "d", `{"rules": []}`, "version", "UTF-8"},
		{"a bad rule", "", "d", `{"rules": [1]}`, "filter.rules[0]", "is a number"},
		{"no domain", "", "", `{"rules": []}`, "domain", "is empty"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			_, err := config.Compose(tc.version, tc.domain, "c", []byte(tc.block))
			var fault *config.Error
			if !errors.As(err, &fault) || fault.Path != tc.wantPath || !strings.Contains(fault.Msg, tc.wantInMessage) {
				t.Errorf("Compose = %v, want path %q and %q in the message", err, tc.wantPath, tc.wantInMessage)
			}
		})
	}
}

// A block that parses composes, with any names, and comes back the same; every fault
// is an Error; nothing panics.
func FuzzParse(f *testing.F) {
	f.Add([]byte(full), "7", "ingest", "weir_ratelimit")
	f.Add([]byte(`{"rules": []}`), "", "d", "c")
	f.Add([]byte(entry(`{"key": "a\ud800", "header": "x-a"}`)), "\xff", "\u2028", "<")
	f.Add([]byte(`{"rules": [{"descriptors": [{"entries": [{"key": "a", "key": "b"}]}]}]}`), "", "d", "c")
	f.Add([]byte(`[1,,2]`), "", "d", "c")
	f.Fuzz(func(t *testing.T, text []byte, version, domain, cluster string) {
		if cfg, err := config.Parse(text); (cfg == nil) == (err == nil) {
			t.Errorf("Parse = %v, %v", cfg, err)
		}
		block, err := config.ParseBlock(text)
		composed, composeErr := config.Compose(version, domain, cluster, text)
		named := domain != "" && cluster != "" &&
			utf8.ValidString(version) && utf8.ValidString(domain) && utf8.ValidString(cluster)
		if (composeErr == nil) != (err == nil && named) {
			t.Fatalf("ParseBlock = %v, Compose = %v", err, composeErr)
		}
		for _, err := range []error{err, composeErr} {
			var fault *config.Error
			if err != nil && !errors.As(err, &fault) {
				t.Errorf("%T is no *config.Error: %v", err, err)
			}
		}
		if composeErr != nil {
			return
		}
		got, err := config.Parse(composed)
		if err != nil {
			t.Fatalf("Parse(Compose) = %v", err)
		}
		want := &config.Config{Version: version, Domain: domain, Cluster: cluster, Block: block}
		if diff := cmp.Diff(want, got, same); diff != "" {
			t.Errorf("Parse(Compose) (-want +got):\n%s", diff)
		}
	})
}

func ExampleParseBlock() {
	_, err := config.ParseBlock([]byte(`{"hold_bytes": "512KiB", "rules": []}`))
	fmt.Println(err)
	// Output: hold_bytes: is a string, want a number
}

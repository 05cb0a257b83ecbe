package filter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// The messages of envoy.service.ratelimit.v3 are written and read by hand: the
// generated types would add 24 MB to the module. Field numbers are those of rls.proto
// and of extensions/common/ratelimit/v3/ratelimit.proto.
const (
	requestDomain      protowire.Number = 1
	requestDescriptors protowire.Number = 2

	descriptorEntries      protowire.Number = 1
	descriptorHitsAddend   protowire.Number = 3
	descriptorNegativeHits protowire.Number = 4

	entryKey   protowire.Number = 1
	entryValue protowire.Number = 2

	uint64Value protowire.Number = 1

	responseOverallCode          protowire.Number = 1
	responseResponseHeadersToAdd protowire.Number = 3
	responseRequestHeadersToAdd  protowire.Number = 4
	responseRawBody              protowire.Number = 5
	responseDynamicMetadata      protowire.Number = 6

	headerKey      protowire.Number = 1
	headerValue    protowire.Number = 2
	headerRawValue protowire.Number = 3
)

// framePrefix is the length of a gRPC frame's prefix: a flag and a length.
const framePrefix = 5

// callHeaders are the headers of every call.
func callHeaders(authority string, timeout time.Duration) [][2]string {
	return [][2]string{
		{":method", "POST"},
		{":path", "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"},
		{":authority", authority},
		{"content-type", "application/grpc"},
		{"te", "trailers"},
		{"grpc-timeout", strconv.FormatInt(timeout.Milliseconds(), 10) + "m"},
	}
}

// receiptHeader is the metadata in which a refund brings its receipt.
const receiptHeader = "weir-receipt"

// appendRequest appends a gRPC frame with a RateLimitRequest for what g takes.
func appendRequest(b []byte, domain string, charges []charge, g *grant) []byte {
	start := len(b)
	b = beginFrame(b, domain)
	for i := range charges {
		if c := &charges[i]; g.takes(c) {
			b = appendDescriptor(b, c, g.hits(c), false)
		}
	}
	return endFrame(b, start)
}

// appendRefund does so for what is left of g. It has the same descriptors, as the receipt
// is theirs.
func appendRefund(b []byte, domain string, charges []charge, g *grant, used *usage) []byte {
	start := len(b)
	b = beginFrame(b, domain)
	for i := range charges {
		if c := &charges[i]; g.takes(c) {
			b = appendDescriptor(b, c, g.left(c, used), true)
		}
	}
	return endFrame(b, start)
}

func beginFrame(b []byte, domain string) []byte {
	b = append(b, 0, 0, 0, 0, 0)
	return appendString(b, requestDomain, domain)
}

// endFrame writes the length of the message of the frame that begins at start.
func endFrame(b []byte, start int) []byte {
	// Envoy bounds a request's headers, and config.MaxValue a value, far below 4 GiB, and
	// with them the message.
	binary.BigEndian.PutUint32(b[start+1:], uint32(len(b)-start-framePrefix)) //nolint:gosec // see above
	return b
}

// takes reports whether g has a charge's descriptor: at first all have, and later those
// that cost something more.
func (g *grant) takes(c *charge) bool { return g.first || g.hits(c) > 0 }

// hits is what g takes of a charge.
func (g *grant) hits(c *charge) int64 {
	if g.first {
		return c.price.at(g.to)
	}
	return c.price.between(g.from, g.to)
}

// left is what is to be given back of it when so much has been used: all of it, if the
// request has not even begun to go on.
func (g *grant) left(c *charge, used *usage) int64 {
	if !used.begun {
		return g.hits(c)
	}
	return c.price.between(used.or(g.from), g.to)
}

// refunds reports whether anything is to be given back.
func (g *grant) refunds(charges []charge, used *usage) bool {
	for i := range charges {
		if g.left(&charges[i], used) > 0 {
			return true
		}
	}
	return false
}

// appendDescriptor appends a descriptor. Each has its own hits_addend: 0 is a cost too,
// and on the request it would mean 1.
func appendDescriptor(b []byte, c *charge, cost int64, negative bool) []byte {
	hits := uint64(cost) //nolint:gosec // not negative
	addend := 0
	if hits != 0 {
		addend = protowire.SizeTag(uint64Value) + protowire.SizeVarint(hits)
	}
	size := protowire.SizeTag(descriptorHitsAddend) + protowire.SizeBytes(addend)
	if negative {
		size += protowire.SizeTag(descriptorNegativeHits) + protowire.SizeVarint(1)
	}
	for i, value := range c.values {
		size += protowire.SizeTag(descriptorEntries) + protowire.SizeBytes(entrySize(c.descriptor.Entries[i].Key, value))
	}

	b = appendLength(b, requestDescriptors, size)
	for i, value := range c.values {
		key := c.descriptor.Entries[i].Key
		b = appendLength(b, descriptorEntries, entrySize(key, value))
		b = appendString(b, entryKey, key)
		b = appendString(b, entryValue, value)
	}
	b = appendLength(b, descriptorHitsAddend, addend)
	if hits != 0 {
		b = protowire.AppendTag(b, uint64Value, protowire.VarintType)
		b = protowire.AppendVarint(b, hits)
	}
	if negative {
		b = protowire.AppendTag(b, descriptorNegativeHits, protowire.VarintType)
		b = protowire.AppendVarint(b, 1)
	}
	return b
}

func entrySize(key, value string) int {
	return stringSize(entryKey, key) + stringSize(entryValue, value)
}

// An empty string is left out, as proto3 does.
func stringSize(n protowire.Number, s string) int {
	if s == "" {
		return 0
	}
	return protowire.SizeTag(n) + protowire.SizeBytes(len(s))
}

func appendString(b []byte, n protowire.Number, s string) []byte {
	if s == "" {
		return b
	}
	b = protowire.AppendTag(b, n, protowire.BytesType)
	return protowire.AppendString(b, s)
}

func appendLength(b []byte, n protowire.Number, size int) []byte {
	b = protowire.AppendTag(b, n, protowire.BytesType)
	return protowire.AppendVarint(b, uint64(size)) //nolint:gosec // a size
}

// The codes of RateLimitResponse that are answers.
const (
	codeOK        = 1
	codeOverLimit = 2
)

// An answer is what the service decided.
type answer struct {
	code            int32 // codeOK or codeOverLimit
	responseHeaders [][2]string
	requestHeaders  [][2]string
	body            []byte
	receipt         []byte   // of what was charged; empty if there is nothing to give back
	shadow          []string // names of limits in shadow that would have refused
}

// A reply is what came back of a call; all its parts may be absent.
type reply struct {
	headers, trailers [][2]string
	body              []byte
}

// parse returns the service's decision, or the reason why there is none.
func (r reply) parse() (answer, error) {
	if len(r.headers) == 0 {
		return answer{}, errors.New("the answer was cut off")
	}
	if status, n := lookup(r.headers, ":status"); n != 1 || status != "200" {
		return answer{}, fmt.Errorf("the answer's HTTP status is %s", quote(status))
	}
	// Without a body, the trailers come as headers.
	from := r.trailers
	status, n := lookup(from, "grpc-status")
	if n == 0 {
		from = r.headers
		status, n = lookup(from, "grpc-status")
	}
	switch {
	case n == 0:
		return answer{}, errors.New("the answer has no grpc-status")
	case n > 1:
		return answer{}, errors.New("the answer has several values of grpc-status")
	case status != "0":
		message, _ := lookup(from, "grpc-message")
		return answer{}, fmt.Errorf("the answer's grpc-status is %s: %s", quote(status), quote(message))
	}
	message, err := unframe(r.body)
	if err != nil {
		return answer{}, err
	}
	return parseResponse(message)
}

// quote bounds what the service can put into the log.
func quote(s string) string {
	const most = 256
	if len(s) > most {
		s = s[:most]
	}
	return strconv.Quote(s)
}

// unframe returns the message of a body that is exactly one uncompressed gRPC frame.
func unframe(body []byte) ([]byte, error) {
	if len(body) < framePrefix {
		return nil, fmt.Errorf("the answer has %d bytes, which is no gRPC frame", len(body))
	}
	if body[0] != 0 {
		return nil, fmt.Errorf("the answer's frame has the flags %#x, as if compressed", body[0])
	}
	message := body[framePrefix:]
	if size := binary.BigEndian.Uint32(body[1:]); uint64(size) != uint64(len(message)) {
		return nil, fmt.Errorf("the answer's frame announces %d bytes and has %d", size, len(message))
	}
	return message, nil
}

var (
	errMalformed   = errors.New("the answer is no RateLimitResponse")
	errHeaderShape = errors.New("the answer has a header that HTTP can't carry")
)

// parseResponse reads a RateLimitResponse. As in any protobuf reader, fields that are
// not known are passed over and the last of several values counts.
func parseResponse(b []byte) (answer, error) {
	var a answer
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return answer{}, errMalformed
		}
		b = b[n:]
		size := protowire.ConsumeFieldValue(num, typ, b)
		if size < 0 {
			return answer{}, errMalformed
		}
		switch {
		case num == responseOverallCode && typ == protowire.VarintType:
			v, _ := protowire.ConsumeVarint(b)
			a.code = int32(v) //nolint:gosec // an enum's value is its low 32 bits
		case num == responseResponseHeadersToAdd && typ == protowire.BytesType:
			h, err := parseHeader(b)
			if err != nil {
				return answer{}, err
			}
			a.responseHeaders = append(a.responseHeaders, h)
		case num == responseRequestHeadersToAdd && typ == protowire.BytesType:
			h, err := parseHeader(b)
			if err != nil {
				return answer{}, err
			}
			a.requestHeaders = append(a.requestHeaders, h)
		case num == responseRawBody && typ == protowire.BytesType:
			a.body, _ = protowire.ConsumeBytes(b)
		case num == responseDynamicMetadata && typ == protowire.BytesType:
			metadata, _ := protowire.ConsumeBytes(b)
			a.receipt, a.shadow = readMetadata(metadata)
		}
		b = b[size:]
	}
	if a.code != codeOK && a.code != codeOverLimit {
		return answer{}, fmt.Errorf("the answer's overall_code is %d", a.code)
	}
	return a, nil
}

// parseHeader reads a config.core.v3.HeaderValue, length-prefixed at the start of b.
// Its name is returned in lower case.
func parseHeader(b []byte) ([2]string, error) {
	b, _ = protowire.ConsumeBytes(b)
	var key, value, raw []byte
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 {
			return [2]string{}, errMalformed
		}
		b = b[n:]
		size := protowire.ConsumeFieldValue(num, typ, b)
		if size < 0 {
			return [2]string{}, errMalformed
		}
		switch {
		case typ != protowire.BytesType:
		case num == headerKey:
			key, _ = protowire.ConsumeBytes(b)
		case num == headerValue:
			value, _ = protowire.ConsumeBytes(b)
		case num == headerRawValue:
			raw, _ = protowire.ConsumeBytes(b)
		}
		b = b[size:]
	}
	if !utf8.Valid(key) || !utf8.Valid(value) {
		return [2]string{}, errMalformed
	}
	if len(value) == 0 {
		value = raw
	}
	h := [2]string{strings.ToLower(string(key)), string(value)}
	if !validHeader(h) {
		return [2]string{}, errHeaderShape
	}
	return h, nil
}

// validHeader keeps an answer from writing a pseudo-header or a second header: Envoy
// takes what a filter gives it. The name is that of a token (RFC 9110, section 5.6.2).
func validHeader(h [2]string) bool {
	for i := range len(h[0]) {
		c := h[0][i]
		if c <= ' ' || c >= 0x7F || strings.IndexByte(`"(),/:;<=>?@[\]{}`, c) >= 0 {
			return false
		}
	}
	return h[0] != "" && !strings.ContainsAny(h[1], "\x00\r\n")
}

// Field numbers of google.protobuf.Struct, its map's entries, Value and ListValue.
const (
	structFields protowire.Number = 1
	fieldName    protowire.Number = 1
	fieldValue   protowire.Number = 2
	valueString  protowire.Number = 3
	valueStruct  protowire.Number = 5
	valueList    protowire.Number = 6
	listValues   protowire.Number = 1
)

// readMetadata takes what is ours out of an answer's dynamic metadata, the struct "weir".
// What is not as it should be is as if it were not there: it decides nothing.
func readMetadata(metadata []byte) (receipt []byte, shadow []string) {
	weir := member(metadata, "weir")
	if weir == nil {
		return nil, nil
	}
	weir = part(weir, valueStruct)
	receipt = part(member(weir, "receipt"), valueString)
	for item := range parts(part(member(weir, "shadow_denied"), valueList), listValues) {
		shadow = append(shadow, string(part(item, valueString)))
	}
	return receipt, shadow
}

// member returns a field of a google.protobuf.Struct, a Value, or nil.
func member(message []byte, name string) []byte {
	var last []byte
	for field := range parts(message, structFields) {
		if string(part(field, fieldName)) == name {
			last = part(field, fieldValue)
		}
	}
	return last
}

// part returns the last of a field's values, which are bytes.
func part(message []byte, field protowire.Number) []byte {
	var last []byte
	for value := range parts(message, field) {
		last = value
	}
	return last
}

// parts returns a field's values up to where the message is malformed.
func parts(message []byte, field protowire.Number) iter.Seq[[]byte] {
	return func(yield func([]byte) bool) {
		for len(message) > 0 {
			num, typ, n := protowire.ConsumeTag(message)
			if n < 0 {
				return
			}
			message = message[n:]
			size := protowire.ConsumeFieldValue(num, typ, message)
			if size < 0 {
				return
			}
			if num == field && typ == protowire.BytesType {
				value, _ := protowire.ConsumeBytes(message)
				if !yield(value) {
					return
				}
			}
			message = message[size:]
		}
	}
}

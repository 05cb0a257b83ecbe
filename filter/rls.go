package filter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/weir-dev/weir/filter/config"
)

// The messages of envoy.service.ratelimit.v3 are written and read by hand: the
// generated types would add 24 MB to the module. Field numbers are those of rls.proto
// and of extensions/common/ratelimit/v3/ratelimit.proto.
const (
	requestDomain      protowire.Number = 1
	requestDescriptors protowire.Number = 2

	descriptorEntries    protowire.Number = 1
	descriptorHitsAddend protowire.Number = 3

	entryKey   protowire.Number = 1
	entryValue protowire.Number = 2

	uint64Value protowire.Number = 1

	responseOverallCode          protowire.Number = 1
	responseResponseHeadersToAdd protowire.Number = 3
	responseRequestHeadersToAdd  protowire.Number = 4
	responseRawBody              protowire.Number = 5

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

// appendRequest appends a gRPC frame with a RateLimitRequest. Each descriptor has its
// own hits_addend: 0 is a cost too, and on the request it would mean 1.
func appendRequest(b []byte, domain string, charges []charge, bodyBytes uint64) []byte {
	start := len(b)
	b = append(b, 0, 0, 0, 0, 0)
	b = appendString(b, requestDomain, domain)
	for i := range charges {
		c := &charges[i]
		hits := uint64(1)
		if c.descriptor.Cost == config.CostBodyBytes {
			hits = bodyBytes
		}
		b = appendDescriptor(b, c, hits)
	}
	// Envoy bounds a request's headers far below 4 GiB, and with them the message.
	binary.BigEndian.PutUint32(b[start+1:], uint32(len(b)-start-framePrefix)) //nolint:gosec // see above
	return b
}

func appendDescriptor(b []byte, c *charge, hits uint64) []byte {
	addend := 0
	if hits != 0 {
		addend = protowire.SizeTag(uint64Value) + protowire.SizeVarint(hits)
	}
	size := protowire.SizeTag(descriptorHitsAddend) + protowire.SizeBytes(addend)
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

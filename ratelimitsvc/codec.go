package ratelimitsvc

import (
	"unicode/utf8"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec that is wrapped
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Bounds of what one connection may hold.
const (
	// maxMessage is the most bytes of a request: more than Envoy can make of a
	// client's largest headers, since what is larger is answered with an error.
	maxMessage    = 4 << 20
	maxStreams    = 1000      // requests in flight
	maxHeaderList = 128 << 10 // bytes of a request's metadata

	// clipAbove is from how many bytes on a request's lists are cut before they are
	// read: an empty descriptor takes two bytes on the wire and a hundred in memory.
	clipAbove = 16 << 10
)

// ServerOptions returns what a gRPC server that carries a [Service] must be made with.
// There are bounds on what a connection can make the server hold, and a codec that also
// reads requests whose texts are not UTF-8. Envoy's own filter copies header values into
// the protocol's strings as they are, and lets a request through when the service
// answers with an error; so a client could switch its limits off with a byte that is not
// UTF-8, if the request could not be read.
func ServerOptions() []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(codec{encoding.GetCodecV2("proto")}),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxConcurrentStreams(maxStreams),
		grpc.MaxHeaderListSize(maxHeaderList),
	}
}

// codec is gRPC's for protobuf, with a second try for what it cannot read.
type codec struct{ encoding.CodecV2 }

// Unmarshal implements [encoding.CodecV2].
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	req, ok := v.(*rlsv3.RateLimitRequest)
	if ok && data.Len() > clipAbove {
		data = mem.BufferSlice{mem.SliceBuffer(clip(data.Materialize(), descriptorsField, maxDescriptors+1, func(d []byte) []byte {
			return clip(d, entriesField, maxEntries+1, nil)
		}))}
	}
	err := c.CodecV2.Unmarshal(data, v)
	if err == nil || !ok {
		return err
	}
	repaired, ok := requestTexts.repair(data.Materialize())
	if !ok {
		return err
	}
	proto.Reset(req)
	return proto.Unmarshal(repaired, req)
}

// The lists of a request.
const (
	descriptorsField = 2
	entriesField     = 1 // of a descriptor
)

// clip returns the message without the items of a list behind the first most: enough to
// tell that they are too many. Each that stays goes through inner, if that is not nil.
// What is no message comes back as it is.
func clip(message []byte, list protowire.Number, most int, inner func([]byte) []byte) []byte {
	clipped := make([]byte, 0, len(message))
	items := 0
	for rest := message; len(rest) > 0; {
		number, kind, tagSize := protowire.ConsumeTag(rest)
		if tagSize < 0 {
			return message
		}
		size := protowire.ConsumeFieldValue(number, kind, rest[tagSize:])
		if size < 0 {
			return message
		}
		field := rest[:tagSize+size]
		rest = rest[tagSize+size:]
		if number != list || kind != protowire.BytesType {
			clipped = append(clipped, field...)
			continue
		}
		if items++; items > most {
			continue
		}
		item, _ := protowire.ConsumeBytes(field[tagSize:])
		if inner != nil {
			item = inner(item)
		}
		clipped = protowire.AppendTag(clipped, number, kind)
		clipped = protowire.AppendBytes(clipped, item)
	}
	return clipped
}

// texts names the strings of a message by field number; under a number with texts of
// its own stands a message.
type texts map[protowire.Number]texts

// requestTexts are the strings of a RateLimitRequest that a client's bytes can reach.
var requestTexts = texts{
	1: nil, // domain
	2: { // descriptors
		1: {1: nil, 2: nil}, // entries: key, value
	},
}

// repair returns the message with its texts escaped to valid UTF-8; ok is false when it is
// no message at all.
func (t texts) repair(message []byte) (repaired []byte, ok bool) {
	for len(message) > 0 {
		number, kind, tagSize := protowire.ConsumeTag(message)
		if tagSize < 0 {
			return nil, false
		}
		size := protowire.ConsumeFieldValue(number, kind, message[tagSize:])
		if size < 0 {
			return nil, false
		}
		field := message[:tagSize+size]
		message = message[tagSize+size:]
		inner, named := t[number]
		if !named || kind != protowire.BytesType {
			repaired = append(repaired, field...)
			continue
		}
		value, _ := protowire.ConsumeBytes(field[tagSize:])
		if inner == nil {
			value = escape(value)
		} else if value, ok = inner.repair(value); !ok {
			return nil, false
		}
		repaired = protowire.AppendTag(repaired, number, kind)
		repaired = protowire.AppendBytes(repaired, value)
	}
	return repaired, true
}

// Characters for private use that stand for single bytes, as in Weir's own filter: the
// same header has the same counter through either.
const (
	byteRune  = 0x10FF00
	firstRune = byteRune + 0x80
)

// escape makes a text that is not UTF-8 valid: each byte that is no part of a character
// becomes U+10FF00 plus the byte, and so do the bytes of the characters that this makes.
// So no two texts that are not valid become the same.
//
// A text that is valid stays as it is, since Weir's filter has escaped what it sends. So
// one that holds those private characters itself (U+10FFFF) is the same as the bytes that
// they stand for (\xff): whoever can send the one as a value can send the other, so that
// nobody gets at a counter that was out of reach.
func escape(text []byte) []byte {
	if utf8.Valid(text) {
		return text
	}
	escaped := make([]byte, 0, len(text)+3*utf8.UTFMax)
	for len(text) > 0 {
		r, n := utf8.DecodeRune(text)
		if r == utf8.RuneError && n == 1 || r >= firstRune {
			for _, b := range text[:n] {
				escaped = utf8.AppendRune(escaped, byteRune+rune(b))
			}
		} else {
			escaped = append(escaped, text[:n]...)
		}
		text = text[n:]
	}
	return escaped
}

package extract

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"strconv"
	"strings"
	"unicode/utf8"
)

var (
	errNotMessage = errors.New("is not a protobuf message, or is cut short")
	errWireType   = errors.New("is on the wire as another type than the rule says")
	errNotUTF8    = errors.New("is not UTF-8")
	errGroups     = errors.New("has groups that are nested more than 64 deep")
)

// A Field says where in a protobuf message a value is: the number of its field, after
// the numbers of the fields that hold the messages around it. The zero Field is
// nowhere.
type Field struct {
	text    string
	numbers []uint32
}

const (
	maxPath       = 16 // field numbers
	maxField      = 1<<29 - 1
	firstReserved = 19000 // for protobuf itself, up to the last
	lastReserved  = 19999
)

// ParseField reads a field's path: "7", "3.1.2". It has 1 to 16 numbers from 1 to
// 2^29-1 in decimal digits, without those from 19000 to 19999.
func ParseField(text string) (Field, error) {
	parts := strings.Split(text, ".")
	if len(parts) > maxPath {
		return Field{}, errors.New("has more than 16 field numbers")
	}
	numbers := make([]uint32, len(parts))
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, 32)
		if err != nil || part[0] == '0' || n > maxField || firstReserved <= n && n <= lastReserved {
			return Field{}, errors.New("has no field number in " + strconv.Quote(part) +
				": it is from 1 to 536870911, but not from 19000 to 19999")
		}
		numbers[i] = uint32(n)
	}
	return Field{text: text, numbers: numbers}, nil
}

// String returns the text that f was read from.
func (f Field) String() string { return f.text }

// Encoding is a field's type, without which its bytes don't tell their value.
type Encoding uint8

// The encodings, each called as the type is in a .proto file.
const (
	EncodingString Encoding = iota // UTF-8
	EncodingBytes                  // becomes lower-case hexadecimal digits
	EncodingBool                   // becomes true or false
	EncodingInt32                  // also for an enum, by its number
	EncodingInt64
	EncodingUint32
	EncodingUint64
	EncodingSint32
	EncodingSint64
	EncodingFixed32
	EncodingFixed64
	EncodingSfixed32
	EncodingSfixed64
)

// encodings has each one's name and how it is on the wire.
var encodings = [...]struct {
	name string
	wire wireType
}{
	EncodingString:   {"string", delimited},
	EncodingBytes:    {"bytes", delimited},
	EncodingBool:     {"bool", varint},
	EncodingInt32:    {"int32", varint},
	EncodingInt64:    {"int64", varint},
	EncodingUint32:   {"uint32", varint},
	EncodingUint64:   {"uint64", varint},
	EncodingSint32:   {"sint32", varint},
	EncodingSint64:   {"sint64", varint},
	EncodingFixed32:  {"fixed32", fixed32},
	EncodingFixed64:  {"fixed64", fixed64},
	EncodingSfixed32: {"sfixed32", fixed32},
	EncodingSfixed64: {"sfixed64", fixed64},
}

// ParseEncoding returns the encoding whose String is text.
func ParseEncoding(text string) (Encoding, bool) {
	for e := range encodings {
		if encodings[e].name == text {
			return Encoding(e), true
		}
	}
	return 0, false
}

// Encodings returns the names of all encodings.
func Encodings() []string {
	names := make([]string, len(encodings))
	for e := range encodings {
		names[e] = encodings[e].name
	}
	return names
}

// String returns e's name in .proto files, and "unknown" if it is none of the above.
func (e Encoding) String() string {
	if int(e) >= len(encodings) {
		return "unknown"
	}
	return encodings[e].name
}

// Read returns the value of f in msg, numbers in decimal digits. It returns
// [ErrAbsent] if it isn't there: a zero that is on the wire is there, though to a
// server it may be the same.
//
// As protobuf tells parsers to, it takes the last of several values, looks for it in
// all pieces of a message that comes in several, cuts an int32 or the like down to 32
// bits, and steps over other fields. A field on the way that has another type on the
// wire is an error, and so is a string with a NUL, at which some servers end it.
//
// The message's schema is not known here. So of a repeated field it is the last value
// too, packed ones are an error, and a field of a oneof is there even if the server
// drops it for another one of the oneof that follows.
func (f Field) Read(msg []byte, enc Encoding) (string, error) {
	if len(f.numbers) == 0 || int(enc) >= len(encodings) {
		return "", ErrAbsent
	}
	l := lookup{wire: encodings[enc].wire}
	if err := l.message(msg, f.numbers); err != nil {
		return "", err
	}
	if !l.found {
		return "", ErrAbsent
	}
	return enc.text(l.last)
}

// text returns v's value as text.
//
//nolint:gosec // G115: the bits are what they are, and protobuf asks for the cuts
func (e Encoding) text(v record) (string, error) {
	switch e {
	case EncodingString:
		return protoString(v.bytes)
	case EncodingBytes:
		return hex.EncodeToString(v.bytes), nil
	case EncodingBool:
		return strconv.FormatBool(v.bits != 0), nil
	case EncodingInt32, EncodingSfixed32:
		return strconv.FormatInt(int64(int32(v.bits)), 10), nil
	case EncodingInt64, EncodingSfixed64:
		return strconv.FormatInt(int64(v.bits), 10), nil
	case EncodingUint32, EncodingFixed32:
		return strconv.FormatUint(uint64(uint32(v.bits)), 10), nil
	case EncodingUint64, EncodingFixed64:
		return strconv.FormatUint(v.bits, 10), nil
	case EncodingSint32:
		bits := uint32(v.bits)
		return strconv.FormatInt(int64(int32(bits>>1)^-int32(bits&1)), 10), nil
	case EncodingSint64:
		return strconv.FormatInt(int64(v.bits>>1)^-int64(v.bits&1), 10), nil
	}
	return "", ErrAbsent
}

func protoString(b []byte) (string, error) {
	switch {
	case !utf8.Valid(b):
		return "", errNotUTF8
	case bytes.IndexByte(b, 0) >= 0:
		return "", errNUL
	}
	return string(b), nil
}

// A lookup finds the last value of a field.
type lookup struct {
	wire  wireType // that it must have
	last  record
	found bool
}

// message reads a message, or a piece of one, from which path leads to the field.
func (l *lookup) message(msg []byte, path []uint32) error {
	for len(msg) > 0 {
		r, rest, ok := readRecord(msg)
		if !ok {
			return errNotMessage
		}
		msg = rest
		switch {
		case r.number == path[0] && len(path) > 1:
			if r.wire != delimited {
				return errWireType
			}
			if err := l.message(r.bytes, path[1:]); err != nil {
				return err
			}
		case r.number == path[0]:
			if r.wire != l.wire {
				return errWireType
			}
			l.last, l.found = r, true
		case r.wire == startGroup:
			var err error
			if msg, err = skipGroup(msg, r.number); err != nil {
				return err
			}
		case r.wire == endGroup:
			return errNotMessage
		}
	}
	return nil
}

// skipGroup returns what follows the group called number, whose start has been read.
func skipGroup(msg []byte, number uint32) ([]byte, error) {
	var open [maxDepth]uint32
	open[0] = number
	for depth := 1; depth > 0; {
		r, rest, ok := readRecord(msg)
		if !ok {
			return nil, errNotMessage
		}
		msg = rest
		switch {
		case r.wire == startGroup && depth == maxDepth:
			return nil, errGroups
		case r.wire == startGroup:
			open[depth] = r.number
			depth++
		case r.wire == endGroup:
			if depth--; open[depth] != r.number {
				return nil, errNotMessage
			}
		}
	}
	return msg, nil
}

// wireType says how long a record is.
type wireType uint8

const (
	varint     wireType = 0
	fixed64    wireType = 1
	delimited  wireType = 2
	startGroup wireType = 3
	endGroup   wireType = 4
	fixed32    wireType = 5
)

// A record is one field on the wire, or where a group starts or ends.
type record struct {
	number uint32
	wire   wireType
	bits   uint64 // of a varint or a fixed
	bytes  []byte // of what is delimited
}

// readRecord returns the record at the start of msg, and what follows it. A varint of more
// than 64 bits is malformed: readers differ in which of the bits they drop.
func readRecord(msg []byte) (r record, rest []byte, ok bool) {
	tag, n := binary.Uvarint(msg)
	if n <= 0 || tag>>3 == 0 || tag>>3 > maxField {
		return record{}, nil, false
	}
	r = record{number: uint32(tag >> 3), wire: wireType(tag & 7)}
	rest = msg[n:]
	switch r.wire {
	case startGroup, endGroup:
		return r, rest, true
	case fixed32:
		if len(rest) < 4 {
			return record{}, nil, false
		}
		r.bits = uint64(binary.LittleEndian.Uint32(rest))
		return r, rest[4:], true
	case fixed64:
		if len(rest) < 8 {
			return record{}, nil, false
		}
		r.bits = binary.LittleEndian.Uint64(rest)
		return r, rest[8:], true
	case varint, delimited:
		if r.bits, n = binary.Uvarint(rest); n <= 0 {
			return record{}, nil, false
		}
		rest = rest[n:]
		if r.wire == varint {
			return r, rest, true
		}
		if r.bits > uint64(len(rest)) {
			return record{}, nil, false
		}
		r.bytes = rest[:r.bits]
		return r, rest[r.bits:], true
	}
	return record{}, nil, false
}

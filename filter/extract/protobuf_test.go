package extract_test

import (
	"encoding/hex"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"

	"github.com/weir-dev/weir/filter/extract"
)

const (
	notMessage = "is not a protobuf message, or is cut short"
	wireType   = "is on the wire as another type than the rule says"
	notUTF8    = "is not UTF-8"
	groups     = "has groups that are nested more than 64 deep"
)

// field reads a path that is right.
func field(tb testing.TB, text string) extract.Field {
	tb.Helper()

	f, err := extract.ParseField(text)
	if err != nil {
		tb.Fatalf("ParseField(%q): %v", text, err)
	}
	return f
}

func TestParseField(t *testing.T) {
	t.Parallel()

	for _, text := range []string{"1", "3.1.2", "18999.20000.536870911", "1" + strings.Repeat(".1", 15)} {
		if f, err := extract.ParseField(text); err != nil || f.String() != text {
			t.Errorf("ParseField(%q) = %q, %v", text, f, err)
		}
	}
	for text, want := range map[string]string{
		"": `""`, ".": `""`, "1.": `""`, ".1": `""`, "1..2": `""`, "0": `"0"`, "01": `"01"`, "-1": `"-1"`, "+1": `"+1"`,
		"1\x20": `"1 "`, "a": `"a"`, "1.0x2": `"0x2"`, "1_0": `"1_0"`, "536870912": `"536870912"`, "19000": `"19000"`,
		"1.19999": `"19999"`, "99999999999999999999": `"99999999999999999999"`, "1/2": `"1/2"`,
		"1" + strings.Repeat(".1", 16): "more than 16",
	} {
		if f, err := extract.ParseField(text); err == nil || !strings.Contains(err.Error(), want) || f.String() != "" {
			t.Errorf("ParseField(%q) = %q, %v; want an error with %s", text, f, err, want)
		}
	}
}

func TestEncodings(t *testing.T) {
	t.Parallel()

	for _, enc := range allEncodings {
		if got, ok := extract.ParseEncoding(enc.String()); got != enc || !ok {
			t.Errorf("ParseEncoding(%q) = %v, %v", enc, got, ok)
		}
	}
	for _, text := range []string{"", "unknown", "String", "varint", "float", "double", "message", "enum", "int32 "} {
		if got, ok := extract.ParseEncoding(text); ok {
			t.Errorf("ParseEncoding(%q) = %v", text, got)
		}
	}
	none := extract.Encoding(len(allEncodings))
	if got := none.String(); got != "unknown" {
		t.Errorf("the encoding after the last is %q", got)
	}
	if got := outcome(field(t, "1").Read([]byte{8, 1}, none)); got != absent {
		t.Errorf("Read as the encoding after the last = %s", got)
	}
	if got := outcome(extract.Field{}.Read([]byte{8, 1}, extract.EncodingBool)); got != absent {
		t.Errorf("Read of the zero Field = %s", got)
	}
}

// The parts of messages on the wire.
func varint(number protowire.Number, v uint64) string {
	return string(protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.VarintType), v))
}

func fixed32(number protowire.Number, v uint32) string {
	return string(protowire.AppendFixed32(protowire.AppendTag(nil, number, protowire.Fixed32Type), v))
}

func fixed64(number protowire.Number, v uint64) string {
	return string(protowire.AppendFixed64(protowire.AppendTag(nil, number, protowire.Fixed64Type), v))
}

func delimited(number protowire.Number, content string) string {
	return string(protowire.AppendString(protowire.AppendTag(nil, number, protowire.BytesType), content))
}

func group(number protowire.Number, content string) string {
	return string(protowire.AppendGroup(protowire.AppendTag(nil, number, protowire.StartGroupType), number, []byte(content)))
}

func TestFieldReadEncodings(t *testing.T) {
	t.Parallel()

	const minusOne = 1<<64 - 1
	for _, tc := range []struct {
		msg  string
		enc  extract.Encoding
		want string
	}{
		{delimited(1, "acme"), extract.EncodingString, `"acme"`},
		{delimited(1, ""), extract.EncodingString, `""`},
		{delimited(1, "é😀"), extract.EncodingString, `"é😀"`},
		{delimited(1, "\xff"), extract.EncodingString, notUTF8},
		{delimited(1, "\xed\xa0\x80"), extract.EncodingString, notUTF8},
		{delimited(1, "a\x00b"), extract.EncodingString, hasNUL},
		{delimited(1, "\x00\xABz"), extract.EncodingBytes, `"00ab7a"`},
		{delimited(1, ""), extract.EncodingBytes, `""`},

		{varint(1, 0), extract.EncodingBool, `"false"`},
		{varint(1, 1), extract.EncodingBool, `"true"`},
		{varint(1, 1<<40), extract.EncodingBool, `"true"`},
		{"\x08\x80\x00", extract.EncodingBool, `"false"`},

		// What is longer is cut down, as by every parser.
		{varint(1, 5), extract.EncodingInt32, `"5"`},
		{varint(1, 1<<32+5), extract.EncodingInt32, `"5"`},
		{varint(1, minusOne), extract.EncodingInt32, `"-1"`},
		{varint(1, 1<<32-1), extract.EncodingInt32, `"-1"`},
		{varint(1, 1<<31), extract.EncodingInt32, `"-2147483648"`},
		{varint(1, 1<<32+5), extract.EncodingUint32, `"5"`},
		{varint(1, minusOne), extract.EncodingUint32, `"4294967295"`},
		{varint(1, 1<<32+3), extract.EncodingSint32, `"-2"`},
		{varint(1, 4), extract.EncodingSint32, `"2"`},
		{varint(1, 1<<32-1), extract.EncodingSint32, `"-2147483648"`},

		{varint(1, 1<<32+5), extract.EncodingInt64, `"4294967301"`},
		{varint(1, minusOne), extract.EncodingInt64, `"-1"`},
		{varint(1, 1<<63), extract.EncodingInt64, `"-9223372036854775808"`},
		{varint(1, minusOne), extract.EncodingUint64, `"18446744073709551615"`},
		{varint(1, 1<<32+3), extract.EncodingSint64, `"-2147483650"`},
		{varint(1, minusOne), extract.EncodingSint64, `"-9223372036854775808"`},
		{varint(1, minusOne-1), extract.EncodingSint64, `"9223372036854775807"`},

		{fixed32(1, 1<<32-1), extract.EncodingFixed32, `"4294967295"`},
		{fixed32(1, 1<<32-1), extract.EncodingSfixed32, `"-1"`},
		{fixed64(1, minusOne), extract.EncodingFixed64, `"18446744073709551615"`},
		{fixed64(1, minusOne), extract.EncodingSfixed64, `"-1"`},

		// Longer than need be, but not than 64 bits.
		{"\x08\x85\x80\x80\x80\x80\x80\x80\x80\x80\x00", extract.EncodingInt64, `"5"`},
		{"\x88\x80\x80\x80\x00\x05", extract.EncodingInt64, `"5"`},
		{"\x08\x85\x80\x80\x80\x80\x80\x80\x80\x80\x02", extract.EncodingInt64, notMessage},
		{"\x08\x85\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00", extract.EncodingInt64, notMessage},
		{"\x88\x80\x80\x80\x80\x01\x05", extract.EncodingInt64, notMessage}, // a tag of more than 32 bits
	} {
		if got := outcome(field(t, "1").Read([]byte(tc.msg), tc.enc)); got != tc.want {
			t.Errorf("Read(%x as %s) = %s, want %s", tc.msg, tc.enc, got, tc.want)
		}
	}
}

func TestFieldRead(t *testing.T) {
	t.Parallel()

	deep := func(depth int, inner string) string {
		for range depth {
			inner = group(30, inner)
		}
		return inner
	}
	others := varint(2, 7) + fixed32(3, 7) + fixed64(4, 7) + delimited(5, "\xff") + group(6, group(6, "")+varint(1, 9)) + varint(1<<29-1, 1)
	for _, tc := range []struct {
		name, msg, path, want string // of an int32
	}{
		{"after others", others + varint(1, 5), "1", `"5"`},
		{"before others", varint(1, 5) + others, "1", `"5"`},
		{"highest number", others, "536870911", `"1"`},
		{"reserved number beside it", varint(19000, 1) + varint(1, 5), "1", `"5"`},
		{"empty message", "", "1", absent},
		{"others only", others, "1", absent},
		{"in a message", delimited(3, varint(1, 5)), "3.1", `"5"`},
		{"in messages", delimited(3, delimited(1, varint(2, 5))), "3.1.2", `"5"`},
		{"empty on the way", delimited(3, ""), "3.1", absent},
		{"elsewhere", delimited(4, varint(1, 5)) + varint(1, 6), "3.1", absent},
		{"in a group only", group(4, varint(1, 5)), "1", absent},

		{"last one wins", varint(1, 5) + varint(1, 6), "1", `"6"`},
		{"zero wins", varint(1, 5) + varint(1, 0), "1", `"0"`},
		{"messages merge", delimited(3, varint(1, 5)) + delimited(3, varint(2, 6)), "3.1", `"5"`},
		{"last of those that merge", delimited(3, varint(1, 5)) + delimited(3, varint(1, 6)) + delimited(3, ""), "3.1", `"6"`},

		{"another type", fixed32(1, 5), "1", wireType},
		{"another type too", varint(1, 5) + delimited(1, "\x05"), "1", wireType}, // as a packed one would be
		{"a group", group(1, ""), "1", wireType},
		{"a group's end", "\x0c", "1", wireType},
		{"no message on the way", varint(3, 5), "3.1", wireType},
		{"a group on the way", group(3, varint(1, 5)), "3.1", wireType},

		{"number zero", "\x00\x05", "1", notMessage},
		{"number too high", "\x80\x80\x80\x80\x10\x05" + varint(1, 5), "1", notMessage},
		{"wire type 6", "\x16\x05" + varint(1, 5), "1", notMessage},
		{"wire type 7", varint(1, 5) + "\x17", "1", notMessage},
		{"no varint", "\x08", "1", notMessage},
		{"half a varint", "\x08\x80", "1", notMessage},
		{"half a tag", varint(1, 5) + "\x80", "1", notMessage},
		{"short fixed32", varint(1, 5) + "\x1d\x01\x02\x03", "1", notMessage},
		{"short fixed64", varint(1, 5) + "\x21\x01\x02\x03\x04\x05\x06\x07", "1", notMessage},
		{"short bytes", varint(1, 5) + "\x2a\x02x", "1", notMessage},
		{"no length", varint(1, 5) + "\x2a", "1", notMessage},
		{"vast length", varint(1, 5) + "\x2a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", "1", notMessage},
		{"length of more than 32 bits", "\x2a\x80\x80\x80\x80\x10" + varint(1, 5), "1", notMessage},
		{"malformed on the way", delimited(3, varint(1, 5)+"\x08"), "3.1", notMessage},
		{"malformed off the way", delimited(4, "\x08") + delimited(3, varint(1, 5)), "3.1", `"5"`},
		{"group that ends nowhere", varint(1, 5) + "\x33", "1", notMessage},
		{"group that ends twice", varint(1, 5) + group(6, "") + "\x34", "1", notMessage},
		{"group that ends as another", "\x33\x3c" + varint(1, 5), "1", notMessage},
		{"groups that cross", "\x33\x3b\x34\x3c" + varint(1, 5), "1", notMessage},
		{"malformed in a group", group(6, "\x08") + varint(1, 5), "1", notMessage},
		{"message that ends a group outside", "\x1b" + delimited(3, "\x1c"), "3.1", wireType},

		{"64 groups", deep(64, varint(1, 6)) + varint(1, 5), "1", `"5"`},
		{"65 groups", deep(65, "") + varint(1, 5), "1", groups},
		{"many groups", strings.Repeat("\x33", 1<<20), "1", groups},
		{"many groups in a row", strings.Repeat("\x33\x34", 1<<16) + varint(1, 5), "1", `"5"`},
	} {
		if got := outcome(field(t, tc.path).Read([]byte(tc.msg), extract.EncodingInt32)); got != tc.want {
			t.Errorf("%s: Read(%.40x, %s) = %s, want %s", tc.name, tc.msg, tc.path, got, tc.want)
		}
	}
}

// The value's text is all that is allocated.
func TestC85FieldAllocations(t *testing.T) {
	msg := []byte(strings.Repeat(delimited(3, delimited(1, "acme"))+group(6, varint(1, 1)), 2000))
	f := field(t, "3.1")
	if got := testing.AllocsPerRun(10, func() { _, _ = f.Read(msg, extract.EncodingString) }); got > 1 {
		t.Errorf("Read allocates %v times, want once", got)
	}
}

// nested is the number of the field of the tests' message that holds the same again.
const nested = 20

// allEncodings are the types of the fields 1 to 13 of the tests' message.
var allEncodings = []extract.Encoding{
	extract.EncodingString, extract.EncodingBytes, extract.EncodingBool,
	extract.EncodingInt32, extract.EncodingInt64, extract.EncodingUint32, extract.EncodingUint64,
	extract.EncodingSint32, extract.EncodingSint64, extract.EncodingFixed32, extract.EncodingFixed64,
	extract.EncodingSfixed32, extract.EncodingSfixed64,
}

// messageType is a message that has a field of each encoding, in proto2, where all of
// them tell whether they are there.
func messageType(tb testing.TB) protoreflect.MessageDescriptor {
	tb.Helper()

	message := &descriptorpb.DescriptorProto{Name: new("Message")}
	field := func(name string, number int32, kind descriptorpb.FieldDescriptorProto_Type) *descriptorpb.FieldDescriptorProto {
		f := &descriptorpb.FieldDescriptorProto{
			Name: new(name), Number: new(number), Type: kind.Enum(),
			Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
		}
		message.Field = append(message.Field, f)
		return f
	}
	for i, enc := range allEncodings {
		kind := descriptorpb.FieldDescriptorProto_Type_value["TYPE_"+strings.ToUpper(enc.String())]
		field("f"+strconv.Itoa(i), int32(i+1), descriptorpb.FieldDescriptorProto_Type(kind))
	}
	field("nested", nested, descriptorpb.FieldDescriptorProto_TYPE_MESSAGE).TypeName = new(".test.Message")
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: new("test.proto"), Package: new("test"), Syntax: new("proto2"),
		MessageType: []*descriptorpb.DescriptorProto{message},
	}, nil)
	if err != nil {
		tb.Fatal(err)
	}
	return file.Messages().Get(0)
}

// text returns a field's value as Read writes it.
func text(v protoreflect.Value) string {
	if b, ok := v.Interface().([]byte); ok {
		return hex.EncodeToString(b)
	}
	return v.String()
}

// What protobuf's own parser reads is read here, and nothing else.
func FuzzFieldRead(f *testing.F) {
	descriptor := messageType(f)
	for i, enc := range allEncodings {
		m := dynamicpb.NewMessage(descriptor)
		inner := m.Mutable(descriptor.Fields().ByName("nested")).Message()
		if enc == extract.EncodingString {
			inner.Set(descriptor.Fields().Get(i), protoreflect.ValueOfString("acme"))
		}
		msg, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(msg, uint8(enc), uint8(1))
		number := protowire.Number(i + 1)
		for _, v := range []uint64{0, 5, 1<<32 + 5, 1<<64 - 1} {
			value := protowire.AppendVarint(protowire.AppendTag(nil, number, protowire.VarintType), v)
			value = protowire.AppendVarint(protowire.AppendTag(value, nested, protowire.VarintType), 1)
			f.Add(value, uint8(enc), uint8(0))
		}
		fixed := protowire.AppendFixed32(protowire.AppendTag(nil, number, protowire.Fixed32Type), 1<<31)
		f.Add(fixed, uint8(enc), uint8(0))
		fixed = protowire.AppendFixed64(protowire.AppendTag(nil, number, protowire.Fixed64Type), 1<<63)
		f.Add(protowire.AppendGroup(protowire.AppendTag(fixed, 30, protowire.StartGroupType), 30, fixed), uint8(enc), uint8(0))
		f.Add(protowire.AppendBytes(protowire.AppendTag(nil, number, protowire.BytesType), []byte("\xff")), uint8(enc), uint8(0))
	}
	f.Fuzz(func(t *testing.T, msg []byte, encoding, depth uint8) {
		index := int(encoding) % len(allEncodings)
		enc := allEncodings[index]
		depth %= 4
		path, err := extract.ParseField(strings.Repeat(strconv.Itoa(nested)+".", int(depth)) + strconv.Itoa(index+1))
		if err != nil {
			t.Fatal(err)
		}
		got, err := path.Read(msg, enc)

		m := dynamicpb.NewMessage(descriptor)
		if unmarshalErr := proto.Unmarshal(msg, m); unmarshalErr != nil {
			// Messages off the way are not looked into, but all on it are.
			if _, _, n := protowire.ConsumeField(msg); n < 0 && outcome(got, err) == absent {
				t.Errorf("Read(%x, %s) = %v, though it begins with %v", msg, path, err, protowire.ParseError(n))
			}
			return
		}
		var at protoreflect.Message = m
		for range depth {
			at = at.Get(descriptor.Fields().ByNumber(nested)).Message()
		}
		field := descriptor.Fields().Get(index)
		value := text(at.Get(field))
		switch result := outcome(got, err); result {
		case absent:
			if at.Has(field) {
				t.Errorf("Read(%x, %s as %s) = absent, want %q", msg, path, enc, value)
			}
		case "is on the wire as another type than the rule says", "has groups that are nested more than 64 deep":
		case "is not UTF-8":
			if utf8.ValidString(at.Get(field).String()) {
				t.Errorf("Read(%x, %s as %s) = %s, but it is %q", msg, path, enc, result, value)
			}
		case "has a NUL character, at which some servers end the text":
			if !strings.Contains(value, "\x00") {
				t.Errorf("Read(%x, %s as %s) = %s, but it is %q", msg, path, enc, result, value)
			}
		case strconv.Quote(value):
			if !at.Has(field) {
				t.Errorf("Read(%x, %s as %s) = %q, want absent", msg, path, enc, got)
			}
		default:
			t.Errorf("Read(%x, %s as %s) = %s, want %q (there: %v)", msg, path, enc, result, value, at.Has(field))
		}
	})
}

// A path is read as it is written, and only in one spelling.
func FuzzField(f *testing.F) {
	for _, s := range []string{"1", "3.1.2", "536870911", "536870912", "19000", "20000", "01", "+1", "1.", ".", "", "1_0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := extract.ParseField(s)
		ok := strings.Count(s, ".") < 16
		for part := range strings.SplitSeq(s, ".") {
			n, err := strconv.Atoi(part)
			ok = ok && err == nil && strconv.Itoa(n) == part && protowire.Number(n).IsValid() && n <= 1<<29-1 &&
				(n < int(protowire.FirstReservedNumber) || n > int(protowire.LastReservedNumber))
		}
		if (err == nil) != ok {
			t.Fatalf("ParseField(%q) = %v, want ok: %v", s, err, ok)
		}
		if ok && got.String() != s || !ok && got.String() != "" {
			t.Errorf("ParseField(%q).String() = %q", s, got)
		}
	})
}

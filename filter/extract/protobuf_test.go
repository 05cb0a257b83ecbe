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

	message := &descriptorpb.DescriptorProto{Name: proto.String("Message")}
	field := func(name string, number int32, kind descriptorpb.FieldDescriptorProto_Type) *descriptorpb.FieldDescriptorProto {
		f := &descriptorpb.FieldDescriptorProto{
			Name: proto.String(name), Number: proto.Int32(number), Type: kind.Enum(),
			Label: descriptorpb.FieldDescriptorProto_LABEL_OPTIONAL.Enum(),
		}
		message.Field = append(message.Field, f)
		return f
	}
	for i, enc := range allEncodings {
		kind := descriptorpb.FieldDescriptorProto_Type_value["TYPE_"+strings.ToUpper(enc.String())]
		field("f"+strconv.Itoa(i), int32(i+1), descriptorpb.FieldDescriptorProto_Type(kind))
	}
	field("nested", nested, descriptorpb.FieldDescriptorProto_TYPE_MESSAGE).TypeName = proto.String(".test.Message")
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("test.proto"), Package: proto.String("test"), Syntax: proto.String("proto2"),
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
		field := descriptor.Fields().Get(i)
		switch field.Kind() {
		case protoreflect.StringKind:
			inner.Set(field, protoreflect.ValueOfString("acme"))
		case protoreflect.BytesKind:
			inner.Set(field, protoreflect.ValueOfBytes([]byte{0, 0xFF}))
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

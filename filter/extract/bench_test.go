package extract_test

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

// BenchmarkExtract takes one value from each source as requests have them.
func BenchmarkExtract(b *testing.B) {
	headers := [][2]string{
		{":method", "POST"},
		{":path", "/v1/tenants/acme/jobs?limit=10&cursor=abc"},
		{":authority", "API.example.com:8443"},
		{"user-agent", "curl/8.9"},
		{"accept", "*/*"},
		{"cookie", "theme=dark; session=0189d0a87f3b; lang=en"},
		{"x-forwarded-for", "10.1.2.3"},
		{"x-tenant", "acme"},
		{"content-type", "application/json"},
	}
	target := headers[1][1]
	path := extract.PathOf(target)
	tenants := pattern(b, "/v1/tenants/{tenant}/**")
	message := []byte(delimited(2, strings.Repeat("x", 200)) + delimited(3, varint(1, 42)+delimited(2, "acme")))
	id, tokens := field(b, "3.2"), field(b, "3.1")
	packed := compressed(b, chat(20))
	body := append(frame(0, string(message)), frame(0, "x")...)

	for _, bc := range []struct {
		name string
		do   func() error
	}{
		{"header", func() error { return second(extract.Header(headers, "x-tenant")) }},
		{"segment", func() error { return second(extract.Segment(path, 3)) }},
		{"prefix", func() error { return second(extract.Prefix(path, 3)) }},
		{"prefix_escaped", func() error { return second(extract.Prefix("/v1/tenants/a%20b/jobs", 3)) }},
		{"pattern", func() error { return second(tenants.Part(path, "tenant")) }},
		{"query", func() error { return second(extract.Query(target, "cursor")) }},
		{"cookie", func() error { return second(extract.Cookie(headers, "session")) }},
		{"host", func() error { return second(extract.Host(headers[2][1])) }},
		{"address", func() error { return second(extract.Address("10.1.2.3:4567", extract.Masks{IPv4: 24, IPv6: 56})) }},
		{"protobuf_string", func() error { return second(id.Read(message, extract.EncodingString)) }},
		{"protobuf_int64", func() error { return second(tokens.Read(message, extract.EncodingInt64)) }},
		{"first_message", func() error {
			_, _, _, err := extract.FirstMessage(body, 1<<20)
			return err
		}},
		{"gunzip", func() error { return secondOf(extract.Gunzip(packed, 1<<20)) }},
	} {
		b.Run(bc.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := bc.do(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// chat is a document as a language model's clients send it, with so many messages.
func chat(messages int) []byte {
	const message = `{"role":"user","content":"Caf\u00e9 \"Weir\": how many litres a second, and — since when?"}`
	return []byte(`{"model":"m","messages":[` + strings.Repeat(message+",", messages-1) + message +
		`],"usage":{"total_tokens":4200},"user":"acme"}`)
}

// BenchmarkJSON reads a number behind much else, beside what encoding/json takes to
// check the same.
func BenchmarkJSON(b *testing.B) {
	tokens := pointer(b, "/usage/total_tokens")
	for _, messages := range []int{20, 2000} {
		doc := chat(messages)
		name := strconv.Itoa(messages) + "_messages"
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(doc)))
			for b.Loop() {
				if _, err := extract.JSON(doc, tokens); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+"_encoding_json", func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(doc)))
			for b.Loop() {
				if !json.Valid(doc) {
					b.Fatal("is not valid")
				}
			}
		})
	}
}

// BenchmarkFrames counts messages of so many bytes that come in chunks of 16 KiB.
func BenchmarkFrames(b *testing.B) {
	for _, size := range []int{0, 100, 100_000} {
		stream := []byte(strings.Repeat(string(frame(0, strings.Repeat("x", size))), 1<<20/(size+5)))
		b.Run(strconv.Itoa(size), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(stream)))
			for b.Loop() {
				var f extract.Frames
				for rest := stream; len(rest) > 0; {
					chunk := rest[:min(len(rest), 16<<10)]
					rest = rest[len(chunk):]
					err := f.Next(len(chunk), func(offset, n int) ([]byte, error) { return chunk[offset : offset+n], nil })
					if err != nil {
						b.Fatal(err)
					}
				}
				if !f.Whole() {
					b.Fatal("is not whole")
				}
			}
		})
	}
}

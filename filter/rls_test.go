package filter

import (
	"bytes"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/weir-dev/weir/filter/config"
)

// Byte for byte what the generated types would send.
func TestAppendRequest(t *testing.T) {
	t.Parallel()

	type entry struct{ key, value string }
	type descriptor struct {
		price   price
		entries []entry
	}
	long := strings.Repeat("x", 300)
	for _, tc := range []struct {
		name        string
		domain      string
		bodyBytes   int64
		descriptors []descriptor
	}{
		{"one", "ingest", 0, []descriptor{{price{fixed: 1}, []entry{{"consumer", "acme"}}}}},
		{"an explicit zero", "ingest", 0, []descriptor{{price{perByte: 1}, []entry{{"node", "n"}}}}},
		{"an empty value", "ingest", 1, []descriptor{{price{perByte: 1}, []entry{{"node", ""}}}}},
		{"the largest cost", "d", math.MaxInt64, []descriptor{{price{perByte: 1}, []entry{{"node", "n"}}}}},
		{"several of several", "d", 1 << 35, []descriptor{
			{price{perByte: 1}, []entry{{"a", "1"}, {"b", long}, {long, "3"}}},
			{price{fixed: 1}, []entry{{"c", "\U0010FFC0"}}},
		}},
		{"none", "d", 1, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			var charges []charge
			want := &rlsv3.RateLimitRequest{Domain: tc.domain}
			for _, d := range tc.descriptors {
				c := charge{descriptor: &config.Descriptor{}, price: d.price}
				hits := uint64(min(d.price.fixed+d.price.perByte*tc.bodyBytes, 1<<53+1))
				var keysAndValues []string
				for _, e := range d.entries {
					c.descriptor.Entries = append(c.descriptor.Entries, config.Entry{Key: e.key})
					c.values = append(c.values, e.value)
					keysAndValues = append(keysAndValues, e.key, e.value)
				}
				charges = append(charges, c)
				want.Descriptors = append(want.Descriptors, desc(hits, keysAndValues...))
			}
			message, err := proto.MarshalOptions{Deterministic: true}.Marshal(want)
			if err != nil {
				t.Fatal(err)
			}
			got := appendRequest([]byte("before"), tc.domain, charges, &grant{first: true, to: units{bytes: tc.bodyBytes}})
			if want := append([]byte("before"), frame(message)...); !bytes.Equal(got, want) {
				t.Errorf("appendRequest\n got %q\nwant %q", got, want)
			}
		})
	}
}

func TestCallHeaders(t *testing.T) {
	t.Parallel()

	for timeout, want := range map[time.Duration]string{
		time.Millisecond: "1m", 250 * time.Millisecond: "250m", 1500 * time.Microsecond: "1m", time.Minute: "60000m",
	} {
		got, n := lookup(callHeaders("c", timeout), "grpc-timeout")
		if got != want || n != 1 {
			t.Errorf("grpc-timeout of %v = %q, want %q", timeout, got, want)
		}
	}
}

// full is a response with every field.
func full() *rlsv3.RateLimitResponse {
	return &rlsv3.RateLimitResponse{
		OverallCode: rlsv3.RateLimitResponse_OVER_LIMIT,
		Statuses: []*rlsv3.RateLimitResponse_DescriptorStatus{{
			Code:               rlsv3.RateLimitResponse_OVER_LIMIT,
			CurrentLimit:       &rlsv3.RateLimitResponse_RateLimit{Name: "n", RequestsPerUnit: 10, Unit: rlsv3.RateLimitResponse_RateLimit_DAY},
			DurationUntilReset: durationpb.New(time.Hour),
		}},
		ResponseHeadersToAdd: headerValues([2]string{"Retry-After", "31"}, [2]string{"x", "1"}, [2]string{"x", "2"}),
		RequestHeadersToAdd:  headerValues([2]string{"x-up", "ü"}),
		RawBody:              []byte("\x00no\xff"),
		DynamicMetadata: &structpb.Struct{Fields: map[string]*structpb.Value{
			"weir": structpb.NewStringValue("r"),
		}},
		Quota: &rlsv3.RateLimitResponse_Quota{Requests: 1, Id: "q"},
	}
}

func TestParseResponse(t *testing.T) {
	t.Parallel()

	message, err := proto.Marshal(full())
	if err != nil {
		t.Fatal(err)
	}
	got, err := parseResponse(message)
	if err != nil {
		t.Fatal(err)
	}
	want := answer{
		code:            codeOverLimit,
		responseHeaders: [][2]string{{"retry-after", "31"}, {"x", "1"}, {"x", "2"}},
		requestHeaders:  [][2]string{{"x-up", "ü"}},
		body:            []byte("\x00no\xff"),
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(answer{})); diff != "" {
		t.Errorf("parseResponse (-want +got):\n%s", diff)
	}
	// Cut anywhere, it is refused or, at a field's end, has fewer fields.
	for i := range message {
		if a, err := parseResponse(message[:i]); err == nil && proto.Unmarshal(message[:i], &rlsv3.RateLimitResponse{}) != nil {
			t.Errorf("parseResponse of the first %d bytes = %v", i, a)
		}
	}
}

// What the generated types read from any bytes, ours read too, or refuse for a reason
// of their own; nothing panics.
func FuzzParseResponse(f *testing.F) {
	message, err := proto.Marshal(full())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(message)
	f.Add([]byte{8, 1})
	f.Add([]byte{8, 1, 8, 2})
	f.Add([]byte{8, 0x81, 0x80, 0x80, 0x80, 0x10})
	f.Add([]byte{0x1a, 4, 0x0a, 2, 'X', 'y', 8, 1})
	f.Add([]byte{0x1b, 0x1c, 8, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		got, err := parseResponse(b)
		var want rlsv3.RateLimitResponse
		if proto.Unmarshal(b, &want) != nil {
			return
		}
		code := int32(want.GetOverallCode())
		headers := append(pairsOf(want.GetResponseHeadersToAdd()), pairsOf(want.GetRequestHeadersToAdd())...)
		valid := code == codeOK || code == codeOverLimit
		for _, h := range headers {
			valid = valid && validHeader(h)
		}
		if (err == nil) != valid {
			t.Fatalf("parseResponse(%q) = %v, want valid: %v", b, err, valid)
		}
		if err != nil {
			return
		}
		if got.code != code || !bytes.Equal(got.body, want.GetRawBody()) {
			t.Errorf("parseResponse(%q) = code %d, body %q; want %d, %q", b, got.code, got.body, code, want.GetRawBody())
		}
		if diff := cmp.Diff(headers, append(got.responseHeaders, got.requestHeaders...), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("parseResponse(%q): headers (-want +got):\n%s", b, diff)
		}
	})
}

func pairsOf(headers []*corev3.HeaderValue) (out [][2]string) {
	for _, h := range headers {
		value := h.GetValue()
		if value == "" {
			value = string(h.GetRawValue())
		}
		out = append(out, [2]string{strings.ToLower(h.GetKey()), value})
	}
	return out
}

// A body is a frame, exactly, or an error; a frame comes back as it went in.
func FuzzUnframe(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 2, 8, 1})
	f.Add([]byte{1, 0, 0, 0, 0})
	f.Add([]byte{0, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		message, err := unframe(b)
		if err == nil && !bytes.Equal(frame(message), b) {
			t.Errorf("unframe(%q) = %q, whose frame is another", b, message)
		}
		message, err = unframe(frame(b))
		if err != nil || !bytes.Equal(message, b) {
			t.Errorf("unframe(frame(%q)) = %q, %v", b, message, err)
		}
		// The whole way to an outcome.
		if a, err := (reply{headers: [][2]string{{":status", "200"}, {"grpc-status", "0"}}, body: b}).parse(); err == nil {
			if a.code != codeOK && a.code != codeOverLimit {
				t.Errorf("parse of %q = code %d", b, a.code)
			}
		}
	})
}

func TestContentLength(t *testing.T) {
	t.Parallel()

	for _, tc := range []struct {
		value string
		want  int64
		ok    bool
	}{
		{"0", 0, true},
		{"163840", 163840, true},
		{"007", 7, true},
		{"9223372036854775807", math.MaxInt64, true},
		{"9223372036854775808", 0, false},
		{"99999999999999999999999999", 0, false},
		{"", 0, false},
		{"-1", 0, false},
		{"+1", 0, false},
		{" 1", 0, false},
		{"1,1", 0, false},
		{"0x10", 0, false},
		{"\xb2", 0, false},
	} {
		got, ok := contentLength([][2]string{{"content-length", tc.value}})
		if got != tc.want || ok != tc.ok {
			t.Errorf("contentLength(%q) = %d, %v; want %d, %v", tc.value, got, ok, tc.want, tc.ok)
		}
	}
	if _, ok := contentLength(nil); ok {
		t.Error("contentLength of no header is ok")
	}
}

func TestQuoteIsBounded(t *testing.T) {
	t.Parallel()

	if got := quote(strings.Repeat("\x00", 1<<20)); len(got) > 2000 || !utf8.ValidString(got) {
		t.Errorf("quote gives %d bytes", len(got))
	}
}

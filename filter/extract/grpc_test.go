package extract_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

const notStream = "is not a gRPC stream: a message begins with a byte that is neither 0 nor 1"

func TestFrames(t *testing.T) {
	t.Parallel()

	hello, big := string(frame(0, "hello")), string(frame(1, strings.Repeat("x", 100_000)))
	for _, tc := range []struct {
		name   string
		chunks []string
		want   string
	}{
		{"nothing", nil, "0, whole true"},
		{"empty chunks", []string{"", ""}, "0, whole true"},
		{"one message", []string{hello}, "1, whole true"},
		{"empty message", []string{"\x00\x00\x00\x00\x00"}, "1, whole true"},
		{"messages", []string{hello + hello + big + hello}, "4, whole true"},
		{"a chunk each", []string{hello, big, hello}, "3, whole true"},
		{"half a prefix", []string{hello + hello[:3]}, "1, whole false"},
		{"a prefix", []string{hello + hello[:5]}, "2, whole false"},
		{"half a message", []string{hello + hello[:7]}, "2, whole false"},
		{"prefix in pieces", []string{hello[:1], hello[1:3], "", hello[3:4], hello[4:]}, "1, whole true"},
		{"prefix across the end", []string{hello + hello[:4], hello[4:] + hello}, "3, whole true"},
		{"message across chunks", []string{big[:50], big[50:60_000], big[60_000:] + hello}, "2, whole true"},
		{"byte by byte", strings.Split(hello+string(frame(1, "")), ""), "2, whole true"},
		{"longest message", []string{"\x01\xff\xff\xff\xff", hello}, "1, whole false"},
	} {
		var f extract.Frames
		for _, chunk := range tc.chunks {
			if err := feed(t, &f, []byte(chunk)); err != nil {
				t.Errorf("%s: %v", tc.name, err)
			}
		}
		if got := state(&f); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

// After an error there is only the error.
func TestFramesErrors(t *testing.T) {
	t.Parallel()

	hello := frame(0, "hello")
	gone := errors.New("gone")
	for _, tc := range []struct {
		name string
		read func(offset, n int) ([]byte, error)
		want string
	}{
		{"flag", func(_, n int) ([]byte, error) { return []byte{2, 0, 0, 0, 0}[:n], nil }, notStream},
		{"highest flag", func(_, n int) ([]byte, error) { return []byte{255, 0, 0, 0, 0}[:n], nil }, notStream},
		{"refusal", func(int, int) ([]byte, error) { return nil, gone }, "gone"},
		{"nothing", func(int, int) ([]byte, error) { return nil, nil }, "is not as long as was said"},
		{"too little", func(_, n int) ([]byte, error) { return make([]byte, n-1), nil }, "is not as long as was said"},
		{"too much", func(_, n int) ([]byte, error) { return make([]byte, n+1), nil }, "is not as long as was said"},
	} {
		for _, size := range []int{1, 5, 1000} {
			var f extract.Frames
			if err := feed(t, &f, hello); err != nil {
				t.Fatal(err)
			}
			if err := f.Next(size, tc.read); err == nil || err.Error() != tc.want {
				t.Errorf("%s: Next(%d) = %v, want %s", tc.name, size, err, tc.want)
			}
			if err := feed(t, &f, hello); err == nil || err.Error() != tc.want {
				t.Errorf("%s: then Next = %v, want %s", tc.name, err, tc.want)
			}
			if got := state(&f); got != "1, whole false" {
				t.Errorf("%s: %s, want 1, whole false", tc.name, got)
			}
		}
	}
	// A flag is refused before the rest of its prefix is there.
	var f extract.Frames
	if err := feed(t, &f, []byte{7}); err == nil || err.Error() != notStream {
		t.Errorf("Next of a wrong flag = %v", err)
	}
}

// A body's first message comes out whole however its bytes come, and a compressed one
// is told.
func TestC81FirstMessage(t *testing.T) {
	t.Parallel()

	hello := string(frame(0, "hello"))
	for _, tc := range []struct {
		name, body           string
		most                 int
		want                 string
		compressed, complete bool
	}{
		{name: "nothing", want: `""`},
		{name: "flag only", body: "\x01", want: `""`, compressed: true},
		{name: "half a prefix", body: hello[:4], want: `""`},
		{name: "prefix only", body: hello[:5], most: 5, want: `""`},
		{name: "half", body: hello[:9], most: 5, want: `""`},
		{name: "whole", body: hello, most: 5, want: `"hello"`, complete: true},
		{name: "more after it", body: hello + "\x07garbage", most: 5, want: `"hello"`, complete: true},
		{name: "compressed", body: string(frame(1, "hello")), most: 5, want: `"hello"`, compressed: true, complete: true},
		{name: "empty", body: string(frame(0, "")), want: `""`, complete: true},
		{name: "too large", body: hello, most: 4, want: tooLarge},
		{name: "too large, announced", body: hello[:5], most: 4, want: tooLarge},
		{name: "too large, compressed", body: "\x01\xff\xff\xff\xff", most: 1 << 20, want: tooLarge, compressed: true},
		{name: "empty where nothing goes", body: string(frame(0, "")), most: -1, want: tooLarge},
		{name: "flag", body: "\x02" + hello[1:], most: 5, want: notStream},
		{name: "HTTP/1 text", body: "hello", most: 5, want: notStream},
	} {
		msg, compressed, complete, err := extract.FirstMessage([]byte(tc.body), tc.most)
		if got := outcome(string(msg), err); got != tc.want || compressed != tc.compressed || complete != tc.complete {
			t.Errorf("%s: FirstMessage = %s, compressed %v, complete %v; want %s, %v, %v",
				tc.name, got, compressed, complete, tc.want, tc.compressed, tc.complete)
		}
	}
}

// What is appended to a message must not go over the bytes after it.
func TestFirstMessageIsClipped(t *testing.T) {
	t.Parallel()

	body := append(frame(0, "a"), "next"...)
	msg, _, _, err := extract.FirstMessage(body, 1)
	if err != nil {
		t.Fatal(err)
	}
	if _ = append(msg, '!'); string(body[6:]) != "next" {
		t.Errorf("what follows the message is %q", body[6:])
	}
}

// A stream of 50 MB is counted without being held: nothing is read but prefixes, and
// nothing is allocated.
func TestC83Frames(t *testing.T) {
	const size, chunk, messages = 10_000, 16_384, 5_000
	prefix := frame(0, strings.Repeat("x", size))[:5]
	stream := func(offset, n int) []byte { // n bytes of an endless stream, as far as they are prefix
		at := offset % (size + len(prefix))
		return prefix[at : at+n]
	}
	count := func() (read int, f extract.Frames) {
		for start := 0; start < messages*(size+len(prefix)); start += chunk {
			n := min(chunk, messages*(size+len(prefix))-start)
			if err := f.Next(n, func(offset, n int) ([]byte, error) {
				read += n
				return stream(start+offset, n), nil
			}); err != nil {
				t.Fatal(err)
			}
		}
		return read, f
	}
	read, f := count()
	if got, want := state(&f), "5000, whole true"; got != want || read != messages*len(prefix) {
		t.Errorf("%s with %d bytes read, want %s with %d", got, read, want, messages*len(prefix))
	}
	if got := testing.AllocsPerRun(1, func() { count() }); got > 10 {
		t.Errorf("50 MB are counted with %v allocations", got)
	}
}

// frame returns a message with its prefix.
func frame(flag byte, message string) []byte {
	prefix := binary.BigEndian.AppendUint32([]byte{flag}, uint32(len(message)))
	return append(prefix, message...)
}

// feed gives f the next chunk, of which it may read beginnings of messages.
func feed(tb testing.TB, f *extract.Frames, chunk []byte) error {
	tb.Helper()

	end := 0
	return f.Next(len(chunk), func(offset, n int) ([]byte, error) {
		if n < 1 || n > 5 || offset < end || offset+n > len(chunk) {
			tb.Fatalf("Next(%d) reads %d bytes at %d after those to %d", len(chunk), n, offset, end)
		}
		end = offset + n
		return chunk[offset:end], nil
	})
}

// state writes down what f tells.
func state(f *extract.Frames) string { return fmt.Sprintf("%d, whole %v", f.Messages(), f.Whole()) }

// framesByReference counts the messages of a stream that is all there.
func framesByReference(stream []byte) (messages int64, whole, ok bool) {
	for r := bytes.NewReader(stream); r.Len() > 0; {
		flag, _ := r.ReadByte()
		if flag > 1 {
			return messages, false, false
		}
		var size uint32
		if binary.Read(r, binary.BigEndian, &size) != nil {
			return messages, false, true
		}
		messages++
		if int64(size) > int64(r.Len()) {
			return messages, false, true
		}
		if _, err := r.Seek(int64(size), 1); err != nil {
			return messages, false, false
		}
	}
	return messages, true, true
}

// However a stream is cut into chunks, the same comes out.
func FuzzFrames(f *testing.F) {
	f.Add([]byte{}, []byte{}, 0)
	f.Add(append(frame(0, "hello"), frame(1, "")...), []byte{1, 2, 3}, 5)
	f.Add(append(frame(1, ""), frame(0, "x")...), []byte{4, 0, 2}, 0)
	f.Add(append(frame(0, "hello"), 2), []byte{9}, 4)
	f.Add([]byte{0, 0xFF, 0xFF, 0xFF, 0xFF, 1}, []byte{5}, -1)
	f.Add([]byte{2}, []byte{}, 1<<31)
	f.Fuzz(func(t *testing.T, stream, sizes []byte, most int) {
		var whole, chunked extract.Frames
		wholeErr := feed(t, &whole, stream)

		var chunkedErr error
		rest := stream
		for i := 0; len(rest) > 0; i++ {
			n := len(rest)
			if i < len(sizes) {
				n = min(n, int(sizes[i]))
			}
			chunkedErr = feed(t, &chunked, rest[:n])
			rest = rest[n:]
		}
		if state(&chunked) != state(&whole) || !errors.Is(chunkedErr, wholeErr) {
			t.Errorf("%x in chunks of %d: %s, %v; at once: %s, %v",
				stream, sizes, state(&chunked), chunkedErr, state(&whole), wholeErr)
		}
		messages, atEnd, ok := framesByReference(stream)
		if whole.Messages() != messages || whole.Whole() != atEnd || (wholeErr == nil) != ok {
			t.Errorf("%x: %s, %v; want %d, whole %v, ok %v", stream, state(&whole), wholeErr, messages, atEnd, ok)
		}

		// The first message is there once it is complete, and stays the same.
		for end := range len(stream) + 1 {
			if 20 < end && end < len(stream) {
				continue // what a long stream has in its midst takes too long to go through
			}
			msg, compressed, complete, err := extract.FirstMessage(stream[:end], most)
			switch {
			case err != nil && (msg != nil || complete):
				t.Fatalf("FirstMessage(%x, %d) = %x, complete %v, %v", stream[:end], most, msg, complete, err)
			case errors.Is(err, extract.ErrTooLarge):
				if size := int64(binary.BigEndian.Uint32(stream[1:5])); size <= int64(most) {
					t.Errorf("FirstMessage(%x, %d) = %v, but it has %d bytes", stream[:end], most, err, size)
				}
			case err != nil:
				if stream[0] <= 1 {
					t.Errorf("FirstMessage(%x, %d) = %v", stream[:end], most, err)
				}
			case complete:
				if again := frame(stream[0], string(msg)); !bytes.HasPrefix(stream[:end], again) || len(msg) > most {
					t.Errorf("FirstMessage(%x, %d) = %x", stream[:end], most, msg)
				}
				if compressed != (stream[0] == 1) {
					t.Errorf("FirstMessage(%x, %d): compressed %v", stream[:end], most, compressed)
				}
			case msg != nil || end >= 5 && int64(binary.BigEndian.Uint32(stream[1:5])) <= int64(end-5):
				t.Errorf("FirstMessage(%x, %d) = %x, not complete", stream[:end], most, msg)
			}
		}
	})
}

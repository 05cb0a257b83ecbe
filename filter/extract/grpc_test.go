package extract_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

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

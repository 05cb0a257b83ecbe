package extract

import (
	"encoding/binary"
	"errors"
)

var (
	errFlag = errors.New("is not a gRPC stream: a message begins with a byte that is neither 0 nor 1")
	errRead = errors.New("is not as long as was said")
)

// prefixLen is how many bytes come before each gRPC message: one that says whether it
// is compressed, and four with its length, the first one being the highest.
const prefixLen = 5

// Frames counts the messages of a gRPC stream as its bytes come, and keeps none of
// them. The zero Frames stands at a stream's beginning. It is not safe for concurrent
// use.
type Frames struct {
	messages int64
	left     int64 // bytes of the message begun that are still to come
	prefix   [prefixLen]byte
	have     int // bytes of prefix, while it is not whole
	failed   error
}

// Next takes the next size bytes of the stream. Where messages begin in them it calls
// read, which returns the n bytes, 1 to 5, that are offset bytes from the start of
// those size ones. They are not kept.
//
// It returns an error if the bytes are no gRPC stream, and what read returns. It keeps
// returning it, and Messages counts what came before.
func (f *Frames) Next(size int, read func(offset, n int) ([]byte, error)) error {
	for at := 0; at < size && f.failed == nil; {
		if f.left > 0 {
			n := min(f.left, int64(size-at))
			f.left -= n
			at += int(n)
			continue
		}
		n := min(prefixLen-f.have, size-at)
		b, err := read(at, n)
		if err != nil {
			f.failed = err
			break
		}
		f.failed = f.begin(b, n)
		at += n
	}
	return f.failed
}

// begin takes n bytes of a prefix.
func (f *Frames) begin(b []byte, n int) error {
	if len(b) != n {
		return errRead
	}
	f.have += copy(f.prefix[f.have:], b)
	if f.prefix[0] > 1 {
		return errFlag
	}
	if f.have == prefixLen {
		f.messages++
		f.left = int64(binary.BigEndian.Uint32(f.prefix[1:]))
		f.have = 0
	}
	return nil
}

// Messages returns how many messages have begun: one counts as soon as its length is
// known.
func (f *Frames) Messages() int64 { return f.messages }

// Whole reports that the bytes so far end where a message does, or that there are
// none.
func (f *Frames) Whole() bool { return f.failed == nil && f.left == 0 && f.have == 0 }

// FirstMessage returns the first message of a gRPC stream of which body is the
// beginning, without its prefix, and whether it is compressed. While it isn't complete
// there is no message, and it is told to be compressed once that is known.
//
// It returns [ErrTooLarge] as soon as a message of more than most bytes is announced.
func FirstMessage(body []byte, most int) (msg []byte, compressed, complete bool, err error) {
	if len(body) == 0 {
		return nil, false, false, nil
	}
	if body[0] > 1 {
		return nil, false, false, errFlag
	}
	compressed = body[0] == 1
	if len(body) < prefixLen {
		return nil, compressed, false, nil
	}
	size := int64(binary.BigEndian.Uint32(body[1:]))
	body = body[prefixLen:]
	switch {
	case size > int64(most):
		return nil, compressed, false, ErrTooLarge
	case size > int64(len(body)):
		return nil, compressed, false, nil
	}
	return body[:size:size], compressed, true, nil
}

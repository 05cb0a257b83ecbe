package extract

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
)

var errNotGzip = errors.New("is not gzip, or is cut short or damaged")

// Gunzip returns what data has compressed, at most most bytes of it, or
// [ErrTooLarge] if there is more. Several streams one after another count as one.
// Data that ends early, has a wrong checksum or goes on after its end is an error.
//
// The memory is in proportion to what comes out, never to what a header announces.
func Gunzip(data []byte, most int) ([]byte, error) {
	r, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, errNotGzip
	}
	most = max(most, 0)
	// A text shrinks to a fourth or so; a first guess that holds it saves copies.
	out := make([]byte, 0, min(most, 4*len(data))+1)
	for {
		n, err := r.Read(out[len(out):cap(out)])
		out = out[:len(out)+n]
		switch {
		case len(out) > most:
			return nil, ErrTooLarge
		case errors.Is(err, io.EOF):
			return out, nil
		case err != nil:
			return nil, errNotGzip
		case len(out) == cap(out):
			// At most one byte beyond the bound is ever asked for.
			bigger := make([]byte, len(out), min(most-len(out), len(out))+len(out)+1)
			copy(bigger, out)
			out = bigger
		}
	}
}

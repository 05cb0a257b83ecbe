package extract_test

import (
	"bytes"
	"compress/gzip"
	"io"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

// compressed returns plain in gzip.
func compressed(tb testing.TB, plain []byte) []byte {
	tb.Helper()

	return compressedBy(tb, gzip.NewWriter(nil), plain)
}

// compressedBy is compressed with a writer that is used again, since it is large.
func compressedBy(tb testing.TB, w *gzip.Writer, plain []byte) []byte {
	tb.Helper()

	var b bytes.Buffer
	w.Reset(&b)
	if _, err := w.Write(plain); err != nil {
		tb.Fatal(err)
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

// The bound is kept to the byte, and within it all comes out as it went in.
func FuzzGunzip(f *testing.F) {
	f.Add([]byte("hello"), 5)
	f.Add([]byte("hello"), 4)
	f.Add([]byte{}, 0)
	f.Add(bytes.Repeat([]byte("a"), 5000), 5001)
	f.Add(compressed(f, []byte("hello")), 10)
	f.Add(append(compressed(f, []byte("a")), compressed(f, []byte("b"))...), 2)
	f.Add(append(compressed(f, []byte("a")), 0), 2)
	w := gzip.NewWriter(nil)
	f.Fuzz(func(t *testing.T, data []byte, most int) {
		most %= 1 << 20
		// As what is compressed, cut short somewhere, and with something after it.
		packed := compressedBy(t, w, data)
		got, err := extract.Gunzip(packed, most)
		switch result := outcome("", err); {
		case most >= len(data) && (err != nil || !bytes.Equal(got, data)):
			t.Errorf("Gunzip(%x, %d) = %x, %v; want %x", packed, most, got, err, data)
		case most < len(data) && most >= 0 && (result != tooLarge || got != nil):
			t.Errorf("Gunzip(%x, %d) = %x, %v", packed, most, got, err)
		}
		const enough = 1 << 20
		if got, err := extract.Gunzip(packed[:max(0, most)%len(packed)], enough); err == nil {
			t.Errorf("Gunzip of %x without its end = %x", packed, got)
		}
		if got, err := extract.Gunzip(append(packed, 0), enough); err == nil {
			t.Errorf("Gunzip of %x and a zero = %x", packed, got)
		}

		// As what somebody says is compressed.
		got, err = extract.Gunzip(data, most)
		if err != nil {
			if got != nil {
				t.Errorf("Gunzip(%x, %d) = %x, %v", data, most, got, err)
			}
			return
		}
		r, err := gzip.NewReader(bytes.NewReader(data))
		if err != nil {
			t.Fatalf("Gunzip(%x, %d) = %x, but %v", data, most, got, err)
		}
		if want, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
			t.Errorf("Gunzip(%x, %d) = %x, want %x, %v", data, most, got, want, err)
		}
	})
}

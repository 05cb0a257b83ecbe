package extract_test

import (
	"bytes"
	"compress/gzip"
	"io"
	"runtime"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

const notGzip = "is not gzip, or is cut short or damaged"

func TestGunzip(t *testing.T) {
	t.Parallel()

	hello := compressed(t, []byte("hello"))
	damaged := bytes.Clone(hello)
	damaged[len(damaged)-6] ^= 1 // in the checksum
	for _, tc := range []struct {
		name string
		data []byte
		most int
		want string
	}{
		{"all of it", hello, 100, `"hello"`},
		{"just so", hello, 5, `"hello"`},
		{"nothing", compressed(t, nil), 0, `""`},
		{"two streams", append(bytes.Clone(hello), hello...), 10, `"hellohello"`},
		{"one byte too many", hello, 4, tooLarge},
		{"no room", hello, 0, tooLarge},
		{"less than no room", hello, -1, tooLarge},
		{"two streams, too many", append(bytes.Clone(hello), hello...), 9, tooLarge},
		{"empty", nil, 100, notGzip},
		{"not gzip", []byte("hello"), 100, notGzip},
		{"cut in its header", hello[:5], 100, notGzip},
		{"cut in its data", hello[:12], 100, notGzip},
		{"cut in its end", hello[:len(hello)-1], 100, notGzip},
		{"wrong checksum", damaged, 100, notGzip},
		{"going on", append(bytes.Clone(hello), 0), 100, notGzip},
	} {
		data, err := extract.Gunzip(tc.data, tc.most)
		if got := outcome(string(data), err); got != tc.want {
			t.Errorf("%s: Gunzip = %s, want %s", tc.name, got, tc.want)
		}
	}
}

// A usage in a compressed body is found. A small body that inflates to 1 GiB is given
// up at the bound, with memory in proportion to that.
func TestC11Gzip(t *testing.T) {
	plain, err := extract.Gunzip(compressed(t, []byte(`{"usage":{"total_tokens":42}}`)), 1<<10)
	if err != nil {
		t.Fatal(err)
	}
	if got := outcome(extract.JSON(plain, pointer(t, "/usage/total_tokens"))); got != `"42"` {
		t.Errorf("total_tokens = %s, want 42", got)
	}

	const most = 1 << 20
	bomb := bytes.Repeat(compressed(t, make([]byte, 16<<20)), 64)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	data, err := extract.Gunzip(bomb, most)
	runtime.ReadMemStats(&after)
	if got := outcome(string(data), err); got != tooLarge {
		t.Errorf("Gunzip of 1 GiB in %d bytes: %d bytes, %v", len(bomb), len(data), err)
	}
	// The buffers double, and there is the decompressor.
	if took := after.TotalAlloc - before.TotalAlloc; took > 2*most+256<<10 {
		t.Errorf("Gunzip took %d bytes of memory for at most %d", took, most)
	}
}

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

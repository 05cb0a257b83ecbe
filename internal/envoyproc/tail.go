package envoyproc

import (
	"io"
	"strings"
	"sync"
)

// maxTail is how much of Envoy's output is kept for an error: enough for a filter
// configuration in a log line, and the lines after it.
const maxTail = 16 << 10

// A tail passes what is written to it on and keeps the end of it. It is safe for
// concurrent use.
type tail struct {
	next io.Writer // may be nil

	mu   sync.Mutex
	kept []byte
	cut  bool // whether some was dropped
}

func newTail(next io.Writer) *tail { return &tail{next: next} }

// Write never fails: a reader of logs that has gone is no reason for Envoy's
// output to block or for Envoy to end.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()

	t.kept = append(t.kept, p...)
	if extra := len(t.kept) - maxTail; extra > 0 {
		t.kept = append(t.kept[:0], t.kept[extra:]...)
		t.cut = true
	}
	if t.next != nil {
		if _, err := t.next.Write(p); err != nil {
			t.next = nil
		}
	}
	return len(p), nil
}

// String is the end of what was written, without a line that is not whole.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()

	s := string(t.kept)
	if t.cut {
		if _, whole, ok := strings.Cut(s, "\n"); ok {
			s = whole
		}
	}
	return strings.TrimSpace(s)
}

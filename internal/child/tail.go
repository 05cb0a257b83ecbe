package child

import (
	"io"
	"strings"
	"sync"
)

// maxTail is how much of a child's output is kept for an error: enough for a filter
// configuration in a line of Envoy's log, and the lines after it.
const maxTail = 16 << 10

// A Tail passes what a child writes on and keeps the last 16 KiB of it, for an error's
// text. It is safe for concurrent use.
type Tail struct {
	next io.Writer // may be nil

	mu   sync.Mutex
	kept []byte
	cut  bool // whether some was dropped
}

// NewTail returns a Tail that passes on to next, or to nowhere when it is nil.
func NewTail(next io.Writer) *Tail { return &Tail{next: next} }

// Write never fails: a reader of logs that has gone is no reason for a child's
// output to block or for the child to end.
func (t *Tail) Write(p []byte) (int, error) {
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
func (t *Tail) String() string {
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

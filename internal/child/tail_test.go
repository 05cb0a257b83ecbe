package child

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

type failing struct{ writes int }

func (f *failing) Write([]byte) (int, error) {
	f.writes++
	return 0, errors.New("broken pipe")
}

func TestTail(t *testing.T) {
	t.Parallel()

	next := new(failing)
	out := NewTail(next)
	line := func(i int) string { return fmt.Sprintf("line %06d", i) }
	const lines = 10_000
	for i := range lines {
		if n, err := fmt.Fprintln(out, line(i)); err != nil || n != len(line(i))+1 {
			t.Fatalf("Write = %d, %v", n, err)
		}
	}
	got := out.String()
	if len(got) > maxTail || len(got) < maxTail/2 {
		t.Errorf("%d bytes were kept, want just under %d", len(got), maxTail)
	}
	if !strings.HasPrefix(got, "line ") || !strings.HasSuffix(got, "\n"+line(lines-1)) {
		t.Errorf("kept %.20q … %q, want whole lines up to the last", got, got[len(got)-20:])
	}
	if next.writes != 1 {
		t.Errorf("a broken writer was written %d times, want 1", next.writes)
	}

	short := NewTail(nil)
	_, _ = fmt.Fprintln(short, "one")
	if got := short.String(); got != "one" {
		t.Errorf("kept %q, want one", got)
	}
}

package extract_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

// What outcome says for the errors that are told apart.
const (
	absent   = "absent"
	repeated = "repeated"
	tooLarge = "too large"
)

// outcome writes down what an extractor returned: the value in quotes, or the error.
func outcome(value string, err error) string {
	switch {
	case err != nil && value != "":
		return strconv.Quote(value) + " along with: " + err.Error()
	case errors.Is(err, extract.ErrAbsent):
		return absent
	case errors.Is(err, extract.ErrRepeated):
		return repeated
	case errors.Is(err, extract.ErrTooLarge):
		return tooLarge
	case err != nil:
		return err.Error()
	}
	return strconv.Quote(value)
}

// Numbers are those that strconv reads, without signs, up to 2^53.
func FuzzWhole(f *testing.F) {
	for _, s := range []string{"0", "007", "9007199254740992", "9007199254740993", "", "-1", "+1", "1.0", "1e3", " 1", "1_0", "\u0661"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, err := extract.Whole(s)
		want, parseErr := strconv.ParseInt(s, 10, 64)
		ok := parseErr == nil && strings.Trim(s, "0123456789") == "" && want <= 1<<53
		if (err == nil) != ok || ok && got != want || !ok && got != 0 {
			t.Fatalf("Whole(%q) = %d, %v; want %d, ok: %v", s, got, err, want, ok)
		}
		if !ok {
			return
		}
		if again, err := extract.Whole("0" + strconv.FormatInt(got, 10)); again != got || err != nil {
			t.Errorf("Whole(%q) = %d, but with a zero before it %d, %v", s, got, again, err)
		}
	})
}

package config_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/weir-dev/weir/filter/config"
)

func TestCanonicalUUID(t *testing.T) {
	t.Parallel()

	const id = "0189d0a8-7f3b-7c4e-9a54-2f8e6b1c0d3a"
	for _, tc := range []struct {
		value string
		ok    bool
	}{
		{id, true},
		{strings.ToUpper(id), true},
		{"0189D0a8-7f3B-7c4e-9a54-2f8e6b1c0d3A", true},
		{"00000000-0000-0000-0000-000000000001", true},
		{"ffffffff-ffff-ffff-ffff-ffffffffffff", true},
		{"00000000-0000-0000-0000-000000000000", false},
		{"", false},
		{"not-a-uuid", false},
		{strings.ReplaceAll(id, "-", ""), false},
		{"{" + id + "}", false},
		{"urn:uuid:" + id, false},
		{" " + id[1:], false},
		{id + " ", false},
		{id[:35], false},
		{id[:35] + "g", false},
		{id[:8] + "0" + id[9:], false},
		{id[:7] + "--" + id[9:], false},
		{id[:34] + "\u00e9", false},
		{id[:35] + "\x00", false},
	} {
		got, err := config.TypeUUID.Canonical(tc.value)
		if (err == nil) != tc.ok {
			t.Errorf("Canonical(%q) = %v, want ok: %v", tc.value, err, tc.ok)
		}
		if err == nil && got != strings.ToLower(tc.value) {
			t.Errorf("Canonical(%q) = %q", tc.value, got)
		}
	}
}

// The accepted are the 36-character forms that another parser reads, but zero.
func FuzzCanonicalUUID(f *testing.F) {
	f.Add("0189d0a8-7f3b-7c4e-9a54-2f8e6b1c0d3a")
	f.Add("0189D0A8-7F3B-7C4E-9A54-2F8E6B1C0D3A")
	f.Add("00000000-0000-0000-0000-000000000000")
	f.Add("urn:uuid:0189d0a8-7f3b-7c4e-9a54-2f8e6b1c0d3a")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := config.TypeUUID.Canonical(s)
		id, uuidErr := uuid.Parse(s)
		ok := uuidErr == nil && len(s) == 36 && id != uuid.Nil
		if (err == nil) != ok {
			t.Fatalf("Canonical(%q) = %v, want ok: %v", s, err, ok)
		}
		if ok && got != id.String() {
			t.Errorf("Canonical(%q) = %q, want %q", s, got, id)
		}
	})
}

func TestCanonicalString(t *testing.T) {
	t.Parallel()

	for value, want := range map[string]string{
		"":                 "",
		"acme":             "acme",
		"ü €\U0001F600":    "ü €\U0001F600",
		"\uFFFD":           "\uFFFD",
		"1 \xC0\xA7":       "1 \U0010FFC0\U0010FFA7", // C30
		"\xff":             "\U0010FFFF",
		"é\x80":            "é\U0010FF80",
		"\xed\xa0\x80":     "\U0010FFED\U0010FFA0\U0010FF80", // a surrogate
		"\U0010FF7F":       "\U0010FF7F",
		"\U0010FF80":       "\U0010FFF4\U0010FF8F\U0010FFBE\U0010FF80",
		"a\U0010FFFFb\xe2": "a\U0010FFF4\U0010FF8F\U0010FFBF\U0010FFBFb\U0010FFE2",
	} {
		if got, err := config.TypeString.Canonical(value); got != want || err != nil {
			t.Errorf("Canonical(%q) = %q, %v; want %q", value, got, err, want)
		}
	}
}

// The result is valid UTF-8, tells what it came from, and is the value itself where
// nothing had to be written otherwise.
func FuzzCanonicalString(f *testing.F) {
	f.Add("acme")
	f.Add("1 \xC0\xA7")
	f.Add("\U0010FF80\xf4\x8f\xbe")
	f.Fuzz(func(t *testing.T, s string) {
		got, err := config.TypeString.Canonical(s)
		if err != nil || !utf8.ValidString(got) {
			t.Fatalf("Canonical(%q) = %q, %v", s, got, err)
		}
		var back strings.Builder
		for _, r := range got {
			if r >= 0x10FF80 {
				back.WriteByte(byte(r))
			} else {
				back.WriteRune(r)
			}
		}
		if back.String() != s {
			t.Errorf("Canonical(%q) = %q, which reads as %q", s, got, back.String())
		}
	})
}

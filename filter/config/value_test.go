package config_test

import (
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/filter/extract"
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
		got, err := (&config.Entry{Type: config.TypeUUID}).Canonical(tc.value)
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
		got, err := (&config.Entry{Type: config.TypeUUID}).Canonical(s)
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
		if got, err := (&config.Entry{}).Canonical(value); got != want || err != nil {
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
		got, err := (&config.Entry{}).Canonical(s)
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

func TestCanonical(t *testing.T) {
	t.Parallel()

	capture := func(text string) config.Entry { return config.Entry{Capture: regexp.MustCompile(text)} }
	steps := func(n ...config.Normalizer) config.Entry { return config.Entry{Normalize: n} }
	for _, tc := range []struct {
		name        string
		entry       config.Entry
		value, want string
		err         string // a part of the error
	}{
		{name: "as it is", value: " A\t", want: " A\t"},
		{name: "the whole match", entry: capture("[0-9]+"), value: "n-42-7", want: "42"},
		{name: "the first group", entry: capture("^(?:Bearer) +([^ ]*)( .*)?$"), value: "Bearer  abc", want: "abc"},
		{name: "an empty group", entry: capture("^a(.*)$"), value: "a", want: ""},
		{name: "no match", entry: capture("^b"), value: "a", err: "is absent"},
		{name: "a group without a part in it", entry: capture("^(?:a|(b))$"), value: "a", err: "is absent"},
		{name: "small letters", entry: steps(config.Lower), value: "ÄB", want: "äb"},
		{name: "small letters of no UTF-8", entry: steps(config.Lower), value: "A\xffB", want: "a\U0010FFFFb"},
		{name: "trimmed", entry: steps(config.Trim), value: "\t a b ", want: "a b"},
		{name: "in order", entry: steps(config.Lower, config.SHA256), value: "ABC", want: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
		{name: "a secret is hashed", entry: steps(config.SHA256), value: "", want: "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
		{name: "an address", entry: config.Entry{Type: config.TypeIP, Mask: extract.Masks{IPv4: 24, IPv6: 56}}, value: "10.1.2.3:80", want: "10.1.2.0/24"},
		{name: "no address", entry: config.Entry{Type: config.TypeIP}, value: "localhost", err: "is not an IP address"},
		{name: "as long as can be", value: strings.Repeat("x", 65536), want: strings.Repeat("x", 65536)},
		{name: "too long", value: strings.Repeat("x", 65537), err: "is longer than 65536 bytes"},
		{name: "long, and hashed", entry: steps(config.SHA256), value: strings.Repeat("x", 65537), want: "1abe08ebecf1c18cab71f6fe28aaddf20268f85bad78bb9a72f88ca47c874662"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()

			got, err := tc.entry.Canonical(tc.value)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("Canonical = %q, %v, want an error with %q", got, err, tc.err)
				}
				return
			}
			if err != nil || got != tc.want {
				t.Errorf("Canonical = %q, %v, want %q", got, err, tc.want)
			}
		})
	}
}

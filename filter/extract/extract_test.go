package extract_test

import (
	"errors"
	"strconv"
	"strings"
	"testing"

	"github.com/weir-dev/weir/filter/extract"
)

func TestHeader(t *testing.T) {
	t.Parallel()

	headers := [][2]string{
		{":method", "GET"},
		{"x-tenant", "acme"},
		{"x-empty", ""},
		{"x-twice", "a"},
		{"x-twice", "a"},
		{"x-list", "a, b"},
		{"x-space", " a\t"},
	}
	for name, want := range map[string]string{
		"x-tenant": `"acme"`,
		":method":  `"GET"`,
		"x-list":   `"a, b"`,
		"x-space":  `" a\t"`, // Envoy strips the space around values
		"x-empty":  `""`,
		"x-twice":  repeated,
		"x-other":  absent,
		"":         absent,
	} {
		if got := outcome(extract.Header(headers, name)); got != want {
			t.Errorf("Header(%q) = %s, want %s", name, got, want)
		}
	}
}

func TestWhole(t *testing.T) {
	t.Parallel()

	for text, want := range map[string]int64{
		"0": 0, "7": 7, "007": 7, "4294967296": 1 << 32, "9007199254740992": 1 << 53,
		strings.Repeat("0", 100) + "1": 1,
	} {
		if got, err := extract.Whole(text); got != want || err != nil {
			t.Errorf("Whole(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", "-1", "-0", "+1", " 1", "1 ", "1.0", "1e3", "0x1", "1_0", "1,2", "\u0661",
		"9007199254740993", "18446744073709551617", strings.Repeat("9", 100),
	} {
		if got, err := extract.Whole(text); got != 0 || err == nil {
			t.Errorf("Whole(%q) = %d, want an error", text, got)
		}
	}
}

// A missing cost and one that is no cost are told apart from each other, and from 1.
func TestC10MissingCost(t *testing.T) {
	t.Parallel()

	tokens := pointer(t, "/usage/total_tokens")
	for doc, want := range map[string]string{
		`{"usage":{"total_tokens":42}}`:    "42",
		`{"usage":{"total_tokens":"42"}}`:  "42",
		`{"usage":{"total_tokens":0}}`:     "0",
		`{"usage":{}}`:                     absent,
		`{"usage":{"total_tokens":null}}`:  absent,
		`{"usage":{"total_tokens":""}}`:    "is not a whole number from 0 to 2^53",
		`{"usage":{"total_tokens":-42}}`:   "is not a whole number from 0 to 2^53",
		`{"usage":{"total_tokens":true}}`:  "is not a whole number from 0 to 2^53",
		`{"usage":{"total_tokens":42.5}}`:  notWhole,
		`{"usage":{"total_tokens":1e300}}`: notWhole,
		`{"usage":{"total_tokens":[42]}}`:  container,
		`{"usage":{"total_tokens":42}`:     notJSON,
		``:                                 notJSON,
	} {
		text, err := extract.JSON([]byte(doc), tokens)
		got := outcome(text, err)
		if err == nil {
			var n int64
			if n, err = extract.Whole(text); err == nil {
				got = strconv.FormatInt(n, 10)
			} else {
				got = err.Error()
			}
		}
		if got != want {
			t.Errorf("the cost in %s = %s, want %s", doc, got, want)
		}
	}
}

// Absent and present but empty are told apart by each source that knows both.
func TestC24AbsentAndEmpty(t *testing.T) {
	t.Parallel()

	const empty = `""`
	for source, got := range map[string][2]string{
		"header": {
			outcome(extract.Header([][2]string{{"x-tenant", ""}}, "x-tenant")),
			outcome(extract.Header([][2]string{{"x-other", ""}}, "x-tenant")),
		},
		"cookie": {
			outcome(extract.Cookie([][2]string{{"cookie", "tenant="}}, "tenant")),
			outcome(extract.Cookie([][2]string{{"cookie", ""}}, "tenant")),
		},
		"cookie without =": {
			outcome(extract.Cookie([][2]string{{"cookie", "a=b; tenant"}}, "tenant")),
			outcome(extract.Cookie(nil, "tenant")),
		},
		"query": {
			outcome(extract.Query("/?tenant=", "tenant")),
			outcome(extract.Query("/?other=", "tenant")),
		},
		"query without =": {
			outcome(extract.Query("/?tenant", "tenant")),
			outcome(extract.Query("/", "tenant")),
		},
		"segment": {
			outcome(extract.Segment("/v1//jobs", 2)),
			outcome(extract.Segment("/v1/", 2)),
		},
		"part": {
			outcome(pattern(t, "/v1/{tenant}/jobs").Part("/v1//jobs", "tenant")),
			outcome(pattern(t, "/v1/{tenant}/jobs").Part("/v1/jobs", "tenant")),
		},
		"JSON": {
			outcome(extract.JSON([]byte(`{"tenant":""}`), pointer(t, "/tenant"))),
			outcome(extract.JSON([]byte(`{"tenant":null}`), pointer(t, "/tenant"))),
		},
		"protobuf": {
			outcome(field(t, "1").Read([]byte("\x0a\x00"), extract.EncodingString)),
			outcome(field(t, "1").Read(nil, extract.EncodingString)),
		},
	} {
		if got != [2]string{empty, absent} {
			t.Errorf("%s: %s and %s, want %s and %s", source, got[0], got[1], empty, absent)
		}
	}
}

// Long values, spaces, NULs and bytes that are not UTF-8 are values like others where
// a source can have them, byte by byte.
func TestC29TestC30AnyBytes(t *testing.T) {
	t.Parallel()

	for _, value := range []string{
		"a b\tc", "1 \xC0\xA7", "\xFF", "a\x00b", "a|b.c:d\n%'\"", "\u00e9", "e\u0301", strings.Repeat("x", 64<<10),
	} {
		want := outcome(value, nil)
		for source, got := range map[string]string{
			"header":  outcome(extract.Header([][2]string{{"x-tenant", value}}, "x-tenant")),
			"query":   outcome(extract.Query("/?tenant="+percent(value), "tenant")),
			"segment": outcome(extract.Segment("/v1/"+percent(value), 2)),
			"part":    outcome(pattern(t, "/v1/{tenant}").Part("/v1/"+percent(value), "tenant")),
		} {
			if got != want {
				t.Errorf("%s = %s, want %s", source, got, want)
			}
		}
	}
}

// Whatever is made to break a parser gets a value or an error from all of them.
func TestC84CraftedInput(t *testing.T) {
	t.Parallel()

	for _, unit := range []string{
		"%", "%zz", "/", "/..", "&", "=", ";", "\"", "\\", "[", "{", `{"":`, "[[],", "-", "1", "0", ".", "e", ":", "::", "@",
		"\x00", "\x01", "\x0a", "\x1a\x80", "\x33", "\x80", "\xff", "\xc3", "\u00e9", "\ud7ff", `\u`, `\ud83d`,
	} {
		for _, count := range []int{1, 2, 5, 64, 65, 1 << 14} {
			text := strings.Repeat(unit, count)
			headers := [][2]string{{"cookie", text}, {text, text}}
			for source, got := range map[string]string{
				"header":     outcome(extract.Header(headers, text)),
				"cookie":     outcome(extract.Cookie(headers, text)),
				"query":      outcome(extract.Query("/?"+text, text)),
				"segment":    outcome(extract.Segment(text, count)),
				"prefix":     outcome(extract.Prefix("/"+text, count)),
				"part":       outcome(pattern(t, "/{rest...}").Part("/"+text, "rest")),
				"host":       outcome(extract.Host(text)),
				"literal":    outcome(extract.Host("[" + text)),
				"address":    outcome(extract.Address(text, whole)),
				"JSON":       outcome(extract.JSON([]byte(text), pointer(t, "/0"))),
				"string":     outcome(extract.JSON([]byte(`{"a":"`+text+`"}`), pointer(t, "/a"))),
				"name":       outcome(extract.JSON([]byte(`{"`+text+`":1}`), pointer(t, "/a"))),
				"number":     outcome(extract.JSON([]byte("1"+text), pointer(t, ""))),
				"protobuf":   outcome(field(t, "3.6").Read([]byte(text), extract.EncodingString)),
				"gzip":       outcome("", secondOf(extract.Gunzip([]byte("\x1f\x8b\x08"+text), 1<<10))),
				"frames":     outcome("", feed(t, new(extract.Frames), []byte(text))),
				"its number": outcome("", secondOf(extract.Whole(text))),
			} {
				if got == "" || strings.Contains(got, "along with") {
					t.Errorf("%s of %d times %q = %s", source, count, unit, got)
				}
			}
		}
	}
}

// An error's text holds nothing that the client sent, since it goes into answers and
// logs.
func TestErrorsAreConstant(t *testing.T) {
	t.Parallel()

	const secret = "s3cr3t"
	for source, err := range map[string]error{
		"address":  second(extract.Address(secret, whole)),
		"cookie":   second(extract.Cookie([][2]string{{"cookie", "id=\"" + secret}}, "id")),
		"host":     second(extract.Host(secret + "/")),
		"query":    second(extract.Query("/?id="+secret+"%", "id")),
		"segment":  second(extract.Segment("/"+secret+"%", 1)),
		"path":     second(extract.Segment(secret, 1)),
		"part":     second(pattern(t, "/{id}").Part("/"+secret+"%", "id")),
		"JSON":     second(extract.JSON([]byte(secret), pointer(t, "/id"))),
		"name":     second(extract.JSON([]byte(`{"`+secret+`":1,"ID":2}`), pointer(t, "/id"))),
		"protobuf": second(field(t, "1").Read([]byte(secret), extract.EncodingString)),
		"whole":    secondOf(extract.Whole(secret)),
		"gzip":     secondOf(extract.Gunzip([]byte(secret), 1)),
		"frames":   new(extract.Frames).Next(len(secret), func(int, int) ([]byte, error) { return []byte(secret)[:5], nil }),
	} {
		if err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", source, err)
		}
	}
}

func second(_ string, err error) error { return err }

func secondOf[T any](_ T, err error) error { return err }

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

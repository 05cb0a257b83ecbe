package extract_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"math/big"
	"strconv"
	"strings"
	"testing"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/weir-dev/weir/filter/extract"
)

const (
	notJSON   = "is not JSON as RFC 8259 has it, or is cut short"
	tooDeep   = "is nested more than 64 deep"
	likeName  = "has a name that some servers take for another"
	hasNUL    = "has a NUL character, at which some servers end the text"
	container = "is an object or an array"
	notWhole  = "is not a whole number from -2^53 to 2^53"
)

// pointer reads a pointer that is right.
func pointer(tb testing.TB, text string) extract.Pointer {
	tb.Helper()

	p, err := extract.ParsePointer(text)
	if err != nil {
		tb.Fatalf("ParsePointer(%q): %v", text, err)
	}
	return p
}

func TestParsePointer(t *testing.T) {
	t.Parallel()

	for _, text := range []string{"", "/", "/a/b", "/a~1b/~0~01", "/0/-", "//", "/é", strings.Repeat("/a", 64)} {
		if p, err := extract.ParsePointer(text); err != nil || p.String() != text {
			t.Errorf("ParsePointer(%q) = %q, %v", text, p, err)
		}
	}
	for text, want := range map[string]string{
		"a":                      "does not begin with a slash",
		"#/a":                    "does not begin with a slash",
		"/a~":                    `has a ~ without 0 or 1 after it in "a~"`,
		"/~0~2":                  `has a ~ without 0 or 1 after it in "~0~2"`,
		"/~/0":                   `has a ~ without 0 or 1 after it in "~"`,
		"/\xff":                  "is not UTF-8",
		strings.Repeat("/a", 65): tooDeep,
	} {
		if p, err := extract.ParsePointer(text); err == nil || err.Error() != want || p.String() != "" {
			t.Errorf("ParsePointer(%q) = %q, %v; want %s", text, p, err, want)
		}
	}
}

// The pointers of RFC 6901, section 5.
func TestJSONPointers(t *testing.T) {
	t.Parallel()

	const doc = `{"foo":["bar","baz"],"":0,"a/b":1,"c%d":2,"e^f":3,"g|h":4,"i\\j":5,"k\"l":6," ":7,"m~n":8}`
	for text, want := range map[string]string{
		"":       container,
		"/foo":   container,
		"/foo/0": `"bar"`,
		"/foo/1": `"baz"`,
		"/":      `"0"`,
		"/a~1b":  `"1"`,
		"/c%d":   `"2"`,
		"/e^f":   `"3"`,
		"/g|h":   `"4"`,
		"/i\\j":  `"5"`,
		"/k\"l":  `"6"`,
		"/\x20":  `"7"`,
		"/m~0n":  `"8"`,

		"/foo/2":                    absent,
		"/foo/-":                    absent,
		"/foo/00":                   absent,
		"/foo/01":                   absent,
		"/foo/+1":                   absent,
		"/foo/1.0":                  absent,
		"/foo/":                     absent,
		"/foo/4294967296":           absent,
		"/foo/18446744073709551616": absent,
		"/foo/0/x":                  absent,
		"/foo/length":               absent,
		"/bar":                      absent,
		"//":                        absent,
	} {
		if got := outcome(extract.JSON([]byte(doc), pointer(t, text))); got != want {
			t.Errorf("JSON(%q) = %s, want %s", text, got, want)
		}
	}
	if got := outcome(extract.JSON([]byte(`"acme"`), extract.Pointer{})); got != `"acme"` {
		t.Errorf("JSON at the zero Pointer = %s", got)
	}
}

func TestJSONValues(t *testing.T) {
	t.Parallel()

	for value, want := range map[string]string{
		`"acme"`:               `"acme"`,
		`""`:                   `""`,
		`"\"\\\/\b\f\n\r\t"`:   `"\"\\/\b\f\n\r\t"`,
		`"\u0061\u00e9\u20AC"`: `"aé€"`,
		`"\ud83d\uDE00"`:       `"😀"`,
		`"é€😀"`:                `"é€😀"`,
		`"\uFFFF\ufffd"`:       `"\uffff�"`,
		"\"\u007f\u2028\"":     `"\x7f\u2028"`,
		`true`:                 `"true"`,
		`false`:                `"false"`,
		`null`:                 absent,
		`{}`:                   container,
		`[]`:                   container,
		`"a\u0000b"`:           hasNUL,

		`0`:                      `"0"`,
		`-0`:                     `"0"`,
		`0.0`:                    `"0"`,
		`-0.00e-7`:               `"0"`,
		`0e99999999999999999999`: `"0"`,
		`7`:                      `"7"`,
		`-7`:                     `"-7"`,
		`7.0`:                    `"7"`,
		`7.000e0`:                `"7"`,
		`1e3`:                    `"1000"`,
		`1E+3`:                   `"1000"`,
		`1000e0`:                 `"1000"`,
		`100000e-2`:              `"1000"`,
		`1.2345e4`:               `"12345"`,
		`0.0012e4`:               `"12"`,
		`1.50e1`:                 `"15"`,
		`10e-1`:                  `"1"`,
		`9007199254740992`:       `"9007199254740992"`,
		`-9007199254740992`:      `"-9007199254740992"`,
		`9007199254740992.000`:   `"9007199254740992"`,
		`9.007199254740992e15`:   `"9007199254740992"`,
		`90071992547409920e-1`:   `"9007199254740992"`,
		`9007199254740993`:       notWhole,
		`-9007199254740993`:      notWhole,
		`9007199254740999`:       notWhole,
		`9007199254741000`:       notWhole,
		`1e16`:                   notWhole,
		`1e400`:                  notWhole,
		`1e99999999999999999999`: notWhole,
		`18446744073709551617`:   notWhole,
		`0.5`:                    notWhole,
		`1.5`:                    notWhole,
		`1.0000000000000000001`:  notWhole,
		`15e-1`:                  notWhole,
		`1e-1`:                   notWhole,
		`1e-400`:                 notWhole,
		`1e-9999999999999999999`: notWhole,
		`1` + strings.Repeat("0", 1000) + `e-1000`: `"1"`,
		`0.` + strings.Repeat("0", 999) + `1e1000`: `"1"`,

		``: notJSON, `+1`: notJSON, `01`: notJSON, `-01`: notJSON, `-`: notJSON, `.5`: notJSON, `1.`: notJSON,
		`1.e1`: notJSON, `1e`: notJSON, `1e+`: notJSON, `1e1.5`: notJSON, `0x1`: notJSON, `1_0`: notJSON,
		`NaN`: notJSON, `Infinity`: notJSON, `-Infinity`: notJSON, `--1`: notJSON, `1 2`: notJSON,
		`tru`: notJSON, `True`: notJSON, `truee`: notJSON, `nul`: notJSON, `falsy`: notJSON, `undefined`: notJSON,
		`'a'`: notJSON, `a`: notJSON, `"a`: notJSON, `"a\"`: notJSON, `"a\`: notJSON, `"\ud83d\`: notJSON, `"\x41"`: notJSON, `"\'"`: notJSON, `"\u12"`: notJSON,
		`"\u12g4"`: notJSON, `"\U0041"`: notJSON, "\"\n\"": notJSON, "\"\x00\"": notJSON, "\"\x1f\"": notJSON,
		`"\ud83d"`: notJSON, `"\ude00"`: notJSON, `"\ud83dx"`: notJSON, `"\ud83d\u0061"`: notJSON, `"\ude00\ud83d"`: notJSON,
		`"\ud83d\ud83d\ude00"`: notJSON, `"\ud83d\n"`: notJSON, `"\ud83d\ude0"`: notJSON,
		"\"\xff\"": notJSON, "\"\xc0\xa7\"": notJSON, "\"\xed\xa0\x80\"": notJSON, "\"\xf4\x90\x80\x80\"": notJSON, "\"\xe2\x82\"": notJSON,
		`[1,]`: notJSON, `[,1]`: notJSON, `[1 2]`: notJSON, `[1`: notJSON, `[`: notJSON, `]`: notJSON, `[}`: notJSON, `[1}`: notJSON,
		`{"a":1,}`: notJSON, `{,}`: notJSON, `{"a"}`: notJSON, `{"a":}`: notJSON, `{"a" 1}`: notJSON, `{a:1}`: notJSON,
		`{1:1}`: notJSON, `{"a":1 "b":2}`: notJSON, `{"a":1`: notJSON, `{"a":1]`: notJSON, `{`: notJSON, `{"a`: notJSON,
		`{null:1}`: notJSON, `//`: notJSON, `/**/1`: notJSON, "1\f": notJSON, "\v1": notJSON, "\u00a01": notJSON, "1\x00": notJSON,
	} {
		for _, in := range []struct{ before, after, pointer string }{
			{"", "", ""},
			{" \t\r\n", " \t\r\n", ""},
			{`{"a":[0,{"b": `, ` ,"c":[{}]}]}`, "/a/1/b"},
		} {
			doc := in.before + value + in.after
			if got := outcome(extract.JSON([]byte(doc), pointer(t, in.pointer))); got != want {
				t.Errorf("JSON(%q, %q) = %s, want %s", doc, in.pointer, got, want)
			}
		}
	}
	if got := outcome(extract.JSON([]byte("\ufeff1"), extract.Pointer{})); got != notJSON {
		t.Errorf("JSON after a byte order mark = %s", got)
	}
}

// All of a document counts, so that what one reader takes and another refuses is
// refused.
func TestJSONDocuments(t *testing.T) {
	t.Parallel()

	nested := func(depth int, inner string) string {
		return strings.Repeat("[", depth) + inner + strings.Repeat("]", depth)
	}
	for _, tc := range []struct{ doc, pointer, want string }{
		{`{"id":"a","x":[tru]}`, "/id", notJSON},
		{`{"id":"a"}x`, "/id", notJSON},
		{`{"id":"a"}{"id":"b"}`, "/id", notJSON},
		{`{"id":"a","x":"` + "\xff" + `"}`, "/id", notJSON},
		{`{"id":"a","x":"\ud800"}`, "/id", notJSON},
		{`{"id":"a","x":01}`, "/id", notJSON},
		{`{"id":"a","x":1e999,"y":"\u0000"}`, "/id", `"a"`},
		{`{"` + "\xff" + `":1,"id":"a"}`, "/id", notJSON},

		// Twice is twice, however it is spelt and whatever it holds.
		{`{"id":"a","id":"b"}`, "/id", repeated},
		{`{"id":"a","id":"a"}`, "/id", repeated},
		{`{"id":"a","\u0069d":"b"}`, "/id", repeated},
		{`{"\u0069\u0064":"a","id":null}`, "/id", repeated},
		{`{"é":"a","\u00e9":"b"}`, "/é", repeated},
		{`{"😀":"a","\ud83d\ude00":"b"}`, "/😀", repeated},
		{`{"a":{"id":1},"a":{}}`, "/a/id", repeated},
		{`{"a":1,"a":{"id":1}}`, "/a/id", repeated},
		{`{"":1,"":2}`, "/", repeated},
		{`{"id":"a","id":"b"`, "/id", notJSON},
		{`{"id":"a","x":1,"x":2}`, "/id", `"a"`}, // off the way
		{`{"x":{"id":1,"id":2},"id":"a"}`, "/id", `"a"`},
		{`[{"id":1,"id":2},{"id":"a"}]`, "/1/id", `"a"`},
		{`{"id":{"id":"a"}}`, "/id/id", `"a"`},

		// A name that only some servers take for it.
		{`{"ID":"b","id":"a"}`, "/id", likeName},
		{`{"id":"a","Id":"b"}`, "/id", likeName},
		{`{"Id":"b"}`, "/id", likeName},
		{`{"\u0049d":"b"}`, "/id", likeName},
		{`{"id\u0000x":"b","id":"a"}`, "/id", likeName},
		{`{"ID\u0000":"b"}`, "/id", likeName},
		{`{"to\u212aens":"b","tokens":1}`, "/tokens", likeName},
		{`{"uſage":{"n":1}}`, "/usage/n", likeName},
		{`{"É":"b"}`, "/é", likeName},
		{`{"A":1,"a":{"id":"a"}}`, "/a/id", likeName},
		{`{"x":{"ID":1},"id":"a"}`, "/id", `"a"`}, // off the way
		{`{"id ":1,"id":"a","i":2,"idd":3,"":4,"\u0000":5}`, "/id", `"a"`},
		{`{"i-d":1,"i_d":2,"id":"a"}`, "/id", `"a"`},

		{nested(64, "7"), strings.Repeat("/0", 64), `"7"`},
		{nested(65, "7"), strings.Repeat("/0", 64), tooDeep},
		{`{"id":"a","x":` + nested(63, "{}") + `}`, "/id", tooDeep},
		{`{"id":"a","x":` + nested(62, "{}") + `}`, "/id", `"a"`},
		{strings.Repeat("[", 1<<20), "", tooDeep},
		{strings.Repeat(`{"a":`, 1<<20), "", tooDeep},
	} {
		if got := outcome(extract.JSON([]byte(tc.doc), pointer(t, tc.pointer))); got != tc.want {
			t.Errorf("JSON(%.200q, %.50q) = %s, want %s", tc.doc, tc.pointer, got, tc.want)
		}
	}
}

// The value's text is all that is allocated, whatever else the document holds.
func TestC85JSONAllocations(t *testing.T) {
	members := strings.Repeat(`"\u0078":[{"y":[1.5e300,null,true]},"\ud83d\ude00é"],`, 2000)
	for value, want := range map[string]float64{
		`"acme"`:               1,
		`"` + "a\\u0062" + `"`: 1,
		`9007199254740992`:     1,
		`null`:                 0,
		`[]`:                   0,
	} {
		doc := []byte("{" + members + `"usage":{"id":` + value + "}}")
		p := pointer(t, "/usage/id")
		if got := testing.AllocsPerRun(10, func() { _, _ = extract.JSON(doc, p) }); got > want {
			t.Errorf("JSON of %s allocates %v times, want %v", value, got, want)
		}
	}
}

// A node is a JSON value as encoding/json's tokens tell it, with all members.
type node struct {
	scalar   json.Token // of what is neither object nor array
	isObject bool
	isArray  bool
	names    []string // of an object's values
	values   []node
	depth    int // how deep the deepest array or object in it is, 0 for a scalar
}

func readNode(d *json.Decoder) (node, error) {
	token, err := d.Token()
	if err != nil {
		return node{}, err
	}
	delim, ok := token.(json.Delim)
	if !ok {
		return node{scalar: token}, nil
	}
	n := node{isObject: delim == '{', isArray: delim == '[', depth: 1}
	for d.More() {
		if n.isObject {
			name, err := d.Token()
			if err != nil {
				return node{}, err
			}
			n.names = append(n.names, name.(string))
		}
		value, err := readNode(d)
		if err != nil {
			return node{}, err
		}
		n.values = append(n.values, value)
		n.depth = max(n.depth, value.depth+1)
	}
	_, err = d.Token()
	return n, err
}

// pairedSurrogates reports that all \u escapes of a valid document are characters.
func pairedSurrogates(doc []byte) bool {
	unit := func(i int) rune {
		if i+6 > len(doc) || doc[i] != '\\' || doc[i+1] != 'u' {
			return -1
		}
		n, err := strconv.ParseUint(string(doc[i+2:i+6]), 16, 16)
		if err != nil {
			return -1
		}
		return rune(n)
	}
	for i := 0; i < len(doc); i++ {
		if doc[i] != '\\' {
			continue
		}
		if u := unit(i); u >= 0 && utf16.IsSurrogate(u) {
			if utf16.DecodeRune(u, unit(i+6)) == utf8.RuneError {
				return false
			}
			i += 6
		}
		i++
	}
	return true
}

// errRefused stands for all errors that extract doesn't tell apart.
var errRefused = errors.New("refused")

// jsonByReference is extract.JSON by way of encoding/json and math/big. It leaves out
// numbers with exponents that are too long for a big.Rat: known is false for those.
func jsonByReference(doc []byte, tokens []string) (value string, known bool, err error) {
	if !json.Valid(doc) || !utf8.Valid(doc) || !pairedSurrogates(doc) {
		return "", true, errRefused
	}
	d := json.NewDecoder(bytes.NewReader(doc))
	d.UseNumber()
	root, err := readNode(d)
	if err != nil || root.depth > 64 {
		return "", true, errRefused
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return "", true, errRefused
	}
	at := root
	var fault error
	for _, token := range tokens {
		next, found := node{}, false
		for i, name := range at.names {
			upToNUL, _, _ := strings.Cut(name, "\x00")
			switch {
			case name == token && found:
				fault = cmpFault(fault, extract.ErrRepeated)
			case name == token:
				next, found = at.values[i], true
			case strings.EqualFold(name, token) || strings.EqualFold(upToNUL, token):
				fault = cmpFault(fault, errRefused)
			}
		}
		if i, err := strconv.Atoi(token); at.isArray && err == nil && strconv.Itoa(i) == token && 0 <= i && i < len(at.values) {
			next, found = at.values[i], true
		}
		if !found {
			return "", true, cmpFault(fault, extract.ErrAbsent)
		}
		at = next
	}
	switch {
	case fault != nil:
		return "", true, fault
	case at.isArray || at.isObject:
		return "", true, errRefused
	}
	switch v := at.scalar.(type) {
	case string:
		if strings.Contains(v, "\x00") {
			return "", true, errRefused
		}
		return v, true, nil
	case bool:
		return strconv.FormatBool(v), true, nil
	case json.Number:
		return numberByReference(string(v))
	}
	return "", true, extract.ErrAbsent
}

// cmpFault returns the fault that was found first.
func cmpFault(first, then error) error {
	if first != nil {
		return first
	}
	return then
}

func numberByReference(text string) (value string, known bool, err error) {
	_, exponent, _ := strings.Cut(strings.ToLower(text), "e")
	if len(strings.TrimLeft(exponent, "+-0")) > 3 {
		return "", false, nil
	}
	r, ok := new(big.Rat).SetString(text)
	if !ok || !r.IsInt() || r.Num().CmpAbs(big.NewInt(1<<53)) > 0 {
		return "", true, errRefused
	}
	return r.Num().String(), true, nil
}

// The values are encoding/json's, where its laxity is not at stake, and are read the
// same from every spelling that it writes them in.
func FuzzJSON(f *testing.F) {
	for _, doc := range []string{
		`{"usage":{"total_tokens":42,"tags":["a","\u00e9\ud83d\ude00\n"]},"id":null}`,
		`{"a":1,"\u0061":2,"A":3,"a\u0000":4}`,
		` [ true , false , null , -0.0e+5 , 1E3 , 9007199254740992 , 9007199254740993 ] `,
		`{"":{"":"","~/":"x"}}`, `"\ud800"`, `"\udc00\ud800"`, "\"\xff\"", "\"\x1f\"",
		`{"K":1,"\u212a":2}`, `[[[[]]],{}]`, `1.50e1`, `1e-1`, `{"a":[{"b":"c"}]}`,
	} {
		for _, pointer := range []string{"", "/a", "/usage/total_tokens", "/usage/tags/1", "/5", "/", "//~0~1", "/k", "/a/0/b"} {
			f.Add([]byte(doc), pointer)
		}
	}
	f.Fuzz(func(t *testing.T, doc []byte, pointer string) {
		p, err := extract.ParsePointer(pointer)
		if err != nil {
			if p.String() != "" {
				t.Errorf("ParsePointer(%q) = %q, %v", pointer, p, err)
			}
			return
		}
		if p.String() != pointer {
			t.Errorf("ParsePointer(%q).String() = %q", pointer, p)
		}
		var tokens []string
		if pointer != "" {
			for token := range strings.SplitSeq(pointer[1:], "/") {
				tokens = append(tokens, strings.NewReplacer("~0", "~", "~1", "/").Replace(token))
			}
		}
		got, err := extract.JSON(doc, p)
		want, known, wantErr := jsonByReference(doc, tokens)
		if wantErr != nil && err != nil {
			// Which of the two a document with several faults gets is decided by order.
			if errors.Is(wantErr, errRefused) != (!errors.Is(err, extract.ErrAbsent) && !errors.Is(err, extract.ErrRepeated)) {
				t.Errorf("JSON(%q, %q) = %v, want %v", doc, pointer, err, wantErr)
			}
			if !errors.Is(wantErr, errRefused) && !errors.Is(err, wantErr) {
				t.Errorf("JSON(%q, %q) = %v, want %v", doc, pointer, err, wantErr)
			}
			return
		}
		if known && (got != want || (err == nil) != (wantErr == nil)) {
			t.Fatalf("JSON(%q, %q) = %q, %v; want %q, %v", doc, pointer, got, err, want, wantErr)
		}
		if err != nil {
			return
		}
		// The value in another document, in two more spellings.
		plain, err := json.Marshal(map[string]any{"k": got})
		if err != nil {
			t.Fatal(err)
		}
		var escaped strings.Builder
		escaped.WriteString("\n{\"o\":[{}],\"\\u006b\" :\t\"")
		for _, unit := range utf16.Encode([]rune(got)) {
			escaped.WriteString(`\u` + strconv.FormatUint(0x10000+uint64(unit), 16)[1:])
		}
		escaped.WriteString("\"\r}")
		k, err := extract.ParsePointer("/k")
		if err != nil {
			t.Fatal(err)
		}
		for _, spelling := range []string{string(plain), escaped.String()} {
			if again, err := extract.JSON([]byte(spelling), k); again != got || err != nil {
				t.Errorf("JSON(%q, /k) = %q, %v; want %q", spelling, again, err, got)
			}
		}
	})
}

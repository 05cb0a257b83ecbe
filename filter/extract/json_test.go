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
	if _, exponent, ok := strings.Cut(strings.ToLower(text), "e"); ok {
		if n, err := strconv.Atoi(exponent); err != nil || n < -1000 || n > 1000 {
			return "", false, nil
		}
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

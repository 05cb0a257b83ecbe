package extract

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

var (
	errNotJSON   = errors.New("is not JSON as RFC 8259 has it, or is cut short")
	errTooDeep   = errors.New("is nested more than 64 deep")
	errMember    = errors.New("has a name that some servers take for another")
	errNUL       = errors.New("has a NUL character, at which some servers end the text")
	errContainer = errors.New("is an object or an array")
	errNumber    = errors.New("is not a whole number from -2^53 to 2^53")
)

// maxDepth is how deep values may be nested, in JSON as in protobuf's groups.
const maxDepth = 64

// A Pointer says where in a JSON document a value is, as RFC 6901 has it:
// "/usage/total_tokens", "/items/0/id". The zero Pointer is the whole document.
type Pointer struct {
	text   string
	tokens []string // decoded
}

// ParsePointer reads a pointer. It is empty or begins with a slash, has at most 64
// slashes and is UTF-8; in it "~1" is a slash and "~0" a tilde.
func ParsePointer(text string) (Pointer, error) {
	switch {
	case text == "":
		return Pointer{}, nil
	case text[0] != '/':
		return Pointer{}, errors.New("does not begin with a slash")
	case !utf8.ValidString(text):
		return Pointer{}, errors.New("is not UTF-8")
	}
	tokens := strings.Split(text[1:], "/")
	if len(tokens) > maxDepth {
		return Pointer{}, errTooDeep
	}
	for i, token := range tokens {
		for rest := token; ; {
			_, after, ok := strings.Cut(rest, "~")
			if !ok {
				break
			}
			if after == "" || after[0] != '0' && after[0] != '1' {
				return Pointer{}, errors.New("has a ~ without 0 or 1 after it in " + strconv.Quote(token))
			}
			rest = after[1:]
		}
		tokens[i] = strings.ReplaceAll(strings.ReplaceAll(token, "~1", "/"), "~0", "~")
	}
	return Pointer{text: text, tokens: tokens}, nil
}

// String returns the text that p was read from.
func (p Pointer) String() string { return p.text }

// JSON returns the value at p in doc, which is checked to its end. A string is
// decoded, true and false are words, and a number is a whole one from -2^53 to 2^53
// in decimal digits however it is spelt: 1e3 and 1000.0 are "1000", -0 is "0".
//
// It returns [ErrAbsent] if there is no value, or null, and [ErrRepeated] if an object
// on the way has a name of p twice in whatever spelling. Objects and arrays are
// errors, and so are numbers that are not whole, or so large that readers round them
// differently. An empty document is malformed.
//
// Names are case-sensitive, but where an object on the way has one that differs from
// p's only in case, or by a NUL and what follows it, doc is refused: there are servers
// that take them for the same. For the like reason a value with a NUL is refused.
// Everywhere in doc, strings must be UTF-8 without unpaired surrogates, and arrays and
// objects are nested at most 64 deep. The string "5" and the number 5 are the same.
func JSON(doc []byte, p Pointer) (string, error) {
	s := scanner{rest: doc}
	if err := s.value(p.tokens, true, 0); err != nil {
		return "", err
	}
	s.space()
	switch {
	case len(s.rest) > 0:
		return "", errNotJSON
	case s.fault != nil:
		return "", s.fault
	case s.found == nil:
		return "", ErrAbsent
	}
	switch s.found[0] {
	case '{', '[':
		return "", errContainer
	case '"':
		return unquote(s.found[1 : len(s.found)-1])
	case 'n':
		return "", ErrAbsent
	case 't', 'f':
		return string(s.found), nil
	}
	return wholeNumber(s.found)
}

// A scanner checks a document from left to right.
type scanner struct {
	rest  []byte
	found []byte // the value at the pointer as it is spelt, if it is there
	fault error  // why there isn't one value there, in a document that is well-formed
}

func (s *scanner) space() {
	i := 0
	for i < len(s.rest) && (s.rest[i] == ' ' || s.rest[i] == '\n' || s.rest[i] == '\r' || s.rest[i] == '\t') {
		i++
	}
	s.rest = s.rest[i:]
}

// take steps over c if it is next but for spaces.
func (s *scanner) take(c byte) bool {
	s.space()
	if len(s.rest) == 0 || s.rest[0] != c {
		return false
	}
	s.rest = s.rest[1:]
	return true
}

// value steps over the next value, which is within depth others. If it is on the way,
// path leads from it to what is sought.
func (s *scanner) value(path []string, onWay bool, depth int) error {
	s.space()
	if len(s.rest) == 0 {
		return errNotJSON
	}
	start := s.rest
	var err error
	switch s.rest[0] {
	case '{':
		err = s.object(path, onWay && len(path) > 0, depth+1)
	case '[':
		err = s.array(path, onWay && len(path) > 0, depth+1)
	case '"':
		_, err = s.text()
	case 't':
		err = s.word("true")
	case 'f':
		err = s.word("false")
	case 'n':
		err = s.word("null")
	default:
		err = s.number()
	}
	if onWay && len(path) == 0 {
		s.found = start[:len(start)-len(s.rest)]
	}
	return err
}

func (s *scanner) object(path []string, onWay bool, depth int) error {
	if depth > maxDepth {
		return errTooDeep
	}
	s.take('{')
	if s.take('}') {
		return nil
	}
	for seen := false; ; {
		s.space()
		name, err := s.text()
		if err != nil {
			return err
		}
		if !s.take(':') {
			return errNotJSON
		}
		next, same := path, false
		if onWay {
			var alike bool
			same, alike = matches(name, path[0])
			switch {
			case s.fault != nil:
			case same && seen:
				s.fault = ErrRepeated
			case alike && !same:
				s.fault = errMember
			}
			seen = seen || same
			next = path[1:]
		}
		if err := s.value(next, same, depth); err != nil {
			return err
		}
		if s.take('}') {
			return nil
		}
		if !s.take(',') {
			return errNotJSON
		}
	}
}

func (s *scanner) array(path []string, onWay bool, depth int) error {
	if depth > maxDepth {
		return errTooDeep
	}
	s.take('[')
	if s.take(']') {
		return nil
	}
	index, next := -1, path
	if onWay {
		index, next = arrayIndex(path[0]), path[1:]
	}
	for i := 0; ; i++ {
		if err := s.value(next, i == index, depth); err != nil {
			return err
		}
		if s.take(']') {
			return nil
		}
		if !s.take(',') {
			return errNotJSON
		}
	}
}

// arrayIndex returns the number that token is, or -1 if it is none: no array has an
// element "-", "01" or one beyond all memory.
func arrayIndex(token string) int {
	const digits = 9
	if token == "" || len(token) > digits || token[0] == '0' && token != "0" {
		return -1
	}
	n := 0
	for i := range len(token) {
		if !isDigit(token[i]) {
			return -1
		}
		n = n*10 + int(token[i]-'0')
	}
	return n
}

func (s *scanner) word(word string) error {
	if len(s.rest) < len(word) || string(s.rest[:len(word)]) != word {
		return errNotJSON
	}
	s.rest = s.rest[len(word):]
	return nil
}

// number steps over what the grammar has for numbers. What may follow one is for the
// caller to see, as after all values.
func (s *scanner) number() error {
	i := 0
	digits := func() bool {
		start := i
		for i < len(s.rest) && isDigit(s.rest[i]) {
			i++
		}
		return i > start
	}
	next := func(chars string) bool {
		if i < len(s.rest) && strings.IndexByte(chars, s.rest[i]) >= 0 {
			i++
			return true
		}
		return false
	}
	next("-")
	ok := next("0") || digits()
	if ok && next(".") {
		ok = digits()
	}
	if ok && next("eE") {
		next("+-")
		ok = digits()
	}
	if !ok {
		return errNotJSON
	}
	s.rest = s.rest[i:]
	return nil
}

// text steps over a string, and returns what stands between its quotes.
func (s *scanner) text() ([]byte, error) {
	if len(s.rest) == 0 || s.rest[0] != '"' {
		return nil, errNotJSON
	}
	raw := s.rest[1:]
	for i := 0; i < len(raw); {
		c := raw[i]
		if c == '"' {
			s.rest = raw[i+1:]
			return raw[:i], nil
		}
		if ' ' <= c && c < utf8.RuneSelf && c != '\\' { // nearly all there is, quickly
			i++
			continue
		}
		_, n := character(raw[i:])
		if n == 0 {
			return nil, errNotJSON
		}
		i += n
	}
	return nil, errNotJSON
}

// character returns the first character of a string's inside, and how many bytes
// spell it. That is 0 if it may not stand there. raw is not empty.
func character(raw []byte) (r rune, n int) {
	switch c := raw[0]; {
	case c < ' ':
		return 0, 0
	case c == '\\':
		return escaped(raw)
	case c < utf8.RuneSelf:
		return rune(c), 1
	}
	r, n = utf8.DecodeRune(raw)
	if r == utf8.RuneError && n == 1 {
		return 0, 0
	}
	return r, n
}

// escaped is character for what begins with a backslash.
func escaped(raw []byte) (r rune, n int) {
	if len(raw) < 2 {
		return 0, 0
	}
	switch c := raw[1]; c {
	case '"', '\\', '/':
		return rune(c), 2
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	}
	const single, pair = len(`\uXXXX`), len(`\uXXXX\uXXXX`)
	unit, ok := codeUnit(raw)
	if !ok {
		return 0, 0
	}
	if !utf16.IsSurrogate(unit) {
		return unit, single
	}
	second, ok := codeUnit(raw[single:])
	if r = utf16.DecodeRune(unit, second); !ok || r == unicode.ReplacementChar {
		return 0, 0
	}
	return r, pair
}

// codeUnit reads an escape of the form \uXXXX.
func codeUnit(raw []byte) (unit rune, ok bool) {
	const length = len(`\uXXXX`)
	if len(raw) < length || raw[0] != '\\' || raw[1] != 'u' {
		return 0, false
	}
	for _, c := range raw[2:length] {
		digit := unhex(c)
		if digit > 0xF {
			return 0, false
		}
		unit = unit<<4 | rune(digit)
	}
	return unit, true
}

// matches reports that raw, which is a name between its quotes, is the name want, and
// also that it looks like it to some server: to one that ignores case, as Go's
// encoding/json does, or to one that ends texts at a NUL.
func matches(raw []byte, want string) (same, alike bool) {
	same = true
	for len(raw) > 0 {
		c, n := character(raw)
		raw = raw[n:]
		if want == "" {
			return false, c == 0
		}
		w, size := utf8.DecodeRuneInString(want)
		want = want[size:]
		if c == w {
			continue
		}
		if same = false; fold(c) != fold(w) {
			return false, false
		}
	}
	return same && want == "", want == ""
}

// fold returns the same for all cases of a character, and else what is its own.
func fold(r rune) rune {
	least := r
	for next := unicode.SimpleFold(r); next != r; next = unicode.SimpleFold(next) {
		least = min(least, next)
	}
	return least
}

// unquote decodes the inside of a string that has been checked.
func unquote(raw []byte) (string, error) {
	if bytes.IndexByte(raw, '\\') < 0 {
		return string(raw), nil
	}
	var b strings.Builder
	b.Grow(len(raw)) // no escape is shorter than its character
	for len(raw) > 0 {
		r, n := character(raw)
		if r == 0 {
			return "", errNUL
		}
		b.WriteRune(r)
		raw = raw[n:]
	}
	return b.String(), nil
}

// wholeNumber returns a number that has been checked, if it is whole and not too
// large, in decimal digits. It takes no more steps than text has bytes, whatever the
// exponent says.
func wholeNumber(text []byte) (string, error) {
	text, negative := bytes.CutPrefix(text, []byte{'-'})
	var n int64             // the digits but for zeros at the end
	zeros, decimals := 0, 0 // how many of each there are at the end
	point := false
	i := 0
	for ; i < len(text) && text[i]|0x20 != 'e'; i++ {
		c := text[i]
		if c == '.' {
			point = true
			continue
		}
		if point {
			decimals++
		}
		if zeros++; c == '0' {
			continue
		}
		// The last digit is not zero, so what is too large here can't be whole and small.
		var fits bool
		if n, fits = shift(n, zeros); !fits {
			return "", errNumber
		}
		n += int64(c - '0')
		zeros = 0
	}
	if n == 0 {
		return "0", nil
	}
	power := zeros - decimals
	if i < len(text) {
		power += exponent(text[i+1:])
	}
	n, fits := shift(n, power)
	if power < 0 || !fits {
		return "", errNumber
	}
	if negative {
		n = -n
	}
	return strconv.FormatInt(n, 10), nil
}

// shift returns n with power zeros behind it, if that is at most 2^53.
func shift(n int64, power int) (shifted int64, fits bool) {
	for ; power > 0 && 0 < n && n <= maxWhole; power-- {
		n *= 10
	}
	return n, n <= maxWhole
}

// exponent reads digits with a sign or without. One that is longer than any document
// is as good as another.
func exponent(text []byte) int {
	const enough = 1 << 40
	digits := bytes.TrimLeft(text, "+-")
	n := 0
	for _, c := range digits {
		n = min(n*10+int(c-'0'), enough)
	}
	if text[0] == '-' {
		return -n
	}
	return n
}

package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"iter"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// A node is a JSON value. The decoding of encoding/json keeps neither a field that is
// given twice nor the path of a wrong one, hence this tree.
type node struct {
	kind   kind
	text   string // of a string, or of a number as it is written
	items  []node // of an array
	fields []field
}

type field struct {
	name  string
	value node
}

type kind string

const (
	kindObject kind = "an object"
	kindArray  kind = "a list"
	kindString kind = "a string"
	kindNumber kind = "a number"
	kindBool   kind = "a boolean"
	kindNull   kind = "null"
)

// maxDepth is more than the document ever needs.
const maxDepth = 32

// decoder gathers the faults of one document.
type decoder struct{ errs []error }

func (d *decoder) fault(path, format string, args ...any) {
	d.errs = append(d.errs, &Error{Path: path, Msg: fmt.Sprintf(format, args...)})
}

// decode reads text as one JSON value.
func decode(text []byte) (*decoder, node) {
	d := &decoder{}
	// encoding/json would replace such bytes silently.
	if !utf8.Valid(text) {
		d.fault("", "is not valid UTF-8")
		return d, node{}
	}
	// This finds every fault of syntax, text after the value included.
	var whole json.RawMessage
	if err := json.Unmarshal(text, &whole); err != nil {
		d.fault("", "%s", strings.TrimPrefix(err.Error(), "json: "))
		return d, node{}
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	return d, d.node(dec, "", 0)
}

// node reads the next value. After a fault the tree is not to be used.
func (d *decoder) node(dec *json.Decoder, path string, depth int) node {
	if depth > maxDepth {
		d.fault(path, "is nested too deeply")
		return node{}
	}
	token, err := dec.Token()
	if err != nil {
		d.fault(path, "%v", err)
		return node{}
	}
	switch t := token.(type) {
	case string:
		return node{kind: kindString, text: t}
	case json.Number:
		return node{kind: kindNumber, text: t.String()}
	case bool:
		return node{kind: kindBool, text: strconv.FormatBool(t)}
	case json.Delim:
		if t == '[' {
			return d.array(dec, path, depth)
		}
		return d.object(dec, path, depth)
	default:
		return node{kind: kindNull}
	}
}

func (d *decoder) array(dec *json.Decoder, path string, depth int) node {
	n := node{kind: kindArray}
	for dec.More() {
		item := d.node(dec, index(path, len(n.items)), depth+1)
		if len(d.errs) > 0 {
			return node{}
		}
		n.items = append(n.items, item)
	}
	_, _ = dec.Token() // the closing bracket: the syntax has been checked
	return n
}

func (d *decoder) object(dec *json.Decoder, path string, depth int) node {
	n := node{kind: kindObject}
	for dec.More() {
		token, err := dec.Token()
		name, ok := token.(string)
		if err != nil || !ok {
			d.fault(path, "has no field name where one is due")
			return node{}
		}
		value := d.node(dec, join(path, name), depth+1)
		if len(d.errs) > 0 {
			return node{}
		}
		n.fields = append(n.fields, field{name, value})
	}
	_, _ = dec.Token()
	return n
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

func index(path string, i int) string {
	return path + "[" + strconv.Itoa(i) + "]"
}

// is reports whether n has the kind, and a fault if it does not.
func (d *decoder) is(path string, n node, want kind) bool {
	if n.kind != want {
		d.fault(path, "is %s, want %s", n.kind, want)
		return false
	}
	return true
}

// fields returns the fields of an object by name, having reported those that are
// not known or are given twice.
func (d *decoder) fields(path string, n node, known ...string) map[string]node {
	if !d.is(path, n, kindObject) {
		return nil
	}
	fields := make(map[string]node, len(n.fields))
	for _, f := range n.fields {
		if _, twice := fields[f.name]; twice {
			d.fault(join(path, f.name), "is given twice")
			continue
		}
		fields[f.name] = f.value
		if !slices.Contains(known, f.name) {
			d.fault(join(path, f.name), "is not a known field; known are %s", strings.Join(known, ", "))
		}
	}
	return fields
}

// str returns a string field, or the fallback where it is absent.
func (d *decoder) str(path string, fields map[string]node, name, fallback string) string {
	n, ok := fields[name]
	if !ok || !d.is(join(path, name), n, kindString) {
		return fallback
	}
	return n.text
}

// required returns a string field that must be there and not empty.
func (d *decoder) required(path string, fields map[string]node, name string) string {
	if _, ok := fields[name]; !ok {
		d.fault(join(path, name), "is required")
		return ""
	}
	before := len(d.errs)
	s := d.str(path, fields, name, "")
	if s == "" && len(d.errs) == before {
		d.fault(join(path, name), "is empty")
	}
	return s
}

// list returns the elements of a list field, which must be there.
func (d *decoder) list(path string, fields map[string]node, name string) []node {
	n, ok := fields[name]
	if !ok {
		d.fault(join(path, name), "is required")
		return nil
	}
	if !d.is(join(path, name), n, kindArray) {
		return nil
	}
	return n.items
}

// some returns the elements of a list field with their paths. One that is there must
// not be empty: it would be read as all, or as none, by different people.
func (d *decoder) some(path string, fields map[string]node, name string) iter.Seq2[string, node] {
	return func(yield func(string, node) bool) {
		n, ok := fields[name]
		path = join(path, name)
		if !ok || !d.is(path, n, kindArray) {
			return
		}
		if len(n.items) == 0 {
			d.fault(path, "is empty")
		}
		for i, item := range n.items {
			if !yield(index(path, i), item) {
				return
			}
		}
	}
}

// texts returns the strings of a list field, none of them empty.
func (d *decoder) texts(path string, fields map[string]node, name string) []string {
	var all []string
	for at, item := range d.some(path, fields, name) {
		if text, ok := d.text(at, item); ok {
			all = append(all, text)
		}
	}
	return all
}

// text returns a string that must not be empty.
func (d *decoder) text(path string, n node) (string, bool) {
	if !d.is(path, n, kindString) {
		return "", false
	}
	if n.text == "" {
		d.fault(path, "is empty")
		return "", false
	}
	return n.text, true
}

// whole returns a whole number of a range, or the fallback where the field is absent.
// The unit is for the message.
func (d *decoder) whole(path string, fields map[string]node, name string, fallback, least, most int64, unit string) int64 {
	n, ok := fields[name]
	if !ok {
		return fallback
	}
	return d.wholeNode(join(path, name), n, fallback, least, most, unit)
}

func (d *decoder) wholeNode(path string, n node, fallback, least, most int64, unit string) int64 {
	if !d.is(path, n, kindNumber) {
		return fallback
	}
	value, err := strconv.ParseInt(n.text, 10, 64)
	switch {
	case err != nil:
		d.fault(path, "%s is not a whole number of %s", n.text, unit)
	case value < least || value > most:
		d.fault(path, "is %d, want %d to %d", value, least, most)
	default:
		return value
	}
	return fallback
}

// isTrue checks a field that is there to say that something applies.
func (d *decoder) isTrue(path string, n node) {
	if d.is(path, n, kindBool) && n.text != "true" {
		d.fault(path, "is false, want true or nothing")
	}
}

// A word is a value that has a name in the configuration.
type word[T any] struct {
	name  string
	value T
}

// choice returns the value of a string field that has few, or the fallback where it
// is absent. The noun is for the message.
func choice[T any](d *decoder, path string, fields map[string]node, name, noun string, fallback T, words []word[T]) (value T, ok bool) {
	n, given := fields[name]
	if !given {
		return fallback, true
	}
	return choiceNode(d, join(path, name), n, noun, fallback, words)
}

func choiceNode[T any](d *decoder, path string, n node, noun string, fallback T, words []word[T]) (value T, ok bool) {
	if !d.is(path, n, kindString) {
		return fallback, false
	}
	names := make([]string, 0, len(words))
	for _, w := range words {
		if w.name == n.text {
			return w.value, true
		}
		names = append(names, w.name)
	}
	d.fault(path, "%q is not %s; known are %s", n.text, noun, strings.Join(names, ", "))
	return fallback, false
}

// expression compiles an RE2 expression, whose time is linear in what it is matched
// with.
func (d *decoder) expression(path, text string) *regexp.Regexp {
	re, err := regexp.Compile(text)
	if err != nil {
		d.fault(path, "is not an RE2 expression: %s", strings.TrimPrefix(err.Error(), "error parsing regexp: "))
		return nil
	}
	return re
}

package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
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

func (d *decoder) config(n node) *Config {
	fields := d.fields("", n, "version", "domain", "cluster", "filter")
	if fields == nil {
		return nil
	}
	c := &Config{
		Version: d.str("", fields, "version", ""),
		Domain:  d.required("", fields, "domain"),
		Cluster: d.required("", fields, "cluster"),
	}
	block, ok := fields["filter"]
	if !ok {
		d.fault("filter", "is required")
		return nil
	}
	c.Block = d.block("filter", block)
	return c
}

func (d *decoder) block(path string, n node) Block {
	fields := d.fields(path, n, "timeout", "hold_bytes", "rules")
	if fields == nil {
		return Block{}
	}
	b := Block{
		Timeout:   d.timeout(path, fields),
		HoldBytes: d.holdBytes(path, fields),
	}
	names := map[string]string{}
	places := map[string]string{}
	for i, item := range d.list(path, fields, "rules") {
		at := index(join(path, "rules"), i)
		r := d.rule(at, item, places)
		if other, taken := names[r.Name]; taken && r.Name != "" {
			d.fault(join(at, "name"), "%q is the name of %s too", r.Name, other)
		}
		names[r.Name] = at
		b.Rules = append(b.Rules, r)
	}
	return b
}

func (d *decoder) timeout(path string, fields map[string]node) time.Duration {
	text := d.str(path, fields, "timeout", DefaultTimeout.String())
	timeout, err := time.ParseDuration(text)
	switch {
	case err != nil:
		d.fault(join(path, "timeout"), "%q is not a duration such as 250ms", text)
	case timeout < MinTimeout || timeout > MaxTimeout:
		d.fault(join(path, "timeout"), "is %v, want %v to %v", timeout, MinTimeout, MaxTimeout)
	}
	return timeout
}

func (d *decoder) holdBytes(path string, fields map[string]node) int64 {
	n, ok := fields["hold_bytes"]
	if !ok {
		return DefaultHoldBytes
	}
	path = join(path, "hold_bytes")
	if !d.is(path, n, kindNumber) {
		return 0
	}
	size, err := strconv.ParseInt(n.text, 10, 64)
	switch {
	case err != nil:
		d.fault(path, "%s is not a whole number of bytes", n.text)
	case size < 1 || size > MaxHoldBytes:
		d.fault(path, "is %d, want 1 to %d", size, int64(MaxHoldBytes))
	}
	return size
}

// rule reads a rule. In places is where each descriptor was seen before: the same one
// twice would charge a request twice.
func (d *decoder) rule(path string, n node, places map[string]string) Rule {
	fields := d.fields(path, n, "name", "descriptors")
	if fields == nil {
		return Rule{}
	}
	r := Rule{Name: d.str(path, fields, "name", "")}
	items := d.list(path, fields, "descriptors")
	if fields["descriptors"].kind == kindArray && len(items) == 0 {
		d.fault(join(path, "descriptors"), "is empty")
	}
	for i, item := range items {
		at := index(join(path, "descriptors"), i)
		before := len(d.errs)
		desc := d.descriptor(at, item)
		if len(d.errs) == before {
			text := fmt.Sprintf("%#v", desc)
			if other, seen := places[text]; seen {
				d.fault(at, "is the same as %s", other)
			}
			places[text] = at
		}
		r.Descriptors = append(r.Descriptors, desc)
	}
	return r
}

func (d *decoder) descriptor(path string, n node) Descriptor {
	fields := d.fields(path, n, "entries", "cost")
	if fields == nil {
		return Descriptor{}
	}
	var desc Descriptor
	items := d.list(path, fields, "entries")
	if fields["entries"].kind == kindArray && len(items) == 0 {
		d.fault(join(path, "entries"), "is empty")
	}
	for i, item := range items {
		desc.Entries = append(desc.Entries, d.entry(index(join(path, "entries"), i), item))
	}
	switch cost := d.str(path, fields, "cost", "one"); cost {
	case "one":
		desc.Cost = CostOne
	case "body_bytes":
		desc.Cost = CostBodyBytes
	default:
		d.fault(join(path, "cost"), "%q is not a cost; known are one, body_bytes", cost)
	}
	return desc
}

func (d *decoder) entry(path string, n node) Entry {
	fields := d.fields(path, n, "key", "header", "type", "missing", "default")
	if fields == nil {
		return Entry{}
	}
	e := Entry{
		Key:    d.required(path, fields, "key"),
		Source: d.source(path, fields),
	}
	typed := true
	switch t := d.str(path, fields, "type", "string"); t {
	case "string":
		e.Type = TypeString
	case "uuid":
		e.Type = TypeUUID
	default:
		typed = false
		d.fault(join(path, "type"), "%q is not a type; known are string, uuid", t)
	}
	known := true
	switch m := d.str(path, fields, "missing", "deny"); m {
	case "deny":
		e.Missing = MissingDeny
	case "skip":
		e.Missing = MissingSkip
	case "default":
		e.Missing = MissingDefault
	default:
		known = false
		d.fault(join(path, "missing"), "%q is not a way to deal with it; known are deny, skip, default", m)
	}
	_, given := fields["default"]
	switch {
	case e.Missing == MissingDefault:
		before := len(d.errs)
		value := d.required(path, fields, "default")
		if !typed || len(d.errs) > before {
			break
		}
		canonical, err := e.Type.Canonical(value)
		if err != nil {
			d.fault(join(path, "default"), "%q %v", value, err)
		}
		e.Default = canonical
	case given && known:
		d.fault(join(path, "default"), "needs missing: default")
	}
	return e
}

// source reads the one source of an entry. Each kind of source is a field of its
// own; exactly one is to be given.
func (d *decoder) source(path string, fields map[string]node) Source {
	if _, ok := fields["header"]; !ok {
		d.fault(path, "has no source; known is header")
		return Source{}
	}
	before := len(d.errs)
	name := strings.ToLower(d.required(path, fields, "header"))
	if len(d.errs) > before {
		return Source{}
	}
	switch {
	case !isToken(name):
		d.fault(join(path, "header"), "%q is not a header's name", name)
	case name == "host":
		// Envoy turns it into :authority, so an entry that skips it would never apply.
		d.fault(join(path, "header"), "host is not visible to a filter in Envoy")
	}
	return Source{Kind: SourceHeader, Name: name}
}

// isToken reports whether s is a token of RFC 9110, section 5.6.2, in lower case.
func isToken(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0:
		default:
			return false
		}
	}
	return s != ""
}

package policy

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// An Error is a fault of a policy file, or a warning, and its place.
type Error struct {
	File   string
	Line   int    // from 1
	Column int    // from 1
	Path   string // the field, such as descriptors[0].budget.burst; "" for the whole file
	Msg    string
}

// Error renders the place and the fault as file:line:column: field: message.
func (e *Error) Error() string {
	if e.Path == "" {
		return fmt.Sprintf("%s:%d:%d: %s", e.File, e.Line, e.Column, e.Msg)
	}
	return fmt.Sprintf("%s:%d:%d: %s: %s", e.File, e.Line, e.Column, e.Path, e.Msg)
}

type position struct{ line, column int }

// maxNodes and maxDepth bound what a document may unfold to through its aliases,
// which can name each other many times over, or themselves.
const (
	maxNodes = 1 << 18
	maxDepth = 64
)

// A document is a YAML file being read: it collects all faults rather than stopping
// at the first.
type document struct {
	file     string
	origins  map[*node]*origin
	compared int // pairs of descriptors that the lint has looked at
	errs     []*Error
	warnings []*Error
	nodes    int
	depth    int
	tooLarge bool
}

// faults returns all faults, joined in the order of their places; nil if there are none.
func (d *document) faults() error {
	sortByPlace(d.errs)
	errs := make([]error, len(d.errs))
	for i, e := range d.errs {
		errs[i] = e
	}
	return errors.Join(errs...)
}

func sortByPlace(errs []*Error) {
	slices.SortStableFunc(errs, func(a, b *Error) int {
		return cmp.Or(cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
}

// value reads any YAML as the values that encoding/json has: nil, bool, float64, string,
// []any and map[string]any.
func (d *document) value(f field) any {
	n := f.value
	switch n.Kind {
	case yaml.MappingNode:
		m := map[string]any{}
		d.within(n, f.path, func() {
			members, _ := d.members(n, f.path)
			for _, f := range members {
				m[f.key.Value] = d.value(f)
			}
		})
		return m
	case yaml.SequenceNode:
		list := make([]any, 0, len(n.Content))
		d.within(n, f.path, func() {
			for _, item := range d.items(f) {
				list = append(list, d.value(item))
			}
		})
		return list
	case yaml.ScalarNode:
		switch n.Tag {
		case "!!null":
			return nil
		case "!!bool":
			return d.boolean(f)
		case "!!int", "!!float":
			var number float64
			if n.Decode(&number) != nil || math.IsNaN(number) || math.IsInf(number, 0) {
				d.failf(n, f.path, "must be a finite number, not %s", describe(n))
			}
			return number
		}
		return n.Value
	case yaml.DocumentNode, yaml.AliasNode:
	}
	return nil
}

// within runs read one level deeper, unless the document is too deep or too large.
func (d *document) within(n *yaml.Node, path string, read func()) {
	if d.depth >= maxDepth || d.nodes > maxNodes {
		if !d.tooLarge {
			d.failf(n, path, "the file is nested more than %d deep, or unfolds to more than %d values", maxDepth, maxNodes)
		}
		d.tooLarge = true
		return
	}
	d.depth++
	read()
	d.depth--
}

func (d *document) failf(n *yaml.Node, path, format string, args ...any) {
	d.errs = append(d.errs, d.fault(n, path, fmt.Sprintf(format, args...)))
}

func (d *document) warnf(n *yaml.Node, path, format string, args ...any) {
	d.warnings = append(d.warnings, d.fault(n, path, fmt.Sprintf(format, args...)))
}

func (d *document) fault(n *yaml.Node, path, msg string) *Error {
	return &Error{File: d.file, Line: n.Line, Column: n.Column, Path: path, Msg: msg}
}

var syntaxError = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)$`)

// parse returns the root of the first YAML document in data, or nil with the fault
// recorded.
func (d *document) parse(data []byte) *yaml.Node {
	dec := yaml.NewDecoder(strings.NewReader(string(data)))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			d.errs = append(d.errs, &Error{File: d.file, Line: 1, Column: 1, Msg: "the file is empty"})
			return nil
		}
		d.errs = append(d.errs, d.syntaxError(data, err))
		return nil
	}
	var second yaml.Node
	if err := dec.Decode(&second); err == nil {
		d.warnf(&second, "", "only the first YAML document of a file is read; this one is ignored")
	} else if !errors.Is(err, io.EOF) {
		d.errs = append(d.errs, d.syntaxError(data, err))
	}
	return d.resolve(doc.Content[0])
}

// syntaxError gives the parser's message a column: that of the first character of
// the line it names.
func (d *document) syntaxError(data []byte, err error) *Error {
	e := &Error{File: d.file, Line: 1, Column: 1, Msg: err.Error()}
	m := syntaxError.FindStringSubmatch(err.Error())
	if m == nil {
		return e
	}
	e.Msg = m[2]
	if line, err := strconv.Atoi(m[1]); err == nil && line > 0 {
		e.Line = line
		if lines := strings.Split(string(data), "\n"); line <= len(lines) {
			text := lines[line-1]
			e.Column = len(text) - len(strings.TrimLeft(text, " \t")) + 1
		}
	}
	return e
}

// resolve follows an alias, and counts the node against the document's bound.
func (d *document) resolve(n *yaml.Node) *yaml.Node {
	d.nodes++
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// A field is one member of a mapping.
type field struct {
	key, value *yaml.Node
	path       string
}

// referenceFields are all fields of the reference's format. It takes any of them in any
// of its mappings, and ignores those that have no meaning there.
var referenceFields = []string{
	"domain", "descriptors", "key", "value", "rate_limit", "unit", "requests_per_unit", "unlimited",
	"name", "replaces", "shadow_mode", "quota_mode", "detailed_metric", "value_to_metric",
	"share_threshold", "metadata",
}

// fields reads a mapping whose keys are all in allowed; other keys, repeated keys and
// other kinds of node are faults. ok is false when n is no mapping.
func (d *document) fields(n *yaml.Node, path string, allowed ...string) (map[string]field, bool) {
	members, ok := d.members(n, path)
	if !ok {
		return nil, false
	}
	fields := make(map[string]field, len(members))
	for _, f := range members {
		if !slices.Contains(allowed, f.key.Value) {
			d.unknown(f, allowed)
			continue
		}
		fields[f.key.Value] = f
	}
	return fields, true
}

// referenceMapping reads a mapping that the reference's format has too, as lenient as
// the reference is with its own fields: one out of place is only warned of, and an empty
// one is absent.
func (d *document) referenceMapping(n *yaml.Node, path string, allowed ...string) (map[string]field, bool) {
	members, ok := d.members(n, path)
	if !ok {
		return nil, false
	}
	fields := make(map[string]field, len(members))
	for _, f := range members {
		theirs := slices.Contains(referenceFields, f.key.Value)
		switch {
		case !slices.Contains(allowed, f.key.Value) && theirs:
			d.warnf(f.key, f.path, "has no meaning here and is ignored, as envoyproxy/ratelimit does")
		case !slices.Contains(allowed, f.key.Value):
			d.unknown(f, allowed)
		case theirs && isNull(f.value):
			d.warnf(f.key, f.path, "is empty, which is as good as absent")
		default:
			fields[f.key.Value] = f
		}
	}
	return fields, true
}

func (d *document) unknown(f field, allowed []string) {
	d.failf(f.key, f.path, "unknown field; known here: %s", strings.Join(allowed, ", "))
}

// members reads a mapping in the order of the file: its own members, then those that it
// merges in by <<, which its own take precedence over. Members that stand twice are
// faults. ok is false when n is no mapping.
func (d *document) members(n *yaml.Node, path string) (members []field, ok bool) {
	if n.Kind != yaml.MappingNode {
		d.failf(n, path, "must be a mapping, not %s", describe(n))
		return nil, false
	}
	var merged []*yaml.Node
	first := make(map[string]*yaml.Node, len(n.Content)/2)
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], d.resolve(n.Content[i+1])
		at := join(path, key.Value)
		switch {
		case key.Kind == yaml.ScalarNode && key.Tag == "!!merge":
			if value.Kind == yaml.SequenceNode {
				for _, n := range value.Content {
					merged = append(merged, d.resolve(n))
				}
			} else {
				merged = append(merged, value)
			}
		case key.Kind != yaml.ScalarNode:
			d.failf(key, path, "a field's name must be a text, not %s", describe(key))
		case first[key.Value] != nil:
			d.failf(key, at, "stands twice; the first is on line %d", first[key.Value].Line)
		default:
			first[key.Value] = key
			members = append(members, field{key: key, value: value, path: at})
		}
	}
	for _, n := range merged {
		d.within(n, path, func() {
			more, _ := d.members(n, path)
			for _, f := range more {
				if first[f.key.Value] == nil {
					first[f.key.Value] = f.key
					members = append(members, f)
				}
			}
		})
	}
	return members, true
}

// items reads a list.
func (d *document) items(f field) []field {
	if f.value.Kind != yaml.SequenceNode {
		if !isNull(f.value) {
			d.failf(f.value, f.path, "must be a list, not %s", describe(f.value))
		}
		return nil
	}
	items := make([]field, len(f.value.Content))
	for i, n := range f.value.Content {
		items[i] = field{key: n, value: d.resolve(n), path: fmt.Sprintf("%s[%d]", f.path, i)}
	}
	return items
}

// text reads a scalar as it is written: 404, true and 2024-01-01 are texts too.
func (d *document) text(f field) string {
	if f.value.Kind != yaml.ScalarNode {
		d.failf(f.value, f.path, "must be a text, not %s", describe(f.value))
		return ""
	}
	if isNull(f.value) {
		return ""
	}
	return f.value.Value
}

// boolean reads true or false, or one of the other words of YAML 1.1 for them, which the
// reference takes.
func (d *document) boolean(f field) bool {
	if f.value.Kind == yaml.ScalarNode && (f.value.Style == 0 || f.value.Tag == "!!bool") {
		switch strings.ToLower(f.value.Value) {
		case "true", "yes", "y", "on":
			return true
		case "false", "no", "n", "off":
			return false
		}
	}
	d.failf(f.value, f.path, "must be true or false, not %s", describe(f.value))
	return false
}

// amount reads a number of units, whole or not.
func (d *document) amount(f field) float64 { return number(d, f, parseAmount) }

// whole reads a whole number of units.
func (d *document) whole(f field) int64 { return number(d, f, parseWhole) }

// count reads a whole number in any notation of YAML's, such as 0x10, or of Weir's.
func (d *document) count(f field) int64 {
	return number(d, f, func(text string) (int64, error) {
		if n, err := strconv.ParseUint(strings.TrimPrefix(text, "+"), 0, 64); f.value.Tag == "!!int" && err == nil && n <= MaxUnits {
			return int64(n), nil
		}
		return parseWhole(text)
	})
}

func number[T any](d *document, f field, parse func(string) (T, error)) T {
	var zero T
	if f.value.Kind != yaml.ScalarNode {
		d.failf(f.value, f.path, "must be a number, not %s", describe(f.value))
		return zero
	}
	n, err := parse(f.value.Value)
	if err != nil {
		d.failf(f.value, f.path, "%v", err)
		return zero
	}
	return n
}

func join(path, key string) string {
	if path == "" || key == "" {
		return path + key
	}
	return path + "." + key
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		if isNull(n) {
			return "nothing"
		}
		return strconv.Quote(n.Value)
	case yaml.DocumentNode, yaml.AliasNode:
	}
	return "this"
}

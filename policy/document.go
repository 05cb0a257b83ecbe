package policy

import (
	"errors"
	"fmt"
	"io"
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
	errs     []error
	warnings []*Error
	nodes    int
	depth    int
	tooLarge bool
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

// fields reads a mapping whose keys are all in allowed; other keys, repeated keys and
// other kinds of node are faults. ok is false when n is no mapping.
func (d *document) fields(n *yaml.Node, path string, allowed ...string) (map[string]field, bool) {
	if n.Kind != yaml.MappingNode {
		d.failf(n, path, "must be a mapping, not %s", describe(n))
		return nil, false
	}
	fields := make(map[string]field, len(n.Content)/2)
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], d.resolve(n.Content[i+1])
		at := join(path, key.Value)
		if first, ok := fields[key.Value]; ok {
			d.failf(key, at, "stands twice; the first is on line %d", first.key.Line)
			continue
		}
		if key.Kind != yaml.ScalarNode || !slices.Contains(allowed, key.Value) {
			d.failf(key, at, "unknown field; known here: %s", strings.Join(allowed, ", "))
			continue
		}
		fields[key.Value] = field{key: key, value: value, path: at}
	}
	return fields, true
}

// items reads a list.
func (d *document) items(f field) []field {
	if f.value.Kind != yaml.SequenceNode {
		if f.value.Tag != "!!null" {
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
	if f.value.Tag == "!!null" {
		return ""
	}
	return f.value.Value
}

func (d *document) boolean(f field) bool {
	var b bool
	if f.value.Kind != yaml.ScalarNode || f.value.Tag != "!!bool" || f.value.Decode(&b) != nil {
		d.failf(f.value, f.path, "must be true or false, not %s", describe(f.value))
	}
	return b
}

// amount reads a number of units, whole or not.
func (d *document) amount(f field) float64 { return number(d, f, parseAmount) }

// whole reads a whole number of units.
func (d *document) whole(f field) int64 { return number(d, f, parseWhole) }

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

func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		if n.Tag == "!!null" {
			return "nothing"
		}
		return strconv.Quote(n.Value)
	case yaml.DocumentNode, yaml.AliasNode:
	}
	return "this"
}

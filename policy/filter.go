package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// A Filter is the `filter:` block of a policy file: the filter's rules for the
// domain. Package policy keeps it and its place; package filter/config knows what it
// means.
type Filter struct {
	// JSON is the block as one JSON value. Plain scalars with a unit of bytes, such
	// as 512KiB, have become whole numbers.
	JSON []byte

	file   string
	places map[string]position
}

// Locate gives a fault of the block its place in the policy file. path is relative to
// the block, such as rules[0].name; the place of an absent field is that of the
// nearest thing around it. "" is the block itself.
func (f *Filter) Locate(path, msg string) *Error {
	at := path
	pos, ok := f.places[at]
	for !ok && at != "" {
		at = parentPath(at)
		pos, ok = f.places[at]
	}
	return &Error{File: f.file, Line: pos.line, Column: pos.column, Path: join("filter", path), Msg: msg}
}

// parentPath drops the last .key or [index] of a path.
func parentPath(path string) string {
	for i := len(path) - 1; i > 0; i-- {
		if path[i] == '.' || path[i] == '[' {
			return path[:i]
		}
	}
	return ""
}

func (d *document) filter(f field) *Filter {
	filter := &Filter{file: d.file, places: map[string]position{"": {f.key.Line, f.key.Column}}}
	var buf bytes.Buffer
	d.writeJSON(&buf, f.value, "", filter.places)
	filter.JSON = buf.Bytes()
	return filter
}

// writeJSON writes a YAML node as JSON and notes the place of each member.
func (d *document) writeJSON(buf *bytes.Buffer, n *yaml.Node, path string, places map[string]position) {
	switch n = d.resolve(n); n.Kind {
	case yaml.MappingNode:
		buf.WriteByte('{')
		for i := 0; i < len(n.Content); i += 2 {
			key := n.Content[i]
			at := join(path, key.Value)
			if i > 0 {
				buf.WriteByte(',')
			}
			if key.Kind != yaml.ScalarNode {
				d.failf(key, join("filter", path), "a field's name must be a text, not %s", describe(key))
				return
			}
			if _, ok := places[at]; ok {
				d.failf(key, join("filter", at), "stands twice")
			}
			places[at] = position{n.Content[i+1].Line, n.Content[i+1].Column}
			writeText(buf, key.Value)
			buf.WriteByte(':')
			d.within(n, join("filter", at), func() { d.writeJSON(buf, n.Content[i+1], at, places) })
		}
		buf.WriteByte('}')
	case yaml.SequenceNode:
		buf.WriteByte('[')
		for i, item := range n.Content {
			at := fmt.Sprintf("%s[%d]", path, i)
			if i > 0 {
				buf.WriteByte(',')
			}
			places[at] = position{item.Line, item.Column}
			d.within(n, join("filter", at), func() { d.writeJSON(buf, item, at, places) })
		}
		buf.WriteByte(']')
	case yaml.ScalarNode:
		if err := writeScalar(buf, n); err != nil {
			d.failf(n, join("filter", path), "%v", err)
		}
	case yaml.DocumentNode, yaml.AliasNode:
	}
}

func writeScalar(buf *bytes.Buffer, n *yaml.Node) error {
	switch n.Tag {
	case "!!null":
		buf.WriteString("null")
	case "!!bool":
		var b bool
		if err := n.Decode(&b); err != nil {
			return fmt.Errorf("reading %q: %w", n.Value, err)
		}
		buf.WriteString(strconv.FormatBool(b))
	case "!!int":
		var i int64
		if err := n.Decode(&i); err != nil {
			return fmt.Errorf("%q is too large a number", n.Value)
		}
		buf.WriteString(strconv.FormatInt(i, 10))
	case "!!float":
		var v float64
		if err := n.Decode(&v); err != nil {
			return fmt.Errorf("reading %q: %w", n.Value, err)
		}
		number, err := json.Marshal(v)
		if err != nil {
			return errors.New("must be a finite number")
		}
		buf.Write(number)
	default:
		if m := amountPattern.FindStringSubmatch(n.Value); n.Style == 0 && m != nil && m[3] != "" {
			whole, err := parseWhole(n.Value)
			if err != nil {
				return err
			}
			buf.WriteString(strconv.FormatInt(whole, 10))
			return nil
		}
		writeText(buf, n.Value)
	}
	return nil
}

func writeText(buf *bytes.Buffer, s string) {
	text, _ := json.Marshal(s) // a string cannot fail
	buf.Write(text)
}

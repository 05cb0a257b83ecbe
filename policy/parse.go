package policy

import (
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Parse reads one policy file; file is its name in messages. It is strict: an unknown
// field, a field that stands twice, or a value out of range is a fault. The error
// joins all faults in the order of their lines, each an [*Error].
func Parse(file string, data []byte) (*Policy, error) {
	d := &document{file: file, origins: map[*node]*origin{}}
	root := d.parse(data)
	if root == nil {
		return nil, d.faults()
	}
	p := &Policy{File: file, MostConsumers: DefaultMostConsumers}
	d.policy(root, p)
	if err := d.faults(); err != nil {
		return nil, err
	}
	d.lint(p)
	sortByPlace(d.warnings)
	p.Warnings = d.warnings
	p.settle()
	return p, nil
}

func (d *document) policy(root *yaml.Node, p *Policy) {
	p.root = &level{}
	fields, ok := d.referenceMapping(root, "", "domain", "descriptors", "headers", "max_consumers", "filter")
	if !ok {
		return
	}
	if f, ok := fields["domain"]; ok {
		p.Domain = d.text(f)
	}
	if p.Domain == "" {
		d.failf(root, "domain", "is missing or empty; it is the namespace that requests name")
	}
	if f, ok := fields["headers"]; ok {
		p.Headers = d.headers(f)
	}
	if f, ok := fields["max_consumers"]; ok {
		faults := len(d.errs)
		if p.MostConsumers = d.whole(f); p.MostConsumers == 0 && len(d.errs) == faults {
			d.failf(f.value, f.path, "must be at least 1")
		}
	}
	if f, ok := fields["filter"]; ok {
		p.Filter = d.filter(f)
	}
	if f, ok := fields["descriptors"]; ok {
		p.root = d.level(f, nil)
	}
	if len(p.root.nodes) == 0 {
		d.warnf(root, "descriptors", "there are none, so nothing is limited")
	}
	d.replacements(p)
}

func (d *document) headers(f field) Headers {
	var h Headers
	fields, ok := d.fields(f.value, f.path, "on_allowed", "style")
	if !ok {
		return h
	}
	if f, ok := fields["on_allowed"]; ok {
		h.OnAllowed = d.boolean(f)
	}
	if f, ok := fields["style"]; ok {
		switch d.text(f) {
		case "epoch":
			h.Style = StyleEpoch
		case "delta":
			h.Style = StyleDelta
		case "ietf":
			h.Style = StyleIETF
		default:
			d.failf(f.value, f.path, "must be epoch, delta or ietf, not %s", describe(f.value))
		}
	}
	return h
}

// An origin is where a node and what the lint speaks of were read.
type origin struct {
	descriptor field
	budget     field
	replaces   []field // the name of each of the limit's replaces
}

// level reads a list of descriptors; keys are those of the path above them.
func (d *document) level(f field, keys []string) *level {
	l := &level{exact: map[Entry]*node{}, bare: map[string]*node{}}
	seen := map[Entry]*node{}
	for _, item := range d.items(f) {
		n := d.descriptor(item, keys)
		if n == nil {
			continue
		}
		id := Entry{Key: n.key, Value: n.value}
		if first, ok := seen[id]; ok {
			line := d.origins[first].descriptor.value.Line
			if n.equal(first) {
				d.warnf(item.value, item.path, "stands twice, and says the same; the first is on line %d", line)
			} else {
				d.failf(item.value, item.path, "this key and value stand twice, and say different things; the first is on line %d", line)
			}
			continue
		}
		seen[id] = n
		l.nodes = append(l.nodes, n)
		switch {
		case n.isPattern():
			l.patterns = append(l.patterns, n)
		case n.value != "":
			l.exact[id] = n
		default:
			l.bare[n.key] = n
		}
	}
	return l
}

// equal reports whether two descriptors say the same, their children included.
func (n *node) equal(o *node) bool {
	if n.key != o.key || n.value != o.value || n.shared != o.shared || n.name != o.name ||
		!reflect.DeepEqual(n.limit, o.limit) || (n.children == nil) != (o.children == nil) {
		return false
	}
	if n.children == nil {
		return true
	}
	if len(n.children.nodes) != len(o.children.nodes) {
		return false
	}
	for i, c := range n.children.nodes {
		if !c.equal(o.children.nodes[i]) {
			return false
		}
	}
	return true
}

// withoutEffect are fields of the reference's format that never change a decision.
var withoutEffect = []string{"detailed_metric", "value_to_metric"}

func (d *document) descriptor(item field, above []string) *node {
	fields, ok := d.referenceMapping(item.value, item.path,
		"key", "value", "descriptors",
		"budget", "limiter", "rate_limit", "quota",
		"name", "on_error", "expose", "share_threshold", "shadow_mode", "quota_mode", "metadata",
		"detailed_metric", "value_to_metric")
	if !ok {
		return nil
	}
	n := &node{}
	d.origins[n] = &origin{descriptor: item}
	if f, ok := fields["key"]; ok {
		n.key = d.text(f)
	}
	if n.key == "" {
		d.failf(item.value, join(item.path, "key"), "is missing or empty")
		return nil
	}
	if f, ok := fields["value"]; ok {
		n.value = d.text(f)
	}
	if f, ok := fields["share_threshold"]; ok {
		n.shared = d.boolean(f)
		if n.shared && !n.isPattern() {
			d.failf(f.value, f.path, "needs a key or a value with a *")
		}
	}
	for _, name := range withoutEffect {
		if f, ok := fields[name]; ok && d.boolean(f) {
			d.warnf(f.key, f.path, "has no effect: Weir's metrics never carry what a client chooses")
		}
	}
	keys := append(append([]string(nil), above...), n.key)
	if f, ok := fields["descriptors"]; ok {
		d.within(f.value, f.path, func() { n.children = d.level(f, keys) })
	}
	n.limit = d.limit(fields, n, keys)
	return n
}

// isPattern reports whether the descriptor's key or value has a *.
func (n *node) isPattern() bool {
	return strings.Contains(n.key, "*") || strings.Contains(n.value, "*")
}

package policy

import (
	"fmt"
	"strings"
)

// maxCompared bounds how many pairs of descriptors the lint looks at, so that a file of
// many thousands of descriptors still loads at once. What lies beyond goes unwarned.
const maxCompared = 1 << 20

// another counts one more comparison; it is false when there were too many.
func (d *document) another() bool {
	d.compared++
	return d.compared <= maxCompared
}

// lint warns of what loads, but likely does not do what it seems to.
func (d *document) lint(p *Policy) {
	d.lintLevel(p.root)
	d.lintBudgets(p)
}

func (d *document) lintLevel(l *level) {
	d.lintCovered(l)
	for _, n := range l.nodes {
		d.lintShadowed(l, n)
	}
	d.lintGlued(l)
	for _, n := range l.nodes {
		if n.children != nil {
			d.lintLevel(n.children)
		}
	}
}

func (d *document) warnNode(n *node, format string, args ...any) {
	f := d.origins[n].descriptor
	d.warnf(f.value, f.path, format, args...)
}

func (d *document) line(n *node) int { return d.origins[n].descriptor.value.Line }

// lintCovered finds descriptors that no request reaches, since an earlier pattern
// matches all that they do.
func (d *document) lintCovered(l *level) {
	for i, n := range l.patterns {
		d.lintCoveredBy(l.patterns[:i], n)
	}
	if len(l.patterns) == 0 {
		return
	}
	for _, n := range l.nodes {
		if n == l.bare[n.key] {
			d.lintCoveredBy(l.patterns, n)
		}
	}
}

func (d *document) lintCoveredBy(earlier []*node, n *node) {
	for _, p := range earlier {
		if !d.another() {
			return
		}
		if p.covers(n) {
			d.warnNode(n, "is never reached: %s on line %d is tried before it and matches all that it does", p, d.line(p))
			return
		}
	}
}

// covers reports whether a pattern matches every entry that n does. A * in n's texts is
// a byte that only a * can match, so if the pattern matches the text of n, it matches
// whatever n does.
func (n *node) covers(o *node) bool {
	return glob(n.key, o.key) &&
		(strings.Trim(n.value, "*") == "" || o.value != "" && glob(n.value, o.value))
}

// lintShadowed finds what requests that match n can no longer reach, since there is no
// way back from n.
func (d *document) lintShadowed(l *level, n *node) {
	if n == l.bare[n.key] {
		return // the last that is tried
	}
	o := l.bare[n.key] // what would be tried next
	if o != nil && n.covers(o) {
		o = nil // nothing reaches it
	}
	if !n.isPattern() {
		for _, p := range l.patterns {
			if d.another() && p.covers(n) {
				o = p
				break
			}
		}
	}
	if o == nil {
		return
	}
	if n.limit == nil && o.limit != nil && o.limit.limits() {
		d.warnNode(n, "%s shadows the limit of %s on line %d: a request that ends here is not limited", n, o, d.line(o))
	}
	if lost := d.lost(n.children, o.children); lost != "" {
		d.warnNode(n, "%s shadows %s>%s on line %d: a request that matches here never reaches that, and is not limited by it", n, o, lost, d.line(o))
	}
}

// lost names the first descriptor below of that is not reached below by.
func (d *document) lost(by, of *level) string {
	if of == nil {
		return ""
	}
	for _, c := range of.nodes {
		if !d.another() {
			return ""
		}
		var n *node
		if by != nil {
			n = d.catch(by, c)
		}
		if n == nil || n.limit == nil && c.limit != nil && c.limit.limits() {
			return c.String()
		}
		if lost := d.lost(n.children, c.children); lost != "" {
			return c.String() + ">" + lost
		}
	}
	return ""
}

// catch returns a descriptor of the level that matches all that n does, or nil.
func (d *document) catch(l *level, n *node) *node {
	if c := l.exact[Entry{Key: n.key, Value: n.value}]; c != nil {
		return c
	}
	for _, p := range l.patterns {
		if d.another() && p.covers(n) {
			return p
		}
	}
	return l.bare[n.key]
}

// limits reports whether the limit ever refuses.
func (l *Limit) limits() bool {
	return l.Budget != nil || l.Limiter != nil || l.RateLimit != nil || len(l.Quota) > 0
}

// lintGlued finds what means something else to the reference, which joins key and value
// by an underscore before it looks them up. It looks only at keys that stand beside each
// other: that a key such as remote_address could be taken for a key remote is of no
// interest where no request has such a key.
func (d *document) lintGlued(l *level) {
	keys := map[string]*node{}
	var order []*node // the first of each key
	for _, n := range l.nodes {
		if keys[n.key] == nil && !strings.Contains(n.key, "*") {
			keys[n.key] = n
			order = append(order, n)
		}
	}
	first := map[string]*node{}
	duplicates := map[*node]bool{}
	for _, n := range l.nodes {
		glued := n.glued()
		if o := first[glued]; o != nil {
			d.warnNode(n, "envoyproxy/ratelimit takes %s and %s on line %d for duplicates and refuses the file; here they are two", n, o, d.line(o))
			duplicates[n], duplicates[o] = true, true
			continue
		}
		first[glued] = n
	}
	for _, n := range l.nodes {
		if duplicates[n] {
			continue
		}
		if o := d.taken(n, keys, order); o != nil {
			d.warnNode(n, "envoyproxy/ratelimit, which joins keys and values by an underscore, may match %s to requests with the key %q (line %d); here it never does", n, o.key, d.line(o))
		}
	}
}

// taken returns the first descriptor of another key whose requests the reference may
// match to n.
func (d *document) taken(n *node, keys map[string]*node, order []*node) *node {
	glued := n.glued()
	head, _, pattern := strings.Cut(glued, "*")
	if !pattern {
		for i := range len(glued) {
			if o := keys[glued[:i]]; glued[i] == '_' && o != nil && o.key != n.key {
				return o
			}
		}
		return nil
	}
	for _, o := range order {
		if !d.another() {
			return nil
		}
		other := o.key + "_"
		if !glob(n.key, o.key) && (strings.HasPrefix(head, other) || strings.HasPrefix(other, head)) {
			return o
		}
	}
	return nil
}

// glued is how the reference names a descriptor of a level.
func (n *node) glued() string {
	if n.value == "" {
		return n.key
	}
	return n.key + "_" + n.value
}

// String renders the descriptor for messages, such as consumer or consumer=alice.
func (n *node) String() string {
	const maxText = 64
	if n.value == "" {
		return Truncate(n.key, maxText)
	}
	return Truncate(n.key, maxText) + "=" + Truncate(n.value, maxText)
}

// lintBudgets finds buckets that may be charged under two shapes: those of one scope,
// reached by two ways. Descriptors of one key that stand beside each other are one way,
// since each value takes only one of them.
func (d *document) lintBudgets(p *Policy) {
	type way struct {
		beside *level
		key    string
	}
	type use struct {
		way

		node *node
	}
	uses := map[Scope][]use{}
	var visit func(l *level)
	visit = func(l *level) {
		for _, n := range l.nodes {
			if n.limit != nil && n.limit.Budget != nil {
				b := n.limit.Budget
				u := use{way{l, n.key}, n}
				for _, o := range uses[b.Scope] {
					if !d.another() {
						return
					}
					if o.way != u.way && o.node.limit.Budget.Budget != b.Budget && !distinct(n, o.node) {
						f := d.origins[n].budget
						d.warnf(f.value, f.path, "the scope %s has another rate or burst on line %d; a key that is in both has one bucket with two shapes", b.Scope, d.origins[o.node].budget.value.Line)
						break
					}
				}
				uses[b.Scope] = append(uses[b.Scope], u)
			}
			if n.children != nil {
				visit(n.children)
			}
		}
	}
	visit(p.root)
}

// distinct reports whether two descriptors have two values.
func distinct(a, b *node) bool {
	return a.value != "" && b.value != "" && !a.isPattern() && !b.isPattern() && !strings.EqualFold(a.value, b.value)
}

// replacements checks the names that limits replace.
func (d *document) replacements(p *Policy) {
	named := map[string][]*node{} // the holders of a name that can be replaced
	var replacing []*node
	p.each(func(n *node) {
		if n.name != "" && !n.limit.Unlimited {
			named[n.name] = append(named[n.name], n)
		}
		if len(n.limit.Replaces) > 0 {
			replacing = append(replacing, n)
		}
	})
	for _, n := range replacing {
		for _, f := range d.origins[n].replaces {
			if name := d.text(f); named[name] == nil {
				d.warnf(f.value, f.path, "no limit that could be replaced has the name %q", name)
			}
		}
	}
	const (
		open = iota + 1
		done
	)
	var (
		state = map[string]int{}
		path  []string
		visit func(name string)
	)
	visit = func(name string) {
		state[name] = open
		path = append(path, name)
		for _, n := range named[name] {
			for i, next := range n.limit.Replaces {
				switch {
				case state[next] == open:
					f := d.origins[n].replaces[i]
					d.failf(f.value, f.path, "%s: a request that matches all of them would have no limit", cycle(path, next))
				case state[next] == 0 && named[next] != nil:
					visit(next)
				}
			}
		}
		path = path[:len(path)-1]
		state[name] = done
	}
	for _, n := range replacing {
		if named[n.name] != nil && state[n.name] == 0 {
			visit(n.name)
		}
	}
}

// cycle renders the part of the path from name, which closes it.
func cycle(path []string, name string) string {
	for i := range path {
		if path[i] == name {
			path = path[i:]
			break
		}
	}
	if len(path) == 2 {
		return fmt.Sprintf("replacement cycle %q ↔ %q", path[0], path[1])
	}
	var b strings.Builder
	b.WriteString("replacement cycle ")
	for _, text := range path {
		fmt.Fprintf(&b, "%q → ", text)
	}
	fmt.Fprintf(&b, "%q", name)
	return b.String()
}

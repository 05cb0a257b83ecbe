package policy

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// A level is the descriptors that stand beside each other in a policy.
type level struct {
	nodes    []*node // in the order of the file, as are the patterns
	exact    map[Entry]*node
	patterns []*node
	bare     map[string]*node
}

// A node is one descriptor of a policy.
type node struct {
	key, value string // as written; value is "" where the key stands alone
	name       string // its limit's, "" where it is not given
	shared     bool   // all values that match the pattern share one counter
	limit      *Limit // nil where only the children limit
	children   *level // nil where there are none

	// The rest is settled when the whole policy is read.

	trail    []*node // the nodes above it, from the top, and itself
	overflow CounterID
	holder   *holder // nil where it differs from request to request
}

// A holder is the counters of a node that has only one of each.
type holder struct {
	rateLimit CounterID
	limiter   LimiterBucket
	consumer  *Consumer
}

// A step is one matched entry, as far as it identifies a counter.
type step struct {
	key, value string
	kind       stepKind
}

type stepKind uint8

// The kinds of steps. Their numbers are part of what is hashed, so they never change.
const (
	stepValue   stepKind = iota // the entry's own value
	stepPattern                 // a pattern's text, shared by all values that match
	stepAny                     // any value, in the path of an overflow's counter
)

// A Match is the limit that applies to one descriptor. The zero Match is none.
type Match struct {
	Limit      *Limit // nil if nothing applies
	policy     *Policy
	node       *node
	descriptor Descriptor
}

// Match returns the limit that applies to the descriptor; ok is false when the
// policy says nothing of it. The match refers to the descriptor, which must not be
// changed while the match is in use.
func (p *Policy) Match(d Descriptor) (m Match, ok bool) {
	var (
		at   = p.root
		last *node
	)
	for _, e := range d {
		if at == nil {
			return Match{}, false // the descriptor is deeper than the policy
		}
		if last = at.find(e); last == nil {
			return Match{}, false
		}
		at = last.children
	}
	if last == nil || last.limit == nil {
		return Match{}, false
	}
	return Match{Limit: last.limit, policy: p, node: last, descriptor: d}, true
}

func (l *level) find(e Entry) *node {
	if e.Value != "" {
		if n, ok := l.exact[e]; ok {
			return n
		}
	}
	for _, n := range l.patterns {
		if glob(n.key, e.Key) && (n.value == "" || glob(n.value, e.Value)) {
			return n
		}
	}
	return l.bare[e.Key]
}

// Empty reports whether the policy has no descriptors.
func (p *Policy) Empty() bool { return len(p.root.nodes) == 0 }

// Limits reports whether a descriptor with these keys can reach a limit, for some values.
func (p *Policy) Limits(keys []string) bool { return p.root.limits(keys) }

func (l *level) limits(keys []string) bool {
	if l == nil || len(keys) == 0 {
		return false
	}
	return slices.ContainsFunc(l.nodes, func(n *node) bool {
		if !glob(n.key, keys[0]) {
			return false
		}
		if len(keys) > 1 {
			return n.children.limits(keys[1:])
		}
		return n.limit != nil && n.limit.says()
	})
}

// says reports whether the limit is more than the word that its descriptors are not limited.
func (l *Limit) says() bool {
	return l.Budget != nil || l.Limiter != nil || l.RateLimit != nil || l.Unlimited || len(l.Quota) > 0
}

// Replace drops the limits that others of the same request replace: matches[i] becomes
// the zero Match if another one replaces its name. matches are those of all descriptors
// of a request, zero where nothing applies. A limit without a name of its own and an
// unlimited one are never replaced, and a limit that is replaced itself still replaces
// others.
func Replace(matches []Match) {
	var replaced map[string]bool
	for _, m := range matches {
		if m.Limit == nil {
			continue
		}
		for _, name := range m.Limit.Replaces {
			if replaced == nil {
				replaced = make(map[string]bool)
			}
			replaced[name] = true
		}
	}
	if replaced == nil {
		return
	}
	for i, m := range matches {
		if m.Limit != nil && !m.Limit.Unlimited && m.node.name != "" && replaced[m.node.name] {
			matches[i] = Match{}
		}
	}
}

// each calls f for every node that has a limit, in the order of the file.
func (p *Policy) each(f func(*node)) { p.root.each(f) }

func (l *level) each(f func(*node)) {
	for _, n := range l.nodes {
		if n.limit != nil {
			f(n)
		}
		if n.children != nil {
			n.children.each(f)
		}
	}
}

// settle works out, once the policy is read, all that no longer depends on a request.
func (p *Policy) settle() { p.root.settle(p, nil) }

func (l *level) settle(p *Policy, above []*node) {
	for _, n := range l.nodes {
		n.trail = slices.Concat(above, []*node{n})
		if n.children != nil {
			n.children.settle(p, n.trail)
		}
		if n.limit == nil {
			continue
		}
		d := make(Descriptor, len(n.trail)) // what it matches, if that is but one thing
		written := make([]step, len(n.trail))
		n.limit.Named = true
		for i, above := range n.trail {
			d[i] = Entry{Key: above.key, Value: above.value}
			written[i] = above.written()
			n.limit.Named = n.limit.Named && above.one()
		}
		if !n.limit.Named {
			n.overflow = newCounterID(kindOverflow, p.Domain, written)
			continue
		}
		m := Match{Limit: n.limit, policy: p, node: n, descriptor: d}
		n.holder = &holder{
			rateLimit: m.RateLimitCounter(), limiter: m.LimiterBucket(), consumer: m.Consumer(),
		}
	}
}

// one reports whether all that the node matches counts as one.
func (n *node) one() bool {
	if strings.Contains(n.key, "*") {
		return false
	}
	return n.shared || n.value != "" && !n.isPattern()
}

// written is the node as a step of a path that leaves values from requests out.
func (n *node) written() step {
	switch {
	case n.value == "":
		return step{key: n.key, kind: stepAny}
	case n.isPattern():
		return step{key: n.key, value: n.value, kind: stepPattern}
	}
	return step{key: n.key, value: n.value, kind: stepValue}
}

// path appends the steps that the descriptor took.
func (m *Match) path(steps []step) []step {
	for i, n := range m.node.trail {
		e := m.descriptor[i]
		if n.shared {
			steps = append(steps, step{key: e.Key, value: n.value, kind: stepPattern})
		} else {
			steps = append(steps, step{key: e.Key, value: e.Value, kind: stepValue})
		}
	}
	return steps
}

func (m *Match) counter(kind counterKind) CounterID {
	var steps [8]step // on the stack, for all but the deepest
	return newCounterID(kind, m.policy.Domain, m.path(steps[:0]))
}

// RateLimitCounter returns the counter of the match's rate_limit. Nobody enrols it.
func (m Match) RateLimitCounter() CounterID {
	if m.node.holder != nil {
		return m.node.holder.rateLimit
	}
	return m.counter(kindRateLimit)
}

// LimiterBucket returns the bucket of the match's limiter. Its Subject is such as
// "consumer=alice", cut short.
func (m Match) LimiterBucket() LimiterBucket {
	if m.node.holder != nil {
		return m.node.holder.limiter
	}
	return LimiterBucket{ID: m.counter(kindLimiter), Namespace: m.policy.Domain, Subject: m.subject()}
}

// subject renders the path for people, with keys and values cut short.
func (m *Match) subject() string {
	const (
		maxText  = 64
		maxSteps = 8
	)
	var steps [8]step
	var b strings.Builder
	for i, s := range m.path(steps[:0]) {
		if i > 0 {
			b.WriteString(", ")
		}
		if i == maxSteps {
			b.WriteString("…")
			break
		}
		b.WriteString(Truncate(s.key, maxText))
		b.WriteByte('=')
		b.WriteString(Truncate(s.value, maxText))
	}
	return b.String()
}

// Truncate cuts a text for people to so many bytes, at a character's end, and marks that it
// did.
func Truncate(s string, most int) string {
	if len(s) <= most {
		return s
	}
	end := most
	for end > most-utf8.UTFMax && !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + "…"
}

// DefaultMostConsumers is how many consumers a domain may enrol by default.
const DefaultMostConsumers = 100_000

// Consumer returns the holder of the quota that the match found. It may be shared: it
// must not be changed.
func (m Match) Consumer() *Consumer {
	if m.node.holder != nil {
		return m.node.holder.consumer
	}
	var steps [8]step
	path := m.path(steps[:0])
	c := &Consumer{
		ID:      newCounterID(kindQuota, m.policy.Domain, path),
		Domain:  m.policy.Domain,
		Entries: make([]Entry, len(path)),
		Named:   m.Limit.Named,
	}
	for i, s := range path {
		c.Entries[i] = Entry{Key: s.key, Value: s.value}
	}
	if !c.Named {
		c.Overflow = m.node.overflow
		c.Most = m.policy.MostConsumers
	}
	return c
}

// NamedConsumers returns the consumers that the policy spells out and gives a quota, in
// the order of the file.
func (p *Policy) NamedConsumers() []Consumer {
	var named []Consumer
	p.each(func(n *node) {
		if n.limit.Named && len(n.limit.Quota) > 0 {
			named = append(named, *n.holder.consumer)
		}
	})
	return named
}

// OverrideCounter returns the counter of a descriptor that brings its own limit: that of
// all its keys and values, whatever the policy says of them.
func OverrideCounter(domain string, d Descriptor) CounterID {
	path := make([]step, len(d))
	for i, e := range d {
		path[i] = step{key: e.Key, value: e.Value, kind: stepValue}
	}
	return newCounterID(kindOverride, domain, path)
}

// BucketKey returns the key of the budget's bucket: the value of the last entry. The
// error is [ErrMalformedKey].
func (m Match) BucketKey() (BucketKey, error) {
	return ParseBucketKey(m.descriptor[len(m.descriptor)-1].Value)
}

// glob reports whether s matches the pattern, in which each * stands for any run of
// bytes. Both ends are anchored. It takes time in proportion to len(pattern) ×
// len(s) at worst, since a client chooses s.
func glob(pattern, s string) bool {
	head, rest, found := strings.Cut(pattern, "*")
	if !found {
		return pattern == s
	}
	if !strings.HasPrefix(s, head) {
		return false
	}
	s = s[len(head):]
	for {
		var part string
		part, rest, found = strings.Cut(rest, "*")
		if !found {
			return strings.HasSuffix(s, part)
		}
		// The leftmost fit leaves the most for what follows.
		i := strings.Index(s, part)
		if i < 0 {
			return false
		}
		s = s[i+len(part):]
	}
}

package policy

import (
	"strings"
)

// A level is the descriptors that stand beside each other in a policy.
type level struct {
	exact    map[Entry]*node
	patterns []*node // in the order of the file
	bare     map[string]*node
}

// A node is one descriptor of a policy.
type node struct {
	key, value string // as written; value is "" where the key stands alone
	shared     bool   // all values that match the pattern share one counter
	limit      *Limit // nil where only the children limit
	children   *level // nil where there are none
	at         position
}

// A step is one matched entry, as far as it identifies a counter.
type step struct {
	key, value string
	kind       stepKind
}

type stepKind uint8

const (
	stepValue   stepKind = iota // the entry's own value
	stepPattern                 // a pattern's text, shared by all values that match
)

// A Match is the limit that applies to one descriptor.
type Match struct {
	Limit  *Limit
	domain string
	path   []step
}

// Match returns the limit that applies to the descriptor; ok is false when the
// policy says nothing of it.
func (p *Policy) Match(d Descriptor) (m Match, ok bool) {
	var (
		at   = p.root
		last *node
		path = make([]step, 0, len(d))
	)
	for _, e := range d {
		if at == nil {
			return Match{}, false // the descriptor is deeper than the policy
		}
		n := at.find(e)
		if n == nil {
			return Match{}, false
		}
		if n.shared {
			path = append(path, step{key: e.Key, value: n.value, kind: stepPattern})
		} else {
			path = append(path, step{key: e.Key, value: e.Value, kind: stepValue})
		}
		last, at = n, n.children
	}
	if last == nil || last.limit == nil {
		return Match{}, false
	}
	return Match{Limit: last.limit, domain: p.Domain, path: path}, true
}

// each calls f for every limit below the level.
func (l *level) each(f func(*Limit)) {
	visit := func(n *node) {
		if n.limit != nil {
			f(n.limit)
		}
		if n.children != nil {
			n.children.each(f)
		}
	}
	for _, n := range l.exact {
		visit(n)
	}
	for _, n := range l.patterns {
		visit(n)
	}
	for _, n := range l.bare {
		visit(n)
	}
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

// DefaultMostConsumers is how many consumers a domain may enrol by default.
const DefaultMostConsumers = 100_000

// Consumer returns the holder of the quota that the match found.
func (m Match) Consumer() *Consumer {
	c := &Consumer{
		ID:      newCounterID(kindQuota, m.domain, m.path),
		Domain:  m.domain,
		Entries: make([]Entry, len(m.path)),
		Named:   m.Limit.Named,
	}
	for i, s := range m.path {
		c.Entries[i] = Entry{Key: s.key, Value: s.value}
	}
	if !c.Named {
		c.Overflow = newCounterID(kindOverflow, m.domain, nil)
		c.Most = DefaultMostConsumers
	}
	return c
}

// BucketKey returns the key of the budget's bucket: the value of the last entry. The
// error is [ErrMalformedKey].
func (m Match) BucketKey() (BucketKey, error) {
	return ParseBucketKey(m.path[len(m.path)-1].value)
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

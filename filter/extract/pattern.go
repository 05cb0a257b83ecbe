package extract

import (
	"errors"
	"slices"
	"strconv"
	"strings"
)

// A Pattern is what a path may look like, with named parts: "/v1/{tenant}/**". The
// zero Pattern matches nothing.
type Pattern struct {
	text  string
	parts []part
}

// A part is one segment of a pattern, or what stands for all that follow.
type part struct {
	kind    partKind
	literal string // decoded; of a literal
	name    string // of what is captured, else empty
}

type partKind uint8

const (
	literal partKind = iota
	one              // any segment
	rest             // any segments, also none; the last part only
)

// ParsePattern reads a pattern. It begins with a slash, and between slashes it has
//
//   - a literal, which may have percent escapes;
//   - "*" for any one segment;
//   - "{name}" for any one segment that [Pattern.Part] returns;
//   - at the end only, "**" for whatever follows, also nothing, or "{name...}" for the
//     same with a name.
//
// Names are of lower-case letters, digits and underscores, each of them once. "/" is
// the pattern of the root alone. A slash at the end is refused, since a path's makes
// no difference. In a literal the characters *, {, }, ? and # are written as escapes.
func ParsePattern(text string) (Pattern, error) {
	if text == "" || text[0] != '/' {
		return Pattern{}, errors.New("does not begin with a slash")
	}
	p := Pattern{text: text}
	if text == "/" {
		return p, nil
	}
	for segment := range strings.SplitSeq(text[1:], "/") {
		if last := len(p.parts) - 1; last >= 0 && p.parts[last].kind == rest {
			return Pattern{}, errors.New("has something after ** or {name...}, which stand at the end only")
		}
		next, err := parsePart(segment)
		if err != nil {
			return Pattern{}, err
		}
		if next.name != "" && slices.ContainsFunc(p.parts, func(q part) bool { return q.name == next.name }) {
			return Pattern{}, errors.New("has two parts with the name " + strconv.Quote(next.name))
		}
		p.parts = append(p.parts, next)
	}
	return p, nil
}

func parsePart(segment string) (part, error) {
	switch segment {
	case "":
		return part{}, errors.New("has an empty segment, or a slash at its end")
	case "*":
		return part{kind: one}, nil
	case "**":
		return part{kind: rest}, nil
	}
	if inner, ok := strings.CutPrefix(segment, "{"); ok {
		if inner, ok = strings.CutSuffix(inner, "}"); ok {
			kind := one
			name, isRest := strings.CutSuffix(inner, "...")
			if isRest {
				kind = rest
			}
			if !isName(name) {
				return part{}, errors.New("has a part named " + strconv.Quote(name) +
					": a name is of a-z, 0-9 and _")
			}
			return part{kind: kind, name: name}, nil
		}
	}
	if i := strings.IndexAny(segment, "*{}?#"); i >= 0 {
		return part{}, errors.New("has " + strconv.Quote(segment[i:i+1]) + " within the segment " +
			strconv.Quote(segment) + ": write it as a percent escape, or let a wildcard be a segment of its own")
	}
	value, err := decodeSegment(segment)
	if err != nil {
		return part{}, errors.New("in the segment " + strconv.Quote(segment) + " " + err.Error())
	}
	return part{literal: value}, nil
}

func isName(s string) bool {
	for i := range len(s) {
		if c := s[i]; c != '_' && !isDigit(c) && (c < 'a' || c > 'z') {
			return false
		}
	}
	return s != ""
}

// String returns the text that p was read from.
func (p Pattern) String() string { return p.text }

// Parts returns the names of p's parts in their order.
func (p Pattern) Parts() []string {
	var names []string
	for _, q := range p.parts {
		if q.name != "" {
			names = append(names, q.name)
		}
	}
	return names
}

// Match reports that path, as from [PathOf], is one of p's. Literals are compared
// with decoded segments, and a path's slash at the end makes no difference.
//
// Where any segment will do, one with a bad escape or with dots does too: so it is
// refused by [Pattern.Part], and does not slip past a rule.
func (p Pattern) Match(path string) bool {
	_, ok := p.match(path, "")
	return ok
}

// match also returns what the part called name has, not decoded. For a rest it
// begins with a slash, unless it is empty.
func (p Pattern) match(path, name string) (value string, ok bool) {
	if p.text == "" || path == "" || path[0] != '/' {
		return "", false
	}
	left := split(path)
	for _, q := range p.parts {
		if q.kind == rest {
			if q.name == name && left.more {
				// The slash before it is still there, and one at the end counts no more.
				value = strings.TrimSuffix(path[len(path)-len(left.rest)-1:], "/")
			}
			return value, true
		}
		segment, ok := left.next()
		if !ok {
			return "", false
		}
		if q.kind == literal {
			if equal, _ := spells(segment, q.literal, false); !equal {
				return "", false
			}
		} else if q.name == name {
			value = segment
		}
	}
	return value, !left.more
}

// Part returns the part of path that p calls name. It returns [ErrAbsent] if path
// does not match or p has no such part.
//
// One segment is as from [Segment]. Of "{name...}" it is all that follows, as from
// [Prefix] but without the slash at the beginning, and empty if nothing does.
func (p Pattern) Part(path, name string) (string, error) {
	i := slices.IndexFunc(p.parts, func(q part) bool { return q.name == name })
	if i < 0 || name == "" {
		return "", ErrAbsent
	}
	value, ok := p.match(path, name)
	if !ok {
		return "", ErrAbsent
	}
	if p.parts[i].kind == one {
		return decodeSegment(value)
	}
	value, err := canonicalPath(value)
	return strings.TrimPrefix(value, "/"), err
}

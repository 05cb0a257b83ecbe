package extract

import (
	"errors"
	"strings"
)

// The faults of paths. Dots are refused since a server that resolves them sees other
// segments than those that stand there. Where Envoy normalises paths, none arrive.
var (
	errNoPath = errors.New("is not a path that begins with a slash")
	errDots   = errors.New("has a dot segment")
)

// PathOf returns the path of target, which is a request's :path: what stands before
// the query and the fragment.
func PathOf(target string) string {
	if i := strings.IndexAny(target, "?#"); i >= 0 {
		return target[:i]
	}
	return target
}

// segments walks through a path. A trailing slash makes no segment of its own, while
// an empty one in the middle is one.
type segments struct {
	rest string
	more bool
}

// split returns the segments of path, which begins with a slash.
func split(path string) segments {
	return segments{rest: path[1:], more: len(path) > 1}
}

// next returns the next segment, not decoded.
func (s *segments) next() (segment string, ok bool) {
	if !s.more {
		return "", false
	}
	segment, s.rest, _ = strings.Cut(s.rest, "/")
	s.more = s.rest != ""
	return segment, true
}

// Path returns all of path (as from [PathOf]) in the form that [Prefix] has, which is "/"
// for the root.
func Path(path string) (string, error) {
	if err := checkPath(path); err != nil {
		return "", err
	}
	if path == "/" {
		return path, nil
	}
	return canonicalPath(strings.TrimSuffix(path, "/"))
}

// Segment returns the n-th segment of path (as from [PathOf]), counted from 1 and
// percent-decoded. It returns [ErrAbsent] beyond the last one.
//
// A slash at the end makes no segment of its own, so "/a/" is as "/a". An empty
// segment before that is an empty value. A segment that is "." or ".." when decoded
// is refused, and so is a path that doesn't begin with a slash. Other spellings of a
// path, doubled slashes among them, are for Envoy to normalise.
func Segment(path string, n int) (string, error) {
	if err := checkPath(path); err != nil {
		return "", err
	}
	rest := split(path)
	for range n - 1 {
		if _, ok := rest.next(); !ok {
			return "", ErrAbsent
		}
	}
	segment, ok := rest.next()
	if n < 1 || !ok {
		return "", ErrAbsent
	}
	return decodeSegment(segment)
}

// Prefix returns the first n segments of path, n being at least 1, each with a slash
// before it. They are decoded, but a slash within a segment is written %2F and a
// percent sign %25, so that the prefixes of two paths are equal only if all their
// segments are. It returns [ErrAbsent] if path has fewer, and treats it as [Segment]
// does in all else.
func Prefix(path string, n int) (string, error) {
	if err := checkPath(path); err != nil {
		return "", err
	}
	if n < 1 {
		return "", ErrAbsent
	}
	rest := split(path)
	end := 0
	for range n {
		segment, ok := rest.next()
		if !ok {
			return "", ErrAbsent
		}
		end += len("/") + len(segment)
	}
	return canonicalPath(path[:end])
}

func checkPath(path string) error {
	switch {
	case path == "":
		return ErrAbsent
	case path[0] != '/':
		return errNoPath
	}
	return nil
}

func decodeSegment(segment string) (string, error) {
	value, err := unescape(segment, false)
	if err == nil && isDots(value) {
		return "", errDots
	}
	return value, err
}

func isDots(segment string) bool { return segment == "." || segment == ".." }

// canonicalPath decodes all segments of path, which are those between its slashes and
// after the last one, and joins them as [Prefix] says. It returns path itself if
// nothing is escaped there.
func canonicalPath(path string) (string, error) {
	var b strings.Builder
	escaped := strings.IndexByte(path, '%') >= 0
	if escaped {
		b.Grow(len(path))
	}
	for segment := range strings.SplitSeq(path, "/") {
		value, err := decodeSegment(segment)
		if err != nil {
			return "", err
		}
		if escaped {
			writeSegment(&b, value)
			b.WriteByte('/')
		}
	}
	if !escaped {
		return path, nil
	}
	return b.String()[:b.Len()-1], nil
}

func writeSegment(b *strings.Builder, value string) {
	for {
		i := strings.IndexAny(value, "/%")
		if i < 0 {
			b.WriteString(value)
			return
		}
		b.WriteString(value[:i])
		if value[i] == '/' {
			b.WriteString("%2F")
		} else {
			b.WriteString("%25")
		}
		value = value[i+1:]
	}
}

package filter

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/filter/extract"
)

// request is what the filter knows of a request: all that its keys and costs are read
// from.
type request struct {
	host    host
	headers [][2]string
	target  string // :path
	grpc    bool

	// Envoy is asked for each property once.
	properties []property

	// The body, or of a gRPC stream its first message, where the rules read it. It is
	// nil until it is known.
	body    []byte
	hasBody bool
	bodyErr error
}

type property struct {
	path  []string
	value []byte
	err   error
}

// errNoBody means that the body is not known yet.
var errNoBody = errors.New("is in the body, which has not been read")

// read returns a source's value, as it stands there.
func (r *request) read(s *config.Source) (string, error) {
	switch s.Kind {
	case config.SourceHeader:
		return extract.Header(r.headers, s.Name)
	case config.SourcePath:
		return extract.Path(extract.PathOf(r.target))
	case config.SourceSegment:
		return extract.Segment(extract.PathOf(r.target), s.N)
	case config.SourcePrefix:
		return extract.Prefix(extract.PathOf(r.target), s.N)
	case config.SourcePattern:
		return s.Pattern.Part(extract.PathOf(r.target), s.Name)
	case config.SourceQuery:
		return extract.Query(r.target, s.Name)
	case config.SourceCookie:
		return extract.Cookie(r.headers, s.Name)
	case config.SourceMethod:
		return extract.Header(r.headers, ":method")
	case config.SourceAuthority:
		authority, err := extract.Header(r.headers, ":authority")
		if err != nil {
			return "", err
		}
		return extract.Host(authority)
	case config.SourceAddress:
		return r.property([]string{"source", "address"}, config.PropertyText)
	case config.SourceProperty:
		return r.property(s.Path, s.As)
	case config.SourceJSON, config.SourceProtobuf:
		return r.inBody(s)
	case config.SourceConstant:
	}
	return s.Name, nil
}

func (r *request) inBody(s *config.Source) (string, error) {
	switch {
	case !r.hasBody:
		return "", errNoBody
	case r.bodyErr != nil:
		return "", r.bodyErr
	case s.Kind == config.SourceProtobuf:
		return s.Field.Read(r.body, s.Encoding)
	case len(r.body) == 0:
		return "", extract.ErrAbsent
	}
	return extract.JSON(r.body, s.Pointer)
}

var (
	errNotNumber = errors.New("is not a whole number from -2^53 to 2^53")
	errNotBool   = errors.New("is not true or false")
)

// property returns a property of Envoy's as text. Envoy doesn't say of what type it is.
func (r *request) property(path []string, as config.PropertyType) (string, error) {
	value, err := r.rawProperty(path)
	if err != nil {
		return "", err
	}
	switch as {
	case config.PropertyNumber:
		if len(value) != 8 {
			return "", errNotNumber
		}
		return wholeText(math.Float64frombits(binary.LittleEndian.Uint64(value)))
	case config.PropertyBool:
		if len(value) != 1 || value[0] > 1 {
			return "", errNotBool
		}
		return strconv.FormatBool(value[0] == 1), nil
	case config.PropertyText:
		if len(value) == 0 {
			return "", extract.ErrAbsent
		}
	case config.PropertyString:
	}
	return string(value), nil
}

func (r *request) rawProperty(path []string) ([]byte, error) {
next:
	for i := range r.properties {
		p := &r.properties[i]
		if len(p.path) != len(path) {
			continue
		}
		for j := range path {
			if p.path[j] != path[j] {
				continue next
			}
		}
		return p.value, p.err
	}
	value, found, err := r.host.property(path)
	if err == nil && !found {
		err = extract.ErrAbsent
	}
	r.properties = append(r.properties, property{path, value, err})
	return value, err
}

// wholeText writes a number of JSON. Beyond 2^53 two numbers may be one.
func wholeText(f float64) (string, error) {
	if f != math.Trunc(f) || math.Abs(f) > config.MaxCost {
		return "", errNotNumber
	}
	return strconv.FormatInt(int64(f), 10), nil
}

// holds reports whether a rule is for the request.
func (r *request) holds(w *config.When) (bool, error) {
	if len(w.Methods) > 0 {
		method, err := extract.Header(r.headers, ":method")
		if err != nil || !slices.Contains(w.Methods, method) {
			return false, nil //nolint:nilerr // a request without a method has none of them
		}
	}
	if len(w.Paths) > 0 && !r.hasPath(w.Paths) {
		return false, nil
	}
	for i := range w.Headers {
		if !r.hasHeader(&w.Headers[i]) {
			return false, nil
		}
	}
	if len(w.Routes) == 0 {
		return true, nil
	}
	route, err := r.property([]string{"xds", "route_name"}, config.PropertyText)
	if errors.Is(err, extract.ErrAbsent) {
		return false, nil
	}
	return err == nil && slices.Contains(w.Routes, route), err
}

func (r *request) hasPath(patterns []extract.Pattern) bool {
	path := extract.PathOf(r.target)
	for i := range patterns {
		if patterns[i].Match(path) {
			return true
		}
	}
	return false
}

func (r *request) hasHeader(m *config.HeaderMatch) bool {
	value, n := lookup(r.headers, m.Name)
	switch m.Kind {
	case config.HeaderPresent:
		return n > 0
	case config.HeaderAbsent:
		return n == 0
	case config.HeaderEquals:
		return n == 1 && value == m.Value
	case config.HeaderMatches:
	}
	return n == 1 && m.Expression.MatchString(value)
}

// lookup returns the first value of a header and how many there are.
func lookup(headers [][2]string, name string) (value string, n int) {
	for i := range headers {
		if headers[i][0] == name {
			if n == 0 {
				value = headers[i][1]
			}
			n++
		}
	}
	return value, n
}

// contentLength returns the body's length if it is given, once, as RFC 9110,
// section 8.6, writes it. Envoy's codecs hold a body to it.
func contentLength(headers [][2]string) (int64, bool) {
	value, n := lookup(headers, "content-length")
	if n != 1 || value == "" {
		return 0, false
	}
	var length int64
	for i := range len(value) {
		c := int64(value[i]) - '0'
		if c < 0 || c > 9 || length > (math.MaxInt64-c)/10 {
			return 0, false
		}
		length = length*10 + c
	}
	return length, true
}

// size is the bytes of all names and values.
func size(headers [][2]string) int64 {
	n := 0
	for i := range headers {
		n += len(headers[i][0]) + len(headers[i][1])
	}
	return int64(n)
}

// isGRPC reports whether a content-type is gRPC's, which has messages in frames.
func isGRPC(headers [][2]string) bool {
	value, n := lookup(headers, "content-type")
	rest, ok := strings.CutPrefix(value, "application/grpc")
	return n == 1 && ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

// expectsContinue reports whether the client waits for a word before it sends the body
// (RFC 9110, section 10.1.1).
func expectsContinue(headers [][2]string) bool {
	value, _ := lookup(headers, "expect")
	return strings.EqualFold(value, "100-continue")
}

// startsLate reports whether the client sends its body only once somebody has answered
// the headers, so that the body can't be waited for.
func startsLate(headers [][2]string) bool {
	method, _ := lookup(headers, ":method")
	_, upgrades := lookup(headers, "upgrade")
	return expectsContinue(headers) || upgrades > 0 || method == "CONNECT"
}

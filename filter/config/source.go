package config

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/weir-dev/weir/filter/extract"
)

// A sourceField is the field of an entry, or of a cost, by which a source is given.
type sourceField struct {
	name string
	read func(d *decoder, path string, n node) Source
}

// sources are those of an entry, in the order of the documentation.
var sources = []sourceField{
	{"header", headerSource},
	{"path", pathSource},
	{"query", named(SourceQuery, "query parameter")},
	{"cookie", named(SourceCookie, "cookie")},
	{"method", alone(SourceMethod, "method")},
	{"authority", alone(SourceAuthority, "authority")},
	{"source_address", alone(SourceAddress, "source address")},
	{"peer_certificate", certificateSource},
	{"sni", sniSource},
	{"jwt_claim", claimSource},
	{"metadata", metadataSource("metadata", "metadata", "filter_metadata")},
	{"route", routeSource},
	{"route_metadata", metadataSource("route_metadata", "xds", "route_metadata", "filter_metadata")},
	{"json", jsonSource},
	{"protobuf", protobufSource(extract.EncodingString)},
	{"constant", named(SourceConstant, "constant")},
}

// costSources are those of a cost: where a number may stand.
var costSources = []sourceField{
	{"header", headerSource},
	{"query", named(SourceQuery, "query parameter")},
	{"jwt_claim", claimSource},
	{"metadata", metadataSource("metadata", "metadata", "filter_metadata")},
	{"route_metadata", metadataSource("route_metadata", "xds", "route_metadata", "filter_metadata")},
	{"json", jsonSource},
	{"protobuf", protobufSource(extract.EncodingInt64)},
}

func sourceNames(from []sourceField) []string {
	names := make([]string, 0, len(from))
	for _, f := range from {
		names = append(names, f.name)
	}
	return names
}

// source reads the one source among an object's fields.
func (d *decoder) source(path string, fields map[string]node, from []sourceField) Source {
	var found Source
	first := ""
	for _, f := range from {
		n, ok := fields[f.name]
		switch {
		case !ok:
		case first != "":
			d.fault(join(path, f.name), "is a second source, beside %s", first)
		default:
			first = f.name
			found = f.read(d, join(path, f.name), n)
		}
	}
	if first == "" {
		d.fault(path, "has no source; known are %s", strings.Join(sourceNames(from), ", "))
	}
	return found
}

// named reads sources that are a name alone.
func named(kind SourceKind, noun string) func(d *decoder, path string, n node) Source {
	return func(d *decoder, path string, n node) Source {
		text, _ := d.text(path, n)
		return Source{Kind: kind, Name: text, text: noun + " " + text}
	}
}

// alone reads sources of which there is one in a request: true is all they say.
func alone(kind SourceKind, noun string) func(d *decoder, path string, n node) Source {
	return func(d *decoder, path string, n node) Source {
		d.isTrue(path, n)
		return Source{Kind: kind, text: noun}
	}
}

func headerSource(d *decoder, path string, n node) Source {
	name, ok := d.text(path, n)
	if !ok {
		return Source{}
	}
	name = d.checkHeader(path, name)
	return Source{Kind: SourceHeader, Name: name, text: "header " + name}
}

// headerName returns the name of a header, in lower case.
func (d *decoder) headerName(path string, fields map[string]node, field string) string {
	before := len(d.errs)
	name := d.required(path, fields, field)
	if len(d.errs) > before {
		return ""
	}
	return d.checkHeader(join(path, field), name)
}

func (d *decoder) checkHeader(path, name string) string {
	name = strings.ToLower(name)
	switch {
	case !isToken(name):
		d.fault(path, "%q is not a header's name", name)
	case name == "host":
		// Envoy turns it into :authority, so an entry that skips it would never apply.
		d.fault(path, "host is not visible to a filter in Envoy: use authority")
	}
	return name
}

// isToken reports whether s is a token of RFC 9110, section 5.6.2, in lower case.
func isToken(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0:
		default:
			return false
		}
	}
	return s != ""
}

// maxSegment is the greatest number of a path's segment.
const maxSegment = 64

func pathSource(d *decoder, path string, n node) Source {
	if n.kind == kindString {
		if n.text != "whole" {
			d.fault(path, "%q is not a part of the path; known are whole, {segment}, {prefix}, {pattern, part}", n.text)
		}
		return Source{Kind: SourcePath, text: "path"}
	}
	fields := d.fields(path, n, "segment", "prefix", "pattern", "part")
	if fields == nil {
		return Source{}
	}
	_, segment := fields["segment"]
	_, prefix := fields["prefix"]
	_, pattern := fields["pattern"]
	switch {
	case segment && len(fields) == 1:
		i := d.whole(path, fields, "segment", 1, 1, maxSegment, "segments")
		return Source{Kind: SourceSegment, N: int(i), text: "path segment " + strconv.FormatInt(i, 10)}
	case prefix && len(fields) == 1:
		i := d.whole(path, fields, "prefix", 1, 1, maxSegment, "segments")
		return Source{Kind: SourcePrefix, N: int(i), text: "path prefix " + strconv.FormatInt(i, 10)}
	case pattern && !segment && !prefix:
		return d.partSource(path, fields)
	}
	d.fault(path, "wants one of segment, prefix and pattern")
	return Source{}
}

func (d *decoder) partSource(path string, fields map[string]node) Source {
	before := len(d.errs)
	text := d.required(path, fields, "pattern")
	if len(d.errs) > before {
		return Source{}
	}
	p := d.pattern(join(path, "pattern"), text)
	if len(d.errs) > before {
		return Source{}
	}
	parts := p.Parts()
	if len(parts) == 0 {
		d.fault(join(path, "pattern"), "%q names no part", text)
		return Source{}
	}
	part := d.str(path, fields, "part", "")
	switch _, given := fields["part"]; {
	case !given && len(parts) == 1:
		part = parts[0]
	case !given:
		d.fault(join(path, "part"), "is required, since the pattern names %d", len(parts))
	case !slices.Contains(parts, part):
		d.fault(join(path, "part"), "%q is not a part of the pattern; known are %s", part, strings.Join(parts, ", "))
	}
	return Source{Kind: SourcePattern, Pattern: p, Name: part, text: "path part " + part + " of " + text}
}

func certificateSource(d *decoder, path string, n node) Source {
	property, ok := choiceNode(d, path, n, "a part of a certificate", "", []word[string]{
		{"uri_san", "uri_san_peer_certificate"},
		{"dns_san", "dns_san_peer_certificate"},
		{"subject", "subject_peer_certificate"},
		{"sha256", "sha256_peer_certificate_digest"},
	})
	if !ok {
		return Source{}
	}
	return propertySource("peer certificate's "+n.text, PropertyText, "connection", property)
}

func sniSource(d *decoder, path string, n node) Source {
	d.isTrue(path, n)
	return propertySource("sni", PropertyText, "connection", "requested_server_name")
}

func routeSource(d *decoder, path string, n node) Source {
	_, _ = choiceNode(d, path, n, "a part of the route", "", []word[string]{{"name", ""}})
	return propertySource("route name", PropertyText, "xds", "route_name")
}

func propertySource(text string, as PropertyType, path ...string) Source {
	return Source{Kind: SourceProperty, Path: path, As: as, text: text}
}

// claimSource reads a claim of a JWT that Envoy has verified and put into its dynamic
// metadata.
func claimSource(d *decoder, path string, n node) Source {
	const filter = "envoy.filters.http.jwt_authn"
	if n.kind == kindString {
		claim, _ := d.text(path, n)
		return propertySource("jwt claim "+claim, PropertyString, "metadata", "filter_metadata", filter, "payload", claim)
	}
	fields := d.fields(path, n, "path", "payload", "as")
	if fields == nil {
		return Source{}
	}
	payload := d.str(path, fields, "payload", "payload")
	if payload == "" {
		d.fault(join(path, "payload"), "is empty")
	}
	steps := d.steps(path, fields)
	as := d.propertyType(path, fields)
	text := fmt.Sprintf("jwt claim %s of %s as %v", strings.Join(steps, "/"), payload, as)
	return propertySource(text, as, append([]string{"metadata", "filter_metadata", filter, payload}, steps...)...)
}

// metadataSource reads a value of some metadata, which Envoy has at the root.
func metadataSource(noun string, root ...string) func(d *decoder, path string, n node) Source {
	return func(d *decoder, path string, n node) Source {
		fields := d.fields(path, n, "filter", "path", "as")
		if fields == nil {
			return Source{}
		}
		filter := d.required(path, fields, "filter")
		steps := d.steps(path, fields)
		as := d.propertyType(path, fields)
		whole := append(append([]string{}, root...), filter)
		text := fmt.Sprintf("%s %s %s as %v", noun, filter, strings.Join(steps, "/"), as)
		return propertySource(text, as, append(whole, steps...)...)
	}
}

// steps reads the way to a value in metadata, of names and of places in lists.
func (d *decoder) steps(path string, fields map[string]node) []string {
	if _, ok := fields["path"]; !ok {
		d.fault(join(path, "path"), "is required")
		return nil
	}
	steps := d.texts(path, fields, "path")
	for i, s := range steps {
		// Envoy's host functions separate a property's steps with it.
		if strings.Contains(s, "\x00") {
			d.fault(index(join(path, "path"), i), "has a zero byte")
		}
	}
	return steps
}

func (d *decoder) propertyType(path string, fields map[string]node) PropertyType {
	as, _ := choice(d, path, fields, "as", "a type of metadata", PropertyString, []word[PropertyType]{
		{"string", PropertyString}, {"number", PropertyNumber}, {"bool", PropertyBool},
	})
	return as
}

func jsonSource(d *decoder, path string, n node) Source {
	if !d.is(path, n, kindString) {
		return Source{}
	}
	p, err := extract.ParsePointer(n.text)
	if err != nil {
		d.fault(path, "%q %v", n.text, err)
	}
	return Source{Kind: SourceJSON, Pointer: p, text: "json " + strconv.Quote(n.text)}
}

// protobufSource reads a field of a message, which has an encoding if none is given.
func protobufSource(fallback extract.Encoding) func(d *decoder, path string, n node) Source {
	return func(d *decoder, path string, n node) Source {
		if n.kind == kindString || n.kind == kindNumber {
			return d.protobuf(path, n, fallback)
		}
		fields := d.fields(path, n, "field", "as")
		if fields == nil {
			return Source{}
		}
		encoding := fallback
		if as := d.str(path, fields, "as", fallback.String()); as != fallback.String() {
			var ok bool
			if encoding, ok = extract.ParseEncoding(as); !ok {
				d.fault(join(path, "as"), "%q is not an encoding; known are %s", as, strings.Join(extract.Encodings(), ", "))
			}
		}
		field, ok := fields["field"]
		if !ok {
			d.fault(join(path, "field"), "is required")
			return Source{}
		}
		return d.protobuf(join(path, "field"), field, encoding)
	}
}

func (d *decoder) protobuf(path string, n node, encoding extract.Encoding) Source {
	if n.kind == kindNumber {
		// As a number, 3.10 would be 3.1.
		d.fault(path, "is a number, want a string: write %q", n.text)
		return Source{}
	}
	if !d.is(path, n, kindString) {
		return Source{}
	}
	field, err := extract.ParseField(n.text)
	if err != nil {
		d.fault(path, "%q %v", n.text, err)
	}
	return Source{
		Kind: SourceProtobuf, Field: field, Encoding: encoding,
		text: "protobuf field " + n.text + " as " + encoding.String(),
	}
}

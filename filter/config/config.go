// Package config is the filter's configuration: its types, its strict parser and
// the builder of the document that Envoy hands to the filter.
//
// [Parse] reads the whole plugin configuration, [ParseBlock] only the `filter:`
// block of a policy file, and [Compose] puts a block into a plugin configuration.
// The same code runs in the filter, in the control plane and in `weir policy
// check`, so what one accepts the others accept.
//
// # Document
//
// The document is JSON:
//
//	{
//	  "version": "7",
//	  "domain":  "ingest",
//	  "cluster": "weir_ratelimit",
//	  "filter": {
//	    "timeout": "250ms",
//	    "hold_bytes": 262144,
//	    "rules": [{
//	      "name": "uploads",
//	      "when": {"methods": ["PUT"], "paths": ["/v1/{tenant}/**"]},
//	      "descriptors": [{
//	        "entries": [{"key": "node", "header": "x-node-id", "type": "uuid", "missing": "skip"}],
//	        "cost": "body_bytes"
//	      }]
//	    }]
//	  }
//	}
//
// docs/filter.md describes every field of the block, with examples.
//
// # Strictness
//
// An unknown field, a field given twice, a value of the wrong type, text after the
// document and bytes that are not UTF-8 are errors. All faults are reported at
// once, joined, each as an [*Error] with the path of the value that is wrong.
// A value that was returned without an error needs no further check.
//
// The package keeps no state and is safe for concurrent use.
package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"regexp"
	"time"
	"unicode/utf8"

	"github.com/weir-dev/weir/filter/extract"
)

// Limits of a [Block], and what it defaults to.
const (
	// DefaultTimeout is how long the filter waits for the service's answer.
	DefaultTimeout = 250 * time.Millisecond
	// MinTimeout is one millisecond, the unit in which Envoy takes a timeout.
	// Envoy reads zero as "no timeout".
	MinTimeout = time.Millisecond
	// MaxTimeout is the longest that a request may be kept waiting.
	MaxTimeout = time.Minute

	// DefaultHoldBytes is 256 KiB.
	DefaultHoldBytes = 256 << 10
	// MaxHoldBytes is 16 MiB, the default window of an HTTP/2 stream in Envoy.
	MaxHoldBytes = 16 << 20

	// DefaultBlockBytes is 64 KiB.
	DefaultBlockBytes = 64 << 10
	// MaxBlockBytes is 16 MiB.
	MaxBlockBytes = 16 << 20
	// DefaultBlockMessages is how many messages of a gRPC stream are taken ahead.
	DefaultBlockMessages = 16
	// MaxBlockMessages is the most of [Block.BlockMessages].
	MaxBlockMessages = 1 << 20

	// DefaultRefusedStatus is 429, Too Many Requests (RFC 6585).
	DefaultRefusedStatus = 429
	// MaxRefusedBody is 16 KiB.
	MaxRefusedBody = 16 << 10

	// MaxValue is the longest value of a key, in bytes: 64 KiB.
	MaxValue = 64 << 10

	// MaxCost is the largest cost, 2^53: the largest limit of a policy.
	MaxCost = 1 << 53
)

// Config is a whole plugin configuration.
type Config struct {
	// Version is opaque: it tells one configuration from another. It may be empty.
	Version string
	// Domain is the namespace of the descriptors. It is never empty.
	Domain string
	// Cluster is Envoy's name for the rate limit service. It is never empty.
	Cluster string

	Block
}

// Block is the `filter:` block of a policy file.
type Block struct {
	// Timeout is how long the filter waits for the service before it answers 500;
	// [MinTimeout] to [MaxTimeout]. Defaults to [DefaultTimeout].
	Timeout time.Duration
	// HoldBytes is how much of a body of unknown length, in bytes, the filter holds
	// back in order to charge it at once, and the most that it reads of a body in
	// which a key or a cost stands, before and after decompression; 1 to
	// [MaxHoldBytes]. Defaults to [DefaultHoldBytes].
	HoldBytes int64
	// BlockBytes is how many bytes of a longer body, or of a gRPC stream, are taken
	// ahead of what is forwarded; 1 to [MaxBlockBytes]. Defaults to
	// [DefaultBlockBytes].
	BlockBytes int64
	// BlockMessages is the same for costs that count messages; 1 to
	// [MaxBlockMessages]. Defaults to [DefaultBlockMessages].
	BlockMessages int64
	// Refused is the answer to a request that is refused.
	Refused Answer
	// Debug is what the filter logs of each request. Defaults to [DebugOff].
	Debug Debug
	// Rules are tried on every request, and all that hold apply. With none, nothing
	// is limited.
	Rules []Rule
}

// Answer is a response of the filter's own.
type Answer struct {
	// Status is the HTTP status, 400 to 599. Defaults to [DefaultRefusedStatus]. A gRPC
	// client gets RESOURCE_EXHAUSTED whatever it is.
	Status int
	// Body is the body, at most [MaxRefusedBody] bytes, and "" for that of the service
	// or a short text.
	Body string
	// ContentType is the body's media type, or empty.
	ContentType string
}

// Debug is what the filter writes to Envoy's log, at level debug, of each request.
type Debug uint8

// The levels of detail.
const (
	// DebugOff writes nothing.
	DebugOff Debug = iota
	// DebugRedacted says which key came from where, and how long its value is.
	DebugRedacted
	// DebugValues writes the values too, and with them what may be secret.
	DebugValues
)

// Rule is a group of descriptors with the requests that they are for.
type Rule struct {
	// Name is the rule's name in metrics and logs: letters, digits, dots and dashes,
	// at most 64, without a dot at the end. It is unique. Defaults to the rule's place from 0, such as "3".
	Name string
	// When says which requests the rule is for. Defaults to all.
	When When
	// Descriptors has at least one element.
	Descriptors []Descriptor
}

// When is a condition on a request. All of its parts must hold; one that is empty does.
type When struct {
	// Routes has the names of Envoy's routes, of which one must be the request's.
	Routes []string
	// Methods has methods, of which one must be the request's.
	Methods []string
	// Paths has patterns, of which one must match the path.
	Paths []extract.Pattern
	// Headers must all hold.
	Headers []HeaderMatch
}

// HeaderMatch is a condition on a header. A header that comes twice meets none but that
// it is there.
type HeaderMatch struct {
	// Name is the header's name in lower case.
	Name string
	// Kind is what must be so.
	Kind HeaderMatchKind
	// Value is what [HeaderEquals] compares with; it may be empty.
	Value string
	// Expression is the RE2 expression of [HeaderMatches], for the whole value.
	Expression *regexp.Regexp
}

// HeaderMatchKind is a kind of condition on a header.
type HeaderMatchKind uint8

// The kinds of conditions.
const (
	// HeaderPresent is that the header is there.
	HeaderPresent HeaderMatchKind = iota
	// HeaderAbsent is that it is not.
	HeaderAbsent
	// HeaderEquals is that it is there once with exactly this value.
	HeaderEquals
	// HeaderMatches is that it is there once with a value that matches.
	HeaderMatches
)

// Descriptor is one aspect of a request that the service may limit.
type Descriptor struct {
	// Entries has at least one element. Their order counts.
	Entries []Entry
	// Cost is what the descriptor charges. Defaults to one for each request.
	Cost Cost
	// AllowOnError says that this descriptor does not keep a request from going on when
	// the service is unavailable. All of a request's must say so.
	AllowOnError bool
}

// Entry is one key of a descriptor and where its value comes from. A value goes
// through Capture, Normalize and Type, in this order.
type Entry struct {
	// Key is the entry's name in the policy. It is never empty.
	Key string
	// Source is where the value is read.
	Source Source
	// Capture is an RE2 expression; its first group is the value, or the whole match
	// if it has none. A value that it does not match is absent. Nil for none.
	Capture *regexp.Regexp
	// Normalize is applied in order.
	Normalize []Normalizer
	// Type is what the value must be. Defaults to [TypeString], or [TypeIP] for
	// [SourceAddress].
	Type Type
	// Mask says how much of an address counts, for [TypeIP].
	Mask extract.Masks
	// Missing is what happens when the source is absent. Defaults to [MissingDeny].
	Missing Missing
	// Default is the value of an absent source under [MissingDefault], in the form
	// that [Entry.Canonical] gives it, else empty.
	Default string
}

// Source is a place in a request.
type Source struct {
	Kind SourceKind
	// Name is the name of a header (in lower case), a query parameter, a cookie or a
	// pattern's part, or the text of [SourceConstant].
	Name string
	// N is the number of [SourceSegment], from 1, or how many segments
	// [SourcePrefix] has.
	N int
	// Pattern is that of [SourcePattern].
	Pattern extract.Pattern
	// Path is the path of a property of Envoy, for [SourceProperty].
	Path []string
	// As is how the property's bytes are read.
	As PropertyType
	// Pointer is that of [SourceJSON].
	Pointer extract.Pointer
	// Field and Encoding are those of [SourceProtobuf].
	Field    extract.Field
	Encoding extract.Encoding

	text string // as the configuration names it
}

// String names the source for people, such as "header x-node-id".
func (s *Source) String() string { return s.text }

// InBody reports whether the source stands in the body.
func (s *Source) InBody() bool { return s.Kind == SourceJSON || s.Kind == SourceProtobuf }

// SourceKind is a kind of place in a request.
type SourceKind uint8

// The kinds of places.
const (
	// SourceHeader is a request header.
	SourceHeader SourceKind = iota
	// SourcePath is the path without its query, decoded.
	SourcePath
	// SourceSegment is one segment of the path.
	SourceSegment
	// SourcePrefix is the path's first segments.
	SourcePrefix
	// SourcePattern is a part of the path that a pattern names.
	SourcePattern
	// SourceQuery is a parameter of the query.
	SourceQuery
	// SourceCookie is a cookie.
	SourceCookie
	// SourceMethod is the method.
	SourceMethod
	// SourceAuthority is the host that is asked for, without its port.
	SourceAuthority
	// SourceAddress is the client's address, as Envoy determined it.
	SourceAddress
	// SourceProperty is a property of Envoy: of the client's certificate, the
	// connection, the route, or dynamic metadata such as a verified JWT's claims.
	SourceProperty
	// SourceJSON is a value in a JSON body.
	SourceJSON
	// SourceProtobuf is a field of a protobuf body, or of the first message of a
	// gRPC stream.
	SourceProtobuf
	// SourceConstant is a fixed text.
	SourceConstant
)

// PropertyType is how a property's bytes are read: Envoy does not say what they are.
type PropertyType uint8

// The types of properties.
const (
	// PropertyString is text.
	PropertyString PropertyType = iota
	// PropertyNumber is a number, as JSON and metadata have them.
	PropertyNumber
	// PropertyBool is true or false.
	PropertyBool
	// PropertyText is text of the connection, its certificate or the route, where Envoy
	// gives an empty text for one that is absent.
	PropertyText
)

// String is the type's name in the configuration.
func (t PropertyType) String() string {
	switch t {
	case PropertyNumber:
		return "number"
	case PropertyBool:
		return "bool"
	case PropertyString, PropertyText:
	}
	return "string"
}

// Normalizer is a step that makes different spellings of one value the same.
type Normalizer uint8

// The normalizers.
const (
	// Lower turns letters into lower case.
	Lower Normalizer = iota
	// Trim takes white space from both ends.
	Trim
	// SHA256 puts the value's SHA-256 in its place, in hexadecimal, so that a secret
	// such as an API key is in no counter, log or metric.
	SHA256
)

// Cost is what a descriptor charges for a request: the sum of its terms.
type Cost struct {
	// Terms has at least one element.
	Terms []Term
}

// Term is a summand of a cost: a quantity times a factor.
type Term struct {
	Kind TermKind
	// Source is that of [TermValue].
	Source Source
	// Factor multiplies the quantity; 1 to [MaxCost]. Defaults to 1.
	Factor int64
	// Min and Max are the range in which a value of [TermValue] counts; one outside it
	// is missing. 0 to [MaxCost]; they default to 1 and [MaxCost].
	Min, Max int64
	// Missing is what happens when a value is absent, is no whole number or is out of
	// range. Defaults to [MissingDeny].
	Missing Missing
	// Default is the quantity of a missing value under [MissingDefault].
	Default int64
}

// TermKind is a kind of quantity.
type TermKind uint8

// The kinds of quantities.
const (
	// TermOne is one for each request.
	TermOne TermKind = iota
	// TermBodyBytes is the bytes of the body as they are received.
	TermBodyBytes
	// TermBytes is those and the bytes of the headers: of their names and values,
	// pseudo-headers too, as the filter sees them.
	TermBytes
	// TermMessages is the messages of a gRPC stream. A request that is none has no
	// messages.
	TermMessages
	// TermValue is a number that stands in the request.
	TermValue
)

// Missing is what to do when a source is absent. An empty value is not absent.
type Missing uint8

// The ways to deal with an absent source.
const (
	// MissingDeny refuses the request with a 400.
	MissingDeny Missing = iota
	// MissingSkip leaves the whole descriptor out.
	MissingSkip
	// MissingDefault takes the default as the value.
	MissingDefault
)

// Error is one fault of a configuration.
type Error struct {
	// Path names the value, such as `rules[0].descriptors[1].entries[0].header`.
	// It starts at the block for [ParseBlock] and at the document for [Parse] and
	// [Compose], where a block's paths begin with `filter.`. It is empty for a fault
	// of the whole text.
	Path string
	// Msg says what is wrong, in lower case.
	Msg string
}

// Error is the path, a colon and the message.
func (e *Error) Error() string {
	if e.Path == "" {
		return e.Msg
	}
	return e.Path + ": " + e.Msg
}

// Parse reads a plugin configuration. Its error is one or more [*Error], joined.
func Parse(data []byte) (*Config, error) {
	d, root := decode(data)
	if len(d.errs) > 0 {
		return nil, errors.Join(d.errs...)
	}
	c := d.config(root)
	if len(d.errs) > 0 {
		return nil, errors.Join(d.errs...)
	}
	return c, nil
}

// ParseBlock reads a `filter:` block alone. Its error is one or more [*Error],
// joined.
func ParseBlock(data []byte) (Block, error) {
	d, root := decode(data)
	if len(d.errs) > 0 {
		return Block{}, errors.Join(d.errs...)
	}
	b := d.block("", root)
	if len(d.errs) > 0 {
		return Block{}, errors.Join(d.errs...)
	}
	return b, nil
}

// Compose builds the plugin configuration around a block's JSON and checks it as
// [Parse] does. Equal arguments give equal bytes.
func Compose(version, domain, cluster string, block []byte) ([]byte, error) {
	var errs []error
	for _, f := range []struct{ path, value string }{
		{"version", version}, {"domain", domain}, {"cluster", cluster},
	} {
		if !utf8.ValidString(f.value) {
			errs = append(errs, &Error{Path: f.path, Msg: "is not valid UTF-8"})
		}
	}
	// Marshal would replace bytes that are not UTF-8, so they are refused first.
	if !utf8.Valid(block) {
		errs = append(errs, &Error{Path: "filter", Msg: "is not valid UTF-8"})
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, block); err != nil {
		return nil, &Error{Path: "filter", Msg: err.Error()}
	}

	var out bytes.Buffer
	out.WriteString(`{"version":`)
	for _, f := range []struct{ value, next string }{
		{version, `,"domain":`}, {domain, `,"cluster":`}, {cluster, `,"filter":`},
	} {
		text, err := json.Marshal(f.value)
		if err != nil {
			return nil, fmt.Errorf("encoding %q: %w", f.value, err)
		}
		out.Write(text)
		out.WriteString(f.next)
	}
	out.Write(compact.Bytes())
	out.WriteByte('}')
	if _, err := Parse(out.Bytes()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// Headers returns all the request headers that the block reads, each with the path of the
// field that names it.
func (b *Block) Headers() iter.Seq2[string, string] {
	return func(yield func(path, name string) bool) {
		for i := range b.Rules {
			at := index("rules", i)
			for j, h := range b.Rules[i].When.Headers {
				if !yield(index(at+".when.headers", j)+".name", h.Name) {
					return
				}
			}
			for j := range b.Rules[i].Descriptors {
				if !b.Rules[i].Descriptors[j].headers(index(at+".descriptors", j), yield) {
					return
				}
			}
		}
	}
}

func (d *Descriptor) headers(at string, yield func(path, name string) bool) bool {
	for k := range d.Entries {
		if s := &d.Entries[k].Source; s.Kind == SourceHeader && !yield(index(at+".entries", k)+".header", s.Name) {
			return false
		}
	}
	for k := range d.Cost.Terms {
		t := &d.Cost.Terms[k]
		if t.Kind != TermValue || t.Source.Kind != SourceHeader {
			continue
		}
		place := at + ".cost"
		if len(d.Cost.Terms) > 1 {
			place = index(place+".sum", k)
		}
		if !yield(place+".header", t.Source.Name) {
			return false
		}
	}
	return true
}

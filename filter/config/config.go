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
//	      "descriptors": [{
//	        "entries": [{"key": "node", "header": "x-node-id", "type": "uuid", "missing": "skip"}],
//	        "cost": "body_bytes"
//	      }]
//	    }]
//	  }
//	}
//
// # Strictness
//
// An unknown field, a field given twice, a value of the wrong type, text after the
// document and bytes that are not UTF-8 are errors. All faults are reported at
// once, joined, each as an [*Error] with the path of the value that is wrong.
// A value that was returned without an error needs no further check.
//
// The package imports the standard library only, keeps no state and is safe for
// concurrent use.
package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"time"
	"unicode/utf8"
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
	// HoldBytes is the largest body of unknown length, in bytes, that the filter
	// holds back to count it; 1 to [MaxHoldBytes]. Defaults to [DefaultHoldBytes].
	HoldBytes int64
	// Rules all apply to every request. With none, nothing is limited.
	Rules []Rule
}

// Rule is a group of descriptors.
type Rule struct {
	// Name is for people. It is unique among the rules, or empty.
	Name string
	// Descriptors has at least one element.
	Descriptors []Descriptor
}

// Descriptor is one aspect of a request that the service may limit.
type Descriptor struct {
	// Entries has at least one element. Their order counts.
	Entries []Entry
	// Cost is what the descriptor charges. Defaults to [CostOne].
	Cost Cost
}

// Entry is one key of a descriptor and where its value comes from.
type Entry struct {
	// Key is the entry's name in the policy. It is never empty.
	Key string
	// Source is where the value is read.
	Source Source
	// Type is what the value must be. Defaults to [TypeString].
	Type Type
	// Missing is what happens when the source is absent. Defaults to [MissingDeny].
	Missing Missing
	// Default is the value of an absent source under [MissingDefault], in the form
	// that [Type.Canonical] gives it, else empty.
	Default string
}

// Source is a place in a request.
type Source struct {
	Kind SourceKind
	// Name is the header's name in lower case.
	Name string
}

// SourceKind is a kind of place in a request.
type SourceKind uint8

// SourceHeader is a request header. Later kinds follow it.
const SourceHeader SourceKind = iota

// Cost is what a descriptor charges for a request.
type Cost uint8

// The costs.
const (
	// CostOne charges one for each request.
	CostOne Cost = iota
	// CostBodyBytes charges the bytes of the request's body as they were received.
	CostBodyBytes
)

// Missing is what to do when a source is absent. An empty value is not absent.
type Missing uint8

// The ways to deal with an absent source.
const (
	// MissingDeny refuses the request with a 400.
	MissingDeny Missing = iota
	// MissingSkip leaves the whole descriptor out.
	MissingSkip
	// MissingDefault takes [Entry.Default] as the value.
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

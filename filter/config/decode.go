package config

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weir-dev/weir/filter/extract"
)

func (d *decoder) config(n node) *Config {
	fields := d.fields("", n, "version", "domain", "cluster", "filter")
	if fields == nil {
		return nil
	}
	c := &Config{
		Version: d.str("", fields, "version", ""),
		Domain:  d.required("", fields, "domain"),
		Cluster: d.required("", fields, "cluster"),
	}
	block, ok := fields["filter"]
	if !ok {
		d.fault("filter", "is required")
		return nil
	}
	c.Block = d.block("filter", block)
	return c
}

func (d *decoder) block(path string, n node) Block {
	fields := d.fields(path, n, "timeout", "hold_bytes", "block_bytes", "block_messages", "refused", "debug", "rules")
	if fields == nil {
		return Block{}
	}
	b := Block{
		Timeout:       d.timeout(path, fields),
		HoldBytes:     d.whole(path, fields, "hold_bytes", DefaultHoldBytes, 1, MaxHoldBytes, "bytes"),
		BlockBytes:    d.whole(path, fields, "block_bytes", DefaultBlockBytes, 1, MaxBlockBytes, "bytes"),
		BlockMessages: d.whole(path, fields, "block_messages", DefaultBlockMessages, 1, MaxBlockMessages, "messages"),
		Refused:       d.answer(path, fields),
	}
	b.Debug, _ = choice(d, path, fields, "debug", "a level of detail", DebugOff, []word[Debug]{
		{"off", DebugOff}, {"redacted", DebugRedacted}, {"values", DebugValues},
	})
	names := map[string]string{}
	places := map[string]string{}
	for i, item := range d.list(path, fields, "rules") {
		at := index(join(path, "rules"), i)
		r := d.rule(at, i, item, places)
		if other, taken := names[r.Name]; taken {
			d.fault(join(at, "name"), "%q is the name of %s too", r.Name, other)
		}
		names[r.Name] = at
		b.Rules = append(b.Rules, r)
	}
	return b
}

func (d *decoder) timeout(path string, fields map[string]node) time.Duration {
	text := d.str(path, fields, "timeout", DefaultTimeout.String())
	timeout, err := time.ParseDuration(text)
	switch {
	case err != nil:
		d.fault(join(path, "timeout"), "%q is not a duration such as 250ms", text)
	case timeout < MinTimeout || timeout > MaxTimeout:
		d.fault(join(path, "timeout"), "is %v, want %v to %v", timeout, MinTimeout, MaxTimeout)
	}
	return timeout
}

func (d *decoder) answer(path string, fields map[string]node) Answer {
	a := Answer{Status: DefaultRefusedStatus}
	n, ok := fields["refused"]
	if !ok {
		return a
	}
	path = join(path, "refused")
	fields = d.fields(path, n, "status", "body", "content_type")
	if fields == nil {
		return a
	}
	a.Status = int(d.whole(path, fields, "status", DefaultRefusedStatus, 400, 599, "an HTTP status"))
	a.Body = d.str(path, fields, "body", "")
	if len(a.Body) > MaxRefusedBody {
		d.fault(join(path, "body"), "has %d bytes, want at most %d", len(a.Body), MaxRefusedBody)
	}
	a.ContentType = d.str(path, fields, "content_type", "")
	for i := range len(a.ContentType) {
		if c := a.ContentType[i]; c < ' ' || c >= 0x7F {
			d.fault(join(path, "content_type"), "%q is not a media type", a.ContentType)
			break
		}
	}
	return a
}

// rule reads the i-th rule. In places is where each descriptor was seen before: the same one
// twice, for the same requests, would charge a request twice.
func (d *decoder) rule(path string, i int, n node, places map[string]string) Rule {
	fields := d.fields(path, n, "name", "when", "descriptors")
	if fields == nil {
		return Rule{Name: strconv.Itoa(i)}
	}
	r := Rule{Name: d.str(path, fields, "name", strconv.Itoa(i)), When: d.when(path, fields)}
	if !isRuleName(r.Name) {
		d.fault(join(path, "name"), "%q is not a name of 1 to %d letters, digits, dots and dashes without a dot at its end", r.Name, maxRuleName)
	}
	items := d.list(path, fields, "descriptors")
	if fields["descriptors"].kind == kindArray && len(items) == 0 {
		d.fault(join(path, "descriptors"), "is empty")
	}
	for i, item := range items {
		at := index(join(path, "descriptors"), i)
		before := len(d.errs)
		desc := d.descriptor(at, item)
		if len(d.errs) == before {
			text := fmt.Sprintf("%+v %+v", r.When, desc)
			if other, seen := places[text]; seen {
				d.fault(at, "is the same as %s", other)
			}
			places[text] = at
		}
		r.Descriptors = append(r.Descriptors, desc)
	}
	return r
}

// maxRuleName is in bytes.
const maxRuleName = 64

// isRuleName reports whether s can be a part of a metric's name, in which other
// characters separate it from the rest.
func isRuleName(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '.', c == '-':
		default:
			return false
		}
	}
	// Envoy drops a dot at the end from a label, so that two rules would become one.
	return s != "" && len(s) <= maxRuleName && s[len(s)-1] != '.'
}

func (d *decoder) when(path string, fields map[string]node) When {
	n, ok := fields["when"]
	if !ok {
		return When{}
	}
	path = join(path, "when")
	fields = d.fields(path, n, "routes", "methods", "paths", "headers")
	if fields == nil {
		return When{}
	}
	w := When{
		Routes:  d.texts(path, fields, "routes"),
		Methods: d.texts(path, fields, "methods"),
	}
	for i, method := range w.Methods {
		if !isToken(strings.ToLower(method)) || strings.ToUpper(method) != method {
			d.fault(index(join(path, "methods"), i), "%q is not a method in capitals", method)
		}
	}
	for at, item := range d.some(path, fields, "paths") {
		if text, ok := d.text(at, item); ok {
			w.Paths = append(w.Paths, d.pattern(at, text))
		}
	}
	for at, item := range d.some(path, fields, "headers") {
		w.Headers = append(w.Headers, d.headerMatch(at, item))
	}
	return w
}

func (d *decoder) pattern(path, text string) extract.Pattern {
	p, err := extract.ParsePattern(text)
	if err != nil {
		d.fault(path, "%q %v", text, err)
	}
	return p
}

func (d *decoder) headerMatch(path string, n node) HeaderMatch {
	fields := d.fields(path, n, "name", "equals", "matches", "present")
	if fields == nil {
		return HeaderMatch{}
	}
	m := HeaderMatch{Name: d.headerName(path, fields, "name")}
	given := 0
	if n, ok := fields["present"]; ok {
		given++
		if d.is(join(path, "present"), n, kindBool) && n.text == "false" {
			m.Kind = HeaderAbsent
		}
	}
	if _, ok := fields["equals"]; ok {
		given++
		m.Kind = HeaderEquals
		m.Value = d.str(path, fields, "equals", "")
	}
	if _, ok := fields["matches"]; ok {
		given++
		m.Kind = HeaderMatches
		text := d.required(path, fields, "matches")
		if d.expression(join(path, "matches"), text) != nil {
			m.Expression = regexp.MustCompile("^(?:" + text + ")$")
		}
	}
	if given != 1 {
		d.fault(path, "wants one of equals, matches and present")
	}
	return m
}

func (d *decoder) descriptor(path string, n node) Descriptor {
	fields := d.fields(path, n, "entries", "cost", "on_error")
	if fields == nil {
		return Descriptor{}
	}
	var desc Descriptor
	items := d.list(path, fields, "entries")
	if fields["entries"].kind == kindArray && len(items) == 0 {
		d.fault(join(path, "entries"), "is empty")
	}
	for i, item := range items {
		desc.Entries = append(desc.Entries, d.entry(index(join(path, "entries"), i), item))
	}
	desc.Cost = d.cost(path, fields)
	desc.AllowOnError, _ = choice(d, path, fields, "on_error", "a way to deal with it", false, []word[bool]{
		{"deny", false}, {"allow", true},
	})
	return desc
}

func (d *decoder) entry(path string, n node) Entry {
	fields := d.fields(path, n, append([]string{
		"key", "capture", "normalize", "type", "mask", "missing", "default",
	}, sourceNames(sources)...)...)
	if fields == nil {
		return Entry{}
	}
	before := len(d.errs)
	e := Entry{
		Key:    d.required(path, fields, "key"),
		Source: d.source(path, fields, sources),
		Mask:   extract.Masks{IPv4: 32, IPv6: 128},
	}
	if text, ok := fields["capture"]; ok && d.is(join(path, "capture"), text, kindString) {
		e.Capture = d.expression(join(path, "capture"), text.text)
	}
	for at, item := range d.some(path, fields, "normalize") {
		if step, ok := choiceNode(d, at, item, "a normalizer", Lower, []word[Normalizer]{
			{"lower", Lower}, {"trim", Trim}, {"sha256", SHA256},
		}); ok {
			e.Normalize = append(e.Normalize, step)
		}
	}
	d.entryType(path, fields, &e)
	d.entryMissing(path, fields, &e, len(d.errs) == before)
	return e
}

func (d *decoder) entryType(path string, fields map[string]node, e *Entry) {
	fallback := TypeString
	if e.Source.Kind == SourceAddress {
		fallback = TypeIP
	}
	typ, ok := choice(d, path, fields, "type", "a type", fallback, []word[Type]{
		{"string", TypeString}, {"uuid", TypeUUID}, {"ip", TypeIP},
	})
	e.Type = typ
	if !ok {
		return
	}
	if typ != TypeString && slices.Contains(e.Normalize, SHA256) {
		d.fault(join(path, "normalize"), "sha256 needs type: string")
	}
	if e.Source.Kind == SourceAddress && typ != TypeIP {
		d.fault(join(path, "type"), "a source_address is of type ip")
	}
	mask, given := fields["mask"]
	if !given {
		return
	}
	path = join(path, "mask")
	if typ != TypeIP {
		d.fault(path, "needs type: ip")
		return
	}
	bits := d.fields(path, mask, "ipv4", "ipv6")
	if bits == nil {
		return
	}
	e.Mask.IPv4 = int(d.whole(path, bits, "ipv4", 32, 0, 32, "bits"))
	e.Mask.IPv6 = int(d.whole(path, bits, "ipv6", 128, 0, 128, "bits"))
}

// entryMissing reads what to do without a value. A default is checked only if the
// entry that it is for is sound.
func (d *decoder) entryMissing(path string, fields map[string]node, e *Entry, sound bool) {
	missing, ok := d.missing(path, fields)
	e.Missing = missing
	_, given := fields["default"]
	switch {
	case missing == MissingDefault:
		before := len(d.errs)
		value := d.required(path, fields, "default")
		if !sound || len(d.errs) > before {
			break
		}
		canonical, err := e.typed(value)
		if err != nil {
			d.fault(join(path, "default"), "%q %v", value, err)
		}
		e.Default = canonical
	case given && ok:
		d.fault(join(path, "default"), "needs missing: default")
	}
}

func (d *decoder) missing(path string, fields map[string]node) (Missing, bool) {
	return choice(d, path, fields, "missing", "a way to deal with it", MissingDeny, []word[Missing]{
		{"deny", MissingDeny}, {"skip", MissingSkip}, {"default", MissingDefault},
	})
}

package filter

import (
	"errors"
	"strconv"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/filter/extract"
)

// A charge is a descriptor that applies to the request, with its entries' values and
// what it costs.
type charge struct {
	rule       int
	descriptor *config.Descriptor
	values     []string
	price      price
}

// A fault is what is wrong with a request, for the client.
type fault struct {
	rule int
	text string
}

// collect forms the charges of the rules that hold. All keys are looked at, so that the
// answer does not depend on the rules' order. needsBody is set if something stands in
// the body, and that is not known yet; then the charges are not complete.
func (s *stream) collect() (needsBody bool, f *fault, err error) {
	s.charges, s.values = s.charges[:0], s.values[:0]
	rules := s.plugin.cfg.Rules
	for i := range rules {
		holds, err := s.request.holds(&rules[i].When)
		if err != nil {
			return false, nil, err
		}
		if !holds {
			continue
		}
		for j := range rules[i].Descriptors {
			state, text := s.form(i, &rules[i].Descriptors[j])
			if text != "" {
				return false, &fault{i, text}, nil
			}
			if state == formPending && !needsBody {
				needsBody, s.bodyRule = true, i
			}
		}
	}
	return needsBody, nil, nil
}

type form int

const (
	formed      form = iota // a charge was added
	formSkipped             // the descriptor does not apply
	formPending             // its body is not known
)

// form adds the charge of a descriptor. The text is what is wrong with the request.
func (s *stream) form(rule int, d *config.Descriptor) (state form, text string) {
	first := len(s.values)
	pending, skipped := false, false
	for i := range d.Entries {
		e := &d.Entries[i]
		value, err := s.value(e)
		switch {
		case err == nil:
			s.debugKey(rule, e, "", value)
			s.values = append(s.values, value)
		case errors.Is(err, errNoBody):
			pending = true
		case !errors.Is(err, extract.ErrAbsent):
			return formed, e.Source.String() + " " + err.Error()
		case e.Missing == config.MissingDeny:
			return formed, e.Source.String() + " is missing"
		case e.Missing == config.MissingSkip:
			// Deny is stronger, so the other entries are looked at too.
			s.debugKey(rule, e, "is absent, so the descriptor is left out", "")
			skipped = true
		default:
			s.debugKey(rule, e, "is absent, so it has its default", "")
			s.values = append(s.values, e.Default)
		}
	}
	p, costState, text := s.price(rule, d, !pending && !skipped)
	switch {
	case text != "":
		return formed, text
	case skipped || costState == formSkipped: // and so it needs no body
		state = formSkipped
	case pending || costState == formPending:
		state = formPending
	default:
		s.charges = append(s.charges, charge{rule, d, s.values[first:len(s.values):len(s.values)], p})
		return formed, ""
	}
	s.values = s.values[:first]
	return state, ""
}

func (s *stream) value(e *config.Entry) (string, error) {
	value, err := s.request.read(&e.Source)
	if err != nil {
		return "", err
	}
	return e.Canonical(value)
}

// price works out what a descriptor costs. A missing cost is counted if that decides.
func (s *stream) price(rule int, d *config.Descriptor, counts bool) (p price, state form, text string) {
	pending := false
	for i := range d.Cost.Terms {
		t := &d.Cost.Terms[i]
		var q price
		switch t.Kind {
		case config.TermOne:
			q.fixed = t.Factor
		case config.TermBodyBytes:
			q.perByte = t.Factor
		case config.TermBytes:
			q.perByte = t.Factor
			q.fixed = multiply(t.Factor, size(s.request.headers))
		case config.TermMessages:
			if s.request.grpc {
				q.perMessage = t.Factor
			}
		case config.TermValue:
			n, err := s.number(t)
			switch {
			case err == nil:
			case errors.Is(err, errNoBody):
				pending = true
			default:
				if counts || t.Missing == config.MissingDeny {
					s.host.count(s.plugin.counters.rules[rule].missing[reasonOf(err)])
				}
				switch t.Missing {
				case config.MissingDeny:
					return p, state, t.Source.String() + " " + missingText(err)
				case config.MissingSkip:
					state = formSkipped // and deny is stronger
				case config.MissingDefault:
					n = t.Default
				}
			}
			q.fixed = multiply(t.Factor, n)
		}
		p = p.plus(q)
	}
	if pending && state != formSkipped {
		state = formPending
	}
	return p, state, ""
}

// A rangeError says which costs a term takes.
type rangeError struct{ least, most int64 }

func (e *rangeError) Error() string {
	return "is not a whole number from " + strconv.FormatInt(e.least, 10) + " to " + strconv.FormatInt(e.most, 10)
}

// number reads the number of a term.
func (s *stream) number(t *config.Term) (int64, error) {
	text, err := s.request.read(&t.Source)
	if err != nil {
		return 0, err
	}
	n, err := extract.Whole(text)
	if err != nil {
		return 0, err
	}
	if n < t.Min || n > t.Max {
		return 0, &rangeError{t.Min, t.Max}
	}
	return n, nil
}

func reasonOf(err error) reason {
	var r *rangeError
	switch {
	case errors.Is(err, extract.ErrAbsent):
		return absent
	case errors.Is(err, extract.ErrRepeated):
		return repeated
	case errors.As(err, &r):
		return outOfRange
	}
	return malformed
}

func missingText(err error) string {
	if errors.Is(err, extract.ErrAbsent) {
		return "is missing"
	}
	return err.Error()
}

// debugKey logs where a key's value came from.
func (s *stream) debugKey(rule int, e *config.Entry, note, value string) {
	level := s.plugin.cfg.Debug
	if level == config.DebugOff {
		return
	}
	switch {
	case note != "":
	case level == config.DebugValues:
		note = "is " + strconv.Quote(value)
	default:
		note = "has " + strconv.Itoa(len(value)) + " bytes"
	}
	s.host.logDebug("rule " + s.plugin.cfg.Rules[rule].Name + ": key " + strconv.Quote(e.Key) +
		" from " + e.Source.String() + " " + note)
}

// uses returns one of each unit that some charge counts.
func (s *stream) uses() units {
	var u units
	for i := range s.charges {
		if s.charges[i].price.perByte != 0 {
			u.bytes = 1
		}
		if s.charges[i].price.perMessage != 0 {
			u.messages = 1
		}
	}
	return u
}

// allowsError reports whether the request may go on while the service is unavailable.
func (s *stream) allowsError() bool {
	for i := range s.charges {
		if !s.charges[i].descriptor.AllowOnError {
			return false
		}
	}
	return len(s.charges) > 0
}

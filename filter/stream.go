package filter

import (
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"

	"github.com/weir-dev/weir/filter/config"
)

// actionStopAll holds the headers and everything after them, with back-pressure and
// without another callback, until the request is resumed. Envoy calls it
// StopAllIterationAndWatermark; the SDK has no name for it. With ActionPause at the
// headers body callbacks come, under allow_on_headers_stop_iteration.
const actionStopAll types.Action = 4

// The gRPC statuses of our own answers.
const (
	grpcInvalidArgument   = 3
	grpcResourceExhausted = 8
	grpcUnavailable       = 14
)

type state uint8

const (
	fresh    state = iota // before the headers
	holding               // the body is counted and kept back
	calling               // the service has been asked
	passed                // the request goes on, or went on
	answered              // a response was sent, or the stream has ended
)

// A charge is a descriptor that applies to the request, with its entries' values.
type charge struct {
	descriptor *config.Descriptor
	values     []string
}

// stream is the context of one request.
type stream struct {
	types.DefaultHttpContext
	plugin *plugin
	host   host
	state  state
	size   uint64 // the body's bytes, as far as they are known

	charges []charge
	values  []string // of all charges, in order
	added   [][2]string

	// Room for the usual few, so that they need no allocation of their own.
	chargesBuf [4]charge
	valuesBuf  [4]string
}

// OnHttpRequestHeaders implements [types.HttpContext].
func (s *stream) OnHttpRequestHeaders(_ int, endOfStream bool) (action types.Action) {
	defer s.rescue(&action)

	if s.plugin.cfg == nil {
		return s.unavailable(errors.New("the plugin has no valid configuration"))
	}
	// All keys are taken now: the map is empty once the headers have gone on.
	headers, err := s.host.requestHeaders()
	if err != nil {
		return s.unavailable(fmt.Errorf("reading the request's headers: %w", err))
	}
	if fault := s.collect(headers); fault != "" {
		s.plugin.vm.count(invalid)
		return s.respond(400, nil, []byte(fault), grpcInvalidArgument)
	}
	switch {
	case len(s.charges) == 0:
		s.state = passed
		return types.ActionContinue
	case endOfStream, !s.needsBody():
		return s.call(actionStopAll)
	}
	if length, ok := contentLength(headers); ok {
		s.size = length
		return s.call(actionStopAll)
	}
	s.state = holding
	return types.ActionPause
}

// OnHttpRequestBody implements [types.HttpContext].
func (s *stream) OnHttpRequestBody(size int, endOfStream bool) (action types.Action) {
	defer s.rescue(&action)

	switch s.state {
	case passed:
		return types.ActionContinue
	case holding:
	case fresh, calling, answered:
		return types.ActionPause
	}
	// While paused, size is all that is held and not the new bytes alone. An empty
	// last call must not make less of it.
	s.size = max(s.size, uint64(max(size, 0)))
	if limit := uint64(s.plugin.cfg.HoldBytes); s.size > limit { //nolint:gosec // at least 1
		s.plugin.vm.count(tooLarge)
		text := "the body has no Content-Length and is larger than hold_bytes (" + strconv.FormatUint(limit, 10) + ")"
		return s.respond(413, nil, []byte(text), grpcResourceExhausted)
	}
	if endOfStream {
		return s.call(types.ActionPause)
	}
	return types.ActionPause
}

// OnHttpRequestTrailers implements [types.HttpContext]. A body that trailers follow
// has no last call of its own.
func (s *stream) OnHttpRequestTrailers(int) (action types.Action) {
	defer s.rescue(&action)

	switch s.state {
	case passed:
		return types.ActionContinue
	case holding:
		return s.call(types.ActionPause)
	case fresh, calling, answered:
	}
	return types.ActionPause
}

// OnHttpResponseHeaders implements [types.HttpContext]. Envoy calls it for the
// upstream's response, and for local ones too, ours included.
func (s *stream) OnHttpResponseHeaders(int, bool) (action types.Action) {
	defer s.rescue(&action)

	if s.state != passed {
		// Whoever answered, a call that is still out must not answer again.
		s.state = answered
		return types.ActionContinue
	}
	if len(s.added) > 0 {
		if err := s.host.setResponseHeaders(s.added); err != nil {
			s.host.logWarn("the response lacks its rate headers: " + err.Error())
		}
		s.added = nil
	}
	return types.ActionContinue
}

// OnHttpStreamDone implements [types.HttpContext].
func (s *stream) OnHttpStreamDone() {
	// Nothing can be answered any more.
	defer func() { _ = recover() }()

	s.state = answered
}

// collect forms the charges. It returns what is wrong with the request, if anything
// is: all keys are looked at, so that the answer doesn't depend on the rules' order.
func (s *stream) collect(headers [][2]string) (fault string) {
	rules := s.plugin.cfg.Rules
	for i := range rules {
		for j := range rules[i].Descriptors {
			d := &rules[i].Descriptors[j]
			first := len(s.values)
			skip := false
			for k := range d.Entries {
				e := &d.Entries[k]
				value, n := lookup(headers, e.Source.Name)
				switch {
				case n > 1:
					return "header " + e.Source.Name + " is given more than once"
				case n == 1:
					canonical, err := e.Type.Canonical(value)
					if err != nil {
						return "header " + e.Source.Name + " " + err.Error()
					}
					s.values = append(s.values, canonical)
				case e.Missing == config.MissingDeny:
					return "header " + e.Source.Name + " is missing"
				case e.Missing == config.MissingSkip:
					skip = true
				default:
					s.values = append(s.values, e.Default)
				}
			}
			if skip {
				s.values = s.values[:first]
				continue
			}
			s.charges = append(s.charges, charge{d, s.values[first:len(s.values):len(s.values)]})
		}
	}
	return ""
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
func contentLength(headers [][2]string) (uint64, bool) {
	value, n := lookup(headers, "content-length")
	if n != 1 || value == "" {
		return 0, false
	}
	var length uint64
	for i := range len(value) {
		c := uint64(value[i]) - '0' // what is below '0' becomes large
		if c > 9 || length > (math.MaxInt64-c)/10 {
			return 0, false
		}
		length = length*10 + c
	}
	return length, true
}

func (s *stream) needsBody() bool {
	for i := range s.charges {
		if s.charges[i].descriptor.Cost == config.CostBodyBytes {
			return true
		}
	}
	return false
}

// call asks the service. The action wait keeps the request until onAnswer.
func (s *stream) call(wait types.Action) types.Action {
	p := s.plugin
	p.message = appendRequest(p.message[:0], p.cfg.Domain, s.charges, s.size)
	err := s.host.call(p.cfg.Cluster, p.callHeaders, p.message, p.timeout, s.onAnswer)
	if cap(p.message) > maxKept {
		p.message = nil
	}
	if err != nil {
		return s.unavailable(fmt.Errorf("calling cluster %q: %w", p.cfg.Cluster, err))
	}
	s.state = calling
	s.charges, s.values = nil, nil
	return wait
}

// maxKept is the most memory, in bytes, that a plugin keeps for its next message.
const maxKept = 64 << 10

// onAnswer is called with the outcome of the call, which is the only one: a second
// time, or after the stream was answered otherwise, it does nothing.
func (s *stream) onAnswer(headers, size, trailers int) {
	var ignored types.Action
	defer s.rescue(&ignored)

	if s.state != calling {
		return
	}
	a, err := s.answer(headers, size, trailers)
	if err != nil {
		s.unavailable(err)
		return
	}
	if a.code == codeOverLimit {
		s.plugin.vm.count(refused)
		body := a.body
		if len(body) == 0 {
			body = []byte("too many requests")
		}
		s.respond(429, a.responseHeaders, body, grpcResourceExhausted)
		return
	}
	if len(a.requestHeaders) > 0 {
		if err := s.host.setRequestHeaders(a.requestHeaders); err != nil {
			s.unavailable(err)
			return
		}
	}
	s.plugin.vm.count(allowed)
	s.added = a.responseHeaders
	s.state = passed
	if err := s.host.resume(); err != nil {
		// Nothing is left to be done for this stream, but it should be known.
		s.host.logWarn("resuming the request: " + err.Error())
	}
}

// answer reads the service's answer from the host.
func (s *stream) answer(headers, size, trailers int) (answer, error) {
	var (
		r   reply
		err error
	)
	if headers > 0 {
		if r.headers, err = s.host.answerHeaders(); err != nil {
			return answer{}, fmt.Errorf("reading the answer's headers: %w", err)
		}
	}
	if size > 0 {
		if r.body, err = s.host.answerBody(size); err != nil {
			return answer{}, fmt.Errorf("reading the answer's body: %w", err)
		}
	}
	if trailers > 0 {
		if r.trailers, err = s.host.answerTrailers(); err != nil {
			return answer{}, fmt.Errorf("reading the answer's trailers: %w", err)
		}
	}
	return r.parse()
}

// unavailable answers 500. The client learns nothing of the cause.
func (s *stream) unavailable(cause error) types.Action {
	action := s.respond(500, nil, []byte("internal error"), grpcUnavailable)
	s.plugin.vm.count(unavailable)
	s.host.logWarn("rate limiting is unavailable: " + cause.Error())
	return action
}

// respond ends the stream with an answer of ours.
func (s *stream) respond(status uint32, headers [][2]string, body []byte, grpcStatus int32) types.Action {
	s.state = answered
	if err := s.host.respond(status, headers, body, grpcStatus); err != nil {
		s.host.logWarn("answering " + strconv.Itoa(int(status)) + ": " + err.Error())
	}
	return types.ActionPause
}

// rescue ends a callback that panicked: 500 for this stream, and the VM, with all
// its other streams, goes on. It is deferred itself, or recover would not work.
func (s *stream) rescue(action *types.Action) {
	r := recover()
	if r == nil {
		return
	}
	// What panicked may do so again.
	defer func() { _ = recover() }()
	*action = types.ActionPause
	s.unavailable(errors.New("panic: " + describe(r)))
}

// describe gives the text of a recovered value.
func describe(r any) string {
	switch v := r.(type) {
	case error:
		return v.Error()
	case string:
		return v
	}
	return fmt.Sprintf("%v", r)
}

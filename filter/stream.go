package filter

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/proxy-wasm/proxy-wasm-go-sdk/proxywasm/types"

	"github.com/weir-dev/weir/filter/extract"
)

// Actions of Envoy that the SDK has no name for. Both hold with back-pressure, never
// with a 413.
const (
	// actionHold, in the body, holds what has come. More callbacks follow, with the size
	// of what is new alone. Envoy calls it StopIterationAndWatermark.
	actionHold types.Action = 2
	// actionStopAll, at the headers, holds everything without another callback until the
	// request is resumed. With ActionPause there body callbacks come, under
	// allow_on_headers_stop_iteration. Envoy calls it StopAllIterationAndWatermark.
	actionStopAll types.Action = 4
)

// The gRPC statuses of our own answers.
const (
	grpcInvalidArgument   = 3
	grpcResourceExhausted = 8
	grpcUnavailable       = 14
)

type phase uint8

const (
	fresh    phase = iota // before the headers
	holding               // the body is kept back, since a key or the cost needs it
	metering              // the service is or has been asked, and may be asked again
	passed                // the request goes on, and nothing more is to be done
	answered              // a response was sent, or the stream has ended
)

// exactAsks is how often the service is asked for no more than is needed after it has
// refused a block, before a block is tried again.
const exactAsks = 16

// stream is the context of one request.
type stream struct {
	types.DefaultHttpContext
	plugin  *plugin
	host    host
	phase   phase
	request request

	charges []charge
	values  []string // of all charges, in order
	counted units    // one of each unit that a charge counts
	added   [][2]string

	ended    bool   // all of the request has been received
	held     int64  // bytes of the body that are held in phase holding
	content  []byte // of the body, if a key or a cost stands there
	reading  bool   // content is being gathered
	bodyRule int    // the first rule that needs it
	frames   extract.Frames
	admitted bool // the first call was allowed

	received  units // of the body
	forwarded usage // of these, what has gone on
	granted   units // what is paid for
	whole     bool  // all that can come is paid for
	grants    []grant

	// The call that is under way.
	calling bool
	asked   units
	ahead   bool  // more is asked for than is needed
	least   units // what is needed before a byte has come
	exact   int   // how often no more than is needed is asked for from now on
	waiting bool  // something is held until the answer

	// Room for the usual few, so that they need no allocation of their own.
	chargesBuf [4]charge
	valuesBuf  [4]string
	grantsBuf  [2]grant
}

// usage is what has gone on.
type usage struct {
	units
	begun bool // the headers have
}

// A grant is what a call has been allowed.
type grant struct {
	first    bool // with all charges, and what they cost at once
	from, to units
	receipt  string
}

// OnHttpRequestHeaders implements [types.HttpContext].
func (s *stream) OnHttpRequestHeaders(_ int, endOfStream bool) (action types.Action) {
	defer s.rescue(&action)

	if s.plugin.cfg == nil {
		return s.fail(errors.New("the plugin has no valid configuration"))
	}
	// All keys are taken now: the map is empty once the headers have gone on.
	headers, err := s.host.requestHeaders()
	if err != nil {
		return s.fail(fmt.Errorf("reading the request's headers: %w", err))
	}
	if headers, err = s.strip(headers); err != nil {
		return s.fail(err)
	}
	s.request.headers = headers
	s.request.target, _ = lookup(headers, ":path")
	s.request.grpc = isGRPC(headers)
	s.request.hasBody = endOfStream // which is empty
	s.ended = endOfStream
	return s.begin()
}

// strip takes headers of ours off a request: the upstream must be able to trust them.
func (s *stream) strip(headers [][2]string) ([][2]string, error) {
	kept := headers
	for i := range headers {
		if !isOurs(headers[i][0]) {
			if len(kept) < len(headers) {
				kept = append(kept, headers[i])
			}
			continue
		}
		if len(kept) == len(headers) {
			kept = append(make([][2]string, 0, len(headers)), headers[:i]...)
		}
		if err := s.host.removeRequestHeader(headers[i][0]); err != nil {
			return nil, fmt.Errorf("removing header %q: %w", headers[i][0], err)
		}
	}
	return kept, nil
}

func isOurs(name string) bool {
	switch name {
	case "ratelimit", "ratelimit-policy", receiptHeader:
		return true
	}
	return strings.HasPrefix(name, "x-ratelimit-")
}

// begin decides at the headers what the request has to wait for.
func (s *stream) begin() types.Action {
	needsBody, f, err := s.collect()
	switch {
	case err != nil:
		return s.fail(err)
	case f != nil:
		return s.invalid(f)
	case needsBody:
		return s.readBody()
	case len(s.charges) == 0:
		return s.pass()
	}
	s.counted = s.uses()
	length, known := contentLength(s.request.headers)
	switch {
	case s.ended, s.counted == units{}:
		return s.ask(units{}, false, actionStopAll)
	case known && s.counted.messages == 0:
		s.whole = true
		return s.ask(units{bytes: length}, false, actionStopAll)
	case s.request.grpc:
		// It may be that the client waits for the server's first message, so the headers
		// must go on before the first byte comes.
		s.least = s.only(units{bytes: framePrefix, messages: 1})
		return s.ask(s.least, true, actionStopAll)
	case startsLate(s.request.headers):
		s.least = s.only(units{bytes: 1})
		return s.ask(s.least, true, actionStopAll)
	}
	s.phase = holding
	return types.ActionPause
}

// readBody holds the request to read its body, or its first message.
func (s *stream) readBody() types.Action {
	if expectsContinue(s.request.headers) {
		// The upstream would have to ask for the body, and hasn't the request yet. A
		// client then sends the request again without waiting (RFC 9110, section 15.5.18).
		return s.respond(417, nil, []byte("the body is read before the request goes on: send it without Expect"), grpcInvalidArgument)
	}
	if length, known := contentLength(s.request.headers); known && !s.request.grpc && length > s.plugin.cfg.HoldBytes {
		return s.tooLarge()
	}
	s.phase = holding
	s.reading = true
	return types.ActionPause
}

// OnHttpRequestBody implements [types.HttpContext].
func (s *stream) OnHttpRequestBody(size int, endOfStream bool) (action types.Action) {
	defer s.rescue(&action)

	switch s.phase {
	case passed:
		return types.ActionContinue
	case fresh, answered:
		return types.ActionPause
	case holding, metering:
	}
	s.ended = s.ended || endOfStream
	if err := s.receive(max(size, 0)); err != nil {
		return s.malformed("the body " + err.Error())
	}
	if s.phase == holding {
		return s.hold(max(size, 0))
	}
	return s.advance()
}

// OnHttpRequestTrailers implements [types.HttpContext]. A body that trailers follow
// has no last call of its own.
func (s *stream) OnHttpRequestTrailers(int) (action types.Action) {
	defer s.rescue(&action)

	s.ended = true
	switch s.phase {
	case passed:
		return types.ActionContinue
	case holding:
		action = s.hold(0)
	case metering:
		action = s.advance()
	case fresh, answered:
		return types.ActionPause
	}
	if action != types.ActionContinue {
		return types.ActionPause // trailers know no other way to wait
	}
	return action
}

// receive counts a chunk of the body.
func (s *stream) receive(size int) error {
	// In phase holding the prices may not be known yet.
	if s.counted.messages > 0 || s.phase == holding && s.request.grpc {
		if err := s.frames.Next(size, s.host.requestBody); err != nil {
			return err
		}
	}
	s.held += int64(size)
	s.received = units{s.held, s.frames.Messages()}
	return nil
}

// only drops the units that no charge counts.
func (s *stream) only(u units) units {
	return units{u.bytes * s.counted.bytes, u.messages * s.counted.messages}
}

// hold keeps the body back until it can be charged.
func (s *stream) hold(size int) types.Action {
	if s.reading {
		return s.gather(size)
	}
	if s.ended {
		return s.ask(s.only(s.received), false, actionHold)
	}
	if s.held <= s.plugin.cfg.HoldBytes {
		return actionHold
	}
	return s.ask(s.only(s.received), true, actionHold)
}

// gather keeps a copy of the body until all that is read of it is there.
func (s *stream) gather(size int) types.Action {
	if s.held > s.plugin.cfg.HoldBytes {
		return s.tooLarge()
	}
	if size > 0 {
		chunk, err := s.host.requestBody(0, size)
		if err != nil {
			return s.fail(fmt.Errorf("reading the body: %w", err))
		}
		s.content = append(s.content, chunk...)
	}
	done, err := s.open()
	if errors.Is(err, extract.ErrTooLarge) {
		return s.tooLarge()
	}
	if !done {
		return actionHold
	}
	s.request.hasBody, s.request.bodyErr = true, err
	s.reading, s.content = false, nil

	_, f, err := s.collect()
	switch {
	case err != nil:
		return s.fail(err)
	case f != nil:
		return s.invalid(f)
	case len(s.charges) == 0:
		return s.pass()
	}
	s.counted = s.uses()
	s.request.body = nil
	return s.ask(s.only(s.received), !s.ended, actionHold)
}

var (
	errEncoding = errors.New("is in an encoding that can't be read; gzip can")
	errCut      = errors.New("ends in the middle of a message")
)

// open takes what keys and costs are read from out of the content. It reports whether
// all of it is there.
func (s *stream) open() (done bool, err error) {
	most := int(s.plugin.cfg.HoldBytes)
	encoding := "content-encoding"
	body, packed := s.content, true
	if s.request.grpc {
		encoding = "grpc-encoding"
		message, compressed, complete, err := extract.FirstMessage(s.content, most)
		switch {
		case err != nil:
			return true, err
		case !complete && !s.ended:
			return false, nil
		case !complete && len(s.content) > 0:
			return true, errCut
		}
		body, packed = message, compressed
	} else if !s.ended {
		return false, nil
	}
	if packed && len(body) > 0 {
		if body, err = s.unpack(body, encoding, most); err != nil {
			return true, err
		}
	}
	s.request.body = body
	return true, nil
}

// unpack decompresses a body.
func (s *stream) unpack(body []byte, header string, most int) ([]byte, error) {
	encoding, n := lookup(s.request.headers, header)
	switch {
	case n == 0, n == 1 && strings.EqualFold(encoding, "identity"):
		return body, nil
	case n == 1 && (strings.EqualFold(encoding, "gzip") || strings.EqualFold(encoding, "x-gzip")):
		return extract.Gunzip(body, most)
	}
	return nil, errEncoding
}

// advance lets on what is paid for.
func (s *stream) advance() types.Action {
	need := s.only(s.received)
	if !s.admitted || s.waiting || !s.granted.covers(need) {
		s.waiting = true
		if s.calling {
			return actionHold
		}
		return s.ask(need, s.exact == 0, actionHold)
	}
	s.forwarded.units = need
	if s.ended {
		s.finish()
		return types.ActionContinue
	}
	s.askAhead(need)
	return types.ActionContinue
}

// askAhead asks for the next block once no more than half of one is left, so that the
// stream need not wait for it.
func (s *stream) askAhead(need units) {
	block := s.block()
	low := block.bytes > 0 && s.granted.bytes-need.bytes <= block.bytes/2 ||
		block.messages > 0 && s.granted.messages-need.messages <= block.messages/2
	if !low || s.whole || s.calling || s.exact > 0 {
		return
	}
	if err := s.call(need.plus(block).or(s.granted)); err != nil {
		s.exact = exactAsks // it is asked for when it is needed, and then the failure counts
		return
	}
	s.ahead = true
}

func (s *stream) block() units {
	return s.only(units{s.plugin.cfg.BlockBytes, s.plugin.cfg.BlockMessages})
}

// ask asks the service for what is needed, and for a block more if that is wanted. The
// action wait keeps the request until the answer.
func (s *stream) ask(need units, ahead bool, wait types.Action) types.Action {
	to := need.or(s.granted)
	if ahead = ahead && s.counted != (units{}); ahead {
		to = to.plus(s.block())
	}
	if err := s.call(to); err != nil {
		return s.unavailable(err)
	}
	s.ahead, s.waiting = ahead, true
	s.phase = metering
	return wait
}

// call makes the call.
func (s *stream) call(to units) error {
	p := s.plugin
	g := grant{first: !s.admitted, from: s.granted, to: to}
	p.message = appendRequest(p.message[:0], p.cfg.Domain, s.charges, &g)
	err := p.host.call(p.cfg.Cluster, p.callHeaders, p.message, p.timeout, s.onAnswer)
	if cap(p.message) > maxKept {
		p.message = nil
	}
	if err != nil {
		return fmt.Errorf("calling cluster %q: %w", p.cfg.Cluster, err)
	}
	s.calling, s.asked = true, to
	return nil
}

// maxKept is the most memory, in bytes, that a plugin keeps for its next message.
const maxKept = 64 << 10

// onAnswer is called with the outcome of a call.
func (s *stream) onAnswer(headers, size, trailers int) {
	var ignored types.Action
	defer s.rescue(&ignored)

	if !s.calling {
		return
	}
	s.calling = false
	a, err := readAnswer(s.host, headers, size, trailers)
	switch {
	case s.phase != metering:
		// Somebody else has answered meanwhile, so what was granted is given back.
		if err == nil && a.code == codeOK {
			s.grant(&a)
			s.settle()
		}
	case err != nil && !s.waiting:
		s.exact = exactAsks
	case err != nil:
		s.then(s.unavailable(err))
	case a.code == codeOverLimit:
		s.denied(&a)
	default:
		s.admit(&a)
	}
}

// denied deals with a refusal.
func (s *stream) denied(a *answer) {
	if s.ahead {
		// What is needed may be there, although a block more is not.
		s.exact = exactAsks
		if s.waiting {
			s.then(s.ask(s.needed(), false, actionHold))
		}
		return
	}
	if !s.waiting {
		return
	}
	s.count(refused)
	cfg := &s.plugin.cfg.Refused
	headers, body := a.responseHeaders, a.body
	if cfg.Body != "" {
		body = []byte(cfg.Body)
		if cfg.ContentType != "" {
			headers = append(slices.Clip(headers), [2]string{"content-type", cfg.ContentType})
		}
	}
	if len(body) == 0 {
		body = []byte("too many requests")
	}
	s.respond(uint32(cfg.Status), headers, body, grpcResourceExhausted) //nolint:gosec // 400 to 599
}

// needed is what must be paid for before anything goes on.
func (s *stream) needed() units { return s.only(s.received).or(s.least) }

// admit lets on what a call was granted.
func (s *stream) admit(a *answer) {
	s.grant(a)
	if s.exact > 0 {
		s.exact--
	}
	s.added = a.responseHeaders
	if len(a.shadow) > 0 {
		if err := s.host.setState(shadowState, strings.Join(a.shadow, ",")); err != nil {
			s.host.logDebug("setting " + shadowState + ": " + err.Error())
		}
	}
	if !s.admitted {
		if len(a.requestHeaders) > 0 {
			if err := s.host.setRequestHeaders(a.requestHeaders); err != nil {
				s.fail(err)
				return
			}
		}
		s.admitted = true
	}
	if !s.waiting {
		return
	}
	need := s.only(s.received)
	if !s.granted.covers(need) {
		s.then(s.ask(need, s.exact == 0, actionHold))
		return
	}
	s.waiting = false
	s.forwarded = usage{need, true}
	if s.ended || s.counted == (units{}) {
		s.finish()
	}
	s.resume()
}

// shadowState is the name under which the limits in shadow that would have refused the
// request are given to access logs: Envoy lets no filter in WebAssembly write dynamic
// metadata.
const shadowState = "weir.shadow_denied"

// grant writes down what a call was granted. Grants of which nothing can be given back
// any more are dropped, so that a long stream keeps no more than the last few.
func (s *stream) grant(a *answer) {
	if s.counted == (units{}) && s.phase == metering {
		return // it goes on at once, and then nothing is ever given back
	}
	s.grants = slices.DeleteFunc(s.grants, func(g grant) bool { return s.forwarded.uses(&g) })
	s.grants = append(s.grants, grant{first: !s.admitted, from: s.granted, to: s.asked, receipt: string(a.receipt)})
	s.granted = s.asked
}

// finish ends the metering of a request of which no more will go on.
func (s *stream) finish() {
	s.phase = passed
	s.count(allowed)
	s.settle()
}

// uses reports whether nothing of a grant is left.
func (u *usage) uses(g *grant) bool { return u.begun && u.covers(g.to) }

// settle gives back what has been granted and not forwarded.
func (s *stream) settle() {
	p := s.plugin
	for i := range s.grants {
		g := &s.grants[i]
		if g.receipt == "" || s.forwarded.uses(g) || !g.refunds(s.charges, &s.forwarded) {
			continue
		}
		p.message = appendRefund(p.message[:0], p.cfg.Domain, s.charges, g, &s.forwarded)
		p.refunds.add(g.receipt, p.message)
	}
	s.grants = nil
}

// OnHttpResponseHeaders implements [types.HttpContext]. Envoy calls it for the
// upstream's response, and for local ones too, ours included.
func (s *stream) OnHttpResponseHeaders(int, bool) (action types.Action) {
	defer s.rescue(&action)

	if s.phase != passed && (s.phase != metering || !s.forwarded.begun) {
		// Whoever answered, a call that is still out must not answer again.
		s.phase = answered
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

	if s.phase == metering && s.forwarded.begun {
		s.finish()
	}
	s.settle()
	s.phase = answered
}

// pass lets a request on that costs nothing.
func (s *stream) pass() types.Action {
	s.phase = passed
	return types.ActionContinue
}

// then does what a callback of the request would return, later.
func (s *stream) then(action types.Action) {
	if action == types.ActionContinue {
		s.resume()
	}
}

// resume lets a request on that was held.
func (s *stream) resume() {
	if err := s.host.resume(); err != nil {
		// Nothing is left to be done for this stream, but it should be known.
		s.host.logWarn("resuming the request: " + err.Error())
	}
}

// invalid answers a request that has something wrong.
func (s *stream) invalid(f *fault) types.Action {
	s.countRule(f.rule, invalid)
	return s.respond(400, nil, []byte(f.text), grpcInvalidArgument)
}

// malformed ends a request whose body is no body of its kind.
func (s *stream) malformed(text string) types.Action {
	if s.reading {
		s.countRule(s.bodyRule, invalid)
	} else {
		s.count(invalid)
	}
	return s.respond(400, nil, []byte(text), grpcInvalidArgument)
}

// tooLarge answers a request whose body can't be read.
func (s *stream) tooLarge() types.Action {
	s.countRule(s.bodyRule, tooLarge)
	text := "the body must be read and is larger than hold_bytes (" + strconv.FormatInt(s.plugin.cfg.HoldBytes, 10) + ")"
	return s.respond(413, nil, []byte(text), grpcResourceExhausted)
}

// unavailable deals with a request for which the service could not be asked.
func (s *stream) unavailable(cause error) types.Action {
	if !s.allowsError() {
		return s.fail(cause)
	}
	s.count(allowedOnError)
	s.warn(cause)
	// What goes on from here is not known to be paid for, so nothing is given back.
	s.grants = nil
	s.phase = passed
	return types.ActionContinue
}

// fail answers 500. The client learns nothing of the cause.
func (s *stream) fail(cause error) types.Action {
	action := s.respond(500, nil, []byte("internal error"), grpcUnavailable)
	s.count(unavailable)
	s.warn(cause)
	return action
}

func (s *stream) warn(cause error) {
	if text := s.plugin.outage.sample(s.host.now(), "rate limiting is unavailable: "+cause.Error()); text != "" {
		s.host.logWarn(text)
	}
}

// respond ends the stream with an answer of ours.
func (s *stream) respond(status uint32, headers [][2]string, body []byte, grpcStatus int32) types.Action {
	s.phase = answered
	err := s.host.respond(status, headers, body, grpcStatus)
	if err != nil && len(headers) > 0 {
		// An answer without its headers is better than a request that hangs.
		err = errors.Join(err, s.host.respond(status, nil, body, grpcStatus))
	}
	if err != nil {
		s.host.logWarn("answering " + strconv.Itoa(int(status)) + ": " + err.Error())
	}
	s.settle()
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
	s.grants = nil // they may be what panicked
	s.fail(errors.New("panic: " + describe(r)))
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

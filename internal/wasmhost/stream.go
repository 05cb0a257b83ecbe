package wasmhost

import (
	"context"
	"maps"
	"slices"
	"strings"
)

// Action is what a callback wants done with the stream.
type Action uint32

// The actions.
const (
	// Continue lets the data go on.
	Continue Action = 0
	// Pause holds it. Callbacks for what follows go on, and the body's size in them
	// is that of all that is held.
	Pause Action = 1
	// PauseWatermark holds the body, with a size in callbacks of what is new.
	PauseWatermark Action = 2
	// StopAll at the headers holds everything, with no callback until it is resumed.
	StopAll Action = 4
)

// A Message is what has gone on to one side.
type Message struct {
	Headers  [][2]string
	Body     []byte
	Trailers [][2]string
	// Begun is set once the headers went on, Ended once all did.
	Begun, Ended bool
}

// A LocalResponse is an answer that the guest made itself.
type LocalResponse struct {
	Status  int
	Headers [][2]string
	Body    []byte
	// GRPCStatus is the status for gRPC clients; -1 leaves it to Envoy.
	GRPCStatus int
}

// A Stream is one request and its response.
type Stream struct {
	vm     *VM
	plugin *Plugin
	id     uint32

	request, response half
	properties        map[string][]byte
	state             map[string][]byte
	local             *LocalResponse
	localSent         bool
	ended             bool
}

// NewStream begins a stream.
func (p *Plugin) NewStream(ctx context.Context) (*Stream, error) {
	s := &Stream{
		vm: p.vm, plugin: p, id: p.vm.nextID(),
		request:    half{exports: [3]string{"proxy_on_request_headers", "proxy_on_request_body", "proxy_on_request_trailers"}},
		response:   half{exports: [3]string{"proxy_on_response_headers", "proxy_on_response_body", "proxy_on_response_trailers"}},
		properties: map[string][]byte{},
		state:      map[string][]byte{},
	}
	p.vm.streams[s.id] = s
	_, err := p.vm.call(ctx, s.id, "proxy_on_context_create", uint64(s.id), uint64(p.id))
	return s, err
}

// SetProperty sets a property that the guest may read, such as source.address.
func (s *Stream) SetProperty(value []byte, path ...string) {
	s.properties[strings.Join(path, "\x00")] = value
}

// State returns the filter state that the guest has set under a name, which begins
// with "wasm." as in Envoy; nil if it has not.
func (s *Stream) State(name string) []byte { return s.state[name] }

// Upstream returns what the upstream has seen of the request.
func (s *Stream) Upstream() Message { return s.request.out }

// Downstream returns what the client has seen of the response.
func (s *Stream) Downstream() Message { return s.response.out }

// LocalResponse returns the guest's own answer, nil if it made none.
func (s *Stream) LocalResponse() *LocalResponse { return s.local }

// RequestHeaders delivers the request's headers, pseudo-headers too. If end is set, no
// body follows.
func (s *Stream) RequestHeaders(ctx context.Context, headers [][2]string, end bool) (Action, error) {
	return s.deliver(ctx, &s.request, event{kind: headersEvent, pairs: headers, end: end})
}

// RequestBody delivers a part of the request's body. While the stream is stopped it
// waits at the host, and StopAll is returned; after a local response it is dropped.
func (s *Stream) RequestBody(ctx context.Context, chunk []byte, end bool) (Action, error) {
	return s.deliver(ctx, &s.request, event{kind: bodyEvent, chunk: chunk, end: end})
}

// RequestTrailers delivers the request's trailers. No end of the body comes before.
func (s *Stream) RequestTrailers(ctx context.Context, trailers [][2]string) (Action, error) {
	return s.deliver(ctx, &s.request, event{kind: trailersEvent, pairs: trailers, end: true})
}

// ResponseHeaders delivers the response's headers, with :status.
func (s *Stream) ResponseHeaders(ctx context.Context, headers [][2]string, end bool) (Action, error) {
	return s.deliver(ctx, &s.response, event{kind: headersEvent, pairs: headers, end: end})
}

// ResponseBody delivers a part of the response's body.
func (s *Stream) ResponseBody(ctx context.Context, chunk []byte, end bool) (Action, error) {
	return s.deliver(ctx, &s.response, event{kind: bodyEvent, chunk: chunk, end: end})
}

// ResponseTrailers delivers the response's trailers.
func (s *Stream) ResponseTrailers(ctx context.Context, trailers [][2]string) (Action, error) {
	return s.deliver(ctx, &s.response, event{kind: trailersEvent, pairs: trailers, end: true})
}

// Done ends the stream, whatever its state: the client may have gone. Headers can be
// read again in the guest's last callback.
func (s *Stream) Done(ctx context.Context) error {
	if s.ended {
		return nil
	}
	s.ended = true
	s.request.reopen()
	s.response.reopen()
	for _, name := range []string{"proxy_on_done", "proxy_on_log", "proxy_on_delete"} {
		if _, err := s.vm.call(ctx, s.id, name, uint64(s.id)); err != nil {
			return err
		}
	}
	delete(s.vm.streams, s.id)
	return s.vm.settle(ctx)
}

func (s *Stream) deliver(ctx context.Context, h *half, e event) (Action, error) {
	switch {
	case s.ended, s.localSent:
		return Pause, nil
	case h.stopped:
		h.queue = append(h.queue, e)
		return StopAll, nil
	}
	action, err := s.run(ctx, h, e)
	if err != nil {
		return action, err
	}
	return action, s.vm.settle(ctx)
}

// run calls the guest for an event and does what it answers.
func (s *Stream) run(ctx context.Context, h *half, e event) (Action, error) {
	count, end := h.take(e), uint64(0)
	if e.end {
		end = 1
	}
	args := []uint64{uint64(s.id), u64(count), end}
	if e.kind == trailersEvent {
		args = args[:2]
	}
	result, err := s.vm.call(ctx, s.id, h.exports[e.kind], args...)
	if err != nil {
		return Pause, err
	}
	action := Action(u32(result))
	h.apply(e, action)
	return action, nil
}

// settle does what the guest asked for during a call: Envoy, too, resumes a stream or
// answers it only after the callback has returned.
func (v *VM) settle(ctx context.Context) error {
	for {
		var work *Stream
		for _, id := range slices.Sorted(maps.Keys(v.streams)) {
			if v.streams[id].pending() {
				work = v.streams[id]
				break
			}
		}
		if work == nil {
			return nil
		}
		if err := work.settle(ctx); err != nil {
			return err
		}
	}
}

func (s *Stream) pending() bool {
	return s.local != nil && !s.localSent || s.request.resumed || s.response.resumed
}

func (s *Stream) settle(ctx context.Context) error {
	if s.local != nil {
		s.request.resumed, s.response.resumed = false, false
		if s.localSent {
			return nil
		}
		return s.sendLocal(ctx)
	}
	for _, h := range []*half{&s.request, &s.response} {
		if !h.resumed {
			continue
		}
		h.resume()
		for len(h.queue) > 0 && !h.stopped {
			e := h.queue[0]
			h.queue = h.queue[1:]
			if _, err := s.run(ctx, h, e); err != nil {
				return err
			}
		}
	}
	return nil
}

// sendLocal sends the guest's answer through its own response callback, as Envoy
// does. Once a response has begun it can only be cut off.
func (s *Stream) sendLocal(ctx context.Context) error {
	s.localSent = true
	if s.response.out.Begun {
		return nil
	}
	headers := append([][2]string{{":status", itoa(s.local.Status)}}, s.local.Headers...)
	// In the midst of the upstream's response, that response is replaced.
	replaced := s.response.begun
	s.response = half{exports: s.response.exports}
	e := event{kind: headersEvent, pairs: headers, end: len(s.local.Body) == 0}
	if replaced {
		s.response.take(e)
		s.response.apply(e, Continue)
	} else if _, err := s.run(ctx, &s.response, e); err != nil {
		return err
	}
	s.response.resume()
	s.response.out.Body = s.local.Body
	s.response.out.Ended = true
	return nil
}

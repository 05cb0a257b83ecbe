package wasmhost

import (
	"slices"
	"strconv"
	"strings"
)

type eventKind int

const (
	headersEvent eventKind = iota
	bodyEvent
	trailersEvent
)

// An event is a piece of a message.
type event struct {
	kind  eventKind
	pairs [][2]string
	chunk []byte
	end   bool
}

// half is one direction of a stream: what arrived, what is held and what went on.
type half struct {
	exports [3]string // by eventKind

	begun    bool
	headers  [][2]string // what the guest may read; nil once they went on
	trailers [][2]string
	body     []byte // what the guest may read

	held      []byte
	buffering bool // the last body callback returned Pause
	ended     bool // the last event has been seen
	stopped   bool // StopAll
	queue     []event
	resumed   bool // the guest asked for it; done once its callback has returned

	out Message
}

// take makes an event visible to the guest and returns the number that its callback is
// told.
func (h *half) take(e event) int {
	h.ended = h.ended || e.end
	switch e.kind {
	case headersEvent:
		h.begun = true
		h.headers = lower(e.pairs)
		return len(h.headers)
	case bodyEvent:
		h.body = e.chunk
		if h.buffering {
			h.body = append(slices.Clip(h.held), e.chunk...)
		}
		return len(h.body)
	case trailersEvent:
		h.trailers = lower(e.pairs)
	}
	return len(h.trailers)
}

// apply does what the callback of an event answered.
func (h *half) apply(e event, action Action) {
	if e.kind == bodyEvent {
		// The guest may have replaced what it was shown.
		if h.buffering {
			h.held = h.body
		} else {
			h.held = append(h.held, h.body...)
		}
		h.body = nil
		h.buffering = action == Pause
	}
	switch {
	case action == Continue:
		h.flush()
	case e.kind == headersEvent && action != Pause:
		h.stopped = true
	}
}

// resume lets what is held go on.
func (h *half) resume() {
	h.resumed, h.stopped, h.buffering = false, false, false
	h.flush()
}

func (h *half) flush() {
	if !h.begun {
		return
	}
	if !h.out.Begun {
		h.out.Begun = true
		h.out.Headers, h.headers = h.headers, nil
	}
	h.out.Body = append(h.out.Body, h.held...)
	h.held = nil
	if h.trailers != nil {
		h.out.Trailers, h.trailers = h.trailers, nil
	}
	h.out.Ended = h.ended && len(h.queue) == 0
}

// reopen makes the headers that went on readable, as they are when a stream is done.
func (h *half) reopen() {
	if h.headers == nil {
		h.headers = h.out.Headers
	}
}

// lower copies pairs, with names in lower case as Envoy keeps them. It is never nil.
func lower(pairs [][2]string) [][2]string {
	out := make([][2]string, 0, len(pairs))
	for _, p := range pairs {
		out = append(out, [2]string{strings.ToLower(p[0]), p[1]})
	}
	return out
}

func itoa(n int) string { return strconv.Itoa(n) }

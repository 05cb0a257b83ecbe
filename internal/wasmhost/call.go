package wasmhost

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// A Call is an HTTP call that the guest has dispatched.
type Call struct {
	Cluster  string
	Headers  [][2]string
	Body     []byte
	Trailers [][2]string
	// Timeout is how long Envoy would wait for the answer; 0 is for ever.
	Timeout time.Duration

	plugin *Plugin
	id     uint32
}

// An Answer is what a call brings. With no headers at all the call was cut off.
type Answer struct {
	Headers  [][2]string
	Body     []byte
	Trailers [][2]string
}

// Calls returns the calls of a plugin's streams, and of its own, that have not been
// answered, oldest first.
func (p *Plugin) Calls() []*Call {
	var calls []*Call
	for _, c := range p.vm.calls {
		if c.plugin == p {
			calls = append(calls, c)
		}
	}
	slices.SortFunc(calls, func(a, b *Call) int { return int(a.id) - int(b.id) })
	return calls
}

// Respond answers a call. It can be done once. The stream that made the call may be
// gone, as in Envoy.
func (c *Call) Respond(ctx context.Context, a Answer) error {
	v := c.plugin.vm
	if v.calls[c.id] != c {
		return fmt.Errorf("answering call %d: it has been answered", c.id)
	}
	delete(v.calls, c.id)
	v.answer = &a
	_, err := v.call(ctx, c.plugin.id, "proxy_on_http_call_response", uint64(c.plugin.id), uint64(c.id),
		u64(len(a.Headers)), u64(len(a.Body)), u64(len(a.Trailers)))
	v.answer = nil
	if err != nil {
		return err
	}
	return v.settle(ctx)
}

package filter

import (
	"fmt"
	"slices"
)

const (
	// maxRefunds is how many refunds may wait. Beyond, they are lost: the service has
	// been away for long, and memory is bounded.
	maxRefunds = 1024
	// maxRefundCalls is how many refunds are under way at once.
	maxRefundCalls = 64
	// refundTick is how often refunds are sent, in milliseconds.
	refundTick = 20
)

// A refund gives back what was charged and not used.
type refund struct {
	headers [][2]string
	message []byte
}

// refunds are those of a plugin that are to be sent. They are not sent by the streams:
// the SDK drops an answer whose stream has ended.
//
// A refund is sent once, since the service can't tell a second one from a repetition.
// Only if Envoy couldn't begin a call it is tried again.
type refunds struct {
	plugin  *plugin
	queue   []refund
	calls   int  // under way
	ticking bool // the host calls [plugin.OnTick]
	ending  bool // the host waits for the last one
	lost    sampler
	failed  sampler
}

// add queues a refund. The message is copied.
func (r *refunds) add(receipt string, message []byte) {
	p := r.plugin
	if len(r.queue) >= maxRefunds {
		r.lose(1)
		return
	}
	headers := append(slices.Clip(p.callHeaders), [2]string{receiptHeader, receipt})
	r.queue = append(r.queue, refund{headers, slices.Clone(message)})
	r.tick()
}

func (r *refunds) lose(n int) {
	for range n {
		r.plugin.host.count(r.plugin.counters.refunds[refundLost])
	}
	if text := r.lost.sample(r.plugin.host.now(), "refunds are lost: too many wait for the service"); text != "" {
		r.plugin.host.logWarn(text)
	}
}

// tick has the host call back while, and only while, there is something to send.
func (r *refunds) tick() {
	want := len(r.queue) > 0
	if want == r.ticking {
		return
	}
	period := uint32(0)
	if want {
		period = refundTick
	}
	if err := r.plugin.host.setTick(period); err != nil {
		r.plugin.host.logWarn("setting the period of refunds: " + err.Error())
		return
	}
	r.ticking = want
}

// send makes the calls that may be made now.
func (r *refunds) send() {
	p := r.plugin
	for len(r.queue) > 0 && r.calls < maxRefundCalls {
		next := r.queue[0]
		if err := p.host.call(p.cfg.Cluster, next.headers, next.message, p.timeout, r.onAnswer); err != nil {
			if text := r.failed.sample(p.host.now(), fmt.Sprintf("refunds wait: calling cluster %q: %v", p.cfg.Cluster, err)); text != "" {
				p.host.logWarn(text)
			}
			break
		}
		r.queue = r.queue[1:]
		r.calls++
	}
	if len(r.queue) == 0 {
		r.queue = nil // frees what has been sent
	}
	r.tick()
}

// onAnswer is called with the outcome of a refund's call.
func (r *refunds) onAnswer(headers, size, trailers int) {
	p := r.plugin
	defer p.rescue("the answer to a refund")

	r.calls--
	a, err := readAnswer(p.host, headers, size, trailers)
	if err == nil && a.code != codeOK {
		err = fmt.Errorf("the answer's overall_code is %d", a.code)
	}
	if err == nil {
		p.host.count(p.counters.refunds[refundSent])
	} else {
		p.host.count(p.counters.refunds[refundFailed])
		if text := r.failed.sample(p.host.now(), "a refund failed: "+err.Error()); text != "" {
			p.host.logWarn(text)
		}
	}
	if !r.ending {
		return
	}
	r.send()
	if r.idle() {
		r.ending = false
		p.host.pluginDone()
	}
}

func (r *refunds) idle() bool { return len(r.queue) == 0 && r.calls == 0 }

// end sends what is left and reports whether nothing is. If not, the host is told later.
func (r *refunds) end() bool {
	if r.plugin == nil { // the plugin has not started
		return true
	}
	r.send()
	if r.calls == 0 && len(r.queue) > 0 {
		// No call can be made, so nothing would ever end it.
		r.lose(len(r.queue))
		r.queue = nil
		r.tick()
	}
	r.ending = !r.idle()
	return !r.ending
}

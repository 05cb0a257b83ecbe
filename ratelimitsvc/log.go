package ratelimitsvc

import (
	"context"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"time"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"github.com/weir-dev/weir/policy"
)

// Texts in a log line come from clients, so each is cut to a length that a line can bear,
// and so is their number.
const (
	maxText        = 64 // bytes
	maxDescribed   = 8  // descriptors, and entries of one
	sampleInterval = time.Second
)

// A sampler lets the first of many alike through, and then one a second: an outage must
// not write a line for every request. The zero sampler is ready.
type sampler struct {
	mu         sync.Mutex
	next       time.Time
	suppressed int64
}

// allow reports whether to let one through at now, and how many were held back since the
// last.
func (s *sampler) allow(now time.Time) (suppressed int64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	// A clock that was set back must not silence it for longer.
	if now.Before(s.next) && s.next.Sub(now) <= sampleInterval {
		s.suppressed++
		return 0, false
	}
	suppressed = s.suppressed
	s.next, s.suppressed = now.Add(sampleInterval), 0
	return suppressed, true
}

// log writes a line a decision: what was refused always, what could not be decided as a
// sample, what was allowed only for those who debug.
func (s *Service) log(ctx context.Context, now time.Time, p *plan, a *answer) {
	level := slog.LevelDebug
	var suppressed int64
	switch {
	case a.outcome == outcomeCanceled:
	case a.cause != nil:
		level = slog.LevelWarn
		var ok bool
		if suppressed, ok = s.undecided.allow(now); !ok {
			return
		}
	case a.outcome == outcomeRefused:
		level = slog.LevelInfo
	}
	if !s.config.Logger.Enabled(ctx, level) {
		return
	}
	attrs := []slog.Attr{
		slog.String("outcome", string(a.outcome)),
		slog.Bool("rate_limited", a.outcome == outcomeRefused),
		slog.String("domain", truncate(p.domain)),
		slog.Any("descriptors", p.describe()),
	}
	if c := p.consumer(a); c != "" {
		attrs = append(attrs, slog.String("consumer", c))
	}
	if a.reason != "" {
		attrs = append(attrs, slog.String("reason", a.reason))
	}
	if r := a.decisive; r != nil {
		attrs = append(attrs, slog.String("limit", r.name()))
		if r.key != "" {
			attrs = append(attrs, slog.String("budget", r.key))
		}
		attrs = append(attrs, slog.Int64("size", r.size), slog.Int64("remaining", r.remaining))
	}
	if a.retryAfter > 0 {
		attrs = append(attrs, slog.Int64("retry_after_s", a.retryAfter))
	}
	if len(a.shadowDenied) > 0 {
		attrs = append(attrs, slog.Any("shadow_denied", a.shadowDenied))
	}
	if a.cause != nil {
		attrs = append(attrs, slog.Any("err", a.cause))
	}
	if suppressed > 0 {
		attrs = append(attrs, slog.Int64("suppressed", suppressed))
	}
	s.config.Logger.LogAttrs(ctx, level, "decision", attrs...)
}

// logRejected tells of requests that were answered with an error of the caller's: Envoy
// lets them through as a rule.
func (s *Service) logRejected(ctx context.Context, now time.Time, req *rlsv3.RateLimitRequest, err error) {
	suppressed, ok := s.rejected.allow(now)
	if !ok {
		return
	}
	s.config.Logger.LogAttrs(ctx, slog.LevelWarn, "request rejected",
		slog.String("domain", truncate(req.GetDomain())),
		slog.Any("err", err), slog.Int64("suppressed", suppressed))
}

func (s *Service) logInert(ctx context.Context, now time.Time, c *policy.Consumer) {
	suppressed, ok := s.inert.allow(now)
	if !ok {
		return
	}
	s.config.Logger.LogAttrs(ctx, slog.LevelWarn, "a consumer that the policy names is not in the store, so its quota is inert",
		slog.String("domain", c.Domain), slog.String("consumer", describeEntries(c.Entries)), slog.Int64("suppressed", suppressed))
}

// logOverflow tells once of each domain that has as many consumers as it may.
func (s *Service) logOverflow(ctx context.Context, c *policy.Consumer) {
	if _, told := s.overflowed.LoadOrStore(c.Domain, true); told {
		return
	}
	s.config.Logger.LogAttrs(ctx, slog.LevelWarn, "the domain has as many consumers as it may, so that new ones share a counter",
		slog.String("domain", c.Domain), slog.Int64("max_consumers", c.Most))
}

// consumer names the holder of the quota that decided, else that of the request's first
// quota; "" if it has none.
func (p *plan) consumer(a *answer) string {
	name := ""
	for i := range p.descriptors {
		d := &p.descriptors[i]
		for _, debit := range d.debits() {
			if debit.kind != debitQuota || !d.enforced() {
				continue
			}
			decided := a.decisive != nil && a.decisive.kind == debitQuota && a.decisive.descriptor == i
			if name == "" || decided {
				name = describeEntries(p.request.Quotas[debit.at].Consumer.Entries)
			}
			if decided {
				return name
			}
		}
	}
	return name
}

// describe renders the descriptors and their costs for the log.
func (p *plan) describe() []string {
	texts := make([]string, 0, min(len(p.descriptors), maxDescribed+1))
	for i := range p.descriptors {
		if i == maxDescribed {
			return append(texts, strconv.Itoa(len(p.descriptors)-i)+" more")
		}
		d := &p.descriptors[i]
		text := describeEntries(d.entries) + " cost " + strconv.FormatInt(d.cost, 10)
		switch {
		case d.limit == nil:
			text += " (no limit)"
		case d.limit.Shadow:
			text += " (shadow)"
		}
		texts = append(texts, text)
	}
	return texts
}

func describeEntries(entries []policy.Entry) string {
	var b strings.Builder
	for i, e := range entries {
		if i > 0 {
			b.WriteByte('/')
		}
		if i == maxDescribed {
			b.WriteString("…")
			break
		}
		b.WriteString(truncate(e.Key))
		b.WriteByte('=')
		b.WriteString(truncate(e.Value))
	}
	return b.String()
}

// truncate cuts a text to what a log line can bear.
func truncate(s string) string { return policy.Truncate(s, maxText) }

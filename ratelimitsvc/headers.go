package ratelimitsvc

import (
	"strconv"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	"github.com/weir-dev/weir/policy"
)

// The headers, in the lower case that HTTP/2 wants.
const (
	headerRetryAfter = "retry-after"
	headerLimit      = "x-ratelimit-limit"
	headerRemaining  = "x-ratelimit-remaining"
	headerReset      = "x-ratelimit-reset"

	// Those of draft-ietf-httpapi-ratelimit-headers.
	headerIETFPolicy = "ratelimit-policy"
	headerIETF       = "ratelimit"
)

// rateHeaders describes the limit r, which is one of all, in the policy's style.
func (p *plan) rateHeaders(r *reading, all []reading, retryAfter int64) []*corev3.HeaderValue {
	headers := retryAfterHeaders(retryAfter)
	reset := policy.WholeSeconds(r.reset)
	switch p.headers.Style {
	case policy.StyleIETF:
		return append(headers,
			&corev3.HeaderValue{Key: headerIETFPolicy, Value: ietfPolicies(r, all)},
			&corev3.HeaderValue{Key: headerIETF, Value: ietfLimit(r)},
		)
	case policy.StyleEpoch:
		reset = ceilSecond(p.request.Now.Add(r.reset))
	case policy.StyleDelta:
	}
	return append(headers,
		header(headerLimit, r.size),
		header(headerRemaining, r.remaining),
		header(headerReset, reset),
	)
}

// retryAfterHeaders is the one header, or none if there is nothing to wait for.
func retryAfterHeaders(after int64) []*corev3.HeaderValue {
	headers := make([]*corev3.HeaderValue, 0, 4)
	if after > 0 {
		headers = append(headers, header(headerRetryAfter, after))
	}
	return headers
}

func header(key string, n int64) *corev3.HeaderValue {
	return &corev3.HeaderValue{Key: key, Value: strconv.FormatInt(n, 10)}
}

// ceilSecond returns the first whole epoch second not before t.
func ceilSecond(t time.Time) int64 {
	if t.Nanosecond() > 0 {
		return t.Unix() + 1
	}
	return t.Unix()
}

// maxPolicies bounds the list of policies, in bytes: a client that uses a header this
// long is told enough.
const maxPolicies = 4096

// ietfPolicies is RateLimit-Policy: every visible limit of the request, each once, in the
// order of the request, so that the field stays the same from answer to answer. w is how
// long a calendar window really is, and for a bucket the time from empty to full. The
// limit that RateLimit speaks of is always among them.
func ietfPolicies(described *reading, all []reading) string {
	own := ietfPolicy(described)
	room := maxPolicies - len(own)
	var items []string
	seen := make(map[string]bool, len(all))
	for i := range all {
		item := own
		if r := &all[i]; r != described {
			if r.limit.Hidden {
				continue
			}
			item = ietfPolicy(r)
		}
		if seen[item] || item != own && len(item) > room {
			continue
		}
		seen[item] = true
		if item != own {
			room -= len(item) + len(", ")
		}
		items = append(items, item)
	}
	return strings.Join(items, ", ")
}

func ietfPolicy(r *reading) string {
	item := sfString(ietfName(r)) + ";q=" + sfInteger(r.size)
	if r.kind == debitBudget {
		switch r.limit.Budget.Scope {
		case policy.ScopeIngestNode, policy.ScopeIngestDomain:
			item += `;qu="content-bytes"`
		case policy.ScopeSecretReadNode, policy.ScopeSecretReadDomain, policy.ScopeAccessIssuanceDomain:
		}
	}
	return item + ";w=" + sfInteger(r.window)
}

// ietfLimit is RateLimit: what is left of one limit, and in how many seconds it is whole
// again.
func ietfLimit(r *reading) string {
	return sfString(ietfName(r)) + ";r=" + sfInteger(r.remaining) + ";t=" + sfInteger(policy.WholeSeconds(r.reset))
}

// ietfName is the limit's name, and which of its parts is meant if it has several.
func ietfName(r *reading) string {
	l := r.limit
	parts := len(l.Quota)
	for _, has := range []bool{l.Budget != nil, l.Limiter != nil, l.RateLimit != nil} {
		if has {
			parts++
		}
	}
	if parts < 2 {
		return r.name()
	}
	part := r.key
	switch r.kind {
	case debitBudget:
		part = "budget"
	case debitLimiter:
		part = "limiter"
	case debitRateLimit:
		part = "rate_limit"
	case debitQuota:
	}
	return r.name() + "/" + part
}

// sfString writes a String of structured fields (RFC 9651, section 4.1.6), which holds
// printable ASCII; other bytes are written as in a URL.
func sfString(s string) string {
	const hex = "0123456789ABCDEF"
	b := make([]byte, 0, len(s)+2)
	b = append(b, '"')
	for i := range len(s) {
		switch c := s[i]; {
		case c == '"' || c == '\\':
			b = append(b, '\\', c)
		case c < ' ' || c > '~':
			b = append(b, '%', hex[c>>4], hex[c&0xf])
		default:
			b = append(b, c)
		}
	}
	return string(append(b, '"'))
}

// sfInteger writes an Integer of structured fields (RFC 9651, section 4.1.4), which has
// at most 15 digits.
func sfInteger(n int64) string {
	const most = 999_999_999_999_999
	return strconv.FormatInt(min(n, most), 10)
}

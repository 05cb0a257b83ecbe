package policy

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Dump renders all that the policy's file says of limits, a line a descriptor that has
// one.
func (p *Policy) Dump() string {
	var b strings.Builder
	p.each(func(n *node) {
		l := n.limit
		for i, above := range n.trail {
			if i > 0 {
				b.WriteString(" > ")
			}
			b.WriteString(above.String())
			if above.shared {
				b.WriteString(" (shared)")
			}
		}
		fmt.Fprintf(&b, ": %s", l.Name)
		if l.Budget != nil {
			fmt.Fprintf(&b, "; budget %s %v/s burst %v", l.Budget.Scope, l.Budget.Budget.PerSecond, l.Budget.Budget.Burst)
		}
		if l.Limiter != nil {
			fmt.Fprintf(&b, "; limiter %d per %v burst %d", l.Limiter.Permits, l.Limiter.Per, l.Limiter.Burst)
		}
		if l.RateLimit != nil {
			fmt.Fprintf(&b, "; rate_limit %d per %v", l.RateLimit.Limit, l.RateLimit.Unit)
		}
		for _, q := range l.Quota {
			fmt.Fprintf(&b, "; quota %d %s", q.Limit, q.Key)
		}
		for _, flag := range []struct {
			name string
			on   bool
		}{
			{"unlimited", l.Unlimited},
			{"shadow", l.Shadow},
			{"quota mode", l.QuotaMode},
			{"hidden", l.Hidden},
			{"allow on error", l.AllowError},
			{"named", l.Named},
		} {
			if flag.on {
				b.WriteString("; " + flag.name)
			}
		}
		if len(l.Replaces) > 0 {
			fmt.Fprintf(&b, "; replaces %q", l.Replaces)
		}
		if l.Metadata != nil {
			text, err := json.Marshal(l.Metadata)
			fmt.Fprintf(&b, "; metadata %s", text)
			if err != nil {
				fmt.Fprintf(&b, " %v", err)
			}
		}
		b.WriteByte('\n')
	})
	return b.String()
}

// Glob is glob, and Covers whether a pattern covers another, both of one key.
func Glob(pattern, s string) bool { return glob(pattern, s) }

func Covers(p, q string) bool { return (&node{key: "k", value: p}).covers(&node{key: "k", value: q}) }

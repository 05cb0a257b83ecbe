package ratelimitsvc_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/ratelimitsvc"
)

// verdicts is a Decider that always answers the same.
type verdicts struct {
	store
	policy.Verdict
}

func (v *verdicts) Decide(context.Context, policy.Request) (policy.Verdict, error) {
	return v.Verdict, nil
}

// BenchmarkDecision is what a decision costs the service, without its store and the wire.
func BenchmarkDecision(b *testing.B) {
	for _, bench := range []struct {
		name        string
		descriptors []string
		verdict     policy.Verdict
	}{
		{"allowed", []string{"node=" + nodeID}, policy.Verdict{Allowed: true, Budgets: []policy.BudgetState{bucket(true, 60)}}},
		{"refused", []string{"node=" + nodeID}, policy.Verdict{Budgets: []policy.BudgetState{bucket(false, 0)}}},
		{"four descriptors", []string{"node=" + nodeID, "domain=" + nodeID, "consumer=alice", "soft=bob"}, policy.Verdict{
			Allowed: true, Budgets: []policy.BudgetState{bucket(true, 60), bucket(true, 60)},
			Quotas: []policy.QuotaState{reservation(-1, 2, 60), reservation(-1, 2)},
		}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			p, err := policy.Parse("test.yaml", []byte(testPolicy))
			if err != nil {
				b.Fatal(err)
			}
			set, err := policy.NewSet(p)
			if err != nil {
				b.Fatal(err)
			}
			v := &verdicts{Verdict: bench.verdict}
			service, err := ratelimitsvc.New(ratelimitsvc.Config{
				Policies: set, Decider: v, Usage: v, Ping: v.Ping,
				Now:      func() time.Time { return noon },
				Logger:   slog.New(slog.DiscardHandler),
				Registry: prometheus.NewRegistry(),
			})
			if err != nil {
				b.Fatal(err)
			}
			req := &rlsv3.RateLimitRequest{Domain: "ingest", Descriptors: descriptors(bench.descriptors...)}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := service.ShouldRateLimit(b.Context(), req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

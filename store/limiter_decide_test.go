package store

import (
	"testing"
	"time"

	"github.com/weir-dev/weir/policy"
)

// The same as TestLimiterRollOut, through Store.Decide.
func TestDecideRollOut(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	s := NewStore(pool)
	policies := []Policy{{Permits: 100, Per: time.Second, Burst: 10}, {Permits: 100, Per: time.Second, Burst: 100}}
	const (
		cycle = 1200 * time.Millisecond
		step  = 10 * time.Millisecond
		span  = 10 * cycle
	)
	for name, tt := range map[string]struct {
		small, large func(at time.Duration) bool // whether they take at a time of the cycle
	}{
		"small rests at once": {
			small: func(at time.Duration) bool { return at%(200*time.Millisecond) == 2*step },
			large: func(at time.Duration) bool { return at%(200*time.Millisecond) == 0 },
		},
		"small never rests": {
			small: func(at time.Duration) bool { return at > 0 && at < 900*time.Millisecond },
			large: func(at time.Duration) bool { return at == 0 },
		},
	} {
		law := newLawOne(policies, 0)
		var now time.Time
		var admitted int64
		take := func(p Policy, cost int64) {
			v, err := s.Decide(t.Context(), policy.Request{Now: now, Limiters: []policy.LimiterDebit{{
				Bucket: policy.LimiterBucket{ID: libraryLimiter("decide", []byte(name)), Namespace: "decide", Subject: name}, Policy: p, Cost: cost,
			}}})
			if err != nil {
				t.Fatal(err)
			}
			if v.Allowed {
				admitted += cost
				if !law.admit(cost, now.UnixMicro()) {
					t.Errorf("%s: at %v: admitted more than law 1 allows", name, now.Sub(noon))
				}
			}
		}
		for at := time.Duration(0); at < span; at += step {
			now = noon.Add(at)
			if _, err := s.DeleteExpired(t.Context(), now); err != nil {
				t.Fatal(err)
			}
			if tt.large(at % cycle) {
				take(policies[1], 100)
			}
			if tt.small(at % cycle) {
				take(policies[0], 1)
			}
		}
		t.Logf("%s: %d admitted in %v, at most %d by law 1", name, admitted, span, 100+span.Milliseconds()/10)
	}
}

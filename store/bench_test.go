package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
)

// The statements alone, on one connection and 1,000 keys: the floor under the
// service. An operation is one request, also where many go in one call.
func BenchmarkTake(b *testing.B) {
	s := benchStore(b)
	keys := benchKeys(1000)
	budget := Budget{PerSecond: 1e6, Burst: 1e9}
	now := noon
	for i := 0; b.Loop(); i++ {
		now = now.Add(time.Microsecond)
		if _, err := s.Take(b.Context(), ScopeIngestNode, keys[i%len(keys)], 1, budget, now); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	for _, shape := range []struct {
		name            string
		buckets, quotas int
		keys            int
	}{
		{"bucket", 1, 0, 1000},
		{"hot", 1, 0, 1},
		{"buckets=2/quota", 2, 1, 1000},
	} {
		for _, size := range []int{1, 16, 64, 256} {
			b.Run(fmt.Sprintf("%s/batch=%d", shape.name, size), func(b *testing.B) {
				s := benchStore(b)
				keys := benchKeys(shape.keys)
				budget := Budget{PerSecond: 1e6, Burst: 1e9}
				now, n := noon, 0
				reqs := make([]policy.Request, size)
				for b.Loop() {
					for i := range reqs {
						n++
						now = now.Add(time.Microsecond)
						req := policy.Request{Now: now}
						for j := range shape.buckets {
							req.Budgets = append(req.Budgets, policy.BudgetDebit{
								Scope: policy.Scopes()[3+j], Key: keys[n%len(keys)], Budget: budget, Cost: 1,
							})
						}
						for range shape.quotas {
							key := keys[n%len(keys)]
							c := policy.Consumer{Domain: "bench", Entries: []policy.Entry{{Key: "consumer", Value: "value"}}}
							copy(c.ID[:], key[:])
							req.Quotas = append(req.Quotas, quotaDebit(c, dayMonth(1e9, 1e9), 1))
						}
						reqs[i] = req
					}
					if _, err := s.decide(b.Context(), reqs); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*size), "ns/request")
			})
		}
	}
}

func benchStore(b *testing.B) *Store {
	b.Helper()
	cfg, err := PoolConfig(pgtest.NewDatabase(b))
	if err != nil {
		b.Fatal(err)
	}
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	return NewStore(pool)
}

func benchKeys(n int) []Key {
	keys := make([]Key, n)
	for i := range keys {
		keys[i] = newKey()
	}
	return keys
}

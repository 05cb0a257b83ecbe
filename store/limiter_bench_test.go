package store

import (
	"fmt"
	"testing"
	"time"

	"github.com/weir-dev/weir/internal/pgtest"
)

// One call of the limiter on one connection, and of sixteen on one hot subject.
func BenchmarkLimiter(b *testing.B) {
	pool := benchPool(b)
	const subjects = 1000
	names := make([]string, subjects)
	for i := range names {
		names[i] = fmt.Sprint("user:", i)
	}
	clock := newClock(noon)
	plenty := limiterAt(pool, Policy{Permits: 1_000_000, Per: time.Second, Burst: 1_000_000}, clock)
	none := NewLimiter(pool, LimiterConfig[string]{
		Policy: Policy{Permits: 1, Per: time.Hour, Burst: 1}, Namespace: "none", Now: clock.now,
	})
	for _, name := range names {
		if _, err := none.TryAcquire(b.Context(), name, 1); err != nil {
			b.Fatal(err)
		}
	}
	for name, call := range map[string]func(i int) (Decision, error){
		"allowed": func(i int) (Decision, error) { return plenty.TryAcquire(b.Context(), names[i%subjects], 1) },
		"denied":  func(i int) (Decision, error) { return none.TryAcquire(b.Context(), names[i%subjects], 1) },
		"peek":    func(i int) (Decision, error) { return plenty.Peek(b.Context(), names[i%subjects]) },
		"hot":     func(int) (Decision, error) { return plenty.TryAcquire(b.Context(), "hot", 1) },
	} {
		b.Run(name, func(b *testing.B) {
			for i := 0; b.Loop(); i++ {
				if _, err := call(i); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(name+"/parallel", func(b *testing.B) {
			b.SetParallelism(8)
			b.RunParallel(func(pb *testing.PB) {
				for i := 0; pb.Next(); i++ {
					if _, err := call(i); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}

func benchPool(b *testing.B) DBTX {
	b.Helper()
	pool, err := Connect(b.Context(), pgtest.NewDatabase(b))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	return pool
}

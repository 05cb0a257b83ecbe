package store

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/weir-dev/weir/policy"
)

// BenchmarkCounterPartitions measures what decisions would cost if quota_counters were
// partitioned by month: RATIONALE.md says what came of it. The backend's own time is
// told too, since it is the same on a busy machine.
func BenchmarkCounterPartitions(b *testing.B) {
	for _, partitions := range []int{0, 1, 16, 28} {
		for _, size := range []int{1, 64} {
			b.Run(fmt.Sprintf("partitions=%d/batch=%d", partitions, size), func(b *testing.B) {
				s := benchStore(b)
				if partitions > 0 {
					partitionCounters(b, s, partitions)
				}
				holders := make([]policy.Consumer, 1000)
				for i := range holders {
					holders[i] = consumer(strconv.Itoa(i))
				}
				now, n := noon, 0
				reqs := make([]policy.Request, size)
				decide := func() {
					for i := range reqs {
						n++
						now = now.Add(time.Microsecond)
						reqs[i] = quotaRequest(holders[n%len(holders)], dayMonth(1e9, 1e9), 1, now)
					}
					if _, err := s.decide(b.Context(), reqs); err != nil {
						b.Fatal(err)
					}
				}
				for range 2 * len(holders) / size { // so that all windows are open
					decide()
				}
				spent := backendTime(b, s)
				for b.Loop() {
					decide()
				}
				requests := float64(b.N * size)
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/requests, "ns/request")
				b.ReportMetric(float64((backendTime(b, s)-spent).Nanoseconds())/requests, "backend-ns/request")
			})
		}
	}
}

// backendTime is what the server's process of the store's one connection has spent on a
// processor, or 0 where that can't be seen.
func backendTime(b *testing.B, s *Store) time.Duration {
	b.Helper()
	var pid int
	if err := s.db.QueryRow(b.Context(), "SELECT pg_backend_pid()").Scan(&pid); err != nil {
		b.Fatal(err)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	if err != nil {
		return 0
	}
	ns, _, _ := strings.Cut(string(text), " ")
	n, err := strconv.ParseInt(ns, 10, 64)
	if err != nil {
		b.Fatal(err)
	}
	return time.Duration(n)
}

// partitionCounters replaces quota_counters by a table of so many months, the last but
// one of which holds noon, and a default partition.
func partitionCounters(b *testing.B, s *Store, months int) {
	b.Helper()
	statements := []string{
		"DROP TABLE plexsphere.quota_counters CASCADE",
		`CREATE TABLE plexsphere.quota_counters (
			counter bytea NOT NULL, unit text NOT NULL, window_start timestamptz NOT NULL, used bigint NOT NULL,
			PRIMARY KEY (counter, unit, window_start)
		) PARTITION BY RANGE (window_start)`,
		"CREATE TABLE plexsphere.quota_counters_rest PARTITION OF plexsphere.quota_counters DEFAULT WITH (fillfactor = 70)",
	}
	first := time.Date(noon.Year(), noon.Month()-time.Month(max(0, months-2)), 1, 0, 0, 0, 0, time.UTC)
	for i := range months {
		statements = append(statements, fmt.Sprintf(
			"CREATE TABLE plexsphere.quota_counters_%d PARTITION OF plexsphere.quota_counters FOR VALUES FROM ('%s') TO ('%s') WITH (fillfactor = 70)",
			i, first.AddDate(0, i, 0).Format(time.RFC3339), first.AddDate(0, i+1, 0).Format(time.RFC3339)))
	}
	for _, sql := range statements {
		if _, err := s.db.Exec(b.Context(), sql); err != nil {
			b.Fatal(err)
		}
	}
}

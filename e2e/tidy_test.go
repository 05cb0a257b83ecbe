package e2e_test

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"github.com/weir-dev/weir/internal/pgtest"
)

// Two replicas of `weir serve` share the jobs, so that each is done once; and what a
// consumer sent is in the history, whichever replica decided it, also what they had still
// in memory when they were stopped.
func TestServeTidies(t *testing.T) {
	t.Parallel()
	awayFromMidnight(t)
	dsn := pgtest.NewDatabase(t)
	var replicas [2]*mesh
	for i := range replicas {
		m := &mesh{dsn: dsn, service: &service{grpc: freeAddress(t), http: freeAddress(t)}}
		m.arguments = []string{
			"serve", examplePolicy, "--database-url", dsn, "--drain-delay", "0s",
			"--grpc-listen", m.service.grpc, "--http-listen", m.service.http, "--xds-listen", "",
		}
		showOnFailure(t, fmt.Sprintf("weir serve %d", i), &m.serviceLog)
		m.startService(t)
		t.Cleanup(func() { _ = m.service.Stop(syscall.SIGKILL, 0) })
		replicas[i] = m
	}
	for i := range 12 { // 10 are allowed a day
		answer, err := rlsv3.NewRateLimitServiceClient(dial(t, replicas[i%2].service.grpc)).ShouldRateLimit(t.Context(), &rlsv3.RateLimitRequest{
			Domain: "ingest",
			Descriptors: []*commonv3.RateLimitDescriptor{{
				Entries: []*commonv3.RateLimitDescriptor_Entry{{Key: "consumer", Value: "acme"}},
			}},
		})
		if want := map[bool]rlsv3.RateLimitResponse_Code{true: rlsv3.RateLimitResponse_OK, false: rlsv3.RateLimitResponse_OVER_LIMIT}[i < 10]; err != nil || answer.GetOverallCode() != want {
			t.Fatalf("request %d: %v, %v; want %v", i+1, answer, err, want)
		}
	}
	conn := replicas[0].connect(t)
	const jobs = 6
	eventually(t, time.Minute, "all jobs are done", func() error {
		var done, runs int
		if err := conn.QueryRow(t.Context(), "SELECT count(*) FILTER (WHERE state = 'succeeded'), sum(run) FROM plexsphere.sweep_status JOIN plexsphere.sweep_jobs USING (name)").Scan(&done, &runs); err != nil {
			return err
		}
		if done != jobs || runs != jobs {
			return fmt.Errorf("%d jobs of %d have succeeded, in %d runs", done, jobs, runs)
		}
		return nil
	})
	metrics := scrape(t, replicas[0].service.http) + scrape(t, replicas[1].service.http)
	for _, want := range []string{"weir_sweep_last_success_timestamp_seconds{", "weir_history_tallies "} {
		if !strings.Contains(metrics, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	for _, m := range replicas {
		m.stopService(t, syscall.SIGTERM)
	}
	lines := strings.Count(replicas[0].serviceLog.String()+replicas[1].serviceLog.String(), "msg=swept")
	if lines != jobs {
		t.Errorf("the logs tell of %d sweeps, want %d", lines, jobs)
	}
	for _, view := range []string{"usage_by_hour", "usage_by_day"} {
		var sent, refused, units int64
		err := conn.QueryRow(t.Context(), `
SELECT coalesce(sum(sent), 0)::bigint, coalesce(sum(refused), 0)::bigint, coalesce(sum(units), 0)::bigint
FROM plexsphere.`+view+` WHERE entries -> 0 ->> 'value' = 'acme'`).Scan(&sent, &refused, &units)
		if err != nil || sent != 12 || refused != 2 || units != 10 {
			t.Errorf("%s: %d sent, %d refused, %d units, %v; want 12, 2 and 10", view, sent, refused, units, err)
		}
	}
}

package store

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"pgregory.net/rapid"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// runJob runs one of the jobs as a replica does, at the database's time.
func runJob(t *testing.T, pool *pgxpool.Pool, job Job) {
	t.Helper()
	s, _ := testSweeper(t, pool, "a", io.Discard, job)
	if _, err := pool.Exec(t.Context(), "UPDATE plexsphere.sweep_jobs SET due_at = '-infinity' WHERE name = $1", job.Name); err != nil {
		t.Fatal(err)
	}
	tick(t, s)
	var failure *string
	if err := pool.QueryRow(t.Context(), "SELECT error FROM plexsphere.sweep_jobs WHERE name = $1", job.Name).Scan(&failure); err != nil || failure != nil {
		t.Fatalf("%s: %v, %q", job.Name, err, deref(failure))
	}
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// databaseNow is what the jobs take for now.
func databaseNow(t *testing.T, db DBTX) time.Time {
	t.Helper()
	var now time.Time
	if err := db.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&now); err != nil {
		t.Fatal(err)
	}
	return now.UTC()
}

// turnAt is a job's turn at another time than the database's.
func turnAt(s *Store, now time.Time) Turn { return Turn{Store: s, Now: now} }

// The retention of a bucket is an hour of refill and what clocks may be apart: whoever
// wrote the row is 5 minutes behind, and the database 5 minutes ahead.
func TestIdleRetentionCoversClocks(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	job := mustJob("rate-budget-sweep")
	budget := Budget{PerSecond: 1, Burst: policy.MaxRefill}
	key := newKey()
	taken := noon // true time
	mustTake(t, s, ScopeIngestNode, key, budget.Burst, budget, taken.Add(-5*time.Minute))
	full := taken.Add(policy.MaxRefill * time.Second)
	for _, step := range []struct {
		after time.Duration // that it is full, in true time
		want  bool
	}{{-time.Microsecond, true}, {0, true}, {time.Microsecond, false}} {
		if _, err := job.Run(t.Context(), turnAt(s, full.Add(step.after).Add(5*time.Minute))); err != nil {
			t.Fatal(err)
		}
		if _, _, ok := bucketRow(t, pool, ScopeIngestNode, key); ok != step.want {
			t.Errorf("swept %v after it is full: the bucket is there: %v, want %v", step.after, ok, step.want)
		}
	}
}

// Sweeps run by the job all the while that takers spend idle buckets: none that was
// debited is minted full again.
func TestSweepJobAgainstConcurrentTakes(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	const buckets, takers = 40, 6
	budget := Budget{PerSecond: 10.0 / policy.MaxRefill, Burst: 10}
	job := mustJob("rate-budget-sweep")
	for range 4 {
		now := databaseNow(t, pool)
		keys := make([]Key, buckets)
		for i := range keys {
			keys[i] = newKey()
			mustTake(t, s, ScopeIngestNode, keys[i], 10, budget, now.Add(-2*time.Hour))
		}
		var granted [takers][buckets]int64
		together(takers+1, func(worker int) {
			if worker == takers {
				for range 10 {
					runJob(t, pool, job)
				}
				return
			}
			for i, key := range keys {
				for range 3 {
					ok, err := s.Take(t.Context(), ScopeIngestNode, key, 1, budget, now)
					if err != nil {
						t.Error(err)
					}
					if ok {
						granted[worker][i]++
					}
				}
			}
		})
		for i, key := range keys {
			var total int64
			for worker := range takers {
				total += granted[worker][i]
			}
			if tokens, _, ok := bucketRow(t, pool, ScopeIngestNode, key); total != 10 || !ok || tokens != 0 {
				t.Errorf("bucket %d: granted %d and %v left (there: %v), want 10 and 0", i, total, tokens, ok)
			}
		}
	}
}

// A window is deleted once it ended at the instant or before, and no earlier: at both
// edges, in every unit, at instants in all years.
func TestDeleteEnded(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	ids := [][]byte{hash("before"), hash("at"), hash("after")}
	rapid.Check(t, func(rt *rapid.T) {
		unit := rapid.SampledFrom([]quota.Unit{quota.Second, quota.Minute, quota.Hour, quota.Day, quota.Week, quota.Month, quota.Year}).Draw(rt, "unit")
		by := time.Unix(rapid.Int64Range(-60_000_000_000, 200_000_000_000).Draw(rt, "by"), rapid.Int64Range(0, 999_999_999).Draw(rt, "nanoseconds"))
		w := unit.Window(by.Unix())
		starts := []time.Time{time.Unix(unit.Window(w.Start-1).Start, 0), time.Unix(w.Start, 0), time.Unix(w.End, 0)}
		other := quota.Second
		if unit == other {
			other = quota.Year
		}
		for _, u := range []quota.Unit{unit, other} {
			if _, err := pool.Exec(t.Context(), `
INSERT INTO plexsphere.quota_counters SELECT c, $2, w, 1 FROM unnest($1::bytea[], $3::timestamptz[]) AS k (c, w)`, ids, u.String(), starts); err != nil {
				rt.Fatal(err)
			}
		}
		n, err := s.DeleteEnded(t.Context(), unit, by)
		if err != nil || n != 1 {
			rt.Errorf("DeleteEnded(%s, %v) = %d, %v, want 1", unit, by, n, err)
		}
		if got := count(t, pool, "SELECT count(*) FROM plexsphere.quota_counters WHERE unit = $1 AND counter = ANY ($2)", unit.String(), ids[1:]); got != 2 {
			rt.Errorf("of the windows that hold %v and follow it, %d are left", by, got)
		}
		if got := count(t, pool, "SELECT count(*) FROM plexsphere.quota_counters WHERE unit = $1", other.String()); got != 3 {
			rt.Errorf("%d windows of another unit are left, want 3", got)
		}
		if _, err := pool.Exec(t.Context(), "DELETE FROM plexsphere.quota_counters"); err != nil {
			rt.Fatal(err)
		}
	})
	if _, err := s.DeleteEnded(t.Context(), 0, noon); err == nil {
		t.Error("an unknown unit: no error")
	}
	if _, err := s.DeleteEnded(t.Context(), quota.Day, time.Time{}.AddDate(-10, 0, 0)); err == nil {
		t.Error("an instant that no calendar holds: no error")
	}
}

func hash(name string) []byte { id := consumer(name).ID; return id[:] }

// The job leaves what is current, for any clock within the hour, and what its retention
// says; nothing of what it deletes was still to be counted.
func TestCounterSweepKeeps(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	holder := consumer("c")
	all := quotaOf(map[quota.Unit]int64{
		quota.Second: 9, quota.Minute: 9, quota.Hour: 9, quota.Day: 9, quota.Week: 9, quota.Month: 9, quota.Year: 9,
	})
	job := mustJob("quota-counter-sweep")
	left := func() string {
		t.Helper()
		var units string
		if err := pool.QueryRow(t.Context(), "SELECT coalesce(string_agg(unit, ' ' ORDER BY unit), '') FROM plexsphere.quota_counters").Scan(&units); err != nil {
			t.Fatal(err)
		}
		return units
	}
	mustDecide(t, s, quotaRequest(holder, all, 1, noon))
	for _, step := range []struct {
		at   time.Time
		want string
	}{
		{noon, "day hour minute month second week year"},
		{noon.Add(time.Hour), "day hour minute month second week year"},
		{noon.Add(time.Hour + time.Second), "day hour minute month week year"},
		{noon.Add(time.Hour + time.Minute), "day hour month week year"},
		{noon.Add(2 * time.Hour), "day month week year"},
		{noon.AddDate(0, 0, 90), "day month week year"},
		{noon.AddDate(0, 0, 91), "month week year"},
		{noon.AddDate(0, 0, 97), "month year"},
		{noon.AddDate(2, 0, 0), "month year"},
		{noon.AddDate(2, 1, 0), "year"},
		{noon.AddDate(3, 0, 0), ""},
	} {
		if _, err := job.Run(t.Context(), turnAt(s, step.at)); err != nil {
			t.Fatal(err)
		}
		if got := left(); got != step.want {
			t.Errorf("after the sweep at %v: %q, want %q", step.at, got, step.want)
		}
	}
}

// A refund of the last minutes still finds its window, and one that comes too late makes
// none.
func TestCounterSweepAndLateRefunds(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	holder, minute := consumer("c"), quotaOf(map[quota.Unit]int64{quota.Minute: 10})
	job := mustJob("quota-counter-sweep")
	mustDecide(t, s, quotaRequest(holder, minute, 5, noon))
	for _, step := range []struct {
		at         time.Time
		back, used int64
	}{
		{noon.Add(59 * time.Minute), 2, 3},
		{noon.Add(2 * time.Hour), 1, 0},
	} {
		if _, err := job.Run(t.Context(), turnAt(s, step.at)); err != nil {
			t.Fatal(err)
		}
		req := quotaRequest(holder, minute, -step.back, step.at)
		req.Quotas[0].ChargedAt = noon
		mustDecide(t, s, req)
		if got := usedIn(t, s, holder, minute, noon)[0]; got != step.used {
			t.Errorf("after the refund at %v: %d used, want %d", step.at, got, step.used)
		}
	}
}

// Counters are swept while they are charged, in batches: the index of the sweep is used by
// it, and never by a decision.
func TestCounterSweepIndex(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	// Decisions plan on an empty table, as in a new database.
	for i := range 20 {
		mustDecide(t, s, quotaRequest(consumer(strconv.Itoa(i)), dayMonth(9, 9), 1, noon))
	}
	if _, err := pool.Exec(t.Context(), `
INSERT INTO plexsphere.quota_counters
SELECT sha256(i::text::bytea), 'second', $1::timestamptz - interval '2 hours' + (i / 1000) * interval '1 second', 1
FROM generate_series(1, $2) AS i`, noon, 2*sweepBatch+5); err != nil {
		t.Fatal(err)
	}
	scans := func(index string) int64 {
		t.Helper()
		// Statistics come from all connections, at their leisure.
		return count(t, pool, "SELECT idx_scan FROM pg_stat_user_indexes WHERE schemaname = 'plexsphere' AND indexrelname = $1", index)
	}
	waitUntil(t, "the statistics", func() bool {
		if _, err := pool.Exec(t.Context(), "SELECT pg_stat_force_next_flush()"); err != nil {
			t.Fatal(err)
		}
		mustDecide(t, s, quotaRequest(consumer("0"), dayMonth(9, 9), 1, noon))
		return scans("quota_counters_pkey") >= 20
	})
	if n := scans("quota_counters_ended"); n != 0 {
		t.Errorf("decisions used the sweep's index %d times", n)
	}
	n, err := s.DeleteEnded(t.Context(), quota.Second, noon.Add(-time.Hour))
	if err != nil || n != 2*sweepBatch+5 {
		t.Errorf("DeleteEnded = %d, %v, want %d", n, err, 2*sweepBatch+5)
	}
	waitUntil(t, "the sweep to show in the statistics", func() bool {
		if _, err := pool.Exec(t.Context(), "SELECT pg_stat_force_next_flush()"); err != nil {
			t.Fatal(err)
		}
		return scans("quota_counters_ended") >= 3
	})
}

func TestRetentionChecks(t *testing.T) {
	t.Parallel()

	if _, err := Jobs(Retention{DayCounters: time.Minute}); err == nil || !strings.Contains(err.Error(), "day counters") {
		t.Errorf("a minute: %v, want an error", err)
	}
	jobs, err := Jobs(Retention{HourlyHistory: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	names := make(map[string]bool)
	for _, j := range jobs {
		names[j.Name] = true
	}
	if len(names) != len(jobs) {
		t.Errorf("two jobs have one name: %v", names)
	}
}

// Consumers without counters go once they are old, and are no longer counted; those that a
// policy names, that are used or that have history stay.
func TestConsumerSweep(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	job := mustJob("consumer-sweep")
	old := noon.AddDate(0, 0, -91)
	enrol := func(name string, at time.Time) policy.Consumer {
		t.Helper()
		c := consumer(name)
		mustDecide(t, s, quotaRequest(c, dayMonth(9, 9), 1, at))
		return c
	}
	unused, named, used, remembered := enrol("unused", old), enrol("named", old), enrol("used", old), enrol("remembered", old)
	fresh := enrol("fresh", noon)
	if _, err := pool.Exec(t.Context(), "UPDATE plexsphere.consumers SET named = true WHERE id = $1", named.ID[:]); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "DELETE FROM plexsphere.quota_counters WHERE counter <> $1", used.ID[:]); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "INSERT INTO plexsphere.history_daily VALUES ($1, $2, 'test', 1, 0, 1)", remembered.ID[:], old); err != nil {
		t.Fatal(err)
	}
	changes, err := job.Run(t.Context(), turnAt(s, noon))
	if err != nil || changes["consumers"] != 1 {
		t.Errorf("the sweep removed %v, %v, want 1", changes, err)
	}
	got := listed(t, s)
	want := []policy.CounterID{named.ID, used.ID, remembered.ID, fresh.ID}
	slices.SortFunc(want, compareCounters)
	if !slices.Equal(got, want) {
		t.Errorf("left are %x, want all but %x", got, unused.ID)
	}
	if n := count(t, pool, "SELECT consumers FROM plexsphere.consumer_domains WHERE domain = 'test'"); n != 4 {
		t.Errorf("the domain has %d consumers, want 4", n)
	}
	// Whoever comes back is enrolled anew.
	other := NewStore(pool) // one that doesn't remember
	mustDecide(t, other, quotaRequest(unused, dayMonth(9, 9), 1, noon))
	if got := listed(t, s); len(got) != 5 {
		t.Errorf("%d consumers are listed, want 5", len(got))
	}
	if n := count(t, pool, "SELECT consumers FROM plexsphere.consumer_domains WHERE domain = 'test'"); n != 5 {
		t.Errorf("the domain has %d consumers, want 5", n)
	}
}

func listed(t *testing.T, s *Store) []policy.CounterID {
	t.Helper()
	page, err := s.Consumers(t.Context(), policy.ConsumersQuery{Domain: "test", Limit: 1000, Now: noon})
	if err != nil {
		t.Fatal(err)
	}
	var ids []policy.CounterID
	for _, c := range page {
		ids = append(ids, c.ID)
	}
	return ids
}

// A consumer whose charge is under way at the moment of the sweep, which cannot see it
// yet, comes back; also one that a replica goes on charging because it remembers it.
func TestConsumerSweepRestoresTheCharged(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	old := noon.AddDate(0, 0, -91)
	inFlight, remembered, gone := consumer("in flight"), consumer("remembered"), consumer("gone")
	for _, c := range []policy.Consumer{inFlight, remembered, gone} {
		mustDecide(t, s, quotaRequest(c, dayMonth(9, 9), 1, old))
	}
	if _, err := pool.Exec(t.Context(), "DELETE FROM plexsphere.quota_counters"); err != nil {
		t.Fatal(err)
	}
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	mustDecide(t, NewStore(tx), quotaRequest(inFlight, dayMonth(9, 9), 1, noon))
	sweep := func() Changes {
		t.Helper()
		changes, err := mustJob("consumer-sweep").Run(t.Context(), turnAt(NewStore(pool), databaseNow(t, pool)))
		if err != nil {
			t.Fatal(err)
		}
		return changes
	}
	if changes := sweep(); changes["consumers"] != 3 {
		t.Errorf("the sweep removed %v, want 3", changes)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustDecide(t, s, quotaRequest(remembered, dayMonth(9, 9), 1, noon))
	if got := listed(t, s); len(got) != 0 {
		t.Fatalf("%d consumers are listed: the test does not show what it is for", len(got))
	}
	if changes := sweep(); changes["consumers_restored"] != 0 {
		t.Errorf("restored at once: %v", changes)
	}
	if _, err := pool.Exec(t.Context(), "UPDATE plexsphere.retired_consumers SET retired_at = retired_at - interval '1 hour'"); err != nil {
		t.Fatal(err)
	}
	if changes := sweep(); changes["consumers_restored"] != 2 {
		t.Errorf("restored %v, want 2", changes)
	}
	want := []policy.CounterID{inFlight.ID, remembered.ID}
	slices.SortFunc(want, compareCounters)
	if got := listed(t, s); !slices.Equal(got, want) {
		t.Errorf("listed are %x, want %x", got, want)
	}
	if n := count(t, pool, "SELECT consumers FROM plexsphere.consumer_domains WHERE domain = 'test'"); n != 2 {
		t.Errorf("the domain has %d consumers, want 2", n)
	}
	if n := count(t, pool, "SELECT count(*) FROM plexsphere.retired_consumers"); n != 0 {
		t.Errorf("%d are still kept aside", n)
	}
}

// Consumers are retired in pages, domain by domain right, while others enrol: nobody
// deadlocks, and the counts are those of the rows.
func TestConsumerSweepBesideEnrolment(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	if _, err := pool.Exec(t.Context(), `
INSERT INTO plexsphere.consumers (id, domain, entries, enrolled_at)
SELECT sha256(i::text::bytea), 'd' || i % 5, '[]', $1 FROM generate_series(1, $2) AS i`, noon.AddDate(0, 0, -91), 3*consumerBatch+7); err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), "INSERT INTO plexsphere.consumer_domains SELECT domain, count(*) FROM plexsphere.consumers GROUP BY domain"); err != nil {
		t.Fatal(err)
	}
	together(5, func(worker int) {
		if worker == 0 {
			if _, err := mustJob("consumer-sweep").Run(t.Context(), turnAt(s, noon)); err != nil {
				t.Error(err)
			}
			return
		}
		for i := range 60 {
			var reqs []policy.Request
			for j := range 5 {
				c := consumer(fmt.Sprint(worker, i, j))
				c.Domain = fmt.Sprint("d", (i+j)%5)
				reqs = append(reqs, quotaRequest(c, dayMonth(9, 9), 1, noon))
			}
			if _, err := s.decide(t.Context(), reqs); err != nil {
				t.Error(err)
			}
		}
	})
	if got := count(t, pool, "SELECT count(*) FROM plexsphere.consumers"); got != 4*60*5 {
		t.Errorf("%d consumers, want %d", got, 4*60*5)
	}
	if got := count(t, pool, `
SELECT count(*) FROM (SELECT domain, count(*) AS n FROM plexsphere.consumers GROUP BY domain) AS c
FULL JOIN plexsphere.consumer_domains AS d USING (domain) WHERE c.n IS DISTINCT FROM d.consumers`); got != 0 {
		t.Errorf("%d domains are counted wrong", got)
	}
}

// Months are made ahead, once, and take over what came before them; those that are past
// their retention are dropped, in turn, and what never had a month is deleted.
func TestHistoryPartitions(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	add := func(at time.Time, rows int) {
		t.Helper()
		for _, table := range []string{"history_hourly", "history_daily"} {
			if _, err := pool.Exec(t.Context(), "INSERT INTO plexsphere."+table+` SELECT sha256(i::text::bytea), $1, 'd', 1, 0, 1 FROM generate_series(1, $2) AS i`, at, rows); err != nil {
				t.Fatal(err)
			}
		}
	}
	lies := func(at time.Time, want string) {
		t.Helper()
		for _, table := range []string{"history_hourly", "history_daily"} {
			if got := count(t, pool, "SELECT count(*) FROM plexsphere."+table+want+" WHERE window_start = $1", at); got != 3 {
				t.Errorf("%s%s has %d rows of %v, want 3", table, want, got, at)
			}
		}
	}
	may := time.Date(2026, time.May, 31, 23, 0, 0, 0, time.UTC)
	june := time.Date(2026, time.June, 1, 0, 0, 0, 0, time.UTC)
	ancient := time.Date(1999, time.May, 1, 0, 0, 0, 0, time.UTC)
	for _, at := range []time.Time{may, june, ancient} {
		add(at, 3)
		lies(at, "_default")
	}
	for _, want := range []int64{2 * monthsAhead, 0} {
		changes, err := makePartitions(t.Context(), turnAt(s, noon))
		if err != nil || changes["partitions_made"] != want {
			t.Errorf("made %v, %v, want %d", changes, err, want)
		}
	}
	lies(may, "_2026_05")
	lies(june, "_2026_06")
	lies(ancient, "_default")
	retention := Retention{}.withDefaults()
	for _, step := range []struct {
		at             time.Time
		drop, old      int64
		hourly, dailys int
	}{
		{noon, 0, 3, 6, 6},
		{june.AddDate(0, 0, 89), 0, 0, 6, 6},
		{june.AddDate(0, 0, 90), 1, 0, 3, 6},
		{june.AddDate(2, 0, -1), 2, 0, 0, 6}, // June's and July's hours
		{june.AddDate(2, 0, 0), 1, 0, 0, 3},  // 731 days
		{june.AddDate(3, 0, 0), 2, 0, 0, 0},
	} {
		changes, err := dropHistory(t.Context(), turnAt(s, step.at), retention)
		if err != nil || changes["partitions_dropped"] != step.drop || changes["history_hourly"] != step.old || changes["history_daily"] != step.old {
			t.Errorf("at %v: %v, %v, want %d dropped and %d deleted of each", step.at, changes, err, step.drop, step.old)
		}
		for table, want := range map[string]int{"history_hourly": step.hourly, "history_daily": step.dailys} {
			if got := count(t, pool, "SELECT count(*) FROM plexsphere."+table); got != int64(want) {
				t.Errorf("at %v: %s has %d rows, want %d", step.at, table, got, want)
			}
		}
	}
	if _, err := pool.Exec(t.Context(), "SELECT plexsphere.drop_history_partition('rate_budgets', now())"); err == nil {
		t.Error("another table: no error")
	}
}

// Who reads a month that is to be dropped is not waited for long, and neither does anybody
// wait behind the drop.
func TestHistoryRetentionBesideAReader(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	if _, err := makePartitions(t.Context(), turnAt(s, noon)); err != nil {
		t.Fatal(err)
	}
	reader, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	count(t, reader, "SELECT count(*) FROM plexsphere.history_hourly")
	later := noon.AddDate(10, 0, 0)
	retention := Retention{}.withDefaults()
	if _, err := dropHistory(t.Context(), turnAt(s, later), retention); err == nil || !strings.Contains(err.Error(), "55P03") {
		t.Errorf("beside a reader: %v, want that the lock was not to be had", err)
	}
	if err := reader.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	changes, err := dropHistory(t.Context(), turnAt(s, later), retention)
	if err != nil || changes["partitions_dropped"] != 2*monthsAhead {
		t.Errorf("without a reader: %v, %v, want all dropped", changes, err)
	}
}

// Partitions are the owner's, whoever serves: a role that may only read and write is
// enough, once it may call the functions.
func TestHistoryPartitionsByAWriter(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	role := "writer_" + strings.ReplaceAll(strings.ToLower(t.Name()), "/", "_")
	for _, sql := range []string{
		"DROP ROLE IF EXISTS " + role,
		"CREATE ROLE " + role,
		"GRANT USAGE ON SCHEMA plexsphere TO " + role,
		"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA plexsphere TO " + role,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		for _, sql := range []string{"DROP OWNED BY " + role, "DROP ROLE " + role} {
			if _, err := pool.Exec(context.Background(), sql); err != nil {
				t.Error(err)
			}
		}
	})
	as := func() error {
		tx, err := pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback(t.Context()) //nolint:errcheck // committed below
		if _, err := tx.Exec(t.Context(), "SET LOCAL ROLE "+role); err != nil {
			t.Fatal(err)
		}
		turn := turnAt(NewStore(tx), noon)
		if _, err := makePartitions(t.Context(), turn); err != nil {
			return err
		}
		if _, err := dropHistory(t.Context(), turn, Retention{}.withDefaults()); err != nil {
			return err
		}
		return tx.Commit(t.Context())
	}
	if err := as(); err == nil || !strings.Contains(err.Error(), "42501") {
		t.Errorf("without leave: %v, want that it is denied", err)
	}
	if _, err := pool.Exec(t.Context(), "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA plexsphere TO "+role); err != nil {
		t.Fatal(err)
	}
	if err := as(); err != nil {
		t.Errorf("with leave: %v", err)
	}
	if changes, err := makePartitions(t.Context(), turnAt(s, noon)); err != nil || changes["partitions_made"] != 0 {
		t.Errorf("the owner had to make %v, %v, want none", changes, err)
	}
}

// Whom a policy names is marked so, also when it was enrolled before by a charge, and
// counts once however often policies load.
func TestEnrolKeepsFromTheSweep(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	charged, named := consumer("charged"), consumer("named")
	old := noon.AddDate(0, 0, -91)
	mustDecide(t, s, quotaRequest(charged, dayMonth(9, 9), 1, old))
	for range 2 {
		if err := s.Enrol(t.Context(), []policy.Consumer{charged, named}, old); err != nil {
			t.Fatal(err)
		}
		if n := count(t, pool, "SELECT consumers FROM plexsphere.consumer_domains WHERE domain = 'test'"); n != 2 {
			t.Errorf("the domain has %d consumers, want 2", n)
		}
	}
	if _, err := pool.Exec(t.Context(), "DELETE FROM plexsphere.quota_counters"); err != nil {
		t.Fatal(err)
	}
	changes, err := mustJob("consumer-sweep").Run(t.Context(), turnAt(s, noon))
	if err != nil || changes["consumers"] != 0 || len(listed(t, s)) != 2 {
		t.Errorf("the sweep removed %v, %v, want none", changes, err)
	}
}

package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

const day = 24 * time.Hour

// Retention says how long what has ended is kept, from its end. The zero value is complete.
type Retention struct {
	// DayCounters is for the counters of days and weeks, MonthCounters for those of
	// months and years. Shorter windows are kept for an hour, in which late refunds
	// may still come. Default to 90 days and 2 years (731 days).
	DayCounters, MonthCounters time.Duration
	// HourlyHistory and DailyHistory are for the history, which goes by whole
	// months. Default to 90 days and 2 years (731 days).
	HourlyHistory, DailyHistory time.Duration
}

func (r Retention) withDefaults() Retention {
	r.DayCounters = cmp.Or(r.DayCounters, 90*day)
	r.MonthCounters = cmp.Or(r.MonthCounters, 731*day)
	r.HourlyHistory = cmp.Or(r.HourlyHistory, 90*day)
	r.DailyHistory = cmp.Or(r.DailyHistory, 731*day)
	return r
}

// minRetention is the shortest that a counter may be kept after its window: a replica
// whose clock is behind still counts in the window that the database takes for ended, and
// a refund comes late.
const minRetention = time.Hour

func (r Retention) validate() error {
	for name, d := range map[string]time.Duration{
		"day counters": r.DayCounters, "month counters": r.MonthCounters,
		"hourly history": r.HourlyHistory, "daily history": r.DailyHistory,
	} {
		if d < minRetention {
			return fmt.Errorf("the retention of %s is %v, which is less than %v", name, d, minRetention)
		}
	}
	return nil
}

// counters returns how long the counter of a window is kept after the window.
func (r Retention) counters(u quota.Unit) time.Duration {
	switch u {
	case quota.Second, quota.Minute, quota.Hour:
		return minRetention
	case quota.Day, quota.Week:
		return r.DayCounters
	case quota.Month, quota.Year:
		return r.MonthCounters
	}
	return r.MonthCounters // the longest, for what is not known
}

// tidyQueries are the statements of the jobs and of the history, for a store's schema.
type tidyQueries struct {
	deleteEnded, makePartitions, dropPartition, deleteHourly, deleteDaily, deleteWriters string
	retire, restore, record, historyHourly, historyDaily                                 string
}

func newTidyQueries(schema string) tidyQueries {
	return tidyQueries{
		deleteEnded:    inSchema(deleteEndedSQL, schema),
		makePartitions: inSchema(makePartitionsSQL, schema),
		dropPartition:  inSchema(dropPartitionSQL, schema),
		deleteHourly:   inSchema(deleteHourlySQL, schema),
		deleteDaily:    inSchema(deleteDailySQL, schema),
		deleteWriters:  inSchema(deleteWritersSQL, schema),
		retire:         inSchema(retireSQL, schema),
		restore:        inSchema(restoreSQL, schema),
		record:         inSchema(recordSQL, schema),
		historyHourly:  inSchema(historySQL, schema),
		historyDaily:   inSchema(strings.Replace(historySQL, "history_hourly", "history_daily", 1), schema),
	}
}

// clockSpread is how far two clocks may be apart, each up to 5 minutes off true time to
// either side: that of the replica that wrote a row, and the database's.
const clockSpread = 10 * time.Minute

// idleRetention is how long a rate budget's bucket is left alone before it is swept. It is
// full after [policy.MaxRefill] of true time; if whoever took from it last was 5 minutes
// behind, and the database is 5 minutes ahead, it looks 10 minutes older than it is.
const idleRetention = policy.MaxRefill*time.Second + clockSpread

// monthsAhead is for how many months, from the present one, there are partitions: should
// the job fail, there is a month or more to see it.
const monthsAhead = 3

// Jobs returns what keeps a database of Weir tidy. None of them makes an answer of the
// store wrong when it doesn't run: it costs rows.
func Jobs(retention Retention) ([]Job, error) {
	retention = retention.withDefaults()
	if err := retention.validate(); err != nil {
		return nil, err
	}
	return []Job{
		{Name: "history-partitions", Period: 6 * time.Hour, Run: makePartitions},
		{Name: "rate-budget-sweep", Period: time.Hour, Run: func(ctx context.Context, t Turn) (Changes, error) {
			n, err := t.Store.DeleteIdle(ctx, t.Now.Add(-idleRetention))
			return Changes{"rate_budgets": n}, err
		}},
		{Name: "limiter-sweep", Period: time.Hour, Run: func(ctx context.Context, t Turn) (Changes, error) {
			n, err := t.Store.DeleteExpired(ctx, t.Now.Add(-clockSpread))
			return Changes{"limiter_buckets": n}, err
		}},
		{Name: "quota-counter-sweep", Period: 10 * time.Minute, Run: func(ctx context.Context, t Turn) (Changes, error) {
			var deleted int64
			var errs []error
			for u := quota.Second; u <= quota.Year; u++ {
				n, err := t.Store.DeleteEnded(ctx, u, t.Now.Add(-retention.counters(u)))
				deleted += n
				errs = append(errs, err)
			}
			return Changes{"quota_counters": deleted}, errors.Join(errs...)
		}},
		{Name: "history-retention", Period: 6 * time.Hour, Run: func(ctx context.Context, t Turn) (Changes, error) {
			return dropHistory(ctx, t, retention)
		}},
		{Name: "consumer-sweep", Period: 6 * time.Hour, Run: func(ctx context.Context, t Turn) (Changes, error) {
			return sweepConsumers(ctx, t, retention)
		}},
	}, nil
}

// deleteEndedSQL deletes a batch of the counters of a unit's windows that began before an
// instant. The expressions are those of the index quota_counters_ended. What they hold
// never changes, so a row that was locked needs no second look; one that a refund holds is
// left for the next run.
const deleteEndedSQL = `
WITH ended AS MATERIALIZED (
    SELECT ctid
    FROM plexsphere.quota_counters
    WHERE (unit || '') = $3 AND (window_start AT TIME ZONE 'UTC') < $1::timestamptz AT TIME ZONE 'UTC'
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM plexsphere.quota_counters
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM ended))
    RETURNING 1
)
SELECT (SELECT count(*) FROM ended), (SELECT count(*) FROM gone)`

// DeleteEnded deletes the counters of a unit's windows that ended at an instant or before,
// and returns how many. The instant must lie so far back that for every replica's clock
// those windows have ended, and that no refund into them will come. It deletes in
// batches, as [Store.DeleteIdle] does.
func (s *Store) DeleteEnded(ctx context.Context, unit quota.Unit, by time.Time) (int64, error) {
	if err := checkNow(by); err != nil {
		return 0, fmt.Errorf("deleting ended windows: %w", err)
	}
	if !unit.Valid() {
		return 0, errors.New("deleting ended windows: unknown unit")
	}
	// The window that holds the instant ends after it; all before have ended.
	start := time.Unix(unit.Window(by.Unix()).Start, 0)
	n, err := s.deleteBatches(ctx, s.tidy.deleteEnded, start, unit.String())
	if err != nil {
		return n, fmt.Errorf("deleting ended windows of a %s: %w", unit, err)
	}
	return n, nil
}

func makePartitions(ctx context.Context, t Turn) (Changes, error) {
	var made int64
	if err := t.Store.db.QueryRow(ctx, t.Store.tidy.makePartitions, t.Now, monthsAhead).Scan(&made); err != nil {
		return nil, fmt.Errorf("making partitions: %w", err)
	}
	return Changes{"partitions_made": made}, nil
}

// writerRetention is how long a writer of history is remembered. One that is silent for
// longer has no flush left to send again.
const writerRetention = 30 * day

func dropHistory(ctx context.Context, t Turn, r Retention) (Changes, error) {
	changes := Changes{"partitions_dropped": 0, "history_hourly": 0, "history_daily": 0, "history_writers": 0}
	for _, table := range []struct {
		name string
		keep time.Duration
		sql  string
	}{
		{"history_hourly", r.HourlyHistory, t.Store.tidy.deleteHourly},
		{"history_daily", r.DailyHistory, t.Store.tidy.deleteDaily},
	} {
		before := t.Now.Add(-table.keep)
		for {
			var dropped int64
			if err := t.Store.db.QueryRow(ctx, t.Store.tidy.dropPartition, table.name, before).Scan(&dropped); err != nil {
				return changes, fmt.Errorf("dropping a partition of %s: %w", table.name, err)
			}
			if dropped == 0 {
				break
			}
			changes["partitions_dropped"] += dropped
		}
		// What came with a date for which there was never a partition.
		tag, err := t.Store.db.Exec(ctx, table.sql, before)
		if err != nil {
			return changes, fmt.Errorf("deleting from the default partition of %s: %w", table.name, err)
		}
		changes[table.name] += tag.RowsAffected()
	}
	tag, err := t.Store.db.Exec(ctx, t.Store.tidy.deleteWriters, t.Now.Add(-writerRetention))
	if err != nil {
		return changes, fmt.Errorf("deleting writers of history: %w", err)
	}
	changes["history_writers"] += tag.RowsAffected()
	return changes, nil
}

const (
	makePartitionsSQL = `SELECT plexsphere.make_history_partitions($1, $2)`
	dropPartitionSQL  = `SELECT plexsphere.drop_history_partition($1, $2)`
	deleteHourlySQL   = `DELETE FROM plexsphere.history_hourly_default WHERE window_start < $1`
	deleteDailySQL    = `DELETE FROM plexsphere.history_daily_default WHERE window_start < $1`
	deleteWritersSQL  = `DELETE FROM plexsphere.history_writers WHERE flushed_at < $1`
)

// consumerBatch bounds how many consumers one statement looks at: a new consumer's first
// charge may have to wait for it. The statements hold it as a number, since a plan that
// doesn't know it reckons with a tenth of the table.
const consumerBatch = 1000

// restoreAfter is how long a retired consumer is kept aside: longer than replicas remember
// whom they know, and than any decision lasts.
const restoreAfter = 2*keepTime + 5*time.Minute

// retireSQL sets unused consumers aside: of a page in order of ids, those that were
// enrolled before $1, are named by no policy and have neither a counter nor history. Rows are
// locked consumers first and domains after, each in their order, as by a decision.
const retireSQL = `
WITH page AS MATERIALIZED (
    SELECT id FROM plexsphere.consumers WHERE id > $2 ORDER BY id LIMIT 1000
), unused AS MATERIALIZED (
    SELECT c.id
    FROM plexsphere.consumers AS c
    JOIN page ON page.id = c.id
    WHERE c.enrolled_at < $1 AND NOT c.named
        AND NOT EXISTS (SELECT FROM plexsphere.quota_counters AS q WHERE q.counter = c.id)
        AND NOT EXISTS (SELECT FROM plexsphere.history_hourly AS h WHERE h.consumer = c.id)
        AND NOT EXISTS (SELECT FROM plexsphere.history_daily AS h WHERE h.consumer = c.id)
    ORDER BY c.id
    FOR UPDATE OF c SKIP LOCKED
), gone AS (
    DELETE FROM plexsphere.consumers AS c
    USING unused
    WHERE c.id = unused.id
    RETURNING c.id, c.domain, c.entries, c.enrolled_at
), aside AS (
    INSERT INTO plexsphere.retired_consumers (id, domain, entries, enrolled_at, retired_at)
    SELECT id, domain, entries, enrolled_at, clock_timestamp() FROM gone
    ON CONFLICT (id) DO UPDATE SET retired_at = excluded.retired_at
), fewer AS MATERIALIZED (
    SELECT d.domain, g.n
    FROM plexsphere.consumer_domains AS d
    JOIN (SELECT domain, count(*) AS n FROM gone GROUP BY domain) AS g ON g.domain = d.domain
    ORDER BY d.domain
    FOR UPDATE OF d
), counted AS (
    UPDATE plexsphere.consumer_domains AS d
    SET consumers = greatest(0, d.consumers - fewer.n)
    FROM fewer
    WHERE d.domain = fewer.domain
)
SELECT (SELECT id FROM page ORDER BY id DESC LIMIT 1), (SELECT count(*) FROM page), (SELECT count(*) FROM gone)`

// restoreSQL ends the waiting of those that were retired before $1: who has a counter by
// now is a consumer again, beyond any cap, and the others are forgotten.
const restoreSQL = `
WITH due AS MATERIALIZED (
    SELECT id FROM plexsphere.retired_consumers WHERE retired_at < $1 ORDER BY id LIMIT 1000 FOR UPDATE SKIP LOCKED
), waited AS (
    DELETE FROM plexsphere.retired_consumers AS r
    USING due
    WHERE r.id = due.id
    RETURNING r.id, r.domain, r.entries, r.enrolled_at
), back AS (
    INSERT INTO plexsphere.consumers (id, domain, entries, enrolled_at)
    SELECT w.id, w.domain, w.entries, w.enrolled_at
    FROM waited AS w
    WHERE EXISTS (SELECT FROM plexsphere.quota_counters AS q WHERE q.counter = w.id)
    ORDER BY w.id
    ON CONFLICT DO NOTHING
    RETURNING domain
), counted AS (
    INSERT INTO plexsphere.consumer_domains AS d (domain, consumers)
    SELECT domain, count(*) FROM back GROUP BY domain ORDER BY domain
    ON CONFLICT (domain) DO UPDATE SET consumers = d.consumers + excluded.consumers
)
SELECT (SELECT count(*) FROM due), (SELECT count(*) FROM back)`

func sweepConsumers(ctx context.Context, t Turn, r Retention) (Changes, error) {
	changes := Changes{"consumers": 0, "consumers_restored": 0}
	for {
		var due, back int64
		if err := t.Store.db.QueryRow(ctx, t.Store.tidy.restore, t.Now.Add(-restoreAfter)).Scan(&due, &back); err != nil {
			return changes, fmt.Errorf("restoring consumers: %w", err)
		}
		changes["consumers_restored"] += back
		if due < consumerBatch {
			break
		}
	}
	last := []byte{}
	for {
		var found, gone int64
		var end []byte
		err := t.Store.db.QueryRow(ctx, t.Store.tidy.retire, t.Now.Add(-r.DayCounters), last).Scan(&end, &found, &gone)
		if err != nil {
			return changes, fmt.Errorf("retiring consumers: %w", err)
		}
		changes["consumers"] += gone
		if found < consumerBatch {
			return changes, nil
		}
		last = end
	}
}

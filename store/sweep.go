package store

import (
	"context"
	"fmt"
	"time"
)

// sweepBatch bounds how many rows one statement deletes, and so how long it holds
// their locks. Each batch looks through the index anew, so it is not small either.
const sweepBatch = 10_000

// deleteIdleSQL deletes a batch of idle buckets. A row that someone is taking from is
// skipped and not waited for; and as a row may have been debited between the
// statement's snapshot and its lock, its age is checked again by the delete, on the
// row's latest version.
const deleteIdleSQL = `
WITH idle AS MATERIALIZED (
    SELECT scope, bucket_key
    FROM plexsphere.rate_budgets
    WHERE refilled_at < $1::timestamptz
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM plexsphere.rate_budgets AS b
    USING idle
    WHERE b.scope = idle.scope AND b.bucket_key = idle.bucket_key
        AND b.refilled_at < $1::timestamptz
    RETURNING 1
)
SELECT (SELECT count(*) FROM idle), (SELECT count(*) FROM gone)`

// DeleteIdle deletes the buckets that were last taken from before an instant, and
// returns how many. The instant must lie at least [policy.MaxRefill] seconds back for
// every replica's clock: a bucket idle for that long is full, which is what its next
// take mints. It deletes in batches of 10,000, each committed by itself unless the
// store is on a transaction, and returns what it has deleted along with an error. A
// bucket that is being taken from meanwhile stays.
func (s *Store) DeleteIdle(ctx context.Context, before time.Time) (int64, error) {
	if err := checkNow(before); err != nil {
		return 0, fmt.Errorf("deleting idle rate budgets: %w", err)
	}
	var deleted int64
	for {
		var found, gone int64
		if err := s.db.QueryRow(ctx, s.queries.deleteIdle, before, sweepBatch).Scan(&found, &gone); err != nil {
			return deleted, fmt.Errorf("deleting idle rate budgets: %w", err)
		}
		deleted += gone
		if found < sweepBatch {
			return deleted, nil
		}
	}
}

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
// row's latest version. The rows are found again by where they lie, which the lock keeps:
// by their keys, the plan would be to read all idle rows anew for each batch.
const deleteIdleSQL = `
WITH idle AS MATERIALIZED (
    SELECT ctid
    FROM plexsphere.rate_budgets
    WHERE refilled_at < $1::timestamptz
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM plexsphere.rate_budgets
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM idle)) AND refilled_at < $1::timestamptz
    RETURNING 1
)
SELECT (SELECT count(*) FROM idle), (SELECT count(*) FROM gone)`

// deleteExpiredSQL does the same for limiters' buckets that have expired.
const deleteExpiredSQL = `
WITH expired AS MATERIALIZED (
    SELECT ctid
    FROM plexsphere.limiter_buckets
    WHERE expires_at < $1::timestamptz
    LIMIT $2
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM plexsphere.limiter_buckets
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM expired)) AND expires_at < $1::timestamptz
    RETURNING 1
)
SELECT (SELECT count(*) FROM expired), (SELECT count(*) FROM gone)`

// DeleteIdle deletes the buckets that were last taken from before an instant, and
// returns how many. The instant must lie at least [policy.MaxRefill] seconds back for
// every replica's clock: a bucket idle for that long is full, which is what its next
// take mints. It deletes in batches of 10,000, each committed by itself unless the
// store is on a transaction, and returns what it has deleted along with an error. A
// bucket that is being taken from meanwhile stays.
func (s *Store) DeleteIdle(ctx context.Context, before time.Time) (int64, error) {
	deleted, err := s.deleteBatches(ctx, s.queries.deleteIdle, before)
	if err != nil {
		return deleted, fmt.Errorf("deleting idle rate budgets: %w", err)
	}
	return deleted, nil
}

// DeleteExpired deletes the limiters' buckets that had expired before an instant, and
// returns how many: they are full by every policy that wrote them, which is what their
// next take mints. The instant must not lie ahead of any replica's clock; a few minutes
// back is a good choice. It deletes as [Store.DeleteIdle] does.
func (s *Store) DeleteExpired(ctx context.Context, before time.Time) (int64, error) {
	deleted, err := s.deleteBatches(ctx, s.queries.deleteExpired, before)
	if err != nil {
		return deleted, fmt.Errorf("deleting expired limiters' buckets: %w", err)
	}
	return deleted, nil
}

// deleteBatches runs a statement, which deletes a batch of what is older than an instant
// and returns how many rows it found and deleted, until it finds no full batch. More
// arguments follow the instant and the batch's size.
func (s *Store) deleteBatches(ctx context.Context, statement string, before time.Time, more ...any) (int64, error) {
	if err := checkNow(before); err != nil {
		return 0, err
	}
	args := append([]any{before, sweepBatch}, more...)
	var deleted int64
	for {
		var found, gone int64
		if err := s.db.QueryRow(ctx, statement, args...).Scan(&found, &gone); err != nil {
			return deleted, err
		}
		deleted += gone
		if found < sweepBatch {
			return deleted, nil
		}
	}
}

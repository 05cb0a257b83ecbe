-- The buckets of limiters: token buckets for subjects that a user names freely. A row
-- exists only while its bucket is not full, and expires when it would be.
--
-- Levels are whole numbers, so that arithmetic is exact: a token counts as many units
-- (token-microseconds) as the policy's period has microseconds, and as many units come
-- back each microsecond as the policy has permits.
--
-- A bucket remembers the policy that wrote it. Under another one it is refilled by the
-- old policy up to now, and then cut to the new capacity; and its expiry never moves
-- back. So the replicas of a roll-out, some on the old policy and some on the new,
-- cannot hand out full buckets in turn.

-- +goose Up
CREATE TABLE plexsphere.limiter_buckets (
    id          bytea       NOT NULL PRIMARY KEY,
    namespace   text        NOT NULL,
    subject     text        NOT NULL,
    level       bigint      NOT NULL,
    refilled_at timestamptz NOT NULL,
    permits     bigint      NOT NULL,
    period_us   bigint      NOT NULL,
    burst       bigint      NOT NULL,
    expires_at  timestamptz NOT NULL,
    CONSTRAINT limiter_buckets_id CHECK (octet_length(id) = 32),
    CONSTRAINT limiter_buckets_policy CHECK (permits > 0 AND period_us > 0 AND burst > 0
        AND burst <= 4611686018427387904 / period_us),
    CONSTRAINT limiter_buckets_level CHECK (level >= 0 AND level <= burst * period_us),
    CONSTRAINT limiter_buckets_refilled_at CHECK (isfinite(refilled_at))
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX limiter_buckets_expires_at ON plexsphere.limiter_buckets
    USING brin (expires_at) WITH (pages_per_range = 32, autosummarize = on);

COMMENT ON TABLE plexsphere.limiter_buckets IS
    'Limiters: what is left in each bucket that is not full. A missing row is a full bucket.';
COMMENT ON COLUMN plexsphere.limiter_buckets.id IS
    'SHA-256 of the namespace and the subject, or of the domain and the path that the descriptor matched in the policy.';
COMMENT ON COLUMN plexsphere.limiter_buckets.namespace IS
    'The limiter''s namespace, or the policy''s domain. For people: long texts are cut short, and bytes that are no printable text escaped as in Go. The id alone identifies.';
COMMENT ON COLUMN plexsphere.limiter_buckets.subject IS
    'Whose bucket it is, written like namespace.';
COMMENT ON COLUMN plexsphere.limiter_buckets.level IS
    'Token-microseconds left as of refilled_at: tokens times period_us.';
COMMENT ON COLUMN plexsphere.limiter_buckets.refilled_at IS
    'When level was last brought up to date: by the clock of the replica that took, and never earlier than before.';
COMMENT ON COLUMN plexsphere.limiter_buckets.permits IS
    'The policy that wrote the row: tokens that come back each period.';
COMMENT ON COLUMN plexsphere.limiter_buckets.period_us IS
    'The policy that wrote the row: its period in microseconds.';
COMMENT ON COLUMN plexsphere.limiter_buckets.burst IS
    'The policy that wrote the row: its capacity in tokens.';
COMMENT ON COLUMN plexsphere.limiter_buckets.expires_at IS
    'When the bucket will be full if nobody takes from it, by every policy that wrote it: the sweep deletes the row after that. ''infinity'' when that is more than 142 years ahead.';
COMMENT ON INDEX plexsphere.limiter_buckets_pkey IS
    'One row a bucket.';
COMMENT ON INDEX plexsphere.limiter_buckets_expires_at IS
    'For the sweep of full buckets.';

-- +goose Down
DROP TABLE plexsphere.limiter_buckets;

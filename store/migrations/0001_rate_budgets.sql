-- The buckets of the rate budgets: what is left of a Node's or a Domain's budget,
-- one row a bucket, shared by all replicas. The rate and the ceiling are not columns:
-- they travel with each take, so that a changed budget is in force at once. A row
-- carries no foreign key: it is a tally, its key a Node or a Domain by its scope, and
-- the sweep deletes it when nobody takes from it any more.
--
-- Every take updates its row in place, so updates must stay heap-only (HOT): no
-- B-tree may hold a column that a take changes. A BRIN index may, from Postgres 16
-- on, and serves the sweep; pages keep half their room for new row versions; and
-- autovacuum looks at the table by the number of dead rows, however few live ones
-- there are.

-- +goose Up
CREATE TABLE plexsphere.rate_budgets (
    scope       text             NOT NULL,
    bucket_key  uuid             NOT NULL,
    tokens      double precision NOT NULL,
    refilled_at timestamptz      NOT NULL,
    PRIMARY KEY (scope, bucket_key),
    CONSTRAINT rate_budgets_scope CHECK (scope IN (
        'secret_read_node', 'secret_read_domain', 'access_issuance_domain',
        'ingest_node', 'ingest_domain')),
    -- NaN sorts above all numbers, so it would pass as not negative.
    CONSTRAINT rate_budgets_tokens CHECK (tokens >= 0 AND tokens < 'Infinity'),
    CONSTRAINT rate_budgets_refilled_at CHECK (isfinite(refilled_at))
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX rate_budgets_refilled_at ON plexsphere.rate_budgets
    USING brin (refilled_at) WITH (pages_per_range = 32, autosummarize = on);

COMMENT ON TABLE plexsphere.rate_budgets IS
    'Rate budgets: what is left in each bucket. The rate and the ceiling travel with each take. A missing row is a full bucket.';
COMMENT ON COLUMN plexsphere.rate_budgets.scope IS
    'Which budget the bucket belongs to: one of a closed set.';
COMMENT ON COLUMN plexsphere.rate_budgets.bucket_key IS
    'The Node or the Domain, by scope, whose budget it is.';
COMMENT ON COLUMN plexsphere.rate_budgets.tokens IS
    'Units (reads, issuances or bytes, by scope) left as of refilled_at. Never negative.';
COMMENT ON COLUMN plexsphere.rate_budgets.refilled_at IS
    'When tokens was last brought up to date: by the clock of the replica that took, and never earlier than before. A refusal does not move it.';
COMMENT ON INDEX plexsphere.rate_budgets_pkey IS
    'One row a bucket.';
COMMENT ON INDEX plexsphere.rate_budgets_refilled_at IS
    'For the sweep of idle buckets.';

-- +goose Down
DROP TABLE plexsphere.rate_budgets;

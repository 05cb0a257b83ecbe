-- What is used of quotas and rate limits: one row for each counter and calendar window.
-- A row counts what was used and not what is left, so that a limit edited under use
-- is right at once. The window's start is part of the key: a new window begins with
-- no row, whatever became of the last one's.
--
-- The table is not partitioned: a decision would have to lock each partition, which costs
-- it more than the sweep of ended windows. There is no foreign key to consumers: a counter
-- is a tally, and the check would cost the first charge of each window a second lock.

-- +goose Up
CREATE TABLE plexsphere.consumers (
    id          bytea       NOT NULL PRIMARY KEY,
    domain      text        NOT NULL,
    entries     jsonb       NOT NULL,
    enrolled_at timestamptz NOT NULL,
    CONSTRAINT consumers_id CHECK (octet_length(id) = 32),
    CONSTRAINT consumers_entries CHECK (jsonb_typeof(entries) = 'array')
);

-- Consumers are listed by domain, in pages.
CREATE UNIQUE INDEX consumers_domain ON plexsphere.consumers (domain, id);

COMMENT ON TABLE plexsphere.consumers IS
    'The holders of quotas: those that a policy names, enrolled when it loads, and others, enrolled by their first charge.';
COMMENT ON COLUMN plexsphere.consumers.id IS
    'SHA-256 of the domain and of the path that the descriptor matched in the policy.';
COMMENT ON COLUMN plexsphere.consumers.domain IS
    'The policy''s domain, escaped like entries; empty for consumers of the Go library.';
COMMENT ON COLUMN plexsphere.consumers.entries IS
    'What the descriptor matched, for people: an array of {"key", "value"}, long texts cut short, bytes that are no printable text escaped as in Go. The id alone identifies.';
COMMENT ON COLUMN plexsphere.consumers.enrolled_at IS
    'When the consumer was first charged, or first named by a policy.';
COMMENT ON INDEX plexsphere.consumers_pkey IS
    'One row a consumer.';
COMMENT ON INDEX plexsphere.consumers_domain IS
    'For listing a domain''s consumers in pages.';

-- How many consumers a domain has, so that enrolling one need not count them.
CREATE TABLE plexsphere.consumer_domains (
    domain    text   NOT NULL PRIMARY KEY,
    consumers bigint NOT NULL
) WITH (fillfactor = 50);

COMMENT ON TABLE plexsphere.consumer_domains IS
    'How many consumers each domain has enrolled. A policy bounds it, so that whoever invents names cannot fill the database.';
COMMENT ON COLUMN plexsphere.consumer_domains.domain IS
    'consumers.domain.';
COMMENT ON COLUMN plexsphere.consumer_domains.consumers IS
    'The number of its rows in consumers.';
COMMENT ON INDEX plexsphere.consumer_domains_pkey IS
    'One row a domain.';

CREATE TABLE plexsphere.quota_counters (
    counter      bytea       NOT NULL,
    unit         text        NOT NULL,
    window_start timestamptz NOT NULL,
    used         bigint      NOT NULL,
    PRIMARY KEY (counter, unit, window_start),
    CONSTRAINT quota_counters_counter CHECK (octet_length(counter) = 32),
    CONSTRAINT quota_counters_unit CHECK (unit IN (
        'second', 'minute', 'hour', 'day', 'week', 'month', 'year')),
    CONSTRAINT quota_counters_window_start CHECK (isfinite(window_start)),
    CONSTRAINT quota_counters_used CHECK (used >= 0)
) WITH (
    fillfactor = 70,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);

-- For the sweep, by expressions that decisions don't use. An index on the columns
-- themselves would be chosen for decisions by a plan that was made while the table was
-- small, instead of the key's, and then read whole windows. Neither column ever changes, so
-- updates stay heap-only (HOT).
CREATE INDEX quota_counters_ended ON plexsphere.quota_counters ((unit || ''), (window_start AT TIME ZONE 'UTC'));

COMMENT ON TABLE plexsphere.quota_counters IS
    'What each counter has used in each calendar window (UTC). A missing row is a window of which nothing was used.';
COMMENT ON COLUMN plexsphere.quota_counters.counter IS
    'consumers.id, or the SHA-256 of another counter: that of a rate_limit''s path, or the one that a domain''s consumers share once there are as many as may be.';
COMMENT ON COLUMN plexsphere.quota_counters.unit IS
    'The window''s length.';
COMMENT ON COLUMN plexsphere.quota_counters.window_start IS
    'The first instant of the window.';
COMMENT ON COLUMN plexsphere.quota_counters.used IS
    'Units used in the window. May exceed a limit that was lowered under use.';
COMMENT ON INDEX plexsphere.quota_counters_pkey IS
    'One row a counter and window, found by counter.';
COMMENT ON INDEX plexsphere.quota_counters_ended IS
    'For the sweep of ended windows. Its columns are expressions, so that no decision uses it.';

-- +goose Down
DROP TABLE plexsphere.quota_counters;
DROP TABLE plexsphere.consumer_domains;
DROP TABLE plexsphere.consumers;

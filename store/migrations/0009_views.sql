-- What people look at: the tables with their hashes and token-microseconds resolved. A view
-- reads its tables with its owner's rights, so whoever may read the views need not be able
-- to read the tables. Reading locks no row, but a query that runs for long keeps Postgres
-- from reusing what decisions leave behind: see docs/budgets.md.

-- +goose Up
-- By the expressions of the index quota_counters_ended, so that it reads current windows
-- and no others.
CREATE VIEW plexsphere.current_usage AS
SELECT c.domain, c.entries, q.unit, q.window_start,
    (w.window_start + ('1 ' || w.unit)::interval) AT TIME ZONE 'UTC' AS window_end,
    q.used, c.id AS consumer
FROM (
    SELECT u.unit, date_trunc(u.unit, now() AT TIME ZONE 'UTC') AS window_start
    FROM (VALUES ('second'), ('minute'), ('hour'), ('day'), ('week'), ('month'), ('year')) AS u (unit)
) AS w
JOIN plexsphere.quota_counters AS q ON (q.unit || '') = w.unit AND (q.window_start AT TIME ZONE 'UTC') = w.window_start
JOIN plexsphere.consumers AS c ON c.id = q.counter;

COMMENT ON VIEW plexsphere.current_usage IS
    'What each consumer has used in the calendar windows (UTC) of now: a row a window of which something was used.';
COMMENT ON COLUMN plexsphere.current_usage.domain IS
    'The policy''s domain; empty for consumers of the Go library.';
COMMENT ON COLUMN plexsphere.current_usage.entries IS
    'What the consumer''s descriptor matched: an array of {"key", "value"}.';
COMMENT ON COLUMN plexsphere.current_usage.unit IS
    'The window''s length: second, minute, hour, day, week, month or year.';
COMMENT ON COLUMN plexsphere.current_usage.window_start IS
    'The first instant of the window.';
COMMENT ON COLUMN plexsphere.current_usage.window_end IS
    'The first instant after it, when the quota is whole again.';
COMMENT ON COLUMN plexsphere.current_usage.used IS
    'Units used in the window.';
COMMENT ON COLUMN plexsphere.current_usage.consumer IS
    'consumers.id.';

CREATE VIEW plexsphere.budget_levels AS
SELECT scope, bucket_key, tokens, refilled_at, now() - refilled_at AS idle
FROM plexsphere.rate_budgets;

COMMENT ON VIEW plexsphere.budget_levels IS
    'What is left in the buckets of rate budgets that were taken from lately. A bucket that is not here is full.';
COMMENT ON COLUMN plexsphere.budget_levels.scope IS
    'Which budget the bucket belongs to.';
COMMENT ON COLUMN plexsphere.budget_levels.bucket_key IS
    'The Node or the Domain, by scope, whose budget it is.';
COMMENT ON COLUMN plexsphere.budget_levels.tokens IS
    'Units left as of refilled_at. What came back since is not in it, as the rate is not stored.';
COMMENT ON COLUMN plexsphere.budget_levels.refilled_at IS
    'When a take was last covered.';
COMMENT ON COLUMN plexsphere.budget_levels.idle IS
    'How long ago that was, by the database''s clock.';

CREATE VIEW plexsphere.limiter_levels AS
SELECT namespace, subject,
    floor(least(burst::numeric,
        (level + greatest(0, extract(epoch FROM now() - refilled_at) * 1000000) * permits) / period_us))::bigint AS tokens,
    burst, permits, period_us * interval '1 microsecond' AS period, refilled_at, expires_at AS full_at, id
FROM plexsphere.limiter_buckets;

COMMENT ON VIEW plexsphere.limiter_levels IS
    'What is left now in the buckets of limiters, by the policy that wrote each. A bucket that is not here is full.';
COMMENT ON COLUMN plexsphere.limiter_levels.namespace IS
    'The limiter''s namespace, or the policy''s domain.';
COMMENT ON COLUMN plexsphere.limiter_levels.subject IS
    'Whose bucket it is.';
COMMENT ON COLUMN plexsphere.limiter_levels.tokens IS
    'Whole tokens left now.';
COMMENT ON COLUMN plexsphere.limiter_levels.burst IS
    'The most that the bucket holds, in tokens.';
COMMENT ON COLUMN plexsphere.limiter_levels.permits IS
    'Tokens that come back in each period.';
COMMENT ON COLUMN plexsphere.limiter_levels.period IS
    'The policy''s period.';
COMMENT ON COLUMN plexsphere.limiter_levels.refilled_at IS
    'When a take was last covered.';
COMMENT ON COLUMN plexsphere.limiter_levels.full_at IS
    'When the bucket will be full, if nobody takes from it, by every policy that wrote it.';
COMMENT ON COLUMN plexsphere.limiter_levels.id IS
    'limiter_buckets.id.';

CREATE VIEW plexsphere.usage_by_hour AS
SELECT h.domain, c.entries, h.window_start, h.sent, h.refused, h.units, h.consumer
FROM plexsphere.history_hourly AS h
LEFT JOIN plexsphere.consumers AS c ON c.id = h.consumer;

COMMENT ON VIEW plexsphere.usage_by_hour IS
    'What each consumer sent in each hour (UTC), some seconds late.';
COMMENT ON COLUMN plexsphere.usage_by_hour.domain IS
    'The policy''s domain; empty for consumers of the Go library.';
COMMENT ON COLUMN plexsphere.usage_by_hour.entries IS
    'What the consumer''s descriptor matched; null for all those together that were not enrolled.';
COMMENT ON COLUMN plexsphere.usage_by_hour.window_start IS
    'The first instant of the hour.';
COMMENT ON COLUMN plexsphere.usage_by_hour.sent IS
    'Requests, refused ones included.';
COMMENT ON COLUMN plexsphere.usage_by_hour.refused IS
    'Requests that were refused, by whichever limit.';
COMMENT ON COLUMN plexsphere.usage_by_hour.units IS
    'Units that were admitted, less those refunded.';
COMMENT ON COLUMN plexsphere.usage_by_hour.consumer IS
    'consumers.id.';

CREATE VIEW plexsphere.usage_by_day AS
SELECT h.domain, c.entries, h.window_start, h.sent, h.refused, h.units, h.consumer
FROM plexsphere.history_daily AS h
LEFT JOIN plexsphere.consumers AS c ON c.id = h.consumer;

COMMENT ON VIEW plexsphere.usage_by_day IS
    'What each consumer sent on each day (UTC), some seconds late.';
COMMENT ON COLUMN plexsphere.usage_by_day.domain IS
    'The policy''s domain; empty for consumers of the Go library.';
COMMENT ON COLUMN plexsphere.usage_by_day.entries IS
    'What the consumer''s descriptor matched; null for all those together that were not enrolled.';
COMMENT ON COLUMN plexsphere.usage_by_day.window_start IS
    'The first instant of the day.';
COMMENT ON COLUMN plexsphere.usage_by_day.sent IS
    'Requests, refused ones included.';
COMMENT ON COLUMN plexsphere.usage_by_day.refused IS
    'Requests that were refused, by whichever limit.';
COMMENT ON COLUMN plexsphere.usage_by_day.units IS
    'Units that were admitted, less those refunded.';
COMMENT ON COLUMN plexsphere.usage_by_day.consumer IS
    'consumers.id.';

CREATE VIEW plexsphere.sweep_status AS
SELECT name,
    CASE
        WHEN finished_at IS NULL AND due_at > now() THEN 'running'
        WHEN finished_at IS NULL THEN 'abandoned'
        WHEN error IS NOT NULL THEN 'failed'
        ELSE 'succeeded'
    END AS state,
    started_by, started_at, coalesce(finished_at, now()) - started_at AS took, changed, error, succeeded_at, due_at
FROM plexsphere.sweep_jobs;

COMMENT ON VIEW plexsphere.sweep_status IS
    'The jobs that keep the database tidy: how the last run of each went, and when the next is due.';
COMMENT ON COLUMN plexsphere.sweep_status.name IS
    'The job.';
COMMENT ON COLUMN plexsphere.sweep_status.state IS
    'succeeded, failed, running, or abandoned: its replica died, and another one takes the job when it next looks.';
COMMENT ON COLUMN plexsphere.sweep_status.started_by IS
    'The replica of the last run.';
COMMENT ON COLUMN plexsphere.sweep_status.started_at IS
    'When the last run began.';
COMMENT ON COLUMN plexsphere.sweep_status.took IS
    'How long it took, or has taken so far.';
COMMENT ON COLUMN plexsphere.sweep_status.changed IS
    'What the last run that ended did: rows deleted by table, or partitions made or dropped.';
COMMENT ON COLUMN plexsphere.sweep_status.error IS
    'Why the last run that ended failed; null when it did not.';
COMMENT ON COLUMN plexsphere.sweep_status.succeeded_at IS
    'When a run last ended without an error.';
COMMENT ON COLUMN plexsphere.sweep_status.due_at IS
    'From when on a replica may take the job.';

-- +goose Down
DROP VIEW plexsphere.sweep_status;
DROP VIEW plexsphere.usage_by_day;
DROP VIEW plexsphere.usage_by_hour;
DROP VIEW plexsphere.limiter_levels;
DROP VIEW plexsphere.budget_levels;
DROP VIEW plexsphere.current_usage;

-- The history of consumers: how much each sent and how much of it was refused, by hour and
-- by day. It is gathered in memory and added here every few seconds, apart from decisions.
--
-- The tables are partitioned by month, and a month that is past its retention is dropped,
-- not deleted. Partitions are made ahead by a job; what finds none goes to the default
-- one, and moves when its month's is made.

-- +goose Up
CREATE TABLE plexsphere.history_hourly (
    consumer     bytea       NOT NULL,
    window_start timestamptz NOT NULL,
    domain       text        NOT NULL,
    sent         bigint      NOT NULL,
    refused      bigint      NOT NULL,
    units        bigint      NOT NULL,
    PRIMARY KEY (consumer, window_start),
    CONSTRAINT history_hourly_consumer CHECK (octet_length(consumer) = 32),
    CONSTRAINT history_hourly_window_start CHECK (isfinite(window_start)),
    CONSTRAINT history_hourly_counts CHECK (sent >= 0 AND refused >= 0)
) PARTITION BY RANGE (window_start);

COMMENT ON TABLE plexsphere.history_hourly IS
    'What each consumer sent in each hour (UTC), for metering. Written a few seconds late; a replica that dies loses its last seconds.';
COMMENT ON COLUMN plexsphere.history_hourly.consumer IS
    'consumers.id; for what no enrolled consumer sent, an id that stands for all others of the domain.';
COMMENT ON COLUMN plexsphere.history_hourly.window_start IS
    'The first instant of the hour.';
COMMENT ON COLUMN plexsphere.history_hourly.domain IS
    'The policy''s domain, as in consumers.domain. It stays when the consumer is gone.';
COMMENT ON COLUMN plexsphere.history_hourly.sent IS
    'Requests, refused ones included.';
COMMENT ON COLUMN plexsphere.history_hourly.refused IS
    'Requests that were refused, by whichever limit.';
COMMENT ON COLUMN plexsphere.history_hourly.units IS
    'Units that were admitted, less those refunded in the hour. May be negative where a refund came later than its charge.';
COMMENT ON INDEX plexsphere.history_hourly_pkey IS
    'One row a consumer and hour, found by consumer.';

CREATE TABLE plexsphere.history_hourly_default (LIKE plexsphere.history_hourly INCLUDING ALL);
ALTER TABLE plexsphere.history_hourly ATTACH PARTITION plexsphere.history_hourly_default DEFAULT;
COMMENT ON TABLE plexsphere.history_hourly_default IS
    'Hours of months that have no partition yet.';

CREATE TABLE plexsphere.history_daily (
    consumer     bytea       NOT NULL,
    window_start timestamptz NOT NULL,
    domain       text        NOT NULL,
    sent         bigint      NOT NULL,
    refused      bigint      NOT NULL,
    units        bigint      NOT NULL,
    PRIMARY KEY (consumer, window_start),
    CONSTRAINT history_daily_consumer CHECK (octet_length(consumer) = 32),
    CONSTRAINT history_daily_window_start CHECK (isfinite(window_start)),
    CONSTRAINT history_daily_counts CHECK (sent >= 0 AND refused >= 0)
) PARTITION BY RANGE (window_start);

COMMENT ON TABLE plexsphere.history_daily IS
    'What each consumer sent on each day (UTC): the sums of history_hourly, kept longer.';
COMMENT ON COLUMN plexsphere.history_daily.consumer IS
    'As in history_hourly.';
COMMENT ON COLUMN plexsphere.history_daily.window_start IS
    'The first instant of the day.';
COMMENT ON COLUMN plexsphere.history_daily.domain IS
    'As in history_hourly.';
COMMENT ON COLUMN plexsphere.history_daily.sent IS
    'Requests, refused ones included.';
COMMENT ON COLUMN plexsphere.history_daily.refused IS
    'Requests that were refused, by whichever limit.';
COMMENT ON COLUMN plexsphere.history_daily.units IS
    'Units that were admitted, less those refunded on the day. May be negative where a refund came later than its charge.';
COMMENT ON INDEX plexsphere.history_daily_pkey IS
    'One row a consumer and day, found by consumer.';

CREATE TABLE plexsphere.history_daily_default (LIKE plexsphere.history_daily INCLUDING ALL);
ALTER TABLE plexsphere.history_daily ATTACH PARTITION plexsphere.history_daily_default DEFAULT;
COMMENT ON TABLE plexsphere.history_daily_default IS
    'Days of months that have no partition yet.';

CREATE TABLE plexsphere.history_writers (
    writer     uuid        NOT NULL PRIMARY KEY,
    flush      bigint      NOT NULL,
    flushed_at timestamptz NOT NULL
) WITH (fillfactor = 50);

COMMENT ON TABLE plexsphere.history_writers IS
    'The last flush of each process that writes history, so that a flush whose answer was lost can be sent again and counts once.';
COMMENT ON COLUMN plexsphere.history_writers.writer IS
    'The process, by a number drawn when it starts.';
COMMENT ON COLUMN plexsphere.history_writers.flush IS
    'The number of its last flush.';
COMMENT ON COLUMN plexsphere.history_writers.flushed_at IS
    'When that was. Writers that have been silent for long are swept.';
COMMENT ON INDEX plexsphere.history_writers_pkey IS
    'One row a writer.';

-- Partitions belong to the owner of the schema, whoever serves: hence SECURITY DEFINER.

-- +goose StatementBegin
CREATE FUNCTION plexsphere.make_history_partitions(
    first_month timestamptz, -- any instant of it
    months      int
) RETURNS bigint -- how many tables were made
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    parent    text;
    partition text;
    starts    timestamp; -- UTC
    made      bigint := 0;
BEGIN
    FOREACH parent IN ARRAY ARRAY['history_hourly', 'history_daily'] LOOP
        FOR i IN 0 .. months - 1 LOOP
            starts := date_trunc('month', first_month AT TIME ZONE 'UTC') + make_interval(months => i);
            partition := parent || to_char(starts, '_YYYY_MM');
            CONTINUE WHEN to_regclass('plexsphere.' || partition) IS NOT NULL;
            -- What the default partition holds of the month is moved while nobody adds to it.
            EXECUTE format('LOCK TABLE plexsphere.%I IN ACCESS EXCLUSIVE MODE', parent || '_default');
            EXECUTE format('CREATE TABLE plexsphere.%I (LIKE plexsphere.%I INCLUDING ALL)', partition, parent);
            EXECUTE format(
                'WITH moved AS (DELETE FROM plexsphere.%I WHERE window_start >= %L AND window_start < %L RETURNING *)
                 INSERT INTO plexsphere.%I SELECT * FROM moved',
                parent || '_default', starts AT TIME ZONE 'UTC', (starts + interval '1 month') AT TIME ZONE 'UTC', partition);
            EXECUTE format('ALTER TABLE plexsphere.%I ATTACH PARTITION plexsphere.%I FOR VALUES FROM (%L) TO (%L)',
                parent, partition, starts AT TIME ZONE 'UTC', (starts + interval '1 month') AT TIME ZONE 'UTC');
            EXECUTE format('COMMENT ON TABLE plexsphere.%I IS %L', partition, 'The month ' || to_char(starts, 'YYYY-MM') || ' of ' || parent || '.');
            made := made + 1;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;
-- +goose StatementEnd

COMMENT ON FUNCTION plexsphere.make_history_partitions IS
    'Makes the partitions of so many months, from the one that holds an instant, where they are missing; returns how many.';

-- +goose StatementBegin
CREATE FUNCTION plexsphere.drop_history_partition(
    parent text,        -- history_hourly or history_daily
    before timestamptz
) RETURNS bigint -- 1, or 0 when there is none to drop
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '1s'
AS $$
DECLARE
    partition text;
BEGIN
    IF parent NOT IN ('history_hourly', 'history_daily') THEN
        RAISE 'no history: %', parent USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT c.relname INTO partition
    FROM pg_inherits AS i
    JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE i.inhparent = to_regclass('plexsphere.' || parent)
        AND c.relname ~ ('^' || parent || '_\d{4,}_\d{2}$')
        AND to_timestamp(right(c.relname, -length(parent) - 1), 'YYYY_MM')::timestamp + interval '1 month' <= before AT TIME ZONE 'UTC'
    ORDER BY c.relname
    LIMIT 1;
    IF partition IS NULL THEN
        RETURN 0;
    END IF;
    -- Waits for who reads the history, and not long: whoever comes after waits behind.
    EXECUTE format('DROP TABLE plexsphere.%I', partition);
    RETURN 1;
END
$$;
-- +goose StatementEnd

COMMENT ON FUNCTION plexsphere.drop_history_partition IS
    'Drops the oldest month of a history that ended before an instant, if there is one; returns how many were dropped.';

-- Who may run these is for the owner to say: they act as the owner.
REVOKE ALL ON FUNCTION plexsphere.make_history_partitions, plexsphere.drop_history_partition FROM PUBLIC;

-- +goose Down
DROP FUNCTION plexsphere.drop_history_partition;
DROP FUNCTION plexsphere.make_history_partitions;
DROP TABLE plexsphere.history_writers;
DROP TABLE plexsphere.history_daily;
DROP TABLE plexsphere.history_hourly;

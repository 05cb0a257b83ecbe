-- What keeps the database tidy: a row for each job, which the replicas take in turn. The
-- row is the claim and the memory of the last run; nobody is a standing leader.
--
-- A replica takes a job that is due by writing its name and the next run's number. Each
-- statement of the run is a transaction that first sets due_at a little ahead, and only
-- while the run is still the row's: so whoever was taken for dead can delete nothing
-- more, and nobody takes a job whose holder has a statement under way.

-- +goose Up
CREATE TABLE plexsphere.sweep_jobs (
    name         text        NOT NULL PRIMARY KEY,
    run          bigint      NOT NULL,
    started_at   timestamptz NOT NULL,
    started_by   text        NOT NULL,
    finished_at  timestamptz,
    due_at       timestamptz NOT NULL,
    succeeded_at timestamptz,
    changed      jsonb       NOT NULL DEFAULT '{}',
    error        text,
    CONSTRAINT sweep_jobs_changed CHECK (jsonb_typeof(changed) = 'object')
) WITH (fillfactor = 50);

COMMENT ON TABLE plexsphere.sweep_jobs IS
    'The jobs that keep the database tidy, and the last run of each. One replica at a time holds a job.';
COMMENT ON COLUMN plexsphere.sweep_jobs.name IS
    'The job''s name, as logs and metrics have it.';
COMMENT ON COLUMN plexsphere.sweep_jobs.run IS
    'The number of the last run. A replica whose run is not this one any more changes nothing.';
COMMENT ON COLUMN plexsphere.sweep_jobs.started_at IS
    'When the last run began.';
COMMENT ON COLUMN plexsphere.sweep_jobs.started_by IS
    'The replica of the last run.';
COMMENT ON COLUMN plexsphere.sweep_jobs.finished_at IS
    'When the last run ended; null while it runs, or when its replica died.';
COMMENT ON COLUMN plexsphere.sweep_jobs.due_at IS
    'From when on a replica may take the job: the next run''s time, or, in a run, when its holder is taken for dead.';
COMMENT ON COLUMN plexsphere.sweep_jobs.succeeded_at IS
    'When a run last ended without an error.';
COMMENT ON COLUMN plexsphere.sweep_jobs.changed IS
    'What the last run that ended did: rows deleted by table, or partitions made or dropped.';
COMMENT ON COLUMN plexsphere.sweep_jobs.error IS
    'Why the last run that ended failed; null when it did not.';
COMMENT ON INDEX plexsphere.sweep_jobs_pkey IS
    'One row a job.';

-- +goose Down
DROP TABLE plexsphere.sweep_jobs;

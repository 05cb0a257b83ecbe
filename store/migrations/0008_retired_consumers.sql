-- Consumers that nobody uses any more make room for others.
--
-- A consumer may be charged at the very moment at which it is found unused: the decision
-- has seen its row, and the sweep does not see the charge yet. So it is kept aside until
-- every decision of that time has ended, and comes back if it was charged.
--
-- A consumer that a policy names is never removed: without its row, its quota is inert.

-- +goose Up
ALTER TABLE plexsphere.consumers ADD COLUMN named boolean NOT NULL DEFAULT false;

COMMENT ON COLUMN plexsphere.consumers.named IS
    'Whether a policy named the consumer. Such a one is not swept, however long it is not used.';

CREATE TABLE plexsphere.retired_consumers (
    id          bytea       NOT NULL PRIMARY KEY,
    domain      text        NOT NULL,
    entries     jsonb       NOT NULL,
    enrolled_at timestamptz NOT NULL,
    retired_at  timestamptz NOT NULL
);

COMMENT ON TABLE plexsphere.retired_consumers IS
    'Consumers that the sweep has just removed. The next sweep restores those that were charged meanwhile, and forgets the others.';
COMMENT ON COLUMN plexsphere.retired_consumers.id IS
    'consumers.id.';
COMMENT ON COLUMN plexsphere.retired_consumers.domain IS
    'consumers.domain.';
COMMENT ON COLUMN plexsphere.retired_consumers.entries IS
    'consumers.entries.';
COMMENT ON COLUMN plexsphere.retired_consumers.enrolled_at IS
    'consumers.enrolled_at.';
COMMENT ON COLUMN plexsphere.retired_consumers.retired_at IS
    'When the sweep removed it, by the database''s clock.';
COMMENT ON INDEX plexsphere.retired_consumers_pkey IS
    'One row a consumer.';

-- +goose Down
DROP TABLE plexsphere.retired_consumers;
ALTER TABLE plexsphere.consumers DROP COLUMN named;

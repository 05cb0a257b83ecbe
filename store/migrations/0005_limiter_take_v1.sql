-- One take from one limiter's bucket, for the library: a call is one round trip, and
-- also fits into a batch or a transaction of the caller's. A change of its contract is a
-- new function beside it (limiter_take_v2).
--
-- First it looks without a lock: what is refused then was refused by the latest committed
-- state, so a denial neither waits for anybody nor writes. Whoever seems to be covered
-- locks the row and decides anew.
--
-- A take under another policy than the row's refills by the row's policy up to now,
-- converts the level to the new period and cuts it to the new capacity. This is written
-- even when the take is then refused: a bucket whose old capacity is below the cost would
-- otherwise never be acquired again.
--
-- A row must outlive its bucket's emptiness under every policy that is in force, since
-- whoever finds no row mints a full bucket. Under one policy the expiry is when the
-- bucket is full. A policy with a smaller burst is full sooner, though, and the sweep
-- would hand a full bucket to the replicas that still have the larger one. So when the
-- row's expiry is later than its own policy explains, another one put it there: it
-- stays, and each take moves it on by the time in which its cost comes back. With the
-- expiry so kept, no mixture of policies admits more than the largest burst at once and
-- the largest rate from then on.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION plexsphere.limiter_take_v1(
    bucket_id        bytea,
    bucket_namespace text,         -- for people
    bucket_subject   text,         -- for people
    cost             bigint,       -- tokens, from 1 to the burst
    policy_permits   bigint,
    policy_period_us bigint,
    policy_burst     bigint,
    instant          timestamptz,  -- the caller's clock

    OUT allowed    boolean,
    OUT balance    bigint,         -- token-microseconds left at balance_at, of the caller's policy
    OUT balance_at timestamptz
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    -- What an expiry lies ahead at most, in microseconds: doubles, by which intervals
    -- are multiplied, are exact up to there. It is 142 years; what is later is infinity.
    horizon constant bigint := 4503599627370496;
    whole   constant bigint := policy_burst * policy_period_us;
    price   constant bigint := cost * policy_period_us;
    micros  constant bigint := (extract(epoch FROM instant) * 1000000)::bigint;
    b       record;
    locked  boolean := false;
    same    boolean;  -- whether the row is of the caller's policy
    at_us   bigint;   -- the row's last refill
    room    bigint;   -- what its bucket lacks, by its own policy
    full_us bigint;   -- when it would be full, by the caller's policy
    ends_us bigint;   -- when the row expires; NULL for infinity
BEGIN
    LOOP
        IF locked THEN
            SELECT * INTO b FROM plexsphere.limiter_buckets WHERE id = bucket_id FOR UPDATE;
        ELSE
            SELECT * INTO b FROM plexsphere.limiter_buckets WHERE id = bucket_id;
        END IF;

        IF NOT FOUND THEN
            ends_us := (price + (policy_permits - 1)) / policy_permits;
            INSERT INTO plexsphere.limiter_buckets
                (id, namespace, subject, level, refilled_at, permits, period_us, burst, expires_at)
            VALUES (bucket_id, bucket_namespace, bucket_subject, whole - price, instant,
                policy_permits, policy_period_us, policy_burst,
                CASE WHEN ends_us < horizon THEN instant + ends_us * interval '1 microsecond' ELSE 'infinity' END)
            ON CONFLICT DO NOTHING;
            IF FOUND THEN
                allowed := true;
                balance := whole - price;
                balance_at := instant;
                RETURN;
            END IF;
            -- Somebody else minted it meanwhile: take from theirs.
            locked := true;
            CONTINUE;
        END IF;

        -- The arithmetic of policy.LimiterPolicy.Level, written so that nothing
        -- overflows.
        at_us := (extract(epoch FROM b.refilled_at) * 1000000)::bigint;
        room := b.burst * b.period_us - b.level;
        IF micros <= at_us THEN
            balance := b.level;
        ELSIF micros - at_us > room / b.permits THEN
            balance := b.burst * b.period_us;
        ELSE
            balance := b.level + (micros - at_us) * b.permits;
        END IF;
        same := b.permits = policy_permits AND b.period_us = policy_period_us AND b.burst = policy_burst;
        IF NOT same THEN
            IF b.period_us <> policy_period_us THEN
                -- That of policy.LimiterPolicy.Convert.
                balance := least(whole, div(balance::numeric * policy_period_us, b.period_us))::bigint;
            ELSE
                balance := least(whole, balance);
            END IF;
        END IF;

        allowed := balance >= price;
        IF NOT allowed AND same THEN
            balance := b.level;
            balance_at := b.refilled_at;
            RETURN;
        END IF;
        IF NOT locked THEN
            locked := true;
            CONTINUE;
        END IF;

        balance_at := greatest(b.refilled_at, instant);
        at_us := greatest(at_us, micros);
        full_us := at_us + ((whole - balance) + (policy_permits - 1)) / policy_permits;
        IF allowed THEN
            balance := balance - price;
        END IF;
        IF NOT isfinite(b.expires_at) THEN
            ends_us := NULL;
        ELSE
            ends_us := (extract(epoch FROM b.expires_at) * 1000000)::bigint;
            IF ends_us <= full_us THEN
                ends_us := at_us + ((whole - balance) + (policy_permits - 1)) / policy_permits;
            ELSIF allowed THEN
                ends_us := ends_us + (price + (policy_permits - 1)) / policy_permits;
            END IF;
        END IF;

        UPDATE plexsphere.limiter_buckets
        SET level = balance, refilled_at = balance_at,
            permits = policy_permits, period_us = policy_period_us, burst = policy_burst,
            expires_at = CASE WHEN ends_us - at_us < horizon
                THEN balance_at + (ends_us - at_us) * interval '1 microsecond' ELSE 'infinity' END
        WHERE id = bucket_id;
        RETURN;
    END LOOP;
END
$$;
-- +goose StatementEnd

COMMENT ON FUNCTION plexsphere.limiter_take_v1 IS
    'Takes tokens from one limiter''s bucket, or says what it holds: a denial writes nothing, unless the row is of another policy, whose bucket then becomes one of this.';

-- +goose Down
DROP FUNCTION plexsphere.limiter_take_v1;

-- The decision of a batch of requests in one call: the only write path of the
-- service. A change of its contract is a new function beside it (decide_v2), so that
-- the binaries before and after a roll-out run on one schema.
--
-- Rows are locked in the order of the arguments, which callers sort by key, buckets
-- before windows: so calls cannot deadlock. What is decided is decided in memory, in
-- arrival order, as if each request had come alone. Then missing rows are inserted
-- and after that existing ones updated, never the other way round: an insert may have
-- to wait for whoever is updating the row that it collides with, so whoever holds
-- updated rows must not insert any more.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION plexsphere.decide_v1(
    -- The buckets that the batch names, each once. Those that may be spent from come
    -- first, sorted by key, and are bucket_writable many; the rest are only read.
    bucket_scopes    text[],
    bucket_keys      uuid[],
    bucket_writable  int,
    -- The quota windows, in the same manner.
    window_consumers bytea[],
    window_units     text[],
    window_starts    timestamptz[],
    window_writable  int,
    -- The consumers of the writable windows, sorted by id, and when each is seen.
    consumer_ids     bytea[],
    consumer_domains text[],
    consumer_entries text[],
    consumer_seen    timestamptz[],
    -- The requests, in arrival order: each one's instant, and how many of the
    -- following debits and quotas are its.
    request_nows     timestamptz[],
    request_debits   int[],
    request_quotas   int[],
    -- The debits from buckets.
    debit_buckets    int[],
    debit_costs      float8[],
    debit_rates      float8[],
    debit_bursts     float8[],
    -- The quotas: what each costs and how many of the following limits are its. A
    -- quota that is not chargeable (cost 0, or above a whole limit) is only read.
    quota_costs      bigint[],
    quota_limits     int[],
    quota_chargeable boolean[],
    -- The limits of quotas, shortest window first.
    limit_windows    int[],
    limit_units      bigint[],

    -- Answers, by request, by debit, by quota and by limit.
    OUT allowed     boolean[],
    OUT covered     boolean[],
    OUT tokens_left float8[],
    OUT tokens_at   timestamptz[],
    OUT denied      int[],       -- index from 0 of the first limit that denies, or -1
    OUT units_used  bigint[]
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    buckets constant int := cardinality(bucket_scopes);
    windows constant int := cardinality(window_units);

    -- Working state and what the rows held, by bucket and by window. NULL: no row.
    t  float8[];
    a  timestamptz[];
    t0 float8[];
    a0 timestamptz[];
    u  bigint[];
    u0 bigint[];

    -- A bucket before each debit, to undo it.
    was_t float8[];
    was_a timestamptz[];

    d int := 0;  -- debits before the request
    q int := 0;  -- quotas before the request
    l int := 0;  -- limits before the request
    ql int;      -- limits before the quota
    i int;
    rec record;
    n bigint;
    instant timestamptz;
    level   float8;
    ok      boolean;
    denier  int;        -- the first quota that denies, unless a bucket refused
    denier_l int;
    minted  int;
    changed int;
    holders bytea[];    -- consumers of new windows
BEGIN
    IF buckets > 0 THEN
        t := array_fill(NULL::float8, ARRAY[buckets]);
        a := array_fill(NULL::timestamptz, ARRAY[buckets]);
        IF bucket_writable > 0 THEN
            FOR rec IN
                SELECT k.i, b.tokens, b.refilled_at
                FROM unnest(bucket_scopes, bucket_keys) WITH ORDINALITY AS k (scope, bucket_key, i)
                JOIN plexsphere.rate_budgets AS b ON b.scope = k.scope AND b.bucket_key = k.bucket_key
                WHERE k.i <= bucket_writable
                ORDER BY k.i
                FOR UPDATE OF b
            LOOP
                t[rec.i] := rec.tokens;
                a[rec.i] := rec.refilled_at;
            END LOOP;
        END IF;
    END IF;
    IF windows > 0 THEN
        u := array_fill(NULL::bigint, ARRAY[windows]);
        IF window_writable > 0 THEN
            FOR rec IN
                SELECT k.i, c.used
                FROM unnest(window_consumers, window_units, window_starts) WITH ORDINALITY AS k (counter, unit, window_start, i)
                JOIN plexsphere.quota_counters AS c
                    ON c.counter = k.counter AND c.unit = k.unit AND c.window_start = k.window_start
                WHERE k.i <= window_writable
                ORDER BY k.i
                FOR UPDATE OF c
            LOOP
                u[rec.i] := rec.used;
            END LOOP;
        END IF;
    END IF;
    -- What is only read is read last, when nobody is waited for any more.
    IF bucket_writable < buckets THEN
        FOR rec IN
            SELECT k.i, b.tokens, b.refilled_at
            FROM unnest(bucket_scopes, bucket_keys) WITH ORDINALITY AS k (scope, bucket_key, i)
            JOIN plexsphere.rate_budgets AS b ON b.scope = k.scope AND b.bucket_key = k.bucket_key
            WHERE k.i > bucket_writable
        LOOP
            t[rec.i] := rec.tokens;
            a[rec.i] := rec.refilled_at;
        END LOOP;
    END IF;
    IF window_writable < windows THEN
        FOR rec IN
            SELECT k.i, c.used
            FROM unnest(window_consumers, window_units, window_starts) WITH ORDINALITY AS k (counter, unit, window_start, i)
            JOIN plexsphere.quota_counters AS c
                ON c.counter = k.counter AND c.unit = k.unit AND c.window_start = k.window_start
            WHERE k.i > window_writable
        LOOP
            u[rec.i] := rec.used;
        END LOOP;
    END IF;
    t0 := t;
    a0 := a;
    u0 := u;

    FOR r IN 1 .. cardinality(request_nows) LOOP
        instant := request_nows[r];
        ok := true;
        denier := NULL;

        -- Charge all that is covered, also after a refusal, so that each answer
        -- reckons with those before it.
        FOR k IN d + 1 .. d + request_debits[r] LOOP
            i := debit_buckets[k];
            was_t[k] := t[i];
            was_a[k] := a[i];
            IF debit_costs[k] = 0 THEN
                covered[k] := true;
                CONTINUE;
            END IF;
            -- The arithmetic of policy.Budget.Level, in its order.
            IF t[i] IS NULL THEN
                level := debit_bursts[k];
            ELSE
                level := least(debit_bursts[k],
                    t[i] + greatest(0, date_part('epoch', instant - a[i])) * debit_rates[k]);
            END IF;
            IF debit_costs[k] <= level THEN
                covered[k] := true;
                t[i] := level - debit_costs[k];
                a[i] := greatest(a[i], instant);
            ELSE
                covered[k] := false;
                ok := false;
            END IF;
        END LOOP;

        ql := l;
        FOR z IN q + 1 .. q + request_quotas[r] LOOP
            denied[z] := -1;
            IF quota_costs[z] > 0 THEN
                FOR k IN 1 .. quota_limits[z] LOOP
                    -- Written so that nothing overflows.
                    IF quota_costs[z] > limit_units[ql + k]
                        OR coalesce(u[limit_windows[ql + k]], 0) > limit_units[ql + k] - quota_costs[z]
                    THEN
                        denied[z] := k - 1;
                        EXIT;
                    END IF;
                END LOOP;
                IF denied[z] < 0 THEN
                    FOR k IN 1 .. quota_limits[z] LOOP
                        i := limit_windows[ql + k];
                        u[i] := coalesce(u[i], 0) + quota_costs[z];
                    END LOOP;
                ELSIF ok THEN
                    ok := false;
                    denier := z;
                    denier_l := ql;
                END IF;
            END IF;
            ql := ql + quota_limits[z];
        END LOOP;

        IF NOT ok THEN
            FOR k IN REVERSE d + request_debits[r] .. d + 1 LOOP
                i := debit_buckets[k];
                t[i] := was_t[k];
                a[i] := was_a[k];
            END LOOP;
            ql := l;
            FOR z IN q + 1 .. q + request_quotas[r] LOOP
                IF quota_costs[z] > 0 AND denied[z] < 0 THEN
                    FOR k IN 1 .. quota_limits[z] LOOP
                        i := limit_windows[ql + k];
                        -- Back to no row, where there was none.
                        u[i] := CASE WHEN u[i] > quota_costs[z] OR u0[i] IS NOT NULL THEN u[i] - quota_costs[z] END;
                    END LOOP;
                END IF;
                ql := ql + quota_limits[z];
            END LOOP;
            -- The exception: what a later window denies stays spent in the earlier
            -- ones of its quota.
            IF denier IS NOT NULL AND quota_chargeable[denier] THEN
                FOR k IN 1 .. denied[denier] LOOP
                    i := limit_windows[denier_l + k];
                    u[i] := coalesce(u[i], 0) + quota_costs[denier];
                END LOOP;
            END IF;
        END IF;

        allowed[r] := ok;
        FOR k IN d + 1 .. d + request_debits[r] LOOP
            i := debit_buckets[k];
            tokens_left[k] := coalesce(t[i], debit_bursts[k]);
            tokens_at[k] := coalesce(a[i], instant);
        END LOOP;
        FOR k IN l + 1 .. ql LOOP
            units_used[k] := coalesce(u[limit_windows[k]], 0);
        END LOOP;
        d := d + request_debits[r];
        q := q + request_quotas[r];
        l := ql;
    END LOOP;

    minted := 0;
    FOR k IN 1 .. bucket_writable LOOP
        IF t0[k] IS NULL AND t[k] IS NOT NULL THEN
            minted := minted + 1;
        END IF;
    END LOOP;
    IF minted > 0 THEN
        INSERT INTO plexsphere.rate_budgets (scope, bucket_key, tokens, refilled_at)
        SELECT k.scope, k.bucket_key, k.tokens, k.refilled_at
        FROM unnest(bucket_scopes, bucket_keys, t, a, t0) WITH ORDINALITY AS k (scope, bucket_key, tokens, refilled_at, t0, i)
        WHERE k.t0 IS NULL AND k.tokens IS NOT NULL
        ORDER BY k.i
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n < minted THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'another decision minted a bucket meanwhile';
        END IF;
    END IF;

    minted := 0;
    FOR k IN 1 .. window_writable LOOP
        IF u0[k] IS NULL AND u[k] IS NOT NULL THEN
            minted := minted + 1;
            holders[minted] := window_consumers[k];
        END IF;
    END LOOP;
    IF minted > 0 THEN
        -- Windows may be new to a consumer that is known, or enrolled meanwhile.
        INSERT INTO plexsphere.consumers (id, domain, entries, enrolled_at)
        SELECT k.id, k.domain, k.entries::jsonb, k.seen
        FROM unnest(consumer_ids, consumer_domains, consumer_entries, consumer_seen) WITH ORDINALITY AS k (id, domain, entries, seen, i)
        WHERE k.id = ANY (holders)
        ORDER BY k.i
        ON CONFLICT DO NOTHING;
        INSERT INTO plexsphere.quota_counters (counter, unit, window_start, used)
        SELECT k.counter, k.unit, k.window_start, k.used
        FROM unnest(window_consumers, window_units, window_starts, u, u0) WITH ORDINALITY AS k (counter, unit, window_start, used, u0, i)
        WHERE k.u0 IS NULL AND k.used IS NOT NULL
        ORDER BY k.i
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n < minted THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'another decision opened a window meanwhile';
        END IF;
    END IF;

    changed := 0;
    FOR k IN 1 .. bucket_writable LOOP
        IF t[k] <> t0[k] OR a[k] <> a0[k] THEN
            changed := changed + 1;
        END IF;
    END LOOP;
    IF changed > 0 THEN
        UPDATE plexsphere.rate_budgets AS b
        SET tokens = k.tokens, refilled_at = k.refilled_at
        FROM unnest(bucket_scopes, bucket_keys, t, a, t0, a0) AS k (scope, bucket_key, tokens, refilled_at, t0, a0)
        WHERE b.scope = k.scope AND b.bucket_key = k.bucket_key
            AND (k.tokens <> k.t0 OR k.refilled_at <> k.a0);
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n < changed THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'a locked bucket is gone';
        END IF;
    END IF;

    changed := 0;
    FOR k IN 1 .. window_writable LOOP
        IF u[k] <> u0[k] THEN
            changed := changed + 1;
        END IF;
    END LOOP;
    IF changed > 0 THEN
        UPDATE plexsphere.quota_counters AS c
        SET used = k.used
        FROM unnest(window_consumers, window_units, window_starts, u, u0) AS k (counter, unit, window_start, used, u0)
        WHERE c.counter = k.counter AND c.unit = k.unit AND c.window_start = k.window_start
            AND k.used <> k.u0;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n < changed THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'a locked window is gone';
        END IF;
    END IF;
END
$$;
-- +goose StatementEnd

COMMENT ON FUNCTION plexsphere.decide_v1 IS
    'Decides a batch of requests in arrival order: each one''s buckets and quota windows are charged or none, except that a quota denied by a later window stays spent in its earlier ones.';

-- +goose Down
DROP FUNCTION plexsphere.decide_v1;

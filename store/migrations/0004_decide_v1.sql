-- The decision of a batch of requests in one call: with decide_one_v1 below, which is
-- the same for a lone request, the only write path of the service. A change of its contract is a new function beside it (decide_v2), so that
-- the binaries before and after a roll-out run on one schema.
--
-- Rows are locked in the order of the arguments, which callers sort by key: rate
-- budgets, then limiters, then windows. So calls cannot deadlock. What is decided is
-- decided in memory, in arrival order, as if each request had come alone. Then missing
-- rows are inserted and after that existing ones updated, never the other way round: an
-- insert may have to wait for whoever is updating the row that it collides with, so
-- whoever holds updated rows must not insert any more.

-- +goose Up
-- +goose StatementBegin
CREATE FUNCTION plexsphere.decide_v1(
    -- Whether the batch is simple: every cost is above 0 and within every limit, all
    -- rows may be written, no consumer may have to be enrolled, nobody asks one row at
    -- two instants or under two shapes. Then the demands below are all there is.
    simple           boolean,
    bucket_demands   float8[],
    bucket_rates     float8[],
    bucket_bursts    float8[],
    bucket_nows      timestamptz[],
    limiter_demands  bigint[],      -- token-microseconds
    limiter_permits  bigint[],
    limiter_periods  bigint[],
    limiter_bursts   bigint[],
    limiter_nows     timestamptz[],
    window_demands   bigint[],
    window_limits    bigint[],      -- the least of those that the batch names

    -- The rate budgets that the batch names, each once. Those that may be written come
    -- first, sorted by key, and are bucket_writable many; the rest are only read.
    bucket_scopes    text[],
    bucket_keys      uuid[],
    bucket_writable  int,
    -- The limiters' buckets, in the same manner.
    limiter_ids        bytea[],
    limiter_namespaces text[],
    limiter_subjects   text[],
    limiter_writable   int,
    -- The windows, in the same manner.
    window_counters  bytea[],
    window_units     text[],
    window_starts    timestamptz[],
    window_writable  int,
    -- Consumers that may not be enrolled yet, sorted by id, and when each is seen. A
    -- named one is never enrolled here; others only while the domain has fewer than
    -- consumer_most, if that is not 0.
    consumer_ids     bytea[],
    consumer_domains text[],
    consumer_entries text[],
    consumer_named   boolean[],
    consumer_most    bigint[],
    consumer_seen    timestamptz[],
    -- The requests, in arrival order: each one's instant, and how many of the
    -- following debits, takes and quotas are its.
    request_nows     timestamptz[],
    request_debits   int[],
    request_takes    int[],
    request_quotas   int[],
    -- The debits from rate budgets.
    debit_buckets    int[],
    debit_costs      float8[],
    debit_rates      float8[],
    debit_bursts     float8[],
    -- The takes from limiters, in tokens.
    take_buckets     int[],
    take_costs       bigint[],
    take_permits     bigint[],
    take_periods     bigint[],      -- microseconds
    take_bursts      bigint[],
    -- The quotas: what each costs and how many of the following limits are its. A
    -- quota that is not chargeable (cost 0, or above a whole limit) is only read. An
    -- optional one refuses the request only together with all other optional ones.
    -- The consumer is an index into consumers, 0 where it is known or there is none.
    quota_costs      bigint[],
    quota_limits     int[],
    quota_chargeable boolean[],
    quota_optional   boolean[],
    quota_consumers  int[],
    -- The limits of quotas, shortest window first. The overflow is the window that
    -- counts instead when the consumer may not be enrolled, 0 for none.
    limit_windows    int[],
    limit_overflows  int[],
    limit_units      bigint[],

    -- Whether all requests of a simple batch were allowed. Then tokens_left, tokens_at,
    -- take_levels, take_at and units_used answer by row, and nothing else is set.
    OUT all_allowed   boolean,
    -- Else the answers, by request, debit, take, quota, limit and consumer.
    OUT allowed       boolean[],
    OUT covered       boolean[],
    OUT tokens_left   float8[],
    OUT tokens_at     timestamptz[],
    OUT take_covered  boolean[],
    OUT take_levels   bigint[],      -- token-microseconds of the take's own policy
    OUT take_at       timestamptz[],
    OUT denied        int[],         -- index from 0 of the first limit that denies, or -1
    OUT quota_states  int[],         -- 0, 1: a named consumer is unknown, 2: overflow
    OUT units_used    bigint[],
    OUT enrolled      boolean[]
) LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    buckets  constant int := cardinality(bucket_scopes);
    limiters constant int := cardinality(limiter_ids);
    windows  constant int := cardinality(window_units);
    holders  constant int := cardinality(consumer_ids);

    -- Which of the rows that may be written are there.
    bucket_places  bigint[];
    limiter_places bigint[];
    window_places  bigint[];

    -- Working state and what the rows held (…0), by bucket, limiter and window. NULL:
    -- no row.
    t  float8[];
    a  timestamptz[];
    t0 float8[];
    a0 timestamptz[];

    v   bigint[];       -- a limiter's level
    va  timestamptz[];  -- as of when
    vm  bigint[];       -- the same in microseconds
    vp  bigint[];       -- the policy that wrote it: permits,
    vd  bigint[];       -- period
    vb  bigint[];       -- and burst
    ve  timestamptz[];  -- when it expires
    v0  bigint[];
    va0 timestamptz[];
    vm0 bigint[];
    vp0 bigint[];
    vd0 bigint[];
    vb0 bigint[];
    ve0 timestamptz[];
    adopted boolean[];  -- whether another policy's row became one of this batch
    moved   boolean[];  -- whether the row is to be updated

    u  bigint[];
    u0 bigint[];

    -- A row before each debit, take and limit, to undo it.
    was_t float8[];
    was_a timestamptz[];
    was_v bigint[];
    was_va timestamptz[];
    was_vm bigint[];
    was_vp bigint[];
    was_vd bigint[];
    was_vb bigint[];
    was_ve timestamptz[];
    was_u bigint[];

    d int := 0;  -- debits before the request
    p int := 0;  -- takes before the request
    q int := 0;  -- quotas before the request
    l int := 0;  -- limits before the request
    ql int;      -- limits before the quota
    i int;
    c int;
    rec record;
    n bigint;
    instant timestamptz;
    micros  bigint;     -- the instant
    level   float8;
    balance bigint;
    whole   bigint;     -- a limiter's capacity
    wait    bigint;     -- microseconds until a limiter is full
    ok      boolean;
    charged boolean[];  -- by quota
    optionals int;      -- of the request
    refusing  int;      -- of them
    denier  int;        -- the first quota that denies, unless a bucket refused
    denier_l int;
    minted  int;
    changed int;
    domain_counts jsonb; -- consumers by domain, where there are new ones
    wanted  int[];       -- by consumer, the request that enrols it
    via     int[];       -- by limit, the window that counts
BEGIN
    -- Lock and read, in the order of the keys. ok says whether all rows are there and
    -- cover their demands.
    ok := simple;
    IF buckets > 0 THEN
        SELECT array_agg(x.i), array_agg(x.tokens), array_agg(x.refilled_at),
            array_agg(x.level - x.demand), array_agg(greatest(x.refilled_at, x.instant)),
            ok AND count(*) = buckets AND bool_and(x.demand <= x.level)
        INTO bucket_places, t0, a0, tokens_left, tokens_at, ok
        FROM (
            -- The arithmetic of policy.Budget.Level, in its order.
            SELECT k.i, b.tokens, b.refilled_at, k.demand, k.instant,
                least(k.burst, b.tokens + greatest(0, date_part('epoch', k.instant - b.refilled_at)) * k.rate) AS level
            FROM unnest(bucket_scopes, bucket_keys, bucket_demands, bucket_rates, bucket_bursts, bucket_nows) WITH ORDINALITY
                AS k (scope, bucket_key, demand, rate, burst, instant, i)
            JOIN plexsphere.rate_budgets AS b ON b.scope = k.scope AND b.bucket_key = k.bucket_key
            WHERE k.i <= bucket_writable
            ORDER BY k.i
            FOR UPDATE OF b
        ) AS x;
    END IF;
    IF limiters > 0 THEN
        SELECT array_agg(x.i), array_agg(x.level), array_agg(x.refilled_at), array_agg(x.micros),
            array_agg(x.permits), array_agg(x.period_us), array_agg(x.burst), array_agg(x.expires_at),
            array_agg(x.refilled - x.demand), array_agg(greatest(x.refilled_at, x.instant)),
            -- When each expires after it: see below.
            array_agg(CASE
                WHEN x.demand > x.refilled THEN NULL
                WHEN (x.capacity - x.refilled + (x.permits - 1)) / x.permits < 4503599627370496
                    AND x.expires_at > greatest(x.refilled_at, x.instant)
                        + (x.capacity - x.refilled + (x.permits - 1)) / x.permits * interval '1 microsecond'
                    AND (x.demand + (x.permits - 1)) / x.permits < 4503599627370496
                THEN x.expires_at + (x.demand + (x.permits - 1)) / x.permits * interval '1 microsecond'
                WHEN (x.capacity - x.refilled + x.demand + (x.permits - 1)) / x.permits < 4503599627370496
                THEN greatest(x.refilled_at, x.instant)
                    + (x.capacity - x.refilled + x.demand + (x.permits - 1)) / x.permits * interval '1 microsecond'
                ELSE 'infinity' END),
            ok AND count(*) = limiters AND bool_and(x.same AND x.demand <= x.refilled)
        INTO limiter_places, v0, va0, vm0, vp0, vd0, vb0, ve0, take_levels, take_at, ve, ok
        FROM (
            SELECT k.i, b.level, b.refilled_at, b.permits, b.period_us, b.burst, b.expires_at, k.demand, k.instant,
                b.burst * b.period_us AS capacity,
                (extract(epoch FROM b.refilled_at) * 1000000)::bigint AS micros,
                b.permits = k.permits AND b.period_us = k.period AND b.burst = k.burst AS same,
                -- The arithmetic of policy.LimiterPolicy.Level.
                CASE WHEN b.level >= b.burst * b.period_us
                    OR (extract(epoch FROM k.instant - b.refilled_at) * 1000000)::bigint > (b.burst * b.period_us - b.level) / b.permits
                THEN b.burst * b.period_us
                ELSE b.level + greatest(0, (extract(epoch FROM k.instant - b.refilled_at) * 1000000)::bigint) * b.permits END AS refilled
            FROM unnest(limiter_ids, limiter_demands, limiter_permits, limiter_periods, limiter_bursts, limiter_nows) WITH ORDINALITY
                AS k (id, demand, permits, period, burst, instant, i)
            JOIN plexsphere.limiter_buckets AS b ON b.id = k.id
            WHERE k.i <= limiter_writable
            ORDER BY k.i
            FOR UPDATE OF b
        ) AS x;
    END IF;
    IF windows > 0 THEN
        SELECT array_agg(x.i), array_agg(x.used), array_agg(CASE WHEN x.used <= x.units - x.demand THEN x.used + x.demand END),
            ok AND count(*) = windows AND bool_and(x.used <= x.units - x.demand)
        INTO window_places, u0, units_used, ok
        FROM (
            SELECT k.i, w.used, k.demand, k.units
            FROM unnest(window_counters, window_units, window_starts, window_demands, window_limits) WITH ORDINALITY
                AS k (counter, unit, window_start, demand, units, i)
            JOIN plexsphere.quota_counters AS w
                ON w.counter = k.counter AND w.unit = k.unit AND w.window_start = k.window_start
            WHERE k.i <= window_writable
            ORDER BY k.i
            FOR UPDATE OF w
        ) AS x;
    END IF;

    -- The common case needs no more: each row is charged all that is asked of it.
    IF ok THEN
        all_allowed := true;
        IF buckets > 0 THEN
            UPDATE plexsphere.rate_budgets AS b
            SET tokens = k.tokens, refilled_at = k.refilled_at
            FROM unnest(bucket_scopes, bucket_keys, tokens_left, tokens_at) AS k (scope, bucket_key, tokens, refilled_at)
            WHERE b.scope = k.scope AND b.bucket_key = k.bucket_key;
        END IF;
        IF limiters > 0 THEN
            UPDATE plexsphere.limiter_buckets AS b
            SET level = k.level, refilled_at = k.refilled_at, expires_at = k.expires_at
            FROM unnest(limiter_ids, take_levels, take_at, ve) AS k (id, level, refilled_at, expires_at)
            WHERE b.id = k.id;
        END IF;
        IF windows > 0 THEN
            UPDATE plexsphere.quota_counters AS w
            SET used = k.used
            FROM unnest(window_counters, window_units, window_starts, units_used) AS k (counter, unit, window_start, used)
            WHERE w.counter = k.counter AND w.unit = k.unit AND w.window_start = k.window_start;
        END IF;
        RETURN;
    END IF;

    -- Otherwise requests are decided one by one. First, each row in its place.
    all_allowed := false;
    tokens_left := NULL;
    tokens_at := NULL;
    take_levels := NULL;
    take_at := NULL;
    units_used := NULL;
    IF buckets > 0 THEN
        t := array_fill(NULL::float8, ARRAY[buckets]);
        a := array_fill(NULL::timestamptz, ARRAY[buckets]);
        FOR k IN 1 .. coalesce(cardinality(bucket_places), 0) LOOP
            i := bucket_places[k];
            t[i] := t0[k];
            a[i] := a0[k];
        END LOOP;
    END IF;
    IF limiters > 0 THEN
        v := array_fill(NULL::bigint, ARRAY[limiters]);
        vm := v;
        vp := v;
        vd := v;
        vb := v;
        va := array_fill(NULL::timestamptz, ARRAY[limiters]);
        ve := va;
        adopted := array_fill(false, ARRAY[limiters]);
        moved := adopted;
        FOR k IN 1 .. coalesce(cardinality(limiter_places), 0) LOOP
            i := limiter_places[k];
            v[i] := v0[k];
            va[i] := va0[k];
            vm[i] := vm0[k];
            vp[i] := vp0[k];
            vd[i] := vd0[k];
            vb[i] := vb0[k];
            ve[i] := ve0[k];
        END LOOP;
    END IF;
    IF windows > 0 THEN
        u := array_fill(NULL::bigint, ARRAY[windows]);
        FOR k IN 1 .. coalesce(cardinality(window_places), 0) LOOP
            u[window_places[k]] := u0[k];
        END LOOP;
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
    IF limiter_writable < limiters THEN
        FOR rec IN
            SELECT k.i, b.*, (extract(epoch FROM b.refilled_at) * 1000000)::bigint AS micros
            FROM unnest(limiter_ids) WITH ORDINALITY AS k (id, i)
            JOIN plexsphere.limiter_buckets AS b ON b.id = k.id
            WHERE k.i > limiter_writable
        LOOP
            v[rec.i] := rec.level;
            va[rec.i] := rec.refilled_at;
            vm[rec.i] := rec.micros;
            vp[rec.i] := rec.permits;
            vd[rec.i] := rec.period_us;
            vb[rec.i] := rec.burst;
            ve[rec.i] := rec.expires_at;
        END LOOP;
    END IF;
    IF window_writable < windows THEN
        FOR rec IN
            SELECT k.i, w.used
            FROM unnest(window_counters, window_units, window_starts) WITH ORDINALITY AS k (counter, unit, window_start, i)
            JOIN plexsphere.quota_counters AS w
                ON w.counter = k.counter AND w.unit = k.unit AND w.window_start = k.window_start
            WHERE k.i > window_writable
        LOOP
            u[rec.i] := rec.used;
        END LOOP;
    END IF;
    IF holders > 0 THEN
        enrolled := array_fill(false, ARRAY[holders]);
        wanted := array_fill(NULL::int, ARRAY[holders]);
        FOR rec IN
            SELECT k.i
            FROM unnest(consumer_ids) WITH ORDINALITY AS k (id, i)
            JOIN plexsphere.consumers AS h ON h.id = k.id
        LOOP
            enrolled[rec.i] := true;
        END LOOP;
        SELECT coalesce(jsonb_object_agg(h.domain, h.consumers), '{}')
        INTO domain_counts
        FROM plexsphere.consumer_domains AS h
        WHERE h.domain = ANY (consumer_domains);
    END IF;
    t0 := t;
    a0 := a;
    v0 := v;
    vm0 := vm;
    u0 := u;
    via := limit_windows;

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
            IF debit_costs[k] = 0 OR debit_costs[k] < 0 AND t[i] IS NULL THEN
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
                t[i] := least(debit_bursts[k], level - debit_costs[k]);
                a[i] := greatest(a[i], instant);
            ELSE
                covered[k] := false;
                ok := false;
            END IF;
        END LOOP;

        IF request_takes[r] > 0 THEN
            micros := (extract(epoch FROM instant) * 1000000)::bigint;
        END IF;
        FOR k IN p + 1 .. p + request_takes[r] LOOP
            i := take_buckets[k];
            whole := take_bursts[k] * take_periods[k];
            -- A row of another policy becomes one of this policy, once: refilled by its
            -- own up to now, cut to the new capacity, and not undone by a refusal, or
            -- a policy that was raised might never be reached.
            IF take_costs[k] <> 0 AND take_costs[k] <= take_bursts[k] AND v[i] IS NOT NULL AND (vp[i] <> take_permits[k] OR vd[i] <> take_periods[k] OR vb[i] <> take_bursts[k]) THEN
                balance := v[i];
                n := greatest(0, micros - vm[i]);
                IF balance >= vb[i] * vd[i] OR n > (vb[i] * vd[i] - balance) / vp[i] THEN
                    balance := vb[i] * vd[i];
                ELSE
                    balance := balance + n * vp[i];
                END IF;
                v[i] := least(whole, div(balance::numeric * take_periods[k], vd[i]))::bigint;
                IF micros > vm[i] THEN
                    va[i] := instant;
                    vm[i] := micros;
                END IF;
                vp[i] := take_permits[k];
                vd[i] := take_periods[k];
                vb[i] := take_bursts[k];
                wait := (whole - v[i] + (vp[i] - 1)) / vp[i];
                ve[i] := greatest(ve[i], CASE WHEN wait < 4503599627370496 THEN va[i] + wait * interval '1 microsecond' ELSE 'infinity' END);
                adopted[i] := true;
            END IF;
            was_v[k] := v[i];
            was_va[k] := va[i];
            was_vm[k] := vm[i];
            was_vp[k] := vp[i];
            was_vd[k] := vd[i];
            was_vb[k] := vb[i];
            was_ve[k] := ve[i];
            IF take_costs[k] = 0 OR take_costs[k] < 0 AND v[i] IS NULL THEN
                take_covered[k] := true;
                CONTINUE;
            END IF;
            take_covered[k] := false;
            IF take_costs[k] <= take_bursts[k] THEN
                IF v[i] IS NULL THEN
                    balance := whole;
                ELSE
                    balance := v[i];
                    n := greatest(0, micros - vm[i]);
                    IF balance >= whole OR n > (whole - balance) / take_permits[k] THEN
                        balance := whole;
                    ELSE
                        balance := balance + n * take_permits[k];
                    END IF;
                END IF;
                IF take_costs[k] * take_periods[k] <= balance THEN
                    take_covered[k] := true;
                    -- A refund, written so that nothing overflows.
                    IF take_costs[k] < 0 AND balance > whole + take_costs[k] * take_periods[k] THEN
                        v[i] := whole;
                    ELSE
                        v[i] := balance - take_costs[k] * take_periods[k];
                    END IF;
                    IF vm[i] IS NULL OR micros > vm[i] THEN
                        va[i] := instant;
                        vm[i] := micros;
                    END IF;
                    vp[i] := take_permits[k];
                    vd[i] := take_periods[k];
                    vb[i] := take_bursts[k];
                    wait := (whole - balance + (vp[i] - 1)) / vp[i];
                    -- As long as another policy's expiry is later than this one's bucket
                    -- would have been full, what is taken moves it on: else replicas on
                    -- a larger policy would find the row swept, and a full bucket.
                    IF wait < 4503599627370496 AND ve[i] > va[i] + wait * interval '1 microsecond' THEN
                        wait := greatest(0, take_costs[k] * take_periods[k] + (vp[i] - 1)) / vp[i];
                        ve[i] := CASE WHEN wait < 4503599627370496 THEN ve[i] + wait * interval '1 microsecond' ELSE 'infinity' END;
                    ELSE
                        wait := (whole - v[i] + (vp[i] - 1)) / vp[i];
                        ve[i] := CASE WHEN wait < 4503599627370496 THEN va[i] + wait * interval '1 microsecond' ELSE 'infinity' END;
                    END IF;
                END IF;
            END IF;
            IF NOT take_covered[k] THEN
                ok := false;
            END IF;
        END LOOP;

        optionals := 0;
        refusing := 0;
        ql := l;
        FOR z IN q + 1 .. q + request_quotas[r] LOOP
            denied[z] := -1;
            charged[z] := false;
            quota_states[z] := 0;
            c := quota_consumers[z];
            IF c > 0 AND NOT enrolled[c] THEN
                IF consumer_named[c] THEN
                    quota_states[z] := 1;
                    ql := ql + quota_limits[z];
                    CONTINUE;
                END IF;
                IF wanted[c] IS NULL AND consumer_most[c] > 0 THEN
                    n := coalesce((domain_counts ->> consumer_domains[c])::bigint, 0);
                    -- A refund goes where the charge went.
                    IF n >= consumer_most[c] OR quota_costs[z] < 0 THEN
                        quota_states[z] := 2;
                        FOR k IN ql + 1 .. ql + quota_limits[z] LOOP
                            via[k] := limit_overflows[k];
                        END LOOP;
                    END IF;
                END IF;
                IF wanted[c] IS NULL AND quota_states[z] = 0 AND quota_chargeable[z] AND quota_costs[z] > 0 THEN
                    wanted[c] := r;
                    domain_counts := jsonb_set(domain_counts, ARRAY[consumer_domains[c]],
                        to_jsonb(coalesce((domain_counts ->> consumer_domains[c])::bigint, 0) + 1));
                END IF;
            END IF;
            IF quota_costs[z] < 0 THEN
                FOR k IN ql + 1 .. ql + quota_limits[z] LOOP
                    i := via[k];
                    was_u[k] := u[i];
                    u[i] := greatest(0, u[i] + quota_costs[z]);
                    IF was_u[k] IS NULL THEN
                        u[i] := NULL; -- greatest ignores NULL
                    END IF;
                END LOOP;
                charged[z] := true;
            ELSIF quota_costs[z] > 0 THEN
                FOR k IN ql + 1 .. ql + quota_limits[z] LOOP
                    -- Written so that nothing overflows.
                    IF quota_costs[z] > limit_units[k]
                        OR coalesce(u[via[k]], 0) > limit_units[k] - quota_costs[z]
                    THEN
                        denied[z] := k - ql - 1;
                        EXIT;
                    END IF;
                END LOOP;
                IF denied[z] < 0 THEN
                    FOR k IN ql + 1 .. ql + quota_limits[z] LOOP
                        i := via[k];
                        was_u[k] := u[i];
                        u[i] := coalesce(u[i], 0) + quota_costs[z];
                    END LOOP;
                    charged[z] := true;
                ELSIF quota_optional[z] THEN
                    refusing := refusing + 1;
                ELSIF ok THEN
                    ok := false;
                    denier := z;
                    denier_l := ql;
                END IF;
            END IF;
            IF quota_optional[z] THEN
                optionals := optionals + 1;
            END IF;
            ql := ql + quota_limits[z];
        END LOOP;
        IF optionals > 0 AND refusing = optionals THEN
            ok := false;
        END IF;

        IF NOT ok THEN
            FOR k IN REVERSE d + request_debits[r] .. d + 1 LOOP
                i := debit_buckets[k];
                t[i] := was_t[k];
                a[i] := was_a[k];
            END LOOP;
            FOR k IN REVERSE p + request_takes[r] .. p + 1 LOOP
                IF take_covered[k] AND take_costs[k] <> 0 THEN
                    i := take_buckets[k];
                    v[i] := was_v[k];
                    va[i] := was_va[k];
                    vm[i] := was_vm[k];
                    vp[i] := was_vp[k];
                    vd[i] := was_vd[k];
                    vb[i] := was_vb[k];
                    ve[i] := was_ve[k];
                END IF;
            END LOOP;
            ql := l;
            FOR z IN q + 1 .. q + request_quotas[r] LOOP
                ql := ql + quota_limits[z];
            END LOOP;
            FOR z IN REVERSE q + request_quotas[r] .. q + 1 LOOP
                ql := ql - quota_limits[z];
                IF charged[z] THEN
                    FOR k IN REVERSE ql + quota_limits[z] .. ql + 1 LOOP
                        u[via[k]] := was_u[k];
                    END LOOP;
                END IF;
            END LOOP;
            -- Nobody is enrolled for nothing.
            FOR z IN q + 1 .. q + request_quotas[r] LOOP
                c := quota_consumers[z];
                IF c > 0 AND wanted[c] = r AND (denier IS NULL OR quota_consumers[denier] <> c
                    OR denied[denier] = 0 OR NOT quota_chargeable[denier])
                THEN
                    wanted[c] := NULL;
                    domain_counts := jsonb_set(domain_counts, ARRAY[consumer_domains[c]],
                        to_jsonb((domain_counts ->> consumer_domains[c])::bigint - 1));
                END IF;
            END LOOP;
            -- The exception: what a later window denies stays spent in the earlier
            -- ones of its quota.
            IF denier IS NOT NULL AND quota_chargeable[denier] THEN
                FOR k IN denier_l + 1 .. denier_l + denied[denier] LOOP
                    i := via[k];
                    u[i] := coalesce(u[i], 0) + quota_costs[denier];
                END LOOP;
            END IF;
        END IF;

        -- What each row holds now is the answer.
        allowed[r] := ok;
        FOR k IN d + 1 .. d + request_debits[r] LOOP
            i := debit_buckets[k];
            tokens_left[k] := coalesce(t[i], debit_bursts[k]);
            tokens_at[k] := coalesce(a[i], instant);
        END LOOP;
        FOR k IN p + 1 .. p + request_takes[r] LOOP
            i := take_buckets[k];
            take_levels[k] := coalesce(v[i], take_bursts[k] * take_periods[k]);
            take_at[k] := coalesce(va[i], instant);
            -- A row that is only read may be another policy's.
            IF v[i] IS NOT NULL AND (vp[i] <> take_permits[k] OR vd[i] <> take_periods[k] OR vb[i] <> take_bursts[k]) THEN
                balance := v[i];
                n := greatest(0, micros - vm[i]);
                IF balance >= vb[i] * vd[i] OR n > (vb[i] * vd[i] - balance) / vp[i] THEN
                    balance := vb[i] * vd[i];
                ELSE
                    balance := balance + n * vp[i];
                END IF;
                take_levels[k] := least(take_bursts[k] * take_periods[k], div(balance::numeric * take_periods[k], vd[i]))::bigint;
                take_at[k] := greatest(va[i], instant);
            END IF;
        END LOOP;
        FOR z IN q + 1 .. q + request_quotas[r] LOOP
            FOR k IN l + 1 .. l + quota_limits[z] LOOP
                units_used[k] := coalesce(u[via[k]], 0);
            END LOOP;
            l := l + quota_limits[z];
        END LOOP;
        d := d + request_debits[r];
        p := p + request_takes[r];
        q := q + request_quotas[r];
    END LOOP;

    -- Insert what is new.
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
    FOR k IN 1 .. limiter_writable LOOP
        IF v0[k] IS NULL AND v[k] IS NOT NULL THEN
            minted := minted + 1;
        END IF;
    END LOOP;
    IF minted > 0 THEN
        INSERT INTO plexsphere.limiter_buckets (id, namespace, subject, level, refilled_at, permits, period_us, burst, expires_at)
        SELECT k.id, k.namespace, k.subject, k.level, k.refilled_at, k.permits, k.period_us, k.burst, k.expires_at
        FROM unnest(limiter_ids, limiter_namespaces, limiter_subjects, v, va, vp, vd, vb, ve, v0) WITH ORDINALITY
            AS k (id, namespace, subject, level, refilled_at, permits, period_us, burst, expires_at, v0, i)
        WHERE k.v0 IS NULL AND k.level IS NOT NULL
        ORDER BY k.i
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n < minted THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'another decision minted a limiter''s bucket meanwhile';
        END IF;
    END IF;

    minted := 0;
    FOR k IN 1 .. window_writable LOOP
        IF u0[k] IS NULL AND u[k] IS NOT NULL THEN
            minted := minted + 1;
        END IF;
    END LOOP;
    IF minted > 0 THEN
        INSERT INTO plexsphere.quota_counters (counter, unit, window_start, used)
        SELECT k.counter, k.unit, k.window_start, k.used
        FROM unnest(window_counters, window_units, window_starts, u, u0) WITH ORDINALITY AS k (counter, unit, window_start, used, u0, i)
        WHERE k.u0 IS NULL AND k.used IS NOT NULL
        ORDER BY k.i
        ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n < minted THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'another decision opened a window meanwhile';
        END IF;
    END IF;

    IF cardinality(array_remove(wanted, NULL)) > 0 THEN
        WITH fresh AS (
            INSERT INTO plexsphere.consumers (id, domain, entries, enrolled_at)
            SELECT k.id, k.domain, k.entries::jsonb, k.seen
            FROM unnest(consumer_ids, consumer_domains, consumer_entries, consumer_seen, wanted) WITH ORDINALITY AS k (id, domain, entries, seen, wanted, i)
            WHERE k.wanted IS NOT NULL
            ORDER BY k.i
            ON CONFLICT DO NOTHING
            RETURNING domain
        )
        INSERT INTO plexsphere.consumer_domains AS h (domain, consumers)
        SELECT f.domain, count(*) FROM fresh AS f GROUP BY f.domain ORDER BY f.domain
        ON CONFLICT (domain) DO UPDATE SET consumers = h.consumers + excluded.consumers;
        FOR k IN 1 .. holders LOOP
            enrolled[k] := enrolled[k] OR wanted[k] IS NOT NULL;
        END LOOP;
    END IF;

    -- Update what was there.
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
    FOR k IN 1 .. limiter_writable LOOP
        IF v0[k] IS NOT NULL AND (adopted[k] OR v[k] <> v0[k] OR vm[k] <> vm0[k]) THEN
            moved[k] := true;
            changed := changed + 1;
        END IF;
    END LOOP;
    IF changed > 0 THEN
        UPDATE plexsphere.limiter_buckets AS b
        SET level = k.level, refilled_at = k.refilled_at, permits = k.permits,
            period_us = k.period_us, burst = k.burst, expires_at = k.expires_at
        FROM unnest(limiter_ids, v, va, vp, vd, vb, ve, moved)
            AS k (id, level, refilled_at, permits, period_us, burst, expires_at, moved)
        WHERE b.id = k.id AND k.moved;
        GET DIAGNOSTICS n = ROW_COUNT;
        IF n < changed THEN
            RAISE SQLSTATE '40001' USING MESSAGE = 'a locked limiter''s bucket is gone';
        END IF;
    END IF;

    changed := 0;
    FOR k IN 1 .. window_writable LOOP
        IF u[k] <> u0[k] THEN
            changed := changed + 1;
        END IF;
    END LOOP;
    IF changed > 0 THEN
        UPDATE plexsphere.quota_counters AS w
        SET used = k.used
        FROM unnest(window_counters, window_units, window_starts, u, u0) AS k (counter, unit, window_start, used, u0)
        WHERE w.counter = k.counter AND w.unit = k.unit AND w.window_start = k.window_start
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
    'Decides a batch of requests in arrival order: each one''s rate budgets, limiters and windows are charged or none, except that a quota denied by a later window stays spent in its earlier ones.';

-- A lone request for one rate budget, which is most of what an idle replica meets: what
-- decide_v1 would do, at half the price. The cost is above 0 and not above the burst.
-- +goose StatementBegin
CREATE FUNCTION plexsphere.decide_one_v1(
    of_scope   text,
    of_key     uuid,
    cost       float8,
    rate       float8,
    burst      float8,
    instant    timestamptz,
    OUT covered     boolean,
    OUT tokens_left float8,
    OUT tokens_at   timestamptz
) LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    -- Two that take from one bucket wait for each other here, and the second sees what
    -- the first has left. The arithmetic is that of policy.Budget.Level, in its order.
    INSERT INTO plexsphere.rate_budgets AS b (scope, bucket_key, tokens, refilled_at)
    VALUES (of_scope, of_key, burst - cost, instant)
    ON CONFLICT (scope, bucket_key) DO UPDATE SET
        tokens = least(burst, b.tokens + greatest(0, date_part('epoch', instant - b.refilled_at)) * rate) - cost,
        refilled_at = greatest(b.refilled_at, instant)
    WHERE cost <= least(burst, b.tokens + greatest(0, date_part('epoch', instant - b.refilled_at)) * rate)
    RETURNING true, tokens, refilled_at INTO covered, tokens_left, tokens_at;
    IF covered IS NULL THEN
        -- The row is locked by now, also by a refusal.
        covered := false;
        SELECT b.tokens, b.refilled_at INTO tokens_left, tokens_at
        FROM plexsphere.rate_budgets AS b
        WHERE b.scope = of_scope AND b.bucket_key = of_key;
    END IF;
END
$$;
-- +goose StatementEnd

COMMENT ON FUNCTION plexsphere.decide_one_v1 IS
    'Decides a lone request for one rate budget, as decide_v1 would.';

-- +goose Down
DROP FUNCTION plexsphere.decide_one_v1;
DROP FUNCTION plexsphere.decide_v1;

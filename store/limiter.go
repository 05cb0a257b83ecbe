package store

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/policy"
)

// A Policy is the shape of a limiter's buckets: each holds at most Burst tokens, and
// Permits of them come back every Per, evenly and not in steps. Per is in whole
// microseconds, at least one, and Burst × Per and Permits are at most 2^62, so that
// arithmetic is exact.
type Policy = policy.LimiterPolicy

// PerSecond returns the policy of n tokens a second and a burst of n.
func PerSecond(n int64) Policy { return Policy{Permits: n, Per: time.Second, Burst: n} }

// PerMinute returns the policy of n tokens a minute and a burst of n.
func PerMinute(n int64) Policy { return Policy{Permits: n, Per: time.Minute, Burst: n} }

// ErrInvalidArgument is returned, before any query, by every call of a [Limiter] whose
// policy is invalid or whose codec is missing, for a cost outside 1 to the policy's
// burst, and for a subject that the codec refuses.
var ErrInvalidArgument = policy.ErrInvalidArgument

// DefaultNamespace is the namespace of limiters that name none.
const DefaultNamespace = "ratelimit"

// LimiterConfig is what [NewLimiter] needs to know. S is the type of subjects.
type LimiterConfig[S any] struct {
	// Policy is that of every subject's bucket. It may be changed under use, also by a
	// rolling deployment: a bucket remembers the policy that wrote it.
	Policy Policy
	// Codec identifies subjects. Defaults to [StringKey] where S is string; other types
	// need one.
	Codec KeyCodec[S]
	// Namespace keeps limiters of one schema apart: each policy that is active at the
	// same time has its own. Any bytes will do. Defaults to [DefaultNamespace].
	Namespace string
	// Schema is the database schema, which [Migrate] has made. Defaults to
	// [DefaultSchema].
	Schema string
	// Now is the clock, read once a call; what it tells counts in whole microseconds.
	// Defaults to [time.Now]. A clock that lags behind that of another process admits
	// less, never more.
	Now func() time.Time
}

// A Limiter limits how often something may happen for each of any number of subjects,
// across all processes on one database. Each subject has a token bucket, which is full
// until something is taken. It is safe for concurrent use, if the [DBTX] is.
type Limiter[S any] struct {
	db        DBTX
	policy    Policy
	codec     KeyCodec[S]
	namespace string
	now       func() time.Time
	err       error // what is wrong with the configuration

	take, peek, reset string // the statements, for the schema
}

// NewLimiter returns a limiter. It reaches no database, and panics when db is nil. What
// is invalid in the configuration is returned by each call, as [ErrInvalidArgument].
func NewLimiter[S any](db DBTX, cfg LimiterConfig[S]) *Limiter[S] {
	if isNil(db) {
		panic("store: the database handle is nil")
	}
	cfg = cfg.withDefaults()
	return &Limiter[S]{
		db:        db,
		policy:    cfg.Policy,
		codec:     cfg.Codec,
		namespace: cfg.Namespace,
		now:       cfg.Now,
		err:       cfg.validate(),
		take:      inSchema(limiterTakeSQL, cfg.Schema),
		peek:      inSchema(limiterPeekSQL, cfg.Schema),
		reset:     inSchema(limiterResetSQL, cfg.Schema),
	}
}

func (c LimiterConfig[S]) withDefaults() LimiterConfig[S] {
	if c.Codec == nil {
		// Of another type than KeyCodec[S], this leaves it nil.
		c.Codec, _ = any(KeyCodec[string](StringKey[string])).(KeyCodec[S])
	}
	if c.Namespace == "" {
		c.Namespace = DefaultNamespace
	}
	if c.Schema == "" {
		c.Schema = DefaultSchema
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return c
}

func (c LimiterConfig[S]) validate() error {
	err := c.Policy.Validate()
	if c.Codec == nil {
		var subject S
		err = errors.Join(err, fmt.Errorf("%w: subjects of type %T need a codec", ErrInvalidArgument, subject))
	}
	return err
}

// A Decision is a limiter's answer. A denial is an answer too, and no error.
type Decision struct {
	// Allowed is whether the tokens were taken or, for a peek, at least one is there.
	Allowed bool
	// Remaining is the whole tokens left in the bucket. A denial took none, so with 3
	// left and a cost of 5 it says 3.
	Remaining int64
	// ResetAfter is how long until the bucket is full, if nobody takes from it.
	ResetAfter time.Duration
	// RetryAfter is how long until the bucket holds what was asked for, if nobody takes
	// from it: the same call after exactly so long is allowed. It is 0 when allowed.
	RetryAfter time.Duration
}

// RetryAfterSeconds returns RetryAfter as the Retry-After header has it: in whole
// seconds, rounded up so that nobody comes back too early. It is at least 1 for a
// denial, and 0 when allowed.
func (d Decision) RetryAfterSeconds() int64 {
	if d.Allowed {
		return 0
	}
	return policy.WholeSeconds(d.RetryAfter)
}

const limiterTakeSQL = `
SELECT allowed, balance, balance_at
FROM plexsphere.limiter_take_v1($1::bytea, $2::text, $3::text, $4::bigint, $5::bigint, $6::bigint, $7::bigint, $8::timestamptz)`

const limiterPeekSQL = `
SELECT level, refilled_at, permits, period_us, burst
FROM plexsphere.limiter_buckets
WHERE id = $1::bytea`

const limiterResetSQL = `
DELETE FROM plexsphere.limiter_buckets
WHERE id = $1::bytea`

// TryAcquire takes cost tokens (1 to the policy's burst) from the subject's bucket if it
// holds them, and tells at once either way: it never waits for tokens. It is one
// statement, atomic however many processes take at the same time. A denial takes and
// writes nothing; but a bucket that another policy wrote becomes one of this policy.
//
// An error means that nothing is known: when a connection dies at the moment of its
// commit, the tokens may be taken although the caller got an error. Whether to let a
// request pass when the database can't be reached is the caller's to decide.
func (l *Limiter[S]) TryAcquire(ctx context.Context, subject S, cost int64) (Decision, error) {
	c, err := l.Command(subject, cost)
	if err != nil {
		return Decision{}, err
	}
	return c.Decision(l.db.QueryRow(ctx, c.SQL, c.Args...))
}

// A Command is a take that the caller runs: by itself, or as part of a batch or of a
// transaction. See [Limiter.Command].
type Command struct {
	// SQL is the statement and Args its arguments. It returns one row.
	SQL  string
	Args []any

	policy    Policy
	namespace string
	cost      int64
	now       time.Time
}

// Command returns what [Limiter.TryAcquire] would run, decided as of now: queue it on a
// [pgx.Batch], or run it in a transaction, and hand the row to [Command.Decision]. Each
// run takes anew.
//
// A bucket that was taken from stays locked until the transaction ends, which is the whole
// batch's unless it was told otherwise. So whoever queues several commands should queue
// them in one order of subjects everywhere, or two may wait for each other until
// Postgres refuses one as a deadlock.
func (l *Limiter[S]) Command(subject S, cost int64) (*Command, error) {
	id, err := l.id(subject)
	if err != nil {
		return nil, fmt.Errorf("taking from limiter %q: %w", l.namespace, err)
	}
	if cost < 1 || cost > l.policy.Burst {
		return nil, fmt.Errorf("taking from limiter %q: %w: the cost must be 1 to the burst, %d, not %d",
			l.namespace, ErrInvalidArgument, l.policy.Burst, cost)
	}
	now, err := l.instant()
	if err != nil {
		return nil, fmt.Errorf("taking from limiter %q: %w", l.namespace, err)
	}
	return &Command{
		SQL: l.take,
		Args: []any{
			id.sum[:], readable(l.namespace), readable(id.subject), cost,
			l.policy.Permits, l.policy.Per.Microseconds(), l.policy.Burst, now,
		},
		policy:    l.policy,
		namespace: l.namespace,
		cost:      cost,
		now:       now,
	}, nil
}

// Decision reads the command's row, such as that of a batch's next result.
func (c *Command) Decision(row pgx.Row) (Decision, error) {
	var (
		d     Decision
		level int64
		at    time.Time
	)
	if err := row.Scan(&d.Allowed, &level, &at); err != nil {
		return Decision{}, fmt.Errorf("taking from limiter %q: %w", c.namespace, err)
	}
	d.Remaining = c.policy.Tokens(c.policy.Level(level, at, c.now))
	d.ResetAfter, _ = c.policy.Wait(level, at, c.now, c.policy.Burst)
	if !d.Allowed {
		d.RetryAfter, _ = c.policy.Wait(level, at, c.now, c.cost)
	}
	return d, nil
}

// Peek tells what the subject's bucket holds and takes and writes nothing. It is allowed
// while at least one token is there, and otherwise denied with the time until one is.
//
// Where another policy wrote the bucket, Peek shows what a take would make of it now;
// but RetryAfter reckons with that other policy, by which the bucket refills until
// somebody takes.
func (l *Limiter[S]) Peek(ctx context.Context, subject S) (Decision, error) {
	id, err := l.id(subject)
	if err != nil {
		return Decision{}, fmt.Errorf("peeking at limiter %q: %w", l.namespace, err)
	}
	now, err := l.instant()
	if err != nil {
		return Decision{}, fmt.Errorf("peeking at limiter %q: %w", l.namespace, err)
	}
	var (
		stored Policy
		period int64
		level  int64
		at     time.Time
	)
	err = l.db.QueryRow(ctx, l.peek, id.sum[:]).Scan(&level, &at, &stored.Permits, &period, &stored.Burst)
	if errors.Is(err, pgx.ErrNoRows) {
		return Decision{Allowed: true, Remaining: l.policy.Burst}, nil
	}
	if err != nil {
		return Decision{}, fmt.Errorf("peeking at limiter %q: %w", l.namespace, err)
	}
	stored.Per = time.Duration(period) * time.Microsecond
	level = stored.Level(level, at, now)
	if at.Before(now) {
		at = now
	}
	converted := l.policy.Convert(level, stored)
	d := Decision{Remaining: l.policy.Tokens(converted)}
	d.Allowed = d.Remaining > 0
	d.ResetAfter, _ = l.policy.Wait(converted, at, now, l.policy.Burst)
	if !d.Allowed {
		d.RetryAfter, _ = stored.Wait(level, at, now, 1)
	}
	return d, nil
}

// Reset clears the subject's bucket, so that its next take finds it full. What was taken
// before is not given back to anybody else: use it as an operator's pardon.
func (l *Limiter[S]) Reset(ctx context.Context, subject S) error {
	id, err := l.id(subject)
	if err != nil {
		return fmt.Errorf("resetting limiter %q: %w", l.namespace, err)
	}
	if _, err := l.db.Exec(ctx, l.reset, id.sum[:]); err != nil {
		return fmt.Errorf("resetting limiter %q: %w", l.namespace, err)
	}
	return nil
}

// instant reads the clock, at the precision of the database.
func (l *Limiter[S]) instant() (time.Time, error) {
	now := policy.TruncateNow(l.now())
	return now, checkNow(now)
}

package store_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/store"
)

// The examples' database and clock: a migrated database of its own, and a clock that
// moves when it is told to, so that what they print is always the same.

type database struct {
	*pgxpool.Pool
	drop func() error
}

func openDatabase(ctx context.Context) *database {
	dsn, drop, err := pgtest.OpenDatabase(ctx)
	if err != nil {
		panic(err)
	}
	pool, err := store.Connect(ctx, dsn)
	if err != nil {
		panic(err)
	}
	return &database{pool, drop}
}

func (d *database) Close() {
	d.Pool.Close()
	if err := d.drop(); err != nil {
		panic(err)
	}
}

type clock struct{ at time.Time }

func newClock() *clock { return &clock{time.Date(2026, time.May, 14, 12, 0, 0, 0, time.UTC)} }

func (c *clock) Now() time.Time          { return c.at }
func (c *clock) Advance(d time.Duration) { c.at = c.at.Add(d) }

func ExampleNewLimiter() {
	ctx := context.Background()
	db := openDatabase(ctx) // a *pgxpool.Pool; store.Connect opens one
	defer db.Close()

	limiter := store.NewLimiter(db, store.LimiterConfig[string]{
		Policy: store.PerSecond(100),
		Now:    newClock().Now, // leave it out to use the real clock
	})
	decision, err := limiter.TryAcquire(ctx, "user:42", 1)
	if err != nil {
		fmt.Println("the store is unreachable:", err)
		return
	}
	fmt.Println(decision.Allowed, decision.Remaining, decision.ResetAfter)
	// Output: true 99 10ms
}

func ExampleLimiter_TryAcquire() {
	ctx := context.Background()
	db := openDatabase(ctx)
	defer db.Close()

	clock := newClock()
	limiter := store.NewLimiter(db, store.LimiterConfig[string]{
		Policy:    store.Policy{Permits: 10, Per: time.Second, Burst: 20},
		Namespace: "reports",
		Now:       clock.Now,
	})
	show := func(cost int64) {
		d, err := limiter.TryAcquire(ctx, "tenant:7", cost)
		if err != nil {
			fmt.Println(err)
			return
		}
		if d.Allowed {
			fmt.Printf("allowed: %d left, full in %v\n", d.Remaining, d.ResetAfter)
		} else {
			fmt.Printf("denied: %d left, Retry-After: %d\n", d.Remaining, d.RetryAfterSeconds())
		}
	}
	show(15) // the burst at once
	show(10) // a denial takes nothing
	show(5)
	clock.Advance(time.Second) // ten tokens later
	show(10)
	// Output:
	// allowed: 5 left, full in 1.5s
	// denied: 5 left, Retry-After: 1
	// allowed: 0 left, full in 2s
	// allowed: 0 left, full in 2s
}

// To wait for tokens, sleep for as long as the denial says, and try again.
func ExampleDecision_retry() {
	ctx := context.Background()
	db := openDatabase(ctx)
	defer db.Close()

	clock := newClock()
	limiter := store.NewLimiter(db, store.LimiterConfig[string]{Policy: store.PerSecond(4), Now: clock.Now})
	for range 6 {
		for {
			d, err := limiter.TryAcquire(ctx, "worker", 1)
			if err != nil {
				fmt.Println(err)
				return
			}
			if d.Allowed {
				break
			}
			fmt.Println("sleeping for", d.RetryAfter)
			clock.Advance(d.RetryAfter) // time.Sleep(d.RetryAfter), with a real clock
		}
	}
	// Output:
	// sleeping for 250ms
	// sleeping for 250ms
}

func ExampleLimiter_Peek() {
	ctx := context.Background()
	db := openDatabase(ctx)
	defer db.Close()

	clock := newClock()
	limiter := store.NewLimiter(db, store.LimiterConfig[string]{Policy: store.PerMinute(2), Now: clock.Now})
	show := func() {
		d, err := limiter.Peek(ctx, "user:42")
		fmt.Println(d.Allowed, d.Remaining, d.RetryAfter, err)
	}
	show() // nothing was taken yet
	if _, err := limiter.TryAcquire(ctx, "user:42", 2); err != nil {
		fmt.Println(err)
	}
	show()
	clock.Advance(30 * time.Second)
	show()
	show() // a peek took nothing
	// Output:
	// true 2 0s <nil>
	// false 0 30s <nil>
	// true 1 0s <nil>
	// true 1 0s <nil>
}

func ExampleLimiter_Reset() {
	ctx := context.Background()
	db := openDatabase(ctx)
	defer db.Close()

	limiter := store.NewLimiter(db, store.LimiterConfig[string]{
		Policy: store.PerMinute(3), Namespace: "login", Now: newClock().Now,
	})
	for range 4 {
		d, err := limiter.TryAcquire(ctx, "alice", 1)
		fmt.Println(d.Allowed, err)
	}
	if err := limiter.Reset(ctx, "alice"); err != nil {
		fmt.Println(err)
	}
	d, err := limiter.TryAcquire(ctx, "alice", 1)
	fmt.Println("after the reset:", d.Allowed, d.Remaining, err)
	// Output:
	// true <nil>
	// true <nil>
	// true <nil>
	// false <nil>
	// after the reset: true 2 <nil>
}

// Two limits for one request, in one round trip.
func ExampleLimiter_Command() {
	ctx := context.Background()
	db := openDatabase(ctx)
	defer db.Close()

	clock := newClock()
	perUser := store.NewLimiter(db, store.LimiterConfig[string]{Policy: store.PerSecond(10), Namespace: "user", Now: clock.Now})
	perTenant := store.NewLimiter(db, store.LimiterConfig[int]{Policy: store.PerSecond(50), Codec: store.IntKey[int], Namespace: "tenant", Now: clock.Now})

	user, err := perUser.Command("user:42", 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	tenant, err := perTenant.Command(7, 1)
	if err != nil {
		fmt.Println(err)
		return
	}
	var batch pgx.Batch
	batch.Queue(user.SQL, user.Args...)
	batch.Queue(tenant.SQL, tenant.Args...)
	results := db.SendBatch(ctx, &batch)
	for _, c := range []*store.Command{user, tenant} {
		d, err := c.Decision(results.QueryRow())
		fmt.Println(d.Allowed, d.Remaining, err)
	}
	if err := results.Close(); err != nil { // the takes are committed when this is nil
		fmt.Println(err)
	}
	// Output:
	// true 9 <nil>
	// true 49 <nil>
}

// A subject of one's own type: the codec gives bytes that differ where subjects do.
func ExampleKeyCodec() {
	ctx := context.Background()
	db := openDatabase(ctx)
	defer db.Close()

	type route struct{ method, path string }
	limiter := store.NewLimiter(db, store.LimiterConfig[route]{
		Policy: store.PerSecond(1),
		Codec: func(r route) ([]byte, error) {
			return fmt.Appendf(nil, "%q %q", r.method, r.path), nil // quoted, so that nothing runs together
		},
		Namespace: "route",
		Now:       newClock().Now,
	})
	for _, r := range []route{{"GET", "/"}, {"GET", "/"}, {"POST", "/"}} {
		d, err := limiter.TryAcquire(ctx, r, 1)
		fmt.Println(r.method, d.Allowed, err)
	}
	// Output:
	// GET true <nil>
	// GET false <nil>
	// POST true <nil>
}

// A policy is changed while processes still run on the old one. Everybody carries over
// what is left, cut to the new capacity.
func ExampleLimiterConfig_policyChange() {
	ctx := context.Background()
	db := openDatabase(ctx)
	defer db.Close()

	clock := newClock()
	old := store.NewLimiter(db, store.LimiterConfig[string]{Policy: store.PerSecond(100), Now: clock.Now})
	replacement := store.NewLimiter(db, store.LimiterConfig[string]{Policy: store.PerSecond(10), Now: clock.Now})
	show := func(name string, l *store.Limiter[string], cost int64) {
		d, err := l.TryAcquire(ctx, "user:42", cost)
		fmt.Println(name, d.Allowed, d.Remaining, err)
	}
	show("old", old, 40)
	show("new", replacement, 1) // 60 were left, and 10 is the most now
	show("old", old, 10)        // no full bucket for coming back
	show("old", old, 9)
	// Output:
	// old true 60 <nil>
	// new true 9 <nil>
	// old false 9 <nil>
	// old true 0 <nil>
}

// What is wrong with a policy or a cost is an error of the program, told before any query.
func ExampleLimiter_TryAcquire_invalidArgument() {
	ctx := context.Background()
	db := openDatabase(ctx)
	defer db.Close()

	limiter := store.NewLimiter(db, store.LimiterConfig[string]{Policy: store.PerSecond(10)})
	_, err := limiter.TryAcquire(ctx, "user:42", 11)
	fmt.Println(errors.Is(err, store.ErrInvalidArgument), err)

	limiter = store.NewLimiter(db, store.LimiterConfig[string]{Policy: store.Policy{Permits: 10, Per: time.Second}})
	_, err = limiter.TryAcquire(ctx, "user:42", 1)
	fmt.Println(errors.Is(err, store.ErrInvalidArgument), err)
	// Output:
	// true taking from limiter "ratelimit": invalid argument: the cost must be 1 to the burst, 10, not 11
	// true taking from limiter "ratelimit": invalid argument: burst must be above 0, not 0
}

func ExampleStore_DeleteExpired() {
	ctx := context.Background()
	db := openDatabase(ctx)
	defer db.Close()

	clock := newClock()
	limiter := store.NewLimiter(db, store.LimiterConfig[string]{Policy: store.PerSecond(10), Now: clock.Now})
	for _, subject := range []string{"a", "b", "c"} {
		if _, err := limiter.TryAcquire(ctx, subject, 1); err != nil {
			fmt.Println(err)
		}
	}
	clock.Advance(time.Hour)
	// Not ahead of any process's clock.
	fmt.Println(store.NewStore(db).DeleteExpired(ctx, clock.Now().Add(-10*time.Minute)))
	// Output: 3 <nil>
}

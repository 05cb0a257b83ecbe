package store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
)

// clock is a limiter's clock that stands still until it is set.
type clock struct{ nanos atomic.Int64 }

func newClock(at time.Time) *clock {
	c := &clock{}
	c.set(at)
	return c
}

func (c *clock) set(at time.Time)        { c.nanos.Store(at.UnixNano()) }
func (c *clock) advance(d time.Duration) { c.nanos.Add(int64(d)) }
func (c *clock) now() time.Time          { return time.Unix(0, c.nanos.Load()).UTC() }

// newLimiter returns a limiter of strings whose clock stands at noon.
func newLimiter(db DBTX, p Policy) (*Limiter[string], *clock) {
	c := newClock(noon)
	return limiterAt(db, p, c), c
}

func limiterAt(db DBTX, p Policy, c *clock) *Limiter[string] {
	return NewLimiter(db, LimiterConfig[string]{Policy: p, Now: c.now})
}

func mustAcquire[S any](t *testing.T, l *Limiter[S], subject S, cost int64) Decision {
	t.Helper()
	d, err := l.TryAcquire(t.Context(), subject, cost)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func mustPeek[S any](t *testing.T, l *Limiter[S], subject S) Decision {
	t.Helper()
	d, err := l.Peek(t.Context(), subject)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// limiterRow is all of a row of limiter_buckets as text, with the system columns that
// change with any write or lock.
func limiterRow(t *testing.T, db DBTX) string {
	t.Helper()
	var row string
	err := db.QueryRow(t.Context(), "SELECT b::text || ' ' || xmin || ' ' || xmax || ' ' || ctid FROM plexsphere.limiter_buckets AS b").Scan(&row)
	if errors.Is(err, pgx.ErrNoRows) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	return row
}

// unreachable is a database that must not be asked.
type unreachable struct{ t *testing.T }

func (u unreachable) fail(sql string) {
	u.t.Helper()
	u.t.Errorf("the database was asked: %s", sql)
}

func (u unreachable) Exec(_ context.Context, sql string, _ ...any) (pgconn.CommandTag, error) {
	u.fail(sql)
	return pgconn.CommandTag{}, nil
}

func (u unreachable) Query(_ context.Context, sql string, _ ...any) (pgx.Rows, error) {
	u.fail(sql)
	return nil, errors.New("unreachable")
}

func (u unreachable) QueryRow(_ context.Context, sql string, _ ...any) pgx.Row {
	u.fail(sql)
	return failingRow{errors.New("unreachable")}
}

func TestPolicyConstructors(t *testing.T) {
	t.Parallel()

	if got, want := PerSecond(100), (Policy{Permits: 100, Per: time.Second, Burst: 100}); got != want {
		t.Errorf("PerSecond(100) = %+v, want %+v", got, want)
	}
	if got, want := PerMinute(5000), (Policy{Permits: 5000, Per: time.Minute, Burst: 5000}); got != want {
		t.Errorf("PerMinute(5000) = %+v, want %+v", got, want)
	}
}

// The life of one bucket: the burst at once, then the rate; smooth, and never above the
// capacity. A denial costs nothing.
func TestLimiterTimeline(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, clock := newLimiter(pool, Policy{Permits: 10, Per: time.Second, Burst: 20}) // a token each 100 ms
	const ms = time.Millisecond
	for i, step := range []struct {
		at   time.Duration // after noon
		cost int64         // 0: peek
		want Decision
	}{
		{cost: 0, want: Decision{Allowed: true, Remaining: 20}},
		{cost: 1, want: Decision{Allowed: true, Remaining: 19, ResetAfter: 100 * ms}},
		{cost: 16, want: Decision{Allowed: true, Remaining: 3, ResetAfter: 1700 * ms}},
		{cost: 5, want: Decision{Remaining: 3, ResetAfter: 1700 * ms, RetryAfter: 200 * ms}}, // untouched balance
		{cost: 3, want: Decision{Allowed: true, ResetAfter: 2000 * ms}},
		{cost: 1, want: Decision{ResetAfter: 2000 * ms, RetryAfter: 100 * ms}},
		{cost: 0, want: Decision{ResetAfter: 2000 * ms, RetryAfter: 100 * ms}},
		{at: 50 * ms, cost: 0, want: Decision{ResetAfter: 1950 * ms, RetryAfter: 50 * ms}},
		{at: 50 * ms, cost: 1, want: Decision{ResetAfter: 1950 * ms, RetryAfter: 50 * ms}},
		{at: 100*ms - time.Microsecond, cost: 1, want: Decision{ResetAfter: 1900*ms + time.Microsecond, RetryAfter: time.Microsecond}},
		{at: 100 * ms, cost: 0, want: Decision{Allowed: true, Remaining: 1, ResetAfter: 1900 * ms}},
		{at: 100 * ms, cost: 1, want: Decision{Allowed: true, ResetAfter: 2000 * ms}},
		{at: 350 * ms, cost: 2, want: Decision{Allowed: true, ResetAfter: 1950 * ms}}, // half a token stays
		{at: 400 * ms, cost: 1, want: Decision{Allowed: true, ResetAfter: 2000 * ms}},
		{at: 300 * ms, cost: 1, want: Decision{ResetAfter: 2100 * ms, RetryAfter: 200 * ms}},                     // a clock that lags
		{at: 300 * ms, cost: 20, want: Decision{ResetAfter: 2100 * ms, RetryAfter: 2100 * ms}},                   // refills nothing
		{at: 2400 * ms, cost: 20, want: Decision{Allowed: true, ResetAfter: 2000 * ms}},                          // and delays nothing
		{at: time.Hour, cost: 0, want: Decision{Allowed: true, Remaining: 20}},                                   // expired, and full
		{at: time.Hour, cost: 20, want: Decision{Allowed: true, ResetAfter: 2000 * ms}},                          // once,
		{at: time.Hour, cost: 1, want: Decision{ResetAfter: 2000 * ms, RetryAfter: 100 * ms}},                    // not twice
		{at: 10 * 8766 * time.Hour, cost: 1, want: Decision{Allowed: true, Remaining: 19, ResetAfter: 100 * ms}}, // T03
	} {
		clock.set(noon.Add(step.at))
		var got Decision
		if step.cost == 0 {
			got = mustPeek(t, l, "user:42")
		} else {
			got = mustAcquire(t, l, "user:42", step.cost)
		}
		if got != step.want {
			t.Errorf("step %d, at %v, cost %d: %+v, want %+v", i, step.at, step.cost, got, step.want)
		}
	}
	if got := mustAcquire(t, l, "user:43", 1); got.Remaining != 19 {
		t.Errorf("another subject has %d left, want 19", got.Remaining)
	}
}

// Law 2: a denial writes nothing, and locks nothing either. A peek never does.
func TestLimiterDenialWritesNothing(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, clock := newLimiter(pool, PerSecond(10))
	if mustPeek(t, l, "a"); limiterRow(t, pool) != "" {
		t.Error("a peek made a row")
	}
	mustAcquire(t, l, "a", 10)
	row := limiterRow(t, pool)
	for range 3 {
		clock.advance(10 * time.Millisecond)
		if mustAcquire(t, l, "a", 1).Allowed || mustPeek(t, l, "a").Allowed {
			t.Fatal("an empty bucket allowed")
		}
	}
	if got := limiterRow(t, pool); got != row {
		t.Errorf("after denials the row is %s, want %s", got, row)
	}
	clock.advance(time.Minute)
	if !mustPeek(t, l, "a").Allowed {
		t.Error("a full bucket denied")
	}
	if got := limiterRow(t, pool); got != row {
		t.Errorf("after a peek the row is %s, want %s", got, row)
	}
}

// A denied take doesn't wait for whoever holds the row: it is refused by what is
// committed. One that may be covered does wait, and never takes a locked row for a
// missing one (P06).
func TestP06LimiterOnALockedRow(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, _ := newLimiter(pool, PerSecond(10))
	mustAcquire(t, l, "a", 8)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context()) //nolint:errcheck // committed below
	inTx, _ := newLimiter(tx, PerSecond(10))
	mustAcquire(t, inTx, "a", 2)

	if d := mustAcquire(t, l, "a", 3); d.Allowed || d.Remaining != 2 {
		t.Errorf("a take beside an open one: %+v, want denied with 2", d)
	}
	done := make(chan Decision)
	go func() {
		d, err := l.TryAcquire(t.Context(), "a", 2)
		if err != nil {
			t.Error(err)
		}
		done <- d
	}()
	waitForLock(t, pool)
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d := <-done; d.Allowed || d.Remaining != 0 {
		t.Errorf("the take that waited: %+v, want denied with 0", d)
	}
}

// waitForLock returns once some session of the database waits for a lock.
func waitForLock(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for count(t, pool, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()") == 0 {
		if time.Now().After(deadline) {
			t.Fatal("nobody waits for a lock")
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func TestLimiterReset(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, _ := newLimiter(pool, PerSecond(10))
	mustAcquire(t, l, "a", 10)
	mustAcquire(t, l, "b", 10)
	for range 2 { // no row is no error
		if err := l.Reset(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
	}
	if d := mustPeek(t, l, "a"); d != (Decision{Allowed: true, Remaining: 10}) {
		t.Errorf("after a reset: %+v, want a full bucket", d)
	}
	if d := mustAcquire(t, l, "a", 10); !d.Allowed {
		t.Error("a bucket that was reset is not full")
	}
	if d := mustPeek(t, l, "b"); d.Allowed {
		t.Error("a reset reached another subject")
	}
}

// C18: texts that look alike when they are joined are different buckets.
func TestC18LimiterNamespaces(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	for _, key := range []struct{ namespace, subject string }{
		{"", ""},
		{"ratelimit:", ""},
		{"ratelimit", ":"}, // "" is ratelimit
		{"a", "bc"},
		{"ab", "c"},
		{"abc", ""},
		{"a", "b\x00c"},
		{"a\x00b", "c"},
		{"a\x01", "bc"},
		{"a", "\x01bc"},
		{"login", "user:42"},
		{"api", "user:42"},
		{"login:user", "42"},
		{`a`, `\x00`},
		{"a", "\x00"},
		{"a", "b|c%\n\"'."},
	} {
		l := NewLimiter(pool, LimiterConfig[string]{Policy: PerSecond(1), Namespace: key.namespace, Now: newClock(noon).now})
		if d := mustAcquire(t, l, key.subject, 1); !d.Allowed {
			t.Errorf("namespace %q, subject %q: denied by another bucket", key.namespace, key.subject)
		}
		if d := mustAcquire(t, l, key.subject, 1); d.Allowed {
			t.Errorf("namespace %q, subject %q: allowed twice", key.namespace, key.subject)
		}
	}
	l := NewLimiter(pool, LimiterConfig[string]{Policy: PerSecond(1), Namespace: DefaultNamespace, Now: newClock(noon).now})
	if d := mustAcquire(t, l, "", 1); d.Allowed {
		t.Error("the default namespace is not " + DefaultNamespace)
	}
}

// C29: any bytes, at any length, are a subject and a namespace, and their columns can be
// read.
func TestC29LimiterAnyBytes(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	long := make([]byte, 64<<10)
	if _, err := rand.Read(long); err != nil {
		t.Fatal(err)
	}
	longer := string(long) + "\x00"
	for _, text := range []string{"", "\x00", "\xff\xfe", "a\x00b", "\xed\xa0\x80", "𝄞\u202e", strings.Repeat("é", 300), string(long), longer} {
		l := NewLimiter(pool, LimiterConfig[[]byte]{Policy: PerSecond(1), Codec: BytesKey[[]byte], Namespace: "n" + text, Now: newClock(noon).now})
		if !mustAcquire(t, l, []byte(text), 1).Allowed || mustAcquire(t, l, []byte(text), 1).Allowed {
			t.Errorf("subject %.20q: want one of two takes allowed", text)
		}
		if mustPeek(t, l, []byte(text)).Allowed {
			t.Errorf("subject %.20q: an empty bucket allows", text)
		}
	}
	l := NewLimiter(pool, LimiterConfig[string]{Policy: PerSecond(1), Namespace: "log\x00in"})
	mustAcquire(t, l, "user \"42\"\n\xff", 1)
	if got := count(t, pool, `SELECT count(*) FROM plexsphere.limiter_buckets WHERE namespace = 'log\x00in' AND subject = 'user "42"\n\xff'`); got != 1 {
		t.Error("the bucket isn't found by its readable columns")
	}
	if got := count(t, pool, "SELECT max(octet_length(subject)) FROM plexsphere.limiter_buckets"); got > 4*maxReadable+8 {
		t.Errorf("a subject of 64 KiB takes %d bytes of its row", got)
	}
}

func TestKeyCodecs(t *testing.T) {
	t.Parallel()

	type account int32
	for _, tt := range []struct {
		name string
		key  func() ([]byte, error)
		want string
	}{
		{"string", func() ([]byte, error) { return StringKey("user:42") }, "user:42"},
		{"bytes", func() ([]byte, error) { return BytesKey([]byte{0, 0xff}) }, "\x00\xff"},
		{"no bytes", func() ([]byte, error) { return BytesKey[[]byte](nil) }, ""},
		{"int", func() ([]byte, error) { return IntKey(-42) }, "-42"},
		{"int64", func() ([]byte, error) { return IntKey[int64](math.MinInt64) }, "-9223372036854775808"},
		{"own int", func() ([]byte, error) { return IntKey(account(7)) }, "7"},
		{"uint64", func() ([]byte, error) { return UintKey[uint64](math.MaxUint64) }, "18446744073709551615"},
		{"UUID", func() ([]byte, error) { return UUIDKey(uuid.MustParse("0A1B2C3D-4e5f-6071-8293-a4b5c6d7e8f9")) }, "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"},
		{"our key", func() ([]byte, error) { return UUIDKey(Key{15: 1}) }, "00000000-0000-0000-0000-000000000001"},
	} {
		got, err := tt.key()
		if err != nil || string(got) != tt.want {
			t.Errorf("%s: %q, %v, want %q", tt.name, got, err, tt.want)
		}
	}
}

// Subjects of any type: those with a ready codec, and one of the caller's own.
func TestLimiterSubjects(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	type route struct{ method, path string }
	oneEach(t, NewLimiter(pool, LimiterConfig[int]{Policy: PerMinute(1), Codec: IntKey[int], Namespace: "int"}), 1, -1, 11)
	oneEach(t, NewLimiter(pool, LimiterConfig[uint8]{Policy: PerMinute(1), Codec: UintKey[uint8], Namespace: "uint8"}), 0, 1, 255)
	oneEach(t, NewLimiter(pool, LimiterConfig[uuid.UUID]{Policy: PerMinute(1), Codec: UUIDKey[uuid.UUID], Namespace: "uuid"}), uuid.New(), uuid.New())
	oneEach(t, NewLimiter(pool, LimiterConfig[string]{Policy: PerMinute(1), Namespace: "string"}), "1", "11", "")
	oneEach(t, NewLimiter(pool, LimiterConfig[route]{
		Policy:    PerMinute(1),
		Codec:     func(r route) ([]byte, error) { return fmt.Appendf(nil, "%q %q", r.method, r.path), nil },
		Namespace: "route",
	}), route{"GET", "/"}, route{"POST", "/"}, route{"GET", `/" "`})
}

func oneEach[S any](t *testing.T, l *Limiter[S], subjects ...S) {
	t.Helper()
	for _, s := range subjects {
		if !mustAcquire(t, l, s, 1).Allowed {
			t.Errorf("subject %v was denied by another", s)
		}
		if mustAcquire(t, l, s, 1).Allowed {
			t.Errorf("subject %v was allowed twice", s)
		}
	}
}

// What is invalid reaches no query, and says what it is.
func TestLimiterChecksBeforeAnyQuery(t *testing.T) {
	t.Parallel()

	db := unreachable{t}
	good := PerSecond(10)
	refusal := errors.New("no such user")
	for _, tt := range []struct {
		name      string
		cfg       LimiterConfig[string]
		cost      int64
		want      string
		costsOnly bool // a peek is valid
	}{
		{name: "no policy", cost: 1, want: "permits must be above 0"},
		{name: "no capacity", cfg: LimiterConfig[string]{Policy: Policy{Permits: 1, Per: time.Second}}, cost: 1, want: "burst must be above 0"},
		{name: "no refill", cfg: LimiterConfig[string]{Policy: PerSecond(0)}, cost: 1, want: "permits must be above 0"},
		{name: "negative", cfg: LimiterConfig[string]{Policy: PerMinute(-3)}, cost: 1, want: "permits must be above 0"},
		{name: "short period", cfg: LimiterConfig[string]{Policy: Policy{Permits: 1, Per: 999, Burst: 1}}, cost: 1, want: "at least one, not 999ns"},
		{name: "too large", cfg: LimiterConfig[string]{Policy: PerSecond(1 << 43)}, cost: 1, want: "as far as levels are exact"},
		{name: "cost 0", cfg: LimiterConfig[string]{Policy: good}, want: "the cost must be 1 to the burst, 10, not 0", costsOnly: true},
		{name: "cost below 0", cfg: LimiterConfig[string]{Policy: good}, cost: -1, want: "not -1", costsOnly: true},
		{name: "cost above capacity", cfg: LimiterConfig[string]{Policy: good}, cost: 11, want: "not 11", costsOnly: true},
		{name: "cost that would wrap", cfg: LimiterConfig[string]{Policy: good}, cost: math.MinInt64, want: "not -9223372036854775808", costsOnly: true},
		{name: "refused subject", cfg: LimiterConfig[string]{Policy: good, Codec: func(string) ([]byte, error) { return nil, refusal }}, cost: 1, want: "no such user"},
	} {
		l := NewLimiter(db, tt.cfg)
		calls := map[string]error{}
		_, calls["TryAcquire"] = l.TryAcquire(t.Context(), "a", tt.cost)
		_, calls["Command"] = l.Command("a", tt.cost)
		if !tt.costsOnly {
			_, calls["Peek"] = l.Peek(t.Context(), "a")
			calls["Reset"] = l.Reset(t.Context(), "a")
		}
		for call, err := range calls {
			if !errors.Is(err, ErrInvalidArgument) || !strings.Contains(err.Error(), tt.want) || !strings.Contains(err.Error(), `"ratelimit"`) {
				t.Errorf("%s: %s: %v, want one that says %q", tt.name, call, err, tt.want)
			}
		}
		if strings.Contains(tt.want, refusal.Error()) && !errors.Is(calls["Peek"], refusal) {
			t.Errorf("%s: %v does not wrap the codec's error", tt.name, calls["Peek"])
		}
	}

	if _, err := NewLimiter(db, LimiterConfig[int]{Policy: good}).TryAcquire(t.Context(), 1, 1); !errors.Is(err, ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "subjects of type int need a codec") {
		t.Errorf("without a codec: %v", err)
	}
	for _, now := range []time.Time{time.Unix(1<<40, 0), time.Unix(-1<<40, 0)} {
		l := NewLimiter(db, LimiterConfig[string]{Policy: good, Now: func() time.Time { return now }})
		if _, err := l.TryAcquire(t.Context(), "a", 1); err == nil {
			t.Errorf("TryAcquire at %v: no error", now)
		}
		if _, err := l.Peek(t.Context(), "a"); err == nil {
			t.Errorf("Peek at %v: no error", now)
		}
	}
}

func TestNewLimiterPanicsOnNil(t *testing.T) {
	t.Parallel()

	for name, db := range map[string]DBTX{"nil": nil, "nil pool": (*pgxpool.Pool)(nil)} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: NewLimiter did not panic", name)
				}
			}()
			NewLimiter(db, LimiterConfig[string]{Policy: PerSecond(1)})
		}()
	}
}

// Law 3: an unreachable store is an error of each call, never an answer.
func TestLimiterUnavailable(t *testing.T) {
	t.Parallel()

	cause := errors.New("connection refused")
	db := &failingDB{err: cause}
	l, _ := newLimiter(db, PerSecond(10))
	d, err := l.TryAcquire(t.Context(), "a", 1)
	if !errors.Is(err, cause) || errors.Is(err, ErrInvalidArgument) || d != (Decision{}) {
		t.Errorf("TryAcquire = %+v, %v, want the cause", d, err)
	}
	if d, err = l.Peek(t.Context(), "a"); !errors.Is(err, cause) || d != (Decision{}) {
		t.Errorf("Peek = %+v, %v, want the cause", d, err)
	}
	if err := l.Reset(t.Context(), "a"); !errors.Is(err, cause) {
		t.Errorf("Reset = %v, want the cause", err)
	}
	if db.queries != 3 {
		t.Errorf("%d queries for three calls, want one each", db.queries)
	}
}

// A bucket's usage is the database's: another limiter of the same namespace goes on where
// the first stopped (C74: however often the policy is loaded).
func TestC74LimiterReloaded(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	var allowed int
	for range 100 {
		l, _ := newLimiter(pool, PerSecond(10))
		if mustAcquire(t, l, "a", 1).Allowed {
			allowed++
		}
	}
	if allowed != 10 {
		t.Errorf("%d of 100 takes allowed, want 10", allowed)
	}
}

func TestLimiterInAnotherSchema(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	pool := newPool(t, dsn, 2)
	const schema = "another-1"
	if err := Migrate(t.Context(), dsn, schema); err != nil {
		t.Fatal(err)
	}
	clock := newClock(noon)
	other := NewLimiter(pool, LimiterConfig[string]{Policy: PerSecond(1), Schema: schema, Now: clock.now})
	if !mustAcquire(t, other, "a", 1).Allowed || mustAcquire(t, other, "a", 1).Allowed || mustPeek(t, other, "a").Allowed {
		t.Error("want one take of two allowed")
	}
	if d := mustAcquire(t, limiterAt(pool, PerSecond(1), clock), "a", 1); !d.Allowed {
		t.Error("two schemas share a bucket")
	}
	if n, err := NewStoreIn(pool, schema).DeleteExpired(t.Context(), noon.Add(time.Hour)); n != 1 || err != nil {
		t.Errorf("DeleteExpired = %d, %v, want 1", n, err)
	}
	if err := other.Reset(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

// The policy's change on an existing namespace: a bucket carries over the lesser of its
// tokens and the new capacity.
func TestLimiterPolicyChange(t *testing.T) {
	t.Parallel()

	const ms = time.Millisecond
	tenASecond := Policy{Permits: 10, Per: time.Second, Burst: 20}
	for _, tt := range []struct {
		name     string
		from, to Policy
		spend    int64         // under from
		after    time.Duration // until the change
		cost     int64
		want     Decision
	}{
		{"raised", tenASecond, PerSecond(100), 15, 0, 1, Decision{Allowed: true, Remaining: 4, ResetAfter: 960 * ms}},
		{"raised above a cost that never fitted", tenASecond, PerSecond(100), 15, 0, 50, Decision{Remaining: 5, ResetAfter: 950 * ms, RetryAfter: 450 * ms}},
		{"lowered", PerSecond(100), PerSecond(10), 40, 0, 1, Decision{Allowed: true, Remaining: 9, ResetAfter: 100 * ms}},
		{"lowered below what is left of little", PerSecond(100), PerSecond(10), 98, 0, 1, Decision{Allowed: true, Remaining: 1, ResetAfter: 900 * ms}},
		{"refilled by the old policy first", tenASecond, PerSecond(1000), 20, 500 * ms, 1, Decision{Allowed: true, Remaining: 4, ResetAfter: 996 * ms}},
		{"a full old bucket is no full new one", tenASecond, PerSecond(1000), 20, time.Hour, 20, Decision{Allowed: true, ResetAfter: time.Second}},
		{"C34: another period", PerSecond(10), PerMinute(10), 4, 50 * ms, 1, Decision{Allowed: true, Remaining: 5, ResetAfter: 27 * time.Second}},
		{"a period that doesn't divide", Policy{Permits: 1, Per: 3 * time.Second, Burst: 9}, Policy{Permits: 1, Per: 7 * time.Microsecond, Burst: 9}, 5, 1000*ms + 1000, 4, Decision{Allowed: true, ResetAfter: 61 * time.Microsecond}},
		{"only the rate", PerSecond(10), Policy{Permits: 1, Per: time.Second, Burst: 10}, 10, 100 * ms, 1, Decision{Allowed: true, ResetAfter: 10 * time.Second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()

			_, pool := setup(t)
			clock := newClock(noon)
			mustAcquire(t, limiterAt(pool, tt.from, clock), "a", tt.spend)
			clock.advance(tt.after)
			to := limiterAt(pool, tt.to, clock)
			peek := mustPeek(t, to, "a")
			got := mustAcquire(t, to, "a", tt.cost)
			if got != tt.want {
				t.Errorf("after the change: %+v, want %+v", got, tt.want)
			}
			left := got.Remaining
			if got.Allowed {
				left += tt.cost
			}
			if peek.Remaining != left {
				t.Errorf("a peek saw %d tokens, and the take found %d", peek.Remaining, left)
			}
		})
	}
}

// A bucket whose old capacity lies below the cost would be stuck for ever if denials left
// it under the old policy.
func TestLimiterRaisedPolicyIsReached(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	clock := newClock(noon)
	mustAcquire(t, limiterAt(pool, PerSecond(5), clock), "a", 5)
	raised := limiterAt(pool, PerSecond(100), clock)
	d := mustAcquire(t, raised, "a", 80)
	if d.Allowed || d.RetryAfter != 800*time.Millisecond {
		t.Fatalf("an empty bucket: %+v, want denied for 800ms", d)
	}
	clock.advance(d.RetryAfter)
	if d := mustAcquire(t, raised, "a", 80); !d.Allowed {
		t.Errorf("after the time that the denial told: %+v, want allowed", d)
	}
}

// A peek at a bucket of a slower policy tells the wait by that one: peeking doesn't
// change it.
func TestLimiterPeekUnderAnotherPolicy(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	clock := newClock(noon)
	mustAcquire(t, limiterAt(pool, PerMinute(1), clock), "a", 1)
	l := limiterAt(pool, PerSecond(10), clock)
	want := Decision{RetryAfter: time.Minute, ResetAfter: time.Second}
	if d := mustPeek(t, l, "a"); d != want {
		t.Errorf("Peek = %+v, want %+v", d, want)
	}
	clock.advance(time.Minute - time.Microsecond)
	if d := mustPeek(t, l, "a"); d.Allowed || d.RetryAfter != time.Microsecond {
		t.Errorf("a microsecond before: %+v", d)
	}
	clock.advance(time.Microsecond)
	if d := mustPeek(t, l, "a"); !d.Allowed || d.Remaining != 1 {
		t.Errorf("after the time that the peek told: %+v, want allowed", d)
	}
}

// A hundred takes at one instant from two pools admit exactly the burst, also when each is
// the first of its bucket (P05), and report no balance twice.
func TestP05LimiterHundredFromTwoPools(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	pools := []*pgxpool.Pool{newPool(t, dsn, 12), newPool(t, dsn, 12)}
	for round := range 8 {
		const burst = 37
		var (
			mu        sync.Mutex
			remaining = map[int64]int{}
			denied    int
		)
		together(100, func(i int) {
			l, _ := newLimiter(pools[i%2], PerSecond(burst))
			d, err := l.TryAcquire(t.Context(), fmt.Sprint("subject ", round), 1)
			if err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if d.Allowed {
				remaining[d.Remaining]++
				return
			}
			denied++
			if d.Remaining != 0 || d.RetryAfter == 0 {
				t.Errorf("a denial says %+v, want nothing left", d)
			}
		})
		want := map[int64]int{}
		for i := range int64(burst) {
			want[i] = 1
		}
		if diff := cmp.Diff(want, remaining); diff != "" || denied != 100-burst {
			t.Errorf("round %d: %d denied, and balances after (-want +got):\n%s", round, denied, diff)
		}
	}
}

// P04: a limit of one, and a hundred at once.
func TestP04LimiterOneOfAHundred(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	var allowed atomic.Int64
	together(100, func(int) {
		l, _ := newLimiter(pool, PerMinute(1))
		d, err := l.TryAcquire(t.Context(), "a", 1)
		if err != nil {
			t.Error(err)
		}
		if d.Allowed {
			allowed.Add(1)
		}
	})
	if allowed.Load() != 1 {
		t.Errorf("%d allowed, want 1", allowed.Load())
	}
}

// P07: an earlier clock refills nothing and moves no refill back, whatever it waited for.
func TestP07LimiterClocksDisagree(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	clock := newClock(noon)
	l := limiterAt(pool, PerSecond(10), clock)
	mustAcquire(t, l, "a", 5)
	for _, skew := range []time.Duration{-5 * time.Minute, 5 * time.Minute, -5 * time.Minute} {
		clock.set(noon.Add(skew))
		mustAcquire(t, l, "a", 1)
	}
	// 5 - 1, full at +5 min, - 1, - 1.
	want := noon.Add(5 * time.Minute)
	var at time.Time
	var level int64
	if err := pool.QueryRow(t.Context(), "SELECT refilled_at, level FROM plexsphere.limiter_buckets").Scan(&at, &level); err != nil {
		t.Fatal(err)
	}
	if !at.Equal(want) || level != 8_000_000 {
		t.Errorf("the bucket holds %d at %v, want 8000000 at %v", level, at, want)
	}
}

// C38: what the header says in whole seconds is never too early, and never 0.
func TestC38RetryAfterSeconds(t *testing.T) {
	t.Parallel()

	for wait, want := range map[time.Duration]int64{
		0: 1, time.Microsecond: 1, 200 * time.Millisecond: 1, time.Second: 1, 1001 * time.Millisecond: 2,
		59_999_900 * time.Microsecond: 60, time.Minute: 60, math.MaxInt64: 9_223_372_037,
	} {
		if got := (Decision{RetryAfter: wait}).RetryAfterSeconds(); got != want {
			t.Errorf("%v is %d s, want %d", wait, got, want)
		}
	}
	if got := (Decision{Allowed: true}).RetryAfterSeconds(); got != 0 {
		t.Errorf("allowed: %d s, want 0", got)
	}
}

// C39: a clock that went back makes the wait longer by that much, never negative or 0.
func TestC39LimiterClockMovedBack(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, clock := newLimiter(pool, PerSecond(1))
	mustAcquire(t, l, "a", 1)
	clock.advance(-10 * time.Second)
	for _, d := range []Decision{mustAcquire(t, l, "a", 1), mustPeek(t, l, "a")} {
		if d.Allowed || d.RetryAfter != 11*time.Second || d.RetryAfterSeconds() != 11 || d.ResetAfter != 11*time.Second {
			t.Errorf("10 s before the take: %+v, want 11 s", d)
		}
	}
	clock.advance(11 * time.Second)
	if !mustAcquire(t, l, "a", 1).Allowed {
		t.Error("denied after the time that was told")
	}
}

// C60: a thousand a month come back smoothly.
func TestC60LimiterSmoothMonth(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	month := 28 * 24 * time.Hour
	l, clock := newLimiter(pool, Policy{Permits: 1000, Per: month, Burst: 1000})
	mustAcquire(t, l, "a", 1000)
	clock.advance(month / 2)
	if d := mustPeek(t, l, "a"); d.Remaining != 500 || d.ResetAfter != month/2 {
		t.Errorf("after half a month: %+v, want 500 left", d)
	}
	if d := mustAcquire(t, l, "a", 501); d.Allowed || d.RetryAfter != month/1000 {
		t.Errorf("a cost of 501: %+v, want denied for %v", d, month/1000)
	}
	if d := mustAcquire(t, l, "a", 500); !d.Allowed {
		t.Errorf("a cost of 500: %+v, want allowed", d)
	}
}

// T01: asking often doesn't starve a slow bucket.
func TestT01LimiterSlowBucket(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, clock := newLimiter(pool, Policy{Permits: 1, Per: 10 * time.Second, Burst: 1})
	mustAcquire(t, l, "a", 1)
	var allowed int
	first := time.Duration(0)
	for at := 900 * time.Millisecond; at <= time.Hour; at += 900 * time.Millisecond {
		clock.set(noon.Add(at))
		if mustAcquire(t, l, "a", 1).Allowed {
			allowed++
			if first == 0 {
				first = at
			}
		}
	}
	// A burst of one wastes what refills between a full bucket and the next ask.
	if first != 10_800*time.Millisecond || allowed != 333 {
		t.Errorf("first allowed after %v and %d in an hour, want 10.8s and 333", first, allowed)
	}

	// With room for two nothing is wasted.
	l, clock = newLimiter(pool, Policy{Permits: 1, Per: 10 * time.Second, Burst: 2})
	mustAcquire(t, l, "b", 2)
	allowed = 0
	for at := 900 * time.Millisecond; at <= time.Hour; at += 900 * time.Millisecond {
		clock.set(noon.Add(at))
		if mustAcquire(t, l, "b", 1).Allowed {
			allowed++
		}
	}
	if allowed != 360 {
		t.Errorf("%d tokens in an hour, want 360", allowed)
	}
}

// T04: many tokens a millisecond have exact times as well.
func TestT04LimiterFastBucket(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, _ := newLimiter(pool, PerSecond(5000))
	if d := mustAcquire(t, l, "a", 1); d.ResetAfter != 200*time.Microsecond {
		t.Errorf("a token of 5000/s is back after %v, want 200µs", d.ResetAfter)
	}
	l, _ = newLimiter(pool, PerSecond(3_000_000))
	if d := mustAcquire(t, l, "b", 2); d.ResetAfter != time.Microsecond { // rounded up
		t.Errorf("two tokens of 3 a µs are back after %v, want 1µs", d.ResetAfter)
	}
}

// T05 and T07: bursts at the edges of any window get no second capacity.
func TestT05T07LimiterNoDoubleBurst(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, clock := newLimiter(pool, PerSecond(3))
	var allowed int
	for at := time.Duration(0); at < time.Minute; at += 100 * time.Millisecond {
		clock.set(noon.Add(at))
		if mustAcquire(t, l, "a", 1).Allowed {
			allowed++
		}
	}
	if allowed > 3*60+3 || allowed < 3*60 {
		t.Errorf("%d allowed in a minute of 3/s, want 180 to 183", allowed)
	}

	l, clock = newLimiter(pool, PerMinute(100))
	allowed = 0
	for _, at := range []time.Duration{59 * time.Second, 60 * time.Second} {
		clock.set(noon.Add(at))
		for range 100 {
			if mustAcquire(t, l, "b", 1).Allowed {
				allowed++
			}
		}
	}
	if allowed != 101 {
		t.Errorf("%d allowed around the minute's edge, want 101", allowed)
	}
}

// Commands of several limiters and subjects in one batch: one round trip, each with its
// decision.
func TestLimiterCommandsInABatch(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, clock := newLimiter(pool, PerSecond(10))
	login := NewLimiter(pool, LimiterConfig[int]{Policy: PerMinute(3), Codec: IntKey[int], Namespace: "login", Now: clock.now})
	var (
		batch    pgx.Batch
		commands []*Command
	)
	for _, take := range []struct {
		subject string
		cost    int64
	}{{"a", 4}, {"a", 4}, {"a", 4}, {"b", 10}} {
		c, err := l.Command(take.subject, take.cost)
		if err != nil {
			t.Fatal(err)
		}
		batch.Queue(c.SQL, c.Args...)
		commands = append(commands, c)
	}
	c, err := login.Command(42, 2)
	if err != nil {
		t.Fatal(err)
	}
	var viaFunction Decision
	batch.Queue(c.SQL, c.Args...).QueryRow(func(row pgx.Row) error {
		viaFunction, err = c.Decision(row)
		return err
	})

	results := pool.SendBatch(t.Context(), &batch)
	var got []Decision
	for _, c := range commands {
		d, err := c.Decision(results.QueryRow())
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, d)
	}
	if err := results.Close(); err != nil {
		t.Fatal(err)
	}
	const ms = time.Millisecond
	want := []Decision{
		{Allowed: true, Remaining: 6, ResetAfter: 400 * ms},
		{Allowed: true, Remaining: 2, ResetAfter: 800 * ms},
		{Remaining: 2, ResetAfter: 800 * ms, RetryAfter: 200 * ms},
		{Allowed: true, ResetAfter: time.Second},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("decisions (-want +got):\n%s", diff)
	}
	if want := (Decision{Allowed: true, Remaining: 1, ResetAfter: 40 * time.Second}); viaFunction != want {
		t.Errorf("the queued function read %+v, want %+v", viaFunction, want)
	}
	if d := mustPeek(t, login, 42); d.Remaining != 1 {
		t.Errorf("after the batch %d are left, want 1", d.Remaining)
	}

	// An error of the batch is an error of the decision.
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	results = pool.SendBatch(ctx, &batch)
	if d, err := commands[0].Decision(results.QueryRow()); err == nil || d != (Decision{}) {
		t.Errorf("on a failed batch: %+v, %v, want an error", d, err)
	}
	results.Close()
}

// In a transaction a take stands or falls with it, at READ COMMITTED and above.
func TestLimiterInATransaction(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	l, clock := newLimiter(pool, PerSecond(10))
	for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		for _, commit := range []bool{false, true} {
			subject := fmt.Sprint(isolation, commit)
			tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: isolation})
			if err != nil {
				t.Fatal(err)
			}
			inTx := limiterAt(tx, PerSecond(10), clock)
			mustAcquire(t, inTx, subject, 4)
			if d := mustAcquire(t, inTx, subject, 4); d.Remaining != 2 {
				t.Errorf("%s: a second take leaves %d, want 2", subject, d.Remaining)
			}
			if d := mustPeek(t, inTx, subject); d.Remaining != 2 {
				t.Errorf("%s: a peek sees %d, want 2", subject, d.Remaining)
			}
			end, want := tx.Rollback, int64(10)
			if commit {
				end, want = tx.Commit, 2
			}
			if err := end(t.Context()); err != nil {
				t.Fatal(err)
			}
			if d := mustPeek(t, l, subject); d.Remaining != want {
				t.Errorf("%s: after the transaction %d are left, want %d", subject, d.Remaining, want)
			}
		}
	}

	// On an older snapshot a take fails rather than decide by what is gone.
	mustAcquire(t, l, "a", 1)
	tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context()) //nolint:errcheck // nothing is left to lose
	count(t, tx, "SELECT 1")
	mustAcquire(t, l, "a", 9)
	_, err = limiterAt(tx, PerSecond(10), clock).TryAcquire(t.Context(), "a", 1)
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "40001" {
		t.Errorf("on an old snapshot: %v, want a serialization failure", err)
	}
}

// Each way of talking to the server will do, as poolers ask for them.
func TestLimiterQueryModes(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		cfg, err := PoolConfig(dsn)
		if err != nil {
			t.Fatal(err)
		}
		cfg.ConnConfig.DefaultQueryExecMode = mode
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		l, _ := newLimiter(pool, PerSecond(3))
		subject := "mode\x00" + mode.String()
		if d := mustAcquire(t, l, subject, 2); d != (Decision{Allowed: true, Remaining: 1, ResetAfter: 666_667 * time.Microsecond}) {
			t.Errorf("%v: %+v", mode, d)
		}
		if d := mustPeek(t, l, subject); d.Remaining != 1 {
			t.Errorf("%v: a peek sees %+v", mode, d)
		}
		if err := l.Reset(t.Context(), subject); err != nil {
			t.Errorf("%v: %v", mode, err)
		}
		pool.Close()
	}
}

// P10: takes keep the table's updates heap-only. The server is the test's own, as that
// of TestP10UpdatesAreHeapOnly.
func TestP10LimiterUpdatesAreHeapOnly(t *testing.T) {
	t.Parallel()

	server, err := pgtest.Start(t.Context(), pgtest.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := Migrate(t.Context(), server.DSN("postgres"), DefaultSchema); err != nil {
		t.Fatal(err)
	}
	conn := newPool(t, server.DSN("postgres"), 1) // statistics are flushed by session
	l, clock := newLimiter(conn, PerSecond(1000))
	const rounds, subjects = 60, 20
	for range rounds {
		for i := range subjects {
			clock.advance(time.Millisecond)
			if !mustAcquire(t, l, strconv.Itoa(i), 3).Allowed {
				t.Fatal("denied")
			}
		}
	}
	if _, err := conn.Exec(t.Context(), "SELECT pg_stat_force_next_flush()"); err != nil {
		t.Fatal(err)
	}
	var updates, hot, size int64
	if err := conn.QueryRow(t.Context(), `
		SELECT n_tup_upd, n_tup_hot_upd, pg_table_size(relid) FROM pg_stat_user_tables
		WHERE schemaname = 'plexsphere' AND relname = 'limiter_buckets'`).Scan(&updates, &hot, &size); err != nil {
		t.Fatal(err)
	}
	if updates != (rounds-1)*subjects || hot*100 < updates*95 {
		t.Errorf("%d of %d updates were heap-only, want 95%% of %d", hot, updates, (rounds-1)*subjects)
	}
	if size > 256<<10 {
		t.Errorf("%d rows take %d bytes", subjects, size)
	}
}

// P08: behind pgbouncer in transaction mode, with more callers than sessions.
func TestP08LimiterBehindPgBouncer(t *testing.T) {
	t.Parallel()

	pool := mustConnect(t, pgtest.StartPgBouncer(t, pgtest.NewDatabase(t), nil)+"&pool_max_conns=20")
	l, _ := newLimiter(pool, PerSecond(100))
	var allowed atomic.Int64
	together(20, func(int) {
		for range 10 {
			d, err := l.TryAcquire(t.Context(), "a", 1)
			if err != nil {
				t.Error(err)
			}
			if d.Allowed {
				allowed.Add(1)
			}
		}
	})
	if allowed.Load() != 100 {
		t.Errorf("%d of 200 takes allowed, want 100", allowed.Load())
	}
	if d := mustPeek(t, l, "a"); d.Allowed {
		t.Errorf("a peek sees %+v, want nothing left", d)
	}
	if err := l.Reset(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

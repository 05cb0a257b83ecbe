package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

func newRecorder(t *testing.T, s *Store, config RecorderConfig) (*Recorder, *prometheus.Registry) {
	t.Helper()
	r := NewRecorder(s, config)
	registry := prometheus.NewRegistry()
	registry.MustRegister(r)
	return r, registry
}

func mustFlush(t *testing.T, r *Recorder) {
	t.Helper()
	if err := r.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// enrolled returns a consumer that the store knows.
func enrolled(t *testing.T, s *Store, name string) policy.Consumer {
	t.Helper()
	c := consumer(name)
	mustDecide(t, s, quotaRequest(c, dayMonth(1000, 1000), 1, noon))
	return c
}

// windowAt is noon's hour or day, moved by some.
func windowAt(u quota.Unit, move int) time.Time {
	d := time.Hour
	if u == quota.Day {
		d = day
	}
	return time.Unix(u.Window(noon.Add(time.Duration(move)*d).Unix()).Start, 0).UTC()
}

func mustHistory(t *testing.T, s *Store, q policy.HistoryQuery) []policy.ConsumerHistory {
	t.Helper()
	if q.Limit == 0 {
		q.Limit = 100
	}
	if q.From.IsZero() {
		q.From, q.To = noon.AddDate(0, 0, -5), noon.AddDate(0, 0, 5)
	}
	page, err := s.History(t.Context(), q)
	if err != nil {
		t.Fatal(err)
	}
	return page
}

// What was sent is in the history by hour and by day, as sums over flushes and replicas.
func TestHistory(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	a, b := enrolled(t, s, "a"), enrolled(t, s, "b")
	first, _ := newRecorder(t, s, RecorderConfig{})
	other, _ := newRecorder(t, s, RecorderConfig{})
	first.Record(a, false, 5, noon)
	first.Record(a, true, 7, noon) // refused: its units don't count
	first.Record(a, false, 2, noon.Add(time.Hour))
	first.Record(b, false, 1, noon)
	mustFlush(t, first)
	mustFlush(t, first) // nothing new
	other.Record(a, false, 3, noon)
	other.Record(a, false, -1, noon) // a refund is no request
	mustFlush(t, other)
	first.Record(a, false, 4, noon.AddDate(0, 0, 1))
	mustFlush(t, first)

	entries := func(name string) []policy.Entry { return []policy.Entry{{Key: "consumer", Value: name}} }
	hours := []policy.ConsumerHistory{
		{ID: a.ID, Domain: "test", Entries: entries("a"), Windows: []policy.HistoryWindow{
			{Start: windowAt(quota.Hour, 0), Sent: 3, Refused: 1, Units: 7},
			{Start: windowAt(quota.Hour, 1), Sent: 1, Units: 2},
			{Start: windowAt(quota.Hour, 24), Sent: 1, Units: 4},
		}},
		{ID: b.ID, Domain: "test", Entries: entries("b"), Windows: []policy.HistoryWindow{
			{Start: windowAt(quota.Hour, 0), Sent: 1, Units: 1},
		}},
	}
	days := []policy.ConsumerHistory{
		{ID: a.ID, Domain: "test", Entries: entries("a"), Windows: []policy.HistoryWindow{
			{Start: windowAt(quota.Day, 0), Sent: 4, Refused: 1, Units: 9},
			{Start: windowAt(quota.Day, 1), Sent: 1, Units: 4},
		}},
		{ID: b.ID, Domain: "test", Entries: entries("b"), Windows: []policy.HistoryWindow{
			{Start: windowAt(quota.Day, 0), Sent: 1, Units: 1},
		}},
	}
	if compareCounters(a.ID, b.ID) > 0 {
		hours[0], hours[1] = hours[1], hours[0]
		days[0], days[1] = days[1], days[0]
	}
	if diff := cmp.Diff(hours, mustHistory(t, s, policy.HistoryQuery{Domain: "test", Unit: quota.Hour})); diff != "" {
		t.Errorf("by hour (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(days, mustHistory(t, s, policy.HistoryQuery{Domain: "test", Unit: quota.Day})); diff != "" {
		t.Errorf("by day (-want +got):\n%s", diff)
	}
	// In pages, one consumer at a time, and the windows that begin in a span.
	if diff := cmp.Diff(hours[:1], mustHistory(t, s, policy.HistoryQuery{Domain: "test", Unit: quota.Hour, Limit: 1})); diff != "" {
		t.Errorf("the first page (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(hours[1:], mustHistory(t, s, policy.HistoryQuery{Domain: "test", Unit: quota.Hour, Limit: 1, After: hours[0].ID})); diff != "" {
		t.Errorf("the second page (-want +got):\n%s", diff)
	}
	got := mustHistory(t, s, policy.HistoryQuery{Domain: "test", Only: a.ID, Unit: quota.Hour, From: windowAt(quota.Hour, 1), To: windowAt(quota.Hour, 24)})
	want := []policy.ConsumerHistory{{ID: a.ID, Domain: "test", Entries: entries("a"), Windows: []policy.HistoryWindow{
		{Start: windowAt(quota.Hour, 1), Sent: 1, Units: 2},
	}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("one consumer, [from, to) (-want +got):\n%s", diff)
	}
	if got := mustHistory(t, s, policy.HistoryQuery{Domain: "elsewhere", Unit: quota.Hour}); len(got) != 0 {
		t.Errorf("another domain has %+v", got)
	}
}

func TestHistoryChecks(t *testing.T) {
	t.Parallel()

	s := NewStore(&failingDB{err: errors.New("connection refused")})
	good := policy.HistoryQuery{Limit: 1, Unit: quota.Hour, From: noon, To: noon.Add(time.Hour)}
	for name, edit := range map[string]func(*policy.HistoryQuery){
		"unit":      func(q *policy.HistoryQuery) { q.Unit = quota.Week },
		"limit":     func(q *policy.HistoryQuery) { q.Limit = 0 },
		"outside":   func(q *policy.HistoryQuery) { q.To = time.Time{}.AddDate(-1, 0, 0) },
		"more than": func(q *policy.HistoryQuery) { q.Limit, q.To = 100, noon.Add(1001*time.Hour) },
		"refused":   func(*policy.HistoryQuery) {},
	} {
		q := good
		edit(&q)
		if _, err := s.History(t.Context(), q); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Names that nobody enrolled make no rows: they are counted together, by domain.
func TestHistoryOfOthers(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	known := enrolled(t, s, "known")
	r, _ := newRecorder(t, s, RecorderConfig{})
	r.Record(known, false, 1, noon)
	for i := range 50 {
		r.Record(consumer(fmt.Sprint("invented", i)), true, 1, noon)
	}
	elsewhere := consumer("invented")
	elsewhere.Domain = "else\x00where"
	r.Record(elsewhere, true, 1, noon)
	mustFlush(t, r)
	if n := count(t, pool, "SELECT count(*) FROM plexsphere.history_hourly"); n != 3 {
		t.Errorf("%d rows, want 3: one's, and the others' of two domains", n)
	}
	page := mustHistory(t, s, policy.HistoryQuery{Domain: "test", Unit: quota.Day})
	if len(page) != 2 || page[0].ID != known.ID || page[0].Others || !page[1].Others {
		t.Fatalf("the history is %+v, want one consumer and others", page)
	}
	want := []policy.HistoryWindow{{Start: windowAt(quota.Day, 0), Sent: 50, Refused: 50}}
	if diff := cmp.Diff(want, page[1].Windows); diff != "" {
		t.Errorf("others (-want +got):\n%s", diff)
	}
	if page := mustHistory(t, s, policy.HistoryQuery{Domain: "else\x00where", Unit: quota.Day}); len(page) != 1 || page[0].Windows[0].Sent != 1 {
		t.Errorf("another domain's others are %+v", page)
	}
	if got := mustHistory(t, s, policy.HistoryQuery{Domain: "test", Unit: quota.Day, Only: page[1].ID}); len(got) != 1 || !got[0].Others {
		t.Errorf("the others alone are %+v", got)
	}
}

// However many consumers send something, memory is bounded; the rest is counted together.
func TestHistoryIsBounded(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	r, registry := newRecorder(t, s, RecorderConfig{MaxTallies: 10})
	for i := range 1000 {
		r.Record(enrolledLike(i), false, 1, noon)
	}
	if n := len(r.tallies); n > 11 {
		t.Errorf("%d tallies are held, want at most 11", n)
	}
	if got := series(t, registry, "weir_history_overflow_total", ""); got != 990 {
		t.Errorf("%v requests overflowed, want 990", got)
	}
	if got := series(t, registry, "weir_history_tallies", ""); got != 11 {
		t.Errorf("the gauge says %v, want 11", got)
	}
	mustFlush(t, r)
	page := mustHistory(t, s, policy.HistoryQuery{Domain: "test", Unit: quota.Hour})
	if len(page) != 1 || page[0].Windows[0].Sent != 1000 {
		t.Errorf("the history is %+v, want all 1000 requests", page)
	}
	// Domains are few; were they many, the bound holds too.
	for i := range 1000 {
		c := enrolledLike(i)
		c.Domain = strconv.Itoa(i)
		r.Record(c, false, 1, noon)
	}
	if n := len(r.tallies); n > 20 {
		t.Errorf("%d tallies are held, want at most 20", n)
	}
	if n := len(r.pending); n != 0 {
		t.Errorf("%d flushes are pending", n)
	}
}

func enrolledLike(i int) policy.Consumer { return consumer(fmt.Sprint("c", i)) }

// wireDB is a handle whose network can be cut: before a statement gets through, or after,
// so that only its answer is lost.
type wireDB struct {
	DBTX

	cut, cutAnswer bool
}

func (w *wireDB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if w.cut {
		return pgconn.CommandTag{}, errors.New("connection refused")
	}
	tag, err := w.DBTX.Exec(ctx, sql, args...)
	if w.cutAnswer {
		return pgconn.CommandTag{}, errors.New("unexpected EOF")
	}
	return tag, err
}

// While the database is away history is kept, and then counts once, also when an answer
// was lost.
func TestHistoryCountsOnce(t *testing.T) {
	t.Parallel()

	direct, pool := setup(t)
	wire := &wireDB{DBTX: pool}
	s := NewStore(wire)
	c := enrolled(t, direct, "c")
	r, registry := newRecorder(t, s, RecorderConfig{})
	sent := int64(0)
	record := func(n int) {
		for range n {
			sent++
			r.Record(c, false, 2, noon)
		}
	}
	record(3)
	wire.cut = true
	for range 3 {
		if err := r.flush(t.Context()); err == nil {
			t.Error("cut off: no error")
		}
		record(2)
	}
	wire.cut, wire.cutAnswer = false, true
	for range 3 {
		if err := r.flush(t.Context()); err == nil {
			t.Error("without an answer: no error")
		}
		record(2)
	}
	wire.cutAnswer = false
	mustFlush(t, r)
	record(1)
	mustFlush(t, r)
	if len(r.pending) != 0 || len(r.tallies) != 0 {
		t.Errorf("%d flushes and %d tallies are left", len(r.pending), len(r.tallies))
	}
	page := mustHistory(t, direct, policy.HistoryQuery{Domain: "test", Unit: quota.Day})
	if len(page) != 1 || page[0].Windows[0].Sent != sent || page[0].Windows[0].Units != 2*sent {
		t.Errorf("the history is %+v, want %d requests", page, sent)
	}
	if got := series(t, registry, "weir_history_flushes_total", "failed"); got != 6 {
		t.Errorf("%v failed flushes, want 6", got)
	}
	// What the database refuses for what it holds can never go in, and holds up nothing.
	r.Record(policy.Consumer{ID: c.ID, Domain: "test"}, false, 1, noon)
	r.freeze()
	r.pending[0].sent[0] = -1 << 40
	record(1)
	mustFlush(t, r)
	if got := series(t, registry, "weir_history_flushes_total", "dropped"); got != 1 {
		t.Errorf("%v dropped flushes, want 1", got)
	}
	page = mustHistory(t, direct, policy.HistoryQuery{Domain: "test", Unit: quota.Day})
	if page[0].Windows[0].Sent != sent {
		t.Errorf("the history is %+v, want %d requests", page, sent)
	}
}

// Replicas that flush the same consumers at once, in many statements, don't deadlock, and
// no request is lost.
func TestHistoryOfManyReplicas(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	if _, err := makePartitions(t.Context(), turnAt(s, noon)); err != nil {
		t.Fatal(err)
	}
	consumers := make([]policy.Consumer, 60)
	var reqs []policy.Request
	for i := range consumers {
		consumers[i] = enrolledLike(i)
		reqs = append(reqs, quotaRequest(consumers[i], dayMonth(9, 9), 1, noon))
	}
	if _, err := s.decide(t.Context(), reqs); err != nil {
		t.Fatal(err)
	}
	const replicas, rounds = 6, 20
	together(replicas, func(int) {
		r := NewRecorder(s, RecorderConfig{})
		for round := range rounds {
			for _, c := range consumers {
				r.Record(c, round%2 == 0, 1, noon.Add(time.Duration(round)*10*time.Minute))
			}
			if err := r.flush(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
	for _, table := range []string{"history_hourly", "history_daily"} {
		if n := count(t, pool, "SELECT sum(sent)::bigint FROM plexsphere."+table); n != replicas*rounds*60 {
			t.Errorf("%s has %d requests, want %d", table, n, replicas*rounds*60)
		}
		if n := count(t, pool, "SELECT sum(refused)::bigint FROM plexsphere."+table); n != replicas*rounds*60/2 {
			t.Errorf("%s has %d refused requests, want half", table, n)
		}
		if n := count(t, pool, "SELECT count(*) FROM plexsphere."+table+"_default"); n != 0 {
			t.Errorf("%s has %d rows beside its months", table, n)
		}
	}
}

// Numbers too large to add stop at a bound, and don't keep the rest from being written.
func TestHistoryOfHugeUnits(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	c := enrolled(t, s, "c")
	r, _ := newRecorder(t, s, RecorderConfig{})
	for range 4 {
		r.Record(c, false, math.MaxInt64, noon)
		r.Record(c, false, math.MinInt64, noon.Add(2*time.Hour))
	}
	mustFlush(t, r)
	page := mustHistory(t, s, policy.HistoryQuery{Domain: "test", Unit: quota.Hour})
	want := []policy.HistoryWindow{
		{Start: windowAt(quota.Hour, 0), Sent: 4, Units: math.MaxInt64 / 4},
		{Start: windowAt(quota.Hour, 2), Units: -math.MaxInt64 / 4},
	}
	if diff := cmp.Diff(want, page[0].Windows); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Run flushes by itself, and what is left when it ends.
func TestRecorderRun(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	c := enrolled(t, s, "c")
	var log bytes.Buffer
	r, _ := newRecorder(t, s, RecorderConfig{Every: 10 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- r.Run(ctx) }()
	sent := func() int64 {
		return count(t, pool, "SELECT coalesce(sum(sent), 0)::bigint FROM plexsphere.history_daily")
	}
	r.Record(c, false, 1, noon)
	waitUntil(t, "the flush", func() bool { return sent() == 1 })
	stop()
	r.Record(c, false, 1, noon)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	mustFlush(t, r) // if Run had ended before the second was recorded
	if got := sent(); got != 2 {
		t.Errorf("%d requests in the history, want 2", got)
	}
	if log.Len() > 0 {
		t.Errorf("the log says: %s", &log)
	}

	// A slow one ends with a flush.
	slow, _ := newRecorder(t, s, RecorderConfig{Every: time.Hour})
	slow.Record(c, false, 1, noon)
	ctx, stop = context.WithCancel(t.Context())
	stop()
	if err := slow.Run(ctx); err != nil {
		t.Error(err)
	}
	if got := sent(); got != 3 {
		t.Errorf("%d requests after the last flush, want 3", got)
	}
}

// Views show people what the tables hold.
func TestViews(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	now := databaseNow(t, pool)
	c := consumer("acme")
	all := quotaOf(map[quota.Unit]int64{
		quota.Hour: 9, quota.Day: 9, quota.Week: 9, quota.Month: 9, quota.Year: 9,
	})
	mustDecide(t, s, quotaRequest(c, all, 3, now))
	mustDecide(t, s, quotaRequest(c, all, 2, now.AddDate(-2, 0, 0))) // not current
	key := newKey()
	mustTake(t, s, ScopeIngestNode, key, 4, Budget{PerSecond: 1, Burst: 10}, now)
	mustDecide(t, s, policy.Request{Now: now, Limiters: []policy.LimiterDebit{{
		Bucket: policy.LimiterBucket{ID: c.ID, Namespace: "ns", Subject: "who"},
		Policy: policy.LimiterPolicy{Permits: 1, Per: time.Hour, Burst: 10}, Cost: 4,
	}}})
	r, _ := newRecorder(t, s, RecorderConfig{})
	r.Record(c, true, 1, now)
	mustFlush(t, r)
	runJob(t, pool, mustJob("history-partitions"))

	// The hour may turn meanwhile, so it is not compared.
	rows, err := pool.Query(t.Context(), `
SELECT concat_ws(' ', domain, entries -> 0 ->> 'value', unit, used,
    window_start <= now() AND window_end > now(), (window_end AT TIME ZONE 'UTC') - (window_start AT TIME ZONE 'UTC') >= ('1 ' || unit)::interval)
FROM plexsphere.current_usage WHERE unit <> 'hour' ORDER BY unit`)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	for i := range got {
		// A month of February is shorter than 30 days.
		got[i] = strings.TrimSuffix(strings.TrimSuffix(got[i], " t"), " f")
	}
	want := []string{"test acme day 3 t", "test acme month 3 t", "test acme week 3 t", "test acme year 3 t"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("current_usage (-want +got):\n%s", diff)
	}
	// The windows of the view are those of package quota.
	for _, u := range []quota.Unit{quota.Week, quota.Month, quota.Year} {
		w := u.Window(now.Unix())
		if n := count(t, pool, "SELECT count(*) FROM plexsphere.current_usage WHERE unit = $1 AND window_start = $2 AND window_end = $3",
			u.String(), time.Unix(w.Start, 0), time.Unix(w.End, 0)); n != 1 {
			t.Errorf("the %s is not %v", u, w)
		}
	}
	for sql, want := range map[string]int64{
		"SELECT count(*) FROM plexsphere.budget_levels WHERE scope = 'ingest_node' AND tokens = 6 AND idle >= '0'":                     1,
		"SELECT tokens FROM plexsphere.limiter_levels WHERE namespace = 'ns' AND subject = 'who' AND burst = 10 AND period = '1 hour'": 6,
		"SELECT refused FROM plexsphere.usage_by_hour WHERE domain = 'test' AND entries -> 0 ->> 'value' = 'acme'":                     1,
		"SELECT sent FROM plexsphere.usage_by_day WHERE domain = 'test'":                                                               1,
		"SELECT count(*) FROM plexsphere.sweep_status WHERE name = 'history-partitions' AND state = 'succeeded' AND changed <> '{}'":   1,
		"SELECT count(*) FROM plexsphere.sweep_status WHERE state <> 'succeeded'":                                                      0,
	} {
		if n := count(t, pool, sql); n != want {
			t.Errorf("%s = %d, want %d", sql, n, want)
		}
	}
	if _, err := pool.Exec(t.Context(), "UPDATE plexsphere.sweep_jobs SET finished_at = NULL"); err != nil {
		t.Fatal(err)
	}
	if n := count(t, pool, "SELECT count(*) FROM plexsphere.sweep_status WHERE state = 'running'"); n != 1 {
		t.Error("a job that runs is not shown so")
	}
	makeDue(t, pool)
	if n := count(t, pool, "SELECT count(*) FROM plexsphere.sweep_status WHERE state = 'abandoned'"); n != 1 {
		t.Error("a job whose replica died is not shown so")
	}
}

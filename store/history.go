package store

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// RecorderConfig says how a [Recorder] works. The zero value is complete.
type RecorderConfig struct {
	// Every is the time from one flush to the next. Defaults to 10 seconds.
	Every time.Duration
	// MaxTallies is the most consumers (each once an hour) that are told apart from
	// one flush to the next; the rest is counted together, by domain. Twice as many are
	// held while the database does not answer. Defaults to 20,000.
	MaxTallies int
	// Logger is told when history can't be written. Defaults to none.
	Logger *slog.Logger
}

func (c RecorderConfig) withDefaults() RecorderConfig {
	if c.Every <= 0 {
		c.Every = 10 * time.Second
	}
	if c.MaxTallies <= 0 {
		c.MaxTallies = 20_000
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// A Recorder gathers the history of consumers in memory and adds it to the database every
// few seconds, apart from decisions: a crash loses its last seconds, and never a counter.
// What is flushed counts once, also when the answer to a flush is lost and it is sent
// again. It is safe for concurrent use, and a [prometheus.Collector]; [Recorder.Run] does the
// flushing.
type Recorder struct {
	store   *Store
	config  RecorderConfig
	metrics *recorderMetrics
	writer  [16]byte

	mu      sync.Mutex
	tallies map[tallyID]*tally

	// Run's alone: what has been taken out of tallies, in statements' worths, the first
	// of which may have been sent already, and the number of the last one.
	pending []flush
	last    int64
}

type tallyID struct {
	consumer policy.CounterID
	hour     int64 // epoch second at which it begins
}

type tally struct {
	domain               string
	sent, refused, units int64
}

// A flush is one statement's arguments.
type flush struct {
	number               int64
	consumers, others    [][]byte
	domains              []string
	hours                []time.Time
	sent, refused, units []int64
}

// NewRecorder returns a recorder, which writes through a store that must not be on a
// transaction.
func NewRecorder(store *Store, config RecorderConfig) *Recorder {
	r := &Recorder{store: store, config: config.withDefaults(), tallies: make(map[tallyID]*tally)}
	_, _ = rand.Read(r.writer[:]) // never fails
	r.metrics = newRecorderMetrics(r.held)
	return r
}

// Describe implements [prometheus.Collector].
func (r *Recorder) Describe(ch chan<- *prometheus.Desc) { describe(r.metrics.all(), ch) }

// Collect implements [prometheus.Collector].
func (r *Recorder) Collect(ch chan<- prometheus.Metric) { collect(r.metrics.all(), ch) }

// Record notes a request of a consumer at now: whether it was refused, by whichever limit,
// and what it cost in units, which count unless it was refused. Negative units are a
// refund, which is no request. It waits for nothing but other calls of itself.
func (r *Recorder) Record(consumer policy.Consumer, refused bool, units int64, now time.Time) {
	id := tallyID{consumer: consumer.ID, hour: quota.Hour.Window(now.Unix()).Start}
	r.mu.Lock()
	defer r.mu.Unlock()
	t, ok := r.tallies[id]
	if !ok {
		if len(r.tallies) >= r.config.MaxTallies {
			r.metrics.overflowed.Inc()
			id.consumer = othersOf(readable(consumer.Domain))
			t, ok = r.tallies[id]
		}
		// Others are few: one a domain and hour. Were they many, then so as well.
		if !ok && len(r.tallies) >= 2*r.config.MaxTallies {
			return
		}
	}
	if !ok {
		t = &tally{domain: readable(consumer.Domain)}
		r.tallies[id] = t
	}
	switch {
	case units < 0:
		t.units = addClamped(t.units, units)
		return
	case refused:
		t.refused++
	default:
		t.units = addClamped(t.units, units)
	}
	t.sent++
}

// addClamped adds, and stops at half of what the column holds: so a flush fits however
// often it happens in an hour.
func addClamped(a, b int64) int64 {
	const most = math.MaxInt64 / 4
	b = min(max(b, -most), most)
	return min(max(a+b, -most), most)
}

// othersOf is the id under which the consumers of a domain (as [readable] writes it) are
// counted that are not enrolled. What a policy hashes begins with a kind, which is never 0.
func othersOf(domain string) policy.CounterID {
	return sha256.Sum256([]byte("\x00store.history\x00" + domain))
}

func (r *Recorder) held() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return float64(len(r.tallies))
}

// lastFlushTimeout bounds the flush of what is left when a recorder stops.
const lastFlushTimeout = 5 * time.Second

// Run flushes until ctx ends, and then once more. While the database doesn't answer it
// keeps what it has and tries again.
func (r *Recorder) Run(ctx context.Context) error {
	ticker := time.NewTicker(r.config.Every)
	defer ticker.Stop()
	failing := false
	for {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			last, cancel := context.WithTimeout(context.WithoutCancel(ctx), lastFlushTimeout)
			defer cancel()
			if err := r.flush(last); err != nil {
				r.config.Logger.LogAttrs(last, slog.LevelWarn, "the last history is lost", slog.Any("err", err))
			}
			return nil
		}
		err := r.flush(ctx)
		if err != nil && !failing && ctx.Err() == nil {
			r.config.Logger.LogAttrs(ctx, slog.LevelWarn, "history is kept in memory", slog.Any("err", err))
		}
		failing = err != nil
	}
}

// flush adds what is pending to the database, and then what was gathered since.
func (r *Recorder) flush(ctx context.Context) error {
	if err := r.send(ctx); err != nil {
		return err
	}
	r.freeze()
	return r.send(ctx)
}

// flushSize bounds how many tallies go in one statement.
const flushSize = 2000

// freeze moves the tallies to pending. What has a number never changes any more.
func (r *Recorder) freeze() {
	r.mu.Lock()
	tallies := r.tallies
	r.tallies = make(map[tallyID]*tally)
	r.mu.Unlock()

	var f *flush
	for id, t := range tallies {
		if f == nil || len(f.consumers) == flushSize {
			r.last++
			r.pending = append(r.pending, flush{number: r.last})
			f = &r.pending[len(r.pending)-1]
		}
		others := othersOf(t.domain)
		f.consumers = append(f.consumers, id.consumer[:])
		f.others = append(f.others, others[:])
		f.domains = append(f.domains, t.domain)
		f.hours = append(f.hours, time.Unix(id.hour, 0))
		f.sent = append(f.sent, t.sent)
		f.refused = append(f.refused, t.refused)
		f.units = append(f.units, t.units)
	}
}

// recordSQL adds a flush to both histories, unless it has been added before. Who is not
// enrolled is counted under the id of its domain's others, so that names that a client
// invents make no rows. Rows are locked in order, so that flushes cannot deadlock.
const recordSQL = `
WITH fresh AS MATERIALIZED (
    INSERT INTO plexsphere.history_writers AS w (writer, flush, flushed_at)
    VALUES ($1, $2, clock_timestamp())
    ON CONFLICT (writer) DO UPDATE SET flush = excluded.flush, flushed_at = excluded.flushed_at
    WHERE w.flush < excluded.flush
    RETURNING 1
), tallies AS MATERIALIZED (
    SELECT CASE WHEN c.id IS NULL THEN k.other ELSE c.id END AS consumer, k.hour, min(k.domain) AS domain,
        sum(k.sent)::bigint AS sent, sum(k.refused)::bigint AS refused, sum(k.units)::bigint AS units
    FROM unnest($3::bytea[], $4::bytea[], $5::text[], $6::timestamptz[], $7::bigint[], $8::bigint[], $9::bigint[])
        AS k (consumer, other, domain, hour, sent, refused, units)
    LEFT JOIN plexsphere.consumers AS c ON c.id = k.consumer
    WHERE EXISTS (SELECT FROM fresh)
    GROUP BY 1, 2
), hourly AS (
    INSERT INTO plexsphere.history_hourly AS h (consumer, window_start, domain, sent, refused, units)
    SELECT consumer, hour, domain, sent, refused, units
    FROM tallies
    ORDER BY consumer, hour
    ON CONFLICT (consumer, window_start) DO UPDATE
    SET sent = h.sent + excluded.sent, refused = h.refused + excluded.refused, units = h.units + excluded.units
)
INSERT INTO plexsphere.history_daily AS h (consumer, window_start, domain, sent, refused, units)
SELECT consumer, date_trunc('day', hour, 'UTC'), min(domain), sum(sent)::bigint, sum(refused)::bigint, sum(units)::bigint
FROM tallies
GROUP BY 1, 2
ORDER BY 1, 2
ON CONFLICT (consumer, window_start) DO UPDATE
SET sent = h.sent + excluded.sent, refused = h.refused + excluded.refused, units = h.units + excluded.units`

// send adds what is pending to the database, in order. A flush with which the database
// finds fault would never go in, and is dropped.
func (r *Recorder) send(ctx context.Context) error {
	for len(r.pending) > 0 {
		f := &r.pending[0]
		_, err := r.store.db.Exec(ctx, r.store.tidy.record, r.writer, f.number,
			f.consumers, f.others, f.domains, f.hours, f.sent, f.refused, f.units)
		switch {
		case refused(err):
			r.metrics.flushes.WithLabelValues("dropped").Inc()
			r.config.Logger.LogAttrs(ctx, slog.LevelError, "history is dropped, as the database refuses it", slog.Any("err", err))
		case err != nil:
			r.metrics.flushes.WithLabelValues("failed").Inc()
			return fmt.Errorf("adding to the history: %w", err)
		default:
			r.metrics.flushes.WithLabelValues("succeeded").Inc()
		}
		r.pending = slices.Delete(r.pending, 0, 1)
	}
	return nil
}

// recorderMetrics tell what becomes of the history.
type recorderMetrics struct {
	flushes    *prometheus.CounterVec
	overflowed prometheus.Counter
	tallies    prometheus.GaugeFunc
}

func newRecorderMetrics(held func() float64) *recorderMetrics {
	return &recorderMetrics{
		flushes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weir_history_flushes_total",
			Help: "Flushes of consumers' history to the database, by outcome (succeeded, failed and kept, dropped).",
		}, []string{"outcome"}),
		overflowed: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "weir_history_overflow_total",
			Help: "Requests counted among a domain's others, as too many consumers sent something since the last flush.",
		}),
		tallies: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "weir_history_tallies",
			Help: "Consumers whose history waits in memory for the next flush.",
		}, held),
	}
}

func (m *recorderMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.flushes, m.overflowed, m.tallies}
}

// historySQL reads the page's consumers, those without history as well, and behind the
// last page whatever others there are.
const historySQL = `
WITH page AS MATERIALIZED (
    SELECT id, entries::text AS entries
    FROM plexsphere.consumers
    WHERE domain = $1 AND id > $2 AND ($3::bytea IS NULL OR id = $3)
    ORDER BY id
    LIMIT $4
), who AS (
    SELECT id, entries, false AS others FROM page
    UNION ALL
    SELECT $5, NULL, true WHERE ($3::bytea IS NULL OR $3 = $5) AND (SELECT count(*) FROM page) < $4
)
SELECT who.id, who.entries, who.others, h.window_start, h.sent, h.refused, h.units
FROM who
LEFT JOIN plexsphere.history_hourly AS h
    ON h.consumer = who.id AND h.window_start >= $6 AND h.window_start < $7
ORDER BY who.others, who.id, h.window_start`

// History returns the history of a page of a domain's consumers, in order of their ids,
// and behind the last one that of all others of the domain, if there is any. A page of
// fewer consumers than the limit is the last. It locks nothing; what was sent in the last
// seconds is not in it yet.
func (s *Store) History(ctx context.Context, q policy.HistoryQuery) ([]policy.ConsumerHistory, error) {
	sql := s.tidy.historyHourly
	span := time.Hour
	switch {
	case q.Unit == quota.Day:
		sql, span = s.tidy.historyDaily, day
	case q.Unit != quota.Hour:
		return nil, errors.New("reading history: the unit must be an hour or a day")
	}
	if q.Limit < 1 || q.Limit > policy.MaxConsumers {
		return nil, fmt.Errorf("reading history: the limit must be 1 to %d, not %d", policy.MaxConsumers, q.Limit)
	}
	if err := errors.Join(checkNow(q.From), checkNow(q.To)); err != nil {
		return nil, fmt.Errorf("reading history: %w", err)
	}
	if windows := int64(q.To.Sub(q.From)/span) + 1; windows*int64(q.Limit) > policy.MaxHistory {
		return nil, fmt.Errorf("reading history: %d consumers and %d windows are more than %d rows", q.Limit, windows, policy.MaxHistory)
	}
	var only []byte // NULL: all
	if q.Only != (policy.CounterID{}) {
		only = q.Only[:]
	}
	domain := readable(q.Domain)
	others := othersOf(domain)
	rows, err := s.db.Query(ctx, sql, domain, q.After[:], only, q.Limit, others[:], q.From, q.To)
	if err != nil {
		return nil, fmt.Errorf("reading history: %w", err)
	}
	var (
		page                 []policy.ConsumerHistory
		id                   []byte
		entries              *string
		isOthers             bool
		start                pgtype.Timestamptz
		sent, refused, units *int64
	)
	_, err = pgx.ForEachRow(rows, []any{&id, &entries, &isOthers, &start, &sent, &refused, &units}, func() error {
		if isOthers && !start.Valid {
			return nil
		}
		if n := len(page); n == 0 || page[n-1].ID != policy.CounterID(id) {
			c := policy.ConsumerHistory{ID: policy.CounterID(id), Domain: domain, Others: isOthers}
			if entries != nil {
				var err error
				if c.Entries, err = parseEntries(*entries); err != nil {
					return fmt.Errorf("reading the entries of consumer %x: %w", id, err)
				}
			}
			page = append(page, c)
		}
		if start.Valid {
			c := &page[len(page)-1]
			c.Windows = append(c.Windows, policy.HistoryWindow{Start: start.Time.UTC(), Sent: *sent, Refused: *refused, Units: *units})
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("reading history: %w", err)
	}
	return page, nil
}

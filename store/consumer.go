package store

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

var _ quota.Store = (*Store)(nil)

// Reserve spends cost (from 0, in units) for a consumer in all its windows that
// contain now, or says which window denies. It is [Store.Decide] for one quota, and
// makes a Store a [quota.Store]. Consumers named here are apart from those of any
// policy, whatever their names.
func (s *Store) Reserve(ctx context.Context, consumer string, budgets []quota.Budget, cost int64, now time.Time) (quota.Reservation, error) {
	if cost < 0 {
		return quota.Reservation{}, fmt.Errorf("reserving in a quota of %q: %w: %d", consumer, ErrNegativeCost, cost)
	}
	holder := libraryConsumer(consumer)
	verdict, err := s.Decide(ctx, policy.Request{
		Now:    now,
		Quotas: []policy.QuotaDebit{{Counter: holder.ID, Budgets: budgets, Cost: cost, Consumer: &holder}},
	})
	if err != nil {
		return quota.Reservation{}, fmt.Errorf("reserving in a quota: %w", err)
	}
	return verdict.Quotas[0].Reservation, nil
}

// enrolBatch bounds how many consumers one statement enrols.
const enrolBatch = 1000

// enrolSQL enrols consumers and keeps them from being swept. A row that was there already
// has an xmax, by the lock that the update took, and is not counted again.
const enrolSQL = `
WITH enrolled AS (
    INSERT INTO plexsphere.consumers AS c (id, domain, entries, enrolled_at, named)
    SELECT k.id, k.domain, k.entries::jsonb, $4, true
    FROM unnest($1::bytea[], $2::text[], $3::text[]) WITH ORDINALITY AS k (id, domain, entries, i)
    ORDER BY k.i
    ON CONFLICT (id) DO UPDATE SET named = true WHERE NOT c.named
    RETURNING domain, xmax = 0 AS fresh
)
INSERT INTO plexsphere.consumer_domains AS h (domain, consumers)
SELECT e.domain, count(*) FROM enrolled AS e WHERE e.fresh GROUP BY e.domain ORDER BY e.domain
ON CONFLICT (domain) DO UPDATE SET consumers = h.consumers + excluded.consumers`

// Enrol makes consumers known, as a policy does with those that it names when it loads. Those
// that are known already stay as they are. It is done in statements of 1,000.
func (s *Store) Enrol(ctx context.Context, consumers []policy.Consumer, now time.Time) error {
	if err := checkNow(now); err != nil {
		return fmt.Errorf("enrolling consumers: %w", err)
	}
	sorted := slices.Clone(consumers)
	slices.SortFunc(sorted, func(a, b policy.Consumer) int { return compareCounters(a.ID, b.ID) })
	for chunk := range slices.Chunk(sorted, enrolBatch) {
		ids := make([][]byte, len(chunk))
		domains := make([]string, len(chunk))
		entries := make([]string, len(chunk))
		for i := range chunk {
			ids[i] = chunk[i].ID[:]
			domains[i] = readable(chunk[i].Domain)
			entries[i] = readableEntries(chunk[i].Entries)
		}
		if _, err := s.db.Exec(ctx, s.queries.enrol, ids, domains, entries, now); err != nil {
			return fmt.Errorf("enrolling consumers: %w", err)
		}
	}
	return nil
}

const usedSQL = `
SELECT coalesce(c.used, 0)
FROM unnest($2::text[], $3::timestamptz[]) WITH ORDINALITY AS w (unit, window_start, i)
LEFT JOIN plexsphere.quota_counters AS c
    ON c.counter = $1 AND c.unit = w.unit AND c.window_start = w.window_start
ORDER BY w.i`

// Used returns what a consumer of [Store.Reserve] has used in each budget's window
// that contains now, in units. It reserves nothing. A consumer that is unknown has
// used nothing.
func (s *Store) Used(ctx context.Context, consumer string, budgets []quota.Budget, now time.Time) ([]int64, error) {
	units := make([]quota.Unit, len(budgets))
	for i, b := range budgets {
		units[i] = b.Unit
	}
	names, starts, err := currentWindows(units, now)
	if err != nil {
		return nil, fmt.Errorf("reading a quota: %w", err)
	}
	id := libraryConsumer(consumer).ID
	rows, err := s.db.Query(ctx, s.queries.used, id[:], names, starts)
	if err != nil {
		return nil, fmt.Errorf("reading a quota: %w", err)
	}
	used, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		return nil, fmt.Errorf("reading a quota: %w", err)
	}
	return used, nil
}

const consumersSQL = `
SELECT c.id, c.domain, c.entries::text, c.enrolled_at, ARRAY(
    SELECT coalesce(q.used, 0)
    FROM unnest($4::text[], $5::timestamptz[]) WITH ORDINALITY AS w (unit, window_start, i)
    LEFT JOIN plexsphere.quota_counters AS q
        ON q.counter = c.id AND q.unit = w.unit AND q.window_start = w.window_start
    ORDER BY w.i)
FROM plexsphere.consumers AS c
WHERE c.domain = $1 AND c.id > $2 AND ($6::bytea[] IS NULL OR c.id = ANY ($6))
ORDER BY c.id
LIMIT $3`

// Consumers returns a page of consumers with their usage, in order of their ids. A
// page shorter than the limit is the last.
func (s *Store) Consumers(ctx context.Context, q policy.ConsumersQuery) ([]policy.ConsumerUsage, error) {
	if q.Limit < 1 || q.Limit > policy.MaxConsumers {
		return nil, fmt.Errorf("listing consumers: the limit must be 1 to %d, not %d", policy.MaxConsumers, q.Limit)
	}
	names, starts, err := currentWindows(q.Units, q.Now)
	if err != nil {
		return nil, fmt.Errorf("listing consumers: %w", err)
	}
	var only [][]byte // NULL: all
	for i := range q.Only {
		only = append(only, q.Only[i][:])
	}
	rows, err := s.db.Query(ctx, s.queries.consumers, readable(q.Domain), q.After[:], q.Limit, names, starts, only)
	if err != nil {
		return nil, fmt.Errorf("listing consumers: %w", err)
	}
	page, err := pgx.CollectRows(rows, scanConsumer)
	if err != nil {
		return nil, fmt.Errorf("listing consumers: %w", err)
	}
	return page, nil
}

func scanConsumer(row pgx.CollectableRow) (policy.ConsumerUsage, error) {
	var (
		c       policy.ConsumerUsage
		id      []byte
		entries string
	)
	if err := row.Scan(&id, &c.Domain, &entries, &c.EnrolledAt, &c.Used); err != nil {
		return policy.ConsumerUsage{}, err
	}
	copy(c.ID[:], id)
	c.EnrolledAt = c.EnrolledAt.UTC()
	var err error
	if c.Entries, err = parseEntries(entries); err != nil {
		return policy.ConsumerUsage{}, fmt.Errorf("reading the entries of consumer %x: %w", c.ID, err)
	}
	return c, nil
}

// currentWindows returns, by unit, its name and the start of its window at now.
func currentWindows(units []quota.Unit, now time.Time) (names []string, starts []time.Time, err error) {
	if err := checkNow(now); err != nil {
		return nil, nil, err
	}
	names = make([]string, len(units))
	starts = make([]time.Time, len(units))
	for i, u := range units {
		if !u.Valid() {
			return nil, nil, fmt.Errorf("window %d has an unknown unit", i)
		}
		names[i] = u.String()
		starts[i] = time.Unix(u.Window(now.Unix()).Start, 0)
	}
	return names, starts, nil
}

// libraryConsumer is the holder of a quota that no policy names. What a policy
// hashes begins with a kind, which is never 0.
func libraryConsumer(name string) policy.Consumer {
	return policy.Consumer{
		ID:      sha256.Sum256([]byte("\x00store.Reserve\x00" + name)),
		Entries: []policy.Entry{{Key: "consumer", Value: name}},
	}
}

// storedEntry is an entry in the column consumers.entries.
type storedEntry struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// Bounds of what is kept of a consumer for people to read: the id, a hash, holds for
// any length.
const (
	maxReadable        = 256 // bytes of a text, before it is escaped
	maxReadableEntries = 16
)

func readableEntries(entries []policy.Entry) string {
	stored := make([]storedEntry, 0, min(len(entries), maxReadableEntries+1))
	for i, e := range entries {
		if i == maxReadableEntries {
			stored = append(stored, storedEntry{Key: "…", Value: strconv.Itoa(len(entries)-i) + " more"})
			break
		}
		stored = append(stored, storedEntry{Key: readable(e.Key), Value: readable(e.Value)})
	}
	text, err := json.Marshal(stored)
	if err != nil {
		return "[]" // strings always encode
	}
	return string(text)
}

// parseEntries reads what [readableEntries] wrote.
func parseEntries(text string) ([]policy.Entry, error) {
	var stored []storedEntry
	if err := json.Unmarshal([]byte(text), &stored); err != nil {
		return nil, err
	}
	var entries []policy.Entry
	for _, e := range stored {
		entries = append(entries, policy.Entry{Key: e.Key, Value: e.Value})
	}
	return entries, nil
}

// readable makes any bytes a short text that the database takes: it refuses NUL and
// what is no UTF-8. Backslashes are escaped as well, so that an escape is never
// mistaken for the text that looks like it.
func readable(s string) string {
	cut := ""
	if len(s) > maxReadable {
		end := maxReadable
		for end > maxReadable-utf8.UTFMax && !utf8.RuneStart(s[end]) {
			end--
		}
		s, cut = s[:end], "…"
	}
	quoted := strconv.QuoteToGraphic(s)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`) + cut
}

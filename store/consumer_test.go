package store

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// The store is the port of package quota: its evaluation, its reading, its outcome.
func TestQuotaCheckOnTheStore(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	budgets := dayMonth(10, 12)
	at := func(hours int) time.Time { return noon.Add(time.Duration(hours) * time.Hour) }
	for _, step := range []struct {
		now       time.Time
		cost      int64
		code      quota.Code
		budget    int
		remaining int64
		used      []int64
	}{
		{at(0), 9, quota.Allowed, 0, 1, []int64{9, 9}},
		{at(1), 2, quota.Denied, 0, 1, []int64{9, 9}},  // by the day: nothing spent
		{at(24), 4, quota.Denied, 1, 3, []int64{4, 9}}, // by the month: the day is spent
		{at(24), 3, quota.Allowed, 1, 0, []int64{7, 12}},
		{at(24), 1, quota.Denied, 1, 0, []int64{8, 12}},
		{at(24 * 18), 1, quota.Allowed, 0, 9, []int64{1, 1}}, // June
	} {
		out := quota.Check(t.Context(), s, "acme", budgets, step.cost, step.now)
		if out.Code != step.code || out.Err != nil || out.Budget != step.budget || out.Remaining != step.remaining {
			t.Errorf("%d at %v: %+v, want %v by %d, %d left", step.cost, step.now, out, step.code, step.budget, step.remaining)
		}
		used, err := s.Used(t.Context(), "acme", budgets, step.now)
		if err != nil || !slices.Equal(used, step.used) {
			t.Errorf("%d at %v: used %v, %v, want %v", step.cost, step.now, used, err, step.used)
		}
	}
	if used, err := s.Used(t.Context(), "nobody", budgets, noon); err != nil || !slices.Equal(used, []int64{0, 0}) {
		t.Errorf("an unknown consumer used %v, %v", used, err)
	}
}

// A store that cannot answer makes a quota unavailable: no admission, no denial.
func TestQuotaUnavailable(t *testing.T) {
	t.Parallel()

	out := quota.Check(t.Context(), NewStore(&failingDB{err: errors.New("connection refused")}), "acme", dayMonth(1, 1), 1, noon)
	if out.Code != quota.Unavailable || out.Err == nil {
		t.Errorf("on a dead store: %+v, want unavailable", out)
	}
}

// A consumer is enrolled by its first charge: once, at that instant, and not by a
// refusal or a reading.
func TestConsumersAreEnrolledByTheirFirstCharge(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	query := policy.ConsumersQuery{Domain: "test", Limit: 10, Units: []quota.Unit{quota.Day, quota.Month}, Now: noon}
	list := func() []policy.ConsumerUsage {
		t.Helper()
		page, err := s.Consumers(t.Context(), query)
		if err != nil {
			t.Fatal(err)
		}
		return page
	}
	holder := consumer("acme")
	mustDecide(t, s, quotaRequest(holder, dayMonth(0, 10), 1, noon))
	mustDecide(t, s, quotaRequest(holder, dayMonth(5, 10), 0, noon))
	if page := list(); len(page) != 0 {
		t.Errorf("refused and read only, and yet enrolled: %+v", page)
	}
	mustDecide(t, s, quotaRequest(holder, dayMonth(5, 10), 2, noon))
	mustDecide(t, s, quotaRequest(holder, dayMonth(5, 10), 3, noon.Add(24*time.Hour)))
	want := []policy.ConsumerUsage{{
		ID: holder.ID, Domain: "test", Entries: []policy.Entry{{Key: "consumer", Value: "acme"}},
		EnrolledAt: noon, Used: []int64{2, 5},
	}}
	if diff := cmp.Diff(want, list()); diff != "" {
		t.Errorf("consumers (-want +got):\n%s", diff)
	}
	query.Now = noon.Add(24 * time.Hour)
	want[0].Used = []int64{3, 5}
	if diff := cmp.Diff(want, list()); diff != "" {
		t.Errorf("consumers a day later (-want +got):\n%s", diff)
	}
	query.Units, want[0].Used = nil, []int64{}
	if diff := cmp.Diff(want, list()); diff != "" {
		t.Errorf("consumers without windows (-want +got):\n%s", diff)
	}
}

func TestConsumersInPages(t *testing.T) {
	t.Parallel()

	s, _ := setup(t)
	var want []policy.CounterID
	for i := range 25 {
		holder := consumer(strconv.Itoa(i))
		want = append(want, holder.ID)
		mustDecide(t, s, quotaRequest(holder, dayMonth(9, 9), 1, noon))
		if _, err := s.Reserve(t.Context(), strconv.Itoa(i), dayMonth(9, 9), 1, noon); err != nil {
			t.Fatal(err)
		}
		other := consumer(fmt.Sprint("other", i))
		other.Domain = "elsewhere"
		mustDecide(t, s, quotaRequest(other, dayMonth(9, 9), 1, noon))
	}
	slices.SortFunc(want, func(a, b policy.CounterID) int { return bytes.Compare(a[:], b[:]) })
	var got []policy.CounterID
	query := policy.ConsumersQuery{Domain: "test", Limit: 10, Units: []quota.Unit{quota.Day}, Now: noon}
	for {
		page, err := s.Consumers(t.Context(), query)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range page {
			got = append(got, c.ID)
		}
		if len(page) < query.Limit {
			break
		}
		query.After = page[len(page)-1].ID
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ids over all pages (-want +got):\n%s", diff)
	}
	only := policy.ConsumersQuery{Domain: "test", Only: []policy.CounterID{want[7]}, Limit: 10, Units: []quota.Unit{quota.Day}, Now: noon}
	if page, err := s.Consumers(t.Context(), only); err != nil || len(page) != 1 || page[0].ID != want[7] || page[0].Used[0] != 1 {
		t.Errorf("one alone: %+v, %v", page, err)
	}
	only.Domain = "elsewhere"
	if page, err := s.Consumers(t.Context(), only); err != nil || len(page) != 0 {
		t.Errorf("one of another domain: %+v, %v", page, err)
	}
	for _, limit := range []int{-1, 0, 1001} {
		if _, err := s.Consumers(t.Context(), policy.ConsumersQuery{Limit: limit, Now: noon}); err == nil {
			t.Errorf("a page of %d: no error", limit)
		}
	}
}

// C29: any bytes are a consumer's name, a domain and an entry. They are told apart
// by every byte, and kept for people cut short and escaped.
func TestC29AnyBytes(t *testing.T) {
	t.Parallel()

	s, pool := setup(t)
	names := []string{
		"", " ", "a b", "a\x00", "a\x00\x00", "a", `a\x00`, "\xc0\xa7", "\xff", "\xfe", "é", "e\u0301", "'; DROP TABLE x --",
		"%s", "a|b.c:d", "line\nbreak", "\u202e", strings.Repeat("x", 64<<10), strings.Repeat("x", 64<<10) + "y",
		strings.Repeat("é", 400), strings.Repeat("\x00", 4096), strings.Repeat("\xff", 4096), `{"json":"]"}`, `"quoted"`,
	}
	ids := map[policy.CounterID]string{}
	for _, name := range names {
		r, err := s.Reserve(t.Context(), name, dayMonth(1, 1), 1, noon)
		if err != nil || r.Denied >= 0 {
			t.Errorf("%.40q: %+v, %v, want a fresh counter", name, r, err)
		}
		c := consumer(name)
		c.Domain = name + "!"
		c.Entries = slices.Repeat([]policy.Entry{{Key: name, Value: name}}, 40)
		ids[c.ID] = name
		if v := mustDecide(t, s, quotaRequest(c, dayMonth(1, 1), 1, noon)); !v.Allowed {
			t.Errorf("%.40q: refused", name)
		}
		page, err := s.Consumers(t.Context(), policy.ConsumersQuery{Domain: c.Domain, Limit: 1, Now: noon})
		if err != nil || len(page) != 1 || page[0].ID != c.ID && len(name) < maxReadable {
			t.Errorf("%.40q: not listed by its domain: %+v, %v", name, page, err)
		}
		for _, e := range page[0].Entries {
			if !utf8.ValidString(e.Value) || len(e.Value) > 4*maxReadable+len("…") || strings.ContainsRune(e.Value, 0) {
				t.Errorf("%.40q is kept as %q", name, e.Value)
			}
		}
		if len(page[0].Entries) != maxReadableEntries+1 {
			t.Errorf("%.40q: %d entries are kept", name, len(page[0].Entries))
		}
	}
	if len(ids) != len(names) {
		t.Errorf("%d ids for %d names", len(ids), len(names))
	}
	if got := count(t, pool, "SELECT max(octet_length(entries::text)) FROM plexsphere.consumers"); got > 64<<10 {
		t.Errorf("a row of consumers holds %d bytes", got)
	}
}

func TestReadable(t *testing.T) {
	t.Parallel()

	for in, want := range map[string]string{
		"":                       "",
		"plain é 世":              "plain é 世",
		`say "hi"`:               `say "hi"`,
		"nul\x00":                `nul\x00`,
		`nul\x00`:                `nul\\x00`,
		"\xff":                   `\xff`,
		"a\nb\u202e":             `a\nb\u202e`,
		strings.Repeat("x", 256): strings.Repeat("x", 256),
		strings.Repeat("x", 257): strings.Repeat("x", 256) + "…",
		strings.Repeat("世", 100): strings.Repeat("世", 85) + "…", // never half a rune
	} {
		if got := readable(in); got != want {
			t.Errorf("readable(%q) = %q, want %q", in, got, want)
		}
	}
}

package quota_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/weir-dev/weir/quota"
)

func utc(year int, month time.Month, day int) int64 {
	return time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Unix()
}

// The time package is the judge here: the arithmetic under test must not use it.
func TestEveryMonthFrom1970To2400(t *testing.T) {
	t.Parallel()

	for year := 1970; year <= 2400; year++ {
		for month := time.January; month <= time.December; month++ {
			start, end := utc(year, month, 1), utc(year, month+1, 1)
			want := quota.Window{Start: start, End: end}
			for _, epoch := range []int64{start, start + 1, (start + end) / 2, end - 1} {
				if got := quota.MonthWindow(epoch); got != want {
					t.Fatalf("MonthWindow(%d) in %d-%02d = %v, want %v", epoch, year, month, got, want)
				}
			}
		}
		want := quota.Window{Start: utc(year, time.January, 1), End: utc(year+1, time.January, 1)}
		for _, epoch := range []int64{want.Start, want.End - 1} {
			if got := quota.Year.Window(epoch); got != want {
				t.Fatalf("Year.Window(%d) in %d = %v, want %v", epoch, year, got, want)
			}
		}
	}
}

// PEERS C51: peers count months of 30 days from 1970.
func TestC51CalendarWindows(t *testing.T) {
	t.Parallel()

	at := func(s string) int64 {
		instant, err := time.Parse(time.RFC3339, s)
		if err != nil {
			t.Fatal(err)
		}
		return instant.Unix()
	}
	for _, test := range []struct {
		at   string
		unit quota.Unit
		want int64 // seconds to the window's end
	}{
		{"2026-01-31T23:59:59Z", quota.Month, 1},
		{"2028-02-29T12:00:00Z", quota.Month, 43_200},
		{"2028-02-29T12:00:00Z", quota.Year, 26_481_600},
		{"2026-12-31T23:59:59Z", quota.Day, 1},
		{"2026-12-31T23:59:59Z", quota.Month, 1},
		{"2026-12-31T23:59:59Z", quota.Year, 1},
		{"2027-02-01T00:00:00Z", quota.Month, 2_419_200},     // C46: 28 days
		{"2026-11-30T00:00:00Z", quota.Week, 7 * 86_400},     // a Monday
		{"2026-11-29T23:59:59Z", quota.Week, 1},              // the Sunday before
		{"2100-02-28T00:00:00Z", quota.Month, 86_400},        // no leap year
		{"2000-02-28T00:00:00Z", quota.Month, 2 * 86_400},    // a leap year
		{"1970-01-01T00:00:00Z", quota.Week, 4 * 86_400},     // a Thursday
		{"1969-12-31T23:59:59Z", quota.Month, 1},             // before the epoch
		{"2038-01-19T03:14:08Z", quota.Day, 86_400 - 11_648}, // past 32 bits
		{"2026-03-29T00:30:00Z", quota.Hour, 1800},
		{"2026-03-29T00:30:30Z", quota.Minute, 30},
		{"2026-03-29T00:30:30Z", quota.Second, 1},
	} {
		epoch := at(test.at)
		if got := test.unit.Window(epoch).End - epoch; got != test.want {
			t.Errorf("%s: the %v ends in %d s, want %d", test.at, test.unit, got, test.want)
		}
	}
}

// PEERS C61: equal within a window, and one on at each boundary.
func TestC61WindowsAdjoin(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		unit := quota.Unit(rapid.IntRange(int(quota.Second), int(quota.Year)).Draw(t, "unit"))
		epoch := rapid.Int64Range(-1<<55+1, 1<<55-1).Draw(t, "epoch")
		w := unit.Window(epoch)
		if !w.Contains(epoch) {
			t.Fatalf("%v.Window(%d) = %v does not contain it", unit, epoch, w)
		}
		inside := rapid.Int64Range(w.Start, w.End-1).Draw(t, "inside")
		if got := unit.Window(inside); got != w {
			t.Fatalf("%v.Window(%d) = %v, but %v at %d", unit, inside, got, w, epoch)
		}
		if next := unit.Window(w.End); next.Start != w.End {
			t.Fatalf("%v after %v is %v", unit, w, next)
		}
		if before := unit.Window(w.Start - 1); before.End != w.Start {
			t.Fatalf("%v before %v is %v", unit, w, before)
		}
	})
}

func TestISOWeek(t *testing.T) {
	t.Parallel()

	rapid.Check(t, func(t *rapid.T) {
		epoch := rapid.Int64Range(utc(-400, 1, 1), utc(2400, 1, 1)).Draw(t, "epoch")
		w := quota.Week.Window(epoch)
		start := time.Unix(w.Start, 0).UTC()
		if start.Weekday() != time.Monday || w.End-w.Start != 7*86_400 {
			t.Fatalf("week of %d is %v, from a %v", epoch, w, start.Weekday())
		}
	})
}

func TestUnits(t *testing.T) {
	t.Parallel()

	if quota.Unit(0).Valid() || (quota.Year + 1).Valid() {
		t.Error("a unit outside the seven is valid")
	}
	if w := quota.Unit(99).Window(12); w != (quota.Window{}) {
		t.Errorf("Window of an invalid unit = %v, want none", w)
	}
	if got := quota.Unit(99).String(); got != "unit(99)" {
		t.Errorf("String of an invalid unit = %q", got)
	}
	if got := quota.Month.String(); got != "month" {
		t.Errorf("Month = %q", got)
	}
}

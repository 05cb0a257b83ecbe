package quota

import "fmt"

// A Unit is the length of a calendar window. The zero Unit is invalid.
type Unit uint8

// The units, shortest first. A week is the ISO week, Monday to Sunday.
const (
	Second Unit = iota + 1
	Minute
	Hour
	Day
	Week
	Month
	Year
)

var unitNames = [...]string{
	Second: "second", Minute: "minute", Hour: "hour", Day: "day",
	Week: "week", Month: "month", Year: "year",
}

// String returns the unit's name in lower case, as policies write it.
func (u Unit) String() string {
	if !u.Valid() {
		return fmt.Sprintf("unit(%d)", uint8(u))
	}
	return unitNames[u]
}

// Valid reports whether u is one of the seven units.
func (u Unit) Valid() bool { return u >= Second && u <= Year }

const (
	secondsPerMinute = 60
	secondsPerHour   = 60 * secondsPerMinute
	secondsPerDay    = 24 * secondsPerHour
)

// A Window is the half-open span [Start, End) of UTC epoch seconds in which uses
// are counted together.
type Window struct {
	Start int64 // the first second of the window
	End   int64 // the first second after it, when a budget is whole again
}

// Contains reports whether the epoch second lies in the window.
func (w Window) Contains(epoch int64) bool { return w.Start <= epoch && epoch < w.End }

// Window returns the window of unit u that contains the epoch second. Windows of
// one unit adjoin: each instant lies in exactly one. The epoch may be negative;
// its magnitude must be below 2^55 (a thousand million years). For an invalid
// unit the window is empty.
func (u Unit) Window(epoch int64) Window {
	switch u {
	case Second:
		return span(epoch, 1)
	case Minute:
		return span(epoch, secondsPerMinute)
	case Hour:
		return span(epoch, secondsPerHour)
	case Day:
		return DayWindow(epoch)
	case Week:
		// 1970-01-01 was a Thursday, three days after its week's Monday.
		const shift = 3 * secondsPerDay
		w := span(epoch+shift, 7*secondsPerDay)
		return Window{Start: w.Start - shift, End: w.End - shift}
	case Month:
		return MonthWindow(epoch)
	case Year:
		year, _ := yearMonth(floorDiv(epoch, secondsPerDay))
		return Window{
			Start: firstDay(year, 1) * secondsPerDay,
			End:   firstDay(year+1, 1) * secondsPerDay,
		}
	}
	return Window{}
}

// DayWindow returns the UTC day, midnight to midnight, that contains the epoch
// second. It is pure arithmetic: no time zone, no calendar package.
func DayWindow(epoch int64) Window { return span(epoch, secondsPerDay) }

// MonthWindow returns the UTC calendar month, from the first instant of its first
// day, that contains the epoch second.
func MonthWindow(epoch int64) Window {
	year, month := yearMonth(floorDiv(epoch, secondsPerDay))
	start := firstDay(year, month)
	month++
	if month > 12 {
		year, month = year+1, 1
	}
	return Window{Start: start * secondsPerDay, End: firstDay(year, month) * secondsPerDay}
}

// span returns the window of a fixed length, aligned to the epoch.
func span(epoch, length int64) Window {
	start := floorDiv(epoch, length) * length
	return Window{Start: start, End: start + length}
}

// The civil calendar below counts years from 1 March, so that a leap day is the
// last day of its year and months have a fixed pattern of lengths (153 days in
// five months). Days are counted from 1970-01-01.
const (
	daysPerEra = 146_097 // 400 Gregorian years
	eraOffset  = 719_468 // days from 0000-03-01 to 1970-01-01
)

// yearMonth returns the civil year and month (1 to 12) of a day.
func yearMonth(day int64) (year, month int64) {
	day += eraOffset
	era := floorDiv(day, daysPerEra)
	dayOfEra := day - era*daysPerEra
	yearOfEra := (dayOfEra - dayOfEra/1460 + dayOfEra/36_524 - dayOfEra/146_096) / 365
	dayOfYear := dayOfEra - (365*yearOfEra + yearOfEra/4 - yearOfEra/100)
	year = era*400 + yearOfEra
	month = (5*dayOfYear+2)/153 + 3
	if month > 12 {
		year, month = year+1, month-12
	}
	return year, month
}

// firstDay returns the day on which a civil month (1 to 12) begins.
func firstDay(year, month int64) int64 {
	if month <= 2 {
		year, month = year-1, month+12
	}
	era := floorDiv(year, 400)
	yearOfEra := year - era*400
	dayOfYear := (153*(month-3) + 2) / 5
	return era*daysPerEra + yearOfEra*365 + yearOfEra/4 - yearOfEra/100 + dayOfYear - eraOffset
}

// floorDiv rounds towards minus infinity, as a calendar before 1970 needs.
func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

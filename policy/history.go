package policy

import (
	"time"

	"github.com/weir-dev/weir/quota"
)

// MaxHistory is the most rows that one reading of history may come to: consumers times
// windows.
const MaxHistory = 100_000

// A HistoryQuery asks the store for the history of a page of a domain's consumers.
type HistoryQuery struct {
	Domain string     // the policy's domain; empty for consumers that no policy names
	Only   CounterID  // this one alone, if it is not zero
	After  CounterID  // the last id of the page before; zero for the first page
	Limit  int        // at most so many consumers, from 1 to MaxConsumers
	Unit   quota.Unit // Hour or Day
	// The windows that begin in [From, To): Limit times as many are at most MaxHistory.
	From, To time.Time
}

// A ConsumerHistory is what one consumer sent, by windows.
type ConsumerHistory struct {
	ID     CounterID
	Domain string
	// Entries are as in [ConsumerUsage]; none for the one that stands for all who are
	// not enrolled.
	Entries []Entry
	Others  bool            // stands for all of the domain who are not enrolled; it is on the last page
	Windows []HistoryWindow // in their order; windows in which nothing was sent are left out
}

// A HistoryWindow is what was sent in one window.
type HistoryWindow struct {
	Start   time.Time // the first instant of the window
	Sent    int64     // requests, refused ones included
	Refused int64     // requests that were refused, by whichever limit
	Units   int64     // units that were admitted, less those refunded in the window
}

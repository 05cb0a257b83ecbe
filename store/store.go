// Package store is Weir's truth, in Postgres: rate budgets and quota counters, shared
// by every replica.
//
// [Connect] opens a pool as the store wants it, [Migrate] brings the schema up to
// date and [CheckSchema] verifies it. [Store.Decide] takes all limits of one request
// in one round trip; it is what the service calls. [Store.Take] is one rate budget
// alone, and [Store.Reserve] one quota, for callers of the library.
//
// # Promises
//
// No bucket and no window is ever overdrawn, however many replicas take from it: the
// database serialises on the row, at READ COMMITTED. What a call admits is durable
// before it returns. A refusal writes nothing, but for the one exception that
// [policy.Request] names.
//
// # Clock
//
// Nothing here reads a clock: every call takes now, at microsecond precision. A now
// earlier than a bucket's last refill refills nothing and never moves the refill
// back, so that a slow clock admits less, never more.
//
// # Failure
//
// An error means that nothing is known: neither an admission nor a refusal. A
// refusal is never an error. When a connection dies at the moment of its commit, the
// charge may stand although the caller got an error.
//
// All methods are safe for concurrent use, if the [DBTX] is.
package store

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weir-dev/weir/policy"
)

// DefaultSchema is the database schema that [NewStore] uses.
const DefaultSchema = "plexsphere"

// DBTX is what a pool, a connection and a transaction of pgx share.
type DBTX interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// The errors of arguments, returned before any query.
var (
	// ErrUnknownScope is returned for a scope that is none of the five.
	ErrUnknownScope = errors.New("unknown scope")
	// ErrZeroKey is returned for an all-zero bucket key.
	ErrZeroKey = errors.New("bucket key is zero")
	// ErrNegativeCost is returned for a cost below 0, and for one that is no finite
	// number.
	ErrNegativeCost = errors.New("cost is negative or no number")
	// ErrInvalidBudget is returned for a budget that [policy.Budget.Validate] refuses.
	ErrInvalidBudget = policy.ErrInvalidBudget
)

// A Store reads and writes budgets and quotas in one schema of a database.
type Store struct {
	db      DBTX
	queries queries
	tidy    tidyQueries
	known   *knownConsumers
}

// queries are the statements, for the store's schema.
type queries struct {
	take, deleteIdle, deleteExpired, decide, decideAgain, decideHurried, decideOne, decideOneHurried, used, consumers, enrol string
}

// NewStore returns a store on the schema [DefaultSchema]. It panics when db is nil.
func NewStore(db DBTX) *Store { return NewStoreIn(db, DefaultSchema) }

// NewStoreIn returns a store on another schema, which [Migrate] has made. It panics
// when db is nil.
func NewStoreIn(db DBTX, schema string) *Store {
	if isNil(db) {
		panic("store: the database handle is nil")
	}
	return &Store{db: db, known: &knownConsumers{}, tidy: newTidyQueries(schema), queries: queries{
		take:             inSchema(takeSQL, schema),
		deleteIdle:       inSchema(deleteIdleSQL, schema),
		deleteExpired:    inSchema(deleteExpiredSQL, schema),
		decide:           inSchema(decideSQL, schema),
		decideAgain:      inSchema(decideAgainSQL, schema),
		decideHurried:    inSchema(decideHurriedSQL, schema),
		decideOne:        inSchema(decideOneSQL, schema),
		decideOneHurried: inSchema(decideOneHurriedSQL, schema),
		used:             inSchema(usedSQL, schema),
		consumers:        inSchema(consumersSQL, schema),
		enrol:            inSchema(enrolSQL, schema),
	}}
}

// isNil also finds the nil pointer inside an interface, such as a pool that a failed
// connect returned.
func isNil(db DBTX) bool {
	if db == nil {
		return true
	}
	v := reflect.ValueOf(db)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// inSchema puts a statement that is written for the default schema into another.
// Names are qualified rather than found by search_path, which is a session's
// setting and so not ours behind a pooler.
func inSchema(sql, schema string) string {
	return strings.ReplaceAll(sql, DefaultSchema+".", pgx.Identifier{schema}.Sanitize()+".")
}

// The instants that both Go's calendar and a timestamp of the database can hold.
var (
	minNow = time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
	maxNow = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC).Unix()
)

func checkNow(now time.Time) error {
	if s := now.Unix(); s < minNow || s > maxNow {
		return fmt.Errorf("now is %d s from 1970, outside the years 1 to 9999", s)
	}
	return nil
}

package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// ErrCircuitOpen is returned by [Batcher.Decide] at once, without asking, while the
// database does not answer.
var ErrCircuitOpen = errors.New("the database does not answer, and is not asked until it does")

const (
	// lossesToOpen is how many statements in a row must lose their connections: one
	// alone may be of before a restart, and the next one dials anew.
	lossesToOpen = 2
	// The wait between two tries of a database that does not answer.
	minProbeWait = 50 * time.Millisecond
	maxProbeWait = time.Second
)

// probeSQL asks for what a decision needs: a server that answers and may be written to.
const probeSQL = "SELECT current_setting('transaction_read_only')"

// A circuit is open while the database does not answer. Then nobody waits for it but
// one probe at a time.
type circuit struct {
	open   atomic.Bool
	losses atomic.Int32  // connections lost in a row
	opened chan struct{} // has room for one; wakes what closes it
}

// A failure is what an error says of the database.
type failure int

const (
	answered failure = iota // it answers, whatever it says
	lost                    // the connection is of no use: the next one may be
	silent                  // nothing came in time
)

// failureOf tells what an error of a statement says of the database. A row that
// somebody holds locked, a collision and bad data are answers.
func failureOf(err error) failure {
	if err == nil || errors.Is(err, errPanicked) || errors.Is(err, errShortAnswer) {
		return answered
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return silent
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return lost
	}
	switch code := pgErr.Code; {
	case code == "25006", // read-only
		strings.HasPrefix(code, "57P"), // it shuts down or starts up
		strings.HasPrefix(code, "08"),  // connections
		strings.HasPrefix(code, "53"):  // it is out of connections, memory or disk
		return lost
	}
	return answered
}

// note takes notice of a statement's end, and reports whether it opened the circuit.
func (c *circuit) note(err error) bool {
	switch failureOf(err) {
	case answered:
		c.losses.Store(0)
		return false
	case lost:
		if c.losses.Add(1) < lossesToOpen {
			return false
		}
	case silent:
	}
	if !c.open.CompareAndSwap(false, true) {
		return false
	}
	c.opened <- struct{}{} // whoever closed it has emptied it
	return true
}

func (c *circuit) close() {
	c.losses.Store(0)
	c.open.Store(false)
}

// note takes notice of a statement's end. Whatever is wrong with one connection may be
// with all of them, so they are dropped: those of before a failover would each fail a
// batch.
func (b *Batcher) note(ctx context.Context, err error) {
	if failureOf(err) != answered {
		b.dropConnections()
	}
	if b.circuit.note(err) {
		b.metrics.opened.Inc()
		b.config.Logger.LogAttrs(ctx, slog.LevelError, "the database does not answer: decisions are unavailable until it does", slog.Any("err", err))
	}
}

// dropConnections has a pool dial anew. A single connection can't be helped.
func (b *Batcher) dropConnections() {
	if pool, ok := b.store.db.(interface{ Reset() }); ok {
		pool.Reset()
	}
}

// watch closes the circuit whenever it has opened and the database answers again, until
// ctx ends.
func (b *Batcher) watch(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.circuit.opened:
		}
		start := time.Now()
		if !b.awaitAnswer(ctx) {
			return
		}
		b.circuit.close()
		b.config.Logger.LogAttrs(ctx, slog.LevelInfo, "the database answers again", slog.Duration("after", time.Since(start)))
	}
}

// awaitAnswer probes until the database answers; it returns false when ctx ends first.
// Replicas wait for different times, lest they come back as one.
func (b *Batcher) awaitAnswer(ctx context.Context) bool {
	for wait := minProbeWait; ; wait = min(2*wait, maxProbeWait) {
		err := b.probe(ctx)
		if err == nil {
			return true
		}
		b.config.Logger.LogAttrs(ctx, slog.LevelDebug, "the database does not answer yet", slog.Any("err", err))
		timer := time.NewTimer(wait/2 + rand.N(wait/2)) //nolint:gosec // no secret
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return false
		}
	}
}

func (b *Batcher) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, b.config.Timeout)
	defer cancel()
	var readOnly string
	if err := b.store.db.QueryRow(ctx, probeSQL).Scan(&readOnly); err != nil {
		return fmt.Errorf("probing the database: %w", err)
	}
	if readOnly != "off" {
		b.dropConnections()
		return errors.New("probing the database: it is read-only")
	}
	return nil
}

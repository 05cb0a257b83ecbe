package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weir-dev/weir/policy"
)

// ErrQueueFull is returned by [Batcher.Decide] when as many requests wait as may: the
// database does not keep up, and to wait longer would help nobody.
var ErrQueueFull = errors.New("the queue for the database is full")

// BatcherConfig says how a [Batcher] works. The zero value is complete.
type BatcherConfig struct {
	// Statements is how many statements are in flight at once, each on a
	// connection of its own. Defaults to 1: batches are then larger, which on two
	// cores was worth more (a fifth) than deciding while another one commits. Two
	// are for a database whose commits are slow.
	Statements int
	// MaxBatch is the most requests that one statement decides. Defaults to 256.
	MaxBatch int
	// MaxLimits is the most debits and windows that one statement decides, so that its
	// duration is bounded; a request that has more goes alone. Defaults to 1024.
	MaxLimits int
	// Queue is the most requests that may wait. Defaults to 8192.
	Queue int
	// Timeout bounds a statement. A database that says nothing for so long is not
	// asked again until it answers a probe; see [ErrCircuitOpen]. It should be above the
	// connections' lock_timeout (2 seconds), so that a row that somebody holds locked is
	// no silence. Defaults to 2.5 seconds.
	Timeout time.Duration
	// Logger is told when the database ceases to answer, and when it answers again.
	// Defaults to none.
	Logger *slog.Logger
}

func (c BatcherConfig) withDefaults() BatcherConfig {
	if c.Statements <= 0 {
		c.Statements = 1
	}
	if c.MaxBatch <= 0 {
		c.MaxBatch = 256
	}
	if c.MaxLimits <= 0 {
		c.MaxLimits = 1024
	}
	if c.Queue <= 0 {
		c.Queue = 8192
	}
	if c.Timeout <= 0 {
		c.Timeout = 2500 * time.Millisecond
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c
}

// A Batcher decides requests together: what arrives while a statement is in flight
// goes in the next one, so that many requests share one round trip and one commit. A
// request that finds the database idle waits for nobody.
//
// When the database does not answer (a statement gets no answer in time, or two in a
// row lose their connections) the batcher's circuit opens: what waits and what comes
// fails at once, with [ErrCircuitOpen], and one probe at a time finds out when the
// database answers and may be written to again.
//
// It is safe for concurrent use, and a [prometheus.Collector]; [Batcher.Run] does the
// work.
type Batcher struct {
	store   *Store
	config  BatcherConfig
	queue   chan *waiting
	circuit circuit
	locked  moment // when a batch last met a row that somebody holds locked
	metrics *batcherMetrics
}

// A waiting request is in the queue, or in a statement.
type waiting struct {
	ctx     context.Context //nolint:containedctx // the caller's, for as long as it waits
	request policy.Request
	verdict policy.Verdict
	err     error
	done    chan struct{} // has room for one, so that who answers never waits
}

var waitings = sync.Pool{New: func() any { return &waiting{done: make(chan struct{}, 1)} }}

// NewBatcher returns a batcher in front of a store, which must not be on a transaction.
func NewBatcher(store *Store, config BatcherConfig) *Batcher {
	config = config.withDefaults()
	b := &Batcher{
		store:   store,
		config:  config,
		queue:   make(chan *waiting, config.Queue),
		circuit: circuit{opened: make(chan struct{}, 1)},
	}
	b.metrics = newBatcherMetrics(b)
	return b
}

// Decide is [Store.Decide] in company: see there for what it checks and returns. Requests
// are decided in the order of their arrival, all of a statement at the instant of the
// latest. It fails with [ErrQueueFull] and with [ErrCircuitOpen] at once, and with ctx's
// error when ctx ends first: a request that has not reached the database by then never
// does; one that has may have been charged.
func (b *Batcher) Decide(ctx context.Context, req policy.Request) (policy.Verdict, error) {
	if err := check(req); err != nil {
		return policy.Verdict{}, fmt.Errorf("deciding a request: %w", err)
	}
	if !req.Asks() {
		return policy.Verdict{Allowed: true, At: req.Now}, nil
	}
	if b.circuit.open.Load() {
		return policy.Verdict{}, ErrCircuitOpen
	}
	w, _ := waitings.Get().(*waiting)
	w.ctx, w.request = ctx, req
	select {
	case b.queue <- w:
	default:
		w.release()
		return policy.Verdict{}, ErrQueueFull
	}
	select {
	case <-w.done:
		verdict, err := w.verdict, w.err
		w.release()
		return verdict, err
	case <-ctx.Done():
		// Whoever answers still holds w, so it is left to the collector.
		return policy.Verdict{}, fmt.Errorf("waiting for a decision: %w", ctx.Err())
	}
}

func (w *waiting) release() {
	w.ctx, w.request, w.verdict, w.err = nil, policy.Request{}, policy.Verdict{}, nil
	waitings.Put(w)
}

// Run decides until ctx ends, and then what is in the queue. Requests that come later
// wait for their own contexts, so the service must have stopped taking them.
func (b *Batcher) Run(ctx context.Context) error {
	var workers sync.WaitGroup
	for range b.config.Statements {
		workers.Go(func() { b.work(ctx) })
	}
	workers.Go(func() { b.watch(ctx) })
	workers.Wait()
	return nil
}

func (b *Batcher) work(ctx context.Context) {
	batch := make([]*waiting, 0, b.config.MaxBatch)
	requests := make([]policy.Request, 0, b.config.MaxBatch)
	var next *waiting // came for the last batch, which had no room for it
	for {
		if next == nil {
			if next = b.wait(ctx); next == nil {
				return
			}
		}
		batch, next = b.fill(append(batch, next))
		batch, requests = keep(batch, requests)
		switch {
		case len(batch) == 0:
		case b.circuit.open.Load():
			failAll(batch, ErrCircuitOpen)
		default:
			b.decide(context.WithoutCancel(ctx), batch, requests)
		}
		clear(batch)
		clear(requests)
		batch, requests = batch[:0], requests[:0]
	}
}

// wait waits for a request. It returns nil when ctx has ended and none is left.
func (b *Batcher) wait(ctx context.Context) *waiting {
	select {
	case w := <-b.queue:
		return w
	case <-ctx.Done():
	}
	// One last look, without waiting.
	select {
	case w := <-b.queue:
		return w
	default:
		return nil
	}
}

// fill adds to a batch of one what else waits, and returns what it had no room for.
func (b *Batcher) fill(batch []*waiting) (full []*waiting, next *waiting) {
	limits := limitsOf(&batch[0].request)
	for len(batch) < b.config.MaxBatch {
		select {
		case w := <-b.queue:
			if limits += limitsOf(&w.request); limits > b.config.MaxLimits {
				return batch, w
			}
			batch = append(batch, w)
		default:
			return batch, nil
		}
	}
	return batch, nil
}

// limitsOf is how many debits and windows a request has.
func limitsOf(req *policy.Request) int {
	n := len(req.Budgets) + len(req.Limiters)
	for i := range req.Quotas {
		n += len(req.Quotas[i].Budgets)
	}
	for i := range req.Shadows {
		n += limitsOf(&req.Shadows[i])
	}
	return n
}

// keep leaves out of a batch whose caller has gone, and puts the rest at one instant.
func keep(batch []*waiting, requests []policy.Request) ([]*waiting, []policy.Request) {
	kept := batch[:0]
	var latest time.Time
	for _, w := range batch {
		if err := w.ctx.Err(); err != nil {
			w.answer(policy.Verdict{}, fmt.Errorf("waiting for a decision: %w", err))
			continue
		}
		kept = append(kept, w)
		requests = append(requests, w.request)
		if w.request.Now.After(latest) {
			latest = w.request.Now
		}
	}
	// With one instant for all, what a row is asked for adds up.
	for i := range requests {
		requests[i].Now = latest
		requests[i].Shadows = slices.Clone(requests[i].Shadows) // the caller's
		for j := range requests[i].Shadows {
			requests[i].Shadows[j].Now = latest
		}
	}
	return kept, requests
}

func (b *Batcher) decide(ctx context.Context, batch []*waiting, requests []policy.Request) {
	decide := b.store.decide
	if time.Since(b.locked.last()) < hurryFor {
		decide = b.store.decideHurried
	}
	verdicts, err := b.try(ctx, decide, requests)
	if err == nil {
		answerAll(batch, verdicts)
		return
	}
	if len(batch) > 1 && isLocked(err) {
		b.decideHalves(ctx, batch, requests)
		return
	}
	if len(batch) == 1 || !refused(err) {
		failAll(batch, err)
		return
	}
	// One of them is to blame, and none was charged.
	for i, w := range batch {
		if b.circuit.open.Load() {
			w.answer(policy.Verdict{}, ErrCircuitOpen)
			continue
		}
		verdicts, err := b.try(ctx, b.store.decide, requests[i:i+1])
		if err != nil {
			w.answer(policy.Verdict{}, err)
			continue
		}
		w.answer(verdicts[0], nil)
	}
}

// hurryFor is how long batches hurry after one has met a row that somebody holds locked.
const hurryFor = 2 * time.Second

// decideHalves finds the requests that ask for a row that somebody holds locked: they fail,
// and the others need not.
func (b *Batcher) decideHalves(ctx context.Context, batch []*waiting, requests []policy.Request) {
	b.locked.note()
	half := len(batch) / 2
	for _, part := range [2][2]int{{0, half}, {half, len(batch)}} {
		batch, requests := batch[part[0]:part[1]], requests[part[0]:part[1]]
		if b.circuit.open.Load() {
			failAll(batch, ErrCircuitOpen)
			continue
		}
		verdicts, err := b.try(ctx, b.store.decideHurried, requests)
		switch {
		case err == nil:
			answerAll(batch, verdicts)
		case len(batch) > 1 && isLocked(err):
			b.decideHalves(ctx, batch, requests)
		default:
			failAll(batch, err)
		}
	}
}

// A moment is the last time that something happened.
type moment struct{ nanos atomic.Int64 }

func (m *moment) note() { m.nanos.Store(time.Now().UnixNano()) }

func (m *moment) last() time.Time { return time.Unix(0, m.nanos.Load()) }

func answerAll(batch []*waiting, verdicts []policy.Verdict) {
	for i, w := range batch {
		w.answer(verdicts[i], nil)
	}
}

func failAll(batch []*waiting, err error) {
	for _, w := range batch {
		w.answer(policy.Verdict{}, err)
	}
}

// errPanicked is what a panic while deciding becomes: it costs its batch, and not the
// process.
var errPanicked = errors.New("panicked")

// try decides requests by one statement.
func (b *Batcher) try(ctx context.Context, decide func(context.Context, []policy.Request) ([]policy.Verdict, error), requests []policy.Request) (verdicts []policy.Verdict, err error) {
	start := time.Now()
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("deciding %d requests: %w: %v", len(requests), errPanicked, p)
			b.config.Logger.LogAttrs(ctx, slog.LevelError, "deciding panicked", slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
		}
		b.metrics.observe(len(requests), time.Since(start), err)
		b.note(ctx, err)
	}()
	tryCtx, cancel := context.WithTimeout(ctx, b.config.Timeout)
	defer cancel()
	return decide(tryCtx, requests)
}

func (w *waiting) answer(v policy.Verdict, err error) {
	w.verdict, w.err = v, err
	w.done <- struct{}{}
}

// isLocked reports whether a statement gave up waiting for a row that somebody holds.
func isLocked(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "55P03"
}

// refused reports whether the database found fault with what a statement holds (data
// that it cannot take, or a constraint), rather than being unable to do it now.
func refused(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && len(pgErr.Code) == 5 && (pgErr.Code[:2] == "22" || pgErr.Code[:2] == "23")
}

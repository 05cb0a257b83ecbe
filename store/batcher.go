package store

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
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
	// Queue is the most requests that may wait. Defaults to 8192.
	Queue int
	// Timeout bounds a statement. Defaults to 2 seconds.
	Timeout time.Duration
}

func (c BatcherConfig) withDefaults() BatcherConfig {
	if c.Statements <= 0 {
		c.Statements = 1
	}
	if c.MaxBatch <= 0 {
		c.MaxBatch = 256
	}
	if c.Queue <= 0 {
		c.Queue = 8192
	}
	if c.Timeout <= 0 {
		c.Timeout = 2 * time.Second
	}
	return c
}

// A Batcher decides requests together: what arrives while a statement is in flight
// goes in the next one, so that many requests share one round trip and one commit. A
// request that finds the database idle waits for nobody. It is safe for concurrent
// use; [Batcher.Run] does the work.
type Batcher struct {
	store  *Store
	config BatcherConfig
	queue  chan *waiting
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
	return &Batcher{store: store, config: config, queue: make(chan *waiting, config.Queue)}
}

// Decide is [Store.Decide] in company: see there for what it checks and returns. Requests
// are decided in the order of their arrival, all of a statement at the instant of the
// latest. It fails with [ErrQueueFull] at once, and
// with ctx's error when ctx ends first: a request that has not reached the database by
// then never does; one that has may have been charged.
func (b *Batcher) Decide(ctx context.Context, req policy.Request) (policy.Verdict, error) {
	if err := check(req); err != nil {
		return policy.Verdict{}, fmt.Errorf("deciding a request: %w", err)
	}
	if !req.Asks() {
		return policy.Verdict{Allowed: true, At: req.Now}, nil
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
	workers.Wait()
	return nil
}

func (b *Batcher) work(ctx context.Context) {
	batch := make([]*waiting, 0, b.config.MaxBatch)
	requests := make([]policy.Request, 0, b.config.MaxBatch)
	for {
		select {
		case w := <-b.queue:
			batch = append(batch, w)
		case <-ctx.Done():
			// One last look, without waiting.
			select {
			case w := <-b.queue:
				batch = append(batch, w)
			default:
				return
			}
		}
		batch, requests = b.fill(batch, requests)
		if len(batch) > 0 {
			b.decide(context.WithoutCancel(ctx), batch, requests)
		}
		clear(batch)
		clear(requests)
		batch, requests = batch[:0], requests[:0]
	}
}

// fill adds to a batch of one what else waits, and leaves out whose caller has gone.
func (b *Batcher) fill(batch []*waiting, requests []policy.Request) ([]*waiting, []policy.Request) {
	for more := true; more && len(batch) < b.config.MaxBatch; {
		select {
		case w := <-b.queue:
			batch = append(batch, w)
		default:
			more = false
		}
	}
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
	verdicts, err := b.try(ctx, requests)
	if err == nil {
		for i, w := range batch {
			w.answer(verdicts[i], nil)
		}
		return
	}
	if len(batch) == 1 || !refused(err) {
		for _, w := range batch {
			w.answer(policy.Verdict{}, err)
		}
		return
	}
	// One of them is to blame, and none was charged.
	for i, w := range batch {
		verdicts, err := b.try(ctx, requests[i:i+1])
		if err != nil {
			w.answer(policy.Verdict{}, err)
			continue
		}
		w.answer(verdicts[0], nil)
	}
}

func (b *Batcher) try(ctx context.Context, requests []policy.Request) ([]policy.Verdict, error) {
	ctx, cancel := context.WithTimeout(ctx, b.config.Timeout)
	defer cancel()
	return b.store.decide(ctx, requests)
}

func (w *waiting) answer(v policy.Verdict, err error) {
	w.verdict, w.err = v, err
	w.done <- struct{}{}
}

// refused reports whether the database found fault with what a statement holds (data
// that it cannot take, or a constraint), rather than being unable to do it now.
func refused(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && len(pgErr.Code) == 5 && (pgErr.Code[:2] == "22" || pgErr.Code[:2] == "23")
}

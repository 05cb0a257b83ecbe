package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/store"
)

// A column is one way to ask, and what for.
type column struct {
	name    string
	base    string // the column that its rate is compared with
	callers int
	refused float64 // the least share of refusals that makes the column what it says
	// open connects; call makes the n-th request of a caller, and tells whether it was
	// refused.
	open func(ctx context.Context) (call asking, done func(), err error)
	// charged, if it is there, counts what all requests so far were charged; each is to be
	// charged so much.
	charged func(ctx context.Context) (int, error)
	charges int
}

type asking func(ctx context.Context, caller, n int) (refused bool, err error)

// connections and callers are those of an Envoy or a few, busy.
const (
	connections = 4
	callers     = 64
)

// addresses are where the servers are.
type addresses struct {
	null, weir string
	rows       map[int]string // Weir on tables of so many buckets
}

func columnsOf(o options, at addresses) []column {
	spread := func(keys int, names ...string) func(caller, n int) *rlsv3.RateLimitRequest {
		return func(caller, n int) *rlsv3.RateLimitRequest {
			return request((caller*7919+n*104729)%keys, names...)
		}
	}
	columns := []column{
		{name: "null", base: "null", callers: callers, open: asks(at.null, spread(o.keys, "node"))},
		{name: "exact", base: "null", callers: callers, open: asks(at.weir, spread(o.keys, "node"))},
		{name: "exact_hot", base: "null", callers: callers, open: asks(at.weir, spread(1, "node"))},
		{name: "exact_4desc", base: "null", callers: callers, open: asks(at.weir, spread(o.keys, "node", "domain", "reads", "issued"))},
		{
			name: "refused", base: "null", callers: callers, refused: 0.85,
			open: asks(at.weir, func(caller, n int) *rlsv3.RateLimitRequest {
				if n%10 == 0 {
					return request((caller*7919+n)%o.keys, "node")
				}
				return request(n%16, "tight")
			}),
		},
		{name: "take", base: "null", callers: 16, open: takes(o)},
		{name: "null_one", base: "null_one", callers: 1, open: asks(at.null, spread(o.keys, "node"))},
		{name: "exact_one", base: "null_one", callers: 1, open: asks(at.weir, spread(o.keys, "node"))},
		{name: "take_one", base: "null_one", callers: 1, open: takes(o)},
	}
	for _, rows := range slices.Sorted(maps.Keys(at.rows)) {
		columns = append(columns, column{
			name: "rows_" + strconv.Itoa(rows), base: "null", callers: callers, open: asks(at.rows[rows], spread(rows, "node")),
		})
	}
	if o.peer != "" {
		columns = append(columns, column{name: "peer", base: "null", callers: callers, open: asks(o.peer, spread(o.keys, "node"))})
	}
	return columns
}

// asks is the rate limit protocol, over a few connections.
func asks(address string, request func(caller, n int) *rlsv3.RateLimitRequest) func(ctx context.Context) (asking, func(), error) {
	return func(ctx context.Context) (asking, func(), error) {
		var conns []*grpc.ClientConn
		done := func() {
			for _, conn := range conns {
				_ = conn.Close() // nothing is left to lose
			}
		}
		clients := make([]rlsv3.RateLimitServiceClient, connections)
		for i := range clients {
			conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
			if err != nil {
				return nil, done, err
			}
			conns = append(conns, conn)
			clients[i] = rlsv3.NewRateLimitServiceClient(conn)
			if _, err := clients[i].ShouldRateLimit(ctx, request(0, 0)); err != nil {
				return nil, done, err
			}
		}
		return func(ctx context.Context, caller, n int) (bool, error) {
			answer, err := clients[caller%len(clients)].ShouldRateLimit(ctx, request(caller, n))
			return answer.GetOverallCode() == rlsv3.RateLimitResponse_OVER_LIMIT, err
		}, done, nil
	}
}

// takes is the statement of a take alone, a connection for each caller: the floor under
// what is decided one by one.
func takes(o options) func(ctx context.Context) (asking, func(), error) {
	return func(ctx context.Context) (asking, func(), error) {
		config, err := store.PoolConfig(o.database)
		if err != nil {
			return nil, func() {}, err
		}
		config.MaxConns = 16
		pool, err := pgxpool.NewWithConfig(ctx, config)
		if err != nil {
			return nil, func() {}, err
		}
		s := store.NewStoreIn(pool, o.schema)
		budget := policy.Budget{PerSecond: 1 << 30, Burst: 1 << 40}
		return func(ctx context.Context, caller, n int) (bool, error) {
			covered, err := s.Take(ctx, policy.ScopeIngestNode, keyOf((caller*7919+n)%o.keys), 1, budget, time.Now())
			return !covered, err
		}, pool.Close, nil
	}
}

// keyOf is the n-th bucket; fill makes the same.
func keyOf(n int) policy.BucketKey {
	var id policy.BucketKey
	binary.BigEndian.PutUint64(id[8:], uint64(n)+1) //nolint:gosec // n counts from 0
	return id
}

// request asks for one unit of each key's budget.
func request(n int, keys ...string) *rlsv3.RateLimitRequest {
	req := &rlsv3.RateLimitRequest{Domain: benchDomain}
	for _, key := range keys {
		req.Descriptors = append(req.Descriptors, &ratelimitv3.RateLimitDescriptor{
			Entries: []*ratelimitv3.RateLimitDescriptor_Entry{{Key: key, Value: keyOf(n).String()}},
		})
	}
	return req
}

// measure runs the column for a time: each caller asks, waits for the answer and asks
// again.
func (c column) measure(ctx context.Context, duration time.Duration) (figure, error) {
	call, done, err := c.open(ctx)
	defer done()
	if err != nil {
		return figure{}, err
	}
	before, err := c.countCharged(ctx)
	if err != nil {
		return figure{}, err
	}
	latencies := make([][]time.Duration, c.callers)
	refusals := make([]int, c.callers)
	cpu, err := serversCPU()
	if err != nil {
		return figure{}, err
	}
	start := time.Now()
	var group errgroup.Group
	for caller := range c.callers {
		group.Go(func() error {
			for n := 0; ctx.Err() == nil; n++ {
				asked := time.Now()
				if asked.Sub(start) >= duration {
					return nil
				}
				refused, err := call(ctx, caller, n)
				if err != nil {
					return err
				}
				latencies[caller] = append(latencies[caller], time.Since(asked))
				if refused {
					refusals[caller]++
				}
			}
			return ctx.Err()
		})
	}
	if err := group.Wait(); err != nil {
		return figure{}, err
	}
	took := time.Since(start)
	after, err := serversCPU()
	if err != nil {
		return figure{}, err
	}
	all := slices.Concat(latencies...)
	counted, err := c.countCharged(ctx)
	if err != nil {
		return figure{}, err
	}
	if c.charged != nil && counted-before != c.charges*len(all) {
		return figure{}, fmt.Errorf("%d requests were charged %d, want %d each", len(all), counted-before, c.charges)
	}
	slices.Sort(all)
	refused := 0
	for _, n := range refusals {
		refused += n
	}
	if share := float64(refused) / float64(len(all)); share < c.refused || c.refused == 0 && refused > 0 {
		return figure{}, fmt.Errorf("%.0f %% of the requests were refused", 100*share)
	}
	micros := func(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
	return figure{
		RPS: float64(len(all)) / took.Seconds(),
		P50: micros(all[len(all)/2]),
		P99: micros(all[len(all)*99/100]),
		CPU: micros(after-cpu) / float64(len(all)),
	}, nil
}

func (c column) countCharged(ctx context.Context) (int, error) {
	if c.charged == nil {
		return 0, nil
	}
	return c.charged(ctx)
}

// ticksPerSecond is the unit of /proc/PID/stat, the same on every Linux that Go runs on.
const ticksPerSecond = 100

// serversCPU sums the processor time of all processes below this one: the servers, and
// Postgres unless it is somebody else's.
func serversCPU() (time.Duration, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return 0, err
	}
	parents, ticks := map[int]int{}, map[int]int{}
	for _, file := range files {
		text, err := os.ReadFile(file) //nolint:gosec // a path of the kernel's
		if err != nil {
			continue // it has ended
		}
		// The name, in brackets, may hold anything; the rest are numbers.
		end := strings.LastIndexByte(string(text), ')')
		fields := strings.Fields(string(text[end+1:]))
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil || len(fields) < 15 {
			continue
		}
		parents[pid], _ = strconv.Atoi(fields[1])
		for _, i := range []int{11, 12} { // user and system
			n, _ := strconv.Atoi(fields[i])
			ticks[pid] += n
		}
	}
	total := 0
	for pid := range parents {
		for at := parents[pid]; at > 1; at = parents[at] {
			if at == os.Getpid() {
				total += ticks[pid]
				break
			}
		}
	}
	return time.Duration(total) * time.Second / ticksPerSecond, nil
}

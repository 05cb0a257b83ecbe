package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/weir-dev/weir/policy"
)

// A column is one way to ask one server.
type column struct {
	name    string
	base    string // the column that its rate is compared with
	address string
	callers int
	// request makes the n-th request of a caller.
	request func(caller, n int) *rlsv3.RateLimitRequest
	// refused is the least share of refusals that makes the column what it says.
	refused float64
}

// connections and callers are those of an Envoy or a few, busy.
const (
	connections = 4
	callers     = 64
)

func columnsOf(o options, null, weir string) []column {
	spread := func(keys ...string) func(caller, n int) *rlsv3.RateLimitRequest {
		return func(caller, n int) *rlsv3.RateLimitRequest {
			return request((caller*7919+n)%o.keys, keys...)
		}
	}
	hot := func(int, int) *rlsv3.RateLimitRequest { return request(0, "node") }
	columns := []column{
		{name: "null", base: "null", address: null, callers: callers, request: spread("node")},
		{name: "exact", base: "null", address: weir, callers: callers, request: spread("node")},
		{name: "exact_hot", base: "null", address: weir, callers: callers, request: hot},
		{name: "exact_4desc", base: "null", address: weir, callers: callers, request: spread("node", "domain", "reads", "issued")},
		{
			name: "refused", base: "null", address: weir, callers: callers, refused: 0.85,
			request: func(caller, n int) *rlsv3.RateLimitRequest {
				if n%10 == 0 {
					return request((caller*7919+n)%o.keys, "node")
				}
				return request(n%16, "tight")
			},
		},
		{name: "null_one", base: "null_one", address: null, callers: 1, request: spread("node")},
		{name: "exact_one", base: "null_one", address: weir, callers: 1, request: spread("node")},
	}
	if o.peer != "" {
		columns = append(columns, column{name: "peer", base: "null", address: o.peer, callers: callers, request: spread("node")})
	}
	return columns
}

// request asks for one unit of each key's budget.
func request(n int, keys ...string) *rlsv3.RateLimitRequest {
	var id policy.BucketKey
	binary.BigEndian.PutUint64(id[8:], uint64(n)+1) //nolint:gosec // n counts from 0
	req := &rlsv3.RateLimitRequest{Domain: "bench"}
	for _, key := range keys {
		req.Descriptors = append(req.Descriptors, &ratelimitv3.RateLimitDescriptor{
			Entries: []*ratelimitv3.RateLimitDescriptor_Entry{{Key: key, Value: id.String()}},
		})
	}
	return req
}

// measure runs the column for a time: each caller asks, waits for the answer and asks
// again.
func (c column) measure(ctx context.Context, duration time.Duration) (figure, error) {
	clients := make([]rlsv3.RateLimitServiceClient, min(connections, c.callers))
	for i := range clients {
		conn, err := grpc.NewClient(c.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return figure{}, err
		}
		defer func() { _ = conn.Close() }()
		clients[i] = rlsv3.NewRateLimitServiceClient(conn)
		if _, err := clients[i].ShouldRateLimit(ctx, c.request(0, 0)); err != nil {
			return figure{}, err
		}
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
			client := clients[caller%len(clients)]
			for n := 0; ctx.Err() == nil; n++ {
				asked := time.Now()
				if asked.Sub(start) >= duration {
					return nil
				}
				response, err := client.ShouldRateLimit(ctx, c.request(caller, n))
				if err != nil {
					return err
				}
				latencies[caller] = append(latencies[caller], time.Since(asked))
				if response.GetOverallCode() != rlsv3.RateLimitResponse_OK {
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

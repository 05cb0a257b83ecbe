package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	ratelimitconfigv3 "github.com/envoyproxy/go-control-plane/envoy/config/ratelimit/v3"
	routev3 "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	ratelimitfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ratelimit/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"github.com/jackc/pgx/v5"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/weir-dev/weir/envoy"
	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/internal/envoyproc"
)

// The columns with an Envoy: one that charges nothing, one with Envoy's own filter, and
// one with Weir's.
const (
	envoyNone       = "envoy_none"
	envoyNative     = "envoy_native"
	envoyFilterCall = "envoy_filter_call"
)

// Both filters call the same service, for as long as this machine may stand still.
const (
	serviceCluster = "weir_ratelimit"
	callTimeout    = 5 * time.Second
	consumerHeader = "x-consumer"
	consumerKey    = "consumer"
)

// envoyParts divides a column's time: rounds are shorter and more by so much, since what
// disturbs a shared machine should hit all three columns alike.
const envoyParts = 8

// An envoyBench is the Envoys and what tells how much was charged through them.
type envoyBench struct {
	columns  []column
	database *pgx.Conn
	schema   string
	envoys   []*envoyproc.Envoy
	log      envoyLog
}

// An envoyLog shows Envoys' warnings until they are stopped, which is one too.
type envoyLog struct{ stopped atomic.Bool }

// Write implements [io.Writer].
func (l *envoyLog) Write(p []byte) (int, error) {
	if l.stopped.Load() {
		return len(p), nil
	}
	return os.Stderr.Write(p)
}

// startEnvoys starts an Envoy for each column, all at rest until they are measured. The
// caller stops what is returned, also beside an error.
func startEnvoys(ctx context.Context, o options, service, upstream string) (*envoyBench, error) {
	b := &envoyBench{schema: pgx.Identifier{o.schema}.Sanitize()}
	binary, err := envoyproc.Find(o.envoy)
	if err != nil {
		return b, err
	}
	module, err := filepath.Abs(o.filter)
	if err != nil {
		return b, fmt.Errorf("finding the filter: %w", err)
	}
	if b.database, err = pgx.Connect(ctx, o.database); err != nil {
		return b, fmt.Errorf("connecting to count charges: %w", err)
	}
	for _, name := range []string{envoyNone, envoyNative, envoyFilterCall} {
		bootstrap, err := envoyBootstrap(name, service, upstream, module)
		if err != nil {
			return b, fmt.Errorf("configuring %s: %w", name, err)
		}
		address, err := b.start(ctx, binary, bootstrap)
		if err != nil {
			return b, fmt.Errorf("starting %s: %w", name, err)
		}
		charges := 1
		if name == envoyNone {
			charges = 0
		}
		b.columns = append(b.columns, column{
			name: name, base: envoyNative, callers: callers, open: gets(address, o.keys),
			charged: b.charged, charges: charges,
		})
	}
	return b, nil
}

// start returns the address of the gateway.
func (b *envoyBench) start(ctx context.Context, binary string, bootstrap *bootstrapv3.Bootstrap) (string, error) {
	const startTimeout = time.Minute // it compiles the filter
	// One worker each: with more, what a request costs would hide behind idle cores.
	e, err := envoyproc.Start(ctx, envoyproc.Config{Binary: binary, Bootstrap: bootstrap, Output: &b.log, Concurrency: 1})
	if err != nil {
		return "", err
	}
	b.envoys = append(b.envoys, e)
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := e.WaitReady(ctx); err != nil {
		return "", err
	}
	return e.Listener(ctx, envoy.ListenerName)
}

func (b *envoyBench) stop() {
	b.log.stopped.Store(true)
	for _, e := range b.envoys {
		_ = e.Stop() // the figures are taken
	}
	if b.database != nil {
		_ = b.database.Close(context.Background())
	}
}

// charged is what Postgres has counted of all quotas so far: only requests through
// Envoys have one. A daily counter is not swept while this runs, so days add up.
func (b *envoyBench) charged(ctx context.Context) (int, error) {
	var used int
	sql := fmt.Sprintf("SELECT coalesce(sum(used), 0)::bigint FROM %s.quota_counters WHERE unit = 'day'", b.schema)
	if err := b.database.QueryRow(ctx, sql).Scan(&used); err != nil {
		return 0, fmt.Errorf("counting charges: %w", err)
	}
	return used, nil
}

// envoyBootstrap is what package envoy builds, with the column's filter in its place.
func envoyBootstrap(name, service, upstream, module string) (*bootstrapv3.Bootstrap, error) {
	filter, err := config.Compose("1", benchDomain, serviceCluster, fmt.Appendf(nil,
		`{"timeout": %q, "rules": [{"descriptors": [{"entries": [{"key": %q, "header": %q}]}]}]}`,
		callTimeout, consumerKey, consumerHeader))
	if err != nil {
		return nil, err
	}
	bootstrap, err := envoy.Config{
		Admin:        "127.0.0.1:0",
		Gateway:      "127.0.0.1:0",
		Upstream:     upstream,
		Service:      service,
		FilterConfig: filter,
		Module:       envoy.Module{Path: module},
	}.Bootstrap()
	if err != nil {
		return nil, err
	}
	network := bootstrap.GetStaticResources().GetListeners()[0].GetFilterChains()[0].GetFilters()[0]
	manager := &hcmv3.HttpConnectionManager{}
	if err := network.GetTypedConfig().UnmarshalTo(manager); err != nil {
		return nil, err
	}
	router := manager.GetHttpFilters()[1:]
	switch name {
	case envoyNone:
		manager.HttpFilters = router
	case envoyNative:
		native, err := nativeFilter()
		if err != nil {
			return nil, err
		}
		manager.HttpFilters = append([]*hcmv3.HttpFilter{native}, router...)
	}
	packed, err := anypb.New(manager)
	if err != nil {
		return nil, err
	}
	network.GetTypedConfig().Value = packed.GetValue()
	return bootstrap, nil
}

// nativeFilter is Envoy's own filter, told the same as ours is.
func nativeFilter() (*hcmv3.HttpFilter, error) {
	packed, err := anypb.New(&ratelimitfilterv3.RateLimit{
		Domain:          benchDomain,
		FailureModeDeny: true,
		Timeout:         durationpb.New(callTimeout),
		RateLimitService: &ratelimitconfigv3.RateLimitServiceConfig{
			TransportApiVersion: corev3.ApiVersion_V3,
			GrpcService: &corev3.GrpcService{TargetSpecifier: &corev3.GrpcService_EnvoyGrpc_{
				EnvoyGrpc: &corev3.GrpcService_EnvoyGrpc{ClusterName: serviceCluster},
			}},
		},
		RateLimits: []*routev3.RateLimit{{Actions: []*routev3.RateLimit_Action{{
			ActionSpecifier: &routev3.RateLimit_Action_RequestHeaders_{
				RequestHeaders: &routev3.RateLimit_Action_RequestHeaders{HeaderName: consumerHeader, DescriptorKey: consumerKey},
			},
		}}}},
	})
	if err != nil {
		return nil, err
	}
	return &hcmv3.HttpFilter{
		Name:       "envoy.filters.http.ratelimit",
		ConfigType: &hcmv3.HttpFilter_TypedConfig{TypedConfig: packed},
	}, nil
}

// gets sends GETs without a body over HTTP/1.1, each caller on a connection of its own
// that is kept. It does no more than it must, as it runs on the servers' cores.
func gets(address string, keys int) func(ctx context.Context) (asking, func(), error) {
	requests := make([][]byte, keys)
	for n := range requests {
		requests[n] = fmt.Appendf(nil, "GET / HTTP/1.1\r\nhost: bench\r\n%s: c%d\r\n\r\n", consumerHeader, n)
	}
	return func(ctx context.Context) (asking, func(), error) {
		clients := make([]*httpClient, callers)
		closeAll := func() {
			for _, c := range clients {
				if c != nil {
					_ = c.conn.Close() // nothing is left to lose
				}
			}
		}
		for i := range clients {
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
			if err != nil {
				return nil, closeAll, err
			}
			clients[i] = &httpClient{conn: conn, reader: bufio.NewReader(conn)}
			if err := conn.SetDeadline(time.Now().Add(maxTime + 2*callTimeout)); err != nil {
				return nil, closeAll, err
			}
		}
		stop := context.AfterFunc(ctx, closeAll)
		return func(_ context.Context, caller, n int) (bool, error) {
			return clients[caller].do(requests[(caller*7919+n*104729)%keys])
		}, func() { stop(); closeAll() }, nil
	}
}

// An httpClient is one connection.
type httpClient struct {
	conn   net.Conn
	reader *bufio.Reader
}

// do sends a request and reads its response. Any status but 200 and 429 is an error.
func (c *httpClient) do(request []byte) (refused bool, err error) {
	if _, err := c.conn.Write(request); err != nil {
		return false, err
	}
	line, err := c.reader.ReadSlice('\n')
	if err != nil {
		return false, fmt.Errorf("reading a status line: %w", err)
	}
	switch {
	case bytes.HasPrefix(line, []byte("HTTP/1.1 200 ")):
	case bytes.HasPrefix(line, []byte("HTTP/1.1 429 ")):
		refused = true
	default:
		return false, fmt.Errorf("the answer was %q", line)
	}
	length := -1
	for {
		line, err := c.reader.ReadSlice('\n')
		if err != nil {
			return false, fmt.Errorf("reading headers: %w", err)
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			break
		}
		// Envoy writes names in lower case.
		if value, found := bytes.CutPrefix(line, []byte("content-length: ")); found {
			if length, err = strconv.Atoi(string(value)); err != nil {
				return false, fmt.Errorf("reading headers: %w", err)
			}
		}
	}
	if length < 0 {
		return false, errors.New("the answer has no content-length")
	}
	_, err = c.reader.Discard(length)
	return refused, err
}

// serveUpstream runs what is behind each Envoy until ctx ends, and says its address on
// stdout. A route that answers by itself would cost less, but Envoy's own filter lets
// such requests pass unasked. It answers each block of headers, and expects no body.
func serveUpstream(ctx context.Context, stdout io.Writer) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Fprintln(stdout, listener.Addr())
	context.AfterFunc(ctx, func() { _ = listener.Close() })
	for {
		conn, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil // ctx has ended
		}
		if err != nil {
			return err
		}
		go answerAll(conn)
	}
}

// answerAll returns when the peer is gone.
func answerAll(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	answer := []byte("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
	reader := bufio.NewReader(conn)
	for {
		line, err := reader.ReadSlice('\n')
		if err != nil {
			return
		}
		if len(bytes.TrimRight(line, "\r\n")) > 0 {
			continue
		}
		if _, err := conn.Write(answer); err != nil {
			return
		}
	}
}

package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/weir-dev/weir/store"
)

// backing is what stands between the service and its database.
type backing struct {
	decisions *pgxpool.Pool
	batcher   *store.Batcher
	clock     *store.Clock
	monitor   *store.Monitor
}

// decisionConns is how many connections decisions have for themselves: that of the statement in
// flight, and one to find out whether the database answers.
const decisionConns = 2

// newBacking measures the database's clock, and registers the metrics of all parts.
func newBacking(config servingConfig, registry *prometheus.Registry) (*backing, error) {
	// Nobody who reads, sweeps or looks may make a decision wait for a connection.
	own := config.pool.Config()
	own.MaxConns, own.MinConns, own.MinIdleConns = decisionConns, 0, 0
	decisions, err := pgxpool.NewWithConfig(context.Background(), own)
	if err != nil {
		return nil, fmt.Errorf("building the service: %w", err)
	}
	// The measurement has a bound of its own.
	clock, err := store.NewClock(context.Background(), config.pool, store.ClockConfig{Logger: config.logger})
	if err != nil {
		return nil, fmt.Errorf("building the service: %w", err)
	}
	b := &backing{
		decisions: decisions,
		batcher:   store.NewBatcher(store.NewStoreIn(decisions, config.schema), store.BatcherConfig{Logger: config.logger}),
		clock:     clock,
		monitor:   store.NewMonitor(config.pool, store.MonitorConfig{Logger: config.logger}),
	}
	registry.MustRegister(b.batcher, b.clock, b.monitor)
	return b, nil
}

// watch keeps the clock right and the metrics of the database true, until ctx ends.
func (b *backing) watch(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return b.clock.Run(ctx) })
	group.Go(func() error { return b.monitor.Run(ctx) })
	return group.Wait()
}

package main

import (
	"context"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/weir-dev/weir/store"
)

// backing is what stands between the service and its database.
type backing struct {
	batcher *store.Batcher
	clock   *store.Clock
	monitor *store.Monitor
}

// newBacking measures the database's clock, and registers the metrics of all parts.
func newBacking(s *store.Store, config servingConfig, registry *prometheus.Registry) (*backing, error) {
	// The measurement has a bound of its own.
	clock, err := store.NewClock(context.Background(), config.pool, store.ClockConfig{Logger: config.logger})
	if err != nil {
		return nil, fmt.Errorf("building the service: %w", err)
	}
	b := &backing{
		batcher: store.NewBatcher(s, store.BatcherConfig{Logger: config.logger}),
		clock:   clock,
		monitor: store.NewMonitor(config.pool, store.MonitorConfig{Logger: config.logger}),
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

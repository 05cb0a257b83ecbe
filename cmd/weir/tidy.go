package main

import (
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/weir-dev/weir/store"
)

// retentionFlags say how long what has ended is kept.
type retentionFlags struct {
	KeepDayCounters   time.Duration `help:"How long the quota counters of days and weeks are kept after their end." default:"2160h"`
	KeepMonthCounters time.Duration `help:"How long those of months and years are kept." default:"17544h"`
	KeepHourlyHistory time.Duration `help:"How long the history of consumers is kept by hour." default:"2160h"`
	KeepDailyHistory  time.Duration `help:"How long it is kept by day." default:"17544h"`
}

func (f retentionFlags) retention() store.Retention {
	return store.Retention{
		DayCounters: f.KeepDayCounters, MonthCounters: f.KeepMonthCounters,
		HourlyHistory: f.KeepHourlyHistory, DailyHistory: f.KeepDailyHistory,
	}
}

// tidying is what works beside decisions: the sweeper, and the recorder of history.
type tidying struct {
	sweeper  *store.Sweeper
	recorder *store.Recorder
}

func newTidying(s *store.Store, config servingConfig, registry *prometheus.Registry) (*tidying, error) {
	jobs, err := store.Jobs(config.retention)
	if err != nil {
		return nil, fmt.Errorf("planning the sweeps: %w", err)
	}
	sweeper, err := store.NewSweeper(config.pool, config.schema, store.SweeperConfig{Jobs: jobs, Logger: config.logger})
	if err != nil {
		return nil, err
	}
	t := &tidying{sweeper: sweeper, recorder: store.NewRecorder(s, store.RecorderConfig{Logger: config.logger})}
	registry.MustRegister(t.sweeper, t.recorder)
	return t, nil
}

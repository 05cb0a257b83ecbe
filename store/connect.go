package store

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// The settings of a connection. A DSN that names one of them keeps its own, but for those
// that correctness rests on.
const (
	connectTimeout   = 2 * time.Second
	statementTimeout = "5s"
	lockTimeout      = "2s"
	idleTimeout      = "10s" // of a transaction that its client has forgotten
)

// PoolConfig reads a DSN, a URL or key=value pairs as libpq has them, and adds what
// the store needs of a connection: generic plans, since plans of array arguments are
// otherwise made anew for each call; no sequential scans, which such a plan would
// choose on a table that was empty when it was made; READ COMMITTED, on which its
// statements rely; and bounds on waiting. Pool settings may stand in the DSN, as
// pool_max_conns does. Behind pgbouncer these settings must be in its
// ignore_startup_parameters, and then in an ALTER ROLE … SET.
func PoolConfig(dsn string) (*pgxpool.Config, error) {
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("reading the database's DSN: %w", err)
	}
	params := cfg.ConnConfig.RuntimeParams
	for name, value := range map[string]string{
		"application_name":                    "weir",
		"enable_seqscan":                      "off",
		"idle_in_transaction_session_timeout": idleTimeout,
		"jit":                                 "off",
		"lock_timeout":                        lockTimeout,
		"plan_cache_mode":                     "force_generic_plan",
		"statement_timeout":                   statementTimeout,
	} {
		if _, ok := params[name]; !ok {
			params[name] = value
		}
	}
	// No role, database or DSN may opt out of these: what is admitted is durable, and
	// the statements rely on READ COMMITTED.
	params["default_transaction_isolation"] = "read committed"
	params["synchronous_commit"] = "on"
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = connectTimeout
	}
	return cfg, nil
}

// Connect opens a pool by [PoolConfig] and tries it. A server that dies later makes
// calls fail quickly and is used again, without a restart, once it is back.
func Connect(ctx context.Context, dsn string) (*pgxpool.Pool, error) {
	cfg, err := PoolConfig(dsn)
	if err != nil {
		return nil, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("opening a pool of connections: %w", err)
	}
	if err := pool.Ping(ctx); err != nil {
		pool.Close()
		return nil, fmt.Errorf("connecting to Postgres: %w", err)
	}
	return pool, nil
}

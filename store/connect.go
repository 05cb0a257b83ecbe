package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// The settings of a connection. A DSN that names one of them keeps its own, but for those
// that correctness rests on.
const (
	connectTimeout   = 2 * time.Second
	statementTimeout = "5s"
	// lockTimeout is below a batch's own timeout, so that a row that somebody holds is
	// the database's answer, and not its silence.
	lockTimeout = "2s"
	idleTimeout = "10s" // of a transaction that its client has forgotten
)

// minServerVersion is Postgres 16, from which updates stay heap-only under a BRIN index.
const minServerVersion = 160000

// execModeParameter is what pgx calls the choice of protocol in a DSN.
const execModeParameter = "default_query_exec_mode"

// settings are what the store asks of a session, unless the DSN says otherwise.
func settings() map[string]string {
	return map[string]string{
		"enable_seqscan":                      "off",
		"idle_in_transaction_session_timeout": idleTimeout,
		"jit":                                 "off",
		"lock_timeout":                        lockTimeout,
		"plan_cache_mode":                     "force_generic_plan",
		"statement_timeout":                   statementTimeout,
	}
}

// requirements are what no role, database or DSN may opt out of: what is admitted is
// durable, and the statements rely on READ COMMITTED.
func requirements() map[string]string {
	return map[string]string{
		"default_transaction_isolation": "read committed",
		"synchronous_commit":            "on",
	}
}

// PoolConfig reads a DSN, a URL or key=value pairs as libpq has them, and adds what
// the store needs of a connection: generic plans, since plans of array arguments are
// otherwise made anew for each call; no sequential scans, which such a plan would
// choose on a table that was empty when it was made; READ COMMITTED, on which its
// statements rely; and bounds on waiting. Pool settings may stand in the DSN, as
// pool_max_conns does.
//
// Each new connection is tried before it is used: a server that is read-only, older
// than Postgres 16, or not durable (fsync, full_page_writes or synchronous_commit off)
// is refused, or passed over for the next host of the DSN. A connection that answers
// that its server is now read-only, or shuts down, is not used again.
//
// [Connect] also finds out what a pooler in between can do.
func PoolConfig(dsn string) (*pgxpool.Config, error) {
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("reading the database's DSN: %w", err)
	}
	params := cfg.ConnConfig.RuntimeParams
	if _, ok := params["application_name"]; !ok {
		params["application_name"] = "weir"
	}
	for name, value := range settings() {
		if _, ok := params[name]; !ok {
			params[name] = value
		}
	}
	maps.Copy(params, requirements())
	if cfg.ConnConfig.ConnectTimeout == 0 {
		cfg.ConnConfig.ConnectTimeout = connectTimeout
	}
	cfg.ConnConfig.DialFunc = dialer{timeout: cfg.ConnConfig.ConnectTimeout}.dial
	cfg.ConnConfig.OnPgError = keepAfter(cfg.ConnConfig.OnPgError)
	cfg.ConnConfig.ValidateConnect = validate(cfg.ConnConfig.ValidateConnect)
	return cfg, nil
}

// Connect opens a pool by [PoolConfig] and tries it. A server that dies later makes
// calls fail quickly and is used again, without a restart, once it is back.
//
// Behind a pooler, such as pgbouncer in transaction mode, connections use no named
// prepared statements, unless the DSN has a default_query_exec_mode of its own, and
// settings that the pooler refuses as startup parameters are left out. They can then
// be the role's: [MissingSettings] says which are not in force.
func Connect(ctx context.Context, dsn string) (*pgxpool.Pool, error) {
	cfg, err := PoolConfig(dsn)
	if err != nil {
		return nil, err
	}
	if err := adapt(ctx, cfg, strings.Contains(dsn, execModeParameter)); err != nil {
		return nil, fmt.Errorf("connecting to Postgres: %w", err)
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

// adapt makes one connection, to fit cfg to what is between here and the server.
func adapt(ctx context.Context, cfg *pgxpool.Config, modeChosen bool) error {
	conn, err := pgx.ConnectConfig(ctx, cfg.ConnConfig)
	if refusesParameters(err) {
		for _, ours := range []map[string]string{settings(), requirements()} {
			for name := range ours {
				delete(cfg.ConnConfig.RuntimeParams, name)
			}
		}
		conn, err = pgx.ConnectConfig(ctx, cfg.ConnConfig)
	}
	if err != nil {
		return err
	}
	pooled, err := isPooled(ctx, conn.PgConn())
	if err = errors.Join(err, conn.Close(ctx)); err != nil {
		return err
	}
	if pooled && !modeChosen {
		// A named statement lives in one server's session, and the next call may go
		// to another one.
		cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
	}
	return nil
}

// refusesParameters reports whether a pooler did not let startup parameters pass.
func refusesParameters(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && strings.Contains(pgErr.Message, "unsupported startup parameter")
}

// isPooled reports whether a pooler answers here: the process that it names for
// cancelling is then none of the server's.
func isPooled(ctx context.Context, conn *pgconn.PgConn) (bool, error) {
	row, err := readRow(ctx, conn, "SELECT pg_backend_pid()", 1)
	if err != nil {
		return false, err
	}
	return row[0] != strconv.FormatUint(uint64(conn.PID()), 10), nil
}

// readRow runs a statement in the simple protocol, which needs nothing prepared, and
// returns its one row of so many columns.
func readRow(ctx context.Context, conn *pgconn.PgConn, sql string, columns int) ([]string, error) {
	results, err := conn.Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) != columns {
		return nil, fmt.Errorf("%q did not answer with one row of %d columns", sql, columns)
	}
	row := make([]string, columns)
	for i, value := range results[0].Rows[0] {
		row[i] = string(value)
	}
	return row, nil
}

// keepAfter returns what decides whether a connection is kept after an error: not when
// its server has become read-only, as after a failover, or shuts down.
func keepAfter(next pgconn.PgErrorHandler) pgconn.PgErrorHandler {
	return func(conn *pgconn.PgConn, err *pgconn.PgError) bool {
		switch err.Code {
		case "25006", "57P01", "57P02", "57P03":
			return false
		}
		return next == nil || next(conn, err)
	}
}

const validateSQL = `SELECT current_setting('transaction_read_only'), current_setting('server_version_num'),
current_setting('fsync'), current_setting('full_page_writes'),
current_setting('synchronous_commit'), current_setting('default_transaction_isolation'), current_user`

// validate returns what tries a new connection. It trusts no startup parameter, since a
// pooler may have dropped it.
func validate(next pgconn.ValidateConnectFunc) pgconn.ValidateConnectFunc {
	return func(ctx context.Context, conn *pgconn.PgConn) error {
		if next != nil {
			if err := next(ctx, conn); err != nil {
				return err
			}
		}
		row, err := readRow(ctx, conn, validateSQL, 7)
		if err != nil {
			return fmt.Errorf("reading the session's settings: %w", err)
		}
		readOnly, version, fsync, fullPageWrites, commit, isolation, role := row[0], row[1], row[2], row[3], row[4], row[5], row[6]
		if readOnly != "off" {
			return pgconn.ErrReadOnlyConnection
		}
		if n, err := strconv.Atoi(version); err != nil || n < minServerVersion {
			return fmt.Errorf("the server is of version %s (server_version_num), and Weir needs Postgres 16 (%d) or later", version, minServerVersion)
		}
		// A crash of such a server loses or mangles what was committed.
		for name, value := range map[string]string{"fsync": fsync, "full_page_writes": fullPageWrites} {
			if value != "on" {
				return fmt.Errorf("the server has %s = %s, so that a crash could forget what was admitted: set it to on (ALTER SYSTEM SET %s = on, then SELECT pg_reload_conf())", name, value, name)
			}
		}
		ident := pgx.Identifier{role}.Sanitize()
		if commit != "on" && commit != "remote_apply" {
			return fmt.Errorf("the session has synchronous_commit = %s though on was asked for, so that a crash could forget what was admitted: a pooler drops the startup parameter; run ALTER ROLE %s SET synchronous_commit = on, then have the pooler reconnect", commit, ident)
		}
		if isolation != "read committed" {
			return fmt.Errorf("the session has default_transaction_isolation = %s though read committed was asked for: a pooler drops the startup parameter; run ALTER ROLE %s SET default_transaction_isolation = 'read committed', then have the pooler reconnect", isolation, ident)
		}
		return nil
	}
}

// MissingSettings returns the names, sorted, of the settings of [PoolConfig] that a
// session does not have, because a pooler drops them or the DSN has others. Without
// plan_cache_mode, enable_seqscan and jit decisions are slower; without the timeouts
// only the caller's own bound a wait. ALTER ROLE … SET gives them to a role.
func MissingSettings(ctx context.Context, db DBTX) ([]string, error) {
	names := make([]string, 0, len(settings()))
	values := make([]string, 0, len(settings()))
	for name, value := range settings() {
		names = append(names, name)
		values = append(values, value)
	}
	var missing []string
	err := db.QueryRow(ctx, `
SELECT coalesce(array_agg(name ORDER BY name) FILTER (WHERE current_setting(name) <> value), '{}')
FROM unnest($1::text[], $2::text[]) AS s (name, value)`, names, values).Scan(&missing)
	if err != nil {
		return nil, fmt.Errorf("reading the session's settings: %w", err)
	}
	return missing, nil
}

// A dialer bounds whatever a connection waits for by one timeout. A statement that its
// caller has given up on ends its connection, and the pool's place is taken until that
// has been cleaned up; where nothing answers, pgx would wait for it much longer.
type dialer struct{ timeout time.Duration }

func (d dialer) dial(ctx context.Context, network, address string) (net.Conn, error) {
	n := net.Dialer{Timeout: d.timeout}
	conn, err := n.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return boundedConn{Conn: conn, timeout: d.timeout}, nil
}

// boundedConn is a connection on which no deadline is further ahead than its timeout.
type boundedConn struct {
	net.Conn

	timeout time.Duration
}

func (c boundedConn) bound(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	if latest := time.Now().Add(c.timeout); t.After(latest) {
		return latest
	}
	return t
}

// SetDeadline implements [net.Conn].
func (c boundedConn) SetDeadline(t time.Time) error { return c.Conn.SetDeadline(c.bound(t)) }

// SetReadDeadline implements [net.Conn].
func (c boundedConn) SetReadDeadline(t time.Time) error { return c.Conn.SetReadDeadline(c.bound(t)) }

// SetWriteDeadline implements [net.Conn].
func (c boundedConn) SetWriteDeadline(t time.Time) error { return c.Conn.SetWriteDeadline(c.bound(t)) }

package store

import (
	"context"
	"database/sql"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"
	"github.com/pressly/goose/v3/lock"
)

// The schema versions that this package works on. A migration that leaves the
// binaries before it running takes the next number. One that does not (it drops what
// they use) begins the next hundred: so a binary also accepts versions that are newer
// than itself, up to the end of its hundred.
const (
	minSchemaVersion = 9
	maxSchemaVersion = 99
)

//go:embed migrations/*.sql
var migrations embed.FS

const (
	versionTable = "schema_version"

	// A migration waits so long for a lock on a table, and not longer: whoever comes
	// after it waits behind it.
	migrationLockTimeout = "10s"

	// schemaLock is the advisory lock under which a schema is made ("weir").
	schemaLock = 0x77656972

	sessionLockPeriod   = 1 // seconds between attempts to become the one migrator
	sessionLockAttempts = 300
)

// schemaName is what a schema may be called: its quoted name must pass unharmed
// through the migrations' text.
var schemaName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_-]{0,62}$`)

// Migrate creates the schema if it is missing and brings it up to date. dsn must
// lead to the server itself or to a pooler in session mode. It is safe to run from
// several processes at once: one migrates, the others wait. The schema's name must be
// 1 to 63 ASCII letters, digits, "_" or "-", and not begin with a digit or "-".
func Migrate(ctx context.Context, dsn, schema string) error {
	db, err := openForMigration(ctx, dsn, schema)
	if err != nil {
		return fmt.Errorf("migrating schema %q: %w", schema, err)
	}
	defer func() { _ = db.Close() }() // nothing is left to lose
	provider, err := newProvider(db, schema)
	if err != nil {
		return fmt.Errorf("migrating schema %q: %w", schema, err)
	}
	if _, err := provider.Up(ctx); err != nil {
		return fmt.Errorf("migrating schema %q: %w", schema, err)
	}
	return nil
}

// openForMigration connects and makes the schema, which must be there before goose
// can make its table in it.
func openForMigration(ctx context.Context, dsn, schema string) (*sql.DB, error) {
	if !schemaName.MatchString(schema) {
		return nil, errors.New("the name must be 1 to 63 ASCII letters, digits, _ or -, and begin with a letter or _")
	}
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("reading the database's DSN: %w", err)
	}
	if _, ok := cfg.RuntimeParams["lock_timeout"]; !ok {
		cfg.RuntimeParams["lock_timeout"] = migrationLockTimeout
	}
	if _, ok := cfg.RuntimeParams["application_name"]; !ok {
		cfg.RuntimeParams["application_name"] = "weir migrate"
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("connecting to Postgres: %w", err)
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return createSchema(ctx, tx, schema) })
	if err = errors.Join(err, conn.Close(ctx)); err != nil {
		return nil, err
	}
	return stdlib.OpenDB(*cfg), nil
}

func createSchema(ctx context.Context, tx pgx.Tx, schema string) error {
	if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", schemaLock); err != nil {
		return fmt.Errorf("waiting for other migrations: %w", err)
	}
	ident := pgx.Identifier{schema}.Sanitize()
	var missing bool
	if err := tx.QueryRow(ctx, "SELECT to_regnamespace($1) IS NULL", ident).Scan(&missing); err != nil {
		return fmt.Errorf("looking for the schema: %w", err)
	}
	if !missing {
		return nil
	}
	if _, err := tx.Exec(ctx, "CREATE SCHEMA "+ident); err != nil {
		return fmt.Errorf("creating the schema: %w", err)
	}
	if _, err := tx.Exec(ctx, "COMMENT ON SCHEMA "+ident+" IS 'Weir: rate budgets and quotas.'"); err != nil {
		return fmt.Errorf("creating the schema: %w", err)
	}
	return nil
}

func newProvider(db *sql.DB, schema string) (*goose.Provider, error) {
	files, err := fs.Sub(migrations, "migrations")
	if err != nil {
		return nil, fmt.Errorf("reading the migrations: %w", err)
	}
	locker, err := lock.NewPostgresSessionLocker(lock.WithLockTimeout(sessionLockPeriod, sessionLockAttempts))
	if err != nil {
		return nil, fmt.Errorf("making a lock: %w", err)
	}
	table, err := database.NewStoreFromQuerier(pgx.Identifier{schema, versionTable}.Sanitize(), versionQuerier{})
	if err != nil {
		return nil, fmt.Errorf("naming the version table: %w", err)
	}
	return goose.NewProvider(goose.DialectCustom, db, schemaFS{FS: files, schema: schema},
		goose.WithStore(table),
		goose.WithSessionLocker(locker),
		goose.WithDisableGlobalRegistry(true),
	)
}

// Version returns the schema's version: that of the last migration, or 0 when there
// is none.
func Version(ctx context.Context, db DBTX, schema string) (int64, error) {
	var version int64
	err := db.QueryRow(ctx, inSchema("SELECT coalesce(max(version), 0) FROM plexsphere."+versionTable, schema)).Scan(&version)
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && (pgErr.Code == "42P01" || pgErr.Code == "3F000") { // no such table, no such schema
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("reading the version of schema %q: %w", schema, err)
	}
	return version, nil
}

// CheckSchema returns an error that says what to do unless the schema's version is
// one that this package works on.
func CheckSchema(ctx context.Context, db DBTX, schema string) error {
	version, err := Version(ctx, db, schema)
	switch {
	case err != nil:
		return err
	case version < minSchemaVersion:
		return fmt.Errorf("schema %q is at version %d, and this weir needs %d: run weir migrate", schema, version, minSchemaVersion)
	case version > maxSchemaVersion:
		return fmt.Errorf("schema %q is at version %d, and this weir knows none above %d: run a newer weir", schema, version, maxSchemaVersion)
	}
	return nil
}

// schemaFS holds the migrations, rewritten for a schema as they are read.
type schemaFS struct {
	fs.FS
	schema string
}

// Open implements [fs.FS].
func (f schemaFS) Open(name string) (fs.File, error) {
	file, err := f.FS.Open(name)
	if err != nil || path.Ext(name) != ".sql" {
		return file, err
	}
	text, err := io.ReadAll(file)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return rewritten{File: file, text: strings.NewReader(inSchema(string(text), f.schema))}, nil
}

type rewritten struct {
	fs.File
	text *strings.Reader
}

// Read implements [fs.File].
func (r rewritten) Read(p []byte) (int, error) { return r.text.Read(p) }

// versionQuerier keeps the applied migrations in a table of the schema itself. Its
// table names are quoted already.
type versionQuerier struct{}

// CreateTable implements goose's querier.
func (versionQuerier) CreateTable(table string) string {
	return fmt.Sprintf(`
CREATE TABLE %[1]s (
    version    bigint      NOT NULL PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE %[1]s IS 'The migrations that have been applied. The greatest version is the schema''s.';
COMMENT ON COLUMN %[1]s.version IS 'The migration''s number; 0 stands for the empty schema.';
COMMENT ON COLUMN %[1]s.applied_at IS 'When it was applied.';
COMMENT ON INDEX %[2]s IS 'One row a migration.'`, table, strings.TrimSuffix(table, `"`)+`_pkey"`)
}

// InsertVersion implements goose's querier; the second argument is always true.
func (versionQuerier) InsertVersion(table string) string {
	return fmt.Sprintf("INSERT INTO %s (version) SELECT $1::bigint WHERE $2::boolean", table)
}

// DeleteVersion implements goose's querier.
func (versionQuerier) DeleteVersion(table string) string {
	return fmt.Sprintf("DELETE FROM %s WHERE version = $1", table)
}

// GetMigrationByVersion implements goose's querier.
func (versionQuerier) GetMigrationByVersion(table string) string {
	return fmt.Sprintf("SELECT applied_at, true FROM %s WHERE version = $1", table)
}

// ListMigrations implements goose's querier.
func (versionQuerier) ListMigrations(table string) string {
	return fmt.Sprintf("SELECT version, true FROM %s ORDER BY version DESC", table)
}

// GetLatestVersion implements goose's querier.
func (versionQuerier) GetLatestVersion(table string) string {
	return "SELECT max(version) FROM " + table
}

// TableExists spares goose a failing query on its first run.
func (versionQuerier) TableExists(table string) string {
	return fmt.Sprintf("SELECT to_regclass('%s') IS NOT NULL", table)
}

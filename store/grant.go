package store

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Roles are database roles, which must exist. An empty name stands for none.
type Roles struct {
	// Writer is what the service connects as: it calls the schema's functions and
	// reads and writes its tables, and can change none of their definitions.
	Writer string
	// Reader sees the schema's views only.
	Reader string
}

// Grant gives roles what they need in a schema, and takes from them what they had
// beyond that. It connects as the schema's owner, as [Migrate] does, and must run after
// each migration, since what a migration makes is nobody else's at first. It needs no
// right to make roles.
//
// What is made in the schema later, such as a table's partition, is the writer's to use
// as well. Functions cease to be executable by everybody, as Postgres makes them.
func Grant(ctx context.Context, dsn, schema string, roles Roles) error {
	if roles == (Roles{}) {
		return nil
	}
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return fmt.Errorf("granting on schema %q: reading the database's DSN: %w", schema, err)
	}
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return fmt.Errorf("granting on schema %q: connecting to Postgres: %w", schema, err)
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return grant(ctx, tx, schema, roles) })
	if err = errors.Join(err, conn.Close(ctx)); err != nil {
		return fmt.Errorf("granting on schema %q: %w", schema, err)
	}
	return nil
}

func grant(ctx context.Context, tx pgx.Tx, schema string, roles Roles) error {
	// Concurrent grants on one object fail, so they take turns, also with migrations.
	if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", schemaLock); err != nil {
		return fmt.Errorf("waiting for migrations: %w", err)
	}
	if roles.Writer == roles.Reader {
		return fmt.Errorf("the role %q cannot be both writer and reader", roles.Writer)
	}
	ident := pgx.Identifier{schema}.Sanitize()
	if roles.Writer != "" {
		if err := checkRole(ctx, tx, "writer", roles.Writer); err != nil {
			return err
		}
		if err := run(ctx, tx, writerGrants(ident, pgx.Identifier{roles.Writer}.Sanitize())); err != nil {
			return fmt.Errorf("writer %q: %w", roles.Writer, err)
		}
	}
	if roles.Reader != "" {
		if err := checkRole(ctx, tx, "reader", roles.Reader); err != nil {
			return err
		}
		reader := pgx.Identifier{roles.Reader}.Sanitize()
		views, err := viewsOf(ctx, tx, schema)
		if err != nil {
			return err
		}
		statements := []string{
			"REVOKE ALL ON SCHEMA " + ident + " FROM " + reader,
			"REVOKE ALL ON ALL TABLES IN SCHEMA " + ident + " FROM " + reader,
			"REVOKE ALL ON ALL SEQUENCES IN SCHEMA " + ident + " FROM " + reader,
			"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA " + ident + " FROM PUBLIC, " + reader,
			"GRANT USAGE ON SCHEMA " + ident + " TO " + reader,
		}
		for _, view := range views {
			statements = append(statements, "GRANT SELECT ON "+pgx.Identifier{schema, view}.Sanitize()+" TO "+reader)
		}
		if err := run(ctx, tx, statements); err != nil {
			return fmt.Errorf("reader %q: %w", roles.Reader, err)
		}
	}
	return nil
}

// writerGrants are the statements for a writer; both names are quoted.
func writerGrants(schema, writer string) []string {
	return []string{
		"REVOKE ALL ON SCHEMA " + schema + " FROM " + writer,
		"REVOKE ALL ON ALL TABLES IN SCHEMA " + schema + " FROM " + writer,
		"REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA " + schema + " FROM PUBLIC",
		"GRANT USAGE ON SCHEMA " + schema + " TO " + writer,
		"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA " + schema + " TO " + writer,
		"GRANT USAGE ON ALL SEQUENCES IN SCHEMA " + schema + " TO " + writer,
		"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA " + schema + " TO " + writer,
		// Only a migration says which one was applied.
		"REVOKE INSERT, UPDATE, DELETE ON " + schema + "." + versionTable + " FROM " + writer,
		"ALTER DEFAULT PRIVILEGES IN SCHEMA " + schema + " GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO " + writer,
		"ALTER DEFAULT PRIVILEGES IN SCHEMA " + schema + " GRANT USAGE ON SEQUENCES TO " + writer,
		"ALTER DEFAULT PRIVILEGES IN SCHEMA " + schema + " GRANT EXECUTE ON FUNCTIONS TO " + writer,
	}
}

// checkRole returns an error that says what to do unless a role exists, may connect,
// and is another than the one that migrates, whose rights can't be taken.
func checkRole(ctx context.Context, tx pgx.Tx, kind, role string) error {
	var exists, self, connects bool
	err := tx.QueryRow(ctx, `
SELECT r.oid IS NOT NULL, $1 = current_user,
       r.oid IS NULL OR has_database_privilege(r.oid, current_database(), 'CONNECT')
FROM (VALUES (1)) AS one LEFT JOIN pg_roles AS r ON r.rolname = $1`, role).Scan(&exists, &self, &connects)
	ident := pgx.Identifier{role}.Sanitize()
	switch {
	case err != nil:
		return fmt.Errorf("looking for the %s %q: %w", kind, role, err)
	case !exists:
		return fmt.Errorf("there is no role %q for the %s: run CREATE ROLE %s LOGIN PASSWORD '…' first", role, kind, ident)
	case self:
		return fmt.Errorf("the %s %q is the role that migrates, and so owns the tables: name another one", kind, role)
	case !connects:
		return fmt.Errorf("the %s %q may not connect to this database: run GRANT CONNECT ON DATABASE … TO %s", kind, role, ident)
	}
	return nil
}

func viewsOf(ctx context.Context, tx pgx.Tx, schema string) ([]string, error) {
	rows, err := tx.Query(ctx, `
SELECT c.relname::text FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind IN ('v', 'm') ORDER BY 1`, schema)
	if err != nil {
		return nil, fmt.Errorf("listing the views: %w", err)
	}
	views, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("listing the views: %w", err)
	}
	return views, nil
}

func run(ctx context.Context, tx pgx.Tx, statements []string) error {
	for _, sql := range statements {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
	return nil
}

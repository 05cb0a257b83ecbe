package store

import (
	"context"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
)

// as returns a DSN for another role, which is its own password.
func as(t *testing.T, dsn, role string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(role, role)
	return u.String()
}

// newRoles makes roles that only the test has, and that can make none themselves.
func newRoles(t *testing.T, admin *pgxpool.Pool, kinds ...string) []string {
	t.Helper()
	var suffix string
	if err := admin.QueryRow(t.Context(), "SELECT right(current_database(), 16)").Scan(&suffix); err != nil {
		t.Fatal(err)
	}
	roles := make([]string, len(kinds))
	for i, kind := range kinds {
		roles[i] = "weir " + kind + " " + suffix // needs quotes
		ident := pgx.Identifier{roles[i]}.Sanitize()
		if _, err := admin.Exec(t.Context(), "CREATE ROLE "+ident+" LOGIN NOCREATEROLE PASSWORD '"+roles[i]+"'"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			// The test's context has ended.
			if _, err := admin.Exec(context.Background(), "DROP OWNED BY "+ident+" CASCADE"); err != nil {
				t.Error(err)
			}
			if _, err := admin.Exec(context.Background(), "DROP ROLE "+ident); err != nil {
				t.Error(err)
			}
		})
	}
	return roles
}

// wantDenied fails unless an error is the server's word that a role may not.
func wantDenied(t *testing.T, what string, err error) {
	t.Helper()
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Code != "42501" {
		t.Errorf("%s: %v, want insufficient_privilege", what, err)
	}
}

// An owner without the right to make roles migrates and grants; the writer does what
// the service does and no more; the reader sees views only.
func TestRoles(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	admin := newPool(t, dsn, 2)
	const schema = "Weir-roles"
	roles := newRoles(t, admin, "owner", "writer", "reader")
	owner, writer, reader := roles[0], roles[1], roles[2]
	if _, err := admin.Exec(t.Context(), "DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO %I', current_database(), '"+owner+"'); END $$"); err != nil {
		t.Fatal(err)
	}
	ownerDSN := as(t, dsn, owner)
	migrate := func() {
		t.Helper()
		if err := Migrate(t.Context(), ownerDSN, schema); err != nil {
			t.Fatal(err)
		}
		if err := Grant(t.Context(), ownerDSN, schema, Roles{Writer: writer, Reader: reader}); err != nil {
			t.Fatal(err)
		}
	}
	migrate()
	ownerPool := mustConnect(t, ownerDSN)
	must := func(sql string) {
		t.Helper()
		if _, err := ownerPool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	// What later migrations bring, and a grant that somebody made by hand.
	must(`CREATE VIEW "Weir-roles".spent AS SELECT scope, tokens FROM "Weir-roles".rate_budgets`)
	must(`CREATE TABLE "Weir-roles".later (a int)`)
	must(`GRANT SELECT ON "Weir-roles".rate_budgets TO ` + pgx.Identifier{reader}.Sanitize())
	migrate()
	must(`CREATE TABLE "Weir-roles".partition (a int)`)

	pool := mustConnect(t, as(t, dsn, writer))
	s := NewStoreIn(pool, schema)
	if err := CheckSchema(t.Context(), pool, schema); err != nil {
		t.Errorf("writer: %v", err)
	}
	key, holder := newKey(), consumer("c")
	req := oneUnit(key)
	req.Quotas = append(req.Quotas, quotaDebit(holder, dayMonth(10, 10), 1))
	for range 2 { // a first and a later charge
		if v := mustDecide(t, s, req); !v.Allowed {
			t.Errorf("writer: %+v, want allowed", v)
		}
		if !mustTake(t, s, ScopeIngestDomain, key, 1, Budget{PerSecond: 1, Burst: 10}, noon) {
			t.Error("writer: a take was refused")
		}
	}
	if used := usedIn(t, s, holder, dayMonth(10, 10), noon); used[0] != 2 {
		t.Errorf("writer: used %v", used)
	}
	if _, err := s.DeleteIdle(t.Context(), noon.Add(-time.Hour)); err != nil {
		t.Errorf("writer: %v", err)
	}
	for _, sql := range []string{
		`INSERT INTO "Weir-roles".later VALUES (1)`,
		`INSERT INTO "Weir-roles".partition VALUES (1)`,
	} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Errorf("writer: %s: %v", sql, err)
		}
	}
	for _, sql := range []string{
		`CREATE TABLE "Weir-roles".mine (a int)`,
		`DROP TABLE "Weir-roles".rate_budgets`,
		`ALTER TABLE "Weir-roles".rate_budgets DROP CONSTRAINT rate_budgets_tokens`,
		`TRUNCATE "Weir-roles".rate_budgets`,
		`CREATE INDEX ON "Weir-roles".rate_budgets (tokens)`,
		`DROP SCHEMA "Weir-roles" CASCADE`,
		`INSERT INTO "Weir-roles".schema_version VALUES (1000)`,
	} {
		_, err := pool.Exec(t.Context(), sql)
		wantDenied(t, "writer: "+sql, err)
	}

	readers := mustConnect(t, as(t, dsn, reader))
	var scope string
	if err := readers.QueryRow(t.Context(), `SELECT scope FROM "Weir-roles".spent LIMIT 1`).Scan(&scope); err != nil {
		t.Errorf("reader: %v", err)
	}
	for _, sql := range []string{
		`SELECT FROM "Weir-roles".rate_budgets`,
		`SELECT FROM "Weir-roles".schema_version`,
		`SELECT FROM "Weir-roles".later`,
		`DELETE FROM "Weir-roles".spent`,
		`CREATE TABLE "Weir-roles".mine (a int)`,
	} {
		_, err := readers.Exec(t.Context(), sql)
		wantDenied(t, "reader: "+sql, err)
	}
	_, err := NewStoreIn(readers, schema).Decide(t.Context(), req)
	wantDenied(t, "reader: a decision", err)
}

// What cannot be granted is an error that says what to do, and nothing is granted.
func TestGrantRefuses(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	admin := newPool(t, dsn, 2)
	writer := newRoles(t, admin, "writer")[0]
	for want, roles := range map[string]Roles{
		"CREATE ROLE \"nobody is called that\"": {Writer: writer, Reader: "nobody is called that"},
		"both writer and reader":                {Writer: writer, Reader: writer},
		"the role that migrates":                {Writer: "postgres"},
	} {
		if err := Grant(t.Context(), dsn, DefaultSchema, roles); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", roles, err, want)
		}
	}
	if n := count(t, admin, "SELECT count(*) FROM pg_namespace WHERE nspname = 'plexsphere' AND nspacl::text LIKE '%' || $1 || '%'", writer); n != 0 {
		t.Error("a refused grant was made in part")
	}
	if err := Grant(t.Context(), "postgres://nowhere.invalid:1/x", DefaultSchema, Roles{}); err != nil {
		t.Errorf("no roles: %v, want nothing done", err)
	}
	if _, err := admin.Exec(t.Context(), "DO $$ BEGIN EXECUTE format('REVOKE CONNECT ON DATABASE %I FROM PUBLIC', current_database()); END $$"); err != nil {
		t.Fatal(err)
	}
	if err := Grant(t.Context(), dsn, DefaultSchema, Roles{Writer: writer}); err == nil || !strings.Contains(err.Error(), "GRANT CONNECT") {
		t.Errorf("a role that may not connect: %v, want what to run", err)
	}
}

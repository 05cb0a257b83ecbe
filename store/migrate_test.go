package store

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weir-dev/weir/internal/pgtest"
	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// catalogue describes all that is in a schema, a line a thing.
func catalogue(t *testing.T, db DBTX, schema string) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), `
WITH s AS (SELECT oid FROM pg_namespace WHERE nspname = $1)
SELECT concat_ws(' ', 'relation', c.relname, c.relkind, c.reloptions, obj_description(c.oid, 'pg_class'))
FROM pg_class c WHERE c.relnamespace = (SELECT oid FROM s)
UNION ALL
SELECT concat_ws(' ', 'column', a.attrelid::regclass, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
    pg_get_expr(d.adbin, d.adrelid), col_description(a.attrelid, a.attnum))
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE c.relnamespace = (SELECT oid FROM s) AND a.attnum > 0 AND NOT a.attisdropped
UNION ALL
SELECT concat_ws(' ', 'constraint', conrelid::regclass, conname, pg_get_constraintdef(oid))
FROM pg_constraint WHERE connamespace = (SELECT oid FROM s)
UNION ALL
SELECT concat_ws(' ', 'index', indexdef) FROM pg_indexes WHERE schemaname = $1
UNION ALL
SELECT concat_ws(' ', 'function', pg_get_functiondef(oid), obj_description(oid, 'pg_proc'))
FROM pg_proc WHERE pronamespace = (SELECT oid FROM s)
UNION ALL
SELECT concat_ws(' ', 'type', typname, typtype) FROM pg_type WHERE typnamespace = (SELECT oid FROM s)
ORDER BY 1`, schema)
	if err != nil {
		t.Fatal(err)
	}
	things, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return things
}

func down(t *testing.T, dsn, schema string) {
	t.Helper()
	db, err := openForMigration(t.Context(), dsn, schema)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	provider, err := newProvider(db, schema)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := provider.DownTo(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
}

func TestMigrateUpDownUp(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	pool := newPool(t, dsn, 2)
	const schema = "up_down"
	if err := Migrate(t.Context(), dsn, schema); err != nil {
		t.Fatal(err)
	}
	first := catalogue(t, pool, schema)
	if len(first) < 30 {
		t.Fatalf("the catalogue has only %d things: %q", len(first), first)
	}
	down(t, dsn, schema)
	for _, thing := range catalogue(t, pool, schema) {
		if !strings.Contains(thing, versionTable) {
			t.Errorf("after all down migrations there is still: %s", thing)
		}
	}
	if v, err := Version(t.Context(), pool, schema); err != nil || v != 0 {
		t.Errorf("Version after down = %d, %v, want 0", v, err)
	}
	if err := Migrate(t.Context(), dsn, schema); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(first, catalogue(t, pool, schema)); diff != "" {
		t.Errorf("up, and down and up again (-first +second):\n%s", diff)
	}
	// The template of the tests' databases was migrated elsewhere; it is the same.
	other := slices.Clone(first)
	for i := range other {
		other[i] = strings.ReplaceAll(strings.ReplaceAll(other[i], `"`+schema+`".`, schema+"."), schema+".", "plexsphere.")
	}
	got := catalogue(t, pool, DefaultSchema)
	for i := range got {
		got[i] = strings.ReplaceAll(got[i], `"plexsphere".`, "plexsphere.")
	}
	slices.Sort(other)
	slices.Sort(got)
	if diff := cmp.Diff(other, got); diff != "" {
		t.Errorf("two schemas differ:\n%s", diff)
	}
}

// Everything explains itself to \d+: each table, view, column, index, sequence and
// function, partitions that a job has made included.
func TestEverythingIsCommented(t *testing.T) {
	t.Parallel()

	_, pool := setup(t)
	if n := count(t, pool, "SELECT plexsphere.make_history_partitions(now(), 2)"); n != 4 {
		t.Errorf("%d partitions were made, want 4", n)
	}
	bare := func() []string {
		t.Helper()
		rows, err := pool.Query(t.Context(), `
SELECT concat_ws(' ', 'relation', c.relkind, c.relname)
FROM pg_class c
WHERE c.relnamespace = 'plexsphere'::regnamespace AND c.relkind NOT IN ('t', 'c')
    AND obj_description(c.oid, 'pg_class') IS NULL
UNION ALL
SELECT concat_ws(' ', 'column', c.relname, a.attname)
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'plexsphere'::regnamespace AND c.relkind NOT IN ('t', 'i', 'I', 'S')
    AND col_description(c.oid, a.attnum) IS NULL
UNION ALL
SELECT concat_ws(' ', 'function', p.oid::regprocedure)
FROM pg_proc p
WHERE p.pronamespace = 'plexsphere'::regnamespace AND obj_description(p.oid, 'pg_proc') IS NULL
UNION ALL
SELECT concat_ws(' ', 'type', t.typname)
FROM pg_type t
WHERE t.typnamespace = 'plexsphere'::regnamespace AND t.typrelid = 0 AND t.typelem = 0
    AND obj_description(t.oid, 'pg_type') IS NULL
UNION ALL
SELECT nspname
FROM pg_namespace
WHERE nspname = 'plexsphere' AND obj_description(oid, 'pg_namespace') IS NULL`)
		if err != nil {
			t.Fatal(err)
		}
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	if names := bare(); len(names) > 0 {
		t.Errorf("without a comment: %q", names)
	}
	// The test sees what lacks one.
	if _, err := pool.Exec(t.Context(), `
CREATE TABLE plexsphere.silent (id int PRIMARY KEY);
CREATE VIEW plexsphere.mute AS SELECT 1 AS one;
CREATE FUNCTION plexsphere.dumb() RETURNS int LANGUAGE sql AS 'SELECT 1'`); err != nil {
		t.Fatal(err)
	}
	want := []string{"relation r silent", "relation i silent_pkey", "relation v mute", "column silent id", "column mute one", "function plexsphere.dumb()"}
	got := bare()
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("what lacks a comment (-want +got):\n%s", diff)
	}
}

func TestMigrateConcurrently(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			if err := Migrate(t.Context(), dsn, "together"); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	pool := newPool(t, dsn, 1)
	if err := CheckSchema(t.Context(), pool, "together"); err != nil {
		t.Error(err)
	}
}

func TestCheckSchema(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	pool := newPool(t, dsn, 2)
	if err := CheckSchema(t.Context(), pool, DefaultSchema); err != nil {
		t.Errorf("on the schema as migrated: %v", err)
	}
	// The version that is needed is the newest one there is.
	if v, err := Version(t.Context(), pool, DefaultSchema); err != nil || v != minSchemaVersion {
		t.Errorf("Version = %d, %v, want %d", v, err, minSchemaVersion)
	}
	if err := CheckSchema(t.Context(), pool, "absent"); err == nil || !strings.Contains(err.Error(), "weir migrate") {
		t.Errorf("on a schema that is not there: %v, want what to do", err)
	}
	for version, want := range map[int]string{minSchemaVersion + 1: "", 99: "", 101: "newer weir"} {
		if _, err := pool.Exec(t.Context(), "INSERT INTO plexsphere.schema_version (version) VALUES ($1)", version); err != nil {
			t.Fatal(err)
		}
		err := CheckSchema(t.Context(), pool, DefaultSchema)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("at version %d: %v, want %q", version, err, want)
		}
		if _, err := pool.Exec(t.Context(), "DELETE FROM plexsphere.schema_version WHERE version = $1", version); err != nil {
			t.Fatal(err)
		}
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := CheckSchema(ended, pool, DefaultSchema); err == nil {
		t.Error("without an answer: no error")
	}
}

func TestMigrateRefusesNames(t *testing.T) {
	t.Parallel()

	for _, schema := range []string{"", "a b", `a"b`, "a;b", "a$$b", "a.b", "1a", "-a", "é", strings.Repeat("a", 64), "a\x00"} {
		if err := Migrate(t.Context(), "postgres://127.0.0.1:1/nowhere", schema); err == nil || !strings.Contains(err.Error(), "name must be") {
			t.Errorf("schema %q: %v, want that its name is refused", schema, err)
		}
	}
}

// Another schema is whole: every statement works in it, and none touches the default
// one; also where its name needs quotes and no default schema exists.
func TestAnotherSchema(t *testing.T) {
	t.Parallel()

	dsn := pgtest.NewDatabase(t)
	pool := newPool(t, dsn, 4)
	if _, err := pool.Exec(t.Context(), "DROP SCHEMA plexsphere CASCADE"); err != nil {
		t.Fatal(err)
	}
	const schema = "Weir-Test_2"
	if err := Migrate(t.Context(), dsn, schema); err != nil {
		t.Fatal(err)
	}
	if err := CheckSchema(t.Context(), pool, schema); err != nil {
		t.Error(err)
	}
	s := NewStoreIn(pool, schema)
	exercise(t, s, pool, schema)
}

func exercise(t *testing.T, s *Store, pool *pgxpool.Pool, schema string) {
	t.Helper()
	key, budget := newKey(), Budget{PerSecond: 1, Burst: 10}
	if !mustTake(t, s, ScopeIngestNode, key, 4, budget, noon) {
		t.Error("refused what fits")
	}
	v := mustDecide(t, s, policy.Request{
		Now:     noon,
		Budgets: []policy.BudgetDebit{{Scope: ScopeIngestNode, Key: key, Budget: budget, Cost: 4}},
		Quotas:  []policy.QuotaDebit{quotaDebit(consumer("c"), dayMonth(5, 5), 4)},
	})
	if !v.Allowed || v.Budgets[0].Tokens != 2 {
		t.Errorf("Decide = %+v, want 2 left", v)
	}
	if _, err := s.Reserve(t.Context(), "c", dayMonth(5, 5), 3, noon); err != nil {
		t.Error(err)
	}
	if used, err := s.Used(t.Context(), "c", dayMonth(5, 5), noon); err != nil || used[0] != 3 {
		t.Errorf("Used = %v, %v, want 3", used, err)
	}
	page, err := s.Consumers(t.Context(), policy.ConsumersQuery{Limit: 5, Units: []quota.Unit{quota.Day}, Now: noon})
	if err != nil || len(page) != 1 || page[0].Used[0] != 3 {
		t.Errorf("Consumers = %+v, %v, want one with 3", page, err)
	}
	if n, err := s.DeleteIdle(t.Context(), noon.AddDate(0, 0, 1)); err != nil || n != 1 {
		t.Errorf("DeleteIdle = %d, %v, want 1", n, err)
	}
	// What was written is in that schema and nowhere else.
	for table, want := range map[string]int64{"rate_budgets": 0, "quota_counters": 4, "consumers": 2} {
		sql := "SELECT count(*) FROM " + pgx.Identifier{schema, table}.Sanitize()
		if got := count(t, pool, sql); got != want {
			t.Errorf("%s has %d rows, want %d", table, got, want)
		}
	}
}

package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	setupTimeout   = 3 * time.Minute // a first start downloads the server
	cleanupTimeout = 30 * time.Second
)

// suite is what a test binary shares: TestMain can hand nothing to its tests, so
// this is the package's one variable.
var suite struct {
	migrate func(ctx context.Context, dsn string) error

	once   sync.Once
	server *Server // nil when DATABASE_URL names one
	admin  string  // DSN from which databases are made
	err    error

	// template is the migrated database that tests' databases are copied from.
	template string
}

// Main runs the tests and returns the code to exit with; call it from TestMain:
//
//	func TestMain(m *testing.M) { os.Exit(pgtest.Main(m, migrate)) }
//
// migrate brings a new database to the state that tests start from; nil leaves it
// empty. The server starts with the first call of [NewDatabase] and is stopped at the
// end.
func Main(m *testing.M, migrate func(ctx context.Context, dsn string) error) int {
	if RunChild() {
		return 0
	}
	suite.migrate = migrate
	code := m.Run()
	if err := stopSuite(); err != nil {
		fmt.Fprintln(os.Stderr, "pgtest:", err)
		return 1
	}
	return code
}

// NewDatabase makes a database for one test, migrated, and returns its DSN. It is
// dropped when the test ends, with whatever is still connected to it.
func NewDatabase(tb testing.TB) string {
	tb.Helper()
	dsn, drop, err := OpenDatabase(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := drop(); err != nil {
			tb.Error(err)
		}
	})
	return dsn
}

// OpenDatabase is [NewDatabase] for examples, which have no [testing.TB]: they call drop
// themselves.
func OpenDatabase(ctx context.Context) (dsn string, drop func() error, err error) {
	suite.once.Do(func() { suite.err = startSuite() })
	if suite.err != nil {
		return "", nil, fmt.Errorf("making a database: %w", suite.err)
	}
	name := randomName("test")
	ctx, cancel := context.WithTimeout(ctx, setupTimeout)
	defer cancel()
	if err := execute(ctx, fmt.Sprintf("CREATE DATABASE %s TEMPLATE %s", name, suite.template)); err != nil {
		return "", nil, fmt.Errorf("making a database: %w", err)
	}
	if dsn, err = withDatabase(suite.admin, name); err != nil {
		return "", nil, fmt.Errorf("making a database: %w", err)
	}
	return dsn, func() error {
		// The test's context has ended by now.
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		if err := execute(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
			return fmt.Errorf("dropping a database: %w", err)
		}
		return nil
	}, nil
}

func startSuite() error {
	ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
	defer cancel()
	suite.admin = os.Getenv("DATABASE_URL")
	if suite.admin == "" {
		server, err := Start(ctx, Config{})
		if err != nil {
			return err
		}
		suite.server = server
		suite.admin = server.DSN("postgres")
	}
	template := randomName("template")
	if err := execute(ctx, "CREATE DATABASE "+template); err != nil {
		return err
	}
	suite.template = template
	dsn, err := withDatabase(suite.admin, template)
	if err != nil {
		return err
	}
	if suite.migrate == nil {
		return nil
	}
	if err := suite.migrate(ctx, dsn); err != nil {
		return fmt.Errorf("migrating the template: %w", err)
	}
	return nil
}

func stopSuite() error {
	var errs []error
	if suite.template != "" && suite.server == nil {
		ctx, cancel := context.WithTimeout(context.Background(), cleanupTimeout)
		defer cancel()
		errs = append(errs, execute(ctx, "DROP DATABASE IF EXISTS "+suite.template+" WITH (FORCE)"))
	}
	if suite.server != nil {
		errs = append(errs, suite.server.Stop())
	}
	return errors.Join(errs...)
}

// execute runs one statement on a connection of its own.
func execute(ctx context.Context, statement string) error {
	conn, err := pgx.Connect(ctx, suite.admin)
	if err != nil {
		return fmt.Errorf("connecting to Postgres: %w", err)
	}
	_, err = conn.Exec(ctx, statement)
	if err != nil {
		err = fmt.Errorf("executing %q: %w", statement, err)
	}
	return errors.Join(err, conn.Close(ctx))
}

// randomName names a database so that no other test binary on the server does. It
// needs no quotes.
func randomName(kind string) string {
	return "weir_" + kind + "_" + strings.ToLower(rand.Text())
}

// withDatabase returns dsn, in either of its forms, for another database.
func withDatabase(dsn, database string) (string, error) {
	if !strings.HasPrefix(dsn, "postgres://") && !strings.HasPrefix(dsn, "postgresql://") {
		return dsn + " dbname=" + database, nil // the last one holds
	}
	u, err := url.Parse(dsn)
	if err != nil {
		return "", errors.New("DATABASE_URL is no valid URL") // it may hold a password
	}
	u.Path = "/" + database
	return u.String(), nil
}

package main

import (
	"context"
	"fmt"

	"github.com/weir-dev/weir/store"
)

type migrateCommand struct {
	databaseFlags
}

// Run migrates, and says to which version.
func (c *migrateCommand) Run(ctx context.Context, t terminal) error {
	if err := c.validate(); err != nil {
		return err
	}
	if err := store.Migrate(ctx, c.DatabaseURL, c.Schema); err != nil {
		return err
	}
	pool, err := store.Connect(ctx, c.DatabaseURL)
	if err != nil {
		return err
	}
	defer pool.Close()
	version, err := store.Version(ctx, pool, c.Schema)
	if err != nil {
		return err
	}
	fmt.Fprintf(t.stdout, "schema %s is at version %d\n", c.Schema, version)
	return nil
}

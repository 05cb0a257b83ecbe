package main

import (
	"context"
	"fmt"

	"github.com/weir-dev/weir/store"
)

type migrateCommand struct {
	databaseFlags

	Writer string `help:"A role that exists, to be granted what serve needs, which is no change of tables." placeholder:"ROLE"`
	Reader string `help:"A role that exists, to be granted the views." placeholder:"ROLE"`
}

// Run migrates, grants, and says to which version.
func (c *migrateCommand) Run(ctx context.Context, t terminal) error {
	if c.DirectURL != "" {
		c.DatabaseURL = c.DirectURL
	}
	if err := c.validate(); err != nil {
		return err
	}
	if err := store.Migrate(ctx, c.DatabaseURL, c.Schema); err != nil {
		return err
	}
	if err := store.Grant(ctx, c.DatabaseURL, c.Schema, store.Roles{Writer: c.Writer, Reader: c.Reader}); err != nil {
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

package main

import (
	"context"
	"errors"

	"golang.org/x/sync/errgroup"
)

// A part runs until its context ends, and returns once it has cleaned up.
type part func(context.Context) error

// runBeside runs parts beside lead. The context of lead ends with ctx, or when a part
// fails; that of the parts ends when lead has returned, or when one of them fails. So
// lead may take its time to end, and the parts serve it until then. The error joins
// lead's and that of the part that failed first.
func runBeside(ctx context.Context, lead part, parts ...part) error {
	partsCtx, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, partsCtx := errgroup.WithContext(partsCtx)
	for _, p := range parts {
		group.Go(func() error { return p(partsCtx) })
	}
	leadCtx, endLead := context.WithCancel(ctx)
	defer endLead()
	defer context.AfterFunc(partsCtx, endLead)()

	err := lead(leadCtx)
	stop()
	return errors.Join(err, group.Wait())
}

// together runs parts side by side, until ctx ends or one of them fails.
func together(parts ...part) part {
	return func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		for _, p := range parts {
			group.Go(func() error { return p(ctx) })
		}
		return group.Wait()
	}
}

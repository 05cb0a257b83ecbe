package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// The lead ends first, and the parts serve it until it has.
func TestRunBeside(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var partEnded time.Time
		start := time.Now()
		go func() {
			time.Sleep(time.Second)
			cancel()
		}()
		err := runBeside(ctx, func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(2 * time.Second) // a drain
			if !partEnded.IsZero() {
				t.Error("a part ended before the lead")
			}
			return nil
		}, func(ctx context.Context) error {
			<-ctx.Done()
			partEnded = time.Now()
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		if got := partEnded.Sub(start); got != 3*time.Second {
			t.Errorf("the part ended after %v, want 3s", got)
		}
	})
}

// A part that fails ends the lead and the other parts, and its error is told.
func TestRunBesideFailure(t *testing.T) {
	t.Parallel()
	errPart, errLead := errors.New("part"), errors.New("lead")
	waiting := func(ctx context.Context) error {
		<-ctx.Done()
		return nil
	}
	failing := func(context.Context) error { return errPart }
	if err := runBeside(t.Context(), waiting, waiting, failing); !errors.Is(err, errPart) {
		t.Errorf("a part fails: %v, want its error", err)
	}
	if err := runBeside(t.Context(), func(context.Context) error { return errLead }, waiting); !errors.Is(err, errLead) {
		t.Errorf("the lead fails: %v, want its error", err)
	}
	if err := runBeside(t.Context(), together(waiting, failing), waiting); !errors.Is(err, errPart) {
		t.Errorf("one of a lead's parts fails: %v, want its error", err)
	}
}

package store

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/weir-dev/weir/policy"
)

type (
	// Scope names which rate budget a bucket belongs to. See [policy.Scope].
	Scope = policy.Scope
	// Key is the UUID of the Node or the Domain whose bucket it is.
	Key = policy.BucketKey
	// Budget is a bucket's rate and ceiling. See [policy.Budget].
	Budget = policy.Budget
)

// The scopes, a closed set that the table's CHECK holds as well.
const (
	ScopeSecretReadNode       = policy.ScopeSecretReadNode
	ScopeSecretReadDomain     = policy.ScopeSecretReadDomain
	ScopeAccessIssuanceDomain = policy.ScopeAccessIssuanceDomain
	ScopeIngestNode           = policy.ScopeIngestNode
	ScopeIngestDomain         = policy.ScopeIngestDomain
)

// takeSQL mints a missing bucket at its ceiling and debits it, or refills the bucket
// that is there and debits it if it then covers the cost; otherwise it matches no row.
// The conflict arm sees the latest committed row, so concurrent takes add up. The
// refill is the expression of policy.Budget.Level, in its order.
const takeSQL = `
INSERT INTO plexsphere.rate_budgets AS b (scope, bucket_key, tokens, refilled_at)
VALUES ($1, $2, $5::float8 - $3::float8, $6::timestamptz)
ON CONFLICT (scope, bucket_key) DO UPDATE SET
    tokens = least($5::float8,
        b.tokens + greatest(0, date_part('epoch', $6::timestamptz - b.refilled_at)) * $4::float8) - $3::float8,
    refilled_at = greatest(b.refilled_at, $6::timestamptz)
WHERE least($5::float8,
        b.tokens + greatest(0, date_part('epoch', $6::timestamptz - b.refilled_at)) * $4::float8) >= $3::float8
RETURNING true`

// Take takes cost units from a bucket at now and reports whether the bucket covered
// them. A refusal changes nothing and is no error. A bucket that has no row is full.
//
// Arguments are checked first, in this order, whatever the cost: [ErrUnknownScope],
// [ErrZeroKey], [ErrNegativeCost], [ErrInvalidBudget]. Then a cost of 0 is admitted
// and a cost above budget.Burst is refused, both without a query.
func (s *Store) Take(ctx context.Context, scope Scope, key Key, cost float64, budget Budget, now time.Time) (bool, error) {
	if err := checkBucket(scope, key); err != nil {
		return false, err
	}
	if !(cost >= 0) || math.IsInf(cost, 0) {
		return false, fmt.Errorf("taking from rate budget %s/%s: %w: %v", scope, key, ErrNegativeCost, cost)
	}
	if err := budget.Validate(); err != nil {
		return false, fmt.Errorf("taking from rate budget %s/%s: %w", scope, key, err)
	}
	if err := checkNow(now); err != nil {
		return false, fmt.Errorf("taking from rate budget %s/%s: %w", scope, key, err)
	}
	if cost == 0 {
		return true, nil
	}
	if cost > budget.Burst {
		return false, nil
	}
	var taken bool
	err := s.db.QueryRow(ctx, s.queries.take,
		string(scope), [16]byte(key), cost, budget.PerSecond, budget.Burst, now).Scan(&taken)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("taking from rate budget %s/%s: %w", scope, key, err)
	}
	return taken, nil
}

func checkBucket(scope Scope, key Key) error {
	if !scope.Valid() {
		return fmt.Errorf("taking from a rate budget: %w %q", ErrUnknownScope, string(scope))
	}
	if key == (Key{}) {
		return fmt.Errorf("taking from a rate budget of scope %s: %w", scope, ErrZeroKey)
	}
	return nil
}

package store

import (
	"sync"
	"time"

	"github.com/weir-dev/weir/policy"
)

// Consumers that are known to be enrolled are remembered, so that a decision need not
// look: at most so many, and at most twice so long, lest one stay that the sweep has removed.
const (
	maxKnown = 100_000 // twice, 32 bytes each
	keepTime = 5 * time.Minute
)

// knownConsumers remembers ids in two generations, of which the older is dropped when
// the younger is full or has been kept for keepTime.
type knownConsumers struct {
	mu         sync.RWMutex
	young, old map[policy.CounterID]struct{}
	turned     time.Time
}

func (k *knownConsumers) has(id policy.CounterID) bool {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if time.Since(k.turned) > 2*keepTime {
		return false
	}
	_, ok := k.young[id]
	if !ok {
		_, ok = k.old[id]
	}
	return ok
}

func (k *knownConsumers) add(ids []policy.CounterID) {
	if len(ids) == 0 {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.young == nil || len(k.young)+len(ids) > maxKnown || time.Since(k.turned) > keepTime {
		k.old, k.young = k.young, make(map[policy.CounterID]struct{})
		k.turned = time.Now()
	}
	for _, id := range ids {
		k.young[id] = struct{}{}
	}
}

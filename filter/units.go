package filter

import (
	"math/bits"

	"github.com/weir-dev/weir/filter/config"
)

// units are what grows while a request streams. A gRPC message counts from when its
// prefix has been received.
type units struct{ bytes, messages int64 }

// covers reports that u has at least what v has.
func (u units) covers(v units) bool { return u.bytes >= v.bytes && u.messages >= v.messages }

// or returns the larger of both in each unit.
func (u units) or(v units) units {
	return units{max(u.bytes, v.bytes), max(u.messages, v.messages)}
}

func (u units) plus(v units) units { return units{u.bytes + v.bytes, u.messages + v.messages} }

// overCost is what a cost becomes that is over [config.MaxCost]: no limit grants it.
const overCost = config.MaxCost + 1

// price is what a charge costs at so many units.
type price struct{ fixed, perByte, perMessage int64 }

// at is the whole price.
func (p price) at(u units) int64 { return add(p.fixed, p.between(units{}, u)) }

// between is what is paid from one number of units to another one, which is not
// smaller in either unit, or nothing.
func (p price) between(from, to units) int64 {
	return add(multiply(p.perByte, max(to.bytes-from.bytes, 0)), multiply(p.perMessage, max(to.messages-from.messages, 0)))
}

// plus is the price of both. It is nearest to the sum where that is too large.
func (p price) plus(q price) price {
	return price{add(p.fixed, q.fixed), add(p.perByte, q.perByte), add(p.perMessage, q.perMessage)}
}

// add and multiply take numbers from 0 to overCost and stay there.
func add(a, b int64) int64 { return min(a+b, overCost) }

func multiply(a, b int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b)) //nolint:gosec // not negative
	if hi != 0 || lo > overCost {
		return overCost
	}
	return int64(lo)
}

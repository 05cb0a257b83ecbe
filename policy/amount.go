package policy

import (
	"fmt"
	"math/big"
	"regexp"
	"strings"
)

// amountPattern is a number as policies write one: with underscores between digits,
// and with a unit of bytes behind it.
var amountPattern = regexp.MustCompile(`^([0-9][0-9_]*)(\.[0-9]+)? ?(kB|MB|GB|TB|KiB|MiB|GiB|TiB)?$`)

var byteUnits = map[string]int64{
	"":   1,
	"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
	"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}

// exactAmount reads a number of units: 500, 100_000, 0.5, 16KiB, 1.5 MB. Values are
// at most [MaxUnits]. It is exact, since a double would silently round what lies
// just above.
func exactAmount(text string) (*big.Rat, error) {
	m := amountPattern.FindStringSubmatch(text)
	if m == nil {
		return nil, fmt.Errorf("%q is no amount; write a number such as 500, 100_000, 0.5 or 16KiB", text)
	}
	n, ok := new(big.Rat).SetString(strings.ReplaceAll(m[1], "_", "") + m[2])
	if !ok {
		return nil, fmt.Errorf("%q is no amount", text)
	}
	n.Mul(n, new(big.Rat).SetInt64(byteUnits[m[3]]))
	if n.Cmp(new(big.Rat).SetInt64(MaxUnits)) > 0 {
		return nil, fmt.Errorf("%q is more than 2^53", text)
	}
	return n, nil
}

// parseAmount reads an amount as the nearest double.
func parseAmount(text string) (float64, error) {
	n, err := exactAmount(text)
	if err != nil {
		return 0, err
	}
	f, _ := n.Float64()
	return f, nil
}

// parseWhole reads an amount that must be a whole number.
func parseWhole(text string) (int64, error) {
	n, err := exactAmount(text)
	if err != nil {
		return 0, err
	}
	if !n.IsInt() {
		return 0, fmt.Errorf("%q is no whole number", text)
	}
	return n.Num().Int64(), nil
}

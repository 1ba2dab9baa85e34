package leasetest

import "math"

// mulDiv returns ⌊a·b/c⌋ for a, b ≥ 0, c > 0 as the script computes it, in
// doubles: the product may round, so the quotient may be off by one part in
// 2^53. Both places it is used in are an estimate or rounded down by it.
func mulDiv(a, b, c int64) int64 {
	product := float64(a) * float64(b)
	return int64(math.Floor(product / float64(c)))
}

package soak

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// fineness is how many buckets there are between two powers of two, as a power of
// two: a quantile is at most an eighth too high.
const fineness = 3

// histogram counts durations in buckets, of which there are a fixed number however
// many it counts.
type histogram struct {
	counts [(64 - fineness) << fineness]atomic.Int64
}

type histogramCounts [(64 - fineness) << fineness]int64

func (h *histogram) add(d time.Duration) { h.counts[bucketOf(d)].Add(1) }

func (h *histogram) snapshot() (c histogramCounts) {
	for i := range h.counts {
		c[i] = h.counts[i].Load()
	}
	return c
}

// since returns what was counted after an earlier snapshot.
func (c *histogramCounts) since(before *histogramCounts) (d histogramCounts) {
	for i := range c {
		d[i] = c[i] - before[i]
	}
	return d
}

// quantile returns the end of the bucket that has the q-th part of all; 0 if there
// are none.
func (c *histogramCounts) quantile(q float64) time.Duration {
	var n, all int64
	for _, k := range c {
		all += k
	}
	for i, k := range c {
		if n += k; k > 0 && float64(n) >= q*float64(all) {
			return bucketEnd(i)
		}
	}
	return 0
}

// bucketOf returns a duration's bucket: by its highest bit and the few after it.
func bucketOf(d time.Duration) int {
	v := uint64(max(0, d))
	shift := max(0, bits.Len64(v)-fineness-1)
	return shift<<fineness + int(v>>shift)
}

// bucketEnd returns the longest duration of bucket i.
func bucketEnd(i int) time.Duration {
	if i < 2<<fineness {
		return time.Duration(i)
	}
	shift := i>>fineness - 1
	first := uint64(i-shift<<fineness) << shift
	return time.Duration(first + 1<<shift - 1)
}

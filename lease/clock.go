package lease

import (
	"sync/atomic"
	"time"
)

const (
	// tick is how often the coarse clock moves while a lease is out.
	tick = time.Millisecond
	// coarseLag is how far behind the coarse clock may be when it is believed:
	// closer than this to a deadline the true clock is asked. A 1 ms ticker was
	// seen 10 ms late in the median and 45 ms at worst with every P busy.
	coarseLag = 50 * time.Millisecond
	// suspendGap is how much further the wall clock must have gone than the
	// monotonic one, within a tick, to say that the machine was asleep.
	suspendGap = 100 * time.Millisecond
	// refreshEvery is after how many tokens of a lease a hit sets the coarse
	// clock, so that hits themselves keep it fresh when the ticker cannot run.
	refreshEvery = 64
)

// clock is the node's monotonic time in nanoseconds since it was made. Reading
// the true clock costs more than the whole rest of a hit (48 ns of 30), so hits
// read a coarse copy. In a Stepped cache the copy is all there is.
type clock struct {
	coarse  atomic.Int64
	base    time.Time
	stepped bool
	// asleep is how much further the wall clock went than this one, in a Stepped.
	asleep int64
	// running is whether a ticker moves coarse. It does while a lease is out.
	running atomic.Bool
}

// now returns the true time, and leaves it in the coarse clock.
func (c *clock) now() int64 {
	if c.stepped {
		return c.coarse.Load()
	}
	n := int64(time.Since(c.base))
	c.coarse.Store(n)
	return n
}

// watchdog notices that the machine slept. The monotonic clock stops meanwhile
// (golang/go#24595), so leases would look younger than they are.
type watchdog struct {
	wall func() int64 // nanoseconds; time.Now().UnixNano but in tests
	last int64        // wall − monotonic at the last look
	set  bool
}

// slept reports whether wall time ran ahead of now, the monotonic time.
func (w *watchdog) slept(now int64) bool {
	offset := w.wall() - now
	gap := offset - w.last
	first := !w.set
	w.last, w.set = offset, true
	return !first && gap > int64(suspendGap)
}

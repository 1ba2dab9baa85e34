package lease

import "sync/atomic"

// ledger counts tokens and calls. granted = spent + returned + expired + lost +
// live, at rest.
type ledger struct {
	granted, spent, returned, expired, lost atomic.Int64
	calls, trips, notExecuted, unknown      atomic.Int64
}

type counts struct {
	denied, failed, evicted, suspended, corrupt, vanished atomic.Int64
}

// Stats is what a Cache did so far. Tokens balance: Granted = Spent + Returned
// + Expired + Lost + Live.
type Stats struct {
	Granted  int64 // tokens the store granted
	Spent    int64 // admitted with
	Returned int64 // given back unused
	Expired  int64 // unused at their deadline
	Lost     int64 // granted for a request that had left, or by a late reply
	Live     int64 // still to be spent

	Calls       int64 // calls to the store, one per key
	Trips       int64 // round trips that carried them
	NotExecuted int64 // calls the store certainly did not carry out
	Unknown     int64 // calls whose outcome is unknown
	Denied      int64 // requests refused
	Failed      int64 // requests that had to ask the store, and were decided without it
	Keys        int64 // keys held
	Evicted     int64 // keys evicted to make room
	Suspended   int64 // times the machine slept, and all leases were dropped
	Corrupt     int64 // buckets that could not be read, and were replaced by a full one
	Vanished    int64 // buckets that were gone though they cannot have been full: the store lost data
}

// Stats returns the counters. It visits every key: call it as often as metrics
// are scraped, not per request.
func (c *Cache) Stats() Stats {
	var live int64
	c.table.each(func(h *holding) bool {
		h.mu.Lock()
		h.settleLocked(c, c.clock.now())
		live += h.heldLocked()
		h.mu.Unlock()
		return true
	})
	l := &c.ledger
	return Stats{
		Granted: l.granted.Load(), Spent: l.spent.Load(), Returned: l.returned.Load(),
		Expired: l.expired.Load(), Lost: l.lost.Load(), Live: live,
		Calls: l.calls.Load(), Trips: l.trips.Load(), NotExecuted: l.notExecuted.Load(), Unknown: l.unknown.Load(),
		Denied: c.counts.denied.Load(), Failed: c.counts.failed.Load(),
		Keys: c.table.count.Load(), Evicted: c.counts.evicted.Load(), Suspended: c.counts.suspended.Load(),
		Corrupt: c.counts.corrupt.Load(), Vanished: c.counts.vanished.Load(),
	}
}

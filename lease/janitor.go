package lease

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	wheelSlot  = 16 * time.Millisecond
	wheelSlots = 64
	// idleAfter is how long a key must be unused to be the first to go.
	idleAfter = time.Minute
)

// wheel is where holdings wait for their next visit: a leased key is visited
// once a period, to see whether it fell idle. Later visits than the wheel is
// long are made in stages.
type wheel struct {
	sync.Mutex // taken last
	slot       [wheelSlots][]*holding
	at         int64 // the slot number reached, in wheelSlots since the clock's base
	waiting    int
}

// watchLocked arranges for a visit to h a lease period from now, or before its
// lease ends.
func (c *Cache) watchLocked(h *holding, now int64) {
	if h.inWheel {
		return
	}
	h.inWheel = true
	due := now + int64(h.terms.Load().period)
	if last := h.current.deadline - c.margin(h) - int64(wheelSlot); last > now {
		due = min(due, last)
	}
	w := &c.wheel
	w.Lock()
	if w.waiting == 0 {
		w.at = now / int64(wheelSlot)
	}
	n := due/int64(wheelSlot) + 1
	n = min(max(n, w.at+1), w.at+wheelSlots-1)
	w.slot[n%wheelSlots] = append(w.slot[n%wheelSlots], h)
	w.waiting++
	start := !c.clock.stepped && !c.clock.running.Load() && !c.closed.Load()
	if start {
		c.clock.running.Store(true)
	}
	w.Unlock()
	if start {
		c.running.Go(c.tick)
	}
}

// margin is how long before its deadline a lease has to start back, to be with
// the store in time.
func (c *Cache) margin(h *holding) int64 {
	return min(int64(wheelSlot)+2*c.rtt.Load(), int64(h.terms.Load().period)/4)
}

// tick moves the coarse clock and makes the visits that are due, as long as
// any lease is out. A cache without leases costs nothing.
func (c *Cache) tick() {
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	c.dog.set = false
	for {
		select {
		case <-c.done:
			c.clock.running.Store(false)
			return
		case <-ticker.C:
		}
		now := c.clock.now()
		c.watch(now)
		c.visitDue(now)
		c.wheel.Lock()
		if c.wheel.waiting == 0 {
			c.clock.running.Store(false)
			c.wheel.Unlock()
			return
		}
		c.wheel.Unlock()
	}
}

// watch looks whether the machine slept.
func (c *Cache) watch(now int64) {
	if c.dog.slept(now) {
		c.dropAll()
	}
}

// visitDue visits every holding whose slot has come by now.
func (c *Cache) visitDue(now int64) {
	w := &c.wheel
	for {
		w.Lock()
		if w.waiting == 0 || (w.at+1)*int64(wheelSlot) > now {
			w.Unlock()
			return
		}
		w.at++
		slot := &w.slot[w.at%wheelSlots]
		due := *slot
		*slot = nil
		w.waiting -= len(due)
		w.Unlock()
		for _, h := range due {
			c.visit(h, now)
		}
	}
}

// visit drops what expired and gives back what nobody asked for in a period or
// what is about to expire: an expired token is as good as lost to a slow key.
func (c *Cache) visit(h *holding, now int64) {
	h.mu.Lock()
	h.inWheel = false
	if h.gone {
		h.mu.Unlock()
		return
	}
	h.settleLocked(c, now)
	if h.heldLocked() == 0 {
		h.mu.Unlock()
		return
	}
	t := h.terms.Load()
	idle := h.arrived == 0 && h.refused.Load() == 0 && now-h.demandAt >= int64(t.period)
	h.demandLocked(now, t.period)
	ending := len(h.later) == 0 && h.current.deadline-now <= c.margin(h)+2*int64(wheelSlot)
	if (idle || ending) && !h.flying {
		// Off the node at once: with no holding to visit the coarse clock stops.
		h.drainLocked(c)
		h.giveBack = true
		c.launchLocked(h)
		return
	}
	h.trimLocked(c, now, t.period)
	c.watchLocked(h, now)
	h.mu.Unlock()
}

// dropAll forgets every lease and what was to be reported of them: after the
// machine slept nobody knows how old they are.
func (c *Cache) dropAll() {
	c.counts.suspended.Add(1)
	c.table.each(func(h *holding) bool {
		h.mu.Lock()
		h.dropLocked(c)
		h.mu.Unlock()
		return true
	})
}

func (h *holding) dropLocked(c *Cache) {
	if h.current.deadline != 0 {
		h.later = append(h.later, h.closeLocked(c))
	}
	c.ledger.lost.Add(sum(h.later))
	h.later = h.later[:0]
	h.more.Store(false)
	h.unreported = h.unreported[:0]
	h.denial.Store(nil)
	h.paceUntil, h.failUntil = 0, 0
}

// makeRoom evicts until another key fits.
func (c *Cache) makeRoom() {
	for c.table.count.Load() >= int64(c.opts.MaxKeys) {
		now := c.clock.now()
		// First keys long unused, then any without a lease (in a flood of new
		// keys those are the flood's), then any.
		h := c.table.evict(64, func(h *holding) bool { return c.evictable(h, now, idleAfter, false) })
		if h == nil {
			h = c.table.evict(1024, func(h *holding) bool { return c.evictable(h, now, 0, false) })
		}
		if h == nil {
			h = c.table.evict(c.opts.MaxKeys, func(h *holding) bool { return c.evictable(h, now, 0, true) })
		}
		if h == nil {
			return // every key has a call in flight; one too many is no harm
		}
		c.evicted(h)
	}
}

// evicted has what h held given back, now that it is no longer in the table.
func (c *Cache) evicted(h *holding) {
	c.counts.evicted.Add(1)
	h.mu.Lock()
	if len(h.unreported) == 0 {
		h.mu.Unlock() // nothing to tell, as of most keys in a flood
		return
	}
	h.giveBack = true
	c.launchLocked(h)
}

// evictable takes h out of use if it was idle that long, no request waits, and
// it has no lease or leased keys may go too.
func (c *Cache) evictable(h *holding, now int64, idle time.Duration, leased bool) bool {
	if !h.mu.TryLock() {
		return false
	}
	defer h.mu.Unlock()
	if h.flying || h.queue.len > 0 || now-h.touched < int64(idle) {
		return false
	}
	h.settleLocked(c, now)
	if !leased && h.heldLocked() > 0 {
		return false
	}
	h.gone = true
	h.evicted.Store(true)
	h.drainLocked(c)
	return true
}

// Close stops admitting, and returns every lease to the store until ctx ends.
// An error says that some may not have been: the store forgets them within two
// TTLs. After it every method returns ErrClosed, as a second Close does.
func (c *Cache) Close(ctx context.Context) error {
	if !c.closed.CompareAndSwap(false, true) {
		return ErrClosed
	}
	close(c.done)
	failed := -c.ledger.notExecuted.Load() - c.ledger.unknown.Load()
	var open []*holding
	c.table.each(func(h *holding) bool {
		h.mu.Lock()
		h.settleLocked(c, c.clock.now())
		h.drainLocked(c)
		h.queue.giveUp()
		if len(h.unreported) > 0 && !h.flying {
			h.flying, h.giveBack = true, true
			open = append(open, h)
		}
		h.mu.Unlock()
		return true
	})
	if c.clock.stepped { // not by hash, which is another each time
		slices.SortFunc(open, func(a, b *holding) int { return strings.Compare(a.key, b.key) })
	}
	c.send.Lock()   // launchLocked adds to running under it, or sees closed
	c.send.Unlock() //nolint:staticcheck // empty on purpose
	for _, h := range open {
		c.submit(h)
	}
	stopped := make(chan struct{})
	go func() {
		c.running.Wait()
		close(stopped)
	}()
	if c.clock.stepped {
		c.driver.Wait(ctx, stopped, maxDuration)
	}
	select {
	case <-stopped:
		c.giveUp()
		if failed += c.ledger.notExecuted.Load() + c.ledger.unknown.Load(); failed > 0 {
			return fmt.Errorf("lease: %d calls to return leases failed", failed)
		}
		return nil
	case <-ctx.Done():
		c.giveUp()
		if c.clock.stepped {
			c.driver.Wait(context.Background(), stopped, maxDuration)
		}
		<-stopped
		return errors.Join(errors.New("lease: not all leases were returned"), ctx.Err())
	}
}

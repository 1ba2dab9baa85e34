package lease

import (
	"context"
	"fmt"
	"sync"
)

// Request is one of several that are decided together.
type Request struct {
	Key string
	N   int64 // its cost in tokens; 0 looks without charging
}

// AllDecision is the answer to several requests, all or nothing.
type AllDecision struct {
	// Decision is about one of them: of those that were refused the one that has to
	// wait longest; if all were admitted, the one with the fewest tokens remaining.
	Decision
	// Index says which one that is; -1 if there were no requests, which are admitted.
	Index int
	// Each is the decision on each request by itself, as far as one was made: if some
	// are refused those that are allowed were not charged. The zero Decision stands for
	// those that were not looked at.
	Each []Decision
}

// TakeAll decides whether requests on several keys may go ahead together, and
// charges each if all may, none otherwise. A refusal that this node remembers costs
// nothing; else tokens are taken from leases in the order given, and those of keys
// without one from the store, in one round trip. What was taken from leases for
// nothing goes back to them. What the store charged at once it keeps: to give that
// back could admit it twice, if its bucket ran over meanwhile. So the first refusal
// of which this node did not know may cost a key without a lease its tokens.
//
// The error is Take's for a request, in words that say which, and then none is
// charged; or ctx's.
func (c *Cache) TakeAll(ctx context.Context, requests []Request) (AllDecision, error) {
	all := AllDecision{Index: -1, Decision: Decision{Allowed: true}, Each: make([]Decision, len(requests))}
	if c.closed.Load() {
		return AllDecision{Index: -1}, ErrClosed
	}
	taken := make([]taking, len(requests))
	for i, r := range requests {
		h, err := c.holdingOf(r.Key)
		if err == nil {
			err = c.renew(h)
		}
		if err == nil {
			if t := h.terms.Load(); r.N < 0 || r.N > t.limit.Burst && !t.zero {
				err = &CostError{Cost: r.N, Burst: t.limit.Burst}
			}
		}
		if err != nil {
			return AllDecision{Index: i}, fmt.Errorf("request %d: %w", i, err)
		}
		taken[i] = taking{h: h, n: r.N}
	}
	// First those that are known to be refused, and then leases: nobody waits yet.
	for i := range taken {
		if t := &taken[i]; t.refused(c) {
			if t.take(ctx, c); t.err == nil {
				all.add(i, t)
			}
		}
	}
	if !all.Allowed {
		c.undoAll(taken) // of one that was admitted after all
		return all, nil
	}
	missing := 0
	for i := range taken {
		t := &taken[i]
		switch {
		case t.done:
		case t.leased(c):
			t.take(ctx, c)
		default:
			missing++
		}
	}
	c.takeMissing(ctx, taken, missing)

	var err error
	for i := range taken {
		if t := &taken[i]; t.err != nil {
			err = fmt.Errorf("request %d: %w", i, t.err)
		} else {
			all.add(i, t)
		}
	}
	if err == nil && all.Allowed {
		return all, nil
	}
	c.undoAll(taken)
	if err != nil {
		return AllDecision{Index: -1}, err
	}
	return all, nil
}

// taking is one request of a TakeAll.
type taking struct {
	h    *holding
	n    int64
	done bool
	d    Decision
	err  error
}

func (t *taking) take(ctx context.Context, c *Cache) {
	t.done = true
	t.err = c.decide(ctx, t.h, t.n, &t.d)
}

// refused reports whether the request is sure to be refused without a wait.
func (t *taking) refused(c *Cache) bool {
	if t.h.terms.Load().zero {
		return true
	}
	if t.n == 0 || t.h.left.Load() >= t.n || t.h.more.Load() {
		return false
	}
	_, ok := t.h.denial.Load().covers(c.clock.now(), t.n)
	return ok
}

// leased reports whether the lease seems to suffice.
func (t *taking) leased(c *Cache) bool {
	return t.n > 0 && t.h.left.Load() >= t.n && c.clock.coarse.Load() < t.h.spendUntil.Load()
}

// takeMissing takes what is not done yet: all at once, so that the calls share a
// round trip.
func (c *Cache) takeMissing(ctx context.Context, taken []taking, missing int) {
	var others sync.WaitGroup
	for i := range taken {
		t := &taken[i]
		if t.done {
			continue
		}
		if missing--; missing == 0 || c.clock.stepped {
			t.take(ctx, c)
			continue
		}
		others.Go(func() { t.take(ctx, c) })
	}
	others.Wait()
}

// add takes in the decision on request i.
func (all *AllDecision) add(i int, t *taking) {
	all.Each[i] = t.d
	var first bool
	switch {
	case !t.d.Allowed:
		first = all.Allowed || t.d.RetryAfter > all.RetryAfter
	case all.Allowed:
		first = all.Index < 0 || t.d.Remaining < all.Remaining
	}
	if first {
		all.Decision, all.Index = t.d, i
	}
}

// undoAll takes back what requests took.
func (c *Cache) undoAll(taken []taking) {
	for i := range taken {
		if t := &taken[i]; t.err == nil && t.d.Allowed {
			c.undo(t)
		}
	}
}

// undo takes back what t took. Tokens of a lease that the store has not been told
// about are simply there again: it counts them as out. Of those whose lease has ended
// it is told.
func (c *Cache) undo(t *taking) {
	if t.n == 0 || t.d.Source == SourcePolicy {
		return
	}
	h, n := t.h, t.n
	now := c.clock.now()
	h.mu.Lock()
	if !h.gone {
		h.settleLocked(c, now)
		n = h.unspendLocked(c, n)
	}
	if h.giveBack && !h.gone {
		c.launchLocked(h)
	} else {
		h.mu.Unlock()
	}
	if n == 0 {
		return
	}
	// With the store or the share, where others may have had their place.
	c.ledger.spent.Add(-n)
	c.ledger.lost.Add(n)
}

// unspendLocked puts as many of n tokens as it can back to the leases they came from,
// and returns how many remain.
func (h *holding) unspendLocked(c *Cache, n int64) int64 {
	for i := len(h.unreported) - 1; i >= 0 && n > 0; i-- {
		u := &h.unreported[i]
		k := min(n, u.Spent)
		if k == 0 {
			continue
		}
		n -= k
		u.Spent -= k
		h.arrived -= k // asked for, but not to be counted twice by what asks again
		c.ledger.spent.Add(-k)
		if !h.unspendIntoLocked(u.Epoch, k) {
			u.Returned += k
			c.ledger.returned.Add(k)
			h.giveBack = true
		}
	}
	return n
}

// unspendIntoLocked adds n tokens to a live lease of an epoch, if there is one. All
// leases of an epoch are dropped by the store together, after the last has ended.
func (h *holding) unspendIntoLocked(epoch, n int64) bool {
	if h.current.deadline != 0 && h.current.epoch == epoch {
		h.current.tokens += n
		h.left.Add(n)
		return true
	}
	for i := range h.later {
		if h.later[i].epoch == epoch {
			h.later[i].tokens += n
			return true
		}
	}
	return false
}

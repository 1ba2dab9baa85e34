package lease

import (
	"context"
	"errors"
	"math"
	"time"
)

const (
	// maxBatch is how many calls go to the store together.
	maxBatch = 128
	// maxSenders is how many batches may be under way at a time. With one, a
	// slow batch holds up all keys; many only add connections.
	maxSenders = 4
	// failBackoff is how long after a failed call a key makes no other; it
	// doubles with each failure in a row.
	failBackoff    = 10 * time.Millisecond
	maxFailBackoff = time.Second
)

// launchLocked sees to it that a call for h is made, and releases h.mu. At most
// one is in flight per key: whoever comes meanwhile shares the next.
func (c *Cache) launchLocked(h *holding) {
	if h.flying || c.closed.Load() {
		h.mu.Unlock()
		return
	}
	// Under send, which Close takes before it waits for running: h may be evicted,
	// and Close does not look at it then.
	c.send.Lock()
	if c.closed.Load() {
		c.send.Unlock()
		h.mu.Unlock()
		return
	}
	h.flying = true
	c.running.Add(1)
	c.send.Unlock()
	h.mu.Unlock()
	c.submit(h)
	c.running.Done()
}

// submit hands h to a sender. An idle sender starts at once, with no timer: a
// single caller pays nothing for batching.
func (c *Cache) submit(h *holding) {
	c.send.Lock()
	c.send.pending = append(c.send.pending, h)
	start := c.send.senders < maxSenders
	if start {
		c.send.senders++
	}
	c.send.Unlock()
	if start {
		c.spawn(c.sendAll)
	}
}

// spawn runs f in its own goroutine, or as its driver likes in a stepped cache.
func (c *Cache) spawn(f func()) {
	if c.clock.stepped {
		c.running.Add(1)
		c.driver.Go(func() {
			defer c.running.Done()
			f()
		})
		return
	}
	c.running.Go(f)
}

// sendAll sends batches until nothing is pending.
func (c *Cache) sendAll() {
	for {
		c.send.Lock()
		batch := c.nextBatchLocked()
		if len(batch) == 0 {
			c.send.senders--
			c.send.Unlock()
			return
		}
		c.send.Unlock()
		c.sendBatch(batch)
	}
}

// nextBatchLocked takes the next batch off what is pending. Holds c.send.
func (c *Cache) nextBatchLocked() []*holding {
	n := min(len(c.send.pending), maxBatch)
	for i, h := range c.send.pending[:n] {
		if h.evicted.Load() {
			n = max(1, i) // it goes alone: its key may be pending again
			break
		}
	}
	batch := c.send.pending[:n]
	c.send.pending = c.send.pending[n:]
	return batch
}

// sendBatch makes one call to the store for each of batch that has reason to.
func (c *Cache) sendBatch(batch []*holding) {
	// Before the send: deadlines count from here.
	sent := c.clock.now()
	calls := make([]Call, 0, len(batch))
	flying := batch[:0]
	for _, h := range batch {
		_ = c.renew(h) // a limit that is wrong is told to who asks
		if call, ok := h.begin(c, sent); ok {
			calls = append(calls, call)
			flying = append(flying, h)
		}
	}
	if len(calls) == 0 {
		return
	}
	wall := c.dog.wall() - sent
	ctx, cancel := context.WithTimeout(c.base, c.opts.Timeout)
	answers := c.ask(ctx, calls)
	cancel()
	now := c.clock.now()
	if answers[0].Err == nil {
		c.observe(now - sent)
	}
	if slept := c.dog.wall() - now - wall; slept > int64(suspendGap) {
		sent -= slept // the machine was asleep meanwhile: leases are older than they look
	}
	for i, h := range flying {
		if again := h.finish(c, sent, now, &calls[i], &answers[i]); again {
			c.submit(h)
		}
	}
}

// ask has the store carry out calls, and counts those that were sent.
func (c *Cache) ask(ctx context.Context, calls []Call) []Answer {
	answers := c.store.Acquire(ctx, calls)
	if len(answers) != len(calls) {
		// A Store that breaks its contract has not said what it did.
		answers = make([]Answer, len(calls))
		for i := range answers {
			answers[i].Err = ErrUnknownOutcome
		}
	}
	sent := int64(0)
	for i := range answers {
		if !errors.Is(answers[i].Err, ErrDown) {
			sent++
		}
	}
	if sent > 0 {
		c.ledger.calls.Add(sent)
		c.ledger.trips.Add(1)
	}
	return answers
}

// observe takes a round trip into the smoothed one, as TCP does (RFC 6298).
func (c *Cache) observe(rtt int64) {
	old := c.rtt.Load()
	if old == 0 {
		c.rtt.Store(max(rtt, 1))
		return
	}
	c.rtt.Store(max(old+(rtt-old)/8, 1))
}

// leases reports whether it pays to lease a key: the period is long against a
// round trip, and there are several requests in one. Otherwise each round trip
// serves those who wait, and nothing is stranded.
func (c *Cache) leases(t *terms, demand float64, need int64) bool {
	shortest := max(2*time.Millisecond, 3*time.Duration(c.rtt.Load()))
	return !t.tooSmall && t.period >= shortest && demand >= minLease*float64(max(1, need))
}

// begin builds the call that h has reason to make; ok is false if there is none.
func (h *holding) begin(c *Cache, now int64) (call Call, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	t := h.terms.Load()
	h.settleLocked(c, now)
	h.serveLocked(c, now)
	demand := h.demandLocked(now, t.period)

	call = h.callLocked(c, now)
	if w := h.queue.head; w != nil {
		if h.heldLocked() > 0 && w.n > 0 {
			// Too few here for the first in the queue. Back in the bucket they
			// count towards what it needs.
			h.drainLocked(c)
		}
		// Those at the head with the same cost come aboard, as many as a full
		// bucket could serve: the store charges them at once, whole costs only.
		call.Need = w.n
		for w := h.queue.head; w != nil && w.n == call.Need && w.n <= t.limit.Burst-call.Bound; w = h.queue.head {
			h.queue.remove(w)
			h.aboard.push(w)
			w.aboard = true
			call.Bound += w.n
		}
		call.Want = call.Bound + whole(h.queue.tokens, t.limit.Burst)
	}
	h.leasing = (call.Want > 0 || h.refill) && now >= h.paceUntil && c.leases(t, demand, call.Need) && !h.gone && !c.closed.Load()
	if !h.leasing {
		call.Share = ShareNone // a share of what? those who wait take turns
	} else {
		// The estimate is taken when a request has just come: half of it is one
		// too many. A retry storm inflates it: let want no more than double.
		want := min(whole(demand-float64(max(1, call.Need))/2, t.limit.Burst/2), 2*h.lastWant+call.Need+1)
		h.lastWant = max(want, minLease)
		call.Want += want
	}
	// Close leaves the books of a call that is already on its way to that call.
	giveBack := h.giveBack || c.closed.Load()
	h.refill, h.giveBack = false, false
	if giveBack {
		h.drainLocked(c)
	}
	if call.Want > 0 || h.aboard.len > 0 {
		h.reportLocked(&call, now)
		return call, true
	}
	// A report alone is worth a call only with something to give back.
	if giveBack && h.reportLocked(&call, now) {
		return call, true
	}
	h.flying = false
	return call, false
}

// callLocked is a call for h that asks for nothing yet.
func (h *holding) callLocked(c *Cache, now int64) Call {
	t := h.terms.Load()
	call := Call{
		Key: h.key, Limit: t.limit, Version: t.version, Count: t.count, PerUS: t.perUS, TTL: max(2*t.period, minTTL),
		LastEpoch: h.lastEpoch, Share: c.opts.Share, Demand: whole(h.demandLocked(now, t.period), t.limit.Burst),
	}
	if c.local != nil {
		call.Hint = h.known.hint(now)
	}
	return call
}

// whole returns x tokens rounded up, within 0 to most.
func whole(x float64, most int64) int64 { return int64(math.Ceil(max(0, min(x, float64(most))))) }

// reportLocked moves the newest two epochs' tallies into call, the store's and
// this node's own. They leave the node here: if the outcome stays unknown they
// are not sent again, and the store forgets those epochs by itself.
func (h *holding) reportLocked(call *Call, now int64) (some bool) {
	keep := h.unreported[:0]
	for _, u := range h.unreported {
		if now < u.forget {
			keep = append(keep, u)
		}
	}
	h.unreported = keep
	for i := range call.Reports {
		if u, ok := h.newestLocked(false); ok {
			call.Reports[i], h.reporting[i], some = u.Report, u, true
		}
		if u, ok := h.newestLocked(true); ok {
			call.Own[i], some = u.Report, true
		}
	}
	return some
}

// newestLocked takes the tally of the newest epoch out of those unreported.
// Epochs of this node's own count down.
func (h *holding) newestLocked(own bool) (newest tally, ok bool) {
	at := -1
	for i, u := range h.unreported {
		if (u.Epoch < uncounted) == own && (at < 0 || (u.Epoch > h.unreported[at].Epoch) != own) {
			at = i
		}
	}
	if at < 0 {
		return tally{}, false
	}
	newest = h.unreported[at]
	last := len(h.unreported) - 1
	h.unreported[at] = h.unreported[last]
	h.unreported = h.unreported[:last]
	return newest, true
}

// unreportLocked takes back reports that certainly reached no store.
func (h *holding) unreportLocked() {
	for _, r := range h.reporting {
		if r.forget != 0 {
			u := h.tallyLocked(r.Epoch, r.forget)
			u.Spent += r.Spent
			u.Returned += r.Returned
		}
	}
}

// finish applies the answer to call and reports whether h needs another.
func (h *holding) finish(c *Cache, sent, now int64, call *Call, answer *Answer) (again bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.settleLocked(c, now)
	aboard := h.aboard
	h.aboard = waiters{}
	if answer.Err != nil {
		h.bookFailureLocked(c, answer.Err)
	}
	if answer.Err != nil && answer.Grant.Source == SourceNone {
		h.failLocked(c, now, aboard)
	} else {
		if answer.Err != nil {
			c.counts.failed.Add(int64(aboard.len))
		}
		h.applyLocked(c, sent, now, call, &answer.Grant, aboard)
	}
	h.reporting = [2]tally{}
	if c.closed.Load() {
		// Close found this call in flight and left the books to it.
		h.drainLocked(c)
		h.queue.giveUp()
		h.giveBack = answer.Err == nil && len(h.unreported) > 0
	}
	if h.queue.len > 0 || h.refill || h.giveBack {
		return true
	}
	h.flying = false
	return false
}

// bookFailureLocked books what became of a call at the store.
func (h *holding) bookFailureLocked(c *Cache, err error) {
	switch {
	case errors.Is(err, ErrNotExecuted), errors.Is(err, ErrRejected):
		h.unreportLocked()
		c.ledger.notExecuted.Add(1)
	default:
		c.ledger.unknown.Add(1)
	}
}

// failLocked decides everybody who waits by the failure policy.
func (h *holding) failLocked(c *Cache, now int64, aboard waiters) {
	wait := min(failBackoff<<min(h.failures, 10), maxFailBackoff)
	h.failures++
	h.failUntil = now + int64(float64(wait)*(1+c.random()/4))
	h.refill = false
	aboard.giveUp()
	h.queue.giveUp()
}

// applyLocked books a grant and serves those who wait.
func (h *holding) applyLocked(c *Cache, sent, now int64, call *Call, g *Grant, aboard waiters) {
	if g.Created && (h.heldLocked() > 0 || h.known.fullAt(h.terms.Load()) > now) {
		c.counts.vanished.Add(1)
	}
	shown := h.bookGrantLocked(sent, now, call, g)
	h.failUntil, h.failures = 0, 0
	c.ledger.granted.Add(g.Tokens)
	if g.Corrupt {
		c.counts.corrupt.Add(1)
	}
	if g.Newer && g.Limit.Burst > 0 && g.Count > 0 && g.PerUS > 0 {
		g.Limit.OnFailure = call.Limit.OnFailure // no part of what nodes agree on
		h.changeLocked(termsWith(g.Limit, g.Count, g.PerUS, g.Version, c.opts.LeasePeriod))
		shown = h.terms.Load()
	}

	// The lease. Its deadline counts from before the call was sent, so a reply
	// that comes later than that is worth nothing.
	if leased := g.Tokens - g.Bound; leased > 0 {
		b := batch{epoch: g.Epoch, tokens: leased, deadline: sent + int64(g.TTL), forget: sent + 2*int64(call.TTL)}
		if g.Source != SourceStore {
			b.shown = shown
		}
		if now >= b.deadline {
			c.ledger.lost.Add(leased)
		} else {
			h.later = append(h.later, b)
			h.settleLocked(c, now)
			if h.gone {
				h.giveBack = true
			} else {
				c.watchLocked(h, now)
			}
		}
	}

	// Those the store charged. Their Decision counts the lease as remaining, so
	// it is there first.
	bound := g.Bound
	for w := aboard.head; w != nil && bound >= w.n && w.n > 0; w = aboard.head {
		aboard.remove(w)
		if w.gone {
			continue // bound keeps his tokens
		}
		bound -= w.n
		c.ledger.spent.Add(w.n)
		w.decide(h.admitted(shown, now, g.Source))
	}
	h.keepLocked(c, sent, now, bound, g)
	h.paceLocked(c, now, g)

	// Those whom the store could not serve, then those who came meanwhile.
	for w := aboard.head; w != nil; {
		next := w.next
		w.aboard = false
		switch {
		case w.gone:
			aboard.remove(w)
		case w.n == 0:
			aboard.remove(w)
			w.decide(h.looked(shown, now, saturate(now, g.RetryAfter), g.Source))
		}
		w = next
	}
	h.queue.pushFront(aboard)
	h.serveLocked(c, now)
	h.refuseLocked(c, sent, now, call, g, shown)
}

// bookGrantLocked notes what g tells of the bucket, and returns how decisions
// by it are shown.
func (h *holding) bookGrantLocked(sent, now int64, call *Call, g *Grant) (shown *terms) {
	h.balance.Store(g.Remaining)
	h.resetAt.Store(saturate(now, g.ResetAfter))
	t := h.terms.Load()
	if g.Source != SourceStore {
		return t.shareOf(g)
	}
	h.lastEpoch = g.Epoch
	if !g.Newer {
		h.known.learn(sent, now, t, call, g)
	}
	return t
}

// keepLocked keeps n tokens that were charged for requests that have left. The
// store does not count them as outstanding, so there may be no more than fit into
// the bucket beside what it has by the time they are spent: doc.go, Why it holds.
func (h *holding) keepLocked(c *Cache, sent, now, n int64, g *Grant) {
	if n == 0 {
		return
	}
	if g.Source != SourceStore {
		c.ledger.lost.Add(n)
		return
	}
	t := h.terms.Load()
	room := float64(t.limit.Burst-(g.Remaining+1)-g.Outstanding) - float64(g.TTL)/t.nsPerToken
	switch {
	case !t.limit.Algorithm.Leases():
		room = 0 // they count from when they were charged
	case t.windowed:
		room = float64(n) // they count in a window that does not end before the TTL
	}
	keep := min(n, int64(math.Floor(room)))
	deadline := sent + int64(g.TTL)
	if keep <= 0 || now >= deadline || h.gone || c.closed.Load() {
		keep = 0
	} else {
		h.later = append(h.later, batch{epoch: uncounted, tokens: keep, deadline: deadline})
		h.settleLocked(c, now)
		c.watchLocked(h, now)
	}
	c.ledger.lost.Add(n - keep)
}

// paceLocked decides when the next call for more may be made.
func (h *holding) paceLocked(c *Cache, now int64, g *Grant) {
	t := h.terms.Load()
	if !h.leasing {
		return
	}
	if g.Pace > 0 {
		if g.Tokens == 0 && g.Remaining > 0 {
			return // too few for this cost; a smaller one may still ask
		}
		// Too few for all: everybody waits a period, a little apart.
		h.paceUntil = now + int64(float64(g.Pace)*(1+c.random()/10))
		h.early = -1
		h.low.Store(-1)
		return
	}
	h.paceUntil = 0
	// Refill early enough that the last token goes when the reply comes.
	soon := h.demand * (2*float64(c.rtt.Load()) + float64(tick)) / float64(t.period)
	h.early = min(int64(soon), h.heldLocked()/2)
	h.armLocked()
}

// saturate returns now + d, at most the end of time.
func saturate(now int64, d time.Duration) int64 {
	if int64(d) > math.MaxInt64-now {
		return math.MaxInt64
	}
	return now + int64(d)
}

// serveLocked admits from the leases whoever they suffice for, in order.
func (h *holding) serveLocked(c *Cache, now int64) {
	for w := h.queue.head; w != nil; w = h.queue.head {
		if w.n > 0 {
			left, ok := h.takeLocked(c, now, w.n)
			if !ok {
				return
			}
			h.arrived -= w.n // counted when it queued, and again by the lease
			h.queue.remove(w)
			var d Decision
			h.admit(&d, now, left)
			w.decide(d)
			continue
		}
		if h.heldLocked() == 0 {
			return
		}
		h.queue.remove(w)
		t := h.shown.Load()
		w.decide(h.looked(t, now, now, t.source))
	}
}

// refuseLocked remembers a refusal and refuses those it covers.
func (h *holding) refuseLocked(c *Cache, sent, now int64, call *Call, g *Grant, shown *terms) {
	if call.Want == 0 {
		return // a look, or a report
	}
	if g.Tokens >= call.Want {
		h.denial.Store(nil)
		return
	}
	t := h.terms.Load()
	r := &refusal{
		cost: max(1, call.Need), metAt: saturate(now, g.RetryAfter), pace: h.paceUntil, nsPerToken: shown.nsPerToken,
		resetAt: saturate(now, g.ResetAfter), windowed: shown.windowed, shown: shown, source: SourceMemory,
	}
	r.room, r.dropped = shown.full, now
	if g.Outstanding > 0 {
		r.room, r.dropped = shown.full-g.Outstanding, saturate(now, 2*max(call.TTL, g.TTL*100/95+1))
	}
	if g.RetryAfter > 0 || g.Tokens < r.cost {
		// Half the wait, so that a give-back or a raised limit is noticed: at
		// least a second and never longer than the promise. Jittered apart.
		wait := max(time.Second, g.RetryAfter/2)
		if wait < time.Hour*24*365 {
			wait = time.Duration(float64(wait) * (1 + c.random()/4))
		}
		if g.Outstanding > 0 {
			// Whatever others hold is back, or has expired, within a TTL.
			wait = min(wait, 2*t.period)
		}
		if g.Source != SourceStore {
			// To ask again costs no call, and the store may be back.
			r.source, wait = g.Source, min(wait, t.period)
		}
		// From the send, not the reply: asked for again then, the store is
		// reached when the token is there, not a round trip later.
		r.until = max(now+1, sent+int64(min(g.RetryAfter, wait)))
	}
	if h.leasing {
		// A saturated key is asked for once a period, not once a token.
		r.until = max(r.until, now+int64(g.Pace))
	}
	h.denial.Store(r)
	for w := h.queue.head; w != nil; {
		next := w.next
		if retryAt, ok := r.covers(now, w.n); ok && w.n > 0 {
			h.queue.remove(w)
			w.decide(h.denied(shown, now, retryAt, g.Source))
		}
		w = next
	}
}

// looked is the Decision for a cost of 0: as if for a cost of 1.
func (h *holding) looked(t *terms, now, retryAt int64, from Source) Decision {
	d := h.admitted(t, now, from)
	if d.Remaining > 0 {
		return d
	}
	return h.denied(t, now, retryAt, from)
}

package lease

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// holding is what this node has of one key: leased tokens, the memory of a
// refusal, and the requests that wait for a call to the store.
//
// The current lease is spent without a lock, by compare-and-swap on left: left
// never goes below 0, so what a lease's counter lost is exactly what was
// admitted with it, also while others are spending.
type holding struct {
	key  string
	hash uint64
	next atomic.Pointer[holding] // in the table's bucket

	left       atomic.Int64             // tokens of the current lease
	spendUntil atomic.Int64             // its deadline less coarseLag; 0: no lease
	low        atomic.Int64             // refill early when left falls to this; -1: do not
	more       atomic.Bool              // there are leases after the current one
	evicted    atomic.Bool              // gone, readable without mu
	balance    atomic.Int64             // what the bucket had when last asked
	resetAt    atomic.Int64             // when it is full again by that, of windowed terms
	terms      atomic.Pointer[terms]    // the limit in force
	of         atomic.Pointer[snapshot] // the limits that was looked up in
	shown      atomic.Pointer[terms]    // what decisions by the current lease show
	denial     atomic.Pointer[refusal]  // nil: none remembered
	refused    atomic.Int64             // tokens refused from memory, not yet in demand

	mu       sync.Mutex // guards all below; taken after a shard's, before Cache.send and wheel
	gone     bool       // evicted: no longer in the table
	asked    bool       // the limit came with a request
	flying   bool       // a call is in flight or about to be
	inWheel  bool
	refill   bool    // the call should fetch a lease though nobody waits
	giveBack bool    // the call should return what is left
	current  batch   // the lease that left counts; tokens: left when last settled
	later    []batch // leases spent after it, oldest first

	unreported []tally  // what became of leased tokens, by epoch, oldest first
	reporting  [2]tally // aboard the call in flight
	lastEpoch  int64

	queue                waiters // requests for the next call
	aboard               waiters // requests bound to the call in flight
	demand               float64 // tokens asked per lease period, decaying; as of demandAt
	arrived              int64   // tokens asked for since, admitted or waiting
	demandAt, touched    int64
	lastWant             int64 // of the previous call
	failures             int64 // failed calls in a row
	early                int64 // what low is for the last lease held
	leasing              bool  // the call in flight asks for a lease too
	paceUntil, failUntil int64
	known                known
}

// known is what the store's grants told of the bucket.
type known struct {
	ok          bool
	tokens      int64 // in the bucket, by the last grant
	outstanding int64
	at, first   int64 // when that grant came, and the first one
	resetAt     int64 // when the bucket is full by that grant

	// part is this node's part of the demand of all, averaged over epochs as of
	// the last one it knows about: an epoch counts α, those before it 1−α. All nodes
	// weigh an epoch alike, and their parts of it add up to 1; so do the averages.
	part  float64
	epoch int64
	told  [2]told // of this node's demand, in the latest epochs
}

// told is the demand of this node that the store counted in an epoch.
type told struct{ epoch, demand int64 }

// partFade is the time constant of that average.
const partFade = 5 * time.Second

// learn takes in a grant of the store.
func (k *known) learn(sent, now int64, t *terms, call *Call, g *Grant) {
	if !k.ok {
		k.first, k.epoch = now, g.Epoch-1
	}
	k.ok, k.at, k.tokens, k.outstanding = true, now, t.balance(g), g.Outstanding
	k.resetAt = saturate(sent, g.ResetAfter) // no later than by the store's clock
	if call.Want > 0 && call.LastEpoch != g.Epoch {
		k.told[1] = k.told[0]
		k.told[0] = told{g.Epoch, max(1, min(call.Demand, t.limit.Burst))}
	}
	epochs := g.Epoch - 1 - k.epoch
	k.epoch = g.Epoch - 1
	if epochs <= 0 {
		return
	}
	fade := math.Exp(-float64(call.TTL) / float64(partFade))
	k.part *= math.Pow(fade, float64(epochs))
	for _, mine := range k.told {
		if mine.epoch == k.epoch && g.Demand > 0 {
			k.part += (1 - fade) * min(1, float64(mine.demand)/float64(g.Demand))
		}
	}
}

// fullAt returns until when the bucket is sure not to have been full, and so not to
// have expired, unless somebody filled it; 0 if nothing is known.
func (k *known) fullAt(t *terms) int64 {
	if !k.ok {
		return 0
	}
	if t.windowed {
		return k.resetAt
	}
	return saturate(k.at, t.timeFor(t.limit.Burst-k.tokens))
}

// hint returns what is known at now.
func (k *known) hint(now int64) Hint {
	if !k.ok {
		return Hint{Prior: 1}
	}
	fade := func(since int64) float64 { return math.Exp(-float64(now-since) / float64(partFade)) }
	return Hint{
		Known: true, Tokens: k.tokens, Outstanding: k.outstanding, Age: time.Duration(now - k.at),
		Part: k.part * fade(k.at), Prior: fade(k.first),
	}
}

// batch is tokens of one grant.
type batch struct {
	epoch    int64
	tokens   int64
	deadline int64
	forget   int64  // when its epoch means nothing to the store any more
	shown    *terms // as decisions show it; nil for a lease of the store's
}

// uncounted is the epoch of tokens that the store charged as spent. Below it are
// those of tokens that this node was granted by itself.
const uncounted = -1

// tally is a Report in the making.
type tally struct {
	Report
	forget int64
}

// refusal remembers that the store had no tokens. It never covers a cost below
// the one that was refused, and ends early enough to notice a give-back.
type refusal struct {
	cost       int64
	until      int64   // refuse cost and more until then
	pace       int64   // refuse everything until then: no call for more before that
	metAt      int64   // when the bucket would have cost tokens
	nsPerToken float64 // and how long each further one takes,
	resetAt    int64   // or, if windowed, when all are there: it says nothing of those between
	windowed   bool
	room       int64  // what outstanding leases leave of the burst,
	dropped    int64  // until then at the latest
	shown      *terms // as decisions show it
	source     Source
}

// covers reports whether n tokens are to be refused at now, and when they would
// be met if nobody else asked.
func (r *refusal) covers(now, n int64) (retryAt int64, ok bool) {
	if r == nil || now >= r.pace && (n < r.cost || now >= r.until) {
		return 0, false
	}
	retryAt = max(r.pace, now+1, r.metFor(n))
	if n >= r.cost {
		retryAt = max(retryAt, r.until) // refused here until then
	}
	return retryAt, true
}

// metFor returns when the bucket would have n tokens, saturating.
func (r *refusal) metFor(n int64) int64 {
	if n == r.cost {
		return r.metAt // exactly
	}
	if r.windowed {
		if n < r.cost {
			return r.metAt
		}
		return max(r.metAt, r.resetAt)
	}
	// The bucket counts in whole microseconds, and metAt is rounded up to one.
	us := func(tokens int64) float64 { return math.Ceil(float64(tokens)*r.nsPerToken/1e3) * 1e3 }
	at := float64(r.metAt) + us(n-r.cost)
	if n > r.room {
		// Leases hold up refill at room until they are dropped.
		at = max(at, float64(r.dropped)+us(n-r.room))
	}
	if at >= float64(math.MaxInt64) {
		return math.MaxInt64
	}
	return int64(at)
}

// admit fills in d, the zero Decision, for a request that was admitted at now, or
// a little later, leaving left tokens on this node.
func (h *holding) admit(d *Decision, now, left int64) {
	t := h.shown.Load()
	t.admit(d, left+h.balance.Load())
	if t.windowed {
		d.ResetAfter = time.Duration(max(0, h.resetAt.Load()-now))
	}
}

func (t *terms) admit(d *Decision, remaining int64) {
	remaining = min(remaining, t.full)
	d.Allowed = true
	d.Source = t.source
	d.Limit = t.limit
	d.Remaining = remaining
	d.ResetAfter = time.Duration(float64(t.full-remaining) * t.nsPerToken)
}

// admitted is the Decision for a request that a call admitted, from a grant
// that is shown as t.
func (h *holding) admitted(t *terms, now int64, from Source) (d Decision) {
	t.admit(&d, h.heldLocked()+h.balance.Load())
	if t.windowed {
		d.ResetAfter = time.Duration(max(0, h.resetAt.Load()-now))
	}
	d.Source = from
	return d
}

// denied is the Decision for a request refused until retryAt by what is shown
// as t.
func (h *holding) denied(t *terms, now, retryAt int64, from Source) Decision {
	remaining := min(h.left.Load()+h.balance.Load(), t.full)
	d := Decision{Source: from, Limit: t.limit, Remaining: max(0, remaining)}
	d.ResetAfter = t.timeFor(t.full - d.Remaining)
	if t.windowed {
		d.ResetAfter = time.Duration(max(0, h.resetAt.Load()-now))
	}
	d.RetryAfter = max(1, time.Duration(retryAt-now))
	if d.ResetAfter < d.RetryAfter {
		d.ResetAfter = d.RetryAfter
	}
	return d
}

// tallyLocked returns the tally of an epoch.
func (h *holding) tallyLocked(epoch, forget int64) *tally {
	if epoch == uncounted {
		return &tally{} // the store has booked these
	}
	for i := range h.unreported {
		if h.unreported[i].Epoch == epoch {
			h.unreported[i].forget = max(h.unreported[i].forget, forget)
			return &h.unreported[i]
		}
	}
	if len(h.unreported) >= 6 {
		// Reports of at most two epochs are of use, the store's and this node's
		// own; the oldest is none.
		h.unreported = append(h.unreported[:0], h.unreported[1:]...)
	}
	h.unreported = append(h.unreported, tally{Report: Report{Epoch: epoch}, forget: forget})
	return &h.unreported[len(h.unreported)-1]
}

// bookLocked books what hits took from the current lease since the last look:
// it has left tokens now.
func (h *holding) bookLocked(c *Cache, left int64) {
	if spent := h.current.tokens - left; spent > 0 {
		h.current.tokens = left
		h.tallyLocked(h.current.epoch, h.current.forget).Spent += spent
		h.arrived += spent
		c.ledger.spent.Add(spent)
	}
}

// closeLocked ends the current lease and returns what was left of it.
func (h *holding) closeLocked(c *Cache) batch {
	h.spendUntil.Store(0)
	b := h.current
	b.tokens = h.left.Swap(0)
	h.bookLocked(c, b.tokens)
	h.current = batch{}
	return b
}

// settleLocked drops leases past their deadline and makes the oldest live one
// the current one. Every change of later ends with it.
func (h *holding) settleLocked(c *Cache, now int64) {
	h.bookLocked(c, h.left.Load())
	live := h.later[:0]
	for _, b := range h.later {
		// In any order: a change of the limit changes how long leases live.
		if now < b.deadline {
			live = append(live, b)
		} else {
			h.expireLocked(c, b)
		}
	}
	h.later = live
	h.promoteLocked(c, now)
	h.more.Store(len(h.later) > 0)
}

func (h *holding) promoteLocked(c *Cache, now int64) {
	for {
		switch {
		case h.current.deadline != 0 && now >= h.current.deadline:
			h.expireLocked(c, h.closeLocked(c))
		case h.current.deadline != 0 && (h.current.tokens > 0 || len(h.later) == 0):
			return
		case len(h.later) == 0:
			return
		default:
			if h.current.deadline != 0 {
				// Empty; whoever took the last token was counted above, and
				// with 0 left nobody takes more.
				h.closeLocked(c)
			}
			b := h.later[0]
			h.later = append(h.later[:0], h.later[1:]...)
			h.current = b
			if b.shown == nil {
				b.shown = h.terms.Load()
			}
			h.shown.Store(b.shown)
			h.left.Store(b.tokens)
			h.spendUntil.Store(b.deadline - int64(coarseLag))
			h.armLocked()
		}
	}
}

// armLocked sets when hits are to refill early: near the end of the last lease.
func (h *holding) armLocked() {
	if len(h.later) == 0 {
		h.low.Store(h.early)
	} else {
		h.low.Store(-1)
	}
}

// expireLocked books tokens whose deadline passed. They can no longer be spent,
// so the next call may as well return them.
func (h *holding) expireLocked(c *Cache, b batch) {
	if b.tokens > 0 {
		h.tallyLocked(b.epoch, b.forget).Returned += b.tokens
		c.ledger.expired.Add(b.tokens)
	}
}

// heldLocked returns the live tokens here. After settleLocked.
func (h *holding) heldLocked() int64 {
	n := h.left.Load()
	for _, b := range h.later {
		n += b.tokens
	}
	return n
}

// takeLocked admits n tokens from the leases, oldest first, all or nothing.
// After settleLocked.
func (h *holding) takeLocked(c *Cache, now, n int64) (left int64, ok bool) {
	for {
		left := h.left.Load()
		if left >= n {
			if h.left.CompareAndSwap(left, left-n) {
				return left - n, true
			}
			continue
		}
		break
	}
	if len(h.later) == 0 {
		return 0, false
	}
	// The cost spans leases. With the current one closed no hit can interfere.
	first := h.closeLocked(c)
	h.later = append([]batch{first}, h.later...)
	if ok = sum(h.later) >= n; ok {
		h.arrived += n
		c.ledger.spent.Add(n)
		for i := range h.later {
			b := &h.later[i]
			used := min(n, b.tokens)
			b.tokens -= used
			n -= used
			h.tallyLocked(b.epoch, b.forget).Spent += used
		}
	}
	h.settleLocked(c, now)
	return h.left.Load(), ok
}

func sum(batches []batch) (n int64) {
	for _, b := range batches {
		n += b.tokens
	}
	return n
}

// drainLocked takes every live token off the node, to be returned.
func (h *holding) drainLocked(c *Cache) {
	returned := int64(0)
	if h.current.deadline != 0 {
		b := h.closeLocked(c)
		h.later = append(h.later, b)
	}
	for _, b := range h.later {
		switch {
		case b.tokens == 0:
		case b.epoch == uncounted:
			c.ledger.lost.Add(b.tokens)
		default:
			h.tallyLocked(b.epoch, b.forget).Returned += b.tokens
			returned += b.tokens
		}
	}
	h.later = h.later[:0]
	h.more.Store(false)
	c.ledger.returned.Add(returned)
}

// trimLocked takes off the node what the current lease will not need before its
// deadline, for the next call to return: an expired token may be reported too
// late to count.
func (h *holding) trimLocked(c *Cache, now int64, period time.Duration) {
	rest := h.current.deadline - now
	if h.current.deadline == 0 || h.current.epoch == uncounted || rest > int64(period) || len(h.later) > 0 {
		return
	}
	need := int64(math.Ceil(h.demand*float64(rest)/float64(period))) + 1
	for left := h.left.Load(); left > need; left = h.left.Load() {
		if h.left.CompareAndSwap(left, need) {
			h.current.tokens -= left - need
			h.tallyLocked(h.current.epoch, h.current.forget).Returned += left - need
			c.ledger.returned.Add(left - need)
			return
		}
	}
}

// demandLocked brings the estimate of tokens asked per lease period up to now:
// every token asked for counts, refused ones too (a starved node must not look
// idle), and fades with the lease period as time constant.
func (h *holding) demandLocked(now int64, period time.Duration) float64 {
	if dt := now - h.demandAt; dt > 0 {
		h.demand *= math.Exp(-float64(dt) / float64(period))
		h.demandAt = now
	}
	h.demand += float64(h.arrived) + float64(h.refused.Swap(0))
	h.demand = max(0, h.demand) // sums of huge costs may have wrapped
	h.arrived = 0
	return h.demand
}

package lease

import (
	"context"
	"errors"
	"hash/maphash"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Cache is a node's side of the lease protocol: it admits from leases, gets
// them from a Store, and gives back what it does not use. It is safe for
// concurrent use. Make one with New.
type Cache struct {
	table  table
	clock  clock
	store  Store
	opts   Options
	closed atomic.Bool

	local    Local         // store, if it is one
	patience time.Duration // how long a request waits for the store

	limits atomic.Pointer[snapshot]
	recent atomic.Pointer[terms]

	send struct {
		sync.Mutex
		pending []*holding
		senders int
	}
	waiters sync.Pool // of *waiter
	wheel   wheel
	dog     watchdog
	rtt     atomic.Int64 // smoothed round trip, nanoseconds
	ledger  ledger
	counts  counts

	random  func() float64  // jitter, 0 to 1
	driver  Driver          // of a Stepped cache
	base    context.Context // ends when Close gives up; parent of every call
	giveUp  context.CancelFunc
	done    chan struct{} // closed by Close: stops the ticker
	running sync.WaitGroup
}

// New returns a Cache that leases from store. Problems of opts, and of limits
// if it is a Limit, come back together. Close it to return its leases.
func New(store Store, limits Limits, opts Options) (*Cache, error) {
	return newCache(store, limits, opts, false)
}

func newCache(store Store, limits Limits, opts Options, stepped bool) (*Cache, error) {
	opts.setDefaults()
	err := opts.validate()
	if store == nil {
		err = errors.Join(err, errors.New("lease: store is nil"))
	}
	c := &Cache{store: store, opts: opts, done: make(chan struct{})}
	first, limitsErr := newSnapshot(limits, opts.Version, opts.LeasePeriod)
	if err = errors.Join(err, limitsErr); err != nil {
		return nil, err
	}
	c.limits.Store(first)
	c.patience = opts.Timeout
	if c.local, _ = store.(Local); c.local != nil {
		c.patience += grace
	}
	c.table.init()
	c.clock.base, c.clock.stepped = time.Now(), stepped
	c.random = rand.Float64
	c.dog.wall = func() int64 { return time.Now().UnixNano() }
	c.base, c.giveUp = context.WithCancel(context.Background())
	return c, nil
}

// Take decides whether a request of cost n on key may go ahead, and charges it
// if so. A cost of 0 looks without charging. It waits for the store only when
// the node has no tokens and no memory of a refusal, at most Options.Timeout.
//
// The error is never about the store. It is ErrClosed, ErrKey, a *CostError,
// the *LimitError of the key's limit, or ctx's, which is looked at only when
// the request has to wait. With an error the Decision denies.
func (c *Cache) Take(ctx context.Context, key string, n int64) (d Decision, err error) {
	err = c.TakeInto(ctx, key, n, &d)
	return d, err
}

// TakeInto is Take that fills in *d, which must be the zero Decision. A
// Decision is too large for registers, and each function that returns one
// copies it; those that only call this are inlined.
func (c *Cache) TakeInto(ctx context.Context, key string, n int64, d *Decision) error {
	// table.get and decide by hand: the two calls are a tenth of a hit.
	hash := maphash.String(c.table.seed, key)
	s := c.table.shardOf(hash).slots.Load()
	for h := s.head[hash&s.mask].Load(); h != nil; h = h.next.Load() {
		if h.hash != hash || h.key != key {
			continue
		}
		if now := c.clock.coarse.Load(); now < h.spendUntil.Load() && n > 0 {
			if left := h.left.Load() - n; left >= 0 {
				h.admit(d, now, left)
				low := h.low.Load()
				if h.left.CompareAndSwap(left+n, left) {
					if left <= low || left^(left+n) >= refreshEvery {
						c.afterHit(h, left)
					}
					return nil
				}
			}
		}
		return c.decide(ctx, h, n, d)
	}
	return c.decideNew(ctx, key, n, d)
}

func (c *Cache) decideNew(ctx context.Context, key string, n int64, d *Decision) error {
	h, err := c.holdingOf(key)
	if err != nil {
		return err
	}
	return c.decide(ctx, h, n, d)
}

// decide is the hot path for a holding: one look at the coarse clock, one
// compare-and-swap. It fills in *d, which must be the zero Decision.
func (c *Cache) decide(ctx context.Context, h *holding, n int64, d *Decision) error {
	if now := c.clock.coarse.Load(); now < h.spendUntil.Load() && n > 0 {
		for left := h.left.Load() - n; left >= 0; left = h.left.Load() - n {
			// Filled in before it is true: the swap waits for all earlier stores,
			// so whoever copies *d next does not have to wait for them again.
			h.admit(d, now, left)
			low := h.low.Load()
			if h.left.CompareAndSwap(left+n, left) {
				if left <= low || left^(left+n) >= refreshEvery {
					c.afterHit(h, left)
				}
				return nil
			}
		}
	}
	var err error
	*d, err = c.takeSlow(ctx, h, n, nil)
	return err
}

// afterHit does what few hits have to: keep the clock fresh, refill early.
func (c *Cache) afterHit(h *holding, left int64) {
	c.clock.now()
	if low := h.low.Load(); left <= low && h.low.CompareAndSwap(low, -1) {
		h.mu.Lock()
		h.refill = true
		c.launchLocked(h)
	}
}

// takeSlow decides what no current lease could. With as it decides by those
// terms, not the key's own, should the key be evicted meanwhile.
func (c *Cache) takeSlow(ctx context.Context, h *holding, n int64, as *terms) (Decision, error) {
	if err := c.renew(h); err != nil {
		return Decision{}, err
	}
	t := h.terms.Load()
	if t.zero && n >= 0 {
		return c.forbidden(t)
	}
	if n < 0 || n > t.limit.Burst {
		return Decision{}, &CostError{Cost: n, Burst: t.limit.Burst}
	}
	// A remembered refusal, before any lock: refused requests are the flood.
	if r := h.denial.Load(); r != nil && n > 0 && h.left.Load() < n && !h.more.Load() {
		now := c.clock.now()
		if retryAt, ok := r.covers(now, n); ok && !c.closed.Load() {
			h.refused.Add(n)
			c.counts.denied.Add(1)
			return h.denied(r.shown, now, retryAt, r.source), nil
		}
	}
	for {
		if err := ctx.Err(); err != nil {
			return Decision{}, err
		}
		h.mu.Lock()
		if h.gone {
			h.mu.Unlock()
			again, err := c.holdingOf(h.key)
			if err != nil {
				return Decision{}, err
			}
			h = again
			continue
		}
		if as != nil && h.terms.Load().limit != as.limit {
			h.changeLocked(as)
		}
		return c.takeLocked(ctx, h, n)
	}
}

// forbidden is the Decision of a limit that denies everything.
func (c *Cache) forbidden(t *terms) (Decision, error) {
	if c.closed.Load() {
		return Decision{}, ErrClosed
	}
	c.counts.denied.Add(1)
	return Decision{Source: SourceLimit, Limit: t.limit, RetryAfter: maxDuration, ResetAfter: maxDuration}, nil
}

// takeLocked decides with h.mu held, and releases it.
func (c *Cache) takeLocked(ctx context.Context, h *holding, n int64) (Decision, error) {
	if c.closed.Load() {
		h.mu.Unlock()
		return Decision{}, ErrClosed
	}
	now := c.clock.now()
	h.touched = now
	h.settleLocked(c, now)
	if n > 0 && h.queue.len == 0 {
		if left, ok := h.takeLocked(c, now, n); ok {
			low := h.low.Load()
			h.mu.Unlock()
			if left <= low {
				c.afterHit(h, left)
			}
			var d Decision
			h.admit(&d, now, left)
			return d, nil
		}
	}
	if n > 0 {
		r := h.denial.Load()
		if retryAt, ok := r.covers(now, n); ok {
			h.arrived += n
			d := h.denied(r.shown, now, retryAt, r.source)
			h.mu.Unlock()
			c.counts.denied.Add(1)
			return d, nil
		}
	}
	if now < h.failUntil || h.queue.len >= c.opts.MaxWaiters {
		h.mu.Unlock()
		return c.withoutStore(h, n), nil
	}
	w := c.newWaiter(n)
	h.queue.push(w)
	h.arrived += n
	c.launchLocked(h)
	return c.await(ctx, h, w)
}

// await waits for w's decision, its context or the timeout.
func (c *Cache) await(ctx context.Context, h *holding, w *waiter) (Decision, error) {
	if c.wait(ctx, w) {
		return c.finished(h, w)
	}
	n := w.n // w is somebody else's once it is back in the pool
	h.mu.Lock()
	if w.decided {
		h.mu.Unlock()
		<-w.done
		return c.finished(h, w)
	}
	if !w.aboard {
		h.queue.remove(w)
		h.mu.Unlock()
		c.waiters.Put(w)
	} else {
		// Aboard: its tokens are spent in the store already, if it has any. The
		// reply finds nobody and drops w; it must not go back to the pool.
		w.gone = true
		h.mu.Unlock()
	}
	if err := ctx.Err(); err != nil {
		return Decision{}, err
	}
	return c.withoutStore(h, n), nil
}

// wait reports whether w was decided before ctx or its patience ended.
func (c *Cache) wait(ctx context.Context, w *waiter) (decided bool) {
	if c.clock.stepped {
		return c.driver.Wait(ctx, w.done, c.patience)
	}
	if w.timer == nil {
		w.timer = time.NewTimer(c.patience)
	} else {
		w.timer.Reset(c.patience)
	}
	defer w.timer.Stop()
	select {
	case <-w.done:
		return true
	case <-ctx.Done():
	case <-w.timer.C:
	}
	return false
}

func (c *Cache) finished(h *holding, w *waiter) (Decision, error) {
	d, n := w.decision, w.n
	c.waiters.Put(w)
	switch d.Source {
	case SourceNone:
		if c.closed.Load() {
			return Decision{}, ErrClosed
		}
		return c.withoutStore(h, n), nil
	default:
		if !d.Allowed {
			c.counts.denied.Add(1)
		}
		return d, nil
	}
}

// withoutStore decides a request of cost n that the store did not decide in
// time: by what this node may admit by itself, or else by the limit's policy.
func (c *Cache) withoutStore(h *holding, n int64) Decision {
	if h.terms.Load().zero {
		d, _ := c.forbidden(h.terms.Load()) // since it waits
		return d
	}
	if c.local == nil {
		return c.onFailure(h)
	}
	now := c.clock.now()
	h.mu.Lock()
	call := h.callLocked(c, now)
	h.mu.Unlock()
	call.Need, call.Bound, call.Want = n, n, n
	answer := c.local.Local(call)
	if answer.Grant.Source == SourceNone {
		return c.onFailure(h)
	}
	c.counts.failed.Add(1)
	g := &answer.Grant
	t := h.terms.Load().shareOf(g)
	if d := (Decision{}); g.Tokens >= n && g.Remaining+n > 0 {
		c.ledger.granted.Add(g.Tokens)
		c.ledger.spent.Add(g.Tokens)
		t.admit(&d, g.Remaining)
		return d
	}
	c.counts.denied.Add(1)
	d := Decision{Source: g.Source, Limit: t.limit, Remaining: g.Remaining, RetryAfter: max(1, g.RetryAfter)}
	d.ResetAfter = max(d.RetryAfter, t.timeFor(t.full-d.Remaining))
	return d
}

// onFailure is the Decision of the limit's OnFailure.
func (c *Cache) onFailure(h *holding) Decision {
	c.counts.failed.Add(1)
	t := h.terms.Load()
	d := Decision{Allowed: t.limit.OnFailure == Allow, Source: SourcePolicy, Limit: t.limit}
	d.ResetAfter = t.timeFor(t.limit.Burst)
	if !d.Allowed {
		c.counts.denied.Add(1)
		d.RetryAfter = c.opts.Timeout
		d.ResetAfter = max(d.ResetAfter, d.RetryAfter)
	}
	return d
}

// holdingOf returns key's holding, made if need be with the limit that limits
// tell.
func (c *Cache) holdingOf(key string) (*holding, error) { return c.holdingAs(key, nil) }

// holdingAs is holdingOf with terms for a holding that has to be made.
func (c *Cache) holdingAs(key string, t *terms) (*holding, error) {
	if key == "" {
		return nil, ErrKey
	}
	if c.closed.Load() {
		return nil, ErrClosed
	}
	if h := c.table.get(key); h != nil {
		return h, nil
	}
	of := c.limits.Load()
	if t == nil {
		var err error
		if t, err = c.termsFor(of, key); err != nil {
			return nil, err
		}
	}
	c.makeRoom()
	return c.table.getOrAdd(key, func(hash uint64) *holding {
		// A copy: the caller's may be a part of a large request.
		h := &holding{key: strings.Clone(key), hash: hash, lastEpoch: -1}
		h.low.Store(-1)
		h.of.Store(of)
		h.terms.Store(t)
		h.shown.Store(t)
		h.touched = c.clock.now()
		return h
	}), nil
}

// termsOf prepares a limit. Keys mostly share a few limits, so the one prepared
// last is tried first.
func (c *Cache) termsOf(l Limit, version int64) (*terms, error) {
	if t := c.recent.Load(); t != nil && t.limit == l && t.version == version {
		return t, nil
	}
	t, err := newTerms(l, version, c.opts.LeasePeriod)
	if err != nil {
		return nil, err
	}
	c.recent.Store(t)
	return t, nil
}

// TakeLimit is Take with key's limit set to l from now on, on this node at
// once and in the bucket with the next call. The bucket keeps its tokens, up
// to l's burst; it is not refilled. An l that denies everything denies this
// request and changes nothing.
func (c *Cache) TakeLimit(ctx context.Context, key string, l Limit, n int64) (d Decision, err error) {
	h := c.table.get(key)
	if h != nil && h.terms.Load().limit == l {
		err = c.decide(ctx, h, n, &d)
		return d, err
	}
	t, err := c.termsOf(l, c.limits.Load().version)
	if err != nil {
		return Decision{}, err
	}
	if key == "" {
		return Decision{}, ErrKey
	}
	if n < 0 || n > l.Burst && !t.zero {
		return Decision{}, &CostError{Cost: n, Burst: l.Burst}
	}
	if t.zero {
		return c.forbidden(t)
	}
	if h, err = c.holdingAs(key, t); err != nil {
		return Decision{}, err
	}
	h.mu.Lock()
	if !h.gone && h.terms.Load().limit != l {
		h.changeLocked(t)
	}
	h.asked = true
	h.mu.Unlock()
	return c.takeSlow(ctx, h, n, t)
}

// changeLocked puts t in force on this node. What the old limit refused may be
// admitted now; what it granted stays granted.
func (h *holding) changeLocked(t *terms) {
	if h.shown.Load() == h.terms.Load() {
		h.shown.Store(t)
	}
	h.terms.Store(t)
	h.denial.Store(nil)
	h.paceUntil = 0
	h.lastWant = 0
}

// Handle is a key whose holding is already looked up. It is safe for
// concurrent use and never goes stale.
type Handle struct {
	c   *Cache
	key string
	h   atomic.Pointer[holding]
}

// Handle returns a handle on key, or ErrKey, ErrClosed or its limit's error.
func (c *Cache) Handle(key string) (*Handle, error) {
	h, err := c.holdingOf(key)
	if err != nil {
		return nil, err
	}
	handle := &Handle{c: c, key: key}
	handle.h.Store(h)
	return handle, nil
}

// Take is Cache.Take for the handle's key.
func (k *Handle) Take(ctx context.Context, n int64) (d Decision, err error) {
	err = k.TakeInto(ctx, n, &d)
	return d, err
}

// TakeInto is Cache.TakeInto for the handle's key.
func (k *Handle) TakeInto(ctx context.Context, n int64, d *Decision) error {
	h := k.h.Load()
	// An evicted holding has no lease, so a hit need not look.
	if k.c.clock.coarse.Load() >= h.spendUntil.Load() && h.evicted.Load() {
		again, err := k.c.holdingOf(k.key)
		if err != nil {
			return err
		}
		k.h.Store(again)
		h = again
	}
	return k.c.decide(ctx, h, n, d)
}

// grace is how much longer than Timeout a request waits for a Local, whose
// answer for a call in flight is due at Timeout.
const grace = 2 * time.Millisecond

const maxDuration = time.Duration(1<<63 - 1)

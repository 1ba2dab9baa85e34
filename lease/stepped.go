package lease

import (
	"context"
	"math"
	"math/rand/v2"
	"time"
)

// Stepped is a Cache in virtual time: it has no goroutine, its clock is where
// Advance put it, and a call to the store is made and answered within Take, or by
// a Driver. It is the same code otherwise, for simulation and replay. Not for
// concurrent use.
type Stepped struct {
	*Cache
}

// Driver runs what a Cache has goroutines for, and waits when they do. It may have
// several functions under way as long as one of them runs at a time.
type Driver interface {
	// Go runs f, sooner or later.
	Go(f func())
	// Wait returns true once it has received from done, which may be closed, or
	// false: at once, when d is over, or when ctx ends.
	Wait(ctx context.Context, done <-chan struct{}, d time.Duration) bool
}

// alone is the Driver of a Cache whose store answers within the call.
type alone struct{}

func (alone) Go(f func()) { f() }

func (alone) Wait(context.Context, <-chan struct{}, time.Duration) bool { return false }

// NewStepped returns a Stepped at time 0. See New; Timeout is a minute by default.
func NewStepped(store Store, limits Limits, opts Options) (Stepped, error) {
	if opts.Timeout == 0 {
		opts.Timeout = time.Minute // real time, which virtual time does not wait for
	}
	c, err := newCache(store, limits, opts, true)
	if err != nil {
		return Stepped{}, err
	}
	c.driver = alone{}
	c.dog.wall = func() int64 { return c.clock.coarse.Load() + c.clock.asleep }
	s := Stepped{c}
	s.Seed(2) // the same run each time
	s.Watch()
	return s, nil
}

// Drive has d run what the node does. Before the first use.
func (s Stepped) Drive(d Driver) { s.driver = d }

// Seed makes the jitter of this node another than other nodes'. Two runs with the
// same seeds are the same.
func (s Stepped) Seed(seed uint64) { s.random = rand.New(rand.NewPCG(1, seed)).Float64 }

// Advance moves the clock to now, the time since the start, and makes the
// visits to leases that are due. Going back in time does nothing.
func (s Stepped) Advance(now time.Duration) {
	if int64(now) > s.clock.coarse.Load() {
		s.clock.coarse.Store(int64(now))
	}
	s.visitDue(s.clock.now())
}

// Next returns when Advance next has a visit to make. A simulation that moves
// on in one step past it would make the visit late.
func (s Stepped) Next() (at time.Duration, ok bool) {
	w := &s.wheel
	w.Lock()
	defer w.Unlock()
	if w.waiting == 0 {
		return 0, false
	}
	for n := w.at + 1; ; n++ {
		if len(w.slot[n%wheelSlots]) > 0 {
			return time.Duration(n) * wheelSlot, true
		}
	}
}

// Sleep has the machine sleep for d: the wall clock moves on, and the node's, which
// is monotonic, does not.
func (s Stepped) Sleep(d time.Duration) { s.clock.asleep += int64(d) }

// Watch looks whether the machine slept, as a Cache does every millisecond.
func (s Stepped) Watch() { s.watch(s.clock.now()) }

// Held returns the store's tokens that the node may still spend on key: on lease,
// and kept of requests that left, which the store has booked as spent.
func (s Stepped) Held(key string) (leased, kept int64) {
	h := s.table.get(key)
	if h == nil {
		return 0, 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.settleLocked(s.Cache, s.clock.now())
	current := h.current
	current.tokens = h.left.Load()
	for _, b := range append([]batch{current}, h.later...) {
		switch {
		case b.shown != nil: // granted by this node itself
		case b.epoch == uncounted:
			kept += b.tokens
		default:
			leased += b.tokens
		}
	}
	return leased, kept
}

// Evict makes the node forget key, as to make room for others, and give back what
// it holds. It reports whether it could: not while a request waits.
func (s Stepped) Evict(key string) bool {
	now := s.clock.now()
	h := s.table.evict(math.MaxInt, func(h *holding) bool { return h.key == key && s.evictable(h, now, 0, true) })
	if h == nil {
		return false
	}
	s.evicted(h)
	return true
}

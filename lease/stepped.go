package lease

import (
	"math/rand/v2"
	"time"
)

// Stepped is a Cache in virtual time: it has no goroutine, its clock is where
// Advance put it, and a call to the store is made and answered within Take. It
// is the same code otherwise, for simulation and replay. Not for concurrent
// use.
type Stepped struct {
	*Cache
}

// NewStepped returns a Stepped at time 0. See New; Timeout is a minute by default.
func NewStepped(store Store, limits Limits, opts Options) (Stepped, error) {
	if opts.Timeout == 0 {
		opts.Timeout = time.Minute // real time, which virtual time does not wait for
	}
	c, err := newCache(store, limits, opts, true)
	return Stepped{c}, err
}

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

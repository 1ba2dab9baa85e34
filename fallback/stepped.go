package fallback

import (
	"math/rand/v2"
	"slices"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Stepped is a Store without goroutines, for simulation: what it has to do by
// itself, such as probing, Step does. Its clock is time.Now all the same, for its
// breaker's is; run it in a testing/synctest bubble. Not for concurrent use.
type Stepped struct {
	*Store
}

// NewStepped returns a Stepped. Two with the same seed do the same. See New.
func NewStepped(primary lease.Store, opts Options, seed uint64) (Stepped, error) {
	s, err := New(primary, opts)
	if err != nil {
		return Stepped{}, err
	}
	s.stepped = true
	s.random = rand.New(rand.NewPCG(2, seed)).Float64
	return Stepped{s}, nil
}

// Step does what is due.
func (s Stepped) Step() {
	for {
		s.mu.Lock()
		var next *recovery
		for _, r := range s.recoveries {
			if !r.due.After(time.Now()) && (next == nil || r.due.Before(next.due)) {
				next = r
			}
		}
		s.mu.Unlock()
		if next == nil {
			return
		}
		wait, more := next.step(s.Store)
		next.due = time.Now().Add(max(wait, 1))
		if !more {
			s.mu.Lock()
			s.recoveries = slices.DeleteFunc(s.recoveries, func(r *recovery) bool { return r == next })
			s.mu.Unlock()
		}
	}
}

// Next returns when Step next has something to do.
func (s Stepped) Next() (at time.Time, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.recoveries {
		if !ok || r.due.Before(at) {
			at, ok = r.due, true
		}
	}
	return at, ok
}

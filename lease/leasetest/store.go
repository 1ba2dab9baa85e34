// Package leasetest holds what proves a lease.Store and the nodes on it: an
// exact in-memory Store, the acceptance suite TestStore that every Store
// passes, and the oracles that judge a run: level, ledger, promise and call
// budget. Only tests import it.
package leasetest

import (
	"context"
	"fmt"
	"maps"
	"math"
	"sync"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Store is the lease protocol's store in memory: exact, and at the time it is
// told. Safe for concurrent use.
type Store struct {
	// KeepExpired keeps keys past their expiry, for comparison with a server
	// whose own clock expires them.
	KeepExpired bool

	now func() time.Duration

	mu      sync.Mutex
	buckets map[string]*Bucket
	windows map[windowKey]*Window
	calls   int64
	granted map[string]int64
}

// windowKey is why a key has a state for each algorithm that counts in windows.
type windowKey struct {
	key       string
	algorithm lease.Algorithm
}

// NewStore returns an empty Store whose clock is now, the time since any
// instant. Let it start late enough that epochs of different lengths never have
// near numbers (an hour will do).
func NewStore(now func() time.Duration) *Store {
	return &Store{now: now, buckets: map[string]*Bucket{}, windows: map[windowKey]*Window{}, granted: map[string]int64{}}
}

// Acquire implements lease.Store.
func (s *Store) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	answers := make([]lease.Answer, len(calls))
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, c := range calls {
		if err := ctx.Err(); err != nil {
			answers[i].Err = fmt.Errorf("%w: %w", lease.ErrNotExecuted, err)
			continue
		}
		s.calls++
		g := s.applyLocked(c)
		g.Source = lease.SourceStore
		s.granted[c.Key] += g.Tokens
		answers[i].Grant = g
	}
	return answers
}

func (s *Store) applyLocked(c lease.Call) lease.Grant {
	now := s.now().Microseconds()
	if c.Limit.Algorithm.Windowed() {
		at := windowKey{c.Key, c.Limit.Algorithm}
		w := s.windows[at]
		if w == nil {
			w = &Window{}
			s.windows[at] = w
		}
		if s.KeepExpired && w.meter != nil {
			w.expires = math.MaxInt64
		}
		return w.Apply(now, c)
	}
	b := s.buckets[c.Key]
	if b == nil {
		b = &Bucket{}
		s.buckets[c.Key] = b
	}
	if s.KeepExpired && b.exists {
		b.expires = math.MaxInt64
	}
	return b.Apply(now, c)
}

// Calls returns how many calls were carried out.
func (s *Store) Calls() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

// Granted returns the tokens granted so far for each key.
func (s *Store) Granted() map[string]int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.granted)
}

// Bucket returns a copy of key's bucket as of now.
func (s *Store) Bucket(key string) Bucket {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b := s.buckets[key]; b != nil {
		b := *b
		if now := s.now().Microseconds(); b.Exists(now) {
			b.advance(now)
		}
		return b
	}
	return Bucket{}
}

// Window returns a copy of key's state under an algorithm with windows, as last
// changed.
func (s *Store) Window(key string, a lease.Algorithm) Window {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.windows[windowKey{key, a}]; w != nil {
		return w.copy()
	}
	return Window{}
}

// Flush forgets every key, as FLUSHALL does.
func (s *Store) Flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.buckets)
	clear(s.windows)
}

// Evict forgets key, as a server short of memory does.
func (s *Store) Evict(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.buckets, key)
	for at := range s.windows {
		if at.key == key {
			delete(s.windows, at)
		}
	}
}

// Save returns what the store holds, as a replica has it, for Load.
func (s *Store) Save() map[string]Bucket {
	s.mu.Lock()
	defer s.mu.Unlock()
	saved := make(map[string]Bucket, len(s.buckets))
	for key, b := range s.buckets {
		saved[key] = *b
	}
	return saved
}

// Load replaces what the store holds by what was saved, as a fail-over does to a
// replica that lags behind.
func (s *Store) Load(saved map[string]Bucket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.buckets)
	for key, b := range saved {
		s.buckets[key] = &b
	}
}

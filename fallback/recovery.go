package fallback

import (
	"time"
)

// recovery is what is left to do about a shard that went down: to probe it until
// it answers, to charge it with what was admitted meanwhile, also for keys that
// nobody asks for any more, and to drop shares that have nothing to remember.
type recovery struct {
	shard *shard
	stage stage
	life  int64     // of the shard, once it is up: another one has its own recovery
	looks int       // at the shard, since it was up
	due   time.Time // in a Stepped store
}

// unattended is no shard's life.
const unattended = -1

// attend sees to it that what sh's keys owe is charged, though sh is up: a request
// may be decided by a share all the same, if it waited too long.
func (s *Store) attend(sh *shard) {
	life := sh.life.Load()
	old := sh.attended.Load()
	if old == life || sh.down.Load() || !sh.attended.CompareAndSwap(old, life) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.closed {
		s.begin(&recovery{shard: sh, stage: watching, life: life})
	}
}

type stage uint8

const (
	waiting stage = iota
	probing
	watching
)

// begin starts a recovery. Holds s.mu.
func (s *Store) begin(r *recovery) {
	if s.stepped {
		r.due = time.Now()
		s.recoveries = append(s.recoveries, r)
		return
	}
	s.running.Go(func() {
		for more := true; more; {
			var wait time.Duration
			if wait, more = r.step(s); more && !s.sleep(wait) {
				return
			}
		}
	})
}

// step does what comes next, and returns how long to wait before the step after
// it; more is false when nothing is left.
func (r *recovery) step(s *Store) (wait time.Duration, more bool) {
	sh := r.shard
	switch {
	case r.stage == waiting:
		r.stage = probing
		return s.jitter(sh.pause), true
	case r.stage == probing && !s.probe(sh):
		wait = s.jitter(sh.pause)
		sh.pause = min(2*sh.pause, s.opts.Backoff)
		return wait, true
	case r.stage == probing:
		r.life, r.stage = s.up(sh), watching
		return 0, true
	case sh.life.Load() != r.life:
		return 0, false
	}
	if took, more := s.charge(s.alive, sh); more {
		return max(time.Millisecond, chargeRest*took), true
	}
	if r.looks++; r.looks%sweepEvery == 0 {
		s.shares.sweep(time.Now())
	}
	if s.shares.len() > 0 {
		return watchEvery, true
	}
	sh.attended.CompareAndSwap(r.life, unattended)
	return 0, s.shares.len() > 0 && sh.attended.CompareAndSwap(unattended, r.life)
}

// jitter returns pause and up to half of it more.
func (s *Store) jitter(pause time.Duration) time.Duration {
	return time.Duration(float64(pause)*(1+s.random()/2)) + time.Millisecond
}

// sleep waits for d; ok is false if the Store was closed meanwhile.
func (s *Store) sleep(d time.Duration) (ok bool) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-s.alive.Done():
		return false
	}
}

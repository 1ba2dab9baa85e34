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
	pause time.Duration // before the next probe
	life  int64         // of the shard, once it is up: another one has its own recovery
	due   time.Time     // in a Stepped store
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
		s.begin(&recovery{shard: sh, stage: charging, life: life})
	}
}

type stage uint8

const (
	probing stage = iota
	charging
	sweeping
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
	if r.stage != probing && r.shard.life.Load() != r.life {
		return 0, false
	}
	switch r.stage {
	case probing:
		if !s.probe(r.shard) {
			wait = time.Duration(float64(r.pause)*(1+s.random()/2)) + time.Millisecond
			r.pause = min(2*r.pause, s.opts.Backoff)
			return wait, true
		}
		r.life = s.up(r.shard)
		r.stage = charging
		return 0, true
	case charging:
		start := time.Now()
		if s.shares.owing() && s.charge(s.alive, r.shard) {
			return max(time.Millisecond, chargeRest*time.Since(start)), true
		}
		r.stage = sweeping
		return sweepEvery, true
	default:
		s.shares.sweep(time.Now())
		if s.shares.len() > 0 {
			r.stage = charging // of what was admitted meanwhile
			return sweepEvery, true
		}
		r.shard.attended.CompareAndSwap(r.life, unattended)
		return 0, s.shares.len() > 0 && r.shard.attended.CompareAndSwap(unattended, r.life)
	}
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

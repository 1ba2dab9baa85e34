package fallback

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sony/gobreaker/v2"

	"github.com/hybridlimit/hybridlimit/lease"
)

const (
	// firstBackoff is the pause after the first probe that failed. The breaker
	// allows a probe as soon; longer pauses are made here.
	firstBackoff = 25 * time.Millisecond
	// slowFor is how long answers have to be slow before they count as failures,
	// and slowCalls how many.
	slowFor   = time.Second
	slowCalls = 5
	// slowAtLeast is half the usual lease period.
	slowAtLeast = 125 * time.Millisecond
	// rampFrom is the part of the calls that go to the primary as soon as the
	// breaker closed.
	rampFrom = 0.1
)

var (
	// errNeutral is no verdict on the server.
	errNeutral = errors.New("fallback: says nothing about the server")
	errSlow    = errors.New("fallback: server is slow")
)

// shard is one server of the primary, and whether to ask it.
type shard struct {
	breaker *gobreaker.TwoStepCircuitBreaker[struct{}]
	// state is the breaker's, as its hook saw it last. The hook runs under the
	// breaker's lock: to ask the breaker there would be a deadlock.
	state atomic.Int32
	// down is set by the first failure, before the breaker opens: from then on
	// nobody waits for the server but its one probe.
	down atomic.Bool
	// life counts ups and downs, so that a late failure of an earlier life is
	// not held against this one.
	life atomic.Int64
	// attended is the life for which there is a recovery; unattended for none.
	attended atomic.Int64
	// failed is when a call failed last, in nanoseconds since Store.base.
	failed atomic.Int64
	ramp   atomic.Int64 // when the breaker closed, in nanoseconds since Store.base; 0: long ago

	pause time.Duration // before the next probe; the recovery's alone
	upAt  time.Time     // when it was last up; guarded by Store.mu

	mu        sync.Mutex
	template  lease.Call // the call to probe with
	seen      time.Time  // when it was made
	slowSince time.Time
	slow      atomic.Int64 // answers in a row; changed under mu but for the reset
}

func (s *Store) newShard() *shard {
	sh := &shard{}
	sh.attended.Store(unattended)
	sh.breaker = gobreaker.NewTwoStepCircuitBreaker[struct{}](gobreaker.Settings{
		MaxRequests: 1,
		Timeout:     firstBackoff,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= uint32(s.opts.Failures) },
		OnStateChange: func(_ string, from, to gobreaker.State) {
			sh.state.Store(int32(to))
			if from == gobreaker.StateClosed {
				s.counts.trips.Add(1)
			}
		},
		IsExcluded: func(err error) bool { return errors.Is(err, errNeutral) },
	})
	return sh
}

// shardOf returns key's shard.
func (s *Store) shardOf(key string) *shard {
	name := s.opts.Shard(key)
	if sh, ok := s.shards.Load(name); ok {
		return sh.(*shard)
	}
	sh, _ := s.shards.LoadOrStore(name, s.newShard())
	return sh.(*shard)
}

// ticket is the permission to ask a shard, to be given back with the outcome.
type ticket struct {
	shard *shard
	done  func(error)
	life  int64
	err   error // the worst outcome so far
	well  bool  // some call was answered
}

// asks reports whether a call may go to the server now. Those that ask for no
// tokens are no part of the ramp: nothing can stand in for them.
func (sh *shard) asks(s *Store, call *lease.Call, now time.Time) bool {
	if sh.down.Load() || s.alive.Err() != nil {
		return false
	}
	from := sh.ramp.Load()
	if from == 0 || call.Want == 0 {
		return true
	}
	part := float64(now.Sub(s.base)-time.Duration(from)) / float64(s.opts.Ramp)
	if part >= 1 {
		sh.ramp.CompareAndSwap(from, 0)
		return true
	}
	return s.random() < rampFrom+(1-rampFrom)*part
}

// open returns a ticket; ok is false if the breaker has none.
func (sh *shard) open() (t ticket, ok bool) {
	done, err := sh.breaker.Allow()
	return ticket{shard: sh, done: done, life: sh.life.Load()}, err == nil
}

// close judges the server by what became of the ticket's calls.
func (t *ticket) close(s *Store) {
	if t.err != nil && t.life != t.shard.life.Load() {
		t.err = errNeutral // of an earlier life
	}
	t.done(t.err)
	if t.err == nil || errors.Is(t.err, errNeutral) {
		return
	}
	s.fail(t.shard, t.err)
}

// fail takes sh down, for err, and has it probed until it is up again.
func (s *Store) fail(sh *shard, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !sh.down.CompareAndSwap(false, true) {
		return
	}
	s.cause = err
	sh.life.Add(1)
	sh.failed.Store(int64(time.Since(s.base)))
	if s.down == 0 {
		s.downSince = time.Now()
	}
	s.down++
	r := &recovery{shard: sh, stage: probing}
	if sh.pause > 0 && time.Since(sh.upAt) < s.opts.Ramp {
		// Probes are answered and calls are not: go on from where it was.
		r.stage, sh.pause = waiting, min(2*sh.pause, s.opts.Backoff)
	} else {
		sh.pause = firstBackoff
	}
	s.begin(r)
}

// up puts sh into use again, little by little if its breaker was open, and
// returns its new life.
func (s *Store) up(sh *shard) (life int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down--; s.down == 0 {
		s.downFor += time.Since(s.downSince)
		s.shares.forgot.Store(false)
	}
	sh.upAt = time.Now()
	if sh.pause > firstBackoff {
		sh.ramp.Store(max(1, int64(time.Since(s.base))))
	}
	sh.slow.Store(0)
	life = sh.life.Add(1)
	sh.attended.Store(life)
	sh.down.Store(false)
	return life
}

// remember keeps call to probe with: the latest has the limit in force.
func (sh *shard) remember(call *lease.Call, now time.Time) {
	sh.mu.Lock()
	sh.template, sh.seen = *call, now
	sh.mu.Unlock()
}

// probe makes one call to sh and reports whether it was answered in good time.
// It is a call that the script has to write for, as a replica or a full server
// cannot, but that asks for more than there can be, so it takes nothing.
func (s *Store) probe(sh *shard) bool {
	t, ok := sh.open()
	if !ok {
		return false
	}
	sh.mu.Lock()
	call, age := bare(&sh.template), time.Since(sh.seen)
	sh.mu.Unlock()
	if call.Hint.Known {
		call.Hint.Age += age
	}
	call.Need = call.Limit.Burst + 1
	call.Want, call.Demand, call.Share = call.Need, 1, lease.ShareNone
	s.counts.probes.Add(1)
	ctx, cancel := context.WithTimeout(s.alive, s.opts.Timeout)
	defer cancel()
	start := time.Now()
	answers := s.ask(ctx, []lease.Call{call})
	t.take(s.verdict(ctx, start, answers[0].Err))
	if t.err == nil && time.Since(start) > s.tooLong() {
		t.err = errSlow
	}
	t.done(t.err)
	if t.err != nil {
		sh.failed.Store(int64(start.Sub(s.base)))
	}
	return t.err == nil
}

// failedAt returns when sh's server last failed to answer. As far as this node
// knows nobody used it in this life up to then.
func (s *Store) failedAt(sh *shard) time.Time { return s.base.Add(time.Duration(sh.failed.Load())) }

// bare returns what call says about its key, without what it asks or tells.
func bare(call *lease.Call) lease.Call {
	return lease.Call{
		Key: call.Key, Limit: call.Limit, Version: call.Version, Count: call.Count, PerUS: call.PerUS,
		TTL: call.TTL, Hint: call.Hint, LastEpoch: -1,
	}
}

// take takes in one verdict: a failure outweighs an answer, and that outweighs
// what says nothing.
func (t *ticket) take(verdict error) {
	switch {
	case verdict == nil:
		t.well = true
		if errors.Is(t.err, errNeutral) {
			t.err = nil
		}
	case errors.Is(verdict, errNeutral):
		if t.err == nil && !t.well {
			t.err = errNeutral
		}
	default:
		t.err = verdict
	}
}

// verdict tells what err says about the server: nil if it is well, errNeutral if
// nothing.
func (s *Store) verdict(ctx context.Context, start time.Time, err error) error {
	switch {
	case err == nil, errors.Is(err, lease.ErrRejected):
		return nil
	case errors.Is(err, lease.ErrOverloaded):
		return errNeutral
	case errors.Is(ctx.Err(), context.Canceled):
		return errNeutral
	case ctx.Err() != nil && time.Since(start) < s.opts.Timeout*9/10:
		return errNeutral // the caller has less time than the server is given
	}
	return err
}

// tooLong is how long an answer takes that counts as slow. A lease period below
// that is no reason to do without the server: each round trip then serves all who
// wait, and the limit is exact.
func (s *Store) tooLong() time.Duration { return max(s.opts.Period/2, slowAtLeast) }

// late takes in how long the server took, and reports whether it has been slow
// for too long.
func (sh *shard) late(s *Store, now time.Time, took time.Duration) bool {
	if took <= s.tooLong() {
		sh.slow.Store(0)
		return false
	}
	sh.mu.Lock()
	defer sh.mu.Unlock()
	slow := sh.slow.Add(1)
	if slow == 1 {
		sh.slowSince = now
	}
	return slow >= slowCalls && now.Sub(sh.slowSince) >= slowFor
}

package fallback

import (
	"context"
	"errors"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

const (
	// chargeBatch is how many debts go in one call of the primary.
	chargeBatch = 128
	// chargeRest is how long to rest after such a call, in its own duration: a
	// thousand nodes come back at once.
	chargeRest = 10
	// sweepEvery is how often shares that have nothing to remember are dropped
	// once the primary is back.
	sweepEvery = 10 * time.Second
)

// owe adds to a call that goes to the primary what its share owes, and returns
// the share, nil if there is none. settled ends it.
func (s *Store) owe(call *lease.Call, now time.Time) *share {
	hint := call.Hint
	call.Hint = lease.Hint{}
	sh := s.shares.get(call.Key)
	if sh == nil {
		return nil
	}
	defer sh.mu.Unlock()
	if sh.limiter == nil {
		return nil
	}
	if sh.outage {
		call.Hint = hint
	}
	sh.forgive(s, s.idleUntil(s.shardOf(call.Key)))
	now = sh.pass(s, now)
	sh.report(s, call.Own)
	sh.fit(now)
	call.Own = [2]lease.Report{}
	if sh.charging > 0 {
		return nil // somebody else is at it
	}
	sh.charging = sh.admitted
	call.Debt += sh.charging
	return sh
}

// settled takes in what became of the call that owe prepared. A debt of which
// nobody knows whether it was charged is owed on: twice is on the safe side.
func (s *Store) settled(sh *share, err error) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if err == nil {
		sh.admitted -= sh.charging
		s.counts.charged.Add(sh.charging)
		sh.outage = false
	}
	sh.charging = 0
}

// charge makes one call for debts to the server of sh, or to any if it is nil.
// It reports whether there may be more to charge.
func (s *Store) charge(ctx context.Context, sh *shard) (more bool) {
	var (
		calls []lease.Call
		owing []*share
		now   = time.Now()
	)
	for _, call := range s.shares.debts(chargeBatch, func(key string) bool { return sh == nil || s.shardOf(key) == sh }) {
		if owes := s.owe(&call, now); owes != nil {
			calls, owing = append(calls, call), append(owing, owes)
		}
	}
	if len(calls) == 0 {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	answers := s.primary.Acquire(ctx, calls)
	more = true
	for i, owes := range owing {
		err := errors.New("fallback: no answer")
		if i < len(answers) {
			err = answers[i].Err
		}
		s.settled(owes, err)
		more = more && err == nil
	}
	return more
}

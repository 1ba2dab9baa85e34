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
	// watchEvery is how often a server that is back is looked after as long as
	// there are shares, and every sweepEvery-th time those go that have nothing to
	// remember.
	watchEvery = time.Second
	sweepEvery = 10
)

// owe adds to a call that goes to the primary what its share owes, and returns
// the share, nil if there is none. settled ends it.
func (s *Store) owe(call *lease.Call, server *shard, now time.Time) *share {
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
	sh.forgive(s, server)
	now = sh.pass(s, now)
	sh.report(s, call.Own)
	sh.fit(now)
	call.Own = [2]lease.Report{}
	if sh.charging > 0 {
		return nil // somebody else is at it
	}
	sh.firm, sh.idle = sh.firm+sh.idle, 0
	sh.charging = sh.firm
	call.Debt += sh.charging
	return sh
}

// settled takes in what became of the call that owe prepared. A debt of which
// nobody knows whether it was charged is owed on: twice is on the safe side. One
// that the store rejects can never be charged.
func (s *Store) settled(sh *share, err error) {
	sh.mu.Lock()
	defer sh.mu.Unlock()
	rejected := errors.Is(err, lease.ErrRejected)
	if err == nil || rejected {
		sh.firm -= sh.charging
		s.shares.owed.Add(-sh.charging)
	}
	switch {
	case err == nil:
		s.counts.charged.Add(sh.charging)
		sh.outage = false
	case rejected:
		s.shares.lost.Add(sh.charging)
	}
	sh.charging = 0
}

// charge makes one call for debts to the server of sh. It returns how long that
// took; more is false if there is nothing to charge now, or
// no answer.
func (s *Store) charge(ctx context.Context, sh *shard) (took time.Duration, more bool) {
	if s.shares.owed.Load() == 0 {
		return 0, false
	}
	var (
		calls []lease.Call
		owing []*share
		now   = time.Now()
	)
	for _, call := range s.shares.debts(chargeBatch, func(key string) bool { return s.shardOf(key) == sh }) {
		if owes := s.owe(&call, sh, now); owes != nil {
			calls, owing = append(calls, call), append(owing, owes)
		}
	}
	if len(calls) == 0 {
		return 0, false
	}
	ctx, cancel := context.WithTimeout(ctx, s.opts.Timeout)
	defer cancel()
	start := time.Now()
	answers := s.ask(ctx, calls)
	took = time.Since(start)
	for i, owes := range owing {
		err := answers[i].Err
		s.settled(owes, err)
		more = more || err == nil || errors.Is(err, lease.ErrRejected)
	}
	return took, more
}

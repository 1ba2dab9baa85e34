package fallback

import (
	"time"

	"github.com/sony/gobreaker/v2"
)

// Stats is what a Store did so far.
type Stats struct {
	// State is the worst of all breakers': "closed", "half-open" or "open".
	State string
	// Degraded is whether some server of the primary is not asked now: from its
	// first failure, before its breaker opens, until a probe was answered.
	Degraded bool
	// Cause is the failure for which a server was last taken down; nil if none was.
	Cause error
	// Shards is how many servers were met so far, Down how many are not asked.
	Shards, Down int
	// Nodes is how many nodes share the limits.
	Nodes int
	// DegradedFor is how long at least one server was down, in all.
	DegradedFor time.Duration
	// Trips counts breakers that opened, Probes the calls to find out whether a
	// server is back.
	Trips, Probes int64
	// Admitted is the tokens granted by shares, less those that came back.
	Admitted int64
	// Denied is the calls that a share could not grant.
	Denied int64
	// Charged is the tokens that the primary was charged with afterwards,
	// Forgiven those that it need not be, for its bucket would have run over, and
	// Owed those still to be charged. Lost were owed by shares that had to go.
	Charged, Forgiven, Owed, Lost int64
	// Keys is how many shares are kept.
	Keys int64
}

// Stats returns the counters. It visits every share: call it as often as metrics
// are scraped, not per request.
func (s *Store) Stats() Stats {
	c := &s.counts
	st := Stats{
		State: gobreaker.StateClosed.String(), Nodes: max(1, s.opts.Nodes()),
		Trips: c.trips.Load(), Probes: c.probes.Load(),
		Admitted: c.admitted.Load() - c.returned.Load(), Denied: c.denied.Load(),
		Charged: c.charged.Load(), Forgiven: c.forgiven.Load(), Owed: s.shares.owed.Load(), Lost: s.shares.lost.Load(),
		Keys: s.shares.len(),
	}
	worst := gobreaker.StateClosed
	s.shards.Range(func(_, v any) bool {
		sh := v.(*shard)
		worst = max(worst, gobreaker.State(sh.state.Load()))
		st.Shards++
		if sh.down.Load() {
			st.Down++
		}
		return true
	})
	st.State, st.Degraded = worst.String(), st.Down > 0
	s.mu.Lock()
	st.DegradedFor, st.Cause = s.downFor, s.cause
	if s.down > 0 {
		st.DegradedFor += time.Since(s.downSince)
	}
	s.mu.Unlock()
	return st
}

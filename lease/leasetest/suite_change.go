package leasetest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// The part of the acceptance suite that is about change: of the limit, of the
// ttl, of the clock, and of a key that goes.

func testNewer(s *subject) {
	s.limit = lease.Limit{Rate: 1e-6, Burst: 100}
	other := lease.Limit{Rate: 5, Burst: 50}
	s.version = 5
	s.take(10, true)
	// An older call is served by the limit in force, and told of it.
	g := s.call(lease.Call{Limit: other, Version: 4, Need: 60, Bound: 60, Want: 60})
	equal(s.t, "tokens of an older call", g.Tokens, 60)
	equal(s.t, "newer", g.Newer, true)
	equal(s.t, "version in force", g.Version, 5)
	equal(s.t, "limit in force", ratio(g.Limit), ratio(s.limit))
	s.look(30, 0)
	// The same version does not change the limit either.
	g = s.call(lease.Call{Limit: other, Version: 5})
	equal(s.t, "newer at the same version", g.Newer, true)
	equal(s.t, "remaining", g.Remaining, 30)
	// A newer one does.
	g = s.call(lease.Call{Limit: other, Version: 6, Need: 1, Bound: 1, Want: 1})
	equal(s.t, "newer for the newest", g.Newer, false)
	equal(s.t, "remaining", g.Remaining, 29)
	s.after(time.Second)
	g = s.call(lease.Call{})
	equal(s.t, "newer for the old one", g.Newer, true)
	equal(s.t, "limit in force", ratio(g.Limit), ratio(other))
	equal(s.t, "remaining at the new rate", g.Remaining, 34)
	// Version 0 is older than any.
	g = s.call(lease.Call{Limit: s.limit, Version: 0, Want: 1})
	equal(s.t, "newer for version 0", g.Newer, true)
	equal(s.t, "version in force", g.Version, 6)
}

// ratio is what of a limit is kept: the burst and the exact rate.
func ratio(l lease.Limit) [3]int64 {
	count, perUS, _ := l.Ratio()
	return [3]int64{l.Burst, count, perUS}
}

func testLatest(s *subject) {
	s.limit = lease.Limit{Rate: 1e-6, Burst: 100}
	other := lease.Limit{Rate: 5, Burst: 50}
	s.take(70, true)
	g := s.call(lease.Call{Limit: other, Want: 1})
	equal(s.t, "newer for the latest", g.Newer, false)
	equal(s.t, "remaining", g.Remaining, 29)
	s.after(time.Second)
	// The second that passed passed at the rate that was in force.
	equal(s.t, "newer for the one after", s.look(34, 1).Newer, false)
	equal(s.t, "reset after", s.call(lease.Call{Limit: other}).ResetAfter, 3200*time.Millisecond)
}

func testRaised(s *subject) {
	s.limit = lease.Limit{Rate: 1e-6, Burst: 10}
	s.take(7, true)
	s.limit.Burst = 1000
	s.look(3, 0)
	s.limit = lease.Limit{Rate: 1000, Burst: 1000}
	s.look(3, 0)
	s.after(100 * time.Millisecond)
	s.call(lease.Call{Want: 1})
	s.after(100 * time.Millisecond)
	CheckAtMost(s.t, "remaining after 200 ms at 1000/s", float64(s.call(lease.Call{}).Remaining), 203)
}

func testLowered(s *subject) {
	s.limit = lease.Limit{Rate: 1e-6, Burst: 1000}
	s.take(200, true)
	s.limit.Burst = 100
	s.take(101, false)
	s.look(100, 0)
	s.take(100, true)
	s.take(1, false)
	s.limit.Burst = 1000
	s.take(1, false)
	// Debt is no deeper than the new burst either.
	s.call(lease.Call{Debt: 1000})
	s.limit = lease.Limit{Rate: 1, Burst: 10}
	equal(s.t, "retry after, in debt", s.take(1, false).RetryAfter, 11*time.Second)
}

func testLoweredLeases(s *subject) {
	s.limit = lease.Limit{Rate: 10, Burst: 1000}
	s.toEpoch()
	g := s.lease(300, 300)
	s.limit.Burst = 350
	s.look(50, 300)
	s.limit.Burst = 100 // less than is out
	s.look(0, 300)
	s.after(time.Second)
	s.look(0, 300)
	// What comes back fills the burst, less what is still out, and no more.
	s.call(lease.Call{Reports: [2]lease.Report{{Epoch: g.Epoch, Spent: 150, Returned: 100}}})
	s.look(50, 50)
	s.call(lease.Call{Reports: [2]lease.Report{{Epoch: g.Epoch, Returned: 50}}})
	if g := s.look(100, 0); g.Created || g.Corrupt {
		s.t.Errorf("created = %v, corrupt = %v after a return: want false, false", g.Created, g.Corrupt)
	}
}

func testTTL(s *subject) {
	s.limit.Rate = 1e-6
	s.toEpoch()
	equal(s.t, "ttl", s.call(lease.Call{TTL: time.Second, Want: 10}).TTL, 950*time.Millisecond)
	// A shorter one is for this lease alone until no lease is out: those that are live
	// go on.
	equal(s.t, "a shorter ttl with a lease out", s.call(lease.Call{TTL: 100 * time.Millisecond, Want: 10}).TTL, 95*time.Millisecond)
	// A longer one counts at once, and for the leases that are out.
	s.after(1900 * time.Millisecond)
	s.look(80, 20)
	long := s.call(lease.Call{TTL: time.Minute, Want: 10})
	equal(s.t, "a longer ttl", long.TTL, 57*time.Second)
	equal(s.t, "its epoch", long.Epoch, int64(s.clock.Now()/time.Minute))
	s.after(30 * time.Second)
	equal(s.t, "outstanding under the longer ttl", s.call(lease.Call{TTL: time.Minute}).Outstanding, 30)
	s.after(2 * time.Minute)
	g := s.call(lease.Call{TTL: 100 * time.Millisecond, Want: 10})
	equal(s.t, "a shorter ttl with none out", g.TTL, 95*time.Millisecond)
	equal(s.t, "outstanding", g.Outstanding, 10)
	s.after(200 * time.Millisecond)
	equal(s.t, "outstanding after it", s.call(lease.Call{TTL: 100 * time.Millisecond}).Outstanding, 0)
}

func testClockBack(s *subject) {
	s.toEpoch()
	s.take(90, true)
	s.lease(10, 10)
	s.after(-time.Hour)
	s.look(0, 10)
	g := s.take(1, false)
	// Nobody waits for the hour to pass again: the refill goes on from here.
	CheckAtMost(s.t, "seconds to wait", g.RetryAfter.Seconds(), 0.1)
	s.after(g.RetryAfter)
	s.take(1, true)
	// The lease counts for at least as long as a node may spend it.
	s.after(950*time.Millisecond - g.RetryAfter)
	equal(s.t, "outstanding while it lives", s.call(lease.Call{}).Outstanding, 10)
	s.after(2 * s.ttl)
	equal(s.t, "outstanding", s.call(lease.Call{}).Outstanding, 0)

	// A call that changes nothing keeps nothing: what had come in by then is not
	// there if the clock goes back after it.
	s.call(lease.Call{Key: "other", Debt: 200})
	s.after(50 * time.Millisecond)
	equal(s.t, "retry after", s.call(lease.Call{Key: "other"}).RetryAfter, 10050*time.Millisecond)
	s.after(-time.Minute)
	equal(s.t, "retry after, the clock gone back", s.call(lease.Call{Key: "other"}).RetryAfter, 10100*time.Millisecond)
}

// testClockBackEpoch steps back over the end of an epoch. Its number must not come
// a second time while reports of the first may: what they tell would be taken off
// leases that are still out.
func testClockBackEpoch(s *subject) {
	s.toEpoch()
	s.after(s.ttl / 2)
	a := s.lease(40, 40)
	s.after(-s.ttl * 11 / 20) // into the epoch before
	s.call(lease.Call{Need: 1, Bound: 1, Want: 1, LastEpoch: -1})
	s.after(s.ttl * 19 / 20)
	b := s.call(lease.Call{Want: 59, LastEpoch: -1, Share: lease.ShareNone})
	if b.Tokens == 0 {
		s.t.Fatalf("grant = %+v: want a second lease", b)
	}
	s.after(s.ttl / 20)
	s.call(lease.Call{Reports: [2]lease.Report{{Epoch: a.Epoch, Spent: 40}}})
	s.after(s.ttl * 17 / 20) // the second lease is live for another tenth
	g := s.call(lease.Call{Want: 100, LastEpoch: -1, Share: lease.ShareNone})
	if out := g.Outstanding; out < b.Tokens+g.Tokens {
		s.t.Errorf("outstanding = %d with leases of %d and %d tokens live: want no less than both", out, b.Tokens, g.Tokens)
	}
}

func testClockAhead(s *subject) {
	s.take(100, true)
	s.after(50 * 365 * 24 * time.Hour)
	s.look(100, 0) // no more than the burst
	s.lease(100, 100)
	s.after(50 * 365 * 24 * time.Hour)
	s.look(100, 0)
}

func testLook(s *subject) {
	for range 3 {
		equal(s.t, "created by a look", s.look(100, 0).Created, true)
	}
	g := s.call(lease.Call{Reports: [2]lease.Report{{Epoch: 1, Spent: 1}}})
	equal(s.t, "created after a report of nothing", g.Created, true)
	s.look(100, 0)
	s.take(40, true)
	for range 100 {
		s.after(time.Millisecond)
		s.call(lease.Call{})
	}
	s.look(61, 0)
}

// Scenario28 looks at a key around the time when it goes: nobody can tell
// whether it went.
func Scenario28(t *testing.T, b Backend) {
	for _, c := range []struct {
		limit  lease.Limit
		ttl    time.Duration
		leased int64
		debt   int64
	}{
		{lease.Limit{Rate: 100, Burst: 100}, time.Minute, 100, 0}, // fills long before its leases end
		{lease.Limit{Rate: 100, Burst: 100}, time.Minute, 1, 0},
		{lease.Limit{Rate: 100, Burst: 100}, 10 * time.Millisecond, 100, 0},
		{lease.Limit{Rate: 10, Burst: 100}, time.Second, 60, 0},
		{lease.Limit{Rate: 10, Burst: 100}, time.Second, 60, 100},
		{lease.Limit{Rate: 1.0 / 3600, Burst: 1}, 500 * time.Millisecond, 1, 0},
	} {
		t.Run(fmt.Sprintf("%v ttl %v leased %d debt %d", c.limit, c.ttl, c.leased, c.debt), func(t *testing.T) {
			clock := NewClock()
			clock.Set(clock.Now().Truncate(c.ttl) + c.ttl - time.Microsecond) // the end of an epoch
			store, reference := b.Virtual(t, clock), NewStore(clock.Now)
			reference.KeepExpired = true
			call := lease.Call{Key: key, Limit: c.limit, TTL: c.ttl, LastEpoch: -1, Share: lease.ShareNone}
			ask := func(store lease.Store, call lease.Call) lease.Grant {
				t.Helper()
				a := store.Acquire(context.Background(), []lease.Call{call})[0]
				if a.Err != nil {
					t.Fatal(a.Err)
				}
				return a.Grant
			}
			first := call
			first.Want, first.Debt = c.leased, c.debt
			start := clock.Now()
			g := ask(store, first)
			ask(reference, first)
			full := g.ResetAfter + 2*c.ttl
			at := []time.Duration{0, g.TTL - time.Microsecond, g.TTL, c.ttl, full - time.Microsecond, full}
			for i := range 40 {
				at = append(at, full*time.Duration(i)/20)
			}
			for i := -4; i <= 4; i++ {
				at = append(at, full+time.Second+time.Duration(i)*300*time.Microsecond)
			}
			gone := false
			slices.Sort(at)
			for _, d := range at {
				clock.Set(start + d)
				got, want := ask(store, call), ask(reference, call)
				gone = gone || got.Created
				if d < g.TTL && got.Remaining > c.limit.Burst-g.Tokens {
					t.Errorf("after %v: %d remaining with %d on a live lease: want %v in all", d, got.Remaining, g.Tokens, c.limit.Burst)
				}
				if got.Created && want.Outstanding > 0 {
					t.Errorf("after %v: gone with %d tokens outstanding", d, want.Outstanding)
				}
				got.Created = want.Created
				if got != want {
					t.Errorf("after %v: %+v: want as if the key had stayed: %+v", d, got, want)
				}
			}
			if !gone {
				t.Error("the key stayed: want it to go when it is full")
			}
		})
	}
}

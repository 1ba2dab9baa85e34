package leasetest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// TestWindows is the acceptance suite of a lease.Store for an algorithm that counts
// in windows: what the protocol says of one call, and the bound and the promises
// over random schedules.
func TestWindows(t *testing.T, b Backend, a lease.Algorithm) {
	for _, c := range []struct {
		name string
		run  func(s *subject)
	}{
		{"admit and deny", testWindowAdmit},
		{"bound tokens in whole costs", testWindowWholeCosts},
		{"only what is bound", testWindowBoundOnly},
		{"leases", testWindowLeases},
		{"leases end with the window", testWindowLeaseEnds},
		{"returns", testWindowReturns},
		{"shares and pace", testWindowShares},
		{"refund", testWindowRefund},
		{"debt", testWindowDebt},
		{"reset", testWindowReset},
		{"a newer limit", testWindowNewer},
		{"a limit that changes", testWindowChange},
		{"windows that alternate", testWindowAlternate},
		{"a clock that goes back", testWindowClockBack},
		{"a hint of what was lost", testWindowHint},
		{"a look changes nothing", testWindowLook},
		{"many instants", testWindowCap},
		{"a batch", testBatch},
		{"unusual keys", testKeys},
		{"a context that has ended", testContext},
		{"many at a time", testWindowConcurrent},
		{"promises", testWindowPromises},
		{"bound", testWindowBound},
	} {
		t.Run(c.name, func(t *testing.T) {
			clock := NewClock()
			limit := lease.Limit{Rate: 10, Burst: 100, Algorithm: a}
			s := &subject{t: t, store: b.Virtual(t, clock), clock: clock, limit: limit, ttl: time.Second}
			s.toWindow()
			c.run(s)
		})
	}
	if !b.NoExpiry {
		t.Run("expiry is not noticed", func(t *testing.T) { windowExpiry(t, b, a) })
	}
}

// toWindow moves the clock to the start of the next window.
func (s *subject) toWindow() {
	w := s.limit.Window()
	s.clock.Set(s.clock.Now().Truncate(w) + w)
}

func (s *subject) leases() bool { return s.limit.Algorithm.Leases() }

func testWindowAdmit(s *subject) {
	g := s.take(30, true)
	equal(s.t, "created", g.Created, true)
	equal(s.t, "limit", g.Limit, s.limit)
	equal(s.t, "remaining", g.Remaining, 70)
	s.after(time.Second)
	g = s.take(71, false)
	equal(s.t, "created", g.Created, false)
	equal(s.t, "remaining", g.Remaining, 70)
	s.take(70, true)
	g = s.take(1, false)
	CheckAtLeast(s.t, "years to wait for more than the burst", s.take(101, false).RetryAfter.Hours()/24/365, 280)
	s.after(g.RetryAfter - time.Microsecond)
	s.take(1, false)
	s.after(time.Microsecond)
	s.take(1, true)
	s.after(time.Hour)
	s.take(101, false)
	s.take(100, true)
	s.take(1, false)
}

func testWindowWholeCosts(s *subject) {
	s.take(80, true)
	g := s.call(lease.Call{Need: 7, Bound: 21, Want: 21})
	equal(s.t, "bound of 20 tokens for three of 7", g.Bound, 14)
	g = s.call(lease.Call{Need: 30, Bound: 30, Want: 30})
	equal(s.t, "tokens for a need of 30 of what is left", g.Tokens, 0)
}

// testWindowBoundOnly asks for more than for those who wait.
func testWindowBoundOnly(s *subject) {
	if s.leases() {
		s.t.Skip("leases")
	}
	g := s.call(lease.Call{Need: 2, Bound: 6, Want: 50})
	equal(s.t, "tokens", g.Tokens, 6)
	equal(s.t, "bound", g.Bound, 6)
	equal(s.t, "tokens of a lease", s.call(lease.Call{Want: 50}).Tokens, 0)
	s.look(94, 0)
}

func testWindowLeases(s *subject) {
	if !s.leases() {
		s.t.Skip("no leases")
	}
	g := s.lease(30, 30)
	equal(s.t, "ttl", g.TTL, 950*time.Millisecond)
	equal(s.t, "outstanding", g.Outstanding, 30)
	g = s.call(lease.Call{Need: 7, Bound: 14, Want: 20})
	equal(s.t, "bound", g.Bound, 14)
	equal(s.t, "tokens", g.Tokens, 20)
	equal(s.t, "outstanding", g.Outstanding, 36)
	// A lease that nobody reports is spent, for this window.
	s.after(5 * time.Second)
	s.look(50, 0)
	s.toWindow()
	s.look(100, 0)
}

func testWindowLeaseEnds(s *subject) {
	if !s.leases() {
		s.t.Skip("no leases")
	}
	for _, rest := range []time.Duration{2 * time.Second, time.Second, 100 * time.Millisecond, time.Millisecond} {
		s.toWindow()
		s.after(s.limit.Window() - rest)
		g := s.lease(1, 1)
		equal(s.t, fmt.Sprintf("ttl %v before the end", rest), g.TTL, min(s.ttl, rest)*95/100)
	}
	s.after(time.Microsecond)
	g := s.call(lease.Call{Need: 1, Bound: 2, Want: 9})
	equal(s.t, "tokens less than a millisecond before the end", g.Tokens, 2)
	equal(s.t, "bound then", g.Bound, 2)
	equal(s.t, "pace then", g.Pace, 0)
}

func testWindowReturns(s *subject) {
	if !s.leases() {
		s.t.Skip("no leases")
	}
	returned := func(g lease.Grant, spent, n int64) lease.Grant {
		s.t.Helper()
		return s.call(lease.Call{Reports: [2]lease.Report{{Epoch: g.Epoch, Spent: spent, Returned: n}}})
	}
	g := s.lease(60, 60)
	returned(g, 0, 10)
	s.look(50, 50)
	returned(g, 45, 10) // spent comes first
	s.look(55, 0)
	returned(g, 0, 10)
	s.look(55, 0)
	// A lease of this window does not come back into the next.
	s.after(s.limit.Window() - 500*time.Millisecond)
	old := s.lease(40, 40)
	s.toWindow()
	s.lease(100, 100)
	returned(old, 0, 40)
	s.look(0, 100)
	returned(lease.Grant{Epoch: old.Epoch + 1}, 0, 40)
	s.look(40, 60)
}

func testWindowShares(s *subject) {
	if !s.leases() {
		s.t.Skip("no leases")
	}
	for range 4 {
		s.call(lease.Call{Want: 1, Demand: 25})
	}
	epoch := s.look(96, 4).Epoch
	share := func(by lease.Share, want, demand int64) lease.Grant {
		s.t.Helper()
		c := s.complete(lease.Call{Want: want, Demand: demand})
		c.Share, c.LastEpoch = by, epoch
		return s.exact(c)
	}
	g := share(lease.ShareEqual, 96, 25)
	equal(s.t, "a fourth of what is left", g.Tokens, 24)
	equal(s.t, "the pace of a share", g.Pace, s.ttl/2)
	g = share(lease.ShareEqual, 10, 25)
	equal(s.t, "less than that", g.Tokens, 10)
	equal(s.t, "its pace", g.Pace, 0)
	equal(s.t, "by demand", share(lease.ShareProportional, 62, 50).Tokens, 31)
	equal(s.t, "whoever asks first", share(lease.ShareNone, 31, 1).Tokens, 31)
	equal(s.t, "the pace of nothing", share(lease.ShareNone, 31, 1).Pace, s.ttl/2)
	s.after(s.limit.Window() - 100*time.Millisecond)
	equal(s.t, "the pace near the end", s.call(lease.Call{Want: 5}).Pace, 100*time.Millisecond)
}

func testWindowRefund(s *subject) {
	s.take(50, true)
	s.call(lease.Call{Refund: 20})
	s.look(70, 0)
	s.call(lease.Call{Refund: 1e15})
	s.look(100, 0)
	if s.leases() {
		s.lease(30, 30) // keeps what it counts
		s.call(lease.Call{Refund: 50})
		s.look(70, 30)
	}
}

func testWindowDebt(s *subject) {
	w := s.limit.Window()
	s.take(50, true)
	s.call(lease.Call{Debt: 30})
	s.look(20, 0)
	s.call(lease.Call{Debt: 60}) // minus 40
	g := s.look(0, 0)
	s.after(g.RetryAfter - time.Microsecond)
	s.take(1, false)
	s.after(time.Microsecond)
	s.take(1, true)
	s.after(5 * w)
	s.call(lease.Call{Debt: 1e15}) // minus the burst, no less
	g = s.look(0, 0)
	CheckAtMost(s.t, "windows to wait in the deepest debt", g.RetryAfter.Seconds()/w.Seconds(), 2)
	equal(s.t, "reset in the deepest debt", g.ResetAfter > 0 && g.ResetAfter <= 3*w, true)
	s.after(g.ResetAfter)
	s.look(100, 0)
}

func testWindowReset(s *subject) {
	s.take(100, true)
	s.call(lease.Call{Debt: 50})
	s.call(lease.Call{Reset: true})
	s.look(100, 0)
	if s.leases() {
		s.lease(40, 40)
		s.take(60, true)
		s.call(lease.Call{Reset: true})
		s.look(60, 40)
	}
	s.take(60, true)
	g := s.call(lease.Call{Reset: true, Need: 60, Bound: 60, Want: 60})
	equal(s.t, "tokens of a reset and a take", g.Tokens, 60)
}

func testWindowNewer(s *subject) {
	other := lease.Limit{Rate: 5, Burst: 50, Algorithm: s.limit.Algorithm} // the same window
	s.version = 5
	s.take(10, true)
	g := s.call(lease.Call{Limit: other, Version: 4, Need: 60, Bound: 60, Want: 60})
	equal(s.t, "tokens of an older call", g.Tokens, 60)
	equal(s.t, "newer", g.Newer, true)
	equal(s.t, "version in force", g.Version, 5)
	equal(s.t, "limit in force", ratio(g.Limit), ratio(s.limit))
	equal(s.t, "algorithm in force", g.Limit.Algorithm, s.limit.Algorithm)
	g = s.call(lease.Call{Limit: other, Version: 6})
	equal(s.t, "newer for the newest", g.Newer, false)
	equal(s.t, "remaining: what was used stays used", g.Remaining, 0)
	g = s.call(lease.Call{})
	equal(s.t, "newer for the old one", g.Newer, true)
	equal(s.t, "limit in force", ratio(g.Limit), ratio(other))
}

func testWindowChange(s *subject) {
	s.take(30, true)
	s.limit.Burst, s.limit.Rate = 20, 2 // the same window
	g := s.take(1, false)
	s.after(g.RetryAfter - time.Microsecond)
	s.take(1, false)
	s.after(time.Microsecond)
	s.take(1, true)
	// Raised: what is used stays used.
	s.limit.Burst, s.limit.Rate = 100, 10
	CheckAtMost(s.t, "remaining of 100, raised", float64(s.call(lease.Call{}).Remaining), 99)
	// A newer version's window counts at once, with what was used.
	s.version = 1
	s.after(time.Hour)
	s.take(100, true)
	s.version, s.limit.Rate = 2, 100
	g = s.take(1, false)
	CheckAtMost(s.t, "seconds to wait, a shorter window", g.RetryAfter.Seconds(), 2)
	s.after(g.RetryAfter)
	s.take(1, true)
}

// testWindowAlternate has two nodes with different limits, and no version to decide:
// the changes empty nothing.
func testWindowAlternate(s *subject) {
	short := lease.Limit{Rate: 10, Burst: 10, Algorithm: s.limit.Algorithm} // a second
	var trace []lease.Admission
	start := s.clock.Now()
	for i := range 300 {
		for _, limit := range []lease.Limit{s.limit, short} {
			g := s.call(lease.Call{Limit: limit, Need: 1, Bound: 10, Want: 10})
			trace = append(trace, lease.Admission{Start: s.clock.Now() - start, N: g.Bound})
			if i%3 == 0 {
				s.after(time.Duration(i) * 300 * time.Microsecond)
			}
		}
		s.after(73 * time.Millisecond)
	}
	most, _ := densest(trace, s.limit.Window())
	bound := int64(100)
	if s.limit.Algorithm != lease.SlidingLog {
		bound = 200
	}
	CheckAtMost(s.t, "admitted in a window of the longer limit", float64(most), float64(bound))
}

func testWindowClockBack(s *subject) {
	w := s.limit.Window()
	s.after(w / 2)
	s.take(100, true)
	for _, back := range []time.Duration{time.Second, time.Minute, time.Hour} {
		s.after(-back)
		g := s.take(1, false) // no gift
		CheckAtMost(s.t, "seconds to wait", g.RetryAfter.Seconds(), 2*w.Seconds())
		s.after(g.RetryAfter / 2)
		s.take(1, false)
	}
	s.after(2 * w) // nobody waits for the hour to pass again
	s.take(100, true)
	if !s.leases() {
		return
	}
	// A report from before the step does not give back a lease from after it.
	s.toWindow()
	s.after(w / 2)
	a := s.lease(40, 40)
	s.after(-w)
	s.take(1, true)
	s.toWindow()
	b := s.lease(100, 100)
	if a.Epoch == b.Epoch {
		s.t.Errorf("epoch = %d: want another one for another window", b.Epoch)
	}
	s.call(lease.Call{Reports: [2]lease.Report{{Epoch: a.Epoch, Returned: 40}}})
	s.look(0, 100)
}

func testWindowHint(s *subject) {
	w := s.limit.Window()
	s.after(w * 3 / 4)
	for _, c := range []struct {
		age       time.Duration
		remaining int64
	}{{w / 2, 40}, {3 * w, 100}} {
		k := fmt.Sprint(c.age)
		hint := lease.Hint{Known: true, Tokens: 40, Age: c.age}
		equal(s.t, "remaining of a lost state of "+k+" ago", s.call(lease.Call{Key: k, Hint: hint}).Remaining, c.remaining)
	}
}

func testWindowLook(s *subject) {
	for range 3 {
		equal(s.t, "created by a look", s.look(100, 0).Created, true)
	}
	s.take(40, true)
	for range 100 {
		s.after(time.Millisecond)
		s.call(lease.Call{})
	}
	s.look(60, 0)
	equal(s.t, "outstanding after a report of nothing",
		s.call(lease.Call{Reports: [2]lease.Report{{Epoch: 1, Returned: 5}}}).Remaining, 60)
}

// testWindowCap makes more admissions in a window than a log has room for.
func testWindowCap(s *subject) {
	s.limit.Burst, s.limit.Rate = 1000, 100
	w := s.limit.Window()
	var trace []lease.Admission
	for range 2500 {
		if s.call(lease.Call{Need: 1, Bound: 1, Want: 1}).Bound == 1 {
			trace = append(trace, lease.Admission{Start: s.clock.Now(), N: 1})
		}
		s.after(7 * time.Millisecond)
	}
	most, _ := densest(trace, w)
	if s.limit.Algorithm == lease.SlidingLog {
		CheckAtMost(s.t, "admitted in a window", float64(most), 1000)
	}
	// It admits less, but by no more than a 128th part.
	CheckAtLeast(s.t, "admitted in 17.5 s", float64(len(trace)), 1000+0.97*700)
}

func testWindowConcurrent(s *subject) {
	s.limit = lease.Limit{Rate: 1e-3, Burst: 1000, Algorithm: s.limit.Algorithm}
	var mu sync.Mutex
	var sum int64
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 20 {
				a := s.store.Acquire(context.Background(), []lease.Call{s.complete(lease.Call{Need: 7, Bound: 7, Want: 7}), s.complete(lease.Call{Key: "other", Need: 1, Bound: 1, Want: 1})})
				mu.Lock()
				sum += a[0].Grant.Tokens
				mu.Unlock()
			}
		})
	}
	all.Wait()
	equal(s.t, "tokens granted", sum, 994)
}

// densest returns the most that was admitted in a window of length w that contains
// its end and not its beginning, and where it ends. Starts are in order.
func densest(trace []lease.Admission, w time.Duration) (most int64, at time.Duration) {
	sum, from := int64(0), 0
	for _, a := range trace {
		sum += a.N
		for trace[from].Start <= a.Start-w {
			sum -= trace[from].N
			from++
		}
		if sum > most {
			most, at = sum, a.Start
		}
	}
	return most, at
}

// testWindowPromises checks, in states that come about at random, that who waits as
// told and asks alone is admitted then and not before, and that all is there again
// when it was said to be.
func testWindowPromises(s *subject) {
	r := rand.New(rand.NewPCG(5, uint64(s.limit.Algorithm)))
	limits := []lease.Limit{{Rate: 10, Burst: 100}, {Rate: 7, Burst: 10}, {Rate: 1.0 / 3600, Burst: 3}, {Rate: 3e5, Burst: 999}, {Rate: 100, Burst: 1e9}}
	for round := range 100 {
		s.limit.Rate, s.limit.Burst = limits[round%len(limits)].Rate, limits[round%len(limits)].Burst
		w := s.limit.Window()
		s.after(rand.N(w))
		// The same on four keys: asking early must not spoil asking in time.
		keys := make([]string, 4)
		for i := range keys {
			keys[i] = fmt.Sprint(round, i)
		}
		each := func(c lease.Call) (g lease.Grant) {
			for _, k := range keys {
				c.Key = k
				g = s.call(c)
			}
			return g
		}
		for range 1 + r.IntN(6) {
			n := 1 + r.Int64N(s.limit.Burst)
			each(lease.Call{Need: n, Bound: n, Want: n})
			if r.IntN(8) == 0 {
				each(lease.Call{Debt: 1 + r.Int64N(s.limit.Burst)})
			}
			s.after(time.Duration(r.Int64N(int64(w))).Truncate(time.Microsecond))
		}
		now, need := s.clock.Now(), 1+r.Int64N(s.limit.Burst)
		ask := lease.Call{Need: need, Bound: need, Want: need}
		g := s.call(lease.Call{Key: keys[0], Need: need})
		for i, early := range []time.Duration{time.Microsecond, 0} {
			if g.RetryAfter == 0 && early > 0 {
				continue
			}
			s.clock.Set(now + g.RetryAfter - early)
			ask.Key = keys[i]
			if got := s.call(ask).Bound == need; got != (early == 0) {
				s.t.Errorf("round %d, %v: %d tokens %v before the %v promised: granted = %v: want %v", round, s.limit, need, early, g.RetryAfter, got, early == 0)
			}
		}
		for i, early := range []time.Duration{time.Microsecond, 0} {
			if g.ResetAfter == 0 && early > 0 {
				continue
			}
			s.clock.Set(now + g.ResetAfter - early)
			if got := s.call(lease.Call{Key: keys[2+i]}).Remaining == s.limit.Burst; got != (early == 0) {
				s.t.Errorf("round %d, %v: %v before the reset in %v: full = %v: want %v", round, s.limit, early, g.ResetAfter, got, early == 0)
			}
		}
		s.clock.Set(max(now, s.clock.Now()))
	}
}

// testWindowBound has nodes with clocks 5 % off take, lease and spend at random, at
// and around the ends of windows above all, and judges what was admitted.
func testWindowBound(s *subject) {
	for seed := range uint64(8) {
		s.boundOf(rand.New(rand.NewPCG(seed, 7)), fmt.Sprint("bound ", seed))
	}
}

// out is a lease on a node.
type out struct {
	epoch, tokens, spent int64
	deadline             time.Duration // by the store's clock, on the node whose clock is slowest
}

func (s *subject) boundOf(r *rand.Rand, key string) {
	limit := []lease.Limit{{Rate: 10, Burst: 100}, {Rate: 7, Burst: 10}, {Rate: 400, Burst: 60}}[r.IntN(3)]
	s.limit.Rate, s.limit.Burst = limit.Rate, limit.Burst
	w := s.limit.Window()
	start := s.clock.Now().Truncate(w) + w
	s.clock.Set(start)
	var trace []lease.Admission
	var outs []*out
	admit := func(n int64) {
		if n > 0 {
			trace = append(trace, lease.Admission{Start: s.clock.Now(), N: n})
		}
	}
	spend := func(before time.Duration) {
		// Whoever holds a lease spends it at the last instant, or at once.
		slices.SortFunc(outs, func(a, b *out) int { return int(a.deadline - b.deadline) })
		for _, o := range outs {
			if last := o.deadline - time.Microsecond; last < before && o.spent < o.tokens && last >= s.clock.Now() {
				s.clock.Set(last)
				admit(o.tokens - o.spent)
				o.spent = o.tokens
			}
		}
	}
	for range 400 {
		step := time.Duration(r.Int64N(int64(w / 8)))
		switch r.IntN(4) {
		case 0: // to the end of the window, or a microsecond beside it
			step = w - (s.clock.Now()-start)%w + time.Duration(r.Int64N(3)-1)*time.Microsecond
		case 1:
			step = 0
		}
		next := (s.clock.Now() + step).Truncate(time.Microsecond)
		spend(next)
		s.clock.Set(max(next, s.clock.Now()))
		c := lease.Call{Key: key, TTL: w / 3, Need: 1 + r.Int64N(min(8, s.limit.Burst))}
		c.Bound = c.Need * r.Int64N(4)
		c.Want = max(c.Need, c.Bound) + r.Int64N(s.limit.Burst)
		if len(outs) > 0 && r.IntN(2) == 0 {
			o := outs[r.IntN(len(outs))]
			c.Reports[0] = lease.Report{Epoch: o.epoch, Spent: o.spent, Returned: o.tokens - o.spent}
			outs = slices.DeleteFunc(outs, func(x *out) bool { return x == o })
		}
		g := s.call(c)
		admit(g.Bound)
		if leased := g.Tokens - g.Bound; leased > 0 {
			life := (g.TTL*100/95 - 1).Truncate(time.Microsecond)
			outs = append(outs, &out{g.Epoch, leased, 0, s.clock.Now() + life})
		}
	}
	for i := range trace {
		trace[i].Start -= start
	}
	s.judge(trace, w)
}

// judge fails unless trace, in order, keeps to the bound of its algorithm.
func (s *subject) judge(trace []lease.Admission, w time.Duration) {
	s.t.Helper()
	if err := CheckWindows(s.limit, trace); err != nil {
		s.t.Error(err)
	}
	total := int64(0)
	for _, a := range trace {
		total += a.N
	}
	span := trace[len(trace)-1].Start
	CheckAtLeast(s.t, "admitted", float64(total), 0.2*s.limit.Rate*span.Seconds())
}

// CheckWindows returns an error unless trace, in order of its Starts, which count
// from the beginning of a window, keeps to the bound that limit's algorithm states.
func CheckWindows(limit lease.Limit, trace []lease.Admission) error {
	w := limit.Window()
	aligned := map[int64]int64{}
	for _, a := range trace {
		n := int64(a.Start / w)
		if aligned[n] += a.N; aligned[n] > limit.Burst && limit.Algorithm != lease.SlidingLog {
			return fmt.Errorf("%v: %d admitted in window %d: want at most %d", limit, aligned[n], n, limit.Burst)
		}
	}
	sum, from := int64(0), 0
	taken := map[int64]int64{}
	for _, a := range trace {
		sum += a.N
		for trace[from].Start <= a.Start-w {
			sum -= trace[from].N
			from++
		}
		n, f := int64(a.Start/w), float64(a.Start%w)/float64(w)
		taken[n] += a.N
		most := float64(limit.Burst)
		switch limit.Algorithm {
		case lease.FixedWindow:
			most *= 2
		case lease.SlidingCounter:
			most = min(most+f*float64(taken[n-1]), 2*most-1)
		}
		if float64(sum) > most+1e-9 {
			return fmt.Errorf("%v: %d admitted in the window that ends at %v: want at most %.3f", limit, sum, a.Start, most)
		}
	}
	return nil
}

// windowExpiry looks at a key around the time when it goes: nobody can tell whether
// it went.
func windowExpiry(t *testing.T, b Backend, a lease.Algorithm) {
	for _, debt := range []int64{0, 80} {
		limit := lease.Limit{Rate: 10, Burst: 100, Algorithm: a}
		clock := NewClock()
		clock.Set(clock.Now().Truncate(limit.Window()) + limit.Window()/3)
		store, reference := b.Virtual(t, clock), NewStore(clock.Now)
		reference.KeepExpired = true
		start, gone := clock.Now(), false
		call := lease.Call{Key: key, Limit: limit, TTL: time.Second, LastEpoch: -1, Share: lease.ShareNone}
		first := call
		first.Need, first.Bound, first.Want, first.Debt = 60, 60, 70, debt
		for _, s := range []lease.Store{store, reference} {
			s.Acquire(context.Background(), []lease.Call{first})
		}
		for i := range 400 {
			clock.Set(start + time.Duration(i)*100*time.Millisecond)
			got, want := store.Acquire(context.Background(), []lease.Call{call})[0].Grant, reference.Acquire(context.Background(), []lease.Call{call})[0].Grant
			gone = gone || got.Created
			got.Created, got.Epoch, want.Epoch = want.Created, 0, 0
			if got != want {
				t.Errorf("debt %d, after %v: %+v: want as if the key had stayed: %+v", debt, clock.Now()-start, got, want)
			}
		}
		if !gone {
			t.Errorf("debt %d: the key stayed: want it to go when nothing is used", debt)
		}
	}
}

package leasetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// TestStore is the acceptance suite of a lease.Store: what the protocol says of
// one call, each rule on both sides of its bound.
func TestStore(t *testing.T, b Backend) {
	for _, c := range []struct {
		name string
		run  func(s *subject)
	}{
		{"grant and deny", testGrant},
		{"partial grant", testPartial},
		{"bound tokens are spent at once", testBound},
		{"leases count against the burst", testOutstanding},
		{"refill before reports", testOrder},
		{"reports", testReports},
		{"returns", testReturns},
		{"epochs end", testRotation},
		{"retry after", testRetryAfter},
		{"retry after, with leases out", testRetryAfterLeases},
		{"reset after", testResetAfter},
		{"pace", testPace},
		{"refund", testRefund},
		{"debt", testDebt},
		{"reset", testReset},
		{"equal shares", testShareEqual},
		{"proportional shares", testShareProportional},
		{"active nodes", testActive},
		{"a newer limit", testNewer},
		{"the latest limit of version 0", testLatest},
		{"a higher limit is no refill", testRaised},
		{"a lower limit", testLowered},
		{"a lower limit with leases out", testLoweredLeases},
		{"ttl", testTTL},
		{"a clock that goes back", testClockBack},
		{"a clock that goes back to the epoch before", testClockBackEpoch},
		{"a clock that jumps ahead", testClockAhead},
		{"a look changes nothing", testLook},
		{"largest numbers", testLargest},
		{"slowest rate", testSlowest},
		{"a limit that denies everything", testZeroLimit},
		{"a batch", testBatch},
		{"unusual keys", testKeys},
		{"a context that has ended", testContext},
		{"many at a time", testConcurrent},
	} {
		t.Run(c.name, func(t *testing.T) {
			clock := NewClock()
			c.run(&subject{t: t, store: b.Virtual(t, clock), clock: clock, limit: lease.Limit{Rate: 10, Burst: 100}, ttl: time.Second})
		})
	}
	if !b.NoExpiry {
		t.Run("expiry is not noticed", func(t *testing.T) { Scenario28(t, b) })
	}
}

// subject is a Store under test, and what its calls have in common.
type subject struct {
	t       *testing.T
	store   lease.Store
	clock   *Clock
	limit   lease.Limit
	version int64
	ttl     time.Duration
}

// call makes one call, completed by what all have in common.
func (s *subject) call(c lease.Call) lease.Grant {
	s.t.Helper()
	return s.exact(s.complete(c))
}

// exact makes one call as it is.
func (s *subject) exact(c lease.Call) lease.Grant {
	s.t.Helper()
	a := s.store.Acquire(context.Background(), []lease.Call{c})
	if len(a) != 1 || a[0].Err != nil {
		s.t.Fatalf("Acquire(%+v) = %+v: want one answer and no error", c, a)
	}
	return a[0].Grant
}

func (s *subject) complete(c lease.Call) lease.Call {
	if c.Key == "" {
		c.Key = key
	}
	if c.Limit == (lease.Limit{}) {
		c.Limit, c.Version = s.limit, s.version
	}
	if c.TTL == 0 {
		c.TTL = s.ttl
	}
	if c.LastEpoch == 0 {
		c.LastEpoch = -1
	}
	c.Share = lease.ShareNone
	return c
}

// lease leases n tokens and fails unless it gets want.
func (s *subject) lease(n, want int64) lease.Grant {
	s.t.Helper()
	g := s.call(lease.Call{Want: n})
	if g.Tokens != want || g.Bound != 0 {
		s.t.Errorf("lease of %d = %d tokens, %d of them bound: want %d, 0", n, g.Tokens, g.Bound, want)
	}
	return g
}

// take charges n tokens at once and fails unless ok tells the outcome.
func (s *subject) take(n int64, ok bool) lease.Grant {
	s.t.Helper()
	g := s.call(lease.Call{Need: n, Bound: n, Want: n})
	want := int64(0)
	if ok {
		want = n
	}
	if g.Tokens != want || g.Bound != want {
		s.t.Errorf("take of %d = %d tokens, %d of them bound: want %d, %d", n, g.Tokens, g.Bound, want, want)
	}
	return g
}

// look fails unless the bucket has these tokens, and these are out on leases.
func (s *subject) look(remaining, outstanding int64) lease.Grant {
	s.t.Helper()
	g := s.call(lease.Call{})
	if g.Tokens != 0 || g.Remaining != remaining || g.Outstanding != outstanding {
		s.t.Errorf("look = %d tokens, %d remaining, %d outstanding: want 0, %d, %d", g.Tokens, g.Remaining, g.Outstanding, remaining, outstanding)
	}
	return g
}

func (s *subject) after(d time.Duration) { s.clock.Advance(d) }

// toEpoch moves the clock to the start of the next epoch.
func (s *subject) toEpoch() { s.clock.Set(s.clock.Now().Truncate(s.ttl) + s.ttl) }

// equal fails t unless got is want.
func equal[T comparable](t *testing.T, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s = %v: want %v", what, got, want)
	}
}

func testGrant(s *subject) {
	g := s.take(30, true)
	equal(s.t, "created", g.Created, true)
	equal(s.t, "corrupt", g.Corrupt, false)
	equal(s.t, "newer", g.Newer, false)
	equal(s.t, "limit", g.Limit, s.limit)
	equal(s.t, "remaining", g.Remaining, 70)
	equal(s.t, "ttl", g.TTL, 950*time.Millisecond)
	equal(s.t, "epoch", g.Epoch, int64(s.clock.Now()/s.ttl))
	g = s.take(71, false)
	equal(s.t, "created", g.Created, false)
	equal(s.t, "remaining", g.Remaining, 70)
	s.take(70, true)
	s.take(1, false)
	s.after(100*time.Millisecond - time.Microsecond)
	s.take(1, false)
	s.after(time.Microsecond)
	s.take(1, true)
	s.after(time.Hour) // idle fills to the burst and no further
	s.take(101, false)
	s.take(100, true)
	s.take(1, false)
}

func testPartial(s *subject) {
	s.take(70, true)
	s.lease(50, 30)
	s.lease(50, 0)
	s.after(time.Second)
	// Ten are there: too few for the need is nothing at all.
	g := s.call(lease.Call{Need: 11, Bound: 11, Want: 20})
	equal(s.t, "tokens for a need of 11 of 10", g.Tokens, 0)
	g = s.call(lease.Call{Need: 10, Bound: 10, Want: 20})
	equal(s.t, "tokens for a need of 10 of 10", g.Tokens, 10)
}

func testBound(s *subject) {
	s.take(80, true)
	// Whole costs only: of 20 tokens two of 7 are bound, the rest is a lease.
	g := s.call(lease.Call{Need: 7, Bound: 21, Want: 25})
	equal(s.t, "tokens", g.Tokens, 20)
	equal(s.t, "bound", g.Bound, 14)
	equal(s.t, "outstanding", g.Outstanding, 6)
	// What was bound makes room for refill at once, what is leased does not.
	s.after(time.Hour)
	s.look(100, 0)
	s.take(100, true)
	s.after(time.Second)
	s.look(10, 0)
}

func testOutstanding(s *subject) {
	s.toEpoch()
	s.lease(100, 100)
	s.after(500 * time.Millisecond)
	s.look(0, 100)
	s.after(1500*time.Millisecond - time.Microsecond)
	s.look(0, 100)
	s.after(time.Microsecond)
	s.look(0, 0)
	s.after(time.Second)
	s.look(10, 0)
}

func testOrder(s *subject) {
	s.limit = lease.Limit{Rate: 1000, Burst: 100} // fills in 100 ms
	s.toEpoch()
	g := s.lease(100, 100)
	s.after(900 * time.Millisecond)
	// All were out until now, so nothing has come in until now.
	r := s.call(lease.Call{Reports: [2]lease.Report{{Epoch: g.Epoch, Spent: 100}}, Want: 100})
	equal(s.t, "tokens with the report", r.Tokens, 0)
	equal(s.t, "outstanding", r.Outstanding, 0)
	s.after(10 * time.Millisecond)
	s.look(10, 0)
}

func testReports(s *subject) {
	s.limit.Rate = 1e-6
	s.toEpoch()
	first := s.lease(20, 20)
	s.toEpoch()
	second := s.lease(30, 30)
	s.look(50, 50)
	report := func(r ...lease.Report) lease.Grant {
		s.t.Helper()
		c := lease.Call{}
		copy(c.Reports[:], r)
		return s.call(c)
	}
	equal(s.t, "outstanding, both epochs reported", report(
		lease.Report{Epoch: second.Epoch, Spent: 3}, lease.Report{Epoch: first.Epoch, Spent: 4}).Outstanding, 43)
	equal(s.t, "outstanding, in the other order", report(
		lease.Report{Epoch: first.Epoch, Spent: 1}, lease.Report{Epoch: second.Epoch, Spent: 2}).Outstanding, 40)
	equal(s.t, "outstanding, an epoch too old", report(lease.Report{Epoch: first.Epoch - 1, Spent: 9, Returned: 9}).Outstanding, 40)
	equal(s.t, "outstanding, an epoch to come", report(lease.Report{Epoch: second.Epoch + 1, Spent: 9, Returned: 9}).Outstanding, 40)
	s.look(50, 40)
	// More than is out takes what is out, of that epoch alone.
	equal(s.t, "outstanding, too much reported", report(lease.Report{Epoch: first.Epoch, Spent: 1e15}).Outstanding, 25)
	s.look(50, 25)
	equal(s.t, "outstanding, too much reported", report(lease.Report{Epoch: second.Epoch, Spent: 1e15, Returned: 1}).Outstanding, 0)
	s.look(50, 0)
	third := s.lease(50, 50)
	s.look(0, 50)
	s.toEpoch()
	s.toEpoch()
	s.look(0, 0)
	equal(s.t, "remaining, returned after its end", report(lease.Report{Epoch: third.Epoch, Returned: 25}).Remaining, 0)
}

func testReturns(s *subject) {
	s.limit.Rate = 1e-6
	g := s.lease(60, 60)
	returned := func(spent, n int64) lease.Grant {
		s.t.Helper()
		return s.call(lease.Call{Reports: [2]lease.Report{{Epoch: g.Epoch, Spent: spent, Returned: n}}})
	}
	returned(0, 10)
	s.look(50, 50)
	// Spent comes first: only what then is out can be returned.
	returned(45, 10)
	s.look(55, 0)
	returned(0, 10)
	s.look(55, 0)
	// Returned tokens can be granted in the same call.
	g = s.lease(55, 55)
	r := s.call(lease.Call{Reports: [2]lease.Report{{Epoch: g.Epoch, Returned: 55}}, Need: 55, Bound: 55, Want: 55})
	equal(s.t, "tokens bound of those returned", r.Bound, 55)
}

func testRotation(s *subject) {
	s.toEpoch()
	s.after(s.ttl - time.Microsecond) // the last instant of an epoch
	s.lease(40, 40)
	s.after(time.Microsecond)
	s.lease(30, 30) // the first of the next
	s.look(30, 70)
	s.after(s.ttl - time.Microsecond)
	g := s.look(30, 70)
	s.after(time.Microsecond)
	// The first lease is dropped. Until now the other one left room for nothing.
	s.look(30, 30)
	_ = g
	s.after(s.ttl - time.Microsecond)
	s.look(39, 30)
	s.after(time.Microsecond)
	s.look(40, 0)
}

func testRetryAfter(s *subject) {
	s.take(100, true)
	s.after(33 * time.Microsecond)
	for _, n := range []int64{1, 7, 100} {
		g := s.take(n, false)
		want := time.Duration(n)*100*time.Millisecond - 33*time.Microsecond
		equal(s.t, fmt.Sprintf("retry after for %d", n), g.RetryAfter, want)
	}
	g := s.take(7, false)
	s.after(g.RetryAfter - time.Microsecond)
	equal(s.t, "retry after, a microsecond early", s.take(7, false).RetryAfter, time.Microsecond)
	s.after(time.Microsecond)
	equal(s.t, "retry after for one more", s.take(7, true).RetryAfter, 700*time.Millisecond)
	s.after(time.Hour)
	g = s.look(100, 0)
	equal(s.t, "retry after with tokens there", g.RetryAfter, 0)
	CheckAtLeast(s.t, "years to wait for more than the burst", s.take(101, false).RetryAfter.Hours()/24/365, 280)
}

// testRetryAfterLeases waits for tokens that leases keep from coming in: the
// promise is exact all the same.
func testRetryAfterLeases(s *subject) {
	for _, phase := range []time.Duration{0, time.Microsecond, s.ttl / 4, s.ttl - time.Microsecond} {
		for _, leased := range [][2]int64{{100, 0}, {50, 50}, {30, 0}, {0, 100}, {95, 3}} {
			for _, need := range []int64{1, 3, 50, 71, 100} {
				s.promise(phase, leased, need)
			}
		}
	}
}

// promise leases in two epochs, and checks what a call for need is told.
func (s *subject) promise(phase time.Duration, leased [2]int64, need int64) {
	s.t.Helper()
	name := fmt.Sprintf("k%v %v %d", phase, leased, need)
	// The same twice: asking early must not spoil asking in time.
	for i, early := range []time.Duration{time.Microsecond, 0} {
		k := fmt.Sprintf("%s %d", name, i)
		s.toEpoch()
		s.after(phase)
		s.call(lease.Call{Key: k, Want: leased[0]})
		s.after(s.ttl)
		s.call(lease.Call{Key: k, Want: leased[1]})
		if rest := 100 - leased[0] - leased[1]; rest > 0 {
			s.call(lease.Call{Key: k, Need: rest, Bound: rest, Want: rest})
		}
		g := s.call(lease.Call{Key: k, Need: need, Bound: need, Want: need})
		if g.Tokens > 0 {
			return // enough came in meanwhile
		}
		s.after(g.RetryAfter - early)
		again := s.call(lease.Call{Key: k, Need: need, Bound: need, Want: need})
		if got := again.Tokens == need; got != (early == 0) {
			s.t.Errorf("%v into the epoch, %v leased: %d tokens %v before the %v promised: granted = %v: want %v",
				phase, leased, need, early, g.RetryAfter, got, early == 0)
		}
	}
}

func testResetAfter(s *subject) {
	g := s.take(73, true)
	equal(s.t, "reset after", g.ResetAfter, 7300*time.Millisecond)
	s.after(g.ResetAfter - time.Microsecond)
	s.look(99, 0)
	s.after(time.Microsecond)
	equal(s.t, "reset after, full", s.look(100, 0).ResetAfter, 0)
}

func testPace(s *subject) {
	equal(s.t, "pace of a whole grant", s.lease(60, 60).Pace, 0)
	equal(s.t, "pace of a look", s.look(40, 60).Pace, 0)
	equal(s.t, "pace of a short grant", s.lease(60, 40).Pace, s.ttl/2)
	equal(s.t, "pace of no grant", s.lease(1, 0).Pace, s.ttl/2)
}

func testRefund(s *subject) {
	s.limit.Rate = 1e-6
	s.take(50, true)
	s.call(lease.Call{Refund: 20})
	s.look(70, 0)
	s.call(lease.Call{Refund: 1e15})
	s.look(100, 0)
	// Leases keep their room.
	s.lease(30, 30)
	s.call(lease.Call{Refund: 5})
	s.look(70, 30)
	s.take(10, true)
	s.call(lease.Call{Refund: 50})
	s.look(70, 30)
}

func testDebt(s *subject) {
	s.call(lease.Call{Debt: 30})
	s.look(70, 0)
	s.call(lease.Call{Debt: 80})
	g := s.look(0, 0) // minus 10
	equal(s.t, "retry after", g.RetryAfter, 1100*time.Millisecond)
	equal(s.t, "reset after", g.ResetAfter, 11*time.Second)
	s.call(lease.Call{Debt: 1e15})
	g = s.look(0, 0) // minus the burst, no less
	equal(s.t, "retry after the deepest debt", g.RetryAfter, 10100*time.Millisecond)
	s.after(g.RetryAfter - time.Microsecond)
	s.take(1, false)
	s.after(time.Microsecond)
	s.take(1, true)
}

func testReset(s *subject) {
	s.limit.Rate = 1e-6
	s.take(100, true)
	s.call(lease.Call{Reset: true})
	s.look(100, 0)
	s.lease(40, 40)
	s.take(60, true)
	s.call(lease.Call{Reset: true})
	s.look(60, 40)
	s.call(lease.Call{Debt: 1e15})
	s.call(lease.Call{Reset: true})
	s.look(60, 40)
	g := s.call(lease.Call{Reset: true, Need: 60, Bound: 60, Want: 60})
	equal(s.t, "tokens of a reset and a take", g.Tokens, 60)
}

// share makes a call as a node that is known already, with its share of what is
// there.
func (s *subject) share(share lease.Share, c lease.Call) lease.Grant {
	s.t.Helper()
	c = s.complete(c)
	c.Share, c.LastEpoch = share, int64(s.clock.Now()/s.ttl)
	return s.exact(c)
}

func testShareEqual(s *subject) {
	s.limit = lease.Limit{Rate: 200, Burst: 1000} // 100 a lease period
	s.toEpoch()
	s.take(1000, true)
	for range 3 {
		s.call(lease.Call{Want: 1})
	}
	s.call(lease.Call{Refund: 100})
	equal(s.t, "active", s.look(100, 0).Active, 4)
	ask := func(want int64) lease.Grant {
		s.t.Helper()
		return s.share(lease.ShareEqual, lease.Call{Want: want})
	}
	equal(s.t, "a fourth of what a period brings", ask(100).Tokens, 25)
	equal(s.t, "less than that", ask(10).Tokens, 10)
	g := ask(100)
	equal(s.t, "a fourth again", g.Tokens, 25)
	equal(s.t, "the pace of a share", g.Pace, s.ttl/2)
	equal(s.t, "a fourth again", ask(100).Tokens, 25)
	equal(s.t, "the last of it", ask(100).Tokens, 15)
	// With more there than a period brings, what the others' shares leave, but
	// no more than half of it.
	s.call(lease.Call{Reset: true})
	s.look(900, 100)
	equal(s.t, "half of a full bucket", ask(1000).Tokens, 450)
	// A need is met whatever the share.
	g = s.share(lease.ShareEqual, lease.Call{Need: 300, Bound: 300, Want: 400})
	equal(s.t, "bound, for a need over the share", g.Bound, 300)
}

func testShareProportional(s *subject) {
	s.limit = lease.Limit{Rate: 200, Burst: 1000}
	s.toEpoch()
	s.call(lease.Call{Need: 1000, Bound: 1000, Want: 1000, Demand: 75})
	s.call(lease.Call{Want: 1, Demand: 25})
	for _, c := range []struct{ demand, want int64 }{{75, 75}, {25, 25}, {1, 1}, {1000, 100}} {
		// A hundred tokens, what a period brings, and nothing out.
		s.call(lease.Call{Debt: 1e15})
		s.call(lease.Call{Refund: 1000})
		s.call(lease.Call{Refund: 100})
		g := s.share(lease.ShareProportional, lease.Call{Want: 100, Demand: c.demand})
		equal(s.t, fmt.Sprintf("tokens for a demand of %d of 100", c.demand), g.Tokens, c.want)
		s.call(lease.Call{Reports: [2]lease.Report{{Epoch: g.Epoch, Spent: g.Tokens}}})
	}
}

func testActive(s *subject) {
	s.limit = lease.Limit{Rate: 1e6, Burst: 1e9}
	s.toEpoch()
	var epoch int64
	for i := range 5 {
		g := s.call(lease.Call{Want: 1})
		equal(s.t, "active", g.Active, int64(i+1))
		epoch = g.Epoch
	}
	equal(s.t, "active, one again", s.call(lease.Call{Want: 1, LastEpoch: epoch}).Active, 5)
	equal(s.t, "active, a look", s.call(lease.Call{}).Active, 5)
	s.toEpoch()
	equal(s.t, "active in the next epoch", s.call(lease.Call{Want: 1, LastEpoch: epoch}).Active, 5)
	s.toEpoch()
	equal(s.t, "active in the one after", s.call(lease.Call{Want: 1, LastEpoch: epoch + 1}).Active, 1)
	s.toEpoch()
	s.toEpoch()
	equal(s.t, "active when nobody asks", s.call(lease.Call{}).Active, 1)
}

// testZeroLimit asks for what nodes keep to themselves: it may be rejected, but
// it grants nothing.
func testZeroLimit(s *subject) {
	for _, limit := range []lease.Limit{{Rate: 10}, {Burst: 10}} {
		c := s.complete(lease.Call{Limit: limit, Need: 1, Bound: 1, Want: 5})
		a := s.store.Acquire(context.Background(), []lease.Call{c})[0]
		if a.Grant.Tokens != 0 || a.Grant.Bound != 0 || a.Err != nil && !errors.Is(a.Err, lease.ErrRejected) {
			s.t.Errorf("%v grants %d tokens, error %v: want 0, and nil or ErrRejected", limit, a.Grant.Tokens, a.Err)
		}
	}
}

func testLargest(s *subject) {
	s.limit = lease.Limit{Rate: lease.MaxRate, Burst: lease.MaxBurst}
	s.take(lease.MaxBurst, true)
	s.take(1, false)
	s.after(time.Microsecond)
	s.take(1_000_001, false)
	s.take(1_000_000, true)
	s.after(1000*time.Second - time.Microsecond)
	s.look(lease.MaxBurst-1_000_000, 0)
	s.after(time.Microsecond)
	s.lease(lease.MaxBurst, lease.MaxBurst)
	s.look(0, lease.MaxBurst)
	s.call(lease.Call{Debt: lease.MaxBurst})
	s.after(5 * time.Hour)
	s.look(lease.MaxBurst, 0)
}

func testSlowest(s *subject) {
	s.limit = lease.Limit{Rate: 1.0 / 3600, Burst: 1}
	s.take(1, true)
	g := s.take(1, false)
	equal(s.t, "retry after", g.RetryAfter, time.Hour)
	s.after(time.Hour - time.Microsecond)
	s.take(1, false)
	s.after(time.Microsecond)
	s.take(1, true)
}

func testBatch(s *subject) {
	calls := make([]lease.Call, 128)
	for range 2 {
		for i := range calls {
			calls[i] = s.complete(lease.Call{Key: fmt.Sprintf("user:%d", i), Need: 1, Bound: int64(i % 50), Want: int64(i % 50)})
			calls[i].Limit.Burst = int64(100 + i)
		}
		answers := s.store.Acquire(context.Background(), calls)
		if len(answers) != len(calls) {
			s.t.Fatalf("%d answers to %d calls", len(answers), len(calls))
		}
		for i, a := range answers {
			if a.Err != nil || a.Grant.Tokens != int64(i%50) {
				s.t.Errorf("answer %d = %+v, %v: want %d tokens", i, a.Grant, a.Err, i%50)
			}
		}
	}
	for i := range calls {
		calls[i] = s.complete(lease.Call{Key: fmt.Sprintf("user:%d", i)})
		calls[i].Limit.Burst = int64(100 + i)
	}
	for i, a := range s.store.Acquire(context.Background(), calls) {
		equal(s.t, fmt.Sprintf("remaining of %d", i), a.Grant.Remaining, int64(100+i-2*(i%50)))
	}
	equal(s.t, "answers to no calls", len(s.store.Acquire(context.Background(), nil)), 0)
}

func testKeys(s *subject) {
	keys := []string{
		"a", "A", "a ", " a", "a\n", "a\x00", "\x00", "%", "%25", "%7B", "{", "}", "{}", "{a}", "a{b}", "{a}b", "a%7Bb%7D",
		"ключ", "鍵", "\xff\xfe", "a:b", "*", "?", "[a]", "'", `"`, `\`, "\r\n$5\r\n", strings.Repeat("x", 256),
		strings.Repeat("x", 257), strings.Repeat("x", 10_000), strings.Repeat("{", 300), strings.Repeat("}", 300),
	}
	for i, k := range keys {
		equal(s.t, fmt.Sprintf("%.20q is new", k), s.call(lease.Call{Key: k, Need: 1, Bound: int64(i + 1), Want: int64(i + 1)}).Created, true)
	}
	for i, k := range keys {
		equal(s.t, fmt.Sprintf("remaining of %.20q", k), s.call(lease.Call{Key: k}).Remaining, int64(99-i))
	}
}

func testContext(s *subject) {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	calls := []lease.Call{s.complete(lease.Call{Want: 1}), s.complete(lease.Call{Key: "other", Want: 1})}
	for i, a := range s.store.Acquire(ctx, calls) {
		if !errors.Is(a.Err, lease.ErrNotExecuted) && !errors.Is(a.Err, lease.ErrUnknownOutcome) {
			s.t.Errorf("answer %d with an ended context = %+v, %v: want ErrNotExecuted or ErrUnknownOutcome", i, a.Grant, a.Err)
		}
		if errors.Is(a.Err, lease.ErrNotExecuted) {
			equal(s.t, "created after a call that was not executed", s.call(lease.Call{Key: calls[i].Key}).Created, true)
		}
	}
}

func testConcurrent(s *subject) {
	s.limit = lease.Limit{Rate: 1e-6, Burst: 1000}
	var mu sync.Mutex
	var sum int64
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 20 {
				a := s.store.Acquire(context.Background(), []lease.Call{s.complete(lease.Call{Need: 7, Bound: 7, Want: 7}), s.complete(lease.Call{Key: "other", Want: 1})})
				mu.Lock()
				sum += a[0].Grant.Tokens
				mu.Unlock()
			}
		})
	}
	all.Wait()
	equal(s.t, "tokens granted", sum, 994)
}

package leasetest

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Scenarios of waiting and of the network, with real goroutines in fake time.

const rtt = 2 * time.Millisecond

func always(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

// Scenario09 asks for more than the burst on ten cold nodes at one instant. A
// node's first request calls at once, and all others share its next call.
func Scenario09(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1e-6, Burst: 1000}
	InBubble(t, b, limit, func(w *Bubble) {
		for range 10 {
			w.Add(leasing(lease.ShareEqual), always(rtt))
		}
		var all sync.WaitGroup
		for i := range 10 {
			for range 150 {
				all.Go(func() { w.Take(i, key, 1) })
			}
		}
		all.Wait()
		t.Logf("admitted %d of 1000, %d calls by 10 nodes, longest wait %v", w.Trace.Admitted(key), w.Calls(), w.Longest())
		CheckAtMost(t, "calls by 10 nodes", float64(w.Calls()), 2*10)
		CheckAtLeast(t, "admitted", float64(w.Trace.Admitted(key)), 0.95*1000)
	})
}

// Scenario10 has a herd of 10 000 come to one cold key within 10 ms: answered in
// the order of their coming, within two round trips, by a handful of calls.
func Scenario10(t *testing.T, b Backend) {
	const herd = 10_000
	limit := lease.Limit{Rate: 1e-6, Burst: herd / 2}
	InBubble(t, b, limit, func(w *Bubble) {
		// No reply comes at the instant of a request, so their order is known.
		w.Add(leasing(lease.ShareEqual), always(rtt+300*time.Nanosecond))
		allowed := make([]bool, herd)
		decided := make([]time.Duration, herd)
		var all sync.WaitGroup
		for i := range herd {
			all.Go(func() {
				allowed[i] = w.Take(0, key, 1).Allowed
				decided[i] = w.Now()
			})
			time.Sleep(time.Microsecond)
		}
		all.Wait()
		t.Logf("%d calls, longest wait %v", w.Calls(), w.Longest())
		for i := range herd {
			if want := int64(i) < limit.Burst; allowed[i] != want {
				t.Fatalf("request %d: allowed = %v: want %v, for the first %d get the burst", i, allowed[i], want, limit.Burst)
			}
			if i > 0 && i < int(limit.Burst) && decided[i] < decided[i-1] {
				t.Fatalf("request %d decided at %v, the one before it at %v: want first come, first served", i, decided[i], decided[i-1])
			}
		}
		CheckAtMost(t, "calls", float64(w.Calls()), 10)
		CheckAtMost(t, "seconds that a request waits", w.Longest().Seconds(), (2*rtt + time.Microsecond).Seconds())
	})
}

// ScenarioFlatOut has ten nodes ask flat out for an exhausted key, over a network.
func ScenarioFlatOut(t *testing.T, b Backend) {
	const warm, d = time.Second, 3 * time.Second
	limit := lease.Limit{Rate: 1000, Burst: 300}
	InBubble(t, b, limit, func(w *Bubble) {
		for range 10 {
			w.Add(leasing(lease.ShareEqual), always(rtt))
		}
		w.Offer(warm, key, 1000)
		calls, admitted := w.Calls(), w.Trace.Admitted(key)
		w.Offer(d, key, 1000)
		t.Logf("%.0f calls/s for %.0f tokens/s, longest wait %v", perSecond(w.Calls()-calls, d), perSecond(w.Trace.Admitted(key)-admitted, d), w.Longest())
		CheckAtMost(t, "calls/s", perSecond(w.Calls()-calls, d), 1.2*10/period.Seconds())
		CheckAtLeast(t, "tokens/s", perSecond(w.Trace.Admitted(key)-admitted, d), 0.97*limit.Rate)
		CheckAtMost(t, "seconds that a request waits", w.Longest().Seconds(), (2 * rtt).Seconds())
	})
}

// Scenario16 loses a fifth of all round trips, on the way there or back: the
// level holds, and no more than that is missing.
func Scenario16(t *testing.T, b Backend) {
	const nodes, d = 4, 6 * time.Second
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	for name, fault := range map[string]Fault{"request": RequestLost, "reply": ReplyLost} {
		InBubble(t, b, limit, func(w *Bubble) {
			var healed atomic.Bool
			for i := range nodes {
				r := rand.New(rand.NewPCG(5, uint64(i)))
				w.AddOn(&Link{
					Store: w.Store,
					Delay: func() (time.Duration, time.Duration) { return rtt / 2, rtt / 2 },
					Fault: func([]lease.Call) Fault {
						if r.IntN(5) == 0 && !healed.Load() {
							return fault
						}
						return Works
					},
				}, leasing(lease.ShareEqual))
			}
			w.Offer(d, key, 3*limit.Rate/nodes)
			var lost, tokens int64
			for i := range nodes {
				lost += w.Link(i).Counts().Faulty
				tokens += w.Link(i).Counts().Unheard
			}
			t.Logf("%s lost: admitted %.3f of the rate; of %d calls %d lost, and %d tokens with them", name, perSecond(w.Trace.Admitted(key), d)/limit.Rate, w.Calls(), lost, tokens)
			if lost == 0 || (fault == ReplyLost) != (tokens > 0) {
				t.Errorf("%d calls and %d tokens lost: want some", lost, tokens)
			}
			// A loss costs at most one lease: half the burst, or a period's tokens.
			CheckAtMost(t, "tokens lost with a call", float64(tokens)/float64(lost), 500)
			CheckAtLeast(t, "tokens/s", perSecond(w.Trace.Admitted(key), d), 0.8*limit.Rate)
			CheckAtMost(t, "seconds that a request waits", w.Longest().Seconds(), 0.030)
			// All that was lost is there again two ttl later, as the rate gives it.
			healed.Store(true)
			w.Take(0, key, 1)
			time.Sleep(2*ttl + time.Second)
			if d := w.Take(0, key, limit.Burst-10); !d.Allowed {
				t.Errorf("nearly the whole burst, 2 ttl and burst/rate later = %+v: want allowed", d)
			}
		})
	}
}

// Scenario19 has replies come later than their leases last: none is spent.
func Scenario19(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	InBubble(t, b, limit, func(w *Bubble) {
		slow := false
		w.AddOn(&Link{Store: w.Store, Delay: func() (time.Duration, time.Duration) {
			if slow {
				return time.Millisecond, ttl
			}
			return time.Millisecond, time.Millisecond
		}}, lease.Options{LeasePeriod: period, Timeout: time.Second})
		w.Offer(time.Second, key, 500)
		slow = true
		time.Sleep(2 * ttl) // what it has is over
		before := w.Node(0).Stats()
		// Ten that wait make for one call; what it brings beyond them is late.
		var all sync.WaitGroup
		for range 10 {
			all.Go(func() {
				if d := w.Take(0, key, 1); d.Source == lease.SourceLease {
					t.Errorf("Take = %+v: want no use of a late lease", d)
				}
			})
		}
		all.Wait()
		after := w.Node(0).Stats()
		t.Logf("%d tokens granted too late", after.Lost-before.Lost)
		if after.Live != 0 {
			t.Errorf("%d tokens of a late reply are live: want 0", after.Live)
		}
		if got := after.Granted - before.Granted; got-10 != after.Lost-before.Lost {
			t.Errorf("granted %d to 10 requests, lost %d: want all the rest", got, after.Lost-before.Lost)
		}
	})
}

// Scenario19Edge has a lease end between two ticks of the node's coarse clock,
// with the next one on its way for long.
func Scenario19Edge(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 10_000, Burst: 10_000}
	InBubble(t, b, limit, func(w *Bubble) {
		var ends, slow atomic.Int64 // slow: how long a request takes
		slow.Store(int64(300 * time.Microsecond))
		w.AddOn(&Link{
			Store: w.Store,
			Delay: func() (time.Duration, time.Duration) { return time.Duration(slow.Load()), time.Microsecond },
			Carried: func(_ lease.Call, a lease.Answer) {
				ends.Store(int64(w.Now()) - slow.Load() + int64(a.Grant.TTL))
			},
		}, lease.Options{LeasePeriod: period, Timeout: time.Second})
		for w.Node(0).Stats().Live < 2000 {
			if d := w.Take(0, key, 1); !d.Allowed {
				t.Fatalf("Take = %+v: want allowed", d) // time stands still: never again
			}
		}
		over := time.Duration(ends.Load())
		slow.Store(int64(time.Second / 2))
		for w.Link(0).Counts().Calls == w.Link(0).Counts().Answered {
			if d := w.Take(0, key, 1); !d.Allowed { // until it calls for more
				t.Fatalf("Take = %+v: want allowed", d)
			}
			synctest.Wait()
		}
		live := w.Node(0).Stats().Live
		if live < 2 {
			t.Fatalf("%d tokens live: want 2 or more", live)
		}
		time.Sleep(over - w.Now() - time.Microsecond)
		if d := w.Take(0, key, 1); d.Source != lease.SourceLease {
			t.Errorf("a microsecond before the end: %+v: want a use of the lease", d)
		}
		time.Sleep(time.Microsecond)
		if d := w.Take(0, key, 1); d.Source == lease.SourceLease {
			t.Errorf("at the end: %+v: want no use of the lease", d)
		}
	})
}

// Scenario44 has a burst too small to lease any of it: each round trip serves
// all that wait.
func Scenario44(t *testing.T, b Backend) {
	const d = 2 * time.Second
	limit := lease.Limit{Rate: 1000, Burst: 10}
	InBubble(t, b, limit, func(w *Bubble) {
		w.Add(leasing(lease.ShareEqual), always(rtt))
		w.Offer(d, key, 3000)
		s := w.Node(0).Stats()
		t.Logf("admitted %.3f of the rate, %.0f calls/s, longest wait %v", perSecond(w.Trace.Admitted(key), d)/limit.Rate, perSecond(w.Calls(), d), w.Longest())
		CheckAtLeast(t, "tokens/s", perSecond(w.Trace.Admitted(key), d), 0.9*limit.Rate)
		CheckAtMost(t, "tokens left unspent", float64(s.Granted-s.Spent), 0)
		CheckAtMost(t, "calls/s", perSecond(w.Calls(), d), 1/rtt.Seconds())
	})
}

// Scenario49 has half of those who wait leave before the answer comes: what was
// granted for them is used again or lost, and never counts twice.
func Scenario49(t *testing.T, b Backend) {
	const d = 3 * time.Second
	for _, limit := range []lease.Limit{{Rate: 1000, Burst: 10}, {Rate: 1000, Burst: 100}} {
		InBubble(t, b, limit, func(w *Bubble) {
			for range 3 {
				w.Add(leasing(lease.ShareEqual), always(5*rtt))
			}
			var all sync.WaitGroup
			r := rand.New(rand.NewPCG(4, 9))
			for end := time.Now().Add(d); time.Now().Before(end); {
				time.Sleep(time.Duration(r.ExpFloat64() / 2000 * 1e9))
				i, n, patience := r.IntN(3), 1+r.Int64N(4), time.Duration(1+r.IntN(20))*time.Millisecond
				all.Go(func() {
					ctx, cancel := context.WithTimeout(context.Background(), patience)
					defer cancel()
					asked := w.Now()
					_, err := w.TakeContext(ctx, i, key, n)
					if err != nil && !errors.Is(err, context.DeadlineExceeded) {
						t.Error(err)
					}
					if took := w.Now() - asked; took > patience {
						t.Errorf("a request with %v to wait took %v", patience, took)
					}
				})
			}
			all.Wait()
			var lost int64
			for i := range 3 {
				lost += w.Node(i).Stats().Lost
			}
			t.Logf("%v: %d left; admitted %.3f of the rate, %d tokens lost, level %.1f", limit, w.Left(), perSecond(w.Trace.Admitted(key), d)/limit.Rate, lost, w.Trace.Peak(key))
			if w.Left() == 0 {
				t.Error("nobody left: want some")
			}
		})
	}
}

// Scenario34 has a store that takes 100 ms: nothing is lost but what is on its
// way, and nobody waits longer than that and a call before it.
func Scenario34(t *testing.T, b Backend) {
	const slow, nodes, period = 100 * time.Millisecond, 4, 250 * time.Millisecond
	limit := lease.Limit{Rate: 1000, Burst: 750}
	InBubble(t, b, limit, func(w *Bubble) {
		for range nodes {
			w.Add(lease.Options{Timeout: time.Second}, always(slow))
		}
		w.Offer(5*time.Second, key, 750)
		before := w.Trace.Admitted(key)
		w.Offer(20*time.Second, key, 750)
		got := float64(w.Trace.Admitted(key)-before) / 20
		// Protocol 3.3: throughput ≤ C/(T·(1+1/n)), with a round trip on top of T.
		most := min(limit.Rate, float64(limit.Burst)/((period+slow).Seconds()*(1+1.0/nodes)))
		t.Logf("%.0f/s of %.0f/s, %d calls, longest wait %v", got, most, w.Calls(), w.Longest())
		CheckAtLeast(t, "admitted a second", got, 0.9*most)
		CheckAtMost(t, "longest wait", w.Longest().Seconds(), (2*slow + time.Millisecond).Seconds())
	})
}

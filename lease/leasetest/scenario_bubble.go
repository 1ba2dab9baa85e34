package leasetest

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// oneWay returns a round trip that always takes d.
func always(d time.Duration) func() time.Duration { return func() time.Duration { return d } }

// Scenario09 asks for the burst from ten cold nodes at one instant.
func Scenario09(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1, Burst: 1000}
	InBubble(t, b, limit, func(w *Bubble) {
		for range 10 {
			w.Add(leasing(lease.ShareEqual), always(2*time.Millisecond))
		}
		var all sync.WaitGroup
		for i := range 10 {
			for range 150 {
				all.Go(func() { w.Take(i, key, 1) })
			}
		}
		all.Wait()
		t.Logf("admitted %d of 1000, %d calls by 10 nodes", w.Trace.Admitted(key), w.Calls())
	})
}

// Scenario10 has 10 000 goroutines ask for one cold key.
func Scenario10(t *testing.T, b Backend) {
	const herd = 10_000
	limit := lease.Limit{Rate: 1, Burst: 5000}
	InBubble(t, b, limit, func(w *Bubble) {
		opts := leasing(lease.ShareEqual)
		w.Add(opts, always(2*time.Millisecond))
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
		n, first := 0, herd
		for i, ok := range allowed {
			if ok {
				n++
			} else {
				first = min(first, i)
			}
		}
		t.Logf("admitted %d; first denied %d; %d calls; longest wait %v, last decided at %v", n, first, w.Calls(), w.Longest(), w.Now())
	})
}

// Scenario11 has a herd ask for an exhausted key on 10 nodes, flat out.
func Scenario11(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	InBubble(t, b, limit, func(w *Bubble) {
		for range 10 {
			w.Add(leasing(lease.ShareEqual), always(2*time.Millisecond))
		}
		w.Offer(2*time.Second, key, 1000)
		calls, n := w.Calls(), w.Trace.Admitted(key)
		w.Offer(5*time.Second, key, 1000)
		t.Logf("%.0f calls/s for %.0f/s, longest %v", perSecond(w.Calls()-calls, 5*time.Second), perSecond(w.Trace.Admitted(key)-n, 5*time.Second), w.Longest())
	})
}

// Scenario44 has a limit too small to lease.
func Scenario44(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 10}
	InBubble(t, b, limit, func(w *Bubble) {
		w.Add(leasing(lease.ShareEqual), always(2*time.Millisecond))
		w.Offer(5*time.Second, key, 3000)
		t.Logf("admitted %d in 5s; %.0f calls/s, longest wait %v stats %+v", w.Trace.Admitted(key), perSecond(w.Calls(), 5*time.Second), w.Longest(), w.Node(0).Stats())
	})
}

// Scenario16 loses every fifth round trip, on the way there or back.
func Scenario16(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	for _, fault := range []Fault{RequestLost, ReplyLost} {
		InBubble(t, b, limit, func(w *Bubble) {
			for i := range 5 {
				r := rand.New(rand.NewPCG(5, uint64(i)))
				w.AddOn(&Link{
					Store: w.Store,
					Delay: func() (time.Duration, time.Duration) { return time.Millisecond, time.Millisecond },
					Fault: func([]lease.Call) Fault {
						if r.IntN(5) == 0 {
							return fault
						}
						return Works
					},
				}, leasing(lease.ShareEqual))
			}
			w.Offer(20*time.Second, key, 600)
			var faulty, unheard, largest int64
			for i := range 5 {
				c := w.Link(i).Counts()
				faulty += c.Faulty
				unheard += c.Unheard
				t.Logf("%d %+v", i, w.Node(i).Stats())
			}
			t.Logf("fault %d: admitted %d of 21000; %d calls, %d faulty, unheard %d largest %d longest %v", fault, w.Trace.Admitted(key), w.Calls(), faulty, unheard, largest, w.Longest())
		})
	}
}

// Scenario19 has replies come later than their leases last.
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
		w.Offer(5*time.Second, key, 500)
		t.Logf("%+v", w.Node(0).Stats())
		t.Logf("admitted %d; %d calls, longest %v", w.Trace.Admitted(key), w.Calls(), w.Longest())
	})
}

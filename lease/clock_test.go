package lease

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestHitsRefreshTheClock: with a ticker that cannot run, hits of any cost find
// out that their lease is over within 64 tokens and one request.
func TestHitsRefreshTheClock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, cost := range []int64{1, 2, 64} {
			c, _ := New(grants(func(call Call) Grant {
				if call.Want == 0 {
					return Grant{}
				}
				return Grant{Tokens: call.Bound + 100_001, Bound: call.Bound, TTL: 950 * time.Millisecond, Source: SourceStore}
			}), Limit{Rate: 1000, Burst: 1e6}, Options{LeasePeriod: 500 * time.Millisecond})
			for c.Stats().Live < 100 {
				_, _ = c.Take(t.Context(), "k", 1)
				synctest.Wait()
			}
			h := c.table.get("k")
			if h.left.Load()%2 == 0 {
				_, _ = c.Take(t.Context(), "k", 1)
			}
			// The ticker cannot run: stopped process / all Ps busy.
			close(c.done)
			synctest.Wait()
			time.Sleep(10 * time.Second) // long past the deadline
			n := int64(0)
			for {
				d, _ := c.Take(t.Context(), "k", cost)
				if d.Source != SourceLease || n > 90_000 {
					break
				}
				n += cost
			}
			t.Logf("cost %d: admitted %d tokens from a lease that ended 9 s ago", cost, n)
			if n > 64*cost {
				t.Errorf("cost %d: %d", cost, n)
			}
		}
	})
}

// TestSuspendedInFlight: the machine sleeps while a call is in flight. The lease
// it brings is older than the monotonic clock says.
func TestSuspendedInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asleep atomic.Int64
		var sleepNext atomic.Bool
		c, _ := New(grants(func(call Call) Grant {
			if call.Want == 0 {
				return Grant{}
			}
			time.Sleep(2 * time.Millisecond)
			if asleep.Load() > 0 {
				return Grant{Tokens: call.Bound, Bound: call.Bound, TTL: 950 * time.Millisecond, Source: SourceStore}
			}
			if call.Want > call.Bound && sleepNext.Load() {
				// carried out; the machine sleeps before the reply is read
				asleep.Store(int64(time.Minute))
				time.Sleep(3 * time.Millisecond)
			}
			return Grant{Tokens: call.Want, Bound: call.Bound, TTL: 950 * time.Millisecond, Source: SourceStore}
		}), Limit{Rate: 1000, Burst: 1e6}, Options{LeasePeriod: 500 * time.Millisecond})
		c.dog.wall = func() int64 { return time.Now().UnixNano() + asleep.Load() }
		for c.Stats().Live < 100 {
			go func() { _, _ = c.Take(t.Context(), "k", 1) }()
			time.Sleep(time.Millisecond / 4)
		}
		sleepNext.Store(true)
		for asleep.Load() == 0 {
			go func() { _, _ = c.Take(t.Context(), "k", 1) }()
			time.Sleep(time.Millisecond / 4)
		}
		time.Sleep(10 * time.Millisecond)
		d, _ := c.Take(t.Context(), "k", 1)
		s := c.Stats()
		t.Logf("suspended %d live %d, %v", s.Suspended, s.Live, d.Source)
		if s.Live > 0 {
			t.Errorf("%d tokens live of a lease sent before a sleep of a minute", s.Live)
		}
		c.Close(context.Background())
	})
}

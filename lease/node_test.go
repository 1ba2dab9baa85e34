package lease_test

import (
	"context"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// storeFunc makes a function a Store.
type storeFunc func(ctx context.Context, calls []lease.Call) []lease.Answer

func (f storeFunc) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	return f(ctx, calls)
}

// TestLeasesThatEndOutOfOrder has a second lease end before the first, as it may
// when they come from different sources, and then a cost that only both together
// would meet.
func TestLeasesThatEndOutOfOrder(t *testing.T) {
	clock := leasetest.NewClock()
	store := leasetest.NewStore(clock.Now)
	short := false
	node, err := lease.NewStepped(storeFunc(func(ctx context.Context, calls []lease.Call) []lease.Answer {
		a := store.Acquire(ctx, calls)
		if short {
			a[0].Grant.TTL = 20 * time.Millisecond
		}
		return a
	}), lease.Limit{Rate: 10_000, Burst: 10_000}, lease.Options{LeasePeriod: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	take := func(n int64) lease.Decision {
		t.Helper()
		d, err := node.Take(t.Context(), "k", n)
		if asked++; err != nil || asked > 1_000_000 {
			t.Fatalf("Take number %d = %+v, %v: want what the test waits for", asked, d, err)
		}
		return d
	}
	for node.Stats().Live < 2000 {
		take(1)
	}
	short = true
	for calls := store.Calls(); store.Calls() == calls; {
		take(1) // until it calls for more, some being left
	}
	live := node.Stats().Live
	clock.Advance(30 * time.Millisecond)
	node.Advance(30 * time.Millisecond)
	if d := take(live); d.Source == lease.SourceLease {
		t.Errorf("Take(%d), of which most ended 10 ms ago = %+v: want no use of what ended", live, d)
	}
	leasetest.CheckLedger(t, store.Granted()["k"], node.Stats())
}

// TestReportsAfterFailures tells the store of each token once: again after a
// call that was certainly not executed, never after one that may have been.
func TestReportsAfterFailures(t *testing.T) {
	for _, c := range []struct {
		fault leasetest.Fault
		again bool
	}{{leasetest.Refused, true}, {leasetest.RequestLost, false}, {leasetest.ReplyLost, false}} {
		w := leasetest.NewNodes(t, leasetest.InMemory, 1, lease.Limit{Rate: 1000, Burst: 1000}, lease.Options{LeasePeriod: 100 * time.Millisecond})
		for w.Live(0) < 100 {
			w.Take(0, "k", 1)
		}
		var reported []int64
		fault := c.fault
		w.Link(0).Fault = func(calls []lease.Call) leasetest.Fault {
			reported = append(reported, calls[0].Reports[0].Spent)
			f := fault
			fault = leasetest.Works
			return f
		}
		for len(reported) == 0 {
			w.Take(0, "k", 1)
		}
		w.Advance(20 * time.Millisecond) // the back-off
		for len(reported) == 1 {
			w.Take(0, "k", 1)
		}
		if first, second := reported[0], reported[1]; first == 0 || (second >= first) != c.again {
			t.Errorf("fault %d: reported %d, then %d: want again = %v", c.fault, first, second, c.again)
		}
		w.Check()
	}
}

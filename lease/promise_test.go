package lease_test

import (
	"context"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// TestPromiseInWholeMicroseconds: the bucket counts in microseconds, so a
// promise from memory in between would come too early.
func TestPromiseInWholeMicroseconds(t *testing.T) {
	for _, rate := range []float64{3, 7, 30, 700, 1234.5, 99999} {
		for n := int64(2); n <= 10; n++ {
			w := leasetest.NewNodes(t, leasetest.InMemory, 1, lease.Limit{Rate: rate, Burst: 10}, lease.Options{Share: lease.ShareNone})
			w.Take(0, "k", 10)
			w.Take(0, "k", 1)
			d := w.Take(0, "k", n)
			w.Advance(d.RetryAfter)
			if a := w.Take(0, "k", n); !a.Allowed {
				t.Errorf("rate %v: Take(%d) after promised %v (%v) = denied, again %v", rate, n, d.RetryAfter, d.Source, a.RetryAfter)
			}
		}
	}
}

// TestPromiseBesideLeases: leases hold up refill, so a cost above the one that
// was refused is not met after so many more tokens' time.
func TestPromiseBesideLeases(t *testing.T) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	for _, first := range []int64{1, 50} {
		for _, n := range []int64{50, 101, 150, 200, 300, 500} {
			w := leasetest.NewNodes(t, leasetest.InMemory, 1, limit, lease.Options{LeasePeriod: 100 * time.Millisecond})
			w.Store.Acquire(context.Background(), []lease.Call{{Key: "k", Limit: limit, TTL: 200 * time.Millisecond, Want: 900, LastEpoch: -1, Share: lease.ShareNone}})
			w.Take(0, "k", 100)
			a := w.Take(0, "k", first)
			d := w.Take(0, "k", n)
			w.Advance(d.RetryAfter)
			if again := w.Take(0, "k", n); !again.Allowed {
				t.Errorf("first %d (%v %v): Take(%d) after promised %v (%v) = denied, again %v (%v)", first, a.RetryAfter, a.Source, n, d.RetryAfter, d.Source, again.RetryAfter, again.Source)
			}
		}
	}
}

// TestPromiseUnderPace: what is refused until a pace ends is told so.
func TestPromiseUnderPace(t *testing.T) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	w := leasetest.NewNodes(t, leasetest.InMemory, 2, limit, lease.Options{LeasePeriod: 100 * time.Millisecond})
	// both active, node 0 with demand of 50s
	w.Take(1, "k", 1)
	for i := range 40 {
		d := w.Take(0, "k", 50)
		if !d.Allowed {
			t.Logf("denied %+v", d)
			w.Advance(d.RetryAfter)
			again := w.Take(0, "k", 50)
			t.Logf("again %+v", again)
			if !again.Allowed {
				t.Errorf("Take(50) after promised %v = %+v", d.RetryAfter, again)
			}
			return
		}
		if i > 14 {
			w.Advance(20 * time.Millisecond)
		}
	}
}

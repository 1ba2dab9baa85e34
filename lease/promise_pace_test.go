package lease_test

import (
	"context"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// TestPromiseOfABigCost: a big cost that was refused beside a small rest is told
// the end of its refusal, not a nanosecond again and again.
func TestPromiseOfABigCost(t *testing.T) {
	limit := lease.Limit{Rate: 1000, Burst: 10000}
	w := leasetest.NewNodes(t, leasetest.InMemory, 1, limit, lease.Options{LeasePeriod: 100 * time.Millisecond})
	raw := func(want int64) {
		w.Store.Acquire(context.Background(), []lease.Call{{Key: "k", Limit: limit, TTL: 200 * time.Millisecond, Need: want, Bound: want, Want: want, LastEpoch: -1, Share: lease.ShareNone}})
	}
	raw(1)
	for range 20 {
		w.Take(0, "k", 50)
	}
	for w.Live(0) > 0 {
		w.Take(0, "k", min(50, w.Live(0)))
	}
	raw(w.Look("k").Remaining - 30)
	w.Take(0, "k", 50)
	w.Advance(115 * time.Millisecond)
	raw(1)
	raw(w.Look("k").Remaining - 30)
	d := w.Take(0, "k", 50)
	t.Logf("denied %v %v, bucket %d", d.Source, d.RetryAfter, w.Look("k").Remaining)
	for range 6 {
		if !d.Allowed {
			w.Advance(d.RetryAfter)
		} else {
			return
		}
		d = w.Take(0, "k", 50)
		t.Logf("at %v: %v %v %v, bucket %d", w.Now(), d.Allowed, d.Source, d.RetryAfter, w.Look("k").Remaining)
		if !d.Allowed {
			t.Error("denied")
		}
	}
}

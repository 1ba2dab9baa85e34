package lua

import (
	"testing"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

func TestFixedWindowInProcess(t *testing.T)    { testWindows(t, lease.FixedWindow) }
func TestSlidingLogInProcess(t *testing.T)     { testWindows(t, lease.SlidingLog) }
func TestSlidingCounterInProcess(t *testing.T) { testWindows(t, lease.SlidingCounter) }

func testWindows(t *testing.T, a lease.Algorithm) {
	leasetest.TestWindows(t, leasetest.Backend{Virtual: inProcess}, a)
}

// TestWindowsOnServer is the same by a real server's Lua.
func TestWindowsOnServer(t *testing.T) {
	server := redistest.Start(t)
	for _, a := range []lease.Algorithm{lease.FixedWindow, lease.SlidingLog, lease.SlidingCounter} {
		t.Run(a.String(), func(t *testing.T) {
			leasetest.TestWindows(t, leasetest.Backend{Virtual: onServer(server.Client(t)), NoExpiry: true}, a)
		})
	}
}

// The leaky bucket is the token bucket: the suite of one is that of the other, and
// they share a state.
func TestLeakyBucket(t *testing.T) {
	clock := leasetest.NewClock()
	store := inProcess(t, clock)
	for i, a := range []lease.Algorithm{lease.TokenBucket, lease.LeakyBucket, lease.TokenBucket} {
		limit := lease.Limit{Rate: 1, Burst: 10, Algorithm: a}
		g := store.Acquire(t.Context(), []lease.Call{{Key: "k", Limit: limit, TTL: 1e9, Need: 3, Bound: 3, Want: 3, LastEpoch: -1}})[0].Grant
		if g.Remaining != int64(7-3*i) || g.Newer || g.Limit.Algorithm != a {
			t.Errorf("%v: %+v; want %d remaining", a, g, 7-3*i)
		}
	}
}

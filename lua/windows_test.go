package lua

import (
	"fmt"
	"testing"
	"time"

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

// A refund by a node that had nothing of this window is of another one's tokens.
func TestWindowRefundOfAnother(t *testing.T) {
	clock := leasetest.NewClock()
	store := inProcess(t, clock)
	limit := lease.Limit{Rate: 10, Burst: 100, Algorithm: lease.FixedWindow}
	call := func(c lease.Call) lease.Grant {
		t.Helper()
		c.Key, c.Limit, c.TTL = "k", limit, time.Second
		a := store.Acquire(t.Context(), []lease.Call{c})[0]
		if a.Err != nil {
			t.Fatal(a.Err)
		}
		return a.Grant
	}
	clock.Set(clock.Now().Truncate(limit.Window()))
	g := call(lease.Call{Need: 50, Bound: 50, Want: 50, LastEpoch: -1})
	clock.Advance(limit.Window())
	now := call(lease.Call{Need: 80, Bound: 80, Want: 80, LastEpoch: -1})
	if got := call(lease.Call{Refund: 50, LastEpoch: g.Epoch}).Remaining; got != 20 {
		t.Errorf("remaining after a refund of the window before = %d; want 20", got)
	}
	if got := call(lease.Call{Refund: 50, LastEpoch: now.Epoch}).Remaining; got != 70 {
		t.Errorf("remaining after a refund of this window = %d; want 70", got)
	}
}

// A batch of several algorithms goes in one round trip, and each answer comes back
// to its call, whether or not the server knew the scripts.
func TestMixedBatch(t *testing.T) {
	server := redistest.Start(t)
	for _, single := range []bool{true, false} {
		rdb := server.Client(t)
		s := NewStore(rdb, Options{Prefix: fmt.Sprint(single)})
		s.single.Store(single)
		for round := range 2 {
			var calls []lease.Call
			for i := range 25 {
				a := lease.Algorithms()[i%5]
				n := int64(1 + i)
				calls = append(calls, lease.Call{
					Key: fmt.Sprint(i), Limit: lease.Limit{Rate: 1, Burst: 100, Algorithm: a}, TTL: time.Second, LastEpoch: -1, Need: n, Bound: n, Want: n,
				})
			}
			if round == 1 {
				if err := rdb.ScriptFlush(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
			}
			for i, a := range s.Acquire(t.Context(), calls) {
				want := 100 - int64(1+round)*calls[i].Need
				if a.Err != nil || a.Grant.Bound != calls[i].Need || a.Grant.Remaining < want || a.Grant.Remaining > want+3 || a.Grant.Limit != calls[i].Limit {
					t.Errorf("single %v, round %d, call %d = %+v; want %d of %d left", single, round, i, a, want, 100)
				}
			}
		}
	}
}

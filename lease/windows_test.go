package lease_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

func TestFixedWindowInMemory(t *testing.T) { testWindows(t, lease.FixedWindow) }
func TestSlidingLogInMemory(t *testing.T)  { testWindows(t, lease.SlidingLog) }
func TestSlidingCounterInMemory(t *testing.T) {
	testWindows(t, lease.SlidingCounter)
}

func testWindows(t *testing.T, a lease.Algorithm) { leasetest.TestWindows(t, leasetest.InMemory, a) }

// greedy counts calls that ask for more than those who wait need.
type greedy struct {
	*leasetest.Store
	more int
}

func (g *greedy) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	for _, c := range calls {
		if c.Want > c.Bound {
			g.more++
		}
	}
	return g.Store.Acquire(ctx, calls)
}

// Logs and counters are asked for each round trip, fixed windows lease.
func TestLogsAreNotLeased(t *testing.T) {
	for _, a := range lease.Algorithms() {
		limit := lease.Limit{Rate: 1000, Burst: 1000, Algorithm: a}
		store := &greedy{}
		b := leasetest.Backend{Virtual: func(_ testing.TB, clock *leasetest.Clock) lease.Store {
			store.Store = leasetest.NewStore(clock.Now)
			return store
		}}
		w := leasetest.NewNodes(t, b, 1, limit, lease.Options{LeasePeriod: 100 * time.Millisecond})
		w.Offer(5*time.Second, "k", 1, []float64{500})
		if calls := w.Calls(); a.Leases() != (calls < 500) || a.Leases() != (store.more > 0) {
			t.Errorf("%v: %d calls for some 2500 requests, %d asked for a lease: leases = %v", a, calls, store.more, a.Leases())
		}
	}
}

func TestAlgorithmText(t *testing.T) {
	for _, a := range lease.Algorithms() {
		var got lease.Algorithm
		text, err := a.MarshalText()
		if err != nil || got.UnmarshalText(text) != nil || got != a || string(text) != a.String() {
			t.Errorf("%v: %q, %v back to %v", a, text, err, got)
		}
	}
	if _, err := lease.Algorithm(9).MarshalText(); !errors.Is(err, lease.ErrLimit) {
		t.Errorf("MarshalText of 9 = %v; want ErrLimit", err)
	}
	if err := new(lease.Algorithm).UnmarshalText([]byte("log")); !errors.Is(err, lease.ErrLimit) {
		t.Errorf("UnmarshalText(log) = %v; want ErrLimit", err)
	}
}

func TestWindowLimits(t *testing.T) {
	for limit, want := range map[lease.Limit]string{
		{Rate: 1000, Burst: 1, Algorithm: lease.FixedWindow}:                 "1ms",
		{Rate: 7, Burst: 10, Algorithm: lease.SlidingLog}:                    "1.428572s",
		{Rate: 10.0 / 60, Burst: 10, Algorithm: lease.SlidingCounter}:        "1m0s",
		{Rate: 100, Burst: 10}:                                               "0s",
		{Rate: 1002, Burst: 1, Algorithm: lease.FixedWindow}:                 "bad Burst/Rate",
		{Rate: 1.0 / 86400, Burst: 367, Algorithm: lease.SlidingLog}:         "bad Burst/Rate",
		{Rate: 1, Burst: 1, Algorithm: 5}:                                    "bad Algorithm",
		{Rate: 1, Burst: 0, Algorithm: lease.SlidingLog}:                     "0s",
		{Rate: 1.0 / 86400 / 366, Burst: 1, Algorithm: lease.SlidingCounter}: "8784h0m0s",
	} {
		got := limit.Window().String()
		if bad, ok := errors.AsType[*lease.LimitError](limit.Validate()); ok {
			got = "bad " + bad.Field
		}
		if got != want {
			t.Errorf("%v: window %s; want %s", limit, got, want)
		}
	}
}

// The exact meters judge what the reference admits, and admit what it does.
func TestMetersAgree(t *testing.T) {
	for _, a := range []lease.Algorithm{lease.FixedWindow, lease.SlidingLog, lease.SlidingCounter} {
		limit := lease.Limit{Rate: 7, Burst: 20, Algorithm: a}
		clock := leasetest.NewClock()
		store, r := leasetest.NewStore(clock.Now), rand.New(rand.NewPCG(1, uint64(a)))
		meter, err := lease.NewMeter(limit)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 3000 {
			n := 1 + r.Int64N(5)
			got := store.Acquire(t.Context(), []lease.Call{{Key: "k", Limit: limit, TTL: time.Second, Need: n, Bound: n, Want: n, LastEpoch: -1}})[0].Grant.Bound == n
			if want := meter.Allow(clock.Now(), n); got != want {
				t.Fatalf("%v, request %d: admitted = %v, by the meter %v", a, i, got, want)
			}
			clock.Advance(time.Duration(r.Int64N(400_000)) * time.Microsecond)
		}
		if meter.Peak() > 20 {
			t.Errorf("%v: peak %v; want at most 20", a, meter.Peak())
		}
	}
}

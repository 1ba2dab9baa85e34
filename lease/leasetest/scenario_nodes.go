package leasetest

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Scenarios of nodes that come and go, and of unusual limits.

// Scenario20 kills a node that holds a lease: its tokens are there again after
// two ttl.
func Scenario20(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	w := NewNodes(t, b, 2, limit, leasing(lease.ShareEqual))
	for w.Live(0) < 200 {
		w.Take(0, key, 1)
	}
	out := w.Look(key).Outstanding
	if live := w.Live(0); out < live {
		t.Fatalf("outstanding = %d with %d tokens live: want no less", out, live)
	}
	w.Kill(0)
	w.Advance(2 * ttl)
	if g := w.Look(key); g.Outstanding != 0 {
		t.Errorf("outstanding = %d, 2h after the crash: want 0", g.Outstanding)
	}
	// What was lost comes back as the rate gives it.
	w.Advance(time.Second - 2*ttl)
	for i := range limit.Burst {
		if d := w.Take(1, key, 1); !d.Allowed {
			t.Fatalf("request %d of the burst = %+v: want allowed", i, d)
		}
	}
	w.Check()
}

// Scenario21 stops half of the nodes under load: what they hold goes back.
func Scenario21(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	w := NewNodes(t, b, 10, limit, leasing(lease.ShareEqual))
	owed := make([]int64, 10) // leased and not yet reported, by node
	for i := range owed {
		check := w.Link(i).Carried
		w.Link(i).Carried = func(call lease.Call, a lease.Answer) {
			check(call, a)
			owed[i] += a.Grant.Tokens - a.Grant.Bound
			for _, r := range call.Reports {
				owed[i] -= r.Spent + r.Returned
			}
		}
	}
	w.Offer(2*time.Second, key, 1, Even(10, 800))
	before := w.Calls()
	var held int64
	for i := range 5 {
		held += w.Live(i)
		w.Stop(i)
		if owed[i] != 0 {
			t.Errorf("node %d stopped with %d tokens not told of: want 0", i, owed[i])
		}
	}
	var rest int64
	for i := 5; i < 10; i++ {
		rest += owed[i]
	}
	if out := w.Look(key).Outstanding; out > rest {
		t.Errorf("outstanding = %d: want at most the %d of the other nodes", out, rest)
	}
	t.Logf("%d tokens returned by %d calls", held, w.Calls()-before)
	CheckAtMost(t, "calls to stop 5 nodes", float64(w.Calls()-before), 5)
	w.Offer(2*time.Second, key, 1, []float64{5: 160, 6: 160, 7: 160, 8: 160, 9: 160})
	if n := w.Trace.Refused(key); n != 0 {
		t.Errorf("refused %d tokens at 0.8 of the rate: want 0", n)
	}
	for i := 5; i < 10; i++ {
		w.Stop(i)
	}
	if out := w.Look(key).Outstanding; out != 0 {
		t.Errorf("outstanding = %d with all nodes stopped: want 0", out)
	}
	w.Check()
}

// Scenario25 sets the nodes' own clocks hours apart: it makes no difference.
func Scenario25(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 300}
	run := func(skew time.Duration) (admitted []int64, calls int64) {
		w := NewNodes(t, b, 3, limit, leasing(lease.ShareEqual))
		w.Skew(1, skew)
		w.Skew(2, 2*skew)
		// Below the limit nothing is random but the seeded demand.
		admitted = w.Offer(5*time.Second, key, 1, Even(3, 0.6*limit.Rate))
		calls = w.Calls()
		w.Offer(5*time.Second, key, 1, Even(3, 3*limit.Rate))
		CheckAtLeast(t, "admitted", float64(w.Trace.Admitted(key)), 0.6*5000+0.97*5000)
		w.Check()
		return admitted, calls
	}
	same, sameCalls := run(0)
	got, calls := run(time.Hour)
	for i := range got {
		if got[i] != same[i] {
			t.Errorf("node %d admitted %d with skewed clocks, %d without: want the same", i, got[i], same[i])
		}
	}
	if calls != sameCalls {
		t.Errorf("%d calls with skewed clocks, %d without: want the same", calls, sameCalls)
	}
}

// Scenario22 stops a node's clock for two ttl, as a long pause of the process
// would, between two of its requests: it must not spend a lease it held before.
func Scenario22(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	for _, pause := range []time.Duration{ttl * 95 / 100, 2 * ttl} {
		w := NewNodes(t, b, 2, limit, leasing(lease.ShareEqual))
		for w.Live(0) < 100 {
			w.Take(0, key, 1)
		}
		w.Freeze(0)
		w.Advance(pause)
		w.Thaw(0)
		if d := w.Take(0, key, 1); d.Source == lease.SourceLease {
			t.Errorf("after a pause of %v: %+v: want no use of the lease", pause, d)
		}
		// The other node has been free to use what the first one held.
		for w.Take(1, key, 1).Allowed {
		}
		w.Advance(time.Second)
		w.Check()
	}
}

// Scenario42 has 50 nodes share one token an hour.
func Scenario42(t *testing.T, b Backend) {
	const hours = 6
	limit := lease.Limit{Rate: 1.0 / 3600, Burst: 1}
	w := NewNodes(t, b, 50, limit, lease.Options{})
	var times []time.Duration
	for range hours {
		for range 120 {
			w.Advance(30 * time.Second)
			for i := range 50 {
				if w.Take(i, key, 1).Allowed {
					times = append(times, w.Now())
				}
			}
		}
	}
	t.Logf("admitted at %v; %.1f calls an hour and node", times, float64(w.Calls())/hours/50)
	if len(times) != hours {
		t.Errorf("admitted %d in %d hours: want one an hour", len(times), hours)
	}
	CheckAtMost(t, "calls an hour and node", float64(w.Calls())/hours/50, 15)
	w.Check()
}

// Scenario43 has the largest numbers: a thousand million tokens a second.
func Scenario43(t *testing.T, b Backend) {
	const d = 10 * time.Second
	limit := lease.Limit{Rate: 1e9, Burst: 1e9}
	w := NewNodes(t, b, 10, limit, lease.Options{})
	w.Offer(2*time.Second, key, 1_000_000, Even(10, 3*limit.Rate))
	calls, admitted := w.Calls(), w.Trace.Admitted(key)
	w.Offer(d, key, 1_000_000, Even(10, 3*limit.Rate))
	calls, admitted = w.Calls()-calls, w.Trace.Admitted(key)-admitted
	t.Logf("admitted %.4f of the rate, %.1f calls/s", perSecond(admitted, d)/limit.Rate, perSecond(calls, d))
	CheckAtLeast(t, "tokens/s", perSecond(admitted, d), 0.97*limit.Rate)
	CheckAtMost(t, "calls/s", perSecond(calls, d), 10/0.25)
	w.Check()
}

// Scenario43Exact makes many calls that grant and report, with a rate that is no
// round number: every token is accounted for to the last one.
func Scenario43Exact(t *testing.T, b Backend, calls int) {
	limit := lease.Limit{Rate: 1e9 / 7, Burst: 1e9}
	clock := NewClock()
	store := b.Virtual(t, clock)
	call := lease.Call{Key: key, Limit: limit, TTL: ttl, Need: limit.Burst, Bound: limit.Burst, Want: limit.Burst, LastEpoch: -1, Share: lease.ShareNone}
	count, perUS, _ := limit.Ratio()
	call.Count, call.PerUS = count, perUS
	r := rand.New(rand.NewPCG(9, 9))
	granted := int64(0)
	var g lease.Grant
	start := clock.Now()
	for i := range calls {
		a := store.Acquire(t.Context(), []lease.Call{call})[0]
		if a.Err != nil {
			t.Fatal(a.Err)
		}
		g = a.Grant
		granted += g.Tokens
		// The first call empties the bucket, and it never fills again.
		want := limit.Burst + (clock.Now()-start).Microseconds()*count/perUS - granted
		if g.Remaining != want {
			t.Fatalf("call %d: remaining %d: want exactly %d", i, g.Remaining, want)
		}
		call.Need = 1 + r.Int64N(max(1, g.Remaining))
		call.Bound, call.Want = call.Need, call.Need
		clock.Advance(time.Duration(r.IntN(20)) * time.Microsecond)
	}
	t.Logf("%d calls, %d tokens granted", calls, granted)
}

// Scenario45 has limits that allow nothing, and limits that are none.
func Scenario45(t *testing.T, b Backend) {
	for _, limit := range []lease.Limit{{}, {Rate: 10}, {Burst: 10}} {
		w := NewNodes(t, b, 1, limit, lease.Options{})
		for range 3 {
			if d := w.Take(0, key, 0); d.Allowed || d.Source != lease.SourceLimit {
				t.Errorf("%v: Take(0) = %+v: want a denial by the limit", limit, d)
			}
			d := w.Take(0, key, 1)
			if d.Allowed || d.Source != lease.SourceLimit || d.RetryAfter != 1<<63-1 {
				t.Errorf("%v: Take(1) = %+v: want a denial by the limit, for ever", limit, d)
			}
			w.Advance(time.Hour)
		}
		if n := w.Calls(); n != 0 {
			t.Errorf("%v: %d calls: want 0", limit, n)
		}
		w.Check()
	}
}

// Scenario46 mixes small requests with some of half the burst: they get what
// they ask for at 0.8 of the rate, and when refused a right word of when.
func Scenario46(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	w := NewNodes(t, b, 1, limit, leasing(lease.ShareEqual))
	due := time.Second
	var longest time.Duration
	for start := due; w.Now() < 20*time.Second; {
		w.Advance(time.Second / 300)
		w.Take(0, key, 1)
		if w.Now() < due {
			continue
		}
		if d := w.Take(0, key, limit.Burst/2); !d.Allowed {
			due = w.Now() + d.RetryAfter
			continue
		}
		longest = max(longest, w.Now()-start)
		start += time.Second
		due = start
	}
	t.Logf("a request of half the burst waits %v at most", longest)
	CheckAtMost(t, "seconds that a request of half the burst waits", longest.Seconds(), 0.1)
	CheckAtMost(t, "tokens refused to small ones", float64(w.Trace.Refused(key)%(limit.Burst/2)), 0)
	w.Check()

	// An emptied bucket, and the memory of a refusal of 1.
	emptied := func(leased int64) func() *Nodes {
		return func() *Nodes {
			w := NewNodes(t, b, 1, limit, leasing(lease.ShareEqual))
			if leased > 0 { // by a node that died since
				w.Store.Acquire(t.Context(), []lease.Call{{Key: key, Limit: limit, TTL: ttl, Want: leased, LastEpoch: -1, Share: lease.ShareNone}})
			}
			for w.Take(0, key, 1).Allowed {
			}
			return w
		}
	}
	for _, cost := range []int64{1, 2, 50, 500, 1000} {
		CheckExactPromise(t, emptied(0), 0, key, cost)
		CheckPromise(t, emptied(900), 0, key, cost)
	}
	// A larger cost was refused: a smaller one may be met all the same.
	w = NewNodes(t, b, 1, limit, leasing(lease.ShareEqual))
	w.Take(0, key, 500)
	w.Take(0, key, 400)
	if d := w.Take(0, key, 200); d.Allowed {
		t.Errorf("Take(200) of 100 = %+v: want a denial", d)
	}
	if d := w.Take(0, key, 60); !d.Allowed {
		t.Errorf("Take(60) of 100 after a refusal of 200 = %+v: want allowed", d)
	}
	w.Check()
}

// Scenario48 asks for what can never be admitted.
func Scenario48(t *testing.T, b Backend) {
	w := NewNodes(t, b, 1, lease.Limit{Rate: 10, Burst: 20}, lease.Options{})
	for _, cost := range []int64{21, 1 << 62, -1, -1 << 63} {
		_, err := w.Node(0).Take(t.Context(), key, cost)
		var bad *lease.CostError
		if !errors.As(err, &bad) || bad.Cost != cost || bad.Burst != 20 || !errors.Is(err, lease.ErrCost) {
			t.Errorf("Take(%d) = %v: want a *CostError for a burst of 20", cost, err)
		}
	}
	if n := w.Calls(); n != 0 {
		t.Errorf("%d calls for costs that can never be admitted: want 0", n)
	}
	if d := w.Take(0, key, 20); !d.Allowed {
		t.Errorf("Take(20) of a burst of 20 = %+v: want allowed", d)
	}
	w.Check()
}

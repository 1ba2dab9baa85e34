package leasetest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// The scenarios of the protocol notes, by their numbers there. Each runs on any
// Backend and asks the oracles that its row names. All of them check the level
// of every key, the ledger of every node, and that a node has one call per key
// under way.

const (
	key    = "user:1"
	period = 100 * time.Millisecond // T, in most scenarios
	ttl    = 2 * period             // h
)

func leasing(share lease.Share) lease.Options {
	return lease.Options{LeasePeriod: period, Share: share}
}

// perSecond returns what n in d is in a second.
func perSecond(n int64, d time.Duration) float64 { return float64(n) / d.Seconds() }

// Scenario01 has one node ask half the rate: it gets all of it, for one call a
// period once its lease has grown, and without allocating.
func Scenario01(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	w := NewNodes(t, b, 1, limit, leasing(lease.ShareEqual))
	w.Offer(time.Second, key, 1, []float64{500})
	before := w.Calls()
	w.Offer(10*time.Second, key, 1, []float64{500})
	t.Logf("%d calls, then %d in 100 periods", before, w.Calls()-before)
	if n := w.Trace.Refused(key); n != 0 {
		t.Errorf("refused %d tokens: want 0", n)
	}
	CheckAtMost(t, "calls while the lease grew", float64(before), 25)
	CheckAtMost(t, "calls in 100 periods", float64(w.Calls()-before), 100)

	for range 400 { // many at one instant make for a large lease
		w.Take(0, key, 1)
	}
	node, live := w.Node(0), w.Live(0)
	if live < 50 {
		t.Fatalf("lease = %d tokens: want 50 or more, to time hits", live)
	}
	allocations := testing.AllocsPerRun(20, func() {
		if d, err := node.Take(context.Background(), key, 1); err != nil || d.Source != lease.SourceLease {
			t.Errorf("Take = %+v, %v: want a hit", d, err)
		}
	})
	if allocations != 0 {
		t.Errorf("a hit makes %v allocations: want 0", allocations)
	}
}

// Scenario02 has one node ask three times the rate: it gets all there is, and
// the pace keeps it from asking more than once a period.
func Scenario02(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000} // 10·r·T
	w := NewNodes(t, b, 1, limit, leasing(lease.ShareEqual))
	w.Offer(20*time.Second, key, 1, []float64{3000})
	t.Logf("admitted %d of 21000, %d calls in 200 periods", w.Trace.Admitted(key), w.Calls())
	CheckAtLeast(t, "admitted", float64(w.Trace.Admitted(key)), 0.99*21_000)
	CheckAtMost(t, "calls in 200 periods", float64(w.Calls()), 200+12)
	w.Check()
}

// Scenario03 has 50 nodes ask three times the rate together.
func Scenario03(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 300} // 3·r·T, the least that promises the full rate
	w := NewNodes(t, b, 50, limit, leasing(lease.ShareEqual))
	got := w.Offer(10*time.Second, key, 1, Even(50, 3*limit.Rate))
	t.Logf("admitted %d of 10300, %.0f calls/s, Jain %.4f", w.Trace.Admitted(key), perSecond(w.Calls(), w.Now()), Jain(got))
	CheckAtLeast(t, "admitted", float64(w.Trace.Admitted(key)), 0.97*10_000)
	CheckAtMost(t, "calls/s", perSecond(w.Calls(), w.Now()), 50/period.Seconds())
	CheckAtLeast(t, "Jain's index", Jain(got), 0.98)
	w.Check()
}

// Scenario04 has 10 nodes with Zipf demand share equally: what a node gets is
// near its max-min share.
func Scenario04(t *testing.T, b Backend) {
	const d = 20 * time.Second
	limit := lease.Limit{Rate: 10_000, Burst: 10_000}
	w := NewNodes(t, b, 10, limit, leasing(lease.ShareEqual))
	demand := Zipf(10, 3*limit.Rate)
	w.Offer(time.Second, key, 1, demand)
	got := w.Offer(d, key, 1, demand)
	for i, want := range MaxMin(limit.Rate, demand) {
		rate := perSecond(got[i], d)
		t.Logf("node %d: asks %.0f/s, gets %.0f/s, %.2f of its max-min share", i, demand[i], rate, rate/want)
		if demand[i] > want && (rate < 0.85*want || rate > 1.15*want) {
			t.Errorf("node %d gets %.1f/s: want %.1f/s within 15 %%", i, rate, want)
		}
	}
	w.Check()
}

// Scenario05 is the same in proportion: each node gets the same part of what it
// asks for.
func Scenario05(t *testing.T, b Backend) {
	const d = 20 * time.Second
	limit := lease.Limit{Rate: 10_000, Burst: 10_000}
	w := NewNodes(t, b, 10, limit, leasing(lease.ShareProportional))
	demand := Zipf(10, 3*limit.Rate)
	w.Offer(time.Second, key, 1, demand)
	got := w.Offer(d, key, 1, demand)
	for i := range got {
		want, rate := demand[i]/3, perSecond(got[i], d)
		t.Logf("node %d: asks %.0f/s, gets %.0f/s, %.2f of its part", i, demand[i], rate, rate/want)
		if rate < 0.8*want || rate > 1.2*want {
			t.Errorf("node %d gets %.1f/s: want %.1f/s within 20 %%", i, rate, want)
		}
	}
	w.Check()
}

// Scenario06 has one node of 50 ask for everything: it gets everything.
func Scenario06(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	w := NewNodes(t, b, 50, limit, leasing(lease.ShareEqual))
	w.Offer(2*period, key, 1, []float64{3000})
	got := w.Offer(5*time.Second, key, 1, []float64{3000})
	t.Logf("%.3f of the rate from 2T on", perSecond(got[0], 5*time.Second)/limit.Rate)
	CheckAtLeast(t, "tokens/s", perSecond(got[0], 5*time.Second), 0.97*limit.Rate)
	for i := 1; i < 50; i++ {
		if live := w.Live(i); live != 0 {
			t.Errorf("node %d holds %d tokens: want 0", i, live)
		}
	}
	w.Check()
}

// Scenario07 moves all demand from one node to another.
func Scenario07(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 300}
	w := NewNodes(t, b, 2, limit, leasing(lease.ShareEqual))
	w.Offer(2*time.Second, key, 1, []float64{3000, 0})
	first := w.Offer(3*period, key, 1, []float64{0, 3000})
	second := w.Offer(2*ttl-3*period, key, 1, []float64{0, 3000})
	if live := w.Live(0); live != 0 {
		t.Errorf("old node holds %d tokens 2h after its last request: want 0", live)
	}
	got := w.Offer(3*time.Second, key, 1, []float64{0, 3000})
	t.Logf("%.2f of the rate in the first 3T, %.2f in the next T, then %.3f", perSecond(first[1], 3*period)/limit.Rate,
		perSecond(second[1], 2*ttl-3*period)/limit.Rate, perSecond(got[1], 3*time.Second)/limit.Rate)
	CheckAtLeast(t, "tokens/s", perSecond(second[1]+got[1], 3*time.Second+2*ttl-3*period), 0.9*limit.Rate)
	w.Check()
}

// Scenario08 asks for the whole burst of an idle key at one instant.
func Scenario08(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	setup := func() *Nodes {
		w := NewNodes(t, b, 1, limit, leasing(lease.ShareEqual))
		for i := range limit.Burst {
			if d := w.Take(0, key, 1); !d.Allowed {
				t.Fatalf("request %d of the burst = %+v: want allowed", i, d)
			}
		}
		return w
	}
	wait := CheckPromise(t, setup, 0, key, 1)
	t.Logf("next one after %v", wait)
	CheckAtMost(t, "seconds to wait", wait.Seconds(), (period + period/4).Seconds())
}

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
	w.Offer(d, key, 1_000_000, Even(10, 3*limit.Rate))
	t.Logf("admitted %.4f of rate·t + burst, %.1f calls/s", float64(w.Trace.Admitted(key))/(1e9*11), perSecond(w.Calls(), d))
	CheckAtLeast(t, "admitted", float64(w.Trace.Admitted(key)), 0.97*1e9*d.Seconds())
	CheckAtMost(t, "calls/s", perSecond(w.Calls(), d), 1.1*10/0.25)
	w.Check()
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

package leasetest

import (
	"context"
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

// The shares of nodes are told over 40 s. A node's calls come at their own phase
// of the period, which the pace's jitter shifts only slowly; whoever calls where
// something was left gets it, and in 10 s that does not average out.
const shared = 40 * time.Second

// Scenario04 has 10 nodes with Zipf demand share equally: what a node gets is
// near its max-min share.
func Scenario04(t *testing.T, b Backend) {
	limit := lease.Limit{Rate: 2000, Burst: 2000}
	w := NewNodes(t, b, 10, limit, leasing(lease.ShareEqual))
	demand := Zipf(10, 3*limit.Rate)
	w.Offer(2*time.Second, key, 1, demand)
	got := w.Offer(shared, key, 1, demand)
	for i, want := range MaxMin(limit.Rate, demand) {
		rate := perSecond(got[i], shared)
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
	limit := lease.Limit{Rate: 2000, Burst: 2000}
	w := NewNodes(t, b, 10, limit, leasing(lease.ShareProportional))
	demand := Zipf(10, 3*limit.Rate)
	w.Offer(2*time.Second, key, 1, demand)
	got := w.Offer(shared, key, 1, demand)
	for i := range got {
		want, rate := demand[i]/3, perSecond(got[i], shared)
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
	wait := CheckExactPromise(t, setup, 0, key, 1)
	t.Logf("next one after %v", wait)
	CheckAtMost(t, "seconds to wait", wait.Seconds(), (period + period/4).Seconds())
}

// Scenario11 has a herd on 50 nodes ask for an exhausted key, flat out: each node
// asks once a period, and not all at the same time. All nodes find it exhausted
// at one instant here; the pace's jitter of a tenth of a period takes some
// dozens of periods to spread them.
func Scenario11(t *testing.T, b Backend) {
	const nodes, slot, warm, d = 50, period / 5, 4 * time.Second, 4 * time.Second
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	w := NewNodes(t, b, nodes, limit, leasing(lease.ShareEqual))
	for i := range limit.Burst {
		w.Take(int(i%nodes), key, 1)
	}
	slots := make([]int64, d/slot)
	for i := range nodes {
		check := w.Link(i).Carried
		w.Link(i).Carried = func(c lease.Call, a lease.Answer) {
			check(c, a)
			if at := w.Now() - warm; at >= 0 && at < d {
				slots[at/slot]++
			}
		}
	}
	w.Offer(warm+d, key, 1, Even(nodes, 5_000))
	var sum, peak int64
	for _, n := range slots {
		sum += n
		peak = max(peak, n)
	}
	mean := float64(sum) / float64(len(slots))
	t.Logf("%.0f calls/s; in %v at most %d, on average %.1f", perSecond(sum, d), slot, peak, mean)
	CheckAtMost(t, "calls/s", perSecond(sum, d), nodes/period.Seconds())
	CheckAtMost(t, "most calls in a fifth of a period, over the mean", float64(peak)/mean, 3)
	w.Check()
}

// ScenarioHotKey has one node decide a hundred thousand times a second.
func ScenarioHotKey(t *testing.T, b Backend) {
	const d = 2 * time.Second
	limit := lease.Limit{Rate: 200_000, Burst: 200_000}
	w := NewNodes(t, b, 1, limit, lease.Options{})
	w.Offer(time.Second, key, 1, []float64{100_000})
	before := w.Calls()
	w.Offer(d, key, 1, []float64{100_000})
	t.Logf("%d calls, then %.1f/s", before, perSecond(w.Calls()-before, d))
	CheckAtMost(t, "calls/s", perSecond(w.Calls()-before, d), 5)
	if n := w.Trace.Refused(key); n != 0 {
		t.Errorf("refused %d tokens: want 0", n)
	}
	w.Check()
}

// ScenarioTripleDemand has ten nodes ask for three times the rate: they get all
// there is of a burst that just covers what is on the way, 3·r·T. What is
// missing of rate·t + burst is about one period's tokens, on leases or not yet
// asked for.
func ScenarioTripleDemand(t *testing.T, b Backend) {
	const d = 20 * time.Second
	limit := lease.Limit{Rate: 1000, Burst: 300}
	w := NewNodes(t, b, 10, limit, leasing(lease.ShareEqual))
	w.Offer(d, key, 1, Even(10, 3*limit.Rate))
	most := limit.Rate*d.Seconds() + float64(limit.Burst)
	t.Logf("admitted %.4f of rate·t + burst, level %.1f, %.1f calls/s", float64(w.Trace.Admitted(key))/most, w.Trace.Peak(key), perSecond(w.Calls(), d))
	CheckAtLeast(t, "admitted", float64(w.Trace.Admitted(key)), 0.99*most)
	w.Check()
}

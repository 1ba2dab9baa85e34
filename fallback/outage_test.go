package fallback_test

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

const (
	// period is the lease period of all nodes here, with its jitter.
	period = 275 * time.Millisecond
	// heals is how long after the store is back the last node knows: the longest
	// pause between probes, with its jitter, and the ramp.
	heals = 750*time.Millisecond + time.Second
)

// stale is how far off the shares' knowledge of the balance may be together: what
// was granted in a lease period, and the rounding of balances.
func stale(limit lease.Limit) float64 { return limit.Rate*period.Seconds() + 1 }

var splits = map[string]fallback.Options{
	"equal": {Split: fallback.SplitEqual},
	"blend": {Split: fallback.SplitBlend},
}

// The whole outage with the right number of nodes: each admits its share, and
// all together no more than the limit and what their knowledge of the balance,
// a lease period old, was off by.
func TestScenario29_WholeOutage(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 1000}
	for name, opts := range splits {
		for what, demand := range map[string][]float64{
			"even": leasetest.Even(10, 500), "zipf": leasetest.Zipf(10, 500), "idle": leasetest.Even(10, 50),
		} {
			t.Run(name+"/"+what, func(t *testing.T) {
				inWorld(t, 10, limit, opts, func(w *world) {
					w.offer(20*time.Second, "k", 1, demand)
					w.setDown(true)
					w.offer(time.Second, "k", 1, demand) // leases end
					got := w.offer(60*time.Second, "k", 1, demand)
					want := 0.0
					for _, d := range demand {
						want += min(d, 10)
					}
					t.Logf("admitted %d of %.0f, level %.0f", got, 60*want, w.trace.Peak("k"))
					leasetest.CheckAtLeast(t, "admitted", float64(got), 0.95*60*want)
					w.trace.CheckWithin(t, stale(limit))
				})
			})
		}
	}
}

// A blend serves a skewed demand better than equal shares at first.
func TestBlendFollowsDemand(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 1000}
	demand := leasetest.Zipf(10, 100) // all of it could be admitted
	got := map[string]int64{}
	for name, opts := range splits {
		inWorld(t, 10, limit, opts, func(w *world) {
			w.offer(20*time.Second, "k", 1, demand)
			w.setDown(true)
			w.offer(10*time.Second, "k", 1, demand) // full shares are used up
			got[name] = w.offer(20*time.Second, "k", 1, demand)
			w.trace.CheckWithin(t, stale(limit))
		})
	}
	t.Logf("admitted of 2000: %v", got)
	if float64(got["blend"]) < 1.05*float64(got["equal"]) {
		t.Errorf("admitted %v: want a twentieth more with the blend", got)
	}
}

// Five seconds up and five down, for two minutes.
func TestScenario30_Flapping(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 1000}
	for name, opts := range splits {
		t.Run(name, func(t *testing.T) {
			inWorld(t, 10, limit, opts, func(w *world) {
				demand := leasetest.Even(10, 500)
				w.offer(20*time.Second, "k", 1, demand)
				begin := w.admitted()
				for range 12 {
					w.setDown(true)
					w.offer(5*time.Second, "k", 1, demand)
					w.setDown(false)
					w.offer(5*time.Second, "k", 1, demand)
				}
				rate := float64(w.admitted()-begin) / 120
				t.Logf("%.1f/s, level %.0f", rate, w.trace.Peak("k"))
				leasetest.CheckAtMost(t, "long-run rate", rate, 1.05*limit.Rate)
				leasetest.CheckAtLeast(t, "long-run rate", rate, 0.9*limit.Rate)
				// What nodes know is a lease period old, and until the last is back
				// the others take what its debt is for.
				w.trace.CheckWithin(t, limit.Rate*(period+heals).Seconds())
			})
		})
	}
}

// The store fails right after the bucket was drained: there is no second burst.
func TestScenario31_DrainedThenDown(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 1000}
	for name, opts := range splits {
		t.Run(name, func(t *testing.T) {
			inWorld(t, 10, limit, opts, func(w *world) {
				demand := leasetest.Even(10, 5000)
				w.offer(5*time.Second, "k", 1, demand)
				var live int64
				for _, n := range w.nodes {
					live += n.Stats().Live
				}
				w.setDown(true)
				got := w.offer(time.Second, "k", 1, demand)
				most := limit.Rate*(1+period.Seconds()) + float64(live)
				leasetest.CheckAtMost(t, "admitted in the first second", float64(got), most)
				leasetest.CheckAtLeast(t, "admitted in the first second", float64(got), 0.5*limit.Rate)
			})
		})
	}
}

// After an outage as long as ten times the bucket takes to fill, with demand for
// less than the limit at its end, the debt is what the shares lack and not all
// that was admitted.
func TestScenario32_LongOutage(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 1000}
	inWorld(t, 10, limit, fallback.Options{Split: fallback.SplitEqual}, func(w *world) {
		w.offer(10*time.Second, "k", 1, leasetest.Even(10, 500))
		w.setDown(true)
		w.offer(100*time.Second, "k", 1, leasetest.Even(10, 500))
		w.offer(5*time.Second, "k", 1, leasetest.Even(10, 20)) // the shares fill, by 400 of 1000
		w.setDown(false)
		w.sleep(heals)
		var s fallback.Stats
		for _, n := range w.nodes {
			st := n.fallback.Stats()
			s.Admitted += st.Admitted
			s.Charged += st.Charged
			s.Forgiven += st.Forgiven
			s.Owed += st.Owed
		}
		// Leases of the shares that ended unused are part of what they lack.
		if s.Owed != 0 || s.Charged+s.Forgiven != s.Admitted || s.Charged < 500 || s.Charged > 650 {
			t.Errorf("stats = %+v: want about 600 charged, and the rest forgiven", s)
		}
		level := w.trace.Peak("k")
		t.Logf("%+v, balance %.0f, level %.0f", s, w.balance("k"), level)
		if b := w.balance("k"); b < 350 || b > 650 {
			t.Errorf("balance = %.0f: want what the shares had, 400 and what came since", b)
		}
		w.offer(20*time.Second, "k", 1, leasetest.Even(10, 5000))
		w.trace.CheckWithin(t, stale(limit))
	})
}

// Three of ten nodes are cut off: they add their part of the limit, no more.
func TestScenario36_PartCutOff(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 1000}
	inWorld(t, 10, limit, fallback.Options{Split: fallback.SplitEqual}, func(w *world) {
		demand := leasetest.Even(10, 500)
		w.offer(20*time.Second, "k", 1, demand)
		for _, n := range w.nodes[:3] {
			n.down.Store(true)
		}
		got := w.offer(60*time.Second, "k", 1, demand)
		const part = 1.3
		leasetest.CheckAtMost(t, "admitted", float64(got), part*limit.Rate*60+stale(limit))
		for _, n := range w.nodes[:3] {
			n.down.Store(false)
		}
		w.offer(30*time.Second, "k", 1, demand)
		w.trace.CheckWithin(t, (part-1)*(float64(limit.Burst)+limit.Rate*60)+stale(limit))
	})
}

// All but one are cut off, and then heal: twice the limit at worst, and what was
// too much is paid back.
func TestScenario37_AllButOneCutOff(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 200}
	inWorld(t, 10, limit, fallback.Options{Split: fallback.SplitEqual}, func(w *world) {
		demand := leasetest.Even(10, 2000)
		w.offer(10*time.Second, "k", 1, demand)
		for _, n := range w.nodes[1:] {
			n.down.Store(true)
		}
		got := w.offer(20*time.Second, "k", 1, demand)
		leasetest.CheckAtMost(t, "admitted", float64(got), 1.9*limit.Rate*20+stale(limit))
		leasetest.CheckAtLeast(t, "admitted", float64(got), 1.7*limit.Rate*20)
		for _, n := range w.nodes[1:] {
			n.down.Store(false)
		}
		// All the debts are paid within the time to fill, as far as a bucket can be
		// in debt.
		w.offer(2*time.Second+heals, "k", 1, demand)
		after := w.offer(10*time.Second, "k", 1, demand)
		leasetest.CheckAtMost(t, "admitted afterwards", float64(after), limit.Rate*10+stale(limit))
		leasetest.CheckAtLeast(t, "admitted afterwards", float64(after), 0.9*limit.Rate*10)
		for i, n := range w.nodes {
			if s := n.fallback.Stats(); s.Owed != 0 {
				t.Errorf("node %d: %+v: want nothing owed", i, s)
			}
		}
	})
}

// A wrong number of nodes makes the rate wrong by just that factor.
func TestScenario38_WrongNumberOfNodes(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 1000}
	for believed, factor := range map[int]float64{5: 2, 10: 1, 20: 0.5} {
		opts := fallback.Options{Split: fallback.SplitEqual, Nodes: func() int { return believed }}
		inWorld(t, 10, limit, opts, func(w *world) {
			demand := leasetest.Even(10, 500)
			w.offer(20*time.Second, "k", 1, demand)
			w.setDown(true)
			w.offer(5*time.Second, "k", 1, demand)
			got := float64(w.offer(60*time.Second, "k", 1, demand))
			if want := factor * limit.Rate * 60; math.Abs(got-want) > 0.02*want {
				t.Errorf("%d nodes believed, 10 there: admitted %.0f: want %.0f", believed, got, want)
			}
			if got := w.nodes[0].fallback.Stats().Nodes; got != believed {
				t.Errorf("Stats.Nodes = %d: want %d", got, believed)
			}
		})
	}
}

// One an hour on fifty nodes: without owners a share is a token an hour divided
// by fifty, with them one node has it all.
func TestScenario42_OneAnHourInAnOutage(t *testing.T) {
	limit := lease.Limit{Rate: 1.0 / 3600, Burst: 1}
	for _, owners := range []bool{false, true} {
		t.Run(fmt.Sprintf("owners=%t", owners), func(t *testing.T) {
			added := 0
			inWorld(t, 0, limit, fallback.Options{}, func(w *world) {
				for range 50 {
					opts := fallback.Options{Nodes: func() int { return 50 }, Backoff: time.Hour} // days of probes
					if mine := added; owners {
						opts.Owns = func(_ string, owners int) (owns, known bool) { return mine < owners, true }
					}
					w.add(opts)
					added++
				}
				ask := func(d time.Duration) (admitted int64) {
					before := w.admitted()
					for end := w.now() + d; w.now() < end; w.sleep(5 * time.Minute) {
						for _, n := range w.nodes {
							n.take("k", 1)
						}
					}
					return w.admitted() - before
				}
				ask(3 * time.Hour)
				w.setDown(true)
				got := ask(24 * time.Hour)
				if got > 25 || owners && got < 24 {
					t.Errorf("admitted %d in a day: want 24, at most one more", got)
				}
				// A token a fiftieth of which comes in an hour takes two days.
				if got := ask(48 * time.Hour); got > 50 || got < 46 {
					t.Errorf("admitted %d in the next two days: want 48, give or take an hour's", got)
				}
				w.trace.CheckWithin(t, 49) // a token each, at worst
			})
		})
	}
}

// Costs larger than a share are met in the end: its bucket grows as large as
// they are, and no larger.
func TestCostOverShare(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 100}
	const cost = 40
	inWorld(t, 10, limit, fallback.Options{Split: fallback.SplitEqual}, func(w *world) {
		demand := leasetest.Even(10, 2000)
		w.offer(5*time.Second, "k", cost, demand)
		w.setDown(true)
		w.offer(5*time.Second, "k", cost, demand)
		got := w.offer(40*time.Second, "k", cost, demand)
		leasetest.CheckAtLeast(t, "admitted", float64(got), 0.9*40*limit.Rate) // a full bucket waits for a request
		w.trace.CheckWithin(t, 10*cost-float64(limit.Burst)+stale(limit))
	})
}

// A denial in an outage keeps its word.
func TestDegradedRetryAfter(t *testing.T) {
	for _, limit := range []lease.Limit{
		{Rate: 100, Burst: 1000}, {Rate: 1, Burst: 20}, {Rate: 0.01, Burst: 10}, {Rate: 1e6, Burst: 1e6}, {Rate: 1.0 / 3600, Burst: 4},
	} {
		for _, cost := range []int64{1, 3} {
			inWorld(t, 4, limit, fallback.Options{}, func(w *world) {
				w.nodes[0].take("k", 1)
				w.setDown(true)
				n := w.nodes[0]
				d := n.take("k", cost)
				for i := 0; d.Allowed && i < 10_000_000; i++ {
					d = n.take("k", cost)
				}
				if d.Allowed || d.Source != lease.SourceLocal || d.RetryAfter <= 0 || d.ResetAfter < d.RetryAfter || d.Remaining >= max(cost, 3) {
					t.Fatalf("%v: Take(%d) = %+v: want a denial by the share", limit, cost, d)
				}
				w.sleep(d.RetryAfter)
				if again := n.take("k", cost); !again.Allowed || again.Source != lease.SourceLocal {
					t.Errorf("%v: Take(%d) after the %v promised = %+v: want it admitted", limit, cost, d.RetryAfter, again)
				}
			})
		}
	}
}

// What a node starts with when it never heard of a key.
func TestUnknownKey(t *testing.T) {
	limit := lease.Limit{Rate: 1, Burst: 100}
	for start, want := range map[fallback.Unknown]int64{fallback.StartOne: 1, fallback.StartEmpty: 0, fallback.StartFull: 25} {
		inWorld(t, 4, limit, fallback.Options{Unknown: start, Split: fallback.SplitEqual}, func(w *world) {
			w.setDown(true)
			for range 40 {
				w.nodes[0].take("new", 1)
			}
			if got := w.nodes[0].admitted; got != want {
				t.Errorf("start %d: admitted %d at once: want %d", start, got, want)
			}
		})
	}
}

// A limit's own policy decides.
func TestPolicies(t *testing.T) {
	for policy, want := range map[lease.Policy]struct {
		admitted int64
		source   lease.Source
	}{
		lease.Degrade: {250, lease.SourceLocal}, lease.Allow: {3000, lease.SourcePolicy}, lease.Deny: {0, lease.SourcePolicy},
	} {
		limit := lease.Limit{Rate: 0.001, Burst: 1000, OnFailure: policy}
		inWorld(t, 4, limit, fallback.Options{Split: fallback.SplitEqual}, func(w *world) {
			n := w.nodes[0]
			n.take("k", 0)
			w.setDown(true)
			for range 3000 {
				if d := n.take("k", 1); d.Source != want.source || d.Limit != limit {
					t.Fatalf("%v: Take = %+v: want source %v", policy, d, want.source)
				}
			}
			if n.admitted != want.admitted {
				t.Errorf("%v: admitted %d of 3000: want %d", policy, n.admitted, want.admitted)
			}
			s := n.fallback.Stats()
			if owed := map[bool]int64{true: 250}[policy == lease.Degrade]; s.Owed != owed {
				t.Errorf("%v: owed %d: want %d", policy, s.Owed, owed)
			}
			w.setDown(false)
			w.sleep(heals)
			if d := n.take("k", 1); d.Source == lease.SourceLocal || d.Source == lease.SourcePolicy {
				t.Errorf("%v: Take once the store is back = %+v: want the store's", policy, d)
			}
		})
	}
}

// A refund in an outage lowers what is owed; one of more than was admitted, and
// a reset, are refused.
func TestRefundInAnOutage(t *testing.T) {
	limit := lease.Limit{Rate: 0.001, Burst: 100}
	ctx := context.Background()
	inWorld(t, 1, limit, fallback.Options{}, func(w *world) {
		n := w.nodes[0]
		n.take("k", 0)
		w.setDown(true)
		n.take("k", 20)
		if err := n.Refund(ctx, "k", 15); err != nil {
			t.Errorf("Refund = %v: want nil", err)
		}
		if err := n.Refund(ctx, "k", 6); err == nil {
			t.Error("Refund of more than was admitted = nil: want an error")
		}
		if err := n.Reset(ctx, "k"); err == nil {
			t.Error("Reset = nil: want an error")
		}
		if s := n.fallback.Stats(); s.Owed != 5 {
			t.Errorf("owed %d: want 5", s.Owed)
		}
		w.setDown(false)
		w.sleep(heals)
		if got := w.balance("k"); math.Abs(got-95) > 0.1 {
			t.Errorf("balance = %v: want 95", got)
		}
	})
}

// A node hoards what it can of its share on lease, and then spends it all: no
// more than the share, for what is out counts against its burst.
func TestShareHoard(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 100}
	inWorld(t, 1, limit, fallback.Options{}, func(w *world) {
		s := w.nodes[0].fallback
		call := lease.Call{Key: "k", Limit: limit, TTL: 600 * time.Millisecond, Want: 100, Demand: 100, LastEpoch: -1}
		call.Hint = lease.Hint{Known: true, Tokens: 100}
		first := s.Local(call).Grant
		time.Sleep(500 * time.Millisecond)
		second := s.Local(call).Grant
		if first.Tokens != 100 || second.Tokens != 0 {
			t.Errorf("granted %d and, with that still out, %d: want 100 and none", first.Tokens, second.Tokens)
		}
		// Spent, they leave room from then on, not from before.
		call.Own[0] = lease.Report{Epoch: first.Epoch, Spent: 60, Returned: 10}
		if third := s.Local(call).Grant; third.Tokens != 10 {
			t.Errorf("granted %d right after a report: want the 10 that came back", third.Tokens)
		}
		call.Own = [2]lease.Report{}
		time.Sleep(100 * time.Millisecond)
		if fourth := s.Local(call).Grant; fourth.Tokens != 10 {
			t.Errorf("granted %d a tenth of a second later: want 10", fourth.Tokens)
		}
		// Of those never reported the share keeps no count for ever.
		time.Sleep(3 * time.Second)
		if fifth := s.Local(call).Grant; fifth.Tokens != 100 {
			t.Errorf("granted %d when all that was out must have ended: want 100", fifth.Tokens)
		}
	})
}

// A denial by the share for an hour does not outlive the outage.
func TestRecoveryIsNoticed(t *testing.T) {
	limit := lease.Limit{Rate: 1.0 / 3600, Burst: 10}
	inWorld(t, 4, limit, fallback.Options{}, func(w *world) {
		n := w.nodes[0]
		n.take("k", 1)
		w.setDown(true)
		for n.take("k", 1).Allowed {
		}
		w.sleep(2 * time.Second) // no lease is out any more
		n.take("k", 1)
		w.setDown(false)
		w.sleep(heals)
		if d := n.take("k", 1); !d.Allowed || d.Source != lease.SourceStore {
			t.Errorf("Take once the store is back = %+v: want it admitted by the store", d)
		}
	})
}

// A run depends on its seeds alone.
func TestSteppedIsDeterministic(t *testing.T) {
	limit := lease.Limit{Rate: 100, Burst: 300}
	run := func() (admitted int64, stats string) {
		inWorld(t, 4, limit, fallback.Options{}, func(w *world) {
			for range 4 {
				w.offer(3*time.Second, "k", 1, leasetest.Zipf(4, 300))
				w.setDown(true)
				w.offer(3*time.Second, "k", 1, leasetest.Zipf(4, 300))
				w.setDown(false)
			}
			for _, n := range w.nodes {
				stats += fmt.Sprintf("%+v %+v\n", n.Stats(), n.fallback.Stats())
			}
			admitted = w.admitted()
		})
		return admitted, stats
	}
	first, stats := run()
	for range 3 {
		if again, other := run(); again != first || other != stats {
			t.Fatalf("admitted %d, then %d:\n%s\n%s", first, again, stats, other)
		}
	}
}

package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// Leases: over-admission by many nodes, under-use, memory, restart.
//
// Cases of the group that wait for a later feature:
//
//	L06  polled configuration       configuration file (here: AllowLimit, LimitsVersion)
//	L09  unlimited                  there is no unlimited limit
//	L12  the window rolls           window algorithms
//	L15  caps by live count         membership, fallback
//	L19  fallback object            fallback

// nodeLines returns n nodes, each on a line of its own.
func (w *world) nodeLines(n int, rtt time.Duration, limits hybrid.Limits, opts hybrid.Options) (nodes []*hybrid.Limiter, lines []*line) {
	w.t.Helper()
	for range n {
		ln := newLine(rtt)
		lines = append(lines, ln)
		nodes = append(nodes, w.nodeOver(ln, limits, opts))
	}
	return nodes, lines
}

// load asks l for one token every interval for d, a little off beat, and
// returns how many were admitted.
func (tr *trace) load(l *hybrid.Limiter, key string, interval, d time.Duration, seed uint64) (admitted int64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	for end := tr.w.since() + d; tr.w.since() < end; {
		if tr.ask(l, key, 1).Allowed {
			admitted++
		}
		time.Sleep(min(interval/2+time.Duration(rng.Int64N(int64(interval))), end-tr.w.since()))
	}
	return admitted
}

func TestL01_LeasesCountAgainstTheBurst(t *testing.T) {
	const nodes = 10
	limit := hybrid.Limit{Rate: 100.0 / 3600, Burst: 100, OnFailure: hybrid.Deny}
	bubble(t, func(t *testing.T, w *world) {
		all, lines := w.nodeLines(nodes, time.Millisecond, limit, hybrid.Options{})
		tr := w.trace(limit)
		for _, l := range all { // a lease each
			tr.ask(l, "k", 1)
			tr.ask(l, "k", 1)
			tr.ask(l, "k", 1)
		}
		if b := w.bucket("k"); b.out() < nodes {
			t.Fatalf("bucket = %+v; want a lease on each node", b)
		}
		for i := range lines { // half of them silent ever after
			lines[i].dead.Store(i%2 == 0)
		}
		w.sleep(time.Hour) // full again, whatever became of the leases
		before := tr.total()
		together(nodes*40, func(i int) { tr.ask(all[i%nodes], "k", 1) })
		for i := range lines {
			lines[i].dead.Store(false)
		}
		w.sleep(2 * time.Second) // what is on lease comes back
		for _, l := range all {
			tr.burst(l, "k", 100)
		}
		tr.check()
		if got := tr.total() - before; got < 100 || got > 101 {
			t.Errorf("burst after an hour = %d; want 100: the bound is reached", got)
		}
	})

	// Hoarded while the bucket refills: it stops short of the burst by what is
	// out. At this rate the lease lives as long as two thirds of a refill.
	for _, hold := range []time.Duration{100 * time.Millisecond, 200 * time.Millisecond, 400 * time.Millisecond} {
		bubble(t, func(t *testing.T, w *world) {
			limit := hybrid.Limit{Rate: 400.0 / 3, Burst: 100}
			all, _ := w.nodeLines(3, 0, limit, hybrid.Options{})
			tr := w.trace(limit)
			for _, l := range all {
				for range 3 {
					tr.ask(l, "k", 2)
				}
			}
			for range 4 { // never idle for a period, so nothing is given back
				w.sleep(hold / 4)
				for _, l := range all[:2] {
					tr.ask(l, "k", 1)
				}
			}
			var live int64
			for _, l := range all {
				live += l.Stats().Live
			}
			if live == 0 {
				t.Errorf("no node holds a token after %v; want this test to hoard", hold)
			}
			for range 2 {
				for _, l := range all {
					tr.burst(l, "k", 100)
				}
			}
			tr.check()
		})
	}

	// At once, with the leases out: never more than the burst.
	bubble(t, func(t *testing.T, w *world) {
		all, _ := w.nodeLines(nodes, 0, limit, hybrid.Options{})
		tr := w.trace(limit)
		for range 4 {
			for _, l := range all {
				tr.ask(l, "k", 1)
			}
		}
		for _, l := range all {
			tr.burst(l, "k", 100)
		}
		tr.check()
		var live int64
		for _, l := range all {
			live += l.Stats().Live
		}
		if got := tr.total() + live; got > 100 || got < 90 {
			t.Errorf("admitted %d, and %d still on lease; want 100 in all", tr.total(), live)
		}
	})
}

func TestL03_EveryTokenIsReportedOnce(t *testing.T) {
	for name, interval := range map[string]time.Duration{
		"one per period": 250 * time.Millisecond, "hot": 10 * time.Millisecond, "irregular": 73 * time.Millisecond,
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				limit := hybrid.Limit{Rate: 1e-8, Burst: 5000} // nothing refills
				limit.Rate = 5000 / (200 * 365 * 24 * 3600.0)
				all, _ := w.nodeLines(3, time.Millisecond, limit, hybrid.Options{})
				tr := w.trace(limit)
				for i := range 100 {
					for _, l := range all[:1+i%3] {
						tr.ask(l, "k", 1+int64(i%2))
					}
					w.sleep(interval)
				}
				for _, l := range all {
					if err := l.Close(t.Context()); err != nil {
						t.Errorf("Close = %v; want nil", err)
					}
				}
				b := w.bucket("k")
				if got := limit.Burst - b.tokens(); got != tr.total() || b.out() != 0 {
					t.Errorf("charged %d, %d still out; want %d admitted, 0", got, b.out(), tr.total())
				}
				tr.check()
			})
		})
	}
}

func TestL04_EvictionLosesNoSpend(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.Limit{Rate: 50 / (200 * 365 * 24 * 3600.0), Burst: 50}
		all, _ := w.nodeLines(2, time.Millisecond, limit, hybrid.Options{MaxKeys: 10})
		const keys = 80
		var spent [keys]int64
		for round := range 3 {
			for i := range keys {
				l := all[(i+round)%2]
				for range 1 + i%4 { // up to a lease each
					d, err := l.Allow(t.Context(), fmt.Sprint("k", i))
					if err != nil {
						t.Fatal(err)
					}
					if d.Allowed {
						spent[i]++
					}
				}
			}
		}
		for _, l := range all {
			if s := l.Stats(); s.Keys > 10 || s.Evicted < keys {
				t.Errorf("Stats = %+v; want at most 10 keys", s)
			}
			if err := l.Close(t.Context()); err != nil {
				t.Errorf("Close = %v; want nil", err)
			}
		}
		for i := range spent {
			b := w.bucket(fmt.Sprint("k", i))
			if got := 50 - b.tokens() - b.out(); got != spent[i] || b.out() != 0 {
				t.Errorf("key %d: charged %d, %d still out; want %d, 0", i, got, b.out(), spent[i])
			}
			if want := int64(3 * (1 + i%4)); spent[i] != want {
				t.Errorf("key %d: admitted %d; want %d", i, spent[i], want)
			}
		}
	})
}

func TestL06_LimitsChangeWhileLeased(t *testing.T) {
	const h = 500 * time.Millisecond // how long a lease lives
	from100 := hybrid.PerSecond(100, 100)
	for _, c := range []struct {
		from, to hybrid.Limit
		idle     bool // the nodes are idle when the limit changes
	}{
		{from100, hybrid.PerSecond(10, 10), false},
		{from100, hybrid.PerSecond(10, 10), true},
		{from100, hybrid.Limit{}, false},
		{from100, hybrid.Limit{}, true},
		{hybrid.PerSecond(10, 10), from100, false},
		{hybrid.PerSecond(10, 10), from100, true},
	} {
		// By version: half the nodes know the new limit; the others learn it
		// from the bucket.
		t.Run(fmt.Sprintf("version/%v to %v/idle=%t", c.from, c.to, c.idle), func(t *testing.T) {
			if c.to.Zero() {
				t.Skip("see TestL06_ZeroByVersion")
			}
			bubble(t, func(t *testing.T, w *world) {
				old, _ := w.nodeLines(3, time.Millisecond, c.from, hybrid.Options{LimitsVersion: 1})
				tr := w.trace(c.from)
				ask := func(nodes []*hybrid.Limiter, tr *trace, d time.Duration) {
					for end := w.since() + d; w.since() < end; w.sleep(4 * time.Millisecond) {
						for _, l := range nodes {
							tr.ask(l, "k", 1)
						}
					}
				}
				ask(old, tr, time.Second)
				tr.checkAtLeast(int64(c.from.Rate))
				if c.idle {
					w.sleep(10 * time.Second)
				}
				updated, _ := w.nodeLines(3, time.Millisecond, c.to, hybrid.Options{LimitsVersion: 2})
				all := append(updated, old...)
				loose := w.trace(hybrid.Limit{Rate: max(c.from.Rate, c.to.Rate), Burst: max(c.from.Burst, c.to.Burst)})
				ask(all, loose, h)
				loose.check()
				if b := w.bucket("k"); b.burst != c.to.Burst || b.tokens() > c.to.Burst {
					t.Errorf("bucket = %+v; want burst %d and no more tokens", b, c.to.Burst)
				}
				strict := w.trace(c.to)
				ask(all, strict, 3*time.Second)
				strict.checkAtLeast(int64(0.9 * 3 * c.to.Rate))
			})
		})
		// Unversioned, and told to every node with each request.
		t.Run(fmt.Sprintf("AllowLimit/%v to %v/idle=%t", c.from, c.to, c.idle), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				all, _ := w.nodeLines(3, time.Millisecond, c.from, hybrid.Options{})
				ask := func(limit hybrid.Limit, tr *trace, d time.Duration) {
					for end := w.since() + d; w.since() < end; w.sleep(4 * time.Millisecond) {
						for _, l := range all {
							begin := w.since()
							d, err := l.AllowLimit(context.Background(), "k", limit, 1)
							if err != nil {
								t.Errorf("AllowLimit(%v) = %v; want nil", limit, err)
							}
							tr.add(begin, d, 1)
						}
					}
				}
				tr := w.trace(c.from)
				ask(c.from, tr, time.Second)
				tr.checkAtLeast(int64(c.from.Rate))
				if c.idle {
					w.sleep(10 * time.Second)
				}
				ask(c.to, w.trace(c.to), h)
				strict := w.trace(c.to)
				ask(c.to, strict, 3*time.Second)
				if c.to.Zero() {
					if got := strict.total(); got != 0 {
						t.Errorf("admitted %d after the limit became 0; want 0", got)
					}
					return
				}
				strict.checkAtLeast(int64(0.9 * 3 * c.to.Rate))
			})
		})
	}
}

// A version that forbids a key holds on the nodes that have it, from the first
// request on, also while others still have an older one. Reaching those is for
// the source of the configuration: a bucket cannot say "nothing", for it would
// have to last for ever.
func TestL06_ZeroByVersion(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(100, 100)
		old := w.node(limit, hybrid.Options{LimitsVersion: 1})
		tr := w.trace(limit)
		tr.every(old, "k", 5*time.Millisecond, time.Second)
		tr.checkAtLeast(100)

		updated := w.node(hybrid.Limit{}, hybrid.Options{LimitsVersion: 2})
		for range 100 { // a lease's life
			tr.ask(updated, "k", 1)
			tr.ask(old, "k", 1)
			w.sleep(5 * time.Millisecond)
		}
		if s := updated.Stats(); s.Denied != 100 || s.Spent != 0 || s.Calls != 0 {
			t.Errorf("Stats of the node that forbids = %+v; want 100 denied and no call", s)
		}
		tr.check()
	})
}

func TestL07_TwoVersionsAlternate(t *testing.T) {
	big, small := hybrid.PerSecond(1, 100), hybrid.PerSecond(1, 10)
	for _, c := range []struct {
		name       string
		vBig, vSml int64
	}{
		{"the small one is newer", 1, 2}, {"the big one is newer", 2, 1}, {"unversioned", 0, 0}, {"same version", 1, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				var all []*hybrid.Limiter
				for range 2 {
					all = append(all, w.node(big, hybrid.Options{LimitsVersion: c.vBig}), w.node(small, hybrid.Options{LimitsVersion: c.vSml}))
				}
				tr := w.trace(big)
				for i := range 1000 {
					tr.ask(all[i%len(all)], "k", 1)
					w.sleep(7 * time.Millisecond)
				}
				tr.check()
				if b := w.bucket("k"); c.vSml > c.vBig && b.burst != 10 || c.vBig > c.vSml && b.burst != 100 {
					t.Errorf("bucket = %+v; want the newer limit in force", b)
				}
				if c.vSml > c.vBig {
					// Once the newer version is known everywhere, only it counts.
					w.sleep(time.Minute)
					strict := w.trace(small)
					for i := range 400 {
						strict.ask(all[i%len(all)], "k", 1)
						w.sleep(7 * time.Millisecond)
					}
					strict.checkAtLeast(10)
				}
			})
		})
	}
}

func TestL09_FromZeroAndBack(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(10, 10)
		ask := func(tr *trace, l *hybrid.Limiter, key string, limit hybrid.Limit) {
			begin := w.since()
			d, err := l.AllowLimit(context.Background(), key, limit, 1)
			if err != nil {
				t.Errorf("AllowLimit(%v) = %v; want nil", limit, err)
			}
			tr.add(begin, d, 1)
		}
		zero := w.trace(limit)
		l := w.node(hybrid.Limit{}, hybrid.Options{})
		for range 3600 {
			ask(zero, l, "k", hybrid.Limit{})
			w.sleep(time.Second)
		}
		zero.checkTotal(0)

		tr := w.trace(limit)
		for range 25 {
			ask(tr, l, "k", limit) // not stuck, and no more than the burst
		}
		tr.checkTotal(10)
		calls := l.Stats().Calls
		for range 1000 {
			ask(tr, l, "k", limit)
			w.sleep(10 * time.Millisecond)
		}
		tr.checkAtLeast(10 + 95)
		if n := l.Stats().Calls - calls; n > 2*100 {
			t.Errorf("%d calls in 10s at 10/s; want them bounded", n)
		}

		// A used bucket that is closed and opened again keeps its balance.
		for range 100 {
			ask(zero, l, "k", hybrid.Limit{})
		}
		zero.checkTotal(0)
		for range 25 {
			ask(tr, l, "k", limit)
		}
		tr.check()

		// Never used and raised: full at its new burst.
		fresh := w.trace(hybrid.PerSecond(20, 40))
		for range 50 {
			ask(fresh, w.node(limit, hybrid.Options{}), "fresh", hybrid.PerSecond(20, 40))
		}
		fresh.checkTotal(40)
	})
}

func TestL10_NoFalseDenials(t *testing.T) {
	for _, c := range []struct {
		limit hybrid.Limit
		pause bool // nothing moves for 450 ms now and then, and the backlog comes at once
	}{
		{hybrid.PerSecond(1000, 1000), true},
		{hybrid.PerSecond(100, 100), true},
		{hybrid.PerSecond(10, 10), true},
		{hybrid.PerSecond(1000, 100), false},
		{hybrid.PerSecond(100, 30), false},
		{hybrid.PerSecond(100, 10), false},
	} {
		t.Run(fmt.Sprintf("%v/pause=%t", c.limit, c.pause), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				l := w.nodeOver(newLine(5*time.Millisecond), c.limit, hybrid.Options{})
				tr := w.trace(c.limit)
				// Independent callers: one that waits does not hold up the rest.
				interval := time.Duration(float64(time.Second) / (0.8 * c.limit.Rate))
				var wg sync.WaitGroup
				var asked int64
				ask := func() {
					wg.Go(func() { tr.ask(l, "k", 1) })
					asked++
				}
				for w.since() < 10*time.Second {
					ask()
					time.Sleep(interval)
					if c.pause && asked%int64(4*c.limit.Rate) == 0 {
						time.Sleep(450 * time.Millisecond)
						for range int64(0.36 * c.limit.Rate) {
							ask()
						}
					}
				}
				wg.Wait()
				tr.check()
				if s := l.Stats(); s.Failed != 0 || tr.total() != asked {
					t.Errorf("admitted %d of %d at 0.8 of the rate, Stats = %+v; want all", tr.total(), asked, s)
				}
			})
		})
	}
}

func TestL12_RefusalIsForgottenInTime(t *testing.T) {
	ctx := context.Background()
	// A cheap request is not covered by a dear one's refusal.
	bubble(t, func(t *testing.T, w *world) {
		for _, limit := range []hybrid.Limit{hybrid.PerHour(100, 100), hybrid.PerSecond(1, 100)} {
			l := w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			key := limit.String()
			tr.ask(l, key, 60)
			for range 3 {
				if d := tr.ask(l, key, 50); d.Allowed || d.RetryAfter <= 0 {
					t.Errorf("AllowN(50) of 40 = %+v; want refused", d)
				}
			}
			if got := tr.burst(l, key, 50); got != 40 {
				t.Errorf("AllowN(1) after AllowN(50) was refused: %d admitted; want the 40 left", got)
			}
			tr.check()
		}
	})
	// Events on this node end it at once, on others within half the promise.
	for name, event := range map[string]func(l *hybrid.Limiter) error{
		"raised limit": func(l *hybrid.Limiter) error {
			// More tokens only come with time; a higher rate brings them sooner.
			_, err := l.AllowLimit(ctx, "k", hybrid.PerSecond(1000, 10), 0)
			return err
		},
		"refund": func(l *hybrid.Limiter) error { return l.Refund(ctx, "k", 1) },
		"reset":  func(l *hybrid.Limiter) error { return l.Reset(ctx, "k") },
	} {
		for _, own := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/own=%t", name, own), func(t *testing.T) {
				bubble(t, func(t *testing.T, w *world) {
					limit := hybrid.PerHour(60, 10) // one a minute
					l, other := w.node(limit, hybrid.Options{}), w.node(limit, hybrid.Options{})
					tr := w.trace(limit)
					tr.ask(l, "k", 10)
					d := tr.ask(l, "k", 1)
					if d.Allowed || d.RetryAfter != time.Minute {
						t.Fatalf("Allow on empty = %+v; want refused for a minute", d)
					}
					if own {
						other = l
					}
					if err := event(other); err != nil {
						t.Fatal(err)
					}
					if wait := 10 * time.Millisecond; own {
						w.sleep(wait)
					} else {
						w.sleep(d.RetryAfter/2 + d.RetryAfter/8)
					}
					if d, err := l.Allow(ctx, "k"); err != nil || !d.Allowed {
						t.Errorf("Allow after the event = %+v, %v; want admitted", d, err)
					}
				})
			})
		}
	}
	// It ends exactly when promised, whatever the clocks say.
	for _, skew := range []time.Duration{0, time.Second, -time.Second, time.Hour} {
		for _, limit := range []hybrid.Limit{
			hybrid.PerHour(60, 10), hybrid.PerSecond(1, 1), hybrid.PerSecond(1.0/3, 7), hybrid.PerSecond(100, 3), hybrid.PerSecond(3, 100),
		} {
			bubble(t, func(t *testing.T, w *world) {
				w.stepServer(skew)
				l := w.node(limit, hybrid.Options{})
				tr := w.trace(limit)
				for _, n := range []int64{1, 2, limit.Burst} {
					if n > limit.Burst {
						continue
					}
					tr.keepsPromise(l, "k", n, func() hybrid.Decision {
						w.sleep(time.Duration(2 * float64(limit.Burst) / limit.Rate * 1e9))
						tr.ask(l, "k", limit.Burst)
						return tr.ask(l, "k", n)
					})
				}
				tr.check()
			})
		}
	}
}

func TestL13_HotNodeIsNotStarved(t *testing.T) {
	limit := hybrid.PerSecond(1000, 1000)
	interval := func(share float64) time.Duration {
		return time.Duration(float64(time.Second) / (share * limit.Rate))
	}
	for _, share := range []hybrid.Share{hybrid.ShareEqual, hybrid.ShareProportional, hybrid.ShareNone} {
		run := func(name string, f func(t *testing.T, w *world, tr *trace, all []*hybrid.Limiter)) {
			t.Run(fmt.Sprintf("share=%d/%s", share, name), func(t *testing.T) {
				bubble(t, func(t *testing.T, w *world) {
					all, _ := w.nodeLines(4, time.Millisecond, limit, hybrid.Options{Share: share})
					tr := w.trace(limit)
					f(t, w, tr, all)
					tr.check()
				})
			})
		}
		atLeast := func(t *testing.T, who string, got int64, demand float64) {
			t.Helper()
			if float64(got) < 0.95*demand {
				t.Errorf("%s admitted %d of a demand of %.0f; want 95%%", who, got, demand)
			}
		}
		run("two to one", func(t *testing.T, w *world, tr *trace, all []*hybrid.Limiter) {
			var wg sync.WaitGroup
			wg.Go(func() { atLeast(t, "A", tr.load(all[0], "k", interval(0.64), 10*time.Second, 1), 6400) })
			wg.Go(func() { atLeast(t, "B", tr.load(all[1], "k", interval(0.32), 10*time.Second, 2), 3200) })
			wg.Wait()
		})
		run("one of four", func(t *testing.T, w *world, tr *trace, all []*hybrid.Limiter) {
			for i, l := range all[1:] { // seen once
				tr.load(l, "k", interval(0.1), time.Second, uint64(i))
			}
			w.sleep(2 * time.Second)
			atLeast(t, "A", tr.load(all[0], "k", interval(0.99), 10*time.Second, 1), 9900)
		})
		run("on and off", func(t *testing.T, w *world, tr *trace, all []*hybrid.Limiter) {
			var wg sync.WaitGroup
			wg.Go(func() { atLeast(t, "B", tr.load(all[1], "k", interval(0.3), 10*time.Second, 2), 3000) })
			wg.Go(func() {
				var got int64
				for i := range 5 {
					got += tr.load(all[0], "k", interval(0.6), time.Second, uint64(i))
					w.sleep(time.Second)
				}
				atLeast(t, "A", got, 3000)
			})
			wg.Wait()
		})
	}
}

func TestL15_NodesDie(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(1000, 1000)
		all, lines := w.nodeLines(20, time.Millisecond, limit, hybrid.Options{})
		tr := w.trace(limit)
		var wg sync.WaitGroup
		for i, l := range all {
			wg.Go(func() { tr.load(l, "k", 5*time.Millisecond, 3*time.Second, uint64(i)) })
		}
		wg.Wait()
		for i := 2; i < len(lines); i++ {
			lines[i].dead.Store(true) // with their leases
		}
		before := tr.total()
		load := func(d time.Duration) int64 {
			before := tr.total()
			for i, l := range all[:2] {
				wg.Go(func() { tr.load(l, "k", time.Millisecond, d, uint64(i)) })
			}
			wg.Wait()
			return tr.total() - before
		}
		// A lease lives 2 periods of 250 ms, and its epoch as long again.
		if got := load(time.Second); got > 2000 {
			t.Errorf("admitted %d in the second after 18 of 20 died; want at most burst and rate", got)
		}
		if got := load(4 * time.Second); got < 3800 {
			t.Errorf("admitted %d in the 4s after; want 95%% of 4000", got)
		}
		tr.checkAtLeast(before)
	})
}

func TestL16_CrashLoop(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(1000, 1000)
		w.warm()
		tr := w.trace(limit)
		healthy := w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{})
		tr.load(healthy, "k", time.Millisecond, 2*time.Second, 9)
		var wg sync.WaitGroup
		// 100 restarts per lease life of 500 ms, each asking twice: 400 tokens a
		// second that the loop really uses.
		wg.Go(func() {
			for range 300 {
				ln := newLine(time.Millisecond)
				l := w.nodeOver(ln, limit, hybrid.Options{})
				for range 2 {
					tr.ask(l, "k", 1)
				}
				if s := l.Stats(); s.Live > 4 {
					t.Errorf("a new node holds %d tokens after 2 requests; want a small first lease", s.Live)
				}
				ln.dead.Store(true)
				w.sleep(3 * time.Millisecond)
			}
		})
		got := tr.load(healthy, "k", 900*time.Microsecond, 1500*time.Millisecond, 1)
		wg.Wait()
		if got < 750 {
			t.Errorf("the healthy node admitted %d in 1.5s of a crash loop; want half of the rate, 750", got)
		}
		tr.check()
	})

	// Shutdown gives back once; what comes late is ignored.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerHour(1, 100)
		tr := w.trace(limit)
		l := w.node(limit, hybrid.Options{})
		tr.burst(l, "k", 5)
		if b := w.bucket("k"); b.out() == 0 {
			t.Fatalf("bucket = %+v; want a lease out", b)
		}
		if err := l.Close(t.Context()); err != nil {
			t.Errorf("Close = %v; want nil", err)
		}
		if err := l.Close(t.Context()); !errors.Is(err, hybrid.ErrClosed) {
			t.Errorf("second Close = %v; want ErrClosed", err)
		}
		if b := w.bucket("k"); b.out() != 0 || b.tokens() != 95 {
			t.Errorf("bucket after Close = %+v; want 95 tokens, none out", b)
		}

		ln := newLine(0)
		late := w.nodeOver(ln, limit, hybrid.Options{})
		tr.burst(late, "k", 5)
		ln.dead.Store(true)
		w.sleep(time.Hour) // the lease is long gone from the books
		ln.dead.Store(false)
		tr.burst(late, "k", 1)
		if err := late.Close(t.Context()); err != nil {
			t.Errorf("late Close = %v; want nil", err)
		}
		if b := w.bucket("k"); b.tokens()+b.out() > 100-tr.total()+1 {
			t.Errorf("bucket = %+v; want at most what was not admitted, %d", b, 100-tr.total()+1)
		}
		tr.check()
	})
}

// Close returns everything, also beside requests and refills that are about to
// be sent.
func TestL16_CloseBesideRefill(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.warm()
		limit := hybrid.Limit{Rate: 1000 / (200 * 365 * 24 * 3600.0), Burst: 1000}
		for i := range 100 {
			key := fmt.Sprint("k", i)
			l := w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			together(4, func(g int) {
				if g == 0 {
					for range 1 + i%20 {
						tr.ask(l, key, 1)
					}
					if err := l.Close(context.Background()); err != nil {
						t.Errorf("Close = %v; want nil", err)
					}
					return
				}
				for range 200 {
					d, err := l.Allow(context.Background(), key)
					if err != nil {
						return
					}
					tr.add(w.since(), d, 1)
				}
			})
			if b := w.bucket(key); b.out() != 0 || limit.Burst-b.tokens() < tr.total() || limit.Burst-b.tokens() > tr.total()+l.Stats().Lost {
				t.Errorf("after Close, %d admitted, %d lost: bucket = %+v; want none out", tr.total(), l.Stats().Lost, b)
			}
		}
	})
}

func TestL18_MemoryIsBounded(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	// One-shot keys; the limit refuses, so that no time goes to Redis.
	bubble(t, func(t *testing.T, w *world) {
		l := w.node(hybrid.Limit{}, hybrid.Options{MaxKeys: 200})
		baseline := int64(0)
		for i := range 6_000 {
			if _, err := l.Allow(t.Context(), fmt.Sprint("one-shot:", i)); err != nil {
				t.Fatal(err)
			}
			if i == 1000 {
				baseline = heap()
			}
		}
		if grown := heap() - baseline; grown > 1<<19 {
			t.Errorf("heap grew by %d bytes over 5,000 keys; want no growth", grown)
		}
		if s := l.Stats(); s.Keys > 200 || s.Evicted < 5_500 {
			t.Errorf("Stats = %+v; want at most 200 keys", s)
		}
	})
	// The same with buckets; a key in use stays, and Redis forgets too.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(10, 5)
		l := w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{MaxKeys: 100, RedisTimeout: time.Second})
		tr := w.trace(hybrid.PerSecond(100, 100))
		for i := range 8 {
			together(100, func(j int) {
				d, err := l.Allow(context.Background(), fmt.Sprintf("one-shot:%d:%d", i, j))
				if err != nil || !d.Allowed {
					t.Errorf("Allow on a fresh key = %+v, %v; want admitted", d, err)
				}
			})
			if _, err := l.AllowLimit(t.Context(), "hot", tr.limit, 1); err != nil {
				t.Fatal(err)
			}
			w.sleep(100 * time.Millisecond)
		}
		if s := l.Stats(); s.Keys > 100+100 || s.Failed != 0 {
			t.Errorf("Stats = %+v; want about 100 keys, no failures", s)
		}
		if n := len(w.redis.Keys()); n > 820 {
			t.Errorf("%d keys in Redis; want those of the last seconds", n)
		}
		w.sleep(10 * time.Second)
		if n := len(w.redis.Keys()); n != 2 {
			t.Errorf("%d keys in Redis after 10s; want the two of the members", n)
		}
	})
}

func TestL19_LimiterPerCall(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerHour(1, 100)
		tr := w.trace(limit)
		for i := range 400 {
			l, err := hybrid.New(w.rdb, limit, hybrid.Options{Heartbeat: time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			tr.ask(l, "k", 1)
			if i%2 == 0 { // forgotten by the other half of callers
				if err := l.Close(t.Context()); err != nil {
					t.Errorf("Close = %v; want nil", err)
				}
			}
		}
		tr.checkTotal(100)
		w.sleep(time.Hour) // what was not closed comes to rest by itself
	})
}

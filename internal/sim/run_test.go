package sim_test

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// result is what became of a run.
type result struct {
	wrong            []string
	digest           uint64
	decisions, calls int64
	local            int64
	peak             float64
	faults           int
}

// run carries out s.
func run(t *testing.T, s schedule) (r result) {
	t.Helper()
	runAnd(t, s, func(w *world) {
		j := &w.judge
		r = result{j.wrong, j.digest, j.decisions, j.calls, j.local, j.peak, len(s.Faults)}
	})
	return r
}

// runAnd carries out s, and then looks at it.
func runAnd(t *testing.T, s schedule, look func(w *world)) {
	t.Helper()
	synctest.Test(t, func(*testing.T) {
		w := prepare(s)
		defer w.loop.end()
		w.plan()
		w.until(s.For.d())
		w.heal()
		w.aftermath()
		w.judge.over = true
		for _, n := range w.nodes {
			n.stop()
		}
		w.until(w.now + 5*time.Second)
		for _, n := range w.nodes {
			if len(n.parked) > 0 {
				w.judge.fail("node %d: %d functions wait for ever", n.place, len(n.parked))
			}
			n.dead = true
			for n.proceed() {
			}
		}
		w.judge.verdict()
		look(w)
	})
}

// plan puts traffic and faults into the world's calendar.
func (w *world) plan() {
	end := w.For.d()
	for _, t := range w.Traffic {
		w.at(t.At.d(), func() { w.offer(t, min(end, w.now+t.For.d())) })
	}
	for _, f := range w.Faults {
		f.For = min(f.For, w.For-f.At)
		if f.Kind == failover {
			w.failover(f)
			continue
		}
		w.at(f.At.d(), func() { w.strike(f) })
	}
}

// offer has requests arrive until end.
func (w *world) offer(t traffic, end time.Duration) {
	key := w.keys[t.Key]
	cost := min(t.Cost, w.judge.least.Burst)
	ask := func() {
		place := t.Node
		if place < 0 {
			place = w.rand.IntN(w.Nodes)
		}
		switch n := w.nodeAt(place); {
		case n == nil:
		case t.All:
			n.askAll(cost)
		default:
			n.ask(key, cost, nil)
		}
	}
	if t.AtOnce {
		for i := range int64(t.Demand * float64(w.Burst) / float64(cost)) {
			w.after(time.Duration(i), ask)
		}
		return
	}
	var next func()
	next = func() {
		w.after(1+time.Duration(w.rand.ExpFloat64()*float64(cost)/(t.Demand*w.Rate)*1e9), func() {
			if w.now < end {
				ask()
				next()
			}
		})
	}
	next()
}

// strike lets a fault happen.
func (w *world) strike(f fault) {
	switch f.Kind {
	case loseRequests, loseReplies, delayed, duplicate, silence, refuse, errorReplies, flap:
		w.net.begin(f)
	case flush:
		w.damage(func() { w.store.Flush() })
	case evict:
		w.damage(func() { w.store.Evict(w.keys[f.Key]) }, w.keys[f.Key])
	case clockStep:
		if f.Amount > 0 {
			w.damage(func() { w.skew += ms(f.Amount).d() })
		} else {
			w.skew += ms(f.Amount).d()
		}
	case crash:
		w.each(f.Node, func(n *node) {
			n.crash()
			w.after(f.For.d(), func() { w.add(n.place, n.version) })
		})
	case leave:
		w.each(f.Node, func(n *node) {
			if n.paused {
				return
			}
			n.stop()
			w.after(f.For.d(), func() { w.add(n.place, n.version) })
		})
	case rollout:
		w.each(f.Node, func(n *node) {
			if n.paused {
				return
			}
			n.stop()
			w.add(n.place, n.version+1)
		})
	case reload:
		w.each(f.Node, func(n *node) {
			n.do(func() {
				if n.version++; n.SetLimits(w.limit(n.version), n.version) != nil {
					w.judge.fail("node %d: SetLimits does not take version %d", n.place, n.version)
				}
			})
		})
	case join:
		if len(w.live()) < 8 {
			w.add(w.Nodes+len(w.nodes), w.firstVersion())
		}
	case pause, suspend:
		w.each(f.Node, func(n *node) { n.halt(f.For.d(), f.Kind == suspend) })
	case evictHere:
		w.each(f.Node, func(n *node) { n.do(func() { n.Evict(w.keys[f.Key]) }) })
	case change:
		w.each(f.Node, func(n *node) { n.limits[w.keys[f.Key]] = w.limit(2) })
	}
}

// damage does something to the store's state, or its clock.
func (w *world) damage(do func(), keys ...string) {
	if keys == nil {
		keys = w.keys
	}
	before := map[string]float64{}
	for _, key := range keys {
		before[key] = w.judge.tokens(key)
	}
	do()
	for _, key := range keys {
		w.judge.damaged(key, before[key], w.judge.tokens(key))
	}
}

// failover takes the store down, and back with what it had before.
func (w *world) failover(f fault) {
	lost := ms(f.Amount)
	w.at((f.At - lost).d(), func() {
		saved := w.store.Save()
		w.at(f.At.d(), func() {
			w.net.begin(f)
			w.damage(func() { w.store.Load(saved) })
		})
	})
}

// heal waits until nothing is left of any fault.
func (w *world) heal() {
	if len(w.live()) == 0 {
		w.add(0, w.firstVersion())
	}
	for i := range w.Clock {
		w.Clock[i] = 1 // of nodes to come
	}
	w.each(-1, func(n *node) { n.local, n.global, n.tempo = n.clock(), w.now, 1 })
	// All nodes agree on a limit in the end: those that do not clip each other's tokens.
	for _, f := range w.Faults {
		if f.Kind == change {
			w.each(-1, func(n *node) { n.limits[w.keys[f.Key]] = w.limit(2) })
		}
	}
	// The store notices that its clock went back when it is called: the time up to
	// then refills nothing.
	for _, key := range w.keys {
		w.live()[0].ask(key, 1, nil)
	}
	least := w.judge.least
	wait := 2*w.Backoff.d() + w.Ramp.d() + w.Lag.d() + 12*max(w.Period, w.Limit2.Period).d() + 5*time.Second
	wait += time.Duration(3 * float64(w.judge.most.Burst) / least.Rate * 1e9)
	w.until(w.now + wait)
}

// aftermath asks whether all is well again.
func (w *world) aftermath() {
	w.useful()
	w.promise()
	w.frugal()
}

// frugal checks what a key costs that is asked for three times what there is: a call
// a lease period from each node, for nearly all that the rate gives.
func (w *world) frugal() {
	j := &w.judge
	nodes, key := w.live(), w.keys[0]
	period := min(w.Period.d(), time.Duration(float64(w.Burst)/w.Rate/3*1e9))
	demand := 3 * w.Rate
	if j.least != j.most || w.Leaving > 0 || slices.ContainsFunc(nodes, func(n *node) bool { return n.version > 1 }) ||
		period < 6*w.RTT.d() || demand/float64(len(nodes))*period.Seconds() < 4 || w.Burst > 1000 {
		return // not hot, or not healthy
	}
	b := j.books[key]
	offer := func(d time.Duration) {
		for end := w.now + d; w.now < end; {
			w.until(w.now + 1 + time.Duration(w.rand.ExpFloat64()/demand*1e9))
			nodes[w.rand.IntN(len(nodes))].ask(key, 1, nil)
		}
	}
	offer(time.Duration(float64(w.Burst)/w.Rate*1e9) + 3*period) // to drain it
	const periods = 15
	calls, admitted := int64(0), -len(b.admissions)
	for _, n := range nodes {
		calls -= n.calls
	}
	offer(periods * period)
	for _, n := range nodes {
		calls += n.calls
	}
	admitted += len(b.admissions)
	if most := int64(len(nodes)) * (periods*13/10 + 3); calls > most {
		j.fail("%s: %d calls in %d periods by %d nodes: want at most %d", key, calls, periods, len(nodes), most)
	}
	if least := 0.85*w.Rate*periods*period.Seconds() - float64(2*len(nodes)); float64(admitted) < least {
		j.fail("%s: %d admitted in %v: want at least %.0f", key, admitted, periods*period, least)
	}
}

// useful checks that a demand below the limit is met, by the store.
func (w *world) useful() {
	j := &w.judge
	limit := j.least
	// No more than a bucket can be emptied by calls that take a round trip.
	limit.Rate = min(limit.Rate, float64(limit.Burst)/2/w.RTT.d().Seconds())
	for _, key := range w.keys {
		ideal, err := lease.NewLevel(limit)
		if err != nil {
			panic(err)
		}
		b := j.books[key]
		before, local, want := 0, j.local, 0
		nodes := w.live()
		const asked = 100
		settled := w.now // when all nodes know of the limit in force, and old leases are gone
		if j.least != j.most {
			settled += 6 * max(w.Period, w.Limit2.Period).d()
		}
		for i := -50; i < asked; i++ {
			if w.now < settled && i == 0 {
				i--
			}
			if i <= 0 {
				before, want = len(b.admissions), 0
			}
			w.until(w.now + 1 + time.Duration(w.rand.ExpFloat64()/(0.7*limit.Rate)*1e9))
			if ideal.Allow(w.now, 1) {
				want++
			}
			nodes[w.rand.IntN(len(nodes))].ask(key, 1, nil)
		}
		w.until(w.now + w.Timeout.d() + 10*time.Millisecond)
		if got := len(b.admissions) - before; float64(got) < 0.8*float64(want)-float64(2*len(nodes)) && w.Leaving == 0 {
			j.fail("%s: %d of %d admitted afterwards, of %d asked", key, got, want, asked)
		}
		if j.local > local {
			j.fail("%s: %d decided by shares afterwards", key, j.local-local)
		}
	}
}

// promise checks that whoever waits as long as he is told and asks alone is admitted.
func (w *world) promise() {
	key := w.keys[0]
	if w.judge.least != w.judge.most {
		return
	}
	n := w.live()[0]
	cost := w.judge.least.Burst // at the second time it is refused
	take := func() (d lease.Decision, ok bool) {
		n.ask(key, cost, func(decided lease.Decision) { d, ok = decided, true })
		w.until(w.now + w.Timeout.d() + 10*time.Millisecond)
		return d, ok
	}
	var d lease.Decision
	for range 3 {
		var ok bool
		if d, ok = take(); ok && !d.Allowed {
			break
		}
	}
	if d.RetryAfter == 0 || d.RetryAfter > time.Hour {
		return
	}
	w.until(w.now + d.RetryAfter)
	if again, ok := take(); ok && !again.Allowed {
		w.judge.fail("node %d: refused again after %v: %+v, then %+v", n.place, d.RetryAfter, d, again)
	}
}

package leasetest

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Nodes is some nodes on one Store in virtual time, stepped by the test, with
// every oracle attached: hours of traffic take as long as their decisions do.
// Not for concurrent use.
type Nodes struct {
	Clock *Clock
	Trace *Trace
	Store lease.Store

	t     testing.TB
	rand  *rand.Rand
	start time.Duration
	limit lease.Limits
	nodes []stepped
	last  map[string]lease.Call // the last call carried out for a key
	extra float64               // tokens that Check allows on top of the burst
	asked struct {
		at    time.Duration
		times int
	}
}

type stepped struct {
	lease.Stepped
	link *Link
	skew time.Duration // how far the node's own clock is ahead of the others'
	next time.Duration // when it has a visit to make, on its own clock
	dead bool
}

const noVisit = time.Duration(math.MaxInt64)

// NewNodes returns n nodes with these limits and options on a Store of b.
func NewNodes(t testing.TB, b Backend, n int, limits lease.Limits, opts lease.Options) *Nodes {
	t.Helper()
	clock := NewClock()
	w := &Nodes{
		Clock: clock, Trace: NewTrace(limits), Store: b.Virtual(t, clock),
		t: t, rand: rand.New(rand.NewPCG(1, 2)), start: clock.Now(), limit: limits, last: map[string]lease.Call{},
	}
	for range n {
		w.Add(opts)
	}
	return w
}

// Add adds a node, with opts and the limits of all, and returns its number.
func (w *Nodes) Add(opts lease.Options) int {
	w.t.Helper()
	i := len(w.nodes)
	if opts.Timeout == 0 {
		opts.Timeout = time.Minute // it is real time, and has no part in this
	}
	link := &Link{Store: w.Store}
	link.Carried = func(call lease.Call, answer lease.Answer) { w.carried(i, call, answer) }
	node, err := lease.NewStepped(link, w.limit, opts)
	if err != nil {
		w.t.Fatal(err)
	}
	w.nodes = append(w.nodes, stepped{Stepped: node, link: link, next: noVisit})
	w.step(i)
	return i
}

// Now returns the time since the start.
func (w *Nodes) Now() time.Duration { return w.Clock.Now() - w.start }

// Node returns node i.
func (w *Nodes) Node(i int) lease.Stepped { return w.nodes[i].Stepped }

// Link returns node i's way to the store.
func (w *Nodes) Link(i int) *Link { return w.nodes[i].link }

// Skew sets node i's own clock ahead, and leaves it there.
func (w *Nodes) Skew(i int, ahead time.Duration) {
	w.nodes[i].skew = ahead
	w.step(i)
}

// Kill ends node i as a crash would: what it holds is gone.
func (w *Nodes) Kill(i int) { w.nodes[i].dead = true }

// Freeze stops node i where it is, until Thaw: it makes no visits.
func (w *Nodes) Freeze(i int) { w.nodes[i].dead = true }

// Thaw lets a frozen node go on. Its clock shows the time that has passed.
func (w *Nodes) Thaw(i int) { w.nodes[i].dead = false }

// Stop closes node i: its leases go back.
func (w *Nodes) Stop(i int) {
	w.t.Helper()
	w.step(i)
	if err := w.nodes[i].Close(context.Background()); err != nil {
		w.t.Errorf("node %d: Close = %v: want nil", i, err)
	}
	w.nodes[i].dead = true
}

// Advance moves time on by d. What nodes have to do on the way, such as giving
// back an idle lease, each does at its time.
func (w *Nodes) Advance(d time.Duration) { w.until(w.Clock.Now() + d) }

func (w *Nodes) until(end time.Duration) {
	for {
		first, at := -1, end
		for i := range w.nodes {
			n := &w.nodes[i]
			if n.dead || n.next == noVisit {
				continue
			}
			// At its time or, if that was missed, now.
			if next := max(w.start+n.next-n.skew, w.Clock.Now()); next <= at && (first < 0 || next < at) {
				first, at = i, next
			}
		}
		if first < 0 {
			break
		}
		w.Clock.Set(at)
		w.step(first)
	}
	w.Clock.Set(end)
}

// step brings node i's clock up to now and lets it make the visits due.
func (w *Nodes) step(i int) {
	n := &w.nodes[i]
	if n.dead {
		return
	}
	n.Advance(w.Now() + n.skew)
	n.look()
}

// look notes when the node has its next visit to make.
func (n *stepped) look() {
	n.next = noVisit
	if next, ok := n.Next(); ok {
		n.next = next
	}
}

// Take decides a request on node i, now, and records it.
func (w *Nodes) Take(i int, key string, n int64) lease.Decision {
	w.t.Helper()
	w.step(i)
	d, err := w.nodes[i].Take(context.Background(), key, n)
	w.nodes[i].look()
	if err != nil {
		w.t.Fatalf("at %v: node %d: Take(%q, %d) = %v: want no error", w.Now(), i, key, n, err)
	}
	w.Trace.Record(w.Now(), key, n, d)
	// A test that asks until something happens would ask for ever once it is
	// refused: time stands still meanwhile.
	if now := w.Now(); now != w.asked.at {
		w.asked.at, w.asked.times = now, 0
	} else if w.asked.times++; w.asked.times > 1_000_000 {
		w.t.Fatalf("at %v: asked a million times at one instant; the last answer is %+v", now, d)
	}
	return d
}

// Offer asks for cost tokens of key again and again for d, on each node demand
// tokens a second (0 for none), at random instants as independent users do. It
// returns the tokens each node admitted.
func (w *Nodes) Offer(d time.Duration, key string, cost int64, demand []float64) (admitted []int64) {
	w.t.Helper()
	admitted = make([]int64, len(w.nodes))
	end := w.Clock.Now() + d
	Arrivals(w.rand, w.Clock.Now(), end, cost, demand, func(at time.Duration, i int) {
		w.until(at)
		if w.Take(i, key, cost).Allowed {
			admitted[i] += cost
		}
	})
	w.until(end)
	return admitted
}

// Arrivals calls f at the instants from begin to end at which requests of cost
// tokens arrive: at each node i independently, demand[i] tokens a second.
func Arrivals(r *rand.Rand, begin, end time.Duration, cost int64, demand []float64, f func(at time.Duration, i int)) {
	gap := func(i int) time.Duration {
		if demand[i] <= 0 {
			return math.MaxInt64 / 4
		}
		return max(1, time.Duration(r.ExpFloat64()*float64(cost)/demand[i]*1e9))
	}
	arrives := make([]time.Duration, len(demand))
	for i := range arrives {
		arrives[i] = begin + gap(i)
	}
	for {
		first := 0
		for i := range arrives {
			if arrives[i] < arrives[first] {
				first = i
			}
		}
		at := arrives[first]
		if at >= end {
			return
		}
		arrives[first] += gap(first)
		f(at, first)
	}
}

// Calls returns how many calls the nodes made to the store.
func (w *Nodes) Calls() (calls int64) {
	for i := range w.nodes {
		calls += w.nodes[i].link.Counts().Calls
	}
	return calls
}

// Look asks the store about key without a change: its Remaining and Outstanding.
// Some node must have called for key before.
func (w *Nodes) Look(key string) lease.Grant {
	w.t.Helper()
	last, ok := w.last[key]
	if !ok {
		w.t.Fatalf("look at %q: no call was made for it yet", key)
	}
	look := lease.Call{Key: key, Limit: last.Limit, Version: last.Version, TTL: last.TTL, LastEpoch: -1}
	a := w.Store.Acquire(context.Background(), []lease.Call{look})[0]
	if a.Err != nil {
		w.t.Fatalf("at %v: look at %q = %v: want no error", w.Now(), key, a.Err)
	}
	return a.Grant
}

// Live returns the tokens that node i may still spend.
func (w *Nodes) Live(i int) int64 {
	w.step(i)
	return w.nodes[i].Stats().Live
}

// Allow lets Check admit that many tokens over the burst.
func (w *Nodes) Allow(extra float64) { w.extra = extra }

// Check ends a run: the level never passed the burst, every token is accounted
// for, and no node had two calls for a key under way. It returns the tokens
// granted by replies that no node heard.
func (w *Nodes) Check() (inTransit int64) {
	w.t.Helper()
	w.Trace.CheckWithin(w.t, w.extra)
	var granted int64
	stats := make([]lease.Stats, len(w.nodes))
	for i := range w.nodes {
		w.step(i)
		counts := w.nodes[i].link.Counts()
		granted += counts.Granted
		stats[i] = w.nodes[i].Stats()
		if counts.InFlight > 1 {
			w.t.Errorf("node %d: %d calls for a key under way at a time: want 1", i, counts.InFlight)
		}
		if counts.Overtold > 0 {
			w.t.Errorf("node %d: reported %d tokens twice, or without a lease: want 0", i, counts.Overtold)
		}
	}
	return CheckLedger(w.t, granted, stats...)
}

// carried checks, at each call, the two invariants that the bound rests on: the
// store's count of outstanding tokens is never less than the truth, and balance
// and outstanding together never pass the burst.
func (w *Nodes) carried(i int, call lease.Call, answer lease.Answer) {
	w.last[call.Key] = call
	if answer.Err != nil || w.extra != 0 || len(w.nodes) > 10 {
		return // a faulty run; or too dear to ask all nodes each time
	}
	g := answer.Grant
	if room := call.Limit.Burst - g.Outstanding; !g.Newer && g.Remaining > max(0, room) {
		w.t.Errorf("at %v: node %d: remaining %d + outstanding %d: want at most the burst, %d", w.Now(), i, g.Remaining, g.Outstanding, call.Limit.Burst)
	}
	live := g.Tokens - g.Bound // about to be held by i
	for j := range w.nodes {
		n := &w.nodes[j]
		now := w.Now() + n.skew
		if n.dead || j != i && n.next <= now {
			continue // about to make a visit of its own
		}
		if j != i {
			n.Advance(now)
		}
		if s := n.Stats(); s.Keys == 1 {
			live += s.Live
		}
	}
	if live > g.Outstanding {
		w.t.Errorf("at %v: node %d: outstanding = %d by the store, %d in truth: want no less than the truth", w.Now(), i, g.Outstanding, live)
	}
}

// CheckPromise fails t unless a denial keeps its word: a request of n tokens on
// node i is denied, and the same request RetryAfter later is admitted. setup
// makes the same nodes each time, with nobody else asking.
func CheckPromise(t testing.TB, setup func() *Nodes, i int, key string, n int64) (retryAfter time.Duration) {
	t.Helper()
	return promise(t, setup(), i, key, n, 0)
}

// CheckExactPromise is CheckPromise that also has the request come a microsecond
// too early: it is denied again.
func CheckExactPromise(t testing.TB, setup func() *Nodes, i int, key string, n int64) (retryAfter time.Duration) {
	t.Helper()
	promise(t, setup(), i, key, n, time.Microsecond)
	return promise(t, setup(), i, key, n, 0)
}

func promise(t testing.TB, w *Nodes, i int, key string, n int64, early time.Duration) time.Duration {
	t.Helper()
	d := w.Take(i, key, n)
	if d.Allowed || d.RetryAfter <= early {
		t.Fatalf("at %v: Take(%d) = %+v: want a denial, and a wait", w.Now(), n, d)
	}
	w.Advance(d.RetryAfter - early)
	if again := w.Take(i, key, n); again.Allowed != (early == 0) {
		t.Errorf("Take(%d) %v before the %v promised = %+v: want allowed = %v", n, early, d.RetryAfter, again, early == 0)
	}
	w.Check()
	return d.RetryAfter
}

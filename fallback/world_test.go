package fallback_test

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// world is nodes on one store in fake time, each with a fallback, stepped by the
// test alone: a run is the same each time.
type world struct {
	t      *testing.T
	start  time.Time
	skew   time.Duration // of the store's clock
	store  *leasetest.Store
	limits lease.Limits
	trace  *leasetest.Trace
	nodes  []*node
	rand   *rand.Rand
	wrap   func(i int, s lease.Store) lease.Store // what comes before a node's link; nil: nothing
}

type node struct {
	lease.Stepped
	w        *world
	fallback fallback.Stepped
	link     *leasetest.Link
	down     atomic.Bool // its way to the store
	admitted int64
	from     map[lease.Source]int64 // tokens admitted, by source
}

// inWorld runs f with n nodes that know of each other's number.
func inWorld(t *testing.T, n int, limits lease.Limits, opts fallback.Options, f func(w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &world{t: t, start: time.Now(), limits: limits, trace: leasetest.NewTrace(limits), rand: rand.New(rand.NewPCG(7, 11))}
		w.store = leasetest.NewStore(func() time.Duration { return time.Duration(time.Now().UnixNano()) + w.skew })
		for range n {
			w.add(opts)
		}
		defer w.close() // also after a Fatal, or what runs on hides its message
		f(w)
	})
}

func (w *world) close() {
	for i, n := range w.nodes {
		n.Close(context.Background()) // some are cut off
		s := n.Stats()
		if sum := s.Spent + s.Returned + s.Expired + s.Lost + s.Live; s.Granted != sum {
			w.t.Errorf("node %d: granted %d: want spent %d + returned %d + expired %d + lost %d + live %d", i, s.Granted, s.Spent, s.Returned, s.Expired, s.Lost, s.Live)
		}
		n.fallback.Close(context.Background())
	}
}

func (w *world) add(opts fallback.Options) *node {
	w.t.Helper()
	if opts.Nodes == nil {
		opts.Nodes = func() int { return len(w.nodes) }
	}
	n := &node{w: w, link: &leasetest.Link{Store: w.store}, from: map[lease.Source]int64{}}
	n.link.Fault = func([]lease.Call) leasetest.Fault {
		if n.down.Load() {
			return leasetest.RequestLost
		}
		return leasetest.Works
	}
	var err error
	primary := lease.Store(n.link)
	if w.wrap != nil {
		primary = w.wrap(len(w.nodes), primary)
	}
	if n.fallback, err = fallback.NewStepped(primary, opts, uint64(len(w.nodes))); err != nil {
		w.t.Fatal(err)
	}
	if n.Stepped, err = lease.NewStepped(n.fallback, w.limits, lease.Options{}); err != nil {
		w.t.Fatal(err)
	}
	n.Seed(uint64(len(w.nodes)))
	n.Stepped.Advance(w.now())
	w.nodes = append(w.nodes, n)
	return n
}

func (w *world) now() time.Duration { return time.Since(w.start) }

// setDown cuts off all nodes from the store, or heals them.
func (w *world) setDown(down bool) {
	for _, n := range w.nodes {
		n.down.Store(down)
	}
}

// until lets time pass, and each node do what it has to do on the way.
func (w *world) until(end time.Duration) {
	for {
		var first *node
		at := end
		for _, n := range w.nodes {
			if next, ok := n.next(); ok && next <= at && (first == nil || next < at) {
				first, at = n, next
			}
		}
		time.Sleep(max(0, at-w.now()))
		if first == nil {
			return
		}
		first.step()
	}
}

// next returns when n next has something to do by itself.
func (n *node) next() (at time.Duration, ok bool) {
	at, ok = n.Stepped.Next()
	if t, due := n.fallback.Next(); due && (!ok || t.Sub(n.w.start) < at) {
		at, ok = t.Sub(n.w.start), true
	}
	return at, ok
}

func (n *node) step() {
	n.Stepped.Advance(n.w.now())
	n.fallback.Step()
}

func (w *world) sleep(d time.Duration) { w.until(w.now() + d) }

// take decides and records a request.
func (n *node) take(key string, cost int64) lease.Decision {
	w := n.w
	w.t.Helper()
	n.step()
	d, err := n.Take(context.Background(), key, cost)
	if err != nil {
		w.t.Fatalf("at %v: Take(%q, %d) = %v: want no error", w.now(), key, cost, err)
	}
	w.trace.Record(w.now(), key, cost, d)
	if d.Allowed {
		n.admitted += cost
		n.from[d.Source] += cost
	}
	return d
}

// offer asks for cost tokens of key for d, on each node demand tokens a second,
// at random instants. It returns the tokens admitted.
func (w *world) offer(d time.Duration, key string, cost int64, demand []float64) (admitted int64) {
	w.t.Helper()
	before := w.admitted()
	end := w.now() + d
	leasetest.Arrivals(w.rand, w.now(), end, cost, demand, func(at time.Duration, i int) {
		w.until(at)
		w.nodes[i].take(key, cost)
	})
	w.until(end)
	return w.admitted() - before
}

func (w *world) admitted() (tokens int64) {
	for _, n := range w.nodes {
		tokens += n.admitted
	}
	return tokens
}

// balance returns what the store has of key, in tokens.
func (w *world) balance(key string) float64 {
	b := w.store.Bucket(key)
	return b.Tokens()
}

package leasetest

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Bubble is nodes with real goroutines in fake time, with every oracle
// attached: what a scenario needs that is about waiting, concurrency or the
// network. Its methods are safe for concurrent use in the bubble.
type Bubble struct {
	Trace *Trace
	Store lease.Store

	t      *testing.T
	start  time.Time
	limits lease.Limits
	nodes  []*lease.Cache
	links  []*Link
	extra  float64

	mu      sync.Mutex
	longest time.Duration
	left    int
}

// InBubble runs f in a synctest bubble, on an empty Store of b. When f returns
// the nodes are closed and the oracles asked.
func InBubble(t *testing.T, b Backend, limits lease.Limits, f func(w *Bubble)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &Bubble{Trace: NewTrace(limits), Store: b.Live(t), t: t, start: time.Now(), limits: limits}
		f(w)
		w.check()
	})
}

// Add adds a node and returns its number. rtt, if set, returns how long each
// round trip of it takes; half of that on the way to the store.
func (w *Bubble) Add(opts lease.Options, rtt func() time.Duration) int {
	w.t.Helper()
	link := &Link{Store: w.Store}
	if rtt != nil {
		link.Delay = func() (time.Duration, time.Duration) {
			d := rtt()
			return d / 2, d - d/2
		}
	}
	return w.AddOn(link, opts)
}

// AddOn is Add for a node with a link of the test's own.
func (w *Bubble) AddOn(link *Link, opts lease.Options) int {
	w.t.Helper()
	node, err := lease.New(link, w.limits, opts)
	if err != nil {
		w.t.Fatal(err)
	}
	// A test that fails on the way leaves no goroutine in the bubble either.
	w.t.Cleanup(func() { node.Close(context.Background()) })
	w.nodes, w.links = append(w.nodes, node), append(w.links, link)
	return len(w.nodes) - 1
}

// Now returns the time since the start.
func (w *Bubble) Now() time.Duration { return time.Since(w.start) }

// Node returns node i.
func (w *Bubble) Node(i int) *lease.Cache { return w.nodes[i] }

// Link returns node i's way to the store.
func (w *Bubble) Link(i int) *Link { return w.links[i] }

// Take decides a request on node i and records it.
func (w *Bubble) Take(i int, key string, n int64) lease.Decision {
	d, err := w.TakeContext(context.Background(), i, key, n)
	if err != nil && !errors.Is(err, lease.ErrClosed) {
		w.t.Errorf("at %v: node %d: Take(%q, %d) = %v: want no error", w.Now(), i, key, n, err)
	}
	return d
}

// TakeContext is Take by a request that may leave before it is decided.
func (w *Bubble) TakeContext(ctx context.Context, i int, key string, n int64) (lease.Decision, error) {
	asked := w.Now()
	d, err := w.nodes[i].Take(ctx, key, n)
	decided := w.Now()
	at := decided
	if d.Source == lease.SourceStore {
		// Only one call is under way, so the last one is the one that charged it.
		at = w.links[i].Charged(key).Sub(w.start)
	}
	w.Trace.RecordAny(at, key, n, d)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.longest = max(w.longest, decided-asked)
	if err != nil {
		w.left++
	}
	return d, err
}

// Left returns how many requests ended with an error.
func (w *Bubble) Left() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.left
}

// Longest returns the longest that a Take took.
func (w *Bubble) Longest() time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.longest
}

// Offer asks for one token of key at a time for d, on every node rate times a
// second, at random instants and whether or not earlier requests still wait. It
// returns the tokens each node admitted.
func (w *Bubble) Offer(d time.Duration, key string, rate float64) (admitted []int64) {
	admitted = make([]int64, len(w.nodes))
	var all sync.WaitGroup
	end := time.Now().Add(d)
	for i := range w.nodes {
		all.Go(func() {
			r := rand.New(rand.NewPCG(3, uint64(i)))
			var waiting sync.WaitGroup
			var mu sync.Mutex
			for {
				time.Sleep(time.Duration(r.ExpFloat64() / rate * 1e9))
				if !time.Now().Before(end) {
					break
				}
				waiting.Go(func() {
					if w.Take(i, key, 1).Allowed {
						mu.Lock()
						admitted[i]++
						mu.Unlock()
					}
				})
			}
			waiting.Wait()
		})
	}
	all.Wait()
	return admitted
}

// Calls returns how many calls the nodes made to the store.
func (w *Bubble) Calls() (calls int64) {
	for _, l := range w.links {
		calls += l.Counts().Calls
	}
	return calls
}

// Allow lets the run admit that many tokens over the burst.
func (w *Bubble) Allow(extra float64) { w.extra = extra }

// Close closes node i and returns its last Stats.
func (w *Bubble) Close(i int) lease.Stats {
	if err := w.nodes[i].Close(context.Background()); err != nil && !errors.Is(err, lease.ErrClosed) {
		w.t.Errorf("node %d: Close = %v: want nil", i, err)
	}
	return w.nodes[i].Stats()
}

// check closes the nodes and asks the oracles.
func (w *Bubble) check() {
	w.t.Helper()
	var granted int64
	stats := make([]lease.Stats, len(w.nodes))
	for i := range w.nodes {
		stats[i] = w.Close(i)
	}
	time.Sleep(time.Minute) // for what is still on its way, though nobody waits
	for i, l := range w.links {
		counts := l.Counts()
		granted += counts.Granted
		if counts.InFlight > 1 {
			w.t.Errorf("node %d: %d calls for a key under way at a time: want 1", i, counts.InFlight)
		}
		if counts.Overtold > 0 {
			w.t.Errorf("node %d: reported %d tokens twice, or without a lease: want 0", i, counts.Overtold)
		}
		if s := stats[i]; s.Live != 0 {
			w.t.Errorf("node %d: %d tokens live after Close: want 0", i, s.Live)
		}
	}
	w.Trace.CheckWithin(w.t, w.extra)
	CheckLedger(w.t, granted, stats...)
}

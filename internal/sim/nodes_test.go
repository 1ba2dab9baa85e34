package sim_test

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"testing/synctest"
	"time"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

const never = time.Duration(math.MaxInt64)

// world is a schedule under way.
type world struct {
	loop
	schedule
	rand   *rand.Rand
	skew   time.Duration // of the store's clock
	store  *leasetest.Store
	keys   []string
	nodes  []*node // all that ever were
	judge  judge
	net    network
	recent []census // how many nodes there were, lately
}

// census is how many nodes there are from a time on.
type census struct {
	at time.Duration
	n  int
}

// node is one node of a simulation: the code under test, and what runs it.
type node struct {
	lease.Stepped
	w        *world
	id       int // of this one
	place    int // in the schedule: a node that restarts keeps it
	fallback fallback.Stepped
	link     *leasetest.Link // counts what passes
	version  int64

	tempo         float64 // of its clock
	local, global time.Duration
	odd           bool // it was not always the world's

	parked   []*parked
	paused   bool
	dead     bool
	closing  bool
	stepping bool
	wake     time.Duration
	gone     time.Duration // in all, for which it stood still

	flying map[string]int // calls of the cache under way, by key
	limits map[string]lease.Limit
	calls  int64
	asked  int64
}

// parked is a function that waits for something, or to begin.
type parked struct {
	begin func()
	f     *fiber
	until time.Duration
	ready func() bool
}

func prepare(s schedule) *world {
	s.Clock = slices.Clone(s.Clock)
	w := &world{schedule: s, rand: rand.New(rand.NewPCG(s.Seed, 1))}
	w.start = time.Now()
	w.store = leasetest.NewStore(w.storeClock)
	for i := range s.Keys {
		w.keys = append(w.keys, fmt.Sprint("key", i))
	}
	w.judge.init(w)
	w.net.init(w)
	for i := range s.Nodes {
		w.add(i, w.firstVersion())
	}
	w.recent = w.recent[len(w.recent)-1:]
	w.judge.few, w.judge.many = s.Nodes, s.Nodes
	return w
}

// storeClock is the store's clock, decades after the epoch.
func (w *world) storeClock() time.Duration { return leasetest.NewClock().Now() + w.now + w.skew }

// firstVersion is 0, the latest call wins, unless versions are rolled out.
func (w *world) firstVersion() int64 {
	for _, f := range w.Faults {
		if f.Kind == rollout || f.Kind == reload {
			return 1
		}
	}
	return 0
}

func (w *world) limit(version int64) lease.Limit {
	l := lease.Limit{Rate: w.Rate, Burst: w.Burst, OnFailure: w.Policy}
	if version > 1 {
		l.Rate, l.Burst = w.Limit2.Rate, w.Limit2.Burst
	}
	return l
}

// add starts a node at a place.
func (w *world) add(place int, version int64) *node {
	n := &node{
		w: w, id: len(w.nodes), place: place, version: version, tempo: 1, global: w.now, wake: never,
		flying: map[string]int{}, limits: map[string]lease.Limit{},
	}
	if place < len(w.Clock) {
		n.tempo = w.Clock[place]
		n.odd = n.tempo != 1
	}
	n.link = &leasetest.Link{Store: way{n}}
	var err error
	n.fallback, err = fallback.NewStepped(n.link, fallback.Options{
		Nodes: w.believed, Owns: n.owns, Period: w.Period.d(), Timeout: w.Timeout.d(),
		Unknown: w.Unknown, Split: w.Split, Backoff: w.Backoff.d(), Ramp: w.Ramp.d(),
	}, uint64(n.id))
	if err != nil {
		panic(err)
	}
	period := w.Period
	if version > 1 && w.Limit2.Period > 0 {
		period = max(2, w.Limit2.Period)
	}
	store := lease.Store(front{n.fallback, n})
	if w.Bare {
		store = bare{n}
	}
	n.Stepped, err = lease.NewStepped(store, w.limit(version), lease.Options{
		LeasePeriod: period.d(), Timeout: w.Timeout.d(), Share: w.Share, Version: version,
	})
	if err != nil {
		panic(err)
	}
	n.Seed(uint64(n.id))
	n.Drive(n)
	w.nodes = append(w.nodes, n)
	w.count()
	return n
}

// at returns the node at a place, nil if there is none now.
func (w *world) nodeAt(place int) *node {
	for _, n := range slices.Backward(w.nodes) {
		if n.place == place && !n.dead && !n.closing {
			return n
		}
	}
	return nil
}

// each calls f for the node at place, or for all.
func (w *world) each(place int, f func(n *node)) {
	for _, n := range w.live() {
		if place < 0 || n.place == place {
			f(n)
		}
	}
}

func (w *world) live() (nodes []*node) {
	for _, n := range w.nodes {
		if !n.dead && !n.closing {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

func (w *world) count() {
	w.recent = append(w.recent, census{w.now, len(w.live())})
	w.judge.counted(len(w.live()))
}

// believed is how many nodes a node believes in: the most of late.
func (w *world) believed() int {
	for len(w.recent) > 1 && w.recent[1].at <= w.now-w.Lag.d() {
		w.recent = w.recent[1:]
	}
	most := 1
	for _, c := range w.recent {
		most = max(most, c.n)
	}
	return most
}

// owns decides by the highest random weight, as membership does.
func (n *node) owns(key string, owners int) (owns, known bool) {
	if !n.w.Owners {
		return false, false
	}
	weight := func(n *node) uint64 {
		h := fnv.New64a()
		fmt.Fprint(h, key, n.id*7919)
		return h.Sum64()
	}
	before := 0
	for _, other := range n.w.live() {
		if weight(other) > weight(n) {
			before++
		}
	}
	return before < owners, true
}

// clock returns the node's own time.
func (n *node) clock() time.Duration {
	return n.local + time.Duration(n.tempo*float64(n.w.now-n.global))
}

// Go implements lease.Driver.
func (n *node) Go(f func()) { n.parked = append(n.parked, &parked{begin: f}) }

// Wait implements lease.Driver.
func (n *node) Wait(ctx context.Context, done <-chan struct{}, d time.Duration) (received bool) {
	n.park(d, func() bool {
		select {
		case <-done:
			received = true
		default:
		}
		return received || ctx.Err() != nil
	})
	return received
}

// park stops the fiber that runs now until ready, or for d.
func (n *node) park(d time.Duration, ready func() bool) {
	if n.dead || ready() {
		return
	}
	p := &parked{f: n.w.cur, until: never, ready: ready}
	if d < time.Hour*24*365 {
		p.until = n.w.now + d
		n.w.at(p.until, n.settle)
	}
	n.parked = append(n.parked, p)
	n.w.park()
}

// settle lets the node do all it can do now. Only the loop calls it.
func (n *node) settle() {
	if n.paused {
		return
	}
	n.Advance(n.clock())
	for n.proceed() {
	}
	if n.dead {
		return
	}
	if at, ok := n.fallback.Next(); ok && !n.stepping && !n.closing && at.Sub(n.w.start) <= n.w.now {
		n.stepping = true
		n.w.run(func() {
			n.fallback.Step()
			n.stepping = false
		})
		for n.proceed() {
		}
	}
	n.plan()
}

// proceed lets one function go on that can.
func (n *node) proceed() bool {
	if n.closing {
		synctest.Wait() // Close itself has a goroutine
	}
	for i, p := range n.parked {
		if p.begin == nil && !n.dead && n.w.now < p.until && !p.ready() {
			continue
		}
		n.parked = slices.Delete(n.parked, i, i+1)
		if p.begin != nil {
			n.w.run(p.begin)
		} else {
			n.w.proceed(p.f)
		}
		return true
	}
	return false
}

// plan has the node woken when it has something to do by itself.
func (n *node) plan() {
	wake := never
	if at, ok := n.Next(); ok {
		wake = n.global + time.Duration(math.Ceil(float64(at-n.local)/n.tempo))
	}
	if at, ok := n.fallback.Next(); ok && !n.stepping && !n.closing {
		wake = min(wake, at.Sub(n.w.start))
	}
	if wake == never || n.wake > n.w.now && n.wake <= wake {
		return
	}
	n.wake = max(wake, n.w.now+time.Microsecond)
	n.w.at(n.wake, n.settle)
}

// do runs f on the node, in a fiber.
func (n *node) do(f func()) {
	if n.dead || n.closing || n.paused {
		return
	}
	n.Advance(n.clock())
	n.w.run(f)
	n.settle()
}

// leaving is the context of a request that leaves at a time.
type leaving struct {
	context.Context
	w  *world
	at time.Duration
}

func (l leaving) Err() error {
	if l.w.now >= l.at {
		return context.Canceled
	}
	return nil
}

// ask makes one request. then, if any, gets the decision; none comes if the request
// leaves.
func (n *node) ask(key string, cost int64, then func(d lease.Decision)) {
	n.do(func() {
		w := n.w
		ctx := n.patience()
		limit := w.limit(n.version)
		asked, stood := w.now, n.gone
		n.asked++
		var d lease.Decision
		var err error
		if l, ok := n.limits[key]; ok {
			limit = l
			d, err = n.TakeLimit(ctx, key, l, cost)
		} else {
			d, err = n.Take(ctx, key, cost)
		}
		if n.dead {
			return
		}
		var tooMuch *lease.CostError
		switch {
		case errors.Is(err, context.Canceled), errors.As(err, &tooMuch):
			return
		case errors.Is(err, lease.ErrClosed) && n.closing:
			return
		case err != nil:
			w.judge.fail("node %d: a request of %d on %s = %v: want no error", n.place, cost, key, err)
			return
		}
		w.judge.decided(n, key, cost, limit, d, asked, n.gone-stood, false)
		if then != nil {
			then(d)
		}
	})
}

// patience is the context of a request, which may leave.
func (n *node) patience() context.Context {
	w := n.w
	if w.Leaving == 0 || w.rand.Float64() >= w.Leaving {
		return context.Background()
	}
	at := w.now + 1 + time.Duration(w.rand.Float64()*float64(w.Timeout.d()))
	w.at(at, n.settle)
	return leaving{context.Background(), w, at}
}

// askAll makes one request that needs tokens of all keys.
func (n *node) askAll(cost int64) {
	n.do(func() {
		w := n.w
		var requests []lease.Request
		for _, key := range w.keys {
			requests = append(requests, lease.Request{Key: key, N: cost})
			b := w.judge.books[key]
			b.dearest[n] = max(b.dearest[n], cost) // a share makes room for it, admitted or not
			b.costly = b.costly || cost > 1
		}
		asked, stood := w.now, n.gone
		d, err := n.TakeAll(n.patience(), requests)
		if n.dead || err != nil && (errors.Is(err, context.Canceled) || errors.Is(err, lease.ErrCost) || n.closing) {
			return
		}
		if err != nil {
			w.judge.fail("node %d: a request for all keys = %v: want no error", n.place, err)
		}
		if !d.Allowed {
			return
		}
		// Here it waits for one key after the other.
		stood = n.gone - stood + time.Duration(len(requests)-1)*(w.Timeout.d()+3*time.Millisecond)
		for i, q := range requests {
			w.judge.decided(n, q.Key, cost, w.limit(n.version), d.Each[i], asked, stood, true)
		}
	})
}

// halt stops the node until then; with the machine its clock stops too.
func (n *node) halt(d time.Duration, machine bool) {
	if n.paused {
		return
	}
	n.local, n.global = n.clock(), n.w.now
	n.paused = true
	n.odd = n.odd || machine
	n.w.after(d, func() {
		n.paused = false
		n.gone += d
		if machine {
			n.global = n.w.now
			n.Stepped.Sleep(d)
			n.w.judge.slept(n)
			// Requests come before the watchdog looks, a millisecond later at most.
			n.w.after(time.Millisecond, func() {
				if n.dead || n.paused {
					return
				}
				n.Watch()
				if d > 100*time.Millisecond { // less may be a clock that was set
					n.w.judge.woken(n)
				}
				n.settle()
			})
		}
		if !n.dead {
			n.settle()
		}
	})
}

// crash ends the node on the spot.
func (n *node) crash() {
	n.w.judge.crashed(n)
	n.dead, n.paused = true, false
	for n.proceed() {
	}
	n.w.count()
}

// stop closes the node.
func (n *node) stop() {
	if n.closing || n.dead {
		return
	}
	for n.paused {
		n.w.until(n.w.events[0].at) // only at the end of a run
	}
	n.Advance(n.clock())
	n.closing = true
	n.w.count()
	n.w.run(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		// The store may be down; then the books say so.
		n.Close(ctx)
		n.fallback.Close(ctx)
		if !n.dead {
			n.w.judge.closed(n)
			n.dead = true
		}
	})
	n.settle()
}

// front stands between a node's cache and its fallback, and counts.
type front struct {
	fallback.Stepped
	n *node
}

// Acquire implements lease.Store.
func (f front) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	return f.n.counted(ctx, f.Stepped, calls)
}

// bare is the same for a node that has no fallback.
type bare struct{ n *node }

// Acquire implements lease.Store.
func (f bare) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	return f.n.counted(ctx, f.n.link, calls)
}

// counted has s carry out calls of the cache.
func (n *node) counted(ctx context.Context, s lease.Store, calls []lease.Call) []lease.Answer {
	for i := range calls {
		n.calls++
		if calls[i].Want == 0 {
			continue // what an evicted key gives back
		}
		if n.flying[calls[i].Key]++; n.flying[calls[i].Key] > 1 && !n.dead {
			n.w.judge.fail("node %d: two calls for %s under way: want one", n.place, calls[i].Key)
		}
	}
	answers := s.Acquire(ctx, calls)
	for i := range calls {
		if calls[i].Want > 0 {
			n.flying[calls[i].Key]--
		}
	}
	return answers
}

package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hybridlimit/hybridlimit/bench"
	"github.com/hybridlimit/hybridlimit/hybrid"
)

// What the traffic of a soak is made of. What is left are other keys, by Zipf.
const (
	hotPart      = 0.5
	changingPart = 0.05
	newPart      = 0.02 // keys that nobody asked for before
	dearPart     = 0.1  // requests that cost more than a token
	cancelPart   = 0.01 // callers that give up: half of them before they ask
	// zipf is how skewed the other keys are.
	zipf = 1.1
	// backlog is how late a request may be: one that is later is not made, for a
	// machine that stood still must not make up for all of it at once.
	backlog = 250 * time.Millisecond
)

// worker asks one node.
type worker struct {
	s    *soak
	slot int
	rate float64 // requests per second
	rand *rand.Rand
	zipf *rand.Zipf
}

func newWorker(s *soak, i int, rate float64) *worker {
	r := rand.New(rand.NewPCG(s.opts.Seed, uint64(i)+2))
	return &worker{
		s: s, slot: i % len(s.slots), rate: rate, rand: r,
		zipf: rand.NewZipf(r, zipf, 1, uint64(s.opts.Keys-1)),
	}
}

// run asks at random instants until ctx ends.
func (w *worker) run(ctx context.Context) {
	next := time.Duration(0)
	for {
		next = max(next+time.Duration(w.rand.ExpFloat64()/w.rate*float64(time.Second)), w.s.now()-backlog)
		if !bench.SleepUntil(ctx, w.s.start.Add(next)) {
			return
		}
		w.ask()
	}
}

// ask makes one request, which does not end with the run: it is short.
func (w *worker) ask() {
	ctx, cancel := w.caller()
	defer cancel()
	s, node := w.s, w.s.slots[w.slot].Load()
	key, n := w.pick(), w.cost()
	start := s.now()
	var d hybrid.Decision
	var err error
	switch key {
	case newKey:
		d, err = node.limiter.AllowN(ctx, fmt.Sprint("soak:new:", s.newKeys.Add(1)), n)
	case changingKey:
		d, err = node.limiter.AllowLimit(ctx, s.meters[key].key, *s.changing.Load(), n)
	default:
		d, err = node.limiter.AllowN(ctx, s.meters[key].key, n)
	}
	took := s.now() - start
	if errors.Is(err, hybrid.ErrClosed) {
		s.tallies.closed.Add(1)
		time.Sleep(time.Millisecond)
		return
	}
	s.tallies.note(took, slowest{At: (start + took).Seconds(), Took: millis(took), Key: s.nameOf(key), Source: d.Source.String(), Node: node.name})
	gaveUp := err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err())
	s.tallies.add(d, err, gaveUp, took)
	if err == nil && d.Allowed && key >= 0 {
		s.meters[key].admit(start, w.slot, n, d.Source == hybrid.SourceLocal, s)
	}
	if s.quietFrom.Load() >= 0 && err == nil {
		s.asked.Add(1)
		if d.Source == hybrid.SourceStore || d.Source == hybrid.SourceLease {
			s.healed.Add(1)
		}
	}
}

// nameOf returns a key by its number.
func (s *soak) nameOf(key int) string {
	if key < 0 {
		return "a new one"
	}
	return s.meters[key].key
}

// newKey is a key's number that stands for one that is new.
const newKey = -1

// pick returns the number of a key.
func (w *worker) pick() int {
	switch x := w.rand.Float64(); {
	case x < hotPart:
		return hotKey
	case x < hotPart+changingPart:
		return changingKey
	case x < hotPart+changingPart+newPart:
		return newKey
	default:
		return otherKeys + int(w.zipf.Uint64())
	}
}

func (w *worker) cost() int64 {
	if w.rand.Float64() < dearPart {
		return 1 + w.rand.Int64N(w.s.maxCost)
	}
	return 1
}

// caller returns the context of one request.
func (w *worker) caller() (context.Context, context.CancelFunc) {
	switch x := w.rand.Float64(); {
	case x < cancelPart/2:
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		return ctx, cancel
	case x < cancelPart:
		return context.WithTimeout(context.Background(), time.Duration(w.rand.Float64()*float64(5*time.Millisecond)))
	default:
		return context.Background(), func() {}
	}
}

// tallies count what was decided.
type tallies struct {
	sources           [8]atomic.Int64 // decisions, by hybrid.Source
	admitted, refused atomic.Int64
	gaveUp            atomic.Int64 // callers
	closed            atomic.Int64 // requests to a node that was just closed
	failed            atomic.Int64 // requests with an error that they must not have
	failure           atomic.Pointer[error]
	took              histogram

	longest atomic.Int64 // of the decision below, for most are shorter
	mu      sync.Mutex
	slow    slowest // since it was asked for last
}

// note takes in a decision if it is the longest.
func (t *tallies) note(took time.Duration, d slowest) {
	if int64(took) <= t.longest.Load() {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if int64(took) > t.longest.Load() {
		t.longest.Store(int64(took))
		t.slow = d
	}
}

// slowest returns the longest decision since the last call.
func (t *tallies) slowest() (took time.Duration, d slowest) {
	t.mu.Lock()
	defer t.mu.Unlock()
	d, t.slow = t.slow, slowest{}
	return time.Duration(t.longest.Swap(0)), d
}

func (t *tallies) add(d hybrid.Decision, err error, gaveUp bool, took time.Duration) {
	switch {
	case gaveUp:
		t.gaveUp.Add(1)
		return
	case err != nil:
		t.failed.Add(1)
		t.failure.Store(&err)
		return
	case d.Allowed:
		t.admitted.Add(1)
	default:
		t.refused.Add(1)
	}
	t.sources[min(int(d.Source), len(t.sources)-1)].Add(1)
	t.took.add(took)
}

// bySource returns the decisions by the name of what made them.
func (t *tallies) bySource() map[string]int64 {
	m := map[string]int64{}
	for i := range t.sources {
		if n := t.sources[i].Load(); n > 0 {
			m[hybrid.Source(i).String()] = n
		}
	}
	return m
}

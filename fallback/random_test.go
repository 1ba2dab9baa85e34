package fallback_test

import (
	"context"
	"flag"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/lease"
)

var randomRuns = flag.Int("fallback.runs", 300, "how many random outages TestRandomOutages makes")

// overheard is a link that notes what the store granted.
type overheard struct {
	lease.Store
	w    *world
	node int
	log  *[]granted
}

type granted struct {
	node   int
	at     time.Duration
	tokens int64
}

func (s overheard) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	answers := s.Store.Acquire(ctx, calls)
	for _, a := range answers {
		if a.Err == nil {
			*s.log = append(*s.log, granted{s.node, s.w.now(), a.Grant.Tokens})
		}
	}
	return answers
}

// unseen is the most tokens that the others were granted since a node's last
// answer.
func unseen(nodes int, log []granted) (most int64) {
	for i := range nodes {
		last := time.Duration(-1)
		for _, g := range log {
			if g.node == i {
				last = max(last, g.at)
			}
		}
		sum := int64(0)
		for _, g := range log {
			if g.node != i && g.at >= last {
				sum += g.tokens
			}
		}
		most = max(most, sum)
	}
	return most
}

// run is one random outage.
type run struct {
	*world
	r     *rand.Rand
	limit lease.Limit
	level float64
	last  time.Duration
}

func (w *run) drain() {
	w.level = max(0, w.level-w.limit.Rate*(w.now()-w.last).Seconds())
	w.last = w.now()
}

// phase lets random traffic pass for d and returns the highest level in it: rests,
// bursts on one node, and skewed demand, each for less than a second.
func (w *run) phase(d time.Duration) (peak float64) {
	w.drain()
	peak = w.level
	take := func(n *node) {
		if n.take("k", 1).Allowed {
			w.drain()
			w.level++
			peak = max(peak, w.level)
		}
	}
	for end := w.now() + d; w.now() < end; {
		stop := min(end, w.now()+time.Duration(w.r.IntN(1000))*time.Millisecond)
		switch w.r.IntN(4) {
		case 0:
			w.until(stop)
		case 1:
			n := w.nodes[w.r.IntN(len(w.nodes))]
			for range w.r.IntN(int(w.limit.Burst)) {
				take(n)
			}
		default:
			w.skewed(stop, take)
		}
	}
	return peak
}

// skewed has requests arrive at random on nodes with random weights.
func (w *run) skewed(stop time.Duration, take func(*node)) {
	demand := make([]float64, len(w.nodes))
	total := 0.0
	for i := range demand {
		demand[i] = w.r.Float64() * w.r.Float64() * 3 * w.limit.Rate
		total += demand[i]
	}
	for {
		gap := time.Duration(w.r.ExpFloat64() / total * 1e9)
		if w.now()+gap >= stop {
			w.until(stop)
			return
		}
		w.until(w.now() + gap)
		x := w.r.Float64() * total
		for i := range demand {
			if x -= demand[i]; x < 0 {
				take(w.nodes[i])
				break
			}
		}
	}
}

// Random traffic before, in and after an outage, against the bound of each. Each
// node knows how many there are, so E is what it had not seen others take.
func TestRandomOutages(t *testing.T) {
	limits := []lease.Limit{{Rate: 500, Burst: 500}, {Rate: 100, Burst: 1000}, {Rate: 1000, Burst: 300}, {Rate: 10, Burst: 30}}
	for seed := range *randomRuns {
		r := rand.New(rand.NewPCG(uint64(seed), 99))
		limit, n := limits[r.IntN(len(limits))], 1+r.IntN(4)
		opts := fallback.Options{Split: fallback.Split(r.IntN(2)), Nodes: func() int { return n }}
		inWorld(t, 0, limit, opts, func(w *world) {
			var log []granted
			w.wrap = func(i int, s lease.Store) lease.Store { return overheard{s, w, i, &log} }
			for range n {
				w.add(opts)
			}
			x := &run{world: w, r: r, limit: limit}
			burst := float64(limit.Burst)
			check := func(phase string, level, most float64) {
				const rounding = 1e-6
				if level > most+rounding {
					t.Errorf("seed %d: %v, %d nodes, split %d: level %s = %.1f: want at most %.1f", seed, limit, n, opts.Split, phase, level, most)
				}
			}
			check("while all is well", x.phase(time.Duration(500+r.IntN(8000))*time.Millisecond), burst)
			most := max(burst, float64(n)) + min(burst, float64(1+unseen(n, log)))
			w.setDown(true)
			check("in the outage", x.phase(time.Duration(200+r.IntN(9000))*time.Millisecond), most)
			owed, late := int64(0), int64(0)
			for _, n := range w.nodes {
				owed += n.fallback.Stats().Owed
				late -= n.from[lease.SourceLocal]
			}
			w.setDown(false)
			level := x.phase(time.Duration(500+r.IntN(4000)) * time.Millisecond)
			for _, n := range w.nodes {
				late += n.from[lease.SourceLocal] // by nodes that did not know yet
			}
			check("after it", level, most+min(burst, float64(owed))+float64(late)+float64(n))
		})
	}
}

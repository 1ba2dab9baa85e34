package soak

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/hybridlimit/hybridlimit/bench"
	"github.com/hybridlimit/hybridlimit/hybrid"
)

// fault is something that happens to a soak.
type fault struct {
	name  string
	scope scope
	// begin starts it. slot is the node that it is about, if it is about one.
	begin func(s *soak, ctx context.Context, slot int) error
	// lasts is whether it takes a while, and ends with all lines up again.
	lasts bool
	// rare is whether it is dealt in every third round only.
	rare bool
}

// faults are dealt in rounds, each in an order of its own, so that all of them
// happen in a run that is long enough.
var faults = []fault{
	{name: "cut", scope: allNodes, lasts: true, begin: onAll((*bench.Cut).Down)},
	{name: "silent", scope: allNodes, lasts: true, begin: onAll(silence)},
	{name: "slow", scope: allNodes, lasts: true, begin: (*soak).slowed},
	// Not slow enough for a time-out: no node may be the worse for it.
	{name: "sluggish", lasts: true, begin: (*soak).sluggish},
	{name: "node cut off", scope: oneNode, lasts: true, begin: onOne((*bench.Cut).Down)},
	{name: "node silent", scope: oneNode, lasts: true, begin: onOne(silence)},
	{name: "node replaced", begin: (*soak).replace},
	{name: "script flush", begin: (*soak).flushScripts},
	{name: "limit changed", begin: (*soak).changeLimit},
	{name: "flushall", rare: true, begin: (*soak).flushAll},
}

const (
	// flushEvery is how many rounds of faults there are for each that is rare.
	flushEvery = 3
	// longOnes is how many faults there are for each that lasts longOnce times as long.
	longOnes, longOnce = 10, 4
	// The end of a run is left in peace, for it to heal: a tenth of it, but no more
	// than mostStretch and no less than leastStretch, unless two thirds of the run are
	// less.
	leastStretch, mostStretch = 2200 * time.Millisecond, 30 * time.Second
)

func silence(c *bench.Cut) error { c.Silence(); return nil }

func onAll(do func(*bench.Cut) error) func(*soak, context.Context, int) error {
	return func(s *soak, _ context.Context, _ int) error {
		for i := range s.slots {
			if err := do(s.slots[i].Load().cut); err != nil {
				return err
			}
		}
		return nil
	}
}

func onOne(do func(*bench.Cut) error) func(*soak, context.Context, int) error {
	return func(s *soak, _ context.Context, slot int) error { return do(s.slots[slot].Load().cut) }
}

func (s *soak) slowed(context.Context, int) error {
	for i := range s.slots {
		s.slots[i].Load().cut.Slow(2 * s.opts.RedisTimeout)
	}
	return nil
}

func (s *soak) sluggish(context.Context, int) error {
	for i := range s.slots {
		s.slots[i].Load().cut.Slow(s.opts.RedisTimeout / 5)
	}
	return nil
}

// replace closes a node under traffic, and has a new one join.
func (s *soak) replace(ctx context.Context, slot int) error {
	s.retire(ctx, slot)
	bench.SleepUntil(ctx, time.Now().Add(s.span()/8))
	return s.join(slot)
}

// flushScripts has Redis forget the scripts. Where it is not allowed to that is not
// a fault of the limiter's.
func (s *soak) flushScripts(ctx context.Context, _ int) error {
	if err := s.admin.ScriptFlush(ctx).Err(); err != nil {
		s.countFault("script flush refused")
	}
	return nil
}

func (s *soak) flushAll(ctx context.Context, _ int) error {
	for _, m := range s.meters {
		m.flush(s.now())
	}
	return s.opts.Flush(ctx)
}

// changeLimit changes the limit of one key to half of what it was or back. Nodes
// tell Redis with their next call.
func (s *soak) changeLimit(context.Context, int) error {
	next := s.opts.Limit
	if *s.changing.Load() == next {
		next = halved(next)
	}
	s.changing.Store(&next)
	return nil
}

// halved returns half the limit, of which one request must remain possible.
func halved(l hybrid.Limit) hybrid.Limit {
	l.Rate /= 2
	l.Burst = max(1, l.Burst/2)
	return l
}

// span is how long faults last at most, but for the long ones. Pauses are up to half
// longer, and some are too short to heal in.
func (s *soak) span() time.Duration {
	return min(max(s.opts.For/20, 400*time.Millisecond), 8*time.Second)
}

// quiet is when the last fault must be over.
func (s *soak) quiet() time.Duration {
	return s.opts.For - max(min(s.opts.For/10, mostStretch), min(leastStretch, s.opts.For*2/3))
}

// script injects faults until the end of the run is near. What it does depends on
// the seed alone, but for the instants.
func (s *soak) script(ctx context.Context) error {
	r := s.random()
	if !bench.SleepUntil(ctx, s.start.Add(min(s.span(), s.opts.For/6))) {
		return nil
	}
	for round := 0; ; round++ {
		for _, f := range s.deal(r, round) {
			// All that is random is drawn whether it is used or not.
			lasts, pause, slot := 0.3+0.7*r.Float64(), 0.1+1.4*r.Float64(), r.IntN(len(s.slots))
			long := time.Duration(lasts * float64(s.span()))
			if r.IntN(longOnes) == 0 {
				long *= longOnce
			}
			left := s.quiet() - s.now()
			if left <= 0 {
				return nil
			}
			if err := s.inject(ctx, f, slot, min(long, left)); err != nil || ctx.Err() != nil {
				return err
			}
			gap := min(time.Duration(pause*float64(s.span())), s.quiet()-s.now())
			if !bench.SleepUntil(ctx, time.Now().Add(gap)) {
				return nil
			}
		}
	}
}

// random returns what faults are drawn from.
func (s *soak) random() *rand.Rand { return rand.New(rand.NewPCG(s.opts.Seed, 1)) }

// deal returns the faults of one round: of the first, an outage comes first, for a
// short run to have one.
func (s *soak) deal(r *rand.Rand, round int) (deck []fault) {
	for _, f := range faults {
		if f.name == "flushall" && s.opts.Flush == nil || f.rare && round%flushEvery != 1 {
			continue
		}
		deck = append(deck, f)
	}
	rest := deck
	if round == 0 {
		rest = deck[1:]
	}
	r.Shuffle(len(rest), func(i, j int) { rest[i], rest[j] = rest[j], rest[i] })
	return deck
}

// inject has a fault happen and, if it is one that lasts, end.
func (s *soak) inject(ctx context.Context, f fault, slot int, long time.Duration) error {
	s.quietFrom.Store(-1)
	for _, m := range s.meters {
		m.begin(f.scope, slot, s.now())
	}
	s.countFault(f.name)
	err := f.begin(s, ctx, slot)
	if f.lasts {
		if err == nil {
			bench.SleepUntil(ctx, time.Now().Add(long))
		}
		s.heal()
	}
	if f.lasts {
		for _, m := range s.meters {
			m.end(s.now())
		}
		s.renew(0)
	}
	if ctx.Err() == nil {
		s.beginStretch()
	}
	return err
}

// renewEvery is how often meters start anew where no fault ends.
const renewEvery = 30 * time.Second

// renew starts one level of each meter anew, if the last time was that long ago.
func (s *soak) renew(after time.Duration) {
	s.renewing.Lock()
	defer s.renewing.Unlock()
	if s.now()-s.renewed < after {
		return
	}
	b, _ := s.books()
	for _, m := range s.meters {
		m.renew(s.covers, s.now(), b)
	}
	s.covers++
	s.renewed = s.now()
}

// heal brings all lines up.
func (s *soak) heal() {
	for i := range s.slots {
		_ = s.slots[i].Load().cut.Up() // it has no error
	}
}

// settleEvery is how often nodes are asked whether they owe anything.
const settleEvery = 250 * time.Millisecond

// settles tells the meters when no node owes anything.
func (s *soak) settles(ended <-chan struct{}) {
	t := time.NewTicker(settleEvery)
	defer t.Stop()
	var marks [][2]cover
	for {
		select {
		case <-ended:
			return
		case <-t.C:
		}
		if s.quietFrom.Load() < 0 {
			continue
		}
		marks = marks[:0]
		for _, m := range s.meters {
			marks = append(marks, m.mark())
		}
		b, settled := s.books()
		for i, m := range s.meters {
			// Half the limit has half the balance below 0.
			if settled && i != changingKey {
				m.settle(marks[i], b)
			}
		}
	}
}

// books returns what nodes say about their debts; settled is whether none has any.
func (s *soak) books() (b books, settled bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, settled = s.gone, true
	for _, n := range s.nodes() {
		if n.retired {
			continue
		}
		f := n.limiter.Stats().Fallback
		b.forgiven += f.Forgiven
		b.lost += f.Lost
		settled = settled && !f.Degraded && f.Owed == 0
	}
	return b, settled
}

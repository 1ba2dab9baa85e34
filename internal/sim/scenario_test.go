package sim_test

import (
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// busy is nodes at three times the rate, all the time.
func busy(rate float64, burst int64, nodes int, faults ...fault) schedule {
	s := schedule{
		Seed: 1, Rate: rate, Burst: burst, Nodes: nodes, Keys: 1, Period: 100, Timeout: 30, RTT: 1, Backoff: 100, Ramp: 200,
		For: 6000, Clock: make([]float64, nodes), Faults: faults, Limit2: limit2{rate, burst, 0},
		Traffic: []traffic{{For: 6000, Node: -1, Cost: 1, Demand: 3}},
	}
	for i := range s.Clock {
		s.Clock[i] = 1
	}
	return s
}

// play runs s, and fails t for what the judge finds.
func play(t *testing.T, s schedule, look func(w *world, b *book)) {
	t.Helper()
	runAnd(t, s, func(w *world) {
		for _, wrong := range w.judge.wrong {
			t.Error(wrong)
		}
		look(w, w.judge.books[w.keys[0]])
	})
}

// peak is the highest level of b by a limit, from a time on.
func (b *book) peak(t *testing.T, l lease.Limit, since time.Duration) float64 {
	t.Helper()
	level, err := lease.NewLevel(l)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range b.admissions {
		if a.at >= since {
			level.Add(a.at-since, a.tokens)
		}
	}
	return level.Peak()
}

func TestScenario26_FailOverLosesASecond(t *testing.T) {
	s := busy(1000, 500, 4, fault{At: 3000, For: 100, Kind: failover, Node: -1, Amount: 1000})
	play(t, s, func(w *world, b *book) {
		peak, extra := b.peak(t, w.limit(0), 0), b.credits[0].tokens
		t.Logf("level %.1f of %d, the store gained %.1f tokens", peak, s.Burst, extra)
		if extra > 500 || len(b.credits) != 1 {
			t.Errorf("%d losses, of %.1f tokens: want 1, of at most min(burst, rate·1s + what there was)", len(b.credits), extra)
		}
	})
}

func TestScenario39_LimitLowered(t *testing.T) {
	s := busy(2000, 1000, 4, fault{At: 3000, Kind: change, Node: 0}, fault{At: 3000, Kind: change, Node: 1})
	s.Limit2 = limit2{200, 100, 0}
	t.Run("two versions", func(t *testing.T) {
		s := s
		s.Faults = []fault{{At: 3000, Kind: rollout, Node: 0}, {At: 3000, Kind: rollout, Node: 1}}
		play(t, s, func(w *world, b *book) {
			if len(b.changes) != 1 {
				t.Fatalf("the limit changed %d times: want once, and no way back", len(b.changes))
			}
			c := b.changes[0]
			level := b.peak(t, c.limit, c.at)
			t.Logf("%v at %v with %d out: level %.1f", c.limit, c.at, c.out, level)
			if most := float64(c.limit.Burst + c.out); level > most {
				t.Errorf("level = %.1f after it: want at most burst + outstanding, %.1f", level, most)
			}
			for _, s := range b.shown {
				if s.at > c.at+2*w.Period.d() && s.limit.Burst != c.limit.Burst {
					t.Errorf("at %v node %d goes by %v: want %v two periods after the change at %v", s.at, s.node.place, s.limit, c.limit, c.at)
				}
			}
		})
	})
	// Without versions the latest call wins: bounded by the larger one, as the judge
	// sees to, and no tokens for nothing.
	t.Run("unversioned", func(t *testing.T) {
		play(t, s, func(_ *world, b *book) {
			if len(b.changes) < 10 {
				t.Errorf("the limit changed %d times: want it to go to and fro", len(b.changes))
			}
		})
	})
}

func TestScenario40_LimitRaised(t *testing.T) {
	s := busy(100, 100, 4)
	for place := range 4 {
		s.Faults = append(s.Faults, fault{At: 3000, Kind: change, Node: place})
	}
	s.Limit2 = limit2{1000, 1000, 0}
	play(t, s, func(w *world, b *book) {
		if len(b.changes) != 1 {
			t.Fatalf("the limit changed %d times: want once", len(b.changes))
		}
		c := b.changes[0]
		if c.after > c.before+1 {
			t.Errorf("%.1f tokens before, %.1f after: want no burst for nothing", c.before, c.after)
		}
		// By the old limit up to then, and from then on what the new rate gives.
		admitted := int64(0)
		for _, a := range b.admissions {
			if a.at >= c.at && a.at < c.at+time.Second {
				admitted += a.tokens
			}
		}
		t.Logf("%v at %v: %.1f tokens before, %.1f after; %d admitted in the next second", c.limit, c.at, c.before, c.after, admitted)
		if most := c.before + float64(c.out) + 1000; float64(admitted) > most || admitted < 200 {
			t.Errorf("%d admitted in a second: want at most %.1f, and more than before", admitted, most)
		}
	})
}

func TestScenario41_PeriodChanges(t *testing.T) {
	for _, period := range []ms{20, 400} {
		s := busy(1000, 2000, 4)
		for place := range 4 {
			s.Faults = append(s.Faults, fault{At: ms(1000 + 900*place), Kind: rollout, Node: place})
		}
		s.Limit2.Period = period
		play(t, s, func(w *world, b *book) {
			level := b.peak(t, w.limit(0), 0)
			t.Logf("from 100 ms to %v ms: level %.1f", period, level)
			if level > 2000 {
				t.Errorf("level = %.1f: want at most the burst, 2000", level)
			}
		})
	}
}

// A burst lowered elevenfold: the bucket keeps the epochs of the old leases as long as
// any is out, which is always with four nodes at work; they must not wait as long as
// that between calls. They got a fifth of the rate, for good.
func TestLoweredBurstIsNotStarved(t *testing.T) {
	s, err := parse(`{"Seed":20,"Rate":333.3,"Burst":99,"Nodes":4,"Keys":3,"Period":250,"Timeout":30,"RTT":0.2,"Backoff":25,"Ramp":1000,"Share":1,` +
		`"Policy":"degrade","Lag":1000,"For":1800,"Limit2":{"Rate":333.3,"Burst":9,"Period":750},"Clock":[1,1,1,1],` +
		`"Traffic":[{"At":390,"For":16,"Key":0,"Cost":1,"Node":1,"Demand":3}],"Faults":[{"At":571,"For":630,"Kind":"set limits","Node":0}]}`)
	if err != nil {
		t.Fatal(err)
	}
	for seed := range uint64(20) {
		s.Seed = seed
		play(t, s, func(*world, *book) {})
	}
}

// What cannot be run is refused, by field.
func TestScheduleRefusesNonsense(t *testing.T) {
	seed := 1
	for len(drawn.Example(seed).Faults) == 0 {
		seed++
	}
	good := drawn.Example(seed).String()
	if _, err := parse(good); err != nil {
		t.Errorf("a schedule that was drawn: %v: want no error", err)
	}
	for _, c := range []struct{ field, text string }{
		{"invalid character", "nonsense"},
		{"unknown field", `{"Fault":[]}`},
		{"Nodes", "{}"},
		{"Rate", strings.Replace(good, `"Rate":`, `"Rate":-`, 1)},
		{"Period", strings.Replace(good, `"Period":`, `"Period":-`, 1)},
		{"Traffic[0]", strings.Replace(good, `"Demand":`, `"Demand":-`, 1)},
		{"Clock[0]", strings.Replace(good, `"Clock":[`, `"Clock":[0,`, 1)},
		{"Faults[0].Kind", strings.Replace(good, `"Faults":[`, `"Faults":[{"Kind":"flood"},`, 1)},
		{"Faults[0].Key", strings.Replace(good, `"Faults":[`, `"Faults":[{"Kind":"flush","Key":9},`, 1)},
	} {
		if _, err := parse(c.text); err == nil || !strings.Contains(err.Error(), c.field) {
			t.Errorf("%.60s: %v: want %s named", c.text, err, c.field)
		}
	}
}

// Two runs of a schedule are the same, to the last decision.
func TestSimIsDeterministic(t *testing.T) {
	for seed := 1; seed <= 40; seed++ {
		s := drawn.Example(seed)
		if first, second := run(t, s), run(t, s); first.digest != second.digest || first.calls != second.calls {
			t.Errorf("seed %d: %+v, and then %+v: want the same", seed, first, second)
		}
	}
}

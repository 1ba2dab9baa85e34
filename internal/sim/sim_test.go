package sim_test

import (
	"flag"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var (
	simRuns     = flag.Int("sim.runs", 300, "how many schedules TestSim runs")
	simTime     = flag.Duration("sim.time", 0, "for how long TestSim runs schedules, at most; 0: until all have run")
	simSeed     = flag.Int("sim.seed", 1, "the first schedule that TestSim runs; without -sim.runs the only one")
	simShrink   = flag.Bool("sim.shrink", true, "look for the smallest schedule that fails, for 20 s")
	simSchedule = flag.String("sim.schedule", "", "a schedule in JSON, which TestSim runs instead")
)

// given reports whether a flag was given.
func given(name string) (ok bool) {
	flag.Visit(func(f *flag.Flag) { ok = ok || f.Name == name })
	return ok
}

// TestSim runs schedules: each seed is one. It tells of a seed that fails the
// smallest schedule that fails as well.
func TestSim(t *testing.T) {
	if *simSchedule != "" {
		s, err := parse(*simSchedule)
		if err != nil {
			t.Fatalf("-sim.schedule: %v", err)
		}
		r := run(t, s)
		t.Logf("%s%+v", s.tell(), r)
		if r.wrong != nil {
			t.Errorf("%s", strings.Join(r.wrong, "\n"))
		}
		return
	}
	runs := *simRuns
	if given("sim.seed") && !given("sim.runs") {
		runs = 1
	}
	var (
		next   atomic.Int64
		failed atomic.Bool
		mu     sync.Mutex
		sum    result
		done   int
		near   int
		begin  = time.Now()
		bad    = -1
	)
	next.Store(int64(*simSeed) - 1)
	t.Run("schedules", func(t *testing.T) {
		for range 2 {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				for !failed.Load() && (*simTime == 0 || time.Since(begin) < *simTime) {
					seed := int(next.Add(1))
					if seed >= *simSeed+runs {
						return
					}
					r := run(t, drawn.Example(seed))
					mu.Lock()
					done++
					sum.decisions += r.decisions
					sum.calls += r.calls
					sum.local += r.local
					sum.faults += r.faults
					if r.peak > 0.99 {
						near++
					}
					if r.wrong != nil && (bad < 0 || seed < bad) {
						bad = seed
						failed.Store(true)
					}
					mu.Unlock()
				}
			})
		}
	})
	verdict := "no level passed its bound"
	if bad >= 0 {
		verdict = fmt.Sprintf("seed %d failed", bad)
	}
	t.Logf("%d schedules in %v: %d faults, %d decisions, %d calls to the store, %d tokens admitted by shares; %s, in %d runs one came within 1 %% of it",
		done, time.Since(begin).Round(time.Second), sum.faults, sum.decisions, sum.calls, sum.local, verdict, near)
	switch {
	case bad < 0:
	case *simShrink:
		shrink(t, bad)
	default:
		t.Errorf("seed %d: %s", bad, strings.Join(run(t, drawn.Example(bad)).wrong, "\n"))
	}
}

// shrink fails t with the smallest schedule it finds that fails as seed's does.
func shrink(t *testing.T, seed int) {
	whole := drawn.Example(seed)
	set := func(name, value string) {
		if err := flag.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	set("rapid.checks", "1")
	set("rapid.nofailfile", "true")
	set("rapid.shrinktime", "20s")
	t.Logf("seed %d: %s%s", seed, whole.tell(), strings.Join(run(t, whole).wrong, "\n"))
	var smallest schedule
	var wrong []string
	first := true
	set("rapid.seed", strconv.Itoa(seed))
	check := &quiet{T: t}
	rapid.Check(check, func(rt *rapid.T) {
		s := drawn.Draw(rt, "schedule")
		if first && !reflect.DeepEqual(s, whole) {
			t.Errorf("rapid makes another schedule of seed %d", seed)
		}
		first = false
		if r := run(t, s); r.wrong != nil {
			smallest, wrong = s, r.wrong
			rt.Fatalf("wrong")
		}
	})
	t.Errorf("seed %d: smallest schedule that fails:\n%s%s\nagain: go test ./internal/sim -run TestSim -sim.seed=%d\nthis one: go test ./internal/sim -run TestSim -sim.schedule='%v'",
		seed, smallest.tell(), strings.Join(wrong, "\n"), seed, smallest)
}

// quiet is a test that rapid may fail without a word.
type quiet struct {
	*testing.T
	failed bool
}

func (q *quiet) Log(...any)            {}
func (q *quiet) Logf(string, ...any)   {}
func (q *quiet) Error(...any)          { q.failed = true }
func (q *quiet) Errorf(string, ...any) { q.failed = true }
func (q *quiet) Fatal(...any)          { q.failed = true }
func (q *quiet) Fatalf(string, ...any) { q.failed = true }
func (q *quiet) Fail()                 { q.failed = true }
func (q *quiet) FailNow()              { q.failed = true }
func (q *quiet) Failed() bool          { return q.failed }

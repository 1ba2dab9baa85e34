package sim_test

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/internal/sim"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

var limit = lease.Limit{Rate: 1000, Burst: 300}

func newWorld(t *testing.T, nodes int) (*sim.World, *leasetest.Store) {
	t.Helper()
	clock := leasetest.NewClock()
	start := clock.Now()
	store := leasetest.NewStore(clock.Now)
	w, err := sim.NewWorld(nodes, store, func(now time.Duration) { clock.Set(start + now) }, limit, lease.Options{LeasePeriod: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	return w, store
}

// offer asks rate times a second in all for d and returns the times of admissions.
func offer(t *testing.T, w *sim.World, rate float64, d time.Duration) (admitted []time.Duration) {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	at := w.Now()
	for end := at + d; ; {
		at += time.Duration(r.ExpFloat64() / rate * 1e9)
		if at > end {
			w.Advance(end)
			return admitted
		}
		w.Advance(at)
		got, err := w.Take(r.IntN(w.Nodes()), "k", 1)
		if err != nil {
			t.Fatal(err)
		}
		if got.Allowed {
			admitted = append(admitted, w.Now())
		}
	}
}

func TestWorldKeepsTheLimit(t *testing.T) {
	w, store := newWorld(t, 10)
	level, err := lease.NewLevel(limit)
	if err != nil {
		t.Fatal(err)
	}
	admitted := offer(t, w, 3*limit.Rate, 10*time.Second)
	for _, at := range admitted {
		level.Add(at, 1)
	}
	if level.Peak() > float64(limit.Burst) {
		t.Errorf("level = %.3f: want at most %d", level.Peak(), limit.Burst)
	}
	calls, granted, spent := w.Calls()
	t.Logf("admitted %d, %d calls, level %.1f", len(admitted), calls, level.Peak())
	if len(admitted) < 9700 || spent != int64(len(admitted)) || granted != store.Granted()["k"] || calls != store.Calls() {
		t.Errorf("admitted %d; %d calls, granted %d, spent %d; the store %d calls, granted %d: want 9700 or more, and agreement",
			len(admitted), calls, granted, spent, store.Calls(), store.Granted()["k"])
	}
	for i := range w.Nodes() {
		leasetest.CheckLedger(t, granted, w.Node(i).Stats())
	}
	if err := w.Close(); err != nil {
		t.Errorf("Close = %v: want nil", err)
	}
	if out := outstanding(store); out != 0 {
		t.Errorf("outstanding = %d with every node closed: want 0", out)
	}
}

func outstanding(store *leasetest.Store) int64 {
	b := store.Bucket("k")
	return b.Outstanding()
}

// TestWorldDependsOnItsInputAlone runs the same twice, above the limit too.
func TestWorldDependsOnItsInputAlone(t *testing.T) {
	var first []time.Duration
	for range 2 {
		w, _ := newWorld(t, 5)
		got := offer(t, w, 3*limit.Rate, 2*time.Second)
		if first == nil {
			first = got
		} else if !slices.Equal(got, first) {
			t.Errorf("admitted %d, and the second time %d at other times: want the same", len(first), len(got))
		}
	}
}

// TestWorldVisitsInTime moves on in one step past the time at which an idle node
// gives its lease back: it does so at that time, not at the end.
func TestWorldVisitsInTime(t *testing.T) {
	w, store := newWorld(t, 2)
	for range 100 {
		if _, err := w.Take(0, "k", 1); err != nil {
			t.Fatal(err)
		}
	}
	next, ok := w.Node(0).Next()
	live := w.Node(0).Stats().Live
	if !ok || live == 0 {
		t.Fatalf("next visit %v, %v, with %d live: want one", next, ok, live)
	}
	w.Advance(time.Hour)
	if w.Now() != time.Hour {
		t.Errorf("now = %v: want 1h", w.Now())
	}
	s := w.Node(0).Stats()
	if s.Live != 0 || s.Returned != live || s.Expired != 0 || outstanding(store) != 0 {
		t.Errorf("live %d, returned %d, expired %d, outstanding %d: want 0, %d, 0, 0", s.Live, s.Returned, s.Expired, outstanding(store), live)
	}
	w.Advance(time.Minute) // time never goes back
	if w.Now() != time.Hour {
		t.Errorf("now = %v after going back: want 1h", w.Now())
	}
	if d, err := w.Take(1, "k", limit.Burst); err != nil || !d.Allowed {
		t.Errorf("the whole burst for the other node = %+v, %v: want allowed", d, err)
	}
}

func TestNewWorldTellsProblems(t *testing.T) {
	none := func(time.Duration) {}
	if _, err := sim.NewWorld(1, nil, none, limit, lease.Options{}); err == nil {
		t.Error("NewWorld without a store = nil error: want one")
	}
	store := leasetest.NewStore(func() time.Duration { return time.Hour })
	if _, err := sim.NewWorld(1, store, none, lease.Limit{Rate: -1}, lease.Options{}); err == nil {
		t.Error("NewWorld with a bad limit = nil error: want one")
	}
	w, err := sim.NewWorld(0, store, none, limit, lease.Options{})
	if err != nil || w.Nodes() != 0 {
		t.Errorf("NewWorld of no nodes = %v, %v: want an empty one", w, err)
	}
}

package lease_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

func newLevel(t *testing.T, l lease.Limit) *lease.Level {
	t.Helper()
	v, err := lease.NewLevel(l)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestLevel(t *testing.T) {
	v := newLevel(t, lease.Limit{Rate: 10, Burst: 5})
	v.Add(0, 5)
	v.Add(100*time.Millisecond, 1) // one has drained
	if v.Peak() != 5 {
		t.Errorf("peak = %v: want 5", v.Peak())
	}
	v.Add(199999*time.Microsecond, 1) // a microsecond early
	if got, want := v.Peak(), 5.00001; math.Abs(got-want) > 1e-9 {
		t.Errorf("peak = %v: want %v", got, want)
	}
	v.Add(time.Hour, 5) // empty by then, and no emptier
	if got := v.Peak(); math.Abs(got-5.00001) > 1e-9 {
		t.Errorf("peak after an hour = %v: want no change", got)
	}
	v.Add(math.MaxInt64, 6)
	if got := v.Peak(); got != 6 {
		t.Errorf("peak = %v: want 6", got)
	}
}

func TestLevelAllow(t *testing.T) {
	v := newLevel(t, lease.Limit{Rate: 10, Burst: 3})
	for i, s := range []struct {
		at time.Duration
		n  int64
		ok bool
	}{
		{0, 4, false},
		{0, 3, true},
		{0, 1, false},
		{99999 * time.Microsecond, 1, false}, // a hair early
		{100 * time.Millisecond, 1, true},    // exactly on time
		{50 * time.Millisecond, 1, false},    // time does not go back
		{time.Hour, 3, true},
		{time.Hour, 1, false},
	} {
		if got := v.Allow(s.at, s.n); got != s.ok {
			t.Errorf("step %d: Allow(%v, %d) = %v: want %v", i, s.at, s.n, got, s.ok)
		}
	}
	if v.Peak() != 3 {
		t.Errorf("peak = %v: want 3", v.Peak())
	}
	for _, l := range []lease.Limit{{}, {Rate: 1}, {Burst: 1}} {
		if newLevel(t, l).Allow(0, 1) {
			t.Errorf("%v allows: want not", l)
		}
	}
	if _, err := lease.NewLevel(lease.Limit{Rate: -1}); err == nil {
		t.Error("NewLevel of a bad limit = nil error: want one")
	}
}

// TestPeakLevel compares the sweep with the definition: of all windows, the
// tokens wholly inside one, less what the rate allows in it.
func TestPeakLevel(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 200 {
		l := lease.Limit{Rate: 1 + 100*r.Float64(), Burst: 1 + r.Int64N(50)}
		trace := make([]lease.Admission, 1+r.IntN(30))
		instants := r.IntN(2) == 0
		level := newLevel(t, l)
		for i := range trace {
			a := &trace[i]
			a.Start = time.Duration(r.IntN(1000)) * time.Millisecond
			a.End = a.Start + time.Duration(r.IntN(100))*time.Millisecond
			a.N = 1 + r.Int64N(5)
			if instants {
				a.End = a.Start
			}
		}
		want := 0.0
		for _, from := range trace {
			for _, to := range trace {
				inside := int64(0)
				for _, a := range trace {
					if a.Start >= from.Start && a.End <= to.End {
						inside += a.N
					}
				}
				if to.End >= from.Start {
					want = max(want, float64(inside)-l.Rate*(to.End-from.Start).Seconds())
				}
			}
		}
		got := lease.PeakLevel(l, trace)
		if math.Abs(got-want) > 1e-6 {
			t.Fatalf("PeakLevel(%v, %v) = %v: want %v", l, trace, got, want)
		}
		if instants {
			slices.SortFunc(trace, func(a, b lease.Admission) int { return int(a.Start - b.Start) })
			for _, a := range trace {
				level.Add(a.Start, a.N)
			}
			if math.Abs(level.Peak()-got) > 1e-6 {
				t.Fatalf("PeakLevel(%v, %v) = %v: want Level's peak, %v", l, trace, got, level.Peak())
			}
		}
	}
	if got := lease.PeakLevel(lease.Limit{Rate: 1, Burst: 1}, nil); got != 0 {
		t.Errorf("PeakLevel of nothing = %v: want 0", got)
	}
}

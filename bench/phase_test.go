package bench

import (
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/lease"
)

const ms = time.Millisecond

// at is an admission that was decided just then.
func at(t time.Duration, n int64) lease.Admission { return lease.Admission{Start: t, End: t, N: n} }

func TestPhasesAccount(t *testing.T) {
	limit := hybrid.PerSecond(10, 2)
	decide := func(key int, start, end time.Duration, allowed bool, source hybrid.Source) decided {
		return decided{lease.Admission{Start: start, End: end, N: 1}, key, allowed, source}
	}
	logs := [][]decided{
		{
			decide(0, 0, 10*ms, true, hybrid.SourceStore),
			decide(0, 20*ms, 21*ms, true, hybrid.SourceLease),
			decide(0, 30*ms, 31*ms, false, hybrid.SourceMemory), // the bucket is empty for an ideal one too
			decide(1, 90*ms, 190*ms, true, hybrid.SourceLocal),  // answered in the outage
			decide(0, 150*ms, 151*ms, false, hybrid.SourceLocal),
		},
		{
			decide(0, 155*ms, 158*ms, true, hybrid.SourceLocal), // one too many: the ideal has given its token at 150
			decide(0, 310*ms, 312*ms, true, hybrid.SourceStore),
			decide(0, 400*ms, 402*ms, true, hybrid.SourceStore), // after the end
		},
	}
	p := newPhases(limit, []string{"a", "b"}, logs)
	got := []Phase{
		{Phase: "healthy", from: 0, to: 100 * ms},
		{Phase: "outage", from: 100 * ms, to: 300 * ms},
		{Phase: "recovered", from: 300 * ms, to: 350 * ms},
	}
	p.account(got)
	want := []Phase{
		{
			Phase: "healthy", Seconds: 0.1, Decisions: 3, Admitted: 2, Ideal: 2, P50: 1000, P99: 10000, Max: 10000,
			BySource: map[string]int{"store": 1, "lease": 1, "memory": 1}, from: 0, to: 100 * ms,
		},
		{
			Phase: "outage", Seconds: 0.2, Decisions: 3, Admitted: 2, Ideal: 2, P50: 3000, P99: 100000, Max: 100000,
			BySource: map[string]int{"local": 3}, from: 100 * ms, to: 300 * ms,
		},
		{
			Phase: "recovered", Seconds: 0.05, Decisions: 1, Admitted: 1, Ideal: 1, P50: 2000, P99: 2000, Max: 2000,
			BySource: map[string]int{"store": 1}, from: 300 * ms, to: 350 * ms,
		},
	}
	for i := range want {
		if !reflect.DeepEqual(got[i], want[i]) {
			t.Errorf("phase %d:\n got %+v\nwant %+v", i, got[i], want[i])
		}
	}
	if got, want := p.local(1, 190*ms), int64(1); got != want {
		t.Errorf("local(1, 190ms) = %d, want %d", got, want)
	}
	if got, want := p.local(1, 189*ms), int64(0); got != want {
		t.Errorf("local(1, 189ms) = %d, want %d: it was answered later", got, want)
	}

	// The fullest windows: two from 0 to 21 ms, three from 0 to 158 ms, and the last
	// alone from 310 to 312 ms. Key b has a bound far away.
	bounds := []float64{2, 50}
	for i, want := range []float64{1.79, 1.42, 0.98} {
		p.judge(&got[i], func(key int) float64 { return bounds[key] })
		if ph := got[i]; ph.Key != "a" || ph.Bound != 2 || !near(ph.MaxLevel, want) {
			t.Errorf("%s: level %v of %q, bound %v; want %v of a, bound 2", ph.Phase, ph.MaxLevel, ph.Key, ph.Bound, want)
		}
	}
	p.judge(&got[1], func(key int) float64 { return []float64{2, 0.2}[key] })
	if got[1].Key != "b" || got[1].MaxLevel != 0 || got[1].Bound != 0.2 {
		t.Errorf("outage: level %v of %q, bound %v; want 0 of b, bound 0.2", got[1].MaxLevel, got[1].Key, got[1].Bound)
	}
}

func near(a, b float64) bool { return a-b < 1e-6 && b-a < 1e-6 }

func TestPeakWithin(t *testing.T) {
	limit := hybrid.PerSecond(10, 5)
	trace := []lease.Admission{at(500*ms, 5), at(1500*ms, 3), {Start: 1900 * ms, End: 2100 * ms, N: 1}, at(2600*ms, 2)}
	for _, c := range []struct {
		name     string
		from, to time.Duration
		want     float64
	}{
		{"all", 0, 3000 * ms, 5},
		{"before anything", 0, 400 * ms, 0},
		{"up to the first", 0, 500 * ms, 5},
		{"what is left of the first at its beginning", 700 * ms, 900 * ms, 3},
		{"nothing is left", 1000 * ms, 1400 * ms, 0},
		{"the second", 1200 * ms, 1800 * ms, 3},
		{"with what is left of the first", 900 * ms, 950 * ms, 1},
		{"one that began before, and may have been then", 2000 * ms, 2500 * ms, 0},
		{"the last", 2200 * ms, 3000 * ms, 2},
	} {
		if got := peakWithin(limit, trace, c.from, c.to); !near(got, c.want) && c.want > 0 || got < 0 {
			t.Errorf("%s: peakWithin(%v, %v) = %v, want %v", c.name, c.from, c.to, got, c.want)
		}
	}
}

// The definition of a level at an instant, taken literally: of all windows that
// end then, the one with the most.
func TestPeakWithinIsTheMostOfAllWindows(t *testing.T) {
	limit := hybrid.PerSecond(100, 20)
	random := rand.New(rand.NewPCG(3, 5))
	for range 300 {
		trace := make([]lease.Admission, 1+random.IntN(12))
		for i := range trace {
			start := time.Duration(random.IntN(300)) * ms
			trace[i] = lease.Admission{Start: start, End: start + time.Duration(random.IntN(40))*ms, N: 1 + random.Int64N(4)}
		}
		from := time.Duration(random.IntN(200)) * ms
		to := from + time.Duration(random.IntN(150))*ms
		want, ends := 0.0, []time.Duration{from}
		for _, a := range trace {
			if a.End > from && a.End <= to {
				ends = append(ends, a.End)
			}
		}
		for _, end := range ends {
			for _, first := range trace {
				level := -limit.Rate * (end - first.Start).Seconds()
				for _, a := range trace {
					if a.Start >= first.Start && a.End <= end {
						level += float64(a.N)
					}
				}
				if first.Start <= end {
					want = max(want, level)
				}
			}
		}
		if got := peakWithin(limit, trace, from, to); !near(got, want) {
			t.Fatalf("peakWithin(%v, %v, %v) = %v, want %v", trace, from, to, got, want)
		}
	}
}

func TestBounds(t *testing.T) {
	limit := hybrid.PerSecond(100, 500)
	for _, c := range []struct {
		name  string
		terms terms
		want  [3]float64
	}{
		{"nobody missed anything", terms{shares: 1, lasted: 5 * time.Second}, [3]float64{500, 501, 504}},
		{"unseen", terms{shares: 1, unseen: 60, lasted: 5 * time.Second}, [3]float64{500, 561, 564}},
		{"at most all", terms{shares: 1, unseen: 900, lasted: 5 * time.Second}, [3]float64{500, 1000, 1003}},
		{"a call failed before", terms{shares: 1, failed: true, early: 7, lasted: 5 * time.Second}, [3]float64{507, 1007, 1010}},
		{"debts", terms{shares: 1, owed: 300, lasted: 5 * time.Second}, [3]float64{500, 501, 804}},
		{"debts of a long outage", terms{shares: 1, owed: 9000, lasted: 90 * time.Second}, [3]float64{500, 501, 1004}},
		{"late", terms{shares: 1, owed: 300, late: 40, lasted: 5 * time.Second}, [3]float64{500, 501, 844}},
		{"a bucket that was not full yet, lost", terms{shares: 1, lasted: 2 * time.Second}, [3]float64{500, 501, 804}},
		{"one more outage", terms{shares: 1, trips: 1, lasted: 5 * time.Second}, [3]float64{500, 501, 1004}},
		// Each of three believes to be one of two: 3/2 of everything.
		{"too few nodes believed in", terms{shares: 1.5, unseen: 59, lasted: 5 * time.Second}, [3]float64{500, 500 + 90 + 500, 500 + 90 + 500 + 3}},
		{"too many", terms{shares: 0.5, unseen: 59, lasted: 5 * time.Second}, [3]float64{500, 560, 563}},
	} {
		c.terms.limit = limit
		for phase, want := range c.want {
			if got := c.terms.bound(phase); got != want {
				t.Errorf("%s: bound(%d) = %v, want %v", c.name, phase, got, want)
			}
		}
	}
	tiny := terms{limit: hybrid.PerSecond(1, 1), shares: 1, lasted: time.Second}
	if got, want := tiny.bound(1), float64(Nodes+1); got != want {
		t.Errorf("bound of a burst of 1 = %v, want %v: a request for each node, and rounding", got, want)
	}
}

func TestUnseen(t *testing.T) {
	taps := []*tap{
		{replies: []reply{{0, 10 * ms, 11 * ms, 50}, {0, 100 * ms, 105 * ms, 40}}},
		{replies: []reply{{0, 20 * ms, 21 * ms, 30}, {0, 103 * ms, 104 * ms, 20}, {1, 130 * ms, 131 * ms, 999}}},
		{replies: []reply{{0, 40 * ms, 41 * ms, 10}, {0, 900 * ms, 901 * ms, 5}}},
	}
	for _, c := range []struct {
		until time.Duration
		want  int64
	}{
		// The third node knows nothing of what the first two had later; the call of
		// the second may have been before the first's, which came back after it.
		{200 * ms, 60},
		// Now it does; but the second has not seen the third's last, nor maybe the
		// first's.
		{time.Second, 45},
		// A node that never had a reply has seen nothing.
		{30 * ms, 80},
		{0, 0},
	} {
		if got := unseen(taps, 0, c.until); got != c.want {
			t.Errorf("unseen(until %v) = %d, want %d", c.until, got, c.want)
		}
	}
}

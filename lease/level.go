package lease

import (
	"cmp"
	"slices"
	"time"
)

// Level is the height of a leaky bucket that drains at the limit's rate and is
// fed by what was admitted. A trace keeps to the limit exactly when its level
// never passes the burst: that is the one oracle all tests compute. Asked
// before each admission (Allow) it is also the ideal limiter, one exact token
// bucket. (A leaky bucket as a meter and a token bucket are mirror images:
// ITU-T I.371, GCRA.)
//
// Times are durations since any fixed instant, cut to whole microseconds.
// The zero Level is not usable; NewLevel makes one. Not for concurrent use.
type Level struct {
	count, perUS int64
	burst        int64
	units        int64 // the level, in units of 1/perUS tokens
	at           int64 // microseconds; the level is as of here
	peak         int64
	zero         bool
}

// NewLevel returns an empty level for l, or l's *LimitError.
func NewLevel(l Limit) (*Level, error) {
	if err := l.Validate(); err != nil {
		return nil, err
	}
	v := &Level{zero: l.Zero(), burst: l.Burst, perUS: 1}
	if !v.zero {
		v.count, v.perUS, _ = l.ratio()
	}
	return v, nil
}

// drain brings the level to time at. Time running backwards drains nothing.
func (v *Level) drain(at time.Duration) {
	now := at.Microseconds()
	if now <= v.at {
		return
	}
	dt := now - v.at
	v.at = now
	if v.count == 0 {
		return
	}
	// dt·count may overflow after a long pause; by then the level is 0.
	if dt > v.units/v.count {
		v.units = 0
		return
	}
	v.units -= dt * v.count
}

// Add feeds n admitted tokens at time at.
func (v *Level) Add(at time.Duration, n int64) {
	v.drain(at)
	v.units += n * v.perUS
	v.peak = max(v.peak, v.units)
}

// Allow adds n tokens if the level then still keeps to the limit, and reports
// whether it did.
func (v *Level) Allow(at time.Duration, n int64) bool {
	v.drain(at)
	if v.zero || n > v.burst || v.units > (v.burst-n)*v.perUS {
		return false
	}
	v.Add(at, n)
	return true
}

// Peak is the highest level so far, in tokens.
func (v *Level) Peak() float64 { return float64(v.peak) / float64(v.perUS) }

// Admission is one admitted request as seen from outside: it was decided at
// some instant between Start and End, which are durations since any instant.
type Admission struct {
	Start, End time.Duration
	N          int64 // tokens
}

// PeakLevel returns the least peak that any choice of instants inside the
// admissions' intervals could have had, at least: for every window, the tokens
// of admissions that lie wholly inside it, less what the rate allows. A
// measured run that passes the burst by this measure has broken the limit, no
// matter when exactly between call and return each request was decided; a
// scheduler that stops a goroutine between a decision and its timestamp cannot
// make it cry wolf. When every Start equals its End it is exactly Level's peak.
//
// O(n log n): a sweep over window ends with a segment tree over window starts.
func PeakLevel(l Limit, trace []Admission) float64 {
	if len(trace) == 0 {
		return 0
	}
	rate := l.Rate / 1e9 // tokens per nanosecond
	byEnd := slices.Clone(trace)
	slices.SortFunc(byEnd, func(a, b Admission) int { return cmp.Compare(a.End, b.End) })
	starts := make([]time.Duration, len(trace))
	for i, a := range trace {
		starts[i] = a.Start
	}
	slices.Sort(starts)
	starts = slices.Compact(starts)
	t0 := starts[0]

	tree := newMaxTree(len(starts), func(i int) float64 { return rate * float64(starts[i]-t0) })
	peak := 0.0
	for _, a := range byEnd {
		// A window that starts at or before a.Start holds all of a.
		i, _ := slices.BinarySearch(starts, a.Start)
		tree.add(i, float64(a.N))
		// The best window ending here starts no later than here; later starts
		// hold nothing yet and are at most 0 by then.
		j, found := slices.BinarySearch(starts, a.End)
		if !found {
			j--
		}
		peak = max(peak, tree.max(j)-rate*float64(a.End-t0))
	}
	return peak
}

// maxTree answers the maximum over a prefix under additions to a prefix.
type maxTree struct {
	size int
	best []float64 // best[k] is the maximum below k, without pending adds above
	pend []float64
}

func newMaxTree(n int, value func(int) float64) *maxTree {
	size := 1
	for size < n {
		size *= 2
	}
	t := &maxTree{size: size, best: make([]float64, 2*size), pend: make([]float64, 2*size)}
	for i := range n {
		t.best[size+i] = value(i)
	}
	for i := n; i < size; i++ {
		t.best[size+i] = -1e300
	}
	for k := size - 1; k > 0; k-- {
		t.best[k] = max(t.best[2*k], t.best[2*k+1])
	}
	return t
}

// add adds x to the values 0..last.
func (t *maxTree) add(last int, x float64) { t.addIn(1, 0, t.size-1, last, x) }

func (t *maxTree) addIn(k, lo, hi, last int, x float64) {
	if lo > last {
		return
	}
	if hi <= last {
		t.best[k] += x
		t.pend[k] += x
		return
	}
	mid := (lo + hi) / 2
	t.addIn(2*k, lo, mid, last, x)
	t.addIn(2*k+1, mid+1, hi, last, x)
	t.best[k] = max(t.best[2*k], t.best[2*k+1]) + t.pend[k]
}

// max returns the maximum of the values 0..last.
func (t *maxTree) max(last int) float64 { return t.maxIn(1, 0, t.size-1, last) }

func (t *maxTree) maxIn(k, lo, hi, last int) float64 {
	if lo > last {
		return -1e300
	}
	if hi <= last {
		return t.best[k]
	}
	mid := (lo + hi) / 2
	return max(t.maxIn(2*k, lo, mid, last), t.maxIn(2*k+1, mid+1, hi, last)) + t.pend[k]
}

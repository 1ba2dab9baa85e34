package leasetest

import (
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Trace records what all nodes of a run admitted, and judges it with the one
// oracle of every test: the level of each key, a bucket that drains at the
// key's rate and is fed by what was admitted, never passes the key's burst.
// Safe for concurrent use.
type Trace struct {
	limits lease.Limits

	mu   sync.Mutex
	keys map[string]*record
}

type record struct {
	limit             lease.Limit
	level             *lease.Level      // of admissions in order
	unordered         []lease.Admission // others
	admitted, refused int64             // tokens
}

// NewTrace returns an empty Trace for keys with these limits.
func NewTrace(limits lease.Limits) *Trace {
	return &Trace{limits: limits, keys: map[string]*record{}}
}

// Record takes in the decision on a request of n tokens. at is when it was
// made, since any fixed instant; that of one that waited for the store is when
// the store charged it. Time never goes back.
func (r *Trace) Record(at time.Duration, key string, n int64, d lease.Decision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k := r.keyLocked(key); k.book(n, d) {
		k.level.Add(at, n)
	}
}

// RecordAny is Record for decisions that come in no order, for a key that all
// of them come by it. at counts in whole microseconds, as the store's clock does.
func (r *Trace) RecordAny(at time.Duration, key string, n int64, d lease.Decision) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if k := r.keyLocked(key); k.book(n, d) {
		at = at.Truncate(time.Microsecond)
		k.unordered = append(k.unordered, lease.Admission{Start: at, End: at, N: n})
	}
}

func (r *Trace) keyLocked(key string) *record {
	if k := r.keys[key]; k != nil {
		return k
	}
	limit := r.limits.For(key)
	level, err := lease.NewLevel(limit)
	if err != nil {
		panic("leasetest: " + err.Error()) // a limit that a test made up
	}
	k := &record{level: level, limit: limit}
	r.keys[key] = k
	return k
}

// book counts a decision and reports whether it admits anything.
func (k *record) book(n int64, d lease.Decision) bool {
	if !d.Allowed {
		k.refused += n
		return false
	}
	k.admitted += n
	return n > 0
}

func (k *record) peak() float64 {
	return max(k.level.Peak(), lease.PeakLevel(k.limit, k.unordered))
}

// Admitted returns how many tokens of key were admitted.
func (r *Trace) Admitted(key string) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.keyLocked(key).admitted
}

// Refused returns how many tokens of key were refused.
func (r *Trace) Refused(key string) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.keyLocked(key).refused
}

// Peak returns the highest level of key so far.
func (r *Trace) Peak(key string) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.keyLocked(key).peak()
}

// Check fails t for every key whose level passed its burst.
func (r *Trace) Check(t testing.TB) {
	t.Helper()
	r.CheckWithin(t, 0)
}

// CheckWithin is Check with extra tokens allowed on top of each burst, for runs
// with faults that cost a bounded number of them.
func (r *Trace) CheckWithin(t testing.TB, extra float64) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for key, k := range r.keys {
		const rounding = 1e-6 // of PeakLevel, which works in floating point
		if got, most := k.peak(), float64(k.limit.Burst)+extra; got > most+rounding {
			t.Errorf("key %.64q: level = %.3f: want at most %.3f (%v; %d tokens admitted)", key, got, most, k.limit, k.admitted)
		}
	}
}

// CheckLedger fails t unless each node accounts for every token it was granted,
// and all of them together for no more than the store granted. It returns the
// difference: tokens whose reply never reached a node.
func CheckLedger(t testing.TB, granted int64, nodes ...lease.Stats) (inTransit int64) {
	t.Helper()
	inTransit = granted
	for i, s := range nodes {
		if sum := s.Spent + s.Returned + s.Expired + s.Lost + s.Live; s.Granted != sum {
			t.Errorf("node %d: granted %d = %+d + spent %d + returned %d + expired %d + lost %d + live %d: want no rest",
				i, s.Granted, s.Granted-sum, s.Spent, s.Returned, s.Expired, s.Lost, s.Live)
		}
		inTransit -= s.Granted
	}
	if inTransit < 0 {
		t.Errorf("nodes were granted %d tokens, the store granted %d: want no more", granted-inTransit, granted)
	}
	return inTransit
}

// CheckAtMost fails t if got is over most. what names it in the failure.
func CheckAtMost(t testing.TB, what string, got, most float64) {
	t.Helper()
	if got > most {
		t.Errorf("%s = %.4g: want at most %.4g", what, got, most)
	}
}

// CheckAtLeast fails t if got is under least. what names it in the failure.
func CheckAtLeast(t testing.TB, what string, got, least float64) {
	t.Helper()
	if got < least {
		t.Errorf("%s = %.4g: want at least %.4g", what, got, least)
	}
}

// Jain returns Jain's fairness index of what each got: 1 if all the same, 1/n
// if one got it all.
func Jain(got []int64) float64 {
	var sum, squares float64
	for _, x := range got {
		sum += float64(x)
		squares += float64(x) * float64(x)
	}
	if squares == 0 {
		return 1
	}
	return sum * sum / (float64(len(got)) * squares)
}

// MaxMin divides capacity among demands so that nobody gets more than it asks
// for, and nobody could get more without somebody with less losing some.
func MaxMin(capacity float64, demands []float64) []float64 {
	order := make([]int, len(demands))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		if demands[a] < demands[b] {
			return -1
		}
		return 1
	})
	shares := make([]float64, len(demands))
	for k, i := range order {
		shares[i] = min(demands[i], capacity/float64(len(order)-k))
		capacity -= shares[i]
	}
	return shares
}

// Zipf returns n demands that fall as 1/1, 1/2, 1/3, … and add up to total.
func Zipf(n int, total float64) []float64 {
	demands := make([]float64, n)
	sum := 0.0
	for i := range demands {
		demands[i] = 1 / float64(i+1)
		sum += demands[i]
	}
	for i := range demands {
		demands[i] *= total / sum
	}
	return demands
}

// Even returns n equal demands that add up to total.
func Even(n int, total float64) []float64 {
	demands := make([]float64, n)
	for i := range demands {
		demands[i] = total / float64(n)
	}
	return demands
}

package lease

import (
	"cmp"
	"math/bits"
	"slices"
	"time"
)

// Meter judges what was admitted by a limit's algorithm, exactly and with all the
// memory it takes: a Level, or the count of a window. Asked before each admission
// (Allow) it is the ideal limiter of that algorithm. Times never go back; they are
// durations since an instant that windows begin at. Not for concurrent use.
type Meter interface {
	// Add feeds n admitted tokens at time at.
	Add(at time.Duration, n int64)
	// Allow adds n tokens if that keeps to the limit, and reports whether it did.
	Allow(at time.Duration, n int64) bool
	// Peak is the highest count so far, in tokens: at most Burst if the limit held.
	Peak() float64
}

// NewMeter returns an empty Meter for l, or l's *LimitError.
func NewMeter(l Limit) (Meter, error) {
	if err := l.Validate(); err != nil {
		return nil, err
	}
	w := l.Window().Microseconds()
	switch {
	case w == 0:
		return NewLevel(l)
	case l.Algorithm == SlidingLog:
		return &logMeter{burst: l.Burst, w: w}, nil
	}
	return &windowMeter{burst: l.Burst, w: w, slides: l.Algorithm == SlidingCounter}, nil
}

// windowMeter is a fixed window, or one that slides by the weight of the one before.
type windowMeter struct {
	burst, w    int64 // w, now: microseconds
	slides      bool
	now, n      int64 // n: the number of the window
	taken, prev int64
	peak        float64
}

func (m *windowMeter) to(at time.Duration) {
	m.now = max(m.now, at.Microseconds())
	switch n := m.now / m.w; n {
	case m.n:
	case m.n + 1:
		m.n, m.prev, m.taken = n, m.taken, 0
	default:
		m.n, m.prev, m.taken = n, 0, 0
	}
}

// Add implements Meter.
func (m *windowMeter) Add(at time.Duration, n int64) {
	m.to(at)
	m.taken += n
	count := float64(m.taken)
	if m.slides {
		count += float64(m.prev) * float64(m.w-m.now%m.w) / float64(m.w)
	}
	m.peak = max(m.peak, count)
}

// Allow implements Meter.
func (m *windowMeter) Allow(at time.Duration, n int64) bool {
	m.to(at)
	room := m.burst - m.taken - n
	if room < 0 || m.slides && more(m.prev, m.w-m.now%m.w, room, m.w) {
		return false
	}
	m.Add(at, n)
	return true
}

// more reports whether a·b > c·d; all are 0 or more.
func more(a, b, c, d int64) bool {
	h1, l1 := bits.Mul64(uint64(a), uint64(b))
	h2, l2 := bits.Mul64(uint64(c), uint64(d))
	return h1 > h2 || h1 == h2 && l1 > l2
}

// Peak implements Meter.
func (m *windowMeter) Peak() float64 { return m.peak }

// logMeter remembers every admission of a window.
type logMeter struct {
	burst, w, now, sum, peak int64
	log                      []Admission // N at Start, oldest first
}

func (m *logMeter) to(at time.Duration) {
	m.now = max(m.now, at.Microseconds())
	gone := 0
	for gone < len(m.log) && m.log[gone].Start.Microseconds()+m.w <= m.now {
		m.sum -= m.log[gone].N
		gone++
	}
	m.log = m.log[gone:]
}

// Add implements Meter.
func (m *logMeter) Add(at time.Duration, n int64) {
	m.to(at)
	m.log = append(m.log, Admission{Start: time.Duration(m.now) * time.Microsecond, N: n})
	m.sum += n
	m.peak = max(m.peak, m.sum)
}

// Allow implements Meter.
func (m *logMeter) Allow(at time.Duration, n int64) bool {
	if m.to(at); m.sum > m.burst-n {
		return false
	}
	m.Add(at, n)
	return true
}

// Peak implements Meter.
func (m *logMeter) Peak() float64 { return float64(m.peak) }

// PeakWindow is PeakLevel for an algorithm that counts in windows: the most tokens
// of admissions that lie wholly inside one window, wherever it begins for a
// SlidingLog and at a multiple of its length for the others. 0 without windows.
func PeakWindow(l Limit, trace []Admission) (most int64) {
	w := l.Window()
	if w == 0 {
		return 0
	}
	byStart := slices.Clone(trace)
	slices.SortFunc(byStart, func(a, b Admission) int { return cmp.Compare(a.Start, b.Start) })
	for i, first := range byStart {
		from, sum := first.Start, int64(0)
		if l.Algorithm != SlidingLog {
			from = from.Truncate(w)
		}
		for _, a := range byStart[i:] {
			if a.Start >= from+w {
				break
			}
			if a.End < from+w {
				sum += a.N
			}
		}
		most = max(most, sum)
	}
	return most
}

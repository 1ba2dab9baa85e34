package bench

import (
	"math"
	"slices"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/lease"
)

// Phase is what was decided in one part of a run. A decision belongs to the
// phase in which it was answered.
type Phase struct {
	Phase     string  `json:"phase"`
	Seconds   float64 `json:"seconds"`
	Decisions int     `json:"decisions"`
	Admitted  int     `json:"admitted"`
	// Ideal is what one exact bucket per key, run from the start, would have
	// admitted of the phase's requests.
	Ideal int `json:"ideal"`
	// MaxLevel is the highest level that the admissions since the start of the
	// run reached within the phase, and Bound what it must not pass: of Key, the
	// one that came closest. In tokens.
	MaxLevel float64 `json:"max_level"`
	Bound    float64 `json:"bound"`
	Key      string  `json:"key"`
	// P50, P99 and Max are how long a decision took, in microseconds.
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`
	Max float64 `json:"max_us"`
	// BySource counts decisions by what made them.
	BySource map[string]int `json:"by_source"`

	from, to time.Duration // since the start of the run
}

// phases account for the decisions of a run.
type phases struct {
	limit hybrid.Limit
	keys  []string
	// all is every decision, admissions those admitted, by key.
	all        []decided
	admissions [][]lease.Admission
}

func newPhases(limit hybrid.Limit, keys []string, logs [][]decided) *phases {
	p := &phases{limit: limit, keys: keys, admissions: make([][]lease.Admission, len(keys))}
	for _, log := range logs {
		p.all = append(p.all, log...)
	}
	slices.SortFunc(p.all, func(a, b decided) int { return int(a.Start - b.Start) })
	for _, d := range p.all {
		if d.allowed {
			p.admissions[d.key] = append(p.admissions[d.key], d.Admission)
		}
	}
	return p
}

// account fills in what was decided in each phase, but for its bound. The
// phases follow each other without a gap.
func (p *phases) account(list []Phase) {
	buckets, took := meters{limit: p.limit}, make([][]time.Duration, len(list))
	for i := range list {
		list[i].Seconds, list[i].BySource = (list[i].to - list[i].from).Seconds(), map[string]int{}
	}
	for _, d := range p.all {
		ideal := buckets.of(p.keys[d.key]).Allow(d.Start, d.N)
		i := phaseOf(list, d.End)
		if i < 0 {
			continue
		}
		ph := &list[i]
		ph.Decisions++
		ph.BySource[d.source.String()]++
		took[i] = append(took[i], d.End-d.Start)
		if d.allowed {
			ph.Admitted++
		}
		if ideal {
			ph.Ideal++
		}
	}
	for i := range list {
		list[i].P50, list[i].P99, list[i].Max = quantiles(took[i])
	}
}

// phaseOf returns the phase that at is in, -1 for none.
func phaseOf(list []Phase, at time.Duration) int {
	return slices.IndexFunc(list, func(ph Phase) bool { return at > ph.from && at <= ph.to })
}

// judge fills in the level and the bound of the key that came closest to its
// bound.
func (p *phases) judge(ph *Phase, bound func(key int) float64) {
	closest := math.Inf(1)
	for k := range p.keys {
		level, most := peakWithin(p.limit, p.admissions[k], ph.from, ph.to), roundLevel(bound(k))
		if most-level < closest {
			closest = most - level
			ph.Key, ph.MaxLevel, ph.Bound = p.keys[k], level, most
		}
	}
}

// local returns the tokens of a key that were admitted by nodes' shares up to
// an instant.
func (p *phases) local(key int, until time.Duration) (tokens int64) {
	for _, d := range p.all {
		if d.key == key && d.allowed && d.source == hybrid.SourceLocal && d.End <= until {
			tokens += d.N
		}
	}
	return tokens
}

// peakWithin returns the highest level that the trace reached from one instant
// to another, its past included, by the measure of lease.PeakLevel.
func peakWithin(limit hybrid.Limit, trace []lease.Admission, from, to time.Duration) float64 {
	// Of all windows PeakLevel finds the one with the most. What is as large as
	// all else together, admitted just then, makes it one that begins by then
	// and ends later. Windows that begin later have no past.
	mark := lease.Admission{Start: from, End: from, N: 1}
	var past, within []lease.Admission
	for _, a := range trace {
		if a.End > to {
			continue
		}
		mark.N += a.N
		past = append(past, a)
		if a.Start >= from {
			within = append(within, a)
		}
	}
	level := lease.PeakLevel(limit, append(past, mark)) - float64(mark.N)
	return max(0, roundLevel(max(level, lease.PeakLevel(limit, within))))
}

// roundLevel rounds to a millionth of a token, which floating point may be off.
func roundLevel(x float64) float64 { return math.Round(x*1e6) / 1e6 }

// quantiles sorts took and returns its median, 99th percentile and maximum, in
// microseconds.
func quantiles(took []time.Duration) (p50, p99, most float64) {
	if len(took) == 0 {
		return 0, 0, 0
	}
	slices.Sort(took)
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	return us(took[len(took)/2]), us(took[len(took)*99/100]), us(took[len(took)-1])
}

package soak

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Report is what a soak measured.
type Report struct {
	Seconds      float64 `json:"seconds"`
	Seed         uint64  `json:"seed"`
	Nodes        int     `json:"nodes"`
	Keys         int     `json:"keys"`
	Limit        string  `json:"limit"`
	Burst        int64   `json:"burst"`
	RedisTimeout float64 `json:"redis_timeout_ms"`

	Decisions int64            `json:"decisions"`
	Admitted  int64            `json:"admitted"`
	Refused   int64            `json:"refused"`
	BySource  map[string]int64 `json:"by_source"`
	// GaveUp counts callers whose context ended, ToClosed requests to a node that
	// was just closed, and Failed those that had any other error, of which Failure
	// is the last.
	GaveUp   int64  `json:"gave_up"`
	ToClosed int64  `json:"to_closed"`
	Failed   int64  `json:"failed"`
	Failure  string `json:"failure,omitempty"`
	NewKeys  int64  `json:"new_keys"`
	// Faults counts them by name.
	Faults map[string]int `json:"faults"`

	// P50 and P99 are how long a decision took, in microseconds and at most an
	// eighth too high. Max is exact. Slowest is the decision that came closest to what
	// it may take, of the longest of each interval; Late is how late the machine was.
	P50     float64 `json:"p50_us"`
	P99     float64 `json:"p99_us"`
	Max     float64 `json:"max_us"`
	Late    float64 `json:"machine_late_ms"`
	Slowest slowest `json:"slowest"`

	// Hot is the hot key, and Closest the one of all keys, when its level came
	// closest to its bound. Formula is the bound's.
	Hot     reading `json:"hot"`
	Closest reading `json:"closest"`
	Formula string  `json:"bound"`

	// Heaps are live bytes: the medians of the first and the last third of the
	// intervals, the most that the last may be, and at the end.
	HeapFirst float64 `json:"heap_first"`
	HeapLast  float64 `json:"heap_last"`
	HeapMost  float64 `json:"heap_most"`
	HeapEnd   uint64  `json:"heap_end"`
	Intervals int     `json:"intervals"`

	GoroutinesBefore int `json:"goroutines_before"`
	GoroutinesPeak   int `json:"goroutines_peak"`
	GoroutinesAfter  int `json:"goroutines_after"`

	// Closed counts nodes that were closed, UncleanCloses those that said that Redis
	// was not told all. Unbalanced are those whose books are off. Owed is what Redis
	// was never charged with.
	Closed        int          `json:"nodes_closed"`
	UncleanCloses int          `json:"unclean_closes"`
	Unbalanced    []Unbalanced `json:"unbalanced"`
	Owed          int64        `json:"owed"`

	// Stretch is how long the end of the run without faults was, in seconds, 0 if it
	// ended within a fault; StretchAsked the decisions in it and StretchRedis those
	// of Redis: by a call or by a lease.
	Stretch      float64 `json:"last_stretch_s"`
	StretchAsked int64   `json:"last_stretch_decisions"`
	StretchRedis int64   `json:"last_stretch_by_redis"`

	Checks []Check `json:"checks"`
	Held   bool    `json:"held"`
}

// Unbalanced is a node whose books are off by some tokens.
type Unbalanced struct {
	Node   string `json:"node"`
	Tokens int64  `json:"tokens"`
}

// slowest is the longest decision of an interval and what it may have taken.
type slowest struct {
	At      float64 `json:"at"` // its end, seconds since the start
	Took    float64 `json:"took_ms"`
	Allowed float64 `json:"allowed_ms"`
	Key     string  `json:"key"`
	Source  string  `json:"source"`
	Node    string  `json:"node"`
	Fault   string  `json:"fault"` // the last one before the end of the interval
}

func (d slowest) over() float64 { return d.Took - d.Allowed }

// Check is what one check found.
type Check struct {
	Name string `json:"name"`
	// Verdict is "held", "failed" or, where there is nothing to judge by, "skipped".
	Verdict string `json:"verdict"`
	Detail  string `json:"detail"`
}

const (
	held    = "held"
	failed  = "failed"
	skipped = "skipped"
)

const (
	// heapFactor and heapSlack are what the heap may grow by from the first third of
	// a run to the last: what is garbage to the collector's estimate, what a round of
	// faults leaves in pools, and keys of an outage vary by some megabytes.
	heapFactor, heapSlack = 1.25, 8 << 20
	// leastIntervals make thirds, and leastPeace (seconds) a stretch in which a node
	// must have healed: a breaker's pause is 0.75 s at most.
	leastIntervals, leastPeace = 6, 1
)

// judge fills in the checks.
func (r *Report) judge() {
	r.Checks = nil
	check := func(name string, ok bool, format string, args ...any) {
		c := Check{name, held, fmt.Sprintf(format, args...)}
		if !ok {
			c.Verdict = failed
		}
		r.Checks = append(r.Checks, c)
	}
	skip := func(name, why string) { r.Checks = append(r.Checks, Check{name, skipped, why}) }

	// A millionth of a token is what floating point may be off.
	check("level", r.Closest.Level <= r.Closest.Bound+1e-6, "%s came closest: %.1f of %.1f at %.1f s",
		r.Closest.Key, r.Closest.Level, r.Closest.Bound, r.Closest.At)
	check("latency", r.Slowest.Took <= r.Slowest.Allowed, "%.1f ms of %.1f ms at %.1f s: %s, by %s, on %s, after %q",
		r.Slowest.Took, r.Slowest.Allowed, r.Slowest.At, r.Slowest.Key, r.Slowest.Source, r.Slowest.Node, r.Slowest.Fault)
	check("errors", r.Failed == 0, "%d requests had an error that they must not have %s", r.Failed, r.Failure)
	check("goroutines", r.GoroutinesAfter <= r.GoroutinesBefore, "%d after, %d before", r.GoroutinesAfter, r.GoroutinesBefore)
	if r.Intervals < leastIntervals {
		skip("heap", "too few intervals to compare")
	} else {
		check("heap", r.HeapLast <= r.HeapMost, "%.1f MiB in the last third, %.1f MiB in the first, may be %.1f MiB",
			mib(r.HeapLast), mib(r.HeapFirst), mib(r.HeapMost))
	}
	off := make([]string, 0, len(r.Unbalanced))
	for _, u := range r.Unbalanced {
		off = append(off, fmt.Sprintf("%s is off by %d", u.Node, u.Tokens))
	}
	check("ledger", len(off) == 0, "%d nodes closed %s", r.Closed, strings.Join(off, ", "))
	if r.Stretch < leastPeace {
		skip("healed", "it ended in a fault or just after")
	} else {
		check("healed", r.StretchRedis > 0 && r.StretchRedis*leastByRedis >= r.StretchAsked, "%d of %d decisions by Redis in the last %.1f s", r.StretchRedis, r.StretchAsked, r.Stretch)
	}
	r.Held = !slices.ContainsFunc(r.Checks, func(c Check) bool { return c.Verdict == failed })
}

// leastByRedis is the part of the decisions, one of that many, that Redis has to make
// once it is well for a while: on a machine that is too slow for it many time out.
const leastByRedis = 10

// Failures names the checks that failed.
func (r *Report) Failures() (names []string) {
	for _, c := range r.Checks {
		if c.Verdict == failed {
			names = append(names, c.Name)
		}
	}
	return names
}

func mib(bytes float64) float64 { return bytes / (1 << 20) }

// report returns what was measured, but for what is known only later.
func (s *soak) report() Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, took := &s.tallies, s.tallies.took.snapshot()
	r := Report{
		Seconds: s.end.Seconds(), Seed: s.opts.Seed, Nodes: s.opts.Nodes, Keys: s.opts.Keys,
		Limit: s.opts.Limit.String(), Burst: s.opts.Limit.Burst, RedisTimeout: millis(s.opts.RedisTimeout),
		Admitted: t.admitted.Load(), Refused: t.refused.Load(), BySource: t.bySource(),
		GaveUp: t.gaveUp.Load(), ToClosed: t.closed.Load(), Failed: t.failed.Load(), NewKeys: s.newKeys.Load(),
		Faults: maps.Clone(s.faults), Max: millis(s.longest) * 1e3, Late: millis(s.late), Slowest: s.slow, Formula: Bound,
		P50: millis(took.quantile(0.5)) * 1e3, P99: millis(took.quantile(0.99)) * 1e3,
		Intervals: len(s.heap), GoroutinesPeak: s.peak,
		Closed: s.closed, UncleanCloses: s.unclean, Unbalanced: s.unbalanced, Owed: s.owed,
	}
	r.Decisions = r.Admitted + r.Refused
	if err := t.failure.Load(); err != nil {
		r.Failure = (*err).Error()
	}
	r.HeapFirst, r.HeapLast = thirds(s.heap)
	r.HeapMost = r.HeapFirst*heapFactor + heapSlack
	r.Hot = s.meters[hotKey].worst()
	for _, m := range s.meters {
		if got := m.worst(); got.part() > r.Closest.part() {
			r.Closest = got
		}
	}
	if from := s.quietFrom.Load(); from >= 0 {
		r.Stretch, r.StretchAsked, r.StretchRedis = (s.end - time.Duration(from)).Seconds(), s.asked.Load(), s.healed.Load()
	}
	return r
}

// thirds returns the medians of the first and the last third.
func thirds(x []float64) (first, last float64) {
	n := len(x) / 3
	if n == 0 {
		return 0, 0
	}
	return median(x[:n]), median(x[len(x)-n:])
}

func median(x []float64) float64 {
	x = slices.Clone(x)
	slices.Sort(x)
	return x[len(x)/2]
}

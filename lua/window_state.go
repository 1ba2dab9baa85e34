package lua

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Window is what State has for an algorithm that counts in windows. Counts are in
// tokens.
type Window struct {
	// Ends is when the window ends, by the server's clock; zero for a SlidingLog.
	Ends time.Time
	// Taken is what was granted in the window, leases among it. Range 0 to 2^53.
	Taken int64
	// Previous is what was granted in the window before, of a SlidingCounter.
	Previous int64
	// Debt is what is to be charged beside Taken, of a FixedWindow.
	Debt int64
	// Entries is how many instants a SlidingLog holds. Range 0 to 256.
	Entries int
}

// windowParts are the numbers of such a state that AsOf needs.
type windowParts struct {
	w, burst          int64
	ends, taken, more int64 // more: the debt, or what was taken before
	hold, until       int64
	log               []lease.Admission // Start and N, oldest first
}

const (
	headWords  = 13 // of windows.lua
	mostWindow = int64(lease.MaxWindow / time.Microsecond)
	mostLog    = 256
)

// DecodeWindow reads the string that windows.lua keeps in Redis for an algorithm,
// and accepts what the script accepts. See Decode.
func DecodeWindow(raw string, a lease.Algorithm) (State, error) {
	words := strings.Split(raw, " ")
	if words[0] != "1" {
		return State{}, fmt.Errorf("%w: format %.20q: want 1", ErrState, words[0])
	}
	v := make([]int64, 0, len(words))
	for _, word := range words[1:] {
		n, ok := parseExact(word, false)
		if !ok {
			return State{}, fmt.Errorf("%w: %.20q: want an integer of at most 2^53", ErrState, word)
		}
		v = append(v, n)
	}
	if len(v) < headWords {
		return State{}, fmt.Errorf("%w: %.80q: want %d numbers or more after the format", ErrState, raw, headWords)
	}
	burst, count, perUS := v[10], v[11], v[12]
	if burst < 1 || count < 1 || perUS < 1 || float64(burst)*float64(perUS) > exact {
		return State{}, fmt.Errorf("%w: burst %d, %d per %d µs: want a limit", ErrState, burst, count, perUS)
	}
	p := &windowParts{w: (burst*perUS + count - 1) / count, burst: burst}
	if p.w < 1000 || p.w > mostWindow || !p.read(a, v[headWords:], v[0], v[3]+v[4]) {
		return State{}, fmt.Errorf("%w: %.80q: not what a %v has", ErrState, raw, a)
	}
	s := State{
		At: time.UnixMicro(v[0]).UTC(), Epoch: v[1], Outstanding: [2]int64{v[3], v[4]}, Active: [2]int64{v[5], v[6]},
		Demand: [2]int64{v[7], v[8]}, Version: v[9], Limit: limitOf(burst, count, perUS), window: p,
	}
	s.Limit.Algorithm = a
	s.Window, s.Tokens = p.show(a, v[0])
	return s, nil
}

// read takes the algorithm's own numbers, as its script's function of that name.
func (p *windowParts) read(a lease.Algorithm, v []int64, at, out int64) bool {
	if a == lease.SlidingLog {
		return p.readLog(v, at)
	}
	if len(v) != 3 {
		return false
	}
	p.ends, p.taken, p.more = v[0], v[1], v[2]
	if p.ends <= at || p.ends-at > 2*mostWindow {
		return false
	}
	if a == lease.FixedWindow {
		return out <= p.taken && p.more <= 2*p.burst
	}
	return p.taken <= exact/2 && p.more <= exact/2
}

func (p *windowParts) readLog(v []int64, at int64) bool {
	if len(v)%2 != 0 || len(v) < 2 || len(v) > 2+2*mostLog || v[0] < p.w || v[0] > mostWindow {
		return false
	}
	p.hold, p.until = v[0], v[1]
	last, sum := p.hold, int64(0)
	for e := range slices.Chunk(v[2:], 2) {
		if e[0] > last || e[1] < 1 {
			return false
		}
		last, sum = e[0], sum+e[1]
		if sum > exact {
			return false
		}
		p.log = append(p.log, lease.Admission{Start: time.Duration(at - e[0]), N: e[1]}) // in microseconds
	}
	return true
}

// show returns the state for people, and the tokens that are left at time at.
func (p *windowParts) show(a lease.Algorithm, at int64) (w Window, tokens float64) {
	if a == lease.SlidingLog {
		for _, e := range p.log {
			w.Taken += e.N
		}
		w.Entries = len(p.log)
		return w, float64(p.burst - w.Taken)
	}
	w = Window{Ends: time.UnixMicro(p.ends).UTC(), Taken: p.taken}
	if a == lease.FixedWindow {
		w.Debt = p.more
		return w, float64(p.burst - p.taken - p.more)
	}
	w.Previous = p.more
	return w, float64(p.burst-p.taken) - float64(p.more)*float64(min(p.w, p.ends-at))/float64(p.w)
}

// asOf is AsOf for a state with windows: step 1 of windows.lua. If the clock went
// back nothing has changed.
func (s State) asOf(now time.Time) State {
	t, p := now.UnixMicro(), *s.window
	if t <= s.At.UnixMicro() {
		return s
	}
	next := func(t int64) int64 { return (t/p.w + 1) * p.w }
	switch s.Limit.Algorithm {
	case lease.SlidingLog:
		p.log = slices.DeleteFunc(slices.Clone(p.log), func(e lease.Admission) bool {
			at := int64(e.Start)
			return min(at+p.hold, max(at+p.w, p.until)) <= t
		})
	case lease.FixedWindow:
		for i := 0; i < 3 && t >= p.ends; i++ {
			p.more, p.taken, p.ends = min(p.more, max(0, p.taken+p.more-p.burst)), 0, next(p.ends)
			s.Outstanding = [2]int64{}
		}
		if t >= p.ends {
			p.more, p.ends = 0, next(t)
		}
	default:
		if t >= p.ends {
			p.more, p.taken, p.ends = p.taken, 0, next(p.ends)
		}
		if t >= p.ends {
			p.more, p.ends = 0, next(t)
		}
	}
	s.window, s.At = &p, time.UnixMicro(t).UTC()
	s.Window, s.Tokens = p.show(s.Limit.Algorithm, t)
	return s
}

package membership

import "time"

// recent is the largest of the numbers seen in the last window of its own time,
// which passes from one number to the next, and at most a step each time: while
// nothing is seen nothing is forgotten.
type recent struct {
	step  time.Duration
	clock time.Duration // its own time
	at    time.Time     // when the clock was last moved
	// seen has only what a later number has not reached: counts fall, times rise.
	seen []seen
}

type seen struct {
	count int
	list  []string // the newest known list of that many nodes; nil for none
	clock time.Duration
}

// grain is how far apart two lower numbers are kept, so that a large fleet going
// down node by node takes no more than a few dozen lists. A number that falls
// faster may be forgotten this much too soon.
const grain = window / 60

// add takes in a number seen now, and the list that goes with it, if known.
func (r *recent) add(now time.Time, count int, list []string) {
	if !r.at.IsZero() {
		r.clock += min(now.Sub(r.at), r.step)
	}
	r.at = now
	r.push(seen{count, list, r.clock})
	for r.seen[0].clock < r.clock-window {
		r.seen = r.seen[1:]
	}
}

func (r *recent) push(s seen) {
	n := len(r.seen)
	for n > 0 && r.seen[n-1].count <= s.count {
		n--
		if old := r.seen[n]; old.count == s.count && s.list == nil {
			s.list = old.list
		}
	}
	if n > 0 && s.clock < r.seen[n-1].clock+grain {
		r.seen = r.seen[:n]
		return
	}
	r.seen = append(r.seen[:n], s)
}

// max returns the largest number and the newest list of that many nodes; 0 and
// nil before anything was seen.
func (r *recent) max() (count int, list []string) {
	if len(r.seen) == 0 {
		return 0, nil
	}
	return r.seen[0].count, r.seen[0].list
}

package soak

import (
	"sync"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// Bound is the formula of what a level may be in a soak: see meter.
const Bound = `burst + rate·d            d: the longest decision, for a level is fed when a decision returns
+ min(in, cap)            for each fault: in is what shares admitted in it, and cap
    all cut off             N·c + (W-1)·(burst + rate·t), and until no node owes
                            anything burst + min(burst, in)
    one cut off             c + w·(burst + rate·t)
+ after                   what shares admitted in no such fault, until it was charged
+ peak - 2·burst          once it was, if the level was as high before
+ burst                   for each FLUSHALL
+ 64·N                    if the machine stood still for more than 50 ms
N nodes; c the largest cost; t how long the fault lasts; w what one share can be of a
limit, and W all of them; levels start anew at the end of every other fault`

// meter holds the level of one key, fed by what all nodes admit, against what it
// may be.
//
// # The bound
//
// Of a window of length t, without a fault, the promise is burst + rate·t, so the
// level that starts at 0 with the window stays at the burst or below. What else
// there can be is admitted by shares, and is never more than they did admit:
// that is counted. What shares should admit at most (fallback, What holds when) is
// a second bound, and the lower one holds:
//
//   - While no node is answered, the store admits nothing, and the shares at most
//     W·burst, the N·c for shares too small for one request, and W·rate·t. The
//     level begins with no more than the burst. When the store is back it has at
//     most what shares admitted and it was not charged with in addition, and no more
//     than a burst of that.
//   - While one node is cut off the store goes on with the whole limit, and its
//     share comes on top.
//   - What shares admit outside of faults (a call took too long, or calls return to
//     the store little by little) comes on top.
//
// When no node owes anything any more the store has taken in what shares admitted
// (fallback, Why the books balance), and the promise holds again: but for what shares
// may have been too much together, what was forgiven though others used the store,
// as while one node is cut off, and what debts would have been beyond minus the burst.
//
// MinNodes is N, so no node believes in fewer nodes than there are, and W would be
// 1 if all shares were equal. Half of a share goes by demand at first: see weights.
//
// A level is fed when its decision returns, at most d after it was made; that moves
// it by what drains meanwhile. A process that stands still past the deadline of a
// lease may spend up to 64 tokens of it on each node (lease, What may be admitted
// beyond the promise).
//
// A level that never forgets would have to be allowed the terms of all faults.
// So there are two, and each starts anew at the end of every other fault: any
// window over one fault, and what is before and after it up to the next, is in one
// of them. Where there are no faults that happens every renewEvery, which is as
// long as such windows are at least.
type meter struct {
	mu     sync.Mutex
	key    string
	limit  hybrid.Limit // the highest it had
	nodes  int
	cost   float64 // the largest
	all    float64 // W
	single float64 // w
	covers [2]cover

	fault scope
	slot  int           // of the node that is cut off, if it is one
	from  time.Duration // when the fault began

	flushed time.Duration // when the store lost its data last; 0 for never

	closest reading // since the start
	lately  reading // since it was asked for last
}

// scope is which nodes a fault cuts off.
type scope uint8

const (
	none scope = iota
	oneNode
	allNodes
)

// cover is one of a meter's levels, and what its bound is made of.
type cover struct {
	since   time.Duration
	level   float64 // as of at
	at      time.Duration
	longest time.Duration
	peak    float64
	terms   float64 // of faults that are over
	passing float64 // and what of them is gone once Redis was charged
	clamped float64 // what it could not be charged with
	cleared float64 // what is gone
	in      int64   // admitted by shares in the fault that is on
	after   int64   // and at other times
	flushes int
	books   books // when it started anew
}

// books are what nodes say about their debts, of all keys and all nodes that there
// were.
type books struct {
	forgiven int64 // need not be charged
	lost     int64 // cannot be
}

// reading is a level and its bound at one instant.
type reading struct {
	Key   string  `json:"key"`
	At    float64 `json:"at"` // seconds since the start
	Level float64 `json:"level"`
	Bound float64 `json:"bound"`
}

// part is how much of its bound the level takes up: more than 1 breaks it.
func (r reading) part() float64 { return r.Level / max(1e-9, r.Bound) }

// newMeter returns a meter of a key whose limit never is above limit. busy keys are
// asked for often enough that their parts of the demand are what they should be.
func newMeter(key string, limit hybrid.Limit, nodes int, cost int64, busy bool) *meter {
	m := &meter{key: key, limit: limit, nodes: nodes, cost: float64(cost)}
	m.single, m.all = weights(limit, nodes, busy)
	return m
}

// weights returns what one share may be of a limit and what all may be together.
// A share is (1−β)/n + β·0.9·d with β ≤ ½ and at most 4/n: d is the node's part of
// the demand. Traffic is the same on all nodes. While one is away the others have
// 1/(n−1) of it, and it remembers 1/n: together 0.95 + 0.45/n. A twentieth more is
// for chance. Where a key is asked for seldom every node may believe to be the only
// one. A burst that is less than n is divided among as many owners, who are others
// after a node was replaced.
func weights(limit hybrid.Limit, nodes int, busy bool) (single, all float64) {
	if nodes == 1 {
		return 1, 1
	}
	n := float64(nodes)
	most := min(1, 4/n, 0.5/n+0.45)
	if busy {
		single, all = min(most, 1.1*(0.5/n+0.45/(n-1))), min(n, 1+0.45/n)
	} else {
		single, all = most, max(1, n*most)
	}
	if limit.Burst < int64(nodes) {
		single, all = max(single, 1/float64(limit.Burst)), max(all, 2)
	}
	return single, all
}

// admit feeds n tokens, asked for at start and admitted by a node's share or not.
func (m *meter) admit(start time.Duration, slot int, n int64, share bool, clock clock) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := clock.now()
	for i := range m.covers {
		c := &m.covers[i]
		c.level = max(0, c.level-m.limit.Rate*(now-c.at).Seconds()) + float64(n)
		c.at, c.peak = now, max(c.peak, c.level)
		c.longest = max(c.longest, now-start)
		switch {
		case !share:
		case m.fault == allNodes || m.fault == oneNode && slot == m.slot:
			c.in += n
		default:
			c.after += n
		}
		got := reading{m.key, now.Seconds(), c.level, m.bound(c, now)}
		if got.part() > 1 && clock.stood(c.since, now) {
			got.Bound += 64 * float64(m.nodes)
		}
		if got.part() > m.lately.part() {
			m.lately = got
		}
		if got.part() > m.closest.part() {
			m.closest = got
		}
	}
}

// clock is the time since the start of a run.
type clock interface {
	now() time.Duration
	// stood reports whether the machine stood still between two instants.
	stood(from, to time.Duration) bool
}

// bound returns what the level of c may be now. Holds mu, as all below.
func (m *meter) bound(c *cover, now time.Duration) float64 {
	return float64(m.limit.Burst)*float64(1+c.flushes) + m.limit.Rate*c.longest.Seconds() +
		c.terms + c.passing + c.clamped + m.term(c, now) + float64(c.after)
}

// term returns what the fault that is on allows.
func (m *meter) term(c *cover, now time.Duration) float64 {
	lasting, passing := m.allows(c, now)
	return lasting + passing
}

// allows returns that in two parts: the passing one is gone as soon as Redis was
// charged with what shares admitted.
func (m *meter) allows(c *cover, now time.Duration) (lasting, passing float64) {
	in, burst := float64(c.in), float64(m.limit.Burst)
	limit := burst + m.limit.Rate*(now-m.from).Seconds()
	switch m.fault {
	case allNodes:
		lasting = min(in, float64(m.nodes)*m.cost+(m.all-1)*limit)
		return lasting, min(in-lasting, burst+min(burst, in))
	case oneNode:
		return min(in, m.cost+m.single*limit), 0
	default:
		return 0, 0
	}
}

// begin begins a fault: before it does anything.
func (m *meter) begin(s scope, slot int, now time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fault, m.slot, m.from = s, slot, now
}

// flush notes that the store loses its data: before it does.
func (m *meter) flush(now time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.flushed = now
	for i := range m.covers {
		c := &m.covers[i]
		c.flushes++
		// What it was charged with it forgets too: a balance below 0.
		c.terms += min(float64(m.limit.Burst), c.cleared)
		c.cleared = 0
	}
}

// end ends a fault, after it was undone.
func (m *meter) end(now time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for k := range m.covers {
		c := &m.covers[k]
		lasting, passing := m.allows(c, now)
		c.terms += lasting
		c.passing += passing
		c.in = 0
	}
	m.fault = none
}

// mark returns the levels as they are, for settle.
func (m *meter) mark() [2]cover {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.covers
}

// settle takes in that, after marks were taken, no node owed anything, as b has it.
func (m *meter) settle(marks [2]cover, b books) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, mark := range marks {
		c := &m.covers[i]
		if c.since != mark.since || c.books.lost != b.lost {
			continue
		}
		// What was forgiven may have been this key's, and is not charged.
		after := max(0, mark.after-(b.forgiven-c.books.forgiven))
		c.passing -= mark.passing
		c.after -= after
		c.cleared += mark.passing + float64(after)
		// A balance does not go below minus the burst, where the level is twice the burst
		// if it started with a full bucket, and otherwise has a burst to spare.
		c.clamped = max(c.clamped, mark.peak-2*float64(m.limit.Burst))
	}
}

// renew starts level i anew, which is 0 and 1 in turn.
func (m *meter) renew(i int, now time.Duration, b books) {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := &m.covers[i%2]
	*c = cover{since: now, at: now, books: b}
	if m.flushed > 0 && now-m.flushed < forgets {
		c.flushes = 1 // leases are out that the store does not know of
	}
}

// forgets is how long leases live at most, and then some: four lease periods.
const forgets = time.Second

// reading returns the level at the instant since the last call when it came closest
// to its bound; the zero reading if nothing was admitted.
func (m *meter) reading() (r reading) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r, m.lately = m.lately, reading{}
	return r
}

// worst returns the instant of the whole run when the level came closest.
func (m *meter) worst() reading {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.closest
}

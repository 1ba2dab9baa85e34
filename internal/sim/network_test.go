package sim_test

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// network carries calls to the store and answers back, or does not.
type network struct {
	w       *world
	ways    []*trouble
	flights []*grant
}

// trouble is a fault of the network while it lasts.
type trouble struct {
	fault
	until time.Duration
	on    bool // of a fault that comes and goes
}

// grant is a lease on its way to its node.
type grant struct {
	*message
	key    string
	tokens int64
	until  time.Duration // when it is worth nothing any more
}

// message is calls under way.
type message struct {
	n        *node
	calls    []lease.Call
	executed time.Duration
	sent     time.Duration
	answers  []lease.Answer
	left     bool // nobody waits for it any more, or it will never come
}

func (net *network) init(w *world) { net.w = w }

// begin lets a fault of the network last from now on.
func (net *network) begin(f fault) {
	t := &trouble{fault: f, until: net.w.now + f.For.d(), on: true}
	net.ways = append(net.ways, t)
	if f.Kind == flap {
		var turn func()
		turn = func() {
			if net.w.now < t.until {
				t.on = !t.on
				net.w.judge.turned(f, t.on)
				net.w.after(f.time(), turn)
			}
		}
		net.w.after(f.time(), turn)
	}
	net.w.judge.turned(f, true)
	net.w.at(t.until, func() {
		net.ways = slices.DeleteFunc(net.ways, func(o *trouble) bool { return o == t })
		net.w.judge.turned(f, false)
	})
}

// time is the amount as a time.
func (f fault) time() time.Duration { return max(time.Millisecond, ms(f.Amount).d()) }

// has reports whether a node has that trouble, and how much.
func (net *network) has(n *node, k kind) (amount float64, ok bool) {
	for _, t := range net.ways {
		if t.Kind == k && t.on && (t.Node < 0 || t.Node == n.place) {
			amount, ok = max(amount, t.Amount), true
		}
	}
	return amount, ok
}

// happens draws whether such a fault strikes.
func (net *network) happens(n *node, k kind) bool {
	part, ok := net.has(n, k)
	return ok && net.w.rand.Float64() < part
}

// silent reports whether nothing gets through.
func (net *network) silent(n *node) bool {
	for _, k := range []kind{silence, flap, failover} {
		if _, ok := net.has(n, k); ok {
			return true
		}
	}
	return false
}

// delay is how long one way takes.
func (net *network) delay(n *node) time.Duration {
	r := net.w.rand
	d := time.Duration(float64(net.w.RTT.d()) / 2 * (0.5 + r.Float64()/2))
	if most, ok := net.has(n, delayed); ok {
		d += time.Duration(r.Float64() * most * 1e6)
	}
	return max(1, d+time.Duration(r.Int64N(1000))) // no two at one instant
}

// way is a node's connection to the store.
type way struct{ n *node }

// Acquire implements lease.Store.
func (v way) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	n := v.n
	net := &n.w.net
	if n.dead {
		return failed(calls, lease.ErrNotExecuted)
	}
	if _, ok := net.has(n, refuse); ok {
		n.park(net.delay(n), func() bool { return false })
		return failed(calls, fmt.Errorf("%w: connection refused", lease.ErrNotExecuted))
	}
	m := &message{n: n, calls: slices.Clone(calls), sent: n.w.now}
	if !net.happens(n, loseRequests) {
		n.w.after(net.delay(n), func() { net.arrive(m, true) })
		if net.happens(n, duplicate) {
			n.w.after(net.delay(n)+net.delay(n), func() { net.arrive(m, false) })
		}
	}
	deadline, _ := ctx.Deadline()
	n.park(time.Until(deadline)+1, func() bool { return m.answers != nil || ctx.Err() != nil })
	m.left = true
	if m.answers == nil {
		return failed(calls, fmt.Errorf("%w: %w", lease.ErrUnknownOutcome, context.DeadlineExceeded))
	}
	n.w.judge.heard(m)
	return m.answers
}

// arrive has the store carry out m, and sends the answers back unless it is a
// duplicate.
func (net *network) arrive(m *message, first bool) {
	n, w := m.n, net.w
	if net.silent(n) {
		return
	}
	var answers []lease.Answer
	if _, ok := net.has(n, errorReplies); ok {
		answers = failed(m.calls, fmt.Errorf("%w: LOADING", lease.ErrNotExecuted))
	} else {
		answers = w.judge.execute(m, first)
	}
	if !first || net.happens(n, loseReplies) {
		return
	}
	m.executed = w.now
	for i, a := range answers {
		if k := a.Grant.Tokens - a.Grant.Bound; k > 0 {
			net.flights = append(net.flights, &grant{m, m.calls[i].Key, k, w.now + a.Grant.TTL})
		}
	}
	w.after(net.delay(n), func() {
		if net.silent(n) {
			m.left = true
			return
		}
		m.answers = answers
		n.settle()
	})
}

// flying returns the tokens of key in answers that may still be heard, by a node
// that may have lost track of time, or by any.
func (net *network) flying(key string, to *node) (tokens int64) {
	net.flights = slices.DeleteFunc(net.flights, func(g *grant) bool { return g.left || g.n.dead })
	for _, g := range net.flights {
		if g.key == key && (to == nil && net.w.now < g.until || g.n == to) {
			tokens += g.tokens
		}
	}
	return tokens
}

func failed(calls []lease.Call, err error) []lease.Answer {
	answers := make([]lease.Answer, len(calls))
	for i := range answers {
		answers[i].Err = err
	}
	return answers
}

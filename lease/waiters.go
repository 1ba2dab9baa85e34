package lease

import (
	"time"
)

// waiter is a request that waits for a call to the store.
type waiter struct {
	n    int64
	done chan struct{} // receives once, when decided
	// decided, decision and failed are guarded by the holding's mu until done.
	decided    bool
	aboard     bool // in a call that is in flight
	gone       bool // left while aboard
	decision   Decision
	prev, next *waiter
	timer      *time.Timer
}

// newWaiter takes a waiter from the cache's own pool: a channel made in one
// testing/synctest bubble must not turn up in another.
func (c *Cache) newWaiter(n int64) *waiter {
	w, _ := c.waiters.Get().(*waiter)
	if w == nil {
		w = &waiter{done: make(chan struct{}, 1)}
	}
	w.n, w.decided, w.aboard, w.gone, w.decision = n, false, false, false, Decision{}
	return w
}

func (w *waiter) decide(d Decision) {
	w.decided, w.decision = true, d
	w.done <- struct{}{}
}

// waiters is a queue of them, first in first out.
type waiters struct {
	head, tail *waiter
	len        int
	tokens     float64 // the sum of n, which need not fit an int64
}

func (q *waiters) push(w *waiter) {
	w.prev, w.next = q.tail, nil
	if q.tail != nil {
		q.tail.next = w
	} else {
		q.head = w
	}
	q.tail = w
	q.len++
	q.tokens += float64(w.n)
}

func (q *waiters) remove(w *waiter) {
	if w.prev != nil {
		w.prev.next = w.next
	} else {
		q.head = w.next
	}
	if w.next != nil {
		w.next.prev = w.prev
	} else {
		q.tail = w.prev
	}
	w.prev, w.next = nil, nil
	q.len--
	q.tokens -= float64(w.n)
}

// pushFront puts all of other before q's own, in their order.
func (q *waiters) pushFront(other waiters) {
	if other.head == nil {
		return
	}
	if q.head != nil {
		other.tail.next, q.head.prev = q.head, other.tail
		other.tail = q.tail
	}
	other.len += q.len
	other.tokens += q.tokens
	*q = other
}

// giveUp tells everybody in q that the store will not decide them.
func (q *waiters) giveUp() {
	for w := q.head; w != nil; w = q.head {
		q.remove(w)
		if !w.gone {
			w.decide(Decision{})
		}
	}
}

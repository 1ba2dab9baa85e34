package sim_test

import (
	"container/heap"
	"iter"
	"time"
)

// loop runs events at their time and fibers one at a time, in the fake time of a
// synctest bubble: what happens depends on the schedule alone.
type loop struct {
	start  time.Time
	now    time.Duration
	events events
	last   int64
	idle   []*fiber
	cur    *fiber // that runs now; nil: the loop itself
}

// fiber is a function that can stop in the middle and go on later.
type fiber struct {
	job    func()
	resume func() (struct{}, bool)
	stop   func()
	yield  func(struct{}) bool
}

type event struct {
	at  time.Duration
	seq int64 // events of one instant happen in the order they were planned
	do  func()
}

type events []event

func (e events) Len() int { return len(e) }
func (e events) Less(i, j int) bool {
	return e[i].at < e[j].at || e[i].at == e[j].at && e[i].seq < e[j].seq
}
func (e events) Swap(i, j int) { e[i], e[j] = e[j], e[i] }
func (e *events) Push(x any)   { *e = append(*e, x.(event)) }
func (e *events) Pop() any {
	last := len(*e) - 1
	x := (*e)[last]
	*e = (*e)[:last]
	return x
}

// at plans do for a time, now at the earliest.
func (l *loop) at(at time.Duration, do func()) {
	l.last++
	heap.Push(&l.events, event{max(at, l.now), l.last, do})
}

func (l *loop) after(d time.Duration, do func()) { l.at(l.now+d, do) }

// until lets everything happen that is due by end.
func (l *loop) until(end time.Duration) {
	for len(l.events) > 0 && l.events[0].at <= end {
		e := heap.Pop(&l.events).(event)
		l.advance(e.at)
		e.do()
	}
	l.advance(end)
}

func (l *loop) advance(at time.Duration) {
	if at > l.now {
		time.Sleep(at - l.now)
		l.now = at
	}
}

// run runs job in a fiber, until it ends or parks.
func (l *loop) run(job func()) {
	var f *fiber
	if n := len(l.idle); n > 0 {
		f, l.idle = l.idle[n-1], l.idle[:n-1]
	} else {
		f = &fiber{}
		f.resume, f.stop = iter.Pull(func(yield func(struct{}) bool) {
			f.yield = yield
			for {
				f.job()
				f.job = nil
				l.idle = append(l.idle, f)
				if !yield(struct{}{}) {
					return
				}
			}
		})
	}
	f.job = job
	l.proceed(f)
}

// proceed lets a parked fiber go on.
func (l *loop) proceed(f *fiber) {
	caller := l.cur
	l.cur = f
	f.resume()
	l.cur = caller
}

// park stops the fiber that runs now until it proceeds.
func (l *loop) park() { l.cur.yield(struct{}{}) }

// end stops the fibers, which must all be idle.
func (l *loop) end() {
	for _, f := range l.idle {
		f.stop()
	}
}

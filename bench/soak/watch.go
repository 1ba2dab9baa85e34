package soak

import (
	"context"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

const (
	// beat is how often the machine's lateness is measured.
	beat = 5 * time.Millisecond
	// stall is how late it must be for leases to be spent past their deadlines.
	stall = 50 * time.Millisecond
)

// watch measures how late the machine is at waking a goroutine.
type watch struct {
	start   time.Time
	at      atomic.Int64 // when it looked last, in nanoseconds since start
	worst   atomic.Int64 // nanoseconds, since it was asked for last
	stalled atomic.Int64 // when the machine last stood still, in nanoseconds since start
}

func (w *watch) run(ended <-chan struct{}) {
	t := time.NewTimer(beat)
	defer t.Stop()
	for {
		begin := time.Since(w.start)
		w.at.Store(int64(begin))
		t.Reset(beat)
		select {
		case <-ended:
			return
		case <-t.C:
		}
		now := time.Since(w.start)
		late := now - begin - beat
		w.worst.Store(max(w.worst.Load(), int64(late)))
		if late > stall {
			w.stalled.Store(int64(now))
		}
	}
}

// stood reports whether the machine stood still between two instants; the later
// one is about now, and maybe it does still.
func (w *watch) stood(from, to time.Duration) bool {
	at := w.stalled.Load()
	return at > 0 && at >= int64(from) || to-time.Duration(w.at.Load()) > beat+stall
}

// late returns the worst since the last call.
func (w *watch) late() time.Duration { return time.Duration(w.worst.Swap(0)) }

// Interval is what happened in one interval of a soak.
type Interval struct {
	At        time.Duration // its end, since the start
	PerSecond float64       // decisions
	Admitted  int64
	Refused   int64
	BySource  map[string]int64
	// P50 and P99 are at most an eighth too high.
	P50, P99, Max time.Duration
	Late          time.Duration // the machine, at most
	Hot           reading       // the hot key, when it came closest to its bound
	Heap          uint64        // live bytes
	Goroutines    int
	Keys          int64  // held by all nodes
	Faults        int    // so far
	Last          string // the last one
}

// last is what the counters were at the end of an interval.
type last struct {
	at                time.Duration
	admitted, refused int64
	sources           map[string]int64
	took              histogramCounts
	late              time.Duration
}

// interval ends an interval.
func (s *soak) interval() {
	now, t, was := s.now(), &s.tallies, s.was
	next := last{
		at: now, admitted: t.admitted.Load(), refused: t.refused.Load(), sources: t.bySource(),
		took: t.took.snapshot(), late: s.watch.late(),
	}
	i := Interval{
		At: now, Admitted: next.admitted - was.admitted, Refused: next.refused - was.refused,
		BySource: map[string]int64{}, Late: next.late, Goroutines: runtime.NumGoroutine(),
	}
	var slow slowest
	i.Max, slow = t.slowest()
	i.PerSecond = float64(i.Admitted+i.Refused) / max(1e-9, (now-was.at).Seconds())
	for name, n := range next.sources {
		i.BySource[name] = n - was.sources[name]
	}
	took := next.took.since(&was.took)
	i.P50, i.P99 = took.quantile(0.5), took.quantile(0.99)
	i.Hot = s.meters[hotKey].reading()
	if s.quietFrom.Load() >= 0 {
		s.renew(renewEvery)
	}
	for k := range s.slots {
		i.Keys += s.slots[k].Load().limiter.Stats().Keys
	}
	i.Heap = liveHeap()
	// A decision that ended in this interval may have begun in the one before.
	late := max(next.late, was.late)
	s.mu.Lock()
	s.heap = append(s.heap, float64(i.Heap))
	s.peak = max(s.peak, i.Goroutines)
	s.late = max(s.late, next.late)
	s.longest = max(s.longest, i.Max)
	slow.Allowed, slow.Fault = millis(patience(s.opts.RedisTimeout, late)), s.lastFault
	if s.slow.Allowed == 0 || slow.over() > s.slow.over() {
		s.slow = slow
	}
	for _, n := range s.faults {
		i.Faults += n
	}
	i.Last = s.lastFault
	s.mu.Unlock()
	s.was = next
	// The end of a run is not worth a line if it comes just after one.
	if s.opts.Report != nil && now-was.at > s.opts.Every/2 {
		s.opts.Report(i)
	}
}

// patience is how long a decision may take on a machine that was late by that much:
// it waits for Redis, is woken late, and has to get a processor twice more.
func patience(timeout, late time.Duration) time.Duration {
	return timeout + 100*time.Millisecond + 3*late
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1e3 }

// liveHeap returns what is reachable.
func liveHeap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// settledGoroutines returns how many goroutines there are once they are no more than
// before, or after ten seconds: connections that are being dialled take a while.
func settledGoroutines(before int) (n int) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if n = runtime.NumGoroutine(); n <= before || time.Now().After(end) {
			return n
		}
	}
}

// retire closes the node of a slot and checks its books.
func (s *soak) retire(ctx context.Context, slot int) {
	n := s.slots[slot].Load()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	err := n.limiter.Close(closing)
	cancel()
	left := balance(n.limiter)
	// Requests may still be on their way out.
	for end := time.Now().Add(3 * time.Second); left != 0 && time.Now().Before(end); left = balance(n.limiter) {
		time.Sleep(20 * time.Millisecond)
	}
	_ = n.client.Close() // it may be cut off
	f := n.limiter.Stats().Fallback
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed++
	if err != nil {
		s.unclean++
	}
	s.owed += f.Owed + f.Lost
	n.retired = true
	s.gone.forgiven += f.Forgiven
	s.gone.lost += f.Owed + f.Lost
	if left != 0 {
		s.unbalanced = append(s.unbalanced, Unbalanced{n.name, left})
	}
}

// balance returns what a node's books are off by.
func balance(l *hybrid.Limiter) int64 {
	t := l.Stats()
	return t.Granted - t.Spent - t.Returned - t.Expired - t.Lost - t.Live
}

// close ends all nodes, once they have told Redis what they owe.
func (s *soak) close(ctx context.Context) {
	if s.slots[len(s.slots)-1].Load() != nil { // all were started
		s.heal()
		s.settle()
	}
	for i := range s.slots {
		if s.slots[i].Load() != nil {
			s.retire(ctx, i)
		}
	}
	if s.admin != nil {
		_ = s.admin.Close() // nothing is lost with it
	}
}

// settle waits until all nodes use Redis and owe nothing, if that comes soon.
func (s *soak) settle() {
	for end := time.Now().Add(closeTimeout); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		if !slices.ContainsFunc(s.nodes(), func(n *soakNode) bool {
			f := n.limiter.Stats().Fallback
			return f.Degraded || f.Owed > 0
		}) {
			return
		}
	}
}

func (s *soak) nodes() (all []*soakNode) {
	for i := range s.slots {
		all = append(all, s.slots[i].Load())
	}
	return all
}

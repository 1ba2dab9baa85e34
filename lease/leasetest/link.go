package leasetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Backend makes the Stores that scenarios and the acceptance suite run on.
type Backend struct {
	// Virtual returns an empty Store whose clock is clock.
	Virtual func(t testing.TB, clock *Clock) lease.Store
	// Live returns an empty Store whose clock is time.Now. It is called inside
	// a synctest bubble. Only the scenarios need it.
	Live func(t testing.TB) lease.Store
	// NoExpiry says that Virtual's keys do not expire by clock.
	NoExpiry bool
}

// InMemory is the Backend of this package's own Store.
var InMemory = Backend{
	Virtual: func(_ testing.TB, clock *Clock) lease.Store { return NewStore(clock.Now) },
	Live: func(testing.TB) lease.Store {
		return NewStore(func() time.Duration { return time.Duration(time.Now().UnixNano()) })
	},
}

// Clock is a store's clock that only the test moves. Not for concurrent use.
type Clock struct {
	now   time.Duration
	onSet []func(now time.Duration)
}

// NewClock returns a Clock that stands where real ones do, decades after the
// epoch, so that epochs of different lengths have far numbers.
func NewClock() *Clock { return &Clock{now: 500_000 * time.Hour} }

// Now returns the time since the Unix epoch.
func (c *Clock) Now() time.Duration { return c.now }

// Set moves the clock to now, back too.
func (c *Clock) Set(now time.Duration) {
	c.now = now
	for _, f := range c.onSet {
		f(now)
	}
}

// Advance moves the clock on by d.
func (c *Clock) Advance(d time.Duration) { c.Set(c.now + d) }

// OnSet calls f with the time, now and whenever the clock is moved.
func (c *Clock) OnSet(f func(now time.Duration)) {
	c.onSet = append(c.onSet, f)
	f(c.now)
}

// Fault is what becomes of one round trip.
type Fault uint8

const (
	// Works carries the calls out and returns the answers.
	Works Fault = iota
	// Refused does not carry the calls out, and says so.
	Refused
	// RequestLost does not carry the calls out; nobody learns of it.
	RequestLost
	// ReplyLost carries the calls out; nobody learns of it.
	ReplyLost
)

// Link is one node's way to a Store. It counts what passes, and it delays and
// loses what it is told to. Set the fields before use. Safe for concurrent use.
type Link struct {
	// Store is what is at the other end.
	Store lease.Store
	// Delay, if set, returns how long the next request and its reply take. It
	// needs a bubble, and is called by one goroutine at a time.
	Delay func() (request, reply time.Duration)
	// Fault, if set, decides what becomes of a round trip.
	Fault func(calls []lease.Call) Fault
	// Carried, if set, is told of every call that the store carried out.
	Carried func(call lease.Call, answer lease.Answer)

	mu       sync.Mutex
	counts   LinkCounts
	inFlight map[string]int
	charged  map[string]time.Time // when the last call for a key was carried out
	untold   map[lot]int64        // tokens leased and not reported yet
}

// lot is what is leased of a key in one epoch.
type lot struct {
	key   string
	epoch int64
}

// LinkCounts is what passed a Link.
type LinkCounts struct {
	Trips    int64 // round trips begun
	Calls    int64 // calls in them
	Answered int64 // calls whose end the node knows of, whatever it was
	Faulty   int64 // calls in those that did not work
	Granted  int64 // tokens granted, also by replies that were lost
	Unheard  int64 // tokens granted by replies that were lost or too late
	InFlight int   // the most calls for one key that were under way at a time
	Overtold int64 // tokens reported that were not leased, or again after they may have arrived
}

// Counts returns what passed so far.
func (l *Link) Counts() LinkCounts {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts
}

// Charged returns when the store carried out the last call for key.
func (l *Link) Charged(key string) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.charged[key]
}

// Acquire implements lease.Store.
func (l *Link) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	fault, request, reply := l.begin(calls)
	defer l.end(calls)
	if l.Delay == nil {
		switch fault {
		case Refused:
			return failed(calls, lease.ErrNotExecuted)
		case RequestLost:
			return failed(calls, lease.ErrUnknownOutcome)
		}
		answers := l.carry(calls, l.Store.Acquire(ctx, calls))
		if fault == ReplyLost {
			l.unheard(answers)
			return failed(calls, lease.ErrUnknownOutcome)
		}
		return l.heard(calls, answers)
	}

	// What is on its way goes on when nobody waits for it any more.
	done := make(chan []lease.Answer, 1)
	go func() {
		time.Sleep(request)
		switch fault {
		case Refused:
			time.Sleep(reply)
			done <- failed(calls, lease.ErrNotExecuted)
			return
		case RequestLost:
			return
		}
		answers := l.carry(calls, l.Store.Acquire(context.WithoutCancel(ctx), calls))
		time.Sleep(reply)
		if fault == ReplyLost || ctx.Err() != nil {
			l.unheard(answers)
			return
		}
		done <- answers
	}()
	select {
	case answers := <-done:
		return l.heard(calls, answers)
	case <-ctx.Done():
		select {
		case answers := <-done: // both at one instant
			l.unheard(answers)
		default:
		}
		return failed(calls, fmt.Errorf("%w: %w", lease.ErrUnknownOutcome, ctx.Err()))
	}
}

func (l *Link) begin(calls []lease.Call) (fault Fault, request, reply time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.Trips++
	l.counts.Calls += int64(len(calls))
	if l.inFlight == nil {
		l.inFlight = map[string]int{}
	}
	for i := range calls {
		l.inFlight[calls[i].Key]++
		l.counts.InFlight = max(l.counts.InFlight, l.inFlight[calls[i].Key])
	}
	if l.Fault != nil {
		fault = l.Fault(calls)
	}
	if fault != Works {
		l.counts.Faulty += int64(len(calls))
	}
	if fault != Refused {
		l.toldLocked(calls)
	}
	if l.Delay != nil {
		request, reply = l.Delay()
	}
	return fault, request, reply
}

// toldLocked books reports that may have arrived: no token may be told of twice.
func (l *Link) toldLocked(calls []lease.Call) {
	for i := range calls {
		for _, r := range calls[i].Reports {
			of := lot{calls[i].Key, r.Epoch}
			n := r.Spent + r.Returned
			known := min(n, l.untold[of])
			l.counts.Overtold += n - known
			if known > 0 {
				l.untold[of] -= known
			}
		}
	}
}

// heard books leases that the node learns of, and takes back the reports of
// calls that it learns were not executed.
func (l *Link) heard(calls []lease.Call, answers []lease.Answer) []lease.Answer {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.untold == nil {
		l.untold = map[lot]int64{}
	}
	for i, a := range answers {
		if errors.Is(a.Err, lease.ErrNotExecuted) || errors.Is(a.Err, lease.ErrRejected) {
			for _, r := range calls[i].Reports {
				l.untold[lot{calls[i].Key, r.Epoch}] += r.Spent + r.Returned
			}
		}
		if n := a.Grant.Tokens - a.Grant.Bound; n > 0 {
			l.untold[lot{calls[i].Key, a.Grant.Epoch}] += n
		}
	}
	return answers
}

func (l *Link) end(calls []lease.Call) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.counts.Answered += int64(len(calls))
	for i := range calls {
		l.inFlight[calls[i].Key]--
	}
}

// carry books answers of the store.
func (l *Link) carry(calls []lease.Call, answers []lease.Answer) []lease.Answer {
	l.mu.Lock()
	if l.charged == nil {
		l.charged = map[string]time.Time{}
	}
	for i, a := range answers {
		l.counts.Granted += a.Grant.Tokens
		l.charged[calls[i].Key] = time.Now()
	}
	l.mu.Unlock()
	if l.Carried != nil {
		for i := range calls {
			l.Carried(calls[i], answers[i])
		}
	}
	return answers
}

func (l *Link) unheard(answers []lease.Answer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range answers {
		l.counts.Unheard += a.Grant.Tokens
	}
}

func failed(calls []lease.Call, err error) []lease.Answer {
	answers := make([]lease.Answer, len(calls))
	for i := range answers {
		answers[i].Err = err
	}
	return answers
}

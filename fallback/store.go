package fallback

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// Store answers from its primary or, when that does not answer in time, from
// this node's share of the limit. It is a lease.Local, and safe for concurrent
// use. Make one with New, and Close it.
type Store struct {
	primary lease.Store
	opts    Options
	base    time.Time

	shards sync.Map // of *shard, by name
	shares table
	counts counts

	mu        sync.Mutex
	down      int // shards that are down
	downSince time.Time
	downFor   time.Duration
	cause     error // of the last one that went down
	closed    bool

	stepped    bool
	recoveries []*recovery // of a Stepped store

	random func() float64 // 0 to 1: jitter, ramp

	alive   context.Context // ends with Close; parent of calls nobody waits for
	giveUp  context.CancelFunc
	running sync.WaitGroup
}

// counts are a Store's counters.
type counts struct {
	trips, probes, admitted, returned, denied, charged, forgiven atomic.Int64
}

// errDown is what became of a call that a shard that is down was not asked.
var errDown = fmt.Errorf("%w: %w", lease.ErrNotExecuted, lease.ErrDown)

// New returns a Store on primary. All problems of opts come back together.
func New(primary lease.Store, opts Options) (*Store, error) {
	opts.setDefaults()
	err := opts.validate()
	if primary == nil {
		err = errors.Join(err, errors.New("fallback: primary is nil"))
	}
	if err != nil {
		return nil, err
	}
	s := &Store{primary: primary, opts: opts, base: time.Now(), random: rand.Float64}
	s.shares.init(opts.MaxKeys)
	s.alive, s.giveUp = context.WithCancel(context.Background())
	return s, nil
}

// flight is the calls of one Acquire that go to the primary.
type flight struct {
	calls   []lease.Call
	index   []int // where each is among all calls
	shares  []*share
	ticket  []int // of each call
	tickets []ticket
}

// Acquire implements lease.Store. A call that the primary does not answer is
// answered by the share: at once if that was to be expected.
func (s *Store) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	now := time.Now()
	answers := make([]lease.Answer, len(calls))
	f := s.board(calls, answers, now)
	if len(f.calls) == 0 {
		return answers
	}
	got := s.ask(ctx, f.calls)
	s.land(ctx, now, &f, got)
	now = time.Now()
	for k, i := range f.index {
		answers[i] = got[k]
		if sh := f.shares[k]; sh != nil {
			s.settled(sh, got[k].Err)
		}
		if got[k].Err != nil && ctx.Err() != context.Canceled {
			call := calls[i]
			call.Own = f.calls[k].Own // none if the share has taken them in
			answers[i] = s.local(&call, f.tickets[f.ticket[k]].shard, now, got[k].Err)
		}
	}
	return answers
}

// ask has the primary answer calls, one by one even if it breaks its contract.
func (s *Store) ask(ctx context.Context, calls []lease.Call) []lease.Answer {
	answers := s.primary.Acquire(ctx, calls)
	if len(answers) != len(calls) {
		answers = make([]lease.Answer, len(calls))
		for i := range answers {
			answers[i].Err = lease.ErrUnknownOutcome
		}
	}
	return answers
}

// Local implements lease.Local.
func (s *Store) Local(call lease.Call) lease.Answer {
	return s.local(&call, s.shardOf(call.Key), time.Now(), errDown)
}

// board picks the calls that go to the primary, and adds to each what its share
// owes. The others are answered by their share.
func (s *Store) board(calls []lease.Call, answers []lease.Answer, now time.Time) (f flight) {
	for i := range calls {
		server := s.shardOf(calls[i].Key)
		k, ok := f.permit(s, server, &calls[i], now)
		if !ok {
			answers[i] = s.local(&calls[i], server, now, errDown)
			continue
		}
		call := calls[i]
		f.shares = append(f.shares, s.owe(&call, server, now))
		f.calls = append(f.calls, call)
		f.index = append(f.index, i)
		f.ticket = append(f.ticket, k)
	}
	return f
}

// permit returns the ticket for a call to sh; ok is false if it must not go.
func (f *flight) permit(s *Store, sh *shard, call *lease.Call, now time.Time) (k int, ok bool) {
	if !sh.asks(s, call, now) {
		return 0, false
	}
	for k := range f.tickets {
		if f.tickets[k].shard == sh {
			return k, true
		}
	}
	t, ok := sh.open()
	if ok {
		f.tickets = append(f.tickets, t)
	}
	return len(f.tickets) - 1, ok
}

// land judges the servers by the answers.
func (s *Store) land(ctx context.Context, start time.Time, f *flight, got []lease.Answer) {
	now := time.Now()
	for k := range got {
		t := &f.tickets[f.ticket[k]]
		verdict := s.verdict(ctx, start, got[k].Err)
		t.take(verdict)
		if verdict != nil {
			t.shard.remember(&f.calls[k], now)
		}
	}
	for k := range f.tickets {
		t := &f.tickets[k]
		// Of a batch for several servers nobody knows which one took the time.
		if t.err == nil && len(f.tickets) == 1 && t.shard.late(s, now, now.Sub(start)) {
			t.err = errSlow
			t.shard.remember(&f.calls[0], now)
		}
		t.close(s)
	}
}

// Close stops probing, and charges the primary, as far as it answers, with what was
// admitted without it, until ctx ends. The Store answers by its shares alone
// from then on. An error says how many tokens were not charged. A second Close
// does nothing.
func (s *Store) Close(ctx context.Context) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed = true
	s.mu.Unlock()
	s.giveUp()
	s.running.Wait()
	s.shards.Range(func(_, v any) bool {
		sh := v.(*shard)
		for more := true; more && ctx.Err() == nil; {
			_, more = s.charge(ctx, sh)
		}
		return ctx.Err() == nil
	})
	if owed := s.shares.owed.Load(); owed > 0 {
		return fmt.Errorf("fallback: %d tokens that were admitted without the store are not charged to it", owed)
	}
	return nil
}

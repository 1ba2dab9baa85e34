package fallback_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// server is a primary that does what the test tells it.
type server struct {
	store *leasetest.Store
	err   atomic.Pointer[error] // of every call
	hang  atomic.Bool           // until the context ends
	delay atomic.Int64
	calls atomic.Int64 // round trips
	most  atomic.Int64 // at a time
	now   atomic.Int64
	seen  func(ctx context.Context, calls []lease.Call)
}

func newServer() *server {
	return &server{store: leasetest.NewStore(func() time.Duration { return time.Duration(time.Now().UnixNano()) })}
}

func (p *server) fail(err error) { p.err.Store(&err) }

func (p *server) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	p.calls.Add(1)
	if now := p.now.Add(1); now > p.most.Load() {
		p.most.Store(now)
	}
	defer p.now.Add(-1)
	if p.seen != nil {
		p.seen(ctx, calls)
	}
	failed := func(err error) []lease.Answer {
		answers := make([]lease.Answer, len(calls))
		for i := range answers {
			answers[i].Err = err
		}
		return answers
	}
	if p.hang.Load() {
		<-ctx.Done()
		return failed(fmt.Errorf("%w: %w", lease.ErrUnknownOutcome, ctx.Err()))
	}
	if d := time.Duration(p.delay.Load()); d > 0 {
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return failed(fmt.Errorf("%w: %w", lease.ErrUnknownOutcome, ctx.Err()))
		}
	}
	if err := p.err.Load(); err != nil && *err != nil {
		return failed(*err)
	}
	return p.store.Acquire(ctx, calls)
}

// ask returns a call for one token of key.
func ask(key string) lease.Call {
	return lease.Call{
		Key: key, Limit: lease.Limit{Rate: 1000, Burst: 1000}, TTL: 500 * time.Millisecond,
		Need: 1, Bound: 1, Want: 1, Demand: 1, LastEpoch: -1,
	}
}

// one makes one call as a node does, and returns the answer and how long it took.
func one(s lease.Store, key string) (lease.Answer, time.Duration) { return send(s, ask(key)) }

func send(s lease.Store, call lease.Call) (lease.Answer, time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	start := time.Now()
	return s.Acquire(ctx, []lease.Call{call})[0], time.Since(start)
}

// slow is ask for a key that hardly refills.
func slow(key string) lease.Call {
	call := ask(key)
	call.Limit.Rate = 0.001
	return call
}

func inBubble(t *testing.T, opts fallback.Options, f func(t *testing.T, p *server, s *fallback.Store)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		p := newServer()
		s, err := fallback.New(p, opts)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close(context.Background())
		f(t, p, s)
	})
}

var (
	errUnknown  = fmt.Errorf("%w: connection reset", lease.ErrUnknownOutcome)
	errRefused  = fmt.Errorf("%w: connection refused", lease.ErrNotExecuted)
	errRejected = fmt.Errorf("%w: bad limit", lease.ErrRejected)
	errPool     = fmt.Errorf("%w: %w: pool timeout", lease.ErrNotExecuted, lease.ErrOverloaded)
)

// Only those in flight wait for a server that does not answer.
func TestNobodyWaitsTwice(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		one(s, "k")
		p.hang.Store(true)
		a, took := one(s, "k")
		if a.Grant.Source != lease.SourceLocal || took != 30*time.Millisecond || !errors.Is(a.Err, lease.ErrUnknownOutcome) {
			t.Errorf("first call = %+v after %v: want the share's grant after 30ms", a, took)
		}
		for range 1000 {
			a, took := one(s, "k")
			if a.Grant.Source != lease.SourceLocal || took != 0 || !errors.Is(a.Err, lease.ErrDown) {
				t.Fatalf("later call = %+v after %v: want the share's grant at once", a, took)
			}
			time.Sleep(10 * time.Millisecond)
		}
		if st := s.Stats(); st.State == "closed" || st.Trips != 1 || !st.Degraded || !errors.Is(st.Cause, lease.ErrUnknownOutcome) || st.DegradedFor < 9*time.Second {
			t.Errorf("Stats = %+v: want open or half-open, one trip, degraded for 10s", st)
		}
	})
}

// What says nothing about the server does not take it down.
func TestNeutralOutcomes(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		down bool
	}{
		"unknown": {errUnknown, true}, "refused": {errRefused, true}, "rejected": {errRejected, false}, "pool": {errPool, false},
	} {
		inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
			p.fail(c.err)
			for range 100 {
				a, _ := one(s, "k")
				if a.Grant.Source != lease.SourceLocal || a.Err == nil {
					t.Fatalf("%s: answer = %+v: want the share's grant", name, a)
				}
			}
			if st := s.Stats(); st.Degraded != c.down {
				t.Errorf("%s: Stats = %+v: want degraded = %t", name, st, c.down)
			}
		})
	}
}

// A caller that gives up, or has less time than the server is given, is no
// failure; the causes of contexts do not matter.
func TestCallersThatGiveUp(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		p.delay.Store(int64(5 * time.Millisecond))
		for range 100 {
			ctx, cancel := context.WithCancelCause(context.Background())
			time.AfterFunc(time.Millisecond, func() { cancel(errors.New("the browser was closed")) })
			s.Acquire(ctx, []lease.Call{ask("k")})
			hurry, stop := context.WithTimeout(context.Background(), 2*time.Millisecond)
			s.Acquire(hurry, []lease.Call{ask("k")})
			stop()
		}
		p.hang.Store(true)
		ctx, cancel := context.WithCancelCause(context.Background())
		time.AfterFunc(29*time.Millisecond, func() { cancel(errors.New("at the last moment")) })
		s.Acquire(ctx, []lease.Call{ask("k")})
		p.hang.Store(false)
		if st := s.Stats(); st.Degraded || st.Trips != 0 {
			t.Errorf("Stats = %+v: want not degraded", st)
		}
	})
}

// A thousand callers while the breaker is half open: one probe, and everybody
// has an answer at once.
func TestScenario54_HalfOpen(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		one(s, "k")
		p.hang.Store(true)
		one(s, "k")
		time.Sleep(5 * time.Second)
		begin := p.calls.Load()
		p.most.Store(0)
		var wg sync.WaitGroup
		for range 1000 {
			wg.Go(func() {
				for range 40 {
					if a, took := one(s, "k"); took != 0 || a.Grant.Source != lease.SourceLocal {
						t.Errorf("answer = %+v after %v: want the share's at once", a, took)
					}
					time.Sleep(250 * time.Millisecond)
				}
			})
		}
		wg.Wait()
		// In ten seconds, with pauses from 500 to 750 ms and 30 ms of waiting.
		if probes := p.calls.Load() - begin; p.most.Load() != 1 || probes > 20 || probes < 10 {
			t.Errorf("%d probes, %d at a time: want 10 to 20, one at a time", probes, p.most.Load())
		}
		// One success closes it, but calls come back little by little.
		p.hang.Store(false)
		time.Sleep(time.Second)
		begin = p.calls.Load()
		time.Sleep(2 * time.Second)
		if st := s.Stats(); st.Degraded || st.State != "closed" || st.Owed != 0 || p.calls.Load()-begin > 5 {
			t.Errorf("Stats = %+v after %d calls: want closed, nothing owed", st, p.calls.Load()-begin)
		}
	})
}

// Once the breaker has closed, the part of calls that go to the server rises.
func TestRamp(t *testing.T) {
	inBubble(t, fallback.Options{Ramp: 10 * time.Second}, func(t *testing.T, p *server, s *fallback.Store) {
		one(s, "k")
		p.fail(errRefused)
		one(s, "k")
		time.Sleep(10 * time.Second)
		p.fail(nil)
		for s.Stats().Degraded {
			time.Sleep(time.Millisecond)
		}
		last := -1
		for i := range 11 {
			asked := 0
			for range 1000 {
				if a, _ := one(s, fmt.Sprint("other", i)); !errors.Is(a.Err, lease.ErrDown) {
					asked++
				}
				time.Sleep(time.Millisecond)
			}
			if want := 100 + 90*i + 45; i < 10 && (asked < want-60 || asked > want+60) || i == 10 && asked != 1000 || asked < last-20 {
				t.Errorf("second %d: %d of 1000 went to the server: want about %d", i, asked, min(want, 1000))
			}
			last = asked
		}
	})
}

// A failure of a call that was sent before the server was up again is not held
// against it.
func TestLateFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		well := newServer()
		var asked atomic.Int64
		s, err := fallback.New(storeFunc(func(ctx context.Context, calls []lease.Call) []lease.Answer {
			if calls[0].Key == "late" {
				time.Sleep(20 * time.Millisecond)
			} else if asked.Add(1) > 1 {
				return well.Acquire(ctx, calls)
			}
			return []lease.Answer{{Err: errUnknown}}
		}), fallback.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close(context.Background())
		go one(s, "late")
		synctest.Wait()
		one(s, "k") // fails: the server is down, and a probe finds it up again
		time.Sleep(10 * time.Millisecond)
		if s.Stats().Degraded {
			t.Error("degraded after a probe that was answered")
		}
		time.Sleep(10 * time.Millisecond) // before the late failure.
		synctest.Wait()
		if st := s.Stats(); st.Degraded || st.Probes != 1 {
			t.Errorf("Stats = %+v after a late failure: want not degraded, one probe", st)
		}
	})
}

// storeFunc is a Store in one function.
type storeFunc func(ctx context.Context, calls []lease.Call) []lease.Answer

func (f storeFunc) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	return f(ctx, calls)
}

// A server that takes longer than half the usual lease period for a second is not
// asked any more; one that takes a little less is.
func TestScenario34_SlowServer(t *testing.T) {
	for delay, slow := range map[time.Duration]bool{100 * time.Millisecond: false, 120 * time.Millisecond: false, 130 * time.Millisecond: true} {
		inBubble(t, fallback.Options{Timeout: time.Second}, func(t *testing.T, p *server, s *fallback.Store) {
			p.delay.Store(int64(delay))
			for range 30 {
				ctx, cancel := context.WithTimeout(context.Background(), time.Second)
				a := s.Acquire(ctx, []lease.Call{ask("k")})[0]
				cancel()
				if a.Grant.Tokens != 1 {
					t.Fatalf("answer = %+v: want a token", a)
				}
				time.Sleep(50 * time.Millisecond)
			}
			if st := s.Stats(); st.Degraded != slow {
				t.Errorf("delay %v: Stats = %+v: want degraded = %t", delay, st, slow)
			}
			if !slow {
				return
			}
			p.delay.Store(int64(10 * time.Millisecond))
			time.Sleep(2 * time.Second)
			if st := s.Stats(); st.Degraded {
				t.Errorf("Stats = %+v once the server is fast again: want not degraded", st)
			}
		})
	}
}

// A lease period shorter than a round trip is no reason to do without the server.
func TestShortPeriodIsNotSlow(t *testing.T) {
	inBubble(t, fallback.Options{Period: 5 * time.Millisecond}, func(t *testing.T, p *server, s *fallback.Store) {
		p.delay.Store(int64(20 * time.Millisecond))
		for range 100 {
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
			s.Acquire(ctx, []lease.Call{ask("k")})
			cancel()
		}
		if st := s.Stats(); st.Degraded || st.Trips != 0 {
			t.Errorf("Stats = %+v: want not degraded", st)
		}
	})
}

// One slow answer now and then is none of it.
func TestSlowNowAndThen(t *testing.T) {
	inBubble(t, fallback.Options{Timeout: time.Second}, func(t *testing.T, p *server, s *fallback.Store) {
		for i := range 200 {
			p.delay.Store(int64(time.Duration(1+200*(i%2)) * time.Millisecond))
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			s.Acquire(ctx, []lease.Call{ask("k")})
			cancel()
		}
		if st := s.Stats(); st.Degraded || st.Trips != 0 {
			t.Errorf("Stats = %+v: want not degraded", st)
		}
	})
}

// One of two servers is down: the keys of the other do not notice.
func TestScenario35_OneShardDown(t *testing.T) {
	opts := fallback.Options{Shard: func(key string) string { return key[:1] }}
	inBubble(t, opts, func(t *testing.T, p *server, s *fallback.Store) {
		down := &leasetest.Link{Store: p.store}
		split := splitStore{p, down}
		s2, err := fallback.New(split, opts)
		if err != nil {
			t.Fatal(err)
		}
		defer s2.Close(context.Background())
		var lost atomic.Bool
		lost.Store(true)
		down.Fault = func([]lease.Call) leasetest.Fault {
			if lost.Load() {
				return leasetest.RequestLost
			}
			return leasetest.Works
		}
		for range 1000 {
			ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
			answers := s2.Acquire(ctx, []lease.Call{ask("a1"), ask("b1"), ask("a2")})
			cancel()
			for i, want := range []lease.Source{lease.SourceStore, lease.SourceLocal, lease.SourceStore} {
				if got := answers[i].Grant.Source; got != want {
					t.Fatalf("answer %d = %+v: want source %v", i, answers[i], want)
				}
			}
			time.Sleep(2 * time.Millisecond)
		}
		if st := s2.Stats(); st.Shards != 2 || st.Down != 1 || !st.Degraded {
			t.Errorf("Stats = %+v: want one of two servers down", st)
		}
		lost.Store(false)
		time.Sleep(time.Second)
		if st := s2.Stats(); st.Down != 0 || st.Owed != 0 {
			t.Errorf("Stats = %+v: want none down, nothing owed", st)
		}
	})
}

// splitStore sends keys with a to one store and the others to another.
type splitStore struct{ a, b lease.Store }

func (p splitStore) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	answers := make([]lease.Answer, len(calls))
	for i := range calls {
		s := p.b
		if calls[i].Key[0] == 'a' {
			s = p.a
		}
		answers[i] = s.Acquire(ctx, calls[i:i+1])[0]
	}
	return answers
}

// Many keys on many nodes come back at once: debts and calls do not arrive all
// together, and nothing trips again.
func TestScenario33_Recovery(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const nodes, keys = 50, 200
		p := newServer()
		perMS := map[int64]int{}
		var mu sync.Mutex
		p.seen = func(_ context.Context, calls []lease.Call) {
			mu.Lock()
			perMS[time.Now().UnixMilli()] += len(calls)
			mu.Unlock()
		}
		var all []*fallback.Store
		for range nodes {
			s, err := fallback.New(p, fallback.Options{Nodes: func() int { return nodes }, Unknown: fallback.StartFull})
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, s)
		}
		calls := make([]lease.Call, keys)
		for i := range calls {
			calls[i] = ask(fmt.Sprint("k", i))
		}
		round := func() {
			for _, s := range all {
				ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
				s.Acquire(ctx, calls)
				cancel()
			}
		}
		p.fail(errRefused)
		for range 5 {
			round()
			time.Sleep(100 * time.Millisecond)
		}
		time.Sleep(5 * time.Second)
		p.fail(nil)
		p.delay.Store(int64(time.Millisecond))
		begin := time.Now().UnixMilli()
		time.Sleep(3 * time.Second)
		mu.Lock()
		peak, total := 0, 0
		for ms := begin; ms < begin+3000; ms++ {
			total += perMS[ms]
			peak = max(peak, perMS[ms])
		}
		mu.Unlock()
		// Each node's debts are two calls of the server, ten round trips apart.
		if total < nodes*keys || peak > nodes*keys/4 {
			t.Errorf("%d calls for %d debts, %d in one millisecond: want them spread", total, nodes*keys, peak)
		}
		for i, s := range all {
			if st := s.Stats(); st.Trips != 1 || st.Owed != 0 || st.Degraded {
				t.Errorf("node %d: %+v: want one trip, nothing owed", i, st)
			}
			s.Close(context.Background())
		}
	})
}

// A debt of which nobody knows whether it arrived is owed on; one that certainly
// did not, too; one that did is not.
func TestDebts(t *testing.T) {
	for name, err := range map[string]error{"unknown": errUnknown, "refused": errRefused} {
		inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
			send(s, slow("k"))
			p.fail(err)
			call := slow("k")
			call.Hint = lease.Hint{Known: true, Tokens: 1000}
			call.Need, call.Bound, call.Want = 300, 300, 300
			if a := s.Local(call); a.Grant.Tokens != 300 {
				t.Fatalf("Local = %+v: want 300 tokens", a)
			}
			for range 3 {
				send(s, slow("k"))
				time.Sleep(time.Second)
			}
			if st := s.Stats(); st.Owed < 300 || st.Charged != 0 {
				t.Errorf("%s: Stats = %+v: want 300 or a few more owed, none charged", name, st)
			}
			owed := s.Stats().Owed
			p.fail(nil)
			time.Sleep(2 * time.Second)
			if st := s.Stats(); st.Owed != 0 || st.Charged+st.Forgiven != owed {
				t.Errorf("%s: Stats = %+v: want %d charged or forgiven", name, st, owed)
			}
		})
	}
}

// The number of shares is bounded, and those with debts go last.
func TestSharesAreBounded(t *testing.T) {
	inBubble(t, fallback.Options{MaxKeys: 1000, Unknown: fallback.StartFull}, func(t *testing.T, p *server, s *fallback.Store) {
		p.fail(errRefused)
		for i := range 20_000 {
			one(s, fmt.Sprint("flood", i))
		}
		st := s.Stats()
		if st.Keys > 1000+64 {
			t.Errorf("%d shares: want at most 1064", st.Keys)
		}
		if st.Owed+st.Lost != st.Admitted {
			t.Errorf("Stats = %+v: want admitted = owed + lost", st)
		}
		p.fail(nil)
		time.Sleep(30 * time.Second) // charged, full again, and swept
		if st := s.Stats(); st.Keys != 0 || st.Owed != 0 {
			t.Errorf("Stats = %+v: want no share left", st)
		}
	})
}

// Close charges what is owed. That it leaves no goroutine the bubble sees to.
func TestCloseCharges(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		one(s, "k")
		p.fail(errRefused)
		one(s, "k")
		if err := s.Close(context.Background()); err == nil {
			t.Error("Close without a server = nil: want an error that tells what is owed")
		}
		if err := s.Close(context.Background()); err != nil {
			t.Errorf("second Close = %v: want nil", err)
		}
	})
	inBubble(t, fallback.Options{Backoff: time.Hour}, func(t *testing.T, p *server, s *fallback.Store) {
		one(s, "k")
		p.fail(errRefused)
		one(s, "k")
		time.Sleep(2 * time.Hour)
		p.fail(nil)
		if err := s.Close(context.Background()); err != nil || s.Stats().Owed != 0 {
			t.Errorf("Close = %v, %+v: want nothing owed", err, s.Stats())
		}
	})
}

func TestOptionErrors(t *testing.T) {
	_, err := fallback.New(nil, fallback.Options{
		Period: 1, Timeout: -1, MaxKeys: -1, Unknown: 9, Split: 9, Failures: -1, Backoff: 1, Ramp: -1,
	})
	for _, want := range []string{
		"primary", "Period = 1ns: want 2ms to 1h", "Timeout = -1ns: want 1ms to 1m", "MaxKeys = -1: want 1 to 2^30",
		"Unknown = 9: want StartOne", "Split = 9: want SplitBlend", "Failures = -1: want 1 to 1000", "Backoff = 1ns: want 25ms to 1h",
		"Ramp = -1ns: want 1ms to 1h",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New = %v: want it to say %q", err, want)
		}
	}
}

// A Store whose primary is well passes the acceptance suite of stores.
func TestStoreSuite(t *testing.T) {
	leasetest.TestStore(t, leasetest.Backend{Virtual: func(t testing.TB, clock *leasetest.Clock) lease.Store {
		s, err := fallback.New(leasetest.NewStore(clock.Now), fallback.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close(context.Background()) })
		return s
	}})
}

// What a share admits while the server is up, for a request that waited too long,
// is charged too, also if nobody asks for the key again.
func TestChargedWhileUp(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		one(s, "k")
		for range 3 {
			call := ask("k")
			call.Hint = lease.Hint{Known: true, Tokens: 1000}
			call.Need, call.Bound, call.Want = 100, 100, 100
			if a := s.Local(call); a.Grant.Tokens != 100 {
				t.Fatalf("Local = %+v: want 100 tokens", a)
			}
			time.Sleep(12 * time.Second)
			if st := s.Stats(); st.Owed != 0 || st.Degraded || st.Keys != 0 {
				t.Errorf("Stats = %+v: want nothing owed, and no share left", st)
			}
		}
	})
}

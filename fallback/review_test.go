package fallback_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/lease"
)

// known returns a call for n tokens of a key that hardly refills, full when this
// node heard of it last.
func known(key string, n int64) lease.Call {
	call := slow(key)
	call.Hint = lease.Hint{Known: true, Tokens: 1000}
	call.Need, call.Bound, call.Want = n, n, n
	return call
}

// The debts of very many keys are charged in moments, and do not wait for those
// that the server rejects.
func TestManyDebts(t *testing.T) {
	const keys = 20_000
	synctest.Test(t, func(t *testing.T) {
		p := newServer()
		s, err := fallback.New(storeFunc(func(ctx context.Context, calls []lease.Call) []lease.Answer {
			answers := p.Acquire(ctx, calls)
			for i := range answers {
				if calls[i].Key[0] == 'b' {
					answers[i] = lease.Answer{Err: errRejected}
				}
			}
			return answers
		}), fallback.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close(context.Background())
		p.delay.Store(int64(300 * time.Microsecond))
		p.fail(errRefused)
		for i := range keys {
			send(s, known(fmt.Sprint("good", i), 1))
			if i%10 == 0 {
				s.Local(known(fmt.Sprint("bad", i), 1))
			}
		}
		p.fail(nil)
		time.Sleep(5 * time.Second)
		if st := s.Stats(); st.Owed != 0 || st.Charged != keys || st.Lost != keys/10 {
			t.Errorf("Stats = %+v: want %d charged, %d rejected and lost", st, keys, keys/10)
		}
	})
}

// Nothing is forgiven of what was admitted while others could use the store.
func TestForgivenOnlyWhileIdle(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		call := ask("k")
		call.Limit = lease.Limit{Rate: 10, Burst: 100}
		call.Hint = lease.Hint{Known: true, Tokens: 100}
		call.Need, call.Bound, call.Want = 35, 35, 35
		for range 10 {
			// Admitted while the store is up, and down again before it was charged.
			p.fail(nil)
			if a := s.Local(call); a.Grant.Tokens != 35 {
				t.Fatalf("Local = %+v: want 35 tokens", a)
			}
			p.fail(errRefused)
			one(s, "other")
			time.Sleep(10 * time.Second) // the share is full again
			one(s, "k")
			s.Local(call)
			p.fail(nil)
			time.Sleep(10 * time.Second)
		}
		// Of each round the first 35 are charged, the others as far as they lacked.
		if st := s.Stats(); st.Owed != 0 || st.Charged < 350 || st.Charged+st.Forgiven != st.Admitted {
			t.Errorf("Stats = %+v: want 350 or more charged", st)
		}
	})
}

// What is admitted while the server is up is charged within seconds.
func TestChargedSoon(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		p.fail(errRefused)
		send(s, known("k", 1))
		time.Sleep(time.Second)
		p.fail(nil)
		time.Sleep(2 * time.Second)
		s.Local(known("k", 500))
		time.Sleep(2 * time.Second)
		if st := s.Stats(); st.Owed != 0 {
			t.Errorf("Stats = %+v two seconds later: want nothing owed", st)
		}
	})
}

// A share that had to go in an outage does not come back full.
func TestEvictedSharesStartEmpty(t *testing.T) {
	inBubble(t, fallback.Options{MaxKeys: 100}, func(t *testing.T, p *server, s *fallback.Store) {
		p.fail(errRefused)
		one(s, "other")
		most := map[string]int64{}
		for range 20 {
			for i := range 400 {
				call := known(fmt.Sprint("k", i), 10)
				most[call.Key] += s.Local(call).Grant.Tokens
			}
		}
		for key, n := range most {
			if n > 1000 {
				t.Errorf("key %s: admitted %d: want no more than the burst", key, n)
			}
		}
		total := int64(0)
		for _, n := range most {
			total += n
		}
		if total > 10*20*(100+64) {
			t.Errorf("admitted %d of all keys: want only those that were not forgotten to admit", total)
		}
	})
}

// Probes are answered and calls are not: the pauses grow all the same, so that
// few requests wait.
func TestProbesPassCallsDoNot(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		p.seen = func(_ context.Context, calls []lease.Call) { p.hang.Store(calls[0].Need <= 1) }
		waited, end := 0, time.Now().Add(20*time.Second)
		for time.Now().Before(end) {
			if _, took := one(s, "k"); took > 0 {
				waited++
			}
			time.Sleep(time.Millisecond)
		}
		if waited > 60 {
			t.Errorf("%d requests waited in 20s: want a few", waited)
		}
	})
}

// Failures of calls from before the server was up again do not open the breaker.
func TestLateFailuresDoNotTrip(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		p.hang.Store(true)
		for range 6 {
			go one(s, "k")
			time.Sleep(2 * time.Millisecond)
		}
		p.hang.Store(false)
		time.Sleep(time.Second)
		if st := s.Stats(); st.State != "closed" || st.Degraded || st.Trips != 0 {
			t.Errorf("Stats = %+v: want closed", st)
		}
	})
}

// After Close shares alone answer.
func TestAfterClose(t *testing.T) {
	inBubble(t, fallback.Options{}, func(t *testing.T, p *server, s *fallback.Store) {
		one(s, "k")
		s.Close(context.Background())
		before := p.calls.Load()
		if a, took := one(s, "k"); a.Grant.Source != lease.SourceLocal || took != 0 || p.calls.Load() != before {
			t.Errorf("answer after Close = %+v after %v: want the share's at once", a, took)
		}
	})
}

package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// Concurrency: herds, lost updates, leaks, deadlocks, waiters that leave.
//
// Cases of the group that wait for a later feature:
//
//	C01, C03, C16  local path                 fallback
//	C07, C09       waiting for tokens         Wait (Allow waits for a reply only; a
//	               dear request that does not wait can be overtaken by cheap ones)
//	C12            state-change callbacks     fallback
//	C13            reload of a file           configuration file
//	C15            several limits             several limits in one request

func TestC01_CheckAndCountAreOne(t *testing.T) {
	for _, nodes := range []int{1, 5} {
		for _, n := range []int{50, 3000} {
			for _, warm := range []int{0, 5, 24} {
				if n > 50 && (warm > 0) != (nodes > 1) || n > 50 && warm > 5 { // one large one each
					continue
				}
				t.Run(fmt.Sprintf("nodes=%d/calls=%d/warm=%d", nodes, n, warm), func(t *testing.T) {
					bubble(t, func(t *testing.T, w *world) {
						limit := hybrid.PerHour(1, 25)
						tr := w.trace(limit)
						var all []*hybrid.Limiter
						for range nodes {
							all = append(all, w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{RedisTimeout: time.Second}))
						}
						tr.burst(all[0], "k", warm) // so that it holds a lease
						together(n, func(i int) { tr.ask(all[i%nodes], "k", 1) })
						tr.check()
						// What is out on lease on one node is not there for another
						// until it comes back; then it is.
						w.sleep(2 * time.Second)
						for _, l := range all {
							tr.burst(l, "k", 25)
						}
						tr.checkTotal(25)
					})
				})
			}
		}
	}
	// One node never denies what it has.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerHour(1, 25)
		l := w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{RedisTimeout: time.Second})
		tr := w.trace(limit)
		together(5000, func(int) { tr.ask(l, "k", 1) })
		tr.checkTotal(25)
	})
}

func TestC03_ColdKey(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		for i, limit := range []hybrid.Limit{hybrid.PerHour(1, 10), hybrid.PerSecond(100, 10), hybrid.PerHour(1, 2)} {
			l := w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{RedisTimeout: time.Second})
			tr := w.trace(limit)
			together(1000, func(int) { tr.ask(l, fmt.Sprint("cold", i), 1) })
			tr.checkTotal(limit.Burst)
			// Whoever came before the first call left shares it; the rest share the next.
			if s := l.Stats(); s.Calls > 2 || s.Keys != 1 {
				t.Errorf("%v: Stats = %+v; want 1 key and at most 2 calls", limit, s)
			}
		}
		// Many handles and plain calls meet in the same state.
		limit := hybrid.PerHour(1, 10)
		l := w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{RedisTimeout: time.Second})
		tr := w.trace(limit)
		together(1000, func(i int) {
			if i%2 == 0 {
				tr.ask(l, "handles", 1)
				return
			}
			k, err := l.Key("handles")
			if err != nil {
				t.Errorf("Key = %v; want nil", err)
				return
			}
			begin := w.since()
			d, err := k.Allow(context.Background())
			if err != nil {
				t.Errorf("Key.Allow = %v; want nil", err)
			}
			tr.add(begin, d, 1)
		})
		tr.checkTotal(10)
	})
}

func TestC04_EvictionAgainstUse(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		const keys = 30
		limit := hybrid.PerSecond(20, 20)
		var nodes []*hybrid.Limiter
		for range 2 {
			nodes = append(nodes, w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{MaxKeys: 8, RedisTimeout: time.Second}))
		}
		var traces [keys]*trace
		for i := range traces {
			traces[i] = w.trace(limit)
		}
		together(16, func(g int) {
			l := nodes[g%2]
			rng := rand.New(rand.NewPCG(1, uint64(g)))
			handle, err := l.Key("key0") // evicted again and again
			if err != nil {
				t.Errorf("Key = %v; want nil", err)
				return
			}
			for range 50 {
				i := rng.IntN(keys)
				if rng.IntN(4) == 0 {
					begin := w.since()
					d, err := handle.Allow(context.Background())
					if err != nil {
						t.Errorf("Key.Allow = %v; want a decision", err)
					}
					traces[0].add(begin, d, 1)
				} else {
					traces[i].ask(l, fmt.Sprint("key", i), 1+rng.Int64N(3))
				}
				time.Sleep(time.Duration(rng.IntN(20)) * time.Millisecond)
			}
		})
		var evicted int64
		for _, l := range nodes {
			s := l.Stats()
			evicted += s.Evicted
			if s.Failed > 0 || s.Keys > 8+16 {
				t.Errorf("Stats = %+v; want no failures, and keys near 8", s)
			}
		}
		if evicted < 100 {
			t.Errorf("%d evicted; want this test to evict all the time", evicted)
		}
		for _, tr := range traces {
			tr.check()
		}
	})

	// The key is gone from Redis between lease and report: a full bucket, no
	// error, and the late report is of no use to anybody.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerHour(1, 100)
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		tr.burst(l, "k", 10)
		if w.bucket("k").out() == 0 {
			t.Fatal("no lease is out; want one")
		}
		w.redis.Del(redisKey("k"))
		tr.burst(l, "k", 200)
		if got := tr.total(); got < 100 || got > 200 {
			t.Errorf("admitted %d over a lost bucket; want 100 to twice the burst", got)
		}
		if b := w.bucket("k"); b.units < 0 || b.tokens()+b.out() > 100 {
			t.Errorf("bucket = %+v; want a balance of 0 to 100 less what is out", b)
		}
		if s := l.Stats(); s.Failed != 0 {
			t.Errorf("Stats = %+v; want no failures", s)
		}
	})
}

func TestC06_SharedCallOutlivesItsLeader(t *testing.T) {
	limit := hybrid.PerHour(1, 200)
	ask := func(l *hybrid.Limiter, patience time.Duration, n int64) (hybrid.Decision, error) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		return l.AllowN(ctx, "k", n)
	}
	bubble(t, func(t *testing.T, w *world) {
		l := w.nodeOver(newLine(50*time.Millisecond), limit, hybrid.Options{RedisTimeout: time.Second})
		w.warm()
		begin := time.Now()
		var wg sync.WaitGroup
		wg.Go(func() {
			d, err := ask(l, 5*time.Millisecond, 1)
			if !errors.Is(err, context.DeadlineExceeded) || d.Allowed || time.Since(begin) != 5*time.Millisecond {
				t.Errorf("leader = %+v, %v after %v; want its deadline after 5ms", d, err, time.Since(begin))
			}
		})
		time.Sleep(time.Millisecond)
		var served atomic.Int64
		for range 99 {
			wg.Go(func() {
				if d, err := ask(l, time.Second, 1); err != nil || !d.Allowed {
					t.Errorf("joined = %+v, %v; want admitted", d, err)
					return
				}
				served.Add(1)
			})
		}
		wg.Go(func() {
			d, err := ask(l, 10*time.Millisecond, 1)
			if !errors.Is(err, context.DeadlineExceeded) || d.Allowed || time.Since(begin) != 11*time.Millisecond {
				t.Errorf("short one = %+v, %v after %v; want its deadline after 10ms", d, err, time.Since(begin))
			}
		})
		wg.Wait()
		if served.Load() != 99 || time.Since(begin) > 101*time.Millisecond {
			t.Errorf("%d served in %v; want 99 in two round trips", served.Load(), time.Since(begin))
		}
		if s := l.Stats(); s.Calls > 2 || s.Failed != 0 {
			t.Errorf("Stats = %+v; want at most 2 calls, no failure", s)
		}
	})

	// The leader's call fails: everybody who shares it gets the policy.
	limit.OnFailure = hybrid.Deny
	bubble(t, func(t *testing.T, w *world) {
		line := newLine(50 * time.Millisecond)
		l := w.nodeOver(line, limit, hybrid.Options{RedisTimeout: time.Second})
		w.redis.SetError("LOADING Redis is loading the dataset in memory")
		together(100, func(int) {
			d, err := ask(l, time.Second, 1)
			if err != nil || d.Allowed || d.Source != hybrid.SourcePolicy {
				t.Errorf("joined = %+v, %v; want denied by policy", d, err)
			}
		})
		if n := line.calls.Load(); n > 2 {
			t.Errorf("%d calls; want the failure shared", n)
		}
	})

	// Everybody left: what was granted beyond them is kept.
	bubble(t, func(t *testing.T, w *world) {
		l := w.nodeOver(newLine(50*time.Millisecond), limit, hybrid.Options{RedisTimeout: time.Second})
		w.warm()
		if _, err := ask(l, 5*time.Millisecond, 10); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("leader = %v; want its deadline", err)
		}
		time.Sleep(50 * time.Millisecond)
		d, err := ask(l, time.Second, 1)
		if err != nil || !d.Allowed || d.Source != hybrid.SourceLease {
			t.Errorf("next = %+v, %v; want admitted from the lease", d, err)
		}
	})
}

func TestC07_LeavingCostsNothing(t *testing.T) {
	// A context that is already done.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerHour(1, 10)
		l := w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{})
		tr := w.trace(limit)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		for range 100 {
			if d, err := l.Allow(ctx, "k"); err == nil && d.Allowed {
				tr.add(w.since(), d, 1) // from a lease, without waiting: admitted, so charged
			} else if !errors.Is(err, context.Canceled) {
				t.Errorf("Allow with a done context = %+v, %v; want Canceled", d, err)
			}
		}
		checkNoCalls(t, l)
		tr.burst(l, "k", 20)
		tr.checkTotal(10)
	})

	// The first of three leaves before its call does.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerHour(1, 10)
		line := newLine(20 * time.Millisecond)
		l := w.nodeOver(line, limit, hybrid.Options{RedisTimeout: time.Second})
		tr := w.trace(limit)
		var wg sync.WaitGroup
		wg.Go(func() { tr.ask(l, "k", 1) }) // in flight
		time.Sleep(time.Millisecond)
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
			defer cancel()
			if d, err := l.AllowN(ctx, "k", 5); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("AllowN = %+v, %v; want its deadline", d, err)
			}
		})
		time.Sleep(time.Millisecond)
		for range 2 {
			wg.Go(func() { tr.ask(l, "k", 1) })
		}
		wg.Wait()
		tr.burst(l, "k", 20)
		tr.checkTotal(10)
	})

	// A crowd with deadlines shorter than two round trips. What is lost is only
	// what the server charged for those who cannot wait for one.
	for _, impatient := range []int{0, 4} {
		t.Run(fmt.Sprintf("impatient=%d", impatient), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				limit := hybrid.PerSecond(10, 10)
				l := w.nodeOver(newLine(30*time.Millisecond), limit, hybrid.Options{RedisTimeout: time.Second})
				tr := w.trace(limit)
				const span = 15 * time.Second
				var wg sync.WaitGroup
				for i := range 1000 {
					wg.Go(func() {
						rng := rand.New(rand.NewPCG(7, uint64(i)))
						for w.since() < span {
							patience := 50 * time.Millisecond
							if impatient > 0 && i%impatient == 0 {
								patience = 10 * time.Millisecond
							}
							ctx, cancel := context.WithTimeout(context.Background(), patience)
							begin := w.since()
							if d, err := l.Allow(ctx, "k"); err == nil {
								tr.add(begin, d, 1)
							}
							cancel()
							time.Sleep(time.Duration(rng.Int64N(int64(2 * time.Second))))
						}
					})
				}
				wg.Wait()
				lost := l.Stats().Lost
				// 95% of what is refilled, and of that up to 1.1 lease periods' worth
				// may still be in the bucket.
				const least = 10 + 143 - 3
				if impatient == 0 {
					tr.checkAtLeast(least)
				} else if tr.checkAtLeast(least - lost); lost > 10+150/int64(impatient) {
					t.Errorf("%d tokens lost; want no more than the share of the impatient", lost)
				}
			})
		})
	}
}

func TestC10_ObedientCrowd(t *testing.T) {
	for _, nodes := range []int{1, 3} {
		t.Run(fmt.Sprint(nodes), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				limit := hybrid.PerSecond(10, 10)
				var all []*hybrid.Limiter
				for range nodes {
					all = append(all, w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{RedisTimeout: time.Second}))
				}
				tr := w.trace(limit)
				const span = 10 * time.Second
				var wg sync.WaitGroup
				for i := range 1000 {
					wg.Go(func() {
						for w.since() < span {
							d := tr.ask(all[i%nodes], "k", 1)
							if d.Allowed {
								return
							}
							if d.RetryAfter <= 0 {
								t.Errorf("refusal = %+v; want a RetryAfter", d)
								return
							}
							time.Sleep(d.RetryAfter)
						}
					})
				}
				wg.Wait()
				tr.checkAtLeast(10 + 95)
				var calls int64
				for _, l := range all {
					calls += l.Stats().Calls
				}
				if got := tr.total(); calls > 2*got {
					t.Errorf("%d calls for %d tokens; want at most 2 per token", calls, got)
				}
			})
		})
	}
}

func TestC12_CloseDuringEverything(t *testing.T) {
	for i := range 30 {
		bubble(t, func(t *testing.T, w *world) {
			line := newLine(time.Duration(i%7) * time.Millisecond)
			limits := []hybrid.Limit{hybrid.PerSecond(100, 100), hybrid.PerSecond(10, 10), {}}
			l := w.nodeOver(line, limits[0], hybrid.Options{RedisTimeout: 20 * time.Millisecond, MaxKeys: 3})
			tr := w.trace(limits[0])
			var wg sync.WaitGroup
			closed := func(err error) bool {
				if err != nil && !errors.Is(err, hybrid.ErrClosed) {
					t.Errorf("method during Close = %v; want nil or ErrClosed", err)
				}
				return err != nil
			}
			for g := range 16 {
				wg.Go(func() {
					for j := range 1000 {
						key := fmt.Sprint("k", (g+j)%5)
						var err error
						switch {
						case g < 8:
							_, err = l.Allow(context.Background(), key)
						case g < 10: // a reload
							_, err = l.AllowLimit(context.Background(), key, limits[j%3], 1)
						case g < 12:
							_, err = l.Peek(context.Background(), key)
						case g < 13:
							l.Stats()
							_, err = l.Allow(context.Background(), "k0")
						default:
							err = l.Refund(context.Background(), key, 1)
							if errors.Is(err, hybrid.ErrNotExecuted) || errors.Is(err, hybrid.ErrUnknownOutcome) || errors.Is(err, hybrid.ErrCost) {
								err = nil
							}
						}
						if closed(err) {
							return
						}
						time.Sleep(time.Duration(g+j) % 5 * time.Millisecond)
					}
				})
			}
			time.Sleep(time.Duration(i) * time.Millisecond)
			if i%3 == 0 {
				line.hang.Store(true)
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+i%50)*time.Millisecond)
			defer cancel()
			begin := time.Now()
			err := l.Close(ctx)
			if took := time.Since(begin); took > 60*time.Millisecond {
				t.Errorf("Close = %v after %v; want it within 50ms", err, took)
			}
			// A client whose context's deadline ends a call says that it timed out.
			ended := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
			if err != nil && !line.hang.Load() && !ended {
				t.Errorf("Close = %v with Redis well; want nil or its deadline", err)
			}
			if err := l.Close(context.Background()); !errors.Is(err, hybrid.ErrClosed) {
				t.Errorf("second Close = %v; want ErrClosed", err)
			}
			wg.Wait()
			if _, err := l.Allow(context.Background(), "k0"); !errors.Is(err, hybrid.ErrClosed) {
				t.Errorf("Allow after Close = %v; want ErrClosed", err)
			}
			tr.check()
		})
	}
}

func TestC13_LimitsChangeUnderLoad(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limits := [2]hybrid.Limit{hybrid.PerSecond(100, 10), hybrid.PerSecond(10, 100)}
		var inForce atomic.Int64
		l := w.nodeOver(newLine(time.Millisecond), limits[0], hybrid.Options{RedisTimeout: time.Second})
		// Either limit keeps to the larger of both.
		tr := w.trace(hybrid.PerSecond(100, 100))
		var wg sync.WaitGroup
		const span = 5 * time.Second
		wg.Go(func() {
			for w.since() < span {
				inForce.Add(1)
				time.Sleep(10 * time.Millisecond)
			}
		})
		for range 16 {
			wg.Go(func() {
				for w.since() < span {
					begin := w.since()
					d, err := l.AllowLimit(context.Background(), "k", limits[inForce.Load()%2], 1)
					if err != nil {
						t.Errorf("AllowLimit = %v; want nil", err)
					}
					tr.add(begin, d, 1)
					if d.Limit != limits[0] && d.Limit != limits[1] {
						t.Errorf("decided by %v; want one of %v", d.Limit, limits)
					}
					if d.Remaining < 0 || d.Remaining > d.Limit.Burst {
						t.Errorf("%+v: Remaining is not in 0 to the burst", d)
					}
					time.Sleep(3 * time.Millisecond)
				}
			})
		}
		wg.Wait()
		tr.checkAtLeast(50)
	})
}

func TestC16_ManyGoroutinesOneKey(t *testing.T) {
	for _, c := range []struct {
		limit hybrid.Limit
		span  time.Duration
		least int64
	}{
		// A hot key is asked for once in up to 1.1 lease periods of 250 ms.
		{hybrid.PerSecond(1000, 1000), 10 * time.Second, 1000 + 9700},
		// Too small to lease: each time the bucket is full, a round trip and an
		// arrival pass before it is asked again.
		{hybrid.PerSecond(1000, 10), 2 * time.Second, 2 * 800},
		{hybrid.PerSecond(100, 1), 4 * time.Second, 4 * 85},
	} {
		t.Run(c.limit.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				l := w.nodeOver(newLine(time.Millisecond), c.limit, hybrid.Options{RedisTimeout: time.Second})
				tr := w.trace(c.limit)
				together(64, func(g int) {
					rng := rand.New(rand.NewPCG(3, uint64(g)))
					for w.since() < c.span {
						tr.ask(l, "k", 1)
						time.Sleep(time.Duration(rng.Int64N(int64(40 * time.Millisecond))))
					}
				})
				tr.checkAtLeast(c.least)
				if s := l.Stats(); s.Failed != 0 {
					t.Errorf("Stats = %+v; want no failures", s)
				}
			})
		})
	}
}

package hybrid_test

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/lease"
)

// Time: skew, clocks that step, expiry.
//
// Cases of the group that wait for a later feature:
//
//	T01, T03       local and fallback path    fallback
//	T12            leaky bucket               leaky bucket
//	T15            spacing of a shaper        leaky bucket
//	T16            calendar periods           calendar windows
//	T19            loud start without TIME    standalone service (New makes no call)
//	T21            holds by construction: only package time is read

func TestT01_ServerClockStepsBack(t *testing.T) {
	for _, limit := range []hybrid.Limit{hybrid.PerSecond(1, 1), hybrid.PerSecond(2, 20), hybrid.PerSecond(100, 1000)} {
		t.Run(limit.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				l := w.node(limit, hybrid.Options{})
				tr := w.trace(limit)
				tr.ask(l, "k", limit.Burst)
				w.stepServer(-time.Hour)
				if got := tr.burst(l, "k", 10); got != 0 {
					t.Errorf("admitted %d at the step; want 0", got)
				}
				// A cold node must not see a gift either.
				if got := tr.burst(w.node(limit, hybrid.Options{}), "k", 10); got != 0 {
					t.Errorf("a cold node admitted %d at the step; want 0", got)
				}
				w.sleep(10 * time.Second)
				want := min(int64(10*limit.Rate), limit.Burst)
				got := tr.burst(l, "k", int(want)+10)
				if got < want-1 || got > want {
					t.Errorf("admitted %d 10s after the step; want %d", got, want)
				}
				tr.check()
			})
		})
	}
}

func TestT03_AlternatingClockMakesNoTokens(t *testing.T) {
	// The meter on the node, which is also the ideal limiter.
	level, err := lease.NewLevel(hybrid.PerSecond(1, 1))
	if err != nil {
		t.Fatal(err)
	}
	admitted := 0
	for i := range 200 {
		if level.Allow(time.Hour-time.Duration(i%2)*time.Second, 1) {
			admitted++
		}
	}
	if admitted != 1 {
		t.Errorf("100 × (t, t−1s) admitted %d; want 1", admitted)
	}

	// The server cannot tell a step from the truth: what it counts forward it
	// refills, and not more. Without forward movement there is nothing.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(1, 1)
		tr := w.trace(limit)
		for range 100 {
			tr.ask(w.node(limit, hybrid.Options{}), "k", 1)
			w.stepServer(-time.Second)
		}
		tr.checkTotal(1)
	})
}

func TestT04_TimeReadBeforeTheLock(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(400, 400)
		l := w.nodeOver(newLine(time.Millisecond), limit, hybrid.Options{RedisTimeout: time.Second})
		tr := w.trace(limit)
		// All decisions of a round fall into one round trip or two.
		for round, want := range []int64{400, 400} {
			before := tr.total()
			together(800, func(int) { tr.ask(l, "k", 1) })
			if got := tr.total() - before; got != want {
				t.Errorf("round %d: 800 at once admitted %d; want %d", round, got, want)
			}
			w.sleep(2 * time.Second)
		}
		tr.check()
	})
}

func TestT06_FailOverToAnotherClock(t *testing.T) {
	for _, step := range []time.Duration{-time.Minute, time.Minute, -24 * time.Hour, 24 * time.Hour} {
		t.Run(step.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				limit := hybrid.PerSecond(10, 20)
				a, b := w.node(limit, hybrid.Options{}), w.node(limit, hybrid.Options{})
				tr := w.trace(limit)
				tr.every(a, "k", 20*time.Millisecond, 5*time.Second) // leased, saturated
				tr.every(b, "k", 20*time.Millisecond, time.Second)
				tr.check()

				before := tr.total()
				w.stepServer(step)
				tr.burst(a, "k", 100)
				tr.burst(b, "k", 100)
				got := tr.total() - before
				if step < 0 && got > 4 { // what was leased before, at 10/s
					t.Errorf("admitted %d at a step back of %v; want no gift", got, step)
				}
				// A step forward is a refill, once, beside leases still out.
				if most := limit.Burst + 4; got > most {
					t.Errorf("admitted %d at a step of %v; want at most the burst and the leases, %d", got, step, most)
				}
				// No freeze: within two leases' lives refill goes on.
				w.sleep(2 * time.Second)
				before = tr.total()
				tr.every(a, "k", 20*time.Millisecond, 10*time.Second)
				if got := tr.total() - before; got < 95 || got > 120 {
					t.Errorf("admitted %d in the 10s after a step of %v; want 100 and what had gathered, up to 20", got, step)
				}
			})
		})
	}
}

// checkTTLs fails the test unless every key will go: buckets within most, and
// what tells the members ten beats, a minute apart, after the last.
func checkTTLs(t *testing.T, w *world, most time.Duration) {
	t.Helper()
	all := buckets(w.redis)
	for _, key := range w.redis.Keys() {
		most := most
		if !slices.Contains(all, key) {
			most = 10*time.Minute + time.Second
		}
		if ttl := w.redis.TTL(key); ttl < time.Millisecond || ttl > most {
			t.Errorf("TTL of %q = %v; want 1ms to %v", key, ttl, most)
		}
	}
}

func TestT07_EveryKeyExpires(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(1, 10)
		most := 10*time.Second + time.Second + time.Second + time.Millisecond // to fill, two leases' lives, slack
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		ctx := t.Context()
		for name, op := range map[string]func() error{
			"first hit of cost 5": func() error { tr.ask(l, "five", 5); return nil },
			"hit":                 func() error { tr.ask(l, "k", 1); return nil },
			"refused":             func() error { tr.burst(l, "k", 20); return nil },
			"peek":                func() error { _, err := l.Peek(ctx, "peek"); return err },
			"refund of nothing":   func() error { return l.Refund(ctx, "refund", 3) },
			"reset of nothing":    func() error { return l.Reset(ctx, "reset") },
			"refund":              func() error { return l.Refund(ctx, "k", 3) },
			"reset":               func() error { return l.Reset(ctx, "k") },
			"new limit": func() error {
				_, err := l.AllowLimit(ctx, "limit", hybrid.PerSecond(2, 5), 1)
				return err
			},
		} {
			if err := op(); err != nil {
				t.Errorf("%s = %v; want nil", name, err)
			}
			checkTTLs(t, w, most)
		}
		w.sleep(most)
		if keys := buckets(w.redis); len(keys) != 0 {
			t.Errorf("keys after %v = %q; want none", most, keys)
		}

		// A key planted without an expiry gets one from the next request for
		// tokens, whatever it holds and whatever the answer.
		good := "1 0 " + strconv.FormatInt(time.Now().UnixMicro(), 10) + " " + strconv.FormatInt(time.Now().UnixMicro()/500_000, 10) +
			" 0 0 0 0 0 0 0 10 1 1000000 500000"
		for i, state := range []string{good, "", "17", "garbage", strings.Replace(good, "1 0 ", "1 10000000 ", 1)} {
			for _, n := range []int64{1, 10} {
				key := fmt.Sprint("planted", i, n)
				if err := w.redis.Set(redisKey(key), state); err != nil {
					t.Fatal(err)
				}
				w.trace(limit).ask(w.node(limit, hybrid.Options{}), key, n)
				if ttl := w.redis.TTL(redisKey(key)); ttl < time.Millisecond || ttl > most {
					t.Errorf("TTL after a cost of %d on planted %q = %v; want 1ms to %v", n, state, ttl, most)
				}
			}
		}
		// Also when it lost its expiry between two refusals.
		l = w.node(limit, hybrid.Options{})
		tr = w.trace(limit)
		tr.burst(l, "lost", 20)
		w.redis.SetTTL(redisKey("lost"), 0)
		for calls := l.Stats().Calls; l.Stats().Calls == calls; w.sleep(10 * time.Millisecond) {
			tr.ask(l, "lost", 1)
		}
		checkTTLs(t, w, most)
	})
}

func TestT10_ShortTTLsRoundUp(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		for _, limit := range []hybrid.Limit{
			hybrid.PerSecond(1e4, 1), // 0.1 ms
			hybrid.PerSecond(1e12, 1), hybrid.PerSecond(1e6, 1), hybrid.PerSecond(1e4, 10),
			hybrid.PerSecond(1/0.9996, 1), hybrid.PerSecond(1/1.5, 1),
		} {
			for _, period := range []time.Duration{2 * time.Millisecond, 0} {
				l := w.node(limit, hybrid.Options{LeasePeriod: period})
				key := fmt.Sprint(limit, period)
				for range 3 {
					if _, err := l.Allow(t.Context(), key); err != nil {
						t.Errorf("%v: Allow = %v; want nil", limit, err)
					}
				}
				if s := l.Stats(); s.Failed != 0 {
					t.Errorf("%v: Stats = %+v; want no failures", limit, s)
				}
				if !w.redis.Exists(redisKey(key)) {
					t.Errorf("%v: no key after the first call", limit)
				}
			}
		}
		checkTTLs(t, w, 5*time.Second)
	})
}

func TestT12_BucketOutlivesItsRefill(t *testing.T) {
	// Three tokens, one per 15 s.
	for _, idle := range []time.Duration{time.Second, 10 * time.Second, 15*time.Second - time.Microsecond} {
		bubble(t, func(t *testing.T, w *world) {
			limit := hybrid.Every(15*time.Second, 3)
			l := w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			if got := tr.burst(l, "k", 4); got != 3 {
				t.Fatalf("burst = %d; want 3", got)
			}
			w.sleep(idle)
			if got := tr.burst(w.node(limit, hybrid.Options{}), "k", 3); got != 0 {
				t.Errorf("admitted %d on another node %v after the burst; want 0", got, idle)
			}
			tr.check()
		})
	}
	// 0.1/s, one call per 1.1 s for a minute.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(0.1, 1)
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		tr.every(l, "k", 1100*time.Millisecond, time.Minute)
		tr.checkAtLeast(5)
		if got := tr.total(); got > 7 {
			t.Errorf("admitted %d in a minute; want at most 7", got)
		}
	})
	// A full bucket with a lease out: losing it would pay the lease twice. The
	// rate is so high that the bucket is full again long before the lease ends.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(1000, 1000)
		l := w.node(limit, hybrid.Options{LeasePeriod: time.Hour})
		tr := w.trace(limit)
		tr.burst(l, "k", 400)
		dead := newLine(0)
		holder := w.nodeOver(dead, limit, hybrid.Options{})
		tr.burst(holder, "k", 50)
		dead.dead.Store(true) // neither heard of again nor given back
		for range 300 {
			if b := w.bucket("k"); b.out() > 0 {
				ttl := w.redis.TTL(redisKey("k"))
				if end := time.Duration(b.epoch+2) * time.Duration(b.ttl) * time.Microsecond; time.Duration(time.Now().UnixNano())+ttl < end {
					t.Fatalf("key goes in %v with %d tokens out until epoch %d ends", ttl, b.out(), b.epoch+1)
				}
			}
			w.sleep(10 * time.Millisecond)
			tr.ask(l, "k", 1)
		}
		tr.check()
	})
}

func TestT15_NoJumpToFullEachPeriod(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(3, 3)
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		tr.every(l, "k", 100*time.Millisecond, 10*time.Second)
		tr.checkAtLeast(32)
		if got := tr.total(); got > 33 {
			t.Errorf("admitted %d in 10s; want at most 33", got)
		}
	})
}

func TestT19_OnlyTheServerTellsTime(t *testing.T) {
	// What a node sends first for a key depends on neither its clock nor its age.
	record := func(offset, age time.Duration) (sent [][]any) {
		bubble(t, func(t *testing.T, w *world) {
			time.Sleep(offset)
			l := newLine(0)
			n := w.nodeOver(l, hybrid.PerSecond(1, 10), hybrid.Options{})
			time.Sleep(age)
			for range 20 {
				if _, err := n.Allow(t.Context(), "k"); err != nil {
					t.Fatal(err)
				}
			}
			if err := n.Refund(context.Background(), "k", 1); err != nil {
				t.Fatal(err)
			}
			for _, args := range l.commands() {
				for i, a := range args {
					n, ok := a.(int64)
					switch i - 3 {
					case 6, 9, 19: // epochs, as the server gave them
						ok = ok && n != 0 && n != -1 && n != time.Now().UnixMilli()/500
					default:
						ok = ok && (n > 1e8 || n < 0)
					}
					if ok {
						t.Errorf("argument %d of %v = %d; want nothing like a time", i, args[0], n)
					}
				}
			}
			if sent = l.commands(); len(sent) == 0 {
				t.Fatal("no command seen")
			}
		})
		return sent
	}
	young := record(0, 0)
	for _, r := range [][2]time.Duration{{0, 7 * time.Second}, {1e6 * time.Second, 0}, {math.MaxInt32 * time.Millisecond, time.Hour}} {
		old := record(r[0], r[1])
		if !reflect.DeepEqual(young[0], old[0]) {
			t.Errorf("first command of a node started %v later and %v old = %v; want %v", r[0], r[1], old[0], young[0])
		}
	}

	// A server that refuses TIME limits nothing and admits nothing.
	bubble(t, func(t *testing.T, w *world) {
		l := w.node(hybrid.Limit{Rate: 1, Burst: 10, OnFailure: hybrid.Deny}, hybrid.Options{})
		w.redis.SetError("ERR Error running script (call to f_0): @user_script:24: @user_script: 24: Unknown Redis command called from Lua script")
		d, err := l.Allow(t.Context(), "k")
		if err != nil || d.Allowed || d.Source != hybrid.SourcePolicy {
			t.Errorf("Allow without TIME = %+v, %v; want denied by policy", d, err)
		}
	})
}

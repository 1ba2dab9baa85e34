package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// Costs: more than the burst, zero, negative, refunds.
//
// Cases of the group that wait for a later feature:
//
//	K01  waiter, unlimited rule      Wait, configuration file
//	K03  the network's doors         HTTP API, Envoy service
//	K04  after the window rolled     see TestK04_LateRefund and TestK04_RefundsStayInTheirWindow
//	K06  3.7, "10", null, 1e308      HTTP API, configuration file (a cost here is an int64)

func TestK01_CostOverBurst(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(10, 10)
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		checkNever := func(n int64) {
			t.Helper()
			before := l.Stats()
			d, err := l.AllowN(t.Context(), "k", n)
			costErr, ok := errors.AsType[*hybrid.CostError](err)
			if !ok || !errors.Is(err, hybrid.ErrCost) || costErr.Cost != n || costErr.Burst != limit.Burst {
				t.Errorf("AllowN(%d) = %v; want a CostError of %d over %d", n, err, n, limit.Burst)
			}
			if d != (hybrid.Decision{}) {
				t.Errorf("AllowN(%d) = %+v; want the zero Decision, without a promise", n, d)
			}
			if after := l.Stats(); after.Calls != before.Calls || after.Spent != before.Spent {
				t.Errorf("AllowN(%d): Stats went from %+v to %+v; want nothing consumed, no call", n, before, after)
			}
		}
		for _, n := range []int64{11, 12, 1 << 40, math.MaxInt64} {
			checkNever(n) // fresh
		}
		if keys := w.redis.Keys(); len(keys) != 0 {
			t.Errorf("keys = %q; want none", keys)
		}
		if got := tr.burst(l, "k", 11); got != 10 {
			t.Errorf("burst = %d; want 10: nothing was consumed", got)
		}
		checkNever(11) // on empty
		w.sleep(10 * time.Second)
		checkNever(11) // on full again
		tr.check()

		// Burst 0: the limit refuses, whatever the cost.
		zero := w.node(hybrid.PerSecond(10, 0), hybrid.Options{})
		for _, n := range []int64{1, math.MaxInt64} {
			d, err := zero.AllowN(t.Context(), "k", n)
			if err != nil || d.Allowed || d.Source != hybrid.SourceLimit || d.RetryAfter != math.MaxInt64 {
				t.Errorf("AllowN(%d) with burst 0 = %+v, %v; want denied by the limit for ever", n, d, err)
			}
		}
		checkNoCalls(t, zero)
	})

	// A cost over the lease, up to the burst, is met as soon as it can be.
	for _, n := range []int64{60, 100} {
		bubble(t, func(t *testing.T, w *world) {
			limit := hybrid.PerSecond(100, 100)
			l, other := w.node(limit, hybrid.Options{}), w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			// Hot on both nodes: leases are out, and smaller than n.
			for range 100 {
				tr.ask(l, "k", 1)
				tr.ask(other, "k", 1)
				w.sleep(20 * time.Millisecond)
			}
			d := tr.ask(l, "k", n)
			for range 3 {
				if !d.Allowed {
					w.sleep(d.RetryAfter)
					d = tr.ask(l, "k", n)
				}
			}
			if !d.Allowed {
				t.Errorf("AllowN(%d), told thrice when to retry, = %+v; want admitted", n, d)
			}
			// Alone, the promise is exact to the microsecond.
			w.sleep(5 * time.Second)
			if d := tr.ask(l, "k", n); !d.Allowed {
				t.Errorf("AllowN(%d) on full = %+v; want admitted", n, d)
			}
			tr.keepsPromise(l, "k", n, func() hybrid.Decision {
				w.sleep(5 * time.Second)
				tr.ask(l, "k", 100)
				return tr.ask(l, "k", n)
			})
			tr.check()
		})
	}
}

func TestK03_NegativeCost(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		for _, limit := range []hybrid.Limit{hybrid.PerHour(1, 10), {}, {Burst: 5}} {
			l := w.node(limit, hybrid.Options{})
			k, err := l.Key("k")
			if err != nil {
				t.Fatal(err)
			}
			for _, n := range []int64{-1, -2, math.MinInt64} {
				for door, call := range map[string]func() (hybrid.Decision, error){
					"AllowN":     func() (hybrid.Decision, error) { return l.AllowN(t.Context(), "k", n) },
					"Key.AllowN": func() (hybrid.Decision, error) { return k.AllowN(t.Context(), n) },
					"AllowLimit": func() (hybrid.Decision, error) { return l.AllowLimit(t.Context(), "k", limit, n) },
					"Refund":     func() (hybrid.Decision, error) { return hybrid.Decision{}, l.Refund(t.Context(), "k", n) },
				} {
					d, err := call()
					costErr, ok := errors.AsType[*hybrid.CostError](err)
					if !ok || costErr.Cost != n || d.Allowed {
						t.Errorf("%v: %s(%d) = %+v, %v; want a CostError", limit, door, n, d, err)
					}
				}
			}
			if s := l.Stats(); s.Calls != 0 || s.Spent != 0 || s.Denied != 0 {
				t.Errorf("%v: Stats = %+v; want nothing changed", limit, s)
			}
		}
		// Also with a lease at hand.
		limit := hybrid.PerHour(1, 100)
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		tr.burst(l, "k", 10)
		w.sleep(time.Millisecond) // a refill may be on its way
		before := l.Stats()
		if _, err := l.AllowN(t.Context(), "k", math.MinInt64); !errors.Is(err, hybrid.ErrCost) {
			t.Errorf("AllowN(-2^63) on a lease = %v; want ErrCost", err)
		}
		if after := l.Stats(); after != before {
			t.Errorf("Stats went from %+v to %+v; want no change", before, after)
		}
	})
}

func TestK04_Refund(t *testing.T) {
	ctx := context.Background()
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerHour(1, 10)
		l, other := w.node(limit, hybrid.Options{}), w.node(limit, hybrid.Options{})
		refund := func(l *hybrid.Limiter, n int64) {
			t.Helper()
			if err := l.Refund(ctx, "k", n); err != nil {
				t.Errorf("Refund(%d) = %v; want nil", n, err)
			}
		}
		admits := func(why string, want int64) {
			t.Helper()
			var got int64
			for range 15 {
				d, err := l.Allow(ctx, "k")
				if err != nil {
					t.Fatal(err)
				}
				if d.Allowed {
					got++
				}
			}
			if got != want {
				t.Errorf("%s: admitted %d; want %d", why, got, want)
			}
		}
		refund(l, 10)
		admits("refund on a key never used", 10)
		refund(l, 1)
		admits("refund on exhausted", 1)
		refund(other, 3)
		l = other // the first would notice when its memory of the refusal ends
		admits("refund on another node", 3)
		refund(l, 7)
		refund(l, 7)
		w.sleep(time.Second) // what nodes still have to report counts as leased
		refund(l, 7)
		admits("more than was taken", 10)
		refund(l, 0)
		admits("refund of nothing", 0)
		w.sleep(10 * time.Hour)
		refund(l, 10)
		admits("refund on full", 10)
		for _, n := range []int64{11, math.MaxInt64} {
			if err := l.Refund(ctx, "k", n); !errors.Is(err, hybrid.ErrCost) {
				t.Errorf("Refund(%d) = %v; want ErrCost", n, err)
			}
		}
		if err := l.Refund(ctx, "", 1); !errors.Is(err, hybrid.ErrKey) {
			t.Errorf("Refund of no key = %v; want ErrKey", err)
		}
	})

	// The balance never passes what leases leave of the burst.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(100, 100)
		l, other := w.node(limit, hybrid.Options{}), w.node(limit, hybrid.Options{})
		for i := range 400 {
			for _, l := range []*hybrid.Limiter{l, other} {
				if _, err := l.Allow(ctx, "k"); err != nil {
					t.Fatal(err)
				}
			}
			if i%7 == 0 {
				if err := other.Refund(ctx, "k", 50); err != nil {
					t.Fatal(err)
				}
			}
			if b := w.bucket("k"); b.tokens()+b.out() > 100 {
				t.Fatalf("bucket = %+v; want balance and leases within the burst", b)
			}
			w.sleep(5 * time.Millisecond)
		}
	})

	// With Redis down it is lost, and said to be; never doubled later.
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerHour(1, 10)
		line := newLine(time.Millisecond)
		l := w.nodeOver(line, limit, hybrid.Options{})
		tr := w.trace(limit)
		tr.burst(l, "k", 12)
		line.dead.Store(true)
		if err := l.Refund(ctx, "k", 5); !errors.Is(err, hybrid.ErrNotExecuted) {
			t.Errorf("Refund with Redis down = %v; want ErrNotExecuted", err)
		}
		line.dead.Store(false)
		w.sleep(2 * time.Second) // once down it is not asked
		line.hang.Store(true)
		begin := w.since()
		if err := l.Refund(ctx, "k", 5); !errors.Is(err, hybrid.ErrUnknownOutcome) || w.since()-begin > 30*time.Millisecond {
			t.Errorf("Refund with Redis silent = %v after %v; want ErrUnknownOutcome within RedisTimeout", err, w.since()-begin)
		}
		line.hang.Store(false)
		w.sleep(2 * time.Second)
		tr.burst(l, "k", 5)
		tr.checkTotal(10)
	})
}

// A refund names no request, so one of tokens that the bucket has refilled since
// cannot be told from one of the last requests: Refund says not to. What such a
// mistake is worth is what was refunded, never more, and never more than the
// bucket holds.
func TestK04_LateRefund(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(10, 10)
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		tr.ask(l, "k", 10)
		w.sleep(10 * time.Second) // full again
		tr.ask(l, "k", 10)
		if err := l.Refund(t.Context(), "k", 10); err != nil { // of the first ten
			t.Fatal(err)
		}
		tr.burst(l, "k", 30)
		if got := tr.total(); got != 30 {
			t.Errorf("admitted %d in all; want two bursts of 10 and the 10 refunded", got)
		}
		if b := w.bucket("k"); b.tokens()+b.out() > 10 {
			t.Errorf("bucket = %+v; want no more than the burst", b)
		}
	})
}

func TestK06_CostOutOfRange(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(1e9, 1e15)
		l := w.node(limit, hybrid.Options{})
		for _, n := range []int64{1 << 31, 1<<31 + 1, 1 << 32, 1<<32 + 1, 1e15 - 1, 1e15} {
			key := fmt.Sprint(n)
			tr := w.trace(limit)
			if d := tr.ask(l, key, n); !d.Allowed || d.Remaining != 1e15-n {
				t.Errorf("AllowN(%d) = %+v; want admitted, %d remaining", n, d, int64(1e15)-n)
			}
			b := w.bucket(key)
			if got := b.tokens() + b.out(); got != 1e15-n {
				t.Errorf("after AllowN(%d) the bucket and leases hold %d; want %d", n, got, int64(1e15)-n)
			}
			if d := tr.ask(l, key, 1e15); d.Allowed {
				t.Errorf("AllowN(1e15) after AllowN(%d) = %+v; want refused", n, d)
			}
			tr.check()
		}
		for _, n := range []int64{1e15 + 1, 1<<53 - 1, 1 << 53, 1<<53 + 1, math.MaxInt64} {
			if d, err := l.AllowN(t.Context(), "big", n); !errors.Is(err, hybrid.ErrCost) || d.Allowed {
				t.Errorf("AllowN(%d) = %+v, %v; want ErrCost", n, d, err)
			}
		}
	})
}

// What is asked for, as an estimate, goes to the bucket too: it must not grow
// out of the integers that the bucket can hold, or the bucket is lost.
func TestK06_DemandOutOfRange(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(1e9, 1e15)
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		tr.ask(l, "k", limit.Burst)
		for range 20 {
			for range 1000 {
				tr.ask(l, "k", limit.Burst)
			}
			tr.ask(l, "k", 1)
			w.sleep(100 * time.Millisecond)
		}
		tr.check()
	})
}

func TestK09_LimitOne(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(1, 1)
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		if d := tr.ask(l, "k", 1); !d.Allowed || d.Remaining != 0 || d.RetryAfter != 0 || d.ResetAfter != time.Second {
			t.Errorf("first = %+v; want admitted, 0 remaining, reset in 1s", d)
		}
		tr.keepsPromise(l, "k", 1, func() hybrid.Decision {
			d := tr.ask(l, "k", 1)
			if d.Allowed || d.Remaining != 0 || d.RetryAfter != time.Second || d.ResetAfter != time.Second {
				t.Errorf("second = %+v; want refused for 1s", d)
			}
			return d
		})
		tr.checkTotal(2)
	})
}

func TestK10_FirstHitCountsOnce(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		for _, n := range []int64{1, 2, 7, 10} {
			key := fmt.Sprint("k", n)
			l := w.node(hybrid.PerHour(1, 10), hybrid.Options{})
			d, err := l.AllowN(t.Context(), key, n)
			if err != nil || !d.Allowed || d.Remaining != 10-n {
				t.Errorf("first AllowN(%d) = %+v, %v; want admitted, %d remaining", n, d, err, 10-n)
			}
			b := w.bucket(key)
			if used := 10 - b.tokens() - b.out(); used != n {
				t.Errorf("used after the first AllowN(%d) = %d; want %d", n, used, n)
			}
			if s := l.Stats(); s.Spent != n || s.Calls != 1 {
				t.Errorf("Stats = %+v; want %d spent in 1 call", s, n)
			}
			if p, err := w.node(hybrid.PerHour(1, 10), hybrid.Options{}).Peek(t.Context(), key); err != nil || p.Remaining != b.tokens() {
				t.Errorf("Peek of another node = %+v, %v; want %d remaining", p, err, b.tokens())
			}
		}
	})
}

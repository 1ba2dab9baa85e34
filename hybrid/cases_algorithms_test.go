package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lua"
)

// The cases about numbers, time and cost that apply to algorithms with windows.

var windowed = []hybrid.Algorithm{hybrid.FixedWindow, hybrid.SlidingLog, hybrid.SlidingCounter}

// eachWindowed runs f in a bubble for each algorithm, at the beginning of a window
// of a minute.
func eachWindowed(t *testing.T, f func(t *testing.T, w *world, a hybrid.Algorithm)) {
	t.Helper()
	for _, a := range windowed {
		t.Run(a.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(time.Minute)))
				f(t, w, a)
			})
		})
	}
}

// admits returns how many of n requests of cost 1 at one instant are admitted.
func admits(t *testing.T, l *hybrid.Limiter, key string, n int) (admitted int64) {
	t.Helper()
	for range n {
		if take(t, l, key, 1) {
			admitted++
		}
	}
	return admitted
}

func take(t *testing.T, l *hybrid.Limiter, key string, n int64) bool {
	t.Helper()
	d, err := l.AllowN(context.Background(), key, n)
	if err != nil {
		t.Fatalf("AllowN(%q, %d) = %v; want a decision", key, n, err)
	}
	return d.Allowed
}

func TestN01_WindowsOfNothing(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		for _, limit := range []hybrid.Limit{{Burst: 5, Algorithm: a}, {Rate: 5, Algorithm: a}} {
			l := w.node(limit, hybrid.Options{})
			if got := admits(t, l, "k", 10); got != 0 {
				t.Errorf("%v admitted %d; want 0", limit, got)
			}
			checkNoCalls(t, l)
		}
		checkRefusedLimit(t, w, hybrid.Limit{Rate: -1, Burst: 5, Algorithm: a}, "Rate")
	})
}

func TestN07_RefusalKeepsTheWindow(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		l := w.node(hybrid.PerWindow(1, time.Second, a), hybrid.Options{})
		got := int64(0)
		for range 100 {
			got += admits(t, l, "k", 1)
			if _, err := l.Peek(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
			w.sleep(600 * time.Millisecond)
		}
		// Every second call, and in a log every second one too; to a counter of one the
		// window before counts as long as it has any weight, so every third or fourth.
		least := int64(49)
		if a == hybrid.SlidingCounter {
			least = 25
		}
		if got < least || got > 61 {
			t.Errorf("admitted %d in 60 s of one a second; want %d to 61", got, least)
		}
	})
}

func TestN12_WindowsOutOfRange(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		checkRefusedLimit(t, w, hybrid.PerWindow(10, 367*24*time.Hour, a), "Burst/Rate")
		checkRefusedLimit(t, w, hybrid.PerWindow(10, 999*time.Microsecond, a), "Burst/Rate")
		for _, limit := range []hybrid.Limit{hybrid.PerWindow(1000, 366*24*time.Hour, a), hybrid.PerWindow(3, time.Millisecond, a), {Rate: 1e12, Burst: 1e15, Algorithm: a}} {
			l := w.node(limit, hybrid.Options{})
			if !take(t, l, limit.String(), 1) {
				t.Errorf("%v: denied; want it admitted", limit)
			}
		}
		checkTTLs(t, w, 3*366*24*time.Hour)
	})
}

func TestN13_N15_WindowsBankNothing(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		l := w.node(hybrid.PerWindow(5, time.Minute, a), hybrid.Options{})
		for _, idle := range []time.Duration{0, 2 * time.Minute, 12 * time.Hour, 400 * 24 * time.Hour} {
			w.sleep(idle)
			if got := admits(t, l, "k", 20); got != 5 {
				t.Errorf("admitted %d after %v idle; want 5", got, idle)
			}
		}
	})
}

func TestN16_WindowsHaveNoExtraToken(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		l := w.node(hybrid.PerWindow(5, time.Minute, a), hybrid.Options{})
		if _, err := l.AllowN(t.Context(), "k", 6); !errors.Is(err, hybrid.ErrCost) {
			t.Errorf("AllowN(6) = %v; want ErrCost", err)
		}
		if !take(t, l, "k", 5) || take(t, l, "k", 1) {
			t.Error("want 5 admitted and no more")
		}
	})
}

func TestN18_CounterKeepsLowLimits(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		l := w.node(hybrid.PerWindow(1, time.Minute, hybrid.SlidingCounter), hybrid.Options{})
		time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(time.Minute - 100*time.Millisecond)))
		if !take(t, l, "k", 1) {
			t.Fatal("denied at 59.9 s; want it admitted")
		}
		w.sleep(200 * time.Millisecond)
		if take(t, l, "k", 1) {
			t.Error("admitted at 60.1 s; want it denied: 0.998 + 1 > 1")
		}
	})
}

func TestN19_LogWithMixedCosts(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		l := w.node(hybrid.PerWindow(10, time.Minute, hybrid.SlidingLog), hybrid.Options{})
		ask := func(n int64, want bool) {
			t.Helper()
			if got := take(t, l, "k", n); got != want {
				t.Errorf("a cost of %d: admitted = %v; want %v", n, got, want)
			}
		}
		ask(8, true)
		w.sleep(time.Second)
		ask(5, false)
		ask(2, true)
		ask(1, false)
		w.sleep(59 * time.Second)
		ask(8, true)
		ask(1, false)
	})
}

func TestT01_T06_WindowsWhenTheServerClockSteps(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		limit := hybrid.PerWindow(5, 10*time.Second, a)
		for _, step := range []time.Duration{-time.Minute, -time.Hour} {
			key := step.String()
			admits(t, w.node(limit, hybrid.Options{}), key, 10)
			w.stepServer(step)
			if got := admits(t, w.node(limit, hybrid.Options{}), key, 10); got != 0 {
				t.Errorf("admitted %d at a step of %v; want no gift", got, step)
			}
			w.sleep(20 * time.Second)
			if got := admits(t, w.node(limit, hybrid.Options{}), key, 10); got != 5 {
				t.Errorf("admitted %d after two windows; want 5", got)
			}
			w.stepServer(-2 * step)
			if got := admits(t, w.node(limit, hybrid.Options{}), key, 20); got > 5 {
				t.Errorf("admitted %d at a step of %v; want at most 5", got, -2*step)
			}
		}
	})
}

func TestT07_T10_EveryWindowExpires(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		for _, window := range []time.Duration{time.Millisecond, 999600 * time.Microsecond, 1500 * time.Millisecond} {
			l := w.node(hybrid.PerWindow(5, window, a), hybrid.Options{Prefix: window.String()})
			take(t, l, "five", 5)
			admits(t, l, "k", 20)
			if err := errors.Join(l.Refund(t.Context(), "refund", 3), l.Reset(t.Context(), "reset")); err != nil {
				t.Error(err)
			}
			most := 2*window + 2*time.Second + 2*time.Millisecond
			for _, key := range w.redis.Keys() {
				if ttl := w.redis.TTL(key); !strings.Contains(key, "{nodes}") && (ttl < time.Millisecond || ttl > most) {
					t.Errorf("TTL of %q = %v; want 1ms to %v", key, ttl, most)
				}
			}
		}
		w.sleep(10 * time.Second)
		for _, key := range w.redis.Keys() {
			if !strings.Contains(key, "{nodes}") {
				t.Errorf("key %q is left; want none", key)
			}
		}
	})
}

func TestT09_CounterFadesToTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(time.Minute)))
		l := w.node(hybrid.PerWindow(60, time.Minute, hybrid.SlidingCounter), hybrid.Options{})
		if !take(t, l, "k", 60) {
			t.Fatal("denied; want the burst")
		}
		w.sleep(time.Minute)
		for _, c := range []struct {
			after time.Duration
			want  int64
		}{{10 * time.Second, 10}, {40 * time.Second, 40}, {9 * time.Second, 9}, {time.Second, 1}} {
			w.sleep(c.after)
			if got := admits(t, w.node(hybrid.PerWindow(60, time.Minute, hybrid.SlidingCounter), hybrid.Options{}), "k", 80); got != c.want {
				t.Errorf("admitted %d after %v more; want %d", got, c.after, c.want)
			}
		}
	})
}

func TestT12_WindowOutlivesItsUse(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		l := w.node(hybrid.PerWindow(3, 45*time.Second, a), hybrid.Options{})
		time.Sleep(time.Until(time.Now().Truncate(45 * time.Second).Add(45 * time.Second)))
		admits(t, l, "k", 3)
		w.sleep(44 * time.Second)
		if got := admits(t, w.node(hybrid.PerWindow(3, 45*time.Second, a), hybrid.Options{}), "k", 3); got != 0 {
			t.Errorf("admitted %d in the same window; want 0", got)
		}
	})
}

func TestT13_EdgeOfTheLog(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerWindow(2, time.Second, hybrid.SlidingLog)
		l := w.node(limit, hybrid.Options{})
		if got := admits(t, l, "k", 3); got != 2 {
			t.Errorf("admitted %d; want 2", got)
		}
		for _, c := range []struct {
			after time.Duration
			want  int64
		}{{999 * time.Millisecond, 0}, {time.Millisecond, 2}, {time.Millisecond, 0}} {
			w.sleep(c.after)
			if got := admits(t, w.node(limit, hybrid.Options{}), "k", 3); got != c.want {
				t.Errorf("admitted %d after %v more; want %d: a window does not hold its beginning", got, c.after, c.want)
			}
		}
	})
}

func TestT18_LogTellsWhichEntryFrees(t *testing.T) {
	store := lua.NewStore(redistest.Start(t).Client(t), lua.Options{})
	ask := func(limit hybrid.Limit) lease.Grant {
		t.Helper()
		a := store.Acquire(t.Context(), []lease.Call{{Key: "k", Limit: limit, TTL: time.Second, LastEpoch: -1, Need: 1, Bound: 1, Want: 1}})[0]
		if a.Err != nil {
			t.Fatal(a.Err)
		}
		return a.Grant
	}
	limit := hybrid.PerWindow(3, 600*time.Millisecond, hybrid.SlidingLog)
	began := time.Now()
	for range 3 {
		ask(limit)
		time.Sleep(100 * time.Millisecond)
	}
	// The oldest frees a place of three, the newest the place of one.
	near := func(what string, got, entry time.Duration) {
		t.Helper()
		want := entry + 600*time.Millisecond - time.Since(began)
		if got > want+90*time.Millisecond || got < want-5*time.Millisecond {
			t.Errorf("%s = %v; want about %v", what, got, want)
		}
	}
	near("retry after, of 3", ask(limit).RetryAfter, 0)
	near("retry after, of 1", ask(hybrid.PerWindow(1, 600*time.Millisecond, hybrid.SlidingLog)).RetryAfter, 200*time.Millisecond)
}

func TestK04_RefundsStayInTheirWindow(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		limit := hybrid.PerWindow(10, time.Minute, a)
		l := w.node(limit, hybrid.Options{})
		for range 10 { // slowly: a refund is cut to what outstanding leases leave
			take(t, l, "k", 1)
			w.sleep(time.Second)
		}
		if err := l.Refund(t.Context(), "k", 4); err != nil {
			t.Fatal(err)
		}
		if got := admits(t, l, "k", 10); got != 4 {
			t.Errorf("admitted %d after a refund of 4; want 4", got)
		}
		if err := l.Refund(t.Context(), "k", 11); !errors.Is(err, hybrid.ErrCost) {
			t.Errorf("Refund(11) = %v; want ErrCost", err)
		}
		if a != hybrid.FixedWindow {
			return
		}
		// Another node uses the next window; what this one had is of the one before.
		w.sleep(time.Minute)
		other := w.node(limit, hybrid.Options{})
		admits(t, other, "k", 10)
		if err := l.Refund(t.Context(), "k", 10); err != nil {
			t.Fatal(err)
		}
		if got := admits(t, w.node(limit, hybrid.Options{}), "k", 10); got != 0 {
			t.Errorf("admitted %d by a refund of the window before; want 0", got)
		}
	})
}

func TestK09_K10_WindowsCountOnce(t *testing.T) {
	eachWindowed(t, func(t *testing.T, w *world, a hybrid.Algorithm) {
		l := w.node(hybrid.PerWindow(1, time.Minute, a), hybrid.Options{})
		d, err := l.Allow(t.Context(), "k")
		if err != nil || !d.Allowed || d.Remaining != 0 {
			t.Errorf("first Allow = %+v, %v; want it admitted and nothing left", d, err)
		}
		if d, err = l.Allow(t.Context(), "k"); err != nil || d.Allowed || d.RetryAfter <= 0 || d.RetryAfter > 2*time.Minute || d.ResetAfter < d.RetryAfter {
			t.Errorf("second Allow = %+v, %v; want it denied for a while", d, err)
		}
		l = w.node(hybrid.PerWindow(100, time.Minute, a), hybrid.Options{})
		take(t, l, "hundred", 1)
		if d, err := w.node(hybrid.PerWindow(100, time.Minute, a), hybrid.Options{}).Peek(t.Context(), "hundred"); err != nil || d.Remaining != 99 {
			t.Errorf("Peek = %+v, %v; want 99 left", d, err)
		}
	})
}

// What Redis fails to decide the share does, and Redis is charged with it.
func TestWindowsThroughAnOutage(t *testing.T) {
	server := redistest.Start(t)
	for _, a := range windowed {
		t.Run(a.String(), func(t *testing.T) {
			proxy := redistest.NewProxy(t, server.Addr())
			limit := hybrid.PerWindow(100, time.Hour, a)
			l, err := hybrid.New(proxy.Client(t), limit, hybrid.Options{RedisTimeout: 200 * time.Millisecond, Prefix: fmt.Sprint(a)})
			if err != nil {
				t.Fatal(err)
			}
			if got := admits(t, l, "k", 40); got != 40 {
				t.Fatalf("admitted %d; want 40", got)
			}
			proxy.Cut()
			local := admits(t, l, "k", 200)
			if s := l.Stats(); local > 62 || local == 0 || s.Fallback.Admitted == 0 {
				t.Errorf("admitted %d in an outage with 60 left: want some, and no more: %+v", local, s.Fallback)
			}
			proxy.Heal()
			for end := time.Now().Add(20 * time.Second); l.Stats().Fallback.Owed > 0 && time.Now().Before(end); {
				take(t, l, "k", 1)
				time.Sleep(20 * time.Millisecond)
			}
			total := 40 + local + admits(t, l, "k", 200)
			if total > 104 {
				t.Errorf("admitted %d in all in one window; want about 100", total)
			}
			l.Close(t.Context())
		})
	}
}

package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lua"
)

// Numbers: overflow, precision, fractions, zero, negative, infinite, huge.
//
// Cases of the group that wait for a later feature:
//
//	N01, N03  local and fallback path        fallback
//	N03       YAML, JSON, AIMD               configuration file, adaptive limits
//	N10       HTTP headers, RLS reply        middleware, Envoy service

// checkNoCalls fails the test if l talked to Redis or blamed it.
func checkNoCalls(t *testing.T, l *hybrid.Limiter) {
	t.Helper()
	if s := l.Stats(); s.Calls != 0 || s.Failed != 0 {
		t.Errorf("Stats = %+v; want no calls to Redis and no failures", s)
	}
}

// checkRefusedLimit fails the test unless every door refuses limit, with an
// error that names field.
func checkRefusedLimit(t *testing.T, w *world, limit hybrid.Limit, field string) {
	t.Helper()
	check := func(door string, d hybrid.Decision, err error) {
		t.Helper()
		limitErr, ok := errors.AsType[*hybrid.LimitError](err)
		if !ok || !errors.Is(err, hybrid.ErrLimit) {
			t.Errorf("%s with %v = %v; want a LimitError", door, limit, err)
			return
		}
		if limitErr.Field != field {
			t.Errorf("%s with %v = %v; want it to name %s", door, limit, err, field)
		}
		if d.Allowed {
			t.Errorf("%s with %v admitted", door, limit)
		}
	}
	_, err := hybrid.New(w.rdb, limit, hybrid.Options{})
	check("New", hybrid.Decision{}, err)

	l := w.node(hybrid.LimitFunc(func(string) hybrid.Limit { return limit }), hybrid.Options{})
	d, err := l.Allow(t.Context(), "k")
	check("Allow of a LimitFunc", d, err)
	_, err = l.Key("k")
	check("Key of a LimitFunc", hybrid.Decision{}, err)
	checkNoCalls(t, l)

	l = w.node(hybrid.PerSecond(1, 1), hybrid.Options{})
	d, err = l.AllowLimit(t.Context(), "k", limit, 1)
	check("AllowLimit", d, err)
	checkNoCalls(t, l)
}

func TestN01_ZeroAndNegativeLimits(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		for _, limit := range []hybrid.Limit{{Rate: -1}, {Rate: -1, Burst: 5}, {Rate: -1e-300, Burst: 5}} {
			checkRefusedLimit(t, w, limit, "Rate")
		}
		for _, limit := range []hybrid.Limit{{Rate: 0, Burst: -1}, {Rate: 5, Burst: -1}} {
			checkRefusedLimit(t, w, limit, "Burst")
		}

		// Zero denies everything, at every door, without a call.
		negativeZero := math.Copysign(0, -1)
		for _, limit := range []hybrid.Limit{{}, {Burst: 5}, {Rate: negativeZero, Burst: 5}, {Rate: negativeZero}, {Rate: 5}} {
			fixed := w.node(limit, hybrid.Options{})
			dynamic := w.node(hybrid.LimitFunc(func(string) hybrid.Limit { return limit }), hybrid.Options{})
			other := w.node(hybrid.PerSecond(1, 1), hybrid.Options{})
			handle, err := fixed.Key("h")
			if err != nil {
				t.Fatalf("Key with %v = %v; want nil", limit, err)
			}
			for door, allow := range map[string]func() (hybrid.Decision, error){
				"Allow":                func() (hybrid.Decision, error) { return fixed.Allow(t.Context(), "k") },
				"Peek":                 func() (hybrid.Decision, error) { return fixed.Peek(t.Context(), "k") },
				"Key.Allow":            func() (hybrid.Decision, error) { return handle.Allow(t.Context()) },
				"Allow of a LimitFunc": func() (hybrid.Decision, error) { return dynamic.Allow(t.Context(), "k") },
				"AllowLimit":           func() (hybrid.Decision, error) { return other.AllowLimit(t.Context(), "k", limit, 1) },
			} {
				for i := range 10 {
					d, err := allow()
					if err != nil || d.Allowed || d.Source != hybrid.SourceLimit || d.RetryAfter != math.MaxInt64 || d.Remaining != 0 {
						t.Fatalf("call %d: %s with %v = %+v, %v; want denied by the limit for ever", i, door, limit, d, err)
					}
				}
			}
			for _, l := range []*hybrid.Limiter{fixed, dynamic, other} {
				checkNoCalls(t, l)
			}
		}
		if keys := w.redis.Keys(); len(keys) != 0 {
			t.Errorf("keys in Redis = %q; want none", keys)
		}
	})
}

func TestN03_NotFiniteIsRefused(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		nan, inf := math.NaN(), math.Inf(1)
		for _, limit := range []hybrid.Limit{
			hybrid.PerSecond(nan, 10), hybrid.PerSecond(inf, 10), hybrid.PerSecond(-inf, 10),
			hybrid.PerMinute(nan, 10), hybrid.PerHour(inf, 10),
			hybrid.Every(0, 10), hybrid.Every(-1, 10),
			{Rate: nan},
			{Rate: inf},
		} {
			checkRefusedLimit(t, w, limit, "Rate")
		}

		// A stored number that is none counts as corrupt: a fresh bucket, once.
		limit := hybrid.PerHour(1, 10)
		for i, field := range []string{"nan", "NaN", "-nan", "inf", "-inf", "1e999", "1e308", "0x1p9"} {
			for _, state := range []string{
				"1 " + field + " 946684800000000 1893369600 0 0 0 0 0 0 0 10 1 3600000000 500000",
				"1 0 " + field + " 1893369600 0 0 0 0 0 0 0 10 1 3600000000 500000",
				"1 0 946684800000000 1893369600 0 0 0 0 0 0 0 " + field + " 1 3600000000 500000",
				"1 0 946684800000000 1893369600 0 0 0 0 0 0 0 10 " + field + " 3600000000 500000",
			} {
				key := fmt.Sprintf("k%d", i)
				if err := w.redis.Set(redisKey(key), state); err != nil {
					t.Fatal(err)
				}
				l := w.node(limit, hybrid.Options{})
				tr := w.trace(limit)
				tr.burst(l, key, 25)
				tr.checkTotal(10)
				if s := l.Stats(); s.Failed != 0 {
					t.Errorf("state %q: Stats = %+v; want no failures", state, s)
				}
				w.redis.Del(redisKey(key))
			}
		}
	})
}

func TestN04_HugeLimitsAreRefusedOrExact(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		for _, rate := range []float64{1 << 62, 1e18, math.Nextafter(1e12, 2e12), math.MaxFloat64} {
			checkRefusedLimit(t, w, hybrid.PerSecond(rate, 1), "Rate")
			checkRefusedLimit(t, w, hybrid.PerSecond(rate, int64(min(rate, 1<<62))), "Rate")
		}
		// A burst derived by somebody's multiplication may have wrapped.
		wrapped := int64(math.MaxInt64)
		wrapped *= 2
		for _, burst := range []int64{math.MinInt64, wrapped, 1e15 + 1, 1 << 62, math.MaxInt64} {
			checkRefusedLimit(t, w, hybrid.PerSecond(1e9, burst), "Burst")
		}
		for _, limit := range []hybrid.Limit{hybrid.PerSecond(1e12, 1e15), hybrid.PerSecond(1e12, 1), hybrid.PerSecond(1e6, 1e15)} {
			l := w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			key := limit.String()
			if d := tr.ask(l, key, 1); !d.Allowed || d.Remaining < 0 || d.Remaining >= limit.Burst || d.ResetAfter < 0 {
				t.Errorf("%v: Allow = %+v; want admitted, Remaining and ResetAfter in range", limit, d)
			}
			tr.ask(l, key, limit.Burst)
			tr.ask(l, key, limit.Burst-1)
			tr.check()
		}
	})
}

func TestN06_SlowRateRefills(t *testing.T) {
	for _, every := range []time.Duration{time.Millisecond, 10 * time.Millisecond, 100 * time.Millisecond, 333 * time.Millisecond} {
		t.Run(every.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				limit := hybrid.PerSecond(5, 5)
				l := w.node(limit, hybrid.Options{})
				tr := w.trace(limit)
				if got := tr.burst(l, "k", 6); got != 5 {
					t.Fatalf("burst admitted %d; want 5", got)
				}
				n := tr.every(l, "k", every, 10*time.Second)
				tr.check()
				// A hot key is asked for once in up to 1.1 lease periods of 250 ms: up
				// to 1.4 tokens may still be in the bucket.
				if n < min(48, int64(10*time.Second/every)-1) || n > 51 {
					t.Errorf("asked every %v for 10s: admitted %d; want 48 to 51", every, n)
				}
			})
		})
	}
	t.Run("a third", func(t *testing.T) {
		bubble(t, func(t *testing.T, w *world) {
			limit := hybrid.PerSecond(1.0/3, 1)
			l := w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			tr.burst(l, "k", 2)
			n := tr.every(l, "k", time.Second, time.Minute)
			tr.check()
			if n < 19 || n > 21 {
				t.Errorf("asked every second for a minute: admitted %d; want 20 ± 1", n)
			}
		})
	})
}

func TestN07_RefusalKeepsRefillBase(t *testing.T) {
	for _, peeks := range []int{0, 3} {
		t.Run(fmt.Sprintf("%d peeks", peeks), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				limit := hybrid.PerSecond(1, 1)
				l := w.node(limit, hybrid.Options{})
				tr := w.trace(limit)
				const interval = 600 * time.Millisecond
				for i := range int(time.Minute / interval) {
					if d := tr.ask(l, "k", 1); d.Allowed != (i%2 == 0) {
						t.Fatalf("call %d = %+v; want every second one admitted", i, d)
					}
					for range peeks {
						w.sleep(interval / time.Duration(peeks+1))
						if _, err := l.Peek(t.Context(), "k"); err != nil {
							t.Fatal(err)
						}
					}
					w.sleep(time.Duration(i+1)*interval - w.since())
				}
				tr.checkTotal(50)
			})
		})
	}
}

// Real time and a real server: miniredis prints more digits than Redis does.
func TestN09_TimestampsKeepTheirDigits(t *testing.T) {
	server := redistest.Start(t)
	rdb := server.Client(t)
	store := lua.NewStore(rdb, lua.Options{Timeout: 2 * time.Second})
	limit := hybrid.PerSecond(1e6, 10)
	call := []lease.Call{{Key: "k", Limit: limit, TTL: time.Millisecond, LastEpoch: -1, Need: 1, Bound: 1, Want: 1, Share: lease.ShareNone}}
	var before bucket
	refilled := int64(0)
	for i := range 10_000 {
		answer := store.Acquire(t.Context(), call)[0]
		if answer.Err != nil {
			t.Fatal(answer.Err)
		}
		state, err := rdb.Get(t.Context(), redisKey("k")).Result()
		if err != nil {
			t.Fatal(err)
		}
		after, err := parseBucket(state)
		if err != nil {
			t.Fatal(err)
		}
		if len(strconv.FormatInt(after.at, 10)) != 16 || after.count != 1 || after.perUS != 1 {
			t.Fatalf("call %d: state %q; want a base of 16 digits and one token per microsecond", i, state)
		}
		if i > 0 {
			// One token a microsecond, one spent by each call: an exact model.
			want := min(before.units+after.at-before.at, 10) - answer.Grant.Tokens
			if after.units != want {
				t.Fatalf("call %d: %d tokens %dµs after %d; want %d", i, after.units, after.at-before.at, before.units, want)
			}
			refilled += after.at - before.at
		}
		before = after
	}
	if now := time.Now().UnixMicro(); before.at > now || before.at < now-refilled-int64(10*time.Second/time.Microsecond) {
		t.Errorf("base = %d; want about %d", before.at, now)
	}
}

func TestN10_ExactDigits(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		for _, burst := range []int64{100000000, 1000000, 999999999999999} {
			limit := hybrid.PerSecond(1e9, burst)
			l := w.node(limit, hybrid.Options{})
			key := strconv.FormatInt(burst, 10)
			d, err := l.Allow(t.Context(), key)
			if err != nil || !d.Allowed || d.Limit != limit || d.Remaining != burst-1 {
				t.Errorf("Allow = %+v, %v; want admitted by %d, %d remaining", d, err, burst, burst-1)
			}
			state, err := w.redis.Get(redisKey(key))
			if err != nil {
				t.Fatal(err)
			}
			b := w.bucket(key)
			if strings.ContainsAny(state, "eE.") || b.burst != burst || b.tokens()+b.out() != burst-1 {
				t.Errorf("state = %q; want exact integers, burst %d less 1", state, burst)
			}
			if s := limit.String(); strings.Contains(s, "e+") || !strings.Contains(s, "1000000000/s") || !strings.Contains(s, key) {
				t.Errorf("String = %q; want exact digits of 1000000000 and %d", s, burst)
			}
			_, err = l.AllowN(t.Context(), key, burst+1)
			if err == nil || !strings.Contains(err.Error(), strconv.FormatInt(burst+1, 10)) {
				t.Errorf("AllowN over the burst = %v; want an error with the digits of %d", err, burst+1)
			}
		}
	})
}

func TestN12_LongPeriodsSaturate(t *testing.T) {
	const (
		day  = 24 * time.Hour
		year = 365 * day
	)
	bubble(t, func(t *testing.T, w *world) {
		for _, limit := range []hybrid.Limit{
			{Rate: 1e-9, Burst: 1000},                           // 31,700 years
			{Rate: 1 / (300 * year.Hours() * 3600), Burst: 1},   // 300 years
			{Rate: 1 / (30 * day.Seconds()), Burst: 1 << 31},    // a month × 2^31
			{Rate: 1 / (30 * day.Seconds()), Burst: 1e15},       // a month × 1e15
			{Rate: math.SmallestNonzeroFloat64, Burst: 1},       // longer than anything
			{Rate: 1, Burst: 1e15}, {Rate: 1e-300, Burst: 1e15}, // 31 million years and more
		} {
			checkRefusedLimit(t, w, limit, "Burst/Rate")
		}
		for _, limit := range []hybrid.Limit{
			{Rate: 1 / (30 * day.Seconds()), Burst: 1000}, // one a month, 83 years to fill
			{Rate: 1e-9, Burst: 1},
			{Rate: 1e-9, Burst: 8},        // 253 years to fill
			{Rate: 1, Burst: 1<<31 + 1},   // 68 years
			{Rate: 1e6, Burst: 1<<31 + 1}, // C·W over 2^31 µs
			{Rate: 1e9, Burst: 1e15},
			{Rate: 1e12, Burst: 1e6}, // per_us·C at its bounds
		} {
			l := w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			key := limit.String()
			for n := limit.Burst; n > 0; n /= 2 {
				tr.ask(l, key, n)
			}
			d := tr.ask(l, key, limit.Burst)
			tr.check()
			if d.Allowed || d.RetryAfter <= 0 || d.ResetAfter < d.RetryAfter || d.RetryAfter > 286*year {
				t.Errorf("%v: refusal = %+v; want 0 < RetryAfter <= ResetAfter", limit, d)
			}
			fill := time.Duration(float64(limit.Burst) / limit.Rate * 1e9)
			if ttl := w.redis.TTL(redisKey(key)); ttl < fill || ttl > fill+fill/1000+3*time.Second {
				t.Errorf("%v: TTL = %v; want the time to fill of %v and little more", limit, ttl, fill)
			}
		}
	})
}

func TestN13_LongIdle(t *testing.T) {
	const year = 365 * 24 * time.Hour
	limit := hybrid.PerSecond(1e6, 1e6)
	for _, idle := range []time.Duration{12 * time.Hour, year, 200 * year} {
		for _, keep := range []bool{true, false} {
			t.Run(fmt.Sprintf("%v/keep=%t", idle, keep), func(t *testing.T) {
				bubble(t, func(t *testing.T, w *world) {
					w.redis.ClockTTL(!keep) // kept, the state itself has to bear it
					l := w.node(limit, hybrid.Options{})
					tr := w.trace(limit)
					tr.ask(l, "k", limit.Burst)
					w.sleep(idle)
					for _, n := range []int64{1, limit.Burst - 1} {
						if d := tr.ask(l, "k", n); !d.Allowed {
							t.Errorf("AllowN(%d) after %v = %+v; want admitted", n, idle, d)
						}
					}
					if d := tr.ask(l, "k", limit.Burst); d.Allowed {
						t.Errorf("second burst after %v = %+v; want refused", idle, d)
					}
					tr.check()
				})
			})
		}
	}
	// Fake time ends in 2262; the server's clock can start earlier.
	t.Run("292 years", func(t *testing.T) {
		bubble(t, func(t *testing.T, w *world) {
			w.redis.ClockTTL(false)
			w.stepServer(time.Unix(1, 0).Sub(w.start))
			l := w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			tr.ask(l, "k", limit.Burst)
			w.sleep(time.Minute)
			w.stepServer(math.MaxInt64 - 31*year)
			if d := tr.ask(l, "k", limit.Burst); !d.Allowed {
				t.Errorf("AllowN(burst) after 292 years = %+v; want admitted", d)
			}
		})
	})
}

func TestN15_IdleBanksNoMoreThanBurst(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		for _, limit := range []hybrid.Limit{hybrid.PerSecond(1, 1), hybrid.PerSecond(1, 5), hybrid.PerSecond(100, 40)} {
			l := w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			key := limit.String()
			for _, idle := range []time.Duration{0, 30 * time.Second, time.Hour} {
				w.sleep(idle)
				if got := tr.burst(l, key, 100); got != limit.Burst {
					t.Errorf("%v: burst(100) after %v idle admitted %d; want %d", limit, idle, got, limit.Burst)
				}
			}
			tr.check()
			w.sleep(30 * time.Second)
			d, err := l.AllowN(t.Context(), key, limit.Burst+1)
			if !errors.Is(err, hybrid.ErrCost) || d.Allowed {
				t.Errorf("%v: AllowN(burst+1) after idle = %+v, %v; want ErrCost", limit, d, err)
			}
		}
	})
}

func TestN16_NoExtraTokenAfterIdle(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerSecond(5, 5)
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		if got := tr.burst(l, "k", 6); got != 5 {
			t.Errorf("burst(6) = %d; want 5", got)
		}
		w.sleep(2 * time.Second)
		if got := tr.burst(l, "k", 7); got != 5 {
			t.Errorf("burst(7) after idle = %d; want 5", got)
		}
		tr.check()

		if d := tr.ask(l, "fresh", 5); !d.Allowed || d.Remaining != 0 {
			t.Errorf("AllowN(5) = %+v; want admitted, 0 remaining", d)
		}
		for range 3 {
			var costErr *hybrid.CostError
			d, err := l.AllowN(t.Context(), "fresh6", 6)
			if !errors.As(err, &costErr) || costErr.Cost != 6 || costErr.Burst != 5 || d.Allowed {
				t.Errorf("AllowN(6) = %+v, %v; want a CostError of 6 over 5", d, err)
			}
			w.sleep(time.Hour)
		}
	})
}

func TestN21_BackOffSaturates(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		l := newLine(0)
		n := w.nodeOver(l, hybrid.Limit{Rate: 1, Burst: 1, OnFailure: hybrid.Deny}, hybrid.Options{})
		w.redis.SetError("LOADING Redis is loading the dataset in memory")
		ask := func() {
			if d, err := n.Allow(context.Background(), "k"); err != nil || d.Allowed || d.RetryAfter <= 0 {
				t.Fatalf("Allow at %v = %+v, %v; want denied for a while", w.since(), d, err)
			}
		}
		// More failures in a row than a shift by their number could bear.
		var last int64
		for range 20 {
			for range 100 {
				ask()
				w.sleep(100 * time.Millisecond)
			}
			calls := l.calls.Load()
			// The first ten seconds begin with pauses of 25 ms.
			if per10s := calls - last; per10s < 13 || per10s > 20 && last > 0 || per10s > 25 {
				t.Errorf("calls in 10s at %v = %d; want one each 0.5s to 0.75s", w.since(), per10s)
			}
			last = calls
		}
		if last < 100 {
			t.Errorf("only %d calls failed; want 100", last)
		}
		// It ends with the fault.
		w.redis.SetError("")
		w.sleep(1751 * time.Millisecond) // a pause, and a second to ramp up
		if d, err := n.Allow(t.Context(), "k"); err != nil || !d.Allowed {
			t.Errorf("Allow after the fault = %+v, %v; want admitted", d, err)
		}
	})
}

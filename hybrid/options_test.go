package hybrid_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// TestOptionsRanges holds every field to its documented range, both sides of
// each bound, and every message to the field's name, value and range.
func TestOptionsRanges(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"}) // New makes no call
	defer rdb.Close()
	for _, c := range []struct {
		field string
		good  []hybrid.Options
		bad   map[string]hybrid.Options // by the value as the message shows it
		want  string
	}{
		{
			"Prefix",
			[]hybrid.Options{{Prefix: "p"}, {Prefix: strings.Repeat("p", 256)}},
			map[string]hybrid.Options{"257": {Prefix: strings.Repeat("p", 257)}},
			"at most 256",
		},
		{
			"LeasePeriod",
			[]hybrid.Options{{LeasePeriod: 2 * time.Millisecond}, {LeasePeriod: time.Hour}},
			map[string]hybrid.Options{
				"1.999999ms": {LeasePeriod: 2*time.Millisecond - 1}, "1h0m0.000000001s": {LeasePeriod: time.Hour + 1},
				"-1ns": {LeasePeriod: -1},
			},
			"2ms to 1h",
		},
		{
			"RedisTimeout",
			[]hybrid.Options{{RedisTimeout: time.Millisecond}, {RedisTimeout: time.Minute}},
			map[string]hybrid.Options{
				"999.999µs": {RedisTimeout: time.Millisecond - 1}, "1m0.000000001s": {RedisTimeout: time.Minute + 1},
				"-1s": {RedisTimeout: -time.Second},
			},
			"1ms to 1m",
		},
		{
			"MaxKeys",
			[]hybrid.Options{{MaxKeys: 1}, {MaxKeys: 1 << 30}},
			map[string]hybrid.Options{"-1": {MaxKeys: -1}, "1073741825": {MaxKeys: 1<<30 + 1}},
			"1 to 2^30",
		},
		{
			"MaxWaiters",
			[]hybrid.Options{{MaxWaiters: 1}, {MaxWaiters: 1 << 30}},
			map[string]hybrid.Options{"-1": {MaxWaiters: -1}, "1073741825": {MaxWaiters: 1<<30 + 1}},
			"1 to 2^30",
		},
		{
			"Share",
			[]hybrid.Options{{Share: hybrid.ShareEqual}, {Share: hybrid.ShareProportional}, {Share: hybrid.ShareNone}},
			map[string]hybrid.Options{"3": {Share: 3}, "255": {Share: 255}},
			"ShareEqual, ShareProportional or ShareNone",
		},
		{
			"LimitsVersion",
			[]hybrid.Options{{LimitsVersion: 1}, {LimitsVersion: 1 << 53}},
			map[string]hybrid.Options{"-1": {LimitsVersion: -1}, "9007199254740993": {LimitsVersion: 1<<53 + 1}},
			"0 to 2^53",
		},
		{
			"MinNodes",
			[]hybrid.Options{{MinNodes: 1}, {MinNodes: 1 << 20}},
			map[string]hybrid.Options{"-1": {MinNodes: -1}, "1048577": {MinNodes: 1<<20 + 1}},
			"1 to 2^20",
		},
		{
			"Heartbeat",
			[]hybrid.Options{{Heartbeat: 100 * time.Millisecond}, {Heartbeat: time.Minute}},
			map[string]hybrid.Options{"99ms": {Heartbeat: 99 * time.Millisecond}, "1m1s": {Heartbeat: 61 * time.Second}, "-1s": {Heartbeat: -time.Second}},
			"100ms to 1m",
		},
		{
			"Start",
			[]hybrid.Options{{Start: hybrid.StartOne}, {Start: hybrid.StartEmpty}, {Start: hybrid.StartFull}},
			map[string]hybrid.Options{"3": {Start: 3}},
			"StartOne, StartEmpty or StartFull",
		},
		{
			"Split",
			[]hybrid.Options{{Split: hybrid.SplitBlend}, {Split: hybrid.SplitEqual}},
			map[string]hybrid.Options{"2": {Split: 2}},
			"SplitBlend or SplitEqual",
		},
	} {
		for _, opts := range c.good {
			l, err := hybrid.New(rdb, hybrid.PerSecond(1, 1), opts)
			if err != nil {
				t.Errorf("New with a good %s = %v; want nil", c.field, err)
				continue
			}
			l.Close(t.Context())
		}
		for value, opts := range c.bad {
			l, err := hybrid.New(rdb, hybrid.PerSecond(1, 1), opts)
			if err == nil {
				t.Errorf("New with %s = %s = nil; want an error", c.field, value)
				continue
			}
			if l != nil {
				t.Errorf("New with %s = %s returned a Limiter too", c.field, value)
			}
			for _, want := range []string{"hybrid: Options." + c.field + " ", value, c.want} {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("New with %s = %s = %q; want it to contain %q", c.field, value, err, want)
				}
			}
		}
	}
}

// TestNewReportsAllProblems gives New everything wrong at once.
func TestNewReportsAllProblems(t *testing.T) {
	l, err := hybrid.New(nil, hybrid.PerSecond(math.NaN(), -1), hybrid.Options{
		Prefix: strings.Repeat("p", 300), LeasePeriod: -1, RedisTimeout: time.Hour, MaxKeys: -1, MaxWaiters: -1,
		Share: 9, LimitsVersion: -1, MinNodes: -1, Heartbeat: 1, Start: 9, Split: 9,
	})
	if l != nil || err == nil {
		t.Fatalf("New = %v, %v; want an error", l, err)
	}
	for _, want := range []string{
		"rdb", "Prefix", "LeasePeriod", "RedisTimeout", "MaxKeys", "MaxWaiters", "Share", "LimitsVersion", "MinNodes", "Heartbeat", "Start", "Split", "Rate",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("New = %q; want it to name %s too", err, want)
		}
	}
	if !errors.Is(err, hybrid.ErrLimit) {
		t.Errorf("New = %q; want it to match ErrLimit", err)
	}
	if lines := strings.Count(err.Error(), "\n") + 1; lines != 13 {
		t.Errorf("New = %q: %d lines; want 13, one for each problem", err, lines)
	}
}

// TestNewWithoutClientOrLimits is an error, not a panic, now or later.
func TestNewWithoutClientOrLimits(t *testing.T) {
	rdb := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	defer rdb.Close()
	for name, c := range map[string]struct {
		rdb    hybrid.Client
		limits hybrid.Limits
	}{
		"no client":       {nil, hybrid.PerSecond(1, 1)},
		"nil client":      {(*redis.Client)(nil), hybrid.PerSecond(1, 1)},
		"nil cluster":     {(*redis.ClusterClient)(nil), hybrid.PerSecond(1, 1)},
		"no limits":       {rdb, nil},
		"nil limits func": {rdb, hybrid.LimitFunc(nil)},
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if p := recover(); p != nil {
					t.Errorf("New with %s panicked: %v", name, p)
				}
			}()
			if l, err := hybrid.New(c.rdb, c.limits, hybrid.Options{}); l != nil || err == nil {
				t.Errorf("New with %s = %v, %v; want an error", name, l, err)
			}
		})
	}
}

// TestOptionsDefaults reads the defaults off what a node does and sends.
func TestOptionsDefaults(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		ln := newLine(0)
		last := func() []any {
			sent := ln.commands()
			return sent[len(sent)-1]
		}
		never := hybrid.PerHour(1000, 1000)
		never.OnFailure = hybrid.Deny
		l := w.nodeOver(ln, never, hybrid.Options{})
		for range 10 { // hot enough to be leased
			if _, err := l.Allow(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
		}
		if len(last()) != 3+1+22 {
			t.Fatalf("last command = %v; want EVALSHA with one key and 22 arguments", last())
		}
		arg := func(i int) any { return last()[3+i] } // as acquire.lua counts them
		for _, c := range []struct {
			option    string
			got, want any
		}{
			{"Prefix", arg(0), "hybridlimit:tb1:{k}"},
			{"LeasePeriod", arg(5), 2 * (250 * time.Millisecond).Microseconds()},
			{"Share", arg(20), int(hybrid.ShareEqual)},
			{"LimitsVersion", arg(4), int64(0)},
		} {
			if c.got != c.want {
				t.Errorf("default %s: sent %v (%T); want %v", c.option, c.got, c.got, c.want)
			}
		}

		ln.hang.Store(true)
		begin := w.since()
		d, err := l.Allow(context.Background(), "other")
		if took := w.since() - begin; err != nil || d.Allowed || d.Source != hybrid.SourcePolicy || took != 30*time.Millisecond {
			t.Errorf("Allow with Redis silent = %+v, %v after %v; want denied by policy after 30ms", d, err, took)
		}
		ln.hang.Store(false)

		always := hybrid.PerHour(1000, 1000)
		always.OnFailure = hybrid.Allow
		open := w.nodeOver(ln, always, hybrid.Options{
			Prefix: "p:", LeasePeriod: time.Second, RedisTimeout: 5 * time.Millisecond,
			Share: hybrid.ShareNone, LimitsVersion: 7,
		})
		for range 10 {
			if _, err := open.Allow(t.Context(), "k"); err != nil {
				t.Fatal(err)
			}
		}
		if arg(0) != "p:tb1:{k}" || arg(5) != (2*time.Second).Microseconds() || arg(20) != int(hybrid.ShareNone) || arg(4) != int64(7) {
			t.Errorf("sent %v; want prefix p:, leases of 2s, ShareNone, version 7", last())
		}
		ln.hang.Store(true)
		begin = w.since()
		d, err = open.Allow(context.Background(), "other")
		if took := w.since() - begin; err != nil || !d.Allowed || d.Source != hybrid.SourcePolicy || took != 5*time.Millisecond {
			t.Errorf("Allow with Redis silent = %+v, %v after %v; want allowed by policy after 5ms", d, err, took)
		}
		ln.hang.Store(false)
	})
}

// TestOptionsMaxWaiters decides those past it at once.
func TestOptionsMaxWaiters(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.warm()
		limit := hybrid.PerHour(1, 100)
		limit.OnFailure = hybrid.Deny
		l := w.nodeOver(newLine(10*time.Millisecond), limit, hybrid.Options{MaxWaiters: 5, RedisTimeout: time.Second})
		tr := w.trace(limit)
		together(50, func(int) { tr.ask(l, "k", 1) })
		// One or more in flight, five in the queue.
		if got, s := tr.total(), l.Stats(); got < 5 || got > 10 || s.Failed != 50-got {
			t.Errorf("admitted %d of 50, Stats = %+v; want 5 to 10, and the rest decided by policy", got, s)
		}
		tr.check()
	})
}

package hybrid_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
)

func TestTable(t *testing.T) {
	by := func(n int64) hybrid.Limit { return hybrid.PerSecond(float64(n), n) }
	rules := hybrid.Table{
		Default:  by(1),
		Prefixes: map[string]hybrid.Limit{"user:": by(2), "user:vip:": by(3), "": by(4), "é": by(5)},
		Keys:     map[string]hybrid.Limit{"user:7": by(6), "user:blocked": {}},
	}
	made, err := hybrid.NewTable(rules)
	if err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]hybrid.Limit{
		"user:1": by(2), "user:vip:1": by(3), "user:vip:": by(3), "user:vip": by(2), "user:": by(2), "user": by(4), "x": by(4),
		"user:7": by(6), "user:77": by(2), "user:blocked": {}, "ému": by(5), "\xc3": by(4),
	} {
		if got := made.For(key); got != want {
			t.Errorf("For(%q) = %v; want %v", key, got, want)
		}
		if got := rules.For(key); got != want {
			t.Errorf("by hand: For(%q) = %v; want %v", key, got, want)
		}
	}
	delete(rules.Keys, "user:7")
	if made.For("user:7") != by(6) {
		t.Error("a table changes with the maps it was made from")
	}
	if (&hybrid.Table{}).For("k") != (hybrid.Limit{}) {
		t.Error("the zero Table admits something")
	}
	_, err = hybrid.NewTable(hybrid.Table{
		Default: hybrid.Limit{Rate: -1}, Prefixes: map[string]hybrid.Limit{"p": {Burst: -1}}, Keys: map[string]hybrid.Limit{"good": by(1), "k": {Rate: 2e12}},
	})
	if !errors.Is(err, hybrid.ErrLimit) || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("NewTable = %v; want all three that are wrong", err)
	}
	for _, name := range []string{"default", `prefix "p"`, `key "k"`} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("NewTable = %v; want %s named", err, name)
		}
	}
}

func TestSetLimitsMistakes(t *testing.T) {
	l, err := hybrid.New(redistest.Start(t).Client(t), hybrid.PerSecond(10, 10), hybrid.Options{LimitsVersion: 5})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(context.Background())
	for want, err := range map[string]error{
		"limits is nil":                          l.SetLimits((*hybrid.Table)(nil), 6),
		"version 4: want at least":               l.SetLimits(hybrid.PerSecond(1, 1), 4),
		"version -1: want 0 to 2^53":             l.SetLimits(hybrid.PerSecond(1, 1), -1),
		"Limit.Rate = -1: want 0 to 1e12 tokens": l.SetLimits(hybrid.PerSecond(-1, 1), 6),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("SetLimits = %v; want %q", err, want)
		}
	}
}

// Four nodes at full load on a real server, half of them told of a limit that is ten
// times lower: from then on no more than its burst, its rate and what was out. Raised
// again, no burst for nothing.
func TestSetLimitsOnRealRedis(t *testing.T) {
	high, low := hybrid.PerSecond(1000, 1000), hybrid.PerSecond(100, 100)
	const period = 100 * time.Millisecond
	rdb := redistest.Start(t).Client(t)
	var nodes []*hybrid.Limiter
	for range 4 {
		l, err := hybrid.New(rdb, high, hybrid.Options{LeasePeriod: period, RedisTimeout: 5 * time.Second, LimitsVersion: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close(context.Background())
		nodes = append(nodes, l)
	}
	start := time.Now()
	var (
		mu    sync.Mutex
		trace []lease.Admission
		shown [4]hybrid.Limit
	)
	offer := func(d time.Duration) (since time.Duration) {
		since = time.Since(start)
		var callers sync.WaitGroup
		for i := range 8 {
			callers.Go(func() {
				for time.Since(start) < since+d {
					begin := time.Since(start)
					d, err := nodes[i%4].Allow(t.Context(), "k")
					end := time.Since(start)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					shown[i%4] = d.Limit
					if d.Allowed {
						trace = append(trace, lease.Admission{Start: begin, End: end, N: 1})
					}
					mu.Unlock()
					time.Sleep(time.Millisecond)
				}
			})
		}
		callers.Wait()
		return since
	}
	// level is that of what was admitted wholly after a time.
	level := func(l hybrid.Limit, since time.Duration) float64 {
		var after []lease.Admission
		for _, a := range trace {
			if a.Start >= since {
				after = append(after, a)
			}
		}
		return lease.PeakLevel(l, after)
	}
	set := func(l hybrid.Limit, version int64) {
		for _, n := range nodes[:2] {
			if err := n.SetLimits(l, version); err != nil {
				t.Fatal(err)
			}
		}
	}
	offer(2 * time.Second)
	if peak := level(high, 0); peak > 1000 {
		t.Errorf("level = %.1f before; want at most the burst", peak)
	}
	out := int64(0) // the most that can be: what nodes lease in two periods
	for _, n := range nodes {
		out += n.Stats().Live
	}
	set(low, 2)
	changed := time.Since(start)
	offer(3 * period)
	for i, l := range shown {
		if l.Burst != low.Burst {
			t.Errorf("node %d goes by %v three periods later; want %v", i, l, low)
		}
	}
	offer(2 * time.Second)
	// Nodes that were not told lease by the old limit until they meet the new one.
	most := float64(low.Burst+out) + 2*high.Rate*period.Seconds()
	peak := level(low, changed)
	t.Logf("lowered with %d out: level %.1f, at most %.0f", out, peak, most)
	if peak > most {
		t.Errorf("level = %.1f after it was lowered; want at most %.0f", peak, most)
	}

	set(high, 3)
	changed = time.Since(start)
	offer(time.Second)
	n := 0
	for _, a := range trace {
		if a.Start >= changed {
			n++
		}
	}
	took := (time.Since(start) - changed).Seconds()
	t.Logf("raised: %d admitted in %.2fs", n, took)
	if float64(n) > float64(low.Burst)+high.Rate*took {
		t.Errorf("%d admitted in %.2fs after it was raised; want no burst for nothing", n, took)
	}
}

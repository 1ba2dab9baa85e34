package soak

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// soakOptions are of a short run on a Redis of its own.
func soakOptions(t *testing.T) Options {
	t.Helper()
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return Options{
		Dial: func() (redis.UniversalClient, error) {
			return redis.NewClient(&redis.Options{Addr: m.Addr(), MaxRetries: -1, DialerRetries: 1, ContextTimeoutEnabled: true}), nil
		},
		Flush: func(context.Context) error { m.FlushAll(); return nil },
		For:   3 * time.Second, Keys: 50, Demand: 1000, RedisTimeout: 100 * time.Millisecond,
	}
}

func TestHolds(t *testing.T) {
	opts := soakOptions(t)
	var intervals []Interval
	opts.Report = func(i Interval) { intervals = append(intervals, i) }
	r, err := Run(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", r)
	if !r.Held || len(r.Checks) != 7 {
		t.Errorf("checks = %+v; want seven, and all to hold", r.Checks)
	}
	// A machine that is busy with other things may not get to all of it.
	if r.Decisions < 1000 || r.Decisions != r.Admitted+r.Refused || r.NewKeys == 0 || r.GaveUp == 0 {
		t.Errorf("%d decisions, %d new keys, %d gave up; want about 3000, and some of each", r.Decisions, r.NewKeys, r.GaveUp)
	}
	if r.Faults["cut"] == 0 || r.BySource["local"] == 0 || r.BySource["store"] == 0 {
		t.Errorf("faults %v, decided by %v; want an outage", r.Faults, r.BySource)
	}
	if r.Hot.Key != "soak:hot" || r.Hot.Level <= 0 || r.Closest.part() < r.Hot.part() || r.P99 < r.P50 {
		t.Errorf("hot key %+v, closest %+v, p50 %v, p99 %v; want them to be measured", r.Hot, r.Closest, r.P50, r.P99)
	}
	if len(intervals) < 3 || len(intervals) > r.Intervals {
		t.Fatalf("%d intervals were reported, %d measured; want about 6", len(intervals), r.Intervals)
	}
	i := intervals[1]
	if i.At <= 0 || i.PerSecond <= 0 || i.Heap == 0 || i.Goroutines == 0 || i.Keys == 0 || i.Max < i.P50 || len(i.BySource) == 0 {
		t.Errorf("interval = %+v; want all of it measured", i)
	}
}

// The faults come from the seed, whatever the machine does.
func TestFaultsComeFromTheSeed(t *testing.T) {
	names := func(seed uint64, flush bool) (all []string) {
		s := &soak{opts: Options{Seed: seed}}
		if flush {
			s.opts.Flush = func(context.Context) error { return nil }
		}
		r := s.random()
		for round := range 4 {
			for _, f := range s.deal(r, round) {
				all = append(all, f.name)
			}
		}
		return all
	}
	one := names(1, true)
	if again := names(1, true); !slices.Equal(one, again) {
		t.Errorf("seed 1 = %v and then %v", one, again)
	}
	if other := names(2, true); slices.Equal(one, other) {
		t.Errorf("seeds 1 and 2 both = %v", one)
	}
	if one[0] != "cut" {
		t.Errorf("the first is %q; want an outage", one[0])
	}
	for _, f := range faults {
		want := 4
		if f.rare {
			want = 1
		}
		got := 0
		for _, name := range one {
			if name == f.name {
				got++
			}
		}
		if got != want {
			t.Errorf("%q happens %d times in four rounds, want %d", f.name, got, want)
		}
	}
	if slices.Contains(names(1, false), "flushall") {
		t.Error("flushall without a Flush")
	}
}

// Each of the faults by itself, and its end.
func TestInject(t *testing.T) {
	opts := soakOptions(t)
	var flushed atomic.Int64
	inner := opts.Flush
	opts.Flush = func(ctx context.Context) error { flushed.Add(1); return inner(ctx) }
	opts.setDefaults()
	s, err := launch(opts)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close(t.Context())
	first := s.slots[1].Load()
	for _, f := range faults {
		if err := s.inject(t.Context(), f, 1, 10*time.Millisecond); err != nil {
			t.Errorf("%s = %v", f.name, err)
		}
		if s.faults[f.name] != 1 || s.quietFrom.Load() < 0 {
			t.Errorf("%s: counted %d times, quiet from %v; want once, and quiet after it", f.name, s.faults[f.name], s.quietFrom.Load())
		}
		if d, err := s.slots[1].Load().limiter.Allow(t.Context(), f.name); err != nil || !d.Allowed {
			t.Errorf("after %s: Allow = %+v, %v; want it to go on", f.name, d, err)
		}
	}
	if s.slots[1].Load() == first || s.closed != 1 {
		t.Errorf("%d nodes closed, want one, and another in its place", s.closed)
	}
	if got := *s.changing.Load(); got != halved(opts.Limit) {
		t.Errorf("the limit is %v, want half of it", got)
	}
	if flushed.Load() != 1 || s.meters[hotKey].covers[0].flushes != 1 {
		t.Errorf("flushed %d times, the meter has %d; want 1", flushed.Load(), s.meters[hotKey].covers[0].flushes)
	}
}

func TestStoppedEarly(t *testing.T) {
	opts := soakOptions(t)
	opts.For = time.Hour
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	begin := time.Now()
	r, err := Run(ctx, opts)
	if err != nil || !r.Held || r.Seconds > 10 || time.Since(begin) > 20*time.Second || r.Decisions == 0 {
		t.Errorf("Soak stopped after 300ms = %+v, %v; want a report of that", r, err)
	}
	if c := checkOf(r, "healed"); c.Verdict != skipped {
		t.Errorf("healed = %+v, want skipped: it was hardly begun", c)
	}
}

func TestFails(t *testing.T) {
	broken := errors.New("broken")
	opts := soakOptions(t)
	dial, n := opts.Dial, 0
	opts.Dial = func() (redis.UniversalClient, error) {
		if n++; n > 3 {
			return nil, broken
		}
		return dial()
	}
	if r, err := Run(t.Context(), opts); !errors.Is(err, broken) || r.GoroutinesAfter > r.GoroutinesBefore {
		t.Errorf("Soak = %+v, %v; want %v and nothing left of the nodes that were there", r, err, broken)
	}
}

func TestRefusesBadOptions(t *testing.T) {
	good := soakOptions(t)
	for _, c := range []struct {
		spoil func(*Options)
		want  string
	}{
		{func(o *Options) { o.Dial = nil }, "Dial is nil"},
		{func(o *Options) { o.For = time.Second }, "Options.For = 1s: want 2s to 24h"},
		{func(o *Options) { o.For = 25 * time.Hour }, "Options.For = 25h0m0s: want 2s to 24h"},
		{func(o *Options) { o.Every = time.Millisecond }, "Options.Every = 1ms: want 100ms to 1h"},
		{func(o *Options) { o.Nodes = 101 }, "Options.Nodes = 101: want 1 to 100"},
		{func(o *Options) { o.Keys = -1 }, "Options.Keys = -1: want 1 to 100000"},
		{func(o *Options) { o.Demand = 2e6 }, "Options.Demand = 2e+06: want 10 to 1e6"},
		{func(o *Options) { o.RedisTimeout = time.Hour }, "Options.RedisTimeout = 1h0m0s: want 1ms to 1m"},
		{func(o *Options) { o.Limit = hybrid.PerSecond(1, 0) }, "Options.Limit.Burst = 0: want at least 1 token"},
		{func(o *Options) { o.Limit = hybrid.PerSecond(-1, 1) }, "Options.Limit.Rate = -1: want more than 0"},
		{func(o *Options) { o.Limit = hybrid.PerSecond(1e13, 1) }, "Limit.Rate = 1e+13"},
	} {
		o := good
		c.spoil(&o)
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("Soak = %v, want an error with %q", err, c.want)
		}
	}
}

func checkOf(r Report, name string) Check {
	for _, c := range r.Checks {
		if c.Name == name {
			return c
		}
	}
	return Check{}
}

// goodReport is a report whose checks all hold, each by a hair.
func goodReport() Report {
	return Report{
		Closest: reading{"soak:hot", 5, 526, 526}, Slowest: slowest{At: 10, Took: 130, Allowed: 130, Key: "k", Source: "store", Node: "node 1", Fault: "cut"},
		GoroutinesBefore: 4, GoroutinesAfter: 4, HeapFirst: 1 << 20, HeapLast: 2 << 20, HeapMost: 2 << 20, Intervals: 6,
		Closed: 4, Stretch: 2, StretchAsked: 10, StretchRedis: 1,
	}
}

func TestJudge(t *testing.T) {
	r := goodReport()
	r.judge()
	if !r.Held || len(r.Failures()) != 0 || len(r.Checks) != 7 {
		t.Fatalf("checks = %+v; want all seven to hold", r.Checks)
	}
	for _, c := range []struct {
		name   string
		spoil  func(*Report)
		detail string
	}{
		{"level", func(r *Report) { r.Closest.Level = 527 }, "soak:hot came closest: 527.0 of 526.0 at 5.0 s"},
		{"latency", func(r *Report) { r.Slowest.Took = 130.1 }, `130.1 ms of 130.0 ms at 10.0 s: k, by store, on node 1, after "cut"`},
		{"errors", func(r *Report) { r.Failed, r.Failure = 1, "lease: key is empty" }, "1 requests had an error that they must not have lease: key is empty"},
		{"goroutines", func(r *Report) { r.GoroutinesAfter = 5 }, "5 after, 4 before"},
		{"heap", func(r *Report) { r.HeapLast++ }, "2.0 MiB in the last third, 1.0 MiB in the first"},
		{"ledger", func(r *Report) { r.Unbalanced = []Unbalanced{{"node 3", -2}} }, "node 3 is off by -2"},
		{"healed", func(r *Report) { r.StretchRedis = 0 }, "0 of 10 decisions by Redis"},
		{"healed", func(r *Report) { r.StretchRedis, r.StretchAsked = 9, 91 }, "9 of 91 decisions by Redis"},
		{"healed", func(r *Report) { r.StretchRedis, r.StretchAsked = 0, 0 }, "0 of 0 decisions by Redis"},
	} {
		r := goodReport()
		c.spoil(&r)
		r.judge()
		if got := r.Failures(); r.Held || !slices.Equal(got, []string{c.name}) {
			t.Errorf("%s broken: held %v, %v failed; want that check alone", c.name, r.Held, got)
		}
		if got := checkOf(r, c.name); !strings.Contains(got.Detail, c.detail) {
			t.Errorf("%s = %+v; want it to say %q", c.name, got, c.detail)
		}
	}
	r = goodReport()
	r.Intervals, r.HeapLast, r.Stretch, r.StretchRedis = 5, 1<<30, 0, 0
	r.judge()
	if !r.Held || checkOf(r, "heap").Verdict != skipped || checkOf(r, "healed").Verdict != skipped {
		t.Errorf("a run too short for some checks: %+v; want these skipped", r.Checks)
	}
}

func TestThirds(t *testing.T) {
	if first, last := thirds([]float64{3, 1, 2, 50, 50, 50, 50, 7, 9, 8}); first != 2 || last != 8 {
		t.Errorf("thirds = %v, %v; want 2, 8", first, last)
	}
	if first, last := thirds([]float64{3, 1}); first != 0 || last != 0 {
		t.Errorf("thirds of two = %v, %v; want none", first, last)
	}
}

// testClock is a clock that is set.
type testClock struct {
	at    time.Duration
	still bool
}

func (c *testClock) now() time.Duration                          { return c.at }
func (c *testClock) stood(_, _ time.Duration) bool               { return c.still }
func (c *testClock) sleep(d time.Duration) *testClock            { c.at += d; return c }
func (c *testClock) since(d time.Duration) (start time.Duration) { return c.at - d }

func TestMeterBounds(t *testing.T) {
	limit := hybrid.PerSecond(100, 100)
	// With 4 nodes W is 1.1125, w 0.275·1.1 of a busy key.
	const all, one = 1.1125, 0.3025
	for _, c := range []struct {
		name  string
		run   func(m *meter, c *testClock)
		bound float64
	}{
		{"healthy", func(*meter, *testClock) {}, 100},
		{"a long decision", func(m *meter, c *testClock) { m.admit(c.since(50*time.Millisecond), 0, 1, false, c) }, 105},
		{"a share outside of faults", func(m *meter, c *testClock) { m.admit(c.at, 0, 7, true, c) }, 107},
		{"an outage with nothing admitted", func(m *meter, c *testClock) { m.begin(allNodes, 0, c.at); c.sleep(time.Second) }, 100},
		{"an outage, little admitted", func(m *meter, c *testClock) {
			m.begin(allNodes, 0, c.at)
			m.admit(c.at, 0, 30, true, c)
		}, 130},
		{"an outage, as much as there can be", func(m *meter, c *testClock) {
			m.begin(allNodes, 0, c.at)
			m.admit(c.sleep(2*time.Second).at, 0, 1e6, true, c)
		}, 100 + 4*5 + (all-1)*300 + 100 + 100},
		{"the same, over", func(m *meter, c *testClock) {
			m.begin(allNodes, 0, c.at)
			m.admit(c.sleep(2*time.Second).at, 0, 1e6, true, c)
			m.end(c.at)
			c.sleep(time.Hour)
		}, 100 + 4*5 + (all-1)*300 + 100 + 100},
		{"one node cut off, as much as there can be", func(m *meter, c *testClock) {
			m.begin(oneNode, 2, c.at)
			m.admit(c.sleep(2*time.Second).at, 2, 1e6, true, c)
		}, 100 + 5 + one*300},
		{"one node cut off, and another's share", func(m *meter, c *testClock) {
			m.begin(oneNode, 2, c.at)
			m.admit(c.sleep(2*time.Second).at, 1, 9, true, c)
		}, 109},
		{"leases while there is an outage", func(m *meter, c *testClock) {
			m.begin(allNodes, 0, c.at)
			m.admit(c.sleep(2*time.Second).at, 1, 9, false, c)
		}, 100},
		{"flushed", func(m *meter, c *testClock) { m.flush(c.at) }, 200},
		{"flushed just before it starts anew", func(m *meter, c *testClock) {
			m.flush(c.at)
			m.renew(0, c.sleep(time.Second/2).at, books{})
		}, 200},
		{"flushed long before it starts anew", func(m *meter, c *testClock) {
			m.flush(c.at)
			m.renew(0, c.sleep(2*time.Second).at, books{})
		}, 100},
		{"started anew", func(m *meter, c *testClock) {
			m.admit(c.at, 0, 7, true, c)
			m.renew(2, c.at, books{})
		}, 100},
	} {
		m, clock := newMeter("k", limit, 4, 5, true), &testClock{at: time.Second}
		c.run(m, clock)
		if got := m.bound(&m.covers[0], clock.at); rounded(got) != rounded(c.bound) {
			t.Errorf("%s: bound %v, want %v", c.name, got, c.bound)
		}
	}
}

// Once Redis was charged with what shares admitted the promise holds again.
func TestMeterSettles(t *testing.T) {
	const all = 1.1125
	// lasting is what remains of an outage of 2 s in which a share admitted 350, of
	// which its node owes at first what is more.
	const lasting = 4*5 + (all-1)*300
	for _, c := range []struct {
		name  string
		now   books
		after func(m *meter, c *testClock) // between the mark and that all is settled
		then  func(m *meter, c *testClock)
		peak  float64
		bound float64
	}{
		{"charged", books{}, nil, nil, 200, 100 + lasting},
		{"some forgiven", books{forgiven: 3}, nil, nil, 200, 103 + lasting},
		{"more forgiven than shares admitted of this key", books{forgiven: 300}, nil, nil, 200, 107 + lasting},
		{"some lost", books{lost: 1}, nil, nil, 200, 107 + lasting + 200},
		{"more admitted meanwhile", books{}, func(m *meter, c *testClock) { m.admit(c.at, 0, 9, true, c) }, nil, 200, 109 + lasting},
		{"started anew meanwhile", books{}, func(m *meter, c *testClock) {
			m.renew(0, c.sleep(1).at, books{})
			m.admit(c.at, 0, 9, true, c)
		}, nil, 200, 109},
		{"flushed after that", books{}, nil, func(m *meter, c *testClock) { m.flush(c.at) }, 200, 200 + lasting + 100},
		{"more than can be charged", books{}, nil, nil, 257, 100 + lasting + 57},
	} {
		m, clock := newMeter("k", hybrid.PerSecond(100, 100), 4, 5, true), &testClock{at: time.Second}
		m.begin(allNodes, 0, clock.at)
		m.admit(clock.sleep(2*time.Second).at, 0, 350, true, clock)
		m.end(clock.at)
		m.admit(clock.at, 0, 7, true, clock)
		m.covers[0].peak = c.peak
		marks := m.mark()
		if c.after != nil {
			c.after(m, clock)
		}
		m.settle(marks, c.now)
		if c.then != nil {
			c.then(m, clock)
		}
		if got := m.bound(&m.covers[0], clock.at); rounded(got) != rounded(c.bound) {
			t.Errorf("%s: bound %v, want %v", c.name, got, c.bound)
		}
	}
}

func TestMeterLevels(t *testing.T) {
	m, clock := newMeter("k", hybrid.PerSecond(10, 10), 2, 1, true), &testClock{at: time.Second}
	m.admit(clock.at, 0, 10, false, clock)
	if got := m.worst(); got != (reading{"k", 1, 10, 10}) {
		t.Errorf("worst = %+v, want level 10 of 10 at 1", got)
	}
	clock.sleep(300 * time.Millisecond)
	m.admit(clock.at, 0, 3, false, clock)
	if got := m.worst(); got.part() > 1 {
		t.Errorf("worst = %+v, want three tokens to have drained", got)
	}
	m.admit(clock.at, 0, 1, false, clock)
	if got := m.worst(); got.Level != 11 || got.Bound != 10 {
		t.Errorf("worst = %+v, want level 11 of 10: one too many", got)
	}
	if got := m.reading(); got.Level != 11 {
		t.Errorf("reading = %+v, want level 11", got)
	}
	if got := m.reading(); got != (reading{}) {
		t.Errorf("reading = %+v, want none: nothing was admitted since", got)
	}
	// What is too much for a machine that did not stand still is not for one that did.
	clock.still = true
	m.admit(clock.at, 0, 1, false, clock)
	if got := m.reading(); got.Level != 12 || got.Bound != 10+128 {
		t.Errorf("reading = %+v, want level 12 of 138", got)
	}
	// The level that starts anew has no past, the other one has all of it.
	m.renew(0, clock.at, books{})
	m.admit(clock.at, 0, 2, false, clock)
	if a, b := m.covers[0].level, m.covers[1].level; a != 2 || b != 14 {
		t.Errorf("levels %v and %v, want 2 and 14", a, b)
	}
}

func TestWeights(t *testing.T) {
	for _, c := range []struct {
		nodes       int
		burst       int64
		busy        bool
		single, all float64
	}{
		{1, 100, true, 1, 1},
		{1, 100, false, 1, 1},
		{2, 100, true, 0.7, 1.225},
		{2, 100, false, 0.7, 1.4},
		{4, 100, true, 0.3025, 1.1125},
		{4, 100, false, 0.575, 2.3},
		{100, 100, false, 0.04, 4},
		{10, 2, true, 0.5, 2},
		{10, 2, false, 0.5, 4},
	} {
		single, all := weights(hybrid.PerSecond(1, c.burst), c.nodes, c.busy)
		if rounded(single) != c.single || rounded(all) != c.all {
			t.Errorf("weights(burst %d, %d, %v) = %v, %v; want %v, %v", c.burst, c.nodes, c.busy, single, all, c.single, c.all)
		}
	}
}

func TestHistogram(t *testing.T) {
	for _, d := range []time.Duration{0, 1, 15, 16, 17, 1000, 12345, time.Millisecond, time.Hour, 1<<63 - 1} {
		i := bucketOf(d)
		end, before := bucketEnd(i), time.Duration(-1)
		if i > 0 {
			before = bucketEnd(i - 1)
		}
		if d > end || d <= before || float64(end-before) > max(1, float64(d)/8) {
			t.Errorf("%d is in bucket %d, over %d up to %d", d, i, before, end)
		}
	}
	var h histogram
	none := h.snapshot()
	if got := none.quantile(0.5); got != 0 {
		t.Errorf("median of nothing = %v", got)
	}
	for i := range 100 {
		h.add(time.Duration(i + 1))
	}
	first := h.snapshot()
	if p50, p99 := first.quantile(0.5), first.quantile(0.99); p50 < 50 || p50 > 57 || p99 < 99 || p99 > 112 {
		t.Errorf("p50 %d, p99 %d of 1 to 100; want 50 and 99, or an eighth more", p50, p99)
	}
	h.add(time.Second)
	second := h.snapshot()
	if since := second.since(&first); since.quantile(0.5) < time.Second {
		t.Errorf("median since then = %v, want a second", since.quantile(0.5))
	}
}

func TestWatchMeasuresLateness(t *testing.T) {
	w := watch{start: time.Now()}
	w.at.Store(int64(time.Second))
	if w.stood(0, time.Second+10*time.Millisecond) || !w.stood(0, 2*time.Second) {
		t.Error("want the machine to have stood still while the watch did not look")
	}
	w.stalled.Store(int64(time.Second))
	if !w.stood(time.Second, time.Second) || w.stood(time.Second+1, time.Second+1) {
		t.Error("want the machine to have stood still at a second and no later")
	}
	if got := patience(30*time.Millisecond, 10*time.Millisecond); got != 160*time.Millisecond {
		t.Errorf("patience = %v, want 160ms", got)
	}
}

// The traffic is what it is said to be.
func TestWorkerPicks(t *testing.T) {
	s := &soak{opts: Options{Seed: 1, Keys: 100}, slots: make([]atomic.Pointer[soakNode], 2), maxCost: 5}
	w := newWorker(s, 3, 1)
	if w.slot != 1 {
		t.Errorf("worker 3 of 2 nodes asks node %d, want 1", w.slot)
	}
	const n = 20000
	picked, costs, gaveUp := map[int]int{}, map[int64]int{}, 0
	for range n {
		picked[w.pick()]++
		costs[w.cost()]++
		ctx, cancel := w.caller()
		if _, deadline := ctx.Deadline(); deadline || ctx.Err() != nil {
			gaveUp++
		}
		cancel()
	}
	for what, c := range map[string][2]float64{
		"hot":      {float64(picked[hotKey]), hotPart},
		"changing": {float64(picked[changingKey]), changingPart},
		"new":      {float64(picked[newKey]), newPart},
		"dear":     {float64(n - costs[1]), dearPart * 4 / 5},
		"gave up":  {float64(gaveUp), cancelPart},
	} {
		if got := c[0] / n; got < c[1]*0.8 || got > c[1]*1.2 {
			t.Errorf("%s: %v of all, want about %v", what, got, c[1])
		}
	}
	for key := range picked {
		if key < newKey || key >= otherKeys+100 {
			t.Errorf("picked %d", key)
		}
	}
	if len(costs) != 5 || picked[otherKeys] < 5*picked[otherKeys+50] {
		t.Errorf("costs %v, keys %v; want 1 to 5, and some keys far more often", costs, fmt.Sprint(picked[otherKeys], picked[otherKeys+50]))
	}
}

// rounded is x to a millionth of a token, which floating point may be off.
func rounded(x float64) float64 { return math.Round(x*1e6) / 1e6 }

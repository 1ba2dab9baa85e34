package hybrid_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lua"
)

// The ways in which Redis can be down, on a real server.

// outage is a server, its nodes, and how it goes down and comes back.
type outage struct {
	name     string
	down, up func()
	nodes    []*hybrid.Limiter

	took  time.Duration // to come back
	wrong []string      // what is so on a machine that is not too late
	start time.Time
	mu    sync.Mutex
	asked []asked
}

// asked is one request.
type asked struct {
	lease.Admission
	hot bool
	d   hybrid.Decision
}

var outageLimit = hybrid.PerSecond(100, 1000)

// outageTimeout is RedisTimeout there: more than a busy machine is late.
const outageTimeout = 250 * time.Millisecond

// newOutages returns two nodes for each shape, with keys of their own: on a line
// of their own or, where the server itself goes down, on one of their own.
func newOutages(t *testing.T) (all []*outage) {
	common := redistest.Start(t)
	addOn := func(server *redistest.Server, name string, shape func(p *redistest.Proxy) (down, up func())) {
		proxy := redistest.NewProxy(t, server.Addr())
		o := &outage{name: name}
		o.down, o.up = shape(proxy)
		for i := range 2 {
			// Once as tests do it and once as go-redis does by itself.
			opts := redistest.Options(proxy.Addr())
			if i == 1 {
				opts = &redis.Options{Addr: proxy.Addr()}
			}
			rdb := redis.NewClient(opts)
			t.Cleanup(func() { rdb.Close() })
			l, err := hybrid.New(rdb, outageLimit, hybrid.Options{
				Prefix: name + ":", MinNodes: 2, RedisTimeout: outageTimeout,
			})
			if err != nil {
				t.Fatal(err)
			}
			o.nodes = append(o.nodes, l)
		}
		all = append(all, o)
	}
	add := func(name string, shape func(p *redistest.Proxy) (down, up func())) { addOn(common, name, shape) }
	for _, name := range []string{"refused", "paused"} {
		server := redistest.Start(t)
		addOn(server, name, func(*redistest.Proxy) (down, up func()) {
			if name == "paused" {
				return server.Pause, server.Resume
			}
			return server.Kill, func() { server.Restart(t) }
		})
	}
	add("cut", func(p *redistest.Proxy) (down, up func()) { return p.Cut, p.Heal })
	add("silent", func(p *redistest.Proxy) (down, up func()) { return p.Silence, p.Heal })
	add("slow", func(p *redistest.Proxy) (down, up func()) {
		return func() { p.SetLatency(200 * time.Millisecond) }, func() { p.SetLatency(0) }
	})
	add("reply lost", func(p *redistest.Proxy) (down, up func()) {
		return func() { p.DropReplies(1 << 30) }, p.Heal
	})
	add("closed on reply", func(p *redistest.Proxy) (down, up func()) {
		return func() { p.CloseOnReply(1 << 30) }, p.Heal
	})
	for _, text := range []string{
		"LOADING Redis is loading the dataset in memory",
		"READONLY You can't write against a read only replica.",
		"OOM command not allowed when used memory > 'maxmemory'.",
		"CLUSTERDOWN The cluster is down",
		"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
	} {
		code, _, _ := strings.Cut(text, " ")
		add(code, func(p *redistest.Proxy) (down, up func()) {
			return func() { p.RespondError(text) }, p.Heal
		})
	}
	return all
}

// warm connects the nodes, however slow the machine is, and nearly drains the hot
// key.
func (o *outage) warm(t *testing.T) {
	o.start = time.Now()
	for i, l := range o.nodes {
		waitFor(t, 5*time.Second, "Redis decides", func() bool {
			return o.ask(t, l, fmt.Sprint("warm", i, time.Now()), 1).Source == hybrid.SourceStore
		})
	}
	waitFor(t, 5*time.Second, "the hot key is drained", func() bool {
		return o.ask(t, o.nodes[0], "hot", outageLimit.Burst-100).Allowed
	})
}

// want notes what is wrong unless ok.
func (o *outage) want(ok bool, format string, args ...any) {
	if !ok {
		o.wrong = append(o.wrong, fmt.Sprintf(format, args...))
	}
}

// ask makes one request and records it.
func (o *outage) ask(t *testing.T, l *hybrid.Limiter, key string, n int64) hybrid.Decision {
	a := asked{hot: key == "hot"}
	a.Start, a.N = time.Since(o.start), n
	d, err := l.AllowN(context.Background(), key, n)
	a.End, a.d = time.Since(o.start), d
	if err != nil {
		t.Errorf("%s: AllowN(%q) = %v; want a decision", o.name, key, err)
	}
	o.mu.Lock()
	o.asked = append(o.asked, a)
	o.mu.Unlock()
	return d
}

// run asks all nodes until stop is closed: for a hot key and for cold ones.
func (o *outage) run(t *testing.T, stop <-chan struct{}) {
	var wg sync.WaitGroup
	for i, l := range o.nodes {
		for g := range 3 {
			wg.Go(func() {
				for n := 0; ; n++ {
					select {
					case <-stop:
						return
					case <-time.After(10*time.Millisecond + rand.N(10*time.Millisecond)):
					}
					if n%2 == 0 {
						o.ask(t, l, "hot", 1)
					} else {
						o.ask(t, l, fmt.Sprint("cold", i, g, n%60), 1)
					}
				}
			})
		}
	}
	wg.Wait()
}

// back waits until all nodes ask Redis again, and owe nothing, and returns how
// long that took.
func (o *outage) back(most time.Duration) (took time.Duration, ok bool) {
	begin := time.Now()
	for ; time.Since(begin) < most; time.Sleep(50 * time.Millisecond) {
		ok = true
		for _, l := range o.nodes {
			s := l.Stats().Fallback
			ok = ok && !s.Degraded && s.State == "closed" && s.Owed == 0
		}
		if ok {
			break
		}
	}
	return time.Since(begin), ok
}

// hiccup measures how late this machine is at waking a goroutine, until stop.
func hiccup(stop <-chan struct{}) time.Duration {
	var worst time.Duration
	for {
		begin := time.Now()
		select {
		case <-stop:
			return worst
		case <-time.After(5 * time.Millisecond):
			worst = max(worst, time.Since(begin)-5*time.Millisecond)
		}
	}
}

// Two and a half seconds of each kind of trouble under steady traffic: no request
// waits longer than RedisTimeout, shares decide meanwhile, the bound holds, and
// afterwards Redis decides again and all is charged. That RedisTimeout is kept to
// within 5 ms, and that only those in flight wait at all, is shown in fake time
// below: here the machine is late too, by as much as is measured beside.
func TestOutages(t *testing.T) {
	const warm, down = time.Second, 2500 * time.Millisecond
	before := running()
	all := newOutages(t)
	for _, o := range all {
		o.warm(t)
	}
	stopWatch := make(chan struct{})
	late := make(chan time.Duration, 1)
	go func() { late <- hiccup(stopWatch) }()
	var wg sync.WaitGroup
	for _, o := range all {
		wg.Go(func() {
			stop := make(chan struct{})
			var load sync.WaitGroup
			load.Go(func() { o.run(t, stop) })
			ready := time.Since(o.start)
			time.Sleep(warm)
			o.down()
			begin := time.Since(o.start)
			time.Sleep(down)
			end := time.Since(o.start)
			var tripped int64
			for _, l := range o.nodes {
				tripped += min(l.Stats().Fallback.Trips, 1)
			}
			o.up()
			took, ok := o.back(10 * time.Second)
			time.Sleep(time.Second + 100*time.Millisecond) // to ramp up
			again := time.Since(o.start)
			time.Sleep(300 * time.Millisecond)
			close(stop)
			load.Wait()
			o.took = took
			o.want(tripped == 2, "%d nodes tripped; want both", tripped)
			o.want(ok && took < 5*time.Second, "after %v %+v; want Redis asked again and nothing owed", took, o.nodes[0].Stats().Fallback)
			o.check(t, ready, begin, end, again, took)
		})
	}
	wg.Wait()
	close(stopWatch)
	worst := <-late
	for _, o := range all {
		var longest time.Duration
		for _, a := range o.asked {
			longest = max(longest, a.End-a.Start)
		}
		if most := outageTimeout + 100*time.Millisecond + 3*worst; longest > most {
			t.Errorf("%s: a request took %v; want at most %v", o.name, longest, most)
		} else {
			t.Logf("%s: longest request %v (machine late by %v)", o.name, longest, worst)
		}
		for _, wrong := range o.wrong {
			if worst > outageTimeout/8 {
				t.Logf("%s: not judged, the machine is late: %s", o.name, wrong)
			} else {
				t.Errorf("%s: %s", o.name, wrong)
			}
		}
		for _, l := range o.nodes {
			if err := l.Close(context.Background()); err != nil {
				t.Errorf("%s: Close = %v; want nil", o.name, err)
			}
			checkLedger(t, l)
		}
	}
	noneLeft(t, before)
}

// check looks at what was decided since ready, in [begin, end] without Redis, and
// from again on with it.
func (o *outage) check(t *testing.T, ready, begin, end, again, took time.Duration) {
	var trace []lease.Admission
	by := map[string]map[hybrid.Source]int{"before": {}, "hot": {}, "cold": {}, "after": {}}
	var admitted, requests float64
	for _, a := range o.asked {
		if a.hot {
			requests++
			if a.d.Allowed {
				trace = append(trace, a.Admission)
			}
		}
		switch {
		case a.Start > ready && a.End < begin:
			by["before"][a.d.Source]++
		case a.Start > begin+time.Second && a.End < end: // leases have ended
			if a.hot {
				by["hot"][a.d.Source]++
				if a.d.Allowed {
					admitted++
				}
			} else {
				by["cold"][a.d.Source]++
			}
		case a.Start > again:
			by["after"][a.d.Source]++
		}
	}
	for when, sources := range by {
		local := when == "hot" || when == "cold"
		for s, n := range sources {
			o.want(local == (s == hybrid.SourceLocal) || when == "before", "%s: %d decided by %v", when, n, s)
		}
		o.want(len(sources) > 0, "%s: no decision", when)
	}
	with := by["before"]
	o.want(with[hybrid.SourceLocal]*10 < with[hybrid.SourceStore]+with[hybrid.SourceLease]+with[hybrid.SourceMemory], "before: %v; want Redis to decide", with)
	span := (end - begin - time.Second).Seconds()
	// At most what comes in that time and what leases hold, half a second's worth, for two nodes.
	o.want(admitted > 0.5*outageLimit.Rate*span && admitted < outageLimit.Rate*(span+1), "%.0f admitted in %.1fs without Redis, of %v", admitted, span, outageLimit)

	// As F03: what nodes did not know, and the demand beyond the rate until the
	// last debt is charged.
	rate := requests / (o.asked[len(o.asked)-1].End - ready).Seconds()
	extra := 0.3*outageLimit.Rate + 1 + max(0, rate-outageLimit.Rate)*(took+time.Second).Seconds() // a slow machine asks for less than the rate
	if o.name == "refused" {
		extra += float64(outageLimit.Burst) // it came back with nothing
	}
	if peak := lease.PeakLevel(outageLimit, trace); peak > float64(outageLimit.Burst)+extra {
		t.Errorf("%s: level %.0f; want at most %d + %.0f", o.name, peak, outageLimit.Burst, extra)
	} else {
		t.Logf("%s: level %.0f (at most %d + %.0f), back after %v, %v", o.name, peak, outageLimit.Burst, extra, took.Round(time.Millisecond), by)
	}
}

// ours matches goroutines that a Limiter started, or that are inside it.
var ours = regexp.MustCompile(`hybridlimit/(lease|fallback|lua|hybrid|internal/membership)\.\(`)

// running returns the goroutines of Limiters, by their number.
func running() map[string]string {
	all := map[string]string{}
	buf := make([]byte, 1<<22)
	for g := range strings.SplitSeq(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
		if ours.MatchString(g) {
			id, _, _ := strings.Cut(g, " [")
			all[id] = g
		}
	}
	return all
}

// noneLeft fails the test if a goroutine of a closed Limiter goes on that was not
// there before.
func noneLeft(t *testing.T, before map[string]string) {
	t.Helper()
	var left []string
	for range 200 {
		left = nil
		for id, g := range running() {
			if _, old := before[id]; !old {
				left = append(left, g)
			}
		}
		if len(left) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines left after Close, as this one:\n%s", len(left), left[0])
}

// To the nanosecond: in each kind of trouble a request waits for RedisTimeout and
// two milliseconds at most, and once one has found out nobody waits at all.
func TestOutagesInFakeTime(t *testing.T) {
	const timeout, grace = 30 * time.Millisecond, 2 * time.Millisecond
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				w.warm()
				ln := newLine(2 * time.Millisecond)
				limit := hybrid.PerSecond(1000, 1000)
				l := w.nodeOver(ln, limit, hybrid.Options{})
				tr := w.trace(limit)
				stop := w.since() + 3*time.Second
				downAt, upAt := w.since()+time.Second, w.since()+2*time.Second
				time.AfterFunc(time.Second, func() { shape(ln, true) })
				time.AfterFunc(2*time.Second, func() { shape(ln, false) })
				var waited atomic.Int64
				together(4, func(i int) {
					for n := 0; w.since() < stop; n++ {
						begin := w.since()
						d := tr.ask(l, []string{"hot", fmt.Sprint("cold", i, n)}[n%2], 1)
						took := w.since() - begin
						if took > timeout+grace {
							t.Errorf("request at %v took %v, %+v; want at most %v", begin, took, d, timeout+grace)
						}
						if begin > downAt+timeout+grace && begin < upAt && took > 0 {
							waited.Add(1)
							t.Errorf("request at %v waited for %v, %+v; want nobody to, since %v", begin, took, d, downAt)
						}
						w.sleep(time.Duration(3*i+7) * time.Millisecond)
					}
				})
				w.sleep(heals)
				if d := tr.ask(l, "hot", 1); d.Source == hybrid.SourceLocal {
					t.Errorf("after %v: %+v; want Redis to decide", heals, d)
				}
				if s := l.Stats().Fallback; s.Owed != 0 || s.Trips != 1 {
					t.Errorf("%+v; want one trip, and nothing owed", s)
				}
			})
		})
	}
}

// The scripts are flushed all the time, on a real server: no request notices.
func TestScenario18_ScriptFlush(t *testing.T) {
	server := redistest.Start(t)
	rdb, flusher := server.Client(t), server.Client(t)
	limit := hybrid.PerSecond(500, 200)
	var nodes []*hybrid.Limiter
	for range 3 {
		l, err := hybrid.New(rdb, limit, hybrid.Options{RedisTimeout: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, l)
	}
	stop := make(chan struct{})
	var flush sync.WaitGroup
	flushes := 0
	flush.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
			if err := flusher.ScriptFlush(context.Background()).Err(); err != nil {
				t.Errorf("SCRIPT FLUSH = %v", err)
			}
			flushes++
		}
	})
	trace := load(t, nodes, "k", 4, 2, time.Millisecond, 1500*time.Millisecond)
	close(stop)
	flush.Wait()
	if peak := lease.PeakLevel(limit, trace); peak > float64(limit.Burst) {
		t.Errorf("level %.1f of %v", peak, limit)
	}
	between(t, "admitted", float64(admitted(trace)), 0.8*(200+1.5*500), 200+1.7*500)
	for _, l := range nodes {
		if s := l.Stats(); s.Failed != 0 || s.NotExecuted != 0 || s.Unknown != 0 || s.Fallback.Degraded || s.Fallback.Admitted != 0 {
			t.Errorf("%+v after %d flushes; want no failure", s, flushes)
		}
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	balanced(t, nodes)
	if flushes < 100 || server.CommandCalls(t, "eval") < 20 {
		t.Errorf("%d flushes, %d EVAL; want many", flushes, server.CommandCalls(t, "eval"))
	}
}

// Redis's clock steps by ten seconds, once and to and fro, under saturating load.
// Forward it refills what the bucket has room for, at most a burst; backward it
// gives nothing and nobody starves; to and fro it gives at most a burst at each
// step forward, and nothing else.
func TestScenario24_ClockSteps(t *testing.T) {
	limit := hybrid.PerSecond(10, 60) // less than 10·r, so that the burst counts
	for name, steps := range map[string][]time.Duration{
		"forward":    {10 * time.Second},
		"backward":   {-10 * time.Second},
		"to and fro": {10 * time.Second, -10 * time.Second, 10 * time.Second, -10 * time.Second, 10 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				f := w.fleet(3, limit, 10, hybrid.Options{})
				w.stepServer(0)
				stopped := make(chan struct{})
				go func() { // the server's clock goes on
					for {
						select {
						case <-stopped:
							return
						case <-time.After(10 * time.Millisecond):
							w.sleep(0)
						}
					}
				}()
				defer close(stopped)
				f.loadAll(10 * time.Second)
				f.checkPeak(0)
				var most int64
				for _, step := range steps {
					if step > 0 {
						most += limit.Burst
					}
					w.stepServer(step)
					got := f.loadAll(3 * time.Second)
					// What comes in that time, and what leases hold.
					room := 3*limit.Rate + 0.5*float64(limit.Burst)
					least := 0.5 * 3 * limit.Rate // at worst a lease's life passes without refill
					if step > 0 {
						room += float64(limit.Burst)
						least = 3 * limit.Rate
					}
					between(t, fmt.Sprintf("admitted in 3s after %v", step), float64(got), least, room)
				}
				f.checkPeak(float64(most))
				got := f.loadAll(10 * time.Second)
				between(t, "admitted in 10s afterwards", float64(got), 0.9*10*limit.Rate, 10*limit.Rate+float64(limit.Burst))
				for i, l := range f.nodes {
					if s := l.Stats(); s.Failed != 0 || s.Fallback.Degraded {
						t.Errorf("node %d: %+v; want no failure", i, s)
					}
				}
			})
		})
	}
}

// All data is lost under load, on a real server: at most a burst more each time,
// and nodes notice.
func TestScenario27_FlushAll(t *testing.T) {
	server := redistest.Start(t)
	rdb := server.Client(t)
	limit := hybrid.PerSecond(400, 200)
	var nodes []*hybrid.Limiter
	for range 4 {
		l, err := hybrid.New(rdb, limit, hybrid.Options{RedisTimeout: 2 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, l)
	}
	const flushes = 2
	var wg sync.WaitGroup
	wg.Go(func() {
		for range flushes {
			time.Sleep(800 * time.Millisecond)
			if err := rdb.FlushAll(context.Background()).Err(); err != nil {
				t.Errorf("FLUSHALL = %v", err)
			}
		}
	})
	wg.Go(func() { load(t, nodes[:1], "calm", 1, 1, 10*time.Millisecond, 2400*time.Millisecond) }) // leases last
	trace := load(t, nodes, "k", 3, 2, 2*time.Millisecond, 2400*time.Millisecond)
	wg.Wait()
	peak := lease.PeakLevel(limit, trace)
	between(t, "level", peak, 1.2*float64(limit.Burst), (1+flushes)*float64(limit.Burst))
	var vanished int64
	for _, l := range nodes {
		s := l.Stats()
		vanished += s.Vanished
		if s.Failed != 0 || s.Fallback.Degraded || s.Corrupt != 0 {
			t.Errorf("%+v; want no failure", s)
		}
		if err := l.Close(t.Context()); err != nil {
			t.Error(err)
		}
	}
	balanced(t, nodes)
	if vanished == 0 {
		t.Error("no node noticed that the bucket was gone")
	}
}

// A server that refuses says that it did nothing, and so it was: what the bucket
// is charged with is what was admitted, once.
func TestScenario53_ErrorReplies(t *testing.T) {
	master := redistest.Start(t) // of which the other is a replica for a while
	type fault struct {
		down, up func(ctx context.Context, c *redis.Client) error
	}
	set := func(args ...any) func(context.Context, *redis.Client) error {
		return func(ctx context.Context, c *redis.Client) error { return c.Do(ctx, args...).Err() }
	}
	host, port, _ := strings.Cut(master.Addr(), ":")
	cases := map[string]fault{
		"OOM":      {set("config", "set", "maxmemory", "1"), set("config", "set", "maxmemory", "0")},
		"READONLY": {set("replicaof", host, port), set("replicaof", "no", "one")},
		"NOPERM":   {set("acl", "setuser", "default", "-evalsha", "-eval"), set("acl", "setuser", "default", "+evalsha", "+eval")},
		"BUSY": {
			func(ctx context.Context, c *redis.Client) error {
				go c.Eval(context.WithoutCancel(ctx), "while true do end", nil)
				time.Sleep(100 * time.Millisecond) // longer than the threshold
				return nil
			},
			func(ctx context.Context, c *redis.Client) error { return c.ScriptKill(ctx).Err() },
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t, "--busy-reply-threshold", "50")
			rdb := server.Client(t)
			limit := hybrid.Limit{Rate: 1.0 / 3600, Burst: 1000}
			opts := hybrid.Options{RedisTimeout: time.Second, Split: hybrid.SplitEqual}
			l, err := hybrid.New(rdb, limit, opts)
			if err != nil {
				t.Fatal(err)
			}
			ask := func(n int64, source hybrid.Source) {
				t.Helper()
				if d, err := l.AllowN(t.Context(), "k", n); err != nil || !d.Allowed || d.Source != source {
					t.Errorf("AllowN(%d) = %+v, %v; want admitted by %v", n, d, err, source)
				}
			}
			used := func() int64 {
				t.Helper()
				st, found, err := lua.NewStore(rdb, lua.Options{}).Inspect(t.Context(), "k")
				if err != nil || !found {
					t.Fatalf("bucket = %+v, %v, %v", st, found, err)
				}
				return limit.Burst - int64(st.Tokens) - st.Outstanding[0] - st.Outstanding[1]
			}
			ask(100, hybrid.SourceStore)
			if err := c.down(t.Context(), server.Client(t)); err != nil {
				t.Fatal(err)
			}
			ask(10, hybrid.SourceLocal)
			if s := l.Stats(); s.NotExecuted != 1 || s.Unknown != 0 || !s.Fallback.Degraded {
				t.Errorf("%+v with %s; want one call that was not executed", s, name)
			}
			for range 5 {
				ask(10, hybrid.SourceLocal)
			}
			time.Sleep(100 * time.Millisecond)
			if s := l.Stats().Fallback; !s.Degraded {
				t.Errorf("%+v with %s; want no probe to succeed", s, name)
			}
			if err := c.up(t.Context(), server.Client(t)); err != nil {
				t.Fatal(err)
			}
			waitFor(t, 3*time.Second, "all is charged", func() bool {
				s := l.Stats().Fallback
				return !s.Degraded && s.Owed == 0
			})
			if name == "READONLY" {
				return // the other's data came along
			}
			// What the share granted, and with it what the node still holds of that.
			charged := l.Stats().Fallback.Charged
			if got := used(); charged < 60 || charged > 60+100 || got != 100+charged {
				t.Errorf("%d used of the bucket, %d charged; want 100 and that, of which 60 were admitted", got, charged)
			}
			time.Sleep(time.Second) // the ramp, and leases end
			ask(1, hybrid.SourceStore)
			if err := l.Close(t.Context()); err != nil {
				t.Error(err)
			}
			if got := used(); got != 100+charged+1 {
				t.Errorf("%d used of the bucket; want %d", got, 100+charged+1)
			}
		})
	}
}

// What shares admit while calls ramp up is charged soon too, also of keys that
// nobody asks for again.
func TestRampIsCharged(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.warm()
		ln := newLine(time.Millisecond)
		limit := hybrid.PerHour(1, 10)
		l := w.nodeOver(ln, limit, hybrid.Options{})
		ln.dead.Store(true)
		w.trace(limit).ask(l, "k", 1)
		w.sleep(5 * time.Second)
		ln.dead.Store(false)
		for l.Stats().Fallback.Degraded {
			w.sleep(time.Millisecond)
		}
		var local int
		for i := range 50 {
			if d := w.trace(limit).ask(l, fmt.Sprint("once", i), 1); d.Source == hybrid.SourceLocal {
				local++
			}
			w.sleep(10 * time.Millisecond)
		}
		if local < 10 {
			t.Fatalf("%d of 50 decided by the share; want calls to ramp up", local)
		}
		w.sleep(2 * time.Second)
		if s := l.Stats().Fallback; s.Owed != 0 {
			t.Errorf("%+v 2s after calls ramped up; want nothing owed", s)
		}
	})
}

// A call for debts that fails, once Redis is back, is made again soon: also for
// keys that nobody asks for again.
func TestFailedChargeIsRepeated(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.warm()
		ln := newLine(time.Millisecond)
		limit := hybrid.PerHour(1, 10)
		l := w.nodeOver(ln, limit, hybrid.Options{})
		ln.outcomes(errRefused, errRefused, nil, errRefused) // the call, two probes, the debt
		if d := w.trace(limit).ask(l, "once", 1); d.Source != hybrid.SourceLocal {
			t.Fatalf("%+v; want it decided by the share", d)
		}
		w.sleep(3 * time.Second)
		if s := l.Stats().Fallback; s.Owed != 0 || s.Degraded {
			t.Errorf("%+v 3s after a call for debts failed; want it repeated", s)
		}
	})
}

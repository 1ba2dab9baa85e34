package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
)

// Nodes under steady load while something happens to real servers. Whatever it
// is: they go on deciding in time, the bound that is documented for it holds,
// Redis decides again by itself afterwards, and Close leaves nothing behind.
//
// Clusters and Sentinels: servers_cluster_test.go.

const (
	// drillTimeout is RedisTimeout: more than a busy machine is late.
	drillTimeout = 250 * time.Millisecond
	// drillSlack is how much longer than that a request may take, and three times
	// what the machine is late.
	drillSlack = 100 * time.Millisecond
	drillNodes = 3
	colds      = 12 // keys that are asked now and then
	// rampUp is how long after a server is back shares may still decide.
	rampUp = time.Second + 200*time.Millisecond
)

// drillLimit is of every key. What is asked of a hot one is twice as much.
var drillLimit = hybrid.PerSecond(60, 300)

// drill is nodes, their load, and what became of it.
type drill struct {
	t     *testing.T
	nodes []*hybrid.Limiter
	hot   []string // asked above their limit
	start time.Time
	late  time.Duration // of the machine, at worst

	began, ended, again time.Duration // of the fault, and when Redis decides
	took                time.Duration // from its end until all nodes are back and owe nothing

	// losses is how often a server may have lost a key's bucket, or some of what
	// had been taken from it.
	losses map[string]int64

	mu      sync.Mutex // guards asked and longest
	asked   map[string][]asked
	astray  [][]stretch // when some node was not on its feet, and another one could use Redis
	longest time.Duration
}

type stretch struct{ from, to time.Duration }

// newDrill returns nodes with a client each.
func newDrill(t *testing.T, client func(i int) hybrid.Client, opts hybrid.Options) *drill {
	d := &drill{t: t, start: time.Now(), hot: []string{"hot"}, losses: map[string]int64{}, asked: map[string][]asked{}}
	opts.MinNodes, opts.RedisTimeout = drillNodes, drillTimeout
	// Goroutines that this one starts, and those that they start, have the label: so
	// they can be told from those of tests that run beside this one.
	pprof.SetGoroutineLabels(pprof.WithLabels(context.Background(), pprof.Labels("drill", t.Name())))
	for i := range drillNodes {
		l, err := hybrid.New(client(i), drillLimit, opts)
		if err != nil {
			t.Fatal(err)
		}
		d.nodes = append(d.nodes, l)
	}
	return d
}

// clients returns what makes clients of one server: as tests have it, as go-redis
// has it by itself, and that with contexts heeded.
func clients(t *testing.T, addr string, adapt func(*redis.Options)) func(i int) hybrid.Client {
	return func(i int) hybrid.Client {
		opts := redistest.Options(addr)
		if i > 0 {
			opts = &redis.Options{Addr: addr, ContextTimeoutEnabled: i > 1}
		}
		if adapt != nil {
			adapt(opts)
		}
		rdb := redis.NewClient(opts)
		t.Cleanup(func() { rdb.Close() })
		return rdb
	}
}

func (d *drill) since() time.Duration { return time.Since(d.start) }

// ask makes one request and records it.
func (d *drill) ask(l *hybrid.Limiter, key string, n int64) hybrid.Decision {
	var a asked
	a.Start, a.N = d.since(), n
	dec, err := l.AllowN(context.Background(), key, n)
	a.End, a.d = d.since(), dec
	if err != nil {
		d.t.Errorf("AllowN(%q) = %v; want a decision", key, err)
	}
	d.mu.Lock()
	d.asked[key] = append(d.asked[key], a)
	d.longest = max(d.longest, a.End-a.Start)
	d.mu.Unlock()
	return dec
}

// warm connects the nodes, and lets them hear of one another and of the keys.
func (d *drill) warm() {
	d.t.Helper()
	for i, l := range d.nodes {
		waitFor(d.t, 10*time.Second, "Redis decides", func() bool {
			return d.ask(l, fmt.Sprint("warm", i, time.Now()), 1).Source == hybrid.SourceStore
		})
		for _, key := range d.hot {
			d.ask(l, key, 1)
		}
	}
}

// drain nearly empties the hot keys.
func (d *drill) drain() {
	d.t.Helper()
	for _, key := range d.hot {
		waitFor(d.t, 10*time.Second, key+" is drained", func() bool {
			return d.ask(d.nodes[0], key, drillLimit.Burst-60).Allowed
		})
	}
	d.longest = 0 // first connections take their time
}

// load asks all nodes until stop is closed: for each hot key twice as often as its
// limit allows, and for cold ones.
func (d *drill) load(stop <-chan struct{}) {
	pause := time.Duration(float64(time.Second) * drillNodes / (2 * drillLimit.Rate))
	var wg sync.WaitGroup
	each := func(f func(n int)) {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				case <-time.After(pause/2 + rand.N(pause)):
				}
				f(n)
			}
		})
	}
	for i, l := range d.nodes {
		for _, key := range d.hot {
			each(func(int) { d.ask(l, key, 1) })
		}
		each(func(n int) { d.ask(l, fmt.Sprint("cold", (n+i)%colds), 1) })
	}
	wg.Wait()
}

// surge asks for all that there is of the hot keys: what a bucket has too much
// would not show otherwise.
func (d *drill) surge() {
	for _, key := range d.hot {
		for _, l := range d.nodes {
			for range 100 {
				if !d.ask(l, key, 20).Allowed {
					break
				}
			}
		}
	}
}

// watch notes when nodes are not on their feet, until stop.
func (d *drill) watch(stop <-chan struct{}) {
	for well := true; ; {
		s := stretch{from: d.since()}
		select {
		case <-stop:
			return
		case <-time.After(10 * time.Millisecond):
		}
		now, alone := d.onFeet()
		if well && !now {
			d.astray = append(d.astray, nil)
		}
		if s.to = d.since(); (!well || !now) && !alone {
			last := &d.astray[len(d.astray)-1]
			*last = append(*last, s)
		}
		well = now
	}
}

// onFeet reports whether all nodes ask Redis, and owe nothing, and if not
// whether nobody asks it.
func (d *drill) onFeet() (well, alone bool) {
	well, alone = true, true
	for _, l := range d.nodes {
		s := l.Stats().Fallback
		well = well && !s.Degraded && s.State == "closed" && s.Owed == 0
		alone = alone && s.Degraded
	}
	return well, alone
}

// run loads the nodes while fault happens, which returns when it is over, and
// checks what became of it.
func (d *drill) run(fault func()) {
	d.t.Helper()
	stop, closed := make(chan struct{}), make(chan struct{})
	var wg, timing sync.WaitGroup
	timing.Go(func() { d.late = hiccup(closed) })
	wg.Go(func() { d.watch(stop) })
	wg.Go(func() { d.load(stop) })
	time.Sleep(500 * time.Millisecond)
	d.began = d.since()
	fault()
	d.ended = d.since()
	for well := false; !well && d.since() < d.ended+10*time.Second; time.Sleep(10 * time.Millisecond) {
		well, _ = d.onFeet()
	}
	d.took = d.since() - d.ended
	time.Sleep(rampUp)
	d.again = d.since()
	time.Sleep(500 * time.Millisecond)
	d.surge()
	close(stop)
	wg.Wait()
	err := d.close()
	close(closed)
	timing.Wait()
	d.check(err)
}

// check looks at what became of the requests, and of Close.
func (d *drill) check(closing error) {
	t := d.t
	t.Helper()
	if most := drillTimeout + drillSlack + 3*d.late; d.longest > most {
		t.Errorf("a request took %v; want at most %v", d.longest, most)
	}
	var peaks []string
	for key, all := range d.asked {
		for _, until := range []time.Duration{d.ended, d.since()} {
			peak, most := lease.PeakLevel(drillLimit, admissions(all, until)), d.most(key, until)
			if peak > most {
				t.Errorf("%s: level %.0f until %v; want at most %.0f", key, peak, until, most)
			}
			if slices.Contains(d.hot, key) {
				peaks = append(peaks, fmt.Sprintf("%s: level %.0f of %.0f", key, peak, most))
			}
		}
	}
	after := d.sources("", d.again, d.since())
	t.Logf("%s; longest request %v, machine late by %v; fault of %v, back after %v; during %v, after %v", strings.Join(peaks, ", "),
		d.longest, d.late, d.ended-d.began, d.took, d.sources("", d.began, d.ended), after)
	if d.late > drillTimeout/4 {
		return // a machine that late is like a Redis that fails
	}
	if closing != nil {
		t.Errorf("Close = %v; want nil", closing)
	}
	if d.took > 5*time.Second {
		t.Errorf("after %v %+v; want Redis asked again and nothing owed", d.took, d.nodes[0].Stats().Fallback)
	}
	for source, n := range after {
		if source == hybrid.SourceLocal {
			t.Errorf("%d decided by shares after the fault, by %v; want Redis to decide", n, after)
		}
	}
	if after[hybrid.SourceStore] == 0 {
		t.Errorf("after the fault decided by %v; want Redis to decide", after)
	}
	for _, key := range d.hot {
		if !d.denied(key) {
			t.Errorf("%s: nobody denied; want it to be asked above its limit", key)
		}
	}
}

// most is the level that key may reach: burst + what was lost, and with a node that
// was off its feet also E + U (package fallback, What holds when). E is what is
// granted in a lease period, and as much again for calls on the way, and a token
// for each node. U is at most what was asked beyond the rate while some node owed
// and another one could use Redis: while nobody can, shares keep to the limit.
func (d *drill) most(key string, until time.Duration) float64 {
	most := float64(drillLimit.Burst * (1 + d.losses[key]))
	if len(d.astray) == 0 {
		return most // U is 0, and nothing was decided by what a node knew
	}
	var worst float64
	for _, episode := range d.astray {
		var u float64
		for _, s := range episode {
			if s.from > until {
				break
			}
			u -= drillLimit.Rate * (s.to - s.from).Seconds()
			for _, a := range d.asked[key] {
				if a.Start >= s.from && a.Start < s.to {
					u += float64(a.N)
				}
			}
			u = max(0, u)
		}
		worst = max(worst, u)
	}
	const period = 0.25 // seconds
	return most + 2*drillLimit.Rate*period + drillNodes + worst
}

// admissions returns what was admitted of what was asked until then.
func admissions(all []asked, until time.Duration) (trace []lease.Admission) {
	for _, a := range all {
		if a.d.Allowed && a.Start < until {
			trace = append(trace, a.Admission)
		}
	}
	return trace
}

// sources counts who decided what was asked of keys with the prefix, wholly in
// that time.
func (d *drill) sources(prefix string, from, to time.Duration) map[hybrid.Source]int {
	by := map[hybrid.Source]int{}
	for key, all := range d.asked {
		for _, a := range all {
			if strings.HasPrefix(key, prefix) && a.Start > from && a.End < to {
				by[a.d.Source]++
			}
		}
	}
	return by
}

func (d *drill) denied(key string) bool {
	for _, a := range d.asked[key] {
		if !a.d.Allowed {
			return true
		}
	}
	return false
}

// close closes the nodes, and fails the test if something of them is left.
func (d *drill) close() (err error) {
	d.t.Helper()
	if d.running() == "" {
		d.t.Error("no goroutines of the nodes are found before Close") // so it would say nothing after it
	}
	for _, l := range d.nodes {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		err = errors.Join(err, l.Close(ctx))
		cancel()
		checkLedger(d.t, l)
	}
	var left string
	for range 200 {
		if left = d.running(); left == "" {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
	d.t.Errorf("goroutines left after Close:\n%s", left)
	return err
}

// running returns the goroutines of this drill's Limiters.
func (d *drill) running() string {
	var all, left strings.Builder
	if err := pprof.Lookup("goroutine").WriteTo(&all, 1); err != nil {
		d.t.Fatal(err)
	}
	for g := range strings.SplitSeq(all.String(), "\n\n") {
		if strings.Contains(g, fmt.Sprintf("%q:%q", "drill", d.t.Name())) && ours.MatchString(g) {
			left.WriteString(g + "\n\n")
		}
	}
	return left.String()
}

// untouched fails the test if a node noticed anything.
func (d *drill) untouched() {
	d.t.Helper()
	if d.late > drillTimeout/4 {
		return // the machine is late, and they noticed that
	}
	for _, l := range d.nodes {
		if s := l.Stats(); s.Failed != 0 || s.Unknown != 0 || s.Fallback.Admitted != 0 {
			d.t.Errorf("%+v; want no failure", s)
		}
	}
}

// degraded fails the test unless all nodes had to do without Redis for a while.
func (d *drill) degraded() {
	d.t.Helper()
	for i, l := range d.nodes {
		if s := l.Stats().Fallback; s.Probes == 0 || s.Admitted == 0 {
			d.t.Errorf("node %d: %+v; want it to have gone on without Redis", i, s)
		}
	}
}

// do carries commands out on a server, out of the nodes' way.
func do(t *testing.T, server *redistest.Server, commands ...string) {
	t.Helper()
	c := server.Client(t)
	for _, command := range commands {
		var args []any
		for arg := range strings.FieldsSeq(command) {
			args = append(args, arg)
		}
		if err := c.Do(context.Background(), args...).Err(); err != nil && !errors.Is(err, redis.Nil) {
			t.Errorf("%s = %v", command, err)
		}
	}
}

// repeatedly runs f at that pace, for that long.
func repeatedly(pause, span time.Duration, f func()) (n int) {
	for begin := time.Now(); time.Since(begin) < span; n++ {
		f()
		time.Sleep(pause)
	}
	return n
}

// A script that is gone is loaded again: nobody notices. Beats travel along, so
// that there are pipelines for the flush to come in the middle of.
func TestServers_ScriptFlush(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	flusher := server.Client(t)
	d := newDrill(t, clients(t, server.Addr(), nil), hybrid.Options{Heartbeat: 100 * time.Millisecond})
	d.warm()
	d.drain()
	var flushes int
	d.run(func() {
		flushes = repeatedly(2*time.Millisecond, 2*time.Second, func() {
			if err := flusher.ScriptFlush(context.Background()).Err(); err != nil {
				t.Errorf("SCRIPT FLUSH = %v", err)
			}
		})
	})
	d.untouched()
	if n := server.CommandCalls(t, "eval"); flushes < 50 || n < 20 {
		t.Errorf("%d flushes, %d EVAL; want many", flushes, n)
	}
}

// Connections are cut all the time, also between a command and its reply.
func TestServers_ClientKill(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	d := newDrill(t, clients(t, server.Addr(), nil), hybrid.Options{})
	d.warm()
	d.drain()
	killer := server.Client(t)
	d.run(func() {
		repeatedly(20*time.Millisecond, 2*time.Second, func() {
			if err := killer.ClientKillByFilter(context.Background(), "TYPE", "normal").Err(); err != nil {
				t.Errorf("CLIENT KILL = %v", err)
			}
		})
	})
}

// A full server refuses what would need memory, until there is some.
func TestServers_OutOfMemory(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, "--maxmemory", "16mb", "--maxmemory-policy", "noeviction")
	d := newDrill(t, clients(t, server.Addr(), nil), hybrid.Options{})
	d.warm()
	d.drain()
	c := server.Client(t)
	d.run(func() {
		ctx, n, value := context.Background(), 0, strings.Repeat("x", 256<<10)
		for n < 1000 && c.Set(ctx, fmt.Sprint("other", n), value, 0).Err() == nil {
			n++
		}
		// A client that is refused leaves room for as much as it would have sent.
		if err := c.ConfigSet(ctx, "maxmemory", "8mb").Err(); err != nil {
			t.Error(err)
		}
		time.Sleep(1500 * time.Millisecond)
		for i := range n {
			if err := c.Del(ctx, fmt.Sprint("other", i)).Err(); err != nil {
				t.Error(err)
			}
		}
	})
	d.degraded()
}

// A server that has to make room drops buckets too: each is worth a burst.
func TestServers_Eviction(t *testing.T) {
	for policy, least := range map[string]int64{
		"allkeys-random": 1,
		"allkeys-lru":    0, // what is hot seldom is
	} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t, "--maxmemory", "12mb", "--maxmemory-policy", policy, "--notify-keyspace-events", "Ee")
			c := server.Client(t)
			evicted := c.Subscribe(context.Background(), "__keyevent@0__:evicted")
			if _, err := evicted.Receive(t.Context()); err != nil {
				t.Fatal(err)
			}
			d := newDrill(t, clients(t, server.Addr(), nil), hybrid.Options{})
			d.warm()
			d.drain()
			var (
				hot      atomic.Int64
				counting sync.WaitGroup
				count    = map[string]int64{}
			)
			counting.Go(func() {
				for m := range evicted.Channel() {
					count[m.Payload]++
					if m.Payload == redisKey("hot") {
						hot.Add(1)
					}
				}
			})
			d.run(func() {
				value, n := strings.Repeat("x", 256<<10), 0
				for begin := time.Now(); time.Since(begin) < 2*time.Second || hot.Load() < least && time.Since(begin) < 10*time.Second; n++ {
					if err := c.Set(context.Background(), fmt.Sprint("other", n), value, 0).Err(); err != nil {
						t.Errorf("SET = %v", err)
					}
					time.Sleep(20 * time.Millisecond)
				}
				if err := c.ConfigSet(context.Background(), "maxmemory", "64mb").Err(); err != nil {
					t.Error(err)
				}
				time.Sleep(50 * time.Millisecond) // until all are heard of
				evicted.Close()
				counting.Wait()
				for key := range d.keys() {
					d.losses[key] = count[redisKey(key)]
				}
			})
			d.untouched()
			total := server.Info(t, "stats")["evicted_keys"]
			t.Logf("%s keys evicted, the hot one %d times", total, hot.Load())
			if hot.Load() < least || total == "0" {
				t.Errorf("%s keys evicted, the hot one %d times; want it evicted", total, hot.Load())
			}
		})
	}
}

// keys returns the keys of the load.
func (d *drill) keys() map[string]bool {
	keys := map[string]bool{}
	for _, key := range d.hot {
		keys[key] = true
	}
	for i := range colds {
		keys[fmt.Sprint("cold", i)] = true
	}
	return keys
}

// The server hangs for longer than anybody waits, and then answers it all.
func TestServers_DebugSleep(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, "--enable-debug-command", "local")
	d := newDrill(t, clients(t, server.Addr(), nil), hybrid.Options{})
	d.warm()
	d.drain()
	opts := redistest.Options(server.Addr())
	opts.ReadTimeout = 10 * time.Second
	c := redis.NewClient(opts)
	defer c.Close()
	d.run(func() {
		for range 2 {
			if err := c.Do(context.Background(), "DEBUG", "SLEEP", "1").Err(); err != nil {
				t.Errorf("DEBUG SLEEP = %v", err)
			}
			time.Sleep(100 * time.Millisecond)
		}
	})
	d.degraded()
}

// TLS and a password: a server that comes back, empty, is trusted and told the
// password again. That it is empty is no burst more, for nodes tell it what they
// know (package fallback, Why the books balance).
func TestServers_TLS(t *testing.T) {
	t.Parallel()
	server := redistest.StartTLS(t, "--requirepass", "secret")
	d := newDrill(t, clients(t, server.Addr(), func(o *redis.Options) {
		o.TLSConfig, o.Password = server.TLS(), "secret"
	}), hybrid.Options{})
	d.warm()
	d.drain()
	d.run(func() {
		server.Kill()
		time.Sleep(time.Second)
		server.Restart(t)
	})
	d.degraded()
}

// Both protocols, as far as the server has them.
func TestServers_Protocols(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		t.Run(fmt.Sprint("RESP", protocol), func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			d := newDrill(t, clients(t, server.Addr(), func(o *redis.Options) { o.Protocol = protocol }), hybrid.Options{})
			d.warm()
			d.drain()
			d.run(func() { stall(t, server) })
			d.degraded()
		})
	}
}

// stall flushes scripts, cuts connections and stops the server for a second.
func stall(t *testing.T, server *redistest.Server) {
	do(t, server, "SCRIPT FLUSH", "CLIENT KILL TYPE normal SKIPME yes")
	time.Sleep(300 * time.Millisecond)
	server.Pause()
	time.Sleep(time.Second)
	server.Resume()
}

// Valkey is as good.
func TestServers_Valkey(t *testing.T) {
	t.Parallel()
	server := redistest.StartValkey(t)
	d := newDrill(t, clients(t, server.Addr(), nil), hybrid.Options{})
	d.warm()
	d.drain()
	d.run(func() { stall(t, server) })
	d.degraded()
}

package membership

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lua"
)

const (
	period = time.Second
	// turn is when every node has beaten again, however the dice fell.
	turn = period*11/10 + time.Millisecond
	ttl  = ttlPeriods * period

	nodesKey = "hybridlimit:{nodes}"
)

// bubble runs f in a synctest bubble with an in-process Redis reached without a
// socket, so fake time moves for all of it. Nodes are closed when f returns, and
// a goroutine that is then left fails the test.
func bubble(t *testing.T, f func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := miniredis.NewMiniRedis()
		defer m.Close()
		m.ClockTTL(true)
		w := &world{t: t, redis: m}
		defer func() {
			for _, n := range w.nodes {
				n.Close(context.Background()) // some are closed, some cut off
				n.rdb.Close()
			}
		}()
		f(t, w)
	})
}

// world is a Redis and the nodes on it, in fake time.
type world struct {
	t      *testing.T
	redis  *miniredis.Miniredis
	nodes  []*member
	skew   time.Duration // how far the server's clock is ahead
	skewed bool
}

// use keeps the nodes that were started from coming to rest.
func (w *world) use() {
	for _, n := range w.nodes {
		n.mu.Lock()
		started := !n.started.IsZero()
		n.mu.Unlock()
		if started {
			n.Start()
		}
	}
}

// member is a node with a line of its own to Redis.
type member struct {
	*Members
	*line
	store *lua.Store
	rdb   *redis.Client
	t     *testing.T
}

// add returns a node that is not started.
func (w *world) add(opts Options) *member {
	w.t.Helper()
	ro := redistest.Options("127.0.0.1:6379") // an address: a name would be looked up outside the bubble
	ro.Dialer = func(context.Context, string, string) (net.Conn, error) { return w.redis.Dial() }
	n := &member{line: &line{}, rdb: redis.NewClient(ro), t: w.t}
	n.rdb.AddHook(n.line)
	n.store = lua.NewStore(n.rdb, lua.Options{})
	var err error
	if n.Members, err = New(n.store, opts); err != nil {
		w.t.Fatal(err)
	}
	w.nodes = append(w.nodes, n)
	return n
}

// start returns n nodes that were started and know of one another.
func (w *world) start(n int) []*member {
	w.t.Helper()
	nodes := make([]*member, n)
	for i := range nodes {
		nodes[i] = w.add(Options{ID: fmt.Sprintf("node-%d", i)})
		nodes[i].Start()
	}
	w.sleep(2 * turn)
	for _, node := range nodes {
		node.want(n, n)
	}
	return nodes
}

// stepServer moves the server's clock by d, away from everybody else's. From
// then on only sleep moves it.
func (w *world) stepServer(d time.Duration) {
	w.skew += d
	w.skewed = true
	w.redis.SetTime(time.Now().Add(w.skew))
}

// sleep passes d of fake time, on the server too.
func (w *world) sleep(d time.Duration) {
	for !w.skewed && d > 0 {
		w.use()
		time.Sleep(min(d, time.Minute))
		d -= time.Minute
	}
	if !w.skewed {
		return
	}
	for end := time.Now().Add(d); time.Now().Before(end); {
		time.Sleep(min(20*time.Millisecond, time.Until(end)))
		w.redis.SetTime(time.Now().Add(w.skew))
	}
}

// until passes fake time until ok.
func (w *world) until(ok func() bool) {
	w.t.Helper()
	for end := time.Now().Add(time.Hour); !ok(); w.sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatal("an hour went by; want it to happen sooner")
		}
	}
}

// want fails the test unless the node's last beat counted live nodes and N̂ is n.
func (n *member) want(live, nodes int) {
	n.t.Helper()
	synctest.Wait()
	if s := n.Stats(); s.Live != live || s.Nodes != nodes || n.Nodes() != nodes {
		n.t.Errorf("%s: Stats = %+v, Nodes = %d; want %d live and N̂ %d", n.ID(), s, n.Nodes(), live, nodes)
	}
}

// lease makes a call for a token, as the node would.
func (n *member) lease() {
	n.t.Helper()
	call := lease.Call{
		Key: "k", Limit: lease.Limit{Rate: 1000, Burst: 1000}, TTL: time.Second,
		Need: 1, Bound: 1, Want: 1, LastEpoch: -1,
	}
	if a := n.store.Acquire(context.Background(), []lease.Call{call})[0]; a.Err != nil || a.Grant.Tokens != 1 {
		n.t.Errorf("%s: Acquire = %+v, %v; want a token", n.ID(), a.Grant, a.Err)
	}
}

// line is a node's connection to Redis: a hook that counts beats.
type line struct {
	dead  atomic.Bool  // nothing arrives: dialling fails at once
	hang  atomic.Bool  // nothing arrives: the client waits in vain
	slow  atomic.Int64 // nanoseconds that a command takes to arrive
	alone atomic.Int64 // beats that were sent alone
	rode  atomic.Int64 // beats that were sent in a pipeline
}

// isBeat tells a beat, not counting its second try with the script's text.
func isBeat(cmd redis.Cmder) bool {
	return cmd.Name() == "evalsha" && strings.Contains(fmt.Sprint(cmd.Args()...), nodesKey)
}

// fault returns what becomes of a command; nil if it arrives.
func (l *line) fault(ctx context.Context) error {
	if l.dead.Load() {
		return &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}
	}
	if l.hang.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	time.Sleep(time.Duration(l.slow.Load()))
	return nil
}

func (l *line) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *line) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if isBeat(cmd) {
			l.alone.Add(1)
		}
		if err := l.fault(ctx); err != nil {
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

func (l *line) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		for _, cmd := range cmds {
			if isBeat(cmd) {
				l.rode.Add(1)
			}
		}
		if err := l.fault(ctx); err != nil {
			for _, cmd := range cmds {
				cmd.SetErr(err)
			}
			return err
		}
		return next(ctx, cmds)
	}
}

func TestNodesAreCounted(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		nodes := w.start(3)
		for _, n := range nodes {
			if !n.Known() {
				t.Errorf("%s: Known = false; want true after a beat", n.ID())
			}
		}
		for k := range 100 {
			owners := 0
			for _, n := range nodes {
				if n.Owns(fmt.Sprint("key ", k), 1) {
					owners++
				}
			}
			if owners != 1 {
				t.Errorf("key %d has %d owners; want 1", k, owners)
			}
		}
	})
}

// A node's beats are a period apart, give or take a tenth, whether they work or
// not: as many per hour, but no two nodes in step.
func TestPace(t *testing.T) {
	for name, fault := range map[string]func(l *line){
		"well":    func(*line) {},
		"refused": func(l *line) { l.dead.Store(true) },
		"silent":  func(l *line) { l.hang.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				n := w.add(Options{})
				fault(n.line)
				n.Start()
				seen := map[time.Duration]bool{}
				last, at := int64(1), time.Now()
				synctest.Wait()
				for range 600_000 / 5 {
					w.sleep(5 * time.Millisecond)
					if beats := n.alone.Load(); beats != last {
						gap := time.Since(at)
						if beats != last+1 || gap < period*9/10 || gap > turn+5*time.Millisecond {
							t.Errorf("%d beats after %v; want 1 after %v, give or take a tenth", beats-last, gap, period)
						}
						last, at = beats, time.Now()
						seen[gap] = true
					}
				}
				if last < 590 || last > 610 {
					t.Errorf("%d beats in 10 minutes; want about 600", last)
				}
				if len(seen) < 10 {
					t.Errorf("%d different times between beats; want many", len(seen))
				}
			})
		})
	}
}

// A dead node counts until it lapses, and in N̂ for five minutes more.
func TestDeadNodeLapses(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		nodes := w.start(3)
		nodes[2].dead.Store(true)
		w.sleep(ttl - turn) // its last beat was at most a turn ago
		nodes[0].want(3, 3)
		w.sleep(2*turn + 10*time.Millisecond)
		nodes[0].want(2, 3)
		nodes[1].want(2, 3)
		w.sleep(window - 3*turn)
		nodes[0].want(2, 3)
		w.sleep(4 * turn)
		nodes[0].want(2, 2)
		nodes[1].want(2, 2)
	})
}

func TestCloseLeavesAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		nodes := w.start(3)
		if err := nodes[2].Close(context.Background()); err != nil {
			t.Errorf("Close = %v; want nil", err)
		}
		if ids, _ := w.redis.ZMembers(nodesKey); len(ids) != 2 {
			t.Errorf("nodes after Close: %q; want 2", ids)
		}
		w.sleep(turn)
		nodes[0].want(2, 3)
		sent := nodes[2].alone.Load()
		nodes[2].Start()
		nodes[2].lease()
		w.sleep(window + 2*turn)
		if err := nodes[2].Close(context.Background()); err != nil {
			t.Errorf("second Close = %v; want nil", err)
		}
		if n := nodes[2].alone.Load() + nodes[2].rode.Load(); n != sent {
			t.Errorf("%d beats after Close; want none", n-sent)
		}
		nodes[0].want(2, 2)
		nodes[2].want(3, 3) // it knows what it knew
	})
}

// A beat that is on its way does not arrive after the farewell and undo it.
func TestCloseWaitsForTheBeat(t *testing.T) {
	for name, beat := range map[string]func(w *world, n *member){
		"alone": func(w *world, n *member) { w.sleep(turn) },
		"riding": func(w *world, n *member) {
			w.sleep(period * 6 / 10)
			go n.lease()
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				n := w.start(1)[0]
				n.lease() // loads the script
				n.slow.Store(int64(period * 3 / 10))
				before := n.alone.Load() + n.rode.Load()
				beat(w, n)
				synctest.Wait()
				if n.alone.Load()+n.rode.Load() != before+1 {
					t.Fatal("no beat is on its way; want one")
				}
				n.slow.Store(0)
				if err := n.Close(context.Background()); err != nil {
					t.Errorf("Close = %v; want nil", err)
				}
				w.sleep(period)
				if ids, _ := w.redis.ZMembers(nodesKey); len(ids) != 0 {
					t.Errorf("nodes after Close: %q; want none", ids)
				}
			})
		})
	}
}

// Close also waits for Options.Nodes, or its goroutine would be left.
func TestCloseWaitsForTheCallback(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		var inside, slow atomic.Bool
		n := w.add(Options{Nodes: func() int {
			if slow.Load() {
				inside.Store(true)
				time.Sleep(period / 2)
			}
			return 1
		}})
		n.Start()
		slow.Store(true)
		w.until(inside.Load)
		if err := n.Close(context.Background()); err != nil {
			t.Errorf("Close = %v; want nil", err)
		}
		select {
		case <-n.gone:
		default:
			t.Error("the goroutine is there after Close; want it gone")
		}
	})
}

// Close at the instant when a beat is due: either it goes before the farewell or
// it does not go.
func TestCloseBesideABeat(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		for range 200 {
			n := w.add(Options{})
			n.Start()
			w.sleep(period / 2)
			w.sleep(n.untilAlone())
			if err := n.Close(context.Background()); err != nil {
				t.Errorf("Close = %v; want nil", err)
			}
			synctest.Wait()
			if ids, _ := w.redis.ZMembers(nodesKey); len(ids) != 0 {
				t.Fatalf("nodes after Close: %q; want none", ids)
			}
		}
	})
}

func TestCloseIsBounded(t *testing.T) {
	for name, fault := range map[string]func(l *line){
		"refused": func(l *line) { l.dead.Store(true) },
		"silent":  func(l *line) { l.hang.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				n := w.start(1)[0]
				fault(n.line)
				w.sleep(period * 12 / 10) // in a silent line the next beat hangs
				begin := time.Now()
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
				defer cancel()
				if err := n.Close(ctx); err == nil {
					t.Error("Close without a server = nil; want an error")
				}
				if took := time.Since(begin); took > 10*time.Millisecond {
					t.Errorf("Close took %v; want at most its context's 10ms", took)
				}
				if err := n.Close(context.Background()); err != nil {
					t.Errorf("second Close = %v; want nil", err)
				}
			})
		})
	}
	t.Run("a ride that hangs", func(t *testing.T) {
		bubble(t, func(t *testing.T, w *world) {
			n := w.start(1)[0]
			n.lease()
			n.slow.Store(int64(time.Minute))
			w.sleep(period * 6 / 10)
			go n.lease()
			synctest.Wait()
			n.slow.Store(0)
			begin := time.Now()
			if err := n.Close(context.Background()); err != nil {
				t.Errorf("Close = %v; want nil", err)
			}
			if took := time.Since(begin); took != n.timeout {
				t.Errorf("Close took %v; want the %v that it waits for a beat", took, n.timeout)
			}
			w.sleep(time.Minute) // for the call
		})
	})
	t.Run("no deadline", func(t *testing.T) {
		bubble(t, func(t *testing.T, w *world) {
			n := w.start(1)[0]
			n.hang.Store(true)
			begin := time.Now()
			if err := n.Close(context.Background()); !errors.Is(err, lease.ErrUnknownOutcome) {
				t.Errorf("Close on a silent line = %v; want ErrUnknownOutcome", err)
			}
			if took := time.Since(begin); took > 2*maxTimeout {
				t.Errorf("Close took %v; want at most two beats' time-outs", took)
			}
		})
	})
}

func TestCloseBeforeStart(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		n := w.add(Options{})
		if err := n.Close(context.Background()); err != nil {
			t.Errorf("Close = %v; want nil", err)
		}
		n.Start()
		w.sleep(time.Minute)
		if sent := n.alone.Load(); sent != 0 {
			t.Errorf("%d beats of a node closed before Start; want 0", sent)
		}
	})
}

// However the server's clock is set, the living count and the dead lapse.
func TestServerClockSteps(t *testing.T) {
	for _, step := range []time.Duration{-time.Hour, time.Hour} {
		t.Run(step.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				nodes := w.start(4)
				w.stepServer(0) // the server's clock is the test's from here on
				w.sleep(turn)
				nodes[3].dead.Store(true)
				w.stepServer(step)
				for range 20 { // never a moment when a node believes in fewer
					w.sleep(turn / 10)
					for _, n := range nodes[:3] {
						if n.Nodes() != 4 {
							t.Errorf("%s: Nodes = %d; want 4", n.ID(), n.Nodes())
						}
					}
				}
				w.sleep(ttl)
				for _, n := range nodes[:3] {
					n.want(3, 4)
				}
			})
		})
	}
}

func TestServerIsEmptied(t *testing.T) {
	for name, spoil := range map[string]func(m *miniredis.Miniredis){
		"flushed":              func(m *miniredis.Miniredis) { m.FlushAll() },
		"WRONGTYPE":            func(m *miniredis.Miniredis) { m.Del(nodesKey); _ = m.Set(nodesKey, "x") },
		"no generation":        func(m *miniredis.Miniredis) { m.Del(nodesKey + ":gen") },
		"WRONGTYPE generation": func(m *miniredis.Miniredis) { m.Del(nodesKey + ":gen"); m.HSet(nodesKey+":gen", "x", "y") },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				nodes := w.start(3)
				for range 10 {
					spoil(w.redis)
					w.sleep(turn)
					for _, n := range nodes {
						if n.Nodes() != 3 {
							t.Errorf("%s: Nodes = %d; want 3", n.ID(), n.Nodes())
						}
					}
				}
				w.sleep(turn)
				for _, n := range nodes {
					n.want(3, 3)
					if s := n.Stats(); s.Failed != 0 {
						t.Errorf("%s: %d beats failed; want 0", n.ID(), s.Failed)
					}
				}
			})
		})
	}
}

// A node with lease calls sends no beat of its own, but for the first, and is
// counted all the same.
func TestBeatsRide(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		nodes := w.start(3)
		alone := nodes[0].alone.Load()
		for range 100 * 10 {
			nodes[0].lease()
			w.sleep(100 * time.Millisecond)
		}
		for _, n := range nodes {
			n.want(3, 3)
		}
		if n := nodes[0].alone.Load() - alone; n != 0 {
			t.Errorf("%d beats went alone beside a call every 100 ms; want 0", n)
		}
		s := nodes[0].Stats()
		if s.Rode != nodes[0].rode.Load() || s.Rode < 95 || s.Rode > 230 {
			t.Errorf("%d beats rode in 100 s, Stats.Rode = %d; want 1 or 2 a second", nodes[0].rode.Load(), s.Rode)
		}
		if n := nodes[1].rode.Load(); n != 0 {
			t.Errorf("%d beats of a node without calls rode; want 0", n)
		}

		// Without calls it beats by itself again, in time.
		w.sleep(10 * turn)
		nodes[1].want(3, 3)
		if n := nodes[0].alone.Load() - alone; n < 8 {
			t.Errorf("%d beats went alone in 10 periods without calls; want about 10", n)
		}
	})
}

// A beat that failed is followed by one that goes alone: what is wrong with it
// must not cost lease calls time, one after the other.
func TestNoRideAfterAFailure(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		n := w.start(1)[0]
		n.lease() // loads the script
		rode := n.rode.Load()
		n.dead.Store(true)
		w.until(func() bool { return n.Stats().Failed == 1 })
		n.dead.Store(false)
		w.sleep(period * 7 / 10)
		n.lease() // a ride would be due
		if n.rode.Load() != rode {
			t.Error("a beat rode after one that failed; want it alone")
		}
		beats := n.Stats().Beats
		w.until(func() bool { return n.Stats().Beats == beats+1 })
		w.sleep(period * 7 / 10)
		n.lease()
		if n.rode.Load() != rode+1 {
			t.Error("no beat rode after one that worked; want it to")
		}
		if s := n.Stats(); s.Failed != 1 {
			t.Errorf("Stats.Failed = %d; want 1", s.Failed)
		}
	})
}

// An outage of an hour does not age N̂, nor do the low counts after it.
func TestOutage(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		nodes := w.start(3)
		for _, n := range nodes {
			n.dead.Store(true)
		}
		w.sleep(time.Hour)
		for _, n := range nodes {
			n.want(3, 3)
		}
		if age := nodes[0].Stats().Age; age < time.Hour || age > time.Hour+turn {
			t.Errorf("Stats.Age = %v; want an hour", age)
		}
		// One comes back long before the others. Those that it knew are owners.
		nodes[0].dead.Store(false)
		w.sleep(time.Minute)
		nodes[0].want(1, 3)
		owns := 0
		for k := range 300 {
			if nodes[0].Owns(fmt.Sprint("key ", k), 1) {
				owns++
			}
		}
		if owns < 60 || owns > 140 {
			t.Errorf("the first node to come back owns %d of 300 keys; want a third", owns)
		}
		for _, n := range nodes {
			n.dead.Store(false)
		}
		w.sleep(2 * turn)
		for _, n := range nodes {
			n.want(3, 3)
		}
		w.sleep(2 * window)
		for _, n := range nodes {
			n.want(3, 3)
		}
	})
}

// A node that takes another's place takes its keys, although N̂ never changed.
func TestReplacedNode(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		nodes := w.start(3)
		nodes[2].Close(context.Background())
		w.sleep(turn)
		next := w.add(Options{ID: "next"})
		next.Start()
		w.sleep(2 * turn)
		all := []*member{nodes[0], nodes[1], next}
		owns := map[string]int{}
		for k := range 300 {
			owners := 0
			for _, n := range all {
				if n.Owns(fmt.Sprint("key ", k), 1) {
					owners++
					owns[n.ID()]++
				}
			}
			if owners != 1 {
				t.Errorf("key %d has %d owners; want 1", k, owners)
			}
		}
		if owns["next"] < 60 || owns["next"] > 140 {
			t.Errorf("the new node owns %d of 300 keys; want a third", owns["next"])
		}
	})
}

// Without a server N̂ is what the platform says, and at least the minimum.
func TestPlatform(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		var pods atomic.Int64
		n := w.add(Options{Min: 4, Nodes: func() int { return int(pods.Load()) }})
		n.dead.Store(true)
		if n.Nodes() != 4 || n.Known() || !n.Owns("k", 1) || n.Owns("k", 0) {
			t.Errorf("before Start: Nodes = %d, Known = %v; want 4, false, and this node to own all", n.Nodes(), n.Known())
		}
		pods.Store(7)
		n.Start()
		if n.Nodes() != 7 {
			t.Errorf("Nodes after Start = %d; want the platform's 7", n.Nodes())
		}
		pods.Store(9)
		w.sleep(turn)
		n.want(0, 9)
		pods.Store(2)
		w.sleep(window - turn)
		n.want(0, 9)
		w.sleep(3 * turn)
		n.want(0, 4)
		pods.Store(6)
		w.sleep(turn)
		n.want(0, 6)
		pods.Store(-1) // it does not know, for an hour
		w.sleep(time.Hour)
		n.want(0, 6)
		n.dead.Store(false)
		w.sleep(turn)
		n.want(1, 6)
	})
}

// A node that is not used comes to rest and lapses, and is back when it is used.
func TestRest(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		nodes := w.start(2)
		for range 2 {
			for range 20 {
				nodes[0].Start()
				time.Sleep(time.Minute)
			}
			nodes[0].want(1, 1)
			if age := nodes[1].Stats().Age; age < 9*time.Minute || age > 11*time.Minute {
				t.Errorf("last beat of a node that is not used %v ago; want ten minutes of twenty", age)
			}
			nodes[1].Start()
			w.sleep(2 * turn)
			nodes[0].want(2, 2)
			nodes[1].want(2, 2)
		}
		// One that rests has left already.
		time.Sleep(20 * time.Minute)
		if err := nodes[1].Close(context.Background()); err != nil {
			t.Errorf("Close of a node at rest = %v; want nil", err)
		}
		nodes[1].Start()
		nodes[0].Start()
		time.Sleep(turn)
		nodes[0].want(1, 2) // it rested, too: no time passed
	})
}

// Stats before anything happened.
func TestStatsAtFirst(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		n := w.add(Options{})
		if got, want := n.Stats(), (Stats{Nodes: 1}); got != want {
			t.Errorf("Stats before Start = %+v; want %+v", got, want)
		}
		n.dead.Store(true)
		n.Start()
		w.sleep(time.Minute)
		if s := n.Stats(); s.Age != time.Minute || s.Beats != 0 || s.Failed < 50 {
			t.Errorf("Stats after a minute without a server = %+v; want an Age of 1m0s and about 60 Failed", s)
		}
	})
}

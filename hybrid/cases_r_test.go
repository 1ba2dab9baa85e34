package hybrid_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lua"
)

// Redis: scripts, replies, retries, keys.
//
// Cases of the group that are not here:
//
//	R10            other algorithms, versions  other algorithms
//	R12            warning of a policy         the daemon
//	R19            /readyz                     internal/server
//	R21, R25, R27  servers and client modes    servers_*test.go
//
// What nodes do while Redis is down: cases_f_test.go, outage_test.go.

// counted is a client hook that counts commands by name.
type counted struct{ evalsha, eval atomic.Int64 }

func (c *counted) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *counted) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		switch cmd.Name() {
		case "evalsha":
			c.evalsha.Add(1)
		case "eval":
			c.eval.Add(1)
		}
		return next(ctx, cmd)
	}
}

func (c *counted) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// stored returns what m holds of key; ok is false if there is nothing.
func stored(t *testing.T, m *miniredis.Miniredis, key string) (b bucket, ok bool) {
	t.Helper()
	state, err := m.Get(redisKey(key))
	if err != nil {
		return b, false
	}
	if b, err = parseBucket(state); err != nil {
		t.Fatal(err)
	}
	return b, true
}

func TestR01_ScriptFlush(t *testing.T) {
	m := miniredis.RunT(t)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true}) // a clone would lose the hook
	defer rdb.Close()
	counts := &counted{}
	rdb.AddHook(counts)
	l, err := hybrid.New(rdb, hybrid.PerHour(1, 40), hybrid.Options{
		RedisTimeout: 2 * time.Second, LeasePeriod: time.Hour, // no lease ends before the test does
	})
	if err != nil {
		t.Fatal(err)
	}
	flusher := redis.NewClient(&redis.Options{Addr: m.Addr()})
	defer flusher.Close()
	const keys, workers, calls = 500, 64, 10_000
	var admitted [keys]atomic.Int64
	var flushes int
	stop := make(chan struct{})
	var wg, flush sync.WaitGroup
	flush.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(rand.Int64N(int64(4 * time.Millisecond)))):
			}
			if err := flusher.ScriptFlush(context.Background()).Err(); err != nil {
				t.Errorf("SCRIPT FLUSH = %v; want nil", err)
			}
			flushes++
		}
	})
	for g := range workers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(5, uint64(g)))
			for range calls / workers {
				i := rng.IntN(keys)
				d, err := l.Allow(context.Background(), fmt.Sprint("k", i))
				if err != nil || d.Source == hybrid.SourcePolicy {
					t.Errorf("Allow = %+v, %v; want a decision by the bucket", d, err)
				}
				if d.Allowed {
					admitted[i].Add(1)
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	flush.Wait()
	if err := l.Close(t.Context()); err != nil {
		t.Errorf("Close = %v; want nil", err)
	}
	s := l.Stats()
	if s.Failed != 0 || s.NotExecuted != 0 || s.Unknown != 0 {
		t.Errorf("Stats = %+v; want no failures", s)
	}
	checkLedger(t, l)
	if flushes < 5 || counts.eval.Load() < 2 || counts.eval.Load() > counts.evalsha.Load() {
		t.Errorf("%d flushes, %d EVALSHA, %d EVAL; want at most one EVAL after an EVALSHA", flushes, counts.evalsha.Load(), counts.eval.Load())
	}
	for i := range admitted {
		key := fmt.Sprint("k", i)
		b, ok := stored(t, m, key)
		if n := admitted[i].Load(); ok && (40-b.tokens()-b.out() != n || b.out() != 0) {
			t.Errorf("%s: charged %d, %d still out; want %d, 0", key, 40-b.tokens()-b.out(), b.out(), n)
		}
	}
}

// fakeRedis answers script calls as told, in a bubble.
type fakeRedis struct {
	reply func(name string) string // the whole reply, as on the wire; "" for none
	eval  atomic.Int64             // EVALs seen
	calls atomic.Int64             // and EVALSHAs
}

func (f *fakeRedis) client() *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:6379",
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			c, s := net.Pipe()
			go f.serve(s)
			return c, nil
		},
		MaxRetries: -1, ContextTimeoutEnabled: true, Protocol: 2, DisableIdentity: true,
	})
}

func (f *fakeRedis) serve(c net.Conn) {
	defer c.Close()
	r := bufio.NewReader(c)
	number := func() int {
		line, err := r.ReadString('\n')
		if err != nil || len(line) < 2 {
			return -1
		}
		n, err := strconv.Atoi(strings.TrimSpace(line[1:]))
		if err != nil {
			return -1
		}
		return n
	}
	for {
		n := number()
		if n < 1 {
			return
		}
		args := make([]string, n)
		for i := range args {
			arg := make([]byte, max(0, number())+2)
			if _, err := io.ReadFull(r, arg); err != nil {
				return
			}
			args[i] = string(arg[:len(arg)-2])
		}
		name := strings.ToLower(args[0])
		reply := "-ERR unknown command\r\n"
		if name == "ping" {
			reply = "+PONG\r\n"
		}
		if (name == "eval" || name == "evalsha") && n > 3 && !strings.HasSuffix(args[3], "{nodes}") {
			if f.calls.Add(1); name == "eval" {
				f.eval.Add(1)
			}
			reply = f.reply(name)
		}
		if _, err := io.WriteString(c, reply); err != nil {
			return
		}
	}
}

// nodes returns two nodes on f that deny what it does not decide.
func (f *fakeRedis) nodes(t *testing.T) (a, b *hybrid.Limiter) {
	t.Helper()
	rdb := f.client()
	t.Cleanup(func() { rdb.Close() })
	var nodes [2]*hybrid.Limiter
	for i := range nodes {
		l, err := hybrid.New(rdb, hybrid.Limit{Rate: 1, Burst: 10, OnFailure: hybrid.Deny}, hybrid.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close(context.Background()) })
		nodes[i] = l
	}
	return nodes[0], nodes[1]
}

// integers is an array reply of them.
func integers(values ...int64) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(values))
	for _, v := range values {
		fmt.Fprintf(&b, ":%d\r\n", v)
	}
	return b.String()
}

// granted is a good reply to a request for one token.
var granted = integers(1, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0, 1)

func TestR03_ErrorTexts(t *testing.T) {
	const reload = "reload"
	for _, c := range []struct {
		text string
		want any // reload, or the class as an error
	}{
		{"NOSCRIPT No matching script. Please use EVAL.", reload},
		{"ERR NOSCRIPT No matching script.", reload},
		{"(error) NOSCRIPT No matching script", reload},

		{"OOM command not allowed when used memory > 'maxmemory'.", lease.ErrNotExecuted},
		{"ERR Error running script (call to f_1): @user_script:9: -OOM command not allowed when used memory > 'maxmemory'.", lease.ErrNotExecuted},
		{"READONLY You can't write against a read only replica.", lease.ErrNotExecuted},
		{"ERR Error running script (call to f_1): @user_script: 9: -READONLY You can't write against a read only replica.", lease.ErrNotExecuted},
		{"LOADING Redis is loading the dataset in memory", lease.ErrNotExecuted},
		{"BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", lease.ErrNotExecuted},
		{"CLUSTERDOWN The cluster is down", lease.ErrNotExecuted},
		{"MASTERDOWN Link with MASTER is down", lease.ErrNotExecuted},
		{"NOREPLICAS Not enough good replicas to write.", lease.ErrNotExecuted},
		{"MISCONF Redis is configured to save RDB snapshots", lease.ErrNotExecuted},
		{"NOAUTH Authentication required.", lease.ErrNotExecuted},
		{"NOPERM this user has no permissions to run the 'evalsha' command", lease.ErrNotExecuted},
		{"ERR The user executing the script can't run this command or subcommand script: f_1", lease.ErrNotExecuted},
		{"ERR max number of clients reached", lease.ErrNotExecuted},
		{"TRYAGAIN Multiple keys request during rehashing of slot", lease.ErrNotExecuted},

		{"WRONGTYPE Operation against a key holding the wrong kind of value", lease.ErrRejected},
		{"ERR Error compiling script (new function): WRONGTYPE Operation", lease.ErrRejected},
		{"ERR Error running script (call to f_1): @user_script:3: attempt to perform arithmetic on a nil value", lease.ErrRejected},
		{"ERR unknown command 'EVALSHA'", lease.ErrRejected},
		{"ERR", lease.ErrRejected},
		{"", lease.ErrRejected},
	} {
		t.Run(c.text[:min(len(c.text), 20)], func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeRedis{reply: func(name string) string {
					if name == "eval" && c.want == reload {
						return granted
					}
					return "-" + c.text + "\r\n"
				}}
				l, other := f.nodes(t)
				d, err := l.Allow(t.Context(), "k")
				if c.want == reload {
					if err != nil || !d.Allowed || d.Source != hybrid.SourceStore || f.eval.Load() != 1 {
						t.Errorf("Allow = %+v, %v after %d EVAL; want admitted after 1", d, err, f.eval.Load())
					}
					return
				}
				if err != nil || d.Allowed || d.Source != hybrid.SourcePolicy {
					t.Errorf("Allow = %+v, %v; want denied by policy", d, err)
				}
				if err := other.Refund(t.Context(), "k", 1); !errors.Is(err, c.want.(error)) || errors.Is(err, lease.ErrDown) {
					t.Errorf("Refund = %v; want %v", err, c.want)
				}
				if n := f.eval.Load(); n != 0 {
					t.Errorf("%d EVAL; want 0", n)
				}
				// A server that is at fault is not asked again; one that rejects is well.
				for _, n := range []*hybrid.Limiter{l, other} {
					if s := n.Stats().Fallback; s.Degraded == errors.Is(c.want.(error), lease.ErrRejected) {
						t.Errorf("Stats = %+v after %v", s, c.want)
					}
				}
			})
		})
	}
}

func TestR03_ReplyShapes(t *testing.T) {
	short := integers(1, 1, 1893369600, 475_000)
	for name, reply := range map[string]string{
		"nil":                  "$-1\r\n",
		"nil array":            "*-1\r\n",
		"status":               "+OK\r\n",
		"string":               "$5\r\nhello\r\n",
		"empty string":         "$0\r\n\r\n",
		"integer":              ":1\r\n",
		"float":                "$3\r\n0.5\r\n",
		"double":               ",0.5\r\n",
		"boolean":              "#t\r\n",
		"empty array":          "*0\r\n",
		"one integer":          integers(1),
		"short array":          short,
		"eleven of twelve":     integers(1, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0),
		"float among integers": strings.Replace(granted, ":9\r\n", "$3\r\n9.5\r\n", 1),
		"text among integers":  strings.Replace(granted, ":9\r\n", "$1\r\nx\r\n", 1),
		"nil among integers":   strings.Replace(granted, ":9\r\n", "$-1\r\n", 1),
		"array among integers": strings.Replace(granted, ":9\r\n", "*1\r\n:9\r\n", 1),
		"error among integers": strings.Replace(granted, ":9\r\n", "-ERR no\r\n", 1),
		"nan among integers":   strings.Replace(granted, ":9\r\n", "$3\r\nnan\r\n", 1),
		"integer too long":     strings.Replace(granted, ":9\r\n", ":99999999999999999999\r\n", 1),
		"map":                  "%1\r\n+a\r\n:1\r\n",
		"more than asked":      integers(1000, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0, 1),
		"negative grant":       integers(-1, 0, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0, 1),
		"bound over grant":     integers(0, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0, 1),
		"negative bound":       integers(1, -1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0, 1),
		"lua infinity":         integers(-1<<63, -1<<63, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0, 1),
		"limit missing":        integers(1, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 4, 1),
		"truncated":            short[:len(short)-3],
		"garbage":              "?\x00\xff\r\n",
		"no line end":          "garbage",
		"empty line":           "\r\n",
		"nothing":              "",
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeRedis{reply: func(string) string { return reply }}
				l, other := f.nodes(t)
				if d, err := l.Allow(t.Context(), "k"); err != nil || d.Allowed || d.Source != hybrid.SourcePolicy {
					t.Errorf("Allow on %q = %+v, %v; want denied by policy", reply, d, err)
				}
				if s := l.Stats(); s.Spent != 0 || s.Live != 0 || s.Failed != 1 {
					t.Errorf("Stats = %+v; want nothing spent", s)
				}
				if err := other.Refund(t.Context(), "k", 1); !errors.Is(err, hybrid.ErrUnknownOutcome) {
					t.Errorf("Refund on %q = %v; want ErrUnknownOutcome", reply, err)
				}
			})
		})
	}
}

// lossy is a Redis behind a proxy that loses replies, and a node on it whose
// client is as go-redis makes it: three retries.
type lossy struct {
	m     *miniredis.Miniredis
	proxy *redistest.Proxy
	rdb   redis.UniversalClient
	l     *hybrid.Limiter
	wait  time.Duration // for a reply
	keys  int
}

func newLossy(t *testing.T, cluster bool, timeout time.Duration) *lossy {
	t.Helper()
	m := miniredis.RunT(t)
	p := redistest.NewProxy(t, m.Addr())
	var rdb redis.UniversalClient
	if cluster {
		rdb = redis.NewClusterClient(&redis.ClusterOptions{
			Addrs: []string{p.Addr()},
			ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) {
				return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: p.Addr()}}}}, nil
			},
		})
	} else {
		rdb = redis.NewClient(&redis.Options{Addr: p.Addr()})
	}
	t.Cleanup(func() { rdb.Close() })
	l, err := hybrid.New(rdb, hybrid.Limit{Rate: 1.0 / 3600, Burst: 1000, OnFailure: hybrid.Deny}, hybrid.Options{
		RedisTimeout: timeout, LeasePeriod: time.Hour,
		Heartbeat: time.Minute, // no reply but those to lease calls and probes
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close(context.Background()) })
	x := &lossy{m: m, proxy: p, rdb: rdb, l: l, wait: timeout}
	for range 200 { // connect and load the script, however slow the machine is
		if d, err := l.AllowN(t.Context(), "warm", 1); err == nil && d.Allowed && l.Stats().Members.Beats > 0 {
			return x
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("no reply from Redis")
	return nil
}

// lose loses the next k replies, by dropping them or by closing the connection.
func (x *lossy) lose(k int, drop bool) {
	if drop {
		x.proxy.DropReplies(k)
	} else {
		x.proxy.CloseOnReply(k)
	}
}

// heal loses no more replies, and waits until the node asks Redis again.
func (x *lossy) heal(t *testing.T) {
	t.Helper()
	x.proxy.Heal()
	waitFor(t, 5*time.Second, "Redis is asked again", func() bool { return !x.l.Stats().Fallback.Degraded })
}

// ask asks for 10 tokens of a new key, until it is one for which Redis is asked:
// while calls ramp up after an outage it may not be.
func (x *lossy) ask(t *testing.T) (key string, d hybrid.Decision) {
	t.Helper()
	for begin := time.Now(); time.Since(begin) < 5*time.Second; time.Sleep(time.Millisecond) {
		x.keys++
		key = fmt.Sprint("k", x.keys)
		calls, sent := x.l.Stats().Calls, time.Now()
		d, err := x.l.AllowN(t.Context(), key, 10)
		if err != nil {
			t.Fatalf("AllowN = %v; want a decision", err)
		}
		answered := func() bool { return x.l.Stats().Calls > calls }
		if time.Since(sent) >= x.wait { // the call ends about when its caller stops waiting
			waitFor(t, 5*time.Second, "the call has ended", answered)
		}
		if answered() {
			return key, d
		}
		if d.Allowed || d.Source != hybrid.SourcePolicy {
			t.Fatalf("AllowN that was not sent = %+v; want denied by policy", d)
		}
	}
	t.Fatal("no call was sent")
	return "", d
}

// waitFor waits until ok, or fails the test.
func waitFor(t *testing.T, most time.Duration, what string, ok func() bool) {
	t.Helper()
	for begin := time.Now(); !ok(); time.Sleep(time.Millisecond) {
		if time.Since(begin) > most {
			t.Fatalf("after %v it is not so that %s", most, what)
		}
	}
}

// used returns the tokens of key that were charged and are not on lease.
func (x *lossy) used(t *testing.T, key string) int64 {
	t.Helper()
	b, ok := stored(t, x.m, key)
	if !ok {
		return 0
	}
	return 1000 - b.tokens() - b.out()
}

func TestR04_LostReplyChargesOnce(t *testing.T) {
	for _, cluster := range []bool{false, true} {
		for _, drop := range []bool{false, true} {
			if cluster && drop {
				continue // each would block a connection for its ReadTimeout
			}
			for _, k := range []int{1, 3, 100} {
				t.Run(fmt.Sprintf("cluster=%t/drop=%t/%d", cluster, drop, k), func(t *testing.T) {
					t.Parallel()
					timeout := 2 * time.Second
					if drop {
						timeout = 200 * time.Millisecond
					}
					x := newLossy(t, cluster, timeout)
					charged := 0
					for round := 0; charged < 3 && round < 20; round++ {
						x.lose(k, drop)
						key, d := x.ask(t)
						x.heal(t)
						if d.Allowed || d.Source != hybrid.SourcePolicy {
							t.Errorf("AllowN with a lost reply = %+v; want denied by policy", d)
						}
						switch used := x.used(t, key); used {
						case 10:
							charged++
						case 0: // it took so long that it never got there
						default:
							t.Errorf("AllowN with %d lost replies was charged %d; want 10, once", k, used)
						}
					}
					if charged < 3 {
						t.Errorf("%d calls were charged; want 3 whose replies were lost", charged)
					}
					key, d := x.ask(t)
					if used := x.used(t, key); !d.Allowed || used != 10 {
						t.Errorf("AllowN = %+v, charged %d; want admitted, 10", d, used)
					}
				})
			}
		}
	}
}

func TestK07_LostRefundAppliesOnce(t *testing.T) {
	for _, cluster := range []bool{false, true} {
		for _, drop := range []bool{false, true} {
			t.Run(fmt.Sprintf("cluster=%t/drop=%t", cluster, drop), func(t *testing.T) {
				x := newLossy(t, cluster, 300*time.Millisecond)
				// A call that is not sent, while calls ramp up, is made again.
				sent := func(err error) bool { return !errors.Is(err, lease.ErrDown) }
				for i := range 3 {
					x.heal(t)
					key := fmt.Sprint("k", i)
					var err error
					waitFor(t, 5*time.Second, "a refund is sent", func() bool { // creates the bucket
						err = x.l.Refund(t.Context(), key, 1)
						return sent(err)
					})
					if err != nil {
						t.Fatal(err)
					}
					waitFor(t, 5*time.Second, "a request is admitted", func() bool {
						d, err := x.l.AllowN(t.Context(), key, 100)
						return err == nil && d.Allowed
					})
					before := x.used(t, key)
					waitFor(t, 5*time.Second, "a refund is sent", func() bool {
						x.lose(1, drop)
						err = x.l.Refund(t.Context(), key, 30)
						return sent(err)
					})
					if !errors.Is(err, hybrid.ErrUnknownOutcome) {
						t.Errorf("Refund with a lost reply = %v; want ErrUnknownOutcome", err)
					}
					if got := before - x.used(t, key); got != 30 {
						t.Errorf("refund of 30 gave back %d; want 30, once", got)
					}
				}
			})
		}
	}
}

// Reports and give-backs ride on calls whose replies are lost too: none is sent
// twice, so the bound holds.
func TestR04_LostReportsKeepTheBound(t *testing.T) {
	for _, limit := range []hybrid.Limit{hybrid.PerSecond(200, 100), hybrid.PerSecond(100, 100), hybrid.PerSecond(50, 3)} {
		limit.OnFailure = hybrid.Deny // what nodes admit by themselves has another bound: F03, F04
		t.Run(limit.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				w.warm()
				all, lines := w.nodeLines(3, 2*time.Millisecond, limit, hybrid.Options{})
				for _, ln := range lines {
					ln.loseReply.Store(200)
				}
				tr := w.trace(limit)
				together(len(all)+1, func(i int) {
					if i == len(all) {
						// What the bucket believes to be out is never less than what is.
						for w.sleep(20 * time.Millisecond); w.since() < 6*time.Second; w.sleep(20 * time.Millisecond) {
							var live int64
							for _, l := range all {
								live += l.Stats().Live
							}
							if b := w.bucket("k"); live > b.out() {
								t.Errorf("at %v nodes hold %d tokens, bucket = %+v; want no more than it has out", w.since(), live, b)
								return
							}
						}
						return
					}
					for range 3 {
						tr.load(all[i], "k", 4*time.Millisecond, 2*time.Second, uint64(i))
						w.sleep(time.Duration(i+1) * 300 * time.Millisecond) // idle: give back
					}
				})
				tr.checkAtLeast(int64(limit.Rate) / 2) // nodes that lose much ask little
				var unknown int64
				for i, l := range all {
					lines[i].loseReply.Store(0)
					unknown += l.Stats().Unknown
				}
				if unknown < 5 {
					t.Errorf("%d calls of unknown outcome; want this test to lose replies", unknown)
				}
			})
		})
	}
}

// slot is the cluster slot of a key: CRC16 (XMODEM) of its hash tag.
func slot(key string) uint16 {
	if open := strings.IndexByte(key, '{'); open >= 0 {
		if n := strings.IndexByte(key[open+1:], '}'); n > 0 {
			key = key[open+1 : open+1+n]
		}
	}
	var crc uint16
	for _, b := range []byte(key) {
		crc ^= uint16(b) << 8
		for range 8 {
			if crc&0x8000 != 0 {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return crc % 16384
}

func TestR09_BracesDoNotSteerTheSlot(t *testing.T) {
	// The specification's examples.
	for key, want := range map[string]uint16{"123456789": 0x31C3, "foo{bar}{zap}": slot("bar"), "foo{}{bar}": slot("foo{}{bar}")} {
		if got := slot(key); got != want%16384 {
			t.Fatalf("slot(%q) = %d; want %d", key, got, want%16384)
		}
	}
	// What the limiter stores is what RedisKey says.
	bubble(t, func(t *testing.T, w *world) {
		store := lua.NewStore(w.rdb, lua.Options{})
		l := w.node(hybrid.PerHour(1, 10), hybrid.Options{})
		for _, key := range []string{"plain", "{a}", "}", "{", "{}x", "a{b}c", "%7Ba%7D", "%", "a}{b"} {
			if _, err := l.Allow(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			if name := store.RedisKey(key); !w.redis.Exists(name) {
				t.Errorf("key %q is not stored as %q", key, name)
			}
		}
	})

	store := lua.NewStore(nil, lua.Options{})
	names := map[string]string{}
	slots := map[uint16]int{}
	add := func(key string) {
		name := store.RedisKey(key)
		if other, ok := names[name]; ok && other != key {
			t.Errorf("keys %q and %q share the bucket %q", key, other, name)
		}
		names[name] = key
		slots[slot(name)]++
		if tag := name[strings.IndexByte(name, '{')+1:]; strings.IndexByte(tag, '}') != len(tag)-1 || len(tag) < 2 {
			t.Errorf("key %q is stored as %q; want one hash tag, to the end", key, name)
		}
	}
	for _, key := range []string{
		"{a}", "}", "{", "{}x", "a{b}c", "{}", "}{", "a}b", "%", "%25", "%7B", "%7b", "%7Ba%7D", "sha256%", "%2525",
		strings.Repeat("{", 256), strings.Repeat("}", 257), "sha256%" + strings.Repeat("0", 64),
	} {
		add(key)
	}
	clear(slots)
	for i := range 10_000 {
		add(fmt.Sprintf("{x}%d", i))
	}
	// 10,000 balls into 16,384 slots fill 7,485 on average, ± 50.
	if len(slots) < 7200 {
		t.Errorf("10,000 keys that contain {x} are in %d slots; want about 7,485", len(slots))
	}
	for s, n := range slots {
		if n > 12 {
			t.Errorf("%d keys in slot %d; want them spread", n, s)
		}
	}
	// One key, one bucket, one slot: whatever the prefix.
	a, b := lua.NewStore(nil, lua.Options{Prefix: "a:"}), lua.NewStore(nil, lua.Options{Prefix: "b:"})
	if slot(a.RedisKey("user{1}")) != slot(b.RedisKey("user{1}")) {
		t.Errorf("the limits of one key are in different slots: %q, %q", a.RedisKey("user{1}"), b.RedisKey("user{1}"))
	}
}

func TestR15_ReplicasAreNotAsked(t *testing.T) {
	for name, opts := range map[string]redis.ClusterOptions{
		"read only":  {ReadOnly: true},
		"by latency": {RouteByLatency: true},
		"randomly":   {RouteRandomly: true},
	} {
		t.Run(name, func(t *testing.T) {
			primary, replica := miniredis.RunT(t), miniredis.RunT(t)
			opts.ClusterSlots = func(context.Context) ([]redis.ClusterSlot, error) {
				return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: primary.Addr()}, {Addr: replica.Addr()}}}}, nil
			}
			opts.Addrs = []string{primary.Addr()}
			rdb := redis.NewClusterClient(&opts)
			defer rdb.Close()
			l, err := hybrid.New(rdb, hybrid.PerHour(1, 10), hybrid.Options{RedisTimeout: 2 * time.Second})
			if err != nil {
				return // refused at configuration: as good
			}
			var wg sync.WaitGroup
			for i := range 100 { // alone and, by coming together, in pipelines
				if i%2 == 0 {
					wg.Wait()
				}
				wg.Go(func() {
					if d, err := l.Allow(context.Background(), fmt.Sprint("k", i)); err != nil || !d.Allowed {
						t.Errorf("Allow = %+v, %v; want admitted", d, err)
					}
				})
			}
			wg.Wait()
			if err := l.Close(t.Context()); err != nil {
				t.Errorf("Close = %v; want nil", err)
			}
			if p, r := len(buckets(primary)), len(replica.Keys()); p != 100 || r != 0 {
				t.Errorf("%d keys on the primary, %d on the replica; want 100, 0", p, r)
			}
		})
	}
}

func TestR22_CorruptState(t *testing.T) {
	limit := hybrid.PerSecond(10, 20)
	const ttl = 500_000 // microseconds
	bubble(t, func(t *testing.T, w *world) {
		// check asks for all that a state can give, at once and when everything
		// that was ever leased or spent must be back.
		check := func(what, state string) {
			t.Helper()
			name := redisKey(what)
			if err := w.redis.Set(name, state); err != nil {
				t.Fatal(err)
			}
			w.redis.SetTTL(name, time.Hour)
			l := w.node(limit, hybrid.Options{})
			tr := w.trace(limit)
			got := tr.burst(l, what, 30)
			if s := l.Stats(); s.Failed != 0 || got > limit.Burst {
				t.Errorf("%s: state %q admitted %d, %d failures; want at most %d, 0", what, state, got, s.Failed, limit.Burst)
			}
			w.sleep(5 * time.Second)
			if got := tr.burst(l, what, 25); got != limit.Burst {
				t.Errorf("%s: state %q admitted %d 5s later; want the burst, %d", what, state, got, limit.Burst)
			}
			if after, err := w.redis.Get(name); err != nil {
				t.Errorf("%s: no state: %v", what, err)
			} else if b, err := parseBucket(after); err != nil || b.burst != limit.Burst {
				t.Errorf("%s: state %q became %q; want a valid one", what, state, after)
			}
			w.redis.Del(name)
			l.Close(t.Context())
		}
		good := func() []string {
			now := time.Now().UnixMicro()
			return []string{
				"1", "500000", strconv.FormatInt(now, 10), strconv.FormatInt(now/ttl, 10), "3", "2", "1", "1", "5", "5",
				"0", "20", "1", "100000", strconv.Itoa(ttl),
			}
		}
		check("good", strings.Join(good(), " "))
		for i := range good() {
			short := good()
			check(fmt.Sprintf("field %d lost", i), strings.Join(append(short[:i:i], short[i+1:]...), " "))
			for _, value := range []string{
				"x", "", "1e999", "-5", "12345678901234567890", "0", "1", "9007199254740991", "1.5",
			} {
				fields := good()
				fields[i] = value
				check(fmt.Sprintf("field %d = %q", i, value), strings.Join(fields, " "))
			}
		}
		for _, ahead := range []time.Duration{time.Minute, 24 * time.Hour, 100 * 365 * 24 * time.Hour, -100 * 365 * 24 * time.Hour / 5} {
			fields := good()
			at := time.Now().Add(ahead).UnixMicro()
			fields[2] = strconv.FormatInt(at, 10)
			check(fmt.Sprintf("base %v ahead", ahead), strings.Join(fields, " "))
			fields[3] = strconv.FormatInt(at/ttl, 10)
			check(fmt.Sprintf("base and epoch %v ahead", ahead), strings.Join(fields, " "))
		}
		for i, state := range []string{"", " ", "1", "error: no such thing", strings.Repeat("1 ", 15), strings.Repeat("9", 1<<16)} {
			check(fmt.Sprint("text ", i), state)
		}
		// Another type is no state of ours.
		if _, err := w.redis.Lpush(redisKey("list"), "x"); err != nil {
			t.Fatal(err)
		}
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		if got := tr.burst(l, "list", 50); got != limit.Burst || l.Stats().Failed != 0 {
			t.Errorf("over a list %d admitted, Stats = %+v; want %d, no failure", got, l.Stats(), limit.Burst)
		}
	})
}

func TestR24_HugeAndBinaryKeys(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		limit := hybrid.PerHour(1, 5)
		l, other := w.node(limit, hybrid.Options{}), w.node(limit, hybrid.Options{})
		mega := strings.Repeat("k", 1<<20)
		keys := []string{
			mega, mega[:1<<20-1] + "x", "x" + mega[1:], mega[:256], mega[:257], strings.Repeat("%", 256),
			"\x00", "\x00\x00", "a\nb", "a\r\nb", "\xff\xfe", "é", "e\u0301", " ", "a b", "a*", "[a]", `"`, `\`,
		}
		for _, key := range keys {
			tr := w.trace(limit)
			tr.burst(l, key, 3)
			tr.burst(other, key, 5)
			w.sleep(time.Second) // leases come back
			tr.burst(l, key, 5)
			tr.burst(other, key, 5)
			if got := tr.total(); got != limit.Burst {
				t.Errorf("key %.20q (%d bytes) admitted %d; want %d of its own", key, len(key), got, limit.Burst)
			}
		}
		stored := buckets(w.redis)
		if len(stored) != len(keys) {
			t.Errorf("%d keys stored for %d", len(stored), len(keys))
		}
		for _, name := range stored {
			if len(name) > 1024 {
				t.Errorf("stored key of %d bytes; want at most 1024", len(name))
			}
		}
		k, err := l.Key("")
		if d, allowErr := l.Allow(t.Context(), ""); !errors.Is(err, hybrid.ErrKey) || k != nil || !errors.Is(allowErr, hybrid.ErrKey) || d.Allowed {
			t.Errorf("Key, Allow of no key = %v, %+v, %v; want ErrKey", err, d, allowErr)
		}
		// What an error says of a key is bounded and escaped.
		w.redis.SetError("LOADING")
		err = l.Refund(t.Context(), "a\nb"+mega, 1)
		w.redis.SetError("")
		if err == nil || len(err.Error()) > 1024 || strings.Contains(err.Error(), "\n") {
			t.Errorf("error of %d bytes for a huge key; want a short one without line ends", len(fmt.Sprint(err)))
		}
	})
}

// PING works for a minute while scripts are refused: nodes go by the script. Only
// probes are sent meanwhile.
func TestR06_LoadingWhilePingWorks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loaded atomic.Bool
		f := &fakeRedis{reply: func(string) string {
			if loaded.Load() {
				return granted
			}
			return "-LOADING Redis is loading the dataset in memory\r\n"
		}}
		rdb := f.client()
		defer rdb.Close()
		l, err := hybrid.New(rdb, hybrid.PerSecond(1, 10), hybrid.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close(context.Background())
		begin := time.Now()
		for time.Since(begin) < time.Minute {
			asked := time.Now()
			d, err := l.Allow(t.Context(), "k")
			if err != nil || d.Source != hybrid.SourceLocal || time.Since(asked) != 0 {
				t.Fatalf("Allow after %v = %+v, %v in %v; want the share to decide at once", time.Since(begin), d, err, time.Since(asked))
			}
			if err := rdb.Ping(t.Context()).Err(); err != nil {
				t.Fatalf("PING = %v; want it to work", err)
			}
			if s := l.Stats().Fallback; !s.Degraded {
				t.Fatalf("after %v %+v; want it down", time.Since(begin), s)
			}
			time.Sleep(10 * time.Millisecond)
		}
		if least, most := probesIn(time.Minute, 0); int(f.calls.Load()) < 1+least || int(f.calls.Load()) > 1+most {
			t.Errorf("%d calls in a minute; want %d to %d probes after the first", f.calls.Load(), least, most)
		}
		loaded.Store(true)
		time.Sleep(heals)
		if d, err := l.Allow(t.Context(), "other"); err != nil || !d.Allowed || d.Source != hybrid.SourceStore {
			t.Errorf("Allow once it is loaded = %+v, %v; want admitted by Redis", d, err)
		}
	})
}

// Somebody's script keeps the server busy for seconds, and it does not say so: it
// hangs. Callers get a decision in time all the same.
func TestR07_SlowForeignScript(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	l, err := hybrid.New(server.Client(t), hybrid.PerSecond(100, 200), hybrid.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(context.Background())
	waitFor(t, 5*time.Second, "Redis decides", func() bool {
		d, err := l.Allow(t.Context(), fmt.Sprint(time.Now()))
		return err == nil && d.Source == hybrid.SourceStore && l.Stats().Fallback.State == "closed"
	})
	opts := redistest.Options(server.Addr())
	opts.ReadTimeout = time.Minute
	foreign := redis.NewClient(opts)
	defer foreign.Close()
	done := make(chan struct{})
	var late time.Duration
	var wg sync.WaitGroup
	wg.Go(func() { late = hiccup(done) })
	wg.Go(func() {
		defer close(done)
		// From 7.2 on time stands still in a script: it ends by its count there.
		busy := `local function now() local t = redis.call('TIME') return t[1] + t[2] / 1e6 end
			local start, n = now(), 0
			while now() - start < 2 and n < 5e6 do n = n + 1 end`
		if err := foreign.Eval(context.Background(), busy, nil).Err(); err != nil && !errors.Is(err, redis.Nil) {
			t.Errorf("foreign script = %v", err)
		}
	})
	time.Sleep(20 * time.Millisecond)
	begin := time.Now()
	var longest [8]time.Duration
	var local atomic.Int64
	for g := range longest {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-done:
					return
				case <-time.After(5 * time.Millisecond):
				}
				asked := time.Now()
				d, err := l.Allow(context.Background(), fmt.Sprint("k", g, i%10))
				longest[g] = max(longest[g], time.Since(asked))
				if err != nil {
					t.Errorf("Allow = %v", err)
				}
				if d.Source == hybrid.SourceLocal {
					local.Add(1)
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(begin)
	for _, d := range longest {
		if most := 130*time.Millisecond + 3*late; d > most {
			t.Errorf("a request took %v; want at most %v", d, most)
		}
	}
	t.Logf("%d decided by the share in %v, longest %v, machine late by %v", local.Load(), took, longest, late)
	if took < time.Second || local.Load() < 100 {
		t.Errorf("%d decided by the share in %v; want the server blocked for 2s", local.Load(), took)
	}
	waitFor(t, 5*time.Second, "Redis decides again", func() bool {
		d, err := l.Allow(t.Context(), fmt.Sprint(time.Now()))
		return err == nil && d.Source == hybrid.SourceStore
	})
}

// holeConn is a connection through a network that can become a black hole.
type holeConn struct {
	net.Conn
	hole *atomic.Bool
}

func (c holeConn) Write(b []byte) (int, error) {
	if c.hole.Load() {
		return len(b), nil // gone
	}
	return c.Conn.Write(b)
}

// A quarter of an hour in a black hole, and 2000 callers in a hurry each minute:
// connections are made for probes and beats only, and it ends with the hole.
func TestR16_BlackHole(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		var hole atomic.Bool
		var dials atomic.Int64
		rdb := redis.NewClient(&redis.Options{
			Addr: "127.0.0.1:6379",
			Dialer: func(context.Context, string, string) (net.Conn, error) {
				dials.Add(1)
				c, err := w.redis.Dial()
				return holeConn{c, &hole}, err
			},
			// As go-redis does by itself, but for what would look for the world outside.
			Protocol: 2, DisableIdentity: true,
		})
		defer rdb.Close()
		limit := hybrid.PerSecond(100, 200)
		l, err := hybrid.New(rdb, limit, hybrid.Options{Heartbeat: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close(context.Background())
		tr := w.trace(limit)
		if d := tr.ask(l, "k", 1); d.Source != hybrid.SourceStore {
			t.Fatalf("%+v; want Redis to decide", d)
		}
		hole.Store(true)
		before := dials.Load()
		const span = 15 * time.Minute
		for range span / time.Minute {
			at := w.since()
			var gaveUp atomic.Int64
			together(2000, func(i int) {
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
				defer cancel()
				if _, err := l.Allow(ctx, fmt.Sprint("k", i%50)); err != nil {
					gaveUp.Add(1)
				}
			})
			// Only the first ones do not know yet.
			if took := w.since() - at; took > 20*time.Millisecond || at > time.Minute && (took > 0 || gaveUp.Load() > 0) {
				t.Errorf("at %v callers took %v, %d gave up; want decisions at once", at, took, gaveUp.Load())
			}
			w.sleep(time.Minute)
		}
		_, most := probesIn(span, 30*time.Millisecond)
		if n := dials.Load() - before; n > int64(most)+16+4 {
			t.Errorf("%d dials in %v; want one for each of %d probes at most, and for beats", n, span, most)
		}
		hole.Store(false)
		w.sleep(heals)
		for i := range 50 {
			if d := tr.ask(l, fmt.Sprint("new", i), 1); d.Source != hybrid.SourceStore {
				t.Fatalf("%+v after the hole; want Redis to decide", d)
			}
		}
		if s := l.Stats().Fallback; s.Trips != 1 || s.Degraded {
			t.Errorf("%+v; want one trip", s)
		}
	})
}

// A server that was stopped answers everything when it goes on, also those who
// gave up. Nobody reads an answer that is somebody else's: each key has a burst of
// its own to tell by.
func TestR16_NoStrayAnswers(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	burst := func(key string) int64 {
		var n int64
		if _, err := fmt.Sscanf(key, "%d", &n); err != nil {
			t.Errorf("key %q: %v", key, err)
		}
		return 1000 + n
	}
	limits := hybrid.LimitFunc(func(key string) hybrid.Limit { return hybrid.PerHour(1, burst(key)) })
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), PoolSize: 3})
	defer rdb.Close()
	l, err := hybrid.New(rdb, limits, hybrid.Options{RedisTimeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(context.Background())
	next := 0
	var decided int
	for range 5 {
		waitFor(t, 5*time.Second, "Redis decides", func() bool {
			for range 50 {
				key := fmt.Sprint(next)
				next++
				d, err := l.Allow(t.Context(), key)
				if err != nil {
					t.Errorf("Allow = %v", err)
				}
				if d.Source != hybrid.SourceStore {
					return false
				}
				decided++
				if d.Remaining != burst(key)-1 || d.Limit != limits.For(key) {
					t.Errorf("Allow(%q) = %+v; want %d remaining", key, d, burst(key)-1)
				}
			}
			return true
		})
		server.Pause()
		var wg sync.WaitGroup
		for range 100 {
			key := fmt.Sprint(next)
			next++
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
				defer cancel()
				_, _ = l.Allow(ctx, key)
				_ = l.Refund(ctx, key, 1)
			})
		}
		wg.Wait()
		time.Sleep(30 * time.Millisecond)
		server.Resume()
	}
	if decided < 250 {
		t.Errorf("%d answers looked at; want 250", decided)
	}
}

// Five limits on a request, and Redis silent: it waits once, as do all that come
// at the same time. From then on nobody does.
func TestR18_OneTimeoutPerRequest(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		w.warm()
		ln := newLine(2 * time.Millisecond)
		l := w.nodeOver(ln, hybrid.PerSecond(10, 20), hybrid.Options{})
		ln.hang.Store(true)
		request := func(i int) time.Duration {
			begin := w.since()
			for rule := range 5 {
				if _, err := l.Allow(context.Background(), fmt.Sprint("rule", rule, "/", i)); err != nil {
					t.Error(err)
				}
			}
			return w.since() - begin
		}
		together(300, func(i int) {
			if took := request(i); took > 32*time.Millisecond {
				t.Errorf("request of five limits took %v; want one timeout of 30ms, and 2ms", took)
			}
		})
		for i := range 1000 {
			if took := request(i); took != 0 {
				t.Fatalf("request at %v took %v; want nobody to wait", w.since(), took)
			}
			w.sleep(7 * time.Millisecond)
		}
	})
}

// A node that starts while Redis is down starts, decides by its share, and heals
// by itself.
func TestR19_StartWithoutRedis(t *testing.T) {
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				ln := newLine(2 * time.Millisecond)
				shape(ln, true)
				limit := hybrid.PerSecond(10, 40)
				l := w.nodeOver(ln, limit, hybrid.Options{MinNodes: 4, Split: hybrid.SplitEqual, Heartbeat: time.Second})
				tr := w.trace(limit)
				if d := tr.ask(l, "k", 1); !d.Allowed || d.Source != hybrid.SourceLocal || w.since() > 32*time.Millisecond {
					t.Errorf("first request = %+v after %v; want admitted by the share", d, w.since())
				}
				if d := tr.ask(l, "k", 1); d.Allowed || d.Source != hybrid.SourceLocal {
					t.Errorf("second request = %+v; want refused: it starts with one token", d)
				}
				// A quarter of the limit.
				between(t, "admitted in 10s", float64(tr.every(l, "k", 20*time.Millisecond, 10*time.Second)), 24, 25)
				// Beats may take longer than requests wait: they can get through a slow line.
				if s := l.Stats(); !s.Fallback.Degraded || s.Fallback.Nodes != 4 || s.Members.Live != 0 && name != "slow" {
					t.Errorf("%+v; want it degraded, one of 4, and no member", s)
				}
				shape(ln, false)
				w.sleep(heals)
				if d := tr.ask(l, "k", 1); !d.Allowed || d.Source != hybrid.SourceStore {
					t.Errorf("once Redis is there = %+v; want admitted by it", d)
				}
				w.sleep(2 * time.Second)
				if s := l.Stats(); s.Fallback.Degraded || s.Fallback.Owed != 0 || s.Members.Live != 1 {
					t.Errorf("%+v; want it up, nothing owed, and a member", s)
				}
				tr.check()
			})
		})
	}
}

// Redis evicts a key that is used up, again and again, with leases out: each time
// at most a burst more. Reports about what was leased before give nothing back.
func TestR12_Eviction(t *testing.T) {
	limit := hybrid.PerHour(1, 100)
	bubble(t, func(t *testing.T, w *world) {
		all, _ := w.nodeLines(4, time.Millisecond, limit, hybrid.Options{})
		tr := w.trace(limit)
		const evictions = 3
		for i := range evictions + 1 {
			for range 20 {
				for _, l := range all {
					tr.burst(l, "k", 3)
				}
				w.sleep(20 * time.Millisecond)
			}
			if got, most := tr.total(), limit.Burst*int64(i+1); got > most || got < most*4/5 {
				t.Errorf("after %d evictions %d admitted, bucket %+v; want nearly a burst each, %d", i, got, w.bucket("k"), most)
			}
			if i < evictions {
				w.redis.Del(redisKey("k"))
			}
			w.sleep(100 * time.Millisecond)
		}
		w.sleep(10 * time.Second) // what leases still held has come back
		for _, l := range all {
			tr.burst(l, "k", 100)
		}
		if got := tr.total(); got > limit.Burst*(1+evictions) {
			t.Errorf("%d admitted in all; want at most %d", got, limit.Burst*(1+evictions))
		}
	})
	// With tokens still held the nodes notice.
	bubble(t, func(t *testing.T, w *world) {
		l := w.node(limit, hybrid.Options{})
		tr := w.trace(limit)
		tr.burst(l, "k", 10)
		if w.bucket("k").out() == 0 {
			t.Fatal("no lease is out; want one")
		}
		w.redis.Del(redisKey("k"))
		tr.burst(l, "k", 90)
		w.sleep(time.Second)
		if s := l.Stats(); s.Vanished == 0 {
			t.Errorf("%+v; want it noticed that the bucket is gone", s)
		}
	})
}

// All is flushed with a lease on each of ten nodes: what they hold and a burst can
// still be admitted. What they report of lost leases neither fills the bucket nor
// takes from what is out.
func TestR13_Flush(t *testing.T) {
	limit := hybrid.PerSecond(1, 300)
	bubble(t, func(t *testing.T, w *world) {
		all, _ := w.nodeLines(10, time.Millisecond, limit, hybrid.Options{LeasePeriod: 10 * time.Second})
		tr := w.trace(limit)
		for range 3 {
			for _, l := range all {
				tr.ask(l, "k", 2)
			}
		}
		var live int64
		for _, l := range all {
			live += l.Stats().Live
		}
		if live < 20 {
			t.Fatalf("%d tokens on lease; want some on each node", live)
		}
		w.redis.FlushAll()
		at, before := w.since(), tr.total()
		for w.since() < at+30*time.Second {
			for _, l := range all {
				tr.ask(l, "k", 1)
			}
			if !w.redis.Exists(redisKey("k")) {
				// until a lease ends
			} else if b := w.bucket("k"); b.tokens() > limit.Burst || b.out0 < 0 || b.out1 < 0 || b.out() > limit.Burst-max(0, b.tokens()) {
				t.Fatalf("bucket = %+v; want no more than the burst in it and out", b)
			}
			w.sleep(200 * time.Millisecond)
		}
		got := tr.total() - before
		most := live + limit.Burst + 30
		between(t, "admitted after the flush", float64(got), 0.8*float64(most), float64(most))
	})
}

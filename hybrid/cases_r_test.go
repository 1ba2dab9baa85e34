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
//	R06, R07, R16, R18, R19  what nodes do meanwhile    fallback
//	R10                      other algorithms, versions other algorithms
//	R12, R13                 eviction, lost data        fallback (C04 has the lost key)
//	R21, R25, R27            servers and client modes   tests on real servers

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
		var name string
		for i := range n {
			arg := make([]byte, max(0, number())+2)
			if _, err := io.ReadFull(r, arg); err != nil {
				return
			}
			if i == 0 {
				name = strings.ToLower(string(arg[:len(arg)-2]))
			}
		}
		reply := "-ERR unknown command\r\n"
		if name == "eval" || name == "evalsha" {
			if name == "eval" {
				f.eval.Add(1)
			}
			reply = f.reply(name)
		}
		if _, err := io.WriteString(c, reply); err != nil {
			return
		}
	}
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
var granted = integers(1, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0)

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
				rdb := f.client()
				defer rdb.Close()
				l, err := hybrid.New(rdb, hybrid.PerSecond(1, 10), hybrid.Options{})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close(context.Background())
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
				if err := l.Refund(t.Context(), "other", 1); !errors.Is(err, c.want.(error)) {
					t.Errorf("Refund = %v; want %v", err, c.want)
				}
				if n := f.eval.Load(); n != 0 {
					t.Errorf("%d EVAL; want 0", n)
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
		"ten of eleven":        integers(1, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1),
		"float among integers": strings.Replace(granted, ":9\r\n", "$3\r\n9.5\r\n", 1),
		"text among integers":  strings.Replace(granted, ":9\r\n", "$1\r\nx\r\n", 1),
		"nil among integers":   strings.Replace(granted, ":9\r\n", "$-1\r\n", 1),
		"array among integers": strings.Replace(granted, ":9\r\n", "*1\r\n:9\r\n", 1),
		"error among integers": strings.Replace(granted, ":9\r\n", "-ERR no\r\n", 1),
		"nan among integers":   strings.Replace(granted, ":9\r\n", "$3\r\nnan\r\n", 1),
		"integer too long":     strings.Replace(granted, ":9\r\n", ":99999999999999999999\r\n", 1),
		"map":                  "%1\r\n+a\r\n:1\r\n",
		"more than asked":      integers(1000, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0),
		"negative grant":       integers(-1, 0, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0),
		"bound over grant":     integers(0, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0),
		"negative bound":       integers(1, -1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0),
		"lua infinity":         integers(-1<<63, -1<<63, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 0),
		"limit missing":        integers(1, 1, 1893369600, 475_000, 9, 0, 1_000_000, 0, 0, 1, 4),
		"truncated":            short[:len(short)-3],
		"garbage":              "?\x00\xff\r\n",
		"no line end":          "garbage",
		"empty line":           "\r\n",
		"nothing":              "",
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fakeRedis{reply: func(string) string { return reply }}
				rdb := f.client()
				defer rdb.Close()
				l, err := hybrid.New(rdb, hybrid.PerSecond(1, 10), hybrid.Options{})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close(context.Background())
				if d, err := l.Allow(t.Context(), "k"); err != nil || d.Allowed || d.Source != hybrid.SourcePolicy {
					t.Errorf("Allow on %q = %+v, %v; want denied by policy", reply, d, err)
				}
				if s := l.Stats(); s.Spent != 0 || s.Live != 0 || s.Failed != 1 {
					t.Errorf("Stats = %+v; want nothing spent", s)
				}
				if err := l.Refund(t.Context(), "other", 1); !errors.Is(err, hybrid.ErrUnknownOutcome) {
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
	l, err := hybrid.New(rdb, hybrid.PerHour(1, 1000), hybrid.Options{RedisTimeout: timeout, LeasePeriod: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close(context.Background()) })
	x := &lossy{m, p, rdb, l}
	for range 200 { // connect and load the script, however slow the machine is
		if d, err := l.AllowN(t.Context(), "warm", 1); err == nil && d.Allowed {
			return x
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("no reply from Redis")
	return nil
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
			for _, k := range []int{1, 3, 100} {
				if k == 100 && drop {
					if cluster {
						continue // each would block a connection for its ReadTimeout
					}
					k = 20 // each takes a time-out
				}
				t.Run(fmt.Sprintf("cluster=%t/drop=%t/%d", cluster, drop, k), func(t *testing.T) {
					t.Parallel()
					timeout := 2 * time.Second
					if drop {
						timeout = 50 * time.Millisecond
					}
					x := newLossy(t, cluster, timeout)
					if drop {
						x.proxy.DropReplies(k)
					} else {
						x.proxy.CloseOnReply(k)
					}
					var admitted, charged int
					for i := 0; admitted == 0 && i < k+50; i++ {
						key := fmt.Sprint("k", i)
						d, err := x.l.AllowN(t.Context(), key, 10)
						if err != nil {
							t.Fatalf("AllowN = %v; want a decision", err)
						}
						if d.Allowed {
							admitted++
						} else if d.Source != hybrid.SourcePolicy {
							t.Errorf("AllowN with a lost reply = %+v; want denied by policy", d)
						}
						switch used := x.used(t, key); {
						case used == 10:
							charged++
						case used != 0 || d.Allowed:
							t.Errorf("call %d = %+v was charged %d; want 10, once", i, d, used)
						}
					}
					if admitted != 1 || charged < k+1 {
						t.Errorf("%d admitted, %d charged; want 1 after %d lost", admitted, charged, k)
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
				for i := range 3 {
					key := fmt.Sprint("k", i)
					if err := x.l.Refund(t.Context(), key, 1); err != nil { // creates the bucket
						t.Fatal(err)
					}
					if d, err := x.l.AllowN(t.Context(), key, 100); err != nil || !d.Allowed {
						t.Fatalf("AllowN = %+v, %v; want admitted", d, err)
					}
					before := x.used(t, key)
					if drop {
						x.proxy.DropReplies(1)
					} else {
						x.proxy.CloseOnReply(1)
					}
					if err := x.l.Refund(t.Context(), key, 30); !errors.Is(err, hybrid.ErrUnknownOutcome) {
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
				tr.checkAtLeast(int64(2 * limit.Rate))
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
			if p, r := len(primary.Keys()), len(replica.Keys()); p != 100 || r != 0 {
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
		stored := w.redis.Keys()
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

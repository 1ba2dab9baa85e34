package lua

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
)

// within polls until ok, or fails with the message.
func within(t *testing.T, d time.Duration, ok func() bool, format string, args ...any) {
	t.Helper()
	for deadline := time.Now().Add(d); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after %v: "+format, append([]any{d}, args...)...)
		}
	}
}

// knowing waits until s knows the cluster.
func knowing(t *testing.T, s *Store) {
	t.Helper()
	within(t, 5*time.Second, func() bool { return s.Shard("any") != "" }, "Shard is still empty")
}

func manyKeys(n int) []string {
	keys := []string{
		"", "{", "}", "{}", "{tag}", "a{tag}b", "100%", "café", "\x00", strings.Repeat("long", 64), strings.Repeat("longer", 64),
	}
	for i := range n - len(keys) {
		keys = append(keys, fmt.Sprintf("key %d", i))
	}
	return keys
}

func TestShard(t *testing.T) {
	cluster := redistest.StartCluster(t, 3, 0)
	rdb := cluster.Client(t)
	s := NewStore(rdb, Options{})

	// A call must not depend on servers that it does not go to. A client's first
	// one did: go-redis asked any of them for the COMMAND table.
	t.Run("calls go to one server", func(t *testing.T) {
		take(t, s, []lease.Call{one("k")}, 4)
		for _, n := range cluster.Nodes() {
			if calls := n.CommandCalls(t, "command"); calls != 0 {
				t.Errorf("%s was asked for COMMAND %d times, want 0", n.Addr(), calls)
			}
		}
	})
	t.Run("is the owner", func(t *testing.T) {
		owner := owners(t, rdb)
		for prefix, want := range map[string]int{"": 3, "{app}:": 1, "odd{": 3, "}{": 3} {
			s := NewStore(rdb, Options{Prefix: prefix})
			if got := s.Shard("key"); got != "" {
				t.Errorf("Shard(key) = %q before the cluster is known, want none", got)
			}
			knowing(t, s)
			shards := make(map[string]bool)
			for _, key := range manyKeys(1000) {
				got, want := s.Shard(key), owner(s.RedisKey(key))
				if got != want {
					t.Errorf("Shard(%q) = %q, want %q, prefix %q", key, got, want, prefix)
				}
				shards[got] = true
			}
			if len(shards) != want {
				t.Errorf("prefix %q: %d shards, want %d", prefix, len(shards), want)
			}
		}
	})
	t.Run("allocates nothing", func(t *testing.T) {
		knowing(t, s)
		if n := testing.AllocsPerRun(1000, func() { s.Shard("user:4711") }); n != 0 {
			t.Errorf("Shard makes %v allocations, want 0", n)
		}
	})
	// A moved slot is noticed by the calls that are redirected; one that is not in
	// use, when somebody says so.
	for name, notice := range map[string]func(key string){
		"follows a redirected call": func(key string) { take(t, s, []lease.Call{one(key)}, 4) },
		"follows ShardsChanged":     func(string) { s.ShardsChanged() },
	} {
		t.Run(name, func(t *testing.T) {
			from := cluster.MasterOf(s.RedisKey(name))
			to := cluster.Nodes()[0]
			if from == to {
				to = cluster.Nodes()[1]
			}
			if got := s.Shard(name); got != from.Addr() {
				t.Errorf("Shard = %s, want %s", got, from.Addr())
			}
			cluster.MoveSlot(cluster.Slot(s.RedisKey(name)), from, to)
			notice(name)
			within(t, 3*time.Second, func() bool { return s.Shard(name) == to.Addr() }, "Shard is not %s", to.Addr())
		})
	}
}

// owners asks the server for the slot of a key, and for whose it is.
func owners(t *testing.T, rdb *redis.ClusterClient) func(redisKey string) string {
	t.Helper()
	slots, err := rdb.ClusterSlots(t.Context()).Result() //nolint:staticcheck // what clients ask
	if err != nil {
		t.Fatal(err)
	}
	return func(redisKey string) string {
		slot := int(rdb.ClusterKeySlot(t.Context(), redisKey).Val())
		for _, r := range slots {
			if r.Start <= slot && slot <= r.End {
				return r.Nodes[0].Addr
			}
		}
		return "nobody"
	}
}

// A master dies and its replica takes over: calls find the way soon, and Shard
// says where. By itself go-redis would try the dead one for a minute.
func TestShardFollowsAFailover(t *testing.T) {
	cluster := redistest.StartCluster(t, 3, 1)
	s := NewStore(cluster.Client(t), Options{})
	knowing(t, s)
	take(t, s, []lease.Call{one("k")}, 4)
	dead := cluster.MasterOf(s.RedisKey("k"))
	if got := s.Shard("k"); got != dead.Addr() {
		t.Fatalf("Shard = %s, want %s", got, dead.Addr())
	}

	dead.Kill()
	if err := s.Acquire(t.Context(), []lease.Call{one("k")})[0].Err; err == nil {
		t.Error("Acquire from a dead master = nil, want an error")
	}
	if !restless(s) {
		t.Error("a failed call did not report a change")
	}
	if got := s.Shard("k"); got != dead.Addr() {
		t.Errorf("Shard = %s before the fail-over, want %s still", got, dead.Addr())
	}
	// No more calls, as with a breaker that is open: Shard alone must find out.
	start := time.Now()
	within(t, 15*time.Second, func() bool { return s.Shard("k") != dead.Addr() }, "Shard is still the dead %s", dead.Addr())
	cluster.WaitSettled()
	t.Logf("followed %v after the kill", time.Since(start))
	if got, want := s.Shard("k"), cluster.MasterOf(s.RedisKey("k")).Addr(); got != want {
		t.Errorf("Shard = %s after the fail-over, want %s", got, want)
	}
	if err := s.Acquire(t.Context(), []lease.Call{one("k")})[0].Err; err != nil {
		t.Errorf("Acquire from the new master: %v", err)
	}
}

// Asking has a rate of its own: seldom, and each second after a change. However
// many calls want it, one goroutine does it. A cluster that hangs, or is gone,
// changes nothing and holds nobody up.
func TestShardAsks(t *testing.T) {
	cluster := redistest.StartCluster(t, 1, 0)
	node := cluster.Nodes()[0]
	known, unknown := NewStore(cluster.Client(t), Options{}), NewStore(cluster.Client(t), Options{})
	knowing(t, known)

	asked := func() int64 { return node.CommandCalls(t, "cluster|slots") }
	use := func(d time.Duration, f func()) {
		for start := time.Now(); time.Since(start) < d; time.Sleep(time.Millisecond) {
			f()
		}
	}
	before := asked()
	use(1500*time.Millisecond, func() { known.Shard("k") })
	if n := asked() - before; n != 0 {
		t.Errorf("asked %d times in a quiet second, want 0", n)
	}
	before = asked()
	known.ShardsChanged()
	use(2500*time.Millisecond, func() { known.Shard("k") })
	if n := asked() - before; n < 2 || n > 3 {
		t.Errorf("asked %d times in 2.5 s after a change, want once a second", n)
	}

	for state, disturb := range map[string]func(){"paused": node.Pause, "killed": node.Kill} {
		disturb()
		most := 0
		use(1500*time.Millisecond, func() {
			start := time.Now()
			known.ShardsChanged()
			unknown.ShardsChanged()
			a, b := known.Shard("k"), unknown.Shard("k")
			if took := time.Since(start); took > 100*time.Millisecond {
				t.Errorf("%s: Shard took %v", state, took)
			}
			if a != node.Addr() || b != "" {
				t.Errorf("%s: Shard = %q and %q, want %q, as it was, and none", state, a, b, node.Addr())
			}
			most = max(most, asking())
		})
		if most > 2 {
			t.Errorf("%s: %d goroutines ask for two stores, want one each", state, most)
		}
		within(t, 2*shardsTimeout, func() bool { return asking() == 0 }, "%s: a goroutine still asks", state)
		node.Restart(t)
	}
	knowing(t, unknown)
}

// asking counts the goroutines that ask a cluster for its owners.
func asking() int {
	buf := make([]byte, 4<<20)
	buf = buf[:runtime.Stack(buf, true)]
	return strings.Count(string(buf), "lua.(*shards).ask(")
}

func TestShardWithoutACluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rdb := redis.NewClient(redistest.Options("nowhere"))
		defer rdb.Close()
		for name, s := range map[string]*Store{
			"one server": NewStore(rdb, Options{}),
			"wrapped":    NewStore(plain{rdb}, Options{}),
		} {
			s.ShardsChanged()
			if got := s.Shard("k"); got != "" {
				t.Errorf("%s: Shard(k) = %q, want none", name, got)
			}
			s.failed(errors.New("gone"))
		}
		if n := asking(); n != 0 {
			t.Errorf("%d goroutines ask, want 0", n)
		}
	})
}

// restless reports whether s was told of a change lately.
func restless(s *Store) bool {
	s.shards.mu.Lock()
	defer s.shards.mu.Unlock()
	return time.Since(s.shards.born) < s.shards.restless
}

// What a failure says about the shards.
func TestShardFailures(t *testing.T) {
	for err, want := range map[error]bool{
		replyError("MOVED 866 127.0.0.1:7001"):            true,
		replyError("ASK 866 127.0.0.1:7001"):              true,
		replyError("CLUSTERDOWN Hash slot not served"):    true,
		replyError("READONLY You can't write against a"):  true,
		replyError("OOM command not allowed"):             false,
		replyError("NOPERM this user has no permissions"): false,
		replyError("ERR user_script:7: attempt to index"): false,
		context.DeadlineExceeded:                          true,
		errors.New("connection refused"):                  true,
	} {
		rdb := redis.NewClusterClient(redistest.ClusterOptions("127.0.0.1:1"))
		s := NewStore(rdb, Options{})
		s.shards.due.Store(int64(time.Hour)) // nobody asks in this test
		s.failed(err)
		if got := restless(s); got != want {
			t.Errorf("failed(%v) reports a change: %v, want %v", err, got, want)
		}
		rdb.Close()
	}
}

package redistest

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestCluster(t *testing.T) {
	c := StartCluster(t, 3, 1)
	masters, replicas := c.Nodes()[:3], c.Nodes()[3:]
	client := c.Client(t)

	t.Run("keys are spread over the masters", func(t *testing.T) {
		for i := range 300 {
			if err := client.Set(t.Context(), fmt.Sprintf("key %d", i), i, 0).Err(); err != nil {
				t.Fatal(err)
			}
		}
		for i, s := range masters {
			if n := s.Client(t).DBSize(t.Context()).Val(); n < 50 || n > 150 {
				t.Errorf("master %d has %d of 300 keys, want about a third", i, n)
			}
		}
	})
	t.Run("replicas follow", func(t *testing.T) {
		for i, s := range replicas {
			if got, want := s.Info(t, "replication")["master_port"], fmt.Sprint(masters[i].port); got != want {
				t.Errorf("replica %d follows port %s, want %s", i, got, want)
			}
		}
	})
	t.Run("MasterOf", func(t *testing.T) {
		for i := range 20 {
			key := fmt.Sprintf("key %d", i)
			if got, err := c.MasterOf(key).Client(t).Get(t.Context(), key).Int(); got != i || err != nil {
				t.Errorf("Get(%s) of its master = %d, %v; want %d, nil", key, got, err, i)
			}
		}
	})
	t.Run("MoveSlot", func(t *testing.T) {
		from := c.MasterOf("empty slot")
		to := masters[(slices.Index(masters, from)+1)%3]
		c.MoveSlot(c.Slot("empty slot"), from, to)
		if got := c.MasterOf("empty slot"); got != to {
			t.Errorf("MasterOf = %s after MoveSlot, want %s", got.Addr(), to.Addr())
		}
		if err := client.Set(t.Context(), "empty slot", "v", 0).Err(); err != nil {
			t.Errorf("Set in a moved slot: %v", err)
		}
	})
	t.Run("MigrateSlot", func(t *testing.T) {
		from := c.MasterOf("key 0")
		to := masters[(slices.Index(masters, from)+1)%3]
		c.MigrateSlot(c.Slot("key 0"), from, to, 10*time.Millisecond)
		if got := c.MasterOf("key 0"); got != to {
			t.Errorf("MasterOf = %s after MigrateSlot, want %s", got.Addr(), to.Addr())
		}
		if got, err := client.Get(t.Context(), "key 0").Int(); got != 0 || err != nil {
			t.Errorf("Get(key 0) = %d, %v in a migrated slot; want 0, nil", got, err)
		}
	})
	t.Run("a replica takes over", func(t *testing.T) {
		dead := c.MasterOf("key 1")
		replica := replicas[slices.Index(masters, dead)]
		if n, err := dead.Client(t).Wait(t.Context(), 1, patience).Result(); n != 1 || err != nil {
			t.Fatalf("Wait(1) = %d, %v; want 1, nil", n, err)
		}
		dead.Kill()
		if got := c.MasterOf("key 1"); got != dead {
			t.Errorf("MasterOf = %s right after Kill, want the dead %s", got.Addr(), dead.Addr())
		}
		c.WaitSettled()
		if got := c.MasterOf("key 1"); got != replica {
			t.Errorf("MasterOf = %s after the fail-over, want %s", got.Addr(), replica.Addr())
		}
		client.ReloadState(t.Context())
		eventually(t, func() bool {
			got, err := client.Get(t.Context(), "key 1").Int()
			return got == 1 && err == nil
		}, "Get(key 1) of the new master != 1")

		dead.Restart(t)
		c.WaitSettled()
		eventually(t, func() bool { return dead.inSync() == nil }, "the former master follows nobody")
	})
}

// A slot whose keys would be lost is not moved.
func TestMoveSlotWithKeys(t *testing.T) {
	r := &recorder{TB: t}
	r.do(func() {
		c := StartCluster(r, 2, 0)
		from := c.MasterOf("k")
		if err := from.Client(r).Set(t.Context(), "k", "v", 0).Err(); err != nil {
			t.Error(err)
		}
		to := c.nodes[1-slices.Index(c.nodes, from)]
		c.MoveSlot(c.Slot("k"), from, to)
	})
	if len(r.skips) > 0 {
		t.Skip(r.skips[0])
	}
	wantMessage(t, "failure", r.failures, "1 keys would be lost")
}

func TestStartClusterWithoutMasters(t *testing.T) {
	r := &recorder{TB: t}
	r.do(func() { StartCluster(r, 0, 1) })
	wantMessage(t, "failure", r.failures, "want a master or more")
}

func TestNothingLeftAfterClusterTest(t *testing.T) {
	before := goroutines()
	var nodes []*Server
	t.Run("test", func(t *testing.T) {
		c := StartCluster(t, 1, 1)
		nodes = c.Nodes()
		// A cluster client leaves a goroutine that ends when it likes.
		if err := c.MasterOf("k").Client(t).Set(t.Context(), "k", "v", 0).Err(); err != nil {
			t.Fatal(err)
		}
		nodes[0].Pause()
	})
	wantGone(t, nodes)
	wantNoneLeft(t, before)
}

// wantGone checks that servers and their directories are no more.
func wantGone(t *testing.T, servers []*Server) {
	t.Helper()
	for _, s := range servers {
		if dialable(s.Addr()) {
			t.Errorf("something still listens on %s", s.Addr())
		}
		if _, err := os.Stat(s.dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("Stat(%s) = %v, want not exist", s.dir, err)
		}
	}
}

// Options for one server, for a cluster and for Sentinels must say the same.
func TestClusterOptions(t *testing.T) {
	one, many := Options("a:1"), ClusterOptions("a:1", "b:2")
	if len(many.Addrs) != 2 || many.MaxRetries != one.MaxRetries || !many.ContextTimeoutEnabled ||
		many.ReadTimeout != one.ReadTimeout || many.DialTimeout != one.DialTimeout {
		t.Errorf("ClusterOptions = %+v, want those of Options", many)
	}
	if many.MaxRedirects != 0 {
		t.Errorf("MaxRedirects = %d, want the client's default", many.MaxRedirects)
	}
	_ = redis.NewClusterClient(many).Close()
}

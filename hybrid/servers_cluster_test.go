package hybrid_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
)

// failover returns what makes clients of the master that Sentinels name, as
// clients does.
func failover(t *testing.T, s *redistest.Sentinel) func(i int) hybrid.Client {
	return func(i int) hybrid.Client {
		opts := s.FailoverOptions()
		if i > 0 {
			opts = &redis.FailoverOptions{
				MasterName: opts.MasterName, SentinelAddrs: opts.SentinelAddrs, ContextTimeoutEnabled: i > 1,
			}
		}
		rdb := redis.NewFailoverClient(opts)
		t.Cleanup(func() { rdb.Close() })
		return rdb
	}
}

// clusterClients does so for a cluster.
func clusterClients(t *testing.T, c *redistest.Cluster, adapt func(*redis.ClusterOptions)) func(i int) hybrid.Client {
	return func(i int) hybrid.Client {
		opts := redistest.ClusterOptions(c.Addrs()...)
		if i > 0 {
			opts = &redis.ClusterOptions{Addrs: opts.Addrs, ContextTimeoutEnabled: i > 1}
		}
		if adapt != nil {
			adapt(opts)
		}
		rdb := redis.NewClusterClient(opts)
		t.Cleanup(func() { rdb.Close() })
		return rdb
	}
}

// The master is gone and a replica takes over that had heard of all but the last
// moment, which is what E is about anyhow. Then the former master is back: empty,
// or with what it had and sure that it is the master.
func TestServers_SentinelFailover(t *testing.T) {
	for name, f := range map[string]struct {
		down, up func(t *testing.T, s *redistest.Server)
	}{
		"killed": {
			func(_ *testing.T, s *redistest.Server) { s.Kill() },
			func(t *testing.T, s *redistest.Server) { s.Restart(t) },
		},
		"paused": {
			func(_ *testing.T, s *redistest.Server) { s.Pause() },
			func(_ *testing.T, s *redistest.Server) { s.Resume() },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := redistest.StartSentinel(t, 2, 3)
			d := newDrill(t, failover(t, s), hybrid.Options{})
			d.warm()
			d.drain()
			d.run(func() {
				master := s.Master()
				f.down(t, master)
				if now := s.WaitMaster(); now == master {
					t.Error("the master is the same as before")
				}
				f.up(t, master)
				time.Sleep(300 * time.Millisecond)
			})
			d.degraded()
		})
	}
}

// A replica takes over that had not heard of anything lately: to it the bucket is
// still full. That is a burst more, and no further one.
func TestServers_LostWrites(t *testing.T) {
	t.Parallel()
	s := redistest.StartSentinel(t, 1, 3)
	d := newDrill(t, failover(t, s), hybrid.Options{})
	d.losses["hot"] = 1
	d.warm()
	// Half of the burst before the replica is cut off, so that what it has does not
	// expire meanwhile, as a bucket does that is nearly full, and half after it.
	d.ask(d.nodes[0], "hot", drillLimit.Burst/2)
	master := s.Master()
	if n, err := master.Client(t).Wait(t.Context(), 1, 5*time.Second).Result(); n != 1 || err != nil {
		t.Fatalf("WAIT = %d, %v; want the replica to have it all", n, err)
	}
	do(t, master, "ACL SETUSER default -psync -sync", "CLIENT KILL TYPE replica")
	waitFor(t, 5*time.Second, "the hot key is drained", func() bool {
		return !d.ask(d.nodes[0], "hot", 20).Allowed
	})
	d.run(func() {
		s.KillMaster()
		if now := s.WaitMaster(); now == master {
			t.Error("the master is the same as before")
		}
	})
	d.degraded()
	// Later the bucket of the replica would be full, and what is right too.
	judged := d.ended-d.began < 3*time.Second && d.late < drillTimeout/4
	if peak := lease.PeakLevel(drillLimit, admissions(d.asked["hot"], d.since())); judged && peak < 1.2*float64(drillLimit.Burst) {
		t.Errorf("level %.0f; want it to show that writes were lost", peak)
	}
}

// A master of a cluster dies and its replica takes over.
func TestServers_ClusterFailover(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, 1)
	d := newDrill(t, clusterClients(t, c, nil), hybrid.Options{})
	d.warm()
	d.drain()
	d.run(func() {
		c.MasterOf(redisKey("hot")).Kill()
		c.WaitSettled()
	})
	d.degraded()
}

// Slots are moved with their keys, to and fro: nobody notices but the client,
// which is sent after them. Its user has no right too many.
func TestServers_SlotMigration(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, 0)
	for _, node := range c.Nodes() {
		do(t, node, user(slices.Concat(rights, clusterRights)...))
	}
	as := func(o *redis.ClusterOptions) { o.Username, o.Password = "limiter", "secret" }
	d := newDrill(t, clusterClients(t, c, as), hybrid.Options{Heartbeat: 100 * time.Millisecond})
	d.warm()
	d.drain()
	d.run(func() {
		for range 3 {
			for _, key := range []string{redisKey("hot"), "hybridlimit:{nodes}"} {
				from := c.MasterOf(key)
				to := c.Nodes()[(slices.Index(c.Nodes(), from)+1)%3]
				c.MigrateSlot(c.Slot(key), from, to, 150*time.Millisecond)
			}
		}
	})
	d.untouched()
	var met []string
	for _, node := range c.Nodes() {
		for name, n := range node.Info(t, "errorstats") {
			met = append(met, name+" "+n)
		}
	}
	for _, code := range []string{"MOVED", "ASK"} {
		if !strings.Contains(fmt.Sprint(met), "errorstat_"+code+" ") {
			t.Errorf("replies %q; want %s among them", met, code)
		}
	}

	t.Run("each right is needed", func(t *testing.T) {
		for _, node := range c.Nodes() {
			do(t, node, user(slices.Concat(rights, []string{"+asking"})...))
		}
		if p := problem(t, clusterClients(t, c, as)(0), func() {}); p == "" {
			t.Error("works without cluster|slots")
		}
		for _, node := range c.Nodes() {
			do(t, node, user(slices.Concat(rights, []string{"+cluster|slots"})...))
		}
		key := redisKey("asked")
		from := c.MasterOf(key)
		to := c.Nodes()[(slices.Index(c.Nodes(), from)+1)%3]
		var p string
		done := make(chan struct{})
		go func() {
			defer close(done)
			p = problem(t, clusterClients(t, c, as)(0), func() { time.Sleep(700 * time.Millisecond) })
		}()
		c.MigrateSlot(c.Slot(key), from, to, time.Second)
		if <-done; p == "" {
			t.Error("follows ASK without asking")
		}
	})
}

// One shard of a cluster is gone, with what it held, or hangs: only its keys are
// decided by shares. It is the one by which nodes count each other. What it lost is
// no burst more, for nodes tell it what they know (package fallback, Why the books
// balance).
func TestServers_ShardDown(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 3, 0)
	shardDown(t, c, (*redistest.Server).Kill, func(dead *redistest.Server) { dead.Restart(t) })
	for _, node := range c.Nodes() {
		do(t, node, "FLUSHALL")
	}
	shardDown(t, c, (*redistest.Server).Pause, (*redistest.Server).Resume)
}

func shardDown(t *testing.T, c *redistest.Cluster, down, up func(dead *redistest.Server)) {
	d := newDrill(t, clusterClients(t, c, nil), hybrid.Options{})
	dead := c.MasterOf("hybridlimit:{nodes}")
	on := map[string]*redistest.Server{}
	d.hot = nil
	for i, server := range c.Nodes() {
		for n := 0; len(d.hot) == i; n++ {
			if key := fmt.Sprint("hot", i, "/", n); c.MasterOf(redisKey(key)) == server {
				d.hot = append(d.hot, key)
			}
		}
	}
	for key := range d.keys() {
		on[key] = c.MasterOf(redisKey(key))
	}
	d.warm()
	// Until the client has told the shards there is one breaker for all of them.
	waitFor(t, 10*time.Second, "the nodes know the shards", func() bool {
		for _, l := range d.nodes {
			for key := range on {
				d.ask(l, key, 1)
			}
			if l.Stats().Fallback.Shards < 3 {
				return false
			}
		}
		return true
	})
	d.drain()
	d.run(func() {
		down(dead)
		time.Sleep(2500 * time.Millisecond)
		up(dead)
		c.WaitSettled()
	})
	d.degraded()
	// A call for keys of several shards takes as long as the slowest of them, once.
	known := d.began + drillTimeout + 100*time.Millisecond
	by := map[bool]map[hybrid.Source]int{true: {}, false: {}} // by whether the shard is down
	for key, server := range on {
		for source, n := range d.sources(key, known, d.ended) {
			by[server == dead][source] += n
		}
	}
	t.Logf("while a shard is down: its keys %v, others %v", by[true], by[false])
	if d.late > drillTimeout/4 {
		return // as in check
	}
	if by[true][hybrid.SourceLocal] == 0 {
		t.Errorf("keys of the dead shard decided by %v; want shares", by[true])
	}
	if by[false][hybrid.SourceLocal] > 0 || by[false][hybrid.SourceStore] == 0 {
		t.Errorf("keys of other shards decided by %v; want Redis", by[false])
	}
}

// On a cluster each key is a script call of its own, many in a pipeline: some of
// them may find the script and others not.
func TestServers_ScriptFlushOnCluster(t *testing.T) {
	t.Parallel()
	c := redistest.StartCluster(t, 2, 0)
	flusher := c.Client(t)
	d := newDrill(t, clusterClients(t, c, nil), hybrid.Options{Heartbeat: 100 * time.Millisecond})
	d.warm()
	d.drain()
	d.run(func() {
		repeatedly(2*time.Millisecond, 2*time.Second, func() {
			err := flusher.ForEachMaster(context.Background(), func(ctx context.Context, master *redis.Client) error {
				return master.ScriptFlush(ctx).Err()
			})
			if err != nil {
				t.Errorf("SCRIPT FLUSH = %v", err)
			}
		})
	})
	d.untouched()
}

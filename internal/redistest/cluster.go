package redistest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	slots = 16384 // of every cluster

	// nodeTimeout is when nodes begin to call a silent one dead: short, but above
	// the pauses of a busy machine, for each would be a fail-over nobody asked for.
	nodeTimeout = 1500 * time.Millisecond
	// settleTimeout bounds the wait for nodes to agree. A fail-over takes about
	// two nodeTimeouts and a second.
	settleTimeout = 30 * time.Second
	settlePoll    = 20 * time.Millisecond
)

// Cluster is a Redis Cluster that belongs to one test.
type Cluster struct {
	t     testing.TB
	nodes []*Server
}

// StartCluster runs a cluster of this many masters, with replicas for each, and
// returns when all nodes agree on it and the replicas are in sync: after two to
// three seconds, for Redis lets no new master write sooner. What [Start] says
// of skipping and ending holds here too. It takes Redis 7.0.
//
// The masters share the slots evenly, in the order of [Cluster.Nodes]. Slots
// without a master do not stop the others, and a dead master is succeeded by a
// replica of its own after some three seconds, if there are three masters: more
// than half of them must be left to vote.
func StartCluster(t testing.TB, masters, replicas int) *Cluster {
	t.Helper()
	if masters < 1 || replicas < 0 {
		t.Fatalf("redistest: StartCluster(%d, %d): want a master or more", masters, replicas)
	}
	c := &Cluster{t: t}
	for range masters * (1 + replicas) {
		c.nodes = append(c.nodes, startNode(t))
	}
	c.must("meet", c.meet())
	c.must("assign slots", c.assign(c.nodes[:masters]))
	for i, s := range c.nodes[masters:] {
		c.must("replicate", c.replicate(s, c.nodes[i%masters]))
	}
	c.settle(1 + replicas)
	return c
}

func startNode(t testing.TB) *Server {
	t.Helper()
	s := newServer(t, []string{
		"--cluster-node-timeout", strconv.FormatInt(nodeTimeout.Milliseconds(), 10),
		"--cluster-require-full-coverage", "no",
		// A replica stands for election however long its master was out of reach.
		"--cluster-replica-validity-factor", "0",
		// A node that nobody has met would not know its own address.
		"--cluster-announce-ip", "127.0.0.1",
		"--repl-diskless-sync-delay", "0",
		// CLUSTER SLOTS is silent about a replica that has not had a byte.
		"--repl-ping-replica-period", "1",
	})
	s.bus = minPort // to be drawn
	s.start(t)
	return s
}

func (c *Cluster) must(what string, err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatalf("redistest: cluster: %s: %v", what, err)
	}
}

// meet introduces all nodes to one another. They would learn of each other by
// gossip, but later. Epochs of their own, which are to be had only before, save
// the masters the settling of a tie.
func (c *Cluster) meet() error {
	for i, s := range c.nodes {
		err := s.ask(func(ctx context.Context, r *redis.Client) error {
			return r.Do(ctx, "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err()
		})
		if err != nil {
			return err
		}
	}
	for i, s := range c.nodes {
		err := s.ask(func(ctx context.Context, r *redis.Client) (err error) {
			for _, other := range c.nodes[i+1:] {
				err = cmp.Or(err, r.Do(ctx, "CLUSTER", "MEET", "127.0.0.1", other.port, other.bus).Err())
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *Cluster) assign(masters []*Server) error {
	for i, s := range masters {
		first, last := slots*i/len(masters), slots*(i+1)/len(masters)-1
		err := s.ask(func(ctx context.Context, r *redis.Client) error {
			return r.ClusterAddSlotsRange(ctx, first, last).Err()
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// replicate makes s a replica as soon as it has heard of the master.
func (c *Cluster) replicate(s, master *Server) error {
	id, err := master.id()
	if err != nil {
		return err
	}
	return poll(func() error {
		return s.ask(func(ctx context.Context, r *redis.Client) error {
			return r.ClusterReplicate(ctx, id).Err()
		})
	})
}

// id returns the name by which a cluster knows the server.
func (s *Server) id() (id string, err error) {
	err = s.ask(func(ctx context.Context, r *redis.Client) error {
		id, err = r.ClusterMyID(ctx).Result()
		return err
	})
	return id, err
}

// Nodes returns all nodes, also dead ones: what were the masters at the start,
// then their replicas, the first one of each, then the second. A node that is
// restarted comes back as the member that it was, without its keys.
func (c *Cluster) Nodes() []*Server { return slices.Clone(c.nodes) }

// Addrs returns the addresses of Nodes.
func (c *Cluster) Addrs() []string {
	addrs := make([]string, len(c.nodes))
	for i, s := range c.nodes {
		addrs[i] = s.Addr()
	}
	return addrs
}

// Client returns a client of the cluster with [ClusterOptions], closed when t
// ends. After a fail-over it asks the dead master for up to a minute, unless
// somebody calls its ReloadState: go-redis only learns from a node that answers.
func (c *Cluster) Client(t testing.TB) *redis.ClusterClient {
	t.Helper()
	client := redis.NewClusterClient(ClusterOptions(c.Addrs()...))
	t.Cleanup(func() {
		if err := client.Close(); err != nil && !errors.Is(err, redis.ErrClosed) {
			t.Errorf("redistest: close client of cluster %v: %v", c.Addrs(), err)
		}
	})
	return client
}

// ClusterOptions returns what [Options] returns, for a cluster. Redirections
// are followed, as ever: they are no second try of something executed.
func ClusterOptions(addrs ...string) *redis.ClusterOptions {
	opt := Options("")
	return &redis.ClusterOptions{
		Addrs:                    addrs,
		Protocol:                 opt.Protocol,
		MaxRetries:               opt.MaxRetries,
		ContextTimeoutEnabled:    opt.ContextTimeoutEnabled,
		DialTimeout:              opt.DialTimeout,
		DialerRetries:            opt.DialerRetries,
		ReadTimeout:              opt.ReadTimeout,
		WriteTimeout:             opt.WriteTimeout,
		PoolTimeout:              opt.PoolTimeout,
		DisableIdentity:          opt.DisableIdentity,
		MaintNotificationsConfig: opt.MaintNotificationsConfig,
	}
}

// MasterOf returns the node that owns the slot of key, which may be a dead one.
// Nodes that disagree get time to come to terms; no owner fails the test.
func (c *Cluster) MasterOf(key string) *Server {
	c.t.Helper()
	slot := c.Slot(key)
	var owner string
	c.must("find the master of "+key, poll(func() error {
		views, err := c.views()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(views[0].ranges, func(r redis.ClusterSlot) bool {
			return r.Start <= slot && slot <= r.End
		})
		if i < 0 {
			return fmt.Errorf("slot %d has no master", slot)
		}
		owner = views[0].ranges[i].Nodes[0].Addr
		return nil
	}))
	return c.node(owner)
}

// Slot returns the slot of a key.
func (c *Cluster) Slot(key string) int {
	c.t.Helper()
	running := c.running()
	if len(running) == 0 {
		c.must("slot of "+key, errNobody)
	}
	var slot int64
	c.must("slot of "+key, running[0].ask(func(ctx context.Context, r *redis.Client) (err error) {
		slot, err = r.ClusterKeySlot(ctx, key).Result()
		return err
	}))
	return int(slot)
}

// MoveSlot gives a slot without keys to another master, and returns when all
// nodes that run agree to it. A slot with keys fails the test.
func (c *Cluster) MoveSlot(slot int, from, to *Server) {
	c.t.Helper()
	n, err := from.keysIn(slot)
	c.must("move slot", err)
	if n > 0 {
		c.t.Fatalf("redistest: cluster: move slot %d: %d keys would be lost", slot, n)
	}
	c.moveSlot(slot, from, to, func() {})
}

// MigrateSlot gives a slot to another master with its keys, as a cluster is
// resharded: it may be in use. For linger the slot has both masters, with its
// keys still where they were; one that is not there is asked for (ASK) at the
// new master. Then the keys go, and for linger they are all asked for there. It
// returns when all nodes that run agree on the owner.
func (c *Cluster) MigrateSlot(slot int, from, to *Server, linger time.Duration) {
	c.t.Helper()
	c.moveSlot(slot, from, to, func() {
		time.Sleep(linger)
		c.must(fmt.Sprintf("move the keys of slot %d", slot), from.giveKeys(slot, to))
		time.Sleep(linger)
	})
}

func (c *Cluster) moveSlot(slot int, from, to *Server, meanwhile func()) {
	c.t.Helper()
	fromID, err := from.id()
	c.must("move slot", err)
	toID, err := to.id()
	c.must("move slot", err)
	set := func(at *Server, args ...any) {
		c.t.Helper()
		err := at.ask(func(ctx context.Context, r *redis.Client) error {
			return r.Do(ctx, append([]any{"CLUSTER", "SETSLOT", slot}, args...)...).Err()
		})
		c.must(fmt.Sprintf("move slot %d: %v", slot, args), err)
	}
	// Only a master that imports is given the newest epoch with the slot. Without
	// it the others might believe the former owner again.
	set(to, "IMPORTING", fromID)
	set(from, "MIGRATING", toID)
	meanwhile()
	set(to, "NODE", toID)
	set(from, "NODE", toID)
	c.WaitSettled()
}

// giveKeys moves the keys of a slot that migrates to another master.
func (s *Server) giveKeys(slot int, to *Server) error {
	return s.ask(func(ctx context.Context, r *redis.Client) error {
		for {
			keys, err := r.ClusterGetKeysInSlot(ctx, slot, 100).Result()
			if err != nil || len(keys) == 0 {
				return err
			}
			for _, key := range keys {
				err := r.Migrate(ctx, "127.0.0.1", strconv.Itoa(to.port), key, 0, askTimeout).Err()
				if err != nil {
					return err
				}
			}
		}
	})
}

func (s *Server) keysIn(slot int) (n int64, err error) {
	err = s.ask(func(ctx context.Context, r *redis.Client) error {
		n, err = r.ClusterCountKeysInSlot(ctx, slot).Result()
		return err
	})
	return n, err
}

// WaitSettled returns when all nodes that run agree on who owns which slot, no
// owner is dead or paused, and their replicas are in sync: for a test that has
// killed a master, when the fail-over is complete.
func (c *Cluster) WaitSettled() {
	c.t.Helper()
	c.settle(1)
}

// settle waits until each master has perShard-1 replicas or more.
func (c *Cluster) settle(perShard int) {
	c.t.Helper()
	c.must("settle", poll(func() error {
		views, err := c.views()
		for _, v := range views {
			err = cmp.Or(err, c.unsettled(v, perShard))
		}
		return err
	}))
}

// unsettled returns what is missing in a node's view, or nil.
func (c *Cluster) unsettled(v view, perShard int) error {
	if v.state != "ok" || v.link == "down" {
		return fmt.Errorf("%s: cluster_state %s, link to the master %q", v.addr, v.state, v.link)
	}
	owned := 0
	for _, r := range v.ranges {
		if !c.node(r.Nodes[0].Addr).running() || len(r.Nodes) < perShard {
			return fmt.Errorf("%s: slots %d to %d are of %v", v.addr, r.Start, r.End, r.Nodes)
		}
		owned += r.End - r.Start + 1
	}
	if owned != slots {
		return fmt.Errorf("%s: %d slots have an owner, want %d", v.addr, owned, slots)
	}
	return nil
}

// poll waits until ok returns nil, or returns its error after settleTimeout.
func poll(ok func() error) error {
	for deadline := time.Now().Add(settleTimeout); ; time.Sleep(settlePoll) {
		err := ok()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("after %v: %w", settleTimeout, err)
		}
	}
}

// view is what one node thinks of the cluster.
type view struct {
	addr   string
	state  string // "ok" or "fail"
	link   string // to its master, "up" or "down"; "" for a master
	ranges []redis.ClusterSlot
}

// views returns what all nodes that run think, or an error when they think
// differently of who owns what.
func (c *Cluster) views() ([]view, error) {
	running := c.running()
	if len(running) == 0 {
		return nil, errNobody
	}
	views := make([]view, len(running))
	for i, s := range running {
		var err error
		if views[i], err = s.view(); err != nil {
			return nil, err
		}
		if a, b := views[0].owners(), views[i].owners(); a != b {
			return nil, fmt.Errorf("%s sees %s, %s sees %s", views[0].addr, a, views[i].addr, b)
		}
	}
	return views, nil
}

func (s *Server) view() (v view, err error) {
	v.addr = s.Addr()
	err = s.ask(func(ctx context.Context, r *redis.Client) error {
		state, err := r.ClusterInfo(ctx).Result()
		if err != nil {
			return err
		}
		link, err := r.Info(ctx, "replication").Result()
		if err != nil {
			return err
		}
		v.state, v.link = parseInfo(state)["cluster_state"], parseInfo(link)["master_link_status"]
		v.ranges, err = r.ClusterSlots(ctx).Result() //nolint:staticcheck // what cluster clients ask, so what matters
		return err
	})
	return v, err
}

// owners is the part of a view that all must agree on.
func (v view) owners() string {
	var b strings.Builder
	for _, r := range v.ranges {
		fmt.Fprintf(&b, "%d-%d@%s ", r.Start, r.End, r.Nodes[0].Addr)
	}
	return b.String()
}

var errNobody = errors.New("no node runs")

func (c *Cluster) running() []*Server {
	return slices.DeleteFunc(c.Nodes(), func(s *Server) bool { return !s.running() })
}

// node returns the node at addr. There is one, for clusters do not mix.
func (c *Cluster) node(addr string) *Server {
	i := slices.IndexFunc(c.nodes, func(s *Server) bool { return s.Addr() == addr })
	if i < 0 {
		c.t.Fatalf("redistest: cluster names an unknown node %s of %v", addr, c.Addrs())
	}
	return c.nodes[i]
}

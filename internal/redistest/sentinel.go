package redistest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// MasterName is what the Sentinels of StartSentinel call their master.
	MasterName = "primary"

	// downAfter is when the first Sentinel calls a silent server dead, and each
	// further one so much later than the one before it.
	downAfter, downLater = 500 * time.Millisecond, 300 * time.Millisecond
	// failoverTimeout is half of what must pass before Sentinels try again when a
	// fail-over came to nothing.
	failoverTimeout = 2 * time.Second
)

// Sentinel is a master with its replicas, and the Sentinels that watch them. It
// belongs to one test.
type Sentinel struct {
	t         testing.TB
	servers   []*Server
	sentinels []*Server
}

// StartSentinel runs a master with replicas, and Sentinels that watch them. It
// returns when the replicas are in sync and the Sentinels know everybody, which
// is a matter of a second. What [Start] says of skipping and ending holds here
// too. It takes Redis 7.0.
//
// A dead master is succeeded by a replica after one to two seconds, if more than
// half of the Sentinels run.
func StartSentinel(t testing.TB, replicas, sentinels int) *Sentinel {
	t.Helper()
	if replicas < 0 || sentinels < 1 {
		t.Fatalf("redistest: StartSentinel(%d, %d): want a Sentinel or more", replicas, sentinels)
	}
	s := &Sentinel{t: t}
	for range 1 + replicas {
		s.servers = append(s.servers, Start(t, "--repl-diskless-sync-delay", "0"))
	}
	// Replicas first: a Sentinel asks a new master for them at once, and then
	// not for a while.
	s.must("replicate", s.replicate())
	for range sentinels {
		s.sentinels = append(s.sentinels, startSentinel(t))
	}
	for i, watcher := range s.sentinels {
		s.must("watch", s.watch(watcher, downAfter+time.Duration(i)*downLater))
	}
	s.must("meet", poll(s.unmet))
	return s
}

func startSentinel(t testing.TB) *Server {
	t.Helper()
	s := newServer(t, []string{"--sentinel"})
	// A Sentinel writes what it learns into its configuration, so there must be one.
	s.config = filepath.Join(s.dir, "sentinel.conf")
	if err := os.WriteFile(s.config, nil, 0o600); err != nil {
		t.Fatalf("redistest: %v", err)
	}
	s.start(t)
	return s
}

func (s *Sentinel) must(what string, err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("redistest: Sentinel: %s: %v", what, err)
	}
}

// replicate makes all servers but the first its replicas, and waits for them. It
// is no argument of theirs, for one that is master later must be able to restart.
func (s *Sentinel) replicate() error {
	for _, replica := range s.servers[1:] {
		err := replica.ask(func(ctx context.Context, r *redis.Client) error {
			return r.ReplicaOf(ctx, "127.0.0.1", strconv.Itoa(s.servers[0].port)).Err()
		})
		if err != nil {
			return err
		}
	}
	return poll(func() error {
		for _, replica := range s.servers[1:] {
			if err := replica.inSync(); err != nil {
				return err
			}
		}
		return nil
	})
}

func (s *Server) inSync() error {
	return s.ask(func(ctx context.Context, r *redis.Client) error {
		text, err := r.Info(ctx, "replication").Result()
		if err != nil {
			return err
		}
		if link := parseInfo(text)["master_link_status"]; link != "up" {
			return fmt.Errorf("%s: master_link_status %q", s.Addr(), link)
		}
		return nil
	})
}

// watch has one Sentinel watch the master, with less patience than production
// has: a fail-over waits for nothing but timers. One that finds the master dead
// is enough to call an election, which still takes a majority. So with down
// different for each, the first is elected before another stands too. Votes
// that are split cost a fail-over five seconds.
func (s *Sentinel) watch(watcher *Server, down time.Duration) error {
	return watcher.ask(func(ctx context.Context, r *redis.Client) error {
		for _, args := range [][]any{
			// A replica may lead only if its INFO is no older than five PING-PERIODs, and
			// when the master is dead INFO is asked for once a second, whatever we say.
			{"DEBUG", "INFO-PERIOD", 200, "PING-PERIOD", 400, "ASK-PERIOD", 100, "PUBLISH-PERIOD", 100},
			// A Sentinel that finds its clock jumping, as on a busy machine, would do
			// nothing for half a minute.
			{"DEBUG", "ELECTION-TIMEOUT", 1000, "TILT-TRIGGER", 60_000},
			{"MONITOR", MasterName, "127.0.0.1", s.servers[0].port, 1},
			{
				"SET", MasterName,
				"down-after-milliseconds", down.Milliseconds(),
				"failover-timeout", failoverTimeout.Milliseconds(),
			},
		} {
			if err := r.Do(ctx, append([]any{"SENTINEL"}, args...)...).Err(); err != nil {
				return fmt.Errorf("SENTINEL %v: %w", args, err)
			}
		}
		return nil
	})
}

// unmet returns what a Sentinel does not know yet, or nil.
func (s *Sentinel) unmet() error {
	for _, watcher := range s.sentinels {
		var state map[string]string
		err := watcher.ask(func(ctx context.Context, r *redis.Client) (err error) {
			state, err = masterState(ctx, r)
			return err
		})
		if err != nil {
			return err
		}
		if state["flags"] != "master" ||
			state["num-slaves"] != strconv.Itoa(len(s.servers)-1) ||
			state["num-other-sentinels"] != strconv.Itoa(len(s.sentinels)-1) {
			return fmt.Errorf("%s knows %v", watcher.Addr(), state)
		}
	}
	return nil
}

func masterState(ctx context.Context, r *redis.Client) (map[string]string, error) {
	cmd := redis.NewMapStringStringCmd(ctx, "SENTINEL", "MASTER", MasterName)
	_ = r.Process(ctx, cmd) // the error is in the command
	return cmd.Result()
}

// Servers returns all servers, also dead ones: what was the master at the
// start, then its replicas. One that is restarted comes back as an empty master
// of its own, and the Sentinels make it a replica.
func (s *Sentinel) Servers() []*Server { return slices.Clone(s.servers) }

// Sentinels returns the Sentinels. One that is restarted knows what it knew.
func (s *Sentinel) Sentinels() []*Server { return slices.Clone(s.sentinels) }

// Client returns a client of the current master with [FailoverOptions], closed
// when t ends.
func (s *Sentinel) Client(t testing.TB) *redis.Client {
	t.Helper()
	client := redis.NewFailoverClient(s.FailoverOptions())
	t.Cleanup(func() {
		if err := client.Close(); err != nil && !errors.Is(err, redis.ErrClosed) {
			t.Errorf("redistest: close fail-over client: %v", err)
		}
	})
	return client
}

// FailoverOptions returns what [Options] returns, for a client that asks these
// Sentinels.
func (s *Sentinel) FailoverOptions() *redis.FailoverOptions {
	opt := Options("")
	addrs := make([]string, len(s.sentinels))
	for i, watcher := range s.sentinels {
		addrs[i] = watcher.Addr()
	}
	return &redis.FailoverOptions{
		MasterName:            MasterName,
		SentinelAddrs:         addrs,
		Protocol:              opt.Protocol,
		MaxRetries:            opt.MaxRetries,
		ContextTimeoutEnabled: opt.ContextTimeoutEnabled,
		DialTimeout:           opt.DialTimeout,
		DialerRetries:         opt.DialerRetries,
		ReadTimeout:           opt.ReadTimeout,
		WriteTimeout:          opt.WriteTimeout,
		PoolTimeout:           opt.PoolTimeout,
		DisableIdentity:       opt.DisableIdentity,
	}
}

// Master returns the server that the Sentinels name the master, which may be a
// dead one. While they differ, one of them is believed.
func (s *Sentinel) Master() *Server {
	s.t.Helper()
	master, err := s.named()
	s.must("name the master", err)
	return master
}

// named asks the first Sentinel that runs.
func (s *Sentinel) named() (*Server, error) {
	for _, watcher := range s.sentinels {
		if watcher.running() {
			return s.namedBy(watcher)
		}
	}
	return nil, errNobody
}

func (s *Sentinel) namedBy(watcher *Server) (*Server, error) {
	var state map[string]string
	err := watcher.ask(func(ctx context.Context, r *redis.Client) (err error) {
		state, err = masterState(ctx, r)
		return err
	})
	if err != nil {
		return nil, err
	}
	addr := net.JoinHostPort(state["ip"], state["port"])
	i := slices.IndexFunc(s.servers, func(server *Server) bool { return server.Addr() == addr })
	if i < 0 {
		return nil, fmt.Errorf("%s names an unknown server %s", watcher.Addr(), addr)
	}
	return s.servers[i], nil
}

// KillMaster kills the current master and returns it.
func (s *Sentinel) KillMaster() *Server {
	s.t.Helper()
	master := s.Master()
	master.Kill()
	return master
}

// WaitMaster returns the master as soon as all Sentinels that run name the same
// server, it runs, and it takes writes: for a test that has killed or paused
// the former one, when the fail-over is complete.
func (s *Sentinel) WaitMaster() *Server {
	s.t.Helper()
	var master *Server
	s.must("wait for a master", poll(func() (err error) {
		master, err = s.settled()
		return err
	}))
	return master
}

func (s *Sentinel) settled() (*Server, error) {
	master, err := s.named()
	if err != nil {
		return nil, err
	}
	if !master.running() {
		return nil, fmt.Errorf("the master %s does not run", master.Addr())
	}
	for _, watcher := range s.sentinels {
		if !watcher.running() {
			continue
		}
		if other, err := s.namedBy(watcher); err != nil || other != master {
			return nil, errors.Join(err, fmt.Errorf("%s does not name %s the master", watcher.Addr(), master.Addr()))
		}
	}
	return master, master.ask(func(ctx context.Context, r *redis.Client) error {
		role, err := r.Do(ctx, "ROLE").Slice()
		if err == nil && role[0] != "master" {
			err = fmt.Errorf("%s has the role %v", master.Addr(), role[0])
		}
		return err
	})
}

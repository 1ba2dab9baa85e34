package lua

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	// shardsEvery is how often a cluster is asked who owns its slots while Shard
	// is in use, and shardsSoon how often for shardsRestless after a change was
	// reported: a fail-over takes some seconds, and shows only when it is over.
	shardsEvery, shardsSoon, shardsRestless = 10 * time.Second, time.Second, 10 * time.Second
	// shardsTimeout bounds one such question.
	shardsTimeout = time.Second
)

// Shard returns which server the bucket of key is on, for whoever keeps an
// account of each server's health: the address of the master that owns the
// key's slot in a cluster, as the *redis.ClusterClient has it, so of the server
// that a call for key would go to. With any other client it is "": one server,
// or one master behind Sentinels.
//
// Shard does not wait and does not use the network. It is "" for all keys until
// the cluster is known, which the first call sees to in the background, in a
// second at most. It allocates nothing and takes some 200 ns, unless the key has
// to be rewritten for Redis. For slots that nobody owns it is any of the servers.
//
// It follows a change within a second or two of being used, if calls fail or
// are redirected or somebody calls [Store.ShardsChanged], and otherwise within
// ten; while the cluster cannot be asked it is what it was. One goroutine at a
// time does the asking, for a second at most if the client has
// ContextTimeoutEnabled; else the client's own time-outs bound it.
func (s *Store) Shard(key string) string {
	if s.shards == nil {
		return ""
	}
	// A key that has no braces is its own hash tag, so its name in Redis need not
	// be made up to find the slot.
	if s.shards.bracedPrefix || key == "" || len(key) > maxKeyBytes || strings.ContainsAny(key, "%{}") {
		key = s.RedisKey(key)
	}
	return s.shards.owner(key)
}

// ShardsChanged makes the next seconds' use of [Store.Shard] look for the owners
// of slots anew, at most once a second. The Store itself calls it when a call
// fails in a way that a fail-over or a moved slot may explain. It does not wait.
//
// The client profits too. By itself it would go on for a minute to send calls to
// a master that is dead, for it only learns from servers that answer.
func (s *Store) ShardsChanged() {
	if s.shards != nil {
		s.shards.changed()
	}
}

// failed looks at a failed call's error for a sign that the shards have changed.
// Redirections that the client follows need none: it learns from them.
func (s *Store) failed(err error) {
	if s.shards == nil {
		return
	}
	var reply redis.Error
	isReply := errors.As(err, &reply)
	if !isReply || slices.ContainsFunc(movedCodes, func(code string) bool { return hasCode(err, code) }) {
		s.shards.changed()
	}
}

// movedCodes are the codes of replies by which a server says that it is not, or
// not now, the one to ask.
var movedCodes = []string{"MOVED", "ASK", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "LOADING"}

// shards keeps a cluster client's knowledge of who owns which slot fresh. Times
// are since born. All of it is driven by use: without, nothing runs.
type shards struct {
	rdb          *redis.ClusterClient
	bracedPrefix bool // part of the prefix may be the hash tag
	born         time.Time

	known atomic.Bool  // the client has owners, so it need not ask to answer
	due   atomic.Int64 // when to ask next; never while asking

	mu       sync.Mutex // guards what follows, and changes of the above
	asking   bool
	asked    time.Duration // when that began last
	restless time.Duration // until when shardsSoon holds
}

func newShards(rdb *redis.ClusterClient, prefix string) *shards {
	return &shards{rdb: rdb, bracedPrefix: strings.Contains(prefix, "{"), born: time.Now()}
}

func (m *shards) owner(key string) string {
	m.used()
	if !m.known.Load() {
		return ""
	}
	node, err := m.rdb.MasterForKey(context.Background(), key)
	if err != nil {
		return ""
	}
	return node.Options().Addr
}

func (m *shards) changed() {
	m.mu.Lock()
	m.restless = time.Since(m.born) + shardsRestless
	if !m.asking {
		m.due.Store(min(m.due.Load(), int64(m.asked+shardsSoon)))
	}
	m.mu.Unlock()
	m.used()
}

// used asks anew if it is time to.
func (m *shards) used() {
	now := time.Since(m.born)
	if int64(now) < m.due.Load() {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if int64(now) < m.due.Load() {
		return // somebody else was quicker
	}
	m.asking, m.asked = true, now
	m.due.Store(math.MaxInt64)
	go m.ask()
}

// ask has the client load the owners of all slots, and use them. It keeps what
// it has when that fails.
func (m *shards) ask() {
	ctx, cancel := context.WithTimeout(context.Background(), shardsTimeout)
	defer cancel()
	// Loading is the first thing that ForEachMaster does. ReloadState would do it
	// too, but without a bound, and one server that hangs would stop it for long.
	err := m.rdb.ForEachMaster(ctx, func(context.Context, *redis.Client) error { return nil })

	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		m.known.Store(true)
	}
	next := shardsEvery
	if !m.known.Load() || m.asked < m.restless {
		next = shardsSoon
	}
	m.asking = false
	m.due.Store(int64(m.asked + next))
}

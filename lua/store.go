// Package lua is the bucket in Redis: a lease.Store whose every call is one
// script (acquire.lua; window.lua, log.lua or counter.lua for the algorithms with
// windows), and a decoder for the states they keep.
//
// One key is one Redis string, "<prefix>tb1:{<key>}": tb1 is the algorithm and
// the version of the state (fw1 is a fixed window, sl1 a sliding log, sc1 a sliding
// counter), so another algorithm or a later version never meets this one's state. The braces make <key> the hash tag; in the key's own
// text '%', '{' and '}' are written %25, %7B, %7D, so a user cannot choose a
// slot, and a key longer than 256 bytes is replaced by its SHA-256.
//
// # What it needs
//
// Any Redis from 6.2 with EVALSHA, EVAL, MGET, SET and TIME on its keys, and for
// heartbeats PEXPIRE, DEL and the commands of sorted sets on "<prefix>{nodes}" and
// "<prefix>{nodes}:gen". Use maxmemory-policy noeviction: an evicted bucket is a
// full bucket. The client must not send scripts to replicas (in go-redis:
// FailoverOptions.ReplicaOnly, or UniversalOptions.ReadOnly with a MasterName).
//
// # At most once
//
// Clients re-send a command whose connection broke or timed out, and so charge
// one call several times. Every command here is marked as not to be retried,
// whatever the client's MaxRetries. Set the client's ContextTimeoutEnabled.
// Without it a plain *redis.Client is used through its WithTimeout, which does
// not have the client's hooks; any other client leaves a call to itself when its
// time is over, until the client's ReadTimeout, at most 64 of them at a time.
package lua

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/lease"
)

const (
	// MaxBatch is how many keys one script call carries: 128 is where one core
	// of Redis gains little more and other clients would begin to wait (0.5 ms).
	MaxBatch = 128

	argsPerKey  = 22
	reply       = 12 // integers per key
	replyLimit  = 4  // more, for a key whose limit is newer
	maxKeyBytes = 256

	// never is acquire.lua's NEVER, in microseconds.
	never = int64(9_000_000_000_000_000)

	flagCreated = 1
	flagCorrupt = 2
	flagNewer   = 4
)

// Client is what a Store needs of go-redis. *redis.Client (a Sentinel
// fail-over client is one) and *redis.ClusterClient have it.
type Client interface {
	Process(ctx context.Context, cmd redis.Cmder) error
	Pipeline() redis.Pipeliner
}

// Options are a Store's settings. The zero value works.
type Options struct {
	// Prefix starts every Redis key. Default "hybridlimit:".
	Prefix string
	// Timeout bounds the reading of one reply in a client that does not heed
	// its context. Default 30ms.
	Timeout time.Duration
}

// Store is the lease.Store kept in Redis. Make one with NewStore; it is safe
// for concurrent use and holds nothing that needs closing.
type Store struct {
	rdb    Client
	prefix string
	// scripts are those of the algorithms, by their numbers.
	scripts []*script
	// single is whether one script call may carry several keys. It falls for
	// good when the server answers CROSSSLOT.
	single atomic.Bool
	// linger bounds calls that outlive their context in a client that does not
	// heed it; nil when the client does.
	linger chan struct{}
	// shards knows who owns which slot of a cluster; nil without one.
	shards *shards
	// rider has beats to send along; nil for nobody.
	rider *rider
	// clock, in tests only, adds the time to ARGV in place of TIME.
	clock func() time.Duration
}

// NewStore returns a Store on rdb, which stays the caller's to close.
func NewStore(rdb Client, opts Options) *Store {
	if opts.Prefix == "" {
		opts.Prefix = "hybridlimit:"
	}
	if opts.Timeout <= 0 {
		opts.Timeout = 30 * time.Millisecond
	}
	s := &Store{rdb: rdb, prefix: opts.Prefix, scripts: newScripts()}
	switch c := rdb.(type) {
	case *redis.Client:
		s.single.Store(true)
		if !c.Options().ContextTimeoutEnabled {
			// A connection whose reply is lost must not stay busy for the client's
			// ReadTimeout, or a few losses use up the pool.
			s.rdb = c.WithTimeout(opts.Timeout)
		}
	case *redis.ClusterClient:
		s.shards = newShards(c, opts.Prefix)
		if !c.Options().ContextTimeoutEnabled {
			s.linger = make(chan struct{}, 64)
		}
	default:
		s.linger = make(chan struct{}, 64)
	}
	return s
}

// RedisKey returns the name of key's bucket in Redis.
func (s *Store) RedisKey(key string) string { return s.RedisKeyOf(key, lease.TokenBucket) }

// RedisKeyOf returns the name in Redis of key's state under an algorithm.
func (s *Store) RedisKeyOf(key string, a lease.Algorithm) string {
	return s.named(s.scripts[a].tag, key)
}

func (s *Store) named(tag, key string) string {
	var b strings.Builder
	b.Grow(len(s.prefix) + len(key) + 8)
	b.WriteString(s.prefix)
	b.WriteString(tag)
	b.WriteString(":{")
	switch {
	case len(key) > maxKeyBytes:
		sum := sha256.Sum256([]byte(key))
		b.WriteString("sha256%")
		b.WriteString(hex.EncodeToString(sum[:]))
	case strings.ContainsAny(key, "%{}"):
		_, _ = keyEscaper.WriteString(&b, key) // a Builder never fails
	default:
		b.WriteString(key)
	}
	b.WriteByte('}')
	return b.String()
}

var keyEscaper = strings.NewReplacer("%", "%25", "{", "%7B", "}", "%7D")

// Acquire implements lease.Store. On one server up to MaxBatch keys share a call of
// each script; on a cluster each key is a call of its own. Several are pipelined.
func (s *Store) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	answers := make([]lease.Answer, len(calls))
	if err := ctx.Err(); err != nil {
		fill(answers, fmt.Errorf("%w: %w", lease.ErrNotExecuted, err))
		return answers
	}
	got, err := heed(ctx, s, func() []lease.Answer {
		got := make([]lease.Answer, len(calls))
		s.acquire(ctx, calls, got)
		return got
	})
	if err != nil {
		fill(answers, err)
		return answers
	}
	return got
}

// heed returns f's result. With a client that does not heed ctx f is left to itself
// when ctx ends, a bounded number of times; err says that there is no result.
func heed[T any](ctx context.Context, s *Store, f func() T) (result T, err error) {
	if s.linger == nil {
		return f(), nil
	}
	select {
	case s.linger <- struct{}{}:
	default:
		return result, fmt.Errorf("%w: %d earlier calls still hang", lease.ErrNotExecuted, cap(s.linger))
	}
	done := make(chan T, 1)
	go func() {
		late := f()
		<-s.linger
		done <- late
	}()
	select {
	case result = <-done:
		return result, nil
	case <-ctx.Done():
		return result, fmt.Errorf("%w: %w", lease.ErrUnknownOutcome, ctx.Err())
	}
}

func fill(answers []lease.Answer, err error) {
	for i := range answers {
		answers[i] = lease.Answer{Err: err}
	}
}

func (s *Store) acquire(ctx context.Context, calls []lease.Call, answers []lease.Answer) {
	for i := range calls {
		if _, _, ok := calls[i].Ratio(); !ok {
			s.acquireValid(ctx, calls, answers)
			return
		}
	}
	s.send(ctx, calls, answers)
}

// acquireValid answers the calls whose limit has no bucket, and sends the rest:
// a limit that denies everything grants nothing, one out of range is rejected.
func (s *Store) acquireValid(ctx context.Context, calls []lease.Call, answers []lease.Answer) {
	var valid []lease.Call
	var indexes []int
	for i, c := range calls {
		if _, _, ok := c.Ratio(); ok {
			valid = append(valid, c)
			indexes = append(indexes, i)
			continue
		}
		if err := c.Limit.Validate(); err != nil {
			answers[i].Err = fmt.Errorf("%w: %w", lease.ErrRejected, err)
			continue
		}
		answers[i].Grant = lease.Grant{
			Limit: c.Limit, Version: c.Version, Source: lease.SourceStore,
			RetryAfter: micros(never), ResetAfter: micros(never),
		}
	}
	got := make([]lease.Answer, len(valid))
	s.send(ctx, valid, got)
	for k, i := range indexes {
		answers[i] = got[k]
	}
}

// onceCmd is a command that go-redis must not send a second time.
type onceCmd struct{ *redis.Cmd }

// NoRetry is go-redis's question whether to refrain from re-sending.
func (onceCmd) NoRetry() bool { return true }

// command is one of g's script, by its name or its text.
func (s *Store) command(ctx context.Context, name, text string, g group) onceCmd {
	calls := g.calls
	args := make([]any, 0, 5+len(calls)*(1+argsPerKey))
	args = append(args, name, text, len(calls))
	for i := range calls {
		args = append(args, s.named(g.tag, calls[i].Key))
	}
	for i := range calls {
		args = appendArgs(args, &calls[i])
	}
	if s.clock != nil {
		now := s.clock().Microseconds()
		args = append(args, now/1e6, now%1e6)
	}
	cmd := onceCmd{redis.NewCmd(ctx, args...)}
	cmd.SetFirstKeyPos(3)
	// Or else a cluster client asks any of the servers for its COMMAND table first,
	// for up to five seconds whatever ctx says, while all other calls wait.
	cmd.SetStepCount(1)
	return cmd
}

func appendArgs(args []any, c *lease.Call) []any {
	count, perUS, _ := c.Ratio() // acquire saw to it that there is one
	reset := 0
	if c.Reset {
		reset = 1
	}
	hint, age := c.Limit.Burst, int64(0)
	if c.Hint.Known {
		hint, age = c.Hint.Tokens, max(0, c.Hint.Age.Microseconds())
	}
	return append(args,
		c.Limit.Burst, count, perUS, c.Version, c.TTL.Microseconds(),
		c.Reports[0].Epoch, c.Reports[0].Spent, c.Reports[0].Returned,
		c.Reports[1].Epoch, c.Reports[1].Spent, c.Reports[1].Returned,
		c.Refund, c.Debt, reset,
		c.Need, c.Bound, c.Want, c.Demand, c.LastEpoch, int(c.Share),
		hint, age)
}

// decode turns a reply into answers. A reply of another shape is an outcome
// nobody knows: never a grant.
func (s *Store) decode(cmd *redis.Cmd, err error, calls []lease.Call, answers []lease.Answer) {
	if err != nil {
		s.failed(err)
		fill(answers, classify(err, len(calls)))
		return
	}
	values, shapeErr := cmd.Int64Slice()
	if shapeErr != nil || len(values) < reply*len(calls) {
		fill(answers, fmt.Errorf("%w: reply has the wrong shape: %.80q", lease.ErrUnknownOutcome, fmt.Sprint(cmd.Val())))
		return
	}
	tail := values[reply*len(calls):]
	for i := range calls {
		v := values[reply*i : reply*(i+1)]
		g := lease.Grant{
			Tokens: v[0], Bound: v[1], Epoch: v[2], TTL: micros(v[3]),
			Remaining: v[4], RetryAfter: micros(v[5]), ResetAfter: micros(v[6]), Pace: micros(v[7]),
			Outstanding: v[8], Active: v[9], Demand: v[11],
			Created: v[10]&flagCreated != 0, Corrupt: v[10]&flagCorrupt != 0, Newer: v[10]&flagNewer != 0,
			Limit: calls[i].Limit, Version: calls[i].Version, Source: lease.SourceStore,
		}
		if g.Newer {
			if len(tail) < replyLimit {
				answers[i].Err = fmt.Errorf("%w: reply lacks the newer limit", lease.ErrUnknownOutcome)
				continue
			}
			g.Version, g.Count, g.PerUS = tail[0], tail[2], tail[3]
			g.Limit = limitOf(tail[1], tail[2], tail[3])
			g.Limit.Algorithm = calls[i].Limit.Algorithm
			tail = tail[replyLimit:]
		}
		if g.Tokens < 0 || g.Tokens > calls[i].Want || g.Bound < 0 || g.Bound > g.Tokens {
			answers[i].Err = fmt.Errorf("%w: reply grants %d (bound %d) of %d", lease.ErrUnknownOutcome, g.Tokens, g.Bound, calls[i].Want)
			continue
		}
		answers[i].Grant = g
	}
}

// limitOf is the Limit whose Ratio is count per perUS.
func limitOf(burst, count, perUS int64) lease.Limit {
	return lease.Limit{Rate: float64(count) / float64(perUS) * 1e6, Burst: burst}
}

func micros(us int64) time.Duration {
	const most = int64(1<<63-1) / 1000
	return time.Duration(max(0, min(us, most))) * time.Microsecond
}

func isNoScript(err error) bool { return hasCode(err, "NOSCRIPT") }

// hasCode reports whether err is an error reply with the code, also where a
// proxy or an older server put "ERR " or the like before it.
func hasCode(err error, code string) bool {
	var reply redis.Error
	return errors.As(err, &reply) && strings.Contains(firstWords(reply.Error()), code)
}

// firstWords is the part of an error reply where a code can stand.
func firstWords(s string) string { return s[:min(len(s), 64)] }

// Package hybrid is a rate limiter for services with many nodes and a high
// request rate. Redis holds one token bucket per key; each node leases batches
// of tokens from it and decides from memory, so a hot decision costs tens of
// nanoseconds and no round trip, while in any window of length t all nodes
// together never admit more than burst + rate·t.
//
//	limiter, err := hybrid.New(rdb, hybrid.PerSecond(1000, 1000), hybrid.Options{})
//	…
//	d, err := limiter.Allow(ctx, "user:42")
//	if err != nil { … }         // a bad key or cost, or ctx ended; never Redis
//	if !d.Allowed { … }         // wait d.RetryAfter
//
// # What it gives up
//
// Tokens out on lease count against the burst: while other nodes hold some, one
// node's burst can draw only the rest. A node that dies takes its leases along
// for up to four lease periods (a second by default). Remaining is this node's
// knowledge, not the global truth. Keys that are rarely used, or whose burst is
// small against their rate, are decided by a Redis call each, shared by all
// requests that wait at the time.
//
// # Algorithms
//
// Limit.Algorithm says how a limit counts. A window is burst/rate long:
// PerWindow(100, time.Minute, SlidingLog) is a hundred a minute.
//
//	                 bytes per key   at most, in any window     leased  use it for
//	token-bucket     170 to 190      burst + rate·t, exactly    yes     nearly everything
//	leaky-bucket     the same        the same                   yes     the same, thought of as a level that leaks
//	fixed-window     180 to 200      burst in an aligned one,   yes     quotas per minute, hour or day that begin
//	                                 2·burst in any                     anew at a time that users can know
//	sliding-log      180; 250 with   burst, exactly             no      few, costly requests: logins, payments
//	                 10 instants,
//	                 3000 with 256
//	sliding-counter  180 to 200      burst in an aligned one,   no      windows without a log's memory, where
//	                                 less than 2·burst in any           traffic is steady
//
// Bytes are by MEMORY USAGE on Redis 7.0, with keys of some 25 bytes. At its edges a
// fixed window can admit two bursts at once, at the end of one and the beginning of
// the next; a sliding counter nearly that if the burst before came at the very end;
// a log never. A log of more than 256 instants in a window counts some of
// them for up to a 128th of the window too long. What is not leased costs a call
// to Redis, shared by all that wait. Each algorithm has a state of its own in
// Redis, so a key whose algorithm changes starts anew.
//
// # When Redis fails
//
// Requests in flight wait RedisTimeout; then nobody waits for Redis, and each node
// goes on with its share of the limit: Decision.Source is SourceLocal, and
// Remaining and RetryAfter are the share's. With n nodes, which count each other by
// heartbeats in Redis, all together stay within max(burst, cost·n) + rate·t, plus
// what their knowledge of the bucket was off by when Redis failed (usually a lease
// period's worth of the rate). When Redis is back it is charged with what was
// admitted without it. A limit can choose otherwise: Limit.OnFailure. Package
// fallback states the bound for each state. Set Options.MinNodes or Options.Nodes
// so that a node that starts while Redis is down knows that it is not alone. Give the
// limiter a client of its own: a pool that others use up looks like an outage. While
// Redis is down go-redis logs failed dials; redis.SetLogger turns that off.
//
// # Redis
//
// Any Redis from 6.2, or a server that speaks its protocol and runs its Lua, as
// Valkey does. Use maxmemory-policy noeviction: an evicted bucket is a full one.
// Commands are never re-sent, whatever the client's MaxRetries. Set the client's
// ContextTimeoutEnabled, so that calls end when RedisTimeout is over; without
// it the limiter's commands do not pass the client's hooks.
//
// # Redis rights
//
// A user of its own needs, with the default Options.Prefix, no more than
//
//	ACL SETUSER limiter on >password ~hybridlimit:* +evalsha +eval
//	    +time +mget +set
//	    +zadd +zrem +zcard +zrange +zrangebyscore +zremrangebyscore +pexpire +del
//
// The scripts call what is in the second and third line; the third is for
// heartbeats, and DEL of that only where a foreign value has the name of theirs.
// go-redis needs +cluster|slots and +asking too on a cluster, and +select for a
// database other than 0; what it says about itself (CLIENT SETINFO) may be refused.
// A right that is missing looks like an outage, NOPERM or "can't run this
// command" in Stats.Fallback.Cause; one for heartbeats shows in
// Stats.Members.Failed.
package hybrid

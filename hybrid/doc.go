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
// # Redis
//
// Any Redis from 6.2, or a server that speaks its protocol and runs its Lua.
// Use maxmemory-policy noeviction: an evicted bucket is a full one. Commands
// are never re-sent, whatever the client's MaxRetries. Set the client's
// ContextTimeoutEnabled, so that calls end when RedisTimeout is over; without
// it the limiter's commands do not pass the client's hooks.
package hybrid

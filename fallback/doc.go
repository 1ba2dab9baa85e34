// Package fallback keeps limiting when the store fails: a Store asks its primary
// as long as that answers, and else divides each limit among the nodes.
//
// # When the primary is asked
//
// Every server of the primary (a cluster has several) is a shard with a circuit
// breaker of its own. The first call that has no answer in time takes the shard
// down: from then on nobody waits for it. One call at a time probes it, at once
// and then after pauses that double from 25 ms to Options.Backoff, up to half
// longer at random. Options.Failures in a row open the breaker; after that the
// first answered probe closes it, and calls go back to the primary little by
// little over Options.Ramp. A probe is a call of the real script that has to
// write and takes nothing, so a replica, a full or a loading server does not
// pass for a healthy one.
//
// A failure is an unknown outcome, a timeout, a refused connection, an error
// reply by which the server says that it cannot (LOADING, READONLY, OOM, BUSY,
// CLUSTERDOWN, …), or answers that take longer than half a lease period, and than
// 125 ms, for a second. A caller that gives up and a call that the server rejects say nothing
// about the server. Nor does a lack of connections on this node, if the client says
// so before the call's time is over; go-redis, with its usual PoolTimeout, does not.
//
// # What a share is
//
// A node's share of a limit is a token bucket, one x/time/rate limiter for as
// long as the node knows the key, with
//
//	rate   w·rate     burst   max(c, ⌊w·burst⌋)
//
// where w is the node's part of the limit and c the largest cost asked for in this
// outage, admitted or not. With
// SplitEqual w is 1/n, for n nodes. With SplitBlend it is
//
//	w = (1−β)/n + β·0.9·d,   β from ½ to 0 in a minute,   ¼/n ≤ w ≤ 4/n
//
// where d is the node's part of the demand of all nodes, averaged over the seconds
// before the outage; what of these seconds came before the node heard of the key
// counts as 1/n. The parts add up to 1, as far as the nodes heard of the store at
// the same time; the 0.9 makes up for an epoch that some had not heard of. Where the burst
// is less than n, some nodes own the key and have w = 1/burst, the others 0; if
// the nodes are not known by name, all have 1/n and start empty or with what
// Options.Unknown says.
//
// Leases of a share count against its burst, as those of the store do (package
// lease, Why it holds), so that hits are as cheap as ever and the bound of a
// share is exact.
//
// # What holds when
//
// C is the burst, r the rate, c the largest cost, N the nodes that there are and n
// those they believe in, t the length of any window:
//
//	healthy                   C + r·t
//	outage, n = N             max(C, c·N) + r·t
//	outage, n ≠ N             N·max(c, C/n) + (N/n)·r·t
//	window over the failure   the above + E
//	after the outage          C + r·t + E + U
//	p of N nodes cut off      (1 + p/n)·(C + r·t) + E
//
// E is what the nodes' knowledge of the balance was off by when the store failed:
// a share starts with its part of min(C, b + r·a), b being the balance that the
// store told this node last, a ago. Others may have taken tokens since: at most C,
// and for a key in steady use what is granted in a lease period, about r·T. For a
// key that the node never heard of it is a token (StartOne), 0 (StartEmpty) or
// C/n (StartFull). U is what has not been charged yet, at most C and what shares
// admit after the store is back; it is 0 some seconds after all nodes are back,
// Options.Backoff and Options.Ramp after the store. Debts are charged in batches, by
// tens of thousands a second on each node. With
// SplitBlend all shares together are 1, give or take what the parts are off.
//
// A limit with OnFailure Deny holds as it is; with Allow it does not hold until
// the store is back.
//
// Shares are token buckets whatever the limit's Algorithm: for one that counts in
// windows of W = C/r the table is that of other bounds. In any stretch of length W,
// n = N and c·N ≤ C:
//
//	                          FixedWindow   SlidingLog   SlidingCounter
//	healthy                   2·C           C            less than 2·C
//	healthy, aligned          C                          C
//	outage                    2·C           2·C          2·C
//	over the failure          3·C + E       2·C + E      3·C + E
//
// A bucket of C that refills C in W admits 2·C at most, and over the failure begins
// with what the window had left. E is as below, but a share takes the tokens of
// windows to come in little by little and not when a window ends. When the
// store is back the debt is charged to the window that is: the rest of a
// fixed window and then the next, at most two; in a log, and a counter, it counts
// from then on for as long as a request would.
//
// # Why the books balance
//
// When a node is back it charges the store with min(f, B−τ) tokens: f is what the
// share admitted in the outage, and B−τ what its bucket lacked when the store failed
// to answer for the last time; what the share admits after that is charged in full,
// for others may use the store by then. Let the shares have
// started with the balance b of the store. While b + r·t ≤ C the store, idle, shows
// b + r·t where the truth is b + r·t − Σf: the debt is f, and f ≤ B−τ, for no share
// has run over. Once the store's bucket ran over it shows C where the truth is Στ:
// the debt is B−τ, less than f, for what ran over nobody lost. So the balance is
// again what one bucket for all would have. It may become negative and is repaid
// by the refill; no request waits for that. It does not fall below minus the burst: what
// nodes that were cut off admitted beyond that, others using the store meanwhile, is
// not charged. Nor is what they forgive, which takes the store for idle; the bound for p
// nodes that are cut off holds all the same.
//
// A debt whose call has an unknown outcome stays owed: charged twice is on the
// safe side. Debts of keys that nobody asks for any more are sent in batches, with
// pauses of ten times what a batch takes.
//
// No more than Options.MaxKeys shares are kept, give or take 64. First those go that
// are full and owe nothing. If others have to, the shares that are made after that,
// until all servers are up again, start empty: each could be one that had to go. What
// those owed is lost (Stats.Lost).
//
// A bucket that is missing after an outage, for the store lost its data, starts
// with what the first node to call knows of it, not full.
package fallback

// Package lease is the node's side of the lease protocol, and the words both
// sides share. A Store (Redis, in package lua) holds one bucket of tokens per
// key. Each node leases batches of tokens from it, admits requests from memory
// with them, and reports what it spent. It imports the standard library alone.
//
// # The promise
//
// In any window of length t, all nodes together admit at most
//
//	burst + rate·t
//
// tokens of a key. Equivalently, the level, a leaky bucket that drains at rate
// and is fed by what was admitted, never passes burst (type Level). A request
// that waited for the store counts at the instant the store charged it, which
// lies between the call and its return; one admitted from a lease counts at
// its decision on the node.
//
// The promise needs a store that keeps its state. What it costs to lose some is
// in the table below.
//
// # Terms
//
//   - key: what is limited, a string. limit: rate (tokens per second) and burst
//     (tokens) of a key. token: the right to one unit of cost.
//   - lease: tokens that a node may spend until a deadline. grant: the store's
//     answer that makes one. want: how many a node would like; need: how many it
//     must have. demand: the tokens asked of a node per lease period.
//   - renew: to lease again before the last lease is spent. return: to give
//     unspent tokens back. expire: to pass the deadline unspent.
//   - period: how long a lease should last, T. TTL: how long it may be spent,
//     2·T, less 5 %. epoch: a stretch of one TTL (2·T) of the store's clock.
//   - outstanding: leased tokens that are not yet reported spent or returned.
//   - pace: the store's word that a node should not ask again before a period
//     is over. deny: to refuse a request. retry after: how long until the same
//     request would be met if nobody else asked.
//   - share: a node's part of what is there. debt: tokens charged after the
//     fact. over-admission: what was admitted beyond the promise.
//   - fallback: what a node limits with while the store is down (package
//     fallback). node: one process with a limiter.
//
// # Why it holds
//
// Let b be the balance in the bucket, O the tokens out on live leases, Ô the
// store's count of them. The store keeps three rules, in this order, in every
// call:
//
//  1. Advance b to now along db/dt = rate while b + Ô < burst, else 0, with Ô as
//     it was before this call. Leases of an epoch are dropped from Ô when the
//     next epoch ends.
//  2. Then take reports off Ô, each token at most once and only when it can no
//     longer be spent on its node; add returned tokens to b.
//  3. Then grant g ≤ b: b falls by g, Ô rises by g.
//
// O ≤ Ô always: a grant raises both together; a report lowers Ô only by tokens
// that left O; an epoch is dropped no earlier than one TTL after its last
// grant, when every node's deadline (0.95·TTL after it *sent* the call) has
// passed. b + Ô ≤ burst always: rule 1 stops there, a grant or a return keeps
// the sum, a report or a drop lowers it. So Φ = b + O ≤ burst. Φ rises only by
// refill, at most rate·dt, and falls by what is admitted and what is lost;
// granting and returning do not change it. Over any window of length t,
// admitted = Φ(start) − Φ(end) + refill − lost ≤ burst + rate·t. ∎
//
// The order is part of the proof. Reports first would let the refill of the
// whole interval see an Ô from its end: lease the burst, spend it ten seconds
// later, report, and the bucket has refilled for those ten seconds as if
// nothing had been out: twice the burst at one instant.
//
// Tokens for requests that already wait when a call is sent never are a lease:
// the store charges them as spent at once (Call.Bound).
//
// The tokens of a request that left while its call was on the way stay on the
// node for another, though the store booked them as spent. Let X be all such
// tokens alive. A node keeps n of them for a TTL only if b + Ô after their
// charge + n + rate·TTL ≤ burst. Later charges have lowered b by what they keep,
// so the earliest of those alive says that b + Ô + X ≤ burst. A bucket that had
// never made these charges holds V = b + Ô + W, and W ≥ X: a charge adds the same
// to both, and W shrinks only while V stands at the burst, when W = burst −
// (b + Ô) ≥ X. So whatever they admit, V could have admitted.
//
// # Other algorithms
//
// All above is of the token bucket, and of the leaky bucket, which is the same. The
// others count in windows of burst/rate on the store's clock (type Algorithm has
// their bounds) and answer the same Call with the same Grant:
//
//   - FixedWindow leases. What is leased counts in the window it was granted in, so
//     outstanding tokens need no room in another. A lease ends with the window, less
//     5 % of what was left of it; what comes back in time can be granted again, and
//     what nobody reports is lost to this window alone. lua/window.lua has the proof.
//   - SlidingLog and SlidingCounter bound what is admitted by when it was, and a
//     leased token is admitted later than it was counted. So they grant Bound tokens
//     alone: always coalesced-direct, and refusals are remembered as ever. Tokens of
//     a request that left while its call was on the way are lost.
//
// A change of the limit takes along what is used. If the window's length changes at
// version 0, where two limits may alternate, the longer window has to end first; a
// newer version counts by its own window at once.
//
// # What it costs
//
// Outstanding tokens count against the burst, so a key can be used at its full
// rate only if its burst covers what is on the way: about 2·rate·T. Hence T is
// at most burst/(3·rate). Where that is no longer than a few round trips, or a
// node is asked for fewer than two tokens a period, no lease is taken: each
// round trip serves all requests that wait (coalesced-direct), and the next
// waits for it. With leases a hot key costs a node about 1/T calls a second,
// whatever its traffic; that includes an exhausted key (pace).
//
// # What may be admitted beyond the promise
//
//	the store loses a key (eviction, FLUSHALL, a fail-over)   ≤ burst, each time
//	the store's clock jumps ahead by j                        ≤ min(burst, rate·j) + Ô
//	Cache.Reset fills the bucket                              ≤ burst, each time
//	a limit is lowered to (burst', rate') at x                burst' + rate'·t + Ô(x) in all
//	an admitted request is refunded though it ran             what was refunded
//	or of a window that has ended                             the same
//	the clock of windows jumps ahead over the end of one      ≤ burst, each time
//	the machine sleeps, until the watchdog looks (1 ms)       the leases of that node
//	it sleeps for less than 100 ms, which looks like nothing  the same
//	a node's clock runs more than 5 % slow                    the leases of that node
//
// A node reads a coarse clock on a hit. It is believed only when the deadline
// is at least 50 ms off, and set anew by hits, each time they have taken 64
// tokens of a lease, besides the ticker. So a process that was stopped past a
// deadline, and whose ticker is not the first to run when it goes on, admits at
// most 63 tokens and one more request of that lease.
//
// # What is lost
//
// A call is sent at most once. If its outcome stays unknown, the reports in it
// are not sent again and the tokens it may have been granted are not used: both
// come back by themselves when their epoch is dropped, within 2 TTLs. A node
// that dies takes its leases along for as long. Both only admit less.
//
// # When the store fails
//
// A Store may grant by itself what the one behind it does not answer (package
// fallback): the Grant's Source is not SourceStore, and its epoch is below -1. Such
// leases are spent and reported as others, apart from them, for only that Store is
// told (Call.Own). An Answer with an error and a Grant says both what became of the
// call and who stood in. A request that waited in vain asks a Store that is a Local
// directly.
//
// # Locks
//
// A shard's mutex (table), then a holding's, then Cache.send's or the wheel's.
// Never two of a kind. Hits take none. No callback and no store call runs under
// a lock.
package lease

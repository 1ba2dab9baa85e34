package lease

import (
	"context"
	"errors"
	"time"
)

// Store hands out tokens. Redis is one (package lua); "Redis, or else this
// node's share of the limit" is one that wraps another (package fallback).
type Store interface {
	// Acquire carries out calls and returns one Answer for each, in order.
	// The calls have different keys. ctx bounds the whole batch; when it ends
	// first, the calls without an answer get ErrUnknownOutcome.
	//
	// A Store never carries out a call twice, and never re-sends one whose
	// outcome it does not know. It is safe for use by many goroutines.
	Acquire(ctx context.Context, calls []Call) []Answer
}

// Answer is what became of one Call: a Grant, or an error that matches
// ErrNotExecuted, ErrUnknownOutcome or ErrRejected. An error with a Grant (its
// Source is set) tells what became of the call at the store; the Grant stands in.
type Answer struct {
	Grant Grant
	Err   error
}

var (
	// ErrNotExecuted says that the store certainly did not carry out the
	// call: its reports may be sent again.
	ErrNotExecuted = errors.New("lease: call was not executed")
	// ErrUnknownOutcome says that the store may or may not have carried out
	// the call: nothing of it may be sent again.
	ErrUnknownOutcome = errors.New("lease: outcome of call is unknown")
	// ErrRejected says that the store is well and the call is at fault; it
	// was not executed and would be rejected again.
	ErrRejected = errors.New("lease: call was rejected")
	// ErrOverloaded comes with ErrNotExecuted when the call did not leave this
	// node for want of a connection: it says nothing about the store.
	ErrOverloaded = errors.New("lease: this node has too many calls under way")
	// ErrDown comes with ErrNotExecuted when the store is known not to answer,
	// and was not asked.
	ErrDown = errors.New("lease: store is down")
)

// Local is a Store that can also decide without waiting for anything.
type Local interface {
	Store
	// Local answers call at once from what this node may admit by itself. Its
	// Grant's Source is not SourceStore.
	Local(call Call) Answer
}

// Share says how a store divides a bucket among nodes that want more than
// there is.
type Share uint8

const (
	// ShareEqual aims at max-min fairness: a node gets its equal part of the
	// refill, and of the rest what the other active nodes would leave.
	ShareEqual Share = iota
	// ShareProportional gives each node its part of the whole demand.
	ShareProportional
	// ShareNone gives whatever is there to whoever asks first.
	ShareNone
)

// Call is what one node asks of the store about one key, in one round trip.
// Its parts are carried out in the order of the fields below, after the refill
// up to now was computed with the outstanding tokens as they were before
// (doc.go says why that order is part of the proof).
type Call struct {
	// Key names the bucket.
	Key string
	// Limit and Version are the configuration this node knows. A higher
	// Version wins; at Version 0 the latest call wins. The bucket keeps its
	// tokens, up to the new burst, and is never refilled by a change.
	Limit   Limit
	Version int64
	// Count tokens per PerUS microseconds is the limit's rate, exactly. Zero
	// stands for Limit.Ratio; a node that adopted a Grant's limit sends what
	// came with it, for a float64 in between could become another ratio.
	Count, PerUS int64
	// TTL is how long a lease lives, h. It must be the same on all nodes; the
	// store's epochs are of the largest as long as a lease is out, but leases are
	// no longer than asked for. Range 1ms to 24h.
	TTL time.Duration

	// Reports tell what became of leased tokens, by the epoch of their lease.
	// A token is reported at most once, and only when it can no longer be
	// spent on the node.
	Reports [2]Report
	// Own are reports about tokens that this node was granted by itself (their
	// epoch is below -1). A Store that grants such takes them in whatever the
	// Answer; others ignore them.
	Own [2]Report
	// Hint is what this node knows of the bucket, for a Store that may have lost
	// it in an outage. Only a Local is told, and passes it on when there was one:
	// a bucket also goes when another node filled it.
	Hint Hint
	// Refund gives back tokens that were admitted but not used after all. The
	// balance never passes what the burst leaves beside outstanding leases.
	Refund int64
	// Debt is charged whatever the balance, down to minus the burst.
	Debt int64
	// Reset fills the bucket, up to what outstanding leases leave.
	Reset bool

	// Need is the cost that must be met now: fewer tokens are not granted. 0
	// asks for whatever there is.
	Need int64
	// Bound is a multiple of Need: the tokens for requests that are waiting.
	// They count as spent the moment they are granted.
	Bound int64
	// Want is how many tokens in all the node would like, at least Bound.
	// Need = Want = 0 makes no grant: a report, or a look at the bucket.
	Want int64
	// Demand is the node's estimate of the tokens asked of it per lease
	// period, admitted or not.
	Demand int64
	// LastEpoch is the epoch of this node's previous Grant for the key, or -1.
	// The store counts a node as active once per epoch by it.
	LastEpoch int64
	// Share is how to divide what is there.
	Share Share
}

// Report says what became of tokens leased in one epoch since the last report.
type Report struct {
	Epoch    int64
	Spent    int64 // admitted with, or lost on the node
	Returned int64 // given back unused
}

// Hint is what the last Grant of the store told this node about a bucket.
type Hint struct {
	// Known is whether there was one. The rest but Prior is zero otherwise.
	Known bool
	// Tokens was the balance, rounded up: a bucket that expired, as full ones
	// do, must not look less than full. Negative in debt.
	Tokens int64
	// Age is how long ago, by this node's clock.
	Age time.Duration
	// Outstanding was the store's count of leased tokens, this node's included.
	Outstanding int64
	// Part is this node's part of the demand of all nodes, averaged over the last
	// seconds, and Prior the part of that average about which nothing is known, for
	// the node had not heard of the key. Of all nodes together the Parts are at most
	// 1, as far as they heard of the store at the same time. Range 0 to 1.
	Part, Prior float64
}

// Grant is a Store's answer to a Call. Tokens may be fewer than wanted; zero
// means denied until RetryAfter has passed. TTL runs from before the call was
// sent, so a slow network only shortens a lease, never lengthens it.
type Grant struct {
	// Tokens granted, those for Bound requests included.
	Tokens int64
	// Bound is how many of them were charged as spent at once: a multiple of
	// Call.Need. The rest is a lease.
	Bound int64
	// Epoch tags the lease for its reports.
	Epoch int64
	// TTL is how long the lease may be spent, 0.95·h.
	TTL time.Duration
	// Remaining is the whole tokens left in the bucket after this call.
	Remaining int64
	// RetryAfter is when a call for Need (for 1 if Need is 0) would be met, if
	// nobody else calls; 0 if now. Exact to the microsecond.
	RetryAfter time.Duration
	// ResetAfter is when the bucket would be full, leases aside.
	ResetAfter time.Duration
	// Pace asks the node to make no further call for more tokens for that
	// long: there are too few for all.
	Pace time.Duration
	// Outstanding is the store's count of leased tokens not yet reported or
	// expired, never less than the truth.
	Outstanding int64
	// Active is how many nodes asked for this key lately. Demand is the sum of what
	// nodes said in Call.Demand in the epoch before, in their first call with a Want.
	Active, Demand int64
	// Created says that the bucket was not there, Corrupt that what was there
	// could not be read and was replaced by a fresh bucket.
	Created, Corrupt bool
	// Limit and Version are the configuration now in force, if Newer; the
	// caller's own otherwise.
	Newer        bool
	Limit        Limit
	Version      int64
	Count, PerUS int64 // of Limit, if Newer
	// Source says who granted: SourceStore, or SourceLocal or SourcePolicy if
	// the store did not answer. The rest is for those two.
	Source Source
	// Full is what Tokens and Remaining are counted in: the burst of the node's
	// share. Rate is the share's rate in tokens per second.
	Full int64
	Rate float64
}

// Ratio returns the rate of the call's limit as Limit.Ratio does.
func (c *Call) Ratio() (count, perUS int64, ok bool) {
	if c.Count > 0 && c.PerUS > 0 && !c.Limit.Zero() {
		return c.Count, c.PerUS, true
	}
	return c.Limit.Ratio()
}

const (
	minTTL = time.Millisecond
	// minLease is the smallest demand per lease period, in tokens, at which
	// holding a lease is worth more than it strands.
	minLease = 2
)

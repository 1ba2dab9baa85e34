package hybrid

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/internal/membership"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lua"
)

// The words of the lease protocol that its users need. They are defined in
// package lease: go doc lease.Decision shows the fields and methods.
type (
	// Limit is Rate tokens per second (0 to 1e12) and Burst tokens at most at one
	// instant (0 to 1e15). A limit with either 0 denies everything. OnFailure says
	// what becomes of requests while Redis does not answer: Degrade, Allow or Deny.
	// Algorithm says how the two count, TokenBucket by default.
	Limit = lease.Limit
	// Algorithm says how a Limit counts.
	Algorithm = lease.Algorithm
	// Limits tells the limit of each key. A Limit is one: the same for all.
	Limits = lease.Limits
	// LimitFunc is a Limits in one function.
	LimitFunc = lease.LimitFunc
	// Decision is the answer to one request: Allowed, Limit, Remaining,
	// RetryAfter, ResetAfter and Source. The zero Decision denies. RetryAfter is
	// the longest Duration for what can never be admitted.
	Decision = lease.Decision
	// Source says what made a Decision.
	Source = lease.Source
	// Share is how nodes divide a bucket that is too small for all.
	Share = lease.Share
	// Policy decides a request for which Redis gave no answer in time.
	Policy = lease.Policy
	// Start is what a node's share of a limit starts with when Redis fails and
	// the node never heard of the key.
	Start = fallback.Unknown
	// Split says how a limit is divided among the nodes while Redis fails.
	Split = fallback.Split
	// LimitError says which field of a Limit is out of range.
	LimitError = lease.LimitError
	// CostError is returned for a cost that can never be admitted.
	CostError = lease.CostError
	// Request is one of several that AllowAll decides together: Key, and N, its cost
	// in tokens.
	Request = lease.Request
	// AllDecision is the answer to them: the Decision that counts, the Index of the
	// request that it is about, and Each request's own.
	AllDecision = lease.AllDecision
	// Client is what a Limiter needs of go-redis.
	Client = lua.Client
)

// What a Decision's Source can be.
const (
	SourceNone   = lease.SourceNone   // no decision
	SourceLease  = lease.SourceLease  // tokens leased earlier: no round trip
	SourceStore  = lease.SourceStore  // a call to Redis that this request waited for
	SourceMemory = lease.SourceMemory // memory of a recent refusal: no round trip
	SourceLimit  = lease.SourceLimit  // the limit denies everything
	SourcePolicy = lease.SourcePolicy // Limit.OnFailure Allow or Deny: Redis did not answer
	SourceLocal  = lease.SourceLocal  // this node's share of the limit: Redis did not answer
)

// MaxRate and MaxBurst bound a Limit, in tokens per second and tokens.
const (
	MaxRate  = lease.MaxRate
	MaxBurst = lease.MaxBurst
)

// How a Limit counts. The window of the last three is Burst/Rate, 1ms to 366 days.
const (
	TokenBucket    = lease.TokenBucket    // at most Burst + Rate·t in any window of length t
	LeakyBucket    = lease.LeakyBucket    // the same, told by a level that leaks
	FixedWindow    = lease.FixedWindow    // Burst in each window of the clock
	SlidingLog     = lease.SlidingLog     // Burst in any window
	SlidingCounter = lease.SlidingCounter // about Burst in any window, less than twice that
)

// How nodes divide a bucket, and what happens when Redis does not answer.
const (
	ShareEqual        = lease.ShareEqual        // equal parts, and what others leave
	ShareProportional = lease.ShareProportional // by each node's part of the demand
	ShareNone         = lease.ShareNone         // first come, first served

	Degrade = lease.Degrade // go on with this node's share of the limit
	Allow   = lease.Allow   // admit, uncounted
	Deny    = lease.Deny    // refuse

	StartOne   = fallback.StartOne   // one token
	StartEmpty = fallback.StartEmpty // none
	StartFull  = fallback.StartFull  // the whole share

	SplitBlend = fallback.SplitBlend // half by demand at first, equal within a minute
	SplitEqual = fallback.SplitEqual // equal parts
)

// Errors of a Limiter's methods; compare with errors.Is.
var (
	ErrClosed = lease.ErrClosed // the Limiter is closed
	ErrKey    = lease.ErrKey    // the key is empty
	ErrCost   = lease.ErrCost   // negative, or over the burst (a *CostError)
	ErrLimit  = lease.ErrLimit  // out of range (a *LimitError)
	// ErrUnknownOutcome and ErrNotExecuted come from Refund and Reset alone.
	ErrUnknownOutcome = lease.ErrUnknownOutcome
	ErrNotExecuted    = lease.ErrNotExecuted
)

// PerSecond returns a limit of rate tokens a second and the given burst.
func PerSecond(rate float64, burst int64) Limit { return Limit{Rate: rate, Burst: burst} }

// PerMinute returns a limit of rate tokens a minute and the given burst.
func PerMinute(rate float64, burst int64) Limit { return Limit{Rate: rate / 60, Burst: burst} }

// PerHour returns a limit of rate tokens an hour and the given burst.
func PerHour(rate float64, burst int64) Limit { return Limit{Rate: rate / 3600, Burst: burst} }

// Every returns a limit of one token each interval and the given burst. An
// interval of 0 or less gives a limit that New refuses.
func Every(interval time.Duration, burst int64) Limit {
	return Limit{Rate: 1 / interval.Seconds(), Burst: burst}
}

// PerWindow returns a limit of n tokens per window, counted by a: an algorithm with
// windows, or a bucket of n that takes a window to fill. A window of 0 or less gives
// a limit that New refuses.
func PerWindow(n int64, window time.Duration, a Algorithm) Limit {
	return Limit{Rate: float64(n) / window.Seconds(), Burst: n, Algorithm: a}
}

// Options are a Limiter's settings. The zero value works.
type Options struct {
	// Prefix starts every Redis key. Limiters with the same prefix and key share a
	// bucket, and each counts as a node: make one for each prefix in a process, with
	// a LimitFunc for several limits. Default "hybridlimit:"; at most 256 bytes.
	Prefix string
	// LeasePeriod is how long one lease of tokens should last: a hot key costs
	// a node about 1/LeasePeriod Redis calls a second. A key's own period is
	// at most a third of its time to fill (burst/rate), so that leases never
	// starve other nodes. It must be the same on all nodes. Tokens held by a
	// node that dies are missing for at most 4 periods.
	// Default 250ms; range 2ms to 1h.
	LeasePeriod time.Duration
	// RedisTimeout is how long a request waits for Redis before its limit's
	// OnFailure decides it. Once Redis did not answer nobody waits for it until it
	// answers again. Default 30ms; range 1ms to 1m.
	RedisTimeout time.Duration
	// MaxKeys is how many keys this node remembers at a time. Past it the
	// least used go, and return their tokens. A key takes about half a
	// kilobyte. Default 262144; range 1 to 2^30.
	MaxKeys int
	// MaxWaiters is how many requests of one key may wait for Redis at a time;
	// their limit's OnFailure decides those past it. Default 65536; range 1 to 2^30.
	MaxWaiters int
	// Share is how nodes divide a bucket that is too small for all.
	// Default ShareEqual.
	Share Share
	// LimitsVersion numbers the configuration that the limits come from. While
	// two versions are alive the higher one wins on every node. With 0 the
	// latest call wins. A limit that denies everything is not told to other
	// nodes: only those that have it deny. Default 0; range 0 to 2^53.
	LimitsVersion int64

	// MinNodes is the least number of nodes to expect. While Redis fails each
	// node admits 1/n of a limit, n being the largest of MinNodes, of what Nodes
	// returns and of the nodes that were alive in Redis in the last five minutes.
	// A node that starts while Redis is down knows of none but these two. Default
	// 1; range 1 to 2^20.
	MinNodes int
	// Nodes returns how many nodes the platform runs, 0 if it does not know. It is
	// asked about once a Heartbeat, and the largest answer of the last five minutes
	// counts. Default nil.
	Nodes func() int
	// Heartbeat is how often a node says in Redis that it is alive, in the same
	// round trip as a lease call if there is one. It begins with the first request
	// that needs Redis. It must be the same on all nodes. Default 1s; range 100ms
	// to 1m.
	Heartbeat time.Duration
	// Start is what the share of a key that this node never heard of starts with
	// while Redis fails. Default StartOne: at most a token per node too many.
	Start Start
	// Split says how limits are divided among the nodes while Redis fails.
	// Default SplitBlend.
	Split Split
}

// Stats is what a Limiter did so far.
type Stats struct {
	lease.Stats
	// Fallback is about Redis failing: breakers, shares, debts.
	Fallback fallback.Stats
	// Members is about counting the nodes.
	Members membership.Stats
}

// Limiter limits how often keys are used, over all nodes that share a Redis.
// It is safe for concurrent use. Make one with New, and Close it.
type Limiter struct {
	cache    *lease.Cache
	fallback *fallback.Store
	members  *membership.Members
}

// New returns a Limiter whose buckets are in rdb: a *redis.Client, a Sentinel
// fail-over client or a *redis.ClusterClient, which stays the caller's to
// close. limits is one Limit for all keys, or tells each key's. All problems
// of the arguments come back at once. New does not talk to Redis.
func New(rdb Client, limits Limits, opts Options) (*Limiter, error) {
	var errs []error
	if isNil(rdb) {
		rdb = nil
		errs = append(errs, errors.New("hybrid: rdb is nil: want a go-redis client"))
	}
	if isNil(limits) {
		limits = Limit{} // so that the other problems are found too
		errs = append(errs, errors.New("hybrid: limits is nil: want a Limit or a LimitFunc"))
	}
	if len(opts.Prefix) > 256 {
		errs = append(errs, fmt.Errorf("hybrid: Options.Prefix is %d bytes: want at most 256", len(opts.Prefix)))
	}
	if opts.MinNodes < 0 || opts.MinNodes > 1<<20 {
		errs = append(errs, fmt.Errorf("hybrid: Options.MinNodes = %d: want 1 to 2^20", opts.MinNodes))
		opts.MinNodes = 1
	}
	// Without a client they are made all the same, to find the other problems.
	store := lua.NewStore(rdb, lua.Options{Prefix: opts.Prefix, Timeout: opts.RedisTimeout})
	members, err := membership.New(store, membership.Options{
		Period: opts.Heartbeat, Min: max(1, opts.MinNodes), Nodes: opts.Nodes,
	})
	if err != nil {
		errs = append(errs, fmt.Errorf("hybrid: Options.Heartbeat = %v: want 100ms to 1m", opts.Heartbeat))
		members = nil
	}
	l := &Limiter{members: members}
	l.fallback, err = fallback.New(&member{store: store, members: members}, fallback.Options{
		Nodes: members.Nodes, Owns: l.owns, Shard: store.Shard,
		Period: opts.LeasePeriod, Timeout: opts.RedisTimeout, MaxKeys: opts.MaxKeys,
		Unknown: opts.Start, Split: opts.Split,
	})
	errs = append(errs, ownNames(err)...)
	local := lease.Local(l.fallback)
	if err != nil {
		local = noStore{}
	}
	l.cache, err = lease.New(local, limits, lease.Options{
		LeasePeriod: opts.LeasePeriod, Timeout: opts.RedisTimeout,
		MaxKeys: opts.MaxKeys, MaxWaiters: opts.MaxWaiters, Share: opts.Share,
		Version: opts.LimitsVersion,
	})
	if errs = append(errs, ownNames(err)...); len(errs) > 0 {
		return nil, errors.Join(unique(errs)...)
	}
	return l, nil
}

// owns reports whether this node is one of key's owners, if the nodes are known.
func (l *Limiter) owns(key string, owners int) (owns, known bool) {
	if !l.members.Known() {
		return false, false
	}
	return l.members.Owns(key, owners), true
}

// member is the store in Redis for a node that is a member while it is used.
type member struct {
	store   *lua.Store
	members *membership.Members
}

// Acquire implements lease.Store.
func (m *member) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	m.members.Start()
	return m.store.Acquire(ctx, calls)
}

// unique drops errors that say the same: an option may go to several packages.
func unique(errs []error) (all []error) {
	seen := map[string]bool{}
	for _, err := range errs {
		if !seen[err.Error()] {
			seen[err.Error()] = true
			all = append(all, err)
		}
	}
	return all
}

// isNil reports whether v is nil or holds a nil pointer or function.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	switch r := reflect.ValueOf(v); r.Kind() {
	case reflect.Pointer, reflect.Func, reflect.Map, reflect.Slice, reflect.Chan:
		return r.IsNil()
	}
	return false
}

// ownNames takes joined errors apart, and tells those about lease.Options by
// the names that the fields have here.
func ownNames(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		if bad, ok := errors.AsType[*lease.OptionError](err); ok {
			err = optionError(bad.Field, bad.Value, bad.Want)
		} else if bad, ok := errors.AsType[*fallback.OptionError](err); ok {
			err = optionError(bad.Field, bad.Value, bad.Want)
		}
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, ownNames(e)...)
	}
	return all
}

func optionError(field string, value any, want string) error {
	names := map[string]string{
		"Timeout": "RedisTimeout", "Version": "LimitsVersion", "Period": "LeasePeriod", "Unknown": "Start",
	}
	return fmt.Errorf("hybrid: Options.%s = %v: want %s", cmp.Or(names[field], field), value, want)
}

type noStore struct{}

func (noStore) Acquire(context.Context, []lease.Call) []lease.Answer { return nil }
func (noStore) Local(lease.Call) lease.Answer                        { return lease.Answer{} }

// Allow decides whether one request on key may go ahead now, and charges a
// token if so. It never queues for tokens; it waits, at most
// Options.RedisTimeout, only when this node has to ask Redis.
//
// A denial is a Decision, not an error, and so is trouble with Redis
// (Decision.Source and Stats show it). The error is ErrClosed, ErrKey, the
// *LimitError of the key's limit, or ctx's own if it ended while the request
// waited. With any error the Decision denies.
func (l *Limiter) Allow(ctx context.Context, key string) (d Decision, err error) {
	err = l.cache.TakeInto(ctx, key, 1, &d)
	return d, err
}

// AllowN is Allow for a request of cost n tokens, all or nothing. A cost of 0
// is a Peek; one that can never be admitted, negative or over the burst, is a
// *CostError.
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (d Decision, err error) {
	err = l.cache.TakeInto(ctx, key, n, &d)
	return d, err
}

// AllowLimit is AllowN with key's limit set to limit from now on, for callers
// whose requests carry it. When two callers differ the bucket adopts the later
// one's, keeps its tokens up to the new burst and is never refilled by the
// change.
func (l *Limiter) AllowLimit(ctx context.Context, key string, limit Limit, n int64) (Decision, error) {
	return l.cache.TakeLimit(ctx, key, limit, n)
}

// AllowAll decides whether requests on several keys, say of a user, a tenant and the
// service as a whole, may go ahead together. Each key is charged if all may, none
// otherwise: what was taken from leases meanwhile goes back to them. A key without a
// lease may lose its tokens by the first refusal that this node did not know of; the
// next ones it remembers. Put first what refuses most often.
//
// If they are refused the decision is about the one that has to wait longest, Index
// says which: refused again it may be for another reason. If all are admitted it is
// about the one with the fewest tokens remaining. Keys may be anywhere in a cluster:
// each is a call of its own, those that have to be made share a round trip.
//
// Errors as AllowN, in words that say which request; then nothing is charged.
func (l *Limiter) AllowAll(ctx context.Context, requests ...Request) (AllDecision, error) {
	return l.cache.TakeAll(ctx, requests)
}

// SetLimits puts other limits in force, all at once: each request is decided by the
// old ones or by the new ones. A key that is in use turns to its new limit within two
// lease periods; at once if it was being refused and the new limit allows more. Its
// bucket keeps its tokens, up to the new burst, and gains none. A limit that is the
// same as before is not touched; one that came with a request (AllowLimit) stays.
//
// version numbers them as Options.LimitsVersion does. With a version above the one in
// force nodes that were not told yet go by the new limit too, once they meet it in
// the bucket; only a limit that denies everything is not told to others. A version
// that is in force already changes nothing, unless it is 0, and one that is older is
// an error.
func (l *Limiter) SetLimits(limits Limits, version int64) error {
	if isNil(limits) {
		return errors.New("hybrid: limits is nil: want a Limit, a LimitFunc or a Table")
	}
	err := l.cache.SetLimits(limits, version)
	if bad, ok := errors.AsType[*lease.OptionError](err); ok {
		return fmt.Errorf("hybrid: version %v: want %s", bad.Value, bad.Want)
	}
	return err
}

// Peek tells what a request of cost 1 would meet, without charging anything.
func (l *Limiter) Peek(ctx context.Context, key string) (Decision, error) {
	return l.cache.Peek(ctx, key)
}

// Refund gives back n tokens of a request that was admitted but did not run
// after all. The bucket never passes its burst; but a token that it has
// refilled since, burst/rate after the request at the latest, must not be
// refunded: that would admit it twice. It waits for Redis. With an error that matches ErrUnknownOutcome or
// ErrNotExecuted the tokens may be lost, which can only admit less.
func (l *Limiter) Refund(ctx context.Context, key string, n int64) error {
	return l.cache.Refund(ctx, key, n)
}

// Reset fills key's bucket, except for what nodes hold as leases. Other nodes
// notice when their memory of a refusal ends. Errors as Refund.
func (l *Limiter) Reset(ctx context.Context, key string) error { return l.cache.Reset(ctx, key) }

// Stats returns counters and the token ledger. It visits every key this node
// remembers: fine at the pace of metrics, not per request.
func (l *Limiter) Stats() Stats {
	return Stats{Stats: l.cache.Stats(), Fallback: l.fallback.Stats(), Members: l.members.Stats()}
}

// Close stops the Limiter, returns its leases to Redis, charges Redis with what
// was admitted without it, and leaves the members, until ctx ends. An error says
// what of it may not have been done: Redis forgets leases within four lease
// periods, and a member within five Heartbeats. After it every method returns
// ErrClosed, as a second Close does.
func (l *Limiter) Close(ctx context.Context) error {
	err := l.cache.Close(ctx)
	if errors.Is(err, ErrClosed) {
		return err
	}
	return errors.Join(err, l.fallback.Close(ctx), l.members.Close(ctx))
}

// Key is a key that is already looked up: Allow through it saves hashing and
// looking up the key. It is safe for concurrent use and never goes stale.
type Key struct {
	handle *lease.Handle
}

// Key returns a handle on key. Errors as Allow.
func (l *Limiter) Key(key string) (*Key, error) {
	h, err := l.cache.Handle(key)
	if err != nil {
		return nil, err
	}
	return &Key{h}, nil
}

// Allow is Limiter.Allow for this key.
func (k *Key) Allow(ctx context.Context) (d Decision, err error) {
	err = k.handle.TakeInto(ctx, 1, &d)
	return d, err
}

// AllowN is Limiter.AllowN for this key.
func (k *Key) AllowN(ctx context.Context, n int64) (d Decision, err error) {
	err = k.handle.TakeInto(ctx, n, &d)
	return d, err
}

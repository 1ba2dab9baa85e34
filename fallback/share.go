package fallback

import (
	"math"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/hybridlimit/hybridlimit/lease"
)

const (
	// blend is how much of a share goes by demand at first, and blendFor how
	// long it takes until nothing does.
	blend    = 0.5
	blendFor = time.Minute
	// certain is how much of its part of the demand a node believes in: parts are
	// estimates, and together they must not be more than all.
	certain = 0.9
	// leastPart and mostPart bound a share, in equal shares.
	leastPart, mostPart = 0.25, 4
	// ownEpoch is the tag of epoch 0 of a share's own leases; they count down,
	// clear of the store's and of -1.
	ownEpoch = -2
)

// share is this node's part of one key's limit. Its bucket is a rate.Limiter for
// as long as it lives: neither outages nor changes of the limit begin a new one.
//
// As in the store, tokens that are out on lease count against the burst, and
// refill is computed with their number as it was before a report lowers it: the
// limiter's own burst is what they leave. So leases do not loosen the bound.
type share struct {
	mu      sync.Mutex
	key     string
	limiter *rate.Limiter // nil: not used yet
	limit   lease.Limit
	weight  float64 // part of the limit
	burst   int64   // of the share
	cost    int64   // the largest asked for in this outage: burst is no less
	spare   int64   // tokens that came back; the limiter cannot take them

	ttl        time.Duration
	epoch      int64
	out0, out1 int64 // tokens on lease, granted in this epoch and the one before

	outage      bool      // the share was used since the primary last answered
	since       time.Time // and first used then
	part, prior float64   // of the demand, before that: known, and not known

	// What the primary is still to be charged with, in tokens: firm, and idle,
	// which was admitted in this life of the server, down and used by nobody, and
	// may yet be forgiven.
	firm, idle int64
	life       int64 // of the server: that of idle
	charging   int64 // of firm, in a call under way

	at           time.Time  // of the latest use: time never goes back
	hint         lease.Hint // as of then
	version      int64
	count, perUS int64
}

// pass brings the share's time up to now, and returns it.
func (sh *share) pass(s *Store, now time.Time) time.Time {
	if now.Before(sh.at) {
		return sh.at // the limiter would refill from then once more
	}
	sh.rotate(s, now)
	sh.hint.Age += now.Sub(sh.at)
	sh.at = now
	return now
}

// forgive drops what need not be charged. Had one bucket admitted it all, it would
// lack what the shares' buckets lack when the server failed to answer for the last
// time; so the store's, idle up to then, is to be charged with no more than that.
// Once the server is up others use it, and nothing is forgiven any more.
func (sh *share) forgive(s *Store, server *shard) {
	life := server.life.Load()
	// A life later than the next began with a failure of which it is not known how
	// much use came before it.
	if until := s.failedAt(server); life <= sh.life+1 && until.After(sh.at) {
		sh.pass(s, until)
		if over := sh.idle - sh.deficit(until); over > 0 {
			sh.idle -= over
			s.shares.owed.Add(-over)
			s.counts.forgiven.Add(over)
		}
	}
	if life != sh.life {
		sh.firm, sh.idle, sh.life = sh.firm+sh.idle, 0, life
	}
}

// admit books n tokens that the primary is to be charged with.
func (sh *share) admit(s *Store, server *shard, n int64) {
	if server.down.Load() {
		sh.idle += n
	} else {
		sh.firm += n
	}
	s.shares.owed.Add(n)
	s.counts.admitted.Add(n)
}

// unadmit takes back as many of n tokens as the primary has not been charged with.
func (sh *share) unadmit(s *Store, n int64) {
	idle := min(n, sh.idle)
	firm := min(n-idle, sh.firm-sh.charging)
	sh.idle -= idle
	sh.firm -= firm
	s.shares.owed.Add(-idle - firm)
	s.counts.returned.Add(idle + firm)
}

// owes returns the tokens that the primary is still to be charged with.
func (sh *share) owes() int64 { return sh.firm + sh.idle }

// call is a call for the share's key that asks for nothing yet.
func (sh *share) call() lease.Call {
	return lease.Call{
		Key: sh.key, Limit: sh.limit, Version: sh.version, Count: sh.count, PerUS: sh.perUS,
		TTL: sh.ttl, Hint: sh.hint, LastEpoch: -1,
	}
}

// local answers call from the share. err is why the primary does not.
func (s *Store) local(call *lease.Call, server *shard, now time.Time, err error) lease.Answer {
	if call.Limit.Zero() {
		return lease.Answer{Err: err}
	}
	if call.Reset || call.Refund > 0 {
		return s.localTell(call, server, now, err)
	}
	switch call.Limit.OnFailure {
	case lease.Allow:
		return lease.Answer{Err: err, Grant: allow(call)}
	case lease.Deny:
		return lease.Answer{Err: err, Grant: deny(call, s.opts.Timeout)}
	}
	server.remember(call, now)
	sh := s.shares.getOrAdd(call.Key, now)
	defer sh.mu.Unlock()
	if !server.down.Load() {
		defer s.attend(server) // once it is known what is owed
	}
	return lease.Answer{Err: err, Grant: sh.grant(s, now, server, call)}
}

// localTell carries out what needs no grant, as far as that is possible here: a
// refund of what the primary has not been charged with.
func (s *Store) localTell(call *lease.Call, server *shard, now time.Time, err error) lease.Answer {
	sh := s.shares.get(call.Key)
	if sh == nil {
		return lease.Answer{Err: err}
	}
	defer sh.mu.Unlock()
	if call.Reset || call.Refund > sh.owes()-sh.charging {
		return lease.Answer{Err: err}
	}
	// Not back into the share: the request may have been admitted by the store.
	sh.unadmit(s, call.Refund)
	look := bare(call)
	return lease.Answer{Grant: sh.grant(s, now, server, &look)}
}

// allow grants everything, uncounted.
func allow(call *lease.Call) lease.Grant {
	g := lease.Grant{
		Tokens: call.Want, Bound: call.Want, Epoch: -1, TTL: call.TTL / 2,
		Source: lease.SourcePolicy, Full: call.Limit.Burst, Limit: call.Limit, Version: call.Version, Active: 1,
	}
	if call.Need > 0 {
		g.Bound = min(call.Want, call.Bound) / call.Need * call.Need
	} else {
		g.Bound = 0
	}
	return g
}

// deny refuses everything, for as long as it takes to notice that the primary
// is back.
func deny(call *lease.Call, retry time.Duration) lease.Grant {
	return lease.Grant{
		RetryAfter: retry, ResetAfter: retry,
		Source: lease.SourcePolicy, Full: call.Limit.Burst, Limit: call.Limit, Version: call.Version, Active: 1,
	}
}

// grant answers call. Holds mu, as all below.
func (sh *share) grant(s *Store, now time.Time, server *shard, call *lease.Call) lease.Grant {
	now = sh.begin(s, now, server, call)
	sh.report(s, call.Own)

	g := lease.Grant{
		Epoch: ownEpoch - sh.epoch, TTL: sh.ttl * 95 / 100, Source: lease.SourceLocal,
		Limit: call.Limit, Version: call.Version, Full: sh.burst, Rate: sh.weight * call.Limit.Rate, Active: 1,
	}
	avail := sh.avail(now)
	if avail > 0 && avail >= call.Need && call.Want > 0 {
		g.Tokens = min(avail, max(call.Need, call.Want))
		if call.Need > 0 {
			g.Bound = min(g.Tokens, call.Bound) / call.Need * call.Need
		}
		sh.take(now, g.Tokens, g.Tokens-g.Bound)
		sh.admit(s, server, g.Tokens)
	} else if call.Want > 0 {
		s.counts.denied.Add(1)
	}
	g.Remaining = avail - g.Tokens
	if g.Tokens < call.Want && g.Remaining == 0 {
		g.Pace = sh.ttl / 2
	}
	g.Outstanding = sh.out0 + sh.out1
	g.RetryAfter = sh.wait(s, now, max(1, call.Need))
	g.ResetAfter = after(float64(sh.burst)-sh.tokens(now), g.Rate)
	return g
}

// begin brings the share up to now: its part of the limit and, at the start of
// an outage, its tokens. It returns the share's time.
func (sh *share) begin(s *Store, now time.Time, server *shard, call *lease.Call) time.Time {
	if sh.limiter != nil {
		sh.forgive(s, server)
		now = sh.pass(s, now)
	} else {
		sh.at, sh.life = now, server.life.Load()
	}
	sh.hint, sh.version, sh.count, sh.perUS = call.Hint, call.Version, call.Count, call.PerUS
	fresh := sh.limiter == nil
	if !sh.outage {
		sh.outage, sh.since, sh.cost = true, now, 1
		sh.part, sh.prior = call.Hint.Part, call.Hint.Prior
		defer func() { sh.seed(s, now, call, fresh) }()
	}
	sh.cost = min(max(sh.cost, call.Need), call.Limit.Burst)
	weight := sh.weigh(s, now, call)
	if fresh {
		sh.limiter = rate.NewLimiter(0, 0)
	}
	sh.live(s, now, max(call.TTL, time.Millisecond))
	if fresh || call.Limit != sh.limit || math.Abs(weight-sh.weight) > 0.01*sh.weight {
		sh.limiter.SetLimitAt(now, rate.Limit(weight*call.Limit.Rate))
		sh.limit, sh.weight = call.Limit, weight
	}
	const rounding = 1 + 1e-12 // a third of 3 is 1
	sh.burst = int64(sh.weight * float64(call.Limit.Burst) * rounding)
	if sh.weight > 0 {
		sh.burst = min(max(sh.burst, sh.cost), call.Limit.Burst)
	}
	sh.spare = max(0, min(sh.spare, sh.burst-sh.out0-sh.out1))
	sh.fit(now)
	return now
}

// weigh returns the share's part of the limit.
func (sh *share) weigh(s *Store, now time.Time, call *lease.Call) float64 {
	n := max(1, s.opts.Nodes())
	if call.Limit.Burst < int64(n) {
		// A token each would be more than the burst: some nodes have it all.
		if owns, known := s.opts.Owns(call.Key, int(call.Limit.Burst)); known && owns {
			return 1 / float64(call.Limit.Burst)
		} else if known {
			return 0
		}
	}
	equal := 1 / float64(n)
	if s.opts.Split == SplitEqual || n == 1 {
		return equal
	}
	by := blend * max(0, 1-float64(now.Sub(sh.since))/float64(blendFor))
	return max(leastPart*equal, min((1-by)*equal+by*(certain*sh.part+sh.prior*equal), mostPart*equal, 1))
}

// seed sets the tokens at the start of an outage: the share's part of what the
// bucket had, as far as this node knows, and never more than it has already.
func (sh *share) seed(s *Store, now time.Time, call *lease.Call, fresh bool) {
	most := float64(sh.burst)
	switch h := call.Hint; {
	case fresh && s.shares.forgot.Load(): // maybe this one
		most = 0
	case h.Known:
		room := float64(call.Limit.Burst)
		if h.Age <= 2*call.TTL {
			room -= float64(h.Outstanding) // they hold up refill, this node's own too
		}
		balance := min(float64(h.Tokens)+call.Limit.Rate*h.Age.Seconds(), max(0, room))
		most = max(0, min(sh.weight*balance, most))
	case !fresh: // it goes on where it was
	case s.opts.Unknown == StartEmpty:
		most = 0
	case s.opts.Unknown == StartOne:
		most = min(1, most)
	}
	if fresh {
		sh.spare = min(int64(most), sh.burst)
		sh.fit(now)
		return
	}
	surplus := int64(math.Ceil(sh.tokens(now) - most))
	if surplus <= 0 {
		return
	}
	spare := min(surplus, sh.spare)
	sh.spare -= spare
	sh.limiter.AllowN(now, int(min(surplus-spare, int64(sh.limiter.TokensAt(now)))))
	sh.fit(now)
}

// fit makes the limiter's burst what leases and spare tokens leave. What it had
// up to now it has by the burst as it was.
func (sh *share) fit(now time.Time) {
	sh.limiter.SetBurstAt(now, int(max(0, sh.burst-sh.out0-sh.out1-sh.spare)))
}

// live sets how long leases live. Those that are out count from now.
func (sh *share) live(s *Store, now time.Time, ttl time.Duration) {
	if ttl == sh.ttl || ttl < sh.ttl && sh.out0+sh.out1 > 0 {
		return
	}
	sh.ttl = ttl
	sh.epoch = int64(now.Sub(s.base) / sh.ttl)
	sh.out0, sh.out1 = sh.out0+sh.out1, 0
}

// rotate drops leases that can no longer be live: those of an epoch when the
// next one ends.
func (sh *share) rotate(s *Store, now time.Time) {
	for range 2 {
		end := s.base.Add(time.Duration(sh.epoch+1) * sh.ttl)
		if now.Before(end) {
			return
		}
		sh.out0, sh.out1 = 0, sh.out0
		sh.epoch++
		sh.fit(end) // there is room from then on
	}
	sh.epoch = int64(now.Sub(s.base) / sh.ttl)
}

// report takes in what became of the share's leases.
func (sh *share) report(s *Store, reports [2]lease.Report) {
	for _, r := range reports {
		out := &sh.out0
		switch ownEpoch - r.Epoch {
		case sh.epoch:
		case sh.epoch - 1:
			out = &sh.out1
		default:
			continue
		}
		*out -= min(r.Spent, *out)
		returned := min(r.Returned, *out)
		*out -= returned
		sh.spare += returned
		sh.unadmit(s, returned) // but for what the primary has been charged with
	}
	sh.spare = max(0, min(sh.spare, sh.burst-sh.out0-sh.out1))
}

// tokens returns what may be taken, and the fraction on the way.
func (sh *share) tokens(now time.Time) float64 {
	return float64(sh.spare) + max(0, sh.limiter.TokensAt(now))
}

func (sh *share) avail(now time.Time) int64 {
	return sh.spare + int64(max(0, sh.limiter.TokensAt(now)))
}

// take takes n tokens, of which leased go out on lease.
func (sh *share) take(now time.Time, n, leased int64) {
	spare := min(n, sh.spare)
	sh.spare -= spare
	sh.limiter.AllowN(now, int(n-spare))
	sh.out0 += leased
	sh.fit(now)
}

// wait returns how long it takes until n tokens are there.
func (sh *share) wait(s *Store, now time.Time, n int64) time.Duration {
	rate := sh.weight * sh.limit.Rate
	if rate <= 0 || n > sh.burst {
		return s.opts.Backoff // not from this node: the primary may be back by then
	}
	wait := after(float64(n)-sh.tokens(now), rate)
	if n > sh.burst-sh.out0-sh.out1 {
		// Leases hold up refill until they are dropped.
		wait = max(wait, 2*sh.ttl)
	}
	return wait
}

// after returns how long it takes to refill n tokens, rounded up.
func after(n, rate float64) time.Duration {
	if n <= 0 {
		return 0
	}
	const most = time.Duration(9e15) * time.Microsecond / 1000
	d := n / rate * 1e9
	if !(d < float64(most)) {
		return most
	}
	return time.Duration(math.Ceil(d)) + time.Microsecond
}

// deficit returns what the share's bucket lacks, in whole tokens.
func (sh *share) deficit(now time.Time) int64 {
	return max(0, int64(math.Ceil(float64(sh.burst)-sh.tokens(now))))
}

// spent reports whether the share has nothing to remember: a new one would be no
// fuller.
func (sh *share) spent(now time.Time) bool {
	return sh.owes() == 0 && sh.charging == 0 &&
		(sh.limiter == nil || sh.out0+sh.out1 == 0 && sh.deficit(now) == 0)
}

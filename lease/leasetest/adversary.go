package leasetest

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// adversary is a node, or several that conspire, that keeps to the protocol and
// otherwise does its worst: it calls the store itself and spends each token at
// the instant that hurts most.
type adversary struct {
	t            testing.TB
	store        lease.Store
	clock        *Clock
	start        time.Duration
	limit        lease.Limit
	ttl          time.Duration
	level        *lease.Level
	count, perUS int64 // the limit's ratio, which takes long to find

	leases []held // oldest first
	owed   map[int64]*lease.Report
	strict bool // the store counts outstanding tokens: check that it does
}

type held struct {
	epoch    int64
	tokens   int64
	deadline time.Duration
}

func newAdversary(t testing.TB, store lease.Store, clock *Clock, limit lease.Limit, ttl time.Duration) *adversary {
	t.Helper()
	level, err := lease.NewLevel(limit)
	if err != nil {
		t.Fatal(err)
	}
	count, perUS, _ := limit.Ratio()
	return &adversary{
		count: count, perUS: perUS,
		t: t, store: store, clock: clock, start: clock.Now(), limit: limit, ttl: ttl, level: level,
		owed: map[int64]*lease.Report{},
	}
}

// lease asks for n tokens, reporting what became of others before.
func (a *adversary) lease(n int64) lease.Grant {
	a.t.Helper()
	call := lease.Call{Key: key, Limit: a.limit, TTL: a.ttl, Want: n, LastEpoch: -1, Share: lease.ShareNone}
	call.Count, call.PerUS = a.count, a.perUS
	newest := int64(-1)
	for e := range a.owed {
		newest = max(newest, e)
	}
	for i := range call.Reports {
		if r := a.owed[newest-int64(i)]; r != nil {
			call.Reports[i] = *r
		}
	}
	clear(a.owed)
	answer := a.store.Acquire(context.Background(), []lease.Call{call})[0]
	if answer.Err != nil {
		a.t.Fatalf("at %v: %+v = %v: want no error", a.clock.Now()-a.start, call, answer.Err)
	}
	g := answer.Grant
	if g.Tokens > 0 {
		a.leases = append(a.leases, held{g.Epoch, g.Tokens, a.clock.Now() + g.TTL})
	}
	if a.strict {
		if live := a.live(); live > g.Outstanding {
			a.t.Errorf("at %v: outstanding = %d by the store, %d in truth: want no less than the truth", a.clock.Now()-a.start, g.Outstanding, live)
		}
		if g.Remaining+g.Outstanding > a.limit.Burst {
			a.t.Errorf("at %v: remaining %d + outstanding %d: want at most the burst, %d", a.clock.Now()-a.start, g.Remaining, g.Outstanding, a.limit.Burst)
		}
	}
	return g
}

// expire drops leases past their deadline.
func (a *adversary) expire() {
	keep := a.leases[:0]
	for _, l := range a.leases {
		if l.tokens > 0 && a.clock.Now() < l.deadline {
			keep = append(keep, l)
		}
	}
	a.leases = keep
}

func (a *adversary) live() (n int64) {
	a.expire()
	for _, l := range a.leases {
		n += l.tokens
	}
	return n
}

// use spends or returns up to n tokens of the oldest leases.
func (a *adversary) use(n int64, spend bool) {
	a.expire()
	for i := range a.leases {
		l := &a.leases[i]
		k := min(n, l.tokens)
		l.tokens -= k
		n -= k
		r := a.owed[l.epoch]
		if r == nil {
			r = &lease.Report{Epoch: l.epoch}
			a.owed[l.epoch] = r
		}
		if spend {
			r.Spent += k
			a.level.Add(a.clock.Now()-a.start, k)
		} else {
			r.Returned += k
		}
	}
	a.expire()
}

// spendAll spends all it holds and all it can get, at one instant.
func (a *adversary) spendAll() {
	for range 3 {
		a.use(a.limit.Burst*2, true)
		a.lease(a.limit.Burst)
	}
	a.use(a.limit.Burst*2, true)
}

// hoard leases whatever there is for as long as the first lease lives, and then
// spends everything: the worst that can be done to leases that do not count
// against the burst.
func (a *adversary) hoard(rounds int) {
	for range rounds {
		a.lease(a.limit.Burst)
		end := a.clock.Now() + a.ttl*95/100 - time.Millisecond
		for a.clock.Now()+a.ttl/50 < end {
			a.clock.Advance(a.ttl / 50)
			a.lease(a.limit.Burst)
		}
		a.clock.Set(end)
		a.spendAll()
		a.clock.Advance(time.Duration(float64(a.limit.Burst)/a.limit.Rate*1e9) + 2*a.ttl)
	}
}

// recirculate returns each lease just before it ends and leases again, for d,
// and then spends everything. It does so in many small leases, for a bucket
// takes back no more than a burst at a time.
func (a *adversary) recirculate(d time.Duration) {
	for end := a.clock.Now() + d; a.clock.Now() < end; a.clock.Advance(a.ttl / 50) {
		a.expireSoon(a.ttl / 40)
		a.lease(a.limit.Burst)
	}
	a.spendAll()
}

// expireSoon returns what ends within d.
func (a *adversary) expireSoon(d time.Duration) {
	n := int64(0)
	for _, l := range a.leases {
		if l.deadline-a.clock.Now() <= d {
			n += l.tokens
		}
	}
	a.use(n, false)
}

// wander does what comes to its mind, as far as the protocol permits.
func (a *adversary) wander(r *rand.Rand, steps int) {
	for range steps {
		switch r.IntN(8) {
		case 0, 1:
			a.lease(1 + r.Int64N(a.limit.Burst))
		case 2:
			a.lease(a.limit.Burst)
		case 3:
			a.use(1+r.Int64N(a.limit.Burst), true)
		case 4:
			a.use(1+r.Int64N(a.limit.Burst), false)
		case 5:
			if r.IntN(4) == 0 {
				clear(a.owed) // a report that was lost
			} else {
				a.spendAll()
			}
		case 6:
			a.clock.Advance(time.Duration(r.Int64N(int64(a.ttl) * 3 / 2)))
		case 7: // the edges: of an epoch, of a lease
			at := a.clock.Now()
			next := at.Truncate(a.ttl) + a.ttl
			if len(a.leases) > 0 && r.IntN(2) == 0 {
				next = a.leases[0].deadline
			}
			a.clock.Set(max(at, next+time.Duration(r.IntN(3)-1)*time.Microsecond))
		}
	}
	a.spendAll()
}

// plainStore is what this protocol is not: a token bucket whose leases do not
// count against the burst. It is here to be broken: an oracle that finds no
// fault with it would find none with anything.
type plainStore struct {
	clock    *Clock
	giveBack bool // it takes tokens back, too
	units    int64
	at       int64
	started  bool
}

func (s *plainStore) Acquire(_ context.Context, calls []lease.Call) []lease.Answer {
	answers := make([]lease.Answer, len(calls))
	for i, c := range calls {
		count, perUS, _ := c.Limit.Ratio()
		full, now := c.Limit.Burst*perUS, s.clock.Now().Microseconds()
		if !s.started {
			s.started, s.units, s.at = true, full, now
		}
		s.units = min(full, s.units+(now-s.at)*count)
		s.at = now
		if s.giveBack {
			for _, r := range c.Reports {
				s.units = min(full, s.units+r.Returned*perUS)
			}
		}
		n := min(c.Want, s.units/perUS)
		s.units -= n * perUS
		ttl := c.TTL.Microseconds()
		answers[i].Grant = lease.Grant{Tokens: n, Epoch: now / ttl, TTL: micros(ttl * 95 / 100)}
	}
	return answers
}

// adversaries are run with a small burst and a long ttl: r·h is half the burst.
var (
	attacked    = lease.Limit{Rate: 100, Burst: 100}
	attackedTTL = 500 * time.Millisecond
)

// Scenario12 hoards leases that do not count against the burst, to show that
// the oracle sees what they admit: burst + rate·ttl, nearly.
func Scenario12(t *testing.T) {
	clock := NewClock()
	a := newAdversary(t, &plainStore{clock: clock}, clock, attacked, attackedTTL)
	a.hoard(5)
	t.Logf("level %.1f", a.level.Peak())
	CheckAtMost(t, "level of plain leases", a.level.Peak(), 100+50)
	CheckAtLeast(t, "level of plain leases", a.level.Peak(), 0.95*(100+50))
}

// Scenario13 does the same to the Store.
func Scenario13(t *testing.T, b Backend) {
	clock := NewClock()
	a := newAdversary(t, b.Virtual(t, clock), clock, attacked, attackedTTL)
	a.strict = true
	a.hoard(5)
	t.Logf("level %.1f", a.level.Peak())
	CheckAtMost(t, "level", a.level.Peak(), 100)
	CheckAtLeast(t, "level", a.level.Peak(), 100) // the burst itself is his
}

// Scenario14Plain returns leases before they end and takes them again, which
// plain leases that may be given back do not survive.
func Scenario14Plain(t *testing.T) {
	clock := NewClock()
	a := newAdversary(t, &plainStore{clock: clock, giveBack: true}, clock, attacked, attackedTTL)
	a.recirculate(20 * time.Second)
	t.Logf("level %.1f", a.level.Peak())
	CheckAtLeast(t, "level of plain leases given back", a.level.Peak(), 5*100)
}

// Scenario14 does the same to the Store.
func Scenario14(t *testing.T, b Backend) {
	clock := NewClock()
	a := newAdversary(t, b.Virtual(t, clock), clock, attacked, attackedTTL)
	a.strict = true
	a.recirculate(20 * time.Second)
	t.Logf("level %.1f", a.level.Peak())
	CheckAtMost(t, "level", a.level.Peak(), 100)
	CheckAtLeast(t, "level", a.level.Peak(), 100)
}

// Scenario15 leases the burst, spends it shortly before it ends, reports that
// and leases again. A store that took the report before it computed the refill
// would have the bucket fill while the burst was out.
func Scenario15(t *testing.T, b Backend) {
	clock := NewClock()
	limit, ttl := attacked, 10*time.Second // far longer than to fill
	a := newAdversary(t, b.Virtual(t, clock), clock, limit, ttl)
	a.strict = true
	a.lease(limit.Burst)
	clock.Advance(ttl * 9 / 10)
	a.spendAll()
	t.Logf("level %.1f", a.level.Peak())
	CheckAtMost(t, "level", a.level.Peak(), 100)
	CheckAtLeast(t, "level", a.level.Peak(), 100)
}

// ScenarioAny does anything the protocol permits, at random: what the bound
// promises holds for every sequence, not only for the clever ones.
func ScenarioAny(t *testing.T, b Backend, runs int) {
	highest := 0.0
	for seed := range uint64(runs) {
		r := rand.New(rand.NewPCG(seed, 7))
		limit := lease.Limit{Rate: 1 + r.Float64()*1000, Burst: 1 + r.Int64N(500)}
		clock := NewClock()
		clock.Advance(time.Duration(r.Int64N(int64(time.Hour))))
		a := newAdversary(t, b.Virtual(t, clock), clock, limit, time.Millisecond*time.Duration(1+r.IntN(3000)))
		a.strict = true
		a.wander(r, 100)
		if peak := a.level.Peak(); peak > float64(limit.Burst) {
			t.Errorf("seed %d: %v: level = %.3f: want at most the burst", seed, limit, peak)
		}
		highest = max(highest, a.level.Peak()/float64(limit.Burst))
		if t.Failed() {
			t.Fatalf("seed %d: %v, ttl %v", seed, limit, a.ttl)
		}
	}
	t.Logf("highest level %.3f of the burst", highest)
}

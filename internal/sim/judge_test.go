package sim_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// rounding is of sums in floating point.
const rounding = 1e-6

// judge watches a run and compares it with what is promised, given what went wrong.
type judge struct {
	w      *world
	wrong  []string
	books  map[string]*book
	debts  map[*node]int64 // that the store was charged with
	digest uint64
	most   lease.Limit // the largest of all limits in force in this run
	least  lease.Limit
	whole  bool
	base   int64 // owed when the store was last within reach
	over   bool  // the run: nodes close now
	few    int   // the least number of nodes at a time
	many   int

	decisions, calls int64
	peak             float64 // highest level, in its bound
	local            int64   // tokens admitted by shares
}

// book is what is known of one key.
type book struct {
	admissions []admission
	credits    []credit
	slow       map[*node]int64         // the most a node with a slow clock held
	dearest    map[*node]int64         // the largest cost asked of it
	blurred    time.Duration           // until then more may be out than the store knows
	costly     bool                    // some request costs more than 1
	store      gauge                   // of the store's tokens
	every      gauge                   // of all
	until      map[*node]time.Duration // leases it heard of end by then
	vague      bool                    // some request was for all keys: when it took which is not known

	granted int64           // by the store, in all
	mine    map[*node]int64 // of these
	seen    map[*node]int64 // of these, to others, when a node heard of the store last
	charged map[*node]time.Duration
	bound   map[*node]bound

	changes []changed // of the limit in force
	shown   []shown   // limits that decisions showed, where they changed

	errors []credit // E, at the start of an outage
	owed   []credit // U, as of then
}

// gauge is a level of admissions that is known at any time: a lower bound.
type gauge struct {
	seen  int
	level float64
	last  time.Duration
	zero  time.Duration // when it was 0 last
}

func (g *gauge) upTo(b *book, rate float64, now time.Duration, all bool) float64 {
	for ; g.seen < len(b.admissions); g.seen++ {
		a := b.admissions[g.seen]
		if !all && a.from != lease.SourceStore {
			continue
		}
		if a.since >= g.last {
			g.drain(rate, a.since)
			g.level += float64(a.tokens)
		} else if g.zero < a.since {
			g.level += float64(a.tokens)
		}
	}
	g.drain(rate, now)
	return g.level
}

func (g *gauge) drain(rate float64, now time.Duration) {
	if now <= g.last {
		return
	}
	g.level -= rate * (now - g.last).Seconds()
	g.last = now
	if g.level <= 0 {
		g.level, g.zero = 0, now
	}
}

// potential checks, after a call, that what was admitted and what can still be is no
// more than a bucket: level + b + O <= C, and what faults gave.
func (j *judge) potential(key string, b *book, tokens float64, out int64) {
	if j.most != j.least {
		return
	}
	now := j.w.now
	bound := float64(j.most.Burst) + float64(b.mixed(nil)) + j.tick() + rounding
	whole := bound
	for _, n := range b.slow {
		bound += float64(n)
	}
	for _, c := range b.credits {
		bound += c.tokens
	}
	if got := b.store.upTo(b, j.most.Rate, now, false) + tokens + float64(out); got > bound {
		j.fail("%s: level + balance + out = %.3f: want at most %.3f", key, got, bound)
	}
	if !j.whole {
		return
	}
	d := int64(1)
	for _, c := range b.dearest {
		d = max(d, c)
	}
	whole += float64(max(0, d*int64(j.many)-j.most.Burst))
	for _, c := range b.errors {
		whole += c.tokens
	}
	whole += float64(j.w.owed())
	if got := b.every.upTo(b, j.most.Rate, now, true) + tokens + float64(out); got > whole {
		j.fail("%s: level of all + balance + out = %.3f: want at most %.3f", key, got, whole)
	}
}

type admission struct {
	since  time.Duration // taken at some instant between
	at     time.Duration // and here
	tokens int64
	node   *node
	from   lease.Source // SourceStore, SourceLocal or SourcePolicy
}

// credit is how much more may be admitted for something that happened.
type credit struct {
	at     time.Duration
	tokens float64
}

// changed is a change of the limit in force in the store.
type changed struct {
	at            time.Duration
	limit         lease.Limit
	out           int64   // outstanding then
	before, after float64 // tokens in the bucket
}

// shown is the limit that a node shows from a time on.
type shown struct {
	at    time.Duration
	node  *node
	limit lease.Limit
}

func (j *judge) init(w *world) {
	j.w = w
	j.books, j.debts = map[string]*book{}, map[*node]int64{}
	j.whole = w.schedule.whole()
	for _, key := range w.keys {
		j.books[key] = &book{
			slow: map[*node]int64{}, dearest: map[*node]int64{}, mine: map[*node]int64{}, seen: map[*node]int64{},
			vague:   slices.ContainsFunc(w.Traffic, func(t traffic) bool { return t.All }),
			charged: map[*node]time.Duration{}, bound: map[*node]bound{}, until: map[*node]time.Duration{},
		}
	}
	j.most, j.least = w.limit(0), w.limit(0)
	for _, f := range w.Faults {
		if f.Kind == change || f.Kind == rollout || f.Kind == reload {
			j.most.Rate, j.most.Burst = max(w.Rate, w.Limit2.Rate), max(w.Burst, w.Limit2.Burst)
			j.least.Rate, j.least.Burst = min(w.Rate, w.Limit2.Rate), min(w.Burst, w.Limit2.Burst)
		}
	}
}

func (j *judge) fail(format string, args ...any) {
	if len(j.wrong) < 5 {
		j.wrong = append(j.wrong, fmt.Sprintf("at %v: ", j.w.now)+fmt.Sprintf(format, args...))
	}
}

// counted notes how many nodes there are.
func (j *judge) counted(n int) {
	if j.over {
		return
	}
	j.few, j.many = min(j.few, max(1, n)), max(j.many, n)
}

// decided takes in a decision on a request that was made at asked. With others together
// it may have been made long before it is told.
func (j *judge) decided(n *node, key string, cost int64, limit lease.Limit, d lease.Decision, asked, stood time.Duration, together bool) {
	w, b := j.w, j.books[key]
	j.decisions++
	j.digest = j.digest*31 + uint64(w.now)
	j.digest = j.digest*31 + uint64(n.id+n.w.Nodes*int(cost))
	j.digest = j.digest*31 + uint64(d.Remaining) + uint64(d.RetryAfter)<<8 + uint64(d.Source)<<40
	const grace = 2*time.Millisecond + 10*time.Microsecond // lease: a Local is waited for that much longer
	if took := w.now - asked - stood; took > w.Timeout.d()+grace {
		j.fail("node %d: decided after %v: want at most the timeout, %v", n.place, took, w.Timeout.d())
	}
	if d.Source == lease.SourceNone || d.Remaining < 0 || d.RetryAfter < 0 || d.ResetAfter < 0 || d.Allowed && d.RetryAfter != 0 || !d.Allowed && d.RetryAfter == 0 {
		j.fail("node %d: decision %+v makes no sense", n.place, d)
	}
	b.dearest[n] = max(b.dearest[n], cost)
	b.costly = b.costly || cost > 1
	if i := len(b.shown) - 1; i < 0 || b.shown[i].node != n || b.shown[i].limit != d.Limit {
		b.shown = append(b.shown, shown{w.now, n, d.Limit})
	}
	if !d.Allowed || cost == 0 {
		return
	}
	at := w.now
	switch d.Source {
	case lease.SourcePolicy:
		if limit.OnFailure != lease.Allow {
			j.fail("node %d: admitted by policy %v", n.place, limit.OnFailure)
		}
		b.admissions = append(b.admissions, admission{at, at, cost, n, d.Source})
		return
	case lease.SourceLocal:
		j.local += cost
	case lease.SourceStore:
		at = b.charged[n]
		b.bound[n] = bound{b.bound[n].tokens - cost, b.bound[n].until}
	}
	if d.Source == lease.SourceLocal && limit.OnFailure != lease.Degrade {
		j.fail("node %d: admitted by its share, the policy is %v", n.place, limit.OnFailure)
	}
	since := at
	if together {
		since, at = asked, w.now
	} else if d.Source == lease.SourceLease && j.decisions%4 == 0 && b.unclaimed(n, w.now) == 0 {
		// What was spent just now was out before, a token of it at least.
		if truth, _, ok := j.held(key, b); ok && w.now >= b.blurred && truth+cost > j.outstanding(key)+b.mixed(n)+cost-1 {
			j.fail("%s: %d tokens out with those that node %d spent, the store knows of %d", key, truth+cost, n.place, j.outstanding(key))
		}
	}
	// The store counts in whole microseconds.
	from := lease.SourceStore
	if d.Source == lease.SourceLocal {
		from = d.Source
	}
	b.admissions = append(b.admissions, admission{since.Truncate(time.Microsecond), at.Truncate(time.Microsecond), cost, n, from})
	j.sample(b)
}

// bound is tokens that the store charged for requests that wait. What is left over
// when they have been told, for some have left, a node may keep for a lease's life.
type bound struct {
	tokens int64
	until  time.Duration
}

func (b *book) unclaimed(n *node, now time.Duration) int64 {
	if p := b.bound[n]; now < p.until {
		return p.tokens
	}
	return 0
}

// sample notes what shares have admitted that the store does not know of.
func (j *judge) sample(b *book) {
	if !j.whole {
		return
	}
	owed := j.w.owed()
	// No store, no use of it that the debt does not show in.
	if slices.ContainsFunc(j.w.net.ways, func(t *trouble) bool { return t.on }) {
		owed = min(owed, j.base)
	} else {
		j.base = owed
	}
	b.owed = append(b.owed, credit{j.w.now, float64(min(owed, j.most.Burst))})
}

// owed is what shares have admitted and the store was not charged with.
func (w *world) owed() (tokens int64) {
	for _, n := range w.nodes {
		tokens += n.fallback.Stats().Owed
	}
	return tokens
}

// heard takes in that a node had an answer.
func (j *judge) heard(m *message) {
	for i, c := range m.calls {
		b := j.books[c.Key]
		b.charged[m.n] = m.executed
		if m.answers[i].Err == nil {
			b.bound[m.n] = bound{b.unclaimed(m.n, j.w.now) + m.answers[i].Grant.Bound, j.w.now + 4*max(c.TTL, m.answers[i].Grant.TTL)}
			b.seen[m.n] = b.granted - b.mine[m.n]
			if g := m.answers[i].Grant; g.Tokens > g.Bound {
				b.until[m.n] = max(b.until[m.n], m.sent+g.TTL)
			}
		}
	}
}

// execute has the store carry out m, and looks at what it does.
func (j *judge) execute(m *message, first bool) []lease.Answer {
	w := j.w
	for _, c := range m.calls {
		b := j.books[c.Key]
		told := c.Refund
		for _, r := range c.Reports {
			told += r.Spent + r.Returned
		}
		if !first && told > 0 {
			b.blurred = w.now + j.horizon()
			b.credits = append(b.credits, credit{w.now, float64(told)})
		}
		j.held(c.Key, b) // before: a call may report what was live
	}
	before := make([]leasetest.Bucket, len(m.calls))
	for i, c := range m.calls {
		before[i] = w.store.Bucket(c.Key)
	}
	answers := w.store.Acquire(context.Background(), m.calls)
	j.calls += int64(len(answers))
	for i, c := range m.calls {
		b := j.books[c.Key]
		g := answers[i].Grant
		if first {
			b.granted += g.Tokens
			b.mine[m.n] += g.Tokens
			j.debts[m.n] += c.Debt
		}
		bucket := w.store.Bucket(c.Key)
		out := bucket.Outstanding()
		if room := float64(max(0, bucket.Limit().Burst-out)); bucket.Tokens() > room+rounding {
			j.fail("%s: %.3f tokens in the bucket with %d outstanding, of %d", c.Key, bucket.Tokens(), out, bucket.Limit().Burst)
		}
		if limit, was := bucket.Limit(), before[i].Limit(); limit != was && was.Burst > 0 {
			b.changes = append(b.changes, changed{w.now, limit, before[i].Outstanding(), before[i].Tokens(), bucket.Tokens() + float64(g.Tokens)})
			if bucket.Tokens()+float64(g.Tokens) > max(before[i].Tokens(), -float64(limit.Burst))+j.returned(c)+1 && before[i].Exists(w.storeClock().Microseconds()) {
				j.fail("%s: %.3f tokens, %.3f after the limit became %v", c.Key, before[i].Tokens(), bucket.Tokens()+float64(g.Tokens), limit)
			}
		}
		leased := int64(0)
		if first {
			leased = g.Tokens - g.Bound
		}
		truth, kept, ok := j.held(c.Key, b)
		if ok && w.now >= b.blurred && truth+leased > out {
			j.fail("%s: %d tokens out, the store knows of %d", c.Key, truth+leased, out)
		}
		if kept > 0 && ok && w.now >= b.blurred && j.most == j.least && bucket.Tokens()+float64(out+kept) > float64(j.most.Burst)+rounding {
			j.fail("%s: %d tokens kept of requests that left, %.3f in the bucket and %d outstanding, of %d", c.Key, kept, bucket.Tokens(), out, j.most.Burst)
		}
		if ok {
			j.potential(c.Key, b, bucket.Tokens(), truth+leased)
		}
		j.sample(b)
	}
	return answers
}

// returned is the tokens that a call gives back.
func (j *judge) returned(c lease.Call) (tokens float64) {
	for _, r := range c.Reports {
		tokens += float64(r.Returned)
	}
	return tokens + float64(c.Refund)
}

// held returns the tokens of key that are out on leases, and those that nodes keep
// of requests that left; ok is false if that cannot be told, for a node stands still.
func (j *judge) held(key string, b *book) (tokens, left int64, ok bool) {
	ok = true
	for _, n := range j.w.nodes {
		if n.dead {
			continue
		}
		if n.paused {
			ok = false
		} else {
			n.Advance(n.clock())
		}
		held, kept := n.Held(key)
		if held > 0 && !n.odd && !n.paused && j.w.now > b.until[n]+time.Microsecond {
			j.fail("node %d: holds %d tokens of %s of leases that ended at %v", n.place, held, key, b.until[n])
		}
		if n.tempo < 0.96 {
			b.blurred = j.w.now + j.horizon()
			b.slow[n] = max(b.slow[n], held+kept+j.w.net.flying(key, n))
		}
		tokens += held
		left += kept
	}
	return tokens + j.w.net.flying(key, nil), left, ok
}

// damaged takes in what a change of the store's state does to key: what it had
// before, and now.
func (j *judge) damaged(key string, before, after float64) {
	b := j.books[key]
	b.blurred = j.w.now + j.horizon()
	out, kept, _ := j.held(key, b)
	if extra := max(after-before, float64(out+kept)); extra > 0 {
		b.credits = append(b.credits, credit{j.w.now, extra})
	}
}

// outstanding is the store's count of what is out.
func (j *judge) outstanding(key string) int64 {
	bucket := j.w.store.Bucket(key)
	if !bucket.Exists(j.w.storeClock().Microseconds()) {
		return 0
	}
	return j.outNow(&bucket)
}

// outNow is b's count of what is out as of now, not as of the last call.
func (j *judge) outNow(b *leasetest.Bucket) int64 {
	g := b.Apply(j.w.storeClock().Microseconds(), lease.Call{Limit: b.Limit(), TTL: time.Millisecond, LastEpoch: -1})
	return g.Outstanding
}

// tokens is what the store has of key, the burst if it does not know it.
func (j *judge) tokens(key string) float64 {
	bucket := j.w.store.Bucket(key)
	if !bucket.Exists(j.w.storeClock().Microseconds()) {
		return float64(j.most.Burst)
	}
	return bucket.Tokens()
}

// slept takes in that a node's machine was asleep: its leases look younger than
// they are.
func (j *judge) slept(n *node) {
	for key, b := range j.books {
		n.Advance(n.clock())
		held, kept := n.Held(key)
		if extra := held + kept + j.w.net.flying(key, n); extra > 0 {
			b.blurred = j.w.now + j.horizon()
			b.credits = append(b.credits, credit{j.w.now, float64(extra)})
		}
	}
}

// woken takes in that a node's watchdog has noticed that its machine was asleep.
func (j *judge) woken(n *node) {
	for key := range j.books {
		if leased, kept := n.Held(key); leased+kept > 0 {
			j.fail("node %d: holds %d tokens of %s though its machine was asleep", n.place, leased+kept, key)
		}
	}
}

// crashed takes in that a node is gone with what it owed.
func (j *judge) crashed(n *node) { j.accounts(n) }

// closed takes in that a node has closed.
func (j *judge) closed(n *node) {
	j.accounts(n)
	if s := n.Stats(); s.Live != 0 {
		j.fail("node %d: closed with %d tokens live", n.place, s.Live)
	}
}

// accounts checks a node's books.
func (j *judge) accounts(n *node) {
	s := n.Stats()
	if sum := s.Spent + s.Returned + s.Expired + s.Lost + s.Live; s.Granted != sum {
		j.fail("node %d: granted %d: want spent %d + returned %d + expired %d + lost %d + live %d", n.place, s.Granted, s.Spent, s.Returned, s.Expired, s.Lost, s.Live)
	}
	if c := n.link.Counts(); c.Overtold > 0 {
		j.fail("node %d: told the store of %d tokens twice, or without a lease", n.place, c.Overtold)
	}
	f := n.fallback.Stats()
	if f.Admitted != f.Charged+f.Forgiven+f.Owed+f.Lost {
		j.fail("node %d: shares admitted %d: want charged %d + forgiven %d + owed %d + lost %d", n.place, f.Admitted, f.Charged, f.Forgiven, f.Owed, f.Lost)
	}
	if f.Charged > j.debts[n] {
		j.fail("node %d: %d tokens of debt are booked as charged, the store saw %d", n.place, f.Charged, j.debts[n])
	}
	local := int64(0)
	for _, b := range j.books {
		for _, a := range b.admissions {
			if a.from == lease.SourceLocal && a.node == n {
				local += a.tokens
			}
		}
		local -= b.mixed(n)
	}
	if local > f.Admitted {
		j.fail("node %d: %d tokens admitted by shares, which know of %d", n.place, local, f.Admitted)
	}
	if len(n.parked) > 0 && n.dead {
		j.fail("node %d: %d functions wait for ever", n.place, len(n.parked))
	}
}

// mixed is at most how many tokens of node n's requests, or of all, are booked for
// its share and came from the store or the other way round: a request may take from
// two leases, and is booked for the second.
func (b *book) mixed(n *node) (tokens int64) {
	if !b.costly {
		return 0
	}
	last := map[*node]lease.Source{}
	for _, a := range b.admissions {
		if n != nil && a.node != n {
			continue
		}
		if was, ok := last[a.node]; ok && was != a.from {
			tokens += b.dearest[a.node] - 1
		}
		last[a.node] = a.from
	}
	return tokens
}

// turned takes in that a fault of the network comes or goes.
func (j *judge) turned(f fault, on bool) {
	w := j.w
	if !on || !j.whole {
		return
	}
	for _, b := range j.books {
		unseen := int64(0)
		for _, n := range w.live() {
			unseen = max(unseen, b.granted-b.mine[n]-b.seen[n])
		}
		b.errors = append(b.errors, credit{w.now, min(float64(j.most.Burst), float64(unseen+int64(len(w.live()))))})
	}
}

// whole reports whether the faults are outages for all nodes at once, so that the
// bound of an outage holds.
func (s schedule) whole() bool {
	for _, f := range s.Faults {
		switch f.Kind {
		case silence, refuse, errorReplies, flap:
			if f.Node >= 0 {
				return false
			}
		default:
			return false
		}
	}
	return s.Policy == lease.Degrade && !slices.ContainsFunc(s.Clock, func(c float64) bool { return c != 1 })
}

// verdict compares what was admitted with the bounds.
func (j *judge) verdict() {
	for i, key := range j.w.keys {
		b := j.books[key]
		slices.SortStableFunc(b.admissions, func(a, b admission) int { return int(a.at - b.at) })
		j.storeLevel(i, b, j.most, 0, 0)
		if k := len(b.changes) - 1; k >= 0 {
			// From the last change on: what is out then, and the new limit.
			c := b.changes[k]
			j.storeLevel(i, b, c.limit, c.at, float64(c.out))
		}
		j.localLevels(i, b)
		if j.whole && !b.vague { // or else its parts alone
			j.wholeLevel(i, b)
		}
	}
}

// storeLevel judges what the store admitted from a time on: burst + rate·t, and
// what faults gave. A fault no longer counts once the level was 0 with every lease
// of its time gone.
func (j *judge) storeLevel(key int, b *book, limit lease.Limit, since time.Duration, out float64) {
	most := float64(limit.Burst) + out + float64(b.mixed(nil))
	for _, n := range b.slow {
		most += float64(n)
	}
	level, last := 0.0, since
	from := 0
	if b.vague {
		for _, c := range b.credits {
			most += c.tokens
		}
		level = b.leastPeak(limit, func(a admission) bool { return a.from == lease.SourceStore && a.since >= since })
		j.within(fmt.Sprintf("level of the store's tokens by %v", limit), key, 0, level, most)
		return
	}
	for _, a := range b.admissions {
		if a.from != lease.SourceStore || a.at < since {
			continue
		}
		level -= limit.Rate * (a.at - last).Seconds()
		last = a.at
		if level <= 0 {
			level = 0
			for from < len(b.credits) && b.credits[from].at < a.at-j.horizon() {
				from++
			}
		}
		level += float64(a.tokens)
		bound := most
		for _, c := range b.credits[from:] {
			if c.at <= a.at {
				bound += c.tokens
			}
		}
		j.within(fmt.Sprintf("level of the store's tokens by %v", limit), key, a.at, level, bound)
	}
}

// leastPeak is the peak of the level of some admissions, whenever each was taken.
func (b *book) leastPeak(limit lease.Limit, some func(a admission) bool) float64 {
	var trace []lease.Admission
	for _, a := range b.admissions {
		if some(a) {
			trace = append(trace, lease.Admission{Start: a.since, End: a.at, N: a.tokens})
		}
	}
	return lease.PeakLevel(limit, trace)
}

// horizon is how long a lease can live, and be on its way.
func (j *judge) horizon() time.Duration {
	return 4*max(j.w.Period, j.w.Limit2.Period).d() + 3*time.Second
}

func (j *judge) within(what string, key int, at time.Duration, level, bound float64) {
	j.peak = max(j.peak, level/bound)
	if level > bound+rounding {
		if len(j.wrong) < 5 {
			j.wrong = append(j.wrong, fmt.Sprintf("key%d at %v: %s = %.3f: want at most %.3f", key, at, what, level, bound))
		}
	}
}

// localLevels judges what each share admitted: max(c, ⌊w·burst⌋) + w·rate·t.
func (j *judge) localLevels(key int, b *book) {
	w := 1 / float64(j.few)
	if j.w.Split == 0 && j.many > 1 {
		// Half by equal shares and half by nine tenths of the demand, at most.
		w = min(4*w, 0.5*w+0.5*max(0.9, w))
	}
	burst := float64(j.most.Burst)
	if j.w.Owners && j.least.Burst < int64(j.many) {
		w = max(w, 1/float64(j.least.Burst))
	}
	w = min(1, w)
	const unchanged = 1.01 // a share's rate is not set anew for less
	type meter struct {
		level, bound float64
		last         time.Duration
	}
	meters := map[*node]*meter{}
	for _, a := range b.admissions {
		if a.from != lease.SourceLocal {
			continue
		}
		m := meters[a.node]
		if m == nil {
			m = &meter{bound: min(burst, max(float64(b.dearest[a.node]), math.Floor(w*burst+rounding))) + float64(b.mixed(a.node)) + j.tick()}
			meters[a.node] = m
		}
		if b.vague {
			continue
		}
		m.level = max(0, m.level-w*j.most.Rate*unchanged*(a.at-m.last).Seconds()) + float64(a.tokens)
		m.last = a.at
		j.within(fmt.Sprintf("level of node %d's share", a.node.place), key, a.at, m.level, m.bound)
	}
	if b.vague {
		for n, m := range meters {
			m.level = b.leastPeak(lease.Limit{Rate: w * j.most.Rate * unchanged, Burst: j.most.Burst}, func(a admission) bool {
				return a.from == lease.SourceLocal && a.node == n
			})
			j.within(fmt.Sprintf("level of node %d's share", n.place), key, 0, m.level, m.bound)
		}
	}
}

// wholeLevel judges everything that was admitted around outages for all nodes:
// max(burst, cost·nodes) + rate·t + E + U.
func (j *judge) wholeLevel(key int, b *book) {
	dearest := int64(1)
	for _, c := range b.dearest {
		dearest = max(dearest, c)
	}
	level, last := 0.0, time.Duration(0)
	from := 0
	for _, a := range b.admissions {
		level -= j.most.Rate * (a.at - last).Seconds()
		last = a.at
		if level <= 0 {
			level = 0
			for from < len(b.errors) && b.errors[from].at < a.at-j.horizon() {
				from++
			}
		}
		level += float64(a.tokens)
		bound := float64(max(j.most.Burst, dearest*int64(j.many)))
		for _, c := range b.errors[from:] {
			if c.at <= a.at {
				bound += c.tokens
			}
		}
		bound += around(b.owed, a.at) + j.tick()
		j.within("level of all", key, a.at, level, bound)
	}
}

// tick is what comes in a microsecond: shares count in nanoseconds.
func (j *judge) tick() float64 { return j.most.Rate * 1e-6 }

// around returns the largest of the samples next to a time.
func around(samples []credit, at time.Duration) (tokens float64) {
	i, _ := slices.BinarySearchFunc(samples, at, func(c credit, at time.Duration) int { return int(c.at - at) })
	if i > 0 {
		tokens = samples[i-1].tokens
	}
	for ; i < len(samples); i++ {
		tokens = max(tokens, samples[i].tokens)
		if samples[i].at > at {
			break
		}
	}
	return tokens
}

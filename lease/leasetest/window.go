package leasetest

import "github.com/hybridlimit/hybridlimit/lease"

// shortest is the least time, in microseconds, that a window must go on for a lease
// of it to be worth anything.
const shortest = 1000

// Window is one key's state under an algorithm that counts in windows, and the
// whole of the store's side of it as pure integer arithmetic: what windows.lua and
// the script before it are in Lua. A fuzz test holds them together.
type Window struct {
	meter  meter // the algorithm's own part; nil: there is no state
	leases bool

	at           int64 // microseconds: of the last change
	epoch, first int64 // first: the epoch that the window began with
	out0, out1   int64 // tokens leased in this epoch and the one before, unreported
	act0, act1   int64 // nodes seen in this epoch and the one before
	dem0, dem1   int64 // their demand
	version      int64
	burst        int64
	count, perUS int64
	w            int64 // the window, microseconds
	limit        lease.Limit
	expires      int64 // milliseconds
}

// meter is the algorithm's part. Its methods have the names and the meaning of the
// functions in the scripts.
type meter interface {
	clone() meter
	fresh(b *Window, used, age int64)
	back(b *Window, now int64)
	advance(b *Window, now int64) (rolled bool)
	change(b *Window, now int64, newer bool, w, burst int64)
	used(b *Window) int64
	charge(b *Window, n int64)
	debit(b *Window, n int64)
	credit(b *Window, n int64, mine bool)
	clear(b *Window)
	waitFor(b *Window, n int64) int64
	fill(b *Window) int64
}

// newMeter returns the empty state of a, or nil if a has no windows.
func newMeter(a lease.Algorithm) meter {
	switch a {
	case lease.FixedWindow:
		return &fixed{}
	case lease.SlidingLog:
		return &slidingLog{}
	case lease.SlidingCounter:
		return &slidingCounter{}
	}
	return nil
}

// Outstanding returns the count of leased tokens as last updated.
func (b *Window) Outstanding() int64 { return b.out0 + b.out1 }

// Used returns what counts against the burst, as last updated.
func (b *Window) Used() int64 {
	if b.meter == nil {
		return 0
	}
	return b.meter.used(b)
}

// Exists reports whether the key is in the store at time now (microseconds).
func (b *Window) Exists(now int64) bool { return b.meter != nil && now/1000 < b.expires }

// Expires returns when the key goes, in microseconds.
func (b *Window) Expires() int64 { return b.expires * 1000 }

// copy returns a copy that shares nothing.
func (b *Window) copy() Window {
	c := *b
	if c.meter != nil {
		c.meter = c.meter.clone()
	}
	return c
}

// Apply carries out call at time now, in microseconds of the store's clock.
func (b *Window) Apply(now int64, call lease.Call) lease.Grant {
	count, perUS, ok := call.Ratio()
	if !ok {
		return lease.Grant{RetryAfter: micros(never), ResetAfter: micros(never)}
	}
	ttl := max(call.TTL.Microseconds(), 1000)
	g := lease.Grant{Limit: call.Limit, Version: call.Version}

	stored := b.copy()
	if !b.Exists(now) {
		*b = Window{
			meter: newMeter(call.Limit.Algorithm), leases: call.Limit.Algorithm.Leases(), at: now, epoch: now / ttl,
			version: call.Version, burst: call.Limit.Burst, count: count, perUS: perUS,
			w: ceilDiv(call.Limit.Burst*perUS, count), limit: call.Limit,
		}
		b.first = b.epoch
		used, age := int64(0), int64(0)
		if h := call.Hint; h.Known {
			// It was lost, but for what the caller remembers of it.
			used = b.burst - max(-b.burst, min(h.Tokens, b.burst))
			age = max(0, h.Age.Microseconds())
		}
		b.meter.fresh(b, used, age)
		g.Created = true
	}
	b.advance(now, ttl)
	dirty := b.configure(now, call, count, perUS)
	dirty = b.settle(call) || dirty
	if call.Want > 0 && call.LastEpoch != b.epoch {
		b.act0++
		b.dem0 = min(b.dem0+b.demandOf(call), mostDemand)
		dirty = true
	}
	dirty = b.grant(now, ttl, call, &g) || dirty

	g.Epoch = b.epoch
	g.Remaining = max(0, b.burst-b.meter.used(b))
	g.RetryAfter = micros(never)
	if need := max(1, call.Need); need <= b.burst {
		g.RetryAfter = micros(b.meter.waitFor(b, need))
	}
	reset := b.meter.fill(b)
	g.ResetAfter = micros(reset)
	g.Outstanding = b.out0 + b.out1
	g.Active = max(1, b.act0, b.act1)
	g.Demand = b.dem1
	if b.version != call.Version || b.burst != call.Limit.Burst || b.count != count || b.perUS != perUS {
		g.Newer, g.Limit, g.Version, g.Count, g.PerUS = true, b.limit, b.version, b.count, b.perUS
	}
	if dirty {
		b.expires = now/1000 + ceilDiv(reset+2*ttl, 1000) + slackMS
	} else {
		*b = stored
	}
	return g
}

// advance brings the state to now. The number of an epoch never comes a second
// time, or reports of the first would be taken off the leases of the second.
func (b *Window) advance(now, ttl int64) {
	if now < b.at {
		b.meter.back(b, now)
		b.at = now
		return
	}
	ended := now/ttl - b.at/ttl
	rolled := b.meter.advance(b, now)
	if rolled {
		// Leases ended with the window, spent or not.
		ended, b.out0, b.out1 = max(1, ended), 0, 0
	}
	b.at = now
	if ended == 0 {
		return
	}
	b.epoch += ended
	if rolled {
		b.first = b.epoch
	}
	b.out1, b.act1, b.dem1 = b.out0, b.act0, b.dem0
	if ended > 1 {
		b.out1, b.act1, b.dem1 = 0, 0, 0
	}
	b.out0, b.act0, b.dem0 = 0, 0, 0
}

// configure adopts the call's limit if it is newer. What is used stays used.
func (b *Window) configure(now int64, call lease.Call, count, perUS int64) bool {
	same := b.burst == call.Limit.Burst && b.count == count && b.perUS == perUS
	newer := call.Version > b.version
	if !newer && (call.Version != 0 || b.version != 0) || same && call.Version == b.version {
		return false
	}
	w := ceilDiv(call.Limit.Burst*perUS, count)
	if !same {
		b.meter.change(b, now, newer, w, call.Limit.Burst)
	}
	b.version, b.burst, b.count, b.perUS, b.limit, b.w = call.Version, call.Limit.Burst, count, perUS, call.Limit, w
	return true
}

// settle applies reports, refund, debt and reset.
func (b *Window) settle(call lease.Call) bool {
	changed := false
	for _, r := range call.Reports {
		out := &b.out0
		switch r.Epoch {
		case b.epoch:
		case b.epoch - 1:
			out = &b.out1
		default:
			continue
		}
		spent := min(r.Spent, *out)
		*out -= spent
		returned := min(r.Returned, *out)
		*out -= returned
		if returned > 0 {
			b.meter.credit(b, returned, true)
		}
		changed = changed || spent > 0 || returned > 0
	}
	if call.Refund > 0 {
		// A node that had nothing of this window gives back what is of another.
		b.meter.credit(b, call.Refund, call.LastEpoch < 0 || call.LastEpoch >= b.first)
		changed = true
	}
	if call.Debt > 0 {
		b.meter.debit(b, min(call.Debt, 2*b.burst))
		changed = true
	}
	if call.Reset {
		b.meter.clear(b)
		changed = true
	}
	return changed
}

func (b *Window) demandOf(call lease.Call) int64 { return max(1, min(call.Demand, b.burst)) }

// grant charges what call gets. A lease is not more than a fair part of what is
// left, for nothing comes in before the window ends, and lives no longer than it.
func (b *Window) grant(now, ttl int64, call lease.Call, g *lease.Grant) (charged bool) {
	avail := b.burst - b.meter.used(b)
	most, want, rest := avail, call.Want, int64(0)
	life := ttl * 95 / 100
	if f, ok := b.meter.(*fixed); ok {
		rest = f.ends - now
		life = min(ttl, rest) * 95 / 100
		if rest < shortest {
			want = min(want, call.Bound)
		}
		most = b.part(avail, call)
	} else {
		want = min(want, call.Bound)
	}
	if avail > 0 && avail >= call.Need && want > 0 {
		charged = true
		g.Tokens = min(avail, max(call.Need, min(want, most)))
		if call.Need > 0 {
			g.Bound = min(g.Tokens, call.Bound) / call.Need * call.Need
		}
		if !b.leases {
			g.Tokens = g.Bound
		}
		if g.Tokens > 0 {
			b.meter.charge(b, g.Tokens)
		}
		b.out0 += g.Tokens - g.Bound
	}
	if b.leases && g.Tokens < call.Want && b.burst-b.meter.used(b) <= max(0, avail-most) {
		g.Pace = micros(min(ttl/2, rest))
	}
	g.TTL = micros(life)
	return charged
}

// part is the caller's fair part of avail tokens.
func (b *Window) part(avail int64, call lease.Call) int64 {
	switch call.Share {
	case lease.ShareEqual:
		return max(1, floorDiv(avail, max(1, b.act0, b.act1)))
	case lease.ShareProportional:
		all := max(1, b.dem0, b.dem1)
		return max(1, mulDiv(avail, min(b.demandOf(call), all), all))
	}
	return avail
}

// fixed is the fixed window.
type fixed struct{ ends, taken, debt int64 }

func nextEnd(t, w int64) int64 { return (floorDiv(t, w) + 1) * w }

func (f *fixed) clone() meter { c := *f; return &c }

func (f *fixed) fresh(b *Window, used, age int64) {
	*f = fixed{ends: nextEnd(b.at, b.w)}
	if b.at-age >= f.ends-b.w {
		f.taken = max(0, used)
	}
}

func (f *fixed) back(b *Window, now int64) { f.ends = min(f.ends, nextEnd(now, b.w)) }

// after returns the debt that is left of one when a window ends.
func (f *fixed) after(b *Window, taken, debt int64) int64 {
	return min(debt, max(0, taken+debt-b.burst))
}

func (f *fixed) advance(b *Window, now int64) (rolled bool) {
	for range 3 {
		if now < f.ends {
			return rolled
		}
		f.debt, f.taken, f.ends, rolled = f.after(b, f.taken, f.debt), 0, nextEnd(f.ends, b.w), true
	}
	if now >= f.ends {
		f.debt, f.ends = 0, nextEnd(now, b.w)
	}
	return rolled
}

func (f *fixed) change(_ *Window, now int64, newer bool, w, burst int64) {
	ends := nextEnd(now, w)
	if !newer {
		ends = max(ends, f.ends)
	}
	f.ends, f.debt = ends, min(f.debt, 2*burst)
}

func (f *fixed) used(*Window) int64 { return f.taken + f.debt }

func (f *fixed) charge(_ *Window, n int64) { f.taken += n }

func (f *fixed) debit(b *Window, n int64) {
	f.debt = max(f.debt, min(f.debt+n, 2*b.burst-f.taken))
}

func (f *fixed) credit(b *Window, n int64, mine bool) {
	if mine {
		f.taken -= min(n, f.taken-b.out0-b.out1)
	}
}

func (f *fixed) clear(b *Window) { f.taken, f.debt = b.out0+b.out1, 0 }

// passed returns how long it is to the first end of a window at which at most most
// tokens are used, if nothing is granted.
func (f *fixed) passed(b *Window, most int64) int64 {
	t, debt := f.ends, f.after(b, f.taken, f.debt)
	for debt > most {
		t, debt = nextEnd(t, b.w), f.after(b, 0, debt)
	}
	return t - b.at
}

func (f *fixed) waitFor(b *Window, n int64) int64 {
	if b.burst-f.used(b) >= n {
		return 0
	}
	return f.passed(b, b.burst-n)
}

func (f *fixed) fill(b *Window) int64 {
	if f.used(b) == 0 {
		return 0
	}
	return f.passed(b, 0)
}

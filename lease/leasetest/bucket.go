package leasetest

import (
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// never is the longest wait a Grant can tell, about 285 years in microseconds: an
// exact integer in a double, and still a Duration.
const never = int64(9_000_000_000_000_000)

// slack is how long a key outlives the instant from which its loss could not
// be noticed, in milliseconds.
const slackMS = 1000

// mostDemand keeps sums of demand exact in a double.
const mostDemand = int64(4_000_000_000_000_000)

// Bucket is one key's state, and the whole of the store's side of the lease
// protocol as pure integer arithmetic. lua/acquire.lua is the same, line by
// line; a fuzz test holds the two together.
type Bucket struct {
	exists       bool
	units        int64 // balance; one token is perUS units; < 0 only through debt
	at           int64 // microseconds: the balance is as of here
	epoch        int64 // at/ttl
	out0, out1   int64 // tokens leased in this epoch and the one before, unreported
	act0, act1   int64 // nodes seen in this epoch and the one before
	dem0, dem1   int64 // their demand
	version      int64
	burst        int64
	count, perUS int64
	ttl          int64 // microseconds
	limit        lease.Limit
	expires      int64 // milliseconds
}

// Outstanding returns the bucket's own count of leased tokens as last updated.
func (b *Bucket) Outstanding() int64 { return b.out0 + b.out1 }

// Tokens returns the balance as last updated, in tokens.
func (b *Bucket) Tokens() float64 {
	if b.perUS == 0 {
		return 0
	}
	return float64(b.units) / float64(b.perUS)
}

// Limit returns the limit in force.
func (b *Bucket) Limit() lease.Limit { return b.limit }

// Exists reports whether the key is in the store at time now (microseconds).
func (b *Bucket) Exists(now int64) bool { return b.exists && now/1000 < b.expires }

// Expires returns when the key goes, in microseconds.
func (b *Bucket) Expires() int64 { return b.expires * 1000 }

// Apply carries out call at time now, in microseconds of the store's clock.
func (b *Bucket) Apply(now int64, call lease.Call) lease.Grant {
	count, perUS, ok := call.Ratio()
	if !ok {
		return lease.Grant{RetryAfter: micros(never), ResetAfter: micros(never)}
	}
	ttl := max(call.TTL.Microseconds(), 1000)
	g := lease.Grant{Limit: call.Limit, Version: call.Version}

	// Load. An expired key equals a full bucket.
	stored := *b
	if !b.Exists(now) {
		*b = Bucket{
			exists: true, units: call.Limit.Burst * perUS, at: now, epoch: now / ttl,
			version: call.Version, burst: call.Limit.Burst, count: count, perUS: perUS, ttl: ttl, limit: call.Limit,
		}
		if h := call.Hint; h.Known {
			// It was lost, but for what the caller remembers of it.
			b.units = max(-b.burst, min(h.Tokens, b.burst)) * perUS
			age, full := max(0, h.Age.Microseconds()), b.refillTime(b.burst*perUS-b.units)
			b.units = min(b.burst*perUS, b.units+min(age, full)*count)
		}
		g.Created = true
	}
	dirty := false

	// Clock, then refill with the old outstanding count.
	b.advance(now)

	dirty = b.configure(now, call, count, perUS, ttl) || dirty
	dirty = b.settle(call) || dirty
	dirty = b.active(call) || dirty

	// Grant.
	avail := floorDiv(b.units, b.perUS)
	fair, others := b.shares(call, min(b.ttl, ttl)/2)
	if avail > 0 && avail >= call.Need && call.Want > 0 {
		waiting := call.Need
		if call.Need > 0 {
			waiting = max(waiting, min(avail, call.Bound)/call.Need*call.Need)
		}
		most := avail
		if call.Share != lease.ShareNone {
			most = max(fair, avail-others)
			if most > 2*fair {
				// Beyond what waits no more than half: the end of a bucket that
				// hardly refills is not to be stranded on whoever asked first.
				most = max(2*fair, min(most, waiting+(avail-waiting+1)/2))
			}
		}
		g.Tokens = min(avail, max(call.Need, min(call.Want, most)))
		if call.Need > 0 {
			g.Bound = min(g.Tokens, call.Bound) / call.Need * call.Need
		}
		b.units -= g.Tokens * b.perUS
		b.out0 += g.Tokens - g.Bound
		dirty = true
	}
	// Too few for all, and no more than the others' part is left: wait a period.
	if g.Tokens < call.Want && floorDiv(b.units, b.perUS) <= others {
		g.Pace = micros(min(b.ttl, ttl) / 2)
	}

	g.Epoch = b.epoch
	// Not longer than the caller asked for: after a burst was lowered its leases are
	// short, while the bucket's ttl is long as long as any lease is out, which under
	// load is always.
	g.TTL = micros(min(b.ttl, ttl) * 95 / 100)
	g.Remaining = max(0, floorDiv(b.units, b.perUS))
	g.RetryAfter = micros(b.waitFor(max(1, call.Need)))
	g.ResetAfter = micros(b.refillTime(b.burst*b.perUS - b.units))
	g.Outstanding = b.out0 + b.out1
	g.Active = max(1, b.act0, b.act1)
	g.Demand = b.dem1
	if b.version != call.Version || b.burst != call.Limit.Burst || b.count != count || b.perUS != perUS {
		g.Newer, g.Limit, g.Version, g.Count, g.PerUS = true, b.limit, b.version, b.count, b.perUS
	}

	// Save. Without a change the next call computes the same from the old state,
	// so there is nothing to write, as in the script; a look creates no key.
	if dirty {
		// Until the bucket is full, refill held up by leases for at most 2·ttl
		// included, its loss could be noticed.
		full := b.refillTime(b.burst*b.perUS-b.units) + 2*b.ttl
		b.expires = now/1000 + ceilDiv(full, 1000) + slackMS
	} else {
		*b = stored
	}
	return g
}

// advance moves the balance along d(balance)/dt = rate while balance +
// outstanding < burst, and drops each epoch's leases at the end of the next
// epoch, when they can no longer be live on any node.
func (b *Bucket) advance(now int64) {
	if now < b.at {
		// The clock went back: no refill, and the epoch stays until the clock has
		// caught up. Were it to come again, a report of its first time would be taken
		// off the leases of its second. After more than four epochs no report is
		// left, and the leases stay outstanding for two more by the new clock.
		b.at = now
		if e := now / b.ttl; e < b.epoch-4 {
			b.epoch = e
			b.out0, b.out1 = b.out0+b.out1, 0
			b.act0, b.act1 = max(b.act0, b.act1), 0
			b.dem0, b.dem1 = max(b.dem0, b.dem1), 0
		}
		return
	}
	for range 2 {
		end := (b.epoch + 1) * b.ttl
		if now < end {
			break
		}
		b.refill(end)
		b.epoch++
		b.out1, b.out0 = b.out0, 0
		b.act1, b.act0 = b.act0, 0
		b.dem1, b.dem0 = b.dem0, 0
	}
	if e := now / b.ttl; e > b.epoch {
		b.epoch = e
		b.out1, b.act1, b.dem1 = 0, 0, 0
	}
	b.refill(now)
}

// limitUnits is the balance that outstanding leases leave. Of a burst that was
// lowered they may be a multiple; below minus the burst it makes no difference,
// and the product stays exact.
func (b *Bucket) limitUnits() int64 {
	return max(b.burst-b.out0-b.out1, -b.burst) * b.perUS
}

// refill adds what the rate gives from b.at to end, as far as there is room.
func (b *Bucket) refill(end int64) {
	room := b.limitUnits() - b.units
	dt := end - b.at
	b.at = end
	if room <= 0 {
		return
	}
	if dt > room/b.count {
		b.units += room
	} else {
		b.units += dt * b.count
	}
}

// configure adopts the call's limit if it is newer.
func (b *Bucket) configure(now int64, call lease.Call, count, perUS, ttl int64) bool {
	same := b.burst == call.Limit.Burst && b.count == count && b.perUS == perUS
	accept := call.Version > b.version || call.Version == 0 && b.version == 0
	if !accept && (call.Version != b.version || !same) {
		return false
	}
	changed := false
	out := b.out0 + b.out1
	if accept && (!same || call.Version != b.version) {
		tokens := floorDiv(b.units, b.perUS)
		frac := b.units - tokens*b.perUS
		// Bounded by the new burst first: the product must stay exact.
		tokens = max(-call.Limit.Burst, min(tokens, call.Limit.Burst))
		b.units = tokens*perUS + mulDiv(frac, perUS, b.perUS)
		b.version, b.burst, b.count, b.perUS, b.limit = call.Version, call.Limit.Burst, count, perUS, call.Limit
		if room := max(0, b.burst-out) * perUS; b.units > room {
			b.units = room
		}
		if low := -b.burst * perUS; b.units < low {
			b.units = low
		}
		changed = true
	}
	// A longer ttl counts from now; a shorter one only when no lease is out,
	// for those that are live as long as they were told.
	if ttl > b.ttl || ttl < b.ttl && out == 0 {
		b.ttl = ttl
		b.epoch = now / ttl
		b.out0, b.out1 = out, 0
		b.act0, b.act1 = max(b.act0, b.act1), 0
		b.dem0, b.dem1 = max(b.dem0, b.dem1), 0
		changed = true
	}
	return changed
}

// settle applies reports, refund, debt and reset.
func (b *Bucket) settle(call lease.Call) bool {
	changed := false
	for _, r := range call.Reports {
		out := &b.out0
		switch r.Epoch {
		case b.epoch:
		case b.epoch - 1:
			out = &b.out1
		default:
			continue // dropped already, when its epoch ended
		}
		spent := min(r.Spent, *out)
		*out -= spent
		returned := min(r.Returned, *out)
		*out -= returned
		// A lowered burst may have less room than comes back.
		room := b.limitUnits() - b.units
		b.units += max(0, min(returned*b.perUS, room))
		changed = changed || spent > 0 || returned > 0
	}
	if call.Refund > 0 {
		room := b.limitUnits() - b.units
		if room > 0 {
			// In tokens first: refund·perUS may overflow.
			b.units += min(min(call.Refund, b.burst)*b.perUS, room)
			changed = true
		}
	}
	if call.Debt > 0 {
		b.units = max(b.units-min(call.Debt, 2*b.burst)*b.perUS, -b.burst*b.perUS)
		changed = true
	}
	if call.Reset {
		b.units = max(b.units, b.limitUnits())
		changed = true
	}
	return changed
}

// active counts the caller, once per epoch.
func (b *Bucket) active(call lease.Call) bool {
	if call.Want == 0 || call.LastEpoch == b.epoch {
		return false
	}
	b.act0++
	b.dem0 = min(b.dem0+b.demandOf(call), mostDemand)
	return true
}

// demandOf is the caller's demand as it counts: at least one token and no more
// than a bucket holds.
func (b *Bucket) demandOf(call lease.Call) int64 { return max(1, min(call.Demand, b.burst)) }

// shares returns the caller's fair part of what the rate gives in a lease period of
// its, in tokens, and the part of the other active nodes.
func (b *Bucket) shares(call lease.Call, period int64) (fair, others int64) {
	flow := b.burst
	if period <= (b.burst*b.perUS)/b.count {
		flow = period * b.count / b.perUS
	}
	switch call.Share {
	case lease.ShareEqual:
		n := max(1, b.act0, b.act1)
		fair = flow / n
		return fair, (n - 1) * fair
	case lease.ShareProportional:
		all := max(1, b.dem0, b.dem1)
		fair = mulDiv(flow, min(b.demandOf(call), all), all)
		return fair, flow - fair
	}
	return 0, 0
}

// waitFor returns the microseconds until the balance reaches n tokens if no
// call comes, leases blocking refill until their epochs end.
func (b *Bucket) waitFor(n int64) int64 {
	if n > b.burst {
		return never
	}
	v := *b
	need := n * v.perUS
	for range 2 {
		if v.units >= need {
			return v.at - b.at
		}
		end := (v.epoch + 1) * v.ttl
		if limit := v.limitUnits(); limit >= need {
			if wait := v.refillTime(need - v.units); v.at+wait <= end {
				return v.at - b.at + wait
			}
		}
		v.refill(end)
		v.epoch++
		v.out1, v.out0 = v.out0, 0
	}
	if v.units >= need {
		return v.at - b.at
	}
	return v.at - b.at + v.refillTime(need-v.units)
}

// refillTime returns the microseconds the rate takes to give units.
func (b *Bucket) refillTime(units int64) int64 {
	if units <= 0 {
		return 0
	}
	return ceilDiv(units, b.count)
}

func micros(us int64) time.Duration { return time.Duration(us) * time.Microsecond }

func floorDiv(a, b int64) int64 {
	q := a / b
	if a%b < 0 {
		q--
	}
	return q
}

func ceilDiv(a, b int64) int64 { return -floorDiv(-a, b) }

package leasetest

// mostEntries is how many instants a log keeps.
const mostEntries = 256

// slidingLog is the sliding window log: when tokens were charged, oldest first.
// Until untl entries count for hold, if that is more than the window.
type slidingLog struct {
	hold, untl int64
	log        []entry
	sum        int64
}

type entry struct{ at, n int64 }

func (l *slidingLog) clone() meter {
	c := *l
	c.log = append([]entry(nil), l.log...)
	return &c
}

func (l *slidingLog) fresh(b *Window, used, age int64) {
	*l = slidingLog{hold: b.w}
	if used > 0 && age < b.w {
		l.log, l.sum = []entry{{b.at - age, used}}, used
	}
}

func (l *slidingLog) back(b *Window, now int64) {
	by := b.at - now
	for i := range l.log {
		l.log[i].at -= by
	}
	l.untl = max(0, l.untl-by)
}

// gone returns when an entry counts no more.
func (l *slidingLog) gone(w int64, e entry) int64 { return min(e.at+l.hold, max(e.at+w, l.untl)) }

func (l *slidingLog) advance(b *Window, now int64) (rolled bool) {
	l.expire(b.w, now)
	return false
}

func (l *slidingLog) expire(w, now int64) {
	for len(l.log) > 0 && l.gone(w, l.log[0]) <= now {
		l.sum -= l.log[0].n
		l.log = l.log[1:]
	}
}

func (l *slidingLog) change(b *Window, now int64, newer bool, w, _ int64) {
	hold := b.w
	if now < l.untl {
		hold = l.hold
	}
	if newer {
		hold = w
	}
	l.hold = max(hold, w)
	if l.hold > w {
		l.untl = max(l.untl, now+b.w)
	} else {
		l.untl = 0
	}
	l.expire(w, now)
}

func (l *slidingLog) used(*Window) int64 { return l.sum }

func (l *slidingLog) charge(b *Window, n int64) {
	l.sum += n
	last := len(l.log) - 1
	if last >= 0 && l.log[last].at == b.at {
		l.log[last].n += n
		return
	}
	if l.log = append(l.log, entry{b.at, n}); len(l.log) > mostEntries {
		l.compact()
	}
}

// compact puts entries of one grain together, as late as the latest.
func (l *slidingLog) compact() {
	grain := ceilDiv(l.hold, mostEntries/2)
	var log []entry
	for _, e := range l.log {
		if last := len(log) - 1; last >= 0 && floorDiv(log[last].at, grain) == floorDiv(e.at, grain) {
			log[last] = entry{e.at, log[last].n + e.n}
		} else {
			log = append(log, e)
		}
	}
	l.log = log
}

func (l *slidingLog) debit(b *Window, n int64) {
	if n = min(n, 2*b.burst-l.sum); n > 0 {
		l.charge(b, n)
	}
}

// credit takes from the oldest, whichever came back: those left count for longer.
func (l *slidingLog) credit(_ *Window, n int64, _ bool) {
	for n > 0 && len(l.log) > 0 {
		part := min(n, l.log[0].n)
		l.log[0].n -= part
		l.sum -= part
		n -= part
		if l.log[0].n > 0 {
			return
		}
		l.log = l.log[1:]
	}
}

func (l *slidingLog) clear(*Window) { l.log, l.sum = nil, 0 }

func (l *slidingLog) waitFor(b *Window, n int64) int64 {
	left := b.burst - l.sum
	if left >= n {
		return 0
	}
	for _, e := range l.log {
		if left += e.n; left >= n {
			return l.gone(b.w, e) - b.at
		}
	}
	return never
}

func (l *slidingLog) fill(b *Window) int64 {
	if len(l.log) == 0 {
		return 0
	}
	return l.gone(b.w, l.log[len(l.log)-1]) - b.at
}

// slidingCounter is the sliding window counter: taken in the window that ends at
// ends, prev in the one before.
type slidingCounter struct{ ends, taken, prev int64 }

func (c *slidingCounter) clone() meter { d := *c; return &d }

// exact bounds the integers that a double holds.
const exact = int64(1) << 53

// scale returns in how many steps the overlap of prev is told: the products of it
// with the window, with the burst and with prev are exact in a double.
func scale(b *Window, prev int64) int64 { return min(b.w, exact/b.w, exact/max(2*b.burst, prev)) }

// weighed returns what prev counts for at time t, rounded up.
func (c *slidingCounter) weighed(b *Window, t int64) int64 {
	steps := scale(b, c.prev)
	overlap := ceilDiv(min(b.w, c.ends-t)*steps, b.w)
	return ceilDiv(c.prev*overlap, steps)
}

func (c *slidingCounter) fresh(b *Window, used, age int64) {
	*c = slidingCounter{ends: nextEnd(b.at, b.w)}
	switch began := c.ends - b.w; {
	case b.at-age >= began:
		c.taken = max(0, used)
	case b.at-age >= began-b.w:
		c.prev = max(0, used)
	}
}

// fold makes what prev counts for at time t part of this window.
func (c *slidingCounter) fold(b *Window, t int64) {
	c.taken, c.prev = c.taken+c.weighed(b, t), 0
}

func (c *slidingCounter) back(b *Window, now int64) {
	if ends := nextEnd(now, b.w); ends < c.ends {
		c.fold(b, b.at)
		c.ends = ends
	}
}

func (c *slidingCounter) advance(b *Window, now int64) (rolled bool) {
	if now < c.ends {
		return false
	}
	c.prev, c.taken, c.ends = c.taken, 0, nextEnd(c.ends, b.w)
	if now >= c.ends {
		c.prev, c.ends = 0, nextEnd(now, b.w)
	}
	return true
}

func (c *slidingCounter) change(b *Window, now int64, newer bool, w, _ int64) {
	if w != b.w {
		c.fold(b, now)
		ends := nextEnd(now, w)
		if !newer {
			ends = max(ends, c.ends)
		}
		c.ends = ends
	}
}

func (c *slidingCounter) used(b *Window) int64 { return c.taken + c.weighed(b, b.at) }

func (c *slidingCounter) charge(_ *Window, n int64) { c.taken += n }

func (c *slidingCounter) debit(b *Window, n int64) {
	c.taken = max(c.taken, min(c.taken+n, 2*b.burst))
}

func (c *slidingCounter) credit(_ *Window, n int64, mine bool) {
	if mine {
		c.taken -= min(n, c.taken)
	} else {
		c.prev -= min(n, c.prev)
	}
}

func (c *slidingCounter) clear(*Window) { c.taken, c.prev = 0, 0 }

// falls returns the first time from from on, in the window that ends at ends, at
// which prev counts for at most most.
func falls(b *Window, ends, from, prev, most int64) int64 {
	if prev <= most {
		return from
	}
	steps := scale(b, prev)
	return max(from, ends-most*steps/prev*b.w/steps)
}

func (c *slidingCounter) waitFor(b *Window, n int64) int64 {
	if most := b.burst - c.taken - n; most >= 0 {
		return falls(b, c.ends, b.at, c.prev, most) - b.at
	}
	return falls(b, nextEnd(c.ends, b.w), c.ends, c.taken, b.burst-n) - b.at
}

func (c *slidingCounter) fill(b *Window) int64 {
	switch {
	case c.taken > 0:
		return nextEnd(c.ends, b.w) - b.at
	case c.prev > 0:
		return c.ends - b.at
	}
	return 0
}

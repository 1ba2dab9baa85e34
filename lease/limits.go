package lease

import (
	"errors"
	"time"
)

// snapshot is the limits in force from one SetLimits to the next. It never changes.
type snapshot struct {
	limits  Limits
	version int64
	fixed   *terms // the terms of all keys when limits is one Limit
}

func newSnapshot(limits Limits, version int64, period time.Duration) (*snapshot, error) {
	s := &snapshot{limits: limits, version: version}
	switch l := limits.(type) {
	case nil:
		return nil, errors.New("lease: limits is nil")
	case Limit:
		var err error
		if s.fixed, err = newTerms(l, version, period); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// SetLimits puts other limits in force, all at once: each request is decided by the
// old ones or the new ones. A key that is in use turns to its new limit with the next
// request that no lease decides, and with the next call to the store; so within two
// lease periods, and at once if the new limit is higher and the key was refused. The
// bucket keeps its tokens, up to the new burst; a limit that stays the same is not
// touched. A limit that came with a request (TakeLimit) stays.
//
// version numbers them as Options.Version does, 0 to 2^53: nodes that have not been
// told yet adopt the limit of the higher version from the bucket. One that is older
// than the one in force is an *OptionError, and changes nothing; so does, without
// an error, the same one again, but for 0.
func (c *Cache) SetLimits(limits Limits, version int64) error {
	if version < 0 || version > maxUnits {
		return &OptionError{"Version", version, "0 to 2^53"}
	}
	s, err := newSnapshot(limits, version, c.opts.LeasePeriod)
	if err != nil {
		return err
	}
	for {
		old := c.limits.Load()
		switch {
		case version < old.version:
			return &OptionError{"Version", version, "at least the one in force"}
		case version == old.version && version > 0:
			return nil
		case c.limits.CompareAndSwap(old, s):
			return nil
		}
	}
}

// termsFor returns key's terms by s.
func (c *Cache) termsFor(s *snapshot, key string) (*terms, error) {
	if s.fixed != nil {
		return s.fixed, nil
	}
	return c.termsOf(s.limits.For(key), s.version)
}

// renew puts h's limit by the limits in force in place of one by earlier limits.
func (c *Cache) renew(h *holding) error {
	s := c.limits.Load()
	if h.of.Load() == s {
		return nil
	}
	t, err := c.termsFor(s, h.key) // not under a lock: it is the caller's code
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gone || h.of.Load() == s || c.limits.Load() != s {
		return nil
	}
	h.of.Store(s)
	old := h.terms.Load()
	if h.asked || old.version > t.version || old.limit == t.limit && old.version == t.version {
		return nil // its own, adopted from a later one, or the same
	}
	if t.zero {
		h.dropLocked(c) // the store forgets them by itself
	}
	h.changeLocked(t)
	return nil
}

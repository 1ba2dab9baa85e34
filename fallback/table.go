package fallback

import (
	"hash/maphash"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

const tableParts = 64

// table is the shares by key. No more than its capacity are kept: first those go
// that have nothing to remember, then of a few any the one that owes least.
type table struct {
	seed  maphash.Seed
	most  int64
	count atomic.Int64
	owed  atomic.Int64 // by all shares
	lost  atomic.Int64 // tokens owed by shares that had to go
	// forgot is whether a share had to go in this outage that was not full: one
	// that is made now may be the same, and starts empty.
	forgot atomic.Bool
	next   atomic.Int64 // the part to look for debts in next
	parts  [tableParts]part
}

type part struct {
	sync.Mutex // taken before a share's
	shares     map[string]*share
}

func (t *table) init(most int) {
	t.seed, t.most = maphash.MakeSeed(), int64(most)
}

func (t *table) len() int64 { return t.count.Load() }

func (t *table) partOf(key string) *part {
	return &t.parts[maphash.String(t.seed, key)%tableParts]
}

// get returns key's share, locked, or nil.
func (t *table) get(key string) *share {
	if t.count.Load() == 0 {
		return nil
	}
	p := t.partOf(key)
	p.Lock()
	defer p.Unlock()
	sh := p.shares[key]
	if sh != nil {
		sh.mu.Lock()
	}
	return sh
}

// getOrAdd returns key's share, locked, made if need be.
func (t *table) getOrAdd(key string, now time.Time) *share {
	p := t.partOf(key)
	p.Lock()
	defer p.Unlock()
	sh := p.shares[key]
	if sh == nil {
		if t.count.Load() >= t.most {
			t.makeRoom(p, now)
		}
		sh = &share{key: strings.Clone(key)}
		if p.shares == nil {
			p.shares = map[string]*share{}
		}
		p.shares[sh.key] = sh
		t.count.Add(1)
	}
	sh.mu.Lock()
	return sh
}

// makeRoom drops a share of p, which is locked. With none there the table is one
// over its capacity, which is no harm.
func (t *table) makeRoom(p *part, now time.Time) {
	var victim *share
	full := false
	least, tries := int64(math.MaxInt64), 8
	for _, sh := range p.shares { // in no order
		if !sh.mu.TryLock() {
			continue
		}
		idle, owed, busy := sh.spent(now), sh.owes(), sh.charging > 0
		sh.mu.Unlock()
		if idle {
			victim, least, full = sh, 0, true
			break
		}
		if !busy && owed < least {
			victim, least = sh, owed
		}
		if tries--; tries == 0 {
			break
		}
	}
	if victim != nil {
		if !full {
			t.forgot.Store(true)
		}
		t.owed.Add(-least)
		t.lost.Add(least)
		delete(p.shares, victim.key)
		t.count.Add(-1)
	}
}

// sweep drops the shares that have nothing to remember.
func (t *table) sweep(now time.Time) {
	for i := range t.parts {
		p := &t.parts[i]
		p.Lock()
		for key, sh := range p.shares {
			sh.mu.Lock()
			idle := sh.spent(now)
			sh.mu.Unlock()
			if idle {
				delete(p.shares, key)
				t.count.Add(-1)
			}
		}
		p.Unlock()
	}
}

// debts returns a call for each of at most n shares that owe, of those wanted. It
// looks where it stopped the last time, so that all have their turn.
func (t *table) debts(n int, wanted func(key string) bool) (calls []lease.Call) {
	for range tableParts {
		p := &t.parts[uint64(t.next.Add(1))%tableParts]
		p.Lock()
		for _, sh := range p.shares {
			if len(calls) == n {
				break
			}
			sh.mu.Lock()
			if sh.owes() > 0 && sh.charging == 0 && wanted(sh.key) {
				calls = append(calls, sh.call())
			}
			sh.mu.Unlock()
		}
		p.Unlock()
		if len(calls) == n {
			break
		}
	}
	return calls
}

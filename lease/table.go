package lease

import (
	"hash/maphash"
	"sync"
	"sync/atomic"
)

const shards = 64 // a power of two

// table maps keys to holdings. Readers take no lock: a bucket is a linked list
// through the holdings themselves. A reader that meets a growing bucket may
// miss a holding that is there; every miss is looked up again under the lock.
type table struct {
	seed  maphash.Seed
	count atomic.Int64
	hand  atomic.Uint32 // the shard that eviction tries next
	shard [shards]shard
}

type shard struct {
	slots atomic.Pointer[slots]
	mu    sync.Mutex // guards all writes
	count int
	hand  int // the slot that eviction tries next
	_     [64]byte
}

type slots struct {
	mask uint64
	head []atomic.Pointer[holding]
}

func newSlots(n int) *slots {
	return &slots{mask: uint64(n - 1), head: make([]atomic.Pointer[holding], n)}
}

func (t *table) init() {
	t.seed = maphash.MakeSeed()
	for i := range t.shard {
		t.shard[i].slots.Store(newSlots(8))
	}
}

func (t *table) hash(key string) uint64 { return maphash.String(t.seed, key) }

// shardOf uses the high bits, slots the low ones.
func (t *table) shardOf(hash uint64) *shard { return &t.shard[hash>>(64-6)] }

// get returns key's holding, or nil if it is not there or about to move.
func (t *table) get(key string) *holding {
	hash := maphash.String(t.seed, key)
	s := t.shard[hash>>(64-6)].slots.Load()
	for h := s.head[hash&s.mask].Load(); h != nil; h = h.next.Load() {
		if h.hash == hash && h.key == key {
			return h
		}
	}
	return nil
}

// getOrAdd returns key's holding, made by create if there is none.
func (t *table) getOrAdd(key string, create func(hash uint64) *holding) *holding {
	hash := t.hash(key)
	s := t.shardOf(hash)
	s.mu.Lock()
	defer s.mu.Unlock()
	sl := s.slots.Load()
	for h := sl.head[hash&sl.mask].Load(); h != nil; h = h.next.Load() {
		if h.hash == hash && h.key == key {
			return h
		}
	}
	if s.count >= len(sl.head) {
		sl = s.grow(sl)
	}
	h := create(hash)
	head := &sl.head[hash&sl.mask]
	h.next.Store(head.Load())
	head.Store(h)
	s.count++
	t.count.Add(1)
	return h
}

func (s *shard) grow(old *slots) *slots {
	bigger := newSlots(2 * len(old.head))
	for i := range old.head {
		for h := old.head[i].Load(); h != nil; {
			next := h.next.Load()
			head := &bigger.head[h.hash&bigger.mask]
			h.next.Store(head.Load())
			head.Store(h)
			h = next
		}
	}
	s.slots.Store(bigger)
	return bigger
}

// each calls visit for every holding, shard by shard under the shard's lock,
// until visit returns false.
func (t *table) each(visit func(*holding) bool) {
	for i := range t.shard {
		s := &t.shard[i]
		s.mu.Lock()
		sl := s.slots.Load()
		for j := range sl.head {
			for h := sl.head[j].Load(); h != nil; h = h.next.Load() {
				if !visit(h) {
					s.mu.Unlock()
					return
				}
			}
		}
		s.mu.Unlock()
	}
}

// evict removes one holding for which take returns true, looking at no more
// than most of them, and returns it; nil if there was none. take is called
// with the shard locked.
func (t *table) evict(most int, take func(*holding) bool) *holding {
	for range shards {
		s := &t.shard[t.hand.Add(1)%shards]
		s.mu.Lock()
		sl := s.slots.Load()
		for range min(len(sl.head), most) {
			s.hand = (s.hand + 1) % len(sl.head)
			link := &sl.head[s.hand]
			for h := link.Load(); h != nil; link, h = &h.next, h.next.Load() {
				most--
				if take(h) {
					link.Store(h.next.Load())
					s.count--
					t.count.Add(-1)
					s.mu.Unlock()
					return h
				}
			}
		}
		s.mu.Unlock()
		if most <= 0 {
			break
		}
	}
	return nil
}

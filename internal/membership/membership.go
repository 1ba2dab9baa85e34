// Package membership keeps this node alive in Redis and counts the nodes, so
// that every node still knows how many share a limit when Redis is gone.
//
// A node beats once a period: lua/beat.lua notes it in a sorted set, by the
// server's clock, and replies how many nodes were heard of in the last five
// periods. A beat travels in the pipeline of a lease call if there is one, and
// alone otherwise.
//
// # N̂
//
// What a node believes, [Members.Nodes], is the largest of a static minimum,
// what the platform says, and the counts of the last five minutes. Too small a
// number lets the nodes admit too much together, so it rises at once and falls
// slowly. The five minutes are of connected time, which passes only from one
// beat that worked to the next: an outage of any length ages nothing, and the
// low counts right after it, when not all have come back yet, change nothing.
//
// # Owners
//
// Where a limit is too small to be divided, some nodes own a key and the others
// deny it. [Members.Owns] chooses them by rendezvous hashing (Thaler and
// Ravishankar 1998) over the nodes that are alive, without asking anybody; right
// after an outage, when not all are back, over the list that belongs to N̂.
package membership

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hybridlimit/hybridlimit/lua"
)

const (
	defaultPeriod = time.Second
	minPeriod     = 100 * time.Millisecond
	maxPeriod     = time.Minute
	maxIDBytes    = 256

	// ttlPeriods is how many periods a node counts that is not heard of: three
	// beats may be lost, and the fourth late.
	ttlPeriods = 5
	// window is how long N̂ remembers a count.
	window = 5 * time.Minute
	// settles is how long after a beat that did not work others may still be cut
	// off, though they live.
	settles = 2 * time.Minute
	// maxTimeout bounds a beat that travels alone, as a shorter period does.
	maxTimeout = time.Second
	// restAfter is how long after the last Start a node rests: it is in nobody's
	// way, and one that was forgotten does not beat for ever.
	restAfter = 10 * time.Minute
)

// Options are a node's settings. The zero value works. All nodes should have
// the same Period.
type Options struct {
	// Period is the time between two beats, give or take a tenth. A node that
	// dies counts for five more. Default 1s; range 100ms to 1m.
	Period time.Duration
	// Min is the least that Nodes returns. Default 1; range 1 and up.
	Min int
	// Nodes, if set, returns how many nodes the platform knows of, or less than
	// 1 if it does not know. It is called about once a period, by Start too, and
	// should not wait for anything: meanwhile no beat is sent alone.
	Nodes func() int
	// ID names this node, and no other one with the same Redis prefix. It takes 1
	// to 256 bytes. Default 128 random bits in hexadecimal.
	ID string
}

func (o Options) withDefaults() Options {
	if o.Period == 0 {
		o.Period = defaultPeriod
	}
	if o.Min == 0 {
		o.Min = 1
	}
	if o.ID == "" {
		var id [16]byte
		_, _ = rand.Read(id[:]) // never fails
		o.ID = hex.EncodeToString(id[:])
	}
	return o
}

func (o Options) validate() error {
	var errs []error
	if o.Period < minPeriod || o.Period > maxPeriod {
		errs = append(errs, fmt.Errorf("membership: Options.Period = %v: want %v to %v", o.Period, minPeriod, maxPeriod))
	}
	if o.Min < 1 {
		errs = append(errs, fmt.Errorf("membership: Options.Min = %d: want 1 or more", o.Min))
	}
	if len(o.ID) > maxIDBytes {
		errs = append(errs, fmt.Errorf("membership: Options.ID has %d bytes: want at most %d", len(o.ID), maxIDBytes))
	}
	return errors.Join(errs...)
}

// Members is this node's part in the membership, and what it knows of the
// others. Make one with New; it is safe for concurrent use.
type Members struct {
	store   *lua.Store
	opts    Options
	timeout time.Duration // of a beat that travels alone

	nodes atomic.Int64         // N̂
	least atomic.Int64         // of which, by the minimum and the platform
	view  atomic.Pointer[view] // what Owns goes by
	stop  chan struct{}        // closed by Close: no more beats
	idle  chan struct{}        // closed when none is under way any more

	awake   atomic.Bool  // there is a goroutine that beats
	touched atomic.Int64 // the last Start, in nanoseconds since base
	base    time.Time

	mu       sync.Mutex         // guards what follows
	started  time.Time          // zero before Start
	halt     context.CancelFunc // ends a beat under way
	gone     chan struct{}      // closed when the goroutine is gone
	closed   bool
	rideAt   time.Time // from when a beat may ride,
	aloneAt  time.Time // and when it goes alone
	flying   int       // beats under way
	well     bool      // the last beat worked
	wellFrom time.Time // since when all have
	gen      int64     // of list; 0 if the next beat must bring one
	list     []string
	counts   recent // seen in Redis
	platform recent // that Options.Nodes returned
	stats    Stats
	last     time.Time // when a beat last worked
}

// Stats is what a node knows of its own membership. Counters start at New.
type Stats struct {
	// Live is how many nodes the last beat that worked counted; 0 before one did.
	Live int
	// Nodes is N̂.
	Nodes int
	// Age is how long ago a beat last worked, or Start was called if none did; 0
	// before Start.
	Age time.Duration
	// Beats is how many worked, Rode how many of these travelled with lease
	// calls, and Failed how many did not work, or not as far as is known.
	Beats, Rode, Failed int64
}

// New returns a node that Start makes a member, and makes it the store's rider.
// Call it before the store is used, once for each store.
func New(store *lua.Store, opts Options) (*Members, error) {
	opts = opts.withDefaults()
	if err := opts.validate(); err != nil {
		return nil, err
	}
	m := &Members{
		store:    store,
		opts:     opts,
		timeout:  min(opts.Period*9/10, maxTimeout), // before the next is due
		stop:     make(chan struct{}),
		idle:     make(chan struct{}),
		base:     time.Now(),
		counts:   recent{step: 2 * opts.Period},
		platform: recent{step: 2 * opts.Period},
	}
	m.nodes.Store(int64(opts.Min))
	m.least.Store(int64(opts.Min))
	store.SetRider(m.due, func(got lua.Members, err error) { m.landed(got, err, true) })
	return m, nil
}

// Start makes this node a member: its first beat goes at once, and there is a
// goroutine that sends those for which no lease call came along, until Close or
// until Start was not called for ten minutes. It is cheap: call it whenever the
// node is used. It does nothing after Close.
func (m *Members) Start() {
	m.touched.Store(int64(time.Since(m.base)))
	if m.awake.Load() {
		return
	}
	m.mu.Lock()
	if m.awake.Load() || m.closed {
		m.mu.Unlock()
		return
	}
	m.awake.Store(true)
	if m.started.IsZero() {
		m.started = time.Now()
	}
	m.aloneAt = time.Now()
	ctx, halt := context.WithCancel(context.Background())
	m.halt = halt
	m.gone = make(chan struct{})
	gone := m.gone
	m.mu.Unlock()
	m.askPlatform()
	go func() {
		defer close(gone)
		defer halt()
		m.run(ctx)
	}()
}

// rests ends the beats if Start was not called for long.
func (m *Members) rests() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if time.Since(m.base)-time.Duration(m.touched.Load()) < restAfter {
		return false
	}
	m.awake.Store(false)
	return true
}

// run sends the beats that do not ride.
func (m *Members) run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-m.stop:
			return
		case <-timer.C:
		}
		if m.rests() {
			return
		}
		if beat, due := m.dueAlone(); due {
			got, err := m.send(ctx, beat)
			m.landed(got, err, false)
		}
		m.askPlatform()
		timer.Reset(m.untilAlone())
	}
}

func (m *Members) send(ctx context.Context, beat lua.Beat) (lua.Members, error) {
	ctx, cancel := context.WithTimeout(ctx, m.timeout)
	defer cancel()
	return m.store.Beat(ctx, beat)
}

// due is the store's question whether to take a beat along. It may from half a
// period after the last one, so that nodes with lease calls need no others. After
// a failure the next one goes alone: what ails it should not delay lease calls.
func (m *Members) due() (lua.Beat, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if !m.well || m.closed || now.Before(m.rideAt) {
		return lua.Beat{}, false
	}
	return m.takeOffLocked(now), true
}

func (m *Members) dueAlone() (lua.Beat, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Now()
	if m.closed || now.Before(m.aloneAt) {
		return lua.Beat{}, false
	}
	return m.takeOffLocked(now), true
}

func (m *Members) untilAlone() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return time.Until(m.aloneAt)
}

// takeOffLocked returns the beat to send now, and plans the next: a period from
// now, a tenth more or less, whatever becomes of this one.
func (m *Members) takeOffLocked(now time.Time) lua.Beat {
	wait := m.opts.Period*9/10 + mathrand.N(m.opts.Period/5+1)
	m.rideAt, m.aloneAt = now.Add(wait/2), now.Add(wait)
	m.flying++
	return lua.Beat{ID: m.opts.ID, TTL: m.ttl(), Gen: m.gen}
}

func (m *Members) ttl() time.Duration { return ttlPeriods * m.opts.Period }

// landed takes in what became of a beat.
func (m *Members) landed(got lua.Members, err error, rode bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.flying--
	if m.closed && m.flying == 0 {
		close(m.idle)
	}
	if err == nil && !m.well && m.stats.Failed > 0 {
		m.wellFrom = time.Now()
	}
	m.well = err == nil
	if err != nil {
		m.stats.Failed++
		return
	}
	m.last = time.Now()
	m.stats.Beats++
	m.stats.Live = got.Count
	if rode {
		m.stats.Rode++
	}
	m.counts.add(m.last, got.Count, m.listLocked(got))
	m.publishLocked()
}

// listLocked returns the list that belongs to got; nil if it is not known, as
// when a beat overtook an earlier one. The next beat then brings it.
func (m *Members) listLocked(got lua.Members) []string {
	if got.IDs != nil {
		m.gen, m.list = got.Gen, got.IDs
	}
	if got.Gen != m.gen || got.Count != len(m.list) {
		m.gen, m.list = 0, nil
	}
	return m.list
}

// askPlatform takes in what Options.Nodes says. It runs without the lock.
func (m *Members) askPlatform() {
	if m.opts.Nodes == nil {
		return
	}
	n := m.opts.Nodes()
	if n < 1 {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.platform.add(time.Now(), n, nil)
	m.publishLocked()
}

func (m *Members) publishLocked() {
	counted, list := m.counts.max()
	platform, _ := m.platform.max()
	m.nodes.Store(int64(max(m.opts.Min, counted, platform)))
	m.least.Store(int64(max(m.opts.Min, platform)))
	// Who left owns nothing any more. But right after an outage, or a beat that was
	// lost, those that are not back yet are missing: then the longest list is right.
	if m.list != nil && time.Since(m.wellFrom) > settles {
		list = m.list
	}
	// A list that is not known yet must not take the place of one that is.
	if list != nil {
		m.view.Store(newView(m.opts.ID, list))
	}
}

// Nodes returns N̂, how many nodes share a limit. It costs an atomic load.
func (m *Members) Nodes() int { return int(m.nodes.Load()) }

// ID returns this node's name.
func (m *Members) ID() string { return m.opts.ID }

// Known reports whether the list of nodes is known, as it is from the first
// beat that works, and has all that there are by the static minimum and by the
// platform. Before that Owns believes this node to be alone.
func (m *Members) Known() bool {
	v := m.view.Load()
	return v != nil && int64(v.size()) >= m.least.Load()
}

// Owns reports whether this node is among the owners nodes that own key. On all
// nodes with the same list exactly that many are, or all if there are not more.
func (m *Members) Owns(key string, owners int) bool {
	v := m.view.Load()
	if v == nil {
		return owners > 0
	}
	return v.owns(key, owners)
}

// Stats returns what is known now.
func (m *Members) Stats() Stats {
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.stats
	s.Nodes = m.Nodes()
	switch {
	case !m.last.IsZero():
		s.Age = time.Since(m.last)
	case !m.started.IsZero():
		s.Age = time.Since(m.started)
	}
	return s
}

// Close stops beating and takes this node out, until ctx ends. An error says
// that the others may count it until it lapses. A second Close does nothing and
// returns nil; all but Start goes on with what was known last.
func (m *Members) Close(ctx context.Context) error {
	m.mu.Lock()
	if m.closed || !m.awake.Load() {
		m.closed = true
		m.mu.Unlock()
		return nil
	}
	m.closed = true
	halt, gone := m.halt, m.gone
	if m.flying == 0 {
		close(m.idle)
	}
	m.mu.Unlock()
	close(m.stop)
	defer halt()

	// One still on its way could arrive after the farewell, and undo it.
	m.await(ctx, m.idle)
	_, err := m.send(ctx, lua.Beat{ID: m.opts.ID, TTL: m.ttl(), Leave: true})
	if err != nil {
		err = fmt.Errorf("membership: leave: %w", err)
	}
	halt()
	m.await(ctx, gone)
	return err
}

// await waits for done, but not past ctx, nor longer than a beat may take: one
// that hangs in a client without time-outs must not hold up what comes after.
func (m *Members) await(ctx context.Context, done <-chan struct{}) {
	timer := time.NewTimer(m.timeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-ctx.Done():
	case <-timer.C:
	}
}

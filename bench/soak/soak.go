// Package soak runs a fleet of limiters for as long as one likes, under traffic and
// with faults all the time, and checks that limits hold, nobody waits, nothing leaks
// and all heals.
package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/bench"
	"github.com/hybridlimit/hybridlimit/hybrid"
)

// closeTimeout is how long a node may take to return its leases.
const closeTimeout = 5 * time.Second

// Options are the settings of a Run.
type Options struct {
	// Dial returns a client of one Redis that has not been used yet: each node has
	// one of its own. Run closes them.
	Dial func() (redis.UniversalClient, error)
	// Flush empties that Redis, now and then; nil if that must not be.
	Flush func(context.Context) error
	// For is how long it lasts. Default 1m; range 2s to 24h.
	For time.Duration
	// Every is how often Report is told. Default 10s, less if For is less than a
	// minute; range 100ms to 1h.
	Every time.Duration
	// Nodes is how many there are at a time. Default 4; range 1 to 100.
	Nodes int
	// Keys is how many keys are asked for all the time, besides the hot one. Nodes
	// remember three quarters of them. Default 1000; range 1 to 100000.
	Keys int
	// Limit is every key's. Default 500/s burst 500.
	Limit hybrid.Limit
	// Demand is the requests a second, all nodes together. Default 2000; range 10
	// to 1e6.
	Demand float64
	// Seed is what faults and traffic are drawn from. Default 1.
	Seed uint64
	// RedisTimeout is how long a decision waits for Redis. Default 30ms; range 1ms
	// to 1m.
	RedisTimeout time.Duration
	// Report, if not nil, is told about each interval.
	Report func(Interval)
}

// OptionError says which field of Options is out of range.
type OptionError struct {
	Field string
	Value any
	Want  string // the accepted range
}

func (e *OptionError) Error() string {
	return fmt.Sprintf("soak: Options.%s = %v: want %s", e.Field, e.Value, e.Want)
}

func (o *Options) setDefaults() {
	if o.For == 0 {
		o.For = time.Minute
	}
	if o.Every == 0 {
		o.Every = min(10*time.Second, max(o.For/6, 100*time.Millisecond))
	}
	if o.Nodes == 0 {
		o.Nodes = 4
	}
	if o.Keys == 0 {
		o.Keys = 1000
	}
	if o.Limit == (hybrid.Limit{}) {
		o.Limit = hybrid.PerSecond(500, 500)
	}
	if o.Demand == 0 {
		o.Demand = 2000
	}
	if o.Seed == 0 {
		o.Seed = 1
	}
	if o.RedisTimeout == 0 {
		o.RedisTimeout = 30 * time.Millisecond
	}
}

func (o *Options) check() error {
	var errs []error
	want := func(ok bool, field string, value any, want string) {
		if !ok {
			errs = append(errs, &OptionError{field, value, want})
		}
	}
	between := func(d, low, high time.Duration) bool { return d >= low && d <= high }
	if o.Dial == nil {
		errs = append(errs, errors.New("soak: Options.Dial is nil"))
	}
	want(between(o.For, 2*time.Second, 24*time.Hour), "For", o.For, "2s to 24h")
	want(between(o.Every, 100*time.Millisecond, time.Hour), "Every", o.Every, "100ms to 1h")
	want(o.Nodes >= 1 && o.Nodes <= 100, "Nodes", o.Nodes, "1 to 100")
	want(o.Keys >= 1 && o.Keys <= 100_000, "Keys", o.Keys, "1 to 100000")
	want(o.Demand >= 10 && o.Demand <= 1e6, "Demand", o.Demand, "10 to 1e6 requests per second")
	want(between(o.RedisTimeout, time.Millisecond, time.Minute), "RedisTimeout", o.RedisTimeout, "1ms to 1m")
	want(o.Limit.Rate > 0, "Limit.Rate", o.Limit.Rate, "more than 0 tokens per second")
	want(o.Limit.Burst > 0, "Limit.Burst", o.Limit.Burst, "at least 1 token")
	if o.Limit.Rate > 0 && o.Limit.Burst > 0 {
		errs = append(errs, o.Limit.Validate(), halved(o.Limit).Validate())
	}
	return errors.Join(errs...)
}

// Run runs a fleet of nodes under traffic, and with faults all the time, and
// checks that limits hold, nobody waits, nothing leaks and all heals. When ctx
// ends it stops early and reports what there is. An error is about what kept it
// from running; what the limiter did wrong is in the report.
//
// What it remembers does not grow with the time, but for two figures an interval.
func Run(ctx context.Context, opts Options) (Report, error) {
	opts.setDefaults()
	if err := opts.check(); err != nil {
		return Report{}, err
	}
	before := runtime.NumGoroutine()
	s, err := launch(opts)
	if err == nil {
		err = s.run(ctx)
	}
	s.close(ctx)
	r := s.report()
	r.GoroutinesBefore, r.GoroutinesAfter = before, settledGoroutines(before)
	r.HeapEnd = liveHeap()
	r.judge()
	return r, err
}

// soak is a Soak under way.
type soak struct {
	opts   Options
	prefix string
	admin  redis.UniversalClient
	slots  []atomic.Pointer[soakNode]
	start  time.Time
	end    time.Duration

	meters   []*meter // of keys: the hot one, the one whose limit changes, and others
	changing atomic.Pointer[hybrid.Limit]
	newKeys  atomic.Int64
	maxCost  int64

	renewing sync.Mutex
	covers   int // how often meters started anew
	renewed  time.Duration

	tallies tallies
	watch   watch

	// The end of the run without faults: when it began, and the decisions in it by
	// Redis.
	quietFrom atomic.Int64 // nanoseconds since the start; -1 while there is a fault
	healed    atomic.Int64
	asked     atomic.Int64

	was last // of the reports alone

	mu              sync.Mutex
	faults          map[string]int
	lastFault       string
	heap            []float64 // live bytes at the end of each interval
	peak            int       // goroutines
	late, longest   time.Duration
	slow            slowest // the decision that came closest to what it may take
	closed, unclean int     // nodes
	gone            books   // of these
	owed            int64
	unbalanced      []Unbalanced
}

// soakNode is one node and its line to Redis.
type soakNode struct {
	limiter *hybrid.Limiter
	client  redis.UniversalClient
	cut     *bench.Cut
	name    string
	retired bool // its books are among those that are gone; guarded by soak.mu
}

// The first meters.
const (
	hotKey = iota
	changingKey
	otherKeys
)

// launch starts the nodes. Also with an error there is something to close.
func launch(opts Options) (*soak, error) {
	s := &soak{
		opts: opts, prefix: fmt.Sprintf("hybridlimit:soak:%x:", rand.Uint64()), start: time.Now(),
		slots: make([]atomic.Pointer[soakNode], opts.Nodes), faults: map[string]int{},
		maxCost: min(5, halved(opts.Limit).Burst),
	}
	s.quietFrom.Store(-1)
	s.changing.Store(&opts.Limit)
	add := func(key string, busy bool) {
		s.meters = append(s.meters, newMeter(key, opts.Limit, opts.Nodes, s.maxCost, busy))
	}
	add("soak:hot", true)
	add("soak:changing", true)
	for i := range opts.Keys {
		add(fmt.Sprint("soak:", i), false)
	}
	var err error
	if s.admin, err = opts.Dial(); err != nil {
		return s, err
	}
	for i := range s.slots {
		if err := s.join(i); err != nil {
			return s, err
		}
	}
	return s, nil
}

// join starts a node.
func (s *soak) join(slot int) error {
	rdb, err := s.opts.Dial()
	if err != nil {
		return err
	}
	n := &soakNode{client: rdb, cut: &bench.Cut{}, name: fmt.Sprintf("node %d of %v", slot+1, s.now().Round(time.Millisecond))}
	n.cut.Attach(rdb)
	n.limiter, err = hybrid.New(rdb, s.opts.Limit, hybrid.Options{
		Prefix: s.prefix, RedisTimeout: s.opts.RedisTimeout, MinNodes: s.opts.Nodes,
		MaxKeys: max(1, s.opts.Keys*3/4),
	})
	if err != nil {
		_ = rdb.Close() // the error that counts is New's
		return err
	}
	s.slots[slot].Store(n)
	return nil
}

// run has traffic, faults and reports until the time is over, ctx ends or
// something fails.
func (s *soak) run(ctx context.Context) error {
	ctx, stop := context.WithTimeout(ctx, s.opts.For)
	defer stop()
	s.start = time.Now()
	s.watch.start = s.start
	s.beginStretch()
	var failed error
	var background, traffic sync.WaitGroup
	ended := make(chan struct{})
	background.Go(func() { s.watch.run(ended) })
	background.Go(func() { s.reports(ended) })
	background.Go(func() { s.settles(ended) })
	background.Go(func() {
		if failed = s.script(ctx); failed != nil {
			stop()
		}
	})
	workers := len(s.slots) * int(min(64, max(2, s.opts.Demand/float64(len(s.slots))/100)))
	for i := range workers {
		w := newWorker(s, i, s.opts.Demand/float64(workers))
		traffic.Go(func() { w.run(ctx) })
	}
	traffic.Wait()
	<-ctx.Done()
	s.end = s.now()
	close(ended)
	background.Wait()
	return failed
}

// reports tells about each interval, and about what is left at the end.
func (s *soak) reports(ended <-chan struct{}) {
	t := time.NewTicker(s.opts.Every)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			s.interval()
		case <-ended:
			s.interval()
			return
		}
	}
}

func (s *soak) now() time.Duration { return time.Since(s.start) }

// stood implements clock.
func (s *soak) stood(from, to time.Duration) bool { return s.watch.stood(from, to) }

func (s *soak) countFault(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults[name]++
	s.lastFault = name
}

// beginStretch begins a stretch without faults.
func (s *soak) beginStretch() {
	s.asked.Store(0)
	s.healed.Store(0)
	s.quietFrom.Store(int64(s.now()))
}

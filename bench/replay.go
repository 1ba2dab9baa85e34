// Package bench puts load on limiters and measures what comes of it: the
// replay of an access log, the demo, and later the comparison with others and
// the batch tuner.
package bench

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/sim"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lua"
)

// Request is one request of a trace.
type Request struct {
	At  time.Duration // since the trace began, not before its predecessor
	Key string
}

// Spread says which node a request of the trace goes to.
type Spread string

// The ways to spread requests over nodes.
const (
	RoundRobin Spread = "round-robin" // one after the other, as most load balancers do
	ByHash     Spread = "hash"        // by key: sticky sessions
	Random     Spread = "random"
)

// ReplayOptions are the settings of a replay.
type ReplayOptions struct {
	Limit hybrid.Limit // of every key
	// Nodes is how many limiters share the requests. Range 1 to 1000.
	Nodes  int
	Spread Spread
	// LeasePeriod is Options.LeasePeriod of each node; 0 is its default.
	LeasePeriod time.Duration
	// Redis, if not nil, is replayed against in real time. Otherwise virtual
	// time is used, and a Redis in this process whose clock follows it.
	Redis hybrid.Client
	// RedisTimeout is Options.RedisTimeout of each node, in real time only.
	RedisTimeout time.Duration
	// Progress, if not nil, is told how many requests are done.
	Progress func(done int)
}

// ReplayReport is what became of a trace. Its JSON names are part of the
// command line's interface.
type ReplayReport struct {
	Requests int `json:"requests"`
	Admitted int `json:"admitted"`
	Denied   int `json:"denied"`
	// IdealAdmitted is what one exact bucket per key would have admitted, or
	// whatever the algorithm has for a bucket.
	IdealAdmitted int   `json:"ideal_admitted"`
	StoreCalls    int64 `json:"store_calls"`
	// DecisionsPerCall is Requests / StoreCalls.
	DecisionsPerCall float64 `json:"decisions_per_call"`
	// MaxLevel is the highest level that any key's admissions reached, or the
	// highest count by the limit's algorithm: at most Burst, if the limit held.
	MaxLevel float64 `json:"max_level"`
	Burst    int64   `json:"burst"`
	// Skipped is how many lines of the log were no request with a key.
	Skipped int `json:"skipped"`

	from time.Duration // when the trace began, by the store's clock
}

func (o *ReplayOptions) validate() error {
	var errs []error
	if err := o.Limit.Validate(); err != nil {
		errs = append(errs, err)
	}
	if o.Nodes < 1 || o.Nodes > 1000 {
		errs = append(errs, fmt.Errorf("bench: ReplayOptions.Nodes = %d: want 1 to 1000", o.Nodes))
	}
	switch o.Spread {
	case RoundRobin, ByHash, Random:
	default:
		errs = append(errs, fmt.Errorf("bench: ReplayOptions.Spread = %q: want %s, %s or %s", o.Spread, RoundRobin, ByHash, Random))
	}
	return errors.Join(errs...)
}

// Replay runs trace through the real nodes and the real script.
func Replay(ctx context.Context, trace []Request, opts ReplayOptions) (ReplayReport, error) {
	if err := opts.validate(); err != nil {
		return ReplayReport{}, err
	}
	run := replayVirtual
	if opts.Redis != nil {
		run = replayReal
	}
	report, err := run(ctx, trace, opts)
	if err != nil {
		return ReplayReport{}, err
	}
	report.Requests = len(trace)
	report.Denied = report.Requests - report.Admitted
	report.Burst = opts.Limit.Burst
	report.IdealAdmitted = ideal(trace, opts.Limit, report.from)
	if report.StoreCalls > 0 {
		report.DecisionsPerCall = float64(report.Requests) / float64(report.StoreCalls)
	}
	return report, nil
}

// ideal is what one exact meter per key admits of the trace, which begins at from.
func ideal(trace []Request, limit hybrid.Limit, from time.Duration) (admitted int) {
	buckets := meters{limit: limit}
	for _, r := range trace {
		if buckets.of(r.Key).Allow(from+r.At, 1) {
			admitted++
		}
	}
	return admitted
}

// meters keeps a Meter for each key of a valid limit.
type meters struct {
	limit lease.Limit
	keys  map[string]lease.Meter
}

func (l *meters) of(key string) lease.Meter {
	v := l.keys[key]
	if v == nil {
		if l.keys == nil {
			l.keys = map[string]lease.Meter{}
		}
		v, _ = lease.NewMeter(l.limit) // the limit was validated
		l.keys[key] = v
	}
	return v
}

// peak is the highest level of any key.
func (l *meters) peak() (peak float64) {
	for _, v := range l.keys {
		peak = max(peak, v.Peak())
	}
	return peak
}

// picker returns the node for each request in turn.
func picker(opts ReplayOptions) func(key string) int {
	next := -1
	random := rand.New(rand.NewPCG(1, 2)) // the same run each time
	return func(key string) int {
		switch opts.Spread {
		case ByHash:
			h := fnv.New64a()
			h.Write([]byte(key))
			return int(h.Sum64() % uint64(opts.Nodes))
		case Random:
			return random.IntN(opts.Nodes)
		default:
			next = (next + 1) % opts.Nodes
			return next
		}
	}
}

func replayVirtual(ctx context.Context, trace []Request, opts ReplayOptions) (report ReplayReport, err error) {
	server, err := miniredis.Run()
	if err != nil {
		return report, fmt.Errorf("bench: embedded redis: %w", err)
	}
	defer server.Close()
	server.ClockTTL(true)
	rdb := redis.NewClient(&redis.Options{Addr: server.Addr(), MaxRetries: -1, ContextTimeoutEnabled: true})
	defer rdb.Close()

	// Any instant will do for the server's clock; one that every epoch length
	// divides would hide mistakes at the edges.
	base := time.Date(2026, 1, 2, 3, 4, 5, 678_901_000, time.UTC)
	store := lua.NewStore(rdb, lua.Options{})
	world, err := sim.NewWorld(opts.Nodes, store, func(now time.Duration) { server.SetTime(base.Add(now)) },
		opts.Limit, lease.Options{LeasePeriod: opts.LeasePeriod, Timeout: time.Minute})
	if err != nil {
		return report, err
	}
	pick, kept := picker(opts), meters{limit: opts.Limit}
	report.from = time.Duration(base.UnixNano())
	for i, r := range trace {
		if ctx.Err() != nil {
			return report, ctx.Err()
		}
		world.Advance(r.At)
		d, err := world.Take(pick(r.Key), r.Key, 1)
		if err != nil {
			return report, fmt.Errorf("bench: request %d, key %.64q: %w", i, r.Key, err)
		}
		if d.Source == lease.SourcePolicy {
			return report, fmt.Errorf("bench: request %d, key %.64q: the embedded redis gave no answer", i, r.Key)
		}
		if d.Allowed {
			report.Admitted++
			kept.of(r.Key).Add(report.from+r.At, 1)
		}
		if opts.Progress != nil {
			opts.Progress(i + 1)
		}
	}
	// With the leases given back, as at a shutdown, the calls are all counted.
	if err := world.Close(); err != nil {
		return report, err
	}
	report.StoreCalls, _, _ = world.Calls()
	report.MaxLevel = kept.peak()
	return report, nil
}

func replayReal(ctx context.Context, trace []Request, opts ReplayOptions) (report ReplayReport, err error) {
	// Buckets of this run alone; they expire by themselves.
	prefix := fmt.Sprintf("hybridlimit:replay:%x:", rand.Uint64())
	nodes := make([]*hybrid.Limiter, opts.Nodes)
	for i := range nodes {
		nodes[i], err = hybrid.New(opts.Redis, opts.Limit, hybrid.Options{
			Prefix: prefix, LeasePeriod: opts.LeasePeriod, RedisTimeout: opts.RedisTimeout,
		})
		if err != nil {
			return report, err
		}
	}
	var (
		mu       sync.Mutex
		kept     = map[string][]lease.Admission{}
		firstErr error
		failed   int
		wg       sync.WaitGroup
		slots    = make(chan struct{}, 1024)
		pick     = picker(opts)
		start    = time.Now()
	)
	for i, r := range trace {
		if wait := r.At - time.Since(start); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			break
		}
		node := nodes[pick(r.Key)]
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			a := lease.Admission{Start: time.Since(start), N: 1}
			d, err := node.Allow(ctx, r.Key)
			a.End = time.Since(start)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err != nil:
				firstErr = errors.Join(firstErr, err)
			case d.Source == hybrid.SourcePolicy:
				failed++
			case d.Allowed:
				report.Admitted++
				kept[r.Key] = append(kept[r.Key], a)
			}
		})
		if opts.Progress != nil {
			opts.Progress(i + 1)
		}
	}
	wg.Wait()
	for _, n := range nodes {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		err = errors.Join(err, n.Close(closing))
		cancel()
		report.StoreCalls += n.Stats().Calls
	}
	report.from = time.Duration(start.UnixNano())
	for _, trace := range kept {
		if opts.Limit.Algorithm.Windowed() {
			for i := range trace {
				trace[i].Start += report.from
				trace[i].End += report.from
			}
			report.MaxLevel = max(report.MaxLevel, float64(lease.PeakWindow(opts.Limit, trace)))
		} else {
			report.MaxLevel = max(report.MaxLevel, lease.PeakLevel(opts.Limit, trace))
		}
	}
	switch {
	case ctx.Err() != nil:
		return report, ctx.Err()
	case firstErr != nil:
		return report, firstErr
	case failed > 0:
		return report, fmt.Errorf("bench: redis gave no answer in time to %d of %d requests: raise --redis-timeout", failed, len(trace))
	}
	return report, err
}

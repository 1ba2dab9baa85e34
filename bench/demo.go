package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/lease"
)

// DemoOptions are the settings of a demo.
type DemoOptions struct {
	Redis hybrid.Client
	// For is how long the traffic lasts. Default 10s; range 100ms to 1h.
	For time.Duration
	// Limit is every key's. Default 500/s burst 500.
	Limit hybrid.Limit
	// Progress, if not nil, is told about ten times a second how far it is.
	Progress func(elapsed time.Duration)
}

// demoTraffic is what each node is asked, in requests per second: skewed, as
// load balancers do it, and twice what the limit of the hot key allows.
var demoTraffic = []float64{900, 300, 150}

// demoKeys share each node's traffic by these weights: one hot, some not.
var demoKeys = []struct {
	key    string
	weight float64
}{{"tenant:hot", 0.75}, {"tenant:warm", 0.2}, {"tenant:cool", 0.05}}

// DemoReport is what a demo measured.
type DemoReport struct {
	Seconds float64    `json:"seconds"`
	Limit   string     `json:"limit"`
	Nodes   []DemoNode `json:"nodes"`
	Total   DemoNode   `json:"total"`
	// IdealAdmitted is what one exact bucket per key would have admitted of
	// the same requests.
	IdealAdmitted int `json:"ideal_admitted"`
	// MaxLevel is the highest level any key's admissions reached, all nodes
	// together: at most Burst, if the limit held.
	MaxLevel float64 `json:"max_level"`
	Burst    int64   `json:"burst"`
}

// DemoNode is one node's part, or the sum.
type DemoNode struct {
	Node             string  `json:"node"`
	Decisions        int     `json:"decisions"`
	Admitted         int     `json:"admitted"`
	Denied           int     `json:"denied"`
	StoreCalls       int64   `json:"store_calls"`
	DecisionsPerCall float64 `json:"decisions_per_call"`
	// P50 and P99 are how long a decision took, in microseconds.
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`

	took []time.Duration
}

func (n *DemoNode) finish() {
	n.Denied = n.Decisions - n.Admitted
	if n.StoreCalls > 0 {
		n.DecisionsPerCall = float64(n.Decisions) / float64(n.StoreCalls)
	}
	slices.Sort(n.took)
	if len(n.took) > 0 {
		us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
		n.P50, n.P99 = us(n.took[len(n.took)/2]), us(n.took[len(n.took)*99/100])
	}
}

// decided is one decision as it is remembered for the report.
type decided struct {
	lease.Admission
	key     int
	allowed bool
}

// Demo runs three nodes under skewed traffic and reports what they admitted
// against one exact limiter, and what that cost in Redis calls.
func Demo(ctx context.Context, opts DemoOptions) (report DemoReport, err error) {
	if opts.For == 0 {
		opts.For = 10 * time.Second
	}
	if opts.Limit == (hybrid.Limit{}) {
		opts.Limit = hybrid.PerSecond(500, 500)
	}
	if opts.For < 100*time.Millisecond || opts.For > time.Hour {
		return report, fmt.Errorf("bench: DemoOptions.For = %v: want 100ms to 1h", opts.For)
	}
	if err := opts.Limit.Validate(); err != nil {
		return report, err
	}

	prefix := fmt.Sprintf("hybridlimit:demo:%x:", rand.Uint64())
	nodes := make([]*hybrid.Limiter, len(demoTraffic))
	for i := range nodes {
		// The wait is generous: the embedded Redis runs in this process and
		// takes a quarter of a millisecond per script.
		nodes[i], err = hybrid.New(opts.Redis, opts.Limit, hybrid.Options{Prefix: prefix, RedisTimeout: time.Second})
		if err != nil {
			return report, err
		}
	}
	var (
		start = time.Now()
		logs  = make([][]decided, len(nodes))
		errs  = make([]error, len(nodes))
		wg    sync.WaitGroup
	)
	for i, n := range nodes {
		wg.Go(func() { logs[i], errs[i] = drive(ctx, n, demoTraffic[i], start, opts.For) })
	}
	stop := make(chan struct{})
	var ticking sync.WaitGroup
	if opts.Progress != nil {
		ticking.Go(func() { tickProgress(start, stop, opts.Progress) })
	}
	wg.Wait()
	close(stop)
	ticking.Wait()
	report.Seconds = time.Since(start).Seconds()

	for i, n := range nodes {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		errs = append(errs, n.Close(closing))
		cancel()
		node := DemoNode{Node: fmt.Sprintf("node %d", i+1), StoreCalls: n.Stats().Calls}
		report.Nodes = append(report.Nodes, node)
	}
	report.summarize(opts.Limit, logs)
	return report, errors.Join(errs...)
}

// drive asks node for rate decisions a second, at random instants, until the
// time is over.
func drive(ctx context.Context, node *hybrid.Limiter, rate float64, start time.Time, long time.Duration) ([]decided, error) {
	log := make([]decided, 0, int(rate*long.Seconds()*1.1)+16)
	next := time.Duration(0)
	for {
		next += time.Duration(rand.ExpFloat64() / rate * float64(time.Second))
		if next >= long {
			return log, nil
		}
		if wait := next - time.Since(start); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return log, nil // stopped early: report what there is
			}
		}
		d := decided{key: pickKey(rand.Float64())}
		d.N = 1
		d.Start = time.Since(start)
		got, err := node.Allow(ctx, demoKeys[d.key].key)
		d.End = time.Since(start)
		if ctx.Err() != nil {
			return log, nil //nolint:nilerr // stopped early: report what there is
		}
		if err != nil {
			return log, err
		}
		if got.Source == hybrid.SourcePolicy {
			return log, errors.New("bench: redis gave no answer within a second")
		}
		d.allowed = got.Allowed
		log = append(log, d)
	}
}

func pickKey(x float64) int {
	for i, k := range demoKeys {
		if x -= k.weight; x < 0 {
			return i
		}
	}
	return 0
}

func tickProgress(start time.Time, stop <-chan struct{}, tell func(time.Duration)) {
	t := time.NewTicker(100 * time.Millisecond)
	defer t.Stop()
	for {
		select {
		case <-stop:
			return
		case <-t.C:
			tell(time.Since(start))
		}
	}
}

// summarize judges what was decided.
func (r *DemoReport) summarize(limit hybrid.Limit, logs [][]decided) {
	r.Limit, r.Burst = limit.String(), limit.Burst
	r.Total.Node = "all"
	admissions := make([][]lease.Admission, len(demoKeys))
	var all []decided
	for i, log := range logs {
		n := &r.Nodes[i]
		for _, d := range log {
			n.Decisions++
			n.took = append(n.took, d.End-d.Start)
			if d.allowed {
				n.Admitted++
				admissions[d.key] = append(admissions[d.key], d.Admission)
			}
		}
		all = append(all, log...)
		r.Total.Decisions += n.Decisions
		r.Total.Admitted += n.Admitted
		r.Total.StoreCalls += n.StoreCalls
		r.Total.took = append(r.Total.took, n.took...)
		n.finish()
	}
	r.Total.finish()

	slices.SortFunc(all, func(a, b decided) int { return int(a.Start - b.Start) })
	buckets := levels{limit: limit}
	for _, d := range all {
		if buckets.of(demoKeys[d.key].key).Allow(d.Start, 1) {
			r.IdealAdmitted++
		}
	}
	for _, trace := range admissions {
		r.MaxLevel = max(r.MaxLevel, lease.PeakLevel(limit, trace))
	}
}

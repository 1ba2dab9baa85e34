package bench

import (
	"context"
	"errors"
	"fmt"
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
	n.P50, n.P99, _ = quantiles(n.took)
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
	fleet, err := newFleet(opts.Limit, func(_ int, h *hybrid.Options) hybrid.Client {
		// The wait is generous: the embedded Redis runs in this process and
		// takes a quarter of a millisecond per script.
		h.RedisTimeout = time.Second
		return opts.Redis
	})
	if err != nil {
		return report, err
	}
	logs, err := fleet.run(ctx, traffic{long: opts.For, progress: opts.Progress}, nil)
	report.Seconds = time.Since(fleet.start).Seconds()
	err = errors.Join(err, fleet.close(ctx))
	for i, n := range fleet.nodes {
		node := DemoNode{Node: fmt.Sprintf("node %d", i+1), StoreCalls: n.Stats().Calls}
		report.Nodes = append(report.Nodes, node)
	}
	report.summarize(opts.Limit, logs)
	return report, err
}

// summarize judges what was decided.
func (r *DemoReport) summarize(limit hybrid.Limit, logs [][]decided) {
	r.Limit, r.Burst = limit.String(), limit.Burst
	r.Total.Node = "all"
	for i, log := range logs {
		n := &r.Nodes[i]
		for _, d := range log {
			n.Decisions++
			n.took = append(n.took, d.End-d.Start)
			if d.allowed {
				n.Admitted++
			}
		}
		r.Total.Decisions += n.Decisions
		r.Total.Admitted += n.Admitted
		r.Total.StoreCalls += n.StoreCalls
		r.Total.took = append(r.Total.took, n.took...)
		n.finish()
	}
	r.Total.finish()

	p := newPhases(limit, demoKeyNames(), logs)
	buckets := meters{limit: limit}
	for _, d := range p.all {
		if buckets.of(p.keys[d.key]).Allow(d.Start, d.N) {
			r.IdealAdmitted++
		}
	}
	for _, trace := range p.admissions {
		r.MaxLevel = max(r.MaxLevel, lease.PeakLevel(limit, trace))
	}
}

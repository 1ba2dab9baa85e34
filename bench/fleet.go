package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/lease"
)

// closeTimeout is how long the nodes of a demo may take to return their leases.
const closeTimeout = 5 * time.Second

// demoTraffic is what each node is asked, in requests per second: skewed, as
// load balancers do it, and twice what the limit of the hot key allows.
var demoTraffic = [Nodes]float64{900, 300, 150}

// demoKeys share each node's traffic by these weights: one hot, some not.
var demoKeys = []struct {
	key    string
	weight float64
}{{"tenant:hot", 0.75}, {"tenant:warm", 0.2}, {"tenant:cool", 0.05}}

func demoKeyNames() (names []string) {
	for _, k := range demoKeys {
		names = append(names, k.key)
	}
	return names
}

// decided is one decision as it is remembered for the report.
type decided struct {
	lease.Admission
	key     int
	allowed bool
	source  hybrid.Source
}

// fleet is the nodes of a demo.
type fleet struct {
	nodes []*hybrid.Limiter
	start time.Time
}

// newFleet returns Nodes nodes with buckets of their own. client returns the
// client of each, and may change its options.
func newFleet(limit hybrid.Limit, client func(i int, opts *hybrid.Options) hybrid.Client) (*fleet, error) {
	f := &fleet{}
	prefix := fmt.Sprintf("hybridlimit:demo:%x:", rand.Uint64())
	for i := range Nodes {
		opts := hybrid.Options{Prefix: prefix}
		rdb := client(i, &opts)
		node, err := hybrid.New(rdb, limit, opts)
		if err != nil {
			return nil, err
		}
		f.nodes = append(f.nodes, node)
	}
	f.start = time.Now()
	return f, nil
}

// traffic is what a fleet is asked.
type traffic struct {
	long     time.Duration
	degrades bool // decisions without Redis are no error
	progress func(elapsed time.Duration)
}

// run drives all nodes, and meanwhile script, until the time is over, ctx ends or
// something fails. It returns each node's decisions.
func (f *fleet) run(ctx context.Context, t traffic, script func(context.Context, *fleet) error) (logs [][]decided, err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	logs = make([][]decided, len(f.nodes))
	errs := make([]error, len(f.nodes)+1)
	var wg sync.WaitGroup
	for i, n := range f.nodes {
		d := driver{node: n, rate: demoTraffic[i], start: f.start, traffic: t}
		wg.Go(func() { logs[i], errs[i] = d.drive(ctx) })
	}
	if script != nil {
		wg.Go(func() {
			if errs[len(f.nodes)] = script(ctx, f); errs[len(f.nodes)] != nil {
				stop()
			}
		})
	}
	ended := make(chan struct{})
	var ticking sync.WaitGroup
	if t.progress != nil {
		ticking.Go(func() { tickProgress(f.start, ended, t.progress) })
	}
	wg.Wait()
	close(ended)
	ticking.Wait()
	return logs, errors.Join(errs...)
}

// close closes all nodes, also when ctx has ended.
func (f *fleet) close(ctx context.Context) error {
	var errs []error
	for _, n := range f.nodes {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		errs = append(errs, n.Close(closing))
		cancel()
	}
	return errors.Join(errs...)
}

// totals are the counters of all nodes about Redis failing.
type totals struct {
	nodes    int           // N̂, the least
	shares   float64       // the sum of 1/N̂
	degraded time.Duration // the longest
	// The sums: see fallback.Stats.
	trips, probes, admitted, charged, forgiven, owed int64
}

func (f *fleet) stats() (t totals) {
	for i, n := range f.nodes {
		s := n.Stats().Fallback
		if i == 0 || s.Nodes < t.nodes {
			t.nodes = s.Nodes
		}
		t.shares += 1 / float64(s.Nodes)
		t.degraded = max(t.degraded, s.DegradedFor)
		t.trips += s.Trips
		t.probes += s.Probes
		t.admitted += s.Admitted
		t.charged += s.Charged
		t.forgiven += s.Forgiven
		t.owed += s.Owed + s.Lost
	}
	return t
}

// driver asks one node.
type driver struct {
	traffic
	node  *hybrid.Limiter
	rate  float64 // requests per second
	start time.Time
}

// drive asks at random instants until the time is over.
func (d *driver) drive(ctx context.Context) ([]decided, error) {
	log := make([]decided, 0, int(d.rate*d.long.Seconds()*1.1)+16)
	next := time.Duration(0)
	for {
		next += time.Duration(rand.ExpFloat64() / d.rate * float64(time.Second))
		if next >= d.long {
			return log, nil
		}
		if wait := next - time.Since(d.start); wait > 0 {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
				return log, nil // stopped early: report what there is
			}
		}
		got, err := d.ask(ctx, pickKey(rand.Float64()))
		if ctx.Err() != nil {
			return log, nil //nolint:nilerr // stopped early: report what there is
		}
		if err != nil {
			return log, err
		}
		log = append(log, got)
	}
}

func (d *driver) ask(ctx context.Context, key int) (decided, error) {
	one := decided{key: key}
	one.N = 1
	one.Start = time.Since(d.start)
	got, err := d.node.Allow(ctx, demoKeys[key].key)
	one.End = time.Since(d.start)
	one.allowed, one.source = got.Allowed, got.Source
	if err == nil && !d.degrades && (got.Source == hybrid.SourcePolicy || got.Source == hybrid.SourceLocal) {
		err = errors.New("bench: redis gave no answer within a second")
	}
	return one, err
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

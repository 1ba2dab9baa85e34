package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// Nodes is how many nodes a demo runs.
const Nodes = 3

// OutageOptions are the settings of an Outage.
type OutageOptions struct {
	// Clients are Nodes clients of one Redis that have not been used yet.
	Clients []redis.UniversalClient
	// Kill takes that Redis away from them, and Restart brings it back.
	Kill, Restart func() error
	// For is how long the traffic lasts, in three equal phases: healthy, outage
	// and recovered. Default 15s; range 3s to 1h.
	For time.Duration
	// Limit is every key's. Default 500/s burst 500.
	Limit hybrid.Limit
	// RedisTimeout is how long a decision waits for Redis. Default 30ms; range 1ms
	// to 1m.
	RedisTimeout time.Duration
	// Progress, if not nil, is told about ten times a second how far it is.
	Progress func(elapsed time.Duration)
}

// OutageReport is what was decided before, during and after an outage.
//
// # Bounds
//
// The level of a key is that of a leaky bucket that drains at the limit's rate
// and is fed by every admission since the start; Phase.Bound is what it cannot
// have reached. With N nodes that believe to be N̂, and W the sum of their shares
// 1/N̂ or 1, whichever is more (shares by demand are estimates, meant to add up to
// no more; with steady traffic they do):
//
//	healthy    burst + early
//	outage     max(burst, N) + early + unseen + (W-1)·(burst + rate·t)
//	recovered  that + debts + late + N + max(0, burst - rate·t) + burst·trips
//
// early is what shares admitted before the outage, because some call was not
// answered in time: usually 0. A call that the store admitted and a share admits
// again adds at most what the share admits.
//
// unseen is what Redis granted to others since it last answered a node, at most
// of any node: each share starts with its part of the balance that its node
// heard of, so together they have that many tokens more than the bucket had. It
// is W·(1 + that), the 1 for rounding, and at most W·burst, which is what they
// have if all believe the bucket to be full; so much it is also taken to be if
// some call failed before the outage, for then the calls are not all a node's
// own. max(burst, N) is there because no share is less than one request.
//
// Together the shares refill at W·rate, t being the length of the outage.
//
// debts is what shares had admitted and Redis was not charged with when it came
// back: until it is, its bucket has these tokens too. It is at most W·burst, for
// no bucket and no shares have more. late is what shares admitted after that, for
// a node asks Redis for all of its calls only a second after it noticed. N is for
// shares that are cut to whole tokens. A Redis that came back without its data has
// full buckets at most; burst - rate·t is what they would have lacked. trips counts
// breakers that opened once more after that.
type OutageReport struct {
	Seconds float64 `json:"seconds"`
	Limit   string  `json:"limit"`
	Burst   int64   `json:"burst"`
	Nodes   int     `json:"nodes"`
	// RedisTimeout is how long a decision waited for Redis at most, in milliseconds.
	RedisTimeout float64 `json:"redis_timeout_ms"`
	// NodesBelieved is the least number of nodes that any node believed in when
	// Redis went away.
	NodesBelieved int `json:"nodes_believed"`
	// Phases are those that were begun before the run was stopped.
	Phases []Phase `json:"phases"`
	// Held is whether every level kept to its bound.
	Held bool `json:"held"`

	// DownAt and UpAt are when Redis was taken away and brought back, in seconds
	// since the start; 0 if it was not.
	DownAt float64 `json:"down_at"`
	UpAt   float64 `json:"up_at"`
	// FirstLocal is how long after DownAt the first decision by a share was there,
	// and FirstStore after UpAt the first by Redis, in milliseconds; -1 for none.
	FirstLocal float64 `json:"first_local_ms"`
	FirstStore float64 `json:"first_store_ms"`
	// Trips counts breakers that opened, on all nodes. DegradedSeconds is how long
	// a node was without Redis, at most.
	Trips           int64   `json:"trips"`
	DegradedSeconds float64 `json:"degraded_seconds"`
	// AdmittedInOutage is the tokens that shares admitted. Redis was charged with
	// DebtCharged of them afterwards; DebtForgiven its buckets would not have kept,
	// and DebtOwed it could not be told.
	AdmittedInOutage int64 `json:"admitted_in_outage"`
	DebtCharged      int64 `json:"debt_charged"`
	DebtForgiven     int64 `json:"debt_forgiven"`
	DebtOwed         int64 `json:"debt_owed"`
	// Unseen, Debts and Late are those of the bounds, of the last phase's key.
	Unseen float64 `json:"unseen"`
	Debts  float64 `json:"debts"`
	Late   int64   `json:"late"`
}

func (o *OutageOptions) check() error {
	if o.For == 0 {
		o.For = 15 * time.Second
	}
	if o.Limit == (hybrid.Limit{}) {
		o.Limit = hybrid.PerSecond(500, 500)
	}
	if o.RedisTimeout == 0 {
		o.RedisTimeout = 30 * time.Millisecond
	}
	var errs []error
	if o.For < 3*time.Second || o.For > time.Hour {
		errs = append(errs, fmt.Errorf("bench: OutageOptions.For = %v: want 3s to 1h", o.For))
	}
	if len(o.Clients) != Nodes {
		errs = append(errs, fmt.Errorf("bench: OutageOptions.Clients has %d: want %d", len(o.Clients), Nodes))
	}
	if o.Kill == nil || o.Restart == nil {
		errs = append(errs, errors.New("bench: OutageOptions.Kill or Restart is nil"))
	}
	return errors.Join(append(errs, o.Limit.Validate())...)
}

// Outage runs three nodes under skewed traffic, takes their Redis away for the
// middle third of the time, and reports what they admitted in each phase. When
// ctx ends it stops and reports what there is.
func Outage(ctx context.Context, opts OutageOptions) (OutageReport, error) {
	if err := opts.check(); err != nil {
		return OutageReport{}, err
	}
	o := &outage{opts: opts}
	fleet, err := o.launch()
	if err != nil {
		return OutageReport{}, err
	}
	logs, err := fleet.run(ctx, traffic{long: opts.For, degrades: true, progress: opts.Progress}, o.script)
	o.end = time.Since(fleet.start)
	o.atEnd = fleet.stats()
	if o.cut && !o.healed { // stopped early: what is left goes back to Redis all the same
		err = errors.Join(err, opts.Restart())
	}
	// An error here is about leases and debts that Redis could not be told, which
	// it forgets or the report has: the demo has not failed.
	_ = fleet.close(ctx)
	return o.report(fleet, logs), err
}

// outage is an Outage under way.
type outage struct {
	opts OutageOptions
	taps []*tap

	cut, healed   bool
	down, up, end time.Duration // since the start
	atDown, atUp  totals
	atEnd         totals
}

func (o *outage) launch() (*fleet, error) {
	fleet, err := newFleet(o.opts.Limit, func(i int, h *hybrid.Options) hybrid.Client {
		h.RedisTimeout = o.opts.RedisTimeout
		t := &tap{keyOf: demoKeyOf}
		o.taps = append(o.taps, t)
		o.opts.Clients[i].AddHook(t)
		return o.opts.Clients[i]
	})
	if err != nil {
		return nil, err
	}
	for _, t := range o.taps {
		t.start = fleet.start
	}
	return fleet, nil
}

// demoKeyOf returns which of demoKeys a key in Redis is about.
func demoKeyOf(redisKey string) (key int, ok bool) {
	for k := range demoKeys {
		if strings.HasSuffix(redisKey, "{"+demoKeys[k].key+"}") {
			return k, true
		}
	}
	return 0, false
}

// script is what happens to Redis while the traffic lasts.
func (o *outage) script(ctx context.Context, f *fleet) error {
	if !SleepUntil(ctx, f.start.Add(o.opts.For/3)) {
		return nil
	}
	o.atDown = f.stats()
	o.cut, o.down = true, time.Since(f.start)
	if err := o.opts.Kill(); err != nil {
		return fmt.Errorf("bench: take Redis away: %w", err)
	}
	// From now on, so that it is an outage of that length also where the processors
	// have too much to do.
	if !SleepUntil(ctx, time.Now().Add(o.opts.For/3)) {
		return nil
	}
	o.atUp = f.stats()
	o.healed, o.up = true, time.Since(f.start)
	if err := o.opts.Restart(); err != nil {
		return fmt.Errorf("bench: bring Redis back: %w", err)
	}
	return nil
}

// SleepUntil reports whether it slept until at: false if ctx ended before.
func SleepUntil(ctx context.Context, at time.Time) bool {
	timer := time.NewTimer(time.Until(at))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// report judges what was decided.
func (o *outage) report(f *fleet, logs [][]decided) OutageReport {
	final := f.stats()
	r := OutageReport{
		Seconds: o.end.Seconds(), Limit: o.opts.Limit.String(), Burst: o.opts.Limit.Burst, Nodes: Nodes,
		RedisTimeout:  float64(o.opts.RedisTimeout.Microseconds()) / 1e3,
		NodesBelieved: o.atEnd.nodes, DownAt: o.down.Seconds(), UpAt: o.up.Seconds(), FirstLocal: -1, FirstStore: -1,
		Trips: final.trips, DegradedSeconds: final.degraded.Seconds(), AdmittedInOutage: final.admitted,
		DebtCharged: final.charged, DebtForgiven: final.forgiven, DebtOwed: final.owed,
	}
	if o.cut {
		r.NodesBelieved = o.atDown.nodes
	}
	r.Phases = o.phases()
	p := newPhases(o.opts.Limit, demoKeyNames(), logs)
	p.account(r.Phases)
	r.Held = true
	for i := range r.Phases {
		ph := &r.Phases[i]
		p.judge(ph, func(key int) float64 { return o.terms(p, key).bound(i) })
		r.Held = r.Held && ph.MaxLevel <= ph.Bound
	}
	if o.cut {
		r.FirstLocal = firstAfter(p.all, o.down, hybrid.SourceLocal)
		t := o.terms(p, slices.Index(p.keys, r.Phases[len(r.Phases)-1].Key))
		r.Unseen, r.Debts, r.Late = t.unseenTokens(), t.debts(), t.late
	}
	if o.healed {
		r.FirstStore = firstAfter(p.all, o.up, hybrid.SourceStore)
	}
	return r
}

// phases returns those that were begun.
func (o *outage) phases() []Phase {
	list := []Phase{{Phase: "healthy", to: o.end}}
	next := func(name string, from time.Duration) {
		list[len(list)-1].to = from
		list = append(list, Phase{Phase: name, from: from, to: o.end})
	}
	if o.cut {
		next("outage", o.down)
	}
	if o.healed {
		next("recovered", o.up)
	}
	return list
}

// terms returns what the bounds of a key are made of.
func (o *outage) terms(p *phases, key int) terms {
	t := terms{limit: o.opts.Limit, shares: o.atDown.shares, early: p.local(key, o.end)}
	if !o.cut {
		return t
	}
	t.early, t.failed, t.lasted = p.local(key, o.down), o.atDown.probes > 0, o.end-o.down
	if o.healed {
		t.lasted = o.up - o.down
		t.owed, t.late = o.atUp.owed, p.local(key, o.end)-p.local(key, o.up)
		t.trips = o.atEnd.trips - o.atUp.trips
	}
	t.unseen = unseen(o.taps, key, o.down+t.lasted)
	return t
}

// terms are what the bounds of one key are made of: see OutageReport.
type terms struct {
	limit  hybrid.Limit
	shares float64 // the sum of 1/N̂ over all nodes
	early  int64   // tokens
	failed bool    // calls did, before the outage
	unseen int64   // tokens
	lasted time.Duration
	owed   int64 // tokens, of all keys
	late   int64 // tokens
	trips  int64 // after Redis was back
}

// bound returns what the level cannot pass in a phase: 0 is healthy, 1 outage,
// 2 recovered.
func (t terms) bound(phase int) float64 {
	burst, refilled := float64(t.limit.Burst), t.limit.Rate*t.lasted.Seconds()
	healthy := burst + float64(t.early)
	if phase == 0 {
		return healthy
	}
	outage := max(healthy, float64(Nodes+t.early)) + t.unseenTokens() + (t.weight()-1)*(burst+refilled)
	if phase == 1 {
		return outage
	}
	return outage + t.debts() + float64(t.late+Nodes) + max(0, burst-refilled) + burst*float64(t.trips)
}

func (t terms) weight() float64 { return max(1, t.shares) }

func (t terms) unseenTokens() float64 {
	most := t.weight() * float64(t.limit.Burst)
	if t.failed {
		return most
	}
	return min(most, t.weight()*float64(1+t.unseen))
}

func (t terms) debts() float64 { return min(t.weight()*float64(t.limit.Burst), float64(t.owed)) }

// firstAfter returns how long after an instant the first decision by source was
// there, in milliseconds; -1 for none.
func firstAfter(all []decided, at time.Duration, source hybrid.Source) float64 {
	first := time.Duration(-1)
	for _, d := range all {
		if d.source == source && d.End > at && (first < 0 || d.End < first) {
			first = d.End
		}
	}
	if first < 0 {
		return -1
	}
	return float64((first - at).Microseconds()) / 1e3
}

package sim_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"pgregory.net/rapid"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/lease"
)

// ms is a time in a schedule, in milliseconds, that is easy to read in JSON.
type ms float64

func (m ms) d() time.Duration { return time.Duration(float64(m) * 1e6) }

// schedule is one run: what there is, what is asked for and what goes wrong. Equal
// schedules have equal runs.
type schedule struct {
	Seed    uint64 // of arrivals and delays
	Rate    float64
	Burst   int64
	Nodes   int
	Keys    int
	Period  ms
	Timeout ms
	RTT     ms // of the network, half of it at least
	Backoff ms
	Ramp    ms
	Share   lease.Share
	Split   fallback.Split
	Unknown fallback.Unknown
	Policy  lease.Policy
	Bare    bool    `json:",omitempty"` // no fallback: the policy decides without the store
	Owners  bool    // nodes know each other by name
	Lag     ms      // for which a node that is gone is counted on
	Leaving float64 // part of the requests that leave after at most a timeout
	For     ms      // of faults and traffic; then everything heals
	Limit2  limit2  // what the limit is changed to, if it is, and the period by a roll-out
	Clock   []float64
	Traffic []traffic
	Faults  []fault
}

// limit2 is another limit, and lease period.
type limit2 struct {
	Rate   float64
	Burst  int64
	Period ms
}

// traffic is requests for one key: Poisson arrivals, or all at once.
type traffic struct {
	At, For ms
	Key     int
	Cost    int64
	Node    int     // -1: all
	Demand  float64 // in rates; of a burst: in bursts
	AtOnce  bool
	All     bool `json:",omitempty"` // of all keys together, or none
}

// fault is something that goes wrong at a time, for a time.
type fault struct {
	At, For ms
	Kind    kind
	Node    int     // -1: all
	Key     int     `json:",omitempty"`
	Amount  float64 `json:",omitempty"` // a probability, a factor, or milliseconds
}

type kind string

const (
	loseRequests kind = "lose requests"       // Amount: the part of them
	loseReplies  kind = "lose replies"        // Amount: the part of them
	delayed      kind = "delay"               // Amount: up to so many ms each way: late, and out of order
	duplicate    kind = "duplicate"           // Amount: the part of them; the second one later
	silence      kind = "silence"             // nothing gets through
	refuse       kind = "refuse"              // connections are refused
	errorReplies kind = "error replies"       // LOADING, READONLY and the like
	flap         kind = "flap"                // silence again and again, Amount ms each, and Amount ms between
	flush        kind = "flush"               // FLUSHALL
	evict        kind = "evict"               // the store loses a key
	failover     kind = "fail-over"           // down for For, then as it was Amount ms before
	clockStep    kind = "store's clock steps" // by Amount ms
	crash        kind = "crash"               // restarts after For
	leave        kind = "leave"               // closes; another one joins after For
	join         kind = "join"
	pause        kind = "pause"         // the process stops
	suspend      kind = "suspend"       // the machine stops, its monotonic clock too
	evictHere    kind = "evict on node" // a node forgets a key
	change       kind = "change limit"  // of a key, by the node, from now on
	reload       kind = "set limits"    // the next version of the limits, in a node that goes on
	rollout      kind = "roll out"      // the node restarts with the next version of the limits
)

func (s schedule) String() string {
	text, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(text)
}

// tell is s for a reader.
func (s schedule) tell() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d nodes, %d keys, %v/s burst %d, T ≤ %v ms, timeout %v ms, RTT %v ms, for %v ms\n", s.Nodes, s.Keys, s.Rate, s.Burst, s.Period, s.Timeout, s.RTT, s.For)
	fmt.Fprintf(&b, "  share %d, split %d, unknown %d, policy %v, owners %t, lag %v, leaving %v, then %+v, clocks %v\n", s.Share, s.Split, s.Unknown, s.Policy, s.Owners, s.Lag, s.Leaving, s.Limit2, s.Clock)
	for _, t := range s.Traffic {
		fmt.Fprintf(&b, "  traffic %+v\n", t)
	}
	for _, f := range s.Faults {
		fmt.Fprintf(&b, "  at %v ms for %v ms: %s, node %d, key %d, %v\n", f.At, f.For, f.Kind, f.Node, f.Key, f.Amount)
	}
	return b.String()
}

// drawn is where schedules come from: rapid, which can also make them smaller.
var drawn = rapid.Custom(draw)

var numbers = func() (n [1001]int) {
	for i := range n {
		n[i] = i
	}
	return n
}()

// draw makes a schedule. What it draws first stays when rapid makes the rest less,
// and less is simpler: fewer faults, shorter, earlier.
func draw(t *rapid.T) (s schedule) {
	mode := whole(t, "mode", 0, len(modes)-1)
	s.Seed = rapid.Uint64Range(0, 1<<32).Draw(t, "seed")
	s.Nodes = whole(t, "nodes", 1, 5)
	s.Keys = int(pick(t, "keys", 1, 1, 2, 3))
	s.Rate = pick(t, "rate", 100, 10, 1, 500, 2000, 0.5, 333.3)
	s.Burst = int64(max(1, s.Rate*pick(t, "burst", 1, 0.1, 0.3, 3, 10)))
	if whole(t, "tiny", 0, 9) == 9 {
		s.Burst = int64(whole(t, "burst tokens", 1, 5))
	}
	s.Period = ms(pick(t, "period", 100, 20, 250, 5))
	s.Timeout = ms(pick(t, "timeout", 30, 10, 100, 400, 1500))
	s.RTT = ms(pick(t, "rtt", 1, 0.2, 5))
	s.Backoff = ms(pick(t, "backoff", 50, 25, 500))
	s.Ramp = ms(pick(t, "ramp", 100, 10, 1000))
	s.Share = lease.Share(whole(t, "share", 0, 2))
	s.Split = fallback.Split(whole(t, "split", 0, 1))
	s.Unknown = fallback.Unknown(whole(t, "unknown", 0, 2))
	s.Policy = lease.Policy(pick(t, "policy", 0, 0, 0, 0, 0, 0, 1, 2))
	s.Bare = whole(t, "bare", 0, 9) == 9
	s.Owners = rapid.Bool().Draw(t, "owners")
	s.Lag = ms(pick(t, "lag", 0, 1000))
	s.Leaving = pick(t, "leaving", 0, 0, 0, 0.3)
	// As long as a few hundred decisions take at the rate, within reason.
	s.For = ms(max(500, min(8000, 1e3*600/s.Rate)))
	s.Limit2 = limit2{s.Rate * pick(t, "rate 2", 1, 0.1, 3), s.Burst, s.Period * ms(pick(t, "period 2", 1, 0.4, 3))}
	s.Limit2.Burst = max(1, int64(float64(s.Burst)*pick(t, "burst 2", 1, 0.1, 3)))
	s.Clock = make([]float64, s.Nodes)
	for i := range s.Clock {
		s.Clock[i] = 1
		if mode == clocks {
			s.Clock[i] = pick(t, "clock", 1, 1, 1, 1, 1.04, 0.96, 2, 0.5)
		}
	}
	s.Traffic = rapid.SliceOfN(rapid.Custom(s.drawTraffic), 1, 6).Draw(t, "traffic")
	s.Faults = rapid.SliceOfN(rapid.Custom(s.drawFault(mode)), 0, 6).Draw(t, "faults")
	return s
}

// moment is somewhere in the run.
func (s schedule) moment(t *rapid.T, label string) ms {
	return ms(float64(whole(t, label, 0, 1000))) * s.For / 1000
}

func (s schedule) drawTraffic(t *rapid.T) traffic {
	p := traffic{
		At: s.moment(t, "at"), For: s.moment(t, "for"), Key: whole(t, "key", 0, s.Keys-1), Node: whole(t, "node", -1, s.Nodes-1),
		Cost: 1, Demand: pick(t, "demand", 0.5, 1, 3, 0.1),
	}
	if whole(t, "costly", 0, 3) == 3 {
		p.Cost = max(1, s.Burst*int64(whole(t, "cost", 1, 100))/100)
	}
	if p.AtOnce = whole(t, "at once", 0, 3) == 3; p.AtOnce {
		p.For, p.Demand = 0, pick(t, "bursts", 1, 0.3, 2)
		p.Demand = min(p.Demand, 600*float64(p.Cost)/float64(s.Burst))
	}
	p.All = s.Keys > 1 && whole(t, "all", 0, 2) == 2
	return p
}

// modes are sorts of runs, by the faults in them.
var modes = [...][]kind{
	// Everything.
	{
		loseRequests, loseReplies, delayed, duplicate, silence, refuse, errorReplies, flap, flush, evict, failover,
		clockStep, crash, leave, join, pause, suspend, evictHere, change, reload, rollout,
	},
	// Nothing that may cost a token more.
	{loseRequests, loseReplies, delayed, silence, refuse, errorReplies, crash, leave, join, pause, evictHere},
	// The store is down for all at once.
	{silence, refuse, errorReplies, flap},
	// Changes of the limit.
	{change, reload, reload, rollout, leave, join, loseReplies, evictHere},
	// Clocks.
	{clockStep, clockStep, pause, suspend, loseReplies, delayed},
	// The store's memory.
	{failover, flush, evict, duplicate, crash, loseReplies},
}

// outages is the mode of outages for all, clocks the one where clocks go wrong.
const (
	outages = 2
	clocks  = 4
)

func (s schedule) drawFault(mode int) func(t *rapid.T) fault {
	return func(t *rapid.T) fault {
		f := fault{
			Kind: rapid.SampledFrom(modes[mode]).Draw(t, "kind"), For: s.For / 100 * ms(whole(t, "for", 1, 100)),
			Node: whole(t, "node", -1, s.Nodes-1), Key: whole(t, "key", 0, s.Keys-1),
		}
		// When somebody asks, or a lease period later at most.
		p := s.Traffic[whole(t, "in", 0, len(s.Traffic)-1)]
		f.At = min(p.At+(p.For+s.Period)*ms(whole(t, "at", 0, 1000))/1000, 0.99*s.For)
		if mode == outages {
			f.Node = -1
		}
		switch f.Kind {
		case loseRequests, loseReplies, duplicate:
			f.Amount = pick(t, "part", 1, 0.2, 0.5)
		case delayed:
			f.Amount = pick(t, "ms", 10, 50, 300, 2000)
		case flap:
			f.Amount = pick(t, "ms", 50, 10, 300, 1000)
		case failover:
			f.Amount = pick(t, "ms", 10, 100, 1000)
		case clockStep:
			f.Amount = pick(t, "ms", 100, -100, 10_000, -10_000, 1, -1, -600_000) * pick(t, "times", 1, 0.3, 2.5)
		}
		return f
	}
}

// parse reads a schedule that String wrote, or a hand.
func parse(text string) (s schedule, err error) {
	d := json.NewDecoder(strings.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&s); err != nil {
		return s, err
	}
	return s, s.validate()
}

// validate says what of s cannot be run.
func (s schedule) validate() error {
	var errs []error
	want := func(ok bool, field string, value any, want string) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s = %v: want %s", field, value, want))
		}
	}
	want(lease.Limit{Rate: s.Rate, Burst: s.Burst}.Validate() == nil && s.Rate > 0 && s.Burst > 0, "Rate, Burst", [2]any{s.Rate, s.Burst}, "a limit that admits something")
	want(lease.Limit{Rate: s.Limit2.Rate, Burst: s.Limit2.Burst}.Validate() == nil && s.Limit2.Rate > 0 && s.Limit2.Burst > 0, "Limit2", s.Limit2, "a limit that admits something")
	want(s.Nodes >= 1 && s.Nodes <= 8, "Nodes", s.Nodes, "1 to 8")
	want(s.Keys >= 1 && s.Keys <= 8, "Keys", s.Keys, "1 to 8")
	want(s.For > 0 && s.For <= 60_000, "For", s.For, "more than 0, at most 60000")
	want(s.RTT > 0 && s.RTT <= 1000, "RTT", s.RTT, "more than 0, at most 1000")
	want(s.Period >= 2 && s.Period <= 10_000, "Period", s.Period, "2 to 10000")
	want(s.Timeout >= 1 && s.Timeout <= 10_000, "Timeout", s.Timeout, "1 to 10000")
	want(s.Backoff >= 25 && s.Backoff <= 10_000, "Backoff", s.Backoff, "25 to 10000")
	want(s.Ramp >= 1 && s.Ramp <= 10_000, "Ramp", s.Ramp, "1 to 10000")
	want(s.Share <= lease.ShareNone && s.Split <= fallback.SplitEqual && s.Unknown <= fallback.StartFull && s.Policy <= lease.Deny, "Share, Split, Unknown, Policy", [4]any{s.Share, s.Split, s.Unknown, s.Policy}, "known ones")
	want(s.Leaving >= 0 && s.Leaving <= 1, "Leaving", s.Leaving, "0 to 1")
	for i, c := range s.Clock {
		want(c >= 0.1 && c <= 10, fmt.Sprintf("Clock[%d]", i), c, "0.1 to 10")
	}
	within := func(what string, i int, at, d ms, node, key int) {
		want(at >= 0 && d >= 0 && at <= s.For && d <= 60_000, fmt.Sprintf("%s[%d].At, For", what, i), [2]ms{at, d}, "within the run")
		want(node >= -1 && node < s.Nodes, fmt.Sprintf("%s[%d].Node", what, i), node, "-1 or a node")
		want(key >= 0 && key < s.Keys, fmt.Sprintf("%s[%d].Key", what, i), key, "a key")
	}
	for i, p := range s.Traffic {
		within("Traffic", i, p.At, p.For, p.Node, p.Key)
		want(p.Cost >= 1 && p.Demand > 0 && p.Demand <= 1000, fmt.Sprintf("Traffic[%d]", i), p, "a cost of 1 or more, and a demand of more than 0")
	}
	for i, f := range s.Faults {
		within("Faults", i, f.At, f.For, f.Node, f.Key)
		known := false
		for _, kinds := range modes {
			known = known || slices.Contains(kinds, f.Kind)
		}
		want(known, fmt.Sprintf("Faults[%d].Kind", i), f.Kind, "one of those in schedule_test.go")
	}
	return errors.Join(errs...)
}

func pick(t *rapid.T, label string, of ...float64) float64 {
	return rapid.SampledFrom(of).Draw(t, label)
}

// whole is not rapid.IntRange, which likes small numbers.
func whole(t *rapid.T, label string, from, to int) int {
	return from + rapid.SampledFrom(numbers[:to-from+1]).Draw(t, label)
}

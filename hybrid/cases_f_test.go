package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
)

// Fallback and breaker, with the real script and many nodes.
//
// Parts of cases that are elsewhere:
//
//	F06  503 instead of 429         internal/server (here: how a Decision shows it)
//	F12  probes that overlap        there are none: one at a time, TestF10
//	F13  10 000 keys                in batches of 128 here, fewer nodes and keys
//	F16  an hour, the heap          minutes here, L18
//
// Of one store and its breaker alone: fallback/breaker_test.go. On a real server,
// with real faults: F18, and all shapes of trouble in outage_test.go.

const (
	// fleetPeriod is the lease period of a fleet.
	fleetPeriod = time.Second
	// heals is how long after Redis is back the last node knows: the longest
	// pause between probes, a probe, and the ramp.
	heals = 751*time.Millisecond + 30*time.Millisecond + time.Second
)

// stale is how many tokens all nodes of a fleet may believe in together that are
// gone: what was granted since they last heard of the bucket, a lease period and
// its jitter ago.
func stale(limit hybrid.Limit) float64 { return 1.1*limit.Rate*fleetPeriod.Seconds() + 1 }

// shapes are the ways in which Redis can be down.
var shapes = map[string]func(l *line, down bool){
	"refused": func(l *line, down bool) { l.dead.Store(down) },
	"silent":  func(l *line, down bool) { l.hang.Store(down) },
	"loading": func(l *line, down bool) {
		var err error
		if down {
			err = replyError("LOADING Redis is loading the dataset in memory")
		}
		l.fail(err)
	},
	"reply lost": func(l *line, down bool) {
		l.loseReply.Store(0)
		if down {
			l.loseReply.Store(1000)
		}
	},
	"slow": func(l *line, down bool) {
		l.request.Store(int64(time.Millisecond))
		if down {
			l.request.Store(int64(200 * time.Millisecond))
		}
	},
}

// fleet is nodes that know how many they are, each on a line of its own, and what
// they admit of one key.
type fleet struct {
	*trace
	nodes []*hybrid.Limiter
	lines []*line
	rate  float64 // demand of each node, per second
	seed  uint64
}

// fleet returns n nodes, each asked rate times a second by loadAll. With a
// Heartbeat they have to find out how many they are.
func (w *world) fleet(n int, limit hybrid.Limit, rate float64, opts hybrid.Options) *fleet {
	w.t.Helper()
	opts.LeasePeriod = fleetPeriod
	if opts.Heartbeat == 0 {
		opts.MinNodes = n
	}
	f := &fleet{trace: w.trace(limit), rate: rate}
	f.nodes, f.lines = w.nodeLines(n, 2*time.Millisecond, limit, opts)
	return f
}

// loadAll asks all nodes for d and returns the tokens admitted.
func (f *fleet) loadAll(d time.Duration) int64 {
	before := f.total()
	f.seed += uint64(len(f.nodes))
	together(len(f.nodes), func(i int) {
		f.load(f.nodes[i], "k", time.Duration(float64(time.Second)/f.rate), d, f.seed+uint64(i))
	})
	return f.total() - before
}

func (f *fleet) setDown(shape func(*line, bool), down bool) {
	for _, l := range f.lines {
		shape(l, down)
	}
}

// checkPeak fails the test if the level passed the burst by more than extra.
func (f *fleet) checkPeak(extra float64) {
	f.w.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if peak, most := f.peak(), float64(f.limit.Burst)+extra; peak > most {
		f.w.t.Errorf("level %.1f of %v; want at most %.1f", peak, f.limit, most)
	} else {
		f.w.t.Logf("level %.1f of at most %.1f", peak, most)
	}
}

// checkKnown fails the test unless all nodes know how many they are.
func (f *fleet) checkKnown() {
	f.w.t.Helper()
	for i, l := range f.nodes {
		if n := l.Stats().Fallback.Nodes; n != len(f.nodes) {
			f.w.t.Errorf("node %d knows of %d nodes; want %d", i, n, len(f.nodes))
		}
	}
}

func between(t *testing.T, what string, got, least, most float64) {
	t.Helper()
	if got < least || got > most {
		t.Errorf("%s = %.1f; want %.1f to %.1f", what, got, least, most)
	} else {
		t.Logf("%s = %.1f", what, got)
	}
}

// probesIn returns how many probes go in span, each failing after took.
func probesIn(span, took time.Duration) (least, most int) {
	count := func(jitter float64) (n int) {
		pause := 25 * time.Millisecond
		for at := time.Duration(0); at < span; pause = min(2*pause, 500*time.Millisecond) {
			n++
			at += took + time.Duration(jitter*float64(pause)) + time.Millisecond
		}
		return n
	}
	return count(1.5) - 1, count(1)
}

// Ten nodes without Redis for a minute admit one limit together, not ten: from
// the start of the outage no more than rate·t beyond what leases and shares hold,
// and over the whole run the level is at most the burst and what nodes did not
// know of the bucket (protocol 3.4: C + r·t + E, E = Σ seeds − balance).
func TestF01_OneLimitInAnOutage(t *testing.T) {
	limit := hybrid.PerSecond(20, 200)
	for name, shape := range shapes {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				var opts hybrid.Options
				nodes, span := 5, 10*time.Second
				if name == "silent" {
					nodes, span = 10, time.Minute
					opts.Heartbeat = time.Second
				}
				f := w.fleet(nodes, limit, 60/float64(nodes), opts)
				f.loadAll(7 * time.Second)
				f.checkKnown()
				f.setDown(shape, true)
				f.loadAll(time.Second) // leases end
				got := f.loadAll(span)
				// In a blend parts of the demand count nine tenths, and less the older
				// they are: with half by demand at first these shares are 0.85 of it all,
				// give or take what the estimates are off.
				between(t, "admitted without Redis", float64(got), 0.8*limit.Rate*span.Seconds(), limit.Rate*span.Seconds()+stale(limit))
				f.checkPeak(stale(limit))
			})
		})
	}

	// Nodes that never saw Redis go by MinNodes, and begin with a token each: the
	// bound is nodes + rate·t. As nobody knows who has which part of the demand,
	// parts are equal either way.
	for _, split := range []hybrid.Split{hybrid.SplitEqual, hybrid.SplitBlend} {
		t.Run(fmt.Sprint("from the start ", split), func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				f := w.fleet(5, limit, 12, hybrid.Options{Split: split})
				f.setDown(shapes["refused"], true)
				got := f.loadAll(40 * time.Second)
				between(t, "admitted from the start", float64(got), 0.95*40*limit.Rate, 5+40*limit.Rate)
				f.checkPeak(0)
			})
		})
	}
}

// Five seconds up and five down, twenty times. Shares are seeded with what is
// left and what they admit is charged afterwards, so trips pay nothing: in the
// long run the rate, and at no time more than the burst, what nodes did not know,
// and what those that are back first take before the debts of the others are
// charged: the demand beyond the rate, for as long as that takes.
func TestF03_FlappingPaysNoBurst(t *testing.T) {
	limit := hybrid.PerSecond(20, 200)
	const demand = 8 // of each of five nodes
	for name, trips := range map[string]int{"refused": 20, "reply lost": 4} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				f := w.fleet(5, limit, demand, hybrid.Options{})
				f.loadAll(15 * time.Second) // drained
				before := f.total()
				for range trips {
					f.setDown(shapes[name], true)
					f.loadAll(5 * time.Second)
					f.setDown(shapes[name], false)
					f.loadAll(5 * time.Second)
				}
				least := 0.95
				if name == "reply lost" {
					least = 0.7 // each node loses what it is granted by its last call
				}
				between(t, "long-run rate", float64(f.total()-before)/float64(10*trips), least*limit.Rate, 1.05*limit.Rate)
				f.checkPeak(stale(limit) + (5*demand-limit.Rate)*heals.Seconds())
				for i, l := range f.nodes {
					if s := l.Stats().Fallback; s.Trips < int64(trips)*3/4 {
						t.Errorf("node %d: %+v; want a trip in each outage", i, s)
					}
				}
			})
		})
	}
}

// What was admitted in an outage of thirty seconds is charged when Redis is back:
// as much as the shares lack. Without debts the bucket would be full, with all
// that was admitted it would be a burst in debt.
func TestF04_OutageIsCharged(t *testing.T) {
	limit := hybrid.PerSecond(20, 200)
	const demand = 8 // of each of five nodes
	for name, quiet := range map[string]time.Duration{"refused": 2 * time.Second, "silent": 0} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				f := w.fleet(5, limit, demand, hybrid.Options{})
				f.loadAll(15 * time.Second)
				f.setDown(shapes[name], true)
				f.loadAll(30 * time.Second)
				var admitted, charged int64
				for _, l := range f.nodes {
					s := l.Stats().Fallback
					admitted += s.Admitted
					if s.Owed != s.Admitted-s.Charged-s.Forgiven {
						t.Errorf("%+v; want Admitted = Charged + Forgiven + Owed", s)
					}
				}
				between(t, "admitted without Redis", float64(admitted), 0.85*30*limit.Rate, 31*limit.Rate)
				f.setDown(shapes[name], false)

				extra := stale(limit)
				if quiet > 0 {
					// All are back, also with nobody asking: the bucket has what
					// came since.
					w.sleep(quiet)
					between(t, "balance", float64(w.bucket("k").tokens()), 10, 3*limit.Rate)
				} else {
					extra += (5*demand - limit.Rate) * heals.Seconds() // as in F03
				}
				got := f.loadAll(40 * time.Second)
				// Beside the rate what the bucket gained in the quiet.
				between(t, "admitted afterwards", float64(got), 0.95*40*limit.Rate, (40+quiet.Seconds())*limit.Rate+stale(limit))
				f.checkPeak(extra)
				for _, l := range f.nodes {
					s := l.Stats().Fallback
					charged += s.Charged
					if s.Owed != 0 || s.Lost != 0 || s.Admitted != s.Charged+s.Forgiven {
						t.Errorf("%+v; want nothing owed or lost", s)
					}
				}
				// No more than the shares can lack together, rounded up on each
				// node, and what they admit until the last calls go to Redis again.
				between(t, "charged", float64(charged), 0.5*float64(limit.Burst), float64(limit.Burst)+5+limit.Rate*heals.Seconds())
			})
		})
	}
}

// A refusal says whether the limit is used up or Redis is at fault, and what is
// decided without Redis says so, also by leases of the share, and all the time.
func TestF06_OutageIsNoRefusal(t *testing.T) {
	limits := hybrid.LimitFunc(func(key string) hybrid.Limit {
		limit := hybrid.PerSecond(10, 20)
		if key == "closed" {
			limit.OnFailure = hybrid.Deny
		}
		return limit
	})
	bubble(t, func(t *testing.T, w *world) {
		ln := newLine(2 * time.Millisecond)
		l := w.nodeOver(ln, limits, hybrid.Options{})
		// ask returns how often each source admitted and refused in d.
		ask := func(key string, d time.Duration) (admitted, refused map[hybrid.Source]int) {
			admitted, refused = map[hybrid.Source]int{}, map[hybrid.Source]int{}
			for end := w.since() + d; w.since() < end; w.sleep(20 * time.Millisecond) {
				d, err := l.Allow(t.Context(), key)
				if err != nil || d.Limit != limits.For(key) || d.Remaining < 0 || d.Remaining > 20 ||
					d.Allowed != (d.RetryAfter == 0) || d.ResetAfter < d.RetryAfter || d.ResetAfter > 3*time.Second {
					t.Errorf("Allow(%q) at %v = %+v, %v", key, w.since(), d, err)
				}
				if d.Allowed {
					admitted[d.Source]++
				} else {
					refused[d.Source]++
				}
			}
			return admitted, refused
		}
		only := func(when string, got map[hybrid.Source]int, want ...hybrid.Source) {
			t.Helper()
			for s := range got {
				if !slices.Contains(want, s) {
					t.Errorf("%s: decided by %v %d times; want only by %v", when, s, got[s], want)
				}
			}
			if len(got) == 0 && len(want) > 0 {
				t.Errorf("%s: no decision; want some by %v", when, want)
			}
		}
		for range 2 {
			for _, key := range []string{"k", "closed"} {
				admitted, refused := ask(key, 5*time.Second)
				only("with Redis", admitted, hybrid.SourceLease, hybrid.SourceStore)
				only("with Redis", refused, hybrid.SourceStore, hybrid.SourceMemory)
			}
			ln.dead.Store(true)
			ask("k", time.Second)
			ask("closed", time.Second) // leases end
			admitted, refused := ask("k", 15*time.Second)
			only("without", admitted, hybrid.SourceLocal)
			only("without", refused, hybrid.SourceLocal)
			admitted, refused = ask("closed", 15*time.Second)
			only("without", admitted)
			only("without", refused, hybrid.SourcePolicy)
			for _, key := range []string{"k", "closed"} {
				if d, err := l.Peek(t.Context(), key); err != nil || d.Source != hybrid.SourceLocal && d.Source != hybrid.SourcePolicy {
					t.Errorf("Peek(%q) without Redis = %+v, %v", key, d, err)
				}
			}
			ln.dead.Store(false)
			w.sleep(heals)
		}
	})
}

// Callers who leave say nothing about Redis, whatever the reason they give.
func TestF07_CallersWhoLeave(t *testing.T) {
	why := errors.New("the client hung up")
	leave := map[string]func(after time.Duration) (context.Context, context.CancelFunc){
		"cancel": func(after time.Duration) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancel(context.Background())
			time.AfterFunc(after, cancel)
			return ctx, cancel
		},
		"cancel with a cause": func(after time.Duration) (context.Context, context.CancelFunc) {
			ctx, cancel := context.WithCancelCause(context.Background())
			time.AfterFunc(after, func() { cancel(why) })
			return ctx, func() { cancel(nil) }
		},
		"deadline": func(after time.Duration) (context.Context, context.CancelFunc) {
			return context.WithTimeout(context.Background(), after)
		},
		"deadline with a cause": func(after time.Duration) (context.Context, context.CancelFunc) {
			return context.WithTimeoutCause(context.Background(), after, why)
		},
	}
	ops := map[string]func(l *hybrid.Limiter, ctx context.Context, key string) error{
		"Allow": func(l *hybrid.Limiter, ctx context.Context, key string) error {
			_, err := l.Allow(ctx, key)
			return err
		},
		"Peek": func(l *hybrid.Limiter, ctx context.Context, key string) error {
			_, err := l.Peek(ctx, key)
			return err
		},
		"Refund": func(l *hybrid.Limiter, ctx context.Context, key string) error { return l.Refund(ctx, key, 1) },
		"Reset":  func(l *hybrid.Limiter, ctx context.Context, key string) error { return l.Reset(ctx, key) },
	}
	for how, leaving := range leave {
		for what, op := range ops {
			t.Run(what+"/"+how, func(t *testing.T) {
				bubble(t, func(t *testing.T, w *world) {
					w.warm()
					ln := newLine(5 * time.Millisecond)
					l := w.nodeOver(ln, hybrid.PerSecond(10, 20), hybrid.Options{})
					for after := range 5 {
						together(20, func(i int) {
							ctx, cancel := leaving(time.Duration(after) * time.Millisecond)
							defer cancel()
							if err := op(l, ctx, fmt.Sprint("k", after, i)); err == nil {
								t.Errorf("%s of who left after %dms = nil; want an error", what, after)
							}
						})
						w.sleep(10 * time.Millisecond)
					}
					if s := l.Stats().Fallback; s.State != "closed" || s.Degraded || s.Trips != 0 || s.Probes != 0 || s.Admitted != 0 {
						t.Errorf("%+v after 100 callers left; want nothing of it", s)
					}
					if d, err := l.Allow(t.Context(), "other"); err != nil || !d.Allowed || d.Source != hybrid.SourceStore {
						t.Errorf("Allow = %+v, %v; want admitted by Redis", d, err)
					}
					// Those who leave just before a slow answer are no time-outs either.
					if strings.HasPrefix(how, "cancel") {
						ln.request.Store(int64(29 * time.Millisecond))
						ln.reply.Store(0)
						ctx, cancel := leaving(28 * time.Millisecond)
						defer cancel()
						if err := op(l, ctx, "late"); err == nil {
							t.Errorf("%s of who left after 28ms = nil; want an error", what)
						}
						w.sleep(10 * time.Millisecond)
						if s := l.Stats().Fallback; s.Degraded || s.Probes != 0 {
							t.Errorf("%+v after a caller left late; want nothing of it", s)
						}
					}
					// A server that gives no answer in the time that it has is another
					// matter.
					ln.hang.Store(true)
					if _, err := l.Allow(t.Context(), "one more"); err != nil {
						t.Error(err)
					}
					if s := l.Stats().Fallback; !s.Degraded {
						t.Errorf("%+v with Redis silent; want it to be noticed", s)
					}
				})
			})
		}
	}
}

// outcomes makes the next lease calls on l fail with errs, and those after them
// succeed; beats always do.
func (l *line) outcomes(errs ...error) {
	var next atomic.Int64
	f := func(cmds []redis.Cmder) error {
		if len(cmds) == 1 && isBeat(cmds[0]) {
			return nil
		}
		if i := int(next.Add(1)) - 1; i < len(errs) {
			return errs[i]
		}
		return nil
	}
	l.fault.Store(&f)
}

// A neutral outcome is neither: it does not end a row of failures, and a probe
// that says nothing neither closes the breaker nor keeps the next from trying.
func TestF09_NeutralIsNotSuccess(t *testing.T) {
	neutral := redis.ErrPoolTimeout // there was no connection to ask with
	for name, c := range map[string]struct {
		outcomes      []error
		trips, probes int64
	}{
		"a row":           {[]error{errRefused, errRefused, errRefused}, 1, 3},
		"row with gaps":   {[]error{errRefused, neutral, errRefused, neutral, neutral, errRefused}, 1, 6},
		"two, and well":   {[]error{errRefused, errRefused}, 0, 2},
		"two, and gaps":   {[]error{errRefused, neutral, neutral, neutral, errRefused, neutral}, 0, 6},
		"half-open":       {[]error{errRefused, errRefused, errRefused, neutral}, 1, 4},
		"half-open twice": {[]error{errRefused, errRefused, errRefused, neutral, errRefused, neutral, neutral}, 1, 7},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, w *world) {
				w.warm()
				ln := newLine(0)
				l := w.nodeOver(ln, hybrid.PerSecond(10, 20), hybrid.Options{})
				ln.outcomes(c.outcomes...)
				w.trace(hybrid.PerSecond(10, 20)).ask(l, "k", 1)
				for {
					synctest.Wait()
					s := l.Stats().Fallback
					if !s.Degraded {
						break
					}
					// While it is down each outcome so far but the first was a probe's.
					if done := ln.calls.Load() - 1; s.Probes != done || done >= int64(len(c.outcomes)) {
						t.Fatalf("%+v after %d outcomes; want it to end with the first success", s, done+1)
					}
					if s.Trips > 0 && s.State == "closed" {
						t.Fatalf("%+v after %d probes; want no breaker closed by %v", s, s.Probes, c.outcomes)
					}
					w.sleep(time.Millisecond)
					if w.since() > time.Minute {
						t.Fatalf("%+v: stuck", s)
					}
				}
				if s := l.Stats().Fallback; s.Trips != c.trips || s.Probes != c.probes || s.State != "closed" {
					t.Errorf("%+v; want %d trips, %d probes", s, c.trips, c.probes)
				}
			})
		})
	}
}

// A thousand callers at any time of an outage, with Redis hanging: one call for
// the first, then probes, one at a time, and nothing else. Nobody but the first
// waits, and all get a decision that says where it is from.
func TestF10_OnlyProbesReachRedis(t *testing.T) {
	limit := hybrid.PerSecond(1000, 2000)
	bubble(t, func(t *testing.T, w *world) {
		w.warm()
		ln := newLine(2 * time.Millisecond)
		var mu sync.Mutex
		var sent []time.Duration
		note := func(cmds []redis.Cmder) error {
			if !isBeat(cmds[0]) {
				mu.Lock()
				sent = append(sent, w.since())
				mu.Unlock()
			}
			return nil
		}
		ln.fault.Store(&note)
		l := w.nodeOver(ln, limit, hybrid.Options{Start: hybrid.StartFull})
		ln.hang.Store(true)
		tr := w.trace(limit)
		tr.ask(l, "k", 1)
		down := w.since()
		for w.since() < down+10*time.Second {
			// Just when the breaker half-opens too: 25 ms after each failure.
			at := w.since()
			together(1000/20, func(i int) {
				d := tr.ask(l, []string{"k", fmt.Sprint("cold", i)}[i%2], 1)
				if d.Source != hybrid.SourceLocal {
					t.Errorf("at %v: %+v; want a decision by the share", w.since(), d)
				}
			})
			if took := w.since() - at; took != 0 {
				t.Fatalf("at %v callers waited for %v; want nobody to", at, took)
			}
			w.sleep(5 * time.Millisecond)
		}
		mu.Lock()
		defer mu.Unlock()
		least, most := probesIn(10*time.Second, 30*time.Millisecond)
		between(t, "calls in 10s", float64(len(sent)), float64(1+least), float64(1+most))
		for i := 3; i < len(sent); i++ {
			if pause := sent[i] - sent[i-1]; pause < 25*time.Millisecond+30*time.Millisecond {
				t.Errorf("calls at %v and %v; want a pause in between", sent[i-1], sent[i])
			}
		}
		if s := l.Stats().Fallback; s.State == "closed" || s.Trips != 1 || int(s.Probes) != len(sent)-1 {
			t.Errorf("%+v after %d calls; want one trip and probes since", s, len(sent))
		}
	})
}

// What belongs to an earlier life of the breaker is not held for or against a
// later one.
func TestF12_LateResults(t *testing.T) {
	// The first call for early takes 20 ms and ends with then, the first for late
	// fails at once.
	faults := func(then error) func(cmds []redis.Cmder) error {
		var seen sync.Map
		return func(cmds []redis.Cmder) error {
			name := cmds[0].Args()[3]
			if _, again := seen.LoadOrStore(name, true); again {
				return nil
			}
			switch name {
			case redisKey("early"):
				time.Sleep(20 * time.Millisecond)
				return then
			case redisKey("late"):
				return errRefused
			}
			return nil
		}
	}
	setUp := func(t *testing.T, w *world) (*hybrid.Limiter, *line) {
		w.warm()
		ln := newLine(0)
		l := w.nodeOver(ln, hybrid.PerSecond(10, 20), hybrid.Options{})
		if d, err := l.Allow(t.Context(), "template"); err != nil || !d.Allowed { // what to probe with
			t.Fatalf("Allow = %+v, %v", d, err)
		}
		return l, ln
	}

	// A call that was sent before Redis failed, and is answered after: only a
	// probe puts Redis into use again.
	bubble(t, func(t *testing.T, w *world) {
		l, ln := setUp(t, w)
		f := faults(nil)
		ln.fault.Store(&f)
		var early hybrid.Decision
		var done sync.WaitGroup
		done.Go(func() { early, _ = l.Allow(t.Context(), "early") })
		w.sleep(5 * time.Millisecond)
		ln.dead.Store(true)
		for range 3 { // one call and two probes: the breaker opens
			_, _ = l.Allow(t.Context(), "late")
			w.sleep(5 * time.Millisecond)
		}
		done.Wait()
		if !early.Allowed || early.Source != hybrid.SourceStore {
			t.Errorf("call that was sent before = %+v; want admitted by Redis", early)
		}
		w.sleep(time.Second)
		if s := l.Stats().Fallback; !s.Degraded || s.State == "closed" || s.Trips != 1 {
			t.Errorf("%+v after a late success; want Redis still down", s)
		}
	})

	// A call that fails after Redis failed and came back.
	bubble(t, func(t *testing.T, w *world) {
		l, ln := setUp(t, w)
		f := faults(errRefused)
		ln.fault.Store(&f)
		var early hybrid.Decision
		var done sync.WaitGroup
		done.Go(func() { early, _ = l.Allow(t.Context(), "early") })
		w.sleep(5 * time.Millisecond)
		if d, err := l.Allow(t.Context(), "late"); err != nil || d.Source != hybrid.SourceLocal {
			t.Errorf("call that fails = %+v, %v; want a decision by the share", d, err)
		}
		synctest.Wait()
		up := w.since()
		if s := l.Stats().Fallback; s.Degraded || s.Probes != 1 {
			t.Fatalf("%+v; want Redis down and up again", s)
		}
		done.Wait()
		synctest.Wait()
		if early.Source != hybrid.SourceLocal || w.since() <= up {
			t.Fatalf("late call at %v = %+v, up since %v; want it to fail after that", w.since(), early, up)
		}
		if s := l.Stats().Fallback; s.Degraded || s.Probes != 1 {
			t.Errorf("%+v after a late failure; want Redis up", s)
		}
	})
}

// Seven nodes with 300 debts each find Redis back at about the same time. All of
// them at once would keep it busy for 105 ms, three times RedisTimeout; what one
// node sends at once, for 6.4. They probe apart, charge with rests between, and
// ramp up: nobody trips again, and all is charged soon.
func TestF13_RecoveryIsNoStampede(t *testing.T) {
	const nodes, keys = 7, 300
	limit := hybrid.PerSecond(1, 100)
	bubble(t, func(t *testing.T, w *world) {
		w.warm()
		busy := &capacity{perKey: 50 * time.Microsecond}
		type call struct {
			at   time.Duration
			keys int
		}
		var mu sync.Mutex
		calls := make([][]call, nodes)
		all, lines := w.nodeLines(nodes, time.Millisecond, limit, hybrid.Options{MinNodes: nodes})
		for i, ln := range lines {
			ln.busy = busy
			note := func(cmds []redis.Cmder) error {
				mu.Lock()
				defer mu.Unlock()
				for _, cmd := range cmds {
					if !isBeat(cmd) {
						calls[i] = append(calls[i], call{w.since(), keysOf(cmd)})
					}
				}
				return nil
			}
			ln.fault.Store(&note)
			ln.hang.Store(true)
		}
		ask := func(l *hybrid.Limiter, key int) {
			if _, err := l.Allow(context.Background(), fmt.Sprint("k", key)); err != nil {
				t.Error(err)
			}
		}
		together(nodes, func(i int) {
			for key := range keys {
				ask(all[i], key)
			}
		})
		w.sleep(5 * time.Second)
		var owed, trips int64
		mu.Lock()
		for i, l := range all {
			s := l.Stats().Fallback
			owed, trips = owed+s.Owed, trips+s.Trips
			if _, most := probesIn(5*time.Second, 30*time.Millisecond); len(calls[i]) > 1+most {
				t.Errorf("node %d made %d calls in 5s; want no more than its probes", i, len(calls[i]))
			}
		}
		if owed != nodes*keys || trips != nodes {
			mu.Unlock()
			t.Fatalf("%d owed, %d trips; want a token for each key and node, and one trip each", owed, trips)
		}
		// Probes are apart: from the second second on not half of the nodes within
		// a thirtieth of a pause.
		var probes []time.Duration
		for i := range calls {
			for _, c := range calls[i] {
				if c.at > 2*time.Second {
					probes = append(probes, c.at)
				}
			}
		}
		slices.Sort(probes)
		for i := nodes / 2; i < len(probes); i++ {
			if d := probes[i] - probes[i-nodes/2]; d < 20*time.Millisecond {
				t.Errorf("%d probes within %v at %v; want them apart", nodes/2+1, d, probes[i])
			}
		}

		// Redis is back, while requests go on.
		for i, ln := range lines {
			calls[i] = nil
			ln.hang.Store(false)
		}
		mu.Unlock()
		begin := w.since()
		together(nodes, func(i int) {
			for n := 0; w.since() < begin+3*time.Second; n++ {
				ask(all[i], (n*7+i)%keys)
				w.sleep(10 * time.Millisecond)
			}
		})
		var charged int64
		mu.Lock()
		defer mu.Unlock()
		var early, late int // requests that went to Redis, in 300 ms
		for i, l := range all {
			up := calls[i][0].at // the probe that found it back
			for _, c := range calls[i][1:] {
				switch {
				case c.keys > 20: // debts
				case c.at < up+300*time.Millisecond:
					early += c.keys
				case c.at > begin+2500*time.Millisecond && c.at < begin+2800*time.Millisecond:
					late += c.keys
				}
			}
			s := l.Stats().Fallback
			trips -= s.Trips
			charged += s.Charged
			if s.Owed != 0 || s.State != "closed" || s.Degraded {
				t.Errorf("node %d: %+v 3s later; want all charged", i, s)
			}
			// A rest of ten times what a batch of debts took, 6.4 ms at least.
			var last time.Duration
			total := 0
			for _, c := range calls[i] {
				if total += c.keys; c.keys < 100 {
					continue
				}
				if last > 0 && c.at-last < 70*time.Millisecond {
					t.Errorf("node %d: batches at %v and %v; want a rest between", i, last, c.at)
				}
				last = c.at
			}
			// Debts, probes and one call for each request, at most.
			if total > keys+6+300 {
				t.Errorf("node %d: calls for %d keys after the outage; want %d debts and what is asked", i, total, keys)
			}
		}
		if trips != 0 {
			t.Errorf("%d trips in the recovery; want none", -trips)
		}
		if early > late/2 {
			t.Errorf("calls for %d keys at first, %d later; want them to ramp up from a tenth", early, late)
		}
		between(t, "charged", float64(charged), nodes*keys, nodes*keys+nodes*300)
	})
}

// Each limit has its own policy, whatever else the Limiter limits.
func TestF15_PolicyPerLimit(t *testing.T) {
	with := func(p hybrid.Policy) hybrid.Limit {
		limit := hybrid.PerSecond(1, 10)
		limit.OnFailure = p
		return limit
	}
	limits := hybrid.LimitFunc(func(key string) hybrid.Limit {
		switch key {
		case "login":
			return with(hybrid.Deny)
		case "search":
			return with(hybrid.Allow)
		}
		return with(hybrid.Degrade)
	})
	bubble(t, func(t *testing.T, w *world) {
		for name, shape := range shapes {
			ln := newLine(time.Millisecond)
			l := w.nodeOver(ln, limits, hybrid.Options{Prefix: name})
			ask := func(key string, n int) (admitted int, sources map[hybrid.Source]int) {
				sources = map[hybrid.Source]int{}
				for range n {
					d, err := l.Allow(t.Context(), key)
					if err != nil {
						t.Errorf("%s: Allow(%q) = %v", name, key, err)
					}
					if d.Allowed {
						admitted++
					}
					sources[d.Source]++
				}
				return admitted, sources
			}
			for range 2 {
				for _, key := range []string{"login", "search", "rest"} {
					if n, sources := ask(key, 50); n != 10 || sources[hybrid.SourcePolicy]+sources[hybrid.SourceLocal] > 0 {
						t.Errorf("%s: %d of %q with Redis, by %v; want the burst", name, n, key, sources)
					}
				}
				w.sleep(5 * time.Second) // five tokens each
				shape(ln, true)
				for _, c := range []struct {
					key    string
					want   int
					source hybrid.Source
				}{
					{"login", 0, hybrid.SourcePolicy},
					{"search", 500, hybrid.SourcePolicy},
					{"rest", 6, hybrid.SourceLocal}, // what is known is rounded up
				} {
					if n, sources := ask(c.key, 500); n != c.want || sources[c.source] != 500 {
						t.Errorf("%s: %d of %q without Redis, by %v; want %d by %v", name, n, c.key, sources, c.want, c.source)
					}
				}
				// A request that brings its limit brings its policy.
				for p, want := range map[hybrid.Policy]bool{hybrid.Deny: false, hybrid.Allow: true} {
					if d, err := l.AllowLimit(t.Context(), "own", with(p), 1); err != nil || d.Allowed != want || d.Source != hybrid.SourcePolicy {
						t.Errorf("%s: AllowLimit without Redis = %+v, %v; want it decided by its policy, %v", name, d, err, p)
					}
				}
				shape(ln, false)
				w.sleep(15 * time.Second) // full again
			}
			// Uncounted is what policies admit.
			if s := l.Stats().Fallback; s.Admitted != 12 || s.Owed != 0 || s.Charged+s.Forgiven != 12 {
				t.Errorf("%s: %+v; want the share's twelve tokens settled", name, s)
			}
		}
	})
}

// Minutes without Redis, and twenty new keys a second: no more than MaxKeys are
// remembered, those that owe are the last to go, a key may not begin anew by being
// forgotten, and when Redis is back it all comes to an end.
func TestF16_MemoryInAnOutage(t *testing.T) {
	const maxKeys, seconds = 300, 150
	limit := hybrid.PerSecond(1, 100)
	bubble(t, func(t *testing.T, w *world) {
		w.warm()
		ln := newLine(time.Millisecond)
		l := w.nodeOver(ln, limit, hybrid.Options{MaxKeys: maxKeys})
		tr := w.trace(limit)
		tr.burst(l, "hot", 150)
		ln.dead.Store(true)
		for i := range seconds * 20 {
			tr.ask(l, "hot", 1)
			if _, err := l.Allow(t.Context(), fmt.Sprint("once", i)); err != nil {
				t.Fatal(err)
			}
			// A table has 64 parts, and each may be one over.
			if s := l.Stats(); i%100 == 0 && (s.Fallback.Keys > maxKeys+64 || s.Keys > maxKeys+64) {
				t.Fatalf("%d keys and %d shares at %v; want about %d at most", s.Keys, s.Fallback.Keys, w.since(), maxKeys)
			}
			w.sleep(50 * time.Millisecond)
		}
		s := l.Stats()
		if s.Fallback.Keys < maxKeys/2 || s.Fallback.Lost+s.Fallback.Forgiven+s.Fallback.Owed != s.Fallback.Admitted || s.Fallback.Lost == 0 {
			t.Errorf("%+v; want this test to fill the tables, and each token to be owed, forgiven or lost", s.Fallback)
		}
		// A token for each key until there are too many, then none: each may be one
		// that had its token.
		between(t, "admitted without Redis", float64(s.Fallback.Admitted), maxKeys+0.9*seconds, maxKeys+64+seconds+1)
		if peak := tr.peak(); peak > float64(limit.Burst)+1 { // what is known is rounded up
			t.Errorf("level %v of %v", peak, limit)
		}

		// The hot key's share was never lost, so its bucket is as empty as the share.
		ln.dead.Store(false)
		w.sleep(3 * time.Second)
		if n := w.bucket("hot").tokens(); n > 5 {
			t.Errorf("%d tokens of %v, drained 3s ago; want 5 at most", n, limit)
		}
		w.sleep(100*time.Second + 10*time.Second)
		if s := l.Stats().Fallback; s.Keys != 0 || s.Owed != 0 {
			t.Errorf("%+v two minutes later; want no shares left", s)
		}
	})
}

// A client whose connections are all in use is this node's trouble, not Redis's:
// five connections for 500 callers who share calls are enough, and if somebody
// else has them all and the pool says so, that is no outage. If it does not say so
// before RedisTimeout, nobody should wait that long again and again: then shares
// decide until there is a connection.
func TestF18_OwnOverload(t *testing.T) {
	server := redistest.Start(t)
	for name, c := range map[string]struct {
		opts redis.Options
		hogs int  // who keep a connection each
		late bool // nothing tells that the time-out was spent waiting for a connection
	}{
		"many callers":          {redis.Options{PoolSize: 5}, 0, false},
		"in use, pool gives up": {redis.Options{PoolSize: 5, PoolTimeout: 10 * time.Millisecond}, 10, false},
		"in use":                {redis.Options{PoolSize: 5}, 10, true},
		"in use, ctx heeded":    {redis.Options{PoolSize: 5, ContextTimeoutEnabled: true}, 10, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c.opts.Addr = server.Addr()
			rdb := redis.NewClient(&c.opts)
			defer rdb.Close()
			l, err := hybrid.New(rdb, hybrid.PerSecond(1000, 2000), hybrid.Options{Prefix: name, RedisTimeout: 300 * time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close(context.Background())
			if d, err := l.Allow(t.Context(), "k"); err != nil || d.Source != hybrid.SourceStore {
				t.Fatalf("Allow = %+v, %v", d, err)
			}
			var callers, hogs sync.WaitGroup
			stop := make(chan struct{})
			for range c.hogs {
				hogs.Go(func() {
					for range 2 {
						rdb.BLPop(context.Background(), time.Second, "nothing here")
					}
				})
			}
			time.Sleep(10 * time.Millisecond)
			for i := range 500 {
				callers.Go(func() {
					for {
						if _, err := l.Allow(context.Background(), fmt.Sprint("k", i)); err != nil {
							t.Error(err)
						}
						select {
						case <-stop:
							return
						case <-time.After(200 * time.Millisecond):
						}
					}
				})
			}
			time.Sleep(time.Second)
			s := l.Stats()
			if c.hogs > 0 && s.NotExecuted+s.Unknown == 0 {
				t.Error("no call went wrong; want the connections in use")
			}
			if f := s.Fallback; !c.late && (f.Degraded || f.Trips != 0 || f.Probes != 0) {
				t.Errorf("%+v; want no outage of a healthy Redis", f)
			}
			close(stop)
			callers.Wait()
			hogs.Wait()
			waitFor(t, time.Second, "Redis decides", func() bool {
				d, err := l.Allow(t.Context(), fmt.Sprint(time.Now()))
				return err == nil && d.Source == hybrid.SourceStore
			})
		})
	}
}

// After a minute without Redis there is no queue of what happened: one debt a
// key, however many requests, refunds and resets there were.
func TestF19_NothingIsReplayed(t *testing.T) {
	const keys = 10
	limit := hybrid.PerSecond(1, 50)
	bubble(t, func(t *testing.T, w *world) {
		w.warm()
		ln := newLine(time.Millisecond)
		l := w.nodeOver(ln, limit, hybrid.Options{})
		ask := func(i int) {
			if _, err := l.Allow(t.Context(), fmt.Sprint("k", i%keys)); err != nil {
				t.Fatal(err)
			}
		}
		for i := range keys {
			ask(i)
		}
		ln.dead.Store(true)
		for i := range 6000 {
			ask(i)
			if i%5 == 0 {
				// Taken off what is owed, or refused at once.
				if err := l.Refund(t.Context(), fmt.Sprint("k", i%keys), 1); err != nil && !errors.Is(err, hybrid.ErrNotExecuted) {
					t.Errorf("Refund without Redis = %v; want nil or ErrNotExecuted", err)
				}
				if err := l.Reset(t.Context(), fmt.Sprint("k", i%keys)); !errors.Is(err, hybrid.ErrNotExecuted) {
					t.Errorf("Reset without Redis = %v; want ErrNotExecuted", err)
				}
			}
			w.sleep(10 * time.Millisecond)
		}
		var sent atomic.Int64
		count := func(cmds []redis.Cmder) error {
			for _, cmd := range cmds {
				if !isBeat(cmd) {
					sent.Add(int64(keysOf(cmd)))
				}
			}
			return nil
		}
		ln.fault.Store(&count)
		before := l.Stats().Fallback
		ln.dead.Store(false)
		w.sleep(heals)
		s := l.Stats().Fallback
		if n := sent.Load(); n > 5+keys {
			t.Errorf("calls for %d keys after %d requests; want a probe or few, and %d debts", n, 6000, keys)
		}
		if s.Owed != 0 || s.Charged > keys*limit.Burst || s.Charged+s.Forgiven != s.Admitted || before.Owed == 0 {
			t.Errorf("%+v, before %+v; want all settled, at most a burst charged for each key", s, before)
		}
	})
}

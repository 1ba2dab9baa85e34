package hybrid_test

import (
	"cmp"
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
)

// loadWall is load with the server's wall clock, which is this machine's: times are
// since 1970.
func loadWall(t *testing.T, nodes []*hybrid.Limiter, key string, span time.Duration) []lease.Admission {
	t.Helper()
	var (
		mu    sync.Mutex
		trace []lease.Admission
		wg    sync.WaitGroup
		end   = time.Now().Add(span)
	)
	wall := func() time.Duration { return time.Duration(time.Now().UnixNano()) }
	for _, n := range nodes {
		for range 3 {
			wg.Go(func() {
				var mine []lease.Admission
				for time.Now().Before(end) {
					a := lease.Admission{Start: wall(), N: 1 + rand.Int64N(3)}
					d, err := n.AllowN(context.Background(), key, a.N)
					a.End = wall()
					if err != nil {
						t.Errorf("AllowN = %v, want a decision", err)
						return
					}
					if d.Allowed {
						mine = append(mine, a)
					}
					time.Sleep(rand.N(4 * time.Millisecond))
				}
				mu.Lock()
				trace = append(trace, mine...)
				mu.Unlock()
			})
		}
	}
	wg.Wait()
	slices.SortFunc(trace, func(a, b lease.Admission) int { return cmp.Compare(a.Start, b.Start) })
	return trace
}

// densest returns the most tokens of admissions that lie wholly inside a window of
// length w, which may begin anywhere or, if aligned, at multiples of w: no matter
// when exactly each was decided.
func densest(trace []lease.Admission, w time.Duration, aligned bool) (most int64) {
	for i, first := range trace {
		from := first.Start
		if aligned {
			from = from.Truncate(w)
		}
		sum := int64(0)
		for _, a := range trace[i:] {
			if a.Start >= from+w {
				break
			}
			if a.End < from+w {
				sum += a.N
			}
		}
		most = max(most, sum)
	}
	return most
}

// Eight nodes at once on a real server keep to the bound of each algorithm, and use
// what it allows.
func TestAlgorithmsOnRealRedis(t *testing.T) {
	server := redistest.Start(t)
	const span = 3 * time.Second
	for _, limit := range []hybrid.Limit{
		{Rate: 1000, Burst: 300, Algorithm: hybrid.LeakyBucket},
		hybrid.PerWindow(400, 500*time.Millisecond, hybrid.FixedWindow),
		hybrid.PerWindow(3, 20*time.Millisecond, hybrid.FixedWindow), // too few to lease
		hybrid.PerWindow(200, 500*time.Millisecond, hybrid.SlidingLog),
		hybrid.PerWindow(200, 500*time.Millisecond, hybrid.SlidingCounter),
	} {
		t.Run(limit.String(), func(t *testing.T) {
			t.Parallel()
			rdb := server.Client(t)
			var nodes []*hybrid.Limiter
			for range 8 {
				n, err := hybrid.New(rdb, limit, hybrid.Options{RedisTimeout: 2 * time.Second})
				if err != nil {
					t.Fatal(err)
				}
				nodes = append(nodes, n)
			}
			trace := loadWall(t, nodes, "bound "+limit.String(), span)
			w := limit.Window()
			check := func(what string, got, most int64) {
				t.Helper()
				if got > most {
					t.Errorf("%s = %d; want at most %d", what, got, most)
				} else {
					t.Logf("%s = %d of %d", what, got, most)
				}
			}
			switch limit.Algorithm {
			case hybrid.LeakyBucket:
				if peak := lease.PeakLevel(limit, trace); peak > float64(limit.Burst) {
					t.Errorf("peak level = %.2f; want at most %d", peak, limit.Burst)
				}
			case hybrid.FixedWindow:
				check("admitted in an aligned window", densest(trace, w, true), limit.Burst)
				check("admitted in any window", densest(trace, w, false), 2*limit.Burst)
			case hybrid.SlidingLog:
				check("admitted in any window", densest(trace, w, false), limit.Burst)
			case hybrid.SlidingCounter:
				check("admitted in an aligned window", densest(trace, w, true), limit.Burst)
				check("admitted in any window", densest(trace, w, false), 2*limit.Burst-1)
			}
			if got, ideal := float64(admitted(trace)), limit.Rate*span.Seconds(); got < 0.5*ideal {
				t.Errorf("admitted %.0f of %.0f, want at least half", got, ideal)
			} else {
				t.Logf("admitted %.0f %% of the rate", 100*got/ideal)
			}
			calls, leased := int64(0), int64(0)
			for _, n := range nodes {
				if err := n.Close(t.Context()); err != nil {
					t.Errorf("Close = %v", err)
				}
				s := n.Stats()
				calls += s.Calls
				leased += s.Returned + s.Expired
			}
			balanced(t, nodes)
			if !limit.Algorithm.Leases() && leased > 0 {
				t.Errorf("%d tokens were leased; want none", leased)
			}
			t.Logf("%d calls for %d admissions", calls, len(trace))
		})
	}
}

package lease

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// TestScenario23_Suspended has the wall clock jump while the monotonic one
// stands still, as on a machine that slept: all leases are dropped at the next
// tick, and what became of them is not reported.
func TestScenario23_Suspended(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var asleep atomic.Int64
		var reported, granted atomic.Int64
		c, err := New(grants(func(call Call) Grant {
			for _, r := range call.Reports {
				reported.Add(r.Spent + r.Returned)
			}
			granted.Add(call.Want)
			return Grant{Tokens: call.Want, Bound: call.Bound, TTL: 950 * time.Millisecond, Source: SourceStore}
		}), Limit{Rate: 1000, Burst: 1e6}, Options{LeasePeriod: 500 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		c.dog.wall = func() int64 { return time.Now().UnixNano() + asleep.Load() }
		take := func() Decision {
			d, err := c.Take(t.Context(), "k", 1)
			if err != nil || !d.Allowed {
				t.Fatalf("Take = %+v, %v: want allowed", d, err)
			}
			return d
		}
		for c.Stats().Live < 100 {
			take()
			synctest.Wait()
		}
		time.Sleep(10 * time.Millisecond)
		if d := take(); d.Source != SourceLease {
			t.Errorf("before the machine sleeps: %+v: want a use of the lease", d)
		}
		before := reported.Load()
		asleep.Store(int64(time.Minute))
		time.Sleep(2 * tick)
		s := c.Stats()
		if s.Live != 0 || s.Suspended != 1 {
			t.Errorf("a tick after it slept: %d live, suspended %d times: want 0, 1", s.Live, s.Suspended)
		}
		if d := take(); d.Source != SourceStore {
			t.Errorf("after it slept: %+v: want a call", d)
		}
		if n := reported.Load(); n != before {
			t.Errorf("reported %d tokens of dropped leases: want 0", n-before)
		}
		if err := c.Close(context.Background()); err != nil {
			t.Error(err)
		}
		if s := c.Stats(); s.Granted != s.Spent+s.Returned+s.Expired+s.Lost+s.Live {
			t.Errorf("%+v: want a ledger without rest", s)
		}
	})
}

// grants makes a function a Store.
type grants func(call Call) Grant

func (f grants) Acquire(_ context.Context, calls []Call) []Answer {
	answers := make([]Answer, len(calls))
	for i, c := range calls {
		answers[i].Grant = f(c)
	}
	return answers
}

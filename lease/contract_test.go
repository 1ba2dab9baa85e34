package lease_test

import (
	"context"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// TestLoweredBelowTheLeases: the largest numbers, with more out on lease than the
// new burst, stay exact.
func TestLoweredBelowTheLeases(t *testing.T) {
	clock := leasetest.NewClock()
	s := leasetest.NewStore(clock.Now)
	call := lease.Call{Key: "k", Limit: lease.Limit{Rate: 1e9, Burst: 1e13}, TTL: time.Second, LastEpoch: -1, Want: 1e13, Share: lease.ShareNone}
	s.Acquire(context.Background(), []lease.Call{call})
	call.Limit = lease.Limit{Rate: 1, Burst: 10}
	call.Want = 0
	call.Reset = true
	a := s.Acquire(context.Background(), []lease.Call{call})[0]
	t.Logf("%+v", a.Grant)
	call.Reset = false
	call.Want = 10
	for range 5 {
		clock.Advance(100 * time.Millisecond)
		a = s.Acquire(context.Background(), []lease.Call{call})[0]
		t.Logf("%d remaining %d out %d retry %v", a.Grant.Tokens, a.Grant.Remaining, a.Grant.Outstanding, a.Grant.RetryAfter)
		if a.Grant.Tokens > 0 {
			t.Error("granted beside 1e13 outstanding of a burst of 10")
		}
	}
}

type zero struct{ n int }

func (z *zero) Acquire(_ context.Context, calls []lease.Call) []lease.Answer {
	if z.n++; z.n > 100000 {
		panic("100000 calls in one Take")
	}
	return make([]lease.Answer, len(calls))
}

// TestZeroGrant: a Store that grants nothing and promises nothing is not asked
// without end.
func TestZeroGrant(t *testing.T) {
	n, _ := lease.NewStepped(&zero{}, lease.Limit{Rate: 10, Burst: 10}, lease.Options{})
	_, _ = n.Take(context.Background(), "k", 1)
}

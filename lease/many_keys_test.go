package lease_test

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// generous is a store that grants what it is asked for.
type generous struct{ calls, leased int64 }

func (s *generous) Acquire(_ context.Context, calls []lease.Call) []lease.Answer {
	answers := make([]lease.Answer, len(calls))
	for i, c := range calls {
		answers[i].Grant = lease.Grant{
			Tokens: c.Want, Bound: c.Bound, TTL: c.TTL * 95 / 100, Remaining: 9, Source: lease.SourceStore, Limit: c.Limit,
		}
		s.leased += c.Want - c.Bound
	}
	s.calls += int64(len(calls))
	return answers
}

// Keys that are asked for every ten seconds, fifteen times as many as are kept: no
// lease is worth it, each request is one call, and memory is what MaxKeys allows. It
// is the same for a million of them and MaxKeys of 65536, which takes minutes under
// the race detector.
func TestScenario50_ManySlowKeys(t *testing.T) {
	const keys, most = 60_000, 1 << 12
	store := &generous{}
	n, err := lease.NewStepped(store, lease.Limit{Rate: 1, Burst: 10}, lease.Options{MaxKeys: most})
	if err != nil {
		t.Fatal(err)
	}
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for i := range keys {
		n.Advance(time.Duration(i) * 10 * time.Second / keys)
		if d, err := n.Take(context.Background(), fmt.Sprint("user:", i), 1); err != nil || !d.Allowed {
			t.Fatalf("key %d: %+v, %v: want it admitted", i, d, err)
		}
	}
	s, grown := n.Stats(), heap()-before
	t.Logf("%d bytes a key kept", grown/most)
	if s.Keys > most || grown > most*1024 {
		t.Errorf("%d keys and %d bytes kept: want at most %d keys, of a kilobyte", s.Keys, grown, most)
	}
	if store.calls != keys || store.leased != 0 || s.Live != 0 {
		t.Errorf("%d calls, %d tokens leased, %d live: want a call for each request, and nothing leased", store.calls, store.leased, s.Live)
	}
}

// A flood of new keys neither grows memory nor takes a busy key's lease away.
func TestScenario51_KeyFlood(t *testing.T) {
	const most = 1024
	limit := lease.Limit{Rate: 1000, Burst: 1000}
	calls := func(flood int) int64 {
		w := leasetest.NewNodes(t, leasetest.InMemory, 1, limit, lease.Options{MaxKeys: most})
		hot := 0
		for i := range 100 { // milliseconds
			w.Advance(time.Millisecond)
			if w.Take(0, "hot", 1).Allowed {
				hot++
			}
			for k := range flood {
				w.Take(0, fmt.Sprint("flood", i, "/", k), 1)
			}
		}
		s := w.Node(0).Stats()
		if hot != 100 || s.Keys > most {
			t.Errorf("%d of 100 admitted on the busy key, %d keys kept: want all, and at most %d", hot, s.Keys, most)
		}
		return w.Calls() - 100*int64(flood)
	}
	alone, flooded := calls(0), calls(100) // 100 000 new keys a second
	t.Logf("calls for the busy key: %d alone, %d in the flood", alone, flooded)
	if flooded > alone+1 {
		t.Errorf("%d calls for the busy key in the flood, %d without: want about as many", flooded, alone)
	}
}

package lease_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

func TestSetLimitsRefuses(t *testing.T) {
	n, _, _ := newTiers(t, tiers{"a": {Rate: 1, Burst: 10}})
	good := lease.Limit{Rate: 1, Burst: 5}
	if err := n.SetLimits(good, 3); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		limits  lease.Limits
		version int64
		want    error
	}{
		"nil":         {nil, 4, nil},
		"a bad limit": {lease.Limit{Rate: -1, Burst: 1}, 4, lease.ErrLimit},
		"negative":    {good, -1, nil},
		"too large":   {good, 1<<53 + 1, nil},
		"older":       {good, 2, nil},
		"none":        {good, 0, nil},
	} {
		err := n.SetLimits(c.limits, c.version)
		if err == nil || c.want != nil && !errors.Is(err, c.want) {
			t.Errorf("%s: SetLimits = %v: want an error", name, err)
		}
		if bad, ok := errors.AsType[*lease.OptionError](err); name != "nil" && c.want == nil && (!ok || bad.Field != "Version") {
			t.Errorf("%s: SetLimits = %v: want an *OptionError about Version", name, err)
		}
	}
	// The same version again is no change, whatever it says.
	if err := n.SetLimits(lease.Limit{Rate: 1, Burst: 9}, 3); err != nil {
		t.Errorf("the same version = %v: want nil", err)
	}
	if d, err := n.Take(context.Background(), "a:", 1); err != nil || d.Limit.Burst != 5 {
		t.Errorf("%+v, %v: want version 3's limit", d, err)
	}
}

// The limit of a key that is not known any more, or is wrong, is told to who asks.
func TestSetLimitsToAWrongOne(t *testing.T) {
	n, store, _ := newTiers(t, tiers{"a": {Rate: 1, Burst: 10}, "b": {Rate: 1, Burst: 10}})
	for _, key := range []string{"a:", "b:"} {
		if _, err := n.Take(context.Background(), key, 1); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.SetLimits(tiers{"a": {Rate: -1, Burst: 10}, "b": {}}, 1); err != nil {
		t.Fatal(err)
	}
	calls := store.Calls()
	if d, err := n.Take(context.Background(), "a:", 1); !errors.Is(err, lease.ErrLimit) || d.Allowed {
		t.Errorf("a limit that is wrong: %+v, %v: want ErrLimit", d, err)
	}
	if d, err := n.Take(context.Background(), "b:", 1); err != nil || d.Allowed || d.Source != lease.SourceLimit {
		t.Errorf("no limit: %+v, %v: want it denied by the limit", d, err)
	}
	if store.Calls() != calls {
		t.Errorf("%d calls: want none", store.Calls()-calls)
	}
	if err := n.SetLimits(tiers{"a": {Rate: 1, Burst: 5}, "b": {Rate: 1, Burst: 5}}, 2); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"a:", "b:"} {
		if d, err := n.Take(context.Background(), key, 1); err != nil || !d.Allowed || d.Limit.Burst != 5 {
			t.Errorf("%s with a limit again: %+v, %v: want it admitted", key, d, err)
		}
	}
}

// Limits that are the same again touch no bucket, and limits that came with a
// request stay.
func TestSetLimitsToTheSame(t *testing.T) {
	l := lease.Limit{Rate: 1, Burst: 10}
	n, store, _ := newTiers(t, tiers{"a": l})
	for range 10 {
		if _, err := n.Take(context.Background(), "a:", 1); err != nil {
			t.Fatal(err)
		}
	}
	before := store.Bucket("a:")
	refused, err := n.Take(context.Background(), "a:", 1)
	if err != nil || refused.Allowed {
		t.Fatalf("%+v, %v: want it refused", refused, err)
	}
	calls := store.Calls()
	if err := n.SetLimits(lease.LimitFunc(func(string) lease.Limit { return l }), 0); err != nil {
		t.Fatal(err)
	}
	if d, err := n.Take(context.Background(), "a:", 1); err != nil || d.Allowed || d.Source != lease.SourceMemory || store.Calls() != calls {
		t.Errorf("the same limit: %+v, %v, %d calls: want the refusal remembered", d, err, store.Calls()-calls)
	}
	if after := store.Bucket("a:"); after != before {
		t.Errorf("bucket %+v, then %+v: want it untouched", before, after)
	}

	asked := lease.Limit{Rate: 2, Burst: 20}
	if _, err := n.TakeLimit(context.Background(), "b:", asked, 1); err != nil {
		t.Fatal(err)
	}
	if err := n.SetLimits(lease.Limit{Rate: 3, Burst: 30}, 0); err != nil {
		t.Fatal(err)
	}
	if d, err := n.Take(context.Background(), "b:", 1); err != nil || d.Limit != asked {
		t.Errorf("a limit that came with a request: %+v, %v: want it kept", d, err)
	}
}

// A limit lowered tenfold under full load, half of the nodes not told: from then on
// no more than the new burst, the new rate, and what was out; and within two periods
// all go by it. Raised again it gives no burst for nothing.
func TestSetLimitsUnderLoad(t *testing.T) {
	high, low := lease.Limit{Rate: 2000, Burst: 2000}, lease.Limit{Rate: 200, Burst: 200}
	const period = 200 * time.Millisecond
	w := leasetest.NewNodes(t, leasetest.InMemory, 4, high, lease.Options{LeasePeriod: period, Version: 1})
	w.Allow(1e9) // judged here, by the limit in force
	r := rand.New(rand.NewPCG(1, 2))
	var level *lease.Level
	shown := make([]lease.Limit, 4)
	offer := func(d time.Duration, total float64) (admitted int) {
		leasetest.Arrivals(r, w.Now(), w.Now()+d, 1, leasetest.Even(4, total), func(at time.Duration, i int) {
			w.Advance(at - w.Now())
			d := w.Take(i, "k", 1)
			shown[i] = d.Limit
			if d.Allowed {
				admitted++
				level.Add(w.Now(), 1)
			}
		})
		return admitted
	}
	set := func(l lease.Limit, version int64) {
		for i := range 2 {
			if err := w.Node(i).SetLimits(l, version); err != nil {
				t.Fatal(err)
			}
		}
	}
	level = mustLevel(t, high)
	offer(5*time.Second, 6000)
	if level.Peak() > 2000 {
		t.Errorf("level = %.1f before: want at most the burst", level.Peak())
	}

	out := int64(0) // by the store, which may know of more than is live
	for i := range 4 {
		leased, kept := w.Node(i).Held("k")
		out += leased + kept
	}
	set(low, 2)
	level = mustLevel(t, low)
	before := w.Look("k").Outstanding
	offer(2*period, 6000)
	for i, l := range shown {
		if l.Burst != low.Burst {
			t.Errorf("node %d goes by %v two periods later: want %v", i, l, low)
		}
	}
	offer(5*time.Second, 6000)
	t.Logf("lowered with %d out, %d by the store: level %.1f", out, before, level.Peak())
	if most := float64(200 + max(before, out)); level.Peak() > most {
		t.Errorf("level = %.1f after it was lowered: want at most burst + outstanding, %.0f", level.Peak(), most)
	}

	set(high, 3)
	level = mustLevel(t, high)
	first := offer(time.Second, 6000)
	t.Logf("raised: %d in the first second", first)
	if first > 200+2000+100 || first < 1500 {
		t.Errorf("%d admitted in the second after it was raised: want no burst for nothing, and the new rate", first)
	}
}

// Readers see the old limits or the new ones, never a rate of one with the burst of
// the other.
func TestSetLimitsIsAtomic(t *testing.T) {
	store := leasetest.NewStore(func() time.Duration { return time.Duration(time.Now().UnixNano()) })
	limit := func(i int64) lease.Limit { return lease.Limit{Rate: float64(1000 + i), Burst: 1000 + i} }
	c, err := lease.New(store, limit(0), lease.Options{LeasePeriod: 5 * time.Millisecond, Version: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			last := int64(0)
			for {
				select {
				case <-stop:
					return
				default:
				}
				d, err := c.Take(context.Background(), "k", 1)
				if err != nil || d.Limit.Rate != float64(d.Limit.Burst) {
					t.Errorf("%+v, %v: want rate and burst of one version", d, err)
					return
				}
				last = max(last, d.Limit.Burst)
			}
		})
	}
	for i := int64(1); i <= 200; i++ {
		if err := c.SetLimits(limit(i), 1+i); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Millisecond / 2)
	}
	close(stop)
	readers.Wait()
}

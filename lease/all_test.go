package lease_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// tiers is a limit by the first word of a key.
type tiers map[string]lease.Limit

func (m tiers) For(key string) lease.Limit {
	tier, _, _ := strings.Cut(key, ":")
	return m[tier]
}

// hardly is a rate at which nothing comes in while a test runs.
const hardly = 1e-3

// newTiers is a node on an in-memory store.
func newTiers(t *testing.T, limits tiers) (lease.Stepped, *leasetest.Store, *leasetest.Clock) {
	t.Helper()
	clock := leasetest.NewClock()
	store := leasetest.NewStore(clock.Now)
	n, err := lease.NewStepped(store, limits, lease.Options{Timeout: 30 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	return n, store, clock
}

func ask(keys ...string) (requests []lease.Request) {
	for _, key := range keys {
		requests = append(requests, lease.Request{Key: key, N: 1})
	}
	return requests
}

// Of three limits the middle one refuses most: the others are charged with what was
// admitted and no more, whether they lease or not.
func TestScenario52_SeveralLimits(t *testing.T) {
	for _, burst := range []int64{100_000, 400} { // with leases, and with hardly any
		t.Run(fmt.Sprint(burst), func(t *testing.T) {
			n, store, clock := newTiers(t, tiers{"user": {Rate: hardly, Burst: burst}, "tenant": {Rate: hardly, Burst: 50}, "all": {Rate: 1000, Burst: burst}})
			start, admitted := clock.Now(), int64(0)
			for i := range 300 {
				clock.Set(start + time.Duration(i)*time.Millisecond)
				n.Advance(clock.Now() - start)
				d, err := n.TakeAll(context.Background(), ask("user:1", "tenant:1", "all:"))
				if err != nil {
					t.Fatal(err)
				}
				if d.Allowed {
					admitted++
				} else if d.Index != 1 || d.RetryAfter < 10*time.Minute || d.Limit.Burst != 50 {
					t.Fatalf("request %d: %+v: want it refused by the tenant's limit", i, d)
				}
			}
			if admitted != 50 {
				t.Errorf("%d admitted: want what the tenant may, 50", admitted)
			}
			leasetest.CheckLedger(t, store.Granted()["user:1"]+store.Granted()["tenant:1"]+store.Granted()["all:"], n.Stats())
			if err := n.Close(context.Background()); err != nil {
				t.Fatal(err)
			}
			for key, left := range map[string]int64{"user:1": burst - 50, "tenant:1": 0} {
				if b := store.Bucket(key); int64(b.Tokens()) != left || b.Outstanding() != 0 {
					t.Errorf("%s: %.3f tokens left, %d outstanding: want %d, 0", key, b.Tokens(), b.Outstanding(), left)
				}
			}
		})
	}
}

// The first refusal, of which nobody knew, leaves nothing behind on a lease.
func TestAllTakesBack(t *testing.T) {
	for _, warm := range []int{0, 200} { // tokens spent before: enough for a lease
		n, store, clock := newTiers(t, tiers{"user": {Rate: 1, Burst: 1000}, "tenant": {Rate: hardly, Burst: 5}})
		start := clock.Now()
		for range warm {
			clock.Advance(time.Millisecond)
			n.Advance(clock.Now() - start)
			if d, err := n.Take(context.Background(), "user:", 1); err != nil || !d.Allowed {
				t.Fatalf("%+v, %v: want it admitted", d, err)
			}
		}
		drain := lease.Call{Key: "tenant:", Limit: lease.Limit{Rate: hardly, Burst: 5}, TTL: time.Second, Need: 5, Bound: 5, Want: 5, LastEpoch: -1}
		if a := store.Acquire(context.Background(), []lease.Call{drain})[0]; a.Grant.Tokens != 5 {
			t.Fatalf("%+v: want all that the tenant has", a)
		}
		if _, err := n.Take(context.Background(), "user:", 10); err != nil {
			t.Fatal(err)
		}
		spent, held := n.Stats().Spent, func() int64 { leased, _ := n.Held("user:"); return leased }
		if (held() > 0) != (warm > 0) {
			t.Fatalf("%d tokens leased after %d", held(), warm)
		}
		d, err := n.TakeAll(context.Background(), []lease.Request{{Key: "user:", N: 3}, {Key: "tenant:", N: 1}})
		if err != nil || d.Allowed || d.Index != 1 || !d.Each[0].Allowed {
			t.Errorf("TakeAll = %+v, %v: want it refused by the tenant, and by it alone", d, err)
		}
		if got := n.Stats().Spent; got != spent {
			t.Errorf("after %d: %d tokens spent by it: want none", warm, got-spent)
		}
		leasetest.CheckLedger(t, store.Granted()["user:"], n.Stats())
		if err := n.Close(context.Background()); err != nil {
			t.Fatal(err)
		}
		b := store.Bucket("user:")
		left := 1000 - int64(warm) - 10
		if warm == 0 {
			left -= 3 // the store charged them at once
		}
		if int64(b.Tokens()) != left || b.Outstanding() != 0 {
			t.Errorf("after %d: %.3f tokens left, %d outstanding: want %d, 0", warm, b.Tokens(), b.Outstanding(), left)
		}
	}
}

// A refusal that is remembered costs no call and no token, wherever it stands.
func TestAllRemembersRefusals(t *testing.T) {
	n, store, _ := newTiers(t, tiers{"a": {Rate: hardly, Burst: 10}, "b": {Rate: hardly, Burst: 1}})
	for range 2 {
		if _, err := n.TakeAll(context.Background(), ask("a:", "b:")); err != nil {
			t.Fatal(err)
		}
	}
	calls := store.Calls()
	for _, requests := range [][]lease.Request{ask("a:", "b:"), ask("b:", "a:"), ask("new:", "b:")[1:]} {
		d, err := n.TakeAll(context.Background(), requests)
		if err != nil || d.Allowed || requests[d.Index].Key != "b:" || d.Source != lease.SourceMemory {
			t.Errorf("TakeAll(%v) = %+v, %v: want it refused from memory of b", requests, d, err)
		}
	}
	if got := store.Calls(); got != calls {
		t.Errorf("%d calls: want none", got-calls)
	}
}

// Of several that refuse, the one that has to wait longest is named.
func TestAllNamesTheLongestWait(t *testing.T) {
	n, _, _ := newTiers(t, tiers{"s": {Rate: 1, Burst: 1}, "m": {Rate: 1.0 / 60, Burst: 1}, "free": {Rate: 1, Burst: 100}})
	if d, err := n.TakeAll(context.Background(), ask("free:", "s:", "m:")); err != nil || !d.Allowed || d.Index != 1 || d.Remaining != 0 {
		t.Errorf("first: %+v, %v: want it admitted, and the decision about an empty bucket", d, err)
	}
	d, err := n.TakeAll(context.Background(), ask("s:", "free:", "m:"))
	if err != nil || d.Allowed || d.Index != 2 && d.Index != 0 || d.RetryAfter < time.Second/2 {
		t.Errorf("second: %+v, %v: want it refused", d, err)
	}
	for _, key := range []string{"s:", "m:"} { // both refusals are remembered now
		if _, err := n.Take(context.Background(), key, 1); err != nil {
			t.Fatal(err)
		}
	}
	if d, err := n.TakeAll(context.Background(), ask("s:", "free:", "m:")); err != nil || d.Index != 2 || d.RetryAfter < 50*time.Second {
		t.Errorf("third: %+v, %v: want the minute's limit named", d, err)
	}
}

func TestAllMistakes(t *testing.T) {
	n, store, _ := newTiers(t, tiers{"a": {Rate: 1, Burst: 10}, "bad": {Rate: -1, Burst: 1}, "none": {}})
	for _, c := range []struct {
		second lease.Request
		want   error
	}{
		{lease.Request{Key: ""}, lease.ErrKey},
		{lease.Request{Key: "a:2", N: 11}, lease.ErrCost},
		{lease.Request{Key: "a:2", N: -1}, lease.ErrCost},
		{lease.Request{Key: "bad:", N: 1}, lease.ErrLimit},
	} {
		d, err := n.TakeAll(context.Background(), []lease.Request{{Key: "a:1", N: 1}, c.second})
		if !errors.Is(err, c.want) || d.Allowed || !strings.Contains(err.Error(), "request 1: ") {
			t.Errorf("%+v: %+v, %v: want %v, and which request", c.second, d, err, c.want)
		}
	}
	if store.Calls() != 0 {
		t.Errorf("%d calls: want none for what cannot be", store.Calls())
	}
	if d, err := n.TakeAll(context.Background(), ask("a:1", "none:")); err != nil || d.Allowed || d.Index != 1 || d.Source != lease.SourceLimit || store.Calls() != 0 {
		t.Errorf("with a limit that denies everything: %+v, %v, %d calls: want it refused by the second, without a call", d, err, store.Calls())
	}
	if d, err := n.TakeAll(context.Background(), nil); err != nil || !d.Allowed || d.Index != -1 {
		t.Errorf("no requests: %+v, %v: want them admitted", d, err)
	}
	if d, err := n.TakeAll(context.Background(), []lease.Request{{Key: "a:1", N: 10}, {Key: "a:2"}}); err != nil || !d.Allowed || d.Index != 0 {
		t.Errorf("with a look: %+v, %v: want it admitted", d, err)
	}
	if err := n.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	if _, err := n.TakeAll(context.Background(), ask("a:1")); !errors.Is(err, lease.ErrClosed) {
		t.Errorf("closed: %v: want ErrClosed", err)
	}
}

// Many nodes and callers, and a network: every limit holds, no token is counted
// twice, and what the callers were told adds up.
func TestAllInABubble(t *testing.T) {
	limits := tiers{"user": {Rate: 200, Burst: 20}, "tenant": {Rate: 300, Burst: 300}, "all": {Rate: 500, Burst: 50}}
	leasetest.InBubble(t, leasetest.InMemory, limits, func(w *leasetest.Bubble) {
		for range 3 {
			w.Add(lease.Options{LeasePeriod: 50 * time.Millisecond}, func() time.Duration { return 2 * time.Millisecond })
		}
		admitted := make([]atomic.Int64, 4)
		var callers sync.WaitGroup
		for i := range 60 {
			callers.Go(func() {
				r := rand.New(rand.NewPCG(uint64(i), 5))
				for range 100 {
					time.Sleep(time.Duration(r.ExpFloat64() * 30e6))
					user := r.IntN(3)
					requests := []lease.Request{{Key: fmt.Sprint("user:", user), N: 1 + r.Int64N(2)}, {Key: "tenant:", N: 1}, {Key: "all:", N: 1 + r.Int64N(3)}}
					ctx, cancel := context.Background(), func() {}
					if r.IntN(10) == 0 {
						ctx, cancel = context.WithTimeout(ctx, time.Millisecond)
					}
					d, err := w.Node(r.IntN(3)).TakeAll(ctx, requests)
					cancel()
					if err != nil && !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("TakeAll = %v: want no error but the context's", err)
					}
					if !d.Allowed || err != nil {
						continue
					}
					admitted[user].Add(1)
					for _, q := range requests {
						// Each was taken before; the trace takes the instant it was told.
						w.Trace.RecordAny(w.Now(), q.Key, q.N, lease.Decision{Allowed: true, Source: lease.SourceLease})
					}
				}
			})
		}
		callers.Wait()
		total := int64(0)
		for i := range 3 {
			if admitted[i].Load() == 0 {
				t.Errorf("user %d was never admitted", i)
			}
			total += admitted[i].Load()
		}
		t.Logf("%d of 6000 admitted", total)
		w.Allow(500 * 0.03) // recorded up to a round trip and a wait later
	})
}

// hooked is a store that does something before it carries out calls.
type hooked struct {
	lease.Store
	before func(calls []lease.Call)
}

func (s hooked) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	s.before(calls)
	return s.Store.Acquire(ctx, calls)
}

// What was charged for nothing goes back only if the bucket cannot have run over
// meanwhile: otherwise others have had its tokens already.
func TestAllGivesBackNothingTwice(t *testing.T) {
	limits := tiers{"a": {Rate: 1000, Burst: 10}, "b": {Rate: hardly, Burst: 1}}
	clock := leasetest.NewClock()
	start := clock.Now()
	store := leasetest.NewStore(clock.Now)
	level := mustLevel(t, limits["a"])
	drain := func() { // by somebody else
		call := lease.Call{Key: "a:", Limit: limits["a"], TTL: 4 * time.Millisecond, Need: 1, Bound: 10, Want: 10, LastEpoch: -1, Share: lease.ShareNone}
		level.Add(clock.Now()-start, store.Acquire(context.Background(), []lease.Call{call})[0].Grant.Tokens)
	}
	n, err := lease.NewStepped(hooked{store, func(calls []lease.Call) {
		if calls[0].Key == "b:" && calls[0].Want > 0 {
			clock.Advance(20 * time.Millisecond)
			drain()
		}
	}}, limits, lease.Options{LeasePeriod: 2 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if d, err := n.Take(context.Background(), "b:", 1); err != nil || !d.Allowed {
		t.Fatalf("b = %+v, %v: want its only token", d, err)
	}
	level = mustLevel(t, limits["a"]) // without what the wait for b let through
	clock.Advance(time.Second)
	n.Advance(clock.Now() - start)
	if d, err := n.TakeAll(context.Background(), []lease.Request{{Key: "a:", N: 10}, {Key: "b:", N: 1}}); err != nil || d.Allowed {
		t.Fatalf("TakeAll = %+v, %v: want it refused by b", d, err)
	}
	drain()
	if level.Peak() > 10 {
		t.Errorf("level = %.1f: want at most the burst, 10", level.Peak())
	}
}

func mustLevel(t *testing.T, l lease.Limit) *lease.Level {
	t.Helper()
	level, err := lease.NewLevel(l)
	if err != nil {
		t.Fatal(err)
	}
	return level
}

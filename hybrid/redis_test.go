package hybrid_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
)

// load asks nodes about key from several goroutines each until span is over,
// and returns what was admitted, in time since the start. Costs are 1 to most.
func load(t *testing.T, nodes []*hybrid.Limiter, key string, workers int, most int64, pause, span time.Duration) []lease.Admission {
	t.Helper()
	var (
		mu    sync.Mutex
		trace []lease.Admission
		wg    sync.WaitGroup
		start = time.Now()
	)
	for _, n := range nodes {
		for range workers {
			wg.Go(func() {
				var mine []lease.Admission
				for time.Since(start) < span {
					a := lease.Admission{Start: time.Since(start), N: 1 + rand.Int64N(most)}
					d, err := n.AllowN(context.Background(), key, a.N)
					a.End = time.Since(start)
					if err != nil {
						t.Errorf("AllowN = %v, want a decision", err)
						return
					}
					if d.Allowed {
						mine = append(mine, a)
					}
					time.Sleep(rand.N(2 * pause))
				}
				mu.Lock()
				trace = append(trace, mine...)
				mu.Unlock()
			})
		}
	}
	wg.Wait()
	return trace
}

func admitted(trace []lease.Admission) (n int64) {
	for _, a := range trace {
		n += a.N
	}
	return n
}

// balanced fails unless every token a node was granted is accounted for.
func balanced(t *testing.T, nodes []*hybrid.Limiter) {
	t.Helper()
	for i, n := range nodes {
		s := n.Stats()
		if s.Granted != s.Spent+s.Returned+s.Expired+s.Lost+s.Live {
			t.Errorf("node %d: granted %d, want spent + returned + expired + lost + live of %+v", i, s.Granted, s)
		}
	}
}

// Eight nodes at once on a real server: the bound holds, the rate is used, and
// a node that closes leaves nothing behind.
func TestBoundOnRealRedis(t *testing.T) {
	server := redistest.Start(t)
	const span = 3 * time.Second
	for limit, least := range map[hybrid.Limit]float64{
		{Rate: 2000, Burst: 1500}: 0.85, // leased for the longest period
		{Rate: 1000, Burst: 100}:  0.8,  // leased for 33 ms
		{Rate: 500, Burst: 5}:     0.4,  // too small to lease: full after 10 ms, and a busy machine loses that
		{Rate: 10, Burst: 20}:     0.85, // slow
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
			key := "bound " + limit.String()
			trace := load(t, nodes, key, 3, min(3, limit.Burst), 2*time.Millisecond, span)
			if peak := lease.PeakLevel(limit, trace); peak > float64(limit.Burst) {
				t.Errorf("peak level = %.2f, want at most %d", peak, limit.Burst)
			}
			ideal := float64(limit.Burst) + limit.Rate*span.Seconds()
			if got := admitted(trace); float64(got) < least*ideal {
				t.Errorf("admitted %d of %.0f possible, want at least %.0f %%", got, ideal, 100*least)
			} else {
				t.Logf("admitted %.1f %% of burst + rate·t", 100*float64(got)/ideal)
			}
			for _, n := range nodes {
				if err := n.Close(t.Context()); err != nil {
					t.Errorf("Close = %v", err)
				}
			}
			balanced(t, nodes)
		})
	}
}

// The same with a bad network: replies are lost after the server executed,
// connections break, everything is slow. What is lost only admits less. Nodes that
// go on by their shares admit those beside what the bucket has, until they are
// charged: at most another burst, and the refill of the longest outage.
func TestBoundOnABadNetwork(t *testing.T) {
	server := redistest.Start(t)
	for policy, most := range map[hybrid.Policy]float64{hybrid.Deny: 400, hybrid.Degrade: 2*400 + 500} {
		t.Run(policy.String(), func(t *testing.T) {
			t.Parallel()
			limit := hybrid.PerSecond(500, 400)
			limit.OnFailure = policy
			boundOnABadNetwork(t, server, limit, most)
		})
	}
}

func boundOnABadNetwork(t *testing.T, server *redistest.Server, limit hybrid.Limit, most float64) {
	var nodes []*hybrid.Limiter
	var proxies []*redistest.Proxy
	for range 4 {
		p := redistest.NewProxy(t, server.Addr())
		proxies = append(proxies, p)
		// The client's own defaults: it would re-send.
		rdb := redis.NewClient(&redis.Options{Addr: p.Addr(), ContextTimeoutEnabled: true})
		t.Cleanup(func() { rdb.Close() })
		n, err := hybrid.New(rdb, limit, hybrid.Options{RedisTimeout: 60 * time.Millisecond, MinNodes: 4})
		if err != nil {
			t.Fatal(err)
		}
		nodes = append(nodes, n)
	}
	stop := make(chan struct{})
	var trouble sync.WaitGroup
	trouble.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(30 * time.Millisecond):
			}
			p := proxies[rand.IntN(len(proxies))]
			switch i % 4 {
			case 0:
				p.DropReplies(1)
			case 1:
				p.CloseOnReply(1)
			case 2:
				p.SetLatency(rand.N(20 * time.Millisecond))
			case 3:
				p.SetLatency(0)
			}
		}
	})
	trace := load(t, nodes, limit.OnFailure.String(), 4, 3, 2*time.Millisecond, 5*time.Second)
	close(stop)
	trouble.Wait()
	peak := lease.PeakLevel(limit, trace)
	if peak > most {
		t.Errorf("peak level = %.2f, want at most %.0f", peak, most)
	}
	unknown := int64(0)
	for _, n := range nodes {
		n.Close(t.Context()) // what its last call met is no matter here
		unknown += n.Stats().Unknown
	}
	balanced(t, nodes)
	if unknown == 0 {
		t.Error("no call had an unknown outcome; the network was not bad")
	}
	t.Logf("admitted %d, peak level %.0f, %d calls with unknown outcome", admitted(trace), peak, unknown)
}

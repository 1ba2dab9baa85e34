package lua

import (
	"context"
	"fmt"
	"net"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// scripted is the Backend of acquire.lua: on a real redis-server if there is
// one, otherwise on miniredis; in a bubble always on miniredis, for a bubble
// has no sockets.
func scripted(t *testing.T) leasetest.Backend {
	t.Helper()
	b := leasetest.Backend{Live: live, Virtual: inProcess}
	if _, err := exec.LookPath("redis-server"); err == nil {
		b.Virtual = onServer(redistest.Start(t).Client(t))
		b.NoExpiry = true
	}
	return b
}

var prefixes atomic.Int64

// onServer makes stores on a real redis-server, with the script's TIME replaced
// by the test's clock: the server's own Lua, at a time the test decides.
func onServer(rdb *redis.Client) func(testing.TB, *leasetest.Clock) lease.Store {
	return func(_ testing.TB, clock *leasetest.Clock) lease.Store {
		s := NewStore(rdb, Options{Prefix: fmt.Sprintf("t%d:", prefixes.Add(1))})
		s.setClock(clock.Now)
		s.keepForever()
		return s
	}
}

// inProcess makes a store on a miniredis of its own, whose clock is the test's.
func inProcess(t testing.TB, clock *leasetest.Clock) lease.Store {
	m := miniredis.RunT(t)
	opts := redistest.Options(m.Addr())
	opts.ReadTimeout = 10 * time.Second // no test of time: a busy machine may stand still for one
	rdb := redis.NewClient(opts)
	t.Cleanup(func() { rdb.Close() })
	m.ClockTTL(true)
	clock.OnSet(func(now time.Duration) { m.SetTime(time.Unix(0, int64(now))) })
	s := NewStore(rdb, Options{})
	s.setClock(clock.Now)
	return s
}

// live makes a store on a miniredis in a bubble: reached without a socket, so
// that fake time moves for all of it, the script's TIME and key expiry too.
func live(t testing.TB) lease.Store {
	m := miniredis.NewMiniRedis()
	t.Cleanup(m.Close)
	m.ClockTTL(true)
	opts := redistest.Options("in process")
	opts.Dialer = func(context.Context, string, string) (net.Conn, error) { return m.Dial() }
	rdb := redis.NewClient(opts)
	t.Cleanup(func() { rdb.Close() })
	return NewStore(rdb, Options{})
}

func TestStoreInProcess(t *testing.T) {
	leasetest.TestStore(t, leasetest.Backend{Virtual: inProcess})
}

func TestStoreOnServer(t *testing.T) {
	leasetest.TestStore(t, leasetest.Backend{Virtual: onServer(redistest.Start(t).Client(t)), NoExpiry: true})
}

// TestExpiryOnServer compares what a real server does with a key's expiry to
// what the reference asks for.
func TestExpiryOnServer(t *testing.T) {
	rdb := redistest.Start(t).Client(t)
	clock := leasetest.NewClock()
	s, reference := NewStore(rdb, Options{}), leasetest.NewStore(clock.Now)
	s.setClock(clock.Now)
	for _, c := range []lease.Call{
		{Limit: lease.Limit{Rate: 100, Burst: 100}, TTL: time.Minute, Want: 100},
		{Limit: lease.Limit{Rate: 100, Burst: 100}, TTL: time.Minute, Want: 1},
		{Limit: lease.Limit{Rate: 1.0 / 3600, Burst: 20}, TTL: time.Second, Debt: 20},
		{Limit: lease.Limit{Rate: 1e-6, Burst: 8000}, TTL: 24 * time.Hour, Want: 5000}, // for centuries
	} {
		c.Key, c.LastEpoch = fmt.Sprint(c.Limit, c.Want), -1
		s.Acquire(t.Context(), []lease.Call{c})
		reference.Acquire(t.Context(), []lease.Call{c})
		got, err := rdb.PTTL(t.Context(), s.RedisKey(c.Key)).Result()
		if err != nil {
			t.Fatal(err)
		}
		b := reference.Bucket(c.Key)
		want := time.Duration(b.Expires())*time.Microsecond - clock.Now()
		if got > want || got < want-5*time.Second {
			t.Errorf("%+v: key goes in %v: want %v", c, got, want)
		}
	}
}

// FuzzAcquireOnServer holds acquire.lua, run by a real server, to the Go
// reference.
func FuzzAcquireOnServer(f *testing.F) { fuzzOnServer(f, lease.TokenBucket) }
func FuzzWindowOnServer(f *testing.F)  { fuzzOnServer(f, lease.FixedWindow) }
func FuzzLogOnServer(f *testing.F)     { fuzzOnServer(f, lease.SlidingLog) }
func FuzzCounterOnServer(f *testing.F) { fuzzOnServer(f, lease.SlidingCounter) }

func fuzzOnServer(f *testing.F, a lease.Algorithm) {
	seeds(f)
	v := newVirtual()
	s := NewStore(redistest.Start(f).Client(f), Options{})
	s.setClock(v.read)
	s.keepForever()
	f.Fuzz(func(t *testing.T, data []byte) {
		v.now = newVirtual().now
		same(t, s, v, nil, a, data)
	})
}

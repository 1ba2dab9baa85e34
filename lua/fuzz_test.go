package lua

import (
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// virtual is a clock that only tests move.
type virtual struct{ now time.Duration }

func (v *virtual) read() time.Duration { return v.now }

// newVirtual starts where epochs of different lengths have far numbers.
func newVirtual() *virtual { return &virtual{now: 500_000 * time.Hour} }

// onMiniredis returns a Store on an in-process Redis whose clock is v.
func onMiniredis(t testing.TB, v *virtual) (*Store, *miniredis.Miniredis) {
	m := miniredis.RunT(t)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), MaxRetries: -1, ContextTimeoutEnabled: true, Protocol: 2})
	t.Cleanup(func() { rdb.Close() })
	s := NewStore(rdb, Options{})
	m.ClockTTL(true)
	m.SetTime(time.Unix(0, int64(v.now)))
	s.setClock(v.read)
	return s, m
}

// ops turns fuzz data into calls and pauses.
type ops struct{ data []byte }

func (o *ops) byte() byte {
	if len(o.data) == 0 {
		return 0
	}
	b := o.data[0]
	o.data = o.data[1:]
	return b
}

func (o *ops) pick(values ...int64) int64 { return values[int(o.byte())%len(values)] }

func (o *ops) call(seen []lease.Grant) (lease.Call, time.Duration) {
	limits := []lease.Limit{
		{Rate: 100, Burst: 100},
		{Rate: 10.0 / 60, Burst: 20},
		{Rate: 1.0 / 3600, Burst: 1},
		{Rate: 1e9, Burst: 1e9},
		{Rate: 1.0 / 3, Burst: 7},
		{Rate: 0.123456, Burst: 1000},
	}
	b := o.byte()
	c := lease.Call{Key: "k", Limit: limits[0], TTL: 200 * time.Millisecond, LastEpoch: -1}
	if b&0x80 != 0 {
		c.Limit = limits[int(o.byte())%len(limits)]
		c.Version = o.pick(0, 0, 1, 2, 3)
	}
	if b&0x40 != 0 {
		c.TTL = time.Duration(o.pick(1, 10, 200, 500, 60_000)) * time.Millisecond
	}
	c.Need = o.pick(0, 1, 1, 2, 5, c.Limit.Burst)
	c.Bound = c.Need * o.pick(0, 1, 3)
	c.Want = max(c.Bound, c.Need) + o.pick(0, 0, 1, 10, 50)
	c.Demand = o.pick(0, 1, 10, 1000)
	c.Share = lease.Share(o.byte() % 3)
	if n := len(seen); n > 0 {
		g := seen[n-1-int(o.byte())%min(n, 3)]
		c.LastEpoch = g.Epoch
		if b&1 != 0 {
			c.Reports[0] = lease.Report{Epoch: g.Epoch, Spent: o.pick(0, 1, g.Tokens/2, g.Tokens, g.Tokens+1), Returned: o.pick(0, 1, g.Tokens/2)}
		}
		if b&2 != 0 {
			c.Reports[1] = lease.Report{Epoch: g.Epoch - 1, Spent: o.pick(0, 1, 10), Returned: o.pick(0, 2)}
		}
	}
	if b&4 != 0 {
		c.Refund = o.pick(1, 5, 1e15)
	}
	if b&8 != 0 {
		c.Debt = o.pick(1, 5, 1e15)
	}
	c.Reset = b&0x30 == 0x30
	pause := time.Duration(o.pick(0, 0, 1, 7, 999, 50_000, 100_000, 250_000, 3_600_000_000, -60_000_000)) * time.Microsecond
	return c, pause
}

// window makes c a call under an algorithm with windows, among them some that are
// short, and lets it remember a lost state.
func (o *ops) window(c *lease.Call, a lease.Algorithm) {
	b := o.byte()
	if b&1 != 0 {
		limits := []lease.Limit{{Rate: 100, Burst: 5}, {Rate: 7, Burst: 10}, {Rate: 1000, Burst: 300}, {Rate: 1e6, Burst: 1e6}, {Rate: 1.0 / 86400, Burst: 12}, {Rate: 1e12, Burst: 1e15}}
		c.Limit = limits[int(o.byte())%len(limits)]
		c.Need, c.Bound = min(c.Need, c.Limit.Burst+1), min(c.Bound, 3*(c.Limit.Burst+1))
		if c.Need > 0 {
			c.Bound = c.Bound / c.Need * c.Need
		}
	}
	c.Limit.Algorithm = a
	if b&6 == 6 {
		c.Hint = lease.Hint{Known: true, Tokens: o.pick(-5, 0, 3, c.Limit.Burst, -c.Limit.Burst), Age: time.Duration(o.pick(0, 1000, 40_000, 900_000, 3_000_000)) * time.Microsecond}
	}
}

// same fails unless the script and the reference agree on every operation.
func same(t *testing.T, s *Store, v *virtual, m *miniredis.Miniredis, a lease.Algorithm, data []byte) {
	t.Helper()
	ref := leasetest.NewStore(v.read)
	ref.KeepExpired = m == nil // a real server expires by its own clock
	o := &ops{data: data}
	var seen []lease.Grant
	key := fmt.Sprintf("k%d", fuzzKey.next())
	for i := 0; len(o.data) > 0 && i < 64; i++ {
		c, pause := o.call(seen)
		c.Key = key
		if a.Windowed() {
			o.window(&c, a)
		}
		v.now += pause
		if m != nil {
			m.SetTime(time.Unix(0, int64(v.now)))
		}
		want := ref.Acquire(t.Context(), []lease.Call{c})[0]
		got := s.Acquire(t.Context(), []lease.Call{c})[0]
		if got.Err != nil {
			t.Fatalf("op %d: %+v: %v", i, c, got.Err)
		}
		if got.Grant.Newer && want.Grant.Newer {
			// The limit comes back as a ratio; compare it as one.
			gc, gp, _ := got.Grant.Limit.Ratio()
			wc, wp, _ := want.Grant.Limit.Ratio()
			if gc != wc || gp != wp || got.Grant.Limit.Burst != want.Grant.Limit.Burst {
				t.Fatalf("op %d: %+v: limit in force %v, want %v", i, c, got.Grant.Limit, want.Grant.Limit)
			}
			got.Grant.Limit = want.Grant.Limit // a float64 apart
		}
		if got.Grant != want.Grant {
			t.Fatalf("op %d at %v: %+v\n script %+v\n   want %+v\n bucket %+v\n window %+v", i, v.now, c, got.Grant, want.Grant, ref.Bucket(key), ref.Window(key, a))
		}
		seen = append(seen, got.Grant)
	}
}

type counter struct{ n uint64 }

func (c *counter) next() uint64 { c.n++; return c.n }

var fuzzKey counter

func seeds(f *testing.F) {
	for i := range uint64(64) {
		var b [256]byte
		x := i*0x9e3779b97f4a7c15 + 1
		for j := 0; j < len(b); j += 8 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			binary.LittleEndian.PutUint64(b[j:], x)
		}
		f.Add(b[:])
	}
}

// FuzzAcquire holds acquire.lua, run by miniredis, to the Go reference, and so on.
func FuzzAcquire(f *testing.F) { fuzzScript(f, lease.TokenBucket) }
func FuzzWindow(f *testing.F)  { fuzzScript(f, lease.FixedWindow) }
func FuzzLog(f *testing.F)     { fuzzScript(f, lease.SlidingLog) }
func FuzzCounter(f *testing.F) { fuzzScript(f, lease.SlidingCounter) }

func fuzzScript(f *testing.F, a lease.Algorithm) {
	seeds(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		v := newVirtual()
		s, m := onMiniredis(t, v)
		same(t, s, v, m, a, data)
	})
}

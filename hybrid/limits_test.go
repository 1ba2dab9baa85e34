package hybrid_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lua"
)

func bugNode(t *testing.T, limits hybrid.Limits, opts hybrid.Options) (*hybrid.Limiter, *redis.Client, *miniredis.Miniredis) {
	m := miniredis.RunT(t)
	m.SetTime(time.Now())
	rdb := redis.NewClient(redistest.Options(m.Addr()))
	t.Cleanup(func() { rdb.Close() })
	opts.RedisTimeout = 2 * time.Second
	l, err := hybrid.New(rdb, limits, opts)
	if err != nil {
		t.Fatal(err)
	}
	return l, rdb, m
}

func TestCloseReturnsLeases(t *testing.T) {
	l, rdb, _ := bugNode(t, hybrid.PerSecond(10, 1000), hybrid.Options{LeasePeriod: 10 * time.Second})
	s := lua.NewStore(rdb, lua.Options{})
	for range 200 {
		_, _ = l.Allow(t.Context(), "k")
		if st, _, _ := s.Inspect(t.Context(), "k"); st.Outstanding[0] > 0 {
			break
		}
	}
	if err := l.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	st, _, err := s.Inspect(t.Context(), "k")
	if st.Outstanding != [2]int64{} || err != nil {
		t.Errorf("after Close: %d outstanding, %v; want 0. %+v", st.Outstanding, err, l.Stats())
	}
}

func TestRemainingCountsTheLease(t *testing.T) {
	l, _, _ := bugNode(t, hybrid.PerSecond(1, 10), hybrid.Options{})
	defer l.Close(context.Background())
	if d, err := l.AllowN(t.Context(), "k", 7); err != nil || d.Remaining != 3 {
		t.Errorf("AllowN(7) of 10 = %+v, %v; want 3 remaining", d, err)
	}
}

func TestAllowLimitMeetsEviction(t *testing.T) {
	l, _, m := bugNode(t, hybrid.Limit{}, hybrid.Options{MaxKeys: 1})
	defer l.Close(context.Background())
	limit := hybrid.Limit{Rate: 1000, Burst: 1000000}
	var admitted [40]atomic.Int64
	var byLimit atomic.Int64
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			for i := range 500 {
				k := (g*7 + i) % 40
				d, err := l.AllowLimit(t.Context(), fmt.Sprint("k", k), limit, 1)
				if err != nil {
					t.Error(err)
					return
				}
				if d.Allowed {
					admitted[k].Add(1)
				}
				if d.Source == hybrid.SourceLimit || d.Limit != limit {
					byLimit.Add(1)
				}
			}
		})
	}
	wg.Wait()
	for k := range admitted {
		if n := admitted[k].Load(); n > 1000000 {
			t.Errorf("key %d: admitted %d of 10", k, n)
		}
	}
	if n := byLimit.Load(); n > 0 {
		t.Errorf("%d requests decided by a limit they did not bring", n)
	}
	for _, k := range buckets(m) {
		v, _ := m.Get(k)
		if _, err := lua.Decode(v); err != nil {
			t.Errorf("%s: %v", k, err)
		}
	}
	t.Logf("%+v", l.Stats())
}

func TestZeroLimitMeetsWaiters(t *testing.T) {
	l, rdb, m := bugNode(t, hybrid.Limit{}, hybrid.Options{})
	defer l.Close(context.Background())
	_ = rdb
	limit := hybrid.Limit{Rate: 0.001, Burst: 100} // the clock stands still: 100 in all
	var admitted atomic.Int64
	bad := ""
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for range 500 {
				if g == 0 {
					_, _ = l.AllowLimit(t.Context(), "k", hybrid.Limit{}, 1)
					if v, err := m.Get("hybridlimit:tb1:{k}"); err == nil {
						if _, err := lua.Decode(v); err != nil {
							bad = err.Error()
						}
					}
				} else if d, _ := l.AllowLimit(t.Context(), "k", limit, 1); d.Allowed {
					admitted.Add(1)
				}
			}
		})
	}
	wg.Wait()
	if n := admitted.Load(); n > 100 || bad != "" {
		t.Errorf("admitted %d of 100; %s", n, bad)
	}
}

func TestZeroLimitThenClose(t *testing.T) {
	l, rdb, _ := bugNode(t, hybrid.Limit{}, hybrid.Options{LeasePeriod: 10 * time.Second})
	s := lua.NewStore(rdb, lua.Options{})
	limit := hybrid.Limit{Rate: 0.001, Burst: 1000}
	for range 500 {
		_, _ = l.AllowLimit(t.Context(), "k", limit, 1)
		if st, _, _ := s.Inspect(t.Context(), "k"); st.Outstanding[0] > 0 {
			break
		}
	}
	before, _, _ := s.Inspect(t.Context(), "k")
	_, _ = l.AllowLimit(t.Context(), "k", hybrid.Limit{}, 1)
	l.Close(t.Context())
	if st, found, err := s.Inspect(t.Context(), "k"); err != nil || !found {
		t.Errorf("before %v of %v; after a zero limit and Close: %+v, %v, %v: the next call finds a full bucket", before.Tokens, before.Limit, st, found, err)
	}
}

func TestFullBucketOf2To53Units(t *testing.T) {
	l, rdb, _ := bugNode(t, hybrid.Limit{Rate: 0.95367431640625, Burst: 1 << 33}, hybrid.Options{})
	if err := l.Reset(t.Context(), "k"); err != nil {
		t.Fatal(err)
	}
	if st, found, err := lua.NewStore(rdb, lua.Options{}).Inspect(t.Context(), "k"); err != nil {
		t.Errorf("Inspect = %+v, %v, %v", st, found, err)
	}
}

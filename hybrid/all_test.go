package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
)

// threeTiers are limits by the first word of a key.
func threeTiers(key string) hybrid.Limit {
	switch tier, _, _ := strings.Cut(key, ":"); tier {
	case "tenant":
		return hybrid.PerHour(10, 60) // the one that refuses
	case "user":
		return hybrid.PerSecond(1000, 2000)
	}
	return hybrid.PerSecond(100_000, 100_000)
}

// Several nodes ask for a user, a tenant and the service together, on a server and on
// a cluster where the keys live apart: the tenant's limit decides, and the others are
// charged with what it let through.
func TestAllowAll(t *testing.T) {
	clients := map[string]func(t *testing.T) hybrid.Client{
		"server": func(t *testing.T) hybrid.Client { return redistest.Start(t).Client(t) },
		"cluster": func(t *testing.T) hybrid.Client {
			return redistest.StartCluster(t, 3, 0).Client(t)
		},
	}
	for name, client := range clients {
		t.Run(name, func(t *testing.T) {
			rdb := client(t)
			var nodes []*hybrid.Limiter
			for range 4 {
				l, err := hybrid.New(rdb, hybrid.LimitFunc(threeTiers), hybrid.Options{RedisTimeout: 5 * time.Second})
				if err != nil {
					t.Fatal(err)
				}
				nodes = append(nodes, l)
			}
			var (
				callers  sync.WaitGroup
				admitted atomic.Int64
			)
			for i := range 16 {
				callers.Go(func() {
					for k := range 50 {
						user := fmt.Sprint("user:", (i+k)%3)
						d, err := nodes[i%4].AllowAll(t.Context(), hybrid.Request{Key: "tenant:1", N: 1}, hybrid.Request{Key: user, N: 2}, hybrid.Request{Key: "all", N: 1})
						switch {
						case err != nil:
							t.Errorf("AllowAll = %v; want a decision", err)
						case d.Allowed:
							admitted.Add(1)
						case d.Index != 0 || d.RetryAfter < time.Minute:
							t.Errorf("AllowAll = %+v; want it refused by the tenant's limit, for minutes", d)
						}
					}
				})
			}
			callers.Wait()
			if got := admitted.Load(); got != 60 {
				t.Errorf("%d admitted; want the tenant's burst, 60", got)
			}
			for _, l := range nodes {
				if err := l.Close(context.Background()); err != nil {
					t.Error(err)
				}
				s := l.Stats()
				if sum := s.Spent + s.Returned + s.Expired + s.Lost + s.Live; s.Granted != sum {
					t.Errorf("granted %d; want spent %d + returned %d + expired %d + lost %d + live %d", s.Granted, s.Spent, s.Returned, s.Expired, s.Lost, s.Live)
				}
			}
		})
	}
}

func TestAllowAllMistakes(t *testing.T) {
	l, err := hybrid.New(redistest.Start(t).Client(t), hybrid.PerSecond(10, 10), hybrid.Options{RedisTimeout: 5 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(context.Background())
	_, err = l.AllowAll(t.Context(), hybrid.Request{Key: "a", N: 1}, hybrid.Request{Key: "b", N: 11})
	if bad, ok := errors.AsType[*hybrid.CostError](err); !ok || bad.Cost != 11 || !strings.Contains(err.Error(), "request 1") {
		t.Errorf("cost 11 of 10: %v; want a *CostError that says which request", err)
	}
	if d, err := l.Peek(t.Context(), "a"); err != nil || d.Remaining != 10 {
		t.Errorf("a = %+v, %v; want it untouched", d, err)
	}
}

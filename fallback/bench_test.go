package fallback_test

import (
	"context"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/lease"
)

// degraded returns a node whose store refuses every call, and key "k" of which it
// knows that the bucket was full.
func degraded(b *testing.B, limit lease.Limit) *lease.Cache {
	b.Helper()
	p := newServer()
	s, err := fallback.New(p, fallback.Options{Unknown: fallback.StartFull, Backoff: time.Hour})
	if err != nil {
		b.Fatal(err)
	}
	c, err := lease.New(s, limit, lease.Options{})
	if err != nil {
		b.Fatal(err)
	}
	p.fail(errRefused)
	b.Cleanup(func() {
		c.Close(context.Background())
		s.Close(context.Background())
	})
	for range 1000 {
		if _, err := c.Take(context.Background(), "k", 1); err != nil {
			b.Fatal(err)
		}
	}
	return c
}

func benchmarkDegraded(b *testing.B, limit lease.Limit, allowed bool) {
	c := degraded(b, limit)
	ctx := context.Background()
	hits, local := 0, 0
	b.ReportAllocs()
	for b.Loop() {
		d, err := c.Take(ctx, "k", 1)
		if err != nil {
			b.Fatal(err)
		}
		if d.Allowed == allowed {
			hits++
		}
		if d.Source == lease.SourceLocal {
			local++
		}
	}
	if hits < b.N*9/10 || local != b.N {
		b.Fatalf("of %d decisions %d were as they should be, %d local: the benchmark measures something else", b.N, hits, local)
	}
}

// BenchmarkDegraded is a hit on a hot key while the store is down.
func BenchmarkDegraded(b *testing.B) {
	benchmarkDegraded(b, lease.Limit{Rate: 1e11, Burst: 1e12}, true)
}

// BenchmarkDegradedDenied is a refusal then.
func BenchmarkDegradedDenied(b *testing.B) {
	benchmarkDegraded(b, lease.Limit{Rate: 1, Burst: 100}, false)
}

// BenchmarkRate is what both are measured by: a call of x/time/rate.
func BenchmarkRate(b *testing.B) {
	l := rate.NewLimiter(1e11, 1e12)
	b.ReportAllocs()
	for b.Loop() {
		if !l.Allow() {
			b.Fatal("refused")
		}
	}
}

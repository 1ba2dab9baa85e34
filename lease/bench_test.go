package lease_test

import (
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// BenchmarkTake is a hit on one hot key, without the public API around it.
func BenchmarkTake(b *testing.B) {
	start := time.Now()
	store := leasetest.NewStore(func() time.Duration { return 500_000*time.Hour + time.Since(start) })
	c, err := lease.New(store, lease.Limit{Rate: 1e9, Burst: 1e9}, lease.Options{})
	if err != nil {
		b.Fatal(err)
	}
	ctx := b.Context()
	b.ReportAllocs()
	for b.Loop() {
		d, err := c.Take(ctx, "user:00000000:api", 1)
		if err != nil || !d.Allowed {
			b.Fatal("Take refused: this would time denials, not admissions", d, err)
		}
	}
	b.ReportMetric(float64(store.Calls()), "calls")
	if err := c.Close(ctx); err != nil {
		b.Fatal(err)
	}
}

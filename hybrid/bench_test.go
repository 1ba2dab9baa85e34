package hybrid_test

import (
	"hash/maphash"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// hot returns a Limiter whose hot key never runs dry: every decision timed is
// an admission from memory but for a refill each lease period.
func hot(b *testing.B) *hybrid.Limiter {
	m := miniredis.RunT(b)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), MaxRetries: -1, ContextTimeoutEnabled: true})
	b.Cleanup(func() { rdb.Close() })
	l, err := hybrid.New(rdb, hybrid.PerSecond(1e9, 1e9), hybrid.Options{RedisTimeout: time.Second})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close(b.Context()) })
	return l
}

// key is made at run time, so that its bytes are not the stored key's.
func key(i int) string { return string(append([]byte("user:00000000:ap"), byte('a'+i%26))) }

// BenchmarkFloor is the least a keyed decision costs: hash the key, read a
// coarse clock, one atomic add. BenchmarkAllow is to stay under twice that.
func BenchmarkFloor(b *testing.B) {
	seed := maphash.MakeSeed()
	var clock, tokens atomic.Int64
	tokens.Store(1 << 62)
	k := key(0)
	var sink uint64
	b.ReportAllocs()
	for b.Loop() {
		sink += maphash.String(seed, k)
		if clock.Load() > 0 || tokens.Add(-1) < 0 {
			b.Fatal("floor ran dry")
		}
	}
	if sink == 0 {
		b.Fatal("hash not computed")
	}
}

func BenchmarkAllow(b *testing.B) {
	l := hot(b)
	k := key(0)
	ctx := b.Context()
	refused := 0
	b.ReportAllocs()
	for b.Loop() {
		d, err := l.Allow(ctx, k)
		if err != nil {
			b.Fatal(err)
		}
		if !d.Allowed {
			refused++
		}
	}
	premise(b, l, refused)
}

func BenchmarkKeyAllow(b *testing.B) {
	l := hot(b)
	k, err := l.Key(key(0))
	if err != nil {
		b.Fatal(err)
	}
	ctx := b.Context()
	refused := 0
	b.ReportAllocs()
	for b.Loop() {
		d, err := k.Allow(ctx)
		if err != nil {
			b.Fatal(err)
		}
		if !d.Allowed {
			refused++
		}
	}
	premise(b, l, refused)
}

// premise fails a benchmark that timed anything but admissions from memory.
func premise(b *testing.B, l *hybrid.Limiter, refused int) {
	s := l.Stats()
	if refused > 0 {
		b.Fatalf("%d of %d refused: this timed denials, not admissions", refused, b.N)
	}
	if b.N > 100_000 && s.Calls*1000 > int64(b.N) {
		b.Fatalf("%d Redis calls for %d decisions: this timed the network", s.Calls, b.N)
	}
	b.ReportMetric(float64(s.Calls), "calls")
}

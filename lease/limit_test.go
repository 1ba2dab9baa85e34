package lease_test

import (
	"context"
	"errors"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

func TestLimitValidate(t *testing.T) {
	for _, c := range []struct {
		limit lease.Limit
		field string // of the error; empty for none
	}{
		{lease.Limit{}, ""},
		{lease.Limit{Rate: 10, Burst: 20}, ""},
		{lease.Limit{Rate: 1e12, Burst: 1e15}, ""},
		{lease.Limit{Rate: math.Nextafter(1e12, 2e12), Burst: 1}, "Rate"},
		{lease.Limit{Rate: 1e12, Burst: 1e15 + 1}, "Burst"},
		{lease.Limit{Rate: -1, Burst: 1}, "Rate"},
		{lease.Limit{Rate: math.NaN(), Burst: 1}, "Rate"},
		{lease.Limit{Rate: math.Inf(1), Burst: 1}, "Rate"},
		{lease.Limit{Rate: math.Inf(-1), Burst: 1}, "Rate"},
		{lease.Limit{Rate: 1, Burst: -1}, "Burst"},
		{lease.Limit{Rate: 1, Burst: math.MinInt64}, "Burst"},
		{lease.Limit{Rate: 1e-9, Burst: 1}, ""},            // 32 years
		{lease.Limit{Rate: 1e-9, Burst: 10}, "Burst/Rate"}, // 317 years
		{lease.Limit{Rate: math.SmallestNonzeroFloat64, Burst: 1}, "Burst/Rate"},
		{lease.Limit{Rate: 0, Burst: 1e15}, ""},
		{lease.Limit{Rate: 1e12, Burst: 0}, ""},
	} {
		err := c.limit.Validate()
		var bad *lease.LimitError
		if c.field == "" && err != nil || c.field != "" && (!errors.As(err, &bad) || bad.Field != c.field || !errors.Is(err, lease.ErrLimit)) {
			t.Errorf("%v: Validate = %v: want an error about %q", c.limit, err, c.field)
		}
	}
}

// TestLimitRatio has the rate as a ratio of integers: exactly what was meant for
// the rates people write, within a millionth for any, and the full bucket an
// exact integer.
func TestLimitRatio(t *testing.T) {
	for _, c := range []struct {
		rate         float64
		count, perUS int64
	}{
		{10, 1, 100_000},
		{1000, 1, 1000},
		{1e6, 1, 1},
		{1e9, 1000, 1},
		{1e12, 1e6, 1},
		{10.0 / 60, 1, 6_000_000},
		{1.0 / 3600, 1, 3_600_000_000},
		{100.0 / 3, 1, 30_000},
		{0.1, 1, 10_000_000},
		{2.5, 1, 400_000},
		{1.5, 3, 2_000_000},
		{0.123456, 1929, 15_625_000_000},
	} {
		count, perUS, ok := lease.Limit{Rate: c.rate, Burst: 100}.Ratio()
		if count != c.count || perUS != c.perUS || !ok {
			t.Errorf("Ratio of %v/s = %d, %d, %v: want %d, %d, true", c.rate, count, perUS, ok, c.count, c.perUS)
		}
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		l := lease.Limit{Rate: math.Exp(r.Float64()*40 - 14), Burst: 1 + r.Int64N(1e6)}
		if l.Validate() != nil {
			continue
		}
		count, perUS, ok := l.Ratio()
		if !ok || count < 1 || perUS < 1 || new(big.Int).Mul(big.NewInt(perUS), big.NewInt(l.Burst)).BitLen() > 54 {
			t.Fatalf("Ratio of %v = %d, %d, %v", l, count, perUS, ok)
		}
		if off := math.Abs(float64(count)/float64(perUS)*1e6/l.Rate - 1); off > 1e-6 {
			t.Errorf("Ratio of %v = %d/%d, off by %v: want a millionth at most", l, count, perUS, off)
		}
	}
	for _, l := range []lease.Limit{{}, {Rate: 1}, {Burst: 1}, {Rate: -1, Burst: 1}} {
		if _, _, ok := l.Ratio(); ok {
			t.Errorf("Ratio of %v = true: want false", l)
		}
	}
}

// TestAdoptedRatioIsExact: a node that is told the limit in force sends back the
// very ratio. A float64 in between would become another one at times, and store
// and node would differ for ever.
func TestAdoptedRatioIsExact(t *testing.T) {
	now := 500_000 * time.Hour
	store := leasetest.NewStore(func() time.Duration { return now })
	first := lease.Limit{Rate: 518.8975149023566, Burst: 26799}
	newer, err := lease.NewStepped(store, first, lease.Options{Version: 2})
	if err != nil {
		t.Fatal(err)
	}
	if d, err := newer.Take(t.Context(), "k", 1); err != nil || !d.Allowed {
		t.Fatalf("Take = %+v, %v; want admitted", d, err)
	}
	seen := &recorder{Store: store}
	older, err := lease.NewStepped(seen, lease.Limit{Rate: 10, Burst: 10}, lease.Options{Version: 1})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if d, err := older.Take(t.Context(), "k", 3); err != nil || !d.Allowed {
			t.Fatalf("Take = %+v, %v; want admitted", d, err)
		}
	}
	for i, g := range seen.grants {
		if want := i == 0; g.Newer != want {
			t.Errorf("call %d: Newer = %v, want %v: the limit is adopted once", i, g.Newer, want)
		}
	}
}

// recorder keeps the grants of a Store.
type recorder struct {
	lease.Store
	grants []lease.Grant
}

func (r *recorder) Acquire(ctx context.Context, calls []lease.Call) []lease.Answer {
	answers := r.Store.Acquire(ctx, calls)
	for _, a := range answers {
		r.grants = append(r.grants, a.Grant)
	}
	return answers
}

package bench

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

func TestDemoKeepsTheLimit(t *testing.T) {
	m := miniredis.RunT(t)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), MaxRetries: -1, ContextTimeoutEnabled: true})
	defer rdb.Close()
	r, err := Demo(t.Context(), DemoOptions{Redis: rdb, For: 2 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d of %d ideal admitted, %d calls", r.Total.Admitted, r.IdealAdmitted, r.Total.StoreCalls)
	if r.MaxLevel > float64(r.Burst) {
		t.Errorf("max level = %g, want at most the burst, %d", r.MaxLevel, r.Burst)
	}
	if r.Total.Decisions < 1000 || r.Total.Admitted+r.Total.Denied != r.Total.Decisions || len(r.Nodes) != 3 {
		t.Errorf("report does not add up: %+v", r)
	}
	if r.Total.Admitted*10 < r.IdealAdmitted*9 {
		t.Errorf("admitted %d, want about the ideal %d", r.Total.Admitted, r.IdealAdmitted)
	}
	if r.Total.StoreCalls == 0 || r.Total.DecisionsPerCall < 2 {
		t.Errorf("%g decisions per call, want a lease to serve many", r.Total.DecisionsPerCall)
	}
}

func TestDemoRefusesBadOptions(t *testing.T) {
	for _, o := range []DemoOptions{{For: time.Millisecond}, {For: 2 * time.Hour}, {Limit: hybrid.Limit{Rate: -1, Burst: 1}}} {
		if _, err := Demo(t.Context(), o); err == nil {
			t.Errorf("Demo(%+v) = nil error, want one", o)
		}
	}
}

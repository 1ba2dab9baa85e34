package bench

import (
	"os"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/bench/accesslog"
	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/lease"
)

// sharedTrace is the access log of testdata as requests, its time compressed.
func sharedTrace(t testing.TB, keyName string, speed float64) []Request {
	t.Helper()
	f, err := os.Open("testdata/access.log.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	log, err := accesslog.Read(f, accesslog.Options{})
	if err != nil {
		t.Fatal(err)
	}
	key, err := accesslog.ParseKey(keyName)
	if err != nil {
		t.Fatal(err)
	}
	trace, skipped := Requests(log, key, speed)
	if skipped != 0 || len(trace) != 10_000 {
		t.Fatalf("trace has %d requests and %d skipped, want 10000 and 0", len(trace), skipped)
	}
	return trace
}

func TestReplayPerAddress(t *testing.T) {
	r, err := Replay(t.Context(), sharedTrace(t, "ip", 1), ReplayOptions{
		Limit: hybrid.PerMinute(10, 20), Nodes: 4, Spread: RoundRobin,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", r)
	if r.MaxLevel > 20 {
		t.Errorf("max level = %g, want at most the burst, 20", r.MaxLevel)
	}
	if float64(r.Admitted) < 0.99*float64(r.IdealAdmitted) {
		t.Errorf("admitted %d of %d ideal, want 99%%", r.Admitted, r.IdealAdmitted)
	}
}

func TestReplayOneKey(t *testing.T) {
	for _, spread := range []Spread{RoundRobin, Random} {
		r, err := Replay(t.Context(), sharedTrace(t, "none", 20_000), ReplayOptions{
			Limit: hybrid.PerSecond(500, 500), Nodes: 4, Spread: spread,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s: %+v", spread, r)
		if r.MaxLevel > 500 {
			t.Errorf("%s: max level = %g, want at most the burst, 500", spread, r.MaxLevel)
		}
		if float64(r.Admitted) < 0.97*float64(r.IdealAdmitted) {
			t.Errorf("%s: admitted %d of %d ideal, want 97%%", spread, r.Admitted, r.IdealAdmitted)
		}
		if r.DecisionsPerCall < 10 {
			t.Errorf("%s: %.1f decisions per call, want 10", spread, r.DecisionsPerCall)
		}
	}
}

// Every algorithm keeps to its limit, and admits what its exact reference does but
// for what leases strand.
func TestReplayAlgorithms(t *testing.T) {
	trace := sharedTrace(t, "ip", 1)[:1500]
	hot := sharedTrace(t, "none", 20_000)
	for _, a := range lease.Algorithms() {
		for name, run := range map[string]struct {
			trace []Request
			limit hybrid.Limit
			least float64
		}{
			"ip":   {trace, hybrid.PerWindow(10, time.Minute, a), 0.98},
			"none": {hot[:5000], hybrid.PerWindow(500, time.Second, a), 0.95},
		} {
			limit := run.limit
			r, err := Replay(t.Context(), run.trace, ReplayOptions{Limit: limit, Nodes: 4, Spread: RoundRobin})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s, %v: %+v", name, a, r)
			if r.MaxLevel > float64(limit.Burst) {
				t.Errorf("%s, %v: max level = %g, want at most the burst, %d", name, a, r.MaxLevel, limit.Burst)
			}
			if float64(r.Admitted) < run.least*float64(r.IdealAdmitted) {
				t.Errorf("%s, %v: admitted %d of %d ideal", name, a, r.Admitted, r.IdealAdmitted)
			}
			if !a.Leases() && limit.Burst < 256 && r.Admitted != r.IdealAdmitted {
				t.Errorf("%s, %v: admitted %d, want %d: nothing is on the way here", name, a, r.Admitted, r.IdealAdmitted)
			}
		}
	}
}

package bench

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// embedded returns options with a Redis that Kill stops and Restart starts.
func embedded(t *testing.T) OutageOptions {
	t.Helper()
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	if err := m.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return OutageOptions{
		Clients: testClients(t, m.Addr()), Kill: func() error { m.Close(); return nil }, Restart: m.Restart,
		For: 3 * time.Second, RedisTimeout: 100 * time.Millisecond,
	}
}

func testClients(t *testing.T, addr string) (clients []redis.UniversalClient) {
	t.Helper()
	for range Nodes {
		c := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, DialerRetries: 1, ContextTimeoutEnabled: true})
		t.Cleanup(func() { _ = c.Close() })
		clients = append(clients, c)
	}
	return clients
}

func TestMain(m *testing.M) {
	logging.Disable() // of connections that break as they should
	os.Exit(m.Run())
}

func TestOutageKeepsTheBounds(t *testing.T) {
	opts := embedded(t)
	var last time.Duration
	opts.Progress = func(elapsed time.Duration) { last = elapsed }
	r, err := Outage(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", r)
	checkOutage(t, r)
	if last < 2*time.Second {
		t.Errorf("Progress ended at %v, want about 3s", last)
	}
}

func checkOutage(t *testing.T, r OutageReport) {
	t.Helper()
	if len(r.Phases) != 3 {
		t.Fatalf("%d phases, want 3: %+v", len(r.Phases), r.Phases)
	}
	for i, name := range []string{"healthy", "outage", "recovered"} {
		ph := r.Phases[i]
		if ph.Phase != name || ph.Seconds <= 0 || ph.Decisions < 50 || ph.Admitted == 0 || ph.Ideal == 0 {
			t.Errorf("phase %d = %+v, want %s, and its traffic of about a second", i, ph, name)
		}
		if ph.MaxLevel > ph.Bound || ph.MaxLevel <= 0 || ph.Bound < float64(r.Burst) {
			t.Errorf("%s: level %v, bound %v; want it to keep to it", name, ph.MaxLevel, ph.Bound)
		}
		n := 0
		for source, decisions := range ph.BySource {
			n += decisions
			if source == "policy" || source == "none" {
				t.Errorf("%s: %d decisions by %s, want none", name, decisions, source)
			}
		}
		if n != ph.Decisions || ph.Max < ph.P99 || ph.P99 < ph.P50 {
			t.Errorf("%s: does not add up: %+v", name, ph)
		}
	}
	if !r.Held || r.Seconds < 2.9 || r.DownAt < 1 || r.UpAt < r.DownAt+1 || r.Nodes != 3 {
		t.Errorf("report = %+v, want held, after 3 s", r)
	}
	if r.Phases[1].BySource["local"] == 0 || r.FirstLocal < 0 || r.Trips < 3 || r.DegradedSeconds <= 0 {
		t.Errorf("outage: %+v; want decisions by shares, and all breakers open", r)
	}
	if r.AdmittedInOutage == 0 || r.DebtCharged == 0 || r.NodesBelieved < 1 {
		t.Errorf("admitted in outage %d, charged %d, nodes believed %d; want some", r.AdmittedInOutage, r.DebtCharged, r.NodesBelieved)
	}
}

// With connections cut it is the same.
func TestOutageByCut(t *testing.T) {
	m := miniredis.RunT(t)
	m.ClockTTL(true)
	var cut Cut
	opts := OutageOptions{
		Clients: testClients(t, m.Addr()), Kill: cut.Down, Restart: cut.Up,
		For: 3 * time.Second, RedisTimeout: 100 * time.Millisecond,
	}
	for _, c := range opts.Clients {
		cut.Attach(c)
	}
	r, err := Outage(t.Context(), opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", r)
	checkOutage(t, r)
}

func TestOutageStoppedEarly(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		after  time.Duration
		phases int
	}{
		{300 * time.Millisecond, 1},
		{1500 * time.Millisecond, 2},
	} {
		opts := embedded(t)
		restarted, inner := false, opts.Restart
		opts.Restart = func() error { restarted = true; return inner() }
		ctx, cancel := context.WithTimeout(t.Context(), c.after)
		r, err := Outage(ctx, opts)
		cancel()
		if err != nil {
			t.Errorf("stopped after %v: %v, want a report", c.after, err)
		}
		if len(r.Phases) != c.phases || !r.Held || r.UpAt != 0 || r.FirstStore != -1 {
			t.Errorf("stopped after %v: %+v, want %d phases", c.after, r, c.phases)
		}
		if restarted != (c.phases > 1) {
			t.Errorf("stopped after %v: restarted = %v, want Redis to be there at the end", c.after, restarted)
		}
	}
}

func TestOutageFails(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	opts := embedded(t)
	opts.Kill = func() error { return broken }
	start := time.Now()
	if _, err := Outage(t.Context(), opts); !errors.Is(err, broken) {
		t.Errorf("Outage = %v, want %v", err, broken)
	}
	if took := time.Since(start); took > 2500*time.Millisecond {
		t.Errorf("Outage took %v, want it to stop when it failed", took)
	}
	opts = embedded(t)
	opts.Restart = func() error { return broken }
	if _, err := Outage(t.Context(), opts); !errors.Is(err, broken) {
		t.Errorf("Outage = %v, want %v", err, broken)
	}
}

func TestOutageRefusesBadOptions(t *testing.T) {
	nothing := func() error { return nil }
	clients := testClients(t, "127.0.0.1:1")
	for _, o := range []OutageOptions{
		{Clients: clients, Kill: nothing, Restart: nothing, For: 2 * time.Second},
		{Clients: clients, Kill: nothing, Restart: nothing, For: 2 * time.Hour},
		{Clients: clients[:2], Kill: nothing, Restart: nothing},
		{Clients: clients, Restart: nothing},
		{Clients: clients, Kill: nothing},
		{Clients: clients, Kill: nothing, Restart: nothing, Limit: hybrid.Limit{Rate: -1, Burst: 1}},
		{Clients: clients, Kill: nothing, Restart: nothing, RedisTimeout: time.Hour},
	} {
		if _, err := Outage(t.Context(), o); err == nil {
			t.Errorf("Outage(%+v) = nil error, want one", o)
		}
	}
}

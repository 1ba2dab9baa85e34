package redistest

import (
	"testing"
)

func TestSentinel(t *testing.T) {
	s := StartSentinel(t, 1, 3)
	client := s.Client(t)
	if err := client.Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := client.Wait(t.Context(), 1, patience).Result(); n != 1 || err != nil {
		t.Fatalf("Wait(1) = %d, %v; want 1, nil", n, err)
	}
	if got := s.WaitMaster(); got != s.Servers()[0] {
		t.Errorf("WaitMaster() = %s, want %s: no fail-over yet", got.Addr(), s.Servers()[0].Addr())
	}

	dead := s.KillMaster()
	if got := s.Master(); dead != s.Servers()[0] || got != dead {
		t.Errorf("KillMaster() = %s, then Master() = %s; want the first server twice", dead.Addr(), got.Addr())
	}
	if got := s.WaitMaster(); got != s.Servers()[1] {
		t.Errorf("WaitMaster() = %s after Kill, want %s", got.Addr(), s.Servers()[1].Addr())
	}
	eventually(t, func() bool {
		got, err := client.Get(t.Context(), "k").Result()
		return got == "v" && err == nil
	}, "Get(k) of the new master != v")

	dead.Restart(t)
	eventually(t, func() bool { return dead.inSync() == nil }, "the former master follows nobody")
	if got := s.Master(); got == dead {
		t.Error("the former master is the master again")
	}
}

// A paused master is as dead as a killed one, and a Sentinel may be missing.
func TestSentinelPaused(t *testing.T) {
	s := StartSentinel(t, 2, 3)
	s.Sentinels()[0].Kill()
	dead := s.Master()
	dead.Pause()
	if got := s.WaitMaster(); got == dead {
		t.Errorf("WaitMaster() = %s, want another", got.Addr())
	}
	dead.Resume()
	eventually(t, func() bool { return dead.inSync() == nil }, "the former master follows nobody")
}

func TestStartSentinelWithoutSentinels(t *testing.T) {
	r := &recorder{TB: t}
	r.do(func() { StartSentinel(r, 1, 0) })
	wantMessage(t, "failure", r.failures, "want a Sentinel or more")
}

func TestNothingLeftAfterSentinelTest(t *testing.T) {
	before := goroutines()
	var servers []*Server
	t.Run("test", func(t *testing.T) {
		s := StartSentinel(t, 1, 1)
		servers = append(s.Servers(), s.Sentinels()...)
		if err := s.Client(t).Ping(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		servers[0].Pause()
	})
	wantGone(t, servers)
	wantNoneLeft(t, before)
}

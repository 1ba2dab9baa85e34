//go:build unix

package lease_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// pausedProcess, set in its environment, makes this test the process paused.
const pausedProcess = "LEASE_TEST_PAUSED_PROCESS"

// TestScenario22_PausedProcess stops a whole process for more than a ttl, as a
// frozen container would be, while it spends a lease, and lets it go on. Hits
// read a coarse clock, and nothing moves that in a stopped process: until its
// ticker runs again, or the next hit that sets the clock, a hit may still use a
// lease that is over. So the process can be wrong by refreshEvery hits a key.
func TestScenario22_PausedProcess(t *testing.T) {
	if os.Getenv(pausedProcess) != "" {
		spendWhilePaused(t)
		return
	}
	const refreshEvery = 64
	for range 3 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestScenario22_PausedProcess$", "-test.timeout=20s")
		cmd.Env = append(os.Environ(), pausedProcess+"=1")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for lines.Scan() && lines.Text() != "spending" {
		}
		time.Sleep(10 * time.Millisecond)
		pause(t, cmd.Process, 300*time.Millisecond)
		late, said := -1, ""
		for lines.Scan() {
			if _, err := fmt.Sscanf(lines.Text(), "late %d", &late); err != nil {
				said += lines.Text() + "\n"
			}
		}
		if err := cmd.Wait(); err != nil || late < 0 {
			t.Fatalf("the process: %v: %s", err, strings.TrimSpace(said))
		}
		t.Logf("%d hits used a lease that was over", late)
		if late > refreshEvery {
			t.Errorf("%d hits used a lease that was over: want at most %d", late, refreshEvery)
		}
	}
}

func pause(t *testing.T, p *os.Process, d time.Duration) {
	t.Helper()
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	time.Sleep(d)
	if err := p.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

// spendWhilePaused spends leases until it notices that it was stopped, and says
// how many hits used one after its deadline.
func spendWhilePaused(t *testing.T) {
	start := time.Now()
	store := leasetest.NewStore(func() time.Duration { return 500_000*time.Hour + time.Since(start) })
	var deadline atomic.Int64 // of the newest lease, since start
	link := &leasetest.Link{Store: store}
	link.Carried = func(_ lease.Call, a lease.Answer) {
		deadline.Store(int64(time.Since(start) + a.Grant.TTL))
	}
	c, err := lease.New(link, lease.Limit{Rate: 1e9, Burst: 1e9}, lease.Options{LeasePeriod: 100 * time.Millisecond, Timeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	for range 200_000 { // a demand that makes for a large lease
		if _, err := c.Take(t.Context(), "k", 1); err != nil {
			t.Fatal(err)
		}
	}
	fmt.Println("spending")
	late, last, stopped := 0, time.Since(start), false
	for !stopped || time.Since(start)-last < 50*time.Millisecond {
		over, began := deadline.Load(), time.Since(start)
		if !stopped {
			stopped = began-last > 200*time.Millisecond
			last = began
		}
		d, err := c.Take(t.Context(), "k", 1)
		if err != nil {
			t.Fatal(err)
		}
		if stopped && d.Source == lease.SourceLease && int64(began) > over && deadline.Load() == over {
			late++
		}
	}
	fmt.Println("late", late)
	if err := c.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
}

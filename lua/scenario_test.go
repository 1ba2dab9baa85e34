package lua

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

func TestScenario01_HalfDemand(t *testing.T)          { leasetest.Scenario01(t, scripted(t)) }
func TestScenario02_OneNodeSaturates(t *testing.T)    { leasetest.Scenario02(t, scripted(t)) }
func TestScenario03_FiftyNodesSaturate(t *testing.T)  { leasetest.Scenario03(t, scripted(t)) }
func TestScenario04_EqualShares(t *testing.T)         { leasetest.Scenario04(t, scripted(t)) }
func TestScenario05_ProportionalShares(t *testing.T)  { leasetest.Scenario05(t, scripted(t)) }
func TestScenario06_OneOfFifty(t *testing.T)          { leasetest.Scenario06(t, scripted(t)) }
func TestScenario07_DemandMoves(t *testing.T)         { leasetest.Scenario07(t, scripted(t)) }
func TestScenario08_WholeBurst(t *testing.T)          { leasetest.Scenario08(t, scripted(t)) }
func TestScenario09_BurstOnColdNodes(t *testing.T)    { leasetest.Scenario09(t, scripted(t)) }
func TestScenario10_ThunderingHerd(t *testing.T)      { leasetest.Scenario10(t, scripted(t)) }
func TestScenario11_HerdAfterExhaustion(t *testing.T) { leasetest.Scenario11(t, scripted(t)) }
func TestScenario13_Hoard(t *testing.T)               { leasetest.Scenario13(t, scripted(t)) }
func TestScenario14_GiveBack(t *testing.T)            { leasetest.Scenario14(t, scripted(t)) }
func TestScenario15_LateReport(t *testing.T)          { leasetest.Scenario15(t, scripted(t)) }
func TestScenario16_Losses(t *testing.T)              { leasetest.Scenario16(t, scripted(t)) }
func TestScenario19_LateReply(t *testing.T)           { leasetest.Scenario19(t, scripted(t)) }
func TestScenario19_LeaseEnds(t *testing.T)           { leasetest.Scenario19Edge(t, scripted(t)) }
func TestScenario20_Crash(t *testing.T)               { leasetest.Scenario20(t, scripted(t)) }
func TestScenario21_Shutdown(t *testing.T)            { leasetest.Scenario21(t, scripted(t)) }
func TestScenario22_Pause(t *testing.T)               { leasetest.Scenario22(t, scripted(t)) }
func TestScenario25_SkewedClocks(t *testing.T)        { leasetest.Scenario25(t, scripted(t)) }
func TestScenario34_SlowStore(t *testing.T)           { leasetest.Scenario34(t, scripted(t)) }
func TestScenario42_OneAnHour(t *testing.T)           { leasetest.Scenario42(t, scripted(t)) }
func TestScenario43_LargestNumbers(t *testing.T)      { leasetest.Scenario43(t, scripted(t)) }
func TestScenario44_TooSmallToLease(t *testing.T)     { leasetest.Scenario44(t, scripted(t)) }
func TestScenario45_NothingAllowed(t *testing.T)      { leasetest.Scenario45(t, scripted(t)) }
func TestScenario46_MixedCosts(t *testing.T)          { leasetest.Scenario46(t, scripted(t)) }
func TestScenario48_CostOverBurst(t *testing.T)       { leasetest.Scenario48(t, scripted(t)) }
func TestScenario49_Leaving(t *testing.T)             { leasetest.Scenario49(t, scripted(t)) }
func TestScenarioHotKey(t *testing.T)                 { leasetest.ScenarioHotKey(t, scripted(t)) }
func TestScenarioFlatOut(t *testing.T)                { leasetest.ScenarioFlatOut(t, scripted(t)) }
func TestScenarioTripleDemand(t *testing.T)           { leasetest.ScenarioTripleDemand(t, scripted(t)) }

func TestScenario28_Expiry(t *testing.T) {
	leasetest.Scenario28(t, leasetest.Backend{Virtual: inProcess})
}

func TestScenarioAny(t *testing.T)      { leasetest.ScenarioAny(t, scripted(t), 40) }
func TestScenario43_Exact(t *testing.T) { leasetest.Scenario43Exact(t, scripted(t), 3000) }

// TestScenario17_ReplyLost has the server carry a call out and its reply get
// lost, with a client that is set to retry: it is carried out once, and the
// Store says that it does not know.
func TestScenario17_ReplyLost(t *testing.T) {
	server := redistest.Start(t)
	proxy := redistest.NewProxy(t, server.Addr())
	opts := redistest.Options(proxy.Addr())
	opts.MaxRetries, opts.MinRetryBackoff, opts.MaxRetryBackoff = 3, time.Millisecond, time.Millisecond
	opts.ReadTimeout = 100 * time.Millisecond
	rdb := redis.NewClient(opts)
	defer rdb.Close()
	s := NewStore(rdb, Options{})
	acquire := func(n int) []lease.Answer {
		t.Helper()
		calls := make([]lease.Call, n)
		for i := range calls {
			calls[i] = lease.Call{Key: fmt.Sprint(i), Limit: lease.Limit{Rate: 1e-3, Burst: 100}, TTL: time.Second, LastEpoch: -1, Need: 1, Bound: 1, Want: 1}
		}
		return s.Acquire(t.Context(), calls)
	}
	if a := acquire(1)[0]; a.Err != nil { // the script is loaded
		t.Fatal(a.Err)
	}
	executed := func() int64 { return server.CommandCalls(t, "evalsha") }
	for name, fault := range map[string]func(int){"no reply": proxy.DropReplies, "connection closed": proxy.CloseOnReply} {
		for _, n := range []int{1, 3} {
			before := executed()
			fault(1)
			for i, a := range acquire(n) {
				if !errors.Is(a.Err, lease.ErrUnknownOutcome) || a.Grant.Tokens != 0 {
					t.Errorf("%s: answer %d of %d = %+v, %v: want ErrUnknownOutcome", name, i, n, a.Grant, a.Err)
				}
			}
			proxy.Heal()
			if got := executed() - before; got != 1 {
				t.Errorf("%s: carried out %d times: want once", name, got)
			}
		}
	}
	// One take that was answered, and four that were not.
	if g := acquire(1)[0].Grant; g.Remaining != 100-6 {
		t.Errorf("remaining = %d: want 94", g.Remaining)
	}
}

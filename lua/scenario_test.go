package lua

import (
	"testing"

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
func TestScenario42_OneAnHour(t *testing.T)           { leasetest.Scenario42(t, scripted(t)) }
func TestScenario43_LargestNumbers(t *testing.T)      { leasetest.Scenario43(t, scripted(t)) }
func TestScenario44_TooSmallToLease(t *testing.T)     { leasetest.Scenario44(t, scripted(t)) }
func TestScenario45_NothingAllowed(t *testing.T)      { leasetest.Scenario45(t, scripted(t)) }
func TestScenario46_MixedCosts(t *testing.T)          { leasetest.Scenario46(t, scripted(t)) }
func TestScenario48_CostOverBurst(t *testing.T)       { leasetest.Scenario48(t, scripted(t)) }
func TestScenarioHotKey(t *testing.T)                 { leasetest.ScenarioHotKey(t, scripted(t)) }
func TestScenarioFlatOut(t *testing.T)                { leasetest.ScenarioFlatOut(t, scripted(t)) }
func TestScenarioTripleDemand(t *testing.T)           { leasetest.ScenarioTripleDemand(t, scripted(t)) }

func TestScenario28_Expiry(t *testing.T) {
	leasetest.Scenario28(t, leasetest.Backend{Virtual: inProcess})
}

func TestScenarioAny(t *testing.T)      { leasetest.ScenarioAny(t, scripted(t), 20) }
func TestScenario43_Exact(t *testing.T) { leasetest.Scenario43Exact(t, scripted(t), 3000) }

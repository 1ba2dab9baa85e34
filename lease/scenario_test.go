package lease_test

import (
	"testing"

	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

func TestScenario01_HalfDemand(t *testing.T) { leasetest.Scenario01(t, leasetest.InMemory) }

func TestScenario02_OneNodeSaturates(t *testing.T) { leasetest.Scenario02(t, leasetest.InMemory) }

func TestScenario03_FiftyNodesSaturate(t *testing.T) { leasetest.Scenario03(t, leasetest.InMemory) }

func TestScenario04_EqualShares(t *testing.T) { leasetest.Scenario04(t, leasetest.InMemory) }

func TestScenario05_ProportionalShares(t *testing.T) { leasetest.Scenario05(t, leasetest.InMemory) }

func TestScenario06_OneOfFifty(t *testing.T) { leasetest.Scenario06(t, leasetest.InMemory) }

func TestScenario07_DemandMoves(t *testing.T) { leasetest.Scenario07(t, leasetest.InMemory) }

func TestScenario08_WholeBurst(t *testing.T) { leasetest.Scenario08(t, leasetest.InMemory) }

func TestScenario09_BurstOnColdNodes(t *testing.T) { leasetest.Scenario09(t, leasetest.InMemory) }

func TestScenario10_ThunderingHerd(t *testing.T) { leasetest.Scenario10(t, leasetest.InMemory) }

func TestScenario11_HerdAfterExhaustion(t *testing.T) { leasetest.Scenario11(t, leasetest.InMemory) }

func TestScenario13_Hoard(t *testing.T) { leasetest.Scenario13(t, leasetest.InMemory) }

func TestScenario14_GiveBack(t *testing.T) { leasetest.Scenario14(t, leasetest.InMemory) }

func TestScenario15_LateReport(t *testing.T) { leasetest.Scenario15(t, leasetest.InMemory) }

func TestScenario16_Losses(t *testing.T) { leasetest.Scenario16(t, leasetest.InMemory) }

func TestScenario19_LateReply(t *testing.T) { leasetest.Scenario19(t, leasetest.InMemory) }

func TestScenario19_LeaseEnds(t *testing.T) { leasetest.Scenario19Edge(t, leasetest.InMemory) }

func TestScenario20_Crash(t *testing.T) { leasetest.Scenario20(t, leasetest.InMemory) }

func TestScenario21_Shutdown(t *testing.T) { leasetest.Scenario21(t, leasetest.InMemory) }

func TestScenario22_Pause(t *testing.T) { leasetest.Scenario22(t, leasetest.InMemory) }

func TestScenario25_SkewedClocks(t *testing.T) { leasetest.Scenario25(t, leasetest.InMemory) }

func TestScenario42_OneAnHour(t *testing.T) { leasetest.Scenario42(t, leasetest.InMemory) }

func TestScenario43_LargestNumbers(t *testing.T) { leasetest.Scenario43(t, leasetest.InMemory) }

func TestScenario44_TooSmallToLease(t *testing.T) { leasetest.Scenario44(t, leasetest.InMemory) }

func TestScenario45_NothingAllowed(t *testing.T) { leasetest.Scenario45(t, leasetest.InMemory) }

func TestScenario46_MixedCosts(t *testing.T) { leasetest.Scenario46(t, leasetest.InMemory) }

func TestScenario48_CostOverBurst(t *testing.T) { leasetest.Scenario48(t, leasetest.InMemory) }

func TestScenario49_Leaving(t *testing.T) { leasetest.Scenario49(t, leasetest.InMemory) }

func TestScenarioHotKey(t *testing.T) { leasetest.ScenarioHotKey(t, leasetest.InMemory) }

func TestScenarioFlatOut(t *testing.T) { leasetest.ScenarioFlatOut(t, leasetest.InMemory) }

func TestScenarioTripleDemand(t *testing.T) { leasetest.ScenarioTripleDemand(t, leasetest.InMemory) }

// These show that the oracle can fail: plain leases break the bound.

func TestScenario12_HoardPlainLeases(t *testing.T)    { leasetest.Scenario12(t) }
func TestScenario14_GiveBackPlainLeases(t *testing.T) { leasetest.Scenario14Plain(t) }

func TestScenarioAny(t *testing.T)      { leasetest.ScenarioAny(t, leasetest.InMemory, 500) }
func TestScenario43_Exact(t *testing.T) { leasetest.Scenario43Exact(t, leasetest.InMemory, 1_000_000) }

func TestScenario34_SlowStore(t *testing.T) { leasetest.Scenario34(t, leasetest.InMemory) }

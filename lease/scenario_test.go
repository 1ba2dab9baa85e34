package lease_test

import (
	"testing"

	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

func TestScenario01(t *testing.T) { leasetest.Scenario01(t, leasetest.InMemory) }
func TestScenario02(t *testing.T) { leasetest.Scenario02(t, leasetest.InMemory) }
func TestScenario03(t *testing.T) { leasetest.Scenario03(t, leasetest.InMemory) }
func TestScenario04(t *testing.T) { leasetest.Scenario04(t, leasetest.InMemory) }
func TestScenario05(t *testing.T) { leasetest.Scenario05(t, leasetest.InMemory) }
func TestScenario06(t *testing.T) { leasetest.Scenario06(t, leasetest.InMemory) }
func TestScenario07(t *testing.T) { leasetest.Scenario07(t, leasetest.InMemory) }
func TestScenario08(t *testing.T) { leasetest.Scenario08(t, leasetest.InMemory) }
func TestScenario09(t *testing.T) { leasetest.Scenario09(t, leasetest.InMemory) }
func TestScenario10(t *testing.T) { leasetest.Scenario10(t, leasetest.InMemory) }
func TestScenario11(t *testing.T) { leasetest.Scenario11(t, leasetest.InMemory) }
func TestScenario16(t *testing.T) { leasetest.Scenario16(t, leasetest.InMemory) }
func TestScenario19(t *testing.T) { leasetest.Scenario19(t, leasetest.InMemory) }
func TestScenario20(t *testing.T) { leasetest.Scenario20(t, leasetest.InMemory) }
func TestScenario21(t *testing.T) { leasetest.Scenario21(t, leasetest.InMemory) }
func TestScenario25(t *testing.T) { leasetest.Scenario25(t, leasetest.InMemory) }
func TestScenario42(t *testing.T) { leasetest.Scenario42(t, leasetest.InMemory) }
func TestScenario43(t *testing.T) { leasetest.Scenario43(t, leasetest.InMemory) }
func TestScenario44(t *testing.T) { leasetest.Scenario44(t, leasetest.InMemory) }
func TestScenario45(t *testing.T) { leasetest.Scenario45(t, leasetest.InMemory) }
func TestScenario48(t *testing.T) { leasetest.Scenario48(t, leasetest.InMemory) }

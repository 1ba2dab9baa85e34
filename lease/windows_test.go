package lease_test

import (
	"testing"

	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

func TestFixedWindowInMemory(t *testing.T) { testWindows(t, lease.FixedWindow) }
func TestSlidingLogInMemory(t *testing.T)  { testWindows(t, lease.SlidingLog) }
func TestSlidingCounterInMemory(t *testing.T) {
	testWindows(t, lease.SlidingCounter)
}

func testWindows(t *testing.T, a lease.Algorithm) { leasetest.TestWindows(t, leasetest.InMemory, a) }

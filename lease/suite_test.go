package lease_test

import (
	"testing"

	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

func TestStoreInMemory(t *testing.T) { leasetest.TestStore(t, leasetest.InMemory) }

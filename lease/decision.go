package lease

import (
	"errors"
	"fmt"
	"time"
)

// Decision is the answer to one request. The zero Decision denies.
type Decision struct {
	// Allowed says whether the request may go ahead.
	Allowed bool
	// Source says what decided.
	Source Source
	// Limit is the limit that was applied.
	Limit Limit
	// Remaining is how many tokens this node knows to be left: its lease and
	// what was in the bucket when it last asked. Other nodes may have taken
	// some since. Range 0 to Limit.Burst.
	Remaining int64
	// RetryAfter is, for a denial, how long to wait before the same request
	// would be admitted if nobody else asks; 0 when admitted. A request that
	// can never be admitted has the longest Duration.
	RetryAfter time.Duration
	// ResetAfter is how long until the whole burst is there again if nobody
	// asks. At least 0.
	ResetAfter time.Duration
}

// Source says what made a Decision.
type Source uint8

const (
	// SourceNone made no decision: the zero Decision, or an error.
	SourceNone Source = iota
	// SourceLease is a lease held by this node: no round trip.
	SourceLease
	// SourceStore is a call to the store that this request waited for.
	SourceStore
	// SourceMemory is this node's memory of a recent refusal: no round trip.
	SourceMemory
	// SourceLimit is the limit itself: it denies everything.
	SourceLimit
	// SourcePolicy is the limit's OnFailure, Allow or Deny: the store did not
	// answer in time.
	SourcePolicy
	// SourceLocal is this node's share of the limit: the store did not answer in
	// time. Remaining, RetryAfter and ResetAfter are the share's.
	SourceLocal
)

var sourceNames = [...]string{"none", "lease", "store", "memory", "limit", "policy", "local"}

// String returns the source's name in lower case, as used in JSON and metrics.
func (s Source) String() string {
	if int(s) < len(sourceNames) {
		return sourceNames[s]
	}
	return fmt.Sprintf("source(%d)", uint8(s))
}

var (
	// ErrClosed is returned by every method after Close.
	ErrClosed = errors.New("lease: cache is closed")
	// ErrKey is returned for an empty key.
	ErrKey = errors.New("lease: key is empty")
	// ErrCost is what every CostError matches.
	ErrCost = errors.New("lease: bad cost")
)

// CostError is returned for a cost that can never be admitted: negative, or
// over the burst. It matches errors.Is(err, ErrCost).
type CostError struct {
	Cost  int64
	Burst int64 // of the key's limit
}

func (e *CostError) Error() string {
	return fmt.Sprintf("lease: cost = %d: want 0 to the burst, %d", e.Cost, e.Burst)
}

// Is makes every CostError match ErrCost.
func (e *CostError) Is(target error) bool { return target == ErrCost }

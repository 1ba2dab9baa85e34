package lease

import (
	"context"
	"fmt"
)

// Peek tells what a request of cost 1 on key would meet, without charging it:
// Remaining is this node's leases and what is in the bucket right now. It asks
// the store unless the node holds a lease. Errors as Take.
func (c *Cache) Peek(ctx context.Context, key string) (Decision, error) { return c.Take(ctx, key, 0) }

// Refund gives back n tokens of a request that was admitted but did not run
// after all. The bucket never passes what its burst leaves beside outstanding
// leases. It waits for the store; an error that matches ErrUnknownOutcome or
// ErrNotExecuted means that the tokens are lost, which can only admit less.
// A token that the bucket has refilled since, burst/rate after the request at
// the latest, must not be refunded: that would admit it twice. A fixed window and
// a sliding counter take a refund for one of the window that is: in the next it
// is dropped if this node had nothing of that yet, and would admit it twice else.
func (c *Cache) Refund(ctx context.Context, key string, n int64) error {
	h, err := c.holdingOf(key)
	if err != nil {
		return err
	}
	t := h.terms.Load()
	if n < 0 || n > t.limit.Burst {
		return &CostError{Cost: n, Burst: t.limit.Burst}
	}
	if n == 0 {
		return nil
	}
	return c.tell(ctx, h, Call{Refund: n})
}

// Reset fills key's bucket, up to what outstanding leases leave, and forgets
// that it was empty. Other nodes notice when their memory of a refusal ends.
// Errors as Refund.
func (c *Cache) Reset(ctx context.Context, key string) error {
	h, err := c.holdingOf(key)
	if err != nil {
		return err
	}
	return c.tell(ctx, h, Call{Reset: true})
}

// tell makes one call that grants nothing.
func (c *Cache) tell(ctx context.Context, h *holding, call Call) error {
	t := h.terms.Load()
	if t.zero {
		return nil // no bucket to tell
	}
	call.Key, call.Limit, call.Version = h.key, t.limit, t.version
	call.Count, call.PerUS = t.count, t.perUS
	h.mu.Lock()
	call.TTL, call.LastEpoch = max(2*t.period, minTTL), h.lastEpoch
	h.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, c.opts.Timeout)
	defer cancel()
	answer := c.ask(ctx, []Call{call})[0]
	if answer.Err != nil {
		return fmt.Errorf("lease: key %.64q: %w", h.key, answer.Err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.balance.Store(answer.Grant.Remaining)
	h.resetAt.Store(saturate(c.clock.now(), answer.Grant.ResetAfter))
	h.denial.Store(nil)
	h.paceUntil = 0
	return nil
}

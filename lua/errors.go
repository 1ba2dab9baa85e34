package lua

import (
	"errors"
	"fmt"
	"net"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/lease"
)

// notExecuted are the codes of replies by which a server says that it did not
// run the script: it cannot, now or here. Redis puts the code first; older
// servers and proxies wrap it ("ERR Error running script: … -OOM …").
var notExecuted = []string{
	"NOSCRIPT", "MOVED", "ASK", "TRYAGAIN", "LOADING", "READONLY", "CLUSTERDOWN", "MASTERDOWN",
	"NOREPLICAS", "OOM", "BUSY", "MISCONF", "NOAUTH", "WRONGPASS", "NOPERM", "CROSSSLOT",
	"max number of clients", "user executing the script",
}

// classify says what an error means for the calls of one command: see 2.6 of
// the protocol notes in lease/doc.go. What is not known to be harmless is
// ErrUnknownOutcome.
func classify(err error, calls int) error {
	var reply redis.Error
	if errors.As(err, &reply) && !errors.Is(err, redis.Nil) {
		text := reply.Error()
		for _, code := range notExecuted {
			if strings.Contains(text, code) {
				return fmt.Errorf("%w: %w", lease.ErrNotExecuted, err)
			}
		}
		// The script itself failed. With one key its only write comes last, so
		// nothing was written; with several, earlier keys may have been.
		if calls == 1 {
			return fmt.Errorf("%w: %w", lease.ErrRejected, err)
		}
		return fmt.Errorf("%w: %w", lease.ErrUnknownOutcome, err)
	}
	if errors.Is(err, redis.ErrPoolTimeout) || errors.Is(err, redis.ErrPoolExhausted) {
		return fmt.Errorf("%w: %w: %w", lease.ErrNotExecuted, lease.ErrOverloaded, err)
	}
	var op *net.OpError
	if errors.As(err, &op) && op.Op == "dial" || errors.Is(err, redis.ErrClosed) {
		return fmt.Errorf("%w: %w", lease.ErrNotExecuted, err)
	}
	return fmt.Errorf("%w: %w", lease.ErrUnknownOutcome, err)
}

package lease

import (
	"errors"
	"fmt"
	"time"
)

// Limits tells the limit of each key.
type Limits interface {
	// For returns key's limit. It is asked once, when a key is first seen, and
	// again after the key was evicted.
	For(key string) Limit
}

// For makes every Limit a Limits: the same for all keys.
func (l Limit) For(string) Limit { return l }

// LimitFunc is a Limits in one function.
type LimitFunc func(key string) Limit

// For returns f(key).
func (f LimitFunc) For(key string) Limit { return f(key) }

// Options are a Cache's settings. The zero value works.
type Options struct {
	// LeasePeriod is how long one lease should last, T: a hot key costs about
	// 1/T calls a second on each node. A key's own period is at most a third
	// of its time to fill. It must be the same on all nodes. Tokens held by a
	// node that dies are missing for up to 4·T. Default 250ms; range 2ms to 1h.
	LeasePeriod time.Duration
	// Timeout is how long a request waits for the store before its limit's
	// OnFailure decides it. Default 30ms; range 1ms to 1m.
	Timeout time.Duration
	// MaxKeys is how many keys a node remembers. Past it the least used go,
	// and return their tokens. A key takes about half a kilobyte. Default
	// 262144; range 1 to 2^30.
	MaxKeys int
	// MaxWaiters is how many requests of one key may wait for the store at a
	// time; the limit's OnFailure decides those past it. Default 65536; range 1 to 2^30.
	MaxWaiters int
	// Share is how nodes divide a bucket that is too small for all. Default
	// ShareEqual.
	Share Share
	// Version numbers the configuration that the limits come from: of two
	// nodes with different limits for a key the higher Version wins, and the
	// other adopts its limit. At 0 the latest call wins. Default 0; range 0
	// to 2^53.
	Version int64
}

func (o *Options) setDefaults() {
	if o.LeasePeriod == 0 {
		o.LeasePeriod = 250 * time.Millisecond
	}
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Millisecond
	}
	if o.MaxKeys == 0 {
		o.MaxKeys = 1 << 18
	}
	if o.MaxWaiters == 0 {
		o.MaxWaiters = 1 << 16
	}
}

// OptionError says which field of Options is out of range.
type OptionError struct {
	Field string
	Value any
	Want  string // the accepted range
}

func (e *OptionError) Error() string {
	return fmt.Sprintf("lease: Options.%s = %v: want %s", e.Field, e.Value, e.Want)
}

func (o *Options) validate() error {
	var errs []error
	bad := func(field string, value any, want string) {
		errs = append(errs, &OptionError{field, value, want})
	}
	if o.LeasePeriod < 2*time.Millisecond || o.LeasePeriod > time.Hour {
		bad("LeasePeriod", o.LeasePeriod, "2ms to 1h")
	}
	if o.Timeout < time.Millisecond || o.Timeout > time.Minute {
		bad("Timeout", o.Timeout, "1ms to 1m")
	}
	if o.MaxKeys < 1 || o.MaxKeys > 1<<30 {
		bad("MaxKeys", o.MaxKeys, "1 to 2^30")
	}
	if o.MaxWaiters < 1 || o.MaxWaiters > 1<<30 {
		bad("MaxWaiters", o.MaxWaiters, "1 to 2^30")
	}
	if o.Share > ShareNone {
		bad("Share", o.Share, "ShareEqual, ShareProportional or ShareNone")
	}
	if o.Version < 0 || o.Version > maxUnits {
		bad("Version", o.Version, "0 to 2^53")
	}
	return errors.Join(errs...)
}

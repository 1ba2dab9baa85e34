package fallback

import (
	"errors"
	"fmt"
	"time"
)

// Unknown is what a share starts with for a key of which this node had no answer
// from the primary yet.
type Unknown uint8

const (
	// StartOne starts with one token: at most one per node too many.
	StartOne Unknown = iota
	// StartEmpty starts with none: never too many, and a first request is denied.
	StartEmpty
	// StartFull starts with the whole share of the burst.
	StartFull
)

// Split says how a limit is divided among the nodes while the primary is down.
type Split uint8

const (
	// SplitBlend starts half way between equal shares and each node's part of
	// the demand before the primary failed, and ends with equal ones a minute
	// later, for load balancers move traffic.
	SplitBlend Split = iota
	// SplitEqual gives each node 1/Nodes from the start.
	SplitEqual
)

// Options are a Store's settings. The zero value works, for one node alone.
type Options struct {
	// Nodes returns how many nodes share the limits, at least 1. It is asked
	// often. Default 1.
	Nodes func() int
	// Owns reports whether this node is one of the owners of key, which are that
	// many of all nodes and the same on each; known is false while the nodes are
	// not known. It decides who admits when the burst is less than the number of
	// nodes. Default: not known.
	Owns func(key string, owners int) (owns, known bool)
	// Shard names the server that has key's bucket: each has a breaker of its
	// own. Default: one server.
	Shard func(key string) string
	// Period is the lease period, T: answers that take longer than T/2, and than
	// 125ms, for a second or more count as failures. Default 250ms; range 2ms to
	// 1h.
	Period time.Duration
	// Timeout bounds a call that no request waits for: a probe, or a debt.
	// Default 30ms; range 1ms to 1m.
	Timeout time.Duration
	// MaxKeys is how many shares are kept. Default 262144; range 1 to 2^30.
	MaxKeys int
	// Unknown is what a share starts with when the balance is not known. Default
	// StartOne.
	Unknown Unknown
	// Split says how the limit is divided. Default SplitBlend.
	Split Split
	// Failures in a row open the breaker. Default 3; range 1 to 1000.
	Failures int
	// Backoff is the longest pause between two probes. Each pause is twice the
	// one before, from 25ms, and up to half longer at random. Default 500ms; range
	// 25ms to 1h.
	Backoff time.Duration
	// Ramp is how long after the breaker closed the last calls go to the
	// primary again. Default 1s; range 1ms to 1h.
	Ramp time.Duration
}

func (o *Options) setDefaults() {
	def := func(d *time.Duration, to time.Duration) {
		if *d == 0 {
			*d = to
		}
	}
	def(&o.Period, 250*time.Millisecond)
	def(&o.Timeout, 30*time.Millisecond)
	def(&o.Backoff, 500*time.Millisecond)
	def(&o.Ramp, time.Second)
	if o.MaxKeys == 0 {
		o.MaxKeys = 1 << 18
	}
	if o.Failures == 0 {
		o.Failures = 3
	}
	if o.Nodes == nil {
		o.Nodes = func() int { return 1 }
	}
	if o.Owns == nil {
		o.Owns = func(string, int) (owns, known bool) { return false, false }
	}
	if o.Shard == nil {
		o.Shard = func(string) string { return "" }
	}
}

// OptionError says which field of Options is out of range.
type OptionError struct {
	Field string
	Value any
	Want  string // the accepted range
}

func (e *OptionError) Error() string {
	return fmt.Sprintf("fallback: Options.%s = %v: want %s", e.Field, e.Value, e.Want)
}

func (o *Options) validate() error {
	var errs []error
	check := func(ok bool, field string, value any, want string) {
		if !ok {
			errs = append(errs, &OptionError{field, value, want})
		}
	}
	between := func(d, low, high time.Duration) bool { return d >= low && d <= high }
	check(between(o.Period, 2*time.Millisecond, time.Hour), "Period", o.Period, "2ms to 1h")
	check(between(o.Timeout, time.Millisecond, time.Minute), "Timeout", o.Timeout, "1ms to 1m")
	check(between(o.Backoff, firstBackoff, time.Hour), "Backoff", o.Backoff, "25ms to 1h")
	check(between(o.Ramp, time.Millisecond, time.Hour), "Ramp", o.Ramp, "1ms to 1h")
	check(o.MaxKeys >= 1 && o.MaxKeys <= 1<<30, "MaxKeys", o.MaxKeys, "1 to 2^30")
	check(o.Failures >= 1 && o.Failures <= 1000, "Failures", o.Failures, "1 to 1000")
	check(o.Unknown <= StartFull, "Unknown", o.Unknown, "StartOne, StartEmpty or StartFull")
	check(o.Split <= SplitEqual, "Split", o.Split, "SplitBlend or SplitEqual")
	return errors.Join(errs...)
}

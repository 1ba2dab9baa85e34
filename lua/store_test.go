package lua

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
)

// one is a call for a single token of a limit that does not refill in a test.
func one(key string) lease.Call {
	return lease.Call{
		Key: key, Limit: lease.Limit{Rate: 1.0 / 3600, Burst: 5}, TTL: 500 * time.Millisecond,
		Need: 1, Bound: 1, Want: 1, LastEpoch: -1, Share: lease.ShareNone,
	}
}

func manyCalls(n int) []lease.Call {
	calls := make([]lease.Call, n)
	for i := range calls {
		calls[i] = one(fmt.Sprintf("key %d", i))
	}
	return calls
}

// plain hides the client's type, as a wrapper of a user's would: a Store must
// then not assume one server, nor that the context is heeded.
type plain struct{ Client }

func miniClient(t *testing.T) (*miniredis.Miniredis, *redis.Client) {
	m := miniredis.RunT(t)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), MaxRetries: -1, ContextTimeoutEnabled: true})
	t.Cleanup(func() { rdb.Close() })
	return m, rdb
}

func TestAcquireManyKeys(t *testing.T) {
	for name, wrap := range map[string]func(*redis.Client) Client{
		"one script":   func(c *redis.Client) Client { return c },
		"own pipeline": func(c *redis.Client) Client { return plain{c} },
	} {
		t.Run(name, func(t *testing.T) {
			_, rdb := miniClient(t)
			s := NewStore(wrap(rdb), Options{})
			for range 2 { // the second time the script is known
				for i, a := range s.Acquire(t.Context(), manyCalls(300)) {
					if a.Err != nil || a.Grant.Tokens != 1 || a.Grant.Source != lease.SourceStore {
						t.Fatalf("key %d: %+v, %v; want 1 token", i, a.Grant, a.Err)
					}
				}
			}
			if a := s.Acquire(t.Context(), manyCalls(300))[299]; a.Grant.Remaining != 2 {
				t.Errorf("Remaining after three calls = %d, want 2: each key charged once a call", a.Grant.Remaining)
			}
		})
	}
}

// The script cache is volatile. Whatever it loses is sent again with the text,
// once, and charged once (R01, scenario 18).
func TestAcquireReloadsTheScript(t *testing.T) {
	for name, wrap := range map[string]func(*redis.Client) Client{
		"one script":   func(c *redis.Client) Client { return c },
		"own pipeline": func(c *redis.Client) Client { return plain{c} },
	} {
		t.Run(name, func(t *testing.T) {
			rdb := redistest.Start(t).Client(t)
			s := NewStore(wrap(rdb), Options{})
			for i := range int64(5) {
				if err := rdb.ScriptFlush(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
				for k, a := range s.Acquire(t.Context(), manyCalls(40)) {
					if a.Err != nil || a.Grant.Remaining != 4-i {
						t.Fatalf("flush %d, key %d: remaining %d, %v; want %d, nil", i, k, a.Grant.Remaining, a.Err, 4-i)
					}
				}
			}
		})
	}
}

// A server that refuses keys of several slots is asked key by key from then on.
func TestAcquireCrossSlot(t *testing.T) {
	m, rdb := miniClient(t)
	refused := 0
	rdb.AddHook(crossSlot{&refused})
	s := NewStore(rdb, Options{})
	for range 2 {
		for i, a := range s.Acquire(t.Context(), manyCalls(3)) {
			if a.Err != nil || a.Grant.Tokens != 1 {
				t.Fatalf("key %d: %+v, %v; want 1 token", i, a.Grant, a.Err)
			}
		}
	}
	if refused != 1 {
		t.Errorf("%d calls with several slots, want 1 to find out", refused)
	}
	if n := len(m.Keys()); n != 3 {
		t.Errorf("%d keys in the server, want 3", n)
	}
}

// crossSlot answers commands with several keys as a cluster does.
type crossSlot struct{ refused *int }

func (crossSlot) DialHook(next redis.DialHook) redis.DialHook { return next }
func (crossSlot) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (x crossSlot) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if args := cmd.Args(); strings.HasPrefix(cmd.Name(), "eval") && args[2].(int) > 1 {
			*x.refused++
			err := replyError("CROSSSLOT Keys in request don't hash to the same slot")
			cmd.SetErr(err)
			return err
		}
		return next(ctx, cmd)
	}
}

type replyError string

func (e replyError) Error() string { return string(e) }
func (replyError) RedisError()     {}

func TestClassify(t *testing.T) {
	for text, want := range map[string]error{
		"MOVED 866 127.0.0.1:7001":                                      lease.ErrNotExecuted,
		"ASK 866 127.0.0.1:7001":                                        lease.ErrNotExecuted,
		"TRYAGAIN Multiple keys request during rehashing of slot":       lease.ErrNotExecuted,
		"LOADING Redis is loading the dataset in memory":                lease.ErrNotExecuted,
		"READONLY You can't write against a read only replica.":         lease.ErrNotExecuted,
		"CLUSTERDOWN The cluster is down":                               lease.ErrNotExecuted,
		"MASTERDOWN Link with MASTER is down":                           lease.ErrNotExecuted,
		"NOREPLICAS Not enough good replicas to write.":                 lease.ErrNotExecuted,
		"OOM command not allowed when used memory > 'maxmemory'.":       lease.ErrNotExecuted,
		"ERR Error running script (call to f_0): @user_script: 7: -OOM": lease.ErrNotExecuted,
		"BUSY Redis is busy running a script.":                          lease.ErrNotExecuted,
		"NOPERM this user has no permissions":                           lease.ErrNotExecuted,
		"ERR max number of clients reached":                             lease.ErrNotExecuted,
		"ERR user_script:7: attempt to index a nil value":               lease.ErrRejected,
	} {
		if got := classify(replyError(text), 1); !errors.Is(got, want) {
			t.Errorf("classify(%q) = %v, want %v", text, got, want)
		}
	}
	if got := classify(replyError("ERR user_script:7: bug"), 2); !errors.Is(got, lease.ErrUnknownOutcome) {
		t.Errorf("classify of a script error with two keys = %v, want ErrUnknownOutcome: one may be written", got)
	}
	for _, err := range []error{context.DeadlineExceeded, errors.New("read: connection reset by peer"), redis.Nil} {
		if got := classify(err, 1); !errors.Is(got, lease.ErrUnknownOutcome) {
			t.Errorf("classify(%v) = %v, want ErrUnknownOutcome", err, got)
		}
	}
	for _, err := range []error{redis.ErrPoolTimeout, redis.ErrClosed} {
		if got := classify(err, 1); !errors.Is(got, lease.ErrNotExecuted) {
			t.Errorf("classify(%v) = %v, want ErrNotExecuted", err, got)
		}
	}
}

// A call ends with its context, whether or not the client heeds it, and what
// hangs is bounded.
func TestAcquireEndsWithItsContext(t *testing.T) {
	server := redistest.Start(t)
	for name, wrap := range map[string]func(*redis.Client) Client{
		"client": func(c *redis.Client) Client { return c },
		"plain":  func(c *redis.Client) Client { return plain{c} },
	} {
		t.Run(name, func(t *testing.T) {
			proxy := redistest.NewProxy(t, server.Addr())
			rdb := redis.NewClient(&redis.Options{Addr: proxy.Addr(), ReadTimeout: 2 * time.Second}) // all else default
			defer rdb.Close()
			s := NewStore(wrap(rdb), Options{Prefix: name, Timeout: 50 * time.Millisecond})
			if a := s.Acquire(t.Context(), manyCalls(1))[0]; a.Err != nil {
				t.Fatal(a.Err)
			}
			proxy.Silence()
			start := time.Now()
			for range 3 {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				a := s.Acquire(ctx, manyCalls(1))[0]
				cancel()
				if !errors.Is(a.Err, lease.ErrUnknownOutcome) {
					t.Errorf("Acquire of a silent server = %v, want ErrUnknownOutcome", a.Err)
				}
			}
			if took := time.Since(start); took > time.Second {
				t.Errorf("three calls of 50 ms took %v", took)
			}
		})
	}
}

func TestAcquireRefusesAnEndedContext(t *testing.T) {
	_, rdb := miniClient(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if a := NewStore(rdb, Options{}).Acquire(ctx, manyCalls(1))[0]; !errors.Is(a.Err, lease.ErrNotExecuted) {
		t.Errorf("Acquire = %v, want ErrNotExecuted", a.Err)
	}
}

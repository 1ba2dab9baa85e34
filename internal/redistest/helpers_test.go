package redistest

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// patience bounds every wait for something that must happen. It only matters
// when a test fails, so it is long enough for a busy machine.
const patience = 5 * time.Second

// instant bounds a call that must not be answered.
const instant = 100 * time.Millisecond

// eventually polls until ok, or fails with the message.
func eventually(t *testing.T, ok func() bool, format string, args ...any) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("after %v: "+format, append([]any{patience}, args...)...)
}

// brief returns a context for a call that is expected to get no answer.
func brief(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), instant)
	t.Cleanup(cancel)
	return ctx
}

// dialable reports whether something listens on addr.
func dialable(addr string) bool {
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err == nil {
		conn.Close()
	}
	return err == nil
}

// goroutines returns the stacks of all goroutines but the caller's, by their
// first line ("goroutine 12").
func goroutines() map[string]string {
	buf := make([]byte, 4<<20)
	buf = buf[:runtime.Stack(buf, true)]
	stacks := make(map[string]string)
	for i, stack := range strings.Split(string(buf), "\n\n") {
		id, _, _ := strings.Cut(stack, " [")
		if i > 0 { // the caller's comes first
			stacks[id] = stack
		}
	}
	return stacks
}

// wantNoneLeft fails when goroutines run that did not run before. Some need a
// moment to end after they were waited for, so it looks more than once.
func wantNoneLeft(t *testing.T, before map[string]string) {
	t.Helper()
	var left []string
	eventually(t, func() bool {
		left = nil
		for id, stack := range goroutines() {
			if _, ok := before[id]; !ok {
				left = append(left, stack)
			}
		}
		return len(left) == 0
	}, "goroutines left:\n%s", lazy(func() string { return strings.Join(left, "\n\n") }))
}

// lazy is a message argument that is made when it is printed.
type lazy func() string

func (f lazy) String() string { return f() }

// recorder is a testing.TB that notes failures and skips where a real one would
// act on them, and runs cleanups on demand.
type recorder struct {
	testing.TB // for everything else

	mu       sync.Mutex
	failures []string
	skips    []string
	cleanups []func()
}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

func (r *recorder) Fatalf(format string, args ...any) {
	r.Errorf(format, args...)
	runtime.Goexit()
}

func (r *recorder) Skipf(format string, args ...any) {
	r.mu.Lock()
	r.skips = append(r.skips, fmt.Sprintf(format, args...))
	r.mu.Unlock()
	runtime.Goexit()
}

func (r *recorder) Cleanup(f func()) { r.cleanups = append(r.cleanups, f) }

// do runs f as a test would be run, cleanups included, in a goroutine that
// Fatalf and Skipf may end.
func (r *recorder) do(f func()) {
	var wg sync.WaitGroup
	wg.Go(f)
	wg.Wait()
	for i := range r.cleanups {
		r.cleanups[len(r.cleanups)-1-i]()
	}
	r.cleanups = nil
}

package bench

import (
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

func TestCut(t *testing.T) {
	m := miniredis.RunT(t)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), MaxRetries: -1, DialerRetries: 1, ContextTimeoutEnabled: true})
	defer rdb.Close()
	var cut Cut
	cut.Attach(rdb)
	ping := func() error { return rdb.Ping(t.Context()).Err() }
	for range 2 {
		if err := ping(); err != nil {
			t.Fatalf("Ping = %v, want nil", err)
		}
		if n := len(cut.conns); n != 1 {
			t.Errorf("%d connections, want 1", n)
		}
		if err := errors.Join(cut.Down(), cut.Down()); err != nil {
			t.Fatal(err)
		}
		// The connection in the pool is found broken, and then none is to be had.
		if err := ping(); err == nil {
			t.Error("Ping on a connection that was cut = nil, want an error")
		}
		var op *net.OpError
		if err := ping(); !errors.Is(err, syscall.ECONNREFUSED) || !errors.As(err, &op) || op.Op != "dial" {
			t.Errorf("Ping while down = %v, want that dialling is refused", err)
		}
		if err := cut.Up(); err != nil {
			t.Fatal(err)
		}
	}
	if err := ping(); err != nil {
		t.Errorf("Ping at the end = %v, want nil", err)
	}
	rdb.Close()
	if n := len(cut.conns); n != 0 {
		t.Errorf("%d connections after Close, want 0", n)
	}
}

func TestTapNotesGrants(t *testing.T) {
	tp := &tap{keyOf: demoKeyOf}
	note := func(reply []any, err error, args ...any) {
		cmd := redis.NewCmd(t.Context(), args...)
		cmd.SetVal(reply)
		cmd.SetErr(err)
		tp.note(cmd, 3*time.Millisecond, 5*time.Millisecond)
	}
	const hot, cool = "p:tb1:{tenant:hot}", "p:tb1:{tenant:cool}"
	note([]any{int64(7), int64(1), int64(9), int64(2)}, nil, "evalsha", "sha", 2, hot, cool, 1, 2)
	note([]any{int64(4), int64(1)}, nil, "eval", "source", 1, "p:tb1:{tenant:other}")
	note([]any{int64(3), "id"}, nil, "evalsha", "sha", 2, "p:{nodes}", "p:{nodes}:gen")
	note(nil, redis.ErrClosed, "evalsha", "sha", 1, hot)
	note([]any{int64(4)}, nil, "evalsha", "sha", 2, hot, cool) // too short
	note([]any{int64(4)}, nil, "evalsha", "sha", 1)            // no key
	tp.note(redis.NewStatusCmd(t.Context(), "ping"), 0, 0)

	want := []reply{{0, 3 * time.Millisecond, 5 * time.Millisecond, 7}, {2, 3 * time.Millisecond, 5 * time.Millisecond, 9}}
	if !slices.Equal(tp.replies, want) {
		t.Errorf("noted %v, want %v", tp.replies, want)
	}
}

// pinger returns a client behind cut whose calls have 100 ms.
func pinger(t *testing.T, cut *Cut) (ping func() (time.Duration, error)) {
	t.Helper()
	m := miniredis.RunT(t)
	rdb := redis.NewClient(&redis.Options{Addr: m.Addr(), MaxRetries: -1, DialerRetries: 1, ContextTimeoutEnabled: true})
	t.Cleanup(func() { rdb.Close() })
	cut.Attach(rdb)
	ping = func() (time.Duration, error) {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		begin := time.Now()
		err := rdb.Ping(ctx).Err()
		return time.Since(begin), err
	}
	if _, err := ping(); err != nil {
		t.Fatalf("Ping = %v, want nil", err)
	}
	return ping
}

// Who is not heard is not told either, and waits no longer than for the deadline.
func TestCutSilence(t *testing.T) {
	var cut Cut
	ping := pinger(t, &cut)
	cut.Silence()
	cut.Silence()
	// First on the connection in the pool, then dialling.
	for range 2 {
		took, err := ping()
		// A context's own error is one of these too.
		if timeout, ok := errors.AsType[net.Error](err); !ok || !timeout.Timeout() {
			t.Errorf("Ping in silence = %v, want a time-out", err)
		}
		if took < 90*time.Millisecond || took > time.Second {
			t.Errorf("Ping in silence took %v, want 100ms", took)
		}
	}
	if err := cut.Up(); err != nil {
		t.Fatal(err)
	}
	if _, err := ping(); err != nil {
		t.Errorf("Ping after the silence = %v, want nil", err)
	}
}

// What was lost never comes after all: not on a connection that heard nothing of it.
func TestCutLosesForGood(t *testing.T) {
	var cut Cut
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	conn := &cutConn{Conn: near, cut: &cut, closed: make(chan struct{})}
	cut.Silence()
	if n, err := conn.Write([]byte("lost")); n != 4 || err != nil {
		t.Errorf("Write in silence = %d, %v, want 4 and no error", n, err)
	}
	_ = cut.Up()
	if n, err := conn.Write([]byte("late")); n != 4 || err != nil {
		t.Errorf("Write after a loss = %d, %v, want it swallowed too", n, err)
	}
	go func() { _, _ = far.Write([]byte("reply")) }()
	_ = conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := conn.Read(make([]byte, 8)); n != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read after a loss = %d, %v, want nothing until the deadline", n, err)
	}
}

func TestCutSlow(t *testing.T) {
	var cut Cut
	ping := pinger(t, &cut)
	cut.Slow(30 * time.Millisecond)
	if took, err := ping(); err != nil || took < 30*time.Millisecond {
		t.Errorf("Ping took %v, %v; want at least 30ms", took, err)
	}
	cut.Slow(10 * time.Second)
	if took, err := ping(); err == nil || took < 90*time.Millisecond || took > time.Second {
		t.Errorf("Ping took %v, %v; want a time-out after 100ms", took, err)
	}
	if err := cut.Up(); err != nil {
		t.Fatal(err)
	}
	if took, err := ping(); err != nil || took > 90*time.Millisecond {
		t.Errorf("Ping took %v, %v; want no delay", took, err)
	}
}

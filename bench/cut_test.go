package bench

import (
	"errors"
	"net"
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

package redistest

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// startProxied returns a server, a proxy in front of it, and a client of the
// proxy that has one open connection.
func startProxied(t *testing.T) (*Server, *Proxy, *redis.Client) {
	t.Helper()
	s := Start(t)
	p := NewProxy(t, s.Addr())
	c := p.Client(t)
	if err := c.Ping(t.Context()).Err(); err != nil {
		t.Fatalf("Ping() through the proxy: %v", err)
	}
	return s, p, c
}

// raw is a connection without a client's habits: no set-up, no pool.
type raw struct {
	net.Conn
	r *bufio.Reader
}

func dialRaw(t *testing.T, addr string) raw {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return raw{conn, bufio.NewReader(conn)}
}

func (c raw) send(t *testing.T, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
}

func (c raw) want(t *testing.T, value string) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if got, err := readValue(c.r); string(got) != value || err != nil {
		t.Fatalf("read %q, %v; want %q", got, err, value)
	}
}

// wantOpen checks that the connection is open and that nothing arrives on it.
func (c raw) wantOpen(t *testing.T) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(instant))
	b, err := c.r.ReadByte()
	if timeout, ok := errors.AsType[net.Error](err); !ok || !timeout.Timeout() {
		t.Fatalf("read %q, %v; want a time-out", b, err)
	}
}

// wantClosed checks that the connection ends without another byte.
func (c raw) wantClosed(t *testing.T) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b, err := c.r.ReadByte()
	if timeout, ok := errors.AsType[net.Error](err); err == nil || ok && timeout.Timeout() {
		t.Fatalf("read %q, %v; want the end", b, err)
	}
}

func TestProxyForwards(t *testing.T) {
	for _, protocol := range []int{2, 3} {
		s := Start(t)
		p := NewProxy(t, s.Addr())
		opt := Options(p.Addr())
		opt.Protocol = protocol
		opt.DisableIdentity = false
		c := redis.NewClient(opt)
		t.Cleanup(func() { c.Close() })

		big := strings.Repeat("\r\n*3\r\n$5", 100_000) // looks like RESP, is data
		if err := c.Set(t.Context(), "big", big, 0).Err(); err != nil {
			t.Fatal(err)
		}
		if got, err := c.Get(t.Context(), "big").Result(); got != big || err != nil {
			t.Errorf("RESP%d: Get(big) = %d bytes, %v; want %d, nil", protocol, len(got), err, len(big))
		}
		c.HSet(t.Context(), "h", "a", "1", "b", "2")
		if got := c.HGetAll(t.Context(), "h").Val(); len(got) != 2 || got["b"] != "2" {
			t.Errorf("RESP%d: HGetAll(h) = %v, want a:1 b:2", protocol, got)
		}

		cmds, err := c.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
			for range 1000 {
				pipe.Incr(t.Context(), "n")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for i, cmd := range cmds {
			if got := cmd.(*redis.IntCmd).Val(); got != int64(i+1) {
				t.Fatalf("RESP%d: reply %d = %d, want %d", protocol, i, got, i+1)
			}
		}
		if got := p.Requests("incr", "set", "get"); got != 1002 {
			t.Errorf("RESP%d: Requests(incr, set, get) = %d, want 1002", protocol, got)
		}
		if all, hello := p.Requests(), p.Requests("hello"); hello == 0 || all < 1004+hello {
			t.Errorf("RESP%d: Requests() = %d, Requests(hello) = %d", protocol, all, hello)
		}
	}
}

func TestProxyForwardsPubSub(t *testing.T) {
	s, p, _ := startProxied(t)
	c := dialRaw(t, p.Addr())
	c.send(t, "SUBSCRIBE a b\r\n")
	c.want(t, "*3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:1\r\n")
	c.want(t, "*3\r\n$9\r\nsubscribe\r\n$1\r\nb\r\n:2\r\n")
	if err := s.Client(t).Publish(t.Context(), "b", "hi").Err(); err != nil {
		t.Fatal(err)
	}
	c.want(t, "*3\r\n$7\r\nmessage\r\n$1\r\nb\r\n$2\r\nhi\r\n")
}

func TestProxyClosesWhatOneSideCloses(t *testing.T) {
	s, p, c := startProxied(t)
	if got := p.Conns(); got != 1 {
		t.Fatalf("Conns() = %d, want 1", got)
	}

	quit := dialRaw(t, p.Addr())
	quit.send(t, "\r\nPING\r\nQUIT\r\n")
	quit.want(t, "+PONG\r\n")
	quit.want(t, "+OK\r\n") // the server's last word arrives before the end
	quit.wantClosed(t)

	garbage := dialRaw(t, p.Addr())
	garbage.send(t, "*1\r\n?\r\n")
	garbage.wantClosed(t)

	c.Close()
	eventually(t, func() bool { return p.Conns() == 0 }, "Conns() != 0 after all clients closed")
	if got := p.Accepted(); got != 3 {
		t.Errorf("Accepted() = %d, want 3", got)
	}

	s.Kill()
	down := dialRaw(t, p.Addr())
	down.send(t, "PING\r\n")
	down.wantClosed(t) // nobody to forward it to
}

func TestProxyLatency(t *testing.T) {
	_, p, c := startProxied(t)
	const latency = 40 * time.Millisecond
	took := func(f func() error) time.Duration {
		t.Helper()
		start := time.Now()
		if err := f(); err != nil {
			t.Fatal(err)
		}
		return time.Since(start)
	}
	ping := func() error { return c.Ping(t.Context()).Err() }

	p.SetLatency(latency)
	if got := took(ping); got < 2*latency {
		t.Errorf("Ping() took %v, want at least %v", got, 2*latency)
	}
	pipeline := func() error {
		_, err := c.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
			for range 100 {
				pipe.Ping(t.Context())
			}
			return nil
		})
		return err
	}
	// Commands travel together. One by one they would take 8 s.
	if got := took(pipeline); got < 2*latency || got > 25*latency {
		t.Errorf("a pipeline of 100 took %v, want about %v", got, 2*latency)
	}

	p.Heal() // ends no latency
	if got := took(ping); got < 2*latency {
		t.Errorf("Ping() took %v after Heal, want at least %v", got, 2*latency)
	}
	p.SetLatency(0)
	fastest := took(ping)
	for range 20 {
		fastest = min(fastest, took(ping))
	}
	if fastest >= latency {
		t.Errorf("Ping() took %v without latency", fastest)
	}
}

func TestProxyExecutesWhatWasSentBeforeTheClientGaveUp(t *testing.T) {
	s, p, c := startProxied(t)
	p.SetLatency(2 * instant)
	if err := c.Incr(brief(t), "k").Err(); err == nil {
		t.Fatal("Incr(k) = nil, want a time-out")
	}
	if got := s.CommandCalls(t, "incr"); got != 0 {
		t.Fatalf("INCR was executed %d times before it arrived", got)
	}
	eventually(t, func() bool { return s.CommandCalls(t, "incr") == 1 }, "INCR was not executed")
}

func TestProxyNothingLeftAfterTest(t *testing.T) {
	s := Start(t)
	before := goroutines()
	var p *Proxy
	t.Run("test", func(t *testing.T) {
		p = NewProxy(t, s.Addr())
		c := p.Client(t)
		if err := c.Ping(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		dialRaw(t, p.Addr()) // has sent nothing
		p.SetLatency(time.Hour)
		c.Ping(brief(t)) // under way for an hour
		p.Silence()
		c.Ping(brief(t))
	})
	if dialable(p.Addr()) {
		t.Errorf("something still listens on %s", p.Addr())
	}
	if got := p.Conns(); got != 0 {
		t.Errorf("Conns() = %d after the test, want 0", got)
	}
	wantNoneLeft(t, before)
}

// All switches at once under traffic, for the race detector; and whatever the
// network did, no command was executed twice.
func TestProxySwitchesUnderTraffic(t *testing.T) {
	s, p, _ := startProxied(t)
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 4 {
		c := p.Client(t)
		wg.Go(func() {
			for ctx.Err() == nil {
				call, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
				c.Incr(call, "k") // may fail in any way
				cancel()
			}
		})
	}
	for range 20 {
		for _, fault := range []func(){
			func() { p.DropReplies(2) },
			func() { p.CloseOnReply(2) },
			func() { p.SetLatency(time.Millisecond) },
			func() { p.RespondError("BUSY") },
			p.Silence, p.Cut,
			func() { p.SetLatency(0) },
			p.Heal,
		} {
			fault()
			time.Sleep(time.Millisecond)
		}
	}
	stop()
	wg.Wait()
	p.Cut()
	sent, executed := p.Requests("incr"), s.CommandCalls(t, "incr")
	if executed > sent || executed == 0 {
		t.Errorf("INCR was sent %d times and executed %d times", sent, executed)
	}
}

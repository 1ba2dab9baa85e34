package redistest

import (
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

func TestProxyCutAndHeal(t *testing.T) {
	s, p, c := startProxied(t)
	idle := dialRaw(t, p.Addr())
	idle.send(t, "PING\r\n")
	idle.want(t, "+PONG\r\n")

	p.Cut()
	if got := p.Conns(); got != 0 {
		t.Errorf("Conns() = %d after Cut, want 0", got)
	}
	idle.wantClosed(t)
	before := p.Accepted()
	for range 3 {
		if err := c.Incr(t.Context(), "k").Err(); err == nil {
			t.Error("Incr(k) over a cut line = nil, want an error")
		}
	}
	fresh := dialRaw(t, p.Addr())
	fresh.wantClosed(t)
	if got := p.Accepted(); got <= before {
		t.Errorf("Accepted() = %d after Cut, want more than %d: attempts count", got, before)
	}
	if got := s.CommandCalls(t, "incr"); got != 0 {
		t.Errorf("INCR was executed %d times over a cut line", got)
	}

	p.Heal()
	if err := c.Incr(t.Context(), "k").Err(); err != nil {
		t.Errorf("Incr(k) after Heal: %v", err)
	}
}

// Cut promises that nothing is forwarded after it returns, so a count taken
// then is final.
func TestProxyCutIsFinal(t *testing.T) {
	s, p, _ := startProxied(t)
	var wg sync.WaitGroup
	for range 4 {
		c := p.Client(t)
		wg.Go(func() {
			for {
				if err := c.Incr(t.Context(), "k").Err(); err != nil {
					return // the cut
				}
			}
		})
	}
	eventually(t, func() bool { return p.Requests("incr") > 50 }, "no traffic")
	p.Cut()
	wg.Wait()
	// What the proxy had written is in the server's sockets; it is read within
	// one round of its event loop.
	s.Info(t, "server")
	calls := s.CommandCalls(t, "incr")
	time.Sleep(instant / 2)
	if got := s.CommandCalls(t, "incr"); got != calls {
		t.Errorf("INCR was executed %d times, and later %d", calls, got)
	}
}

func TestProxySilence(t *testing.T) {
	s, p, c := startProxied(t)
	idle, lossy := dialRaw(t, p.Addr()), dialRaw(t, p.Addr())
	for _, conn := range []raw{idle, lossy} {
		conn.send(t, "PING\r\n")
		conn.want(t, "+PONG\r\n")
	}

	p.Silence()
	if err := c.Incr(brief(t), "k").Err(); err == nil {
		t.Error("Incr(k) into silence = nil, want a time-out")
	}
	lossy.send(t, "INCR k\r\n")
	lossy.wantOpen(t)
	fresh := dialRaw(t, p.Addr()) // accepted, and no more
	fresh.send(t, "PING\r\n")
	fresh.wantOpen(t)
	if got := p.Requests("incr"); got != 2 {
		t.Errorf("Requests(incr) = %d, want 2: swallowed commands count", got)
	}

	p.Heal()
	idle.send(t, "PING\r\n") // has lost nothing
	idle.want(t, "+PONG\r\n")
	lossy.send(t, "PING\r\n") // nothing overtakes what was lost
	lossy.wantOpen(t)
	if err := c.Ping(t.Context()).Err(); err != nil {
		t.Errorf("Ping() after Heal: %v", err)
	}
	if got := s.CommandCalls(t, "incr"); got != 0 {
		t.Errorf("INCR was executed %d times in silence", got)
	}
}

func TestProxySilenceHidesTheEndOfTheServer(t *testing.T) {
	s, p, _ := startProxied(t)
	c := dialRaw(t, p.Addr())
	c.send(t, "PING\r\n")
	c.want(t, "+PONG\r\n")
	p.Silence()
	s.Kill()
	c.wantOpen(t)
}

func TestProxyDropReplies(t *testing.T) {
	s, p, c := startProxied(t)
	p.DropReplies(2)
	for range 2 {
		// The second goes over a new connection, whose HELLO must not count.
		if err := c.Incr(brief(t), "k").Err(); err == nil {
			t.Error("Incr(k) = nil, want a time-out")
		}
	}
	if n, err := c.Incr(t.Context(), "k").Result(); n != 3 || err != nil {
		t.Errorf("Incr(k) = %d, %v; want 3, nil: each lost call was executed", n, err)
	}
	if got := s.CommandCalls(t, "incr"); got != 3 {
		t.Errorf("INCR was executed %d times, want 3", got)
	}
}

func TestProxyDropRepliesLeavesTheConnectionOpenAndMute(t *testing.T) {
	s, p, _ := startProxied(t)
	c := dialRaw(t, p.Addr())
	p.DropReplies(1)
	c.send(t, "INCR k\r\nINCR k\r\n") // the second reply must not pass for the first
	c.wantOpen(t)
	if got := s.CommandCalls(t, "incr"); got != 2 {
		t.Errorf("INCR was executed %d times, want 2", got)
	}
	p.Heal()
	c.send(t, "INCR k\r\n")
	c.wantOpen(t)
}

func TestProxyCloseOnReply(t *testing.T) {
	s, p, c := startProxied(t)
	p.CloseOnReply(2)
	for range 2 {
		err := c.Incr(t.Context(), "k").Err()
		if timeout, ok := errors.AsType[net.Error](err); err == nil || ok && timeout.Timeout() {
			t.Errorf("Incr(k) = %v, want the end of the connection", err)
		}
	}
	if n, err := c.Incr(t.Context(), "k").Result(); n != 3 || err != nil {
		t.Errorf("Incr(k) = %d, %v; want 3, nil: each lost call was executed", n, err)
	}
	if got := s.CommandCalls(t, "incr"); got != 3 {
		t.Errorf("INCR was executed %d times, want 3", got)
	}
}

// A RESP3 push between command and reply is neither the reply nor counted.
func TestProxyTellsPushesFromReplies(t *testing.T) {
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	p := NewProxy(t, server.Addr().String())
	c := dialRaw(t, p.Addr())
	c.send(t, "PING\r\n")
	conn, err := server.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	p.DropReplies(1)
	if _, err := io.WriteString(conn, ">2\r\n+invalidate\r\n+k\r\n+PONG\r\n"); err != nil {
		t.Fatal(err)
	}
	c.want(t, ">2\r\n+invalidate\r\n+k\r\n")
	c.wantOpen(t) // the reply was dropped
}

func TestProxyHealDisarmsReplyFaults(t *testing.T) {
	_, p, c := startProxied(t)
	p.DropReplies(5)
	p.CloseOnReply(5)
	p.Heal()
	for range 3 {
		if err := c.Incr(t.Context(), "k").Err(); err != nil {
			t.Fatalf("Incr(k) after Heal: %v", err)
		}
	}
}

func TestProxyRespondError(t *testing.T) {
	s, p, c := startProxied(t)
	p.RespondError("LOADING Redis is loading the dataset in memory")
	before := s.CommandCalls(t, "incr")

	cmds, _ := c.Pipelined(t.Context(), func(pipe redis.Pipeliner) error {
		for range 3 {
			pipe.Incr(t.Context(), "k")
		}
		return nil
	})
	for i, cmd := range cmds {
		if !redis.IsLoadingError(cmd.Err()) {
			t.Errorf("reply %d = %v, want LOADING", i, cmd.Err())
		}
	}
	// A new client's set-up is answered likewise, and does not break it.
	if err := p.Client(t).Incr(t.Context(), "k").Err(); !redis.IsLoadingError(err) {
		t.Errorf("Incr(k) of a new client = %v, want LOADING", err)
	}
	if got := p.Requests("incr"); got != 4 {
		t.Errorf("Requests(incr) = %d, want 4", got)
	}
	if got := s.CommandCalls(t, "incr"); got != before {
		t.Errorf("INCR was executed %d times", got-before)
	}

	s.Kill() // the proxy answers by itself
	p.RespondError("-BUSY script\r\n")
	if err := p.Client(t).Incr(t.Context(), "k").Err(); !redis.HasErrorPrefix(err, "BUSY") {
		t.Errorf("Incr(k) = %v, want BUSY", err)
	}
	s.Restart(t)
	p.Heal()
	if n, err := p.Client(t).Incr(t.Context(), "k").Result(); n != 1 || err != nil {
		t.Errorf("Incr(k) after Heal = %d, %v; want 1, nil", n, err)
	}
}

func TestProxyRespondErrorKeepsOrder(t *testing.T) {
	s, p, _ := startProxied(t)
	c := dialRaw(t, p.Addr())
	s.Pause()
	c.send(t, "INCR k\r\n")
	// Forwarded means: past the switch. The mode is read when it arrives.
	eventually(t, func() bool { return p.forwarded() == 1 }, "INCR was not forwarded")
	p.RespondError("LOADING")
	c.send(t, "INCR k\r\n")
	c.wantOpen(t)
	s.Resume()
	c.want(t, ":1\r\n")
	c.want(t, "-LOADING\r\n")
}

// forwarded returns how many commands wait for the server.
func (p *Proxy) forwarded() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for l := range p.links {
		l.mu.Lock()
		n += len(l.pending)
		l.mu.Unlock()
	}
	return n
}

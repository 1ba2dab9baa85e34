package bench

import (
	"context"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/redis/go-redis/v9"
)

// Cut comes between clients and their Redis. While it is down all of their
// connections are closed and new ones refused, as if the server had died; the
// server itself does not notice more than clients that went away. It can also
// swallow everything, or hold up replies. The zero Cut is ready for use.
type Cut struct {
	mu     sync.Mutex
	down   bool
	conns  map[*cutConn]struct{}
	silent chan struct{} // closed when it no longer is; nil if it is not
	delay  time.Duration // of each reply
}

// Attach puts the Cut before a client that has not been used yet. Connections to
// Sentinels are left alone.
func (c *Cut) Attach(rdb redis.UniversalClient) {
	if cluster, ok := rdb.(*redis.ClusterClient); ok {
		cluster.OnNewNode(func(node *redis.Client) { node.AddHook(dialHook{c.dial}) })
		return
	}
	rdb.AddHook(dialHook{c.dial})
}

// Down cuts the clients off.
func (c *Cut) Down() error {
	c.mu.Lock()
	c.down = true
	conns := c.conns
	c.conns = nil
	c.mu.Unlock()
	for conn := range conns {
		_ = conn.Conn.Close() // it was to break
	}
	return nil
}

// Silence swallows what is sent from now on in either direction, as a network
// that drops all packets does: nobody is told. A connection that lost something
// never carries anything again.
func (c *Cut) Silence() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.silent == nil {
		c.silent = make(chan struct{})
	}
}

// Slow has each reply arrive d later.
func (c *Cut) Slow(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.delay = d
}

// Up lets them connect again, hear all and without delay.
func (c *Cut) Up() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.down, c.delay = false, 0
	if c.silent != nil {
		close(c.silent)
		c.silent = nil
	}
	return nil
}

func (c *Cut) dial(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) {
		if c.isDown() {
			return nil, refused(network)
		}
		if err := c.heard(ctx); err != nil {
			return nil, err
		}
		inner, err := next(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		conn := &cutConn{Conn: inner, cut: c, closed: make(chan struct{})}
		if !c.add(conn) { // cut off meanwhile
			_ = inner.Close()
			return nil, refused(network)
		}
		return conn, nil
	}
}

func (c *Cut) isDown() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.down
}

// heard waits until the line is not silent.
func (c *Cut) heard(ctx context.Context) error {
	c.mu.Lock()
	silent := c.silent
	c.mu.Unlock()
	if silent == nil {
		return nil
	}
	select {
	case <-silent:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(dialPatience):
		return &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ETIMEDOUT}
	}
}

// dialPatience is how long dialling takes to fail while nobody answers, for
// callers without a deadline.
const dialPatience = 2 * time.Second

// state tells what becomes of what is sent now.
func (c *Cut) state() (silent bool, delay time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.silent != nil, c.delay
}

func (c *Cut) add(conn *cutConn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.down {
		return false
	}
	if c.conns == nil {
		c.conns = map[*cutConn]struct{}{}
	}
	c.conns[conn] = struct{}{}
	return true
}

// refused is what dialling a port is answered with that nobody listens on.
func refused(network string) error {
	return &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
}

type cutConn struct {
	net.Conn
	cut    *Cut
	lost   atomic.Bool  // something was: it carries nothing more
	until  atomic.Int64 // the read deadline, in Unix nanoseconds; 0 for none
	once   sync.Once
	closed chan struct{}
}

// Write implements net.Conn.
func (c *cutConn) Write(b []byte) (int, error) {
	if silent, _ := c.cut.state(); silent || c.lost.Load() {
		c.lost.Store(true)
		return len(b), nil
	}
	return c.Conn.Write(b)
}

// Read implements net.Conn. It is here that a slow line takes its time, for a
// write that did would hold up its caller beyond every deadline.
func (c *cutConn) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		silent, delay := c.cut.state()
		switch {
		case err != nil:
			return n, err
		case silent || c.lost.Load():
			c.lost.Store(true)
		case delay == 0 || c.sleep(delay):
			return n, nil
		default: // the deadline came first
			c.lost.Store(true)
			return 0, &net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded}
		}
	}
}

// sleep reports whether d passed before the read deadline.
func (c *cutConn) sleep(d time.Duration) bool {
	inTime := true
	if until := c.until.Load(); until != 0 {
		if left := time.Until(time.Unix(0, until)); left < d {
			d, inTime = max(0, left), false
		}
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return inTime
	case <-c.closed:
		return false
	}
}

// SetDeadline implements net.Conn.
func (c *cutConn) SetDeadline(t time.Time) error {
	c.note(t)
	return c.Conn.SetDeadline(t)
}

// SetReadDeadline implements net.Conn.
func (c *cutConn) SetReadDeadline(t time.Time) error {
	c.note(t)
	return c.Conn.SetReadDeadline(t)
}

func (c *cutConn) note(t time.Time) {
	if t.IsZero() {
		c.until.Store(0)
		return
	}
	c.until.Store(t.UnixNano())
}

// Close implements net.Conn.
func (c *cutConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	c.cut.mu.Lock()
	delete(c.cut.conns, c)
	c.cut.mu.Unlock()
	return c.Conn.Close()
}

// dialHook is a go-redis hook that sees connections only.
type dialHook struct {
	dial func(next redis.DialHook) redis.DialHook
}

// DialHook implements redis.Hook.
func (h dialHook) DialHook(next redis.DialHook) redis.DialHook { return h.dial(next) }

// ProcessHook implements redis.Hook.
func (dialHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook { return next }

// ProcessPipelineHook implements redis.Hook.
func (dialHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// tap is a go-redis hook that notes what one node is granted. It is attached
// before the client is used, and read when it is no longer.
type tap struct {
	start time.Time
	keyOf func(redisKey string) (key int, ok bool)

	mu      sync.Mutex
	replies []reply
}

// reply is what Redis granted of one key in one call. It did so at some instant
// between sent and got, which are durations since the start of the run.
type reply struct {
	key       int
	sent, got time.Duration
	granted   int64
}

// DialHook implements redis.Hook.
func (t *tap) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessHook implements redis.Hook.
func (t *tap) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		sent := time.Since(t.start)
		err := next(ctx, cmd)
		t.note(cmd, sent, time.Since(t.start))
		return err
	}
}

// ProcessPipelineHook implements redis.Hook.
func (t *tap) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		sent := time.Since(t.start)
		err := next(ctx, cmds)
		got := time.Since(t.start)
		for _, cmd := range cmds {
			t.note(cmd, sent, got)
		}
		return err
	}
}

// note takes in the reply to a call of acquire.lua: as many integers for each of
// its keys, of which the first is what was granted.
func (t *tap) note(cmd redis.Cmder, sent, got time.Duration) {
	args := cmd.Args()
	values, ok := cmd.(interface{ Int64Slice() ([]int64, error) })
	if !ok || len(args) < 4 {
		return
	}
	n, _ := args[2].(int)
	granted, err := values.Int64Slice()
	if err != nil || n < 1 || n > len(args)-3 || n > len(granted) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range n {
		name, _ := args[3+i].(string)
		if key, ok := t.keyOf(name); ok {
			t.replies = append(t.replies, reply{key, sent, got, granted[i*(len(granted)/n)]})
		}
	}
}

// unseen returns how many tokens of key other nodes were granted until an
// instant and a node does not know of: the most of any node. That is what they
// were granted since the call was sent whose reply it had last.
func unseen(taps []*tap, key int, until time.Duration) (most int64) {
	for i := range taps {
		var last reply // the zero one if there was none
		for _, r := range taps[i].replies {
			if r.key == key && r.got <= until && r.got > last.got {
				last = r
			}
		}
		granted := int64(0)
		for j := range taps {
			for _, r := range taps[j].replies {
				if j != i && r.key == key && r.got <= until && r.got >= last.sent {
					granted += r.granted
				}
			}
		}
		most = max(most, granted)
	}
	return most
}

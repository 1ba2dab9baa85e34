package redistest

import (
	"bufio"
	"context"
	"net"
	"sync"
	"time"
)

// link is one client connection through a Proxy and, once there is something to
// forward, the server connection behind it.
//
//	client ─► readCommands ─► up ─► forward ─► server
//	client ◄─ deliver ◄─ down ◄─ readReplies ◄─ server
//
// The two lines hold what is under way. Faults act where a line ends, so what
// was under way when the network broke is lost too.
type link struct {
	proxy    *Proxy
	client   net.Conn
	cancel   context.CancelFunc // ends a dial
	stop     chan struct{}      // closed by close
	gone     chan struct{}      // closed when run has returned
	wg       sync.WaitGroup     // the goroutines of this link
	up, down line

	deaf bool // has lost a command; only forward reads and writes it
	mute bool // has lost a reply; only deliver reads and writes it

	mu      sync.Mutex // guards what follows
	closed  bool
	server  net.Conn  // nil before the first forwarded command
	pending []pending // commands without a reply, oldest first
}

// pending is a command that still waits for its reply: from the server or, when
// local is set, from the proxy itself as soon as the replies before it are out.
type pending struct {
	name  string
	local []byte
}

func newLink(p *Proxy, client net.Conn, cancel context.CancelFunc) *link {
	return &link{
		proxy:  p,
		client: client,
		cancel: cancel,
		stop:   make(chan struct{}),
		gone:   make(chan struct{}),
		up:     newLine(),
		down:   newLine(),
	}
}

// run serves the link until it is closed, and returns when all its goroutines
// have ended.
func (l *link) run(ctx context.Context) {
	l.wg.Go(l.readCommands)
	l.wg.Go(func() {
		l.up.run(l.stop, func(m message) bool { return l.forward(ctx, m) })
		l.close()
	})
	l.wg.Go(func() {
		l.down.run(l.stop, l.deliver) // never finished: ends in deliver or on stop
		l.close()
	})
	l.wg.Wait()
	l.proxy.forget(l)
	close(l.gone)
}

// close ends the link at once. It may be called more than once, and does not
// wait, for it is also called by the link's own goroutines.
func (l *link) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.closed = true
	l.cancel()
	close(l.stop)
	// The peer learns of it either way; there is nobody to tell about an error.
	_ = l.client.Close()
	if l.server != nil {
		_ = l.server.Close()
	}
}

// readCommands takes commands from the client until it closes. Then the up line
// runs dry first: what was sent before closing still reaches the server.
func (l *link) readCommands() {
	defer l.up.finish()
	for r := bufio.NewReader(l.client); ; {
		raw, name, err := readCommand(r)
		if err != nil {
			return
		}
		if name == "" {
			continue // Redis answers nothing to it, so neither side misses it
		}
		l.proxy.count(name)
		l.up.send(message{raw: raw, name: name}, l.proxy.delay())
	}
}

// forward handles a command at the server's end of the line. It returns false
// when the link cannot go on.
func (l *link) forward(ctx context.Context, m message) bool {
	mode, errorReply := l.proxy.onCommand()
	if mode == silent {
		l.deaf = true
	}
	switch {
	case l.deaf:
		return true
	case mode == cut:
		return false
	case mode == failing:
		l.expect(pending{name: m.name, local: errorReply})
		return true
	}
	server, err := l.dial(ctx)
	if err != nil {
		l.hangUp()
		return true
	}
	l.expect(pending{name: m.name}) // before the write: the reply may be quick
	// A server that is gone shows in readReplies too, after its last reply.
	_, _ = server.Write(m.raw)
	return true
}

// dial returns the server connection, made on first use.
func (l *link) dial(ctx context.Context) (net.Conn, error) {
	l.mu.Lock()
	server := l.server
	l.mu.Unlock()
	if server != nil {
		return server, nil
	}

	server, err := new(net.Dialer).DialContext(ctx, "tcp", l.proxy.target)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		_ = server.Close() // close ran meanwhile and did not see it
		return nil, net.ErrClosed
	}
	l.server = server
	l.wg.Go(func() { l.readReplies(server) })
	return server, nil
}

// readReplies takes replies from the server until it closes.
func (l *link) readReplies(server net.Conn) {
	defer l.hangUp()
	for r := bufio.NewReader(server); ; {
		raw, err := readValue(r)
		if err != nil {
			return
		}
		l.answered(raw)
	}
}

// hangUp tells the client that the server has closed. The news takes the same
// line as the replies: it arrives after a last word of the server ("-ERR max
// number of clients reached"), and not at all through a silent network.
func (l *link) hangUp() { l.down.send(message{}, l.proxy.delay()) }

// expect appends a command to those that wait for a reply.
func (l *link) expect(p pending) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending = append(l.pending, p)
	l.flushLocked()
}

// answered sends a value from the server to the client, as the reply to the
// oldest command. Pushes ('>') and whatever comes unasked answer nothing.
func (l *link) answered(raw []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := message{raw: raw}
	if raw[0] != '>' && len(l.pending) > 0 {
		m.name = l.pending[0].name
		l.pending = l.pending[1:]
	}
	l.down.send(m, l.proxy.delay())
	l.flushLocked()
}

// flushLocked sends the local answers whose turn it is.
func (l *link) flushLocked() {
	for len(l.pending) > 0 && l.pending[0].local != nil {
		// Without a name it does not count as a reply: nothing was executed.
		l.down.send(message{raw: l.pending[0].local}, l.proxy.delay())
		l.pending = l.pending[1:]
	}
}

// deliver handles a reply at the client's end of the line. It returns false when
// the link cannot go on.
func (l *link) deliver(m message) bool {
	if l.mute {
		return true
	}
	switch l.proxy.onReply(m.name != "" && !setup[m.name]) {
	case lose:
		l.mute = true
		return true
	case closeOn:
		return false
	}
	if m.raw == nil {
		return false
	}
	_, err := l.client.Write(m.raw)
	return err == nil
}

// message is a command or a reply under way.
type message struct {
	raw     []byte // nil when the server has closed
	name    string // the command, also of a reply; empty when there is none
	arrives time.Time
}

// line carries messages one way, in order, and holds each until it arrives. It
// takes any number of them without blocking: a reader that waited for a slow
// writer would add a latency that nobody asked for.
type line struct {
	wake chan struct{} // holds one token when there is news

	mu       sync.Mutex // guards what follows
	queue    []message
	finished bool
}

func newLine() line { return line{wake: make(chan struct{}, 1)} }

func (q *line) send(m message, delay time.Duration) {
	m.arrives = time.Now().Add(delay)
	q.mu.Lock()
	q.queue = append(q.queue, m)
	q.mu.Unlock()
	q.news()
}

// finish says that no more messages come. Those under way still arrive.
func (q *line) finish() {
	q.mu.Lock()
	q.finished = true
	q.mu.Unlock()
	q.news()
}

func (q *line) news() {
	select {
	case q.wake <- struct{}{}:
	default: // there is news already
	}
}

// run calls arrived for each message when its time has come. It returns when
// the line is finished and empty, when arrived returns false, or on stop.
func (q *line) run(stop <-chan struct{}, arrived func(message) bool) {
	for {
		q.mu.Lock()
		batch, finished := q.queue, q.finished
		q.queue = nil
		q.mu.Unlock()
		for _, m := range batch {
			if !sleep(stop, time.Until(m.arrives)) || !arrived(m) {
				return
			}
		}
		if finished {
			return
		}
		select {
		case <-q.wake:
		case <-stop:
			return
		}
	}
}

// sleep waits for d and reports whether stop left it the time.
func sleep(stop <-chan struct{}, d time.Duration) bool {
	if d <= 0 {
		select {
		case <-stop:
			return false
		default:
			return true
		}
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-stop:
		return false
	}
}

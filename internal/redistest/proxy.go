package redistest

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// Proxy is a TCP proxy in front of a Redis server, with faults that are switched
// while it runs. Each switch is atomic and holds from its return on, for open
// connections and new ones.
//
// It reads the protocol in both directions, so that faults hit whole commands
// and whole replies wherever TCP happens to split them, and it knows which reply
// answers which command. Commands with more than one reply (SUBSCRIBE, MONITOR)
// pass, but the reply faults may then count wrong.
//
// A connection that has lost a command or a reply never carries another one in
// that direction, also after [Proxy.Heal]: as in TCP, nothing overtakes what was
// lost. It stays open until one side closes it, and a client that reuses it
// waits in vain, which is the client's bug to find.
type Proxy struct {
	target   string
	listener net.Listener
	wg       sync.WaitGroup // the accept loop and every link
	latency  atomic.Int64   // nanoseconds, each way
	accepted atomic.Int64

	mu         sync.Mutex // guards what follows
	mode       mode
	errorReply []byte // in mode failing
	dropLeft   int    // replies still to drop
	closeLeft  int    // replies still to close a connection on
	requests   map[string]int64
	links      map[*link]struct{}
}

// mode is the fault that a Proxy shows to every connection.
type mode int

const (
	forwarding mode = iota
	cut             // connections are closed at once
	silent          // everything is swallowed
	failing         // commands are answered with errorReply
)

// fate is what becomes of one reply.
type fate int

const (
	deliver fate = iota
	lose         // never reaches the client
	closeOn      // the connection closes in its stead
)

// setup names the commands by which a client prepares a new connection. Their
// replies are no prey of DropReplies and CloseOnReply: a fault meant for the
// next EVALSHA should not be used up by the HELLO of a reconnect.
var setup = map[string]bool{
	"hello": true, "auth": true, "client": true, "select": true, "readonly": true,
}

// NewProxy starts a proxy on a free loopback port in front of target, a
// host:port, which need not be up yet: the proxy dials when a connection has its
// first command to forward. When t ends, the listener and all connections are
// closed and all its goroutines are gone.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("redistest: listen: %v", err)
	}
	p := &Proxy{
		target:   target,
		listener: listener,
		requests: make(map[string]int64),
		links:    make(map[*link]struct{}),
	}
	p.wg.Go(p.accept)
	t.Cleanup(func() {
		p.listener.Close()
		p.Cut()
		p.wg.Wait()
	})
	return p
}

// Addr returns the "127.0.0.1:port" that clients dial.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Client returns a client that goes through the proxy, with [Options], closed
// when t ends.
func (p *Proxy) Client(t testing.TB) *redis.Client {
	t.Helper()
	return newClient(t, Options(p.Addr()))
}

// SetLatency makes each command and each reply arrive d after it was sent, so a
// round trip takes 2·d longer. The line has no bandwidth limit: a pipeline takes
// no longer than one command. What is under way keeps the latency it left with.
// A command already sent is still executed when its client closes meanwhile.
func (p *Proxy) SetLatency(d time.Duration) { p.latency.Store(int64(d)) }

// Cut closes all connections, and new ones as soon as they are made. When it
// returns nothing is forwarded any more, neither commands nor replies.
func (p *Proxy) Cut() {
	p.mu.Lock()
	p.mode = cut
	links := make([]*link, 0, len(p.links))
	for l := range p.links {
		links = append(links, l)
	}
	p.mu.Unlock()

	for _, l := range links {
		l.close()
		<-l.gone
	}
}

// Silence swallows every command and every reply without closing anything, as a
// network does that drops packets. Connections made meanwhile are accepted.
func (p *Proxy) Silence() { p.set(silent, nil) }

// RespondError answers each command with an error instead of forwarding it, set-up
// commands included, for example "LOADING Redis is loading the dataset in
// memory". Commands forwarded earlier get their own replies first.
func (p *Proxy) RespondError(line string) {
	p.set(failing, fmt.Appendf(nil, "-%s\r\n", strings.TrimPrefix(strings.TrimSpace(line), "-")))
}

// Heal ends what Cut, Silence or RespondError began (of these only the latest
// call counts), and what is left of DropReplies and CloseOnReply. The latency
// stays.
func (p *Proxy) Heal() {
	p.set(forwarding, nil)
	p.DropReplies(0)
	p.CloseOnReply(0)
}

func (p *Proxy) set(m mode, errorReply []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mode, p.errorReply = m, errorReply
}

// DropReplies loses the next n replies: the server has executed the command, the
// client never hears of it, the connection stays open. As a connection carries no
// reply after a lost one, n replies are lost on n connections. Replies to HELLO,
// AUTH, CLIENT, SELECT and READONLY do not count and arrive. A new call replaces
// the number that is left.
func (p *Proxy) DropReplies(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropLeft = n
}

// CloseOnReply closes the connection instead of delivering a reply, for the next
// n replies: the server has executed the command, the client sees the connection
// end. It counts like DropReplies; where both are set, DropReplies goes first.
func (p *Proxy) CloseOnReply(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closeLeft = n
}

// Conns returns how many client connections are open now.
func (p *Proxy) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// Accepted returns how many connections clients have made so far, the ones that
// were closed at once included.
func (p *Proxy) Accepted() int64 { return p.accepted.Load() }

// Requests returns how many commands clients have sent so far, whatever became
// of them: all commands, or only those with the given lower-case names.
func (p *Proxy) Requests(names ...string) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	var n int64
	if len(names) == 0 {
		for _, count := range p.requests {
			n += count
		}
	}
	for _, name := range names {
		n += p.requests[name]
	}
	return n
}

func (p *Proxy) count(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests[name]++
}

// accept runs until the listener is closed.
func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.accepted.Add(1)
		ctx, cancel := context.WithCancel(context.Background())
		l := newLink(p, client, cancel)
		if !p.admit(l) {
			l.close()
			continue
		}
		p.wg.Go(func() { l.run(ctx) })
	}
}

// admit enters a new link, unless the line is cut. Doing both under the lock
// means that Cut misses none.
func (p *Proxy) admit(l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mode == cut {
		return false
	}
	p.links[l] = struct{}{}
	return true
}

func (p *Proxy) forget(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

// onCommand returns how a command is to be treated when it arrives.
func (p *Proxy) onCommand() (mode, []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mode, p.errorReply
}

// onReply decides the fate of a reply when it arrives. Only counted replies use
// up DropReplies and CloseOnReply.
func (p *Proxy) onReply(counted bool) fate {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.mode == cut || p.mode == silent:
		return lose
	case counted && p.dropLeft > 0:
		p.dropLeft--
		return lose
	case counted && p.closeLeft > 0:
		p.closeLeft--
		return closeOn
	}
	return deliver
}

func (p *Proxy) delay() time.Duration { return time.Duration(p.latency.Load()) }

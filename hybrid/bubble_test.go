package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/lease"
)

// bubble runs f in a synctest bubble with the real script in an in-process
// Redis reached without a socket, so fake time moves for all of it: the
// server's TIME, key expiry, the client and the node. Nodes are closed, and
// their ledgers checked, when f returns.
func bubble(t *testing.T, f func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := miniredis.NewMiniRedis()
		defer m.Close()
		m.ClockTTL(true)
		w := &world{t: t, redis: m, start: time.Now()}
		w.rdb = w.client(nil)
		defer func() { // also after a Fatal, or what runs on hides its message
			for _, l := range w.nodes {
				l.Close(context.Background()) // some are closed, some cut off
				checkLedger(t, l)
			}
			for _, c := range w.clients {
				c.Close()
			}
		}()
		f(t, w)
	})
}

// checkLedger fails the test unless l's tokens balance. l must be at rest.
func checkLedger(t *testing.T, l *hybrid.Limiter) {
	t.Helper()
	s := l.Stats()
	if s.Granted != s.Spent+s.Returned+s.Expired+s.Lost+s.Live {
		t.Errorf("Stats = %+v: Granted is not Spent + Returned + Expired + Lost + Live", s)
	}
}

// world is a Redis and the nodes on it, in fake time.
type world struct {
	t       *testing.T
	redis   *miniredis.Miniredis
	rdb     *redis.Client
	start   time.Time
	nodes   []*hybrid.Limiter
	clients []*redis.Client

	mu     sync.Mutex
	skew   time.Duration // how far the server's clock is ahead
	skewed bool
}

// line is a node's connection to Redis: its latency and its faults, changed
// while it is used. The zero line is perfect.
type line struct {
	request, reply atomic.Int64 // nanoseconds each way
	dead           atomic.Bool  // nothing arrives: dialling fails at once
	hang           atomic.Bool  // nothing arrives: the client waits in vain
	loseReply      atomic.Int64 // replies in a thousand that are lost
	calls          atomic.Int64 // commands sent, beats not counted
	// fault, if set, makes what is sent fail at once where it returns an error.
	fault atomic.Pointer[func(cmds []redis.Cmder) error]
	busy  *capacity // of the server; nil: it takes no time

	mu   sync.Mutex
	sent [][]any // their arguments
}

// commands returns what was sent so far, once nothing is on its way.
func (l *line) commands() [][]any {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sent
}

func newLine(rtt time.Duration) *line {
	l := &line{}
	l.request.Store(int64(rtt / 2))
	l.reply.Store(int64(rtt - rtt/2))
	return l
}

func (l *line) DialHook(next redis.DialHook) redis.DialHook { return next }

func (l *line) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if cmd.Name() == "hello" {
			return next(ctx, cmd) // as if always connected
		}
		return l.pass(ctx, []redis.Cmder{cmd}, func() error { return next(ctx, cmd) })
	}
}

func (l *line) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		if cmds[0].Name() == "hello" {
			return next(ctx, cmds)
		}
		return l.pass(ctx, cmds, func() error { return next(ctx, cmds) })
	}
}

// pass takes what is sent at once to Redis, and brings the replies.
func (l *line) pass(ctx context.Context, cmds []redis.Cmder, send func() error) error {
	l.note(cmds)
	fail := func(err error) error {
		for _, cmd := range cmds {
			cmd.SetErr(err)
		}
		return err
	}
	if l.dead.Load() {
		return fail(errRefused)
	}
	if fault := l.fault.Load(); fault != nil {
		if err := (*fault)(cmds); err != nil {
			return fail(err)
		}
	}
	if l.hang.Load() {
		<-ctx.Done()
		return fail(timedOut(ctx))
	}
	if pause(ctx, time.Duration(l.request.Load())) != nil {
		return fail(timedOut(ctx))
	}
	late := l.busy.serve(ctx, cmds)
	err := send()
	if late != nil {
		return fail(timedOut(ctx)) // executed all the same
	}
	lost := rand.Int64N(1000) < l.loseReply.Load()
	if lost {
		<-ctx.Done()
	} else if pause(ctx, time.Duration(l.reply.Load())) == nil {
		return err
	}
	for _, cmd := range cmds {
		if cmd, ok := cmd.(interface{ SetVal(any) }); ok {
			cmd.SetVal(nil) // nobody read it
		}
	}
	return fail(timedOut(ctx))
}

// timedOut is the client's error when ctx ends before there is a reply: not ctx's.
func timedOut(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return &net.OpError{Op: "read", Net: "tcp", Err: os.ErrDeadlineExceeded}
	}
	return ctx.Err()
}

// capacity is how much a server can do, one thing after the other.
type capacity struct {
	perKey time.Duration

	mu    sync.Mutex
	until time.Time // busy
}

// serve waits until the server has done cmds, or ctx ends.
func (c *capacity) serve(ctx context.Context, cmds []redis.Cmder) error {
	if c == nil {
		return nil
	}
	work := time.Duration(0)
	for _, cmd := range cmds {
		work += time.Duration(keysOf(cmd)) * c.perKey
	}
	c.mu.Lock()
	if now := time.Now(); c.until.Before(now) {
		c.until = now
	}
	c.until = c.until.Add(work)
	wait := time.Until(c.until)
	c.mu.Unlock()
	return pause(ctx, wait)
}

// keysOf returns how many keys a script call is about.
func keysOf(cmd redis.Cmder) int {
	if args := cmd.Args(); len(args) > 2 {
		n, _ := args[2].(int)
		return n
	}
	return 0
}

// errRefused is what dialling gives when nobody listens.
var errRefused = &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}

// replyError is an error that a server replied.
type replyError string

func (e replyError) Error() string { return string(e) }

// RedisError makes it a redis.Error.
func (e replyError) RedisError() {}

// fail makes all that is sent fail with err, until it is nil.
func (l *line) fail(err error) {
	if err == nil {
		l.fault.Store(nil)
		return
	}
	f := func([]redis.Cmder) error { return err }
	l.fault.Store(&f)
}

// note counts the lease calls among cmds.
func (l *line) note(cmds []redis.Cmder) {
	for _, cmd := range cmds {
		if isBeat(cmd) {
			continue
		}
		l.calls.Add(1)
		l.mu.Lock()
		if len(l.sent) < 100 {
			l.sent = append(l.sent, cmd.Args())
		}
		l.mu.Unlock()
	}
}

// isBeat reports whether cmd says that a node is alive.
func isBeat(cmd redis.Cmder) bool {
	args := cmd.Args()
	if len(args) < 4 {
		return false
	}
	key, _ := args[3].(string)
	return strings.HasSuffix(key, "{nodes}")
}

// pause waits for d, or until ctx ends and returns its error.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// client returns a client of the world's Redis, over l if it is not nil.
func (w *world) client(l *line) *redis.Client {
	c := redis.NewClient(&redis.Options{
		// An address, not a name: the client would look it up outside the bubble.
		Addr:       "127.0.0.1:6379",
		Dialer:     func(context.Context, string, string) (net.Conn, error) { return w.redis.Dial() },
		MaxRetries: -1, ContextTimeoutEnabled: true, Protocol: 2, DisableIdentity: true,
		MaintNotificationsConfig: nil,
	})
	if l != nil {
		c.AddHook(l)
	}
	w.clients = append(w.clients, c)
	return c
}

func (w *world) node(limits hybrid.Limits, opts hybrid.Options) *hybrid.Limiter {
	w.t.Helper()
	return w.nodeOver(nil, limits, opts)
}

// nodeOver returns a node that reaches Redis over l, if it is not nil.
func (w *world) nodeOver(l *line, limits hybrid.Limits, opts hybrid.Options) *hybrid.Limiter {
	w.t.Helper()
	rdb := w.rdb
	if l != nil {
		rdb = w.client(l)
	}
	if opts.Heartbeat == 0 {
		opts.Heartbeat = time.Minute // some worlds last for months
	}
	n, err := hybrid.New(rdb, limits, opts)
	if err != nil {
		w.t.Fatal(err)
	}
	w.nodes = append(w.nodes, n)
	return n
}

// since returns the time since the bubble began.
func (w *world) since() time.Duration { return time.Since(w.start) }

// stepServer moves the server's wall clock by d, away from everybody else's.
// From then on only sleep moves it.
func (w *world) stepServer(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.skew += d
	w.skewed = true
	w.redis.SetTime(time.Now().Add(w.skew))
}

// warm loads the script, so that every call is one round trip. The node that does
// is none of the others' members.
func (w *world) warm() {
	w.t.Helper()
	if d, err := w.node(hybrid.PerSecond(1, 1), hybrid.Options{Prefix: "warm:"}).Allow(context.Background(), "warm"); err != nil || !d.Allowed {
		w.t.Fatalf("first Allow = %+v, %v; want admitted", d, err)
	}
}

// sleep passes d of fake time, on the server too.
func (w *world) sleep(d time.Duration) {
	time.Sleep(d)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.skewed {
		w.redis.SetTime(time.Now().Add(w.skew))
	}
}

// bucket is what Redis holds of one key, as acquire.lua describes it.
type bucket struct {
	units, at, epoch, out0, out1, act0, act1, dem0, dem1 int64
	version, burst, count, perUS, ttl                    int64
}

// tokens returns the balance in whole tokens, rounded down.
func (b bucket) tokens() int64 { return b.units / b.perUS }

// out returns the tokens out on lease.
func (b bucket) out() int64 { return b.out0 + b.out1 }

// parseBucket reads a stored state.
func parseBucket(state string) (b bucket, err error) {
	fields := strings.Fields(state)
	if len(fields) != 15 || fields[0] != "1" {
		return b, fmt.Errorf("state %q has not 15 fields, the first of them 1", state)
	}
	for i, p := range []*int64{
		&b.units, &b.at, &b.epoch, &b.out0, &b.out1, &b.act0, &b.act1, &b.dem0, &b.dem1,
		&b.version, &b.burst, &b.count, &b.perUS, &b.ttl,
	} {
		if *p, err = strconv.ParseInt(fields[i+1], 10, 64); err != nil {
			return b, fmt.Errorf("state %q: %w", state, err)
		}
	}
	return b, nil
}

// buckets returns the names of m's buckets: all keys but the two of the members.
func buckets(m *miniredis.Miniredis) (names []string) {
	for _, name := range m.Keys() {
		if !strings.Contains(name, ":{nodes}") || strings.Contains(name, ":tb1:") {
			names = append(names, name)
		}
	}
	return names
}

// redisKey is the name of key's bucket, for keys without special characters.
func redisKey(key string) string { return "hybridlimit:tb1:{" + key + "}" }

// bucket returns what Redis holds of key.
func (w *world) bucket(key string) bucket {
	w.t.Helper()
	state, err := w.redis.Get(redisKey(key))
	if err != nil {
		w.t.Fatalf("state of %q: %v", key, err)
	}
	b, err := parseBucket(state)
	if err != nil {
		w.t.Fatal(err)
	}
	return b
}

// trace is what the nodes of a world admitted for one key.
type trace struct {
	w     *world
	limit hybrid.Limit

	mu       sync.Mutex
	admitted int64 // tokens
	denied   int64 // requests
	list     []lease.Admission
}

func (w *world) trace(limit hybrid.Limit) *trace { return &trace{w: w, limit: limit} }

// add records a decision on a request that was made at begin and returns
// whether it was admitted.
func (tr *trace) add(begin time.Duration, d hybrid.Decision, n int64) bool {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if !d.Allowed {
		tr.denied++
		return false
	}
	tr.admitted += n
	tr.list = append(tr.list, lease.Admission{Start: begin, End: tr.w.since(), N: n})
	return true
}

// ask decides and records a request of cost n on l.
func (tr *trace) ask(l *hybrid.Limiter, key string, n int64) hybrid.Decision {
	begin := tr.w.since()
	d, err := l.AllowN(context.Background(), key, n)
	if err != nil {
		tr.w.t.Errorf("AllowN(%q, %d) at %v = %v; want a decision", key, n, tr.w.since(), err)
	}
	tr.add(begin, d, n)
	return d
}

// peak returns the level's highest point: exact if no request took any time.
func (tr *trace) peak() float64 {
	level, err := lease.NewLevel(tr.limit)
	if err != nil {
		tr.w.t.Fatal(err)
	}
	for _, a := range tr.list {
		if a.Start != a.End {
			return lease.PeakLevel(tr.limit, tr.list) - 1e-6 // its own rounding
		}
		level.Add(a.End, a.N)
	}
	return level.Peak()
}

// total returns the tokens admitted so far.
func (tr *trace) total() int64 {
	tr.mu.Lock()
	defer tr.mu.Unlock()
	return tr.admitted
}

// check is the upper bound: in no window were more than burst + rate·t admitted.
func (tr *trace) check() {
	tr.w.t.Helper()
	tr.mu.Lock()
	defer tr.mu.Unlock()
	if peak := tr.peak(); peak > float64(tr.limit.Burst) {
		tr.w.t.Errorf("level %v passed the burst of %v (%d admitted in %v)", peak, tr.limit, tr.admitted, tr.w.since())
	}
}

// checkAtLeast is the upper bound and the lower one.
func (tr *trace) checkAtLeast(want int64) {
	tr.w.t.Helper()
	tr.check()
	if got := tr.total(); got < want {
		tr.w.t.Errorf("%v admitted %d tokens in %v; want at least %d", tr.limit, got, tr.w.since(), want)
	}
}

// checkTotal is the upper bound, and exactly want admitted.
func (tr *trace) checkTotal(want int64) {
	tr.w.t.Helper()
	tr.check()
	if got := tr.total(); got != want {
		tr.w.t.Errorf("%v admitted %d tokens in %v; want %d", tr.limit, got, tr.w.since(), want)
	}
}

// burst asks n times at this instant for one token.
func (tr *trace) burst(l *hybrid.Limiter, key string, n int) (admitted int64) {
	before := tr.total()
	for range n {
		tr.ask(l, key, 1)
	}
	return tr.total() - before
}

// every asks l for one token each interval, for d.
func (tr *trace) every(l *hybrid.Limiter, key string, interval, d time.Duration) (admitted int64) {
	for range int(d / interval) {
		if tr.ask(l, key, 1).Allowed {
			admitted++
		}
		tr.w.sleep(interval)
	}
	return admitted
}

// keepsPromise is the third oracle: a request of cost n that refuse saw refused
// is admitted when RetryAfter has passed, and is not just before (rounding may
// make it 2 µs late). Two trials, as the early request is traffic too.
func (tr *trace) keepsPromise(l *hybrid.Limiter, key string, n int64, refuse func() hybrid.Decision) {
	tr.w.t.Helper()
	for _, early := range []time.Duration{0, 3 * time.Microsecond} {
		d := refuse()
		if d.Allowed || d.RetryAfter < time.Microsecond {
			tr.w.t.Errorf("%+v: want a refusal with a RetryAfter", d)
			return
		}
		tr.w.sleep(d.RetryAfter - early)
		if then := tr.ask(l, key, n); then.Allowed == (early > 0) {
			tr.w.t.Errorf("AllowN(%q, %d), %v before the end of a RetryAfter of %v = %+v; want admitted at the end only",
				key, n, early, d.RetryAfter, then)
		}
	}
}

// together runs f(0), …, f(n-1) at the same instant and waits for all.
func together(n int, f func(i int)) {
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	ready.Add(n)
	for i := range n {
		done.Go(func() {
			ready.Done()
			<-start
			f(i)
		})
	}
	ready.Wait()
	close(start)
	done.Wait()
}

// TestBubble shows that fake time moves for all parts, and that the oracles
// would notice.
func TestBubble(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		l := w.nodeOver(newLine(2*time.Millisecond), hybrid.PerSecond(1, 1), hybrid.Options{})
		tr := w.trace(hybrid.PerSecond(1, 1))
		tr.every(l, "k", 600*time.Millisecond, time.Minute)
		tr.checkAtLeast(30)

		strict := w.trace(hybrid.PerSecond(0.5, 1))
		strict.add(w.since(), hybrid.Decision{Allowed: true}, 1)
		w.sleep(time.Second)
		strict.add(w.since(), hybrid.Decision{Allowed: true}, 1)
		if peak := strict.peak(); peak != 1.5 {
			t.Errorf("two tokens in a second at 0.5/s: level = %v; want 1.5", peak)
		}
	})
}

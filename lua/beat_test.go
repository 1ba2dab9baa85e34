package lua

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
)

// onEach runs f on miniredis and, if there is one, on a redis-server, in both
// versions of the protocol.
func onEach(t *testing.T, f func(t *testing.T, s *Store, rdb *redis.Client)) {
	t.Helper()
	addrs := map[string]string{"miniredis": miniredis.RunT(t).Addr()}
	if _, err := exec.LookPath("redis-server"); err == nil {
		addrs["server"] = redistest.Start(t).Addr()
	}
	for name, addr := range addrs {
		for protocol := 2; protocol <= 3; protocol++ {
			t.Run(fmt.Sprintf("%s/RESP%d", name, protocol), func(t *testing.T) {
				opts := redistest.Options(addr)
				opts.Protocol = protocol
				rdb := redis.NewClient(opts)
				t.Cleanup(func() { rdb.Close() })
				f(t, NewStore(rdb, Options{Prefix: fmt.Sprintf("t%d:", prefixes.Add(1))}), rdb)
			})
		}
	}
}

// beatTTL is so long that no node lapses because the test is slow.
const beatTTL = time.Minute

// beat sends a beat that must work and count the nodes in want.
func beat(t *testing.T, s *Store, b Beat, want ...string) Members {
	t.Helper()
	b.TTL = beatTTL
	m, err := s.Beat(t.Context(), b)
	if err != nil {
		t.Fatalf("Beat(%+v) = %v; want nil", b, err)
	}
	slices.Sort(m.IDs)
	switch {
	case m.Count != len(want) || m.Gen < 1:
		t.Errorf("Beat(%+v) = %+v; want %d nodes and a generation", b, m, len(want))
	case m.Gen == b.Gen && m.IDs != nil:
		t.Errorf("Beat(%+v) = %+v; want no list, as the generation is the same", b, m)
	case m.Gen != b.Gen && (m.IDs == nil || !slices.Equal(m.IDs, want)):
		t.Errorf("Beat(%+v) = %+v; want %q", b, m, want)
	}
	return m
}

// serverTime returns the server's time in ms after d.
func serverTime(t *testing.T, rdb *redis.Client, d time.Duration) float64 {
	t.Helper()
	now, err := rdb.Time(t.Context()).Result()
	if err != nil {
		t.Fatal(err)
	}
	return float64(now.Add(d).UnixMilli())
}

func TestBeat(t *testing.T) {
	onEach(t, func(t *testing.T, s *Store, _ *redis.Client) {
		first := beat(t, s, Beat{ID: "a"}, "a")
		same := beat(t, s, Beat{ID: "a", Gen: first.Gen}, "a")
		if same.Gen != first.Gen {
			t.Errorf("generation after a second beat of one node = %d; want %d as before", same.Gen, first.Gen)
		}
		joined := beat(t, s, Beat{ID: "b"}, "a", "b")
		if joined.Gen <= first.Gen {
			t.Errorf("generation after a node joined = %d; want more than %d", joined.Gen, first.Gen)
		}
		beat(t, s, Beat{ID: "a", Gen: first.Gen}, "a", "b")
		beat(t, s, Beat{ID: "a", Gen: joined.Gen}, "a", "b")

		left := beat(t, s, Beat{ID: "b", Leave: true}, "a")
		if left.Gen <= joined.Gen {
			t.Errorf("generation after a node left = %d; want more than %d", left.Gen, joined.Gen)
		}
		if again := beat(t, s, Beat{ID: "b", Leave: true, Gen: left.Gen}, "a"); again.Gen != left.Gen {
			t.Errorf("generation after the same node left again = %d; want %d as before", again.Gen, left.Gen)
		}
		beat(t, s, Beat{ID: "a", Leave: true})
	})
}

// A node lapses when it was not heard of for longer than the ttl.
func TestBeatLapses(t *testing.T) {
	m := miniredis.RunT(t)
	rdb := redis.NewClient(redistest.Options(m.Addr()))
	defer rdb.Close()
	m.ClockTTL(true)
	now := time.UnixMilli(1_800_000_000_000)
	m.SetTime(now)
	s := NewStore(rdb, Options{})
	beat(t, s, Beat{ID: "a"}, "a")
	m.SetTime(now.Add(beatTTL))
	both := beat(t, s, Beat{ID: "b"}, "a", "b")
	m.SetTime(now.Add(beatTTL + time.Millisecond))
	one := beat(t, s, Beat{ID: "b", Gen: both.Gen}, "b")
	if one.Gen <= both.Gen {
		t.Errorf("generation after a node lapsed = %d; want more than %d", one.Gen, both.Gen)
	}
}

func TestBeatExpires(t *testing.T) {
	onEach(t, func(t *testing.T, s *Store, rdb *redis.Client) {
		beat(t, s, Beat{ID: "a"}, "a")
		for _, key := range []string{s.nodesKey(), s.nodesKey() + ":gen"} {
			left := rdb.PTTL(t.Context(), key).Val()
			if left <= 2*beatTTL-10*time.Second || left > 2*beatTTL+time.Second {
				t.Errorf("%s expires in %v; want twice the ttl of %v and a second", key, left, beatTTL)
			}
		}
	})
}

// After the clock stepped back a dead node must not look alive until the clock
// is where it was.
func TestBeatFromTheFuture(t *testing.T) {
	onEach(t, func(t *testing.T, s *Store, rdb *redis.Client) {
		future := redis.Z{Score: serverTime(t, rdb, time.Hour), Member: "dead"}
		if err := rdb.ZAdd(t.Context(), s.nodesKey(), future).Err(); err != nil {
			t.Fatal(err)
		}
		beat(t, s, Beat{ID: "a"}, "a", "dead")
		score := rdb.ZScore(t.Context(), s.nodesKey(), "dead").Val()
		if now := serverTime(t, rdb, 0); score > now || score < now-10_000 {
			t.Errorf("the dead node was heard of in %v ms; want now", score-now)
		}
	})
}

// Whatever else is at the keys, the next beat starts over.
func TestBeatOverwritesWhatIsNotItsOwn(t *testing.T) {
	onEach(t, func(t *testing.T, s *Store, rdb *redis.Client) {
		nodes, gen := s.nodesKey(), s.nodesKey()+":gen"
		known := beat(t, s, Beat{ID: "a"}, "a").Gen
		for _, c := range []struct {
			name, key string
			put       func(p redis.Pipeliner, key string)
		}{
			{"nothing", nodes, func(p redis.Pipeliner, key string) {}},
			{"a string", nodes, func(p redis.Pipeliner, key string) { p.Set(t.Context(), key, "x", 0) }},
			{"a list", nodes, func(p redis.Pipeliner, key string) { p.RPush(t.Context(), key, "x") }},
			{"nothing", gen, func(p redis.Pipeliner, key string) {}},
			{"a hash", gen, func(p redis.Pipeliner, key string) { p.HSet(t.Context(), key, "x", 1) }},
			{"nothing in it", gen, func(p redis.Pipeliner, key string) { p.Set(t.Context(), key, "", 0) }},
			{"text", gen, func(p redis.Pipeliner, key string) { p.Set(t.Context(), key, "x", 0) }},
			{"zero", gen, func(p redis.Pipeliner, key string) { p.Set(t.Context(), key, "0", 0) }},
			{"-7", gen, func(p redis.Pipeliner, key string) { p.Set(t.Context(), key, "-7", 0) }},
			{"1.5", gen, func(p redis.Pipeliner, key string) { p.Set(t.Context(), key, "1.5", 0) }},
			{"2^53", gen, func(p redis.Pipeliner, key string) { p.Set(t.Context(), key, "9007199254740992", 0) }},
			{"400 digits", gen, func(p redis.Pipeliner, key string) { p.Set(t.Context(), key, strings.Repeat("9", 400), 0) }},
		} {
			_, err := rdb.Pipelined(t.Context(), func(p redis.Pipeliner) error {
				p.Del(t.Context(), c.key)
				c.put(p, c.key)
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			m := beat(t, s, Beat{ID: "a", Gen: known}, "a")
			if m.Gen <= known || m.Gen > 9e15 {
				t.Errorf("%s at %s: generation %d; want a new one after %d", c.name, c.key, m.Gen, known)
			}
			known = m.Gen
		}
		rdb.Set(t.Context(), nodes, "x", 0)
		if m := beat(t, s, Beat{ID: "a", Gen: known, Leave: true}); m.Gen <= known {
			t.Errorf("generation after leaving a string = %d; want more than %d, as the nodes are gone", m.Gen, known)
		}
	})
}

// A generation that a node knows must not come again with other nodes: neither
// after all was lost, nor on a replica that had not seen the last change.
func TestBeatGenerationIsNeverReused(t *testing.T) {
	onEach(t, func(t *testing.T, s *Store, rdb *redis.Client) {
		beat(t, s, Beat{ID: "a"}, "a")
		known := beat(t, s, Beat{ID: "b"}, "a", "b").Gen
		if err := rdb.FlushAll(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		if m := beat(t, s, Beat{ID: "a", Gen: known}, "a"); m.Gen <= known {
			t.Errorf("generation after FLUSHALL = %d; want more than %d", m.Gen, known)
		}
		known = beat(t, s, Beat{ID: "b"}, "a", "b").Gen
		rdb.ZRem(t.Context(), s.nodesKey(), "b")
		rdb.Set(t.Context(), s.nodesKey()+":gen", known-1, 0)
		if m := beat(t, s, Beat{ID: "c"}, "a", "c"); m.Gen == known {
			t.Errorf("generation on a replica that missed one = %d; want another, as the nodes differ", m.Gen)
		}
	})
}

// The text goes along when the server does not know the script.
func TestBeatReloadsTheScript(t *testing.T) {
	onEach(t, func(t *testing.T, s *Store, rdb *redis.Client) {
		for range 2 {
			if err := rdb.ScriptFlush(t.Context()).Err(); err != nil {
				t.Fatal(err)
			}
			beat(t, s, Beat{ID: "a"}, "a")
		}
	})
}

func TestBeatRefusesAnotherShape(t *testing.T) {
	for _, c := range []struct {
		reply any
		ok    bool
	}{
		{[]any{int64(1), int64(8), "a"}, true},
		{[]any{int64(0), int64(8)}, true},
		{[]any{int64(3), int64(7)}, true}, // the known one
		{nil, false},
		{"OK", false},
		{int64(1), false},
		{[]any(nil), false},
		{[]any{int64(1)}, false},
		{[]any{"1", int64(8), "a"}, false},
		{[]any{int64(1), "8", "a"}, false},
		{[]any{int64(-1), int64(7)}, false},
		{[]any{int64(0), int64(0)}, false},
		{[]any{int64(1), int64(8)}, false},
		{[]any{int64(1), int64(8), "a", "b"}, false},
		{[]any{int64(1), int64(7), "a"}, false},
		{[]any{int64(1), int64(8), int64(9)}, false},
		{[]any{int64(1), int64(8), nil}, false},
	} {
		cmd := redis.NewCmd(t.Context())
		cmd.SetVal(c.reply)
		m, err := new(Store).decodeBeat(cmd, nil, Beat{Gen: 7})
		switch {
		case c.ok && err != nil:
			t.Errorf("reply %v: %v; want nil", c.reply, err)
		case !c.ok && (!errors.Is(err, lease.ErrUnknownOutcome) || m.Count != 0 || m.IDs != nil):
			t.Errorf("reply %v: %+v, %v; want ErrUnknownOutcome", c.reply, m, err)
		}
	}
}

func TestBeatEndsWithItsContext(t *testing.T) {
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
			beat(t, s, Beat{ID: "a"}, "a")
			proxy.Silence()
			start := time.Now()
			for range 3 {
				ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
				_, err := s.Beat(ctx, Beat{ID: "a", TTL: beatTTL})
				cancel()
				if !errors.Is(err, lease.ErrUnknownOutcome) {
					t.Errorf("Beat of a silent server = %v; want ErrUnknownOutcome", err)
				}
			}
			if took := time.Since(start); took > time.Second {
				t.Errorf("three beats of 50 ms took %v", took)
			}
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			if _, err := s.Beat(ctx, Beat{ID: "a", TTL: beatTTL}); !errors.Is(err, lease.ErrNotExecuted) {
				t.Errorf("Beat with an ended context = %v; want ErrNotExecuted", err)
			}
		})
	}
}

// passenger is a rider with beats to send, and what became of them.
type passenger struct {
	mu   sync.Mutex
	due  int
	got  []Members
	errs []error
}

func (p *passenger) ride(s *Store) {
	s.SetRider(func() (Beat, bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.due--
		return Beat{ID: "a", TTL: beatTTL}, p.due >= 0
	}, func(m Members, err error) {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.got, p.errs = append(p.got, m), append(p.errs, err)
	})
}

// traffic is a hook that notes what was sent, as "lease", "beat" or, in one
// pipeline, "lease+beat".
type traffic struct {
	mu   sync.Mutex
	sent []string
}

func (tr *traffic) note(cmds ...redis.Cmder) {
	var kinds []string
	for _, cmd := range cmds {
		kind := "lease"
		if args := cmd.Args(); strings.Contains(fmt.Sprint(args...), "{nodes}") {
			kind = "beat"
		}
		if strings.HasPrefix(cmd.Name(), "eval") {
			kinds = append(kinds, kind)
		}
	}
	if len(kinds) > 0 {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		tr.sent = append(tr.sent, strings.Join(kinds, "+"))
	}
}

func (tr *traffic) DialHook(next redis.DialHook) redis.DialHook { return next }

func (tr *traffic) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		tr.note(cmd)
		return next(ctx, cmd)
	}
}

func (tr *traffic) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		tr.note(cmds...)
		return next(ctx, cmds)
	}
}

// take sends calls and fails the test unless each has a token and remaining left.
func take(t *testing.T, s *Store, calls []lease.Call, remaining int64) {
	t.Helper()
	for i, a := range s.Acquire(t.Context(), calls) {
		if a.Err != nil || a.Grant.Tokens != 1 || a.Grant.Remaining != remaining {
			t.Errorf("call %d: %+v, %v; want a token and %d remaining", i, a.Grant, a.Err, remaining)
		}
	}
}

func TestRide(t *testing.T) {
	onEach(t, func(t *testing.T, s *Store, rdb *redis.Client) {
		if err := rdb.ScriptFlush(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		var tr traffic
		rdb.AddHook(&tr)
		calls := manyCalls(2)
		take(t, s, calls, 4) // without a rider; loads the script
		tr.sent = nil
		take(t, s, calls, 3)

		var p passenger
		p.ride(s)
		take(t, s, calls, 2) // nothing is due

		p.due = 1 // the server does not know the script
		take(t, s, calls, 1)
		if len(p.errs) != 1 || !errors.Is(p.errs[0], lease.ErrNotExecuted) {
			t.Errorf("beat that the server has no script for: %v; want one ErrNotExecuted", p.errs)
		}
		beat(t, s, Beat{ID: "a"}, "a")
		p.due = 1
		take(t, s, calls, 0)
		if len(p.errs) != 2 || p.errs[1] != nil || p.got[1].Count != 1 || !slices.Equal(p.got[1].IDs, []string{"a"}) {
			t.Errorf("beat that rode: %+v, %v; want node a", p.got, p.errs)
		}
		want := []string{"lease", "lease", "lease+beat", "beat", "beat", "lease+beat"}
		if !slices.Equal(tr.sent, want) {
			t.Errorf("sent %q; want %q", tr.sent, want)
		}
	})
}

// When the server has lost all scripts, the calls go again with the text and the
// beat does not.
func TestRideReloadsTheLeaseScript(t *testing.T) {
	for name, wrap := range map[string]func(*redis.Client) Client{
		"one script":   func(c *redis.Client) Client { return c },
		"own pipeline": func(c *redis.Client) Client { return plain{c} },
	} {
		t.Run(name, func(t *testing.T) {
			rdb := redistest.Start(t).Client(t)
			s := NewStore(wrap(rdb), Options{})
			var p passenger
			p.ride(s)
			for i := range int64(3) {
				if err := rdb.ScriptFlush(t.Context()).Err(); err != nil {
					t.Fatal(err)
				}
				p.due = 1
				take(t, s, manyCalls(10), 4-i)
			}
			if len(p.errs) != 3 {
				t.Errorf("%d beats rode; want 3", len(p.errs))
			}
			for _, err := range p.errs {
				if !errors.Is(err, lease.ErrNotExecuted) {
					t.Errorf("beat without a script = %v; want ErrNotExecuted", err)
				}
			}
		})
	}
}

// A batch that goes as a pipeline anyhow takes one beat along.
func TestRideInAPipeline(t *testing.T) {
	_, rdb := miniClient(t)
	s := NewStore(plain{rdb}, Options{})
	take(t, s, manyCalls(3), 4)
	beat(t, s, Beat{ID: "a"}, "a")
	var tr traffic
	rdb.AddHook(&tr)
	p := passenger{due: 1}
	p.ride(s)
	take(t, s, manyCalls(3), 3)
	take(t, s, manyCalls(3), 2)
	if want := []string{"lease+lease+lease+beat", "lease+lease+lease"}; !slices.Equal(tr.sent, want) {
		t.Errorf("sent %q; want %q", tr.sent, want)
	}
	if len(p.errs) != 1 || p.errs[0] != nil || p.got[0].Count != 1 {
		t.Errorf("beat that rode: %+v, %v; want one node", p.got, p.errs)
	}
}

// On a cluster a beat goes along only with calls to the server that it goes to:
// one that is slow or gone must not hold up calls to others.
func TestRideOnACluster(t *testing.T) {
	cluster := redistest.StartCluster(t, 2, 0)
	rdb := cluster.Client(t)
	s := NewStore(rdb, Options{})
	home := cluster.MasterOf(s.nodesKey())
	var near, far lease.Call
	for _, c := range manyCalls(20) {
		if cluster.MasterOf(s.RedisKey(c.Key)) == home {
			near = c
		} else {
			far = c
		}
	}
	take(t, s, []lease.Call{near, far}, 4)
	beat(t, s, Beat{ID: "a"}, "a")
	var tr traffic
	rdb.AddHook(&tr)
	p := passenger{due: 1}
	p.ride(s)
	for deadline := time.Now().Add(5 * time.Second); s.Shard(near.Key) == ""; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the cluster is not known after 5 s")
		}
	}
	take(t, s, []lease.Call{far}, 3)
	take(t, s, []lease.Call{near}, 3)
	p.due = 1
	take(t, s, []lease.Call{far, near}, 2)
	if want := []string{"lease", "lease+beat", "lease+lease+beat"}; !slices.Equal(tr.sent, want) {
		t.Errorf("sent %q; want %q", tr.sent, want)
	}
	for i, err := range p.errs {
		if err != nil || p.got[i].Count != 1 {
			t.Errorf("beat that rode: %+v, %v; want one node", p.got[i], err)
		}
	}

	p.due = 1
	home.Pause()
	defer home.Resume()
	start := time.Now()
	take(t, s, []lease.Call{far}, 1)
	if took := time.Since(start); took > 500*time.Millisecond {
		t.Errorf("a call took %v while the nodes' server hangs; want it not to wait", took)
	}
}

// A beat that the server refuses is of no concern to the calls.
func TestRideRefused(t *testing.T) {
	server := redistest.Start(t)
	admin := server.Client(t)
	opts := redistest.Options(server.Addr())
	opts.Username, opts.Password = "node", "secret"
	if err := admin.ACLSetUser(t.Context(), "node", "on", ">secret", "+@all", "~hybridlimit:tb1:*").Err(); err != nil {
		t.Fatal(err)
	}
	rdb := redis.NewClient(opts)
	defer rdb.Close()
	s := NewStore(rdb, Options{})
	take(t, s, manyCalls(3), 4)
	p := passenger{due: 1}
	p.ride(s)
	take(t, s, manyCalls(3), 3)
	if len(p.errs) != 1 || !errors.Is(p.errs[0], lease.ErrNotExecuted) {
		t.Errorf("beat without permission = %v; want ErrNotExecuted", p.errs)
	}
}

// When the connection breaks between two replies, the calls keep theirs.
func TestRideWhoseReplyIsLost(t *testing.T) {
	for name, wrap := range map[string]func(*redis.Client) Client{
		"one script":   func(c *redis.Client) Client { return c },
		"own pipeline": func(c *redis.Client) Client { return plain{c} },
	} {
		t.Run(name, func(t *testing.T) {
			opts := redistest.Options("in process")
			opts.Dialer = func(context.Context, string, string) (net.Conn, error) {
				client, server := net.Pipe()
				go answerOnce(server)
				return client, nil
			}
			rdb := redis.NewClient(opts)
			defer rdb.Close()
			s := NewStore(wrap(rdb), Options{})
			p := passenger{due: 1}
			p.ride(s)
			a := s.Acquire(t.Context(), []lease.Call{one("k")})[0]
			if a.Err != nil || a.Grant.Tokens != 1 || a.Grant.Remaining != 4 {
				t.Errorf("call whose reply came: %+v, %v; want its token", a.Grant, a.Err)
			}
			if len(p.errs) != 1 || !errors.Is(p.errs[0], lease.ErrUnknownOutcome) {
				t.Errorf("beat whose reply was lost = %v; want ErrUnknownOutcome", p.errs)
			}
		})
	}
}

func TestOutcome(t *testing.T) {
	failed, execErr := errors.New("failed"), errors.New("pipeline failed")
	for _, c := range []struct {
		name  string
		reply any
		err   error
		want  error
	}{
		{"answered", []any{int64(1)}, nil, nil},
		{"answered before the connection broke", []any{int64(1)}, failed, nil},
		{"broken off in its reply", []any(nil), failed, failed},
		{"refused", nil, failed, failed},
		{"of another shape", "OK", nil, nil}, // for decode to see
		{"never sent", nil, nil, execErr},
	} {
		cmd := onceCmd{redis.NewCmd(t.Context())}
		cmd.SetVal(c.reply)
		cmd.SetErr(c.err)
		if got := outcome(cmd, execErr); !errors.Is(got, c.want) || got == nil && cmd.Err() != nil {
			t.Errorf("%s: outcome = %v; want %v", c.name, got, c.want)
		}
	}
}

// answerOnce is a server that grants what the first script call asks for, reads
// the next command and closes the connection.
func answerOnce(conn net.Conn) {
	defer conn.Close()
	r := bufio.NewReader(conn)
	for scripts := 0; scripts < 2; {
		name, err := readCommand(r)
		if err != nil {
			return
		}
		answer := "-ERR unknown command\r\n"
		if strings.HasPrefix(name, "eval") {
			scripts++
			answer = fmt.Sprintf("*%d\r\n:1\r\n:1\r\n:0\r\n:0\r\n:4\r\n%s", reply, strings.Repeat(":0\r\n", reply-5))
		}
		if scripts < 2 {
			if _, err := io.WriteString(conn, answer); err != nil {
				return
			}
		}
	}
}

// readCommand reads a command and returns its name.
func readCommand(r *bufio.Reader) (name string, err error) {
	line := func() (n int) {
		var s string
		if s, err = r.ReadString('\n'); err == nil {
			n, err = strconv.Atoi(strings.TrimSpace(s[1:]))
		}
		return n
	}
	for i := range line() {
		arg := make([]byte, line()+2)
		if err == nil {
			_, err = io.ReadFull(r, arg)
		}
		if i == 0 {
			name = strings.TrimSpace(strings.ToLower(string(arg)))
		}
	}
	return name, err
}

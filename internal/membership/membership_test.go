package membership

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lua"
)

func TestOptions(t *testing.T) {
	rdb := redis.NewClient(redistest.Options("nowhere"))
	defer rdb.Close()
	for _, c := range []struct {
		opts Options
		want []string // what the error mentions; none for no error
	}{
		{Options{}, nil},
		{Options{Period: minPeriod, Min: 1, ID: "a"}, nil},
		{Options{Period: maxPeriod, Min: 1000, ID: strings.Repeat("a", maxIDBytes)}, nil},
		{Options{Period: minPeriod - 1}, []string{"Options.Period = 99.999999ms: want 100ms to 1m0s"}},
		{Options{Period: maxPeriod + 1, Min: -1}, []string{"Options.Period", "Options.Min = -1: want 1 or more"}},
		{Options{ID: strings.Repeat("a", maxIDBytes+1)}, []string{"Options.ID has 257 bytes: want at most 256"}},
	} {
		m, err := New(lua.NewStore(rdb, lua.Options{}), c.opts)
		if (err == nil) != (len(c.want) == 0) || (m == nil) != (err != nil) {
			t.Errorf("New(%+v) = %v, %v; want an error: %v", c.opts, m, err, len(c.want) > 0)
			continue
		}
		if m != nil && m.ttl() != 5*m.opts.Period {
			t.Errorf("New(%+v): ttl = %v; want 5 periods", c.opts, m.ttl())
		}
		for _, want := range c.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("New(%+v) = %q; want it to mention %q", c.opts, err, want)
			}
		}
	}
}

func TestDefaultID(t *testing.T) {
	rdb := redis.NewClient(redistest.Options("nowhere"))
	defer rdb.Close()
	var ids []string
	for range 3 {
		m, err := New(lua.NewStore(rdb, lua.Options{}), Options{})
		if err != nil {
			t.Fatal(err)
		}
		if id := m.ID(); len(id) != 32 || strings.Trim(id, "0123456789abcdef") != "" || slices.Contains(ids, id) {
			t.Errorf("ID = %q after %q; want another 32 hexadecimal digits", id, ids)
		}
		ids = append(ids, m.ID())
	}
}

// A list that is not known, as when one beat overtook another, takes nothing
// away from what is known, and the next beat asks for it.
func TestUnknownList(t *testing.T) {
	rdb := redis.NewClient(redistest.Options("nowhere"))
	defer rdb.Close()
	m, err := New(lua.NewStore(rdb, lua.Options{}), Options{ID: "a"})
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		got    lua.Members
		known  int64 // the generation that the next beat has
		nodes  int   // N̂
		others int   // in the list that Owns goes by; -1 for none
	}{
		{lua.Members{Count: 2, Gen: 4}, 0, 2, -1}, // nothing is known of generation 4
		{lua.Members{Count: 2, Gen: 5, IDs: []string{"a", "b"}}, 5, 2, 1},
		{lua.Members{Count: 2, Gen: 5}, 5, 2, 1},
		{lua.Members{Count: 3, Gen: 6}, 0, 3, 1},
		{lua.Members{Count: 3, Gen: 6, IDs: []string{"a", "b", "c"}}, 6, 3, 2},
		{lua.Members{Count: 4, Gen: 6}, 0, 4, 2}, // another count than the list has
		{lua.Members{Count: 4, Gen: 7, IDs: []string{"b", "c", "d", "e"}}, 7, 4, 4},
	} {
		m.mu.Lock()
		m.takeOffLocked(time.Now())
		m.mu.Unlock()
		m.landed(c.got, nil, false)
		others := -1
		if m.Known() {
			others = len(m.view.Load().others)
		}
		if m.gen != c.known || m.Nodes() != c.nodes || others != c.others {
			t.Errorf("beat %d, %+v: generation %d, N̂ %d, %d others; want %d, %d, %d",
				i, c.got, m.gen, m.Nodes(), others, c.known, c.nodes, c.others)
		}
	}
}

// eventually polls until ok, or fails with the message.
func eventually(t *testing.T, ok func() bool, format string, args ...any) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Errorf("after 10 s: "+format, args...)
}

// The whole life of three nodes on a real server.
func TestOnServer(t *testing.T) {
	server := redistest.Start(t)
	nodes := make([]*Members, 3)
	clients := make([]*redis.Client, 3)
	for i := range nodes {
		clients[i] = redis.NewClient(redistest.Options(server.Addr()))
		defer clients[i].Close()
		var err error
		nodes[i], err = New(lua.NewStore(clients[i], lua.Options{}), Options{Period: minPeriod, ID: fmt.Sprint("node-", i)})
		if err != nil {
			t.Fatal(err)
		}
		nodes[i].Start()
		defer nodes[i].Close(t.Context())
	}
	live := func(want int, of ...*Members) {
		t.Helper()
		for _, m := range of {
			eventually(t, func() bool { return m.Stats().Live == want }, "%s: %d nodes live; want %d", m.ID(), m.Stats().Live, want)
			if m.Nodes() != 3 || !m.Known() {
				t.Errorf("%s: Nodes = %d, Known = %v; want 3, true", m.ID(), m.Nodes(), m.Known())
			}
		}
	}
	live(3, nodes...)
	clients[2].Close() // a crash, as the others see it
	live(2, nodes[:2]...)
	server.Restart(t)
	eventually(t, func() bool { return clients[0].ZCard(t.Context(), nodesKey).Val() == 2 }, "not both nodes are back on a new server")
	live(2, nodes[:2]...)
	if err := nodes[1].Close(t.Context()); err != nil {
		t.Errorf("Close = %v; want nil", err)
	}
	live(1, nodes[0])
}

// After a deploy those that are gone own nothing, though N̂ still counts them.
func TestOwnersAfterADeploy(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		old := w.start(3)
		w.sleep(3 * time.Minute)
		next := make([]*member, 3)
		for i := range next {
			next[i] = w.add(Options{ID: fmt.Sprint("next-", i)})
			next[i].Start()
			w.sleep(2 * turn)
			old[i].Close(context.Background())
			w.sleep(2 * turn)
		}
		w.sleep(2 * ttl)
		if n := next[0].Nodes(); n != 4 {
			t.Errorf("Nodes = %d; want 4, as many as there were at a time", n)
		}
		for k := range 200 {
			owners := 0
			for _, n := range next {
				if n.Known() && n.Owns(fmt.Sprint("key ", k), 1) {
					owners++
				}
			}
			if owners != 1 {
				t.Errorf("key %d has %d owners of those alive; want 1", k, owners)
			}
		}
	})
}

// A list that lacks nodes of which the platform knows is none to choose owners by.
func TestKnownNeedsAll(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		n := w.add(Options{Min: 3})
		n.Start()
		w.sleep(turn)
		if n.Known() {
			t.Error("Known with one node of three at least; want not")
		}
		for i := range 2 {
			w.add(Options{ID: fmt.Sprint("other-", i)}).Start()
		}
		w.sleep(2 * turn)
		if !n.Known() {
			t.Error("not Known with all three; want it")
		}
	})
}

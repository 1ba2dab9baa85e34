package hybrid_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
)

// rights are what package hybrid says that its user in Redis needs.
var rights = []string{
	"~hybridlimit:*",
	"+evalsha", "+eval", "+time", "+mget", "+set",
	"+zadd", "+zrem", "+zcard", "+zrange", "+zrangebyscore", "+zremrangebyscore", "+pexpire", "+del",
}

// clusterRights are what it needs besides on a cluster.
var clusterRights = []string{"+cluster|slots", "+asking"}

// user returns the command that makes a user with these rights.
func user(rights ...string) string {
	return "ACL SETUSER limiter reset on >secret " + strings.Join(rights, " ")
}

// problem returns what a Limiter cannot do with a client, as it shows; "" for
// nothing.
func problem(t *testing.T, rdb hybrid.Client, between func()) string {
	t.Helper()
	l, err := hybrid.New(rdb, drillLimit, hybrid.Options{Heartbeat: 100 * time.Millisecond, RedisTimeout: time.Second})
	if err != nil {
		t.Error(err)
		return ""
	}
	var found []string
	for range 3 {
		if d, err := l.Allow(t.Context(), "asked"); err != nil || d.Source == hybrid.SourceLocal {
			found = append(found, fmt.Sprintf("Allow = %v, %v, for %v", d.Source, err, l.Stats().Fallback.Cause))
		}
		between()
	}
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if m := l.Stats().Members; m.Failed > 0 {
			found = append(found, "a beat failed")
			break
		} else if m.Beats > 2 {
			break
		}
	}
	if err := l.Close(t.Context()); err != nil {
		found = append(found, fmt.Sprintf("Close = %v", err))
	}
	return strings.Join(found, "; ")
}

// The rights that are documented are enough, also for go-redis's own part, and
// when one is taken away and given back that is one outage more.
func TestServers_Rights(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	do(t, server, user(rights...))
	d := newDrill(t, clients(t, server.Addr(), func(o *redis.Options) {
		o.Username, o.Password = "limiter", "secret"
	}), hybrid.Options{Heartbeat: 100 * time.Millisecond})
	d.warm()
	d.drain()
	d.run(func() {
		do(t, server, "SCRIPT FLUSH", "CLIENT KILL USER limiter") // all anew
		time.Sleep(500 * time.Millisecond)
		do(t, server, "ACL SETUSER limiter -set")
		time.Sleep(time.Second)
		do(t, server, "ACL SETUSER limiter +set")
	})
	d.degraded()
	if before := d.sources("", 0, d.began); d.late < drillTimeout/4 && before[hybrid.SourceLocal] > 0 {
		t.Errorf("decided by %v; want Redis with these rights", before)
	}
	for i, l := range d.nodes {
		if l.Stats().Members.Beats == 0 {
			t.Errorf("node %d: %+v; want beats", i, l.Stats().Members)
		}
	}
}

// Without any one of them something does not work.
func TestServers_RightsAreNeeded(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	opts := redistest.Options(server.Addr())
	opts.Username, opts.Password = "limiter", "secret"
	with := func(rights ...string) string {
		// What has the name of the nodes' set is dropped, for which DEL is.
		do(t, server, "FLUSHALL", "SCRIPT FLUSH", "SET hybridlimit:{nodes} foreign", user(rights...))
		rdb := redis.NewClient(opts)
		defer rdb.Close()
		return problem(t, rdb, func() {})
	}
	if p := with(rights...); p != "" {
		t.Fatalf("with %v: %s", rights, p)
	}
	opts.DB = 1
	if p := with(append(slices.Clone(rights), "+select")...); p != "" {
		t.Errorf("with %v and select, of database 1: %s", rights, p)
	}
	if p := with(rights...); p == "" {
		t.Error("works with database 1 without select")
	}
	opts.DB = 0
	for i, right := range rights {
		if p := with(slices.Delete(slices.Clone(rights), i, i+1)...); p == "" {
			t.Errorf("works without %s", right)
		} else {
			t.Logf("without %s: %s", right, p)
		}
	}
	for _, narrower := range []string{"%R~hybridlimit:*", "%W~hybridlimit:*", "~hybridlimit:tb1:*", "~hybridlimit:{nodes}*"} {
		if p := with(append([]string{narrower}, rights[1:]...)...); p == "" {
			t.Errorf("works with %s alone", narrower)
		}
	}
}

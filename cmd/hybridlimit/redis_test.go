package main

import (
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	fake "github.com/alicebob/miniredis/v2/server"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
)

func TestNewClient(t *testing.T) {
	for _, c := range []struct {
		url, where string
		want       redis.Options // of one server; what is zero is not compared
		addrs      string        // of a cluster
	}{
		{"redis://h", "h", redis.Options{Addr: "h:6379"}, ""},
		{"redis://u:p%40w@h:1/2?pool_size=7", "h:1", redis.Options{Addr: "h:1", Username: "u", Password: "p@w", DB: 2, PoolSize: 7}, ""},
		{"redis://[::1]:1", "[::1]:1", redis.Options{Addr: "[::1]:1"}, ""},
		{"redis://h?max_retries=5&dial_timeout=9s", "h", redis.Options{DialTimeout: 9 * time.Second}, ""},
		{"rediss://h:1", "h:1", redis.Options{Addr: "h:1"}, ""},
		{"unix:///run/redis.sock?db=3", "/run/redis.sock", redis.Options{Network: "unix", Addr: "/run/redis.sock", DB: 3}, ""},
		{"unix://u:pw@/run/redis.sock", "/run/redis.sock", redis.Options{Username: "u", Password: "pw"}, ""},
		{"redis+cluster://h:1", "h:1", redis.Options{}, "h:1"},
		{"redis+cluster://u:p,w@h:1,i:2,[::1]:3/?pool_size=7", "h:1, i:2, [::1]:3", redis.Options{Username: "u", Password: "p,w", PoolSize: 7}, "h:1,i:2,[::1]:3"},
		{"rediss+cluster://h:1,i:2?addr=j:3&max_retries=5", "h:1, i:2", redis.Options{}, "h:1,j:3,i:2"},
	} {
		t.Run(c.url, func(t *testing.T) {
			rdb, to, err := newClient(c.url)
			if err != nil {
				t.Fatal(err)
			}
			where := to.addrs
			defer rdb.Close()
			var o redis.Options
			switch r := rdb.(type) {
			case *redis.Client:
				o = *r.Options()
			case *redis.ClusterClient:
				co := r.Options()
				if got := strings.Join(co.Addrs, ","); got != c.addrs {
					t.Errorf("addresses %q; want %q", got, c.addrs)
				}
				o = redis.Options{
					MaxRetries: co.MaxRetries, DialerRetries: co.DialerRetries, ContextTimeoutEnabled: co.ContextTimeoutEnabled,
					DialTimeout: co.DialTimeout, TLSConfig: co.TLSConfig,
					Username: co.Username, Password: co.Password, PoolSize: co.PoolSize,
				}
			}
			w := c.want
			if where != c.where || w.Addr != "" && o.Addr != w.Addr || w.Network != "" && o.Network != w.Network ||
				o.Username != w.Username || o.Password != w.Password || o.DB != w.DB || w.PoolSize != 0 && o.PoolSize != w.PoolSize {
				t.Errorf("%q: %+v; want %q: %+v", where, o, c.where, w)
			}
			if w.DialTimeout == 0 {
				w.DialTimeout = dialTimeout
			}
			// go-redis turns the -1 that forbids to send again into 0.
			if o.MaxRetries > 0 || o.DialerRetries != 1 || !o.ContextTimeoutEnabled || o.DialTimeout != w.DialTimeout {
				t.Errorf("retries %d, dials %d, heeds contexts %v, dial time-out %v; want no retry, 1, true, %v",
					o.MaxRetries, o.DialerRetries, o.ContextTimeoutEnabled, o.DialTimeout, w.DialTimeout)
			}
			if (o.TLSConfig != nil) != strings.HasPrefix(c.url, "rediss") {
				t.Errorf("TLS: %v", o.TLSConfig != nil)
			}
		})
	}
}

func TestNewClientErrors(t *testing.T) {
	for url, detail := range map[string]string{
		"localhost:6379":               "",
		"localhost":                    "",
		"redis://":                     "",
		"http://h":                     "invalid URL scheme",
		"redis+other://h":              `unknown scheme "redis+other"`,
		"unix://":                      "",
		"unix:///a,b":                  "*", // one path with a comma is fine
		"redis://h/x":                  "invalid database number",
		"redis://h:port":               "invalid port",
		"redis://h?bogus=1":            "unexpected option: bogus",
		"redis://h:1,i:2":              "several hosts",
		"redis+cluster://h,i":          "unable to parse addr",
		"redis+sentinel://h:1":         "no master",
		"redis+sentinel://h:1/m/x":     "invalid database number",
		"redis+sentinel://h:1/m?bog=1": "unexpected option: bog",
		"redis://h/0#x":                "",

		// Wherever a parser stumbles over the password, it stays inside.
		"redis://:hun/ter2@h":                    "",
		"redis://:6/ter2@h":                      "",
		"redis://:6?ter2@h":                      "",
		"redis://:6#ter2@h":                      "",
		"redis://:ter2%zz@h":                     "",
		"ter2@://:x@h":                           "",
		"redis://:ter2@h/x":                      "",
		"redis://:ter2@h:1,i:2":                  "",
		"redis+cluster://:ter2@h:1,i":            "",
		"redis+sentinel://h/m/x?password=ter2@":  "",
		"redis+sentinel://h?sentinel_pass=ter2@": "",
	} {
		rdb, _, err := newClient(url)
		if detail == "*" {
			if err != nil {
				t.Errorf("newClient(%q) = %v", url, err)
			}
			rdb.Close()
			continue
		}
		if _, ok := errors.AsType[usageError](err); !ok || !strings.Contains(err.Error(), detail) || !strings.Contains(err.Error(), "want redis://") {
			t.Errorf("newClient(%q) = %v; want a usage error with %q", url, err, detail)
		}
		if err != nil && strings.Contains(err.Error(), "ter2") && strings.Contains(url, "ter2@") {
			t.Errorf("newClient(%q) tells the password: %v", url, err)
		}
	}
}

// ping opens url and uses the client once.
func ping(t *testing.T, url string) error {
	t.Helper()
	rdb, embedded, closeRedis, err := openRedis(t.Context(), url)
	if err != nil {
		return err
	}
	defer closeRedis()
	if embedded != (url == "") {
		t.Errorf("openRedis(%q): embedded = %v", url, embedded)
	}
	if err := rdb.Set(t.Context(), "k", "v", time.Minute).Err(); err != nil {
		t.Errorf("openRedis(%q): SET: %v", url, err)
	}
	return nil
}

func TestOpenRedis(t *testing.T) {
	m := miniredis.RunT(t)
	m.RequireUserAuth("u", "hunter2")
	for url, want := range map[string]string{
		"":                                   "",
		"redis://u:hunter2@" + m.Addr():      "",
		"redis://u:hunter3@" + m.Addr():      "redis at " + m.Addr() + ": WRONGPASS",
		"redis://" + m.Addr():                "redis at " + m.Addr() + ": NOAUTH",
		"redis://u:hunter2@127.0.0.1:1":      "redis at 127.0.0.1:1: dial",
		"unix://u:hunter2@/nowhere/redis":    "redis at /nowhere/redis: dial",
		"redis+cluster://:hunter2@" + "h.:x": "--redis is not a URL",
	} {
		err := ping(t, url)
		if (err == nil) != (want == "") || err != nil && !strings.HasPrefix(err.Error(), want) {
			t.Errorf("openRedis(%q) = %v; want %q", url, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "hunter") {
			t.Errorf("openRedis(%q) tells the password: %v", url, err)
		}
	}
	if m.Exists("k") != true || m.Exists("embedded") {
		t.Error("the server has other keys than its client set")
	}
}

func TestOpenRedisLetsInWhoMayNotPing(t *testing.T) {
	s := redistest.Start(t)
	if err := s.Client(t).Do(t.Context(), "ACL", "SETUSER", "limiter", "on", ">pw", "~*", "-@all", "+set").Err(); err != nil {
		t.Fatal(err)
	}
	if err := ping(t, "redis://limiter:pw@"+s.Addr()); err != nil {
		t.Errorf("openRedis as a user without +ping = %v; want a client", err)
	}
}

func TestOpenRedisCluster(t *testing.T) {
	t.Parallel() // a cluster takes two seconds to say that it is one
	s := redistest.Start(t, "--cluster-enabled", "yes")
	rdb := s.Client(t)
	if err := rdb.Do(t.Context(), "CLUSTER", "ADDSLOTSRANGE", 0, 16383).Err(); err != nil {
		t.Fatal(err)
	}
	for range 1000 {
		if info, _ := rdb.ClusterInfo(t.Context()).Result(); strings.Contains(info, "cluster_state:ok") {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	// The first address is nobody's: the next one is asked.
	if err := ping(t, "redis+cluster://127.0.0.1:1,"+s.Addr()); err != nil {
		t.Errorf("openRedis on a cluster = %v", err)
	}
}

// startSentinel runs something that answers as a Sentinel would that watches
// the server at addr under the name mymaster, for clients with the password.
func startSentinel(t *testing.T, addr, password string) string {
	t.Helper()
	s, err := fake.NewServer("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	host, port, _ := net.SplitHostPort(addr)
	handle := func(name string, f fake.Cmd) {
		if err := s.Register(name, f); err != nil {
			t.Fatal(err)
		}
	}
	handle("HELLO", func(p *fake.Peer, _ string, args []string) {
		if got := strings.Join(args, " "); !strings.EqualFold(got, "3 AUTH s "+password) {
			// As servers before version 6 do, arguments and all.
			p.WriteError("ERR unknown command `HELLO`, with args beginning with: " + got)
			return
		}
		p.WriteMapLen(1)
		p.WriteBulk("proto")
		p.WriteInt(3)
	})
	handle("CLIENT", func(p *fake.Peer, _ string, _ []string) { p.WriteOK() })
	handle("PING", func(p *fake.Peer, _ string, _ []string) { p.WriteInline("PONG") })
	handle("SUBSCRIBE", func(p *fake.Peer, _ string, args []string) {
		for i, channel := range args {
			p.WritePushLen(3)
			p.WriteBulk("subscribe")
			p.WriteBulk(channel)
			p.WriteInt(i + 1)
		}
	})
	handle("SENTINEL", func(p *fake.Peer, _ string, args []string) {
		switch {
		case len(args) == 2 && args[0] == "get-master-addr-by-name" && args[1] == "mymaster":
			p.WriteStrings([]string{host, port})
		case len(args) == 2 && args[0] == "get-master-addr-by-name":
			p.WriteNull()
		default:
			p.WriteLen(0) // no other Sentinels, no replicas
		}
	})
	return s.Addr().String()
}

func TestOpenRedisSentinel(t *testing.T) {
	m := miniredis.RunT(t)
	m.RequireUserAuth("u", "pw")
	addr := startSentinel(t, m.Addr(), "spw")
	login := "?sentinel_username=s&sentinel_password=spw"
	if err := ping(t, "redis+sentinel://u:pw@127.0.0.1:1,"+addr+"/mymaster/3"+login); err != nil {
		t.Fatalf("openRedis through a Sentinel = %v", err)
	}
	if m.DB(3).Exists("k") == false {
		t.Error("the key is not in database 3 of the master")
	}
	for url, why := range map[string]string{
		"redis+sentinel://u:pw@" + addr + "/other" + login:                                             "another master",
		"redis+sentinel://u:bad@" + addr + "/mymaster" + login:                                         "a wrong password",
		"redis+sentinel://u:pw@" + addr + "/mymaster?sentinel_username=s&sentinel_password=wrong%20pw": "another login",
	} {
		err := ping(t, url)
		if err == nil || !strings.HasPrefix(err.Error(), "redis at "+addr) {
			t.Errorf("openRedis with %s = %v; want an error", why, err)
		}
		if err != nil && (strings.Contains(err.Error(), "pw") || strings.Contains(err.Error(), "bad")) {
			t.Errorf("openRedis with %s tells a password: %v", why, err)
		}
	}
}

func TestOpenRedisGivesUpOnSilence(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, conn) }() // listens, and says nothing
		}
	}()
	began := time.Now()
	err = ping(t, "redis://"+l.Addr().String()+"?read_timeout=50ms&protocol="+strconv.Itoa(2))
	if err == nil || time.Since(began) > 5*time.Second {
		t.Errorf("openRedis of a silent server = %v after %v; want an error soon", err, time.Since(began))
	}
}

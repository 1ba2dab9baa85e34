package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/internal/server"
	"github.com/hybridlimit/hybridlimit/lua"
)

// buffer is a bytes.Buffer for two goroutines.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// daemon is serve, running.
type daemon struct {
	t    *testing.T
	log  *buffer
	url  string
	stop context.CancelFunc
	done chan error
}

var listening = regexp.MustCompile(`msg=listening .*addr=(\S+)`)

// startServe runs serve on a free port, and returns when it listens.
func startServe(t *testing.T, open opener, args ...string) *daemon {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	d := &daemon{t: t, log: &buffer{}, stop: stop, done: make(chan error, 1)}
	cmd := serveCmd(open)
	// The default time-out is for production; a loaded machine is no outage.
	cmd.SetArgs(append([]string{"--listen", "127.0.0.1:0", "--redis-timeout", "2s"}, args...))
	cmd.SetErr(d.log)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	go func() { d.done <- cmd.ExecuteContext(ctx) }()
	t.Cleanup(stop)
	for range 2000 {
		if m := listening.FindStringSubmatch(d.log.String()); m != nil {
			d.url = "http://" + m[1]
			return d
		}
		select {
		case err := <-d.done:
			t.Fatalf("serve ended: %v\n%s", err, d.log)
		case <-time.After(5 * time.Millisecond):
		}
	}
	t.Fatalf("serve does not listen:\n%s", d.log)
	return nil
}

// check posts one request and returns whether it was admitted.
func (d *daemon) check(user string, rate, capacity int) bool {
	d.t.Helper()
	return d.ask(user, rate, capacity).Allowed
}

// decision is the answer to a request.
type decision struct {
	Allowed bool
	Tokens  int64
	Source  string
}

// ask posts one request.
func (d *daemon) ask(user string, rate, capacity int) (a decision) {
	d.t.Helper()
	body := fmt.Sprintf(`{"service":"api","user_id":%q,"rate":%d,"capacity":%d}`, user, rate, capacity)
	resp, err := http.Post(d.url+"/check", "application/json", strings.NewReader(body))
	if err != nil {
		d.t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&a); err != nil || resp.StatusCode != http.StatusOK {
		d.t.Fatalf("POST %s = %d, %v", body, resp.StatusCode, err)
	}
	return a
}

// logged waits until the log has a line that matches, and returns its groups.
func (d *daemon) logged(pattern string) []string {
	d.t.Helper()
	re := regexp.MustCompile(pattern)
	for range 2000 {
		if m := re.FindStringSubmatch(d.log.String()); m != nil {
			return m
		}
		time.Sleep(5 * time.Millisecond)
	}
	d.t.Fatalf("no line %s in the log:\n%s", pattern, d.log)
	return nil
}

// lease makes requests until tokens for user u1 are out as a lease, and returns
// how many that took.
func (d *daemon) lease(store *lua.Store) (requests int) {
	d.t.Helper()
	for requests < 200 {
		if !d.check("u1", 10, 1000) {
			d.t.Fatalf("request %d of a thousand was refused", requests+1)
		}
		requests++
		held, found, err := store.Inspect(d.t.Context(), server.Key("api", "u1"))
		if err != nil || !found {
			d.t.Fatalf("Inspect = %+v, %v, %v; want a bucket", held, found, err)
		}
		if held.Outstanding[0]+held.Outstanding[1] > 0 {
			return requests
		}
	}
	d.t.Fatalf("no lease after %d requests", requests)
	return 0
}

// end stops the daemon as a signal would and returns its error.
func (d *daemon) end() error {
	d.t.Helper()
	http.DefaultClient.CloseIdleConnections()
	d.stop()
	select {
	case err := <-d.done:
		return err
	case <-time.After(30 * time.Second):
		d.t.Fatalf("serve did not end:\n%s", d.log)
		return nil
	}
}

func TestServeReturnsLeasesToTheEmbeddedRedis(t *testing.T) {
	t.Setenv(redisEnv, "")
	var rdb redis.UniversalClient
	open := func(ctx context.Context, url string) (redis.UniversalClient, bool, func(), error) {
		client, embedded, closeRedis, err := openRedis(ctx, url)
		if err == nil {
			t.Cleanup(closeRedis) // after a look at what is left
		}
		rdb = client
		return client, embedded, func() {}, err
	}
	// A long period, so that the leases are still out at the end.
	d := startServe(t, open, "--lease-period", "10s", "--prefix", "test:")
	store := lua.NewStore(rdb, lua.Options{Prefix: "test:"})
	spent := float64(d.lease(store))
	resp, err := http.Get(d.url + "/healthz")
	if err != nil {
		t.Fatal(err)
	}
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || string(b) != `{"status":"ok"}`+"\n" {
		t.Errorf("GET /healthz = %d %s", resp.StatusCode, b)
	}
	resp.Body.Close()

	if err := d.end(); err != nil {
		t.Errorf("serve = %v; want nil", err)
	}
	left, _, err := store.Inspect(t.Context(), server.Key("api", "u1"))
	if err != nil || left.Outstanding != [2]int64{} {
		t.Errorf("after the end: %+v, %v; want nothing leased", left, err)
	}
	// All that was granted and not admitted is back.
	if left.TokensNow < 1000-spent || left.TokensNow > 1000 {
		t.Errorf("after the end: %v tokens; want %v and the refill", left.TokensNow, 1000-spent)
	}
	log := d.log.String()
	if n := strings.Count(log, "level=WARN"); n != 1 || !strings.Contains(log, "single node, nothing is kept") {
		t.Errorf("%d warnings; want the one about the embedded Redis:\n%s", n, log)
	}
	if lines := strings.Count(log, "\n"); lines != 3 {
		t.Errorf("%d lines; want a warning, the start and the end:\n%s", lines, log)
	}
	if m := regexp.MustCompile(`msg=stopped .*tokens_returned=[1-9]`).FindString(log); m == "" {
		t.Errorf("no word on the tokens returned:\n%s", log)
	}
}

func TestServeSharesARedis(t *testing.T) {
	m := miniredis.RunT(t)
	m.SetTime(time.Now()) // and stays there: nothing refills
	t.Setenv(redisEnv, "redis://"+m.Addr())
	a := startServe(t, openRedis)
	b := startServe(t, openRedis, "--redis", "redis://"+m.Addr()+"/0")
	admitted := 0
	for i := range 10 {
		if []*daemon{a, b}[i%2].check("u1", 2, 3) {
			admitted++
		}
	}
	if admitted != 3 {
		t.Errorf("two nodes admitted %d; want the capacity, 3", admitted)
	}
	for _, d := range []*daemon{a, b} {
		if err := d.end(); err != nil {
			t.Errorf("serve = %v; want nil", err)
		}
		if log := d.log.String(); strings.Contains(log, "WARN") || !strings.Contains(log, "redis="+m.Addr()) {
			t.Errorf("want no warning and the address of Redis:\n%s", log)
		}
	}
}

func TestServeWithoutRedisAtTheEnd(t *testing.T) {
	for _, policy := range []string{"deny", "allow"} {
		t.Run(policy, func(t *testing.T) {
			m := miniredis.RunT(t)
			d := startServe(t, openRedis, "--redis", "redis://"+m.Addr(), "--on-failure", policy, "--lease-period", "10s")
			rdb := redis.NewClient(redistest.Options(m.Addr()))
			defer rdb.Close()
			d.lease(lua.NewStore(rdb, lua.Options{}))
			m.Close()
			if got := d.ask("u2", 10, 1000); got.Allowed != (policy == "allow") || got.Source != "policy" {
				t.Errorf("without Redis: %+v; want %s by policy", got, policy)
			}
			if err := d.end(); err != nil {
				t.Errorf("serve = %v; want nil, Redis forgets leases by itself", err)
			}
			log := d.log.String()
			if strings.Count(log, "level=WARN") != 2 || !strings.Contains(log, "did not take all tokens back") {
				t.Errorf("want a warning that tokens did not go back:\n%s", log)
			}
			// Also when it ends before the counters are looked at.
			want := map[string]string{"deny": "Redis does not answer: denying requests", "allow": "Redis does not answer: admitting requests without limit"}
			if !strings.Contains(log, want[policy]) || !strings.Contains(log, "on_failure="+policy) {
				t.Errorf("want %q:\n%s", want[policy], log)
			}
		})
	}
}

func TestServeWhileRedisIsDown(t *testing.T) {
	t.Parallel()
	s := redistest.Start(t)
	d := startServe(t, openRedis, "--redis", s.URL(), "--min-nodes", "4", "--start", "full", "--split", "equal", "--heartbeat", "200ms")
	if got := d.ask("u1", 1, 8); !got.Allowed || got.Source != "store" {
		t.Errorf("with Redis: %+v; want admitted by the store", got)
	}

	s.Kill()
	admitted := 0
	for range 10 {
		got := d.ask("u2", 1, 8)
		if got.Source != "local" {
			t.Errorf("without Redis: %+v; want it decided locally", got)
		}
		if got.Allowed {
			admitted++
		}
	}
	if admitted != 2 {
		t.Errorf("without Redis: %d admitted; want this node's share, a quarter of 8", admitted)
	}
	d.logged(`level=WARN msg="Redis does not answer: limiting with this node's share" redis=\S+ nodes=4 on_failure=degrade cause="lease: .*" start=full split=equal\n`)
	if strings.Contains(d.log.String(), "answers again") {
		t.Errorf("Redis does not answer yet:\n%s", d.log)
	}

	s.Restart(t)
	// Nothing has to be asked for that to be noticed, nor to be charged.
	m := d.logged(`level=INFO msg="Redis answers again" redis=\S+ degraded_seconds=([\d.]+) admitted=(\d+) debt_charged=(\d+) debt_forgiven=(\d+) debt_owed=(\d+)\n`)
	n := make([]int, len(m))
	for i := 2; i < len(m); i++ {
		n[i], _ = strconv.Atoi(m[i])
	}
	// On a slow machine the share is refilled meanwhile, and that is forgiven.
	if m[1] == "0" || n[2] != 2 || n[3]+n[4]+n[5] != 2 || n[4] == 2 {
		t.Errorf("%q; want some degraded seconds, and 2 that were admitted to be charged", m)
	}
	// More and more of the calls go to Redis within a second: also those that no
	// request waits for, and then it is a lease that decides.
	byRedis := func(source string) bool { return source == "store" || source == "lease" }
	source := ""
	for range 1000 {
		if source = d.ask("u3", 1000, 100000).Source; byRedis(source) {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if !byRedis(source) {
		t.Errorf("with Redis again: decided by %s; want store or lease", source)
	}
	if err := d.end(); err != nil {
		t.Errorf("serve = %v; want nil", err)
	}
	if log := d.log.String(); strings.Count(log, "does not answer") != 1 || strings.Count(log, "answers again") != 1 {
		t.Errorf("want each transition once:\n%s", log)
	}
}

func TestServePortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if code, _, stderr := execute(t, "serve", "--listen", l.Addr().String()); code != 1 || !strings.Contains(stderr, "in use") {
		t.Errorf("exit code %d, %s; want 1 and that the port is in use", code, stderr)
	}
}

// A service that starts while Redis is down decides all the same, and finds Redis
// when it is there.
func TestServeStartsWithoutRedis(t *testing.T) {
	s := redistest.Start(t)
	s.Kill()
	d := startServe(t, openRedisLater, "--redis", "redis://"+s.Addr()+"/0", "--min-nodes", "4", "--start", "full")
	if got := d.ask("u1", 1, 8); got.Source != "local" || !got.Allowed {
		t.Errorf("without Redis: %+v; want it admitted locally", got)
	}
	d.logged(`level=WARN msg="starting without Redis: it does not answer yet" on_failure=degrade min_nodes=4 err=.*\n`)
	s.Restart(t)
	d.logged(`level=INFO msg="Redis answers again".*\n`)
	if err := d.end(); err != nil {
		t.Errorf("serve = %v; want nil", err)
	}
}

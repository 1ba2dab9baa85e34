package redistest

import (
	"bufio"
	"cmp"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestStart(t *testing.T) {
	s := Start(t, "--maxmemory", "3mb")
	c := s.Client(t)

	if got, err := c.Ping(t.Context()).Result(); got != "PONG" || err != nil {
		t.Fatalf("Ping() = %q, %v; want PONG, nil", got, err)
	}
	if got, want := s.URL(), "redis://"+s.Addr(); got != want {
		t.Errorf("URL() = %q, want %q", got, want)
	}
	if host, _, err := net.SplitHostPort(s.Addr()); host != "127.0.0.1" || err != nil {
		t.Errorf("Addr() = %q, want a port of 127.0.0.1", s.Addr())
	}
	for name, want := range map[string]string{
		"save":       "",
		"appendonly": "no",
		"bind":       "127.0.0.1",
		"maxmemory":  strconv.Itoa(3 << 20), // the test's own argument
	} {
		if got := c.ConfigGet(t.Context(), name).Val()[name]; got != want {
			t.Errorf("CONFIG GET %s = %q, want %q", name, got, want)
		}
	}
}

func TestStartGivesEachTestItsOwn(t *testing.T) {
	a, b := Start(t), Start(t)
	if a.Addr() == b.Addr() {
		t.Fatalf("two servers on %s", a.Addr())
	}
	if err := a.Client(t).Set(t.Context(), "k", "a", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if got, err := b.Client(t).Get(t.Context(), "k").Result(); !errors.Is(err, redis.Nil) {
		t.Errorf("Get(k) of the other server = %q, %v; want redis.Nil", got, err)
	}
}

func TestStartWithPassword(t *testing.T) {
	s := Start(t, "--requirepass", "secret")
	if err := s.Client(t).Ping(t.Context()).Err(); !redis.HasErrorPrefix(err, "NOAUTH") {
		t.Errorf("Ping() without password: %v, want NOAUTH", err)
	}
}

func TestNothingLeftAfterTest(t *testing.T) {
	before := goroutines()
	var addr, dir string
	t.Run("test", func(t *testing.T) {
		s := Start(t)
		addr, dir = s.Addr(), s.dir
		if err := s.Client(t).Ping(t.Context()).Err(); err != nil {
			t.Fatal(err)
		}
		s.Pause() // a stopped process must not survive either
	})
	if dialable(addr) {
		t.Errorf("something still listens on %s", addr)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Stat(%s) = %v, want not exist", dir, err)
	}
	wantNoneLeft(t, before)
}

func TestKillAndRestart(t *testing.T) {
	s := Start(t)
	c := s.Client(t)
	addr, runID := s.Addr(), s.Info(t, "server")["run_id"]
	if err := c.Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	sha, err := c.ScriptLoad(t.Context(), "return 1").Result()
	if err != nil {
		t.Fatal(err)
	}

	s.Kill()
	s.Kill() // once more does nothing
	if err := c.Ping(t.Context()).Err(); err == nil {
		t.Fatal("Ping() of a killed server = nil, want an error")
	}
	if dialable(addr) {
		t.Fatalf("something still listens on %s", addr)
	}

	for range 2 { // dead, then running
		s.Restart(t)
		if s.Addr() != addr {
			t.Fatalf("Addr() = %s after Restart, want %s", s.Addr(), addr)
		}
		c := s.Client(t)
		if n, err := c.Exists(t.Context(), "k").Result(); n != 0 || err != nil {
			t.Errorf("Exists(k) = %d, %v after Restart; want 0, nil", n, err)
		}
		if err := c.EvalSha(t.Context(), sha, nil).Err(); !redis.HasErrorPrefix(err, "NOSCRIPT") {
			t.Errorf("EvalSha() = %v after Restart, want NOSCRIPT", err)
		}
		if got := s.Info(t, "server")["run_id"]; got == runID || got == "" {
			t.Errorf("run_id = %q after Restart, want another than %q", got, runID)
		} else {
			runID = got
		}
	}
}

func TestPauseAndResume(t *testing.T) {
	s := Start(t)
	c := s.Client(t)
	if err := c.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}

	s.Pause()
	err := c.Incr(brief(t), "k").Err()
	if timeout, ok := errors.AsType[net.Error](err); !ok || !timeout.Timeout() {
		t.Fatalf("Incr(k) of a paused server = %v, want a time-out", err)
	}

	s.Resume()
	// The command had reached the server's socket: it is executed late.
	eventually(t, func() bool {
		n, err := c.Get(t.Context(), "k").Int()
		return n == 1 && err == nil
	}, "Get(k) != 1 after Resume")
}

func TestInfo(t *testing.T) {
	s := Start(t)
	_, port, _ := net.SplitHostPort(s.Addr())
	info := s.Info(t, "server")
	if info["tcp_port"] != port {
		t.Errorf("Info(server)[tcp_port] = %q, want %q", info["tcp_port"], port)
	}
	for key, value := range info {
		if strings.HasPrefix(key, "#") || strings.ContainsAny(key+value, "\r\n") {
			t.Errorf("Info(server) has %q = %q", key, value)
		}
	}
	if got := s.Info(t, "clients")["connected_clients"]; got != "1" {
		t.Errorf("connected_clients = %q, want 1: Info's own", got)
	}
}

func TestCommandCalls(t *testing.T) {
	s := Start(t)
	c := s.Client(t)
	want := func(name string, n int64) {
		t.Helper()
		if got := s.CommandCalls(t, name); got != n {
			t.Errorf("CommandCalls(%s) = %d, want %d", name, got, n)
		}
	}
	want("evalsha", 0)
	want("no-such-command", 0)

	sha, err := c.ScriptLoad(t.Context(), "return redis.call('INCR', KEYS[1])").Result()
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := c.EvalSha(t.Context(), sha, []string{"k"}).Err(); err != nil {
			t.Fatal(err)
		}
	}
	want("evalsha", 3)
	want("incr", 3) // called by the script
	want("script|load", 1)

	s.Restart(t)
	want("evalsha", 0)
}

func TestFindProgram(t *testing.T) {
	errNone := errors.New("not found in $PATH")
	tests := []struct {
		name       string
		program    program
		env        map[string]string
		installed  string
		want       string
		skip, fail string // parts of the message
	}{
		{name: "installed", installed: "redis-server", want: "/bin/redis-server"},
		{name: "named", env: map[string]string{"REDIS_SERVER": "valkey-server"}, installed: "valkey-server", want: "/bin/valkey-server"},
		{name: "none", skip: "apt-get install redis-server"},
		{name: "none on macOS", skip: "brew install redis"},
		{name: "required 0", env: map[string]string{"REQUIRE_REDIS": "0"}, skip: "not found"},
		{name: "required", env: map[string]string{"REQUIRE_REDIS": "1"}, fail: "REQUIRE_REDIS=1, but not found"},
		{name: "Valkey", program: valkeyServer, installed: "valkey-server", want: "/bin/valkey-server"},
		{name: "Valkey named", program: valkeyServer, env: map[string]string{"VALKEY_SERVER": "v8"}, installed: "v8", want: "/bin/v8"},
		{name: "no Valkey", program: valkeyServer, env: map[string]string{"REQUIRE_REDIS": "1"}, skip: "apt-get install valkey-server"},
		{name: "Valkey required", program: valkeyServer, env: map[string]string{"REQUIRE_VALKEY": "1"}, fail: "REQUIRE_VALKEY=1, but not found"},
		{name: "named but absent", env: map[string]string{"REDIS_SERVER": "x"}, installed: "redis-server", fail: `REDIS_SERVER = "x"`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			r := &recorder{TB: t}
			var got string
			r.do(func() {
				got = cmp.Or(test.program, redisServer).find(r,
					func(key string) string { return test.env[key] },
					func(name string) (string, error) {
						if name != test.installed {
							return "", errNone
						}
						return "/bin/" + name, nil
					})
			})
			if got != test.want {
				t.Errorf("find() = %q, want %q", got, test.want)
			}
			wantMessage(t, "skip", r.skips, test.skip)
			wantMessage(t, "failure", r.failures, test.fail)
		})
	}
}

// wantMessage checks for one message with the given part, or for none.
func wantMessage(t *testing.T, kind string, got []string, part string) {
	t.Helper()
	want := part != ""
	if want != (len(got) == 1) || !strings.Contains(strings.Join(got, ""), part) {
		t.Errorf("%ss %q, want part %q", kind, got, part)
	}
}

func TestStartSaysWhyItFailed(t *testing.T) {
	r := &recorder{TB: t}
	r.do(func() { Start(r, "--no-such-directive", "1") })
	if len(r.skips) > 0 {
		t.Skip(r.skips[0]) // no server here
	}
	wantMessage(t, "failure", r.failures, "no-such-directive") // from the server's log
}

func TestLaunchOnTakenPort(t *testing.T) {
	s := Start(t)
	// The other server answers PING on that port, and yet is not this one.
	other := &Server{t: t, binary: s.binary, dir: t.TempDir(), port: s.port}
	if err := other.launch(); err == nil {
		other.Kill()
		t.Fatal("launch() on a taken port = nil, want an error")
	}
	if err := s.Client(t).Ping(t.Context()).Err(); err != nil {
		t.Errorf("the first server is hurt: %v", err)
	}
}

func TestServerThatDiesByItselfFailsTheTest(t *testing.T) {
	for name, test := range map[string]struct {
		end  func(s *Server)
		want string
	}{
		"crash": {func(s *Server) { s.proc.kill() }, "died: signal: killed"},
		"exit":  {func(s *Server) { s.Client(t).Shutdown(t.Context()); <-s.proc.done }, "died: exit status 0"},
		"Kill":  {func(s *Server) { s.Kill() }, ""},
		"none":  {func(*Server) {}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			r := &recorder{TB: t}
			r.do(func() { test.end(Start(r)) })
			if len(r.skips) > 0 {
				t.Skip(r.skips[0])
			}
			wantMessage(t, "failure", r.failures, test.want)
		})
	}
}

// The kernel kills a child whose parent thread ends, see launchProcess. Here
// the thread that called Start ends, and then all that can be made to end; the
// server must not notice.
func TestServerOutlivesTheThreadThatStartedIt(t *testing.T) {
	started := make(chan *Server, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(started)
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		started <- Start(t)
	})
	wg.Wait()
	s, ok := <-started
	if !ok {
		t.SkipNow() // Start has skipped or failed the test
	}
	c := s.Client(t)
	for range 10 {
		// Each takes a thread, and takes it along when it ends.
		gate := make(chan struct{})
		for range 8 {
			wg.Go(func() { runtime.LockOSThread(); <-gate })
		}
		close(gate)
		wg.Wait()
		if err := c.Ping(t.Context()).Err(); err != nil {
			t.Fatalf("Ping() = %v after its threads ended", err)
		}
	}
}

// When the test binary is killed, no cleanup runs, and yet the server must not
// be left behind. The test starts this binary again and kills it.
func TestServerDiesWithTheTestBinary(t *testing.T) {
	if os.Getenv("REDISTEST_CHILD") == "1" {
		s := Start(t)
		os.Stdout.WriteString(s.Addr() + "\n")
		// Blocks until killed, or until the parent is gone.
		_, _ = os.Stdin.Read(make([]byte, 1))
		return
	}
	if runtime.GOOS != "linux" {
		t.Skip("only Linux kills a child with its parent")
	}
	redisServer.find(t, os.Getenv, exec.LookPath)

	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	child := exec.Command(exe, "-test.run=^"+t.Name()+"$")
	// The child's data directory outlives it, so it goes where this test cleans up.
	child.Env = append(os.Environ(), "REDISTEST_CHILD=1", "TMPDIR="+t.TempDir())
	stdin, err := child.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	defer stdin.Close()
	stdout, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	addr := strings.TrimSpace(line)
	if err != nil || !dialable(addr) {
		t.Errorf("child printed %q, %v; want the address of its server", line, err)
	}

	if err := child.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = child.Wait()
	eventually(t, func() bool { return !dialable(addr) }, "the server on %s outlives its test binary", addr)
}

func TestFreePortIsBelowTheEphemeralOnes(t *testing.T) {
	var ports []int
	for range 20 {
		if port, err := freePort(t.Context()); err == nil {
			ports = append(ports, port)
		}
	}
	if len(ports) == 0 {
		t.Fatal("freePort() found none in 20 tries")
	}
	if slices.Min(ports) < minPort || slices.Max(ports) >= maxPort {
		t.Errorf("freePort() = %v, want %d to %d", ports, minPort, maxPort)
	}
	if slices.Min(ports) == slices.Max(ports) && len(ports) > 1 {
		t.Errorf("freePort() = %v, want different ones", ports)
	}
}

func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if got := tail(path); !strings.Contains(got, path) {
		t.Errorf("tail of no file = %q, want its name", got)
	}
	text := strings.Repeat("x", logTail) + "end"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := tail(path); got != text[3:] {
		t.Errorf("tail = %d bytes, want the last %d", len(got), logTail)
	}
}

package redistest

import (
	"bufio"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

const (
	startTimeout = 10 * time.Second      // from launch to the first answer
	startPoll    = 5 * time.Millisecond  // between two looks at a starting server
	startTries   = 10                    // ports tried before Start gives up
	rebindPause  = 50 * time.Millisecond // between two tries of Restart
	askTimeout   = 5 * time.Second       // for one question of this package
	logTail      = 2 << 10               // bytes of server log in a failure
)

// Ports are drawn below the range from which Linux and most other systems take
// the local ports of outgoing connections (from 32768 on). A port inside that
// range could be lost to some connection between Kill and Restart.
const minPort, maxPort = 12_000, 32_000

// Server is a redis-server process that belongs to one test. Its methods may be
// called from several goroutines.
type Server struct {
	t      testing.TB
	binary string
	dir    string
	config string // path of a configuration file; "" for none
	args   []string
	port   int
	bus    int         // port for the other nodes of a cluster; 0 outside of one
	secure *tls.Config // a client's; nil for a server without TLS

	mu      sync.Mutex // guards what follows
	proc    *process
	stopped bool // proc was ended on purpose
	paused  bool
}

// Start runs a redis-server for this test and returns when it answers. The
// server keeps nothing on disk, listens on 127.0.0.1 only, and ends with the
// test. args are appended to its command line and win over the defaults, for
// example "--maxmemory", "2mb"; the port is not theirs to choose.
//
// The program is redis-server from PATH, or what the environment variable
// REDIS_SERVER names. When there is none the test is skipped, or failed when
// REQUIRE_REDIS=1, so that a build server cannot pass by testing nothing.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	s := newServer(t, args)
	s.start(t)
	return s
}

// newServer returns a server that is not started yet, and ends with the test.
func newServer(t testing.TB, args []string) *Server {
	t.Helper()
	return newServerOf(t, redisServer, args)
}

func newServerOf(t testing.TB, p program, args []string) *Server {
	t.Helper()
	s := &Server{t: t, binary: p.find(t, os.Getenv, exec.LookPath), dir: t.TempDir(), args: args}
	// Registered after TempDir, so it runs before the directory is removed.
	t.Cleanup(s.end)
	return s
}

// start launches the server on a port that it draws.
func (s *Server) start(t testing.TB) {
	t.Helper()
	if err := s.tryStart(t.Context()); err != nil {
		t.Fatalf("redistest: start %s: %v", s.binary, err)
	}
}

func (s *Server) tryStart(ctx context.Context) (err error) {
	for range startTries {
		// Somebody else may take the port before the server binds it. Then the
		// server exits at once, and another port is as good.
		if err = s.drawPorts(ctx); err != nil {
			continue
		}
		if err = s.launch(); err == nil || errors.Is(err, errNoTLS) {
			return err
		}
	}
	return err
}

func (s *Server) drawPorts(ctx context.Context) (err error) {
	if s.port, err = freePort(ctx); err != nil || s.bus == 0 {
		return err
	}
	s.bus, err = freePort(ctx)
	return err
}

// program is a server that speaks Redis's protocol, and how it is found.
type program struct {
	name    string
	env     string // names another binary
	require string // 1 where it has to be there
	install string // what to do when it is not
}

var redisServer = program{
	name: "redis-server", env: "REDIS_SERVER", require: "REQUIRE_REDIS",
	install: "install it with `apt-get install redis-server` or `brew install redis`",
}

// host is the part of testing.TB that find needs, so that a test can watch it
// skip without being skipped.
type host interface {
	Helper()
	Skipf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// find returns the path of the program's binary, or ends the test: skipped when
// there is none here, failed when the environment promised one.
func (p program) find(t host, getenv func(string) string, lookPath func(string) (string, error)) string {
	t.Helper()
	named := getenv(p.env)
	path, err := lookPath(cmp.Or(named, p.name))
	hint := fmt.Sprintf("%s, or name a binary in %s", p.install, p.env)
	switch {
	case err == nil:
		return path
	case named != "":
		// Skipping here would hide a misspelt path for ever.
		t.Fatalf("redistest: %s = %q: %v", p.env, named, err)
	case getenv(p.require) == "1":
		t.Fatalf("redistest: %s=1, but %v; %s", p.require, err, hint)
	default:
		t.Skipf("redistest: %v; %s", err, hint)
	}
	return ""
}

// freePort returns a loopback port that nothing listened on a moment ago.
func freePort(ctx context.Context) (int, error) {
	port := minPort + rand.N(maxPort-minPort)
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", loopback(port))
	if err != nil {
		return 0, err
	}
	return port, l.Close()
}

func loopback(port int) string {
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
}

// launch starts the process on s.port and waits until it answers. On an error
// nothing is left running.
func (s *Server) launch() error {
	path := filepath.Join(s.dir, "redis.log")
	log, err := os.Create(path)
	if err != nil {
		return err
	}
	defer log.Close()

	p, err := launchProcess(s.binary, s.commandLine(), log)
	if err != nil {
		return err
	}
	if err := s.waitReady(p); err != nil {
		p.kill()
		log := tail(path)
		if withoutTLS(log) {
			err = errNoTLS
		}
		return fmt.Errorf("%w\n%s", err, log)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.proc, s.stopped, s.paused = p, false, false
	return nil
}

func (s *Server) commandLine() []string {
	var args []string
	if s.config != "" {
		args = append(args, s.config) // only the first argument may be a file
	}
	args = append(
		args,
		s.portOption(), strconv.Itoa(s.port),
		"--bind", "127.0.0.1",
		"--dir", s.dir,
		"--save", "",
		"--appendonly", "no",
		"--daemonize", "no",
	)
	if s.secure != nil {
		args = append(args, "--port", "0") // nothing in the clear
	}
	if s.bus != 0 {
		args = append(args, "--cluster-enabled", "yes", "--cluster-port", strconv.Itoa(s.bus))
	}
	return append(args, s.args...)
}

func (s *Server) portOption() string {
	if s.secure != nil {
		return "--tls-port"
	}
	return "--port"
}

// waitReady returns nil once p itself answers on s.port.
func (s *Server) waitReady(p *process) error {
	for deadline := time.Now().Add(startTimeout); time.Now().Before(deadline); {
		select {
		case <-p.done:
			return fmt.Errorf("exited before it answered: %w", cmp.Or(p.err, errExitedCleanly))
		case <-time.After(startPoll):
		}
		if s.answers(p.pid()) {
			return nil
		}
	}
	return fmt.Errorf("no answer on %s within %v", s.Addr(), startTimeout)
}

// errExitedCleanly stands in for the nil error of a process with status 0.
var errExitedCleanly = errors.New("exit status 0")

// answers reports whether the server with this process id is ready. The id
// matters: when two test binaries draw the same port, the loser must not
// take the winner's PONG for its own.
func (s *Server) answers(pid int) bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.Addr())
	if err != nil {
		return false
	}
	if s.secure != nil {
		conn = tls.Client(conn, s.secure)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return false
	}
	if _, err := io.WriteString(conn, "PING\r\nINFO server\r\n"); err != nil {
		return false
	}
	r := bufio.NewReader(conn)
	pong, err := readValue(r)
	if err != nil {
		return false
	}
	if strings.HasPrefix(string(pong), "-NOAUTH") {
		return true // started with a password: it is up, and will say no more
	}
	info, err := readValue(r)
	return err == nil && string(pong) == "+PONG\r\n" &&
		strings.Contains(string(info), fmt.Sprintf("\r\nprocess_id:%d\r\n", pid))
}

// tail returns the end of a log file for a failure message.
func tail(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(data[max(0, len(data)-logTail):])
}

// Addr returns the server's "127.0.0.1:port". It stays the same over restarts.
func (s *Server) Addr() string { return loopback(s.port) }

// URL returns the server's address as "redis://127.0.0.1:port".
func (s *Server) URL() string { return "redis://" + s.Addr() }

// Client returns a client of this server with [Options], closed when t ends.
func (s *Server) Client(t testing.TB) *redis.Client {
	t.Helper()
	return newClient(t, s.options())
}

func (s *Server) options() *redis.Options {
	opt := Options(s.Addr())
	opt.TLSConfig = s.secure
	return opt
}

// Options returns client options for tests: no retries, so a call is sent once
// and its fault is seen; contexts are obeyed; time-outs of one second, which is
// far above a loopback call and yet ends a hopeless test soon. The only set-up
// command on a new connection is HELLO.
func Options(addr string) *redis.Options {
	return &redis.Options{
		Addr:                  addr,
		Protocol:              2,
		MaxRetries:            -1,
		ContextTimeoutEnabled: true,
		DialTimeout:           time.Second,
		DialerRetries:         1,
		ReadTimeout:           time.Second,
		WriteTimeout:          time.Second,
		PoolTimeout:           time.Second,
		DisableIdentity:       true,
		MaintNotificationsConfig: &maintnotifications.Config{
			Mode: maintnotifications.ModeDisabled,
		},
	}
}

func newClient(t testing.TB, opt *redis.Options) *redis.Client {
	t.Helper()
	c := redis.NewClient(opt)
	t.Cleanup(func() {
		// A test may have closed it already, to see what a closed client does.
		if err := c.Close(); err != nil && !errors.Is(err, redis.ErrClosed) {
			t.Errorf("redistest: close client of %s: %v", opt.Addr, err)
		}
	})
	return c
}

// Kill ends the server as a crash would (SIGKILL), paused or not, and returns
// when it is gone. Its connections are reset and its data is lost. Killing a
// dead server does nothing.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.killLocked()
}

func (s *Server) killLocked() {
	s.stopped = true
	if s.proc != nil {
		s.proc.kill()
	}
}

// Restart kills the server if it still runs, and starts it on the same port
// with the same arguments: no keys, no loaded scripts, a new run id. It returns
// when the new server answers.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	s.Kill()
	var err error
	// The port was ours a moment ago, but it is nobody's property meanwhile.
	for range startTries {
		if err = s.launch(); err == nil {
			return
		}
		time.Sleep(rebindPause)
	}
	t.Fatalf("redistest: restart on %s: %v", s.Addr(), err)
}

// Pause stops the server where it stands (SIGSTOP): connections stay open, new
// ones are accepted by the kernel, and nothing answers until [Server.Resume].
func (s *Server) Pause() { s.signal(pauseSignal, true) }

// Resume lets a paused server go on (SIGCONT). It then answers everything that
// was sent to it meanwhile, also for callers that gave up long ago.
func (s *Server) Resume() { s.signal(resumeSignal, false) }

func (s *Server) signal(sig os.Signal, pause bool) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if sig == nil {
		s.t.Skip("redistest: this system cannot pause a process")
	}
	if err := s.proc.cmd.Process.Signal(sig); err != nil {
		s.t.Errorf("redistest: send %v: %v", sig, err)
	}
	s.paused = pause
}

// running reports whether the server is neither killed nor paused.
func (s *Server) running() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.proc != nil && !s.stopped && !s.paused
}

// end is the cleanup of Start. A server that died by itself fails the test,
// for otherwise its crash would pass as an injected fault.
func (s *Server) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proc != nil && !s.stopped {
		select {
		case <-s.proc.done:
			s.t.Errorf("redistest: server on %s died: %v\n%s", s.Addr(),
				cmp.Or(s.proc.err, errExitedCleanly), tail(filepath.Join(s.dir, "redis.log")))
		default:
		}
	}
	s.killLocked()
}

// Info returns one section of INFO, for example "clients", as field → value.
func (s *Server) Info(t testing.TB, section string) map[string]string {
	t.Helper()
	var text string
	err := s.ask(func(ctx context.Context, c *redis.Client) (err error) {
		text, err = c.Info(ctx, section).Result()
		return err
	})
	if err != nil {
		t.Fatalf("redistest: INFO %s of %s: %v", section, s.Addr(), err)
	}
	return parseInfo(text)
}

// ask calls f with a client for a moment: a pooled connection would not survive
// a restart, and an idle one would count as a client that the test did not open.
func (s *Server) ask(f func(ctx context.Context, c *redis.Client) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
	defer cancel()
	opt := s.options()
	opt.ReadTimeout = askTimeout
	c := redis.NewClient(opt)
	defer c.Close()
	return f(ctx, c)
}

func parseInfo(text string) map[string]string {
	fields := make(map[string]string)
	for line := range strings.Lines(text) {
		// Section titles ("# Clients") and empty lines have no colon.
		if key, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), ":"); ok {
			fields[key] = value
		}
	}
	return fields
}

// CommandCalls returns how often the server has executed a command since it
// started, as INFO commandstats counts it: also when the reply was lost, and
// when it was called inside a script. The name is in lower case; a subcommand is
// written "script|load". A command never called counts 0.
func (s *Server) CommandCalls(t testing.TB, name string) int64 {
	t.Helper()
	// The value reads "calls=3,usec=71,usec_per_call=23.67,…".
	stat, ok := s.Info(t, "commandstats")["cmdstat_"+name]
	if !ok {
		return 0
	}
	calls, _, _ := strings.Cut(strings.TrimPrefix(stat, "calls="), ",")
	n, err := strconv.ParseInt(calls, 10, 64)
	if err != nil {
		t.Fatalf("redistest: commandstats of %s = %q: %v", name, stat, err)
	}
	return n
}

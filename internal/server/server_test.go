package server_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/internal/server"
)

func TestMain(m *testing.M) {
	logging.Disable() // the client's own reports of the Redis that tests take away
	os.Exit(m.Run())
}

// service is a Server on a miniredis whose clock stands still, so that nothing
// refills unless the test says so.
type service struct {
	t       testing.TB
	limiter *hybrid.Limiter
	server  *server.Server
	redis   *miniredis.Miniredis
	now     time.Time
}

func newService(t testing.TB, opts hybrid.Options) *service {
	t.Helper()
	return newServiceOf(t, opts, server.Options{})
}

func newServiceOf(t testing.TB, opts hybrid.Options, own server.Options) *service {
	t.Helper()
	m := miniredis.RunT(t)
	o := redistest.Options(m.Addr())
	// Only opts.RedisTimeout decides that Redis does not answer.
	o.DialTimeout, o.ReadTimeout, o.WriteTimeout, o.PoolTimeout = time.Minute, time.Minute, time.Minute, time.Minute
	rdb := redis.NewClient(o)
	t.Cleanup(func() { rdb.Close() })
	if opts.RedisTimeout == 0 {
		opts.RedisTimeout = 2 * time.Second
	}
	limiter, err := hybrid.New(rdb, hybrid.Limit{}, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { limiter.Close(context.Background()) })
	s := &service{t: t, limiter: limiter, server: server.New(limiter, own), redis: m, now: time.Now()}
	s.pass(0)
	return s
}

// pass moves the clock of Redis.
func (s *service) pass(d time.Duration) {
	s.now = s.now.Add(d)
	s.redis.SetTime(s.now)
}

// decision is the body of an answer, of any kind.
type decision struct {
	Allowed      *bool  `json:"allowed"`
	Tokens       int64  `json:"tokens"`
	Remaining    int64  `json:"remaining"`
	RetryAfterMS int64  `json:"retry_after_ms"`
	Source       string `json:"source"`
	Service      string `json:"service"`
	UserID       string `json:"user_id"`
	Error        string `json:"error"`
	Field        string `json:"field"`
	Want         string `json:"want"`
}

// post sends body to path and returns the status, the headers and the answer.
func (s *service) post(path, body string) (int, http.Header, decision) {
	s.t.Helper()
	r := httptest.NewRequest(http.MethodPost, path, strings.NewReader(body))
	return s.do(r)
}

func (s *service) do(r *http.Request) (int, http.Header, decision) {
	s.t.Helper()
	w := httptest.NewRecorder()
	s.server.Handler().ServeHTTP(w, r)
	var d decision
	dec := json.NewDecoder(w.Body)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil {
		s.t.Fatalf("%s %s: status %d, not an answer: %v", r.Method, r.URL, w.Code, err)
	}
	if got := w.Header().Get("Content-Type"); got != "application/json" {
		s.t.Errorf("%s %s: Content-Type = %q; want application/json", r.Method, r.URL, got)
	}
	return w.Code, w.Header(), d
}

// check posts body and fails unless it was decided, with status 200.
func (s *service) check(body string) decision {
	s.t.Helper()
	status, _, d := s.post("/check", body)
	if status != http.StatusOK || d.Allowed == nil || d.Error != "" {
		s.t.Fatalf("POST %s = %d %+v; want a decision", body, status, d)
	}
	if d.Tokens != d.Remaining {
		s.t.Errorf("POST %s: tokens = %d, remaining = %d; want the same", body, d.Tokens, d.Remaining)
	}
	if *d.Allowed != (d.RetryAfterMS == 0) && !strings.Contains(body, `"cost":0`) {
		s.t.Errorf("POST %s: allowed = %v, retry_after_ms = %d", body, *d.Allowed, d.RetryAfterMS)
	}
	return d
}

func body(rate, capacity, cost any) string {
	return fmt.Sprintf(`{"service":"api","user_id":"u1","rate":%v,"capacity":%v,"cost":%v}`, rate, capacity, cost)
}

func TestHealthz(t *testing.T) {
	s := newService(t, hybrid.Options{})
	for _, method := range []string{http.MethodGet, http.MethodHead} {
		w := httptest.NewRecorder()
		s.server.Handler().ServeHTTP(w, httptest.NewRequest(method, "/healthz", nil))
		if w.Code != 200 || w.Body.String() != `{"status":"ok"}`+"\n" {
			t.Errorf("%s /healthz = %d %s; want 200 ok", method, w.Code, w.Body)
		}
	}
}

// serving is a Server that serves on a port of its own.
type serving struct {
	*service
	url  string
	addr string
	stop context.CancelFunc
	done chan error
}

func serve(t *testing.T, s *service, opts server.Options) *serving {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	v := &serving{service: s, url: "http://" + l.Addr().String(), addr: l.Addr().String(), stop: stop, done: make(chan error, 1)}
	go func() { v.done <- server.New(s.limiter, opts).Serve(ctx, l) }()
	t.Cleanup(func() {
		stop()
		http.DefaultClient.CloseIdleConnections()
	})
	return v
}

func (v *serving) wait(t *testing.T) error {
	t.Helper()
	select {
	case err := <-v.done:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("Serve did not return")
		return nil
	}
}

func TestServe(t *testing.T) {
	v := serve(t, newService(t, hybrid.Options{}), server.Options{})
	resp, err := http.Post(v.url+"/check?status=true", "application/json", strings.NewReader(body(2, 3, 1)))
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || resp.StatusCode != 200 || !strings.Contains(string(b), `"allowed":true`) {
		t.Errorf("POST /check = %d %s, %v; want 200 and an admission", resp.StatusCode, b, err)
	}
	v.stop()
	if err := v.wait(t); err != nil {
		t.Errorf("Serve = %v; want nil", err)
	}
	if conn, err := net.Dial("tcp", v.addr); err == nil {
		conn.Close()
		t.Error("the port is open after Serve has returned")
	}
}

// dial connects to v for the length of the test.
func dial(t *testing.T, v *serving) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", v.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return conn
}

// half sends all of a request but its body and returns when the server has read
// that far: it is in the middle of it then.
func half(t *testing.T, v *serving) net.Conn {
	t.Helper()
	conn := dial(t, v)
	fmt.Fprintf(conn, "POST /check HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", len(body(2, 3, 1)))
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil || !strings.Contains(line, "100") {
		t.Fatalf("the server says %q, %v; want it to ask for the body", line, err)
	}
	return conn
}

func TestServeFinishesWhatHasBegun(t *testing.T) {
	v := serve(t, newService(t, hybrid.Options{}), server.Options{})
	conn := half(t, v)
	v.stop()
	// Nobody else gets in, and Serve waits for the one who is.
	for range 1000 {
		c, err := net.Dial("tcp", v.addr)
		if err != nil {
			break
		}
		c.Close()
		time.Sleep(time.Millisecond)
	}
	select {
	case err := <-v.done:
		t.Fatalf("Serve = %v with a request under way", err)
	case <-time.After(20 * time.Millisecond):
	}
	if _, err := io.WriteString(conn, body(2, 3, 1)); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(skipBlank(conn)), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if b, _ := io.ReadAll(resp.Body); resp.StatusCode != 200 || !strings.Contains(string(b), `"allowed":true`) {
		t.Errorf("the request under way = %d %s; want 200 and an admission", resp.StatusCode, b)
	}
	if err := v.wait(t); err != nil {
		t.Errorf("Serve = %v; want nil", err)
	}
}

// skipBlank drops the empty line that ends "100 Continue".
func skipBlank(r io.Reader) io.Reader {
	b := bufio.NewReader(r)
	if next, err := b.Peek(2); err == nil && string(next) == "\r\n" {
		_, _ = b.Discard(2) // they are there
	}
	return b
}

func TestServeCutsOffWhatHangs(t *testing.T) {
	v := serve(t, newService(t, hybrid.Options{}), server.Options{DrainTimeout: 20 * time.Millisecond})
	half(t, v)
	v.stop()
	if err := v.wait(t); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "cut off") {
		t.Errorf("Serve = %v; want an error that says a request was cut off", err)
	}
}

func TestServeFailsWithItsListener(t *testing.T) {
	s := newService(t, hybrid.Options{})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := server.New(s.limiter, server.Options{}).Serve(t.Context(), l); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Serve on a closed listener = %v; want net.ErrClosed", err)
	}
}

func TestServeEndsSlowClients(t *testing.T) {
	v := serve(t, newService(t, hybrid.Options{}), server.Options{ReadTimeout: 20 * time.Millisecond, IdleTimeout: 20 * time.Millisecond})
	for name, sent := range map[string]string{
		"headers": "POST /check HTTP/1.1\r\nHost: x\r\n",
		"body":    "POST /check HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
		"idle":    "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
		"large":   "GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 32<<10) + "\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			conn := dial(t, v)
			_, _ = io.WriteString(conn, sent) // may be cut off before its end
			// A reset is an end as well; only the deadline is none.
			_, err := io.Copy(io.Discard, conn)
			if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
				t.Error("the connection is still open")
			}
		})
	}
}

package redistest

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/redis/go-redis/v9"
)

func TestStartTLS(t *testing.T) {
	s := StartTLS(t, "--requirepass", "secret")
	opt := Options(s.Addr())
	opt.TLSConfig, opt.Password = s.TLS(), "secret"
	for range 2 {
		c := redis.NewClient(opt)
		if err := c.Ping(t.Context()).Err(); err != nil {
			t.Errorf("Ping() = %v, want nil", err)
		}
		c.Close()
		s.Restart(t)
	}
	if err := s.Client(t).Ping(t.Context()).Err(); !redis.HasErrorPrefix(err, "NOAUTH") {
		t.Errorf("Ping() without the password = %v, want NOAUTH", err)
	}
	opt.TLSConfig = nil
	c := redis.NewClient(opt)
	defer c.Close()
	if err := c.Ping(t.Context()).Err(); err == nil {
		t.Error("Ping() in the clear = nil, want an error")
	}
}

// Without TLS the server says which option it does not know.
func TestStartTLSWithoutTLS(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("needs a shell")
	}
	redis := filepath.Join(t.TempDir(), "redis-server")
	script := "#!/bin/sh\necho '*** FATAL CONFIG FILE ERROR (Redis 7.0.15) ***'\necho \">>> 'tls-port \\\"1\\\"'\"\nexit 1\n"
	if err := os.WriteFile(redis, []byte(script), 0o700); err != nil { //nolint:gosec // it has to be run
		t.Fatal(err)
	}
	t.Setenv("REDIS_SERVER", redis)
	r := &recorder{TB: t}
	r.do(func() { StartTLS(r) })
	wantMessage(t, "skip", r.skips, "built without TLS")
	wantMessage(t, "failure", r.failures, "")
}

func TestPlainServerHasNoTLS(t *testing.T) {
	if got := Start(t).TLS(); got != nil {
		t.Errorf("TLS() = %v, want nil", got)
	}
}

func TestStartValkey(t *testing.T) {
	s := StartValkey(t)
	if got := s.Info(t, "server")["server_name"]; got != "valkey" {
		t.Errorf("server_name = %q, want valkey", got)
	}
}

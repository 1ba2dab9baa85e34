package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
)

// stored is a bucket of 2 tokens per second and burst 3, as of 1,000,000.25 s:
// 1.5 tokens there, 1 leased in that epoch and 1 before it.
const (
	stored   = "1 750000 1000000250000 2000000 1 1 2 1 7 5 9 3 1 500000 500000"
	storedAt = 1_000_000_250_000
)

func inspecting(t *testing.T) *miniredis.Miniredis {
	t.Helper()
	m := miniredis.RunT(t)
	m.SetTime(time.UnixMicro(storedAt + 500_000))
	set(t, m, "hybridlimit:tb1:{api:u1}", stored)
	m.SetTTL("hybridlimit:tb1:{api:u1}", 1500*time.Millisecond)
	t.Setenv(redisEnv, "redis://"+m.Addr())
	return m
}

func set(t *testing.T, m *miniredis.Miniredis, key, value string) {
	t.Helper()
	if err := m.Set(key, value); err != nil {
		t.Fatal(err)
	}
}

func TestInspect(t *testing.T) {
	inspecting(t)
	code, stdout, stderr := execute(t, "inspect", "api:u1")
	// Half a second later the older lease is forgotten, and its room refilled.
	const want = `key           api:u1
redis key     hybridlimit:tb1:{api:u1}
limit         2 tokens/s, burst 3 (version 9)
tokens        2 now, 1.5 when last written, 500ms ago
leased        1 to nodes (0 in this epoch, 1 in the one before)
active nodes  2, who are asked for about 7 tokens per lease period
lease ttl     500ms (epoch 2000001)
expires       in 1.5s, when nobody could tell it from a full bucket
`
	if code != 0 || stdout != want || stderr != "" {
		t.Errorf("exit code %d, %s\n%s\nwant\n%s", code, stderr, stdout, want)
	}
}

func TestInspectJSON(t *testing.T) {
	inspecting(t)
	_, stdout, _ := execute(t, "inspect", "--json", "api:u1")
	var got map[string]any
	if err := json.Unmarshal([]byte(stdout), &got); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]any{
		"key": "api:u1", "redis_key": "hybridlimit:tb1:{api:u1}", "exists": true,
		"rate": 2.0, "burst": 3.0, "version": 9.0, "tokens_now": 2.0, "tokens": 1.5,
		"outstanding": 1.0, "outstanding_this_epoch": 0.0, "outstanding_previous_epoch": 1.0,
		"active_nodes": 2.0, "demand": 7.0, "epoch": 2000001.0, "lease_ttl_ms": 500.0, "expires_in_ms": 1500.0,
		"at": "1970-01-12T13:46:40.25Z", "now": "1970-01-12T13:46:40.75Z",
	} {
		if got[name] != want {
			t.Errorf("%s = %v; want %v", name, got[name], want)
		}
		delete(got, name)
	}
	if len(got) > 0 {
		t.Errorf("there is more: %v", got)
	}
}

func TestInspectOddities(t *testing.T) {
	m := inspecting(t)
	set(t, m, "hybridlimit:tb1:{kept}", stored)
	set(t, m, "hybridlimit:tb1:{bad}", "1 2 3")
	set(t, m, "other:tb1:{a b%7B}", stored)
	for _, c := range []struct {
		args           []string
		code           int
		stdout, stderr string
	}{
		{[]string{"nobody"}, 0, "state         none", ""},
		{[]string{"nobody", "--json"}, 0, `"exists":false}`, ""},
		{[]string{"kept"}, 0, "expires       never", ""},
		{[]string{"kept", "--json"}, 0, `"expires_in_ms":null`, ""},
		{[]string{"a b{", "--prefix", "other:"}, 0, "redis key     other:tb1:{a b%7B}", ""},
		{[]string{"line\n\x1b[2J"}, 0, `key           "line\n\x1b[2J"`, ""},
		{[]string{"bad"}, 1, "", "bad state"},
		{[]string{"bad"}, 1, "", "the next request replaces it"},
		{[]string{""}, 1, "", "key is empty"},
	} {
		code, stdout, stderr := execute(t, append([]string{"inspect"}, c.args...)...)
		if code != c.code || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
			t.Errorf("inspect %q: exit code %d; want %d with %q and %q\nstdout: %s\nstderr: %s",
				c.args, code, c.code, c.stdout, c.stderr, stdout, stderr)
		}
	}
}

func TestInspectWindows(t *testing.T) {
	m := inspecting(t)
	const head = "1 1000000250000 2000000 2000000 5 0 1 0 7 0 9 3 1 500000" // 3 in 1.5 s
	set(t, m, "hybridlimit:fw1:{k}", strings.Replace(head, " 5 0 ", " 1 0 ", 1)+" 1000001000000 2 0")
	set(t, m, "hybridlimit:sl1:{k}", strings.Replace(head, " 5 0 ", " 0 0 ", 1)+" 1500000 0 1200000 1 100000 1")
	set(t, m, "hybridlimit:sc1:{k}", strings.Replace(head, " 5 0 ", " 0 0 ", 1)+" 1000001000000 1 2")
	for name, want := range map[string][]string{
		"fixed-window":    {"window of 1.5s", "2 in the window that ends in 250ms, and a debt of 0", "tokens        1 now, 1 when"},
		"sliding-log":     {"1 at 1 instants", "tokens        2 now, 1 when"},
		"sliding-counter": {"1 in the window that ends in 250ms, 2 in the one before", "1.666667 now, 1 when"},
		"token-bucket":    {"none"},
	} {
		code, stdout, stderr := execute(t, "inspect", "k", "--algorithm", name)
		for _, part := range want {
			if code != 0 || !strings.Contains(stdout, part) {
				t.Errorf("%s: exit code %d, %s\n%s\nwant %q", name, code, stderr, stdout, part)
			}
		}
		code, stdout, _ = execute(t, "inspect", "k", "--json", "--algorithm", name)
		if code != 0 || !json.Valid([]byte(stdout)) || name != "token-bucket" && !strings.Contains(stdout, `"algorithm":"`+name+`"`) {
			t.Errorf("%s: exit code %d, %s", name, code, stdout)
		}
	}
	if code, _, stderr := execute(t, "inspect", "k", "--algorithm", "guess"); code != 2 || !strings.Contains(stderr, "sliding-log") {
		t.Errorf("exit code %d, %s; want 2 and the names", code, stderr)
	}
}

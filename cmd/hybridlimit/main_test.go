package main

import (
	"bytes"
	"encoding/json"
	"os"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9/logging"
)

func TestMain(m *testing.M) {
	logging.Disable() // as main does
	os.Exit(m.Run())
}

// execute runs the program's command line.
func execute(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(t.Context(), args, &out, &err)
	return code, out.String(), err.String()
}

func TestRun(t *testing.T) {
	t.Setenv(redisEnv, "")
	for _, c := range []struct {
		args   string
		code   int
		stdout string // a part of it
		stderr string // a part of it; "" is none at all
	}{
		{"", 0, "serve", ""},
		{"--help", 0, "inspect", ""},
		{"serve --help", 0, "--on-failure degrade|allow|deny", ""},
		{"help inspect", 0, "service:user_id", ""},
		{"version", 0, "hybridlimit ", ""},

		{"bogus", 2, "", `hybridlimit: unknown command "bogus"`},
		{"--bogus", 2, "", "hybridlimit: unknown flag: --bogus"},
		{"version extra", 2, "", "Run 'hybridlimit version --help' for usage."},
		{"serve --listen", 2, "", "flag needs an argument"},
		{"serve extra", 2, "", "takes no arguments"},
		{"serve --on-failure maybe", 2, "", "want degrade, allow, deny"},
		{"serve --start half", 2, "", "want one, empty, full"},
		{"serve --split random", 2, "", "want blend, equal"},
		{"serve --min-nodes many", 2, "", "invalid argument"},
		{"serve --min-nodes 0", 2, "", "--min-nodes = 0: want 1 to 1048576"},
		{"serve --heartbeat 0s", 2, "", "--heartbeat = 0: want 100ms to 1m"},
		{"serve --listen 127.0.0.1:0 --min-nodes -1", 2, "", "--min-nodes = -1: want 1 to 1048576"},
		{"serve --listen 127.0.0.1:0 --heartbeat 1ms", 2, "", "Heartbeat = 1ms: want 100ms to 1m"},
		{"serve --lease-period 250", 2, "", "missing unit"},
		{"serve --listen 127.0.0.1", 2, "", "want HOST:PORT"},
		{"serve --lease-period 0s --redis-timeout 0s", 2, "", "--redis-timeout = 0: want 1ms to 1m"},
		{"serve --listen 127.0.0.1:0 --lease-period 1ms", 2, "", "want 2ms to 1h"},
		{"serve --listen 127.0.0.1:0 --redis-timeout 2m", 2, "", "want 1ms to 1m"},
		{"serve --listen 127.0.0.1:0 --redis localhost:6379", 2, "", "--redis is not a URL of Redis"},
		{"demo --for 1s --redis redis://127.0.0.1:1", 1, "", "hybridlimit: redis at 127.0.0.1:1: "},
		{"serve --listen 127.0.0.1:99999", 1, "", "hybridlimit: --listen: "},
		{"inspect", 2, "", "want one argument, KEY"},
		{"demo --for 0s", 2, "", "--for = 0s: want 100ms to 1h"},
		{"demo --outage --for 2s", 2, "", "--for = 2s: want 3s to 1h"},
		{"demo --outage --for 2h", 2, "", "--for = 2h0m0s: want 3s to 1h"},
		{"demo --outage=maybe", 2, "", "invalid argument"},
		{"demo --outage extra", 2, "", "takes no arguments"},
		{"demo --outage --redis localhost:6379", 2, "", "--redis is not a URL of Redis"},
		{"demo --outage --redis redis://127.0.0.1:1", 1, "", "hybridlimit: redis at 127.0.0.1:1: "},
		{"replay f", 2, "", "--limit is required"},
		{"replay f --limit 10/m", 2, "", "--burst is required"},
		{"replay f --limit 10/m --burst 20 --nodes 0", 2, "", "--nodes = 0: want 1 to 1000"},
		{"replay f --limit 10/m --burst 20 --speed NaN", 2, "", "--speed = NaN"},
		{"replay f --limit 10/m --burst 20 --spread zigzag", 2, "", "want round-robin, hash or random"},
		{"replay /nowhere/at/all --limit 10/m --burst 20", 1, "", "no such file"},
		{"inspect k", 2, "", "hybridlimit: --redis is required"},
		{"inspect k --redis redis://127.0.0.1:1", 1, "", "hybridlimit: redis at 127.0.0.1:1: "},
	} {
		t.Run(c.args, func(t *testing.T) {
			code, stdout, stderr := execute(t, strings.Fields(c.args)...)
			if code != c.code || !strings.Contains(stdout, c.stdout) || !strings.Contains(stderr, c.stderr) {
				t.Errorf("exit code %d; want %d with %q and %q\nstdout: %s\nstderr: %s", code, c.code, c.stdout, c.stderr, stdout, stderr)
			}
			if c.stderr == "" && stderr != "" || c.stdout == "" && stdout != "" {
				t.Errorf("stdout: %s\nstderr: %s", stdout, stderr)
			}
			if c.code == 1 && strings.Contains(stderr, "usage") {
				t.Errorf("a usage hint for what is no mistake in usage: %s", stderr)
			}
		})
	}
}

func TestHelpDoesNotShowThePassword(t *testing.T) {
	t.Setenv(redisEnv, "redis://:hunter2@localhost:6379")
	for _, cmd := range []string{"serve", "inspect"} {
		if _, stdout, _ := execute(t, cmd, "--help"); strings.Contains(stdout, "hunter2") {
			t.Errorf("%s --help shows what is in %s", cmd, redisEnv)
		}
	}
}

func TestVersion(t *testing.T) {
	info := &debug.BuildInfo{Main: debug.Module{Version: "v1.2.3"}, Settings: []debug.BuildSetting{
		{Key: "vcs", Value: "git"},
		{Key: "vcs.revision", Value: "0123456789abcdef"},
		{Key: "vcs.time", Value: "2026-11-30T08:00:00Z"},
		{Key: "vcs.modified", Value: "true"},
	}}
	v := versionOf(info)
	if want := "hybridlimit v1.2.3 revision 0123456789ab modified go"; !strings.HasPrefix(v.String(), want) {
		t.Errorf("versionOf = %q; want %q and so on", v, want)
	}
	if v.Revision != "0123456789abcdef" || v.Time != "2026-11-30T08:00:00Z" || !v.Modified {
		t.Errorf("versionOf = %+v; want all of %+v", v, info.Settings)
	}
	if got := versionOf(nil).String(); !strings.HasPrefix(got, "hybridlimit (devel) go") {
		t.Errorf("versionOf(nil) = %q; want (devel)", got)
	}
	_, stdout, _ := execute(t, "version", "--json")
	var got map[string]any
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || got["version"] == "" || !strings.HasPrefix(got["go"].(string), "go") {
		t.Errorf("version --json = %s, %v; want version and go", stdout, err)
	}
}

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/bench/soak"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
)

// quick are the flags of a run that is no burden.
const quick = "soak --for 2s --nodes 2 --keys 50 --demand 500"

func TestSoak(t *testing.T) {
	code, stdout, stderr := execute(t, strings.Fields(quick+" --every 500ms")...)
	if code != 0 || stderr != "" {
		t.Fatalf("exit code %d, %s; want 0\n%s", code, stderr, stdout)
	}
	t.Log(stdout)
	for _, want := range []string{
		"2 nodes on Redis (embedded), 50 keys, 500/s burst 500 each, 500 requests/s for 2s, seed 1\n", " elapsed ", "\nall held\n",
		"\ndecided by ", "\nfaults  ", " cut 1", "\nbound of a level", "  burst + rate·d ",
		"\ncheck level ", "\ncheck latency ", "\ncheck errors ", "\ncheck goroutines ", "\ncheck heap ", "\ncheck ledger ", "\ncheck healed ",
	} {
		if !strings.Contains(stdout, want) {
			t.Errorf("no %q in\n%s", want, stdout)
		}
	}
	head, body, _ := strings.Cut(stdout, soakHeader+"\n")
	lines, _, _ := strings.Cut(body, "\n\n")
	if n := strings.Count(lines, "\n"); n < 2 || n > 4 {
		t.Errorf("%d lines of intervals, want about 4: %s\n%s", n, head, lines)
	}
}

func TestSoakJSON(t *testing.T) {
	code, stdout, stderr := execute(t, strings.Fields(quick+" --seed 3 --json")...)
	if code != 0 || !strings.Contains(stderr, soakHeader) {
		t.Fatalf("exit code %d, %s; want 0, and the lines", code, stderr)
	}
	var r map[string]any
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	for _, field := range []string{
		"redis", "seconds", "seed", "nodes", "keys", "limit", "burst", "redis_timeout_ms", "decisions", "admitted", "refused",
		"by_source", "gave_up", "to_closed", "failed", "new_keys", "faults", "p50_us", "p99_us", "max_us", "machine_late_ms", "slowest",
		"hot", "closest", "bound", "heap_first", "heap_last", "heap_most", "heap_end", "intervals", "goroutines_before",
		"goroutines_peak", "goroutines_after", "nodes_closed", "unclean_closes", "unbalanced", "owed", "last_stretch_s",
		"last_stretch_decisions", "last_stretch_by_redis", "checks", "held",
	} {
		if _, ok := r[field]; !ok {
			t.Errorf("no %q in %s", field, stdout)
		}
	}
	if r["redis"] != "embedded" || r["held"] != true || r["seed"] != 3.0 || r["redis_timeout_ms"] != 100.0 {
		t.Errorf("redis %v, held %v, seed %v, timeout %v; want embedded, true, 3, 100", r["redis"], r["held"], r["seed"], r["redis_timeout_ms"])
	}
}

func TestSoakOnARealRedis(t *testing.T) {
	server := redistest.Start(t)
	rdb := server.Client(t)
	if err := rdb.Set(t.Context(), "mine", "precious", 0).Err(); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := execute(t, strings.Fields(quick+" --redis redis://"+server.Addr()+"/0")...)
	if code != 0 || !strings.Contains(stdout, "on Redis ("+server.Addr()+")") || strings.Contains(stdout, "flushall") {
		t.Errorf("exit code %d, %s; want 0, and no FLUSHALL\n%s", code, stderr, stdout)
	}
	if got, err := rdb.Get(t.Context(), "mine").Result(); got != "precious" || err != nil {
		t.Errorf("what was in that Redis = %q, %v; want it untouched", got, err)
	}
}

func TestSoakFlushesWhatItMay(t *testing.T) {
	server := redistest.Start(t)
	rdb := server.Client(t)
	for _, c := range []struct {
		flags soakFlags
		may   bool
	}{
		{soakFlags{}, true},
		{soakFlags{url: "redis://" + server.Addr()}, false},
		{soakFlags{url: "redis://" + server.Addr(), allowFlush: true}, true},
	} {
		if err := rdb.Set(t.Context(), "k", "v", 0).Err(); err != nil {
			t.Fatal(err)
		}
		_, closeRedis, err := c.flags.open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if got := c.flags.opts.Flush != nil; got != c.may {
			t.Errorf("redis %q, allow-flush %v: may flush = %v, want %v", c.flags.url, c.flags.allowFlush, got, c.may)
		}
		if c.flags.allowFlush {
			if err := c.flags.opts.Flush(t.Context()); err != nil {
				t.Error(err)
			}
			if n, err := rdb.DBSize(t.Context()).Result(); n != 0 || err != nil {
				t.Errorf("%d keys, %v after FLUSHALL; want none", n, err)
			}
		}
		closeRedis()
	}
}

// Whoever stops it has a summary of what there is.
func TestSoakInterrupted(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
	defer cancel()
	var stdout, stderr bytes.Buffer
	begin := time.Now()
	code := run(ctx, []string{"soak", "--for", "1h", "--keys", "50", "--demand", "500"}, &stdout, &stderr)
	if took := time.Since(begin); code != 0 || stderr.Len() > 0 || took > 20*time.Second {
		t.Fatalf("exit code %d, %s, after %v; want 0, and soon", code, stderr.String(), took)
	}
	if out := stdout.String(); !strings.Contains(out, "\nall held\n") || !strings.Contains(out, "check healed      skipped: it ended in a fault or just after") {
		t.Errorf("want a summary:\n%s", out)
	}
}

func TestSoakRefusesBadFlags(t *testing.T) {
	for args, want := range map[string]string{
		"--for 1s":                       "--for = 1s: want 2s to 24h",
		"--for 25h":                      "--for = 25h0m0s: want 2s to 24h",
		"--for 10":                       "missing unit",
		"--every 0s":                     "--every = 0s: want 100ms to 1h",
		"--every 2h":                     "--every = 2h0m0s: want 100ms to 1h",
		"--nodes 0":                      "--nodes = 0: want 1 to 100",
		"--nodes 101":                    "--nodes = 101: want 1 to 100",
		"--keys 0":                       "--keys = 0: want 1 to 100000",
		"--keys 100001":                  "--keys = 100001: want 1 to 100000",
		"--rate 0":                       "--rate = 0: want more than 0 tokens per second",
		"--rate NaN":                     "--rate = NaN: want more than 0 tokens per second",
		"--rate 1e13":                    "--rate = 1e+13, --burst = 500: lease: Limit.Rate = 1e+13: want 0 to 1e12",
		"--burst 0":                      "--burst = 0: want at least 1 token",
		"--burst 1.5":                    "invalid argument",
		"--demand 9":                     "--demand = 9: want 10 to 1e6 requests per second",
		"--demand NaN":                   "--demand = NaN: want 10 to 1e6",
		"--seed 0":                       "--seed = 0: want at least 1",
		"--seed -1":                      "invalid argument",
		"--allow-flush":                  "--allow-flush = true: want --redis with it",
		"--redis localhost":              "--redis is not a URL of Redis",
		"--nodes 0 --keys 0 --demand -1": "--nodes = 0: want 1 to 100\n--keys = 0: want 1 to 100000\n--demand = -1: want",
		"extra":                          "takes no arguments",
	} {
		code, stdout, stderr := execute(t, append([]string{"soak"}, strings.Fields(args)...)...)
		if code != exitUsage || !strings.Contains(stderr, want) || stdout != "" {
			t.Errorf("soak %s: exit code %d, %q; want %d and %q", args, code, stderr, exitUsage, want)
		}
	}
	code, _, stderr := execute(t, "soak", "--redis", "redis://127.0.0.1:1")
	if code != exitError || !strings.Contains(stderr, "hybridlimit: redis at 127.0.0.1:1: ") {
		t.Errorf("soak without its Redis: exit code %d, %q", code, stderr)
	}
}

func TestTellSoakFails(t *testing.T) {
	r := soakReport{"embedded", soak.Report{Formula: soak.Bound, Checks: []soak.Check{
		{Name: "level", Verdict: "failed", Detail: "k came closest: 527.0 of 526.0 at 5.0 s"},
		{Name: "errors", Verdict: "held", Detail: "0"},
		{Name: "heap", Verdict: "failed", Detail: "9.0 MiB"},
	}}}
	for _, asJSON := range []bool{false, true} {
		var b bytes.Buffer
		err := tellSoak(&b, r, asJSON)
		if err == nil || err.Error() != "soak failed: level, heap" {
			t.Errorf("tellSoak = %v, want the checks that failed", err)
		}
		if !asJSON && (!strings.Contains(b.String(), "\nFAILED: level, heap\n") || !strings.Contains(b.String(), "check level   failed: k came closest: 527.0 of 526.0")) {
			t.Errorf("want what failed, and why:\n%s", b.String())
		}
		if asJSON && !json.Valid(b.Bytes()) {
			t.Errorf("not JSON: %s", b.String())
		}
	}
	r.Held = true
	if err := tellSoak(&bytes.Buffer{}, r, false); err != nil {
		t.Errorf("tellSoak = %v of what held", err)
	}
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0: "0s", 1234: "1.23µs", 12345: "12µs", 1234567: "1.2ms", 12345678: "12ms", 2 * time.Second: "2s",
	} {
		if got := short(d); got != want {
			t.Errorf("short(%s) = %q, want %q", fmt.Sprint(int64(d)), got, want)
		}
	}
}

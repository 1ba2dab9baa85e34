package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/bench"
	"github.com/hybridlimit/hybridlimit/internal/redistest"
)

func TestDemoOutageJSON(t *testing.T) {
	code, stdout, stderr := execute(t, "demo", "--outage", "--for", "3s", "--json")
	if code != 0 {
		t.Fatalf("exit code %d, %s; want 0", code, stderr)
	}
	var r map[string]any
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	t.Log(stdout)
	for _, field := range []string{
		"redis", "fault", "seconds", "limit", "burst", "nodes", "redis_timeout_ms", "nodes_believed", "phases", "held",
		"down_at", "up_at", "first_local_ms", "first_store_ms", "trips", "degraded_seconds", "admitted_in_outage",
		"debt_charged", "debt_forgiven", "debt_owed", "unseen", "debts", "late",
	} {
		if _, ok := r[field]; !ok {
			t.Errorf("no %q in %s", field, stdout)
		}
	}
	if r["redis"] != "embedded" || !strings.Contains(fmt.Sprint(r["fault"]), "with its data") {
		t.Errorf("redis %v, fault %v; want embedded, and that the data was kept", r["redis"], r["fault"])
	}
	phases, _ := r["phases"].([]any)
	if len(phases) != 3 {
		t.Fatalf("%d phases, want 3: %s", len(phases), stdout)
	}
	for i, name := range []string{"healthy", "outage", "recovered"} {
		ph := phases[i].(map[string]any)
		for _, field := range []string{"seconds", "decisions", "admitted", "ideal", "max_level", "bound", "p50_us", "p99_us", "max_us"} {
			if v, ok := ph[field].(float64); !ok || v <= 0 {
				t.Errorf("%s: %q = %v, want a positive number", name, field, ph[field])
			}
		}
		by, _ := ph["by_source"].(map[string]any)
		if ph["phase"] != name || ph["max_level"].(float64) > ph["bound"].(float64) || len(by) == 0 || by["policy"] != nil {
			t.Errorf("phase %d = %v, want %s within its bound, and nothing decided by policy", i, ph, name)
		}
	}
}

func TestDemoOutageWithARealServer(t *testing.T) {
	s := redistest.Start(t)
	runID := s.Info(t, "server")["run_id"]
	code, stdout, stderr := execute(t, "demo", "--outage", "--for", "3s", "--redis", s.URL())
	if code != 0 {
		t.Fatalf("exit code %d, %s; want 0", code, stderr)
	}
	t.Log("\n" + stdout)
	for _, part := range []string{
		"Redis (" + s.Addr() + ") was cut off from the nodes; the server itself went on",
		"healthy", "outage", "recovered", "decided by local", "Redis goes away", "Redis is back",
		"first decision by a node's share", "bounds: burst 500", "the limit held",
	} {
		if !strings.Contains(stdout, part) {
			t.Errorf("no %q in\n%s", part, stdout)
		}
	}
	if got := s.Info(t, "server")["run_id"]; got != runID {
		t.Errorf("run_id = %s, want %s: the server is not the demo's to restart", got, runID)
	}
}

func TestPrintOutage(t *testing.T) {
	r := outageReport{"r", "was cut off", bench.OutageReport{
		Seconds: 3, Limit: "500/s burst 500", Burst: 500, Nodes: 3, NodesBelieved: 2, Held: true,
		DownAt: 1, UpAt: 2, FirstLocal: 7.25, FirstStore: -1, AdmittedInOutage: 60, DebtCharged: 30, DebtForgiven: 20, DebtOwed: 10,
		Unseen: 61, Debts: 30, Late: 4,
		Phases: []bench.Phase{
			{Phase: "healthy", Decisions: 10, Admitted: 9, Ideal: 8, MaxLevel: 499.96, Bound: 500, P50: 0.5, P99: 20, Max: 300, BySource: map[string]int{"store": 2, "lease": 8}},
			{Phase: "outage", MaxLevel: 520, Bound: 561},
			{Phase: "recovered", MaxLevel: 530, Bound: 594},
		},
	}}
	tell := func(wantErr error, parts ...string) {
		t.Helper()
		var b bytes.Buffer
		if err := tellOutage(&b, r, false); !errors.Is(err, wantErr) {
			t.Errorf("tellOutage = %v, want %v", err, wantErr)
		}
		for _, part := range parts {
			if !strings.Contains(b.String(), part) {
				t.Errorf("no %q in\n%s", part, b.String())
			}
		}
		if strings.Contains(b.String(), "first decision by Redis") {
			t.Errorf("a first decision by Redis, which there was not:\n%s", b.String())
		}
	}
	tell(nil,
		"Redis (r) was cut off\n",
		"    healthy         10         9      8       500.0  500.0  0.5 µs  20 µs   300 µs\n",
		"healthy    decided by lease 8, store 2\n",
		"   1.000 s  Redis goes away; the 3 nodes believe to be 2\n",
		"   1.007 s  7.2 ms later: the first decision by a node's share of the limit\n",
		"   2.000 s  Redis is back\n",
		"   3.000 s  the end; without Redis 60 tokens were admitted, of which it was charged with 30\n",
		"            and need not be with 20: its buckets would have run over\n",
		"            10 could not be charged\n",
		"bounds: burst 500; +61 without Redis, for what a node had not seen others take;\n+30 with it again, for what it was not charged with yet, and +4 for what shares admitted later",
		"\nevery level kept to its bound: the limit held\n")
	r.Held = false
	tell(errBroken, "\nTHE LIMIT WAS BROKEN: a level passed its bound\n")
	r.Held, r.Phases = true, r.Phases[:1]
	var b bytes.Buffer
	if err := tellOutage(&b, r, false); err != nil || strings.Contains(b.String(), "Redis") {
		t.Errorf("stopped before the outage: %v, want nothing about one:\n%s", err, b.String())
	}
	b.Reset()
	r.Held = false
	if err := tellOutage(&b, r, true); !errors.Is(err, errBroken) || !json.Valid(b.Bytes()) {
		t.Errorf("tellOutage as JSON = %v, %s; want %v and JSON", err, b.String(), errBroken)
	}
}

// Whoever stops the demo has a report of what there is.
func TestDemoOutageStoppedEarly(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
	defer cancel()
	var stdout, stderr bytes.Buffer
	if code := run(ctx, []string{"demo", "--outage", "--for", "3s"}, &stdout, &stderr); code != 0 {
		t.Fatalf("exit code %d, %s; want 0", code, stderr.String())
	}
	if out := stdout.String(); !strings.Contains(out, "the limit held") || strings.Contains(out, "recovered") {
		t.Errorf("want a report without the phase that did not come:\n%s", out)
	}
}

func TestEmbeddedPatient(t *testing.T) {
	p, err := embeddedPatient()
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	ping := func() error { return p.clients[0].Ping(t.Context()).Err() }
	if err := p.clients[0].Set(t.Context(), "k", "v", 0).Err(); err != nil {
		t.Fatal(err)
	}
	if err := p.kill(); err != nil {
		t.Fatal(err)
	}
	// The connection in the pool may be found broken first.
	if err := errors.Join(ping(), ping()); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("Ping of a stopped server = %v, want connection refused", err)
	}
	if err := p.restart(); err != nil {
		t.Fatal(err)
	}
	if got, err := p.clients[1].Get(t.Context(), "k").Result(); got != "v" || err != nil {
		t.Errorf("Get(k) after the restart = %q, %v; want v: the data is kept", got, err)
	}
}

// The port may be taken while the server is down.
func TestEmbeddedPatientWaitsForItsPort(t *testing.T) {
	p, err := embeddedPatient()
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	addr := addressOf(p.clients[0])
	if err := p.kill(); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Skip(err) // somebody else has it
	}
	time.AfterFunc(3*restartPause, func() { l.Close() })
	if err := p.restart(); err != nil {
		t.Errorf("restart = %v, want it to wait for its port", err)
	}
}

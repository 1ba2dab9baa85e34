package main

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/hybrid"
)

// lines makes a logger whose lines have no time, and returns what it has written
// since it was last asked.
func lines() (*slog.Logger, func() string) {
	var b bytes.Buffer
	h := slog.NewTextHandler(&b, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})
	return slog.New(h), func() string {
		defer b.Reset()
		return b.String()
	}
}

func TestWatchLogsTransitions(t *testing.T) {
	const (
		down = `level=WARN msg="Redis does not answer: limiting with this node's share" nodes=3 on_failure=degrade start=one split=blend` + "\n"
		up   = `level=INFO msg="Redis answers again" degraded_seconds=`
	)
	log, read := lines()
	w := &watch{flags: &serveFlags{}, log: log}
	for _, step := range []struct {
		name string
		now  fallback.Stats
		want string
	}{
		{"nothing yet", fallback.Stats{Nodes: 3}, ""},
		{"it fails", fallback.Stats{Nodes: 3, Degraded: true, DegradedFor: 300 * time.Millisecond, Admitted: 5, Owed: 5}, down},
		{"still", fallback.Stats{Nodes: 3, Degraded: true, DegradedFor: 1300 * time.Millisecond, Trips: 1, Admitted: 25, Owed: 25}, ""},
		{
			"it is back",
			fallback.Stats{Nodes: 3, DegradedFor: 1700 * time.Millisecond, Trips: 1, Admitted: 33, Charged: 20, Forgiven: 10, Owed: 3},
			up + "1.7 admitted=33 debt_charged=20 debt_forgiven=10 debt_owed=3\n",
		},
		{"the rest is charged", fallback.Stats{Nodes: 3, DegradedFor: 1700 * time.Millisecond, Trips: 1, Admitted: 33, Charged: 23, Forgiven: 10}, ""},
		{
			"a dip between two looks",
			fallback.Stats{Nodes: 3, DegradedFor: 1740*time.Millisecond + 400*time.Microsecond, Trips: 1, Admitted: 40, Charged: 30, Forgiven: 10},
			down + up + "0.04 admitted=7 debt_charged=7 debt_forgiven=0 debt_owed=0\n",
		},
		{
			"one too short for the clock",
			fallback.Stats{Nodes: 3, DegradedFor: 1740*time.Millisecond + 400*time.Microsecond, Trips: 2, Admitted: 40, Charged: 30, Forgiven: 10},
			down + up + "0 admitted=0 debt_charged=0 debt_forgiven=0 debt_owed=0\n",
		},
		{"quiet", fallback.Stats{Nodes: 3, DegradedFor: 1740*time.Millisecond + 400*time.Microsecond, Trips: 2, Admitted: 40, Charged: 30, Forgiven: 10}, ""},
	} {
		w.look(step.now)
		if got := read(); got != step.want {
			t.Errorf("%s: logged\n%swant\n%s", step.name, got, step.want)
		}
	}
}

func TestWatchTellsWhatItMeans(t *testing.T) {
	for _, c := range []struct {
		flags serveFlags
		want  string
	}{
		{serveFlags{policy: hybrid.Deny}, `"Redis does not answer: denying requests" nodes=2 on_failure=deny servers_down=1 servers=3` + "\n"},
		{serveFlags{policy: hybrid.Allow}, `"Redis does not answer: admitting requests without limit" nodes=2 on_failure=allow servers_down=1 servers=3` + "\n"},
		{
			serveFlags{opts: hybrid.Options{Start: hybrid.StartEmpty, Split: hybrid.SplitEqual}},
			`"Redis does not answer: limiting with this node's share" nodes=2 on_failure=degrade servers_down=1 servers=3 start=empty split=equal` + "\n",
		},
	} {
		log, read := lines()
		w := &watch{flags: &c.flags, log: log}
		w.look(fallback.Stats{Nodes: 2, Degraded: true, Shards: 3, Down: 1})
		if got := read(); !strings.HasSuffix(got, c.want) {
			t.Errorf("logged %swant %s", got, c.want)
		}
	}
}

func TestChoice(t *testing.T) {
	var split hybrid.Split
	f := splitFlag(&split)
	if err := f.Set("equal"); err != nil || split != hybrid.SplitEqual || f.String() != "equal" {
		t.Errorf("Set(equal) = %v, value %v %s; want equal", err, split, f)
	}
	if err := f.Set("third"); err == nil || split != hybrid.SplitEqual {
		t.Errorf("Set(third) = %v, value %v; want an error and no change", err, split)
	}
	for _, c := range []struct{ got, want string }{
		{policyFlag(new(hybrid.Policy)).Type(), "degrade|allow|deny"},
		{startFlag(new(hybrid.Start)).Type(), "one|empty|full"},
		{f.Type(), "blend|equal"},
	} {
		if c.got != c.want {
			t.Errorf("Type() = %s, want %s", c.got, c.want)
		}
	}
	for policy := hybrid.Degrade; policy <= hybrid.Deny; policy++ {
		if got, want := policyFlag(&policy).String(), policy.String(); got != want {
			t.Errorf("flag of %v is called %s, want %s", policy, got, want)
		}
	}
}

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/bench"
)

const (
	// restartTries and restartPause are for a port that somebody else took while
	// the server was down.
	restartTries = 20
	restartPause = 50 * time.Millisecond
	// embeddedTimeout is how long decisions wait for the Redis in this process. It
	// shares the processors with the nodes and the traffic, and takes longer than
	// the default of 30 ms now and then when others want these too.
	embeddedTimeout = 100 * time.Millisecond
)

// errBroken makes the exit status tell that a bound was broken.
var errBroken = errors.New("a level passed its bound")

// outageReport is the report with what was done to Redis.
type outageReport struct {
	// Redis is "embedded" or where the server is, Fault what was done to it.
	Redis string `json:"redis"`
	Fault string `json:"fault"`
	bench.OutageReport
}

// patient is a Redis that can be taken away from its clients.
type patient struct {
	name          string
	fault         string // what kill does, as in "Redis …"
	clients       []redis.UniversalClient
	timeout       time.Duration // 0: the default
	kill, restart func() error
	close         func()
}

func runOutage(ctx context.Context, long time.Duration, redisURL string, asJSON bool, stdout, stderr io.Writer) error {
	p, err := newPatient(ctx, redisURL)
	if err != nil {
		return err
	}
	defer p.close()
	bar := newBar(stderr, long.Milliseconds(), "3 nodes, 3 keys, one outage")
	report, err := bench.Outage(ctx, bench.OutageOptions{
		Clients: p.clients, Kill: p.kill, Restart: p.restart, For: long, RedisTimeout: p.timeout,
		Progress: func(elapsed time.Duration) { bar.Set(int(min(elapsed, long).Milliseconds())) },
	})
	bar.Finish()
	if err != nil {
		return err
	}
	return tellOutage(stdout, outageReport{p.name, p.fault, report}, asJSON)
}

// tellOutage prints the report. It returns errBroken if a bound was broken.
func tellOutage(w io.Writer, r outageReport, asJSON bool) (err error) {
	if asJSON {
		err = json.NewEncoder(w).Encode(r)
	} else {
		err = printOutage(w, r)
	}
	if err == nil && !r.Held {
		return errBroken
	}
	return err
}

// newPatient returns the Redis at redisURL, which goes on while its clients are
// cut off, or with an empty one a server in this process, which is stopped.
func newPatient(ctx context.Context, redisURL string) (*patient, error) {
	if redisURL == "" {
		return embeddedPatient()
	}
	// Whether it is there should be known before three nodes try.
	rdb, _, closeRedis, err := openRedis(ctx, redisURL)
	if err != nil {
		return nil, err
	}
	var cut bench.Cut
	p := &patient{
		name: redisName(rdb, false), fault: "was cut off from the nodes; the server itself went on",
		kill: cut.Down, restart: cut.Up,
	}
	closeRedis()
	for range bench.Nodes {
		node, _, err := newClient(redisURL)
		if err != nil {
			return nil, err
		}
		cut.Attach(node)
		p.clients = append(p.clients, node)
	}
	p.close = p.closeClients
	return p, nil
}

// embeddedPatient starts a Redis on a port of this machine: one that is reached
// through memory could not refuse a connection.
func embeddedPatient() (*patient, error) {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	if err := m.Start(); err != nil {
		return nil, err
	}
	addr := m.Addr()
	p := &patient{
		name: "embedded", timeout: embeddedTimeout, fault: "was stopped, and started again on its port with its data",
		kill:    func() error { m.Close(); return nil },
		restart: func() error { return restart(m) },
	}
	for range bench.Nodes {
		p.clients = append(p.clients, redis.NewClient(withRules(&redis.Options{Addr: addr})))
	}
	p.close = func() { p.closeClients(); m.Close() }
	return p, nil
}

func restart(m *miniredis.Miniredis) (err error) {
	for range restartTries {
		if err = m.Restart(); err == nil {
			return nil
		}
		time.Sleep(restartPause)
	}
	return err
}

func (p *patient) closeClients() {
	for _, c := range p.clients {
		_ = c.Close()
	}
}

func printOutage(w io.Writer, r outageReport) error {
	fmt.Fprintf(w, "three keys, %s each, %d nodes, over %.1f s\n", r.Limit, r.Nodes, r.Seconds)
	if len(r.Phases) > 1 {
		fmt.Fprintf(w, "Redis (%s) %s\n", r.Redis, r.Fault)
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tdecisions\tadmitted\tideal\tpeak level\tbound\tp50\tp99\tlongest\t")
	for _, ph := range r.Phases {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%.1f\t%.1f\t%.1f µs\t%.0f µs\t%.0f µs\t\n",
			ph.Phase, ph.Decisions, ph.Admitted, ph.Ideal, ph.MaxLevel, ph.Bound, ph.P50, ph.P99, ph.Max)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	var b strings.Builder
	b.WriteByte('\n')
	for _, ph := range r.Phases {
		fmt.Fprintf(&b, "%-10s decided by %s\n", ph.Phase, sources(ph.BySource))
	}
	writeStory(&b, r.OutageReport)
	verdict := "every level kept to its bound: the limit held"
	if !r.Held {
		verdict = "THE LIMIT WAS BROKEN: a level passed its bound"
	}
	fmt.Fprintf(&b, "\n%s\n", verdict)
	_, err := io.WriteString(w, b.String())
	return err
}

// writeStory tells what happened when.
func writeStory(b *strings.Builder, r bench.OutageReport) {
	if len(r.Phases) < 2 {
		return // stopped before Redis went away
	}
	line := func(at float64, format string, args ...any) {
		fmt.Fprintf(b, "%8.3f s  %s\n", at, fmt.Sprintf(format, args...))
	}
	b.WriteByte('\n')
	line(r.DownAt, "Redis goes away; the %d nodes believe to be %d", r.Nodes, r.NodesBelieved)
	if r.FirstLocal >= 0 {
		line(r.DownAt+r.FirstLocal/1e3, "%.1f ms later: the first decision by a node's share of the limit", r.FirstLocal)
	}
	if len(r.Phases) == 3 {
		line(r.UpAt, "Redis is back")
	}
	if r.FirstStore >= 0 {
		line(r.UpAt+r.FirstStore/1e3, "%.1f ms later: the first decision by Redis", r.FirstStore)
	}
	line(r.Seconds, "the end; without Redis %d tokens were admitted, of which it was charged with %d", r.AdmittedInOutage, r.DebtCharged)
	fmt.Fprintf(b, "            and need not be with %d: its buckets would have run over\n", r.DebtForgiven)
	if r.DebtOwed > 0 {
		fmt.Fprintf(b, "            %d could not be charged\n", r.DebtOwed)
	}
	fmt.Fprintf(b, "\nbounds: burst %d; %+.0f without Redis, for what a node had not seen others take", r.Burst, r.Unseen)
	if len(r.Phases) == 3 {
		fmt.Fprintf(b, ";\n%+.0f with it again, for what it was not charged with yet, and %+d for what shares admitted later", r.Debts, r.Late)
	}
	b.WriteString(" (demo --help)\n")
}

// sources lists what made decisions, most first.
func sources(by map[string]int) string {
	names := slices.SortedFunc(maps.Keys(by), func(a, b string) int { return by[b] - by[a] })
	for i, name := range names {
		names[i] = fmt.Sprintf("%s %d", name, by[name])
	}
	return strings.Join(names, ", ")
}

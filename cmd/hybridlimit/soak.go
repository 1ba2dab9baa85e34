package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/hybridlimit/hybridlimit/bench/soak"
)

// soakFlags are what soak was told.
type soakFlags struct {
	opts       soak.Options
	url        string
	allowFlush bool
	asJSON     bool
}

func newSoakCmd() *cobra.Command {
	var f soakFlags
	cmd := &cobra.Command{
		Use:   "soak",
		Short: "Run a fleet under traffic and faults for as long as you like, and check that all holds",
		Long: `Soak runs limiter nodes in this process for --for, on one Redis: the one at
--redis, or one inside this process. One key is asked for far above its limit, the
limit of another one changes, --keys others are asked for by Zipf, and ever new ones
come, more than a node remembers; some requests cost more than a token and some
callers give up. All the time something goes wrong, as --seed says: all nodes or one
are cut off from Redis or hear nothing of it, Redis is slow, a node is closed and
another one joins, Redis forgets its scripts or, rarely and only inside this process
or with --allow-flush, its data.

Every --every it prints a line: what decided, how long that took, how late the machine
was, the level of the hot key when it came closest to its bound, the heap's live
bytes, goroutines, keys held by all nodes, and how many faults there were. The bound
is, at each instant,

` + indent(soak.Bound) + `

At the end there is a summary, also after SIGINT. The exit status is 1 if

  level       the level of some key passed its bound
  latency     a decision took longer than it waits for Redis and 100 ms, and three
              times what the machine was late then
  errors      a request had an error though its caller did not give up
  goroutines  there are more of them at the end than at the start
  heap        in the last third more was live than in the first, by a quarter and 8 MiB
  ledger      a node cannot account for every token that it was granted
  healed      Redis decided nothing in the last stretch without faults

The keys are new ones and expire. With --redis the faults are in this program's
connections; the server itself notices SCRIPT FLUSH.`,
		Example: `  hybridlimit soak
  hybridlimit soak --for 1h --nodes 8 --demand 20000
  hybridlimit soak --for 10m --redis redis://localhost:6379/0 --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.check(cmd); err != nil {
				return usageError{err}
			}
			return f.run(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f.add(cmd)
	return cmd
}

func (f *soakFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.DurationVar(&f.opts.For, "for", time.Minute, "how long it lasts, 2s to 24h")
	fl.DurationVar(&f.opts.Every, "every", 10*time.Second, "how often to print a line, 100ms to 1h; by default more often if --for is short")
	fl.IntVar(&f.opts.Nodes, "nodes", 4, "how many nodes, 1 to 100")
	fl.IntVar(&f.opts.Keys, "keys", 1000, "how many keys besides the hot one, 1 to 100000")
	fl.Float64Var(&f.opts.Limit.Rate, "rate", 500, "tokens a second of every key, more than 0")
	fl.Int64Var(&f.opts.Limit.Burst, "burst", 500, "tokens at one instant of every key, at least 1")
	fl.Float64Var(&f.opts.Demand, "demand", 2000, "requests a second, all nodes together, 10 to 1e6")
	fl.Uint64Var(&f.opts.Seed, "seed", 1, "what faults and traffic are drawn from, at least 1")
	fl.StringVar(&f.url, "redis", "", "use this server, as redis://HOST:PORT/DB; else one inside this process")
	fl.BoolVar(&f.allowFlush, "allow-flush", false, "with --redis: FLUSHALL it now and then, ALL ITS DATA IS LOST")
	fl.BoolVar(&f.asJSON, "json", false, "print the summary as one JSON object, and the lines to stderr")
}

// check finds what a zero would hide, for in SoakOptions it is a default. All
// problems come together, by the names of the flags.
func (f *soakFlags) check(cmd *cobra.Command) error {
	if !cmd.Flags().Changed("every") {
		f.opts.Every = 0
	}
	o := f.opts
	var errs []error
	want := func(ok bool, flag string, value any, want string) {
		if !ok {
			errs = append(errs, fmt.Errorf("--%s = %v: want %s", flag, value, want))
		}
	}
	want(o.For >= 2*time.Second && o.For <= 24*time.Hour, "for", o.For, "2s to 24h")
	want(o.Every >= 100*time.Millisecond && o.Every <= time.Hour || !cmd.Flags().Changed("every"), "every", o.Every, "100ms to 1h")
	want(o.Nodes >= 1 && o.Nodes <= 100, "nodes", o.Nodes, "1 to 100")
	want(o.Keys >= 1 && o.Keys <= 100_000, "keys", o.Keys, "1 to 100000")
	want(o.Limit.Rate > 0 && !math.IsInf(o.Limit.Rate, 0), "rate", o.Limit.Rate, "more than 0 tokens per second")
	want(o.Limit.Burst >= 1, "burst", o.Limit.Burst, "at least 1 token")
	want(o.Demand >= 10 && o.Demand <= 1e6, "demand", o.Demand, "10 to 1e6 requests per second")
	want(o.Seed >= 1, "seed", o.Seed, "at least 1")
	want(!f.allowFlush || f.url != "", "allow-flush", f.allowFlush, "--redis with it: the Redis inside this process is emptied anyway")
	if len(errs) == 0 {
		if err := o.Limit.Validate(); err != nil {
			errs = append(errs, fmt.Errorf("--rate = %v, --burst = %d: %w", o.Limit.Rate, o.Limit.Burst, err))
		}
	}
	return errors.Join(errs...)
}

func (f *soakFlags) run(ctx context.Context, stdout, stderr io.Writer) error {
	name, closeRedis, err := f.open(ctx)
	if err != nil {
		return err
	}
	defer closeRedis()
	lines := stdout
	if f.asJSON {
		lines = stderr
	}
	fmt.Fprintf(lines, "%d nodes on Redis (%s), %d keys, %s each, %.0f requests/s for %v, seed %d\n",
		f.opts.Nodes, name, f.opts.Keys, f.opts.Limit, f.opts.Demand, f.opts.For, f.opts.Seed)
	fmt.Fprintln(lines, soakHeader)
	f.opts.Report = func(i soak.Interval) { fmt.Fprintln(lines, soakLine(i)) }
	r, err := soak.Run(ctx, f.opts)
	if err != nil {
		return err
	}
	return tellSoak(stdout, soakReport{name, r}, f.asJSON)
}

// open sets how to reach Redis, and returns its name.
func (f *soakFlags) open(ctx context.Context) (name string, closeRedis func(), err error) {
	if f.url == "" {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		if err := m.Start(); err != nil {
			return "", nil, err
		}
		addr := m.Addr()
		f.opts.RedisTimeout = embeddedTimeout
		f.opts.Flush = func(context.Context) error { m.FlushAll(); return nil }
		f.opts.Dial = func() (redis.UniversalClient, error) {
			return redis.NewClient(withRules(&redis.Options{Addr: addr})), nil
		}
		return "embedded", m.Close, nil
	}
	// Whether it is there should be known before the nodes try.
	rdb, _, closeRedis, err := openRedis(ctx, f.url)
	if err != nil {
		return "", nil, err
	}
	f.opts.Dial = func() (redis.UniversalClient, error) {
		c, _, err := newClient(f.url)
		return c, err
	}
	if f.allowFlush {
		f.opts.Flush = func(ctx context.Context) error { return flushAll(ctx, rdb) }
	}
	return redisName(rdb, false), closeRedis, nil
}

// flushAll empties a server, or every master of a cluster.
func flushAll(ctx context.Context, rdb redis.UniversalClient) error {
	if cluster, ok := rdb.(*redis.ClusterClient); ok {
		return cluster.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return c.FlushAll(ctx).Err() })
	}
	return rdb.FlushAll(ctx).Err()
}

// soakReport is the report with where Redis was.
type soakReport struct {
	Redis string `json:"redis"`
	soak.Report
}

// tellSoak prints the summary. It returns an error that names the checks that
// failed.
func tellSoak(w io.Writer, r soakReport, asJSON bool) (err error) {
	if asJSON {
		err = json.NewEncoder(w).Encode(r)
	} else {
		err = printSoak(w, r)
	}
	if err == nil && !r.Held {
		return fmt.Errorf("soak failed: %s", strings.Join(r.Failures(), ", "))
	}
	return err
}

const soakHeader = " elapsed   dec/s  admitted refused   lease   store  memory   local other    p50    p99    max   late   level/bound    heap  goroutines   keys  faults"

func soakLine(i soak.Interval) string {
	other := int64(0)
	for name, n := range i.BySource {
		if !slices.Contains([]string{"lease", "store", "memory", "local"}, name) {
			other += n
		}
	}
	return fmt.Sprintf("%8s %7.0f %9d %7d %7d %7d %7d %7d %5d %6s %6s %6s %6s %7.0f/%-7.0f %5.1fM %10d %7d %7d  %s",
		atOf(i.At), i.PerSecond, i.Admitted, i.Refused,
		i.BySource["lease"], i.BySource["store"], i.BySource["memory"], i.BySource["local"], other,
		short(i.P50), short(i.P99), short(i.Max), short(i.Late), i.Hot.Level, i.Hot.Bound,
		float64(i.Heap)/(1<<20), i.Goroutines, i.Keys, i.Faults, i.Last)
}

// atOf takes off what a ticker is late by.
func atOf(d time.Duration) time.Duration {
	if d >= 2*time.Second {
		return d.Round(time.Second)
	}
	return d.Round(10 * time.Millisecond)
}

// short writes a duration with two or three digits.
func short(d time.Duration) string {
	switch {
	case d >= 10*time.Millisecond:
		return fmt.Sprint(d.Round(time.Millisecond))
	case d >= time.Millisecond:
		return fmt.Sprint(d.Round(100 * time.Microsecond))
	case d >= 10*time.Microsecond:
		return fmt.Sprint(d.Round(time.Microsecond))
	default:
		return fmt.Sprint(d.Round(10 * time.Nanosecond))
	}
}

func printSoak(w io.Writer, r soakReport) error {
	var b strings.Builder
	fmt.Fprintf(&b, "\n%.1f s, %d nodes on Redis (%s), %d keys, %s each, seed %d\n\n", r.Seconds, r.Nodes, r.Redis, r.Keys, r.Limit, r.Seed)
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", name, fmt.Sprintf(format, args...)) }
	row("decisions", "%d, %.0f/s: %d admitted, %d refused", r.Decisions, float64(r.Decisions)/max(1e-9, r.Seconds), r.Admitted, r.Refused)
	row("decided by", "%s", counts(r.BySource))
	row("not decided", "%d callers gave up, %d asked a node that was just closed", r.GaveUp, r.ToClosed)
	row("faults", "%s", counts(r.Faults))
	row("new keys", "%d", r.NewKeys)
	row("latency", "p50 %.1f µs, p99 %.0f µs, longest %.1f ms; the machine was late by %.1f ms", r.P50, r.P99, r.Max/1e3, r.Late)
	row("hot key", "level %.1f of %.1f at %.1f s, when it came closest; burst %d", r.Hot.Level, r.Hot.Bound, r.Hot.At, r.Burst)
	row("heap", "%.1f MiB at the end; goroutines %d before, %d at most, %d after", float64(r.HeapEnd)/(1<<20), r.GoroutinesBefore, r.GoroutinesPeak, r.GoroutinesAfter)
	row("closed", "%d nodes, %d could not tell Redis all; %d tokens were never charged", r.Closed, r.UncleanCloses, r.Owed)
	for _, c := range r.Checks {
		row("check "+c.Name, "%s: %s", c.Verdict, c.Detail)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(&b, "\nbound of a level, at each instant:\n\n%s\n\n", indent(r.Formula))
	verdict := "all held"
	if !r.Held {
		verdict = "FAILED: " + strings.Join(r.Failures(), ", ")
	}
	fmt.Fprintln(&b, verdict)
	_, err := io.WriteString(w, b.String())
	return err
}

// counts writes them in the order of their names.
func counts[T int | int64](m map[string]T) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, fmt.Sprintf("%s %d", name, m[name]))
	}
	return strings.Join(parts, ", ")
}

func indent(text string) string { return "  " + strings.ReplaceAll(text, "\n", "\n  ") }

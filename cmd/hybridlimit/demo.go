package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/hybridlimit/hybridlimit/bench"
)

func newDemoCmd() *cobra.Command {
	var (
		long     time.Duration
		redisURL string
		asJSON   bool
		outage   bool
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run three nodes under skewed traffic and show what they admit and cost",
		Long: `Demo runs three limiter nodes in this process, each with its own leases, on one
Redis: the one at --redis, or one inside this process. For --for it asks them
about three keys, one of them for more than its limit, and then shows what they
admitted against one exact limiter and how many Redis calls that took. The
latencies are of whole decisions at this low rate, Redis calls and cold caches
included; go test -bench Allow ./hybrid times hot ones. Its keys expire.

With --outage Redis is gone for the middle third of the time, and the nodes go on
with their shares of the limits. The Redis inside this process is stopped and
started again; from the one at --redis the nodes are only cut off. The exit status
is 1 if the level of a key passed its bound. The level is that of a leaky bucket
that all admissions since the start feed; with N nodes the bounds are

  healthy    burst
  outage     burst + unseen      what others were granted since Redis last
                                 answered a node, at most of any node; plus 1
  recovered  outage + debts + N  what shares had admitted and Redis was not charged
             + late              with when it came back; what they admitted later

unseen, debts and late are measured; the first two are at most the burst. There is
more for what happens seldom: calls not answered in time in the healthy phase, nodes
that believe to be fewer than they are, a Redis that lost its data, a second
outage. The documentation of bench.OutageReport has all of it.`,
		Example: `  hybridlimit demo
  hybridlimit demo --outage --for 15s
  hybridlimit demo --outage --redis redis://localhost:6379/0 --json`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			run, least := runDemo, 100*time.Millisecond
			if outage {
				run, least = runOutage, 3*time.Second
			}
			if long < least || long > time.Hour {
				return usageError{fmt.Errorf("--for = %v: want %v to 1h", long, least)}
			}
			return run(cmd.Context(), long, redisURL, asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().DurationVar(&long, "for", 10*time.Second, "how long the traffic lasts, 100ms to 1h; with --outage from 3s")
	cmd.Flags().BoolVar(&outage, "outage", false, "take Redis away for the middle third of the time")
	cmd.Flags().StringVar(&redisURL, "redis", "", "use this server, as redis://HOST:PORT/DB; else one inside this process")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as one JSON object")
	return cmd
}

func runDemo(ctx context.Context, long time.Duration, redisURL string, asJSON bool, stdout, stderr io.Writer) error {
	rdb, embedded, closeRedis, err := openRedis(ctx, redisURL)
	if err != nil {
		return err
	}
	defer closeRedis()
	if embedded {
		fmt.Fprintln(stderr, "using a Redis inside this process: nothing is kept (--redis URL for a real one)")
	}
	bar := newBar(stderr, long.Milliseconds(), "3 nodes, 3 keys")
	report, err := bench.Demo(ctx, bench.DemoOptions{
		Redis: rdb, For: long,
		Progress: func(elapsed time.Duration) { bar.Set(int(min(elapsed, long).Milliseconds())) },
	})
	bar.Finish()
	if err != nil {
		return err
	}
	if asJSON {
		return json.NewEncoder(stdout).Encode(report)
	}
	return printDemo(stdout, report)
}

func printDemo(w io.Writer, r bench.DemoReport) error {
	fmt.Fprintf(w, "three keys, %s each, over %.1f s\n\n", r.Limit, r.Seconds)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tdecisions\tadmitted\tdenied\tRedis calls\tdecisions/call\tp50\tp99\t")
	for _, n := range append(r.Nodes, r.Total) {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%.1f\t%.1f µs\t%.0f µs\t\n",
			n.Node, n.Decisions, n.Admitted, n.Denied, n.StoreCalls, n.DecisionsPerCall, n.P50, n.P99)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	verdict := "the limit held"
	if r.MaxLevel > float64(r.Burst) {
		verdict = "THE LIMIT WAS BROKEN"
	}
	fmt.Fprintf(w, "\nadmitted     %d: %.1f %% of the %d that one exact limiter would have admitted\n",
		r.Total.Admitted, 100*float64(r.Total.Admitted)/float64(max(1, r.IdealAdmitted)), r.IdealAdmitted)
	_, err := fmt.Fprintf(w, "peak level   %.1f of burst %d, all nodes together: %s\n", r.MaxLevel, r.Burst, verdict)
	return err
}

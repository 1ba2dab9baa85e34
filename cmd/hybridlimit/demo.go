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
	)
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run three nodes under skewed traffic and show what they admit and cost",
		Long: `Demo runs three limiter nodes in this process, each with its own leases, on one
Redis: the one at --redis, or one inside this process. For --for it asks them
about three keys, one of them for more than its limit, and then shows what they
admitted against one exact limiter and how many Redis calls that took. The
latencies are of whole decisions at this low rate, Redis calls and cold caches
included; go test -bench Allow ./hybrid times hot ones. Its keys expire.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if long < 100*time.Millisecond || long > time.Hour {
				return usageError{fmt.Errorf("--for = %v: want 100ms to 1h", long)}
			}
			return runDemo(cmd.Context(), long, redisURL, asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().DurationVar(&long, "for", 10*time.Second, "how long the traffic lasts, 100ms to 1h")
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

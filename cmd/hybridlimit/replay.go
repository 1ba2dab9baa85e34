package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/hybridlimit/hybridlimit/bench"
	"github.com/hybridlimit/hybridlimit/bench/accesslog"
	"github.com/hybridlimit/hybridlimit/hybrid"
)

// replayFlags are the flags of replay, as given.
type replayFlags struct {
	key, limit, spread   string
	algorithm            string
	burst                int64
	nodes                int
	speed                float64
	period, redisTimeout time.Duration
	redis                string
	json                 bool
}

func newReplayCmd() *cobra.Command {
	var f replayFlags
	cmd := &cobra.Command{
		Use:   "replay FILE",
		Short: "Run an access log through the limiter and report what it admits",
		Long: `Replay reads a web server's access log (common or combined format, plain or
gzip, - for standard input), puts its lines in order of time, and runs them
through real limiter nodes and the real Redis script.

Without --redis it uses virtual time, the log's own timestamps, and a Redis in
this process whose clock follows them; with --redis it runs in real time
against that server, in keys that expire. --speed N compresses the log's time N times in either
mode; the limit stays as given.

With an algorithm that has windows the limit is --burst requests in the time that
--limit takes to give them: --limit 10/m --burst 10 is ten in a minute.

ideal_admitted is what one exact bucket (or window) per key would have admitted;
max_level is the highest level any key's admissions reached, or the highest count
by the algorithm: the limit held if it is at most the burst.`,
		Example: `  hybridlimit replay access.log.gz --key ip --limit 10/m --burst 20 --nodes 4
  zcat logs/*.gz | hybridlimit replay - --key none --limit 500/s --burst 500 --speed 100 --json`,
		Args: oneArg("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runReplay(cmd.Context(), f, args[0], cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&f.key, "key", "ip", "what a request is limited by: ip, path, user, ip+path, or none for one global key")
	fl.StringVar(&f.limit, "limit", "", "rate of each key, such as 10/m, 100/s or 5000/h (required)")
	fl.Int64Var(&f.burst, "burst", 0, "burst of each key in requests (required; at least 1)")
	fl.StringVar(&f.algorithm, "algorithm", hybrid.TokenBucket.String(), "how to count: token-bucket, leaky-bucket, fixed-window, sliding-log or sliding-counter")
	fl.IntVar(&f.nodes, "nodes", 4, "how many limiter nodes share the requests, 1 to 1000")
	fl.StringVar(&f.spread, "spread", "round-robin", "which node a request goes to: round-robin, hash (by key) or random")
	fl.Float64Var(&f.speed, "speed", 1, "how many times faster than the log, above 0 to 1e9")
	fl.DurationVar(&f.period, "lease-period", 250*time.Millisecond, "how long a lease of tokens should last, 2ms to 1h")
	fl.StringVar(&f.redis, "redis", "", "replay in real time against this server, as redis://HOST:PORT/DB")
	fl.DurationVar(&f.redisTimeout, "redis-timeout", 100*time.Millisecond, "how long a request waits for --redis, 1ms to 1m")
	fl.BoolVar(&f.json, "json", false, "print the report as one JSON object")
	return cmd
}

func runReplay(ctx context.Context, f replayFlags, file string, stdin io.Reader, stdout, stderr io.Writer) error {
	opts, key, err := f.options()
	if err != nil {
		return usageError{err}
	}
	log, err := readLog(file, stdin, stderr)
	if err != nil {
		return err
	}
	showSkipped(stderr, log)
	trace, keyless := bench.Requests(log, key, f.speed)
	if len(trace) == 0 {
		return fmt.Errorf("no line of %s has a %s: nothing to replay", file, f.key)
	}
	if keyless > 0 {
		fmt.Fprintf(stderr, "skipped %d lines without a %s\n", keyless, f.key)
	}
	if f.redis != "" {
		rdb, _, closeRedis, err := openRedis(ctx, f.redis)
		if err != nil {
			return err
		}
		defer closeRedis()
		opts.Redis = rdb
	} else if !f.json {
		fmt.Fprintln(stderr, "virtual time, on a Redis inside this process (--redis URL for a real one)")
	}
	bar := newBar(stderr, int64(len(trace)), "replaying")
	opts.Progress = func(done int) {
		if done%64 == 0 || done == len(trace) {
			bar.Set(done)
		}
	}
	report, err := bench.Replay(ctx, trace, opts)
	bar.Finish()
	if err != nil {
		return err
	}
	report.Skipped = log.Skipped.Count + keyless
	if f.json {
		return json.NewEncoder(stdout).Encode(report)
	}
	return printReplay(stdout, report)
}

// options checks every flag and returns all problems at once.
func (f replayFlags) options() (opts bench.ReplayOptions, key accesslog.KeyFunc, err error) {
	var errs []error
	key, err = accesslog.ParseKey(f.key)
	errs = append(errs, err)
	rate, err := hybrid.ParseRate(f.limit)
	if f.limit == "" {
		err = errors.New("--limit is required, as in --limit 10/m")
	}
	errs = append(errs, err)
	var algorithm hybrid.Algorithm
	if err := algorithm.UnmarshalText([]byte(f.algorithm)); err != nil {
		bad, _ := errors.AsType[*hybrid.LimitError](err)
		errs = append(errs, fmt.Errorf("--algorithm = %s: want %s", bad.Value, bad.Want))
	}
	opts = bench.ReplayOptions{
		Limit: hybrid.Limit{Rate: rate, Burst: f.burst, Algorithm: algorithm}, Nodes: f.nodes, Spread: bench.Spread(f.spread),
		LeasePeriod: f.period, RedisTimeout: f.redisTimeout,
	}
	if f.burst == 0 {
		errs = append(errs, errors.New("--burst is required, as in --burst 20"))
	} else if f.burst < 1 || f.burst > hybrid.MaxBurst {
		errs = append(errs, fmt.Errorf("--burst = %d: want 1 to 1e15", f.burst))
	} else {
		errs = append(errs, opts.Limit.Validate())
	}
	if !(f.speed > 0 && f.speed <= 1e9) {
		errs = append(errs, fmt.Errorf("--speed = %g: want above 0 to 1e9", f.speed))
	}
	if f.period < 2*time.Millisecond || f.period > time.Hour {
		errs = append(errs, fmt.Errorf("--lease-period = %v: want 2ms to 1h", f.period))
	}
	if f.redisTimeout < time.Millisecond || f.redisTimeout > time.Minute {
		errs = append(errs, fmt.Errorf("--redis-timeout = %v: want 1ms to 1m", f.redisTimeout))
	}
	if f.nodes < 1 || f.nodes > 1000 {
		errs = append(errs, fmt.Errorf("--nodes = %d: want 1 to 1000", f.nodes))
	}
	switch opts.Spread {
	case bench.RoundRobin, bench.ByHash, bench.Random:
	default:
		errs = append(errs, fmt.Errorf("--spread = %q: want round-robin, hash or random", f.spread))
	}
	return opts, key, errors.Join(errs...)
}

// readLog reads file, or stdin for "-", with a progress bar for a large one.
func readLog(file string, stdin io.Reader, stderr io.Writer) (*accesslog.Log, error) {
	in, size := stdin, int64(-1)
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return nil, err
		}
		if info.IsDir() {
			return nil, fmt.Errorf("%s is a directory: want an access log, or - for standard input", file)
		}
		in, size = f, info.Size()
	}
	bar := newBar(stderr, size, "reading")
	log, err := accesslog.Read(in, accesslog.Options{Progress: func(read int64) { bar.Set(int(read)) }})
	bar.Finish()
	if err != nil {
		if file == "-" {
			file = "standard input"
		}
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return log, nil
}

func showSkipped(w io.Writer, log *accesslog.Log) {
	if log.Skipped.Count == 0 {
		return
	}
	fmt.Fprintf(w, "skipped %d of %d lines:\n", log.Skipped.Count, log.Lines)
	for _, bad := range log.Skipped.Examples {
		fmt.Fprintf(w, "  line %d: %s: %s\n", bad.Line, bad.Reason, bad.Text)
	}
	if more := log.Skipped.Count - len(log.Skipped.Examples); more > 0 {
		fmt.Fprintf(w, "  and %d more\n", more)
	}
}

func printReplay(w io.Writer, r bench.ReplayReport) error {
	verdict := "the limit held"
	if r.MaxLevel > float64(r.Burst) {
		verdict = "THE LIMIT WAS BROKEN"
	}
	rows := [][2]string{
		{"requests", fmt.Sprint(r.Requests)},
		{"admitted", fmt.Sprint(r.Admitted)},
		{"denied", fmt.Sprint(r.Denied)},
		{"ideal admitted", fmt.Sprintf("%d  (admitted is %.2f %% of it)", r.IdealAdmitted, 100*float64(r.Admitted)/float64(max(1, r.IdealAdmitted)))},
		{"store calls", fmt.Sprint(r.StoreCalls)},
		{"decisions per call", fmt.Sprintf("%.1f", r.DecisionsPerCall)},
		{"max level", fmt.Sprintf("%.2f of burst %d: %s", r.MaxLevel, r.Burst, verdict)},
		{"skipped lines", fmt.Sprint(r.Skipped)},
	}
	var b strings.Builder
	for _, row := range rows {
		fmt.Fprintf(&b, "%-19s %s\n", row[0], row[1])
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// bar is a progress bar, shown only when it goes to a terminal.
type bar struct{ *progressbar.ProgressBar }

func newBar(w io.Writer, most int64, what string) bar {
	f, ok := w.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return bar{}
	}
	return bar{progressbar.NewOptions64(most, progressbar.OptionSetWriter(w), progressbar.OptionSetDescription(what),
		progressbar.OptionClearOnFinish(), progressbar.OptionThrottle(65*time.Millisecond), progressbar.OptionFullWidth())}
}

// Set moves the bar; one that cannot draw does nothing.
func (b bar) Set(done int) {
	if b.ProgressBar != nil {
		_ = b.ProgressBar.Set(done) // a bar that cannot draw is no failure
	}
}

// Finish takes the bar off the screen.
func (b bar) Finish() {
	if b.ProgressBar != nil {
		_ = b.ProgressBar.Finish()
	}
}

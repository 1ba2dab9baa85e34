package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/spf13/cobra"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/server"
)

// returnTimeout is how long the end of the service may take to return leases.
// With the 10 s for requests that have begun it stays well below the 30 s that
// service managers wait before they kill.
const returnTimeout = 5 * time.Second

// opener is openRedisLater, or a test's.
type opener func(ctx context.Context, url string) (redis.UniversalClient, bool, func(), error)

func newServeCmd() *cobra.Command { return serveCmd(openRedisLater) }

func serveCmd(open opener) *cobra.Command {
	var f serveFlags
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Answer rate limit questions over HTTP",
		Long: `Serve decides requests over HTTP, for programs that are not written in Go:

  curl -d '{"service":"api","user_id":"u1","rate":2,"capacity":3}' localhost:8080/check
  {"allowed":true,"tokens":2,"remaining":2,"retry_after_ms":0,"source":"store",...}

Every node that serves with the same Redis and --prefix shares the limits. The
answer has status 200 for a denial too; with /check?status=true it is 429, or
503 when it is a denial because Redis did not answer (--on-failure deny). GET
/healthz says whether the service is up.

Without --redis it starts a Redis inside this process, which other nodes cannot
share and which keeps nothing. A URL with a password is better put into the
environment variable ` + redisEnv + `, where --redis has its default from.

While Redis does not answer, each node goes on with its share of the limits: 1/n,
n being --min-nodes or as many as were alive in Redis in the last five minutes.
Redis is charged with what that admits as soon as it answers again. Both are
logged, and nothing is logged per request. It may start without Redis, too.

SIGTERM or SIGINT ends it: it stops accepting, answers the requests that have
begun, and returns unused tokens to Redis.`,
		Example: `  hybridlimit serve
  hybridlimit serve --listen :8080 --redis redis://localhost:6379/0
  hybridlimit serve --redis redis+sentinel://s1:26379,s2:26379/mymaster`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.run(cmd, open)
		},
	}
	f.add(cmd)
	return cmd
}

// serveFlags are what serve was told.
type serveFlags struct {
	listen, url string
	opts        hybrid.Options
	policy      hybrid.Policy
}

func (f *serveFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.listen, "listen", "127.0.0.1:8080", "`HOST:PORT` to listen on; port 0 takes a free one")
	addRedisFlag(cmd, &f.url, "; without one, a Redis inside this process")
	fl.StringVar(&f.opts.Prefix, "prefix", "hybridlimit:", "start of every Redis key, at most 256 bytes")
	fl.DurationVar(&f.opts.LeasePeriod, "lease-period", 250*time.Millisecond, "how long a lease of tokens should last, 2ms to 1h; the same on all nodes")
	fl.DurationVar(&f.opts.RedisTimeout, "redis-timeout", 30*time.Millisecond, "how long a request waits for Redis, 1ms to 1m; above 5s add ?read_timeout= to --redis")
	fl.Var(policyFlag(&f.policy), "on-failure", "what becomes of requests while Redis does not answer: degrade goes on with this node's share of the limit, allow admits without limit, deny refuses")
	fl.IntVar(&f.opts.MinNodes, "min-nodes", 1, "the least number of nodes to expect, 1 to 1048576: a node that Redis did not answer yet knows of no others")
	fl.DurationVar(&f.opts.Heartbeat, "heartbeat", time.Second, "how often a node says in Redis that it is alive, 100ms to 1m; the same on all nodes")
	fl.Var(startFlag(&f.opts.Start), "start", "what a node's share starts with for a key that the node never heard of: one token, none, or the full share")
	fl.Var(splitFlag(&f.opts.Split), "split", "how limits are divided among the nodes: blend goes half by demand at first and ends with equal parts within a minute")
}

// run serves until the command's context ends.
func (f *serveFlags) run(cmd *cobra.Command, open opener) error {
	ctx, log := cmd.Context(), newLog(cmd.ErrOrStderr())
	if err := f.check(); err != nil {
		return usageError{err}
	}
	// The port before Redis: a service that is up already is found out
	// without a connection to its Redis.
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", f.listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	defer l.Close() // twice when all goes well, which does no harm
	rdb, embedded, closeRedis, err := open(ctx, redisURL(cmd, f.url))
	if late, ok := errors.AsType[*unansweredError](err); ok {
		log.Warn("starting without Redis: it does not answer yet", "on_failure", f.policy.String(), "min_nodes", f.opts.MinNodes, "err", late)
	} else if err != nil {
		return err
	}
	defer closeRedis()
	// Each request brings its limit; the limiter's own is never used.
	limiter, err := hybrid.New(rdb, hybrid.Limit{}, f.opts)
	if err != nil {
		return usageError{err} // only the flags can be at fault here
	}
	if embedded {
		log.Warn("no --redis: using a Redis inside this process, single node, nothing is kept")
	}
	return f.serve(ctx, l, limiter, log.With("redis", redisName(rdb, embedded)))
}

// check finds what would fail late or, a zero being a default in Options, not at
// all. The ranges are hybrid.New's to check.
func (f *serveFlags) check() error {
	var errs []error
	if _, _, err := net.SplitHostPort(f.listen); err != nil {
		errs = append(errs, fmt.Errorf("--listen = %q: want HOST:PORT", f.listen))
	}
	if f.opts.LeasePeriod == 0 {
		errs = append(errs, errors.New("--lease-period = 0: want 2ms to 1h"))
	}
	if f.opts.RedisTimeout == 0 {
		errs = append(errs, errors.New("--redis-timeout = 0: want 1ms to 1m"))
	}
	if f.opts.MinNodes < 1 {
		errs = append(errs, fmt.Errorf("--min-nodes = %d: want 1 to 1048576", f.opts.MinNodes))
	}
	if f.opts.Heartbeat == 0 {
		errs = append(errs, errors.New("--heartbeat = 0: want 100ms to 1m"))
	}
	return errors.Join(errs...)
}

// serve answers on l until ctx ends, and closes limiter.
func (f *serveFlags) serve(ctx context.Context, l net.Listener, limiter *hybrid.Limiter, log *slog.Logger) error {
	log.Info("listening", "addr", l.Addr().String())
	// It also watches the requests that are under way when ctx ends.
	watching, stopWatch := context.WithCancel(context.WithoutCancel(ctx))
	var watcher sync.WaitGroup
	watcher.Go(func() { (&watch{flags: f, log: log}).run(watching, limiter) })
	err := server.New(limiter, server.Options{OnFailure: f.policy, Log: log}).Serve(ctx, l)
	stopWatch()
	watcher.Wait()

	// Serve has returned, so no request is left that could be decided by a
	// closed limiter. Only now do the leases go back.
	before := limiter.Stats()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), returnTimeout)
	defer cancel()
	closeErr := limiter.Close(closing)
	after := limiter.Stats()

	log = log.With("tokens_returned", after.Returned-before.Returned)
	if owed := after.Fallback.Owed; owed > 0 {
		log.Warn("Redis was not charged with all that was admitted while it did not answer", "debt_owed", owed)
	}
	// Redis forgets leases by itself, so this is no failure of the command.
	if failed := after.NotExecuted + after.Unknown - before.NotExecuted - before.Unknown; closeErr != nil || failed > 0 {
		log.Warn("stopped, but Redis did not take all tokens back: those come back when their leases expire", "failed_calls", failed)
		return err
	}
	log.Info("stopped")
	return err
}

// newLog writes to w a line per event.
func newLog(w io.Writer) *slog.Logger { return slog.New(slog.NewTextHandler(w, nil)) }

func redisName(rdb redis.UniversalClient, embedded bool) string {
	if embedded {
		return "embedded"
	}
	return addressOf(rdb)
}

// addRedisFlag adds --redis. Its usage ends in what happens without it.
func addRedisFlag(cmd *cobra.Command, url *string, without string) {
	cmd.Flags().StringVar(url, "redis", "", "`URL` of Redis, as redis://HOST:PORT/DB (default $"+redisEnv+without+")")
}

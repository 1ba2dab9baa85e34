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

// watchInterval is how often the counters are looked at for trouble with Redis.
const watchInterval = time.Second

// opener is openRedis, or a test's.
type opener func(ctx context.Context, url string) (redis.UniversalClient, bool, func(), error)

func newServeCmd() *cobra.Command { return serveCmd(openRedis) }

func serveCmd(open opener) *cobra.Command {
	var (
		listen, url string
		opts        hybrid.Options
	)
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Answer rate limit questions over HTTP",
		Long: `Serve decides requests over HTTP, for programs that are not written in Go:

  curl -d '{"service":"api","user_id":"u1","rate":2,"capacity":3}' localhost:8080/check
  {"allowed":true,"tokens":2,"remaining":2,"retry_after_ms":0,"source":"store",...}

Every node that serves with the same Redis and --prefix shares the limits. The
answer has status 200 for a denial too; with /check?status=true it is 429, or
503 when Redis did not answer. GET /healthz says whether the service is up.

Without --redis it starts a Redis inside this process, which other nodes cannot
share and which keeps nothing. A URL with a password is better put into the
environment variable ` + redisEnv + `, where --redis has its default from.

SIGTERM or SIGINT ends it: it stops accepting, answers the requests that have
begun, and returns unused tokens to Redis.`,
		Example: `  hybridlimit serve
  hybridlimit serve --listen :8080 --redis redis://localhost:6379/0
  hybridlimit serve --redis redis+sentinel://s1:26379,s2:26379/mymaster`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, log := cmd.Context(), newLog(cmd.ErrOrStderr())
			if err := checkServe(listen, opts); err != nil {
				return usageError{err}
			}
			// The port before Redis: a service that is up already is found out
			// without a connection to its Redis.
			l, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
			if err != nil {
				return fmt.Errorf("--listen: %w", err)
			}
			defer l.Close() // twice when all goes well, which does no harm
			rdb, embedded, closeRedis, err := open(ctx, redisURL(cmd, url))
			if err != nil {
				return err
			}
			defer closeRedis()
			// Each request brings its limit; the limiter's own is never used.
			limiter, err := hybrid.New(rdb, hybrid.Limit{}, opts)
			if err != nil {
				return usageError{err} // only the flags can be at fault here
			}
			if embedded {
				log.Warn("no --redis: using a Redis inside this process, single node, nothing is kept")
			}
			return serve(ctx, l, limiter, log.With("redis", redisName(rdb, embedded)))
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&listen, "listen", "127.0.0.1:8080", "`HOST:PORT` to listen on; port 0 takes a free one")
	addRedisFlag(cmd, &url, "; without one, a Redis inside this process")
	fl.StringVar(&opts.Prefix, "prefix", "hybridlimit:", "start of every Redis key, at most 256 bytes")
	fl.DurationVar(&opts.LeasePeriod, "lease-period", 250*time.Millisecond, "how long a lease of tokens should last, 2ms to 1h; the same on all nodes")
	fl.DurationVar(&opts.RedisTimeout, "redis-timeout", 30*time.Millisecond, "how long a request waits for Redis, 1ms to 1m; above 5s add ?read_timeout= to --redis")
	fl.Var((*policyFlag)(&opts.OnStoreFailure), "on-store-failure", "what becomes of requests while Redis does not answer: deny, or allow without limit")
	return cmd
}

// checkServe finds what would fail late or, a zero being a default in Options,
// not at all. The ranges are hybrid.New's to check.
func checkServe(listen string, opts hybrid.Options) error {
	var errs []error
	if _, _, err := net.SplitHostPort(listen); err != nil {
		errs = append(errs, fmt.Errorf("--listen = %q: want HOST:PORT", listen))
	}
	if opts.LeasePeriod == 0 {
		errs = append(errs, errors.New("--lease-period = 0: want 2ms to 1h"))
	}
	if opts.RedisTimeout == 0 {
		errs = append(errs, errors.New("--redis-timeout = 0: want 1ms to 1m"))
	}
	return errors.Join(errs...)
}

// serve answers on l until ctx ends, and closes limiter.
func serve(ctx context.Context, l net.Listener, limiter *hybrid.Limiter, log *slog.Logger) error {
	log.Info("listening", "addr", l.Addr().String())
	watching, stopWatch := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() { watchRedis(watching, limiter, log) })
	defer watch.Wait()
	defer stopWatch()
	err := server.New(limiter, server.Options{Log: log}).Serve(ctx, l)

	// Serve has returned, so no request is left that could be decided by a
	// closed limiter. Only now do the leases go back.
	before := limiter.Stats()
	closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), returnTimeout)
	defer cancel()
	closeErr := limiter.Close(closing)
	after := limiter.Stats()

	log = log.With("tokens_returned", after.Returned-before.Returned)
	// Redis forgets leases by itself, so this is no failure of the command.
	if failed := after.NotExecuted + after.Unknown - before.NotExecuted - before.Unknown; closeErr != nil || failed > 0 {
		log.Warn("stopped, but Redis did not take all tokens back: those come back when their leases expire", "failed_calls", failed)
		return err
	}
	log.Info("stopped")
	return err
}

// watchRedis logs when Redis stops answering, and when it answers again. Nothing
// is logged per request, so it looks at the counters.
func watchRedis(ctx context.Context, limiter *hybrid.Limiter, log *slog.Logger) {
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()
	down, last := false, limiter.Stats()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		now := limiter.Stats()
		failed := now.Failed - last.Failed
		answered := (now.Calls - now.NotExecuted - now.Unknown) - (last.Calls - last.NotExecuted - last.Unknown)
		switch {
		case failed > 0 && !down:
			down = true
			log.Warn("Redis does not answer: requests are decided by --on-store-failure", "requests", failed)
		case failed == 0 && answered > 0 && down:
			down = false
			log.Info("Redis answers again")
		}
		last = now
	}
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

// policyFlag is a hybrid.Policy as a flag.
type policyFlag hybrid.Policy

func (p *policyFlag) String() string {
	if hybrid.Policy(*p) == hybrid.Allow {
		return "allow"
	}
	return "deny"
}

func (p *policyFlag) Set(s string) error {
	switch s {
	case "deny":
		*p = policyFlag(hybrid.Deny)
	case "allow":
		*p = policyFlag(hybrid.Allow)
	default:
		return errors.New("want deny or allow")
	}
	return nil
}

// Type names the values in help.
func (*policyFlag) Type() string { return "deny|allow" }

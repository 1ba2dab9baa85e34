package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/hybridlimit/hybridlimit/fallback"
	"github.com/hybridlimit/hybridlimit/hybrid"
)

// watchInterval is how often the counters are looked at for trouble with Redis.
const watchInterval = time.Second

// watch logs when Redis stops answering, and when it answers again: nothing is
// logged per request, so it goes by the counters.
type watch struct {
	flags *serveFlags
	log   *slog.Logger
	last  fallback.Stats
	down  bool
	since fallback.Stats // the last before Redis went down
}

// run looks at the limiter's counters until ctx ends, and then once more.
func (w *watch) run(ctx context.Context, limiter *hybrid.Limiter) {
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			w.look(limiter.Stats().Fallback)
			return
		case <-ticker.C:
			w.look(limiter.Stats().Fallback)
		}
	}
}

// look takes in the counters as they are now. What came and went since the last
// look is two lines too.
func (w *watch) look(now fallback.Stats) {
	went := now.Degraded || now.DegradedFor > w.last.DegradedFor || now.Trips > w.last.Trips
	if went && !w.down {
		w.down, w.since = true, w.last
		w.wentDown(now)
	}
	if w.down && !now.Degraded {
		w.down = false
		w.cameBack(now)
	}
	w.last = now
}

func (w *watch) wentDown(now fallback.Stats) {
	args := []any{"nodes", now.Nodes, "on_failure", w.flags.policy.String()}
	if now.Shards > 1 {
		args = append(args, "servers_down", now.Down, "servers", now.Shards)
	}
	if now.Cause != nil {
		args = append(args, "cause", now.Cause.Error())
	}
	switch w.flags.policy {
	case hybrid.Allow:
		w.log.Warn("Redis does not answer: admitting requests without limit", args...)
	case hybrid.Deny:
		w.log.Warn("Redis does not answer: denying requests", args...)
	default:
		args = append(args, "start", startFlag(&w.flags.opts.Start).String(), "split", splitFlag(&w.flags.opts.Split).String())
		w.log.Warn("Redis does not answer: limiting with this node's share", args...)
	}
}

// cameBack tells what happened meanwhile. Debts are charged within moments after
// Redis is back; debt_owed is what is still to be.
func (w *watch) cameBack(now fallback.Stats) {
	w.log.Info("Redis answers again",
		"degraded_seconds", seconds(now.DegradedFor-w.since.DegradedFor),
		"admitted", now.Admitted-w.since.Admitted,
		"debt_charged", now.Charged-w.since.Charged,
		"debt_forgiven", now.Forgiven-w.since.Forgiven,
		"debt_owed", now.Owed)
}

// seconds returns d in seconds, rounded to milliseconds.
func seconds(d time.Duration) float64 { return d.Round(time.Millisecond).Seconds() }

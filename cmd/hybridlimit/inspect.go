package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/lua"
)

// inspectTimeout bounds the one round trip of inspect. There is a person at the
// other end, so it is more patient than a limiter.
const inspectTimeout = 5 * time.Second

func newInspectCmd() *cobra.Command {
	var (
		url, prefix, name string
		asJSON            bool
	)
	cmd := &cobra.Command{
		Use:   "inspect KEY",
		Short: "Show what is in a key's bucket in Redis",
		Long: `Inspect reads the bucket of KEY and shows its limit, the tokens in it, and how
many are leased to nodes. It changes nothing. A key has a state for each algorithm
that it is limited by; --algorithm says which to show.

KEY is the limiter's key. The HTTP service makes it from service and user_id, as
service:user_id; in the service '%' and ':' are written %25 and %3A.`,
		Example: `  hybridlimit inspect api:u1 --redis redis://localhost:6379/0
  hybridlimit inspect api:u1 --json | jq .tokens_now`,
		Args: oneArg("KEY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			at := redisURL(cmd, url)
			if at == "" {
				return usageError{errors.New("--redis is required: a Redis inside this process would be empty")}
			}
			var a hybrid.Algorithm
			if err := a.UnmarshalText([]byte(name)); err != nil {
				return usageError{fmt.Errorf("--algorithm: %w", err)}
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), inspectTimeout)
			defer cancel()
			rdb, _, closeRedis, err := openRedis(ctx, at)
			if err != nil {
				return err
			}
			defer closeRedis()
			store := lua.NewStore(rdb, lua.Options{Prefix: prefix})
			state, found, err := store.InspectAs(ctx, args[0], a)
			if errors.Is(err, lua.ErrState) {
				return fmt.Errorf("%w (the next request replaces it by a full bucket)", err)
			}
			if err != nil {
				return err
			}
			v := newView(args[0], store.RedisKeyOf(args[0], a), state, found)
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(v)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), v.text())
			return err
		},
	}
	addRedisFlag(cmd, &url, "; required")
	cmd.Flags().StringVar(&prefix, "prefix", "hybridlimit:", "start of every Redis key, as the limiter has it")
	cmd.Flags().StringVar(&name, "algorithm", hybrid.TokenBucket.String(), "the limit's algorithm: token-bucket, leaky-bucket, fixed-window, sliding-log or sliding-counter")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

// view is a bucket as inspect prints it. Tokens and leases are as of the
// server's clock when it was asked: what a request would have found then.
type view struct {
	Key      string `json:"key"`
	RedisKey string `json:"redis_key"`
	Exists   bool   `json:"exists"`
	*bucket
}

// bucket is the part of a view that a missing key does not have.
type bucket struct {
	Rate        float64   `json:"rate"`       // tokens per second
	Burst       int64     `json:"burst"`      // tokens
	Version     int64     `json:"version"`    // of the limits
	TokensNow   float64   `json:"tokens_now"` // less than 0: debt
	Now         time.Time `json:"now"`
	Tokens      float64   `json:"tokens"` // as last written
	At          time.Time `json:"at"`
	Outstanding int64     `json:"outstanding"` // tokens leased to nodes
	ThisEpoch   int64     `json:"outstanding_this_epoch"`
	Previous    int64     `json:"outstanding_previous_epoch"`
	Active      int64     `json:"active_nodes"`
	Demand      int64     `json:"demand"` // tokens per lease period
	Epoch       int64     `json:"epoch"`
	LeaseTTLMS  float64   `json:"lease_ttl_ms"`
	ExpiresInMS *int64    `json:"expires_in_ms"` // null: the key has no expiry
	*window
}

// window is the part of a bucket that only algorithms with windows have.
type window struct {
	Algorithm hybrid.Algorithm `json:"algorithm"`
	WindowMS  float64          `json:"window_ms"`
	Ends      *time.Time       `json:"window_ends,omitempty"` // absent for a log
	Taken     int64            `json:"taken"`                 // in the window
	Before    int64            `json:"taken_before"`          // in the one before, for a counter
	Debt      int64            `json:"debt"`
	Entries   int              `json:"entries"` // of a log
}

func newView(key, redisKey string, stored lua.State, found bool) view {
	v := view{Key: key, RedisKey: redisKey, Exists: found}
	if !found {
		return v
	}
	// Redis has what the last change left. Leases that ended since are still in
	// it, and an operator who looks for stuck tokens must not find those.
	now := stored.AsOf(stored.Now)
	v.bucket = &bucket{
		Rate: stored.Limit.Rate, Burst: stored.Limit.Burst, Version: stored.Version,
		TokensNow: stored.TokensNow, Now: stored.Now, Tokens: stored.Tokens, At: stored.At,
		Outstanding: now.Outstanding[0] + now.Outstanding[1], ThisEpoch: now.Outstanding[0], Previous: now.Outstanding[1],
		// As the script counts: this epoch may have only begun.
		Active: max(now.Active[0], now.Active[1]), Demand: max(now.Demand[0], now.Demand[1]),
		Epoch: now.Epoch, LeaseTTLMS: float64(stored.TTL) / float64(time.Millisecond),
	}
	if a := stored.Limit.Algorithm; a.Windowed() {
		w := now.Window
		v.window = &window{
			Algorithm: a, WindowMS: float64(stored.Limit.Window()) / float64(time.Millisecond),
			Taken: w.Taken, Before: w.Previous, Debt: w.Debt, Entries: w.Entries,
		}
		if !w.Ends.IsZero() {
			v.Ends = &w.Ends
		}
	}
	if stored.ExpiresIn != math.MaxInt64 {
		v.ExpiresInMS = new(stored.ExpiresIn.Milliseconds())
	}
	return v
}

// text is the view for a person.
func (v view) text() string {
	var b strings.Builder
	row := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-13s %s\n", name, fmt.Sprintf(format, args...))
	}
	row("key", "%s", printable(v.Key))
	row("redis key", "%s", printable(v.RedisKey))
	if !v.Exists {
		row("state", "none: the key was never used, or not since its bucket was full again")
		return b.String()
	}
	row("limit", "%g tokens/s, burst %d (version %d)", v.Rate, v.Burst, v.Version)
	if w := v.window; w != nil {
		row("algorithm", "%v, window of %v", w.Algorithm, time.Duration(w.WindowMS*float64(time.Millisecond)))
		switch w.Algorithm {
		case hybrid.FixedWindow:
			row("taken", "%d in the window that ends in %s, and a debt of %d", w.Taken, w.Ends.Sub(v.Now), w.Debt)
		case hybrid.SlidingCounter:
			row("taken", "%d in the window that ends in %s, %d in the one before", w.Taken, w.Ends.Sub(v.Now), w.Before)
		default:
			row("taken", "%d at %d instants", w.Taken, w.Entries)
		}
	}
	row("tokens", "%s now, %s when last written, %s ago", tokens(v.TokensNow), tokens(v.Tokens), v.Now.Sub(v.At))
	row("leased", "%d to nodes (%d in this epoch, %d in the one before)", v.Outstanding, v.ThisEpoch, v.Previous)
	row("active nodes", "%d, who are asked for about %d tokens per lease period", v.Active, v.Demand)
	if v.window == nil {
		row("lease ttl", "%s (epoch %d)", time.Duration(v.LeaseTTLMS*float64(time.Millisecond)), v.Epoch)
	}
	if v.ExpiresInMS == nil {
		row("expires", "never, which is not the limiter's doing")
	} else {
		row("expires", "in %s, when nobody could tell it from a full bucket", time.Duration(*v.ExpiresInMS)*time.Millisecond)
	}
	return b.String()
}

// printable quotes what would disturb a terminal or a line.
func printable(s string) string {
	if q := strconv.Quote(s); q != `"`+s+`"` {
		return q
	}
	return s
}

// tokens writes a balance with as many decimals as it needs, six at most.
func tokens(n float64) string {
	s := strconv.FormatFloat(n, 'f', 6, 64)
	return strings.TrimRight(strings.TrimRight(s, "0"), ".")
}

package lua

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/lease"
)

// ErrState is what every error of Decode matches. The script cannot read such
// a state either: its next call replaces it by a full bucket.
var ErrState = errors.New("lua: bad state")

// State is one bucket for people to look at: what acquire.lua wrote when the
// bucket last changed. Refill is computed when it is needed, so between two
// changes only AsOf tells what is there. A pair is {this epoch, the one before}.
type State struct {
	// Tokens is the balance as of At: what the bucket could grant, leased
	// tokens not among it. Below 0 only through debt.
	// Range -Limit.Burst to Limit.Burst.
	Tokens float64
	// At is when the balance was computed, by the server's clock.
	At time.Time
	// TokensNow is the balance as of Now; 0 unless Inspect made the State. It
	// is what the script's first step would compute: at most what Limit gives,
	// and nothing for the room that leases take.
	TokensNow float64
	// Now is the server's time when Inspect asked; zero unless it did.
	Now time.Time
	// Epoch is the epoch of At, counted in TTLs since 1970. At the end of the
	// epoch after its own a lease is forgotten.
	Epoch int64
	// Outstanding is how many tokens nodes hold as leases, in tokens: never
	// fewer than they do. Range 0 to 2^53.
	Outstanding [2]int64
	// Active is how many nodes asked for tokens.
	Active [2]int64
	// Demand is the sum of what those nodes said is asked of them, in tokens
	// per lease period.
	Demand [2]int64
	// Version is the configuration that Limit comes from. Range 0 to 2^53.
	Version int64
	// Limit is the limit in force.
	Limit lease.Limit
	// TTL is how long a lease may be outstanding, twice the lease period.
	// Range 1ms to about 285 years.
	TTL time.Duration
	// ExpiresIn is how long Redis keeps the key; 0 unless Inspect made the
	// State. A key without an expiry, which the script never leaves, has the
	// longest Duration.
	ExpiresIn time.Duration

	// Window is what an algorithm that counts in windows has. Tokens are then what
	// is left of the burst, and TTL, which such a state does not have, is 0.
	Window Window

	window *windowParts // nil for a bucket

	// The rate as the script has it, count tokens per perUS microseconds, and
	// the balance in units of 1/perUS token. Limit.Rate is rounded, these are not.
	units, count, perUS float64
}

// exact bounds every number of a state: the integers that a double holds.
const exact = 1 << 53

// fields names the numbers of a state in their order.
var fields = [...]string{
	"units", "at", "epoch", "out0", "out1", "act0", "act1", "dem0", "dem1",
	"version", "burst", "count", "per_us", "ttl_us",
}

// Decode reads the string that acquire.lua keeps in Redis. It accepts exactly
// what the script accepts, so an error, which matches ErrState, also says what
// the script will do. TokensNow, Now and ExpiresIn are not in the string.
func Decode(raw string) (State, error) {
	version, rest, _ := strings.Cut(raw, " ")
	if version != "1" {
		return State{}, fmt.Errorf("%w: format %.20q: want 1", ErrState, version)
	}
	// One more than there are, so that a longer string is not cut short.
	words := strings.SplitN(rest, " ", len(fields)+1)
	if len(words) != len(fields) {
		return State{}, fmt.Errorf("%w: %.80q: want %d numbers after the format", ErrState, raw, len(fields))
	}
	var v [len(fields)]int64
	for i, word := range words {
		n, ok := parseExact(word, i == 0)
		if !ok {
			return State{}, fmt.Errorf("%w: %s = %.20q: want an integer of at most 2^53", ErrState, fields[i], word)
		}
		v[i] = n
	}
	burst, count, perUS, ttl := v[10], v[11], v[12], v[13]
	for i, least := range [...]int64{1, 1, 1, 1000} {
		if v[10+i] < least {
			return State{}, fmt.Errorf("%w: %s = %d: want at least %d", ErrState, fields[10+i], v[10+i], least)
		}
	}
	if most := int64(24 * time.Hour / time.Microsecond); ttl > most {
		return State{}, fmt.Errorf("%w: ttl_us = %d: want at most %d, a day", ErrState, ttl, most)
	}
	// In doubles, as the script does it: the product may not fit an int64.
	units, full := float64(v[0]), float64(burst)*float64(perUS)
	if full > exact {
		return State{}, fmt.Errorf("%w: burst × per_us = %d × %d: want at most 2^53", ErrState, burst, perUS)
	}
	if units > full || units < -full {
		return State{}, fmt.Errorf("%w: units = %d: want within the burst, %d × %d", ErrState, v[0], burst, perUS)
	}
	return State{
		Tokens:      units / float64(perUS),
		At:          time.UnixMicro(v[1]).UTC(),
		Epoch:       v[2],
		Outstanding: [2]int64{v[3], v[4]},
		Active:      [2]int64{v[5], v[6]},
		Demand:      [2]int64{v[7], v[8]},
		Version:     v[9],
		Limit:       limitOf(burst, count, perUS),
		TTL:         time.Duration(ttl) * time.Microsecond,
		units:       units, count: float64(count), perUS: float64(perUS),
	}, nil
}

// parseExact reads digits, after a minus sign where one is allowed. ParseInt
// alone would let "+1" and "1_0" pass, which the script does not.
func parseExact(word string, signed bool) (int64, bool) {
	digits := word
	if signed {
		digits = strings.TrimPrefix(word, "-")
	}
	if digits == "" || strings.Trim(digits, "0123456789") != "" {
		return 0, false
	}
	n, err := strconv.ParseInt(word, 10, 64)
	return n, err == nil && n <= exact && n >= -exact
}

// AsOf returns the state as the script would find it at now, a time by the
// server's clock: the refill since At added, forgotten leases dropped. It is
// step 1 of acquire.lua, in doubles like there, and so gives the same for
// every state that Decode accepts. Any other State comes back unchanged.
func (s State) AsOf(now time.Time) State {
	if s.window != nil {
		return s.asOf(now)
	}
	if s.perUS == 0 {
		return s
	}
	t, at := float64(now.UnixMicro()), float64(s.At.UnixMicro())
	epoch, ttl := float64(s.Epoch), float64(s.TTL.Microseconds())
	refill := func(stop float64) {
		out := float64(s.Outstanding[0]) + float64(s.Outstanding[1])
		// The conversions keep a compiler from fusing product and sum, which
		// would round once where the script rounds twice.
		room := float64((float64(s.Limit.Burst)-out)*s.perUS) - s.units
		if room > 0 {
			s.units += min(float64((stop-at)*s.count), room)
		}
		at = stop
	}
	if t < at {
		// The clock went back: nothing is refilled, and no lease is forgotten.
		if e := math.Floor(t / ttl); e < epoch-4 {
			epoch = e
			s.Outstanding = [2]int64{s.Outstanding[0] + s.Outstanding[1], 0}
			s.Active = [2]int64{max(s.Active[0], s.Active[1]), 0}
			s.Demand = [2]int64{max(s.Demand[0], s.Demand[1]), 0}
		}
	} else {
		for range 2 {
			stop := (epoch + 1) * ttl
			if t < stop {
				break
			}
			refill(stop)
			epoch++
			s.Outstanding = [2]int64{0, s.Outstanding[0]}
			s.Active = [2]int64{0, s.Active[0]}
			s.Demand = [2]int64{0, s.Demand[0]}
		}
		if e := math.Floor(t / ttl); e > epoch {
			epoch = e
			s.Outstanding[1], s.Active[1], s.Demand[1] = 0, 0, 0
		}
		refill(t)
	}
	s.At, s.Epoch, s.Tokens = time.UnixMicro(now.UnixMicro()).UTC(), int64(epoch), s.units/s.perUS
	return s
}

// Inspect reads key's bucket without changing it; found is false if there is
// none, which is the same as a full one. It is one pipeline of GET, PTTL and
// TIME: on a cluster the time may come from another server than the bucket. The
// error is lease.ErrKey, one that matches ErrState, or the client's.
func (s *Store) Inspect(ctx context.Context, key string) (state State, found bool, err error) {
	return s.InspectAs(ctx, key, lease.TokenBucket)
}

// InspectAs is Inspect for key's state under an algorithm.
func (s *Store) InspectAs(ctx context.Context, key string, a lease.Algorithm) (state State, found bool, err error) {
	if key == "" {
		return State{}, false, lease.ErrKey
	}
	pipe := s.rdb.Pipeline()
	name := s.RedisKeyOf(key, a)
	get, pttl, clock := pipe.Get(ctx, name), pipe.PTTL(ctx, name), pipe.Time(ctx)
	// Exec's error is the first of the commands', and a missing key is one.
	_, _ = pipe.Exec(ctx)

	if errors.Is(get.Err(), redis.Nil) {
		return State{}, false, nil
	}
	if err := cmp.Or(get.Err(), pttl.Err(), clock.Err()); err != nil {
		return State{}, false, fmt.Errorf("lua: inspect %.64q: %w", key, err)
	}
	decode := Decode
	if a.Windowed() {
		decode = func(raw string) (State, error) { return DecodeWindow(raw, a) }
	}
	if state, err = decode(get.Val()); err != nil {
		return State{}, false, fmt.Errorf("lua: inspect %.64q: %w", key, err)
	}
	state.Now = clock.Val().UTC()
	state.TokensNow = state.AsOf(state.Now).Tokens
	state.ExpiresIn = expiry(pttl.Val())
	return state, true, nil
}

// expiry reads go-redis's answer to PTTL: the nanoseconds -1 and -2 stand for
// no expiry, and for a key that went between the two commands.
func expiry(pttl time.Duration) time.Duration {
	switch {
	case pttl == -1:
		return math.MaxInt64
	case pttl < 0:
		return 0
	}
	return pttl
}

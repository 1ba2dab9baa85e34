package lease

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"strconv"
	"time"
)

// Bounds of a Limit. They keep every number of the protocol an exact integer:
// in Go's int64, in Lua's doubles (2^53) and on the wire.
const (
	// MaxRate is the highest rate, in tokens per second.
	MaxRate = 1e12
	// MaxBurst is the largest burst, in tokens.
	MaxBurst = int64(1e15)
	// maxUnits bounds burst × units per token, the full balance in the units
	// that Limit.ratio chooses: the integers a double holds exactly.
	maxUnits = int64(1) << 53
)

// Limit is how much of one key may be used: Rate tokens per second on average,
// and never more than Burst tokens at one instant. In any window of length t
// all nodes together admit at most Burst + Rate·t tokens. Other Algorithms have
// other bounds; to those with windows the limit is Burst tokens per Burst/Rate.
//
// A limit with Rate 0 or Burst 0 (the zero Limit too) denies everything.
type Limit struct {
	// Rate is the refill rate in tokens per second; fractions are fine
	// (10.0/60 is ten a minute). Range 0 to 1e12.
	Rate float64
	// Burst is the size of the bucket in tokens. Range 0 to 1e15.
	// Burst/Rate, the time to fill, may be at most about 285 years; where it is a
	// window, MinWindow to MaxWindow.
	Burst int64
	// Algorithm says how the two are to be understood. Default TokenBucket.
	Algorithm Algorithm
	// OnFailure decides requests while the store does not answer. Default
	// Degrade.
	OnFailure Policy
}

// Policy decides a request for which the store gave no answer in time.
type Policy uint8

const (
	// Degrade goes on limiting with this node's share of the limit. A Store
	// that knows of no share denies.
	Degrade Policy = iota
	// Allow admits it, uncounted: the limit does not hold meanwhile.
	Allow
	// Deny refuses it.
	Deny
)

var policyNames = [...]string{"degrade", "allow", "deny"}

// String returns "degrade", "allow" or "deny".
func (p Policy) String() string {
	if int(p) < len(policyNames) {
		return policyNames[p]
	}
	return fmt.Sprintf("policy(%d)", uint8(p))
}

// MarshalText returns String's name, for JSON and flags.
func (p Policy) MarshalText() ([]byte, error) {
	if int(p) >= len(policyNames) {
		return nil, &LimitError{"OnFailure", p.String(), "degrade, allow or deny"}
	}
	return []byte(p.String()), nil
}

// UnmarshalText reads a name that String gives.
func (p *Policy) UnmarshalText(text []byte) error {
	for i, name := range policyNames {
		if string(text) == name {
			*p = Policy(i)
			return nil
		}
	}
	return &LimitError{"OnFailure", strconv.Quote(string(text)), "degrade, allow or deny"}
}

// String returns the limit as "10/s burst 20", and its algorithm unless that is
// TokenBucket: "10/s burst 20 algorithm sliding-log".
func (l Limit) String() string {
	s := fmt.Sprintf("%s/s burst %d", strconv.FormatFloat(l.Rate, 'f', -1, 64), l.Burst)
	if l.Algorithm != TokenBucket {
		s += " algorithm " + l.Algorithm.String()
	}
	return s
}

// Zero reports whether the limit denies everything.
func (l Limit) Zero() bool { return l.Rate == 0 || l.Burst == 0 }

// LimitError says which field of a Limit is out of range. It matches
// errors.Is(err, ErrLimit).
type LimitError struct {
	Field string // "Rate", "Burst", "Burst/Rate", "Algorithm" or "OnFailure"
	Value string // as given
	Want  string // the accepted range
}

// ErrLimit is what every LimitError matches.
var ErrLimit = errors.New("lease: bad limit")

func (e *LimitError) Error() string {
	return fmt.Sprintf("lease: Limit.%s = %s: want %s", e.Field, e.Value, e.Want)
}

// Is makes every LimitError match ErrLimit.
func (e *LimitError) Is(target error) bool { return target == ErrLimit }

// Validate returns a *LimitError for the first field out of range, else nil.
func (l Limit) Validate() error {
	// Written so that NaN fails: only what is provably in range passes.
	if !(l.Rate >= 0 && l.Rate <= MaxRate) {
		return &LimitError{"Rate", fmt.Sprintf("%g", l.Rate), "0 to 1e12 tokens per second"}
	}
	if l.Burst < 0 || l.Burst > MaxBurst {
		return &LimitError{"Burst", fmt.Sprint(l.Burst), "0 to 1e15 tokens"}
	}
	if l.OnFailure > Deny {
		return &LimitError{"OnFailure", l.OnFailure.String(), "degrade, allow or deny"}
	}
	if int(l.Algorithm) >= len(algorithmNames) {
		return &LimitError{"Algorithm", l.Algorithm.String(), wantAlgorithm}
	}
	if l.Zero() {
		return nil
	}
	count, perUS, ok := l.ratio()
	if !ok {
		return &LimitError{
			"Burst/Rate", fmt.Sprintf("%d/%g", l.Burst, l.Rate),
			"a time to fill of at most 285 years, and a rate that 2^53/Burst microseconds can express",
		}
	}
	if l.Algorithm.Windowed() {
		return l.validWindow(count, perUS)
	}
	return nil
}

// Ratio returns the rate as exactly count tokens per perUS microseconds. One
// token is perUS units and each microsecond refills count units, so the whole
// protocol is integer arithmetic: no drift, and a retry-after that is right to
// the microsecond.
//
// It is the first continued-fraction convergent of Rate·1e-6 within the
// precision of a float64, or the best one whose full bucket stays under 2^53
// units. ok is false when that is off by more than one part in a million, for
// an invalid limit, and for a limit that denies everything.
func (l Limit) Ratio() (count, perUS int64, ok bool) {
	if l.Validate() != nil || l.Zero() {
		return 0, 0, false
	}
	return l.ratio()
}

func (l Limit) ratio() (count, perUS int64, ok bool) {
	x := new(big.Rat).SetFloat64(l.Rate)
	if x == nil || x.Sign() <= 0 {
		return 0, 0, false
	}
	x.Quo(x, big.NewRat(1_000_000, 1))
	exact := x
	maxPer := maxUnits / l.Burst

	// h/k runs through the convergents of x.
	h0, h1 := big.NewInt(0), big.NewInt(1)
	k0, k1 := big.NewInt(1), big.NewInt(0)
	rest := new(big.Rat).Set(x)
	for {
		a := new(big.Int).Quo(rest.Num(), rest.Denom())
		h0, h1 = h1, new(big.Int).Add(new(big.Int).Mul(a, h1), h0)
		k0, k1 = k1, new(big.Int).Add(new(big.Int).Mul(a, k1), k0)
		if !k1.IsInt64() || k1.Int64() > maxPer || !h1.IsInt64() || h1.Int64() > maxUnits {
			break
		}
		count, perUS = h1.Int64(), k1.Int64()
		if relativeError(count, perUS, exact) < 0x1p-51 {
			break
		}
		rest.Sub(rest, new(big.Rat).SetInt(a))
		if rest.Sign() == 0 {
			break
		}
		rest.Inv(rest)
	}
	if count <= 0 || perUS <= 0 || relativeError(count, perUS, exact) > 1e-6 {
		return 0, 0, false
	}
	return count, perUS, true
}

func relativeError(count, perUS int64, exact *big.Rat) float64 {
	diff := new(big.Rat).SetFrac64(count, perUS)
	diff.Sub(diff, exact)
	diff.Quo(diff, exact)
	f, _ := diff.Float64()
	return math.Abs(f)
}

// terms is a Limit made ready for use: what the hot path and the calls of all
// its keys share. It never changes once made.
type terms struct {
	limit      Limit
	version    int64
	count      int64 // tokens per perUS microseconds
	perUS      int64
	nsPerToken float64
	period     time.Duration // how long one lease should last, T
	zero       bool          // denies everything
	tooSmall   bool          // the burst is too small to lease any of it, or its algorithm leases none
	windowed   bool          // the bucket does not fill little by little

	// What a Decision shows: the full bucket that its tokens are counted in, and
	// where they come from.
	full   int64
	source Source
}

// shareOf returns t as a grant that is not the store's shows it: a bucket of its
// own, another refill rate.
func (t *terms) shareOf(g *Grant) *terms {
	s := *t
	s.full, s.source, s.windowed = g.Full, g.Source, false
	if g.Rate > 0 {
		s.nsPerToken = 1e9 / g.Rate
	}
	return &s
}

// newTerms prepares l. The lease period is T = min(longest, burst/(3·rate)):
// with outstanding leases counted against the burst, a node gets the full rate
// only if burst ≥ 2·rate·T; the third rate·T is room for sharing (doc.go).
func newTerms(l Limit, version int64, longest time.Duration) (*terms, error) {
	if err := l.Validate(); err != nil {
		return nil, err
	}
	if l.Zero() {
		return &terms{limit: l, version: version, period: longest, zero: true, source: SourceLease}, nil
	}
	count, perUS, _ := l.ratio()
	return termsWith(l, count, perUS, version, longest), nil
}

// termsWith is newTerms for a limit that denies nothing and has its ratio.
func termsWith(l Limit, count, perUS, version int64, longest time.Duration) *terms {
	t := &terms{limit: l, version: version, count: count, perUS: perUS, period: longest, full: l.Burst, source: SourceLease}
	t.nsPerToken = float64(t.perUS) * 1e3 / float64(t.count)
	if full := float64(l.Burst) * t.nsPerToken; full/3 < float64(longest) {
		t.period = max(time.Duration(full/3), minTTL/2)
	}
	t.windowed = l.Algorithm.Windowed()
	t.tooSmall = l.Burst < 2*minLease || !l.Algorithm.Leases()
	return t
}

// balance returns what g says was left in the bucket, in tokens rounded up.
func (t *terms) balance(g *Grant) int64 {
	if t.windowed {
		return g.Remaining // whole tokens are all there is
	}
	const rounding = 1e-6
	missing := float64(g.ResetAfter) / t.nsPerToken
	return t.limit.Burst - int64(math.Floor(min(missing+rounding, float64(2*t.limit.Burst))))
}

// timeFor returns how long the limit takes to refill n tokens, saturating.
func (t *terms) timeFor(n int64) time.Duration {
	if n <= 0 {
		return 0
	}
	d := float64(n) * t.nsPerToken
	if d >= float64(math.MaxInt64) {
		return math.MaxInt64
	}
	return time.Duration(d)
}

package lease

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Algorithm says how a Limit counts. All have the same two numbers; the window
// of the last three is Burst/Rate, rounded up to a whole microsecond (a burst of
// 100 at 100 a minute is 100 per minute), and what they allow is Burst tokens per
// window. A key has one state for each algorithm but the first two, which share
// theirs: a change of the algorithm begins with an empty one.
type Algorithm uint8

const (
	// TokenBucket admits at most Burst + Rate·t tokens in any window of length t.
	TokenBucket Algorithm = iota
	// LeakyBucket is a policer: a request that does not fit is refused, not
	// queued. Each token raises the level by one, the level leaks at Rate, and must
	// not pass Burst. That is the token bucket seen from the other side (what the
	// level lacks to Burst are its tokens), so it is the same script on the same
	// state, and leases alike.
	LeakyBucket
	// FixedWindow counts in windows that begin at multiples of their length on the
	// store's clock: at most Burst tokens in each, and so at most 2·Burst in
	// any stretch of that length. Nodes lease, until the window ends.
	FixedWindow
	// SlidingLog remembers when tokens were admitted: at most Burst in any window.
	// It keeps 256 instants; when more than that are in one window, neighbours
	// closer than a 128th of it become the later one, and so some tokens count for
	// that much longer than the window: it admits less, never more. Every
	// round trip serves all who wait for it; nothing is leased.
	SlidingLog
	// SlidingCounter counts in windows as FixedWindow does, and adds the count of the
	// window before, in proportion to how much of it the window that ends now still
	// covers: close to SlidingLog for steady traffic, with two numbers. If the window
	// before had P tokens, then at a part f of this one at most Burst + f·P are
	// admitted in the window that ends there: less than 2·Burst whatever happens, and
	// never more than Burst in an aligned one. Nothing is leased.
	SlidingCounter
)

// MinWindow and MaxWindow bound Burst/Rate of an algorithm that has windows.
const (
	MinWindow = time.Millisecond
	MaxWindow = 366 * 24 * time.Hour
)

var algorithmNames = [...]string{"token-bucket", "leaky-bucket", "fixed-window", "sliding-log", "sliding-counter"}

// wantAlgorithm is what an Algorithm may be.
var wantAlgorithm = strings.Join(algorithmNames[:], ", ")

// Algorithms returns all there are.
func Algorithms() []Algorithm {
	return []Algorithm{TokenBucket, LeakyBucket, FixedWindow, SlidingLog, SlidingCounter}
}

// String returns "token-bucket", "leaky-bucket", "fixed-window", "sliding-log" or
// "sliding-counter".
func (a Algorithm) String() string {
	if int(a) < len(algorithmNames) {
		return algorithmNames[a]
	}
	return fmt.Sprintf("algorithm(%d)", uint8(a))
}

// MarshalText returns String's name, for JSON and flags.
func (a Algorithm) MarshalText() ([]byte, error) {
	if int(a) >= len(algorithmNames) {
		return nil, &LimitError{"Algorithm", a.String(), wantAlgorithm}
	}
	return []byte(a.String()), nil
}

// UnmarshalText reads a name that String gives.
func (a *Algorithm) UnmarshalText(text []byte) error {
	for i, name := range algorithmNames {
		if string(text) == name {
			*a = Algorithm(i)
			return nil
		}
	}
	return &LimitError{"Algorithm", strconv.Quote(string(text)), wantAlgorithm}
}

// Windowed reports whether a counts in windows of Burst/Rate.
func (a Algorithm) Windowed() bool { return a >= FixedWindow }

// Leases reports whether nodes may lease tokens: whether a token may be spent
// later than the store counted it without the bound being lost. A log and a
// counter that slides bound what is admitted by when it was; of the others one
// keeps an account of what is out, and in a fixed window the instant is no matter.
func (a Algorithm) Leases() bool { return a <= FixedWindow }

// Window returns the window's length, 0 for an algorithm that has none and for a
// limit that is invalid or denies everything.
func (l Limit) Window() time.Duration {
	if !l.Algorithm.Windowed() {
		return 0
	}
	count, perUS, ok := l.Ratio()
	if !ok {
		return 0
	}
	return windowOf(l.Burst, count, perUS)
}

// windowOf is the window of a limit whose ratio is count per perUS. Rounded up:
// a shorter window would allow more than the rate.
func windowOf(burst, count, perUS int64) time.Duration {
	return time.Duration((burst*perUS+count-1)/count) * time.Microsecond
}

// validWindow returns the error of a window out of range. The ratio is valid.
func (l Limit) validWindow(count, perUS int64) error {
	if w := windowOf(l.Burst, count, perUS); w < MinWindow || w > MaxWindow {
		return &LimitError{"Burst/Rate", w.String(), fmt.Sprintf("a window of %v to %v for a %v", MinWindow, MaxWindow, l.Algorithm)}
	}
	return nil
}

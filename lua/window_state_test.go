package lua

import (
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// TestDecodeWindow follows a random life of each state, and compares what Inspect
// tells with what a call is told at that time.
func TestDecodeWindow(t *testing.T) {
	for _, a := range []lease.Algorithm{lease.FixedWindow, lease.SlidingLog, lease.SlidingCounter} {
		s := newStates(t)
		r := rand.New(rand.NewPCG(1, uint64(a)))
		limits := []lease.Limit{{Rate: 100, Burst: 100, Algorithm: a}, {Rate: 7, Burst: 20, Algorithm: a}}
		for i := range 400 {
			c := lease.Call{Key: "k", Limit: limits[i/100%2], TTL: 200 * time.Millisecond, LastEpoch: -1, Need: 1 + r.Int64N(9), Share: lease.ShareNone}
			c.Bound, c.Debt = c.Need, r.Int64N(20)/19*50
			c.Want = c.Bound + r.Int64N(10)
			if answer := s.Acquire(t.Context(), []lease.Call{c})[0]; answer.Err != nil {
				t.Fatal(answer.Err)
			}
			s.at(s.now.Add(time.Duration(r.Int64N(400_000)) * time.Microsecond))
			look := lease.Call{Key: "k", Limit: c.Limit, TTL: c.TTL, LastEpoch: -1}
			g := s.Acquire(t.Context(), []lease.Call{look})[0].Grant
			st, found, err := s.InspectAs(t.Context(), "k", a)
			if err != nil {
				t.Fatal(err)
			}
			if !found {
				continue
			}
			if got := max(0, math.Floor(st.TokensNow+1e-9)); got != float64(g.Remaining) || st.Limit.Algorithm != a || g.Newer {
				t.Fatalf("%v, call %d: %+v; want %d tokens", a, i, st, g.Remaining)
			}
			raw, err := s.redis.Get(s.RedisKeyOf("k", a))
			if err != nil {
				t.Fatal(err)
			}
			s.damage(t, a, raw, i)
		}
	}
}

// damage checks that Decode refuses a broken state as the script does.
func (s *states) damage(t *testing.T, a lease.Algorithm, raw string, i int) {
	t.Helper()
	words := strings.Split(raw, " ")
	k := i % len(words)
	words[k] = []string{"x", "-1", "99999999999999999999", "", "0", "1", "9007199254740992"}[i/len(words)%7]
	bad := strings.Join(words, " ")
	if err := s.redis.Set(s.RedisKeyOf("bad", a), bad); err != nil {
		t.Fatal(err)
	}
	look := lease.Call{Key: "bad", Limit: lease.Limit{Rate: 1, Burst: 1, Algorithm: a}, TTL: time.Second, LastEpoch: -1}
	answer := s.Acquire(t.Context(), []lease.Call{look})[0]
	_, err := DecodeWindow(bad, a)
	if answer.Err == nil && answer.Grant.Corrupt != errors.Is(err, ErrState) {
		t.Errorf("%q: DecodeWindow says %v, the script that it is corrupt: %v", bad, err, answer.Grant.Corrupt)
	}
	if answer.Err != nil {
		t.Errorf("%q: %v; want no endless error", bad, answer.Err)
	}
}

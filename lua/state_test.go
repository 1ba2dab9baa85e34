package lua

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/internal/redistest"
	"github.com/hybridlimit/hybridlimit/lease"
	"github.com/hybridlimit/hybridlimit/lease/leasetest"
)

// states is a Store on a miniredis whose clock the test sets.
type states struct {
	*Store
	redis *miniredis.Miniredis
	now   time.Time
}

func newStates(t testing.TB) *states {
	t.Helper()
	m := miniredis.RunT(t)
	m.ClockTTL(true)
	rdb := redis.NewClient(redistest.Options(m.Addr()))
	t.Cleanup(func() { rdb.Close() })
	s := &states{Store: NewStore(rdb, Options{}), redis: m}
	s.at(time.UnixMicro(1_800_000_000_000_000))
	return s
}

func (s *states) at(now time.Time) {
	s.now = now.UTC()
	s.redis.SetTime(now)
}

func (s *states) set(t *testing.T, key, raw string) {
	t.Helper()
	if err := s.redis.Set(s.RedisKey(key), raw); err != nil {
		t.Fatal(err)
	}
}

func (s *states) inspect(t *testing.T, key string) State {
	t.Helper()
	st, found, err := s.Inspect(t.Context(), key)
	if err != nil || !found {
		t.Fatalf("Inspect(%q) = %+v, %v, %v; want a state", key, st, found, err)
	}
	return st
}

// good is a state of 2 tokens per second and a burst of 3 (a token is 500000
// units), as of the last microsecond of epoch 4 of half a second each.
const good = "1 750000 2499999 4 1 0 2 1 7 5 0 3 1 500000 500000"

func TestDecode(t *testing.T) {
	st, err := Decode(good)
	if err != nil {
		t.Fatal(err)
	}
	want := State{
		Tokens: 1.5, At: time.UnixMicro(2_499_999).UTC(), Epoch: 4,
		Outstanding: [2]int64{1, 0}, Active: [2]int64{2, 1}, Demand: [2]int64{7, 5},
		Limit: lease.Limit{Rate: 2, Burst: 3}, TTL: 500 * time.Millisecond,
		units: 750_000, count: 1, perUS: 500_000,
	}
	if st != want {
		t.Errorf("Decode(%q)\n = %+v\nwant %+v", good, st, want)
	}
}

// with returns good with one of its words replaced; word 0 is the format.
func with(i int, word string) string {
	words := strings.Split(good, " ")
	words[i] = word
	return strings.Join(words, " ")
}

func TestDecodeRefusesWhatTheScriptRefuses(t *testing.T) {
	s := newStates(t)
	for _, c := range []struct {
		name, raw string
		names     string // what the error must mention; "" for a good state
	}{
		{"good", good, ""},
		{"debt", with(1, "-1500000"), ""},
		{"full", with(1, "1500000"), ""},
		{"most", with(10, "9007199254740991"), ""},
		{"empty", "", "format"},
		{"another format", with(0, "2"), "format"},
		{"text", "hello", "format"},
		{"only the format", "1", "14 numbers"},
		{"one short", strings.TrimSuffix(good, " 500000"), "14 numbers"},
		{"one more", good + " 1", "14 numbers"},
		{"trailing space", good + " ", "14 numbers"},
		{"double space", strings.Replace(good, " 4 ", "  4 ", 1), "14 numbers"},
		{"leading space", " " + good, "format"},
		{"newline", good + "\n", "ttl_us"},
		{"tab", strings.Replace(good, " 4 ", "\t4 ", 1), "14 numbers"},
		{"nan", with(1, "nan"), "units"},
		{"inf", with(1, "inf"), "units"},
		{"minus alone", with(1, "-"), "units"},
		{"two minus signs", with(1, "--1"), "units"},
		{"plus", with(2, "+1"), "at"},
		{"minus", with(4, "-1"), "out0"},
		{"fraction", with(5, "0.5"), "out1"},
		{"exponent", with(6, "1e3"), "act0"},
		{"underscore", with(7, "1_0"), "act1"},
		{"hex", with(8, "0x10"), "dem0"},
		{"not ASCII", with(9, "١"), "dem1"},
		{"too large", with(10, "9007199254740994"), "version"},
		{"far too large", with(10, "99999999999999999999"), "version"},
		{"no burst", with(11, "0"), "burst"},
		{"no rate", with(12, "0"), "count"},
		{"no token", with(13, "0"), "per_us"},
		{"short ttl", with(14, "999"), "ttl_us"},
		{"full bucket inexact", with(11, "18014398510"), "2^53"},
		{"product past int64", with(11, "9007199254740991"), "2^53"},
		{"over the burst", with(1, "1500001"), "units"},
		{"under the burst", with(1, "-1500001"), "units"},
	} {
		t.Run(c.name, func(t *testing.T) {
			st, err := Decode(c.raw)
			switch {
			case c.names == "" && err != nil:
				t.Errorf("Decode(%q) = %v", c.raw, err)
			case c.names != "" && (!errors.Is(err, ErrState) || !strings.Contains(err.Error(), c.names) || st != State{}):
				t.Errorf("Decode(%q) = %+v, %v; want ErrState about %s", c.raw, st, err, c.names)
			}
			s.agree(t, c.raw)
		})
	}
}

// agree checks that Decode and AsOf read raw as the script does.
func (s *states) agree(t *testing.T, raw string) {
	t.Helper()
	s.set(t, "k", raw)
	// A look, at a version below the state's, so that it changes nothing.
	look := lease.Call{Key: "k", Limit: lease.Limit{Rate: 2, Burst: 3}, TTL: time.Second, LastEpoch: -1}
	answer := s.Acquire(t.Context(), []lease.Call{look})[0]
	st, err := Decode(raw)
	if answer.Err != nil {
		// Numbers that no script wrote can lead the script out of the integers.
		t.Skipf("the script fails on %q: %v", raw, answer.Err)
	}
	g := answer.Grant
	if g.Corrupt != (err != nil) {
		t.Fatalf("%q: Decode says %v, the script that it is corrupt: %v", raw, err, g.Corrupt)
	}
	if err != nil || st.Version == 0 {
		return
	}
	st = st.AsOf(s.now)
	if tokens := max(0, math.Floor(st.Tokens)); tokens != float64(g.Remaining) {
		t.Errorf("%q: AsOf has %v tokens, the script %d", raw, st.Tokens, g.Remaining)
	}
	if out := st.Outstanding[0] + st.Outstanding[1]; out != g.Outstanding {
		t.Errorf("%q: AsOf has %d outstanding, the script %d", raw, out, g.Outstanding)
	}
	if active := max(1, st.Active[0], st.Active[1]); active != g.Active {
		t.Errorf("%q: AsOf has %d active, the script %d", raw, active, g.Active)
	}
}

// FuzzDecode holds Decode and AsOf to the script, on any string.
func FuzzDecode(f *testing.F) {
	f.Add(good)
	f.Add(with(10, "3"))
	f.Add("1 -7 1799999999000000 35999999 1 1 2 1 7 5 3 9 2 500000 50000000")
	f.Add("1 7 1800000000500000 3600000001 1 1 2 1 7 5 3 9 2 500000 500000") // the clock went back
	f.Add("1 7 1799999999999999 3599999999 1 1 2 1 7 5 3 9 2 500000 500000")
	f.Add("")
	s := newStates(f)
	f.Fuzz(func(t *testing.T, raw string) {
		for word := range strings.FieldsSeq(raw) {
			word = strings.TrimPrefix(word, "-")
			if len(word) > 1 && word[0] == '0' || len(word) > 15 {
				t.Skip("miniredis's Lua reads 010 as octal, and large sums other than doubles")
			}
		}
		s.agree(t, raw)
	})
}

func TestAsOf(t *testing.T) {
	st, err := Decode(good) // 1.5 tokens, 1 outstanding, at the end of epoch 4
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		us          int64 // later than st.At, in microseconds
		tokens      float64
		outstanding [2]int64
	}{
		{0, 1.5, [2]int64{1, 0}},
		{1, 1.500002, [2]int64{0, 1}},      // epoch 5 begins: the lease is of the one before
		{250_000, 2, [2]int64{0, 1}},       // 0.5 tokens more: full beside the lease
		{500_000, 2, [2]int64{0, 1}},       // no room
		{500_001, 2, [2]int64{}},           // epoch 6: the lease is forgotten
		{500_002, 2.000002, [2]int64{}},    // and its room refills
		{1_000_001, 3, [2]int64{}},         // full
		{3_600_000_000, 3, [2]int64{}},     // and no further
		{-1, 1.5, [2]int64{1, 0}},          // the clock went back: no refill
		{-2_000_000, 1.5, [2]int64{1, 0}},  // to an earlier epoch: as live as ever
		{-2_499_999, 1.5, [2]int64{1, 0}},  // to 1970
		{math.MaxInt32, 3, [2]int64{0, 0}}, // 35 minutes
	} {
		now := st.At.Add(time.Duration(c.us) * time.Microsecond)
		got := st.AsOf(now)
		if got.Tokens != c.tokens || got.Outstanding != c.outstanding || got.At != now {
			t.Errorf("after %d µs: %v tokens, %v outstanding at %v; want %v, %v at %v",
				c.us, got.Tokens, got.Outstanding, got.At, c.tokens, c.outstanding, now)
		}
		if again := got.AsOf(now); again != got {
			t.Errorf("after %d µs: AsOf twice = %+v; want %+v", c.us, again, got)
		}
	}
	if got := (State{Tokens: 2}).AsOf(time.Now()); got != (State{Tokens: 2}) {
		t.Errorf("AsOf of a State that is not Decode's = %+v; want it unchanged", got)
	}
}

// TestDecodeReadsWhatTheScriptWrites follows a random life of a bucket, with
// the Go reference beside it.
func TestDecodeReadsWhatTheScriptWrites(t *testing.T) {
	s := newStates(t)
	ref := leasetest.NewStore(func() time.Duration { return time.Duration(s.now.UnixNano()) })
	rng := rand.New(rand.NewPCG(1, 2))
	limits := []lease.Limit{{Rate: 100, Burst: 100}, {Rate: 10.0 / 60, Burst: 20}, {Rate: 1e9, Burst: 1e9}}
	for i := range 300 {
		c := lease.Call{
			Key: "k", Limit: limits[0], TTL: 200 * time.Millisecond, LastEpoch: -1,
			Want: rng.Int64N(40), Demand: rng.Int64N(50), Debt: rng.Int64N(20) / 19 * 150,
		}
		if rng.IntN(30) == 0 {
			c.Limit, c.TTL = limits[rng.IntN(3)], 300*time.Millisecond
		}
		want := ref.Acquire(t.Context(), []lease.Call{c})[0]
		if got := s.Acquire(t.Context(), []lease.Call{c})[0]; got.Err != nil || got.Grant.Tokens != want.Grant.Tokens {
			t.Fatalf("call %d: %+v; want %+v", i, got, want)
		}
		if st, found, err := s.Inspect(t.Context(), "k"); err != nil {
			t.Fatalf("call %d: %v", i, err)
		} else if found {
			// The script writes only what a call changed; both tell it as of now.
			b, now := ref.Bucket("k"), st.AsOf(s.now)
			if st.TokensNow != b.Tokens() || now.Outstanding[0]+now.Outstanding[1] != b.Outstanding() {
				t.Fatalf("call %d: %+v\nwant %v tokens now, %d outstanding", i, st, b.Tokens(), b.Outstanding())
			}
		}
		s.at(s.now.Add(time.Duration(rng.Int64N(80_000)) * time.Microsecond))
	}
}

func TestInspect(t *testing.T) {
	s := newStates(t)
	if st, found, err := s.Inspect(t.Context(), "k"); found || err != nil || st != (State{}) {
		t.Fatalf("Inspect of a missing key = %+v, %v, %v; want nothing", st, found, err)
	}
	// 3 of 10 tokens leased, at 2 a second.
	call := lease.Call{
		Key: "k", Limit: lease.Limit{Rate: 2, Burst: 10}, Version: 7, TTL: time.Second,
		Want: 3, Demand: 4, LastEpoch: -1, Share: lease.ShareNone,
	}
	if a := s.Acquire(t.Context(), []lease.Call{call})[0]; a.Err != nil || a.Grant.Tokens != 3 {
		t.Fatalf("Acquire = %+v", a)
	}
	began := s.now
	st := s.inspect(t, "k")
	want := State{
		Tokens: 7, At: began, TokensNow: 7, Now: began, Epoch: began.Unix(),
		Outstanding: [2]int64{3, 0}, Active: [2]int64{1, 0}, Demand: [2]int64{4, 0},
		Version: 7, Limit: lease.Limit{Rate: 2, Burst: 10}, TTL: time.Second,
		// Full again after 1.5 s, two ttls for the lease and a second's slack.
		ExpiresIn: 4500 * time.Millisecond,
		units:     3_500_000, count: 1, perUS: 500_000,
	}
	if st != want {
		t.Errorf("Inspect\n = %+v\nwant %+v", st, want)
	}
	if again := s.inspect(t, "k"); again != st {
		t.Errorf("looking changed the bucket: %+v\nbefore %+v", again, st)
	}
	// No refill while the lease takes the room, then 0.5 s of it.
	for after, tokens := range map[time.Duration]float64{2 * time.Second: 7, 2500 * time.Millisecond: 8} {
		s.at(began.Add(after))
		if st := s.inspect(t, "k"); st.TokensNow != tokens || st.Tokens != 7 || st.At != began {
			t.Errorf("after %v: %v tokens now, %v at %v; want %v, 7 at %v", after, st.TokensNow, st.Tokens, st.At, tokens, began)
		}
	}
}

func TestInspectErrors(t *testing.T) {
	s := newStates(t)
	if _, _, err := s.Inspect(t.Context(), ""); !errors.Is(err, lease.ErrKey) {
		t.Errorf("Inspect of no key = %v; want lease.ErrKey", err)
	}
	s.set(t, "bad", "1 2 3")
	if _, found, err := s.Inspect(t.Context(), "bad"); found || !errors.Is(err, ErrState) || !strings.Contains(err.Error(), `"bad"`) {
		t.Errorf("Inspect of a bad state = %v, %v; want ErrState and the key", found, err)
	}
	s.redis.HSet(s.RedisKey("hash"), "f", "v")
	if _, found, err := s.Inspect(t.Context(), "hash"); found || err == nil || !strings.Contains(err.Error(), "WRONGTYPE") {
		t.Errorf("Inspect of a hash = %v, %v; want WRONGTYPE", found, err)
	}
	s.set(t, "kept", good) // without an expiry
	if st := s.inspect(t, "kept"); st.ExpiresIn != math.MaxInt64 {
		t.Errorf("a key without expiry: ExpiresIn = %v; want the longest", st.ExpiresIn)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, found, err := s.Inspect(ctx, "kept"); found || !errors.Is(err, context.Canceled) {
		t.Errorf("Inspect with an ended context = %v, %v; want its error", found, err)
	}
	s.redis.Close()
	if _, found, err := s.Inspect(t.Context(), "kept"); found || err == nil {
		t.Errorf("Inspect without a server = %v, %v; want an error", found, err)
	}
}

// narrow hides all of a client but what Client asks for.
type narrow struct{ Client }

func TestInspectOnRedis(t *testing.T) {
	rdb := redistest.Start(t).Client(t)
	s := NewStore(narrow{rdb}, Options{Prefix: "p:"})
	for _, key := range []string{"k", "{50%}", strings.Repeat("long", 100)} {
		call := lease.Call{Key: key, Limit: lease.Limit{Rate: 1, Burst: 10}, TTL: time.Minute, Want: 4, LastEpoch: -1}
		if a := s.Acquire(t.Context(), []lease.Call{call})[0]; a.Err != nil || a.Grant.Tokens != 4 {
			t.Fatalf("Acquire(%.20q) = %+v", key, a)
		}
		st, found, err := s.Inspect(t.Context(), key)
		if err != nil || !found || st.Tokens != 6 || st.TokensNow != 6 || st.Outstanding != [2]int64{4, 0} {
			t.Errorf("Inspect(%.20q) = %+v, %v, %v; want 6 tokens and 4 outstanding", key, st, found, err)
		}
		if late := st.Now.Sub(st.At); late < 0 || late > time.Minute || st.ExpiresIn <= 2*time.Minute || st.ExpiresIn > 3*time.Minute {
			t.Errorf("Inspect(%.20q): asked %v later, expires in %v; want at once, over two minutes", key, late, st.ExpiresIn)
		}
	}
}

func ExampleDecode() {
	st, err := Decode("1 750000 2499999 4 1 0 2 1 7 5 0 3 1 500000 500000")
	fmt.Println(st.Tokens, st.Limit, st.Outstanding, err)
	// Output: 1.5 2/s burst 3 [1 0] <nil>
}

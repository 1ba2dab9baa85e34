package hybrid_test

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

func TestParseRate(t *testing.T) {
	for in, want := range map[string]float64{
		"100/s": 100, "0/s": 0, "10/m": 10.0 / 60, "10/min": 10.0 / 60, "5000/h": 5000.0 / 3600, "5000/hour": 5000.0 / 3600,
		"86400/d": 1, "1/day": 1.0 / 86400, "0.5/second": 0.5, "1e6/s": 1e6, "1E+3/sec": 1000, "1e12/s": 1e12, "6e13/m": 1e12,
		"10-M": 10.0 / 60, "5-S": 5, "1000-H": 1000.0 / 3600, "2-D": 2.0 / 86400, "5r/s": 5, "30r/m": 0.5,
		"100 per minute": 100.0 / 60, " 100\tper  2 minutes ": 100.0 / 120, "100 / s": 100, "20/2m": 20.0 / 120, "3 per 0.5 s": 6, ".5/s": 0.5,
	} {
		if got, err := hybrid.ParseRate(in); err != nil || got != want {
			t.Errorf("ParseRate(%q) = %v, %v; want %v, nil", in, got, err, want)
		}
	}
	for in, pos := range map[string]int{
		"": 1, "/s": 1, "100": 4, "100/": 5, "100/x": 5, "100/S": 5, "x/s": 1, "-1/s": 1, "+1/s": 1, "NaN/s": 1, "Inf/s": 1,
		"1e13/s": 1, " 2e12/s": 2, "0x1p4/s": 2, "1_000/s": 2, "1/s/s": 4, "10-m": 4, "10-": 4, "10 per": 4, "1e/s": 2, "1..2/s": 1, "5r": 2,
		"10/0s": 4, "100/sburst": 5, "100/s burst 3": 7, "1e999/s": 1, "１/s": 1, "3/2": 4,
	} {
		_, err := hybrid.ParseRate(in)
		wrong(t, in, err, pos)
	}
}

// wrong fails t unless err tells that input is wrong at pos.
func wrong(t *testing.T, input string, err error, pos int) {
	t.Helper()
	syntax, ok := errors.AsType[*hybrid.SyntaxError](err)
	if !ok || syntax.Pos != pos || syntax.Input != input || !strings.Contains(err.Error(), "want ") && !strings.Contains(err.Error(), "twice") {
		t.Errorf("%q: %v; want a *SyntaxError at position %d that says what is wanted", input, err, pos)
	}
}

func TestParseLimit(t *testing.T) {
	for in, want := range map[string]struct {
		limit hybrid.Limit
		cost  int64
	}{
		"100/s":                       {hybrid.PerSecond(100, 100), 1},
		"10/m":                        {hybrid.PerMinute(10, 10), 1},
		"0.5/s":                       {hybrid.PerSecond(0.5, 1), 1},
		"1.5/s":                       {hybrid.PerSecond(1.5, 2), 1},
		"0/s":                         {hybrid.PerSecond(0, 0), 1},
		"100/s burst 200":             {hybrid.PerSecond(100, 200), 1},
		"5000/h, burst 100, cost 5":   {hybrid.PerHour(5000, 100), 5},
		"5000/h cost 5 burst 5":       {hybrid.PerHour(5000, 5), 5},
		"10-M burst 0":                {hybrid.PerMinute(10, 0), 1},
		"1/s burst 1000000000":        {hybrid.PerSecond(1, 1e9), 1},
		"20 per 2 minutes,burst 7":    {hybrid.PerMinute(10, 7), 1},
		"100/m algorithm sliding-log": {hybrid.PerWindow(100, time.Minute, hybrid.SlidingLog), 1},
		"100/m, algorithm fixed-window, burst 200 cost 7": {hybrid.Limit{Rate: 100.0 / 60, Burst: 200, Algorithm: hybrid.FixedWindow}, 7},
		"5/s burst 9 algorithm\tsliding-counter":          {hybrid.Limit{Rate: 5, Burst: 9, Algorithm: hybrid.SlidingCounter}, 1},
		"5/s algorithm leaky-bucket":                      {hybrid.Limit{Rate: 5, Burst: 5, Algorithm: hybrid.LeakyBucket}, 1},
		"5/s algorithm token-bucket":                      {hybrid.PerSecond(5, 5), 1},
		"\t1e13 per 10000 s\tcost\t3\t ":                  {hybrid.PerSecond(1e9, 1e13), 3},
	} {
		limit, cost, err := hybrid.ParseLimit(in)
		if err != nil || limit != want.limit || cost != want.cost {
			t.Errorf("ParseLimit(%q) = %v, %d, %v; want %v, %d", in, limit, cost, err, want.limit, want.cost)
		}
	}
	for in, pos := range map[string]int{
		"": 1, "100/s burst": 12, "100/s burst x": 13, "100/s burst5": 12, "3/s burst 5cost 1": 12, "1e-300/1e300d": 1, "1e-320/d": 1, "1e-12/s": 1, "1/s burst 1000000000000": 1, "100/s burst 1.5": 14, "100/s burst 1000000000000001": 13, "100/s burst -1": 13,
		"100/s burst 1 burst 2": 15, "100/s cost 1, cost 1": 15, "100/s cost 0": 12, "100/s cost 101": 12, "100/s burst 5 cost 6": 20,
		"100/s,": 7, "100/s,,": 7, "100/s size 5": 7, "100/s 5": 7, "0/s cost 1": 10, "100/s Burst 5": 7,
		"5/s algorithm": 14, "5/s algorithm ": 15, "5/s algorithm log": 15, "5/s algorithm sliding_log": 15, "5/s algorithm Sliding-Log": 15,
		"5/s algorithm fixed-window algorithm fixed-window": 28, "10000/s burst 5 algorithm fixed-window": 27,
		"1/d burst 367, algorithm sliding-log": 26, "5/s algorithm fixed-window,": 28,
	} {
		_, _, err := hybrid.ParseLimit(in)
		wrong(t, in, err, pos)
	}
}

// Whatever it reads is in range, and what it refuses it refuses at a place in the
// input.
func FuzzParseLimit(f *testing.F) {
	for _, s := range []string{"100/s", "5r/m", "10-M burst 5", "100 per 2 minutes, burst 7, cost 3", "5/s algorithm sliding-log burst 3", "1e999/s", "", "100/s cost 0", "1/0.0s", "\xff/s"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		limit, cost, err := hybrid.ParseLimit(s)
		if err != nil {
			if syntax, ok := errors.AsType[*hybrid.SyntaxError](err); !ok || syntax.Pos < 1 || syntax.Pos > len(s)+1 || syntax.Why == "" {
				t.Errorf("ParseLimit(%q): %v; want a *SyntaxError inside the input", s, err)
			}
			return
		}
		if limit.Validate() != nil || math.IsNaN(limit.Rate) || cost < 1 || cost > max(1, limit.Burst) {
			t.Errorf("ParseLimit(%q) = %v, %d; want them in range", s, limit, cost)
		}
		if rate, err := hybrid.ParseRate(s); err == nil && rate != limit.Rate {
			t.Errorf("ParseRate(%q) = %v; ParseLimit says %v", s, rate, limit.Rate)
		}
	})
}

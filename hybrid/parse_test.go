package hybrid_test

import (
	"strings"
	"testing"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

func TestParseRate(t *testing.T) {
	for in, want := range map[string]float64{
		"100/s": 100, "10/m": 10.0 / 60, "5000/h": 5000.0 / 3600, "1/d": 1.0 / 86400,
		"0.5/second": 0.5, "1e3/min": 1000.0 / 60, "0/s": 0, "2/hour": 2.0 / 3600, "3/day": 3.0 / 86400,
	} {
		if got, err := hybrid.ParseRate(in); err != nil || got != want {
			t.Errorf("ParseRate(%q) = %v, %v; want %v, nil", in, got, err, want)
		}
	}
	for _, in := range []string{
		"", "10", "10/", "/s", "10/M", "10/ms", "10 /s", "10/s ", "-1/s", "NaN/s", "Inf/s", "1e400/s", "1e13/s", "0x10/s", "1_0/s", "10//s", "10/s/s",
	} {
		got, err := hybrid.ParseRate(in)
		if err == nil {
			t.Errorf("ParseRate(%q) = %v, nil; want an error", in, got)
		} else if !strings.Contains(err.Error(), "want a number and a unit") {
			t.Errorf("ParseRate(%q): error %q does not say what is wanted", in, err)
		}
	}
}

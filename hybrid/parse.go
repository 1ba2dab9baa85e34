package hybrid

import (
	"fmt"
	"strconv"
	"strings"
)

// rateUnits are the accepted units of a rate, in seconds.
var rateUnits = map[string]float64{
	"s": 1, "sec": 1, "second": 1,
	"m": 60, "min": 60, "minute": 60,
	"h": 3600, "hour": 3600,
	"d": 86400, "day": 86400,
}

// ParseRate reads a rate such as "100/s", "10/m", "5000/h" or "0.5/minute" and
// returns it in tokens per second. The unit is required: s, m, h or d, or sec,
// second, min, minute, hour, day, in lower case.
func ParseRate(s string) (perSecond float64, err error) {
	bad := func(why string) (float64, error) {
		return 0, fmt.Errorf("hybrid: rate %.64q: %s: want a number and a unit, as in 100/s, 10/m or 5000/h", s, why)
	}
	number, unit, found := strings.Cut(s, "/")
	if !found {
		return bad("no unit")
	}
	seconds, ok := rateUnits[unit]
	if !ok {
		return bad(fmt.Sprintf("unknown unit %.16q", unit))
	}
	if strings.ContainsAny(number, "xXpP_") { // ParseFloat would read 0x1p4 and 1_000
		return bad("not a decimal number")
	}
	n, err := strconv.ParseFloat(number, 64)
	if err != nil {
		return bad("not a number")
	}
	if !(n >= 0 && n/seconds <= MaxRate) {
		return bad("out of range 0 to 1e12 a second")
	}
	return n / seconds, nil
}

package hybrid

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// rateUnits are the accepted units of a rate, in seconds.
var rateUnits = map[string]float64{
	"s": 1, "sec": 1, "second": 1, "seconds": 1,
	"m": 60, "min": 60, "minute": 60, "minutes": 60,
	"h": 3600, "hour": 3600, "hours": 3600,
	"d": 86400, "day": 86400, "days": 86400,
	// After a dash, and there alone.
	"-S": 1, "-M": 60, "-H": 3600, "-D": 86400,
}

// SyntaxError says where a rate or a limit cannot be read, and why.
type SyntaxError struct {
	Input string
	Pos   int // of the first byte that is wrong, from 1; one past the end if something is missing
	Why   string
}

func (e *SyntaxError) Error() string {
	return fmt.Sprintf("hybrid: limit %.64q: position %d: %s", e.Input, e.Pos, e.Why)
}

// ParseRate reads a rate and returns it in tokens per second, 0 to 1e12. These
// are notations of one rate:
//
//	10/m  10/min  10/minute  10r/m  10-M  10 per minute  20/2m  20 per 2 minutes
//
// The unit is required: s, m, h or d, or sec, second, min, minute, hour, day, or their
// plurals, in lower case; S, M, H or D after a dash. The error is a *SyntaxError.
func ParseRate(s string) (perSecond float64, err error) {
	p := parser{input: s}
	rate, _, err := p.rate()
	if err != nil {
		return 0, err
	}
	if p.skip(); p.at < len(s) {
		return 0, p.bad("want nothing after the unit")
	}
	return rate, nil
}

// ParseLimit reads a limit and what a request costs: a rate as in ParseRate, and then,
// in any order, "burst 200" and "cost 5", in tokens, and "algorithm sliding-log".
//
//	100/s    100/s burst 200    5000/h, burst 100, cost 5    100/m algorithm fixed-window
//
// Without a burst it is what the rate gives in its unit, at least 1: 100 of "100/m".
// So the window of an algorithm that has one is the rate's unit. Without a cost that
// is 1; a cost is at least 1 and at most the burst. Algorithms have the names that
// Algorithm.String gives; without one it is token-bucket. The limit is valid: its parts
// fit each other (Limit.Validate). The error is a *SyntaxError.
func ParseLimit(s string) (limit Limit, cost int64, err error) {
	p := parser{input: s}
	rate, count, err := p.rate()
	if err != nil {
		return Limit{}, 0, err
	}
	limit = Limit{Rate: rate}
	burstAt, costAt, algorithmAt := -1, -1, -1
	for {
		if p.skip(); p.at < len(s) && s[p.at] == ',' {
			p.at++
			p.skip()
			if p.at == len(s) {
				return Limit{}, 0, p.bad("want burst, cost or algorithm after the comma")
			}
		}
		if p.at == len(s) {
			break
		}
		at := p.at
		if before := s[at-1]; before != ' ' && before != '\t' && before != ',' {
			return Limit{}, 0, p.bad("want a space")
		}
		word := p.word()
		switch {
		case word == "burst" && burstAt < 0:
			if limit.Burst, err = p.tokens(MaxBurst); err != nil {
				return Limit{}, 0, err
			}
			burstAt = at
		case word == "cost" && costAt < 0:
			if cost, err = p.tokens(MaxBurst); err != nil {
				return Limit{}, 0, err
			}
			costAt = p.began
		case word == "algorithm" && algorithmAt < 0:
			if limit.Algorithm, algorithmAt, err = p.algorithm(); err != nil {
				return Limit{}, 0, err
			}
		case word == "burst", word == "cost", word == "algorithm":
			p.at = at
			return Limit{}, 0, p.bad(word + " is there twice")
		default:
			p.at = at
			return Limit{}, 0, p.bad("want burst, cost or algorithm, or nothing more")
		}
	}
	if burstAt < 0 && rate > 0 {
		limit.Burst = int64(max(1, math.Ceil(min(count, float64(MaxBurst)))))
	}
	if err := limit.Validate(); err != nil {
		bad, _ := errors.AsType[*LimitError](err)
		p.at = max(0, algorithmAt) // all else is in range by itself
		return Limit{}, 0, p.bad(fmt.Sprintf("%s is %s: want %s", bad.Field, bad.Value, bad.Want))
	}
	if costAt < 0 {
		cost = 1
	} else if cost < 1 || cost > limit.Burst {
		p.at = costAt
		return Limit{}, 0, p.bad(fmt.Sprintf("cost %d: want 1 to the burst, %d", cost, limit.Burst))
	}
	return limit, cost, nil
}

// parser reads input from at on.
type parser struct {
	input string
	at    int
	began int // where the last whole number began
}

func (p *parser) bad(why string) error { return &SyntaxError{p.input, p.at + 1, why} }

func (p *parser) skip() {
	for p.at < len(p.input) && (p.input[p.at] == ' ' || p.input[p.at] == '\t') {
		p.at++
	}
}

// while returns the bytes from here on that are in set.
func (p *parser) while(set string) string {
	begin := p.at
	for p.at < len(p.input) && strings.IndexByte(set, p.input[p.at]) >= 0 {
		p.at++
	}
	return p.input[begin:p.at]
}

const (
	digits  = "0123456789"
	letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
)

func (p *parser) word() string { return p.while(letters) }

// number reads a decimal number such as 0.5 or 1e6.
func (p *parser) number() (float64, error) {
	p.skip()
	begin := p.at
	p.while(digits + ".")
	if p.at > begin && p.at < len(p.input) && (p.input[p.at] == 'e' || p.input[p.at] == 'E') {
		mark := p.at
		p.at++
		if p.at < len(p.input) && (p.input[p.at] == '+' || p.input[p.at] == '-') {
			p.at++
		}
		if p.while(digits) == "" {
			p.at = mark
		}
	}
	n, err := strconv.ParseFloat(p.input[begin:p.at], 64)
	if err != nil {
		p.at = begin
		return 0, p.bad("want a decimal number, 0 or more")
	}
	return n, nil
}

// tokens reads a whole number.
func (p *parser) tokens(most int64) (int64, error) {
	before := p.at
	p.skip()
	begin := p.at
	if begin == before {
		return 0, p.bad("want a space and a whole number")
	}
	p.began = begin
	n, err := strconv.ParseInt(p.while(digits), 10, 64)
	if err != nil || n > most {
		p.at = begin
		return 0, p.bad(fmt.Sprintf("want a whole number, 0 to %d", most))
	}
	return n, nil
}

// algorithm reads the name of an algorithm, and tells where it stands.
func (p *parser) algorithm() (a Algorithm, at int, err error) {
	p.skip()
	at = p.at
	if err := a.UnmarshalText([]byte(p.while(letters + "-"))); err != nil {
		p.at = at
		bad, _ := errors.AsType[*LimitError](err)
		return 0, 0, p.bad("want an algorithm: " + bad.Want)
	}
	return a, at, nil
}

// rate reads a rate: tokens per second, and per unit as it stands there.
func (p *parser) rate() (perSecond, count float64, err error) {
	p.skip()
	begin := p.at
	if count, err = p.number(); err != nil {
		return 0, 0, err
	}
	if strings.HasPrefix(p.input[p.at:], "r/") {
		p.at++
	}
	p.skip()
	const notation = "want a unit, as in 100/s, 10-M or 100 per minute"
	dash := ""
	switch rest := p.input[p.at:]; {
	case strings.HasPrefix(rest, "/"):
		p.at++
	case strings.HasPrefix(rest, "-"):
		p.at++
		dash = "-"
	case strings.HasPrefix(rest, "per ") || strings.HasPrefix(rest, "per\t"):
		p.at += len("per ")
	default:
		return 0, 0, p.bad(notation)
	}
	units := 1.0
	if p.skip(); dash == "" && p.at < len(p.input) && strings.IndexByte(digits, p.input[p.at]) >= 0 {
		at := p.at
		if units, err = p.number(); err != nil {
			return 0, 0, err
		}
		if units == 0 {
			p.at = at
			return 0, 0, p.bad("want more than 0 units")
		}
		p.skip()
	}
	at := p.at
	seconds, ok := rateUnits[dash+p.word()]
	if !ok {
		p.at = at
		return 0, 0, p.bad(map[string]string{
			"":  "want a unit: s, sec, second, m, min, minute, h, hour, d or day",
			"-": "want a unit after the dash: S, M, H or D",
		}[dash])
	}
	perSecond = count / (units * seconds)
	if !(perSecond <= MaxRate) || perSecond == 0 && count > 0 {
		p.at = begin
		return 0, 0, p.bad("rate out of range: want 0 to 1e12 a second, and one that a float64 can tell from 0")
	}
	return perSecond, count, nil
}

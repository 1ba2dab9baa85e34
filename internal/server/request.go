package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

const (
	// maxName bounds service and user_id, in bytes. The limiter remembers a
	// million keys, and would hold whole bodies otherwise.
	maxName = 1024
	// maxTokens is the largest capacity, hybrid.Limit.Burst's own bound.
	maxTokens = int64(1e15)

	wantName   = "a string of 1 to 1024 bytes"
	wantRate   = "a number from 0 to 1e12"
	wantTokens = "an integer from 0 to 1e15"
)

// request is the body of POST /check.
type request struct {
	service, userID string
	rate            float64
	capacity, cost  int64
}

// parseRequest reads body strictly. encoding/json alone would take the last of
// two equal names, "COST" for "cost", null for 0, and one replacement character
// for every byte that is no UTF-8, so that different users shared a bucket.
func parseRequest(body []byte) (request, *problem) {
	if !utf8.Valid(body) {
		return request{}, &problem{Error: "body is not UTF-8"}
	}
	var whole json.RawMessage
	if err := json.Unmarshal(body, &whole); err != nil {
		return request{}, &problem{Error: fmt.Sprintf("body is not JSON: %v", err), Want: "one object"}
	}
	// From here on the decoder meets valid JSON only and cannot fail.
	dec := json.NewDecoder(bytes.NewReader(body))
	if open, _ := dec.Token(); open != json.Delim('{') {
		return request{}, &problem{Error: "body is not a JSON object", Want: "one object"}
	}
	req := request{cost: 1}
	seen := make(map[string]bool, 5)
	for dec.More() {
		token, _ := dec.Token()
		name, _ := token.(string)
		var value json.RawMessage
		_ = dec.Decode(&value)
		if seen[name] {
			return request{}, &problem{Error: fmt.Sprintf("%.64q is given twice", name), Field: clip(name)}
		}
		seen[name] = true
		if bad := req.set(name, string(value)); bad != nil {
			return request{}, bad
		}
	}
	// A limit that is not there must not read as 0 or as no limit: no defaults
	// but for cost, where everybody means the same.
	for _, f := range [...]struct{ name, want string }{
		{"service", wantName}, {"user_id", wantName}, {"rate", wantRate}, {"capacity", wantTokens},
	} {
		if !seen[f.name] {
			return request{}, &problem{Error: f.name + " is missing", Field: f.name, Want: f.want}
		}
	}
	return req, nil
}

// set reads the value of one field.
func (r *request) set(name, value string) (bad *problem) {
	switch name {
	case "service":
		r.service, bad = parseName(name, value)
	case "user_id":
		r.userID, bad = parseName(name, value)
	case "rate":
		r.rate, bad = parseRate(name, value)
	case "capacity":
		r.capacity, bad = parseTokens(name, value)
	case "cost":
		r.cost, bad = parseTokens(name, value)
	default:
		return &problem{
			Error: fmt.Sprintf("unknown field %.64q", name), Field: clip(name),
			Want: "service, user_id, rate, capacity, cost",
		}
	}
	return bad
}

// clip keeps a name that a client made up from filling the answer.
func clip(name string) string {
	if len(name) <= 64 {
		return name
	}
	return strings.ToValidUTF8(name[:64], "") + "…"
}

// parseName reads a string that may be part of a key.
func parseName(name, value string) (string, *problem) {
	if value[0] != '"' {
		return "", wrongType(name, value, wantName)
	}
	if loneSurrogate(value) {
		return "", &problem{Error: name + " holds half of a surrogate pair", Field: name, Want: wantName}
	}
	var s string
	_ = json.Unmarshal([]byte(value), &s)
	switch {
	case s == "":
		return "", &problem{Error: name + " is empty", Field: name, Want: wantName}
	case len(s) > maxName:
		return "", &problem{Error: fmt.Sprintf("%s has %d bytes", name, len(s)), Field: name, Want: wantName}
	}
	return s, nil
}

// loneSurrogate reports whether a JSON string has an escape like \ud800 that is
// not half of a pair. It is no character, and all of them decode to the same.
func loneSurrogate(raw string) bool {
	unit := func(i int) rune {
		if i+6 > len(raw) || raw[i] != '\\' || raw[i+1] != 'u' {
			return 0
		}
		n, _ := strconv.ParseUint(raw[i+2:i+6], 16, 16)
		return rune(n)
	}
	for i := 0; i < len(raw); i++ {
		if raw[i] != '\\' {
			continue
		}
		switch r := unit(i); {
		case !utf16.IsSurrogate(r):
			i++ // past what is escaped, which may be a backslash
		case utf16.DecodeRune(r, unit(i+6)) == unicode.ReplacementChar:
			return true
		default:
			i += 11
		}
	}
	return false
}

// parseRate reads a rate; the limiter checks its upper end and whether it can
// express it exactly enough.
func parseRate(name, value string) (float64, *problem) {
	if !isNumber(value) {
		return 0, wrongType(name, value, wantRate)
	}
	if isZero(value) {
		return 0, nil // -0 too
	}
	// The error is one of range: 1e400 is no rate, not an infinite one. In the
	// other direction ParseFloat is silent, and 1e-400 would deny everything.
	rate, err := strconv.ParseFloat(value, 64)
	if err != nil || rate <= 0 {
		return 0, outOfRange(name, value, wantRate)
	}
	return rate, nil
}

// parseTokens reads an integer exactly. 10.0 and 1e1 are 10 as well: some
// languages have no other way to write a number they hold in a float.
func parseTokens(name, value string) (int64, *problem) {
	if !isNumber(value) {
		return 0, wrongType(name, value, wantTokens)
	}
	if isZero(value) {
		return 0, nil
	}
	if value[0] == '-' {
		return 0, outOfRange(name, value, wantTokens)
	}
	mantissa, exponent := value, 0
	if i := strings.IndexAny(value, "eE"); i >= 0 {
		// Atoi stops at the largest int when there is no such number. The sum
		// below must not overflow, and digits in a body cannot outweigh 2^20.
		exponent, _ = strconv.Atoi(value[i+1:])
		exponent = min(max(exponent, -1<<20), 1<<20)
		mantissa = value[:i]
	}
	// By digits, not through a float: above 2^53 a float would round, and a
	// fraction small enough would vanish.
	whole, fraction, _ := strings.Cut(mantissa, ".")
	digits := strings.TrimRight(whole+fraction, "0")
	// The number is digits with this many zeros after it.
	zeros := exponent + len(whole) - len(digits)
	digits = strings.TrimLeft(digits, "0")
	if zeros < 0 {
		return 0, &problem{Error: fmt.Sprintf("%s = %s is not an integer", name, clip(value)), Field: name, Want: wantTokens}
	}
	if len(digits)+zeros > len("1000000000000000") {
		return 0, outOfRange(name, value, wantTokens)
	}
	n, err := strconv.ParseInt(digits+strings.Repeat("0", zeros), 10, 64)
	if err != nil || n > maxTokens {
		return 0, outOfRange(name, value, wantTokens)
	}
	return n, nil
}

// isNumber reports whether a JSON value is a number.
func isNumber(value string) bool { return value[0] == '-' || value[0] >= '0' && value[0] <= '9' }

// isZero reports whether a JSON number is 0 however it is written.
func isZero(value string) bool {
	if i := strings.IndexAny(value, "eE"); i >= 0 {
		value = value[:i]
	}
	return strings.Trim(value, "-0.") == ""
}

// wrongType names the kind of value that is there. The value itself may be as
// long as a body.
func wrongType(name, value, want string) *problem {
	kind := map[byte]string{'"': "a string", '{': "an object", '[': "an array", 't': "a boolean", 'f': "a boolean", 'n': "null"}[value[0]]
	if kind == "" {
		kind = "a number"
	}
	return &problem{Error: fmt.Sprintf("%s is %s", name, kind), Field: name, Want: want}
}

func outOfRange(name, value, want string) *problem {
	return &problem{Error: fmt.Sprintf("%s = %s is out of range", name, clip(value)), Field: name, Want: want}
}

package server_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
	"github.com/hybridlimit/hybridlimit/internal/server"
)

func TestCheckAdmitsTheCapacityAndNoMore(t *testing.T) {
	s := newService(t, hybrid.Options{})
	for i, want := range []decision{
		{Allowed: new(true), Remaining: 2},
		{Allowed: new(true), Remaining: 1},
		{Allowed: new(true), Remaining: 0},
		{Allowed: new(false)},
		{Allowed: new(false)},
	} {
		d := s.check(`{"service":"api","user_id":"u1","rate":2,"capacity":3}`)
		if *d.Allowed != *want.Allowed || d.Remaining != want.Remaining {
			t.Fatalf("request %d: allowed %v, remaining %d; want %v, %d", i+1, *d.Allowed, d.Remaining, *want.Allowed, want.Remaining)
		}
		if d.RetryAfterMS < 0 || d.RetryAfterMS > 500 {
			t.Errorf("request %d: retry_after_ms = %d; want at most the half second a token takes", i+1, d.RetryAfterMS)
		}
		if d.Service != "api" || d.UserID != "u1" || d.Source == "none" || d.Source == "policy" {
			t.Errorf("request %d: %+v; want service and user echoed, and a source", i+1, d)
		}
	}
	if d := s.check(`{"service":"api","user_id":"u2","rate":2,"capacity":3}`); !*d.Allowed {
		t.Errorf("another user: %+v; want its own bucket", d)
	}
}

func TestCheckCost(t *testing.T) {
	s := newService(t, hybrid.Options{})
	for _, c := range []struct {
		cost      int
		allowed   bool
		remaining int64
	}{
		{0, true, 10}, // a look charges nothing
		{7, true, 3},
		{0, true, 3},
		{4, false, 3}, // all or nothing
		{3, true, 0},
		{0, false, 0}, // a cost of 1 would be refused
		{10, false, 0},
	} {
		if d := s.check(body(1, 10, c.cost)); *d.Allowed != c.allowed || d.Remaining > c.remaining {
			t.Errorf("cost %d: %+v; want %v, remaining at most %d", c.cost, d, c.allowed, c.remaining)
		}
	}
}

func TestCheckTakesTheLatestLimit(t *testing.T) {
	s := newService(t, hybrid.Options{})
	for range 3 {
		s.check(body(2, 3, 1)) // empty now
	}
	// A larger limit is in force at once, and fills nothing.
	if d := s.check(body(1000, 100, 1)); *d.Allowed || d.Remaining != 0 {
		t.Fatalf("after a raise: %+v; want a denial, the bucket is as empty as before", d)
	}
	s.pass(10 * time.Millisecond)
	d := retry(t, func() decision { return s.check(body(1000, 100, 1)) })
	if d.Remaining > 9 {
		t.Errorf("10 ms after the raise: %+v; want at most 10 tokens made at the new rate", d)
	}
	// A smaller one cuts what is there, and the old one does not bring it back.
	key := func(rate, capacity, cost int) string {
		return strings.Replace(body(rate, capacity, cost), "u1", "u2", 1)
	}
	if d := s.check(key(1, 100, 1)); d.Remaining > 99 {
		t.Fatalf("a fresh bucket: %+v; want 99 left", d)
	}
	if d := s.check(key(1, 5, 1)); !*d.Allowed || d.Remaining > 4 {
		t.Errorf("after a cut: %+v; want 4 left of 5", d)
	}
	if d := s.check(key(1, 100, 1)); !*d.Allowed || d.Remaining > 3 {
		t.Errorf("after the cut is taken back: %+v; want 3 left, not refilled", d)
	}
}

// retry asks until it is admitted, waiting as long as it is told each time.
func retry(t *testing.T, ask func() decision) decision {
	t.Helper()
	var d decision
	for range 5 {
		if d = ask(); *d.Allowed {
			return d
		}
		time.Sleep(time.Duration(d.RetryAfterMS) * time.Millisecond)
	}
	t.Fatalf("refused 5 times after waiting for retry_after_ms: %+v", d)
	return d
}

func TestCheckZeroLimitDeniesForEver(t *testing.T) {
	s := newService(t, hybrid.Options{})
	for _, b := range []string{
		body(0, 3, 1), body(2, 0, 1), body(0, 0, 1), body("-0", 3, 1), body("0.0e7", 3, 1), body(2, "-0", 1),
		body(0, 3, 5), body(2, 0, 0), // neither the cost matters nor a look
	} {
		d := s.check(b)
		if *d.Allowed || d.RetryAfterMS != -1 || d.Remaining != 0 || d.Source != "limit" {
			t.Errorf("%s: %+v; want a denial without end by the limit", b, d)
		}
	}
	status, header, d := s.post("/check?status=true", body(0, 3, 1))
	if status != http.StatusTooManyRequests || len(header["Retry-After"]) != 0 || d.RetryAfterMS != -1 {
		t.Errorf("status=true: %d, Retry-After %q, %+v; want 429 without a promise", status, header["Retry-After"], d)
	}
}

func TestCheckStatus(t *testing.T) {
	s := newService(t, hybrid.Options{})
	for i, want := range []struct {
		path   string
		status int
	}{
		{"/check?status=true", 200},
		{"/check?status=true", 429},
		{"/check?status=true", 429},
		{"/check?status=false", 200},
		{"/check", 200},
	} {
		// At 0.01 a second a token takes 100 s, of which this test takes few.
		status, header, d := s.post(want.path, body(0.01, 1, 1))
		seconds, err := strconv.Atoi(header.Get("Retry-After"))
		if status != want.status || (err == nil) != (status == 429) || err == nil && (seconds < 50 || seconds > 100) {
			t.Errorf("request %d: %s = %d, Retry-After %q, %+v; want %d, and about 100 with 429",
				i+1, want.path, status, header.Get("Retry-After"), d, want.status)
		}
		if d.Allowed == nil || *d.Allowed != (i == 0) {
			t.Errorf("request %d: %+v; want the decision beside the status", i+1, d)
		}
	}
	// Less than a second is still a whole one.
	for range 2 {
		if status, header, _ := s.post("/check?status=true", strings.Replace(body(5, 1, 1), "u1", "fast", 1)); status == 429 && header.Get("Retry-After") != "1" {
			t.Errorf("Retry-After = %q; want 1", header.Get("Retry-After"))
		}
	}
}

func TestCheckWithoutRedis(t *testing.T) {
	for _, c := range []struct {
		policy  hybrid.Policy
		allowed bool
		status  int // with status=true
	}{{hybrid.Deny, false, 503}, {hybrid.Allow, true, 200}} {
		s := newServiceOf(t, hybrid.Options{}, server.Options{OnFailure: c.policy})
		s.redis.Close()
		if d := s.check(body(2, 3, 1)); *d.Allowed != c.allowed || d.Source != "policy" {
			t.Errorf("policy %v: %+v; want allowed %v by policy", c.policy, d, c.allowed)
		}
		status, header, d := s.post("/check?status=true", body(2, 3, 1))
		if status != c.status || *d.Allowed != c.allowed || (header.Get("Retry-After") != "") == c.allowed {
			t.Errorf("policy %v: %d %+v, Retry-After %q; want %d", c.policy, status, d, header.Get("Retry-After"), c.status)
		}
	}
}

func TestCheckAfterClose(t *testing.T) {
	s := newService(t, hybrid.Options{})
	s.limiter.Close(t.Context())
	if status, _, d := s.post("/check", body(2, 3, 1)); status != 503 || d.Allowed != nil || d.Error == "" {
		t.Errorf("after Close: %d %+v; want 503 and no decision", status, d)
	}
}

func TestCheckCancelled(t *testing.T) {
	s := newService(t, hybrid.Options{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := httptest.NewRequestWithContext(ctx, "POST", "/check", strings.NewReader(body(2, 3, 1)))
	if status, _, d := s.do(r); status != 503 || d.Allowed != nil || d.Error == "" {
		t.Errorf("cancelled: %d %+v; want 503 and no decision", status, d)
	}
}

func TestKey(t *testing.T) {
	// Pairs that a plain join would mix up, and each one's key.
	pairs := map[[2]string]string{
		{"a", "b"}:     "a:b",
		{"a", "b:c"}:   "a:b:c",
		{"a:b", "c"}:   "a%3Ab:c",
		{"a%3Ab", "c"}: "a%253Ab:c",
		{"a", ":b"}:    "a::b",
		{"a:", "b"}:    "a%3A:b",
		{"a%", "b"}:    "a%25:b",
		{"a", "%25:b"}: "a:%25:b",
		{"ü", "é"}:     "ü:é",
	}
	seen := map[string]bool{}
	for pair, want := range pairs {
		got := server.Key(pair[0], pair[1])
		if got != want || seen[got] {
			t.Errorf("Key(%q, %q) = %q (seen: %v); want %q, once", pair[0], pair[1], got, seen[got], want)
		}
		seen[got] = true
	}
}

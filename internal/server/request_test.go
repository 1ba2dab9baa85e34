package server_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

func TestCheckAcceptsExactNumbers(t *testing.T) {
	s := newService(t, hybrid.Options{})
	for i, c := range []struct {
		rate, capacity, cost string
		remaining            int64
	}{
		{"2", "10", "1", 9},
		{"2.5", "10.0", "1e0", 9},
		{"2e0", "1e1", "0.1e1", 9},
		{"2E+0", "1000e-2", "10000000000000000000000e-22", 9},
		{"0.16666666666666666", "1", "1", 0},
		{"1e-3", "5", "5", 0},
		{"1e12", "1000000000000000", "999999999999999", 1},
		{"1e12", "1e15", "0.0000000000000001e16", 999_999_999_999_999},
		{"1e3", "9007199254740", "9007199254739", 1},
		{"1e12", "1e15", "1e15", 0},
		{"1", "10", "0e999999999999999999999", 10},
	} {
		b := strings.Replace(body(c.rate, c.capacity, c.cost), "u1", fmt.Sprint("user", i), 1)
		d := s.check(b)
		if !*d.Allowed || d.Remaining > c.remaining {
			t.Errorf("%s: %+v; want %d left", b, d, c.remaining)
		}
		// To the last token: a look, then all there is and one more.
		ask := func(cost int64) bool {
			return *s.check(strings.Replace(body(c.rate, c.capacity, cost), "u1", fmt.Sprint("user", i), 1)).Allowed
		}
		if c.remaining > 0 && (!ask(0) || !ask(c.remaining)) || ask(1) {
			t.Errorf("%s: not exactly %d left", b, c.remaining)
		}
	}
}

func TestCheckRefusesBadRequests(t *testing.T) {
	s := newService(t, hybrid.Options{})
	const good = `"service":"api","user_id":"u1","rate":2,"capacity":3`
	for _, c := range []struct {
		name, body  string
		field, want string // want "" is not compared
	}{
		{"empty", ``, "", ""},
		{"not JSON", `service=api`, "", ""},
		{"cut short", `{"service":"api"`, "", ""},
		{"trailing garbage", `{` + good + `} x`, "", ""},
		{"two objects", `{` + good + `}{` + good + `}`, "", ""},
		{"trailing comma", `{` + good + `,}`, "", ""},
		{"byte order mark", "\ufeff{" + good + "}", "", ""},
		{"comment", `{` + good + `/**/}`, "", ""},
		{"deep", strings.Repeat("[", 20_000), "", ""},
		{"null", `null`, "", ""},
		{"array", `[{` + good + `}]`, "", ""},
		{"string", `"x"`, "", ""},
		{"invalid UTF-8", "{" + good + ",\"x\":\"\xff\"}", "", ""},
		{"invalid UTF-8 in user", strings.Replace("{"+good+"}", "u1", "u\xff", 1), "", ""},

		{"nothing", `{}`, "service", ""},
		{"no service", `{"user_id":"u1","rate":2,"capacity":3}`, "service", "a string of 1 to 1024 bytes"},
		{"empty service", `{"service":"","user_id":"u1","rate":2,"capacity":3}`, "service", ""},
		{"null service", `{"service":null,"user_id":"u1","rate":2,"capacity":3}`, "service", ""},
		{"service as number", `{"service":1,"user_id":"u1","rate":2,"capacity":3}`, "service", ""},
		{"no user", `{"service":"api","rate":2,"capacity":3}`, "user_id", ""},
		{"empty user", `{"service":"api","user_id":"","rate":2,"capacity":3}`, "user_id", ""},
		{"user as object", `{"service":"api","user_id":{},"rate":2,"capacity":3}`, "user_id", ""},
		{"long user", `{"service":"api","user_id":"` + strings.Repeat("é", 513) + `","rate":2,"capacity":3}`, "user_id", ""},
		{"high surrogate alone", `{"service":"api","user_id":"\ud800","rate":2,"capacity":3}`, "user_id", ""},
		{"low surrogate alone", `{"service":"api","user_id":"a\udc00","rate":2,"capacity":3}`, "user_id", ""},
		{"surrogates swapped", `{"service":"\udc00\ud800","user_id":"u","rate":2,"capacity":3}`, "service", ""},
		{"surrogate cut off", `{"service":"\ud83d\\ude00","user_id":"u","rate":2,"capacity":3}`, "service", ""},

		{"unknown field", `{` + good + `,"costs":2}`, "costs", "service, user_id, rate, capacity, cost"},
		{"other case", `{` + good + `,"Cost":2}`, "Cost", ""},
		{"unknown and long", `{` + good + `,"` + strings.Repeat("é", 50) + `":2}`, strings.Repeat("é", 32) + "…", ""},
		{"twice", `{` + good + `,"rate":3}`, "rate", ""},
		{"twice by escape", `{` + good + `,"cost":1,"c\u006fst":0}`, "cost", ""},

		{"no rate", `{"service":"api","user_id":"u1","capacity":3}`, "rate", "a number from 0 to 1e12"},
		{"rate as string", body(`"2"`, 3, 1), "rate", ""},
		{"rate null", body("null", 3, 1), "rate", ""},
		{"rate boolean", body("true", 3, 1), "rate", ""},
		{"rate negative", body(-1, 3, 1), "rate", "a number from 0 to 1e12"},
		{"rate NaN", body("NaN", 3, 1), "", ""},
		{"rate NaN as string", body(`"NaN"`, 3, 1), "rate", ""},
		{"rate Infinity", body("Infinity", 3, 1), "", ""},
		{"rate infinite", body("1e400", 3, 1), "rate", ""},
		{"rate negative infinite", body("-1e400", 3, 1), "rate", ""},
		{"rate over the range", body("1.1e12", 3, 1), "rate", ""},
		{"rate under any float", body("1e-400", 3, 1), "rate", ""},
		{"rate denormal", body("5e-324", 3, 1), "capacity/rate", ""},
		{"time to fill too long", body("1e-9", "1e15", 1), "capacity/rate", ""},

		{"no capacity", `{"service":"api","user_id":"u1","rate":2}`, "capacity", "an integer from 0 to 1e15"},
		{"capacity fraction", body(2, 3.7, 1), "capacity", "an integer from 0 to 1e15"},
		{"capacity small fraction", body(2, "3.00000000000000000001", 1), "capacity", ""},
		{"capacity tiny", body(2, "1e-999999999999999999999", 1), "capacity", ""},
		{"capacity negative", body(2, -3, 1), "capacity", ""},
		{"capacity over the range", body(2, "1000000000000001", 1), "capacity", ""},
		{"capacity past int64", body(2, "9223372036854775808", 1), "capacity", ""},
		{"capacity huge", body(2, "1e999999999999999999999", 1), "capacity", ""},
		{"capacity infinite", body(2, "1e400", 1), "capacity", ""},
		{"capacity long and huge", body(2, "0."+strings.Repeat("0", 60_000)+"1e70000", 1), "capacity", ""},
		{"capacity as string", body(2, `"3"`, 1), "capacity", ""},
		{"capacity as array", body(2, `[3]`, 1), "capacity", ""},

		{"cost over capacity", body(2, 3, 4), "cost", "0 to 3"},
		{"cost negative", body(2, 3, -1), "cost", ""},
		{"cost fraction", body(2, 3, 0.5), "cost", ""},
		{"cost null", body(2, 3, "null"), "cost", ""},
		{"cost as string", body(2, 3, `"1"`), "cost", ""},
		{"cost past int64", body(2, 3, "18446744073709551617"), "cost", ""},
		{"cost infinite", body(2, 3, "1e400"), "cost", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, path := range []string{"/check", "/check?status=true"} {
				status, _, d := s.post(path, c.body)
				if status != http.StatusBadRequest || d.Allowed != nil || d.Error == "" {
					t.Errorf("%s = %d %+v; want 400 with an error and no decision", path, status, d)
				}
				if d.Field != c.field || c.want != "" && d.Want != c.want {
					t.Errorf("%s: field %q, want %q (%s); want %q, %q", path, d.Field, d.Want, d.Error, c.field, c.want)
				}
				if len(d.Error) > 400 {
					t.Errorf("an error of %d bytes", len(d.Error))
				}
			}
		})
	}
	if stats := s.limiter.Stats(); stats.Granted != 0 || len(s.redis.Keys()) != 0 {
		t.Errorf("%+v, keys %q; want nothing charged by bad requests", stats, s.redis.Keys())
	}
}

func TestCheckRefusesByHTTP(t *testing.T) {
	s := newService(t, hybrid.Options{})
	good := body(2, 3, 1)
	long := strings.Replace(good, "{", "{"+strings.Repeat(" ", 64<<10), 1)
	for _, c := range []struct {
		name, method, path, body string
		header                   [2]string
		status                   int
	}{
		{"GET", "GET", "/check", "", [2]string{}, 405},
		{"PUT", "PUT", "/check", good, [2]string{}, 405},
		{"HEAD", "OPTIONS", "/check", "", [2]string{}, 405},
		{"POST to health", "POST", "/healthz", "", [2]string{}, 405},
		{"another path", "POST", "/checks", good, [2]string{}, 404},
		{"root", "GET", "/", "", [2]string{}, 404},
		{"below", "POST", "/check/", good, [2]string{}, 404},
		{"long body", "POST", "/check", long, [2]string{}, 413},
		{"gzip", "POST", "/check", good, [2]string{"Content-Encoding", "gzip"}, 415},
		{"query misspelt", "POST", "/check?statsu=true", good, [2]string{}, 400},
		{"query not boolean", "POST", "/check?status=yes", good, [2]string{}, 400},
		{"query empty", "POST", "/check?status=", good, [2]string{}, 400},
		{"query twice", "POST", "/check?status=true&status=false", good, [2]string{}, 400},
		{"query malformed", "POST", "/check?status=%zz", good, [2]string{}, 400},
		{"query with semicolon", "POST", "/check?a;b", good, [2]string{}, 400},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := httptest.NewRequest(c.method, c.path, strings.NewReader(c.body))
			if c.header[0] != "" {
				r.Header.Set(c.header[0], c.header[1])
			}
			status, header, d := s.do(r)
			if status != c.status || d.Error == "" || d.Allowed != nil {
				t.Errorf("%s %s = %d %+v; want %d and an error", c.method, c.path, status, d, c.status)
			}
			if (header.Get("Allow") != "") != (status == 405) {
				t.Errorf("Allow = %q with status %d", header.Get("Allow"), status)
			}
		})
	}
	// The limit of the body is on its side; the form type of curl -d is no matter.
	r := httptest.NewRequest("POST", "/check", strings.NewReader(good+strings.Repeat(" ", 64<<10-len(good))))
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	if status, _, d := s.do(r); status != 200 {
		t.Errorf("64 KiB of body = %d %+v; want 200", status, d)
	}
}

// FuzzCheck sends any body: it is decided or refused with a reason, never more.
func FuzzCheck(f *testing.F) {
	f.Add([]byte(`{"service":"api","user_id":"u1","rate":2,"capacity":3,"cost":1}`))
	f.Add([]byte(`{"service":"a:%","user_id":"😀\ud83d\ude00","rate":1e-3,"capacity":1e1,"cost":10.0}`))
	f.Add([]byte(`{"service":"\ud800","user_id":"\\ud800","rate":1e400,"capacity":-0,"cost":0.5}`))
	f.Add([]byte(`{"rate":1e12,"capacity":1000000000000000,"cost":999999999999999,"service":"x","user_id":"y"}`))
	f.Add([]byte(`[null`))
	s := newService(f, hybrid.Options{RedisTimeout: 30 * time.Second, MaxKeys: 100})
	f.Fuzz(func(t *testing.T, body []byte) {
		s := &service{t: t, server: s.server}
		status, _, d := s.post("/check", string(body))
		switch status {
		case http.StatusOK:
			if d.Allowed == nil || d.Service == "" || d.UserID == "" || d.Remaining < 0 {
				t.Fatalf("%q = %+v; want a whole decision", body, d)
			}
			// Redis is well, so whatever it was asked it could answer.
			if d.Source == "policy" || d.Source == "none" {
				t.Fatalf("%q: decided by %s", body, d.Source)
			}
			if *d.Allowed {
				affordable(t, body, d)
			}
		case http.StatusBadRequest, http.StatusRequestEntityTooLarge:
			if d.Error == "" || d.Allowed != nil {
				t.Fatalf("%q = %d %+v; want a reason and no decision", body, status, d)
			}
		default:
			t.Fatalf("%q = %d %+v", body, status, d)
		}
	})
}

// affordable checks an admission by reading its request another way.
func affordable(t *testing.T, body []byte, d decision) {
	r := struct {
		Service  string   `json:"service"`
		UserID   string   `json:"user_id"`
		Rate     float64  `json:"rate"`
		Capacity float64  `json:"capacity"`
		Cost     *float64 `json:"cost"`
	}{}
	if err := json.Unmarshal(body, &r); err != nil {
		t.Fatalf("%q was admitted: %v", body, err)
	}
	cost := 1.0
	if r.Cost != nil {
		cost = *r.Cost
	}
	if !(r.Rate > 0 && cost >= 0 && cost <= r.Capacity) || r.Service != d.Service || r.UserID != d.UserID {
		t.Fatalf("%q was admitted as %+v: %+v", body, d, r)
	}
}

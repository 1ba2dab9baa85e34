package accesslog_test

import (
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/bench/accesslog"
)

// TestReadEntries has one line for each feature of the formats.
func TestReadEntries(t *testing.T) {
	const at = "[02/Jan/2006:15:04:05 +0000]"
	entry := func(ip, user, method, path string, status int, bytes int64) accesslog.Entry {
		return accesslog.Entry{Time: goodTime, IP: ip, User: user, Method: method, Path: path, Status: status, Bytes: bytes}
	}
	root := entry("192.0.2.1", "-", "GET", "/", 200, 1)
	for _, test := range []struct {
		name, line string
		want       accesslog.Entry
	}{
		{"common", `192.0.2.1 - frank ` + at + ` "GET /a.gif HTTP/1.0" 200 2326`, entry("192.0.2.1", "frank", "GET", "/a.gif", 200, 2326)},
		{"combined", `192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1 "http://example.org/" "Mozilla/5.0 (X11)"`, root},
		{"columns after", `192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1 "-" "curl" "203.0.113.9" 0.003 example.org`, root},
		{"quote in agent", `192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1 "-" "a \"b\" 500 7`, root},
		{"bracket in agent", `192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1 "-" "[03/Jan/2006:15:04:05 +0000]"`, root},

		{"IPv6", `2001:db8::1 - - ` + at + ` "GET / HTTP/1.1" 200 1`, entry("2001:db8::1", "-", "GET", "/", 200, 1)},
		{"IPv6 in brackets", `[2001:db8::1] - - ` + at + ` "GET / HTTP/1.1" 200 1`, entry("[2001:db8::1]", "-", "GET", "/", 200, 1)},
		{"host name", `c.example.org - - ` + at + ` "GET / HTTP/1.1" 200 1`, entry("c.example.org", "-", "GET", "/", 200, 1)},
		{"no client", `- - - ` + at + ` "GET / HTTP/1.1" 200 1`, entry("-", "-", "GET", "/", 200, 1)},
		{"socket", `unix: - - ` + at + ` "GET / HTTP/1.1" 200 1`, entry("unix:", "-", "GET", "/", 200, 1)},
		{"client with port", `192.0.2.1:4711 - - ` + at + ` "GET / HTTP/1.1" 200 1`, entry("192.0.2.1:4711", "-", "GET", "/", 200, 1)},

		{"vhost", `example.org:80 192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1 "-" "-"`, root},
		{"vhost, IPv6", `example.org:443 2001:db8::1 - - ` + at + ` "GET / HTTP/1.1" 200 1`, entry("2001:db8::1", "-", "GET", "/", 200, 1)},
		{"vhost, no port", `example.org 192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1`, root},
		{"vhost, none", `_ 192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1`, root},
		{"vhost, address and port", `192.0.2.9:80 192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1`, root},
		{"vhost, spaces in user", `example.org:80 192.0.2.1 - a b ` + at + ` "GET / HTTP/1.1" 200 1`, entry("192.0.2.1", "a b", "GET", "/", 200, 1)},
		{"vhost as ident", `192.0.2.1 example.org - ` + at + ` "GET / HTTP/1.1" 200 1`, root},

		{"spaces in user", `192.0.2.1 - Frank N. Furter ` + at + ` "GET / HTTP/1.1" 200 1`, entry("192.0.2.1", "Frank N. Furter", "GET", "/", 200, 1)},
		{"spaces in user, name", `example.org:80 - a b ` + at + ` "GET / HTTP/1.1" 200 1`, entry("example.org:80", "a b", "GET", "/", 200, 1)},
		{"brackets in user", `192.0.2.1 - a [b] [c ` + at + ` "GET / HTTP/1.1" 200 1`, entry("192.0.2.1", "a [b] [c", "GET", "/", 200, 1)},
		{"empty user", `192.0.2.1 -  ` + at + ` "GET / HTTP/1.1" 200 1`, entry("192.0.2.1", "", "GET", "/", 200, 1)},
		{"quoted user", `192.0.2.1 - "" ` + at + ` "GET / HTTP/1.1" 200 1`, entry("192.0.2.1", `""`, "GET", "/", 200, 1)},

		{"query", `192.0.2.1 - - ` + at + ` "GET /a?b=c&d HTTP/1.1" 200 1`, entry("192.0.2.1", "-", "GET", "/a?b=c&d", 200, 1)},
		{"absolute target", `192.0.2.1 - - ` + at + ` "GET http://example.org/ HTTP/1.1" 200 1`, entry("192.0.2.1", "-", "GET", "http://example.org/", 200, 1)},
		{"asterisk", `::1 - - ` + at + ` "OPTIONS * HTTP/1.0" 200 1`, entry("::1", "-", "OPTIONS", "*", 200, 1)},
		{"authority", `192.0.2.1 - - ` + at + ` "CONNECT example.org:443 HTTP/1.1" 405 1`, entry("192.0.2.1", "-", "CONNECT", "example.org:443", 405, 1)},
		{"WebDAV", `192.0.2.1 - - ` + at + ` "VERSION-CONTROL / HTTP/1.1" 200 1`, entry("192.0.2.1", "-", "VERSION-CONTROL", "/", 200, 1)},
		{"HTTP/2", `192.0.2.1 - - ` + at + ` "GET / HTTP/2.0" 200 1`, root},
		{"HTTP/0.9", `192.0.2.1 - - ` + at + ` "GET /" 200 1`, root},
		{"spaces in path", `192.0.2.1 - - ` + at + ` "GET /a b HTTP/1.1" 200 1`, entry("192.0.2.1", "-", "GET", "/a b", 200, 1)},
		{"no path", `192.0.2.1 - - ` + at + ` "GET  HTTP/1.1" 400 1`, entry("192.0.2.1", "-", "GET", "", 400, 1)},
		{"quotes in request", `192.0.2.1 - - ` + at + ` "GET /\"a\" HTTP/1.1" 200 1`, entry("192.0.2.1", "-", "GET", `/\"a\"`, 200, 1)},
		{"escaped quote and number", `192.0.2.1 - - ` + at + ` "GET /\" 500 7 HTTP/1.1" 200 1`, entry("192.0.2.1", "-", "GET", `/\" 500 7`, 200, 1)},
		{"escaped backslash", `192.0.2.1 - - ` + at + ` "GET /\\" 200 1`, entry("192.0.2.1", "-", "GET", `/\\`, 200, 1)},
		{"raw quote in request", `192.0.2.1 - - ` + at + ` "GET /"a HTTP/1.1" 200 1`, entry("192.0.2.1", "-", "GET", `/"a`, 200, 1)},
		{"TLS", `192.0.2.1 - - ` + at + ` "\x16\x03\x01\x02 \x01" 400 226 "-" "-"`, entry("192.0.2.1", "-", "", `\x16\x03\x01\x02 \x01`, 400, 226)},
		{"TLS, raw", `192.0.2.1 - - ` + at + " \"\x16\x03\x01\x00\xff\" 400 226", entry("192.0.2.1", "-", "", "\x16\x03\x01\x00\xff", 400, 226)},
		{"timeout", `192.0.2.1 - - ` + at + ` "-" 408 - "-" "-"`, entry("192.0.2.1", "-", "", "-", 408, 0)},
		{"empty request", `192.0.2.1 - - ` + at + ` "" 400 0`, entry("192.0.2.1", "-", "", "", 400, 0)},
		{"one word", `192.0.2.1 - - ` + at + ` "QUIT" 400 1`, entry("192.0.2.1", "-", "", "QUIT", 400, 1)},
		{"no target", `192.0.2.1 - - ` + at + ` "GET HTTP/1.1" 400 1`, entry("192.0.2.1", "-", "", "GET HTTP/1.1", 400, 1)},
		{"other protocol", `192.0.2.1 - - ` + at + ` "t3 12.2.1" 400 1`, entry("192.0.2.1", "-", "", "t3 12.2.1", 400, 1)},

		{"no bytes", `192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 304 -`, entry("192.0.2.1", "-", "GET", "/", 304, 0)},
		{"many bytes", `192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 9223372036854775807`, entry("192.0.2.1", "-", "GET", "/", 200, 1<<63-1)},
		{"no status", `192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" - -`, entry("192.0.2.1", "-", "GET", "/", 0, 0)},
		{"zero status", `192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 000 0`, entry("192.0.2.1", "-", "GET", "/", 0, 0)},
		{"odd status", `192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 999 1`, entry("192.0.2.1", "-", "GET", "/", 999, 1)},
	} {
		t.Run(test.name, func(t *testing.T) {
			log := read(t, test.line, accesslog.Options{})
			if got := log.Entries[0]; got != test.want {
				t.Errorf("entry = %+v\nwant    %+v", got, test.want)
			}
		})
	}
}

func TestReadTimes(t *testing.T) {
	for _, test := range []struct {
		text string
		want time.Time // zero: not a time
	}{
		{"02/Jan/2006:15:04:05 +0000", goodTime},
		{"02/Jan/2006:15:04:05 -0700", goodTime.Add(7 * time.Hour)},
		{"02/Jan/2006:15:04:05 +0545", goodTime.Add(-(5*time.Hour + 45*time.Minute))},
		{"02/Jan/2006:15:04:05.5 +0000", goodTime.Add(500 * time.Millisecond)},
		{"02/Jan/2006:15:04:05.000000001 +0000", goodTime.Add(1)},
		{"31/Dec/1999:23:59:59 -0001", time.Date(2000, 1, 1, 0, 0, 59, 0, time.UTC)},
		{"29/Feb/2024:00:00:00 +0000", time.Date(2024, 2, 29, 0, 0, 0, 0, time.UTC)},
		{"29/Feb/2023:00:00:00 +0000", time.Time{}},
		{"31/Apr/2024:00:00:00 +0000", time.Time{}},
		{"00/Jan/2006:15:04:05 +0000", time.Time{}},
		{"02/anF/2006:15:04:05 +0000", time.Time{}},
		{"02/01./2006:15:04:05 +0000", time.Time{}},
		{"02/Jan/2006:24:00:00 +0000", time.Time{}},
		{"02/Jan/2006:15:60:05 +0000", time.Time{}},
		{"02/Jan/2006:15:04:60 +0000", time.Time{}},
		{"02/Jan/2006:15:04:05", time.Time{}},
		{"02/Jan/2006:15:04:05 UTC", time.Time{}},
		{"02/Jan/2006:15:04:05 0000", time.Time{}},
		{"02/Jan/2006:15:04:05 +2400", time.Time{}},
		{"02/Jan/2006:15:04:05 +0060", time.Time{}},
		{"02/Jan/2006:15:04:05. +0000", time.Time{}},
		{"02/Jan/2006:15:04:05.1234567890 +0000", time.Time{}},
		{"02/Jan/2006:15:04:05.12345 ", time.Time{}},
		{"02/Jan/2006:15:04: 5 +0000", time.Time{}},
		{"02/Jan/-006:15:04:05 +0000", time.Time{}},
		{"2006-01-02T15:04:05+00:00", time.Time{}},
		{"", time.Time{}},
	} {
		log := read(t, good+"192.0.2.2 - - ["+test.text+"] \"GET / HTTP/1.1\" 200 1\n", accesslog.Options{})
		var got time.Time
		for _, e := range log.Entries {
			if e.IP == "192.0.2.2" {
				got = e.Time
			}
		}
		if got != test.want {
			t.Errorf("time of [%s] = %v; want %v", test.text, got, test.want)
		}
		if test.want.IsZero() && log.Skipped.Count != 1 {
			t.Errorf("[%s]: skipped %d; want 1", test.text, log.Skipped.Count)
		}
	}
}

// TestReadReasons has a line for each way in which one can be bad.
func TestReadReasons(t *testing.T) {
	const at = "[02/Jan/2006:15:04:05 +0000]"
	for _, test := range []struct{ line, want string }{
		{`garbage`, `no time in brackets`},
		{`192.0.2.1 - - 02/Jan/2006:15:04:05 "GET / HTTP/1.1" 200 1`, `no time in brackets`},
		{`192.0.2.1 - - [02/Jan/2006:15:04:05 +0000 "GET / HTTP/1.1" 200 1`, `no time in brackets`},
		{at + ` "GET / HTTP/1.1" 200 1`, `no time in brackets`}, // nor a client in front of it
		{`192.0.2.1 - - [yesterday] "GET / HTTP/1.1" 200 1`, `bad time "yesterday"`},
		{`192.0.2.1 - - [a] [b] "GET / HTTP/1.1" 200 1`, `bad time "a"`},
		{`192.0.2.1 ` + at + ` "GET / HTTP/1.1" 200 1`, `no host, ident and user before the time`},
		{`192.0.2.1 - ` + at + ` "GET / HTTP/1.1" 200 1`, `no host, ident and user before the time`},
		{`example.org 192.0.2.1 - ` + at + ` "GET / HTTP/1.1" 200 1`, `no host, ident and user before the time`},
		{`"192.0.2.1" - - ` + at + ` "GET / HTTP/1.1" 200 1`, `bad host "\"192.0.2.1\""`},
		{` - - ` + at + ` "GET / HTTP/1.1" 200 1`, `bad host ""`},
		{strings.Repeat("\x01", 41) + ` - - ` + at + ` "GET / HTTP/1.1" 200 1`, `bad host "` + strings.Repeat(`\x01`, 40) + `"...`},
		{`192.0.2.1 192.0.2.2 - - ` + at + ` "GET / HTTP/1.1" 200 1`, `cannot tell which column is the client`},
		{`192.0.2.1, 192.0.2.2 - - ` + at + ` "GET / HTTP/1.1" 200 1`, `cannot tell which column is the client`},
		{`example.org:80 c.example.net - - ` + at + ` "GET / HTTP/1.1" 200 1`, `cannot tell which column is the client`},
		{`Jan  2 15:04:05 web1 nginx: 192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1`, `cannot tell which column is the client`},
		{`Jan 12 15:04:05 web1 nginx: 192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1`, `cannot tell which column is the client`},
		{`web-1  | 192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1`, `cannot tell which column is the client`},
		{`{"log":"192.0.2.1 - - ` + at + ` \"GET / HTTP/1.1\" 200 1\n"}`, `bad host "{\"log\":\"192.0.2.1"`},
		{`192.0.2.1 - - ` + at, `no request in quotes after the time`},
		{`192.0.2.1 - - ` + at + ` GET / HTTP/1.1 200 1`, `no request in quotes after the time`},
		{`192.0.2.1 - - [x] "GET / ` + at + ` HTTP/1.1" 200 1`, `no request in quotes after the time`},
		{`192.0.2.1 - - ` + at + ` "`, `the quote around the request is not closed`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1 200 1`, `the quote around the request is not closed`},
		{`192.0.2.1 - - ` + at + ` "GET /\`, `the quote around the request is not closed`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1"`, `no status after the request`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" `, `no status after the request`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" abc 1`, `bad status "abc"`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" abc 1 "-" "a" 200 1`, `bad status "abc"`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 099 1`, `bad status "099"`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 1000 1`, `bad status "1000"`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" -20 1`, `bad status "-20"`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200`, `no bytes after the status`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 `, `no bytes after the status`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 1k`, `bad bytes "1k"`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 -1`, `bad bytes "-1"`},
		{`192.0.2.1 - - ` + at + ` "GET / HTTP/1.1" 200 9223372036854775808`, `bad bytes "9223372036854775808"`},
		{"\x00\x00", `nothing but NUL bytes`},
	} {
		log := read(t, good+test.line+"\n"+good, accesslog.Options{})
		if log.Skipped.Count != 1 {
			t.Errorf("%s\nskipped %d; want 1: %s", test.line, log.Skipped.Count, test.want)
			continue
		}
		if bad := log.Skipped.Examples[0]; bad.Reason != test.want || bad.Line != 2 {
			t.Errorf("%s\nline %d: %s; want line 2: %s", test.line, bad.Line, bad.Reason, test.want)
		}
	}
}

// TestReadKeepsOneString checks what keeps a large log small: equal strings are
// one string.
func TestReadKeepsOneString(t *testing.T) {
	line := strings.TrimSpace(good)
	few := testing.AllocsPerRun(10, func() { read(t, strings.Repeat(line+"\n", 100), accesslog.Options{}) })
	many := testing.AllocsPerRun(10, func() { read(t, strings.Repeat(line+"\n", 10_000), accesslog.Options{}) })
	if many > few+50 { // the slice of entries grows, nothing else
		t.Errorf("allocations = %v for 10000 lines, %v for 100; want no more per line", many, few)
	}
}

package accesslog_test

import (
	"testing"

	"github.com/hybridlimit/hybridlimit/bench/accesslog"
)

func TestParseKey(t *testing.T) {
	type entry = accesslog.Entry
	for _, test := range []struct {
		key   string
		entry entry
		want  string // empty: the entry has no key
	}{
		{"ip", entry{IP: "192.0.2.1"}, "192.0.2.1"},
		{"ip", entry{IP: "2001:DB8:0:0::1"}, "2001:db8::1"},
		{"ip", entry{IP: "::ffff:192.0.2.1"}, "192.0.2.1"},
		{"ip", entry{IP: "::FFFF:C000:201"}, "192.0.2.1"},
		{"ip", entry{IP: "fe80::1%eth0"}, "fe80::1"},
		{"ip", entry{IP: "[2001:db8::1]"}, "2001:db8::1"},
		{"ip", entry{IP: "[192.0.2.1]"}, "192.0.2.1"},
		{"ip", entry{IP: "192.0.2.1:4711"}, "192.0.2.1"},
		{"ip", entry{IP: "[2001:DB8::1]:4711"}, "2001:db8::1"},
		{"ip", entry{IP: "[::ffff:192.0.2.1]:4711"}, "192.0.2.1"},
		{"ip", entry{IP: "192.0.2.01"}, "192.0.2.01"}, // not an address; perhaps octal
		{"ip", entry{IP: "Client.Example.ORG"}, "client.example.org"},
		{"ip", entry{IP: "-"}, "-"},
		{"ip", entry{}, ""},
		{"path", entry{Method: "GET", Path: "/a"}, "/a"},
		{"path", entry{Method: "GET", Path: "/a?b?c"}, "/a"},
		{"path", entry{Method: "GET", Path: "/A%3F"}, "/A%3F"},
		{"path", entry{Method: "GET", Path: "?a"}, ""},
		{"path", entry{Path: `\x16?\x03`}, `\x16?\x03`},
		{"path", entry{}, ""},
		{"user", entry{User: "frank"}, "frank"},
		{"user", entry{User: "Frank N. Furter"}, "Frank N. Furter"},
		{"user", entry{User: "-"}, ""},
		{"user", entry{User: ""}, ""},
		{"user", entry{User: `""`}, ""},
		{"user", entry{User: "- -"}, ""},
		{"ip+path", entry{IP: "::ffff:192.0.2.1", Method: "GET", Path: "/a?b"}, "192.0.2.1 /a"},
		{"ip+path", entry{IP: "192.0.2.1"}, ""},
		{"ip+path", entry{Method: "GET", Path: "/"}, ""},
		{"none", entry{}, "all"},
		{"none", entry{IP: "192.0.2.1", User: "frank"}, "all"},
	} {
		key, err := accesslog.ParseKey(test.key)
		if err != nil {
			t.Fatal(err)
		}
		if got, ok := key(test.entry); got != test.want || ok != (test.want != "") {
			t.Errorf("%s of %+v = %q, %v; want %q", test.key, test.entry, got, ok, test.want)
		}
	}
}

func TestParseKeyUnknown(t *testing.T) {
	for _, name := range []string{"", "IP", "ip+user", "\x1b"} {
		key, err := accesslog.ParseKey(name)
		if err == nil || key != nil {
			t.Errorf("ParseKey(%q) = %v; want an error", name, err)
		}
	}
	_, err := accesslog.ParseKey("cookie")
	if want := `accesslog: key "cookie": want ip, path, user, ip+path or none`; text(err) != want {
		t.Errorf("ParseKey = %v; want %s", err, want)
	}
}

// TestKeysAllocateNothing covers the keys of a usual log.
func TestKeysAllocateNothing(t *testing.T) {
	e := accesslog.Entry{IP: "192.0.2.1", User: "frank", Method: "GET", Path: "/a?b"}
	for _, name := range []string{"ip", "path", "user", "none"} {
		key, err := accesslog.ParseKey(name)
		if err != nil {
			t.Fatal(err)
		}
		if got := testing.AllocsPerRun(100, func() { key(e) }); got != 0 {
			t.Errorf("%s: %v allocations; want 0", name, got)
		}
	}
}

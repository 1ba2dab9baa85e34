package accesslog_test

import (
	"bytes"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/bench/accesslog"
)

// FuzzRead reads anything, and the same thing gzipped, with lines bounded at
// 256 bytes.
func FuzzRead(f *testing.F) {
	for _, seed := range []string{
		"", "\n", good, good + "garbage\r\n\n" + good, "\ufeff" + good, "\x00\x00" + good,
		good + strings.Repeat("x", 300) + "\n" + good,
		`2001:db8::1 - a [b] [02/Jan/2006:15:04:05.25 -0700] "GET /\"a?b HTTP/1.1" 404 - "-" "a"` + "\n" + good,
		`example.org:80 192.0.2.1 - - [02/Jan/2006:15:04:05 +0000] "\x16\x03" 400 226` + "\n",
		`192.0.2.1 - - [03/Jan/2006:15:04:05 +0000] "-" 408 0` + "\n" + good,
		strings.Repeat(" [02/Jan/2006:", 15),
	} {
		f.Add([]byte(seed))
		f.Add(zip(f, seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		opts := accesslog.Options{MaxLine: 256, MaxExamples: 3}
		log, err := accesslog.Read(bytes.NewReader(data), opts)
		if !bytes.HasPrefix(data, []byte("\x1f\x8b")) {
			zipped, zippedErr := accesslog.Read(bytes.NewReader(zip(t, string(data))), opts)
			if !reflect.DeepEqual(log, zipped) || text(err) != text(zippedErr) {
				t.Fatalf("Read = %v, %v; gzipped %v, %v", log, err, zipped, zippedErr)
			}
		}
		if err != nil {
			if log != nil || !strings.HasPrefix(err.Error(), "accesslog: ") || errors.Is(err, io.EOF) {
				t.Fatalf("Read = %v, %v; want no log and a clear error", log, err)
			}
			return
		}
		checkLog(t, log, opts)
		if !bytes.HasPrefix(data, []byte("\x1f\x8b")) {
			checkLines(t, log, data)
		}
	})
}

// checkLog checks what holds for every log.
func checkLog(t *testing.T, log *accesslog.Log, opts accesslog.Options) {
	t.Helper()
	if len(log.Entries) == 0 || len(log.Entries)+log.Skipped.Count > log.Lines {
		t.Fatalf("%d entries and %d skipped of %d lines", len(log.Entries), log.Skipped.Count, log.Lines)
	}
	var last time.Time
	for i, e := range log.Entries {
		if i > 0 && e.Time.Before(last) {
			t.Fatalf("entry %d is older than the one before", i)
		}
		last = e.Time
		long := len(e.IP) > opts.MaxLine || len(e.User)+len(e.Path)+len(e.Method) > opts.MaxLine
		if e.IP == "" || long || e.Status < 0 || e.Status > 999 || e.Bytes < 0 || strings.Contains(e.Path, "\n") {
			t.Fatalf("entry %d = %+v", i, e)
		}
		for _, name := range []string{"ip", "path", "user", "ip+path", "none"} {
			key, err := accesslog.ParseKey(name)
			if err != nil {
				t.Fatal(err)
			}
			if k, ok := key(e); ok != (k != "") {
				t.Fatalf("%s of %+v = %q, %v", name, e, k, ok)
			}
		}
	}
	if log.First != log.Entries[0].Time || log.Last != last || log.Inversions >= len(log.Entries) {
		t.Fatalf("First, Last, Inversions = %v, %v, %d", log.First, log.Last, log.Inversions)
	}
	if len(log.Skipped.Examples) != min(log.Skipped.Count, opts.MaxExamples) {
		t.Fatalf("%d examples of %d skipped", len(log.Skipped.Examples), log.Skipped.Count)
	}
	for _, bad := range log.Skipped.Examples {
		for _, r := range bad.Text + bad.Reason {
			if r < ' ' || r >= 0x7f && r < 0xa0 {
				t.Fatalf("control character in %+v", bad)
			}
		}
		if bad.Reason == "" || bad.Line < 1 || bad.Line > log.Lines {
			t.Fatalf("example = %+v", bad)
		}
	}
}

// checkLines counts the lines of a plain log in another way.
func checkLines(t *testing.T, log *accesslog.Log, data []byte) {
	t.Helper()
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	lines, empty := 0, 0
	for line := range bytes.Lines(data) {
		lines++
		line = bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r"))
		if len(line) <= 256 && len(bytes.Trim(line, " \t\r")) == 0 {
			empty++
		}
	}
	if log.Lines != lines || len(log.Entries)+log.Skipped.Count+empty != lines {
		t.Fatalf("lines, entries, skipped = %d, %d, %d; there are %d lines, %d of them empty",
			log.Lines, len(log.Entries), log.Skipped.Count, lines, empty)
	}
}

package accesslog_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/iotest"
	"time"
	"unicode/utf8"

	"github.com/hybridlimit/hybridlimit/bench/accesslog"
)

// good is a line that every test may add to make a log readable.
const good = `192.0.2.1 - - [02/Jan/2006:15:04:05 +0000] "GET / HTTP/1.1" 200 1` + "\n"

// goodTime is its time.
var goodTime = time.Date(2006, 1, 2, 15, 4, 5, 0, time.UTC)

func read(t *testing.T, text string, opts accesslog.Options) *accesslog.Log {
	t.Helper()
	log, err := accesslog.Read(strings.NewReader(text), opts)
	if err != nil {
		t.Fatalf("Read = %v; want a log", err)
	}
	return log
}

// TestReadCountsLines covers what counts as a line, and as an empty one.
func TestReadCountsLines(t *testing.T) {
	const bom, line = "\ufeff", "192.0.2.1 - - [02/Jan/2006:15:04:05 +0000] \"GET / HTTP/1.1\" 200 1"
	for name, test := range map[string]struct {
		text                    string
		lines, entries, skipped int
	}{
		"one line":             {good, 1, 1, 0},
		"no final newline":     {good + line, 2, 2, 0},
		"CRLF":                 {line + "\r\n" + line + "\r\n", 2, 2, 0},
		"CR without newline":   {line + "\r", 1, 1, 0},
		"byte order mark":      {bom + good, 1, 1, 0},
		"mark inside":          {bom + good + bom + good, 2, 2, 0},
		"empty lines":          {"\n" + good + "\r\n \t\n" + good + "\n\n", 7, 2, 0},
		"garbage":              {good + "garbage\n" + good, 3, 2, 1},
		"hole in front":        {strings.Repeat("\x00", 4096) + good, 1, 1, 0},
		"hole at the end":      {good + strings.Repeat("\x00", 4096), 2, 1, 1},
		"NUL in the host":      {good + "192.0\x00.2.1" + line[9:], 2, 1, 1},
		"NUL in the request":   {good + strings.Replace(line, "GET", "\x16\x03\x00", 1), 2, 2, 0},
		"last line unfinished": {good + line[:40], 2, 1, 1},
	} {
		t.Run(name, func(t *testing.T) {
			log := read(t, test.text, accesslog.Options{})
			if log.Lines != test.lines || len(log.Entries) != test.entries || log.Skipped.Count != test.skipped {
				t.Errorf("lines, entries, skipped = %d, %d, %d; want %d, %d, %d", log.Lines, len(log.Entries),
					log.Skipped.Count, test.lines, test.entries, test.skipped)
			}
			if last := log.Entries[len(log.Entries)-1]; last.IP != "192.0.2.1" || last.Bytes != 1 {
				t.Errorf("last entry = %+v; want that of the good line", last)
			}
		})
	}
}

// TestReadSorts reads requests that were logged late. Many share a second, so
// the order must be stable or a client's requests change places; Bytes holds
// the number of the line to check that.
func TestReadSorts(t *testing.T) {
	const n = 50_000
	rng := rand.New(rand.NewPCG(1, 2))
	var text strings.Builder
	inversions, last := 0, 0
	for i := range n {
		second := max(0, i/10-rng.IntN(30)) // up to 30 s late
		if second < last {
			inversions++
		}
		last = second
		at := goodTime.Add(time.Duration(second) * time.Second)
		fmt.Fprintf(&text, "192.0.2.%d - - [%s] \"GET / HTTP/1.1\" 200 %d\n",
			i%256, at.Format("02/Jan/2006:15:04:05 -0700"), i)
	}

	log := read(t, text.String(), accesslog.Options{})
	if inversions < 1000 || log.Inversions != inversions {
		t.Errorf("Inversions = %d; want %d, and thousands", log.Inversions, inversions)
	}
	if len(log.Entries) != n {
		t.Fatalf("entries = %d; want %d", len(log.Entries), n)
	}
	for i, e := range log.Entries[1:] {
		before := log.Entries[i]
		if e.Time.Before(before.Time) || e.Time.Equal(before.Time) && e.Bytes < before.Bytes {
			t.Fatalf("entry %d = %v, line %d; after %v, line %d", i+1, e.Time, e.Bytes, before.Time, before.Bytes)
		}
	}
	if log.First != log.Entries[0].Time || log.Last != log.Entries[n-1].Time {
		t.Errorf("First, Last = %v, %v; want those of the entries", log.First, log.Last)
	}
}

// TestReadBoundsLines stands on both sides of the longest line.
func TestReadBoundsLines(t *testing.T) {
	// line returns a good line of n bytes with its end.
	line := func(n int, end string) string {
		start := strings.TrimSpace(good) + ` "-" "`
		return start + strings.Repeat("x", n-len(start)-1) + `"` + end
	}
	for _, test := range []struct {
		option, length int
		end            string
		skipped        int
	}{
		{0, 1 << 20, "\n", 0},
		{0, 1<<20 + 1, "\n", 1},
		{200, 200, "\n", 0},
		{200, 200, "\r\n", 0},
		{200, 200, "", 0},
		{200, 201, "\n", 1},
		{200, 201, "\r\n", 1},
		{200, 201, "", 1},
		{200, 300_000, "\n", 1},
		{100_000, 100_000, "\r\n", 0}, // spans reads
		{100_000, 100_001, "\r\n", 1},
		{100_000, 100_001, "", 1},
		{100_000, 100_002, "\n", 1},
	} {
		text := good + line(test.length, test.end)
		if test.end != "" {
			text += good
		}
		log := read(t, text, accesslog.Options{MaxLine: test.option})
		if log.Skipped.Count != test.skipped || len(log.Entries)+test.skipped != log.Lines {
			t.Errorf("MaxLine %d, line of %d and %q: skipped %d, entries %d of %d; want %d skipped",
				test.option, test.length, test.end, log.Skipped.Count, len(log.Entries), log.Lines, test.skipped)
			continue
		}
		if test.skipped == 0 {
			continue
		}
		bad := log.Skipped.Examples[0]
		want := fmt.Sprintf("longer than %d bytes", max(test.option, 1<<20*(1-min(test.option, 1))))
		if bad.Line != 2 || bad.Reason != want || !strings.HasSuffix(bad.Text, `"...`) {
			t.Errorf("example = %+v; want line 2, %s, and its beginning", bad, want)
		}
	}
}

// TestReadLongLineInBoundedMemory reads a line of 256 MiB without holding it.
func TestReadLongLineInBoundedMemory(t *testing.T) {
	const length = 256 << 20
	input := io.MultiReader(strings.NewReader(good), io.LimitReader(zeros{}, length), strings.NewReader("\n"+good))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	log, err := accesslog.Read(input, accesslog.Options{})
	runtime.ReadMemStats(&after)
	if err != nil {
		t.Fatal(err)
	}
	if log.Lines != 3 || len(log.Entries) != 2 || log.Skipped.Count != 1 {
		t.Fatalf("log = %+v; want 2 entries of 3 lines", log)
	}
	if got := after.TotalAlloc - before.TotalAlloc; got > 8<<20 {
		t.Errorf("allocated %d bytes; want at most 8 MiB", got)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// TestReadShowsSkipped checks the examples: how many, and that no control
// character gets out.
func TestReadShowsSkipped(t *testing.T) {
	bad := "\x1b[31mred\x07\u202e\xff" + strings.Repeat("é", 100)
	text := good + strings.Repeat(bad+"\n", 20)
	for _, test := range []struct{ option, want int }{{0, 5}, {1, 1}, {20, 20}, {1000, 20}} {
		log := read(t, text, accesslog.Options{MaxExamples: test.option})
		if log.Skipped.Count != 20 || len(log.Skipped.Examples) != test.want {
			t.Errorf("MaxExamples %d: %d of %d shown; want %d of 20", test.option,
				len(log.Skipped.Examples), log.Skipped.Count, test.want)
		}
		for i, example := range log.Skipped.Examples {
			if example.Line != i+2 || example.Reason != "no time in brackets" {
				t.Errorf("example %d = line %d, %s; want line %d, no time in brackets", i, example.Line, example.Reason, i+2)
			}
			raw := strings.ContainsAny(example.Text, "\x1b\x07\u202e") || !utf8.ValidString(example.Text)
			if raw || !strings.HasPrefix(example.Text, `"\x1b[31mred\a\u202e\xff`) {
				t.Errorf("Text = %q; want it quoted", example.Text)
			}
		}
	}
}

func TestReadChecksOptions(t *testing.T) {
	for _, test := range []struct {
		opts accesslog.Options
		want string
	}{
		{accesslog.Options{MaxLine: 128, MaxExamples: 1}, ""},
		{accesslog.Options{MaxLine: 1 << 30, MaxExamples: 1000}, ""},
		{accesslog.Options{MaxLine: 127}, "accesslog: Options.MaxLine = 127: want 128 to 1073741824"},
		{accesslog.Options{MaxLine: 1<<30 + 1}, "accesslog: Options.MaxLine = 1073741825: want 128 to 1073741824"},
		{accesslog.Options{MaxExamples: -1}, "accesslog: Options.MaxExamples = -1: want 1 to 1000"},
		{accesslog.Options{MaxLine: -1, MaxExamples: 1001}, "accesslog: Options.MaxLine = -1: want 128 to 1073741824\n" +
			"accesslog: Options.MaxExamples = 1001: want 1 to 1000"},
	} {
		_, err := accesslog.Read(strings.NewReader(good), test.opts)
		if got := text(err); got != test.want {
			t.Errorf("Read(%+v) = %q; want %q", test.opts, got, test.want)
		}
	}
}

func TestReadWithoutEntries(t *testing.T) {
	for _, test := range []struct{ input, want string }{
		{"", "accesslog: input is empty"},
		{"\ufeff", "accesslog: input is empty"},
		{string(zip(t, "")), "accesslog: input is empty"},
		{"\n\r\n ", "accesslog: no log line: lines read: 3, all empty"},
		{"\nx\ny\n", `accesslog: no log line: lines read: 3; line 2: no time in brackets: "x"`},
		{"\x1f", `accesslog: no log line: lines read: 1; line 1: no time in brackets: "\x1f"`},
		{string(zip(t, string(zip(t, good)))), "accesslog: input is gzip inside gzip: unpack it once"},
		{"\x28\xb5\x2f\xfd....", "accesslog: input is zstd: unpack it first"},
		{"\xff\xfe1\x009\x002\x00", "accesslog: input is UTF-16: convert it to UTF-8 first"},
	} {
		log, err := accesslog.Read(strings.NewReader(test.input), accesslog.Options{})
		if got := text(err); got != test.want || log != nil {
			t.Errorf("Read(%q) = %v, %q; want %q", test.input, log, got, test.want)
		}
	}
}

// TestReadReportsReadErrors fails the reader at each byte, plain and zipped: it
// must never look like the end of the log, nor like corrupt gzip.
func TestReadReportsReadErrors(t *testing.T) {
	broken := errors.New("disk on fire")
	for name, input := range map[string][]byte{"plain": []byte(good + good), "gzip": zip(t, good+good)} {
		for n := range len(input) + 1 {
			r := io.MultiReader(bytes.NewReader(input[:n]), iotest.ErrReader(broken))
			_, err := accesslog.Read(r, accesslog.Options{})
			if !errors.Is(err, broken) || !strings.HasPrefix(text(err), "accesslog: read error after ") {
				t.Fatalf("%s, error after %d bytes: Read = %v; want the reader's error", name, n, err)
			}
		}
	}
	if _, err := accesslog.Read(iotest.DataErrReader(strings.NewReader(good)), accesslog.Options{}); err != nil {
		t.Errorf("data and EOF at once: Read = %v; want a log", err)
	}
	if _, err := accesslog.Read(stuck{}, accesslog.Options{}); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("Read from a stuck reader = %v; want %v", err, io.ErrNoProgress)
	}
}

type stuck struct{}

func (stuck) Read([]byte) (int, error) { return 0, nil }

// text is the message of an error, empty if there is none.
func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// TestReadTestdata reads a real log whose addresses and paths were replaced.
func TestReadTestdata(t *testing.T) {
	log, err := accesslog.Read(bytes.NewReader(testdata(t)), accesslog.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if len(log.Entries) != 10_000 || log.Lines != 10_000 || log.Skipped.Count != 0 {
		t.Errorf("entries, lines, skipped = %d, %d, %d; want 10000, 10000, 0",
			len(log.Entries), log.Lines, log.Skipped.Count)
	}
	clients := make(map[string]bool)
	for _, e := range log.Entries {
		clients[e.IP] = true
	}
	t.Logf("%d inversions, %d clients, %v to %v", log.Inversions, len(clients), log.First, log.Last)
	if len(clients) != 1753 {
		t.Errorf("distinct clients = %d; want 1753", len(clients))
	}
}

func testdata(tb testing.TB) []byte {
	tb.Helper()
	data, err := os.ReadFile("../testdata/access.log.gz")
	if err != nil {
		tb.Fatal(err)
	}
	return data
}

func BenchmarkRead(b *testing.B) {
	data := testdata(b)
	plain := unzip(b, data)
	for _, input := range []struct {
		name string
		data []byte
	}{{"gzip", data}, {"plain", plain}} {
		b.Run(input.name, func(b *testing.B) {
			b.SetBytes(int64(len(plain)))
			b.ReportAllocs()
			for b.Loop() {
				log, err := accesslog.Read(bytes.NewReader(input.data), accesslog.Options{})
				if err != nil || len(log.Entries) != 10_000 {
					b.Fatalf("Read = %v; want 10000 entries", err)
				}
			}
		})
	}
}

// Package accesslog reads the access logs of web servers, so that a replay can
// ask what a limit would have done to yesterday's traffic.
//
// It reads the NCSA common log format and everything that only adds to it: the
// combined format of Apache and nginx, a virtual host in front
// ("vhost_combined"), further columns at the end. The file may be gzipped.
//
//	192.0.2.7 - frank [10/Oct/2000:13:55:36 -0700] "GET /a HTTP/1.0" 200 2326
//
// A line that cannot be read is never guessed at: it is skipped, counted and
// given a reason. In particular a line whose client column is in doubt is
// skipped, because a replay keyed by the wrong column looks plausible.
package accesslog

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// Options bounds what Read keeps. The zero value works.
type Options struct {
	// MaxLine is the longest line that is read, in bytes without the line end.
	// A longer one is skipped in bounded memory, whatever its length.
	// Default 1 MiB; range 128 to 1 GiB.
	MaxLine int

	// MaxExamples is how many skipped lines Log.Skipped shows.
	// Default 5; range 1 to 1000.
	MaxExamples int

	// Progress, if set, is told how many bytes have been taken from the reader
	// (compressed ones, if it is compressed): about once per 64 KiB and once at
	// a good end. It runs on the goroutine that called Read.
	Progress func(read int64)
}

// Log is a whole access log in memory: some 100 bytes per entry, and each
// distinct address, user and path once. While it grows and is sorted, Read needs
// about five times as much.
type Log struct {
	// Entries are in order of time; those of one second keep the file's order.
	// There is at least one.
	Entries []Entry

	// Lines is the number of lines read: entries, skipped and empty ones.
	Lines int

	// Skipped are the lines that are neither empty nor an entry.
	Skipped Skipped

	// Inversions counts the entries that were older than the entry before them
	// in the file. Servers log a request when it ends but stamp it with its
	// start, so some are normal.
	Inversions int

	// First and Last are the times of the oldest and the newest entry.
	First, Last time.Time
}

// Entry is one request that a server answered. Its strings are as in the file,
// escapes included, and may hold any byte but a line feed: quote them to print
// them.
type Entry struct {
	// Time is when the request began, in UTC. Most servers log whole seconds.
	Time time.Time

	// IP is the client: an address, or a name if the server looked names up.
	IP string

	// User is the authenticated user, "-" if there was none.
	User string

	// Method is empty if the request was not HTTP, such as a TLS hello on a
	// plain port; Path is the raw text of the request then.
	Method string

	// Path is the request target, with its query.
	Path string

	// Status is the HTTP status, 0 if the server logged none.
	Status int

	// Bytes is the size of the response, 0 if the server logged none.
	Bytes int64
}

// Skipped counts the lines that could not be read and shows the first few.
type Skipped struct {
	Count    int
	Examples []BadLine
}

// BadLine is a line that was skipped, safe to print on a terminal.
type BadLine struct {
	// Line is its number in the file, from 1.
	Line int

	// Reason is what is wrong with it, such as `bad status "abc"`.
	Reason string

	// Text is its first 120 bytes as a Go string literal, quotes included,
	// followed by ... if there are more.
	Text string
}

const (
	defaultMaxLine     = 1 << 20
	defaultMaxExamples = 5

	maxText   = 120 // bytes of a line in BadLine.Text
	maxDetail = 40  // bytes of a column in BadLine.Reason
)

// withDefaults fills in what is zero.
func (o Options) withDefaults() Options {
	if o.MaxLine == 0 {
		o.MaxLine = defaultMaxLine
	}
	if o.MaxExamples == 0 {
		o.MaxExamples = defaultMaxExamples
	}
	return o
}

// check reports all options that are out of range. Defaults are in place.
func (o Options) check() error {
	var errs []error
	if o.MaxLine < 128 || o.MaxLine > 1<<30 {
		errs = append(errs, fmt.Errorf("accesslog: Options.MaxLine = %d: want 128 to %d", o.MaxLine, 1<<30))
	}
	if o.MaxExamples < 1 || o.MaxExamples > 1000 {
		errs = append(errs, fmt.Errorf("accesslog: Options.MaxExamples = %d: want 1 to 1000", o.MaxExamples))
	}
	return errors.Join(errs...)
}

// Read reads a log to its end. Gzip is recognised by its first bytes, not by a
// name, and may have several members, as rotated logs joined by cat have.
//
// A line that cannot be read is no error, but a log without a single entry is,
// and so is one that breaks off: half a log replays as a limit that looks
// generous. What r returned as its error can be found with errors.Is.
func Read(r io.Reader, opts Options) (*Log, error) {
	opts = opts.withDefaults()
	if err := opts.check(); err != nil {
		return nil, err
	}

	src := &source{r: r, progress: opts.Progress}
	text, err := src.open()
	if err != nil {
		return nil, err
	}

	log := new(Log)
	lines := lineReader{r: text, limit: opts.MaxLine}
	parse := parser{intern: make(map[string]string)}
	for {
		line, long, err := lines.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, src.explain(err, log.Lines)
		}

		// Every line counts, so that Lines is the number an editor shows.
		log.Lines++
		if blank(line) && !long {
			continue
		}
		if long {
			log.skip(line, fmt.Sprintf("longer than %d bytes", opts.MaxLine), opts)
			continue
		}
		entry, fault := parse.entry(line)
		if fault.what != "" {
			log.skip(line, fault.String(), opts)
			continue
		}
		log.add(entry)
	}
	src.report()
	return log.finish()
}

// add appends an entry in the order of the file.
func (l *Log) add(e Entry) {
	if n := len(l.Entries); n > 0 && e.Time.Before(l.Entries[n-1].Time) {
		l.Inversions++
	}
	l.Entries = append(l.Entries, e)
}

// skip counts a line that is no entry.
func (l *Log) skip(line []byte, reason string, opts Options) {
	l.Skipped.Count++
	if len(l.Skipped.Examples) < opts.MaxExamples {
		bad := BadLine{Line: l.Lines, Reason: reason, Text: printable(line, maxText)}
		l.Skipped.Examples = append(l.Skipped.Examples, bad)
	}
}

// finish sorts the entries, or says why there are none.
func (l *Log) finish() (*Log, error) {
	switch {
	case l.Lines == 0:
		return nil, errors.New("accesslog: input is empty")
	case len(l.Entries) == 0 && l.Skipped.Count == 0:
		return nil, fmt.Errorf("accesslog: no log line: lines read: %d, all empty", l.Lines)
	case len(l.Entries) == 0:
		bad := l.Skipped.Examples[0]
		return nil, fmt.Errorf("accesslog: no log line: lines read: %d; line %d: %s: %s",
			l.Lines, bad.Line, bad.Reason, bad.Text)
	}

	if l.Inversions > 0 {
		l.Entries = sorted(l.Entries)
	}
	l.First = l.Entries[0].Time
	l.Last = l.Entries[len(l.Entries)-1].Time
	return l, nil
}

// sorted returns the entries in order of time, equal times as they were. It
// sorts indices and moves each entry once: a stable sort of the entries
// themselves, which are large, was half of the time of Read.
func sorted(entries []Entry) []Entry {
	order := make([]int, len(entries))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(entries[a].Time.Compare(entries[b].Time), cmp.Compare(a, b))
	})
	moved := make([]Entry, len(entries))
	for i, from := range order {
		moved[i] = entries[from]
	}
	return moved
}

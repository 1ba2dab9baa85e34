package accesslog

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
)

// chunk is how much is read at once, and so how often progress is reported.
const chunk = 64 << 10

// byteOrderMark is what some editors put in front of UTF-8.
const byteOrderMark = "\ufeff"

// A log that is none of these is plain text. They are named because the
// alternative is an error about a line full of escapes.
var foreign = []struct{ magic, advice string }{
	{"\x1f\x8b", "gzip inside gzip: unpack it once"},
	{"\x28\xb5\x2f\xfd", "zstd: unpack it first"},
	{"\xfd7zXZ\x00", "xz: unpack it first"},
	{"BZh", "bzip2: unpack it first"},
	{"PK\x03\x04", "zip: unpack it first"},
	{"\xff\xfe", "UTF-16: convert it to UTF-8 first"},
	{"\xfe\xff", "UTF-16: convert it to UTF-8 first"},
}

// source is the caller's reader: it counts what is taken from it, and
// remembers its error so that a failing disk is not reported as corrupt gzip.
type source struct {
	r        io.Reader
	progress func(int64)
	n, told  int64
	gzipped  bool
	err      error
}

// Read takes from the caller's reader.
func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.n += int64(n)
	if s.n-s.told >= chunk {
		s.report()
	}
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// report tells the caller how far it is, unless it knows.
func (s *source) report() {
	if s.progress != nil && s.n != s.told {
		s.progress(s.n)
	}
	s.told = s.n
}

// open returns the text of the log: unpacked, and without a byte order mark.
// It looks at the first bytes instead of a name because the log may come from a
// pipe, and because rotated logs are renamed.
func (s *source) open() (*bufio.Reader, error) {
	text := bufio.NewReaderSize(s, chunk)
	head, err := peek(text)
	if err != nil {
		return nil, s.explain(err, 0)
	}
	if bytes.HasPrefix(head, []byte("\x1f\x8b")) {
		s.gzipped = true
		unpacked, err := gzip.NewReader(text)
		if err != nil {
			return nil, s.explain(err, 0)
		}
		text = bufio.NewReaderSize(unpacked, chunk)
		if head, err = peek(text); err != nil {
			return nil, s.explain(err, 0)
		}
	}
	for _, f := range foreign {
		if bytes.HasPrefix(head, []byte(f.magic)) {
			return nil, fmt.Errorf("accesslog: input is %s", f.advice)
		}
	}
	if bytes.HasPrefix(head, []byte(byteOrderMark)) {
		_, _ = text.Discard(len(byteOrderMark)) // has been peeked at
	}
	return text, nil
}

// peek returns the first bytes, fewer if there are no more. Its error must not
// be dropped: bufio reports an error once and a reader need not repeat it.
func peek(r *bufio.Reader) ([]byte, error) {
	head, err := r.Peek(6)
	if errors.Is(err, io.EOF) {
		return head, nil
	}
	return head, err
}

// explain says in which of three ways a log broke off: the reader has an
// error, the gzip stops early (still being copied?), or it is damaged. It asks
// the reader first, because gzip passes its error on as if it were its own.
func (s *source) explain(err error, lines int) error {
	switch {
	case s.err != nil:
		return fmt.Errorf("accesslog: read error after %d lines: %w", lines, s.err)
	case s.gzipped && errors.Is(err, io.ErrUnexpectedEOF):
		return fmt.Errorf("accesslog: gzip is truncated after %d lines: %w", lines, err)
	case s.gzipped:
		return fmt.Errorf("accesslog: gzip is corrupt after %d lines: %w", lines, err)
	default: // a reader that keeps returning nothing
		return fmt.Errorf("accesslog: read error after %d lines: %w", lines, err)
	}
}

// lineReader cuts text into lines of at most limit bytes. bufio.Scanner would
// give up at the first long line.
type lineReader struct {
	r     *bufio.Reader
	limit int
	buf   []byte // a line that spans reads; at most limit+2 bytes
}

// next returns a line without its line end, valid until the next call. Of a
// long line it returns only the beginning, and reads past the rest.
func (l *lineReader) next() (line []byte, long bool, err error) {
	l.buf = l.buf[:0]
	for {
		part, err := l.r.ReadSlice('\n')
		if err == nil && len(l.buf) == 0 {
			line = trimEnd(part) // the usual case: nothing is copied
			return line, len(line) > l.limit, nil
		}
		if room := l.limit + len("\r\n") - len(l.buf); len(part) > room {
			part, long = part[:room], true
		}
		l.buf = append(l.buf, part...)

		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case errors.Is(err, io.EOF) && len(l.buf) > 0:
			// the last line has no line end
		case err != nil:
			return nil, false, err
		}
		line = trimEnd(l.buf)
		return line, long || len(line) > l.limit, nil
	}
}

// trimEnd removes one line end, of either kind.
func trimEnd(line []byte) []byte {
	line = bytes.TrimSuffix(line, []byte("\n"))
	return bytes.TrimSuffix(line, []byte("\r"))
}

// blank reports whether there is nothing on a line.
func blank(line []byte) bool {
	return len(bytes.Trim(line, " \t\r")) == 0
}

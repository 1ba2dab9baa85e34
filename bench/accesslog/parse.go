package accesslog

import (
	"bytes"
	"math"
	"net/netip"
	"strconv"
	"strings"
	"time"
)

// fault says why a line is no entry; the zero fault that it is one. It becomes
// a string only if someone will see it: a log can have millions of them.
type fault struct {
	what string
	text []byte // the offending column, if there is one
}

// String is the reason as BadLine shows it.
func (f fault) String() string {
	if f.text == nil {
		return f.what
	}
	return f.what + " " + printable(f.text, maxDetail)
}

var (
	noTime    = fault{what: "no time in brackets"}
	noColumns = fault{what: "no host, ident and user before the time"}
	noClient  = fault{what: "cannot tell which column is the client"}
	noRequest = fault{what: "no request in quotes after the time"}
	openQuote = fault{what: "the quote around the request is not closed"}
	noStatus  = fault{what: "no status after the request"}
	noBytes   = fault{what: "no bytes after the status"}
	onlyNUL   = fault{what: "nothing but NUL bytes"}
)

// parser turns lines into entries and keeps one copy of each string in them.
type parser struct {
	intern map[string]string
}

// keep returns b as a string, the same one for the same bytes.
func (p *parser) keep(b []byte) string {
	if s, ok := p.intern[string(b)]; ok { // does not allocate
		return s
	}
	s := string(b)
	p.intern[s] = s
	return s
}

// entry reads one line, which is not blank.
func (p *parser) entry(line []byte) (Entry, fault) {
	// A log that was truncated under a running server begins with a hole.
	line = bytes.TrimLeft(line, "\x00")
	if len(line) == 0 {
		return Entry{}, onlyNUL
	}

	line = bytes.TrimPrefix(line, []byte(byteOrderMark)) // files joined by cat

	columns, stamp, rest, f := splitTime(line)
	if f.what != "" {
		return Entry{}, f
	}
	host, user, f := splitColumns(columns)
	if f.what != "" {
		return Entry{}, f
	}
	request, rest, f := splitRequest(rest)
	if f.what != "" {
		return Entry{}, f
	}
	status, size, f := parseAnswer(rest)
	if f.what != "" {
		return Entry{}, f
	}
	method, path := splitTarget(request)
	return Entry{
		Time:   stamp,
		IP:     p.keep(host),
		User:   p.keep(user),
		Method: p.keep(method),
		Path:   p.keep(path),
		Status: status,
		Bytes:  size,
	}, fault{}
}

// splitTime finds the first " [" that a time follows; a user may contain
// brackets too. It is the anchor of the line: everything else is found from it. The search for the "]" has a bound, or a long line of brackets
// would take quadratic time.
func splitTime(line []byte) (before []byte, stamp time.Time, after []byte, f fault) {
	const longest = len("02/Jan/2006:15:04:05.000000000 -0700]")
	f = noTime
	for from := 0; ; {
		i := bytes.Index(line[from:], []byte(" ["))
		if i < 0 {
			return nil, time.Time{}, nil, f
		}
		i += from
		from = i + len(" [")
		window := line[from:min(len(line), from+longest)]
		end := bytes.IndexByte(window, ']')
		if end < 0 {
			continue
		}
		if stamp, ok := parseTime(window[:end]); ok {
			return line[:i], stamp, line[from+end+1:], fault{}
		}
		if f.text == nil {
			f = fault{what: "bad time", text: window[:end]}
		}
	}
}

// splitColumns takes host and user from the columns before the time:
//
//	192.0.2.1 - frank                    host, ident, user
//	192.0.2.1 - Frank N. Furter          some servers allow spaces
//	example.org:80 192.0.2.1 - frank     a virtual host in front
//	example.org:80 c.example.net - -     either
//
// The number of columns does not tell them apart. What does: an ident is never
// an address, and a virtual host is followed by one unless the server looks
// names up. What is left in doubt is no entry.
func splitColumns(columns []byte) (host, user []byte, f fault) {
	host, rest, _ := bytes.Cut(columns, []byte(" "))
	ident, user, found := bytes.Cut(rest, []byte(" "))
	if isAddr(ident) {
		if isAddr(host) || !isHost(host) {
			return nil, nil, noClient // a proxy and a client, in either order
		}
		host = ident
		ident, user, found = bytes.Cut(user, []byte(" "))
	}
	switch {
	case !found:
		return nil, nil, noColumns
	case !isHost(host):
		return nil, nil, fault{what: "bad host", text: host}
	case bytes.ContainsRune(user, ' ') && string(ident) != "-" && !isAddr(host):
		return nil, nil, noClient // a virtual host and a name, or a syslog prefix
	}
	return host, user, fault{}
}

// isAddr reports whether b is an IP address without a port.
func isAddr(b []byte) bool {
	if len(b) < len("::") || len(b) > 64 || !bytes.ContainsAny(b, ".:") {
		return false // the usual ident, cheaply
	}
	_, err := netip.ParseAddr(string(b))
	return err == nil
}

// isHost reports whether b can stand in the host column. Servers write more
// than names and addresses there ("unix:", "_", hashes in anonymised logs), so
// only what marks another column or another format is refused.
func isHost(b []byte) bool {
	for _, c := range b {
		if c <= ' ' || c == 0x7f || strings.IndexByte(`",;\{}()<>|`, c) >= 0 {
			return false
		}
	}
	return len(b) > 0
}

// splitRequest takes the quoted request from what follows the time. A quote
// inside is escaped, or, by servers that do not escape, at least followed by
// something other than a space. To try harder, and look for the quote that a
// status follows, would let a client write the rest of its line.
func splitRequest(b []byte) (request, after []byte, f fault) {
	b = bytes.TrimLeft(b, " ")
	if len(b) == 0 || b[0] != '"' {
		return nil, nil, noRequest
	}
	b = b[1:]
	for i := 0; i < len(b); i++ {
		switch {
		case b[i] == '\\':
			i++
		case b[i] == '"' && (i+1 == len(b) || b[i+1] == ' '):
			return b[:i], b[i+1:], fault{}
		}
	}
	return nil, nil, openQuote
}

// parseAnswer reads status and bytes. Whatever columns follow are ignored:
// referer and agent, or what an operator has added.
func parseAnswer(b []byte) (status int, size int64, f fault) {
	column, rest, _ := bytes.Cut(bytes.TrimLeft(b, " "), []byte(" "))
	if len(column) == 0 {
		return 0, 0, noStatus
	}
	if string(column) != "-" { // Apache's word for a connection that broke
		n, ok := number(column)
		if len(column) != len("200") || !ok || n > 0 && n < 100 {
			return 0, 0, fault{what: "bad status", text: column}
		}
		status = int(n)
	}

	column, _, _ = bytes.Cut(bytes.TrimLeft(rest, " "), []byte(" "))
	if len(column) == 0 {
		return 0, 0, noBytes
	}
	if string(column) != "-" { // a response without a body
		n, ok := number(column)
		if !ok {
			return 0, 0, fault{what: "bad bytes", text: column}
		}
		size = n
	}
	return status, size, fault{}
}

// splitTarget takes method and target from a request, both as they are:
// servers escape differently, and a key needs no more than to be the same each
// time. A target may contain spaces if the client did not care. What is not
// HTTP has no method, and its whole text is the path: the server answered it,
// so the limiter would have seen it.
func splitTarget(request []byte) (method, path []byte) {
	method, path, found := bytes.Cut(request, []byte(" "))
	if !found || !isMethod(method) {
		return nil, request
	}
	if i := bytes.LastIndex(path, []byte(" HTTP/")); i >= 0 {
		return method, path[:i]
	}
	if len(path) > 0 && path[0] == '/' { // HTTP/0.9
		return method, path
	}
	return nil, request
}

// isMethod reports whether b can be an HTTP method. The standard allows more
// characters; no method uses them.
func isMethod(b []byte) bool {
	for _, c := range b {
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && c != '-' && c != '_' {
			return false
		}
	}
	return len(b) > 0
}

// parseTime reads 02/Jan/2006:15:04:05 -0700, with up to nine digits of a
// second's fraction. time.Parse would make a new Location for each line.
func parseTime(b []byte) (time.Time, bool) {
	const layout = "02/Jan/2006:15:04:05"
	if len(b) < len(layout+" -0700") ||
		b[2] != '/' || b[6] != '/' || b[11] != ':' || b[14] != ':' || b[17] != ':' {
		return time.Time{}, false
	}
	day, ok1 := number(b[0:2])
	month := strings.Index("JanFebMarAprMayJunJulAugSepOctNovDec", string(b[3:6]))
	year, ok2 := number(b[7:11])
	hour, ok3 := number(b[12:14])
	minute, ok4 := number(b[15:17])
	second, ok5 := number(b[18:20])
	// An index that is no multiple of 3, -1 included, is no month.
	if !ok1 || !ok2 || !ok3 || !ok4 || !ok5 || month%3 != 0 || hour > 23 || minute > 59 || second > 59 {
		return time.Time{}, false
	}

	zone, nanos := b[len(layout):], int64(0)
	if zone[0] == '.' {
		digits, _, _ := bytes.Cut(zone[1:], []byte(" "))
		n, ok := number(digits)
		if !ok || len(digits) > 9 {
			return time.Time{}, false
		}
		nanos = n
		for range 9 - len(digits) {
			nanos *= 10
		}
		zone = zone[1+len(digits):]
	}
	east, ok := parseZone(zone)
	if !ok {
		return time.Time{}, false
	}

	t := time.Date(int(year), time.Month(month/3+1), int(day),
		int(hour), int(minute), int(second), int(nanos), time.UTC)
	if t.Day() != int(day) { // 31 Feb
		return time.Time{}, false
	}
	return t.Add(-east), true
}

// parseZone reads " -0700": how far the zone is ahead of UTC.
func parseZone(b []byte) (east time.Duration, ok bool) {
	if len(b) != len(" -0700") || b[0] != ' ' || b[1] != '+' && b[1] != '-' {
		return 0, false
	}
	hours, ok1 := number(b[2:4])
	minutes, ok2 := number(b[4:6])
	if !ok1 || !ok2 || hours > 23 || minutes > 59 {
		return 0, false
	}
	east = time.Duration(hours)*time.Hour + time.Duration(minutes)*time.Minute
	if b[1] == '-' {
		east = -east
	}
	return east, true
}

// number reads decimal digits and nothing else: no sign, no space.
func number(b []byte) (n int64, ok bool) {
	for _, c := range b {
		d := int64(c) - '0'
		if d < 0 || d > 9 || n > (math.MaxInt64-d)/10 {
			return 0, false
		}
		n = n*10 + d
	}
	return n, len(b) > 0
}

// printable quotes at most limit bytes of b: no byte of a log reaches a
// terminal raw.
func printable(b []byte, limit int) string {
	if len(b) <= limit {
		return strconv.Quote(string(b))
	}
	return strconv.Quote(string(b[:limit])) + "..."
}

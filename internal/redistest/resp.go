package redistest

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"
)

// Bounds that no test comes near: a garbled length becomes an error at once,
// where it would otherwise make the proxy wait for gigabytes.
const (
	maxBulk  = 64 << 20 // bytes in one string
	maxItems = 1 << 20  // values in one reply or command
)

var errNotRESP = errors.New("redistest: not RESP")

// readValue reads one complete RESP2 or RESP3 value, however deeply nested, and
// returns its bytes unchanged. It returns io.EOF only between two values.
func readValue(r *bufio.Reader) ([]byte, error) {
	var raw []byte
	// Nesting needs no recursion: an aggregate only adds to the number of
	// values that are still to come.
	for open := 1; open > 0; open-- {
		start := len(raw)
		var err error
		if raw, err = appendLine(raw, r); err != nil {
			return nil, err
		}
		kind, text := raw[start], string(raw[start+1:len(raw)-2])
		switch kind {
		case '+', '-', ':', '_', ',', '#', '(': // the line is the value
			continue
		}
		n, err := strconv.Atoi(text)
		if err != nil || n < -1 || n > maxBulk {
			return nil, errNotRESP
		}
		n = max(n, 0) // -1 is RESP2's null: nothing follows
		switch kind {
		case '$', '=', '!':
			if text != "-1" {
				raw, err = appendBulk(raw, r, n)
			}
		case '*', '~', '>':
			open += n
		case '%':
			open += 2 * n
		case '|':
			open += 2*n + 1 // attributes, then the value that they describe
		default:
			err = errNotRESP
		}
		if err == nil && open > maxItems {
			err = errNotRESP
		}
		if err != nil {
			return nil, err
		}
	}
	return raw, nil
}

// appendLine appends a line of at least one byte and its CRLF.
func appendLine(raw []byte, r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadBytes('\n')
	switch {
	case err == nil && len(line) >= 3 && line[len(line)-2] == '\r':
		return append(raw, line...), nil
	case err == nil:
		return nil, errNotRESP
	case errors.Is(err, io.EOF) && len(raw)+len(line) > 0:
		return nil, io.ErrUnexpectedEOF
	}
	return nil, err
}

// appendBulk appends a string of n bytes and its CRLF.
func appendBulk(raw []byte, r *bufio.Reader, n int) ([]byte, error) {
	raw = append(raw, make([]byte, n+2)...)
	body := raw[len(raw)-n-2:]
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, io.ErrUnexpectedEOF
	}
	if !bytes.HasSuffix(body, []byte("\r\n")) {
		return nil, errNotRESP
	}
	return raw, nil
}

// readCommand reads one command, as an array of strings or as an inline line,
// and returns its bytes and its name in lower case. The name is empty for what
// Redis passes over in silence: an empty line and an empty array.
func readCommand(r *bufio.Reader) (raw []byte, name string, err error) {
	first, err := r.Peek(1)
	if err != nil {
		return nil, "", err
	}
	if first[0] != '*' {
		if raw, err = r.ReadBytes('\n'); err != nil {
			return nil, "", io.ErrUnexpectedEOF
		}
		if fields := strings.Fields(string(raw)); len(fields) > 0 {
			name = strings.ToLower(fields[0])
		}
		return raw, name, nil
	}
	if raw, err = readValue(r); err != nil {
		return nil, "", err
	}
	// "*2\r\n$4\r\nPING\r\n…": the name is the third line.
	if lines := bytes.SplitN(raw, []byte("\r\n"), 4); len(lines) == 4 {
		name = strings.ToLower(string(lines[2]))
	}
	return raw, name, nil
}

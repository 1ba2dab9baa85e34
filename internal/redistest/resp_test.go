package redistest

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// values are complete RESP values, RESP2 first.
var values = []string{
	"+OK\r\n",
	"+\r\n",
	"-ERR no\r\n",
	":-12\r\n",
	"$5\r\nhello\r\n",
	"$0\r\n\r\n",
	"$-1\r\n",
	"$4\r\n\r\n\r\n\r\n", // line ends are data inside a string
	"*0\r\n",
	"*-1\r\n",
	"*2\r\n*1\r\n:1\r\n$1\r\na\r\n",
	"*3\r\n$-1\r\n*0\r\n+x\r\n",
	"_\r\n",
	"#t\r\n",
	",1.5\r\n",
	"(123456789012345678901234567890\r\n",
	"=7\r\ntxt:abc\r\n",
	"!5\r\nERR x\r\n",
	"~2\r\n:1\r\n:2\r\n",
	"%2\r\n+a\r\n:1\r\n+b\r\n*1\r\n:2\r\n",
	">2\r\n+message\r\n+x\r\n",
	"|1\r\n+ttl\r\n:3\r\n$1\r\nv\r\n", // attributes belong to the value behind
}

func TestReadValue(t *testing.T) {
	for _, value := range values {
		// One byte per read: a value must not depend on how TCP splits it.
		r := bufio.NewReader(iotest.OneByteReader(strings.NewReader(value + "+next\r\n")))
		for _, want := range []string{value, "+next\r\n"} {
			if got, err := readValue(r); string(got) != want || err != nil {
				t.Errorf("readValue of %q = %q, %v; want %q, nil", value, got, err, want)
			}
		}
		if got, err := readValue(r); !errors.Is(err, io.EOF) {
			t.Errorf("readValue at the end = %q, %v; want EOF", got, err)
		}
	}
}

func TestReadValueCutShort(t *testing.T) {
	for _, value := range values {
		for n := 1; n < len(value); n++ {
			if got, err := readValue(reader(value[:n])); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("readValue of %q = %q, %v; want unexpected EOF", value[:n], got, err)
			}
		}
	}
}

func TestReadValueRejects(t *testing.T) {
	for _, text := range []string{
		"\r\n", "x\r\n", "+OK\n", "$x\r\n", "$-2\r\n", "$3\r\nabcde", "*1\r\n?\r\n",
		"$99999999999999\r\n", "*99999999999999\r\n", "*9000000\r\n", "%900000\r\n",
		"$9223372036854775807\r\n", "%9223372036854775807\r\n",
	} {
		if got, err := readValue(reader(text)); !errors.Is(err, errNotRESP) {
			t.Errorf("readValue of %q = %q, %v; want errNotRESP", text, got, err)
		}
	}
}

func TestReadCommand(t *testing.T) {
	for _, test := range []struct{ text, name string }{
		{"*1\r\n$4\r\nPING\r\n", "ping"},
		{"*3\r\n$7\r\nEvalSha\r\n$2\r\nab\r\n$1\r\n0\r\n", "evalsha"},
		{"*2\r\n$3\r\nGET\r\n$4\r\n\r\n\r\n\r\n", "get"},
		{"INFO server\r\n", "info"},
		{"ping\n", "ping"},
		{"\r\n", ""},
		{"*0\r\n", ""},
		{"*-1\r\n", ""},
	} {
		raw, name, err := readCommand(reader(test.text))
		if string(raw) != test.text || name != test.name || err != nil {
			t.Errorf("readCommand of %q = %q, %q, %v; want name %q", test.text, raw, name, err, test.name)
		}
	}
	for _, text := range []string{"PING", "*1\r\n$4\r\nPI"} {
		if _, _, err := readCommand(reader(text)); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("readCommand of %q: %v, want unexpected EOF", text, err)
		}
	}
	if _, _, err := readCommand(reader("")); !errors.Is(err, io.EOF) {
		t.Errorf("readCommand of nothing: %v, want EOF", err)
	}
}

func reader(text string) *bufio.Reader { return bufio.NewReader(strings.NewReader(text)) }

// Whatever comes in, the parser returns it unchanged or an error, and what it
// takes for one value it takes for one value again.
func FuzzReadValue(f *testing.F) {
	for _, value := range values {
		f.Add([]byte(value))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		raw, err := readValue(bufio.NewReader(bytes.NewReader(data)))
		if err != nil {
			return
		}
		if !bytes.HasPrefix(data, raw) || len(raw) < 3 {
			t.Fatalf("readValue of %q = %q, want a prefix", data, raw)
		}
		again, err := readValue(bufio.NewReader(bytes.NewReader(raw)))
		if !bytes.Equal(again, raw) || err != nil {
			t.Fatalf("readValue of %q = %q, %v; want it unchanged", raw, again, err)
		}
	})
}

package accesslog_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/hybridlimit/hybridlimit/bench/accesslog"
)

func zip(tb testing.TB, text string) []byte {
	tb.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	w.Name = "access.log" // as gzip(1) does: a longer header to truncate
	if _, err := io.WriteString(w, text); err != nil {
		tb.Fatal(err)
	}
	if err := w.Close(); err != nil {
		tb.Fatal(err)
	}
	return b.Bytes()
}

func unzip(tb testing.TB, data []byte) []byte {
	tb.Helper()
	r, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		tb.Fatal(err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		tb.Fatal(err)
	}
	return text
}

func TestReadGzip(t *testing.T) {
	for name, test := range map[string]struct {
		input   []byte
		entries int
	}{
		"one member":          {zip(t, good+good), 2},
		"three members":       {bytes.Join([][]byte{zip(t, good), zip(t, good+good), zip(t, good)}, nil), 4},
		"line across members": {append(zip(t, good[:30]), zip(t, good[30:])...), 1},
		"empty members":       {bytes.Join([][]byte{zip(t, ""), zip(t, good), zip(t, "")}, nil), 1},
		"byte order mark":     {zip(t, "\ufeff"+good), 1},
		"large":               {zip(t, strings.Repeat(good, 10_000)), 10_000},
	} {
		for how, r := range map[string]io.Reader{
			"at once":      bytes.NewReader(test.input),
			"byte by byte": iotest.OneByteReader(bytes.NewReader(test.input)),
		} {
			log, err := accesslog.Read(r, accesslog.Options{})
			if err != nil {
				t.Errorf("%s, %s: Read = %v; want a log", name, how, err)
				continue
			}
			if len(log.Entries) != test.entries || log.Lines != test.entries {
				t.Errorf("%s, %s: %d entries of %d lines; want %d", name, how, len(log.Entries), log.Lines, test.entries)
			}
		}
	}
}

// TestReadTruncatedGzip cuts a log of two members at each byte. Only the cut
// between the members cannot be noticed, and a single byte is not gzip yet.
func TestReadTruncatedGzip(t *testing.T) {
	first := zip(t, good)
	data := append(bytes.Clone(first), zip(t, good+good)...)
	for n := 2; n < len(data); n++ {
		_, err := accesslog.Read(bytes.NewReader(data[:n]), accesslog.Options{})
		if n == len(first) {
			if err != nil {
				t.Errorf("first member alone: Read = %v; want a log", err)
			}
			continue
		}
		if !errors.Is(err, io.ErrUnexpectedEOF) || !strings.HasPrefix(text(err), "accesslog: gzip is truncated after ") {
			t.Errorf("cut after %d of %d bytes: Read = %v; want it to be called truncated", n, len(data), err)
		}
	}

	cut := zip(t, strings.Repeat(good, 1000))
	_, err := accesslog.Read(bytes.NewReader(cut[:len(cut)-8]), accesslog.Options{}) // without the trailer
	if want := "accesslog: gzip is truncated after 1000 lines: unexpected EOF"; text(err) != want {
		t.Errorf("Read = %v; want %s", err, want)
	}
}

func TestReadCorruptGzip(t *testing.T) {
	data := zip(t, strings.Repeat(good, 1000))
	trailer := bytes.Clone(data)
	trailer[len(trailer)-8] ^= 1
	body := bytes.Clone(data)
	for i := range 8 {
		body[len(body)/2+i] ^= 0xff
	}
	method := bytes.Clone(data)
	method[2] = 7
	for name, input := range map[string][]byte{
		"checksum":         trailer,
		"body":             body,
		"method":           method,
		"garbage after it": append(bytes.Clone(data), "garbage, ten bytes at least"...),
	} {
		_, err := accesslog.Read(bytes.NewReader(input), accesslog.Options{})
		if !strings.HasPrefix(text(err), "accesslog: gzip is corrupt after ") {
			t.Errorf("%s: Read = %v; want it to be called corrupt", name, err)
		}
	}
}

// TestReadReportsProgress uses noise, which does not compress, so that there
// is something to report.
func TestReadReportsProgress(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var b strings.Builder
	for range 5000 {
		fmt.Fprintf(&b, "%s %x%x%x\n", strings.TrimSuffix(good, "\n"), rng.Uint64(), rng.Uint64(), rng.Uint64())
	}
	for name, data := range map[string][]byte{"plain": []byte(b.String()), "gzip": zip(t, b.String()), "short": []byte(good)} {
		for how, wrap := range map[string]func(io.Reader) io.Reader{
			"at once":      func(r io.Reader) io.Reader { return r },
			"byte by byte": iotest.OneByteReader,
		} {
			var told []int64
			opts := accesslog.Options{Progress: func(n int64) { told = append(told, n) }}
			if _, err := accesslog.Read(wrap(bytes.NewReader(data)), opts); err != nil {
				t.Fatal(err)
			}
			if name != "short" && len(told) < 3 || len(told) == 0 || told[len(told)-1] != int64(len(data)) {
				t.Fatalf("%s, %s: Progress calls = %d; want the last with %d", name, how, len(told), len(data))
			}
			for i := range len(told) - 2 {
				if step := told[i+1] - told[i]; step < 64<<10 || step > 128<<10 {
					t.Errorf("%s, %s: step of Progress = %d; want about 64 KiB", name, how, step)
				}
			}
		}
	}
}

// TestReadPlainAndGzipAgree reads the testdata both ways.
func TestReadPlainAndGzipAgree(t *testing.T) {
	data := testdata(t)
	zipped, err := accesslog.Read(bytes.NewReader(data), accesslog.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if plain := read(t, string(unzip(t, data)), accesslog.Options{}); !reflect.DeepEqual(plain, zipped) {
		t.Error("logs differ")
	}
}

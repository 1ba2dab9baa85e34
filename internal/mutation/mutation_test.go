package mutation

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// mutation is one way to break the code, and the tests that must notice.
type mutation struct {
	name     string // what goes wrong
	file     string // from the module's root: a .go file, or one it embeds
	old, new string // old must be there exactly once
	pkg      string // package of the tests, from the module's root
	run      string // their names, as go test -run takes them
}

const root = "../.."

// TestMutations fails for every mutation that the tests named for it survive.
func TestMutations(t *testing.T) {
	if os.Getenv("MUTATIONS") != "1" {
		t.Skip("set MUTATIONS=1 to run the mutations: they take minutes")
	}
	baseline(t)
	for _, m := range mutations {
		t.Run(m.name, func(t *testing.T) {
			start := time.Now()
			overlay, err := m.overlay(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			failed, err := goTest(t.Context(), m.pkg, m.run, "-overlay="+overlay)
			switch {
			case err != nil:
				t.Fatalf("%s: %v", m.file, err)
			case len(failed) == 0:
				t.Errorf("%s: %q instead of %q: every test of %s in %s passes: want a failure", m.file, m.new, m.old, m.run, m.pkg)
			default:
				t.Logf("killed by %s in %.1f s", strings.Join(failed, ", "), time.Since(start).Seconds())
			}
		})
	}
}

// baseline fails unless all the tests named pass without a mutation: otherwise
// their failures would say nothing.
func baseline(t *testing.T) {
	t.Helper()
	runs := map[string][]string{}
	for _, m := range mutations {
		if !slices.Contains(runs[m.pkg], m.run) {
			runs[m.pkg] = append(runs[m.pkg], m.run)
		}
	}
	for pkg, names := range runs {
		run := strings.Join(names, "|")
		failed, err := goTest(t.Context(), pkg, run)
		if err != nil {
			t.Fatalf("without a mutation: %s: %v", pkg, err)
		}
		if len(failed) > 0 {
			t.Fatalf("without a mutation: %s in %s: want all tests to pass first", strings.Join(failed, ", "), pkg)
		}
	}
}

// overlay writes the mutated file and an overlay that puts it in place of the
// true one, and returns the overlay's path.
func (m mutation) overlay(dir string) (string, error) {
	path, err := filepath.Abs(filepath.Join(root, filepath.FromSlash(m.file)))
	if err != nil {
		return "", err
	}
	source, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if n := bytes.Count(source, []byte(m.old)); n != 1 {
		return "", fmt.Errorf("%s: %q is there %d times: want once; the code has changed, so must the table", m.file, m.old, n)
	}
	mutant := filepath.Join(dir, filepath.Base(path))
	if err := os.WriteFile(mutant, bytes.Replace(source, []byte(m.old), []byte(m.new), 1), 0o600); err != nil {
		return "", err
	}
	overlay, err := json.Marshal(map[string]map[string]string{"Replace": {path: mutant}})
	if err != nil {
		return "", err
	}
	name := filepath.Join(dir, "overlay.json")
	return name, os.WriteFile(name, overlay, 0o600)
}

// goTest runs tests of pkg and returns which failed. The error says that they
// did not run: a compile error, no such test, all skipped.
func goTest(ctx context.Context, pkg, run string, flags ...string) (failed []string, err error) {
	args := append([]string{"test", "-json", "-count=1", "-vet=off", "-failfast", "-timeout=90s", "-run=" + run}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, "./"+pkg)...)
	cmd.Dir = root
	out, runErr := cmd.Output()
	ran := 0
	var said strings.Builder
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var e struct{ Action, Test, Output, FailedBuild string }
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			return nil, fmt.Errorf("go test -json said %q: %w", lines.Text(), err)
		}
		said.WriteString(e.Output)
		top := e.Test != "" && !strings.Contains(e.Test, "/")
		switch {
		case e.Action == "build-fail" || e.FailedBuild != "":
			return nil, fmt.Errorf("does not compile: %s", tail(said.String()))
		case top && e.Action == "fail":
			failed = append(failed, e.Test)
			ran++
		case top && e.Action == "pass":
			ran++
		}
	}
	var exit *exec.ExitError
	switch {
	case runErr != nil && !errors.As(runErr, &exit):
		return nil, runErr
	case runErr != nil && len(failed) == 0:
		return nil, fmt.Errorf("go test failed, and no test did: %s%s", tail(said.String()), exit.Stderr)
	case ran == 0:
		return nil, fmt.Errorf("no test of %s ran in %s: %s", run, pkg, tail(said.String()))
	}
	return failed, nil
}

// TestSimulator tells which of the mutations the simulator notices, and with which
// schedule. It need not notice all: some only cost tokens, or are in the script.
func TestSimulator(t *testing.T) {
	if os.Getenv("MUTATIONS") != "1" {
		t.Skip("set MUTATIONS=1 to run the mutations: they take minutes")
	}
	seed := regexp.MustCompile(`seed (\d+): `)
	for _, m := range mutations {
		if strings.HasPrefix(m.file, "lua/") || !strings.HasPrefix(m.file, "lease/") && !strings.HasPrefix(m.file, "fallback/") {
			continue // code that the simulator does not run
		}
		t.Run(m.name, func(t *testing.T) {
			overlay, err := m.overlay(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), "go", "test", "-count=1", "-vet=off", "-run=^TestSim$", "-overlay="+overlay,
				"./internal/sim", "-sim.runs=3000", "-sim.time=15s", "-sim.shrink=false")
			cmd.Dir = root
			out, err := cmd.CombinedOutput()
			switch first := seed.FindSubmatch(out); {
			case err == nil:
				t.Log("not noticed")
			case first == nil:
				t.Errorf("%v: %s", err, tail(string(out)))
			default:
				_, said, _ := strings.Cut(string(out), "seed ")
				said, _, _ = strings.Cut(said, "\n")
				t.Logf("killed by seed %s", said)
			}
		})
	}
}

func tail(s string) string { return s[max(0, len(s)-1500):] }

// TestOverlay proves that a mutation reaches the code under test, for Go and for
// a file that is embedded, and that a broken one is told from a killed one.
func TestOverlay(t *testing.T) {
	if os.Getenv("MUTATIONS") != "1" {
		t.Skip("set MUTATIONS=1 to run the mutations: they take minutes")
	}
	for _, c := range []struct {
		mutation
		want string // part of the error; empty if it is to be killed
	}{
		{mutation{"go", "lease/leasetest/bucket.go", "const slackMS = 1000\n", "const slackMS = 1000\n\nfunc init() { panic(\"mutant\") }\n", "lease", "^TestStoreInMemory$"}, "no test did"},
		{mutation{"embedded", "lua/acquire.lua", "local NEVER = ", "error('mutant') local NEVER = ", "lua", "^TestStoreInProcess$"}, ""},
		{mutation{"syntax", "lease/leasetest/bucket.go", "const slackMS = 1000\n", "const slackMS = \n", "lease", "^TestStoreInMemory$"}, "does not compile"},
		{mutation{"no test", "lease/leasetest/bucket.go", "const slackMS = 1000\n", "const slackMS = 1001\n", "lease", "^TestNoSuchThing$"}, "no test of"},
	} {
		t.Run(c.name, func(t *testing.T) {
			overlay, err := c.overlay(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			failed, err := goTest(t.Context(), c.pkg, c.run, "-overlay="+overlay)
			if c.want == "" && (err != nil || len(failed) == 0) || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("failed %v, error %v: want an error with %q", failed, err, c.want)
			}
		})
	}
	twice := mutation{file: "lua/acquire.lua", old: "local "}
	if _, err := twice.overlay(t.TempDir()); err == nil {
		t.Error("overlay of a text that is there many times = nil error: want one")
	}
}

// TestTable fails for a mutation whose text is not there, once and no more: the code
// has changed, and so must the table.
func TestTable(t *testing.T) {
	for _, m := range mutations {
		if _, err := m.overlay(t.TempDir()); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}

package sim_test

import (
	"bufio"
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestScenarios checks the table of scenarios: each has a test, or says why not.
func TestScenarios(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile(`^\| (\d+) [^|]+ \| ([^|]+) \|$`)
	named := regexp.MustCompile(`^([a-z/]+) (Test\w+)$`)
	seen := map[int]bool{}
	for lines := bufio.NewScanner(bytes.NewReader(text)); lines.Scan(); {
		m := row.FindStringSubmatch(lines.Text())
		if m == nil {
			continue
		}
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		if seen[n] {
			t.Errorf("scenario %d is there twice", n)
		}
		seen[n] = true
		if strings.HasPrefix(m[2], "none: ") {
			continue
		}
		for test := range strings.SplitSeq(m[2], ", ") {
			name := named.FindStringSubmatch(test)
			if name == nil {
				t.Errorf("scenario %d: %q: want a package and a test", n, test)
			} else if !declared(t, name[1], name[2]) {
				t.Errorf("scenario %d: no %s in %s", n, name[2], name[1])
			}
		}
	}
	for n := range 55 {
		if !seen[n+1] {
			t.Errorf("no row for scenario %d", n+1)
		}
	}
}

// declared reports whether a package has a test.
func declared(t *testing.T, pkg, test string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("../..", pkg, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte("func "+test+"(")) {
			return true
		}
	}
	return false
}

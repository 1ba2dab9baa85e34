package model

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

// TestModel runs run.sh: the true model keeps the promise in every state, and
// each flaw breaks it.
func TestModel(t *testing.T) {
	if testing.Short() {
		t.Skip("the model takes half a minute")
	}
	for _, tool := range []string{"bash", "spin", "gcc"} {
		if _, err := exec.LookPath(tool); err != nil {
			const missing = "no %s, so the model is not checked: apt-get install -y spin gcc"
			if os.Getenv("REQUIRE_SPIN") == "1" {
				t.Fatalf(missing, tool)
			}
			t.Skipf(missing, tool)
		}
	}
	for _, name := range []string{"run.sh", "lease.pml"} {
		// For the test cache, which does not see what a child reads.
		if _, err := os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(t.Context(), "bash", "run.sh")
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // so that it cleans up
	cmd.WaitDelay = 5 * time.Second
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("run.sh: %v\n%s", err, out)
	}
	t.Logf("%s", out)
}

//go:build unix && !linux

package redistest

import (
	"os"
	"syscall"
)

var pauseSignal, resumeSignal os.Signal = syscall.SIGSTOP, syscall.SIGCONT

// dieWithParent has nothing to offer here: a server outlives a test binary that
// is killed before its cleanups ran.
func dieWithParent() *syscall.SysProcAttr { return nil }

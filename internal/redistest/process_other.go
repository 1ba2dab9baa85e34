//go:build !unix

package redistest

import (
	"os"
	"syscall"
)

// There is no way to pause a process here; a test that wants to is skipped.
var pauseSignal, resumeSignal os.Signal

// dieWithParent has nothing to offer here either.
func dieWithParent() *syscall.SysProcAttr { return nil }

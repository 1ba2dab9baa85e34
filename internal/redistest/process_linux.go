package redistest

import (
	"os"
	"syscall"
)

var pauseSignal, resumeSignal os.Signal = syscall.SIGSTOP, syscall.SIGCONT

// dieWithParent has the kernel kill the child when the forking thread ends; see
// launchProcess for what that asks of the thread.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

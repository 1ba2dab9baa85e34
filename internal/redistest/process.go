package redistest

import (
	"os"
	"os/exec"
	"runtime"
)

// process is a child that is certain to end: by kill, or with this program.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the child is gone and reaped
	err  error         // what Wait returned; read it after done
}

// launchProcess starts path with its output going to log.
//
// On Linux the child asks the kernel to be killed when its parent dies
// (Pdeathsig), which covers what no deferred call can: a panic, a test time-out,
// kill -9. The trap is that "parent" there means the OS thread that forked, not
// the process. The Go runtime ends a thread when a goroutine locked to it
// returns, and a server started from such a thread would die in the middle of a
// test. So each child has a goroutine that is locked to its thread from before
// the fork until the child is gone: the thread outlives the child.
func launchProcess(path string, args []string, log *os.File) (*process, error) {
	p := &process{cmd: exec.Command(path, args...), done: make(chan struct{})} //nolint:noctx // lives until kill
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = dieWithParent()

	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err != nil {
			return
		}
		p.err = p.cmd.Wait()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, err
	}
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// kill ends the child and returns when it is gone.
func (p *process) kill() {
	// The only error here is that the child has ended by itself.
	_ = p.cmd.Process.Kill()
	<-p.done
}

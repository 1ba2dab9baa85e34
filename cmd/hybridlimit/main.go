// Hybridlimit is a distributed rate limiter as a program: the HTTP service, a
// look into a bucket, a demonstration, a soak test, and a replay of access logs.
//
// It exits with 0 when all went well (also when a signal ended it), with 2 when
// it was called wrongly, and with 1 for any other error.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/redis/go-redis/v9/logging"
	"github.com/spf13/cobra"
)

const (
	exitError = 1
	exitUsage = 2
)

// redisEnv is where --redis has its default from. A URL with a password is
// better kept there: everybody on the machine can read a command line.
const redisEnv = "HYBRIDLIMIT_REDIS"

func main() {
	// After the first signal a second one ends the program at once.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	// The client reports each broken connection on stderr, in its own format and
	// as often as requests come. Callers are told by their decisions and errors.
	logging.Disable()
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// run executes the command that args name and returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRootCmd()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	ran := markRun(root)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		fmt.Fprintln(stderr, "hybridlimit: interrupted")
		return exitError
	}
	fmt.Fprintf(stderr, "hybridlimit: %v\n", err)
	// Cobra has no type for its own complaints, but they all come first: an
	// error before a command began is about how it was called.
	if _, ok := errors.AsType[usageError](err); ok || !*ran {
		fmt.Fprintf(stderr, "Run '%s --help' for usage.\n", cmd.CommandPath())
		return exitUsage
	}
	return exitError
}

func newRootCmd() *cobra.Command {
	root := &cobra.Command{
		Use:   "hybridlimit",
		Short: "A distributed rate limiter: one bucket in Redis, leased to each node in batches",
		Long: `Hybridlimit limits how often keys are used, over all nodes that share a Redis.
Each node leases batches of tokens from the key's bucket in Redis and admits
requests from memory; in any time t all nodes together admit at most
burst + rate·t.`,
		SilenceErrors: true, // run prints them
		SilenceUsage:  true,
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(newServeCmd(), newInspectCmd(), newDemoCmd(), newSoakCmd(), newReplayCmd(), newVersionCmd())
	return root
}

// markRun makes every command of root note that it began.
func markRun(root *cobra.Command) (ran *bool) {
	ran = new(bool)
	for _, cmd := range root.Commands() {
		if inner := cmd.RunE; inner != nil {
			cmd.RunE = func(cmd *cobra.Command, args []string) error {
				*ran = true
				return inner(cmd, args)
			}
		}
	}
	return ran
}

// usageError is a mistake in how a command was called that it finds by itself.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// noArgs refuses arguments of a command that has none.
func noArgs(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("takes no arguments, but was given %q", args)
	}
	return nil
}

// oneArg wants exactly one argument, called name.
func oneArg(name string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		if len(args) != 1 {
			return fmt.Errorf("want one argument, %s, but was given %d", name, len(args))
		}
		return nil
	}
}

// redisURL returns the value of cmd's flag --redis: as given, else from the
// environment. The flag has no default of its own, for help would print it.
func redisURL(cmd *cobra.Command, given string) string {
	if cmd.Flags().Changed("redis") {
		return given
	}
	return os.Getenv(redisEnv)
}

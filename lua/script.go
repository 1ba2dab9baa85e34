package lua

import (
	"context"
	"crypto/sha1"
	_ "embed" // the scripts
	"encoding/hex"
	"slices"

	"github.com/hybridlimit/hybridlimit/lease"
)

//go:embed acquire.lua
var acquireSource string

//go:embed windows.lua
var windowsSource string

//go:embed window.lua
var windowSource string

//go:embed log.lua
var logSource string

//go:embed counter.lua
var counterSource string

// script is the store's side of an algorithm. All scripts take the same arguments
// and give the same reply.
type script struct {
	tag    string // of the state's name in Redis: the algorithm, and the format's version
	source string
	sha    string
}

func (c *script) set(source string) {
	c.source = source
	sum := sha1.Sum([]byte(source))
	c.sha = hex.EncodeToString(sum[:])
}

// newScripts returns the script of each algorithm, in their order.
func newScripts() []*script {
	of := func(tag, source string) *script {
		c := &script{tag: tag}
		c.set(source)
		return c
	}
	bucket := of("tb1", acquireSource)
	scripts := []*script{
		lease.TokenBucket:    bucket,
		lease.LeakyBucket:    bucket, // seen from the other side
		lease.FixedWindow:    of("fw1", windowSource+windowsSource),
		lease.SlidingLog:     of("sl1", logSource+windowsSource),
		lease.SlidingCounter: of("sc1", counterSource+windowsSource),
	}
	return scripts
}

// group is calls that one command carries out.
type group struct {
	*script
	calls   []lease.Call
	answers []lease.Answer
	at      []int // where each call was in the batch; nil if this is the batch
}

// groups divides calls by their scripts.
func (s *Store) groups(calls []lease.Call, answers []lease.Answer) []group {
	first := s.scripts[calls[0].Limit.Algorithm]
	if !slices.ContainsFunc(calls, func(c lease.Call) bool { return s.scripts[c.Limit.Algorithm] != first }) {
		return []group{{first, calls, answers, nil}}
	}
	var all []group
	for i, c := range calls {
		of := s.scripts[c.Limit.Algorithm]
		k := slices.IndexFunc(all, func(g group) bool { return g.script == of })
		if k < 0 {
			k = len(all)
			all = append(all, group{script: of})
		}
		all[k].calls = append(all[k].calls, c)
		all[k].at = append(all[k].at, i)
	}
	for k := range all {
		all[k].answers = make([]lease.Answer, len(all[k].calls))
	}
	return all
}

// ungroup puts the answers of groups where they belong.
func ungroup(groups []group, answers []lease.Answer) {
	for _, g := range groups {
		for k, i := range g.at {
			answers[i] = g.answers[k]
		}
	}
}

// split makes a group of each call.
func split(groups []group) (all []group) {
	for _, g := range groups {
		for i := range g.calls {
			all = append(all, group{g.script, g.calls[i : i+1], g.answers[i : i+1], nil})
		}
	}
	return all
}

func (s *Store) send(ctx context.Context, calls []lease.Call, answers []lease.Answer) {
	for len(calls) > 0 {
		n := min(len(calls), MaxBatch)
		s.sendBatch(ctx, s.groups(calls[:n], answers[:n]), answers[:n])
		calls, answers = calls[n:], answers[n:]
	}
}

func (s *Store) sendBatch(ctx context.Context, groups []group, answers []lease.Answer) {
	defer ungroup(groups, answers)
	if len(answers) > 1 && !s.single.Load() {
		s.pipeline(ctx, split(groups))
		return
	}
	refused := groups
	if len(groups) > 1 {
		refused = s.pipeline(ctx, groups)
	} else if s.alone(ctx, groups[0]) {
		refused = nil
	}
	if len(refused) > 0 {
		s.single.Store(false)
		s.pipeline(ctx, split(refused))
	}
}

// alone sends g by itself. It returns false, nothing having been executed, if the
// server refuses keys of several slots.
func (s *Store) alone(ctx context.Context, g group) bool {
	cmd := s.command(ctx, "evalsha", g.sha, g)
	err := s.process(ctx, cmd, g.calls)
	if isNoScript(err) {
		// Certainly not executed, and EVAL loads it for all that follow.
		cmd = s.command(ctx, "eval", g.source, g)
		err = s.rdb.Process(ctx, cmd)
	}
	if len(g.calls) > 1 && hasCode(err, "CROSSSLOT") {
		return false
	}
	s.decode(cmd.Cmd, err, g.calls, g.answers)
	return true
}

// pipeline sends groups in one pipeline. Those that the server did not know the
// script for go again, once, with its text. It returns those that have keys of
// several slots, which the server did not carry out.
func (s *Store) pipeline(ctx context.Context, groups []group) (refused []group) {
	send := func(name string, groups []group) (again []group) {
		pipe := s.rdb.Pipeline()
		cmds := make([]onceCmd, len(groups))
		var calls []lease.Call
		for k, g := range groups {
			text := g.sha
			if name == "eval" {
				text = g.source
			}
			cmds[k] = s.command(ctx, name, text, g)
			calls = append(calls, g.calls...)
			_ = pipe.Process(ctx, cmds[k]) // queues; the error is in the command
		}
		r := s.board(ctx, calls)
		if r != nil {
			_ = pipe.Process(ctx, r.cmd)
		}
		_, execErr := pipe.Exec(ctx)
		s.arrive(r, execErr)
		for k, g := range groups {
			err := outcome(cmds[k], execErr)
			switch {
			case isNoScript(err) && name == "evalsha":
				again = append(again, g)
			case len(g.calls) > 1 && hasCode(err, "CROSSSLOT"):
				refused = append(refused, g)
			default:
				s.decode(cmds[k].Cmd, err, g.calls, g.answers)
			}
		}
		return again
	}
	if again := send("evalsha", groups); len(again) > 0 {
		send("eval", again)
	}
	return refused
}

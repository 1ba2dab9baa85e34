package lua

import (
	"context"
	_ "embed" // beat.lua
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/lease"
)

//go:embed beat.lua
var beatSource string

var beatSHA = redis.NewScript(beatSource).Hash()

// Beat is a sign of life of one node, or its farewell.
type Beat struct {
	// ID is the node's name, unique among the nodes with the Store's prefix.
	ID string
	// TTL is how long the node counts if it is not heard of again. A beat also
	// takes others out that were not heard of for this long, so all nodes should
	// have the same. Range 1ms and up.
	TTL time.Duration
	// Gen is the generation of the list of nodes that the node knows; 0 for none.
	Gen int64
	// Leave takes the node out.
	Leave bool
}

// Members are the nodes in Redis right after a Beat.
type Members struct {
	// Count is how many there are. Range 0, after the last one left, and up.
	Count int
	// Gen is the generation of their list, which changes whenever a node joins,
	// leaves or lapses. Range 1 to 2^53.
	Gen int64
	// IDs are their names, in no order that matters; nil if Gen is Beat.Gen.
	IDs []string
}

// Beat carries b out by the server's clock alone. Like a lease call it is sent
// at most once and ends with ctx; its errors match lease.ErrNotExecuted and
// its siblings. It needs the commands EVALSHA, EVAL, TIME, MGET, SET, PEXPIRE,
// DEL and those of sorted sets, on the keys "<prefix>{nodes}" and
// "<prefix>{nodes}:gen".
func (s *Store) Beat(ctx context.Context, b Beat) (Members, error) {
	if err := ctx.Err(); err != nil {
		return Members{}, fmt.Errorf("lua: beat: %w: %w", lease.ErrNotExecuted, err)
	}
	type result struct {
		members Members
		err     error
	}
	r, err := heed(ctx, s, func() result {
		members, err := s.beat(ctx, b)
		return result{members, err}
	})
	if err != nil {
		return Members{}, fmt.Errorf("lua: beat: %w", err)
	}
	return r.members, r.err
}

func (s *Store) beat(ctx context.Context, b Beat) (Members, error) {
	cmd := s.beatCommand(ctx, "evalsha", beatSHA, b)
	err := s.rdb.Process(ctx, cmd)
	if isNoScript(err) {
		cmd = s.beatCommand(ctx, "eval", beatSource, b)
		err = s.rdb.Process(ctx, cmd)
	}
	return s.decodeBeat(cmd.Cmd, err, b)
}

func (s *Store) nodesKey() string { return s.prefix + "{nodes}" }

func (s *Store) beatCommand(ctx context.Context, name, script string, b Beat) onceCmd {
	leave := 0
	if b.Leave {
		leave = 1
	}
	key := s.nodesKey()
	cmd := onceCmd{redis.NewCmd(ctx, name, script, 2, key, key+":gen",
		b.ID, max(1, b.TTL.Milliseconds()), b.Gen, leave)}
	cmd.SetFirstKeyPos(3)
	cmd.SetStepCount(1) // as command does
	return cmd
}

// decodeBeat turns the reply to b into Members. A reply of another shape is an
// outcome nobody knows.
func (s *Store) decodeBeat(cmd *redis.Cmd, err error, b Beat) (Members, error) {
	if err != nil {
		s.failed(err)
		return Members{}, fmt.Errorf("lua: beat: %w", classify(err, 1))
	}
	m, ok := readMembers(cmd.Val(), b.Gen)
	if !ok {
		return Members{}, fmt.Errorf("lua: beat: %w: reply has the wrong shape: %.80q", lease.ErrUnknownOutcome, fmt.Sprint(cmd.Val()))
	}
	return m, nil
}

func readMembers(reply any, known int64) (m Members, ok bool) {
	values, _ := reply.([]any)
	if len(values) < 2 {
		return Members{}, false
	}
	count, isCount := values[0].(int64)
	gen, isGen := values[1].(int64)
	ids := values[2:]
	switch {
	case !isCount || !isGen || count < 0 || gen < 1:
		return Members{}, false
	case gen == known:
		return Members{Count: int(count), Gen: gen}, len(ids) == 0
	case int64(len(ids)) != count:
		return Members{}, false
	}
	m = Members{Count: int(count), Gen: gen, IDs: make([]string, len(ids))}
	for i := range ids {
		if m.IDs[i], ok = ids[i].(string); !ok {
			return Members{}, false
		}
	}
	return m, true
}

// rider is who has beats to send along with lease calls.
type rider struct {
	due  func() (Beat, bool)
	done func(Members, error)
}

// SetRider lets beats travel in the pipelines of lease calls. Whenever some are
// about to be sent, due says whether a beat is due, and which; done is told,
// once for each such beat and maybe on another goroutine, what became of it.
// Both must be quick, for the calls wait. They cannot suffer otherwise: whatever
// happens to the beat, every call has the answer it would have had alone. A beat
// whose script the server does not know is not sent again; Beat does that.
//
// On a cluster a beat goes only with a call to the server that keeps the nodes.
// Call SetRider once, before the Store is used.
func (s *Store) SetRider(due func() (Beat, bool), done func(Members, error)) {
	s.rider = &rider{due, done}
}

// ride is one beat that travels along.
type ride struct {
	beat Beat
	cmd  onceCmd
}

// board returns a beat to send in the pipeline of calls; nil if none is due.
func (s *Store) board(ctx context.Context, calls []lease.Call) *ride {
	if s.rider == nil || !s.meets(calls) {
		return nil
	}
	b, due := s.rider.due()
	if !due {
		return nil
	}
	return &ride{b, s.beatCommand(ctx, "evalsha", beatSHA, b)}
}

// meets reports whether a beat would go to a server that one of calls goes to
// anyhow. A pipeline takes as long as the slowest server it goes to, and calls
// must not wait for one that they do not need.
func (s *Store) meets(calls []lease.Call) bool {
	if s.shards == nil {
		return true
	}
	home := s.shards.owner(s.nodesKey())
	return home != "" && slices.ContainsFunc(calls, func(c lease.Call) bool { return s.Shard(c.Key) == home })
}

// arrive tells the rider what became of r, in a pipeline that ended with execErr.
func (s *Store) arrive(r *ride, execErr error) {
	if r == nil {
		return
	}
	members, err := s.decodeBeat(r.cmd.Cmd, outcome(r.cmd, execErr), r.beat)
	s.rider.done(members, err)
}

// process sends cmd, which is calls, and a beat with it if one is due.
func (s *Store) process(ctx context.Context, cmd onceCmd, calls []lease.Call) error {
	r := s.board(ctx, calls)
	if r == nil {
		return s.rdb.Process(ctx, cmd)
	}
	pipe := s.rdb.Pipeline()
	_ = pipe.Process(ctx, cmd) // queues; the error is in the command
	_ = pipe.Process(ctx, r.cmd)
	_, execErr := pipe.Exec(ctx)
	s.arrive(r, execErr)
	return outcome(cmd, execErr)
}

// outcome is the error of a command in a pipeline that ended with execErr. When
// a connection breaks go-redis gives its error to every command without one,
// also to those whose reply had come: what was answered stays answered.
func outcome(cmd onceCmd, execErr error) error {
	if reply, _ := cmd.Val().([]any); len(reply) > 0 {
		cmd.SetErr(nil)
		return nil
	}
	if err := cmd.Err(); err != nil || cmd.Val() != nil {
		return err
	}
	return execErr // never sent: the pipeline failed as a whole
}

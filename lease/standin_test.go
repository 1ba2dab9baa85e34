package lease_test

import (
	"context"
	"testing"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// scripted is a Local that answers calls in order, and remembers them.
type scripted struct {
	answers []lease.Answer
	calls   []lease.Call
}

func (s *scripted) Acquire(_ context.Context, calls []lease.Call) []lease.Answer {
	s.calls = append(s.calls, calls[0])
	a := s.answers[0]
	s.answers = s.answers[1:]
	return []lease.Answer{a}
}

func (s *scripted) Local(lease.Call) lease.Answer { return lease.Answer{} }

// Reports in a call that certainly did not reach the store go along with the next,
// also when somebody stood in; of leases of the stand-in it alone is told, once.
func TestReportsSurvive(t *testing.T) {
	limit := lease.Limit{Rate: 1, Burst: 1000}
	own := lease.Grant{Tokens: 5, Epoch: -7, TTL: time.Second, Source: lease.SourceLocal, Full: 500, Rate: 0.5}
	s := &scripted{answers: []lease.Answer{
		{Grant: lease.Grant{Tokens: 3, Epoch: 7, TTL: time.Second, Source: lease.SourceStore}},
		{Grant: own, Err: lease.ErrNotExecuted},
		{Grant: own, Err: lease.ErrUnknownOutcome},
		{Grant: own, Err: lease.ErrNotExecuted},
	}}
	c, err := lease.NewStepped(s, limit, lease.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 + 5 + 5 + 1 {
		d, err := c.Take(context.Background(), "k", 1)
		if want := map[bool]lease.Source{true: lease.SourceStore, false: lease.SourceLocal}[i < 1]; err != nil || !d.Allowed || i > 3 && d.Source != want {
			t.Fatalf("Take %d = %+v, %v: want it admitted by %v", i, d, err, want)
		}
	}
	type reports struct{ store, own lease.Report }
	want := []reports{
		{},
		{store: lease.Report{Epoch: 7, Spent: 3}},
		{store: lease.Report{Epoch: 7, Spent: 3}, own: lease.Report{Epoch: -7, Spent: 5}},
		{own: lease.Report{Epoch: -7, Spent: 5}},
	}
	for i, call := range s.calls {
		if got := (reports{call.Reports[0], call.Own[0]}); got != want[i] {
			t.Errorf("call %d reports %+v: want %+v", i, got, want[i])
		}
	}
	if st := c.Stats(); st.Granted != 18 || st.Spent != 14 || st.Live != 4 || st.NotExecuted != 2 || st.Unknown != 1 {
		t.Errorf("Stats = %+v: want 18 granted, 14 spent, two calls not executed, one unknown", st)
	}
}

// Package sim runs many nodes in virtual time: the same lease code as in
// production, stepped by one goroutine, so a run depends on its input alone
// and an hour of traffic takes as long as its decisions do.
package sim

import (
	"context"
	"time"

	"github.com/hybridlimit/hybridlimit/lease"
)

// World is a number of nodes on one store. Not for concurrent use.
type World struct {
	nodes []lease.Stepped
	store func(now time.Duration)
	now   time.Duration
}

// NewWorld returns a World of n nodes at time 0. Before anything happens at a
// time, setStore is called with it, to set the store's clock.
func NewWorld(n int, store lease.Store, setStore func(now time.Duration), limits lease.Limits, opts lease.Options) (*World, error) {
	w := &World{store: setStore}
	for i := range n {
		node, err := lease.NewStepped(store, limits, opts)
		if err != nil {
			return nil, err
		}
		node.Seed(uint64(i))
		w.nodes = append(w.nodes, node)
	}
	setStore(0)
	return w, nil
}

// Now returns the time, since the start.
func (w *World) Now() time.Duration { return w.now }

// Nodes returns how many nodes there are.
func (w *World) Nodes() int { return len(w.nodes) }

// Node returns node i.
func (w *World) Node(i int) lease.Stepped { return w.nodes[i] }

// Advance moves time on to now. What nodes have to do on the way, such as
// giving back an idle lease, they do at its time and in its order. Time never
// goes back.
func (w *World) Advance(now time.Duration) {
	for {
		first, at := -1, now
		for i, n := range w.nodes {
			if next, ok := n.Next(); ok && next <= at && (first < 0 || next < at) {
				first, at = i, next
			}
		}
		if first < 0 {
			break
		}
		w.set(max(at, w.now))
		w.nodes[first].Advance(w.now)
	}
	w.set(max(now, w.now))
	for _, n := range w.nodes {
		n.Advance(w.now)
	}
}

func (w *World) set(now time.Duration) {
	if now != w.now {
		w.now = now
		w.store(now)
	}
}

// Take decides a request on node i, now.
func (w *World) Take(i int, key string, n int64) (lease.Decision, error) {
	w.nodes[i].Advance(w.now)
	return w.nodes[i].Take(context.Background(), key, n)
}

// Close closes every node, returning its leases.
func (w *World) Close() error {
	for _, n := range w.nodes {
		if err := n.Close(context.Background()); err != nil {
			return err
		}
	}
	return nil
}

// Calls returns how many calls the nodes made to the store, and how many
// tokens they were granted and spent.
func (w *World) Calls() (calls, granted, spent int64) {
	for _, n := range w.nodes {
		s := n.Stats()
		calls += s.Calls
		granted += s.Granted
		spent += s.Spent
	}
	return calls, granted, spent
}

package membership

import (
	"fmt"
	"slices"
	"testing"
)

func names(n int) []string {
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("node-%d", i)
	}
	return ids
}

// views returns the view of every node of ids, each of its own list of them.
func views(ids []string) []*view {
	all := make([]*view, len(ids))
	for i, id := range ids {
		list := slices.Clone(ids)
		slices.Reverse(list[i:]) // the order must not matter
		all[i] = newView(id, list)
	}
	return all
}

// ownersOf returns the ids of the nodes that say that they own key.
func ownersOf(all []*view, key string, owners int) (ids []string) {
	for _, v := range all {
		if v.owns(key, owners) {
			ids = append(ids, v.own.id)
		}
	}
	return ids
}

func TestOwnsExactly(t *testing.T) {
	all := views(names(10))
	for _, c := range []struct{ owners, want int }{{-1, 0}, {0, 0}, {1, 1}, {2, 2}, {7, 7}, {9, 9}, {10, 10}, {11, 10}} {
		for k := range 1000 {
			key := fmt.Sprintf("key %d", k)
			if got := ownersOf(all, key, c.owners); len(got) != c.want {
				t.Fatalf("%d owners of %q: %v own it; want %d of them", c.owners, key, got, c.want)
			}
		}
	}
}

// More owners never take a key from a node that has it.
func TestOwnsGrows(t *testing.T) {
	all := views(names(10))
	for k := range 1000 {
		key := fmt.Sprintf("key %d", k)
		for _, v := range all {
			for owners := range 10 {
				if v.owns(key, owners) && !v.owns(key, owners+1) {
					t.Fatalf("%s owns %q among %d but not among %d; want both", v.own.id, key, owners, owners+1)
				}
			}
		}
	}
}

func TestOwnsIsBalanced(t *testing.T) {
	const nodes, keys = 10, 10_000
	all := views(names(nodes))
	for _, owners := range []int{1, 3} {
		count := map[string]int{}
		for k := range keys {
			for _, id := range ownersOf(all, fmt.Sprintf("user:%d", k), owners) {
				count[id]++
			}
		}
		want := keys * owners / nodes
		for _, v := range all {
			if n := count[v.own.id]; n < want*8/10 || n > want*12/10 {
				t.Errorf("%d owners: %s has %d of %d keys; want %d, give or take a fifth", owners, v.own.id, n, keys, want)
			}
		}
	}
}

// A node that goes leaves its keys to others, and no other key moves.
func TestOwnsMovesLittle(t *testing.T) {
	ids := names(10)
	before := views(ids)
	after := views(ids[1:])
	moved := 0
	for k := range 1000 {
		key := fmt.Sprintf("key %d", k)
		was, is := ownersOf(before, key, 1), ownersOf(after, key, 1)
		switch {
		case was[0] == ids[0]:
			moved++
		case was[0] != is[0]:
			t.Errorf("%q moved from %s to %s, though only %s is gone", key, was[0], is[0], ids[0])
		}
	}
	if moved < 50 || moved > 200 {
		t.Errorf("%d of 1000 keys moved; want about 100", moved)
	}
}

// The own node counts, also where the list lacks it.
func TestOwnsIncludesItself(t *testing.T) {
	ids := names(4)
	with, without := newView(ids[0], ids), newView(ids[0], ids[1:])
	own := 0
	for k := range 1000 {
		key := fmt.Sprintf("key %d", k)
		if with.owns(key, 1) != without.owns(key, 1) {
			t.Fatalf("%s owns %q: %v with itself in the list, %v without; want the same",
				ids[0], key, with.owns(key, 1), without.owns(key, 1))
		}
		if with.owns(key, 1) {
			own++
		}
	}
	if own < 150 || own > 350 {
		t.Errorf("%s owns %d of 1000 keys; want about 250", ids[0], own)
	}
	if alone := newView("a", nil); !alone.owns("key", 1) || alone.owns("key", 0) {
		t.Error("a node alone: owns = false among 1 or true among 0; want the opposite")
	}
}

// Nodes of different versions must agree, so these never change.
func TestWeightIsStable(t *testing.T) {
	for _, c := range []struct {
		id, key string
		want    uint64
	}{
		{"", "user:1", 0x8f321b83a3a3dfed},
		{"node-1", "user:1", 0x3d1a826f05932f12},
		{"c0ffee", "käse", 0xa85d7c51d36d88ed},
	} {
		if got := (node{c.id, hash(c.id)}).weight(hash(c.key)); got != c.want {
			t.Errorf("weight of node %q for %q = %#x; want %#x", c.id, c.key, got, c.want)
		}
	}
}

// Nodes with the same weight are in the order of their names.
func TestOwnsBreaksTies(t *testing.T) {
	a, b := node{"a", 1}, node{"b", 1}
	if v := (&view{own: a, others: []node{b}}); v.owns("key", 1) {
		t.Error("of two nodes of equal weight the first owns the key; want the last")
	}
	if v := (&view{own: b, others: []node{a}}); !v.owns("key", 1) {
		t.Error("of two nodes of equal weight the last does not own the key; want it to")
	}
}

func TestOwnsAllocatesNothing(t *testing.T) {
	v := newView("node-0", names(100))
	if n := testing.AllocsPerRun(100, func() { v.owns("some key", 3) }); n != 0 {
		t.Errorf("owns allocates %v times; want 0", n)
	}
}

package membership

import "hash/fnv"

// view is a list of nodes as one of them sees it. It does not change.
type view struct {
	own    node
	others []node
}

type node struct {
	id   string
	hash uint64
}

// newView returns the view that node id has of list, with or without it.
func newView(id string, list []string) *view {
	v := &view{own: node{id, hash(id)}, others: make([]node, 0, len(list))}
	for _, other := range list {
		if other != id {
			v.others = append(v.others, node{other, hash(other)})
		}
	}
	return v
}

// size returns how many nodes there are, the own one included.
func (v *view) size() int { return 1 + len(v.others) }

// owns reports whether the own node has one of the most weights for key, which
// are as many as owners. It is the same on every machine and in every version:
// nodes must not disagree while some are being upgraded.
func (v *view) owns(key string, owners int) bool {
	if owners > len(v.others) {
		return true
	}
	h := hash(key)
	own := v.own.weight(h)
	for i := range v.others {
		if owners <= 0 {
			break
		}
		// Equal weights are possible, and every node must see the same order.
		if w := v.others[i].weight(h); w > own || w == own && v.others[i].id > v.own.id {
			owners--
		}
	}
	return owners > 0
}

// weight is the node's for the key with hash h: as good as drawn at random, and
// of no other node's.
func (n node) weight(h uint64) uint64 { return mix(n.hash ^ h) }

// hash is 64-bit FNV-1a, mixed: by itself its high bits hardly depend on the
// last characters, which are all that differs in names like "node-1".
func hash(s string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(s)) // never fails
	return mix(h.Sum64())
}

// mix makes every bit of the result depend on every bit of x, without
// collisions: the finalizer of MurmurHash3.
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

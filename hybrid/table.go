package hybrid

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Table is Limits by key: the limit of the key itself, or else that of the longest
// prefix that the key has, or else the default. The zero Table denies everything. It
// must not be changed once a Limiter has it: give the Limiter another one with
// SetLimits.
type Table struct {
	// Default is the limit of keys that no other is for. Default: denies everything.
	Default Limit
	// Prefixes are limits of keys that begin so: of several the longest counts.
	Prefixes map[string]Limit
	// Keys are limits of single keys.
	Keys map[string]Limit

	lengths []int // of Prefixes, longest first; nil in one that NewTable did not make
}

// NewTable returns t checked and made ready: it takes a step for each length that
// prefixes have, not for each prefix. All limits that are wrong are named at once, in
// errors that match ErrLimit. The maps are copied.
func NewTable(t Table) (*Table, error) {
	var errs []error
	check := func(what string, limits map[string]Limit) {
		for _, key := range slices.Sorted(maps.Keys(limits)) {
			if err := limits[key].Validate(); err != nil {
				errs = append(errs, fmt.Errorf("hybrid: %s %.64q: %w", what, key, err))
			}
		}
	}
	if err := t.Default.Validate(); err != nil {
		errs = append(errs, fmt.Errorf("hybrid: default: %w", err))
	}
	check("prefix", t.Prefixes)
	check("key", t.Keys)
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	made := &Table{Default: t.Default, Prefixes: maps.Clone(t.Prefixes), Keys: maps.Clone(t.Keys), lengths: []int{}}
	for prefix := range made.Prefixes {
		made.lengths = append(made.lengths, len(prefix))
	}
	slices.SortFunc(made.lengths, func(a, b int) int { return cmp.Compare(b, a) })
	made.lengths = slices.Compact(made.lengths)
	return made, nil
}

// For returns key's limit.
func (t *Table) For(key string) Limit {
	if l, ok := t.Keys[key]; ok {
		return l
	}
	if t.lengths == nil { // made by hand
		best := -1
		limit := t.Default
		for prefix, l := range t.Prefixes {
			if len(prefix) > best && len(prefix) <= len(key) && key[:len(prefix)] == prefix {
				best, limit = len(prefix), l
			}
		}
		return limit
	}
	for _, n := range t.lengths {
		if n > len(key) {
			continue
		}
		if l, ok := t.Prefixes[key[:n]]; ok {
			return l
		}
	}
	return t.Default
}

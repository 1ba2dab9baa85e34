package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// choice is a flag whose value is one of some names: that of index i is value i.
type choice[T ~uint8] struct {
	value *T
	names []string
}

func policyFlag(p *hybrid.Policy) choice[hybrid.Policy] {
	return choice[hybrid.Policy]{p, []string{hybrid.Degrade: "degrade", hybrid.Allow: "allow", hybrid.Deny: "deny"}}
}

func startFlag(s *hybrid.Start) choice[hybrid.Start] {
	return choice[hybrid.Start]{s, []string{hybrid.StartOne: "one", hybrid.StartEmpty: "empty", hybrid.StartFull: "full"}}
}

func splitFlag(s *hybrid.Split) choice[hybrid.Split] {
	return choice[hybrid.Split]{s, []string{hybrid.SplitBlend: "blend", hybrid.SplitEqual: "equal"}}
}

// String implements pflag.Value.
func (c choice[T]) String() string { return c.names[*c.value] }

// Set implements pflag.Value.
func (c choice[T]) Set(name string) error {
	i := slices.Index(c.names, name)
	if i < 0 {
		return fmt.Errorf("want %s", strings.Join(c.names, ", "))
	}
	*c.value = T(i)
	return nil
}

// Type implements pflag.Value: it names the values in help.
func (c choice[T]) Type() string { return strings.Join(c.names, "|") }

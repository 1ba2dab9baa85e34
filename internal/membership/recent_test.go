package membership

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// look is one number that is seen, after the time since the last one.
type look struct {
	after time.Duration
	count int
	want  int // the largest then
}

func TestRecent(t *testing.T) {
	const s, m = time.Second, time.Minute
	for name, looks := range map[string][]look{
		"rises at once":  {{0, 1, 1}, {s, 3, 3}, {s, 10, 10}},
		"falls in 5 min": {{0, 10, 10}, {5*m - s, 4, 10}, {s, 4, 10}, {1, 4, 4}},
		"a later one counts anew": {
			{0, 10, 10}, {4 * m, 10, 10}, {4 * m, 4, 10}, {m, 4, 10}, {1, 4, 4},
		},
		"step by step": {
			{0, 10, 10}, {m, 7, 10}, {m, 5, 10}, {m, 2, 10}, {2 * m, 1, 10}, {1, 1, 7}, {m, 1, 5}, {m, 1, 2}, {2 * m, 1, 1},
		},
		"a small rise within a fall": {
			{0, 10, 10}, {m, 2, 10}, {m, 3, 10}, {m, 1, 10}, {2*m + 1, 1, 3}, {2 * m, 1, 1},
		},
		"between two grains": {{0, 10, 10}, {grain - 1, 9, 10}, {1, 8, 10}, {5*m - grain + 1, 1, 8}},
		"the last of all":    {{0, 2, 2}, {time.Hour, 1, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			r := recent{step: time.Hour}
			now := time.Now()
			for i, l := range looks {
				now = now.Add(l.after)
				r.add(now, l.count, nil)
				if got, _ := r.max(); got != l.want {
					t.Errorf("look %d: max after %v and %d = %d; want %d", i, l.after, l.count, got, l.want)
				}
			}
		})
	}
}

// While nothing is seen only a step passes, however long it takes.
func TestRecentOutage(t *testing.T) {
	r := recent{step: 2 * time.Second}
	now := time.Now()
	for i, l := range []look{
		{0, 10, 10},
		{time.Hour, 1, 10},       // at 2s
		{100 * time.Hour, 2, 10}, // at 4s
		{time.Second, 3, 10},     // at 5s
	} {
		now = now.Add(l.after)
		r.add(now, l.count, nil)
		if got, _ := r.max(); got != l.want {
			t.Errorf("look %d: max after %v and %d = %d; want %d", i, l.after, l.count, got, l.want)
		}
	}
	// 147 hours of one second each, and one more.
	for range 147 {
		now = now.Add(2 * time.Second)
		r.add(now, 3, nil)
	}
	if got, _ := r.max(); got != 10 {
		t.Errorf("max at 4m59s = %d; want 10", got)
	}
	now = now.Add(time.Second + 1)
	r.add(now, 3, nil)
	if got, _ := r.max(); got != 3 {
		t.Errorf("max after 5m = %d; want 3", got)
	}
}

func TestRecentList(t *testing.T) {
	var r recent
	r.step = time.Minute
	now := time.Now()
	for i, c := range []struct {
		count int
		list  string
		want  string
	}{
		{3, "abc", "abc"},
		{2, "ab", "abc"},
		{3, "abd", "abd"}, // the newest of the largest
		{1, "a", "abd"},
		{3, "", "abd"}, // unknown: the last known one stands
		{4, "", ""},    // nobody knows
		{4, "abcd", "abcd"},
	} {
		now = now.Add(10 * time.Second)
		var list []string
		if c.list != "" {
			list = []string{c.list}
		}
		r.add(now, c.count, list)
		_, got := r.max()
		if len(got) == 0 && c.want == "" {
			continue
		}
		if !slices.Equal(got, []string{c.want}) {
			t.Errorf("look %d: list after %q = %q; want %q", i, c.list, got, c.want)
		}
	}
}

// A fleet that goes down node by node must not leave a list for each of them.
func TestRecentIsSmall(t *testing.T) {
	r := recent{step: 2 * time.Second}
	now := time.Now()
	most := 0
	for n := range 3000 {
		now = now.Add(200 * time.Millisecond)
		r.add(now, 3000-n, []string{fmt.Sprint(n)})
		most = max(most, len(r.seen))
	}
	if most > int(window/grain)+1 {
		t.Errorf("%d numbers kept; want at most %d", most, window/grain+1)
	}
}

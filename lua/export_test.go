package lua

import (
	"strings"
	"time"
)

// setClock makes the scripts take their time from now instead of TIME.
func (s *Store) setClock(now func() time.Duration) {
	s.clock = now
	s.replace("redis.call('TIME')", "{ ARGV[#ARGV - 1], ARGV[#ARGV] }")
}

// keepForever makes the scripts set no expiry: a server's own clock would take
// keys away at times that the test's clock knows nothing of.
func (s *Store) keepForever() { s.replace(", 'PX', string.format('%.0f', px)", "") }

// replace changes what each script has in one place.
func (s *Store) replace(old, by string) {
	done := map[*script]bool{}
	for _, c := range s.scripts {
		if done[c] {
			continue
		}
		done[c] = true
		if strings.Count(c.source, old) != 1 {
			panic(c.tag + " must have once: " + old)
		}
		c.set(strings.Replace(c.source, old, by, 1))
	}
}

package lua

import (
	"strings"
	"time"
)

// setClock makes the script take its time from now instead of TIME.
func (s *Store) setClock(now func() time.Duration) {
	const ask = "redis.call('TIME')"
	if strings.Count(acquireSource, ask) != 1 {
		panic("acquire.lua must read TIME exactly once")
	}
	s.clock = now
	s.setSource(strings.Replace(acquireSource, ask, "{ ARGV[#ARGV - 1], ARGV[#ARGV] }", 1))
}

// keepForever makes the script set no expiry: a server's own clock would take
// keys away at times that the test's clock knows nothing of.
func (s *Store) keepForever() {
	const expiry = ", 'PX', string.format('%.0f', px)"
	if strings.Count(s.source, expiry) != 1 {
		panic("acquire.lua must set the expiry in one place")
	}
	s.setSource(strings.Replace(s.source, expiry, "", 1))
}

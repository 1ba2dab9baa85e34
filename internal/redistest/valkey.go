package redistest

import "testing"

var valkeyServer = program{
	name: "valkey-server", env: "VALKEY_SERVER", require: "REQUIRE_VALKEY",
	install: "install it with `apt-get install valkey-server` (Debian 12 has it in backports)",
}

// StartValkey is [Start] for a Valkey server: valkey-server from PATH, or what
// VALKEY_SERVER names. When there is none the test is skipped, or failed when
// REQUIRE_VALKEY=1.
func StartValkey(t testing.TB, args ...string) *Server {
	t.Helper()
	s := newServerOf(t, valkeyServer, args)
	s.start(t)
	return s
}

// Package redistest gives a test a real Redis server and a bad network.
//
// [Start] runs a redis-server process of the test's own on a free loopback
// port. It can be killed, restarted and paused, and is gone when the test ends.
// [StartTLS] and [StartValkey] run others of its kind, [StartCluster] and
// [StartSentinel] several that belong together.
// [NewProxy] puts a TCP proxy in front of any Redis whose faults (latency, a cut
// line, silence, lost replies, error replies) are switched while it runs.
//
// Everything here works in real time. Do not use it inside a testing/synctest
// bubble: a goroutine that waits for a socket keeps the fake clock from moving.
package redistest

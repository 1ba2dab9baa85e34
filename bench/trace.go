package bench

import (
	"time"

	"github.com/hybridlimit/hybridlimit/bench/accesslog"
)

// Requests makes a trace of a log: keyed by key, its time compressed speed
// times. It returns how many entries had no key.
func Requests(log *accesslog.Log, key accesslog.KeyFunc, speed float64) (trace []Request, skipped int) {
	trace = make([]Request, 0, len(log.Entries))
	for _, e := range log.Entries {
		k, ok := key(e)
		if !ok {
			skipped++
			continue
		}
		at := time.Duration(float64(e.Time.Sub(log.First)) / speed)
		trace = append(trace, Request{At: at, Key: k})
	}
	return trace, skipped
}

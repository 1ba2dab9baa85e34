package hybrid_test

import (
	"context"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// bubble runs f in a synctest bubble with the real script in an in-process
// Redis reached without a socket, so fake time moves for all of it: the
// server's TIME, key expiry, the client and the node.
func bubble(t *testing.T, f func(t *testing.T, w *world)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		m := miniredis.NewMiniRedis()
		defer m.Close()
		m.ClockTTL(true)
		w := &world{t: t, redis: m, start: time.Now()}
		w.rdb = redis.NewClient(&redis.Options{
			Dialer:     func(context.Context, string, string) (net.Conn, error) { return m.Dial() },
			MaxRetries: -1, ContextTimeoutEnabled: true, Protocol: 2, DisableIdentity: true,
			MaintNotificationsConfig: nil,
		})
		defer w.rdb.Close()
		f(t, w)
		for _, l := range w.nodes {
			l.Close(context.Background())
		}
	})
}

// world is a Redis and the nodes on it, in fake time.
type world struct {
	t     *testing.T
	redis *miniredis.Miniredis
	rdb   *redis.Client
	start time.Time
	nodes []*hybrid.Limiter
}

func (w *world) node(limits hybrid.Limits, opts hybrid.Options) *hybrid.Limiter {
	w.t.Helper()
	l, err := hybrid.New(w.rdb, limits, opts)
	if err != nil {
		w.t.Fatal(err)
	}
	w.nodes = append(w.nodes, l)
	return l
}

func TestBubble(t *testing.T) {
	bubble(t, func(t *testing.T, w *world) {
		l := w.node(hybrid.PerSecond(1, 1), hybrid.Options{})
		n := 0
		for range 100 {
			d, err := l.Allow(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			if d.Allowed {
				n++
			}
			time.Sleep(600 * time.Millisecond)
		}
		t.Log(n, l.Stats())
	})
}

package hybrid_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// newRedis returns a client of a Redis inside this process. A program would
// connect to its own.
func newRedis() (rdb *redis.Client, stop func()) {
	m := miniredis.NewMiniRedis()
	if err := m.Start(); err != nil {
		log.Fatal(err)
	}
	rdb = redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true})
	return rdb, func() {
		rdb.Close()
		m.Close()
	}
}

func Example() {
	rdb, stop := newRedis()
	defer stop()
	ctx := context.Background()

	// Five requests at once, and one more every hour.
	limiter, err := hybrid.New(rdb, hybrid.PerHour(1, 5), hybrid.Options{RedisTimeout: time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(ctx) // returns the leases

	for i := range 7 {
		d, err := limiter.Allow(ctx, "user:42")
		if err != nil {
			log.Fatal(err) // an empty key, or ctx ended: never trouble with Redis
		}
		fmt.Println(i, d.Allowed)
	}
	// Output:
	// 0 true
	// 1 true
	// 2 true
	// 3 true
	// 4 true
	// 5 false
	// 6 false
}

// A Decision tells a client all it wants to know.
func ExampleDecision() {
	rdb, stop := newRedis()
	defer stop()
	limiter, err := hybrid.New(rdb, hybrid.PerMinute(1, 1), hybrid.Options{RedisTimeout: time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(context.Background())

	handle := func(w http.ResponseWriter, r *http.Request) {
		d, err := limiter.Allow(r.Context(), r.RemoteAddr)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("X-RateLimit-Limit", strconv.FormatInt(d.Limit.Burst, 10))
		w.Header().Set("X-RateLimit-Remaining", strconv.FormatInt(d.Remaining, 10))
		if !d.Allowed {
			w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(d.RetryAfter.Seconds()))))
			http.Error(w, "slow down", http.StatusTooManyRequests)
			return
		}
		fmt.Fprintln(w, "hello")
	}
	for range 2 {
		w, r := recorder(), &http.Request{RemoteAddr: "192.0.2.1"}
		handle(w, r)
		fmt.Printf("%d, retry after %q\n", w.status, w.Header().Get("Retry-After"))
	}
	// Output:
	// 200, retry after ""
	// 429, retry after "60"
}

// A limit is the same for all keys, or each key's own.
func ExampleLimitFunc() {
	rdb, stop := newRedis()
	defer stop()
	ctx := context.Background()

	plans := hybrid.LimitFunc(func(key string) hybrid.Limit {
		if strings.HasPrefix(key, "paid:") {
			return hybrid.PerSecond(1000, 2000)
		}
		return hybrid.PerMinute(10, 3)
	})
	limiter, err := hybrid.New(rdb, plans, hybrid.Options{RedisTimeout: time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(ctx)

	for _, key := range []string{"paid:alice", "free:bob"} {
		d, err := limiter.Allow(ctx, key)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(key, d.Limit.Burst, d.Remaining)
	}
	// Output:
	// paid:alice 2000 1999
	// free:bob 3 2
}

// Limits are a rate and a burst.
func ExamplePerSecond() {
	fmt.Println(hybrid.PerSecond(100, 200))
	fmt.Println(hybrid.PerMinute(30, 10))
	fmt.Println(hybrid.PerHour(3600, 5))
	fmt.Println(hybrid.Every(500*time.Millisecond, 1))
	// Output:
	// 100/s burst 200
	// 0.5/s burst 10
	// 1/s burst 5
	// 2/s burst 1
}

// A Key is looked up once and then decides without hashing.
func ExampleLimiter_Key() {
	rdb, stop := newRedis()
	defer stop()
	ctx := context.Background()
	limiter, err := hybrid.New(rdb, hybrid.PerHour(1, 100), hybrid.Options{RedisTimeout: time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(ctx)

	connection, err := limiter.Key("tenant:7")
	if err != nil {
		log.Fatal(err)
	}
	admitted := 0
	for range 150 {
		d, err := connection.Allow(ctx)
		if err != nil {
			log.Fatal(err)
		}
		if d.Allowed {
			admitted++
		}
	}
	fmt.Println(admitted)
	// Output: 100
}

// A request may cost more than one token; one that can never be admitted is an
// error.
func ExampleLimiter_AllowN() {
	rdb, stop := newRedis()
	defer stop()
	ctx := context.Background()
	limiter, err := hybrid.New(rdb, hybrid.PerHour(1, 100), hybrid.Options{RedisTimeout: time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(ctx)

	for _, rows := range []int64{80, 80, 1000} {
		d, err := limiter.AllowN(ctx, "export", rows)
		switch {
		case errors.Is(err, hybrid.ErrCost):
			fmt.Println(rows, "is too large ever")
		case err != nil:
			log.Fatal(err)
		default:
			fmt.Println(rows, d.Allowed)
		}
	}
	// Output:
	// 80 true
	// 80 false
	// 1000 is too large ever
}

// The limit comes with the request, for example from a token's claims.
func ExampleLimiter_AllowLimit() {
	rdb, stop := newRedis()
	defer stop()
	ctx := context.Background()
	limiter, err := hybrid.New(rdb, hybrid.PerHour(1, 1), hybrid.Options{RedisTimeout: time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer limiter.Close(ctx)

	claimed := hybrid.PerHour(1, 3)
	for range 4 {
		d, err := limiter.AllowLimit(ctx, "user:42", claimed, 1)
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(d.Allowed, d.Limit.Burst)
	}
	// Output:
	// true 3
	// true 3
	// true 3
	// false 3
}

// response is a http.ResponseWriter that keeps the status.
type response struct {
	header http.Header
	status int
}

func recorder() *response { return &response{http.Header{}, http.StatusOK} }

func (w *response) Header() http.Header         { return w.header }
func (w *response) Write(b []byte) (int, error) { return len(b), nil }
func (w *response) WriteHeader(status int)      { w.status = status }

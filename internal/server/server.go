// Package server is the standalone rate limit service: HTTP in front of a
// hybrid.Limiter, for programs that are not written in Go.
//
// # POST /check
//
// The body is one JSON object:
//
//	{"service":"api","user_id":"u1","rate":2,"capacity":3,"cost":1}
//
//	service, user_id  strings of 1 to 1024 bytes: together they name the bucket
//	rate              tokens per second, 0 to 1e12; fractions are fine
//	capacity          tokens at most at one instant, an integer from 0 to 1e15
//	cost              tokens of this request, an integer from 0 to capacity;
//	                  default 1. 0 charges nothing: allowed then says whether
//	                  a cost of 1 would be admitted
//
// A rate or capacity of 0 denies everything. The limit comes with each request.
// When two requests differ the bucket adopts the later one's, keeps its tokens,
// as far as the new capacity holds them, and is never refilled by the change.
//
// The answer has status 200, also for a denial:
//
//	{"allowed":true,"tokens":2,"remaining":2,"retry_after_ms":0,
//	 "source":"store","service":"api","user_id":"u1"}
//
//	tokens, remaining  both the tokens left as this node knows: what it has
//	                   leased and what was in the bucket when it last asked
//	retry_after_ms     after a denial, how long until the same request would be
//	                   admitted if nobody else asks, rounded up; 0 when allowed,
//	                   -1 when it never will be (a rate or capacity of 0)
//	source             what decided: lease, store, memory, limit, local or
//	                   policy. The last two mean that Redis does not answer:
//	                   local is this node's share of the limit, and remaining
//	                   and retry_after_ms are the share's; policy is
//	                   Options.OnFailure, whatever the limit
//
// With ?status=true the status tells the decision too: 429 for a denial, with a
// Retry-After of at least one second unless the request can never be admitted,
// and 503 for a denial with source policy, which is no fault of the client.
//
// A request that cannot be understood is never decided. It is answered with
// {"error":"…","field":"cost","want":"0 to 3"}, the last two where one field is
// at fault: 400, or 405 for a method, 413 for a body over 64 KiB, 415 for a
// compressed one. 503 says that the server is stopping. The content type is not
// looked at, so that curl -d works as it is.
//
// # GET /healthz
//
// 200 {"status":"ok"} while serving, and 503 {"status":"stopping"} to
// connections that are still open when it ends. It says nothing about Redis:
// without Redis the service still decides, and restarting it would not help.
package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

const (
	// maxHeader bounds the request line and headers, in bytes: four times what
	// a browser with many cookies sends, and little to hold per connection.
	maxHeader = 16 << 10
	// maxWait is the longest that a decision takes: the upper end of
	// hybrid.Options.RedisTimeout.
	maxWait = time.Minute
)

// Options are a Server's settings. The zero value works; anything negative
// means the default.
type Options struct {
	// ReadTimeout is how long a client may take to send one request. An answer
	// may take that long to be read, and a minute more to be decided.
	// Default 10s.
	ReadTimeout time.Duration
	// IdleTimeout is how long a connection may stay open between two requests.
	// Default 2m.
	IdleTimeout time.Duration
	// DrainTimeout is how long Serve waits for requests that have begun when
	// its context ends. Those that take longer are cut off. Default 10s.
	DrainTimeout time.Duration
	// OnFailure decides requests while Redis does not answer. Default
	// hybrid.Degrade.
	OnFailure hybrid.Policy
	// Log gets the troubles of the HTTP server itself: a panic, or no file
	// descriptor for the next connection. Nothing is logged per request.
	// Default nil: nothing at all is logged.
	Log *slog.Logger
}

func (o *Options) setDefaults() {
	if o.ReadTimeout <= 0 {
		o.ReadTimeout = 10 * time.Second
	}
	if o.IdleTimeout <= 0 {
		o.IdleTimeout = 2 * time.Minute
	}
	if o.DrainTimeout <= 0 {
		o.DrainTimeout = 10 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
}

// Server answers the HTTP API. Make one with New.
type Server struct {
	limiter  *hybrid.Limiter
	opts     Options
	mux      *http.ServeMux
	stopping atomic.Bool
}

// New returns a Server that decides with limiter, which stays the caller's to
// close, after Serve has returned. The limits that limiter was made with do not
// matter: each request brings its own.
func New(limiter *hybrid.Limiter, opts Options) *Server {
	opts.setDefaults()
	s := &Server{limiter: limiter, opts: opts, mux: http.NewServeMux()}
	s.mux.HandleFunc("/check", s.check)
	s.mux.HandleFunc("/healthz", s.healthz)
	s.mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		write(w, &problem{status: http.StatusNotFound, Error: "no such path", Want: "POST /check or GET /healthz"})
	})
	return s
}

// Handler returns the API, to be served by other means than Serve.
func (s *Server) Handler() http.Handler { return s.mux }

// Serve answers requests on l until ctx ends. Then it stops accepting, waits
// for the requests that have begun, at most Options.DrainTimeout, and returns
// when none is left: nil, or an error if some had to be cut off. If l fails
// before that, its error is returned. Serve closes l, and is called once.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	// Held for reading by every request. http.Server counts connections, and
	// its Close does not wait for the requests on them; the caller closes the
	// limiter next, so the last request has to have ended.
	var inFlight sync.RWMutex
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			inFlight.RLock()
			defer inFlight.RUnlock()
			s.mux.ServeHTTP(w, r)
		}),
		ReadHeaderTimeout: s.opts.ReadTimeout,
		ReadTimeout:       s.opts.ReadTimeout,
		WriteTimeout:      2*s.opts.ReadTimeout + maxWait,
		IdleTimeout:       s.opts.IdleTimeout,
		MaxHeaderBytes:    maxHeader,
		ErrorLog:          slog.NewLogLogger(s.opts.Log.Handler(), slog.LevelWarn),
	}
	failed := make(chan error, 1)
	var accepting sync.WaitGroup
	accepting.Go(func() { failed <- srv.Serve(l) })

	var errs []error
	select {
	case err := <-failed:
		errs = append(errs, fmt.Errorf("server: %w", err))
	case <-ctx.Done():
	}
	s.stopping.Store(true)
	// Requests do not end with ctx: they have DrainTimeout to finish in.
	drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.opts.DrainTimeout)
	defer cancel()
	if err := srv.Shutdown(drain); err != nil {
		errs = append(errs, fmt.Errorf("server: requests cut off after %v: %w", s.opts.DrainTimeout, err), srv.Close())
	}
	accepting.Wait()
	inFlight.Lock()
	defer inFlight.Unlock()
	return errors.Join(errs...)
}

func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	if !allowMethod(w, r, http.MethodGet, http.MethodHead) {
		return
	}
	if s.stopping.Load() {
		write(w, health{http.StatusServiceUnavailable, "stopping"})
		return
	}
	write(w, health{http.StatusOK, "ok"})
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

const (
	dialTimeout = 2 * time.Second
	pingTimeout = 5 * time.Second
)

// openRedis returns a client of the Redis at rawURL, after a PING, or with an
// empty rawURL of one inside this process, which keeps nothing (embedded).
// closeRedis closes the client, and an embedded server with it. The error never
// holds a password.
//
//	redis://[USER:PASSWORD@]HOST[:PORT][/DB]          one server
//	rediss://…                                        the same over TLS
//	unix://[USER:PASSWORD@]/PATH[?db=DB]              one server, by its socket
//	redis+cluster://[…@]HOST:PORT[,HOST:PORT…]        a cluster
//	redis+sentinel://[…@]HOST:PORT[,…]/MASTER[/DB]    what the Sentinels say is
//	                                                  MASTER; their own login is
//	                                                  ?sentinel_username=, ?sentinel_password=
//
// rediss+cluster and rediss+sentinel are the last two over TLS. Every option of
// go-redis's URLs may follow (?pool_size=20), but for those that would send a
// command twice or outlive a context.
func openRedis(ctx context.Context, rawURL string) (rdb redis.UniversalClient, embedded bool, closeRedis func(), err error) {
	if rawURL == "" {
		rdb, closeRedis = embeddedRedis()
		return rdb, true, closeRedis, nil
	}
	rdb, target, err := newClient(rawURL)
	if err != nil {
		return nil, false, nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, pingTimeout)
	defer cancel()
	// A user without the right to PING is a user who was let in.
	if err := rdb.Ping(ctx).Err(); err != nil && !redis.HasErrorPrefix(err, "NOPERM") {
		_ = rdb.Close() // what PING said is the reason
		scrubbed := target.scrub(fmt.Errorf("redis at %s: %w", target.addrs, err))
		if mayRecover(err) {
			scrubbed = &unansweredError{scrubbed}
		}
		return nil, false, nil, scrubbed
	}
	return rdb, false, func() { _ = rdb.Close() }, nil
}

// unansweredError is a Redis that did not answer, and may yet.
type unansweredError struct{ error }

func (e *unansweredError) Unwrap() error { return e.error }

// mayRecover reports whether err is no answer, or that of a server that is not
// ready; a wrong password stays wrong.
func mayRecover(err error) bool {
	if _, ok := errors.AsType[redis.Error](err); !ok {
		return true
	}
	for _, code := range []string{"LOADING", "BUSY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"} {
		if redis.HasErrorPrefix(err, code) {
			return true
		}
	}
	return false
}

// openRedisLater is openRedis for a service that starts without Redis, too: with
// an *unansweredError there is a client all the same.
func openRedisLater(ctx context.Context, rawURL string) (rdb redis.UniversalClient, embedded bool, closeRedis func(), err error) {
	rdb, embedded, closeRedis, err = openRedis(ctx, rawURL)
	if _, ok := errors.AsType[*unansweredError](err); !ok {
		return rdb, embedded, closeRedis, err
	}
	rdb, _, bad := newClient(rawURL)
	if bad != nil {
		return nil, false, nil, bad
	}
	return rdb, false, func() { _ = rdb.Close() }, err
}

// embeddedRedis starts a Redis that is reached through memory: it opens no port
// that another program could find.
func embeddedRedis() (rdb *redis.Client, closeRedis func()) {
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	rdb = redis.NewClient(withRules(&redis.Options{
		Dialer: func(context.Context, string, string) (net.Conn, error) { return m.Dial() },
	}))
	return rdb, func() {
		_ = rdb.Close()
		m.Close()
	}
}

// target is what a URL leads to, as far as messages are about it.
type target struct {
	addrs   string
	secrets []string
}

// scrub takes the passwords out of an error. Redis quotes the arguments of a
// command that it does not know, and before version 6 it did not know HELLO.
func (t target) scrub(err error) error {
	text := err.Error()
	for _, secret := range t.secrets {
		if secret != "" {
			text = strings.ReplaceAll(text, secret, "***")
		}
	}
	if text == err.Error() {
		return err
	}
	return errors.New(text)
}

// newClient returns a client that has not connected yet.
func newClient(rawURL string) (rdb redis.UniversalClient, to target, err error) {
	scheme, rest, _ := strings.Cut(rawURL, "://")
	transport, kind, _ := strings.Cut(scheme, "+")
	u, others, err := parseHosts(transport + "://" + rest)
	// A '#' would cut the URL short without a word; a password has it as %23.
	if err != nil || rest == "" || strings.Contains(rest, "#") {
		return nil, target{}, badURL(rawURL, err)
	}
	password, _ := u.User.Password()
	to = target{
		addrs:   strings.Join(append([]string{cmp.Or(u.Host, u.Path)}, others...), ", "),
		secrets: []string{password, u.Query().Get("password"), u.Query().Get("sentinel_password")},
	}
	switch {
	case kind == "" && len(others) == 0:
		rdb, err = newSingle(u)
	case kind == "cluster":
		rdb, err = newCluster(u, others)
	case kind == "sentinel":
		rdb, err = newSentinel(u, others)
	case kind == "":
		err = errors.New("several hosts are a cluster or Sentinels, and these have schemes of their own")
	default:
		err = fmt.Errorf("unknown scheme %q", scheme)
	}
	if err != nil {
		return nil, target{}, badURL(rawURL, err)
	}
	return rdb, to, nil
}

func newSingle(u *url.URL) (redis.UniversalClient, error) {
	opts, err := redis.ParseURL(u.String())
	if err != nil {
		return nil, err
	}
	return redis.NewClient(withRules(opts)), nil
}

// withRules sets what every client here must have. Nothing is sent twice, for
// one call would be charged twice; a context ends a call; and one failed dial
// is an answer, so that a request is decided in time.
func withRules(opts *redis.Options) *redis.Options {
	opts.MaxRetries, opts.DialerRetries, opts.ContextTimeoutEnabled = -1, 1, true
	opts.DialTimeout = cmp.Or(opts.DialTimeout, dialTimeout)
	opts.MaintNotificationsConfig = noNotifications()
	return opts
}

func newCluster(u *url.URL, others []string) (redis.UniversalClient, error) {
	q := u.Query()
	q["addr"] = append(q["addr"], others...)
	u.RawQuery = q.Encode()
	opts, err := redis.ParseClusterURL(u.String())
	if err != nil {
		return nil, err
	}
	opts.MaxRetries, opts.DialerRetries, opts.ContextTimeoutEnabled = -1, 1, true
	opts.DialTimeout = cmp.Or(opts.DialTimeout, dialTimeout)
	opts.MaintNotificationsConfig = noNotifications()
	// A replica's answer is late, and it must not be asked to write.
	opts.ReadOnly, opts.RouteByLatency, opts.RouteRandomly = false, false, false
	return redis.NewClusterClient(opts), nil
}

func newSentinel(u *url.URL, others []string) (redis.UniversalClient, error) {
	master, db, _ := strings.Cut(strings.Trim(u.Path, "/"), "/")
	if master == "" {
		return nil, errors.New("the path names no master")
	}
	q := u.Query()
	sentinelUser, sentinelPassword := q.Get("sentinel_username"), q.Get("sentinel_password")
	q.Del("sentinel_username")
	q.Del("sentinel_password")
	q.Set("master_name", master)
	q["addr"] = append(q["addr"], others...)
	u.Path, u.RawQuery = "/"+db, q.Encode()
	opts, err := redis.ParseFailoverURL(u.String())
	if err != nil {
		return nil, err
	}
	// go-redis gives the URL's login to the Sentinels. Here it is the server's,
	// as in every other scheme.
	if u.User != nil {
		opts.Username = u.User.Username()
		opts.Password, _ = u.User.Password()
	}
	opts.SentinelUsername, opts.SentinelPassword = sentinelUser, sentinelPassword
	opts.MaxRetries, opts.DialerRetries, opts.ContextTimeoutEnabled = -1, 1, true
	opts.DialTimeout = cmp.Or(opts.DialTimeout, dialTimeout)
	opts.ReplicaOnly, opts.RouteByLatency, opts.RouteRandomly = false, false, false
	return redis.NewFailoverClient(opts), nil
}

// noNotifications saves each new connection the question whether its server
// announces maintenance; a limiter is as well served by a broken connection.
func noNotifications() *maintnotifications.Config {
	return &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
}

// parseHosts parses a URL that may name several hosts, which package url does
// not know. u has the first.
func parseHosts(raw string) (u *url.URL, others []string, err error) {
	scheme, rest, _ := strings.Cut(raw, "://")
	end := strings.IndexAny(rest, "/?#")
	if end < 0 {
		end = len(rest)
	}
	authority, tail := rest[:end], rest[end:]
	at := strings.LastIndex(authority, "@") + 1
	hosts := strings.Split(authority[at:], ",")
	u, err = url.Parse(scheme + "://" + authority[:at] + hosts[0] + tail)
	return u, hosts[1:], err
}

// badURL is the error for a URL that cannot be used. Parsers quote what they
// did not understand, and in a URL with a login that may be the password.
func badURL(rawURL string, err error) error {
	const want = "want redis://[USER:PASSWORD@]HOST:PORT/DB, rediss://, unix://, redis+cluster:// or redis+sentinel://"
	if err == nil || strings.Contains(rawURL, "@") || strings.Contains(rawURL, "password") {
		return usageError{errors.New("--redis is not a URL of Redis: " + want)}
	}
	if parse, ok := errors.AsType[*url.Error](err); ok {
		err = parse.Err
	}
	return usageError{fmt.Errorf("--redis is not a URL of Redis: %w: %s", err, want)}
}

// addressOf tells where a client's server is, for a log.
func addressOf(rdb redis.UniversalClient) string {
	switch c := rdb.(type) {
	case *redis.ClusterClient:
		return strings.Join(c.Options().Addrs, ",")
	case *redis.Client:
		return c.Options().Addr // "FailoverClient" with Sentinels
	}
	return "unknown"
}

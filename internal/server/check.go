package server

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/hybridlimit/hybridlimit/hybrid"
)

// maxBody bounds the body of a request, in bytes.
const maxBody = 64 << 10

// check answers POST /check.
func (s *Server) check(w http.ResponseWriter, r *http.Request) {
	if !allowMethod(w, r, http.MethodPost) {
		return
	}
	byStatus, bad := readQuery(r.URL.RawQuery)
	if bad != nil {
		write(w, bad)
		return
	}
	req, bad := readRequest(w, r)
	if bad != nil {
		write(w, bad)
		return
	}
	// Nothing is checked twice: the limiter refuses what is out of range, and
	// has the limit of the last request of a key at hand.
	limit := hybrid.Limit{Rate: req.rate, Burst: req.capacity, OnFailure: s.opts.OnFailure}
	d, err := s.limiter.AllowLimit(r.Context(), Key(req.service, req.userID), limit, req.cost)
	if err != nil {
		write(w, problemOf(err))
		return
	}
	a := answer{
		status: http.StatusOK, Allowed: d.Allowed, Tokens: d.Remaining, Remaining: d.Remaining,
		RetryAfterMS: roundUp(d.RetryAfter, time.Millisecond),
		Source:       d.Source.String(), Service: req.service, UserID: req.userID,
	}
	if byStatus && !d.Allowed {
		a.status = http.StatusTooManyRequests
		if d.Source == hybrid.SourcePolicy {
			// Redis did not answer: an outage must not look like a used-up limit.
			a.status = http.StatusServiceUnavailable
		}
		if seconds := roundUp(d.RetryAfter, time.Second); seconds >= 0 {
			w.Header().Set("Retry-After", strconv.FormatInt(max(1, seconds), 10))
		}
	}
	write(w, a)
}

// never is how a wait without end is told: JSON has no infinity, and any other
// number would be a promise.
const never = -1

// roundUp returns d in whole units, so that nobody comes back a hair early.
func roundUp(d, unit time.Duration) int64 {
	if d == math.MaxInt64 {
		return never
	}
	n := int64(d / unit)
	if d%unit > 0 {
		n++
	}
	return n
}

// Key returns the limiter's key for a service and one of its users. It reads
// "service:user_id"; in the service '%' and ':' are written %25 and %3A, so the
// first colon is the border and no two pairs share a key.
func Key(service, userID string) string {
	return serviceEscaper.Replace(service) + ":" + userID
}

var serviceEscaper = strings.NewReplacer("%", "%25", ":", "%3A")

// readQuery reads ?status. What is not known is refused: a misspelt parameter
// would otherwise turn a 429 into a 200.
func readQuery(raw string) (byStatus bool, bad *problem) {
	query, err := url.ParseQuery(raw)
	if err != nil {
		return false, &problem{Error: "query is malformed", Want: "nothing, or status=true"}
	}
	for name, values := range query {
		if name != "status" {
			return false, &problem{Error: fmt.Sprintf("unknown query parameter %.64q", name), Want: "status"}
		}
		if byStatus = values[0] == "true"; len(values) > 1 || !byStatus && values[0] != "false" {
			return false, &problem{Error: "status is neither true nor false", Field: "status", Want: "true or false, once"}
		}
	}
	return byStatus, nil
}

// readRequest reads the body.
func readRequest(w http.ResponseWriter, r *http.Request) (request, *problem) {
	if encoding := r.Header.Get("Content-Encoding"); encoding != "" && encoding != "identity" {
		return request{}, &problem{
			status: http.StatusUnsupportedMediaType,
			Error:  "body is encoded", Field: "Content-Encoding", Want: "none",
		}
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return request{}, &problem{status: http.StatusRequestEntityTooLarge, Error: "body is too long", Want: "at most 65536 bytes"}
		}
		return request{}, &problem{Error: "body ended early"}
	}
	return parseRequest(body)
}

// problemOf tells an error of the limiter. Only those of the request are the
// client's; nothing here ever admits.
func problemOf(err error) *problem {
	if cost, ok := errors.AsType[*hybrid.CostError](err); ok {
		return &problem{
			Error: fmt.Sprintf("cost = %d can never be admitted", cost.Cost),
			Field: "cost", Want: fmt.Sprintf("0 to %d", cost.Burst),
		}
	}
	if limit, ok := errors.AsType[*hybrid.LimitError](err); ok {
		field := map[string]string{"Rate": "rate", "Burst": "capacity", "Burst/Rate": "capacity/rate"}[limit.Field]
		return &problem{Error: fmt.Sprintf("%s = %s is out of range", field, limit.Value), Field: field, Want: limit.Want}
	}
	if errors.Is(err, hybrid.ErrClosed) {
		return &problem{status: http.StatusServiceUnavailable, Error: "server is stopping"}
	}
	// What is left is the context's: the client went away.
	return &problem{status: http.StatusServiceUnavailable, Error: "request was cancelled"}
}

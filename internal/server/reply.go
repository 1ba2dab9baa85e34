package server

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// reply is a body with its status.
type reply interface{ code() int }

// answer is the body of a decision. Every field is always there, so that a
// client in any language can tell a 0 from nothing.
type answer struct {
	status       int
	Allowed      bool   `json:"allowed"`
	Tokens       int64  `json:"tokens"`
	Remaining    int64  `json:"remaining"`
	RetryAfterMS int64  `json:"retry_after_ms"`
	Source       string `json:"source"`
	Service      string `json:"service"`
	UserID       string `json:"user_id"`
}

func (a answer) code() int { return a.status }

// problem is the body for a request that was not decided.
type problem struct {
	status int    // 0 is 400
	Error  string `json:"error"`
	Field  string `json:"field,omitempty"`
	Want   string `json:"want,omitempty"`
}

func (p *problem) code() int {
	if p.status == 0 {
		return http.StatusBadRequest
	}
	return p.status
}

// health is the body of /healthz.
type health struct {
	status int
	Status string `json:"status"`
}

func (h health) code() int { return h.status }

// write sends v. A client that went away meanwhile is nobody's error.
func write(w http.ResponseWriter, v reply) {
	body, err := json.Marshal(v)
	if err != nil {
		// Strings and integers: there is nothing that could fail.
		http.Error(w, `{"error":"internal"}`, http.StatusInternalServerError)
		return
	}
	body = append(body, '\n')
	// A decision is true for one instant and one client.
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(v.code())
	_, _ = w.Write(body)
}

// allowMethod answers 405 and returns false unless r has one of the methods.
func allowMethod(w http.ResponseWriter, r *http.Request, methods ...string) bool {
	if slices.Contains(methods, r.Method) {
		return true
	}
	list := strings.Join(methods, ", ")
	w.Header().Set("Allow", list)
	write(w, &problem{status: http.StatusMethodNotAllowed, Error: "method is not allowed", Want: list})
	return false
}

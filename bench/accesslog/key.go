package accesslog

import (
	"fmt"
	"net/netip"
	"strings"
)

// KeyFunc returns the limiter key of an entry. It reports false, and no key, if
// the entry has none; a key is never empty.
type KeyFunc func(Entry) (string, bool)

// ParseKey returns the KeyFunc of a name:
//
//	ip       the client, so that one client has one key however it was written:
//	         an address in its shortest form, without zone or port, and IPv4 if
//	         it is IPv4 in IPv6; a host name in lower case
//	path     the path without the query, which would make a key per request;
//	         the raw text if the request was not HTTP
//	user     the authenticated user; an entry without one has no key
//	ip+path  both, with a space between them
//	none     "all": one key for everything
func ParseKey(name string) (KeyFunc, error) {
	switch name {
	case "ip":
		return func(e Entry) (string, bool) { return clientKey(e.IP), e.IP != "" }, nil
	case "path":
		return pathKey, nil
	case "user":
		return userKey, nil
	case "ip+path":
		return func(e Entry) (string, bool) {
			path, ok := pathKey(e)
			if !ok || e.IP == "" {
				return "", false
			}
			return clientKey(e.IP) + " " + path, true
		}, nil
	case "none":
		return func(Entry) (string, bool) { return "all", true }, nil
	}
	return nil, fmt.Errorf("accesslog: key %q: want ip, path, user, ip+path or none", name)
}

// clientKey is the canonical form of a client. Some servers write the port
// too, which is different for each connection.
func clientKey(host string) string {
	addr, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"))
	if err != nil {
		port, err := netip.ParseAddrPort(host)
		if err != nil {
			return strings.ToLower(host)
		}
		addr = port.Addr()
	} else if addr.Is4() && host[0] != '[' {
		return host // has one form only; the usual case, without an allocation
	}
	return addr.Unmap().WithZone("").String()
}

// pathKey is the path without its query.
func pathKey(e Entry) (string, bool) {
	path := e.Path
	if e.Method != "" {
		path, _, _ = strings.Cut(path, "?")
	}
	return path, path != ""
}

// userKey is the user. Apache writes an empty user as two quotes, and a format
// with one more column leaves two dashes.
func userKey(e Entry) (string, bool) {
	if strings.Trim(e.User, `-" `) == "" {
		return "", false
	}
	return e.User, true
}

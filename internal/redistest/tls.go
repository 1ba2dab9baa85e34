package redistest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// StartTLS is [Start] for a server that takes connections by TLS alone, with a
// certificate made for it. The test is skipped when redis-server was built
// without TLS.
func StartTLS(t testing.TB, args ...string) *Server {
	t.Helper()
	s := newServer(t, nil)
	cert, key, secure, err := certify(s.dir)
	if err != nil {
		t.Fatalf("redistest: make a certificate: %v", err)
	}
	s.secure = secure
	s.args = append([]string{
		"--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert,
		"--tls-auth-clients", "no",
	}, args...)
	if err := s.tryStart(t.Context()); errors.Is(err, errNoTLS) {
		t.Skipf("redistest: %s was built without TLS", s.binary)
	} else if err != nil {
		t.Fatalf("redistest: start %s: %v", s.binary, err)
	}
	return s
}

// errNoTLS is the failure of a server that does not know what TLS is.
var errNoTLS = errors.New("it was built without TLS")

// withoutTLS reports whether a server's log says that it does not know the first
// option about TLS. It quotes the line of the configuration it stumbled over.
func withoutTLS(log string) bool {
	_, line, bad := strings.Cut(log, ">>> '")
	return bad && strings.HasPrefix(line, "tls-")
}

// TLS returns what a client needs to trust this server, and nobody else; nil for
// a server without TLS.
func (s *Server) TLS() *tls.Config {
	if s.secure == nil {
		return nil
	}
	return s.secure.Clone()
}

// certify writes a certificate for 127.0.0.1 and its key to dir, and returns
// their paths and the configuration of a client that trusts it alone.
func certify(dir string) (certFile, keyFile string, client *tls.Config, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return "", "", nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: "redistest"},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(time.Hour),
		IPAddresses:  []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA:         true, // it vouches for itself
		KeyUsage:     x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},

		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return "", "", nil, err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return "", "", nil, err
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
	certFile, keyFile = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	if err := errors.Join(os.WriteFile(certFile, certPEM, 0o600), os.WriteFile(keyFile, keyPEM, 0o600)); err != nil {
		return "", "", nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(certPEM)
	return certFile, keyFile, &tls.Config{RootCAs: roots, ServerName: "127.0.0.1", MinVersion: tls.VersionTLS12}, nil
}

package accesslog_test

import (
	"fmt"
	"os"
	"strings"

	"github.com/hybridlimit/hybridlimit/bench/accesslog"
)

func ExampleRead() {
	const lines = `192.0.2.7 - frank [10/Oct/2000:13:55:36 -0700] "GET /a?b=c HTTP/1.0" 200 2326
example.org:443 2001:DB8::1 - - [10/Oct/2000:13:55:35 -0700] "POST /b HTTP/2.0" 201 -
192.0.2.7 - - [10/Oct/2000:13:55:36 -0700] "\x16\x03\x01" 400 226
192.0.2.7 - - [yesterday] "GET / HTTP/1.0" 200 1
`
	log, err := accesslog.Read(strings.NewReader(lines), accesslog.Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	key, err := accesslog.ParseKey("ip+path")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	for _, e := range log.Entries {
		k, _ := key(e)
		fmt.Println(e.Time.Format("15:04:05"), e.Status, k)
	}
	for _, bad := range log.Skipped.Examples {
		fmt.Printf("line %d: %s\n", bad.Line, bad.Reason)
	}
	// Output:
	// 20:55:35 201 2001:db8::1 /b
	// 20:55:36 200 192.0.2.7 /a
	// 20:55:36 400 192.0.2.7 \x16\x03\x01
	// line 4: bad time "yesterday"
}

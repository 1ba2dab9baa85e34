package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func newVersionCmd() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Show the version of this program",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			info, _ := debug.ReadBuildInfo() // nil when built without modules
			v := versionOf(info)
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(v)
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), v)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object")
	return cmd
}

// version is what this program was built from.
type version struct {
	Version  string `json:"version"`            // of the module; "(devel)" from a checkout
	Revision string `json:"revision,omitempty"` // of the checkout, if the build noted it
	Time     string `json:"time,omitempty"`     // of that revision
	Modified bool   `json:"modified"`           // since that revision
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// versionOf reads what the go command noted in the binary: there is no version
// to keep up to date in the source, and none to pass to the linker.
func versionOf(info *debug.BuildInfo) version {
	v := version{Version: "(devel)", Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	if info == nil {
		return v
	}
	if info.Main.Version != "" {
		v.Version = info.Main.Version
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.time":
			v.Time = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	return v
}

// String is the version in one line.
func (v version) String() string {
	from := ""
	if v.Revision != "" {
		from = " revision " + v.Revision[:min(len(v.Revision), 12)]
		if v.Modified {
			from += " modified"
		}
	}
	return fmt.Sprintf("hybridlimit %s%s %s %s", v.Version, from, v.Go, v.Platform)
}

package envoy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	wasmfilterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/wasm/v3"
	wasmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/wasm/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/weir-dev/weir/filter/config"
)

// reloadBackoff is how soon a VM that has failed may be replaced by the next.
// Until then its worker answers 503. Making a VM takes milliseconds, so Envoy's
// own second would be mostly outage.
const reloadBackoff = 100 * time.Millisecond

// filterFacts is what the rest of Envoy's configuration must know of the
// filter's.
type filterFacts struct {
	cluster   string
	timeout   time.Duration
	holdBytes int64
}

func readFilter(data []byte) (filterFacts, error) {
	if len(data) == 0 {
		return filterFacts{}, errors.New("is missing")
	}
	c, err := config.Parse(data)
	if err != nil {
		return filterFacts{}, err
	}
	if c.Cluster == UpstreamCluster || c.Cluster == ADSCluster {
		return filterFacts{}, fmt.Errorf("cluster: %q is the name of another cluster of this Envoy", c.Cluster)
	}
	for path, name := range c.Headers() {
		// The listener refuses such headers (see listener), so a rule on one would
		// never find it.
		if strings.Contains(name, "_") {
			return filterFacts{}, fmt.Errorf("filter.%s: %q has an underscore, and the gateway refuses requests with such headers", path, name)
		}
	}
	return filterFacts{cluster: c.Cluster, timeout: c.Timeout, holdBytes: c.HoldBytes}, nil
}

// wasmFilter builds the filter's own configuration, packed.
func (c *checked) wasmFilter() (*anypb.Any, error) {
	// Indented, since people read it in bootstraps and config dumps. It is JSON:
	// readFilter has parsed it.
	var readable bytes.Buffer
	if err := json.Indent(&readable, bytes.TrimSpace(c.FilterConfig), "", "  "); err != nil {
		return nil, fmt.Errorf("indenting the filter's configuration: %w", err)
	}
	// A Struct would reach the filter as protobuf bytes; a StringValue arrives as
	// the string itself.
	configuration, err := pack(wrapperspb.String(readable.String()))
	if err != nil {
		return nil, err
	}

	return pack(&wasmfilterv3.Wasm{
		Config: &wasmv3.PluginConfig{
			Name:   FilterName,
			RootId: FilterName,
			Vm: &wasmv3.PluginConfig_VmConfig{
				VmConfig: &wasmv3.VmConfig{
					VmId:    FilterName,
					Runtime: "envoy.wasm.runtime.v8",
					Code: &corev3.AsyncDataSource{
						Specifier: &corev3.AsyncDataSource_Local{Local: c.Module.source()},
					},
				},
			},
			Configuration: configuration,
			FailurePolicy: wasmv3.FailurePolicy_FAIL_RELOAD,
			ReloadConfig: &wasmv3.ReloadConfig{
				Backoff: &corev3.BackoffStrategy{BaseInterval: durationpb.New(reloadBackoff)},
			},
			// The filter may then stop at the headers and still read the body,
			// which it needs for keys and costs that stand in the body.
			AllowOnHeadersStopIteration: wrapperspb.Bool(true),
		},
	})
}

func (m Module) source() *corev3.DataSource {
	if m.Path != "" {
		return &corev3.DataSource{Specifier: &corev3.DataSource_Filename{Filename: m.Path}}
	}
	return &corev3.DataSource{Specifier: &corev3.DataSource_InlineBytes{InlineBytes: m.Inline}}
}

// pack wraps m so that equal messages give equal bytes, on which the versions of
// xDS resources rest.
func pack(m proto.Message) (*anypb.Any, error) {
	packed := new(anypb.Any)
	if err := anypb.MarshalFrom(packed, m, proto.MarshalOptions{Deterministic: true}); err != nil {
		return nil, fmt.Errorf("packing %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	return packed, nil
}

package xds

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	wasmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/wasm/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"
)

// ErrRemoteCode is returned by [Server.Publish] for Wasm code that is neither a
// local file nor inline. No client may be sent any: see the package's comment.
var ErrRemoteCode = errors.New("wasm code must be a local file or inline")

// untyped are messages that Envoy converts to whatever type they claim to be.
var untyped = []protoreflect.FullName{
	"google.protobuf.Struct",
	"udpa.type.v1.TypedStruct",
	"xds.type.v3.TypedStruct",
}

// inspect looks into every message of the snapshot, however deeply packed, for
// what must not be sent, and holds filters and secrets that are to be discovered
// against those that are there.
func inspect(snapshot *cachev3.Snapshot) error {
	wanted, secrets := make(map[string]bool), make(map[string]bool)
	visit := func(m proto.Message) error {
		switch m := m.(type) {
		case *wasmv3.VmConfig:
			if _, ok := m.GetCode().GetSpecifier().(*corev3.AsyncDataSource_Local); !ok {
				return ErrRemoteCode
			}
		case *hcmv3.HttpFilter:
			if m.GetConfigDiscovery() != nil {
				wanted[m.GetName()] = true
			}
		case *tlsv3.SdsSecretConfig:
			if m.GetSdsConfig().GetAds() != nil {
				secrets[m.GetName()] = true
			}
		}
		return nil
	}
	for _, set := range snapshot.Resources {
		for _, name := range slices.Sorted(maps.Keys(set.Items)) {
			resource := set.Items[name].Resource
			if err := walk(resource.ProtoReflect(), visit); err != nil {
				return fmt.Errorf("%s %q: %w", resource.ProtoReflect().Descriptor().Name(), name, err)
			}
		}
	}

	if err := agree(secrets, snapshot.Resources[types.Secret].Items, "secret"); err != nil {
		return err
	}
	return agree(wanted, snapshot.Resources[types.ExtensionConfig].Items, "extension")
}

// agree makes sure that what is wanted is there, and that what is there is wanted.
func agree(wanted map[string]bool, there map[string]types.ResourceWithTTL, what string) error {
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		if _, ok := there[name]; !ok {
			return fmt.Errorf("the %s %q is to be discovered, and there is none of that name", what, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(there)) {
		if !wanted[name] {
			return fmt.Errorf("nothing discovers the %s %q", what, name)
		}
	}
	return nil
}

// walk visits m and every message in it. A packed message that can't be looked
// into is an error: what it holds can't be vouched for.
func walk(m protoreflect.Message, visit func(proto.Message) error) error {
	if err := visit(m.Interface()); err != nil {
		return err
	}
	if packed, ok := m.Interface().(*anypb.Any); ok {
		inner, err := packed.UnmarshalNew()
		if err != nil {
			return fmt.Errorf("unpacking %q: %w", packed.GetTypeUrl(), err)
		}
		if slices.Contains(untyped, packed.MessageName()) {
			return fmt.Errorf("%s is packed in it, which hides its type", packed.MessageName())
		}
		return walk(inner.ProtoReflect(), visit)
	}

	var err error
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap():
			if field.MapValue().Message() == nil {
				return true
			}
			value.Map().Range(func(_ protoreflect.MapKey, value protoreflect.Value) bool {
				err = walk(value.Message(), visit)
				return err == nil
			})
		case field.Message() == nil:
		case field.IsList():
			for list, i := value.List(), 0; i < list.Len() && err == nil; i++ {
				err = walk(list.Get(i).Message(), visit)
			}
		default:
			err = walk(value.Message(), visit)
		}
		return err == nil
	})
	return err
}

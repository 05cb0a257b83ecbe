package xds

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	cachev3 "github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"google.golang.org/protobuf/proto"

	"github.com/weir-dev/weir/envoy"
)

// versionDigits is the length of a version: 64 bits of a hash, which one can still
// read aloud.
const versionDigits = 16

// newSnapshot copies, checks and numbers resources.
func newSnapshot(resources *envoy.Resources) (*cachev3.Snapshot, error) {
	if resources == nil {
		return nil, errors.New("there are none")
	}
	snapshot := new(cachev3.Snapshot)
	for _, set := range []struct {
		name string
		kind types.ResponseType
		all  []types.Resource
	}{
		{"listeners", types.Listener, copies(resources.Listeners)},
		{"routes", types.Route, copies(resources.Routes)},
		{"clusters", types.Cluster, copies(resources.Clusters)},
		{"endpoints", types.Endpoint, copies(resources.Endpoints)},
		{"extensions", types.ExtensionConfig, copies(resources.Extensions)},
		{"secrets", types.Secret, copies(resources.Secrets)},
	} {
		numbered, err := number(set.all)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", set.name, err)
		}
		snapshot.Resources[set.kind] = numbered
	}

	if err := snapshot.Consistent(); err != nil {
		return nil, err
	}
	if err := inspect(snapshot); err != nil {
		return nil, err
	}
	// Now, rather than under the cache's lock when the first client asks.
	if err := snapshot.ConstructVersionMap(); err != nil {
		return nil, err
	}
	return snapshot, nil
}

// copies takes the resources out of the caller's reach: they are marshalled only
// when they are sent.
func copies[M proto.Message](messages []M) []types.Resource {
	all := make([]types.Resource, len(messages))
	for i, m := range messages {
		all[i] = proto.Clone(m)
	}
	return all
}

// number gives a set of resources the version that its content has.
func number(all []types.Resource) (cachev3.Resources, error) {
	content := make(map[string][]byte, len(all))
	for _, resource := range all {
		name := cachev3.GetResourceName(resource)
		if name == "" {
			return cachev3.Resources{}, errors.New("one has no name")
		}
		if _, ok := content[name]; ok {
			return cachev3.Resources{}, fmt.Errorf("two have the name %q", name)
		}
		data, err := cachev3.MarshalResource(resource)
		if err != nil {
			return cachev3.Resources{}, fmt.Errorf("marshalling %q: %w", name, err)
		}
		content[name] = data
	}

	hash := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(content)) {
		for _, part := range [][]byte{[]byte(name), content[name]} {
			var length [8]byte
			binary.BigEndian.PutUint64(length[:], uint64(len(part)))
			hash.Write(length[:])
			hash.Write(part)
		}
	}
	version := hex.EncodeToString(hash.Sum(nil))[:versionDigits]
	return cachev3.NewResources(version, all), nil
}

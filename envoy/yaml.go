package envoy

import (
	"bytes"
	"fmt"

	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// YAML prints m as Envoy reads it, with the proto's own field names and order.
// Equal messages give equal text. The error is for a message that holds a type
// which this program doesn't know.
func YAML(m proto.Message) ([]byte, error) {
	data, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("marshalling %s: %w", m.ProtoReflect().Descriptor().FullName(), err)
	}
	// JSON is YAML, and a node keeps the order of its fields.
	var document yaml.Node
	if err := yaml.Unmarshal(data, &document); err != nil {
		return nil, fmt.Errorf("reading back JSON: %w", err)
	}
	plain(&document)

	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	if err := encoder.Encode(&document); err != nil {
		return nil, fmt.Errorf("writing YAML: %w", err)
	}
	if err := encoder.Close(); err != nil {
		return nil, fmt.Errorf("writing YAML: %w", err)
	}
	return out.Bytes(), nil
}

// plain takes JSON's brackets and quotes away, where YAML needs none.
func plain(n *yaml.Node) {
	n.Style = 0
	for _, child := range n.Content {
		plain(child)
	}
}

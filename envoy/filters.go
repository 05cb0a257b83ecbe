package envoy

import (
	"encoding/json"
	"errors"
	"fmt"

	jwtv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/jwt_authn/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"go.yaml.in/yaml/v3"
	"google.golang.org/protobuf/encoding/protojson"
)

// Types that [ParseFilters] knows are those that the program links in. This one is
// what filters before Weir's are for most often.
var _ = (*jwtv3.JwtAuthentication)(nil)

// ParseFilters reads HTTP filters as they stand in Envoy's own configuration,
// under http_filters: a list in YAML or JSON. It knows the types of this package,
// among them that of jwt_authn. The error names the filter by its place.
func ParseFilters(text []byte) ([]*hcmv3.HttpFilter, error) {
	var list []any
	if err := yaml.Unmarshal(text, &list); err != nil {
		return nil, fmt.Errorf("a list of HTTP filters is expected: %w", err)
	}
	filters := make([]*hcmv3.HttpFilter, len(list))
	for i, tree := range list {
		data, err := json.Marshal(tree)
		if err != nil {
			return nil, fmt.Errorf("filter %d: %w", i+1, err)
		}
		filters[i] = new(hcmv3.HttpFilter)
		if err := protojson.Unmarshal(data, filters[i]); err != nil {
			return nil, fmt.Errorf("filter %d: %w", i+1, err)
		}
	}
	return filters, nil
}

// checkFilters makes sure that filters are ones that can stand before Weir's.
func checkFilters(filters []*hcmv3.HttpFilter) error {
	seen := map[string]bool{FilterName: true, routerName: true}
	var faults []error
	for i, f := range filters {
		switch {
		case f.GetName() == "":
			faults = append(faults, fmt.Errorf("filter %d has no name", i+1))
		case seen[f.GetName()]:
			faults = append(faults, fmt.Errorf("filter %d: there is another with the name %q", i+1, f.GetName()))
		case f.GetTypedConfig() == nil:
			faults = append(faults, fmt.Errorf("filter %d: %q has no typed_config", i+1, f.GetName()))
		}
		seen[f.GetName()] = true
	}
	return errors.Join(faults...)
}

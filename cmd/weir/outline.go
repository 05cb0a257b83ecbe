package main

import (
	"bytes"
	"fmt"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/policy"
)

// unlimited warns of the descriptors that the filter sends and no limit matches. (Of a
// policy without any descriptor its parser warns.)
func unlimited(p *policy.Policy, block config.Block) []*policy.Error {
	if p.Empty() {
		return nil
	}
	var warnings []*policy.Error
	for i, rule := range block.Rules {
		for j, d := range rule.Descriptors {
			keys := make([]string, len(d.Entries))
			for k, e := range d.Entries {
				keys[k] = e.Key
			}
			if !p.Limits(keys) {
				warnings = append(warnings, p.Filter.Locate(
					fmt.Sprintf("rules[%d].descriptors[%d]", i, j),
					fmt.Sprintf("sends %q, which no limit of the policy matches, so it limits nothing", strings.Join(keys, "/"))))
			}
		}
	}
	return warnings
}

// filterFaults checks the filter's block of a file whose limits are wrong. It reads the
// file with all lines blank but those of the block, so that places stay true; the faults
// of the file's other parts are found when it is read whole.
func filterFaults(file string, data []byte) []error {
	var document yaml.Node
	if err := yaml.Unmarshal(data, &document); err != nil || len(document.Content) == 0 {
		return nil
	}
	root := document.Content[0]
	lines := bytes.SplitAfter(data, []byte("\n"))
	first, end := 0, len(lines)+1 // lines count from 1
	for i := 0; i+1 < len(root.Content); i += 2 {
		switch at := root.Content[i].Line; {
		case root.Content[i].Value == "filter":
			first = at
		case first > 0 && at < end:
			end = at
		}
	}
	if root.Kind != yaml.MappingNode || root.Style&yaml.FlowStyle != 0 || first == 0 {
		return nil
	}
	var text bytes.Buffer
	for i, line := range lines {
		if number := i + 1; number >= first && number < end {
			text.Write(line)
		} else {
			text.WriteByte('\n')
		}
	}
	text.WriteString("\ndomain: any\n") // a policy needs one
	p, err := policy.Parse(file, text.Bytes())
	if err != nil {
		return nil // of the block itself; reading the file whole has told it
	}
	_, faults := checkFilter(p)
	return faults
}

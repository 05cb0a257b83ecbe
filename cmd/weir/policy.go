package main

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/weir-dev/weir/filter/config"
	"github.com/weir-dev/weir/policy"
)

// serviceCluster is Envoy's name for the rate limit service.
const serviceCluster = "weir_ratelimit"

// defaultPolicy is the demonstration's, from the repository's root.
const defaultPolicy = "examples/ingest/policy.yaml"

type policyCommand struct {
	Check policyCheckCommand `cmd:"" help:"Say what is wrong with policy files, by file, line, column and field."`
}

type policyCheckCommand struct {
	Paths []string `arg:"" name:"path" help:"A policy file, or a folder of them (*.yaml, *.yml)."`
}

// Run prints what is wrong, a line a fault, and what is likely not meant. It fails if
// any file would not load.
func (c *policyCheckCommand) Run(t terminal) error {
	loaded, err := loadPolicies(c.Paths)
	for _, w := range loaded.warnings {
		fmt.Fprintf(t.stdout, "%v (warning)\n", w)
	}
	if faults := unjoin(err); len(faults) > 0 {
		for _, fault := range faults {
			fmt.Fprintln(t.stdout, fault)
		}
		return fmt.Errorf("%s: nothing of this can be loaded", plural(len(faults), "fault", "faults"))
	}
	verdict := "nothing wrong"
	if n := len(loaded.warnings); n > 0 {
		verdict = plural(n, "warning", "warnings")
	}
	fmt.Fprintf(t.stdout, "%s, %s\n", plural(len(loaded.policies), "policy", "policies"), verdict)
	return nil
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// loadedPolicies is what files and folders of policies hold.
type loadedPolicies struct {
	set      *policy.Set // nil if anything is wrong
	policies []*policy.Policy
	warnings []*policy.Error // what loads but is likely not meant
}

// loadPolicies reads the policies of files and folders, and checks the filter's blocks
// as the filter does. The error joins all faults of all files, by file and line; what
// was read is returned with it.
func loadPolicies(paths []string) (loadedPolicies, error) {
	files, err := policyFiles(paths)
	if err != nil {
		return loadedPolicies{}, err
	}
	var (
		loaded loadedPolicies
		faults []error
	)
	for _, file := range files {
		data, err := os.ReadFile(file) //nolint:gosec // the operator names the files
		if err != nil {
			faults = append(faults, fmt.Errorf("reading a policy: %w", err))
			continue
		}
		p, err := policy.Parse(file, data)
		if err != nil {
			faults = append(append(faults, unjoin(err)...), filterFaults(file, data)...)
			continue
		}
		loaded.policies = append(loaded.policies, p)
		block, errs := checkFilter(p)
		faults = append(faults, errs...)
		loaded.warnings = append(loaded.warnings, p.Warnings...)
		if len(errs) == 0 {
			loaded.warnings = append(loaded.warnings, unlimited(p, block)...)
		}
	}
	slices.SortStableFunc(loaded.warnings, byPlace)
	loaded.set, err = policy.NewSet(loaded.policies...)
	faults = append(faults, unjoin(err)...)
	slices.SortStableFunc(faults, func(a, b error) int { return byPlace(place(a), place(b)) })
	if err := errors.Join(faults...); err != nil {
		loaded.set = nil
		return loaded, err
	}
	return loaded, nil
}

// place returns a fault's place. What has none comes after what has.
func place(err error) *policy.Error {
	if fault, ok := errors.AsType[*policy.Error](err); ok {
		return fault
	}
	return &policy.Error{File: "\xff"}
}

func byPlace(a, b *policy.Error) int {
	return cmp.Or(strings.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
}

func policyFiles(paths []string) ([]string, error) {
	var files []string
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("finding policies: %w", err)
		}
		if !info.IsDir() {
			files = append(files, path)
			continue
		}
		entries, err := os.ReadDir(path)
		if err != nil {
			return nil, fmt.Errorf("finding policies: %w", err)
		}
		before := len(files)
		for _, e := range entries {
			hidden := strings.HasPrefix(e.Name(), ".") // such as Kubernetes's ..data
			if ext := filepath.Ext(e.Name()); !hidden && !e.IsDir() && (ext == ".yaml" || ext == ".yml") {
				files = append(files, filepath.Join(path, e.Name()))
			}
		}
		if len(files) == before {
			return nil, fmt.Errorf("finding policies: no *.yaml or *.yml in %s", path)
		}
	}
	slices.Sort(files)
	return slices.Compact(files), nil
}

// checkFilter reads a filter's block, and gives each fault its place in the policy's file.
func checkFilter(p *policy.Policy) (config.Block, []error) {
	if p.Filter == nil {
		return config.Block{}, nil
	}
	block, err := config.ParseBlock(p.Filter.JSON)
	var faults []error
	for _, err := range unjoin(err) {
		if fault, ok := errors.AsType[*config.Error](err); ok {
			faults = append(faults, p.Filter.Locate(fault.Path, fault.Msg))
		} else {
			faults = append(faults, p.Filter.Locate("", err.Error()))
		}
	}
	return block, faults
}

// unjoin returns the errors that errors.Join has joined, at any depth.
func unjoin(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var all []error
	for _, err := range joined.Unwrap() {
		all = append(all, unjoin(err)...)
	}
	return all
}

// errNoFilter is returned by filterConfig when no policy has a `filter:` block.
var errNoFilter = errors.New("no policy has a filter: block, so there is nothing for Envoy's filter to do")

// filterConfig builds the configuration of Envoy's filter from the policy that has a
// `filter:` block; domain chooses one if there are several.
func filterConfig(policies []*policy.Policy, domain string) ([]byte, error) {
	var with []*policy.Policy
	for _, p := range policies {
		if p.Filter != nil && (domain == "" || domain == p.Domain) {
			with = append(with, p)
		}
	}
	switch {
	case len(with) == 0 && domain != "":
		return nil, fmt.Errorf("the policies have no filter: block for the domain %q", domain)
	case len(with) == 0:
		return nil, errNoFilter
	case len(with) > 1:
		return nil, fmt.Errorf("%s and %s both have a filter: block; choose one with --filter-domain",
			with[0].File, with[1].File)
	}
	p := with[0]
	// The version tells one content from another.
	sum := sha256.Sum256(append([]byte(p.Domain+"\n"), p.Filter.JSON...))
	data, err := config.Compose(hex.EncodeToString(sum[:8]), p.Domain, serviceCluster, p.Filter.JSON)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", p.File, err)
	}
	return data, nil
}

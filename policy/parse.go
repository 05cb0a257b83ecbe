package policy

import (
	"errors"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/weir-dev/weir/quota"
)

// Parse reads one policy file; file is its name in messages. It is strict: an unknown
// field, a field that stands twice, or a value out of range is a fault. The error
// joins all faults, each an [*Error].
func Parse(file string, data []byte) (*Policy, error) {
	d := &document{file: file}
	root := d.parse(data)
	if root == nil {
		return nil, errors.Join(d.errs...)
	}
	p := &Policy{File: file}
	d.policy(root, p)
	if len(d.errs) > 0 {
		return nil, errors.Join(d.errs...)
	}
	p.Warnings = d.warnings
	return p, nil
}

func (d *document) policy(root *yaml.Node, p *Policy) {
	fields, ok := d.fields(root, "", "domain", "descriptors", "headers", "filter")
	if !ok {
		return
	}
	if f, ok := fields["domain"]; ok {
		p.Domain = d.text(f)
	}
	if p.Domain == "" {
		d.failf(root, "domain", "is missing or empty; it is the namespace that requests name")
	}
	if f, ok := fields["headers"]; ok {
		p.Headers = d.headers(f)
	}
	if f, ok := fields["filter"]; ok {
		p.Filter = d.filter(f)
	}
	if f, ok := fields["descriptors"]; ok {
		p.root = d.level(f, nil)
	}
	if p.root == nil {
		p.root = &level{}
	}
}

func (d *document) headers(f field) Headers {
	var h Headers
	fields, ok := d.fields(f.value, f.path, "on_allowed", "style")
	if !ok {
		return h
	}
	if f, ok := fields["on_allowed"]; ok {
		h.OnAllowed = d.boolean(f)
	}
	if f, ok := fields["style"]; ok {
		switch d.text(f) {
		case "epoch":
			h.Style = StyleEpoch
		case "delta":
			h.Style = StyleDelta
		default:
			d.failf(f.value, f.path, "must be epoch or delta, not %s", describe(f.value))
		}
	}
	return h
}

// level reads a list of descriptors; keys are those of the path above them.
func (d *document) level(f field, keys []string) *level {
	l := &level{exact: map[Entry]*node{}, bare: map[string]*node{}}
	seen := map[Entry]*node{}
	for _, item := range d.items(f) {
		n := d.descriptor(item, keys)
		if n == nil {
			continue
		}
		id := Entry{Key: n.key, Value: n.value}
		if first, ok := seen[id]; ok {
			d.failf(item.value, item.path, "this key and value stand twice; the first is on line %d", first.at.line)
			continue
		}
		seen[id] = n
		switch {
		case strings.Contains(n.key, "*") || strings.Contains(n.value, "*"):
			l.patterns = append(l.patterns, n)
		case n.value != "":
			l.exact[id] = n
		default:
			l.bare[n.key] = n
		}
	}
	return l
}

// notYet are fields of the reference's format that change decisions and that this
// version does not enforce: a file that has one must not load as if it were.
var notYet = []string{"rate_limit", "limiter", "shadow_mode", "quota_mode"}

// withoutEffect are fields of the reference's format that never change a decision.
var withoutEffect = []string{"detailed_metric", "value_to_metric", "metadata"}

func (d *document) descriptor(item field, above []string) *node {
	known := []string{"key", "value", "budget", "quota", "name", "on_error", "share_threshold", "descriptors"}
	fields, ok := d.fields(item.value, item.path, append(append(known, notYet...), withoutEffect...)...)
	if !ok {
		return nil
	}
	for _, name := range notYet {
		if f, ok := fields[name]; ok {
			d.failf(f.key, f.path, "is not enforced by this version of Weir, so a policy that has it is refused")
		}
	}
	for _, name := range withoutEffect {
		if f, ok := fields[name]; ok {
			d.warnf(f.key, f.path, "has no effect in this version of Weir")
		}
	}

	n := &node{at: position{line: item.value.Line, column: item.value.Column}}
	if f, ok := fields["key"]; ok {
		n.key = d.text(f)
	}
	if n.key == "" {
		d.failf(item.value, join(item.path, "key"), "is missing or empty")
		return nil
	}
	if f, ok := fields["value"]; ok {
		n.value = d.text(f)
	}
	if f, ok := fields["share_threshold"]; ok {
		n.shared = d.boolean(f)
		if n.shared && !strings.Contains(n.value, "*") {
			d.failf(f.value, f.path, "needs a value with a *")
		}
	}
	keys := append(append([]string(nil), above...), n.key)
	if f, ok := fields["descriptors"]; ok {
		d.within(f.value, f.path, func() { n.children = d.level(f, keys) })
	}
	n.limit = d.limit(fields, n, keys)
	return n
}

// limit reads what a descriptor says of the requests that end at it. A descriptor with
// neither a limit nor children says that they are not limited.
func (d *document) limit(fields map[string]field, n *node, keys []string) *Limit {
	budget, hasBudget := fields["budget"]
	quotas, hasQuota := fields["quota"]
	if !hasBudget && !hasQuota && n.children != nil {
		for _, name := range []string{"name", "on_error"} {
			if f, ok := fields[name]; ok {
				d.failf(f.key, f.path, "stands beside no budget or quota")
			}
		}
		return nil
	}
	l := &Limit{Name: strings.Join(keys, "/")}
	if f, ok := fields["name"]; ok {
		if l.Name = d.text(f); l.Name == "" {
			d.failf(f.value, f.path, "is empty")
		}
	}
	if f, ok := fields["on_error"]; ok {
		switch d.text(f) {
		case "allow":
			l.AllowError = true
		case "deny":
		default:
			d.failf(f.value, f.path, "must be allow or deny, not %s", describe(f.value))
		}
	}
	if hasBudget {
		l.Budget = d.budget(budget)
		if n.shared {
			d.failf(budget.key, budget.path, "a budget's bucket is named by the value, which share_threshold leaves out")
		}
	}
	if hasQuota {
		l.Quota = d.quota(quotas)
	}
	return l
}

func (d *document) budget(f field) *BudgetLimit {
	fields, ok := d.fields(f.value, f.path, "scope", "per_second", "burst")
	if !ok {
		return nil
	}
	b := &BudgetLimit{}
	faults := len(d.errs)
	for _, name := range []string{"scope", "per_second", "burst"} {
		if _, ok := fields[name]; !ok {
			d.failf(f.key, join(f.path, name), "is missing")
		}
	}
	if f, ok := fields["scope"]; ok {
		if b.Scope = Scope(d.text(f)); !b.Scope.Valid() {
			d.failf(f.value, f.path, "%s is no scope; the scopes are %s", describe(f.value), scopeNames())
		}
	}
	if f, ok := fields["per_second"]; ok {
		b.Budget.PerSecond = d.amount(f)
	}
	if f, ok := fields["burst"]; ok {
		b.Budget.Burst = d.amount(f)
	}
	if len(d.errs) == faults {
		if err := b.Budget.Validate(); err != nil {
			d.failf(f.value, f.path, "%v", err)
		}
	}
	return b
}

func scopeNames() string {
	names := make([]string, 0, len(Scopes()))
	for _, s := range Scopes() {
		names = append(names, string(s))
	}
	return strings.Join(names, ", ")
}

func (d *document) quota(f field) []quota.Budget {
	fields, ok := d.fields(f.value, f.path, quota.DailyKey, quota.MonthlyKey)
	if !ok {
		return nil
	}
	if len(fields) == 0 {
		d.failf(f.key, f.path, "needs %s, %s or both", quota.DailyKey, quota.MonthlyKey)
	}
	var budgets []quota.Budget
	for _, b := range []quota.Budget{
		{Key: quota.DailyKey, Unit: quota.Day},
		{Key: quota.MonthlyKey, Unit: quota.Month},
	} {
		if f, ok := fields[b.Key]; ok {
			b.Limit = d.whole(f)
			budgets = append(budgets, b)
		}
	}
	if len(budgets) == 2 && budgets[1].Limit < budgets[0].Limit {
		f := fields[quota.MonthlyKey]
		d.warnf(f.value, f.path, "is less than %s, which can then never be used up", quota.DailyKey)
	}
	return budgets
}

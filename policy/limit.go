package policy

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/weir-dev/weir/quota"
)

// maxName is how many bytes of the keys of a path become its limit's name.
const maxName = 256

// kinds are the fields that limit, in the order in which they are decided.
var kinds = []string{"budget", "limiter", "rate_limit", "quota"}

// limit reads what a descriptor says of the requests that end at it. A descriptor with
// neither a limit nor children says that they are not limited.
func (d *document) limit(fields map[string]field, n *node, keys []string) *Limit {
	if !slices.ContainsFunc(kinds, func(kind string) bool { _, ok := fields[kind]; return ok }) {
		d.idle(fields, n.children != nil)
		if n.children != nil {
			return nil
		}
	}
	l := &Limit{Name: Truncate(strings.Join(keys, "/"), maxName)}
	if f, ok := fields["name"]; ok {
		if n.name = d.text(f); n.name == "" {
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
	if f, ok := fields["expose"]; ok {
		l.Hidden = !d.boolean(f)
	}
	if f, ok := fields["shadow_mode"]; ok {
		l.Shadow = d.boolean(f)
	}
	if f, ok := fields["metadata"]; ok {
		if m, ok := d.value(f).(map[string]any); !ok {
			d.failf(f.value, f.path, "must be a mapping, not %s", describe(f.value))
		} else if len(m) > 0 {
			l.Metadata = m
		}
	}
	if f, ok := fields["budget"]; ok {
		d.origins[n].budget = f
		l.Budget = d.budget(f)
		d.bucketName(fields, n)
	}
	if f, ok := fields["limiter"]; ok {
		l.Limiter = d.limiter(f)
	}
	if f, ok := fields["rate_limit"]; ok {
		d.rateLimit(f, fields, n, l)
	}
	if f, ok := fields["quota"]; ok {
		l.Quota = d.quota(f)
	}
	if f, ok := fields["quota_mode"]; ok && d.boolean(f) {
		l.QuotaMode = d.quotaMode(f, fields, l)
	}
	if n.name != "" {
		l.Name = n.name
	}
	return l
}

// idle tells of fields that stand beside no limit.
func (d *document) idle(fields map[string]field, children bool) {
	for _, name := range []string{"on_error", "expose"} {
		if f, ok := fields[name]; ok {
			d.failf(f.key, f.path, "stands beside no limit")
		}
	}
	idle := []string{"shadow_mode", "quota_mode"}
	if children {
		idle = append(idle, "name", "metadata")
	}
	for _, name := range idle {
		if f, ok := fields[name]; ok {
			d.warnf(f.key, f.path, "has no effect, since no limit stands beside it")
		}
	}
}

// quotaMode reports whether quota_mode: true takes effect.
func (d *document) quotaMode(f field, fields map[string]field, l *Limit) bool {
	for _, kind := range kinds {
		if _, ok := fields[kind]; ok && kind != "rate_limit" {
			d.failf(f.key, f.path, "stands beside a %s; only a rate_limit that stands alone can be exhausted without refusing", kind)
			return false
		}
	}
	switch {
	case l.Unlimited:
		d.warnf(f.key, f.path, "has no effect on what is unlimited")
	case l.RateLimit == nil: // as was told
	case l.Shadow:
		d.warnf(f.key, f.path, "has no effect, since in shadow mode the limit never refuses")
	default:
		return true
	}
	return false
}

func (d *document) budget(f field) *BudgetLimit {
	names := []string{"scope", "per_second", "burst"}
	fields, ok := d.fields(f.value, f.path, names...)
	if !ok {
		return nil
	}
	b := &BudgetLimit{}
	faults := len(d.errs)
	d.need(f, fields, names...)
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
	if len(d.errs) > faults {
		return b
	}
	if err := b.Budget.Validate(); err != nil {
		d.failf(f.value, f.path, "%v", err)
	} else if b.Budget.Burst < 1 {
		f := fields["burst"]
		d.warnf(f.value, f.path, "is less than 1, so a cost of 1 is always refused")
	}
	return b
}

// need faults the fields of a mapping that are missing.
func (d *document) need(of field, fields map[string]field, names ...string) {
	for _, name := range names {
		if _, ok := fields[name]; !ok {
			d.failf(of.key, join(of.path, name), "is missing")
		}
	}
}

// bucketName checks that the value of a budget's descriptor can name a bucket.
func (d *document) bucketName(fields map[string]field, n *node) {
	if n.shared {
		f := fields["budget"]
		d.failf(f.key, f.path, "a budget's bucket is named by the value, which share_threshold leaves out")
	}
	if n.value == "" || n.isPattern() {
		return
	}
	if _, err := ParseBucketKey(n.value); err != nil {
		f := fields["value"]
		d.failf(f.value, f.path, "names the budget's bucket, and %s is %v", describe(f.value), err)
	}
}

func scopeNames() string {
	names := make([]string, 0, len(Scopes()))
	for _, s := range Scopes() {
		names = append(names, string(s))
	}
	return strings.Join(names, ", ")
}

func (d *document) limiter(f field) *LimiterPolicy {
	fields, ok := d.fields(f.value, f.path, "permits", "per", "burst")
	if !ok {
		return nil
	}
	p := &LimiterPolicy{}
	faults := len(d.errs)
	d.need(f, fields, "permits", "per")
	if f, ok := fields["permits"]; ok {
		p.Permits = d.whole(f)
	}
	if f, ok := fields["per"]; ok {
		per, err := parsePeriod(d.text(f))
		if err != nil {
			d.failf(f.value, f.path, "%v", err)
		}
		p.Per = per
	}
	p.Burst = p.Permits
	if f, ok := fields["burst"]; ok {
		p.Burst = d.whole(f)
	}
	if len(d.errs) > faults {
		return p
	}
	if err := p.Validate(); err != nil {
		d.failf(f.value, f.path, "%v", err)
	}
	return p
}

var periodPattern = regexp.MustCompile(`^([0-9]+)(us|ms|s|m|h|d|w)$`)

var periodUnits = map[string]time.Duration{
	"us": time.Microsecond, "ms": time.Millisecond, "s": time.Second, "m": time.Minute,
	"h": time.Hour, "d": 24 * time.Hour, "w": 7 * 24 * time.Hour,
}

// parsePeriod reads the period of a limiter: a whole number and a unit, such as 1s or 5m.
// There are no months or years, since they differ in length.
func parsePeriod(text string) (time.Duration, error) {
	m := periodPattern.FindStringSubmatch(text)
	if m == nil {
		return 0, fmt.Errorf("%q is no period; write a whole number and one of us, ms, s, m, h, d and w, such as 1s, 5m or 1d", text)
	}
	n, err := strconv.ParseInt(m[1], 10, 64)
	unit := periodUnits[m[2]]
	switch {
	case err != nil || n > math.MaxInt64/int64(unit):
		return 0, fmt.Errorf("%q is longer than 292 years", text)
	case n == 0:
		return 0, errors.New("must be above 0")
	}
	return time.Duration(n) * unit, nil
}

// referenceSpans are what the reference counts instead of calendar windows.
var referenceSpans = map[quota.Unit]string{
	quota.Week:  "7 days, from a Thursday",
	quota.Month: "30 days",
	quota.Year:  "365 days",
}

// rateLimit reads a rate_limit, in the reference's sense but for calendar windows and
// larger numbers.
func (d *document) rateLimit(f field, siblings map[string]field, n *node, l *Limit) {
	fields, ok := d.referenceMapping(f.value, f.path, "unit", "requests_per_unit", "unlimited", "name", "replaces")
	if !ok {
		return
	}
	if f, ok := fields["name"]; ok {
		if name := d.text(f); n.name != "" && n.name != name {
			d.failf(f.value, f.path, "the descriptor's name is %q already", n.name)
		} else {
			n.name = name
		}
	}
	if f, ok := fields["unlimited"]; ok {
		l.Unlimited = d.boolean(f)
	}
	d.replaces(fields["replaces"], n, l)
	if l.Unlimited {
		d.unlimited(fields, siblings)
		return
	}
	d.need(f, fields, "unit")
	b := quota.Budget{}
	if f, ok := fields["unit"]; ok {
		if b.Unit, ok = parseUnit(d.text(f)); !ok {
			d.failf(f.value, f.path, "must be second, minute, hour, day, week, month or year, not %s", describe(f.value))
		} else if span := referenceSpans[b.Unit]; span != "" {
			d.warnf(f.value, f.path, "is a %s of the calendar, in UTC; envoyproxy/ratelimit counts spans of %s", b.Unit, span)
		}
	}
	b.Key = b.Unit.String()
	if of, ok := fields["requests_per_unit"]; ok {
		b.Limit = d.count(of)
	} else {
		d.warnf(f.key, join(f.path, "requests_per_unit"), "is missing, which is 0 and allows nothing")
	}
	l.RateLimit = &b
}

// unlimited checks what stands beside unlimited: true.
func (d *document) unlimited(fields, siblings map[string]field) {
	for _, kind := range kinds {
		if _, ok := siblings[kind]; ok && kind != "rate_limit" {
			at := fields["unlimited"]
			d.failf(at.key, at.path, "stands beside a %s, which is a limit", kind)
		}
	}
	if f, ok := fields["unit"]; ok {
		if _, valid := parseUnit(d.text(f)); valid {
			d.failf(f.key, f.path, "stands beside unlimited, which has no unit")
		} else {
			d.warnf(f.key, f.path, "is no unit, and has no effect beside unlimited")
		}
	}
	if f, ok := fields["requests_per_unit"]; ok {
		d.count(f)
		d.warnf(f.key, f.path, "has no effect beside unlimited")
	}
}

// replaces reads the names of the limits that a rate_limit replaces.
func (d *document) replaces(f field, n *node, l *Limit) {
	if f.value == nil {
		return
	}
	for _, item := range d.items(f) {
		fields, ok := d.referenceMapping(item.value, item.path, "name")
		if !ok {
			continue
		}
		name := ""
		f, ok := fields["name"]
		if ok {
			name = d.text(f)
		}
		switch name {
		case "":
			d.failf(item.value, join(item.path, "name"), "is missing or empty")
		case n.name:
			d.failf(f.value, f.path, "is the limit's own name")
		default:
			l.Replaces = append(l.Replaces, name)
			d.origins[n].replaces = append(d.origins[n].replaces, f)
		}
	}
}

func parseUnit(text string) (quota.Unit, bool) {
	for u := quota.Second; u <= quota.Year; u++ {
		if strings.EqualFold(text, u.String()) {
			return u, true
		}
	}
	return 0, false
}

// quotaWindows are the windows that a quota can have, shortest first.
var quotaWindows = []quota.Budget{
	{Key: quota.SecondlyKey, Unit: quota.Second},
	{Key: quota.MinutelyKey, Unit: quota.Minute},
	{Key: quota.HourlyKey, Unit: quota.Hour},
	{Key: quota.DailyKey, Unit: quota.Day},
	{Key: quota.WeeklyKey, Unit: quota.Week},
	{Key: quota.MonthlyKey, Unit: quota.Month},
	{Key: quota.YearlyKey, Unit: quota.Year},
}

func (d *document) quota(f field) []quota.Budget {
	keys := make([]string, len(quotaWindows))
	for i, b := range quotaWindows {
		keys[i] = b.Key
	}
	faults := len(d.errs)
	fields, ok := d.fields(f.value, f.path, keys...)
	if !ok {
		return nil
	}
	if len(fields) == 0 && len(d.errs) == faults {
		d.failf(f.key, f.path, "needs one or more of %s", strings.Join(keys, ", "))
	}
	var budgets []quota.Budget
	for _, b := range quotaWindows {
		f, ok := fields[b.Key]
		if !ok {
			continue
		}
		faults := len(d.errs)
		b.Limit = d.whole(f)
		i := slices.IndexFunc(budgets, func(shorter quota.Budget) bool { return b.Limit < shorter.Limit })
		switch {
		case len(d.errs) > faults:
		case b.Limit == 0:
			d.warnf(f.value, f.path, "is 0 and allows nothing")
		case i >= 0 && budgets[i].Unit == quota.Week:
			// A week can lie in two months or years.
			d.warnf(f.value, f.path, "is less than %s", budgets[i].Key)
		case i >= 0:
			d.warnf(f.value, f.path, "is less than %s, which can then never be used up", budgets[i].Key)
		}
		budgets = append(budgets, b)
	}
	return budgets
}

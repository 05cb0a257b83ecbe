package filter

import (
	"strconv"

	"github.com/weir-dev/weir/filter/config"
)

// An outcome is what became of a request that a rule applied to. The set is closed.
type outcome int

const (
	allowed outcome = iota
	refused
	unavailable
	allowedOnError
	invalid
	tooLarge
	outcomes // their number
)

func (o outcome) String() string {
	return [outcomes]string{"allowed", "refused", "unavailable", "allowed_on_error", "invalid", "too_large"}[o]
}

// A reason is why a cost is missing.
type reason int

const (
	absent reason = iota
	repeated
	malformed
	outOfRange
	reasons // their number
)

func (r reason) String() string {
	return [reasons]string{"absent", "repeated", "malformed", "out_of_range"}[r]
}

// A refundOutcome is what became of a refund.
type refundOutcome int

const (
	refundSent refundOutcome = iota
	refundFailed
	refundLost
	refundOutcomes // their number
)

func (o refundOutcome) String() string {
	return [refundOutcomes]string{"sent", "failed", "lost"}[o]
}

// counters are the numbers of a plugin's metrics.
type counters struct {
	rules   []ruleCounters
	refunds [refundOutcomes]uint32
}

type ruleCounters struct {
	requests [outcomes]uint32
	missing  [reasons]uint32
}

// define names a configuration's metrics. Envoy's stats have no labels: the parts from
// "_rule=" and "_outcome=" on are for the stats_tags of its bootstrap.
func (v *vm) define(cfg *config.Config) counters {
	c := counters{rules: make([]ruleCounters, len(cfg.Rules))}
	for i := range cfg.Rules {
		rule := "_rule=" + cfg.Rules[i].Name
		for o := range outcomes {
			c.rules[i].requests[o] = v.counter("weir_filter_requests" + rule + "_outcome=" + o.String())
		}
		for r := range reasons {
			c.rules[i].missing[r] = v.counter("weir_filter_cost_missing" + rule + "_reason=" + r.String())
		}
	}
	for o := range refundOutcomes {
		c.refunds[o] = v.counter("weir_filter_refunds_outcome=" + o.String())
	}
	// A version that is no number is for people only, and a gauge is a number.
	if version, err := strconv.ParseUint(cfg.Version, 10, 63); err == nil {
		const name = "weir_filter_config_version"
		gauge, known := v.metrics[name]
		if !known {
			gauge = v.host.defineGauge(name)
			v.metrics[name] = gauge
		}
		v.host.setGauge(gauge, version)
	}
	return c
}

func (v *vm) counter(name string) uint32 {
	id, known := v.metrics[name]
	if !known {
		id = v.host.defineCounter(name)
		v.metrics[name] = id
	}
	return id
}

// count counts an outcome for each rule with a charge. Charges are in the rules' order.
func (s *stream) count(o outcome) {
	last := -1
	for i := range s.charges {
		if rule := s.charges[i].rule; rule != last {
			s.countRule(rule, o)
			last = rule
		}
	}
}

func (s *stream) countRule(rule int, o outcome) {
	s.host.count(s.plugin.counters.rules[rule].requests[o])
}

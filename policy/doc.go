// Package policy holds what may be spent by whom: policy files, their strict
// parsing, the matching of a request's descriptors, and the question that the
// service asks of the store, a [Request], with its answer, a [Verdict].
//
// A [Policy] is one domain's file. [Parse] makes one, or says by file, line, column
// and field what is wrong; there is no invalid Policy. A [Set] holds the policies of
// all domains. [Policy.Match] finds the [Limit] of a descriptor, [Replace] settles
// which of a request's limits replace others, and a [Match] names the counters.
//
// # The file
//
// The format is that of envoyproxy/ratelimit ("the reference"), whose files load
// unchanged, with Weir's own limits beside rate_limit. A file is one YAML document:
//
//	domain: shop                      # the namespace that requests name; required
//	headers: {on_allowed: true, style: ietf}
//	max_consumers: 50_000
//	descriptors:
//	  - key: consumer
//	    limiter: {permits: 100, per: 1s, burst: 200}
//	    quota: {daily: 100_000, monthly: 2_000_000}
//	  - key: consumer
//	    value: alice
//	    rate_limit: {unit: hour, requests_per_unit: 5000, name: vip}
//	filter: {}                        # the rules of Envoy's filter: see filter/config
//
// At the top stand:
//
//   - domain, not empty.
//   - descriptors, a list; see below.
//   - headers: on_allowed: true puts rate limit headers on allowed responses too. style
//     is epoch (X-RateLimit-Reset is an epoch second; the default), delta (seconds to
//     go) or ietf (RateLimit-Policy and RateLimit, as structured fields).
//   - max_consumers, from 1: how many consumers the domain enrols that no descriptor
//     spells out; 100_000 by default. The rest share a counter for each descriptor.
//   - filter, which package filter/config knows.
//
// A descriptor has:
//
//   - key, required, and value. A * in either stands for any run of bytes. An empty value
//     is none: every value matches. Numbers, true and dates are taken as they are written.
//   - descriptors, the next level.
//   - any of budget, limiter, rate_limit and quota; all of them apply. With none of them
//     and no descriptors, requests that end here are not limited.
//   - name, for answers and logs, and for replaces. Defaults to the keys of the path, joined
//     by "/", which is no name for replaces.
//   - on_error: allow lets requests pass when the store can't answer. Defaults to deny.
//   - expose: false leaves the limit out of the headers that clients see. Defaults to true.
//   - shadow_mode: true: decided and charged, but never refuses.
//   - quota_mode: true, beside a rate_limit that stands alone: such limits refuse a request
//     only if all of its descriptors that have one are exhausted.
//   - share_threshold: true, where there is a *: all values that match share one counter.
//   - metadata, any mapping, for the dynamic metadata of requests that match.
//   - detailed_metric and value_to_metric, which the reference has, and which have no
//     effect: Weir's metrics never carry what a client chooses.
//
// An amount is a whole number, may have underscores and a unit of bytes (kB, MB, GB, TB,
// KiB, MiB, GiB, TiB), and is at most 2^53: 500, 100_000, 16KiB, 1.5 MB. Those of a
// budget may be fractions.
//
// # The limits
//
// budget: {scope, per_second, burst}, all required, is a token bucket of the platform's
// rate budgets: per_second units come back, up to burst. The last value of the path is the
// UUID of the Node or the Domain whose bucket it is; scope is one of [Scopes]. It must
// refill within an hour; see [Budget].
//
// limiter: {permits, per, burst} is a token bucket for any key: permits come back evenly
// over each per, up to burst, which defaults to permits. per is a whole number and a unit:
// us, ms, s, m, h, d (24 hours) or w (7 days), such as 1s, 5m or 30d. Months and years,
// which differ in length, are windows and no periods. See [LimiterPolicy] for the bounds.
//
// rate_limit: {unit, requests_per_unit, unlimited, name, replaces} is a window of the
// calendar, in UTC, as the reference has it. unit is second, minute, hour, day, week,
// month or year, in any case. requests_per_unit is 0, which allows nothing, where it is
// missing; it may go to 2^53, where the reference stops at 2^32-1. unlimited: true needs
// no unit and says that nothing is counted. name is the descriptor's. replaces is a list of
// {name}: see [Replace].
//
// quota: {secondly, minutely, hourly, daily, weekly, monthly, yearly}, at least one, is a
// consumer's budget over windows of the calendar, in UTC: all must hold. The consumer,
// the values that matched, is enrolled in the store and its usage is metered.
//
// # Strictness
//
// An unknown field, a field that stands twice, an unknown unit and a number out of range are
// faults; all of a file are reported at once. A descriptor that stands twice is a fault if
// the two differ; if they say the same it is only warned of. As in the
// reference, a field of its format that is out of place is ignored, and so is a second
// YAML document; both are warned of, as is whatever loads but is likely not meant, and
// where the same file means something else to the reference:
//
//   - Keys and values are never joined, so they can't collide: the reference takes (a, b_c)
//     and (a_b, c) for one.
//   - Weeks, months and years are those of the calendar, not spans of 7, 30 and 365 days.
//   - A refused request charges nothing.
//   - Limits that replace each other in a circle, which would all be dropped, are refused,
//     and so is a field that stands twice, of which the reference keeps the last.
//   - A change of unit starts a new count; in the reference the new window may inherit the
//     old one's.
//
// # Matching
//
// A descriptor is matched entry by entry, from the top of the tree. At each level an
// exact key and value comes first, then the patterns in the order of the file, then
// the key alone. There is no way back: what is chosen at one level is not undone at
// the next. A limit applies only where the last entry ends. Matching minds case. A key
// that is repeated in a request's descriptor is matched like any other, by its place.
//
// # Identity
//
// A counter belongs to the kind of its limit, the domain and the matched path: each key
// with its value, or with the pattern's text where all values share it; a window's also to
// its unit and start. Keys and values never run into each other, whatever they contain.
// Neither names nor places in the file matter, so usage survives any edit that keeps the
// path and the kind, and limits can be changed under use.
//
// Nothing here reads a clock, a file or the network. All types are safe for concurrent
// use, once they are made.
package policy

package ratelimitsvc

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc/status"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// A UsageReader reads what consumers have used, apart from decisions: whoever looks
// must not make a request wait. It must be safe for concurrent use.
type UsageReader interface {
	// Consumers returns a page of consumers, in the order of their IDs.
	Consumers(ctx context.Context, q policy.ConsumersQuery) ([]policy.ConsumerUsage, error)
}

// Handler returns the service's HTTP side: GET /healthcheck, /metrics and
// /quotas/usage, and POST /json.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthcheck", s.serveHealth)
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.config.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /quotas/usage", s.serveUsage)
	mux.HandleFunc("POST /json", s.serveJSON)
	return mux
}

func (s *Service) serveHealth(w http.ResponseWriter, _ *http.Request) {
	switch {
	case s.healthy.Load():
		_, _ = w.Write([]byte("OK")) // the client may be gone
	case s.draining.Load():
		http.Error(w, "draining", http.StatusInternalServerError)
	default:
		http.Error(w, "the store does not answer", http.StatusInternalServerError)
	}
}

const (
	defaultPage = 100 // consumers

	// maxUsageReads is how many requests for usage may read the store at once, so that
	// connections are left for decisions however many look.
	maxUsageReads = 2
)

// usagePage is the answer of /quotas/usage.
type usagePage struct {
	Now       int64           `json:"now"` // epoch second of the readings
	Consumers []consumerUsage `json:"consumers"`
	// Next is what `after` must be for the next page; absent on the last.
	Next string `json:"next,omitempty"`
}

type consumerUsage struct {
	Domain  string              `json:"domain"`
	Entries []usageEntry        `json:"entries"`
	Budgets []quota.BudgetUsage `json:"budgets"`
	// Cut tells that the entries are too long to be kept whole, so that no policy's
	// budgets can be put beside this consumer: ask for it by its entries.
	Cut bool `json:"cut,omitempty"`
}

type usageEntry struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// serveUsage lists a domain's consumers and what they have used of the quotas in
// force. Query: domain, which may be absent where there is only one; and one
// entry=key=value a level for a single consumer, or limit (1 to 1000, 100 by default)
// and after to page through all. A client sees the domains that it may ask for.
func (s *Service) serveUsage(w http.ResponseWriter, r *http.Request) {
	q, err := parseUsageQuery(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	domain := s.domainOf(q)
	client, err := s.permit(httpCaller(r), domain)
	if err != nil {
		http.Error(w, status.Convert(err).Message(), httpCode(err))
		return
	}
	p, err := s.policyOf(domain, client)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	query := policy.ConsumersQuery{
		Domain: p.Domain, After: q.after, Limit: q.limit, Units: p.QuotaUnits(), Now: s.config.Now(),
	}
	var one policy.Consumer
	if q.one != nil {
		if m, ok := p.Match(q.one); ok {
			one = *m.Consumer()
		}
		query.Only, query.After, query.Limit = []policy.CounterID{one.ID}, policy.CounterID{}, 1
	}
	answer := usagePage{Now: query.Now.Unix(), Consumers: []consumerUsage{}}
	var page []policy.ConsumerUsage
	if q.one == nil || one.Entries != nil {
		if page, err = s.readUsage(r.Context(), query); err != nil {
			s.usageFailed(w, r, err)
			return
		}
	}
	if q.one == nil && len(page) == query.Limit {
		answer.Next = hex.EncodeToString(page[query.Limit-1].ID[:])
	}
	if one.Entries != nil && len(page) == 0 { // never charged
		page = []policy.ConsumerUsage{{ID: one.ID, Used: make([]int64, len(query.Units))}}
	}
	for _, c := range page {
		entries := unescape(c.Entries)
		if one.Entries != nil {
			entries = one.Entries // whole, where the store's are cut for people
		}
		if usage, ok := usageOf(p, c, entries, query); ok {
			answer.Consumers = append(answer.Consumers, usage)
		}
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		s.config.Logger.LogAttrs(r.Context(), slog.LevelDebug, "writing usage", slog.Any("err", err))
	}
}

// domainOf returns the domain that a query names, or the only one if it names none.
func (s *Service) domainOf(q usageQuery) string {
	if domains := s.config.Policies.Domains(); q.domain == "" && len(domains) == 1 {
		return domains[0]
	}
	return q.domain
}

// policyOf returns the policy of a domain; the error tells a client of those that it may ask
// for.
func (s *Service) policyOf(domain string, client policy.Client) (*policy.Policy, error) {
	p, ok := s.config.Policies.Domain(domain)
	if !ok {
		domains := slices.DeleteFunc(s.config.Policies.Domains(), func(d string) bool { return !client.MayAsk(d) })
		return nil, fmt.Errorf("domain: must be one of %s, not %q", strings.Join(domains, ", "), domain)
	}
	return p, nil
}

var errUsageBusy = errors.New("others are reading the usage")

// readUsage reads a page, unless as many others do as may.
func (s *Service) readUsage(ctx context.Context, query policy.ConsumersQuery) ([]policy.ConsumerUsage, error) {
	select {
	case s.usageReads <- struct{}{}:
		defer func() { <-s.usageReads }()
		return s.config.Usage.Consumers(ctx, query)
	default:
		return nil, errUsageBusy
	}
}

func (s *Service) usageFailed(w http.ResponseWriter, r *http.Request, err error) {
	if errors.Is(err, errUsageBusy) {
		w.Header().Set("Retry-After", "1")
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	s.config.Logger.LogAttrs(r.Context(), slog.LevelWarn, "reading usage", slog.Any("err", err))
	http.Error(w, "the store does not answer", http.StatusInternalServerError)
}

// usageOf renders a consumer's use of the quota in force for it; ok is false when the
// policy no longer has one. That the entries match is not enough, for they may have been
// cut, or the policy may count them elsewhere by now: they must give the consumer's id.
func usageOf(p *policy.Policy, c policy.ConsumerUsage, entries policy.Descriptor, query policy.ConsumersQuery) (usage consumerUsage, ok bool) {
	usage = consumerUsage{Domain: p.Domain, Entries: usageEntries(entries), Budgets: []quota.BudgetUsage{}}
	m, ok := p.Match(entries)
	if !ok || len(m.Limit.Quota) == 0 || m.Consumer().ID != c.ID {
		usage.Cut = wasCut(c.Entries)
		return usage, usage.Cut
	}
	usage.Budgets = quota.Usage(m.Limit.Quota, usedOf(m.Limit.Quota, c, query.Units), query.Now)
	return usage, true
}

// unescape undoes what [policy.ConsumerUsage] says of its entries, but for what is cut.
func unescape(entries []policy.Entry) policy.Descriptor {
	whole := make(policy.Descriptor, len(entries))
	for i, e := range entries {
		whole[i] = policy.Entry{Key: unescapeText(e.Key), Value: unescapeText(e.Value)}
	}
	return whole
}

func unescapeText(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	// Quotes alone are not escaped.
	text, err := strconv.Unquote(`"` + strings.ReplaceAll(s, `"`, `\"`) + `"`)
	if err != nil {
		return s
	}
	return text
}

// wasCut reports whether any of the entries may be shorter than what was matched.
func wasCut(entries []policy.Entry) bool {
	return slices.ContainsFunc(entries, func(e policy.Entry) bool {
		return strings.HasSuffix(e.Key, "…") || strings.HasSuffix(e.Value, "…")
	})
}

// A usageQuery is a page of consumers, or one.
type usageQuery struct {
	domain string
	one    policy.Descriptor
	limit  int
	after  policy.CounterID
}

func parseUsageQuery(query url.Values) (usageQuery, error) {
	q := usageQuery{domain: query.Get("domain"), limit: defaultPage}
	for _, text := range query["entry"] {
		key, value, ok := strings.Cut(text, "=")
		if !ok {
			return q, fmt.Errorf("entry: must be key=value, not %q", text)
		}
		q.one = append(q.one, policy.Entry{Key: key, Value: value})
	}
	if text := query.Get("limit"); text != "" {
		limit, err := strconv.Atoi(text)
		if err != nil || limit < 1 || limit > policy.MaxConsumers {
			return q, fmt.Errorf("limit: must be a number from 1 to %d, not %q", policy.MaxConsumers, text)
		}
		q.limit = limit
	}
	if text := query.Get("after"); text != "" {
		id, err := hex.DecodeString(text)
		if err != nil || len(id) != len(q.after) {
			return q, fmt.Errorf("after: must be the next of an earlier page, not %q", text)
		}
		copy(q.after[:], id)
	}
	return q, nil
}

func usageEntries(d []policy.Entry) []usageEntry {
	entries := make([]usageEntry, len(d))
	for i, e := range d {
		entries[i] = usageEntry{Key: e.Key, Value: e.Value}
	}
	return entries
}

package ratelimitsvc

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
)

// A UsageReader lists consumers. It must be safe for concurrent use.
type UsageReader interface {
	// Consumers returns at most limit consumers of a domain, in the order of their
	// IDs, from the first above after.
	Consumers(ctx context.Context, domain string, after policy.ConsumerID, limit int) ([]policy.Consumer, error)
}

// Handler returns the service's HTTP side: GET /healthcheck, /metrics and
// /quotas/usage.
func (s *Service) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthcheck", s.serveHealth)
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.config.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /quotas/usage", s.serveUsage)
	return mux
}

func (s *Service) serveHealth(w http.ResponseWriter, _ *http.Request) {
	if !s.healthy.Load() {
		http.Error(w, "the store does not answer", http.StatusInternalServerError)
		return
	}
	_, _ = w.Write([]byte("OK")) // the client may be gone
}

const (
	defaultPage = 100
	maxPage     = 1000
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
}

type usageEntry struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// serveUsage lists a domain's consumers and what they have used of the quotas in
// force. Query: domain, which may be absent where there is only one; and one
// entry=key=value a level for a single consumer, or limit (1 to 1000, 100 by default)
// and after to page through all.
func (s *Service) serveUsage(w http.ResponseWriter, r *http.Request) {
	q, err := parseUsageQuery(r.URL.Query())
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	p, err := s.policyOf(q.domain)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	answer := usagePage{Consumers: []consumerUsage{}}
	var consumers []policy.Consumer
	if q.one != nil {
		consumers = []policy.Consumer{{Entries: q.one}}
	} else {
		consumers, err = s.config.Usage.Consumers(r.Context(), p.Domain, q.after, q.limit)
		if err != nil {
			s.usageFailed(w, r, err)
			return
		}
		if len(consumers) == q.limit {
			answer.Next = hex.EncodeToString(consumers[q.limit-1].ID[:])
		}
	}
	// A cost of nothing spends nothing and reads all.
	reading := policy.Request{Now: policy.TruncateNow(s.config.Now()), Quotas: quotasOf(p, consumers)}
	verdict := policy.Verdict{}
	if len(reading.Quotas) > 0 {
		if verdict, err = s.config.Decider.Decide(r.Context(), reading); err != nil {
			s.usageFailed(w, r, err)
			return
		}
	}
	answer.Now = reading.Now.Unix()
	for i, q := range reading.Quotas {
		answer.Consumers = append(answer.Consumers, consumerUsage{
			Domain:  p.Domain,
			Entries: usageEntries(q.Consumer.Entries),
			Budgets: quota.Usage(q.Budgets, verdict.Quotas[i].Used, reading.Now),
		})
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.NewEncoder(w).Encode(answer); err != nil {
		s.config.Logger.LogAttrs(r.Context(), slog.LevelDebug, "writing usage", slog.Any("err", err))
	}
}

// policyOf returns the policy of a domain, or the only one when no domain is named.
func (s *Service) policyOf(domain string) (*policy.Policy, error) {
	domains := s.config.Policies.Domains()
	if domain == "" && len(domains) == 1 {
		domain = domains[0]
	}
	p, ok := s.config.Policies.Domain(domain)
	if !ok {
		return nil, fmt.Errorf("domain: must be one of %s, not %q", strings.Join(domains, ", "), domain)
	}
	return p, nil
}

func (s *Service) usageFailed(w http.ResponseWriter, r *http.Request, err error) {
	s.config.Logger.LogAttrs(r.Context(), slog.LevelWarn, "reading usage", slog.Any("err", err))
	http.Error(w, "the store does not answer", http.StatusInternalServerError)
}

// quotasOf finds the quotas in force for the consumers. One whose quota the policy no
// longer has is left out.
func quotasOf(p *policy.Policy, consumers []policy.Consumer) []policy.QuotaDebit {
	quotas := make([]policy.QuotaDebit, 0, len(consumers))
	for _, c := range consumers {
		m, ok := p.Match(c.Entries)
		if !ok || len(m.Limit.Quota) == 0 {
			continue
		}
		if c.ID == (policy.ConsumerID{}) {
			c = m.Consumer()
		}
		quotas = append(quotas, policy.QuotaDebit{Consumer: c, Budgets: m.Limit.Quota})
	}
	return quotas
}

// A usageQuery is a page of consumers, or one.
type usageQuery struct {
	domain string
	one    policy.Descriptor
	limit  int
	after  policy.ConsumerID
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
		if err != nil || limit < 1 || limit > maxPage {
			return q, fmt.Errorf("limit: must be a number from 1 to %d, not %q", maxPage, text)
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

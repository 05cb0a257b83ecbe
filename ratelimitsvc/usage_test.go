package ratelimitsvc_test

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/ratelimitsvc"
)

// What the store keeps of a consumer for people is escaped, or cut: the first is undone,
// and the second never taken for another consumer's name.
func TestUsageOfAnyNames(t *testing.T) {
	t.Parallel()

	const text = `
domain: test
descriptors:
  - key: consumer
    quota: {daily: 10}
  - key: consumer
    value: long…
    quota: {daily: 99}
`
	p, err := policy.Parse("test.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	s := &store{}
	names := []string{"a\x00b", `back\slash`, `\x00`, `"quoted"`, "\xff", "new\nline", "…"}
	id := func(name string) policy.CounterID {
		m, ok := p.Match(policy.Descriptor{{Key: "consumer", Value: name}})
		if !ok {
			t.Fatalf("%q matches nothing", name)
		}
		return m.Consumer().ID
	}
	for i, name := range names {
		kept := strconv.QuoteToGraphic(name)
		s.known = append(s.known, policy.ConsumerUsage{
			ID: id(name), Used: []int64{int64(i)},
			Entries: []policy.Entry{{Key: "consumer", Value: strings.ReplaceAll(kept[1:len(kept)-1], `\"`, `"`)}},
		})
	}
	// Cut, it reads as another one that the policy names.
	s.known = append(s.known, policy.ConsumerUsage{
		ID: id("longer than the store keeps"), Used: []int64{7}, Entries: []policy.Entry{{Key: "consumer", Value: "long…"}},
	})

	code, body := get(t, newService(t, s, text), "/quotas/usage")
	if code != http.StatusOK {
		t.Fatalf("GET = %d %s", code, body)
	}
	var page struct {
		Consumers []struct {
			Entries []struct{ Value string }
			Budgets []struct{ Limit, Used int64 }
			Cut     bool
		}
	}
	if err := json.Unmarshal([]byte(body), &page); err != nil {
		t.Fatal(err)
	}
	if len(page.Consumers) != len(names)+1 {
		t.Fatalf("%d consumers, want %d: %s", len(page.Consumers), len(names)+1, body)
	}
	for i, name := range names {
		c := page.Consumers[i]
		// JSON holds no bytes that are no UTF-8.
		if want := strings.ToValidUTF8(name, "\ufffd"); c.Entries[0].Value != want || len(c.Budgets) != 1 || c.Budgets[0].Used != int64(i) || c.Budgets[0].Limit != 10 {
			t.Errorf("%q: %+v", name, c)
		}
	}
	if last := page.Consumers[len(names)]; !last.Cut || len(last.Budgets) != 0 || last.Entries[0].Value != "long…" {
		t.Errorf("a name that was cut: %+v", last)
	}
	// Asked for by its name, it is whole.
	_, body = get(t, newService(t, s, text), "/quotas/usage?entry="+url.QueryEscape("consumer=longer than the store keeps"))
	if !strings.Contains(body, `"limit":10,"used":7`) || strings.Contains(body, "cut") {
		t.Errorf("asked for by its name: %s", body)
	}
}

// Whoever may not ask for a domain does not see what its consumers use.
func TestUsagePermissions(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		name, address, query string
		client               policy.Client
		code                 int
		says                 string
	}{
		{name: "any domain", address: "127.0.0.1:4711", query: "domain=test", code: http.StatusOK},
		{name: "its own", address: "127.0.0.1:4711", query: "domain=test", client: policy.Client{Domains: []string{"test"}}, code: http.StatusOK},
		{name: "another", address: "127.0.0.1:4711", query: "domain=test", client: policy.Client{Domains: []string{"other"}}, code: http.StatusForbidden, says: "domain:"},
		{name: "the only one, unnamed", address: "127.0.0.1:4711", client: policy.Client{Domains: []string{"other"}}, code: http.StatusForbidden, says: "domain:"},
		{name: "one that is not there", address: "127.0.0.1:4711", query: "domain=x", client: policy.Client{Domains: []string{"other"}}, code: http.StatusForbidden, says: "domain:"},
		{name: "one consumer", address: "127.0.0.1:4711", query: "entry=consumer=a", client: policy.Client{Domains: []string{"other"}}, code: http.StatusForbidden, says: "domain:"},
		{name: "a client that is not in the file", address: "192.0.2.1:4711", query: "domain=test", code: http.StatusForbidden, says: "client:"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := &store{known: []policy.ConsumerUsage{}}
			r := httptest.NewRequest(http.MethodGet, "/quotas/usage?"+test.query, http.NoBody)
			r.RemoteAddr = test.address
			recorder := httptest.NewRecorder()
			newService(t, s, kindsPolicy, allowed(test.client)).Handler().ServeHTTP(recorder, r)
			body := recorder.Body.String()
			if recorder.Code != test.code || !strings.Contains(body, test.says) {
				t.Errorf("GET = %d %s, want %d with %q", recorder.Code, body, test.code, test.says)
			}
		})
	}
}

// held is a store whose readings last until they are let go.
type held struct {
	store

	reading, release chan struct{}
}

func (h *held) Consumers(ctx context.Context, q policy.ConsumersQuery) ([]policy.ConsumerUsage, error) {
	h.reading <- struct{}{}
	<-h.release
	return h.store.Consumers(ctx, q)
}

// However many look at the usage, two at once read the store; the others are told to come
// again.
func TestUsageIsReadByTwoAtOnce(t *testing.T) {
	t.Parallel()

	h := &held{reading: make(chan struct{}, 3), release: make(chan struct{})}
	service := newService(t, &h.store, kindsPolicy, func(c *ratelimitsvc.Config) { c.Usage = h })
	codes := make(chan int, 2)
	for range 2 {
		go func() {
			recorder := httptest.NewRecorder()
			service.Handler().ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/quotas/usage", http.NoBody))
			codes <- recorder.Code
		}()
		<-h.reading
	}
	recorder := httptest.NewRecorder()
	third := make(chan struct{})
	go func() {
		defer close(third)
		service.Handler().ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/quotas/usage", http.NoBody))
	}()
	select {
	case <-third:
		if recorder.Code != http.StatusServiceUnavailable || recorder.Header().Get("Retry-After") != "1" {
			t.Errorf("a third = %d, retry-after %q, want 503 and 1", recorder.Code, recorder.Header().Get("Retry-After"))
		}
	case <-h.reading:
		t.Error("a third reads the store")
	}
	close(h.release)
	<-third
	for range 2 {
		if code := <-codes; code != http.StatusOK {
			t.Errorf("one of two = %d", code)
		}
	}
	if code, body := get(t, service, "/quotas/usage"); code != http.StatusOK {
		t.Errorf("after them = %d %s", code, body)
	}
}

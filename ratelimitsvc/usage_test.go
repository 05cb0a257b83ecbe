package ratelimitsvc_test

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/weir-dev/weir/policy"
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

package ratelimitsvc_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/ratelimitsvc"
)

func post(t *testing.T, service *ratelimitsvc.Service, body io.Reader, receipts ...string) (code int, header http.Header, text string) {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, "/json", body)
	r.RemoteAddr = "127.0.0.1:4711"
	for _, receipt := range receipts {
		r.Header.Add(ratelimitsvc.ReceiptKey, receipt)
	}
	recorder := httptest.NewRecorder()
	service.Handler().ServeHTTP(recorder, r)
	return recorder.Code, recorder.Header(), recorder.Body.String()
}

// PEERS C.6: the protocol as JSON, with the status of HTTP.
func TestJSON(t *testing.T) {
	t.Parallel()

	const (
		path     = `{"domain": "test", "descriptors": [{"entries": [{"key": "path", "value": "/"}]}]}`
		refunded = `{"domain": "test", "descriptors": [{"entries": [{"key": "path", "value": "/"}], "isNegativeHits": true}]}`
	)
	for _, test := range []struct {
		name, body string
		verdict    policy.Verdict
		err        error
		receipts   []string
		code       int
		says       string
	}{
		{name: "allowed", body: path, verdict: policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1)}}, code: http.StatusOK},
		{name: "refused", body: path, verdict: policy.Verdict{Quotas: []policy.QuotaState{reservation(0, 1000)}}, code: http.StatusTooManyRequests},
		{name: "a refund", body: refunded, verdict: policy.Verdict{Allowed: true, Quotas: []policy.QuotaState{reservation(-1, 1)}}, code: http.StatusOK},
		{name: "a refund with a malformed receipt", body: refunded, receipts: []string{"x"}, code: http.StatusBadRequest, says: ratelimitsvc.ReceiptKey},
		{name: "the store is down", body: path, err: errDown, code: http.StatusInternalServerError, says: "the rate limit store did not answer"},
		{name: "no JSON", body: "{", code: http.StatusBadRequest},
		{name: "nothing", body: "", code: http.StatusBadRequest},
		{name: "an unknown field", body: `{"domian": "test"}`, code: http.StatusBadRequest, says: "domian"},
		{name: "no domain", body: "{}", code: http.StatusBadRequest, says: "domain: is empty"},
		{name: "an override", body: `{"domain": "test", "descriptors": [{"entries": [{"key": "path"}], "limit": {"requestsPerUnit": 5, "unit": "HOUR"}}]}`, code: http.StatusForbidden, says: "descriptors[0].limit"},
		{name: "too long", body: `{"domain": "` + strings.Repeat("x", 1<<20) + `"}`, code: http.StatusRequestEntityTooLarge},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			s := &store{verdict: test.verdict, err: test.err}
			code, header, body := post(t, newService(t, s, kindsPolicy, allowed(policy.Client{Refunds: true})), strings.NewReader(test.body), test.receipts...)
			if code != test.code || !strings.Contains(body, test.says) || len(body) > 4096 {
				t.Fatalf("POST /json = %d %.300s, want %d with %q", code, body, test.code, test.says)
			}
			limited := header.Get("X-RateLimit-Limit") + header.Get("Retry-After")
			switch test.code {
			case http.StatusOK, http.StatusTooManyRequests:
				answer := &rlsv3.RateLimitResponse{}
				if err := protojson.Unmarshal([]byte(body), answer); err != nil {
					t.Fatal(err)
				}
				refused := test.code == http.StatusTooManyRequests
				if len(answer.GetStatuses()) != 1 || (answer.GetOverallCode() == rlsv3.RateLimitResponse_OVER_LIMIT) != refused || (limited != "") != refused {
					t.Errorf("the answer is %v, with headers %v", answer, header)
				}
			default:
				if limited != "" {
					t.Errorf("an error has rate headers: %v", header)
				}
			}
		})
	}
}

// A body that breaks off is the client's fault, and a store that fails is never told of in
// detail.
func TestJSONBrokenBody(t *testing.T) {
	t.Parallel()

	code, _, _ := post(t, newService(t, &store{}, kindsPolicy), io.MultiReader(strings.NewReader("{"), &broken{}))
	if code != http.StatusBadRequest {
		t.Errorf("POST /json = %d, want 400", code)
	}
	s := &store{err: errors.New("password for weir@10.0.0.1")}
	if _, _, body := post(t, newService(t, s, kindsPolicy), strings.NewReader(`{"domain": "test", "descriptors": [{"entries": [{"key": "path"}]}]}`)); strings.Contains(body, "password") {
		t.Errorf("the client is told %s", body)
	}
}

type broken struct{}

func (*broken) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

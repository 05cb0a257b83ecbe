package ratelimitsvc_test

import (
	"context"
	"encoding/binary"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	rlsv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/weir-dev/weir/policy"
	"github.com/weir-dev/weir/quota"
	"github.com/weir-dev/weir/ratelimitsvc"
)

// anything is a Decider whose verdicts have the right shape and are otherwise whatever a
// store could say. What that is follows from the context.
type anything struct{ store }

type seedKey struct{}

// chance is a sequence of numbers.
type chance struct{ seed uint64 }

func (c *chance) next(n int64) int64 {
	c.seed = c.seed*6364136223846793005 + 1442695040888963407
	return int64(c.seed>>33) % n
}

func (*anything) Decide(ctx context.Context, req policy.Request) (policy.Verdict, error) {
	seed, _ := ctx.Value(seedKey{}).(uint64)
	c := &chance{seed: seed}
	switch c.next(16) {
	case 0:
		return policy.Verdict{}, errors.New("down")
	case 1:
		return policy.Verdict{}, context.DeadlineExceeded
	}
	return c.verdict(&req), nil
}

func (c *chance) verdict(req *policy.Request) policy.Verdict {
	v := policy.Verdict{Allowed: true}
	at := func() time.Time { return req.Now.Add(time.Duration(c.next(1e12) - 5e11)) }
	for _, d := range req.Budgets {
		covered := d.Cost <= 0 || c.next(2) == 0
		v.Allowed = v.Allowed && covered
		v.Budgets = append(v.Budgets, policy.BudgetState{
			Covered: covered, Tokens: d.Budget.Burst * float64(c.next(1000)) / 999, RefilledAt: at(),
		})
	}
	for _, d := range req.Limiters {
		covered := d.Cost <= 0 || c.next(2) == 0
		v.Allowed = v.Allowed && covered
		v.Limiters = append(v.Limiters, policy.LimiterState{
			Covered: covered, Level: d.Policy.Capacity() / 999 * c.next(1000), RefilledAt: at(),
		})
	}
	optionals, refusing := 0, 0
	for _, d := range req.Quotas {
		s := policy.QuotaState{Reservation: quota.Reservation{Denied: -1, Used: make([]int64, len(d.Budgets))}}
		for i := range s.Used {
			s.Used[i] = c.next(policy.MaxUnits)
		}
		if d.Cost > 0 && c.next(2) == 0 {
			s.Denied = int(c.next(int64(len(d.Budgets))))
		}
		if d.Optional {
			optionals++
			if s.Denied >= 0 {
				refusing++
			}
		} else {
			v.Allowed = v.Allowed && s.Denied < 0
		}
		if d.Consumer != nil && s.Denied < 0 {
			s.Unknown, s.Overflow = c.next(8) == 0, c.next(8) == 0
		}
		v.Quotas = append(v.Quotas, s)
	}
	v.Allowed = v.Allowed && (optionals == 0 || refusing < optionals)
	for i := range req.Shadows {
		v.Shadows = append(v.Shadows, c.verdict(&req.Shadows[i]))
	}
	return v
}

// fuzzed returns a service for each style of headers.
func fuzzed(f *testing.F) []*ratelimitsvc.Service {
	f.Helper()
	var services []*ratelimitsvc.Service
	for _, style := range []string{"epoch", "delta", "ietf"} {
		services = append(services, newService(f, &store{}, "headers: {on_allowed: true, style: "+style+"}"+kindsPolicy,
			allowed(policy.Client{Refunds: true, Overrides: true}),
			func(config *ratelimitsvc.Config) { config.Decider = &anything{} }))
	}
	return services
}

// checkAnswer holds what is true of every answer, whatever was asked.
func checkAnswer(t *testing.T, req *rlsv3.RateLimitRequest, response *rlsv3.RateLimitResponse, err error) {
	t.Helper()
	if err != nil {
		if !slices.Contains([]codes.Code{codes.InvalidArgument, codes.PermissionDenied, codes.Unavailable}, status.Code(err)) {
			t.Errorf("error %v", err)
		}
		if len(err.Error()) > 1024 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
		return
	}
	if len(response.GetStatuses()) != len(req.GetDescriptors()) {
		t.Errorf("%d statuses for %d descriptors", len(response.GetStatuses()), len(req.GetDescriptors()))
	}
	if n := proto.Size(response); n > 64<<10 {
		t.Errorf("an answer of %d bytes", n)
	}
	refused := response.GetOverallCode() == rlsv3.RateLimitResponse_OVER_LIMIT
	over := false
	for _, s := range response.GetStatuses() {
		over = over || s.GetCode() == rlsv3.RateLimitResponse_OVER_LIMIT
		if d := s.GetDurationUntilReset(); d != nil && d.AsDuration() < 0 {
			t.Errorf("a reset in %v", d.AsDuration())
		}
	}
	if refused && !over {
		t.Errorf("refused by nothing: %v", response)
	}
	for _, h := range response.GetResponseHeadersToAdd() {
		if h.GetKey() == "retry-after" && (!refused || strings.HasPrefix(h.GetValue(), "-") || h.GetValue() == "0") {
			t.Errorf("retry-after: %s, refused %t", h.GetValue(), refused)
		}
	}
}

// Any bytes, in the codec and then in the service: an answer or an error, and neither a
// panic nor an answer without bounds.
func FuzzMessage(f *testing.F) {
	add := func(req *rlsv3.RateLimitRequest) {
		message, err := proto.Marshal(req)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(message, uint64(len(message)))
	}
	add(request(1, "node="+nodeID, "caller=a", "path=/", "all="+nodeID))
	add(request(1<<31, "consumer=a", "consumer=a", "soft=1", "softer=1", "staff=1", "tried=x", "secret=1", "tagged=2"))
	back := request(7, "consumer=a", "node="+nodeID)
	refund(back.GetDescriptors())
	add(back)
	own := request(7, "consumer=a", "node="+nodeID)
	override(own.GetDescriptors()[0], 5, typev3.RateLimitUnit_MONTH)
	override(own.GetDescriptors()[1], 5, 99)
	add(own)
	f.Add([]byte("\x0a\x04test\x12\x0d\x0a\x0b\x0a\x06caller\x12\x01\xff"), uint64(3))
	// Large enough for its lists to be cut.
	f.Add([]byte("\x0a\x04test"+strings.Repeat("\x12\x02\x0a\x00", 5000)), uint64(4))
	services := fuzzed(f)
	f.Fuzz(func(t *testing.T, message []byte, seed uint64) {
		req := &rlsv3.RateLimitRequest{}
		if err := ratelimitsvc.Codec.Unmarshal(mem.BufferSlice{mem.SliceBuffer(message)}, req); err != nil {
			return
		}
		ctx := context.WithValue(fromLoopback(t), seedKey{}, seed)
		response, err := services[seed%3].ShouldRateLimit(ctx, req)
		checkAnswer(t, req, response, err)
	})
}

// Any body gets one of the statuses that there are.
func FuzzJSON(f *testing.F) {
	f.Add(`{"domain": "test", "descriptors": [{"entries": [{"key": "path", "value": "/"}], "hitsAddend": "5"}]}`, uint64(1))
	f.Add(`{"domain": "test", "descriptors": [{"entries": [{"key": "node", "value": "`+nodeID+`"}], "isNegativeHits": true}], "hitsAddend": 3}`, uint64(2))
	f.Add(`{"domain": "test", "descriptors": [{"entries": [{"key": "a"}], "limit": {"unit": 99}}, null]}`, uint64(0))
	f.Add(`[[[[`, uint64(5))
	services := fuzzed(f)
	f.Fuzz(func(t *testing.T, body string, seed uint64) {
		r := httptest.NewRequest(http.MethodPost, "/json", strings.NewReader(body))
		r.RemoteAddr = "127.0.0.1:4711"
		r = r.WithContext(context.WithValue(t.Context(), seedKey{}, seed))
		recorder := httptest.NewRecorder()
		services[seed%3].Handler().ServeHTTP(recorder, r)
		switch recorder.Code {
		case http.StatusOK, http.StatusTooManyRequests, http.StatusBadRequest, http.StatusForbidden, http.StatusInternalServerError:
		default:
			t.Errorf("POST /json = %d %.200s", recorder.Code, recorder.Body)
		}
		if recorder.Body.Len() > 256<<10 {
			t.Errorf("an answer of %d bytes", recorder.Body.Len())
		}
	})
}

// Each receipt names its instant, to the microsecond, and what was charged; any other text
// names none, unless it is one, letter for letter.
func FuzzReceipt(f *testing.F) {
	for _, at := range []time.Time{noon, ratelimitsvc.MinReceipt(), ratelimitsvc.MaxReceipt()} {
		f.Add("test", ratelimitsvc.NewReceipt("test", at, 0, 15, 1))
	}
	f.Add("", "")
	f.Add("\xff", strings.Repeat("A", 18))
	f.Add("test", ratelimitsvc.NewReceipt("test", noon))
	f.Add("test", ratelimitsvc.NewReceipt("test", noon, 16))
	f.Add("test", ratelimitsvc.NewReceipt("test", noon, make([]byte, 65)...))
	f.Fuzz(func(t *testing.T, domain, text string) {
		if at, charged, err := ratelimitsvc.ParseReceipt(domain, text); err == nil {
			if again := ratelimitsvc.NewReceipt(domain, at, charged...); again != text {
				t.Errorf("%q and %q are both of %v", text, again, at)
			}
			if len(charged) == 0 || len(charged) > 64 || slices.Max(charged) > 15 {
				t.Errorf("%q is of %v", text, charged)
			}
		}
		var b [8]byte
		copy(b[:], text)
		at := time.UnixMicro(int64(binary.LittleEndian.Uint64(b[:]) % uint64(ratelimitsvc.MaxReceipt().UnixMicro())))
		charged := []byte{b[0] % 16}
		for i := range min(len(domain), 63) {
			charged = append(charged, domain[i]%16)
		}
		got, gotCharged, err := ratelimitsvc.ParseReceipt(domain, ratelimitsvc.NewReceipt(domain, at, charged...))
		if err != nil || !got.Equal(at) || !slices.Equal(gotCharged, charged) {
			t.Errorf("the receipt of %v at %v gives %v at %v, %v", charged, at, gotCharged, got, err)
		}
	})
}

package e2e_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
)

// The demonstration's claims, on one mesh. Each case has keys of its own.
func TestIngest(t *testing.T) {
	t.Parallel()
	awayFromMidnight(t)
	m := startMesh(t, meshConfig{})

	for _, test := range []struct {
		name string
		run  func(*testing.T, *mesh)
	}{
		{"a quota of ten a day", testQuota},
		{"two bodies pass, the third waits as told", testBytesThenWait},
		{"the same with chunked bodies", testChunkedThenWait},
		{"a body over the ceiling is refused at once and costs nothing", testOverCeiling},
		{"a chunked body is charged to the byte", testChunkedExact},
		{"HTTP/2 bodies with trailers are charged to the byte", testTrailers},
		{"a Domain's budget is one row for all its nodes", testSeedQueries},
		{"all limits of a request or none", testAllOrNone},
		{"keys that are no UUID", testMalformedKeys},
		{"gRPC clients", testGRPCClients},
		{"a request with none of the headers passes", testNoKeys},
		{"a chunked body over hold_bytes", testOverHold},
		{"usage over HTTP", testUsage},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			test.run(t, m)
		})
	}
}

func testQuota(t *testing.T, m *mesh) {
	const path = "/quota"
	h := header("x-consumer", "quota of ten")
	for i := range 10 {
		a := m.request(t, http.MethodGet, path, h, nil)
		if a.status != http.StatusOK {
			t.Fatalf("request %d: %s, want 200", i+1, describe(a))
		}
		noRateHeaders(t, a)
	}
	before := time.Now()
	a := m.request(t, http.MethodGet, path, h, nil)
	after := time.Now()
	midnight := before.UTC().Truncate(24 * time.Hour).Add(24 * time.Hour)
	want := map[string]string{
		"X-Ratelimit-Limit": "10", "X-Ratelimit-Remaining": "0",
		"X-Ratelimit-Reset": strconv.FormatInt(midnight.Unix(), 10),
	}
	if a.status != http.StatusTooManyRequests {
		t.Fatalf("the eleventh: %s, want 429", describe(a))
	}
	for name, value := range want {
		if a.header.Get(name) != value {
			t.Errorf("%s = %q, want %s", name, a.header.Get(name), value)
		}
	}
	// Rounded up: at least the time to midnight, and less than a second more. The
	// service's clock stood somewhere between before and after.
	wait := seconds(t, a.header.Get("Retry-After"))
	if wait < midnight.Sub(after) || wait > midnight.Sub(before)+time.Second {
		t.Errorf("Retry-After = %v, want what is left of the day, %v, rounded up", wait, midnight.Sub(before))
	}
	if _, whole, _ := m.upstream.saw(path); whole != 10 {
		t.Errorf("the upstream saw %d requests, want 10", whole)
	}
}

func seconds(t *testing.T, text string) time.Duration {
	t.Helper()
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("Retry-After %q: %v", text, err)
	}
	return time.Duration(n) * time.Second
}

func testBytesThenWait(t *testing.T, m *mesh) {
	bytesThenWait(t, m, "/bytes", func(b []byte) io.Reader { return bytes.NewReader(b) })
}

func testChunkedThenWait(t *testing.T, m *mesh) {
	bytesThenWait(t, m, "/chunked", chunked)
}

// bytesThenWait spends 100 KiB of a bucket of 256 KiB, twice, and then waits as told for
// a third.
func bytesThenWait(t *testing.T, m *mesh, path string, reader func([]byte) io.Reader) {
	t.Helper()
	body := make([]byte, 100<<10)
	h := header("x-node-id", uuid.NewString())
	for i := range 2 {
		if a := m.request(t, http.MethodPost, path, h, reader(body)); a.status != http.StatusOK {
			t.Fatalf("body %d: %s, want 200", i+1, describe(a))
		}
	}
	a := m.request(t, http.MethodPost, path+"/refused", h, reader(body))
	if a.status != http.StatusTooManyRequests {
		t.Fatalf("the third body: %s, want 429", describe(a))
	}
	if got := a.header.Get("X-Ratelimit-Limit"); got != "262144" {
		t.Errorf("X-RateLimit-Limit = %s, want the burst, 262144", got)
	}
	// 56 KiB are left and 16 KiB come back each second.
	wait := seconds(t, a.header.Get("Retry-After"))
	if wait < time.Second || wait > 3*time.Second {
		t.Errorf("Retry-After = %v, want at most the 3 s that 44 KiB take", wait)
	}
	if begun, _, n := m.upstream.saw(path + "/refused"); begun > 0 || n > 0 {
		t.Errorf("the upstream saw %d requests and %d bytes of the refused body", begun, n)
	}
	time.Sleep(wait)
	if a := m.request(t, http.MethodPost, path, h, reader(body)); a.status != http.StatusOK {
		t.Errorf("after waiting as told: %s, want 200", describe(a))
	}
	if _, whole, n := m.upstream.saw(path); whole != 3 || n != 3*100<<10 {
		t.Errorf("the upstream saw %d bodies and %d bytes, want 3 and %d", whole, n, 3*100<<10)
	}
}

// tokens reads a bucket; ok is false when there is no row.
func (m *mesh) tokens(t *testing.T, scope, key string) (tokens float64, ok bool) {
	t.Helper()
	rows, err := m.connect(t).Query(t.Context(),
		`SELECT tokens FROM plexsphere.rate_budgets WHERE scope = $1 AND bucket_key = $2`, scope, key)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	if !rows.Next() {
		return 0, false
	}
	if err := rows.Scan(&tokens); err != nil {
		t.Fatal(err)
	}
	return tokens, true
}

func testOverCeiling(t *testing.T, m *mesh) {
	body := make([]byte, 300<<10)
	for name, reader := range map[string]io.Reader{"with length": bytes.NewReader(body), "chunked": chunked(body)} {
		node := uuid.NewString()
		path := "/ceiling/" + strings.ReplaceAll(name, " ", "-")
		a := m.request(t, http.MethodPost, path, header("x-node-id", node), reader)
		if a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") != "" {
			t.Errorf("%s: %s, want 429 without Retry-After", name, describe(a))
		}
		if got := a.header.Get("X-Ratelimit-Remaining"); got != "262144" {
			t.Errorf("%s: X-RateLimit-Remaining = %q, want a full bucket", name, got)
		}
		if tokens, ok := m.tokens(t, "ingest_node", node); ok {
			t.Errorf("%s: the refusal wrote a row with %v tokens", name, tokens)
		}
		if begun, _, _ := m.upstream.saw(path); begun > 0 {
			t.Errorf("%s: the upstream saw the refused request", name)
		}
	}
}

func testChunkedExact(t *testing.T, m *mesh) {
	for _, size := range []int{0, 1, 65_537, 163_840, 262_143, 262_144} {
		node := uuid.NewString()
		path := fmt.Sprintf("/exact/%d", size)
		a := m.request(t, http.MethodPost, path, header("x-node-id", node), chunked(make([]byte, size)))
		if a.status != http.StatusOK {
			t.Fatalf("%d bytes: %s, want 200", size, describe(a))
		}
		if _, _, n := m.upstream.saw(path); n != int64(size) {
			t.Errorf("the upstream saw %d bytes of %d", n, size)
		}
		m.wantCharged(t, node, size)
	}
}

// wantCharged checks a bucket that one request minted: it holds the burst less the cost,
// exactly. A cost of nothing mints none.
func (m *mesh) wantCharged(t *testing.T, node string, size int) {
	t.Helper()
	tokens, ok := m.tokens(t, "ingest_node", node)
	switch {
	case size == 0 && ok:
		t.Errorf("an empty body wrote a row with %v tokens", tokens)
	case size > 0 && (!ok || tokens != float64(262_144-size)):
		t.Errorf("a body of %d bytes left %v tokens of 262144 (row: %v)", size, tokens, ok)
	}
}

// h2c is an HTTP/2 client without TLS.
func h2c() *http.Client {
	protocols := new(http.Protocols)
	protocols.SetUnencryptedHTTP2(true)
	return &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{Protocols: protocols}}
}

func testTrailers(t *testing.T, m *mesh) {
	const size = 100_001
	node := uuid.NewString()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+m.gateway+"/trailers", chunked(make([]byte, size)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("x-node-id", node)
	req.Trailer = http.Header{"X-Sum": {"1"}}
	response, err := h2c().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		t.Fatalf("status %d, want 200", response.StatusCode)
	}
	if _, _, n := m.upstream.saw("/trailers"); n != size {
		t.Errorf("the upstream saw %d bytes of %d", n, size)
	}
	m.wantCharged(t, node, size)
}

// The seed's two queries, as printed there.
func testSeedQueries(t *testing.T, m *mesh) {
	domain := uuid.NewString()
	for range 3 {
		a := m.request(t, http.MethodPost, "/seed", header("x-domain-id", domain, "x-node-id", uuid.NewString()), bytes.NewReader(make([]byte, 1000)))
		if a.status != http.StatusOK {
			t.Fatalf("%s, want 200", describe(a))
		}
	}
	conn := m.connect(t)
	var (
		scope  string
		tokens float64
		at     time.Time
	)
	query := strings.ReplaceAll(`SELECT scope, tokens, refilled_at
FROM plexsphere.rate_budgets
WHERE bucket_key = '<domain-uuid>'
ORDER BY scope;`, "<domain-uuid>", domain)
	if err := conn.QueryRow(t.Context(), query).Scan(&scope, &tokens, &at); err != nil {
		t.Fatal(err)
	}
	if scope != "ingest_domain" || tokens >= 1<<20 || time.Since(at) > time.Minute || time.Since(at) < -time.Minute {
		t.Errorf("the bucket is %s, %v, %v", scope, tokens, at)
	}
	var count int
	query = strings.ReplaceAll(`SELECT count(*)
FROM plexsphere.rate_budgets
WHERE scope = 'ingest_domain'
  AND bucket_key = '<domain-uuid>';`, "<domain-uuid>", domain)
	if err := conn.QueryRow(t.Context(), query).Scan(&count); err != nil {
		t.Fatal(err)
	}
	if count != 1 {
		t.Errorf("%d rows, want one however many nodes", count)
	}
}

// PEERS C01: what a narrow limit refuses must not eat a broad one.
func testAllOrNone(t *testing.T, m *mesh) {
	node, domain := uuid.NewString(), uuid.NewString()
	h := header("x-node-id", node, "x-domain-id", domain, "x-consumer", "C01")
	first := m.request(t, http.MethodPost, "/C01", h, bytes.NewReader(make([]byte, 250<<10)))
	if first.status != http.StatusOK {
		t.Fatalf("%s, want 200", describe(first))
	}
	before, _ := m.tokens(t, "ingest_domain", domain)
	for range 12 { // more than the consumer's ten
		a := m.request(t, http.MethodPost, "/C01", h, bytes.NewReader(make([]byte, 250<<10)))
		if a.status != http.StatusTooManyRequests || a.header.Get("X-Ratelimit-Limit") != "262144" {
			t.Fatalf("%s, want a 429 of the node's budget", describe(a))
		}
	}
	if after, _ := m.tokens(t, "ingest_domain", domain); after != before {
		t.Errorf("refusals took the Domain's bucket from %v to %v", before, after)
	}
	if a := m.request(t, http.MethodGet, "/C01", header("x-consumer", "C01"), nil); a.status != http.StatusOK {
		t.Errorf("refusals spent the consumer's quota: %s", describe(a))
	}
}

func testMalformedKeys(t *testing.T, m *mesh) {
	const path = "/malformed"
	twice := header("x-node-id", uuid.NewString(), "x-node-id", uuid.NewString())
	for name, h := range map[string]http.Header{
		"no UUID":      header("x-node-id", "not-a-uuid"),
		"zero":         header("x-node-id", uuid.Nil.String()),
		"empty":        header("x-node-id", ""),
		"braces":       header("x-node-id", "{"+uuid.NewString()+"}"),
		"not UTF-8":    header("x-node-id", "1 \xc0\xa7"), // PEERS C30
		"two of them":  twice,
		"the Domain's": header("x-domain-id", "not-a-uuid", "x-node-id", uuid.NewString()),
	} {
		a := m.request(t, http.MethodPost, path, h, bytes.NewReader([]byte("body")))
		if a.status != http.StatusBadRequest {
			t.Errorf("%s: %s, want 400", name, describe(a))
		}
		noRateHeaders(t, a)
		if !strings.Contains(a.body, "-id") {
			t.Errorf("%s: the body %q does not name the header", name, a.body)
		}
	}
	if begun, _, _ := m.upstream.saw(path); begun > 0 {
		t.Errorf("the upstream saw %d of them", begun)
	}
	// Either case is the same node.
	node := uuid.NewString()
	for _, id := range []string{node, strings.ToUpper(node)} {
		a := m.request(t, http.MethodPost, "/case", header("x-node-id", id), bytes.NewReader(make([]byte, 100<<10)))
		if a.status != http.StatusOK {
			t.Errorf("%s: %s, want 200", id, describe(a))
		}
	}
	if tokens, _ := m.tokens(t, "ingest_node", node); tokens > 150<<10 {
		t.Errorf("two bodies of 100 KiB, one key in either case, left %v tokens", tokens)
	}
}

func testGRPCClients(t *testing.T, m *mesh) {
	send := func(h http.Header, size int) http.Header {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+m.gateway+"/echo.Echo/Say", bytes.NewReader(make([]byte, size)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header = h
		req.Header.Set("content-type", "application/grpc")
		req.Header.Set("te", "trailers")
		response, err := h2c().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			t.Errorf("status %d, want 200 as gRPC has it", response.StatusCode)
		}
		return response.Header
	}
	if got := send(header("x-node-id", "not-a-uuid"), 5).Get("grpc-status"); got != "3" {
		t.Errorf("a malformed key: grpc-status %q, want 3 (INVALID_ARGUMENT)", got)
	}
	// PEERS C49: a refusal is RESOURCE_EXHAUSTED and keeps its headers.
	over := send(header("x-node-id", uuid.NewString()), 300<<10)
	if over.Get("grpc-status") != "8" || over.Get("X-Ratelimit-Limit") != "262144" {
		t.Errorf("over the limit: %v, want grpc-status 8 (RESOURCE_EXHAUSTED) with headers", over)
	}
}

func testNoKeys(t *testing.T, m *mesh) {
	for range 20 {
		a := m.request(t, http.MethodPost, "/free", nil, chunked(make([]byte, 600<<10)))
		if a.status != http.StatusOK {
			t.Fatalf("%s, want 200", describe(a))
		}
	}
}

func testOverHold(t *testing.T, m *mesh) {
	const path = "/hold"
	// 512 KiB are held in the example; the Domain's burst is 1 MiB.
	for name, size := range map[string]int{"what is held": 512 << 10, "a byte more": 512<<10 + 1, "nearly all there is": 1 << 20} {
		path := path + "/" + strings.ReplaceAll(name, " ", "-")
		a := m.request(t, http.MethodPost, path, header("x-domain-id", uuid.NewString()), chunked(make([]byte, size)))
		if a.status != http.StatusOK {
			t.Errorf("%s: %s, want 200", name, describe(a))
		}
		if _, _, got := m.upstream.saw(path); got != int64(size) {
			t.Errorf("%s: the upstream saw %d bytes, want %d", name, got, size)
		}
	}
}

func testUsage(t *testing.T, m *mesh) {
	h := header("x-consumer", "usage")
	for range 3 {
		m.request(t, http.MethodGet, "/usage", h, nil)
	}
	response, err := http.Get("http://" + m.service.http + "/quotas/usage?domain=ingest&entry=consumer=usage")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"limit":10,"used":3,"remaining":7`, `"limit":100,"used":3,"remaining":97`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("usage is %s, want %s in it", text, want)
		}
	}
	response, err = http.Get("http://" + m.service.http + "/quotas/usage")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if text, err = io.ReadAll(response.Body); err != nil || !strings.Contains(string(text), `"value":"usage"`) {
		t.Errorf("the list %s lacks the consumer (%v)", text, err)
	}
}
